//! What one fan-out gave, and what several of them amount to.

use serde::{Deserialize, Serialize};

use crate::host::{Conditions, Memory};
use crate::report::Line;

/// The most children of one burst: what the daemon makes in one call.
pub const MAX_CHILDREN: usize = 1000;

/// One fan-out.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Burst {
    /// How many children were asked for.
    pub asked: usize,
    /// For each child that answered, milliseconds from the moment of asking until it had.
    pub times_ms: Vec<f64>,
    /// Milliseconds until the caller knew of all of them.
    pub all_ms: f64,
    /// What some of the children took, looked at right after the last answer.
    pub memory: Vec<Memory>,
    /// What the host gave away, for each child.
    pub host_kib: Option<f64>,
    /// Why children failed.
    pub errors: Vec<String>,
}

/// The number below or at which a fraction `q` of the numbers is (nearest rank); `None` of none.
pub fn quantile(numbers: &[f64], q: f64) -> Option<f64> {
    let mut sorted: Vec<f64> = numbers.iter().copied().filter(|number| number.is_finite()).collect();
    sorted.sort_by(f64::total_cmp);
    let rank = (q.clamp(0.0, 1.0) * sorted.len() as f64).ceil() as usize;
    sorted.get(rank.saturating_sub(1)).copied()
}

/// The number in the middle.
pub fn median(numbers: &[f64]) -> Option<f64> {
    quantile(numbers, 0.5)
}

impl Line {
    /// What bursts of `n` children amount to. Times are those of all their children; the time to all
    /// is the median burst's; `ok` is the worst burst's: a failure is not averaged away.
    pub fn of_bursts(case: &str, n: usize, bursts: &[Burst], conditions: &Conditions) -> Line {
        let times: Vec<f64> = bursts.iter().flat_map(|burst| burst.times_ms.iter().copied()).collect();
        let memory = |of: &dyn Fn(&Memory) -> u64| {
            let values: Vec<f64> =
                bursts.iter().flat_map(|burst| &burst.memory).map(|one| of(one) as f64).collect();
            median(&values).map(|value| value as u64)
        };
        let host: Vec<f64> = bursts.iter().filter_map(|burst| burst.host_kib).collect();
        let all: Vec<f64> =
            bursts.iter().filter(|burst| !burst.times_ms.is_empty()).map(|burst| burst.all_ms).collect();
        let mut errors: Vec<String> = bursts.iter().flat_map(|burst| burst.errors.iter().cloned()).collect();
        errors.sort();
        errors.dedup();
        errors.truncate(3);
        Line {
            case: case.to_owned(),
            n,
            ok: bursts.iter().map(|burst| burst.times_ms.len()).min().unwrap_or(0),
            p50_ms: median(&times).map(rounded),
            p99_ms: quantile(&times, 0.99).map(rounded),
            all_ms: median(&all).map(rounded),
            private_kib: memory(&|one| one.private_kib),
            pss_kib: memory(&|one| one.pss_kib),
            host_kib: median(&host).map(|value| value.round() as i64),
            runs: bursts.len(),
            ratio: None,
            python_ms: None,
            errors,
            conditions: conditions.clone(),
        }
    }
}

/// To the microsecond.
pub fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn burst(times: &[f64], all_ms: f64) -> Burst {
        Burst { asked: 3, times_ms: times.to_vec(), all_ms, ..Burst::default() }
    }

    #[test]
    fn quantiles_are_numbers_that_were_measured() {
        let numbers: Vec<f64> = (1..=100).rev().map(f64::from).collect();
        assert_eq!(median(&numbers), Some(50.0));
        assert_eq!(quantile(&numbers, 0.99), Some(99.0));
        assert_eq!(quantile(&numbers, 1.0), Some(100.0));
        assert_eq!(quantile(&numbers, 0.0), Some(1.0));
        assert_eq!(median(&[7.0]), Some(7.0));
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[f64::NAN, 2.0]), Some(2.0));
    }

    #[test]
    fn a_failed_child_is_seen_in_the_line_however_many_bursts_went_well() {
        let mut failed = burst(&[1.0, 2.0], 2.0);
        failed.errors.push("no memory".into());
        let bursts = [burst(&[1.0, 2.0, 3.0], 3.0), failed, burst(&[1.0, 2.0, 9.0], 9.0)];
        let line = Line::of_bursts("tiny", 3, &bursts, &Conditions::default());
        assert_eq!((line.ok, line.runs, line.errors.as_slice()), (2, 3, &["no memory".to_owned()][..]));
        assert_eq!((line.p50_ms, line.p99_ms, line.all_ms), (Some(2.0), Some(9.0), Some(3.0)));
        assert_eq!((line.private_kib, line.host_kib), (None, None));
    }

    #[test]
    fn a_burst_without_any_answer_has_no_time_to_all() {
        let line = Line::of_bursts("tiny", 3, &[burst(&[], 5.0)], &Conditions::default());
        assert_eq!((line.ok, line.all_ms, line.p50_ms), (0, None, None));
    }
}
