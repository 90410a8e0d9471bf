//! The time of day as people and logs write it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// `2026-01-31T12:34:56Z`, from seconds since 1970.
pub fn timestamp(secs: u64) -> String {
    format!("{}Z", to_the_second(secs))
}

/// `2026-01-31T12:34:56.789Z`, from milliseconds since 1970.
pub fn timestamp_ms(millis: u64) -> String {
    format!("{}.{:03}Z", to_the_second(millis / 1000), millis % 1000)
}

fn to_the_second(time: u64) -> String {
    let (days, rest) = (time / 86_400, time % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}", rest / 3600, rest % 3600 / 60, rest % 60)
}

/// The date `days` after 1970-01-01, in the Gregorian calendar, whose years are counted from March
/// here so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
}

/// By how much the clock may differ from one nobody can set before that counts: it is always made to go a
/// little faster or slower.
const STEP_MS: i64 = 2000;

/// Notices when somebody sets the clock.
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
        tracing::warn!(seconds = step / 1000, "somebody set the clock");
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
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(59), (1970, 3, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(11_017), (2000, 3, 1));
        assert_eq!(civil(20_454), (2026, 1, 1));
        assert_eq!(timestamp(1_798_761_599), "2026-12-31T23:59:59Z");
        assert_eq!(timestamp_ms(1_798_761_599_007), "2026-12-31T23:59:59.007Z");
    }
}
