//! Stand-ins for unit tests: a guest that answers without a VM, and a process in the place of a monitor.

pub(crate) mod fake_guest;
pub(crate) mod fake_process;
