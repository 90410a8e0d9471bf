//! The time of day as people and logs write it.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use humantime::{format_rfc3339_millis, format_rfc3339_seconds};

/// The end of the year 9999: later times have no such form.
const LAST_MS: u64 = 253_402_300_799_999;

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// `2026-01-31T12:34:56Z`, from seconds since 1970.
pub fn timestamp(secs: u64) -> String {
    format_rfc3339_seconds(since_1970(secs.saturating_mul(1000))).to_string()
}

/// `2026-01-31T12:34:56.789Z`, from milliseconds since 1970.
pub fn timestamp_ms(millis: u64) -> String {
    format_rfc3339_millis(since_1970(millis)).to_string()
}

fn since_1970(millis: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_millis(millis.min(LAST_MS))
}

/// The smallest step that counts. The clock always drifts a little from the time since boot, which cannot be set: time
/// synchronization makes it faster or slower.
const STEP_MS: i64 = 2000;

/// Detects that the host's clock was set.
#[derive(Debug)]
pub(crate) struct ClockStepDetector {
    /// How far it is ahead of the time since the host's boot.
    ahead_ms: i64,
}

impl ClockStepDetector {
    pub(crate) fn new() -> Self {
        ClockStepDetector { ahead_ms: ahead_ms() }
    }

    /// By how many seconds it was set forward since the last look, if it was.
    pub(crate) fn look(&mut self) -> Option<i64> {
        self.compare(ahead_ms())
    }

    fn compare(&mut self, ahead_ms: i64) -> Option<i64> {
        let step = ahead_ms.saturating_sub(self.ahead_ms);
        if step.abs() < STEP_MS {
            return None;
        }
        self.ahead_ms = ahead_ms;
        tracing::warn!(seconds = step / 1000, "host clock set");
        Some(step / 1000)
    }
}

fn ahead_ms() -> i64 {
    let boot = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    now_ms() as i64 - (boot.tv_sec * 1000 + boot.tv_nsec / 1_000_000)
}

/// The host's clock, as guests are told it.
pub(crate) fn unix_nanos() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

pub(crate) fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_set_is_noticed_once() {
        let mut steps = ClockStepDetector { ahead_ms: 1_000_000 };
        assert_eq!(steps.compare(1_001_900), None, "it runs a little fast");
        assert_eq!(steps.compare(1_061_000), Some(61));
        assert_eq!(steps.compare(1_061_000), None);
        assert_eq!(steps.compare(-2_538_000), Some(-3599));
        assert_eq!(ClockStepDetector::new().look(), None);
    }

    #[test]
    fn dates_are_right_around_leap_days() {
        for (days, date) in [
            (0, "1970-01-01"),
            (59, "1970-03-01"),
            (11_016, "2000-02-29"),
            (11_017, "2000-03-01"),
            (20_454, "2026-01-01"),
        ] {
            assert_eq!(timestamp(days * 86_400), format!("{date}T00:00:00Z"));
        }
        assert_eq!(timestamp(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(timestamp_ms(1_798_761_599_007), "2026-12-31T23:59:59.007Z");
        assert_eq!(timestamp(u64::MAX), "9999-12-31T23:59:59Z", "the last there is");
    }
}
