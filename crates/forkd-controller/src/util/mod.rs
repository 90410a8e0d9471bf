//! Utilities that know nothing of sandboxes: tasks, time, counters, records on disk.

pub(crate) mod fs;
pub(crate) mod random;
pub(crate) mod records;
pub(crate) mod task;
pub mod time;
