//! Utilities that know nothing of sandboxes: tasks, time, counters, records on disk.

pub(crate) mod companion;
pub(crate) mod count;
pub(crate) mod fs;
pub(crate) mod random;
pub(crate) mod records;
pub(crate) mod stopping;
pub(crate) mod task;
pub mod time;
