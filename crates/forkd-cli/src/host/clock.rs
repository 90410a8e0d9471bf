//! The time of day, as a number and as text.

pub(crate) use forkd_controller::clock::{now_ms, timestamp};

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    now_ms() / 1000
}
