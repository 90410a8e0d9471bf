//! Counters and histograms of what the daemon did. Gauges of the current state (sandboxes, memory) are in
//! `api::metrics`, which reads them for each request.

use std::time::{Duration, Instant};

use prometheus::proto::MetricType;
use prometheus::{Histogram, HistogramOpts, HistogramVec, IntCounter};

use crate::telemetry::prometheus::Page;
use crate::util::task;

/// Upper bounds in seconds: from a fork of a small guest to a boot under emulation.
const BOUNDS: [f64; 17] =
    [0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// How an operation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Outcome {
    /// It succeeded.
    Ok,
    /// It failed.
    Failed,
    /// The daemon rejected it before its start: a limit was reached, or the request was invalid.
    Refused,
    /// The client went away, a client cancelled it, or the daemon stopped first.
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

/// A counter for each possible outcome. An outcome that has not happened is zero, not absent.
#[derive(Debug)]
pub(crate) struct Outcomes {
    name: &'static str,
    help: &'static str,
    counters: Vec<(Outcome, IntCounter)>,
}

impl Outcomes {
    fn new(name: &'static str, help: &'static str, outcomes: &[Outcome]) -> Self {
        let counters = outcomes.iter().map(|outcome| (*outcome, counter(name, help))).collect();
        Outcomes { name, help, counters }
    }

    pub(crate) fn add(&self, outcome: Outcome, count: u64) {
        let found = self.counters.iter().find(|(known, _)| *known == outcome);
        debug_assert!(found.is_some(), "{outcome:?} is not counted here");
        if let Some((_, counter)) = found {
            counter.inc_by(count);
        }
    }

    fn show(&self, page: &mut Page) {
        page.family(self.name, MetricType::COUNTER, self.help);
        for (outcome, counter) in &self.counters {
            page.sample(&[("outcome", outcome.name())], counter.get() as f64);
        }
    }
}

/// The names and bounds of metrics are constants: a test that makes [`Metrics`] finds one that is not valid.
fn valid<M>(metric: prometheus::Result<M>) -> M {
    metric.expect("the name of a metric is valid")
}

fn counter(name: &str, help: &str) -> IntCounter {
    valid(IntCounter::new(name, help))
}

/// How long something took, how often.
fn seconds(name: &str, help: &str) -> HistogramOpts {
    HistogramOpts::new(name, help).buckets(BOUNDS.to_vec())
}

fn histogram(name: &str, help: &str) -> Histogram {
    valid(Histogram::with_opts(seconds(name, help)))
}

/// All counters and histograms. A new one needs a field, a line in `new`, its name and a line in `show`, and its lines in
/// docs/metrics.txt. ARCHITECTURE.md (*Telemetry*) names the code that counts; alerts are in docs/RUNBOOK.md.
#[derive(Debug)]
pub(crate) struct Metrics {
    /// From the arrival of a request for children, or of a rollback, to the fork of one.
    pub(crate) spawn_fork: Histogram,
    /// From the arrival of a request for children, or of a rollback, to the first answer of one.
    pub(crate) spawn_ready: Histogram,
    /// How long vCPUs stood still for a branch or a fork.
    pub(crate) branch_pause: Histogram,
    pub(crate) exec: Histogram,
    /// By method, matched route and status: all three are of a few values, whatever clients send.
    requests: HistogramVec,
    pub(crate) spawns: Outcomes,
    pub(crate) boots: Outcomes,
    pub(crate) branches: Outcomes,
    pub(crate) execs: Outcomes,
    pub(crate) saves: Outcomes,
    pub(crate) auth_failures: IntCounter,
    /// Events that subscribers were too slow for.
    pub(crate) events_dropped: IntCounter,
    /// Lines that are not in the audit log.
    pub(crate) audit_dropped: IntCounter,
    /// Spans that were not handed over.
    pub(crate) spans_dropped: IntCounter,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        use Outcome::{Cancelled, Failed, Nonzero, Ok, Refused, TimedOut};
        let requests = seconds("forkd_http_request_duration_seconds", "Requests, by the route they matched.");
        Metrics {
            spawn_fork: histogram(
                "forkd_spawn_fork_seconds",
                "From the arrival of a request to the fork of a child.",
            ),
            spawn_ready: histogram(
                "forkd_spawn_ready_seconds",
                "From the arrival of a request to the first answer of a child.",
            ),
            branch_pause: histogram(
                "forkd_branch_pause_seconds",
                "How long vCPUs stood still for a branch or a fork.",
            ),
            exec: histogram(
                "forkd_exec_seconds",
                "Commands and evaluations, from their start to their end; without those of E2B clients, which \
                 the guest serves.",
            ),
            requests: valid(HistogramVec::new(requests, &["method", "route", "status"])),
            spawns: Outcomes::new(
                "forkd_spawns_total",
                "Children asked of a snapshot.",
                &[Ok, Failed, Refused, Cancelled],
            ),
            boots: Outcomes::new(
                "forkd_boots_total",
                "Sandboxes booted from an image.",
                &[Ok, Failed, Cancelled],
            ),
            branches: Outcomes::new(
                "forkd_branches_total",
                "Branches and forks asked of a sandbox.",
                &[Ok, Failed, Refused],
            ),
            execs: Outcomes::new(
                "forkd_execs_total",
                "Commands and evaluations in sandboxes, without those of E2B clients, which the guest serves.",
                &[Ok, Nonzero, TimedOut, Failed, Cancelled],
            ),
            saves: Outcomes::new(
                "forkd_saves_total",
                "Attempts to bring a snapshot to disk.",
                &[Ok, Failed, Cancelled],
            ),
            auth_failures: counter("forkd_auth_failures_total", "Requests without a valid token."),
            events_dropped: counter(
                "forkd_events_dropped_total",
                "Events that subscribers were too slow for.",
            ),
            audit_dropped: counter(
                "forkd_audit_dropped_total",
                "Lines that could not be written to the audit log.",
            ),
            spans_dropped: counter(
                "forkd_trace_spans_dropped_total",
                "Trace spans that could not be handed over.",
            ),
        }
    }

    /// A request was answered.
    pub(crate) fn request(&self, method: &str, route: &str, status: u16, took: Duration) {
        let kind = [method, route, &status.to_string()];
        self.requests.with_label_values(&kind).observe(took.as_secs_f64());
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

    /// Shows all of it. Names every field, so that the compiler warns of one that is not shown.
    pub(crate) fn show(&self, page: &mut Page) {
        let Metrics {
            spawn_fork,
            spawn_ready,
            branch_pause,
            exec,
            requests,
            spawns,
            boots,
            branches,
            execs,
            saves,
            auth_failures,
            events_dropped,
            audit_dropped,
            spans_dropped,
        } = self;
        page.add_renamed(spawn_fork, "forkd_spawn_seconds");
        page.add_renamed(spawn_ready, "forkd_first_answer_seconds");
        page.add(branch_pause);
        page.add(exec);
        page.add_renamed(requests, "forkd_http_request_seconds");
        for outcomes in [spawns, boots, branches, execs, saves] {
            outcomes.show(page);
        }
        page.add(auth_failures);
        page.add(events_dropped);
        page.add_renamed(audit_dropped, "forkd_audit_lost_total");
        page.add_renamed(spans_dropped, "forkd_spans_lost_total");
        let help = "Panics of the daemon's background tasks: each is a bug of forkd.";
        page.family("forkd_task_panics_total", MetricType::COUNTER, help);
        for (task, count) in task::panic_counts() {
            page.sample(&[("task", task)], count as f64);
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
        self.metrics.exec.observe(self.begun.elapsed().as_secs_f64());
        self.metrics.execs.add(self.outcome, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(metrics: &Metrics) -> String {
        let mut page = Page::default();
        metrics.show(&mut page);
        page.finish().unwrap()
    }

    #[test]
    fn a_histogram_counts_each_observation_in_every_bound_it_is_within() {
        let metrics = Metrics::new();
        for millis in [1, 3, 400_000] {
            metrics.spawn_fork.observe(Duration::from_millis(millis).as_secs_f64());
        }
        let text = shown(&metrics);
        for line in [
            "forkd_spawn_fork_seconds_bucket{le=\"0.0005\"} 0",
            "forkd_spawn_fork_seconds_bucket{le=\"0.001\"} 1",
            "forkd_spawn_fork_seconds_bucket{le=\"0.005\"} 2",
            "forkd_spawn_fork_seconds_bucket{le=\"300\"} 2",
            "forkd_spawn_fork_seconds_bucket{le=\"+Inf\"} 3",
            "forkd_spawn_fork_seconds_sum 400.004",
            "forkd_spawn_fork_seconds_count 3",
        ] {
            assert!(text.lines().any(|it| it == line), "{line}\n{text}");
        }
    }

    #[test]
    fn a_renamed_metric_is_there_under_both_names_with_the_same_values() {
        let metrics = Metrics::new();
        metrics.spawn_fork.observe(1.0);
        metrics.spawn_ready.observe(2.0);
        metrics.request("GET", "/version", 200, Duration::from_secs(3));
        metrics.audit_dropped.inc_by(4);
        metrics.spans_dropped.inc_by(5);
        let text = shown(&metrics);
        for (newer, older, samples) in [
            ("forkd_spawn_fork_seconds", "forkd_spawn_seconds", "_sum 1"),
            ("forkd_spawn_ready_seconds", "forkd_first_answer_seconds", "_sum 2"),
            (
                "forkd_http_request_duration_seconds",
                "forkd_http_request_seconds",
                "_sum{method=\"GET\",route=\"/version\",status=\"200\"} 3",
            ),
            ("forkd_audit_dropped_total", "forkd_audit_lost_total", " 4"),
            ("forkd_trace_spans_dropped_total", "forkd_spans_lost_total", " 5"),
        ] {
            let of = |name: &str| -> Vec<String> {
                let lines = text.lines().filter(|line| line.starts_with(name));
                lines.map(|line| line.replacen(name, "", 1)).collect()
            };
            assert!(of(newer).iter().any(|line| line == samples), "{newer}{samples}\n{text}");
            assert_eq!(of(newer), of(older), "{text}");
            assert!(text.contains(&format!("# HELP {older} Deprecated name of {newer}; ")), "{text}");
            assert!(!text.contains(&format!("# HELP {newer} Deprecated")), "{text}");
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
