//! The tasks that work without a request, from the start of the daemon to its stop.

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use crate::api::ApiContext;
use crate::lifecycle::disk_full;
use crate::lifecycle::timeouts::Timeouts;
use crate::snapshot::gc;
use crate::util::task::{self, Task};

/// Starts the tasks. Returns that of the MCP sessions, which ends when it has ended all sessions.
pub(super) fn start(app: &ApiContext, stopping: &CancellationToken) -> JoinHandle<()> {
    collect_snapshots(app);
    let (waiting, until) = (app.registry.clone(), stopping.clone());
    task::keep_running(Task::DiskSpace, move || disk_full::resume_waiting(waiting.clone(), until.clone()));
    enforce_timeouts(app, stopping.clone());
    let (mcp, until) = (app.mcp.clone(), stopping.clone());
    task::keep_running(Task::McpSessions, move || {
        let (mcp, until) = (mcp.clone(), until.clone());
        async move { mcp.end_unused(until).await }
    })
}

/// Removes old branches, except those that a workspace or a sandbox needs, and unloads templates that no client uses.
fn collect_snapshots(app: &ApiContext) {
    let (users, kept) = (app.registry.clone(), app.workspaces.clone());
    let needed = move || {
        let mut needed = kept.tags()?;
        for sandbox in users.list() {
            needed.extend(sandbox.spec.snapshot_tag.clone());
            needed.extend(sandbox.runtime().saved.history.rolled_back_to);
        }
        Ok(needed)
    };
    let snapshots = app.snapshots.clone();
    task::keep_running(Task::SnapshotGc, move || gc::enforce_limits(snapshots.clone(), needed.clone()));
    let snapshots = app.snapshots.clone();
    task::keep_running(Task::Unload, move || gc::unload_unused(snapshots.clone()));
}

/// Acts on sandboxes whose time is over, and prunes expired records.
fn enforce_timeouts(app: &ApiContext, stopping: CancellationToken) {
    let timeouts = Timeouts {
        registry: app.registry.clone(),
        snapshots: app.snapshots.clone(),
        workspaces: app.workspaces.clone(),
        tokens: app.tokens.clone(),
    };
    let (archive, answers) = (app.registry.archive.clone(), app.answers.clone());
    task::keep_running(Task::TimeoutLoop, move || {
        let (archive, answers) = (archive.clone(), answers.clone());
        timeouts.clone().enforce(stopping.clone(), async move || {
            for pruned in [archive.prune().await, answers.prune().await] {
                if let Err(error) = pruned {
                    tracing::warn!(%error, "expired records not pruned");
                }
            }
        })
    });
}
