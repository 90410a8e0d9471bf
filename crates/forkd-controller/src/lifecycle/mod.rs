//! TODO front page of lifecycle.

pub(crate) mod disk_full;
pub(crate) mod timeouts;
