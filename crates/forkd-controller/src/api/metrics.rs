//! `GET /metrics`: counters, and gauges of the current state.

use std::os::linux::fs::MetadataExt;

use ::prometheus::proto::MetricType;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use crate::api::ApiContext;
use crate::error::{Error, Result};
use crate::host::process_stats;
use crate::sandbox::Phase;
use crate::telemetry::prometheus::{self, Page};
use crate::util::task::blocking;

/// Returns metrics in Prometheus' text format.
#[utoipa::path(
    get, path = "/metrics",
    responses((status = 200, body = String, content_type = "text/plain; version=0.0.4; charset=utf-8")),
)]
pub(super) async fn metrics(State(app): State<ApiContext>) -> Result<Response> {
    let mut page = Page::default();
    page.family("forkd_build_info", MetricType::GAUGE, "1, with the version of the daemon.");
    page.sample(&[("version", crate::VERSION)], 1.0);
    // A gauge, although it is called `_total`: dashboards read the name.
    page.gauge("forkd_snapshots_total", "Number of snapshots.", app.snapshots.list().len() as f64);
    sandboxes(&app, &mut page);
    let cap = app.config.limits.max_branches;
    let branching = cap.saturating_sub(app.snapshots.branching.available_permits());
    page.gauge("forkd_branches_in_flight", "Branches that are being taken.", branching as f64);
    page.gauge("forkd_branch_concurrency_cap", "Maximum number of branches taken at a time.", cap as f64);

    let telemetry = &app.registry.host.telemetry;
    let pids = app.registry.list().iter().filter_map(|sandbox| sandbox.runtime().pid).collect();
    let memory = app.registry.host.usage.memory(pids).await;
    let help = "Memory of all sandboxes that only one of them has; a few seconds old.";
    page.gauge("forkd_sandbox_memory_private_bytes", help, memory.private as f64);
    let help = "Memory of all sandboxes that other processes have too, counted for each; a few seconds old.";
    page.gauge("forkd_sandbox_memory_shared_bytes", help, memory.shared as f64);
    telemetry.metrics.show(&mut page);
    let text = blocking("looking at our own process", move || {
        ourselves(&mut page);
        page.finish().map_err(|error| Error::host("writing down the metrics", error))
    });
    Ok(([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], text.await?).into_response())
}

fn sandboxes(app: &ApiContext, page: &mut Page) {
    let names = ["starting", "running", "unresponsive", "paused", "ended", "unknown"];
    let mut counts = [0_u32; 6];
    for sandbox in app.registry.list() {
        counts[match sandbox.phase() {
            Phase::Starting => 0,
            Phase::Running => 1,
            Phase::Unresponsive => 2,
            Phase::Paused => 3,
            Phase::Ended(_) => 4,
            Phase::Unknown(_) => 5,
        }] += 1;
    }
    let active = counts.iter().sum::<u32>() - counts[4];
    page.gauge("forkd_sandboxes_active", "Sandboxes that have a process.", f64::from(active));
    page.family("forkd_sandboxes", MetricType::GAUGE, "Sandboxes, by state.");
    for (name, count) in names.iter().zip(counts) {
        page.sample(&[("state", name)], f64::from(count));
    }
}

/// Metrics of the daemon's own process, under the names that every exporter uses. Blocks.
fn ourselves(page: &mut Page) {
    if let Ok(own) = process_stats::memory(std::process::id()) {
        let help = "Memory of the daemon itself.";
        page.gauge("process_resident_memory_bytes", help, (own.rss_kib << 10) as f64);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        page.gauge("process_open_fds", "Files the daemon has open.", files.count() as f64);
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(limit) = limit {
        page.gauge("process_max_fds", "Files the daemon may have open.", limit as f64);
    }
    // The change time of `/proc/self` is the start time of the process.
    if let Ok(folder) = std::fs::metadata("/proc/self") {
        let help = "When the daemon started, in seconds since 1970.";
        page.gauge("process_start_time_seconds", help, folder.st_ctime() as f64);
    }
}
