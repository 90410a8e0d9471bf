//! Counters and histograms of what the daemon did. What there is at the moment (sandboxes, memory) is not
//! kept here: it is looked at when somebody asks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::telemetry::prometheus::Page;
use crate::util::task;

/// Upper bounds in seconds: from a fork of a small guest to a boot under emulation.
const BOUNDS: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// How something that was asked for came out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// Done.
    Ok,
    /// It went wrong.
    Failed,
    /// It was not begun: a limit, or a request that cannot be.
    Refused,
    /// Whoever wanted it does not any more.
    Cancelled,
    /// A command that ran to its end and says that it failed.
    Nonzero,
    /// A command whose time ran out.
    TimedOut,
}

impl Outcome {
    fn name(self) -> &'static str {
        match self {
            Outcome::Ok => "ok",
            Outcome::Failed => "failed",
            Outcome::Refused => "refused",
            Outcome::Cancelled => "cancelled",
            Outcome::Nonzero => "nonzero",
            Outcome::TimedOut => "timed_out",
        }
    }
}

/// A number that only grows.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, count: u64) {
        self.0.fetch_add(count, Relaxed);
    }

    fn get(&self) -> u64 {
        self.0.load(Relaxed)
    }
}

/// A counter for each outcome there can be, so that those that never were are zero and not absent.
#[derive(Debug)]
pub(crate) struct Outcomes(Vec<(Outcome, Counter)>);

impl Outcomes {
    fn of(outcomes: &[Outcome]) -> Self {
        Outcomes(outcomes.iter().map(|outcome| (*outcome, Counter::default())).collect())
    }

    pub(crate) fn add(&self, outcome: Outcome, count: u64) {
        let found = self.0.iter().find(|(known, _)| *known == outcome);
        debug_assert!(found.is_some(), "{outcome:?} is not counted here");
        if let Some((_, counter)) = found {
            counter.add(count);
        }
    }

    fn show(&self, page: &mut Page, name: &str, help: &str) {
        page.family(name, "counter", help);
        for (outcome, counter) in &self.0 {
            page.sample(name, &[("outcome", outcome.name())], counter.get());
        }
    }
}

/// How long something took, how often.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    /// Those within each bound and above the one before it; the last has none.
    counts: [AtomicU64; BOUNDS.len() + 1],
    sum_micros: AtomicU64,
}

impl Histogram {
    pub(crate) fn observe(&self, took: Duration) {
        let secs = took.as_secs_f64();
        let bucket = BOUNDS.iter().position(|bound| secs <= *bound).unwrap_or(BOUNDS.len());
        self.counts[bucket].fetch_add(1, Relaxed);
        self.sum_micros.fetch_add(u64::try_from(took.as_micros()).unwrap_or(u64::MAX), Relaxed);
    }

    fn show(&self, page: &mut Page, name: &str, labels: &[(&str, &str)]) {
        let (bucket, mut sum) = (format!("{name}_bucket"), 0);
        // One more than there are bounds: the last is for everything.
        let bounds = BOUNDS.iter().map(f64::to_string).chain(["+Inf".to_owned()]);
        for (bound, count) in bounds.zip(&self.counts) {
            sum += count.load(Relaxed);
            let labels: Vec<_> = labels.iter().copied().chain([("le", bound.as_str())]).collect();
            page.sample(&bucket, &labels, sum);
        }
        let secs = self.sum_micros.load(Relaxed) as f64 / 1e6;
        page.sample(&format!("{name}_sum"), labels, secs);
        // The sum of what was shown, not a counter of its own, which could be ahead of it.
        page.sample(&format!("{name}_count"), labels, sum);
    }
}

