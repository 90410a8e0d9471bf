//! What happens to sandboxes without a request: their time is over, or the host's disk is full.

pub(crate) mod disk_full;
pub(crate) mod timeouts;
