//! `GET /metrics`: counters, and gauges of the current state.

use std::os::linux::fs::MetadataExt;

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};

use super::ApiContext;
use crate::error::Result;
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
    page.family("forkd_build_info", "gauge", "1, with the version of the daemon.");
    page.sample("forkd_build_info", &[("version", crate::VERSION)], 1);
    page.single("forkd_snapshots_total", "gauge", "Snapshots there are.", app.snapshots.list().len());
    sandboxes(&app, &mut page);
    let cap = app.config.limits.max_branches;
    let branching = cap.saturating_sub(app.snapshots.branching.available_permits());
    page.single("forkd_branches_in_flight", "gauge", "Branches that are being taken.", branching);
    page.single("forkd_branch_concurrency_cap", "gauge", "How many may be taken at a time.", cap);

    let telemetry = &app.registry.host.telemetry;
    let pids = app.registry.list().iter().filter_map(|sandbox| sandbox.facts().pid).collect();
    let memory = app.registry.host.usage.memory(pids).await;
    let help = "Memory of all sandboxes that only one of them has; a few seconds old.";
    page.single("forkd_sandbox_memory_private_bytes", "gauge", help, memory.private);
    let help = "Memory of all sandboxes that other processes have too, counted for each; a few seconds old.";
    page.single("forkd_sandbox_memory_shared_bytes", "gauge", help, memory.shared);
    telemetry.metrics.show(&mut page);
    let text = blocking("looking at our own process", move || {
        ourselves(&mut page);
        Ok(page.finish())
    });
    Ok(([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], text.await?).into_response())
}

fn sandboxes(app: &ApiContext, page: &mut Page) {
    let names = ["starting", "running", "unresponsive", "paused", "ended", "unknown"];
    let mut counts = [0; 6];
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
    let active = counts.iter().sum::<usize>() - counts[4];
    page.single("forkd_sandboxes_active", "gauge", "Sandboxes that have a process.", active);
    page.family("forkd_sandboxes", "gauge", "Sandboxes, by where they stand.");
    for (name, count) in names.iter().zip(counts) {
        page.sample("forkd_sandboxes", &[("state", name)], count);
    }
}

/// Metrics of the daemon's own process, under the names that every exporter uses. Blocks.
fn ourselves(page: &mut Page) {
    if let Ok(own) = process_stats::memory(std::process::id()) {
        let help = "Memory of the daemon itself.";
        page.single("process_resident_memory_bytes", "gauge", help, own.rss_kib << 10);
    }
    if let Ok(files) = std::fs::read_dir("/proc/self/fd") {
        page.single("process_open_fds", "gauge", "Files the daemon has open.", files.count());
    }
    let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    if let Some(limit) = limit {
        page.single("process_max_fds", "gauge", "Files the daemon may have open.", limit);
    }
    // The change time of `/proc/self` is the start time of the process.
    if let Ok(folder) = std::fs::metadata("/proc/self") {
        let help = "When the daemon started, in seconds since 1970.";
        page.single("process_start_time_seconds", "gauge", help, folder.st_ctime());
    }
}