/// A kind of request: method, matched route, status. All three are of a few values, whatever clients send.
type RequestKind = (&'static str, String, u16);

/// All that is counted.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// From the arrival of a request for children to the fork of one.
    pub(crate) spawn: Histogram,
    /// From the arrival of a request for children to the first answer of one.
    pub(crate) first_answer: Histogram,
    /// How long vCPUs stood still for a branch.
    pub(crate) branch_pause: Histogram,
    pub(crate) exec: Histogram,
    requests: Mutex<BTreeMap<RequestKind, Arc<Histogram>>>,
    pub(crate) spawns: Outcomes,
    pub(crate) boots: Outcomes,
    pub(crate) branches: Outcomes,
    pub(crate) execs: Outcomes,
    pub(crate) saves: Outcomes,
    pub(crate) auth_failures: Counter,
    /// Events that subscribers were too slow for.
    pub(crate) events_dropped: Counter,
    /// Lines that are not in the audit log.
    pub(crate) audit_lost: Counter,
    /// Spans that were not handed over.
    pub(crate) spans_lost: Counter,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        use Outcome::{Cancelled, Failed, Nonzero, Ok, Refused, TimedOut};
        Metrics {
            spawn: Histogram::default(),
            first_answer: Histogram::default(),
            branch_pause: Histogram::default(),
            exec: Histogram::default(),
            requests: Mutex::default(),
            spawns: Outcomes::of(&[Ok, Failed, Refused, Cancelled]),
            boots: Outcomes::of(&[Ok, Failed, Cancelled]),
            branches: Outcomes::of(&[Ok, Failed, Refused]),
            execs: Outcomes::of(&[Ok, Nonzero, TimedOut, Failed, Cancelled]),
            saves: Outcomes::of(&[Ok, Failed, Cancelled]),
            auth_failures: Counter::default(),
            events_dropped: Counter::default(),
            audit_lost: Counter::default(),
            spans_lost: Counter::default(),
        }
    }

    /// A request was answered.
    pub(crate) fn request(&self, method: &'static str, route: &str, status: u16, took: Duration) {
        let histogram = {
            let mut requests = self.requests.lock();
            requests.entry((method, route.to_owned(), status)).or_default().clone()
        };
        histogram.observe(took);
    }

    /// Runs a command or an evaluation to its end and counts it: the only place that does. `came_out` gives the
    /// exit status, and whether its time ran out. One that is dropped before its end counts as cancelled.
    pub(crate) async fn exec<T, E>(
        &self,
        run: impl Future<Output = Result<T, E>>,
        came_out: impl FnOnce(&T) -> (i32, bool),
    ) -> Result<T, E> {
        let mut exec = Exec { metrics: self, begun: Instant::now(), outcome: Outcome::Cancelled };
        let ran = run.await;
        exec.outcome = match ran.as_ref().map(came_out) {
            Ok((_, true)) => Outcome::TimedOut,
            Ok((0, false)) => Outcome::Ok,
            Ok((_, false)) => Outcome::Nonzero,
            Err(_) => Outcome::Failed,
        };
        ran
    }

    /// Shows all of it.
    pub(crate) fn show(&self, page: &mut Page) {
        let single = [
            ("forkd_spawn_seconds", &self.spawn, "From the arrival of a request to the fork of a child."),
            (
                "forkd_first_answer_seconds",
                &self.first_answer,
                "From the arrival of a request to the first answer of a child.",
            ),
            ("forkd_branch_pause_seconds", &self.branch_pause, "How long vCPUs stood still for a branch."),
            ("forkd_exec_seconds", &self.exec, "Commands and evaluations, from their start to their end."),
        ];
        for (name, histogram, help) in single {
            page.family(name, "histogram", help);
            histogram.show(page, name, &[]);
        }
        let requests = self.requests.lock().clone();
        let name = "forkd_http_request_seconds";
        page.family(name, "histogram", "Requests, by the route they matched.");
        for ((method, route, status), histogram) in requests {
            let status = status.to_string();
            histogram.show(page, name, &[("method", method), ("route", &route), ("status", &status)]);
        }
        self.spawns.show(page, "forkd_spawns_total", "Children asked of a snapshot.");
        self.boots.show(page, "forkd_boots_total", "Sandboxes booted from an image.");
        self.branches.show(page, "forkd_branches_total", "Branches asked of a sandbox.");
        self.execs.show(page, "forkd_execs_total", "Commands and evaluations in sandboxes.");
        self.saves.show(page, "forkd_saves_total", "Attempts to bring a snapshot to disk.");
        for (name, counter, help) in [
            ("forkd_auth_failures_total", &self.auth_failures, "Requests without a valid token."),
            (
                "forkd_events_dropped_total",
                &self.events_dropped,
                "Events that subscribers were too slow for.",
            ),
            ("forkd_audit_lost_total", &self.audit_lost, "Lines that could not be written to the audit log."),
            ("forkd_spans_lost_total", &self.spans_lost, "Trace spans that could not be handed over."),
        ] {
            page.single(name, "counter", help, counter.get());
        }
        let name = "forkd_task_panics_total";
        page.family(name, "counter", "Panics of the daemon's background tasks: each is a bug of forkd.");
        for (task, count) in task::panic_counts() {
            page.sample(name, &[("task", task)], count);
        }
    }
}

/// A command under way; see [`Metrics::exec`].
#[derive(Debug)]
struct Exec<'m> {
    metrics: &'m Metrics,
    begun: Instant,
    outcome: Outcome,
}

impl Drop for Exec<'_> {
    fn drop(&mut self) {
        self.metrics.exec.observe(self.begun.elapsed());
        self.metrics.execs.add(self.outcome, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(metrics: &Metrics) -> String {
        let mut page = Page::default();
        metrics.show(&mut page);
        page.finish()
    }

    #[test]
    fn a_histogram_counts_each_observation_in_every_bound_it_is_within() {
        let metrics = Metrics::new();
        for millis in [1, 3, 400_000] {
            metrics.spawn.observe(Duration::from_millis(millis));
        }
        let text = shown(&metrics);
        for line in [
            "forkd_spawn_seconds_bucket{le=\"0.0005\"} 0",
            "forkd_spawn_seconds_bucket{le=\"0.001\"} 1",
            "forkd_spawn_seconds_bucket{le=\"0.005\"} 2",
            "forkd_spawn_seconds_bucket{le=\"300\"} 2",
            "forkd_spawn_seconds_bucket{le=\"+Inf\"} 3",
            "forkd_spawn_seconds_sum 400.004",
            "forkd_spawn_seconds_count 3",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }

    #[tokio::test]
    async fn a_command_counts_once_whatever_comes_of_it() {
        let metrics = Metrics::new();
        for (exit_code, timed_out) in [(0, false), (3, false), (124, true)] {
            let ran = metrics.exec(async { Ok::<_, ()>(exit_code) }, |code| (*code, timed_out)).await;
            assert_eq!(ran, Ok(exit_code));
        }
        assert_eq!(metrics.exec(async { Err::<i32, _>(()) }, |code| (*code, false)).await, Err(()));
        // Its caller goes away.
        let endless = std::future::pending::<Result<i32, ()>>();
        tokio::select! {
            biased;
            _ = metrics.exec(endless, |code| (*code, false)) => {}
            () = std::future::ready(()) => {}
        }
        // One that never began.
        drop(metrics.exec(std::future::pending::<Result<i32, ()>>(), |code| (*code, false)));
        let text = shown(&metrics);
        for outcome in ["ok", "nonzero", "timed_out", "failed", "cancelled"] {
            assert!(text.contains(&format!("forkd_execs_total{{outcome=\"{outcome}\"}} 1\n")), "{text}");
        }
        assert!(text.contains("forkd_exec_seconds_count 5\n"), "{text}");
    }
}
