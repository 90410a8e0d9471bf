//! The time of day, in numbers and as people read it.

pub(crate) use forkd_controller::clock::{now_ms, timestamp};

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    now_ms() / 1000
}
