//! Stand-ins for unit tests: a host with what an earlier daemon left on it, a monitor that speaks the control
//! protocol, and a guest that answers without a VM.

pub(crate) mod fake_guest;
pub(crate) mod fake_host;
pub(crate) mod fake_monitor;
pub(crate) mod fake_process;
