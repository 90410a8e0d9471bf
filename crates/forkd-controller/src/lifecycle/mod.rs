//! Changes of sandboxes without a request: when a time-out is over, or the host's disk was full.

pub(crate) mod disk_full;
pub(crate) mod timeouts;
