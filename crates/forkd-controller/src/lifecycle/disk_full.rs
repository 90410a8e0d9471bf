//! Resumes sandboxes that a full disk paused, when the disk has space again.
//!
//! A full disk has four places: `host::disk_space` measures free space, `sandbox::disk_full` pauses one sandbox, this file
//! resumes them all, and `snapshot::free_space` lets saves of branches wait.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::host::disk_space::free;
use crate::sandbox::Sandbox;
use crate::sandbox::registry::Registry;

/// How much must be free before waiting guests are resumed; with less they would soon wait again.
const ROOM_FOR_GUESTS: u64 = 64 << 20;
/// How long a guest stays paused at least: the disk may have space while a quota of the host is used up.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
/// How often the daemon looks for free space.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(1);

/// Lets sandboxes that wait for room on the disk go on when there is some, until the daemon stops.
pub(crate) async fn resume_waiting(registry: Arc<Registry>, stopping: CancellationToken) {
    let data = registry.host.config.data_dir.clone();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_FOR_ROOM) => {}
            () = stopping.cancelled() => return,
        }
        let is_due = |sandbox: &Arc<Sandbox>| {
            sandbox.waits_for_room() && sandbox.pauses.lasts().is_none_or(|time| time >= SHORTEST_PAUSE)
        };
        let waiting: Vec<_> = registry.list().into_iter().filter(is_due).collect();
        // If the free space cannot be read, resumes: a guest pauses again if its write fails.
        if waiting.is_empty() || free(&data).is_ok_and(|free| free < ROOM_FOR_GUESTS) {
            continue;
        }
        for sandbox in waiting {
            if let Err(error) = sandbox.try_again().await {
                tracing::warn!(sandbox = sandbox.id, %error, "sandbox not resumed; it stays paused until the next try");
            }
        }
    }
}
