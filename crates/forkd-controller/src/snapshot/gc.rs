//! Garbage collection (gc) of branches: removes old ones. `Store::collect` (forkd-store) removes unused layers, and
//! `workspace::sweep` removes earlier states of workspaces.
//!
//! On disk: by age and by number per owner, oldest first. A branch that a sandbox, a workspace or another snapshot
//! needs stays, and so does the snapshot of a suspended sandbox, and one that a client of the E2B API took. In memory, where each template holds all pages that
//! its source has written since: templates without new children are unloaded, and the next spawn starts one from
//! disk. Branches that cannot be saved count like those on disk, and are lost when their memory is freed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use forkd_protocol::names::is_valid_sandbox_id;
use forkd_store::Snapshot;

use crate::config::Limits;
use crate::error::Result;
use crate::snapshot::branch_job::{BranchJob, Mode};
use crate::snapshot::registry::{Entry, Removal, SnapshotJob, SnapshotRegistry, SnapshotState};

/// The longest time between two passes.
const EVERY: Duration = Duration::from_secs(30);
/// The shortest time between two passes.
const SOON: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 250 });

/// A branch, on disk or failed, that may be removed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    created_at_unix: u64,
    /// Orders branches that were taken within the same second.
    saved_at: SystemTime,
    tag: String,
    owner: String,
}

/// Removes branches as the limits say, in an endless loop. `needed` returns the tags that sandboxes and workspaces
/// use. If it fails, nothing is removed.
pub(crate) async fn enforce_limits(
    snapshots: Arc<SnapshotRegistry>,
    needed: impl Fn() -> Result<BTreeSet<String>>,
) {
    let limits = snapshots.host.config.limits.clone();
    let Some(every) = interval(&limits) else { return };
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = snapshots.gc_wakeup.notified() => {}
        }
        remove_expired(&snapshots, &limits, &needed).await;
    }
}

/// Removes what the limits say, once.
async fn remove_expired(
    snapshots: &Arc<SnapshotRegistry>,
    limits: &Limits,
    needed: &impl Fn() -> Result<BTreeSet<String>>,
) {
    let now = crate::util::time::now_unix();
    let mut branches = branches(snapshots);
    // After the list: a snapshot of the E2B API has its name before it is a branch.
    match snapshots.named_tags().await {
        Ok(named) => branches.retain(|branch| !named.contains(&branch.tag)),
        Err(error) => {
            tracing::warn!(%error, "old branches not removed: the names of snapshots are unknown");
            return;
        }
    }
    for tag in expired(&branches, limits, now) {
        // Called for each branch: a use may have begun or ended since the last one.
        match needed() {
            Ok(needed) if needed.contains(&tag) => continue,
            Ok(_) => {}
            Err(error) => {
                tracing::warn!(%error, "old branches not removed: their users are unknown");
                break;
            }
        }
        match snapshots.remove(&tag, Removal::Plain).await {
            Ok(()) => tracing::info!(tag, "old branch removed"),
            // Another snapshot depends on the branch, or a client has removed it.
            Err(error) => tracing::debug!(tag, %error, "old branch not removed"),
        }
    }
}

/// Frees the memory of branches that are on disk or failed, in an endless loop, once no client has forked a child of
/// them for as long as the limits say. Their children keep what they need.
pub(crate) async fn unload_unused(snapshots: Arc<SnapshotRegistry>) {
    let Some(after) = snapshots.host.config.limits.branch_unload_after else { return };
    loop {
        tokio::time::sleep((after / 4).clamp(SOON, EVERY)).await;
        for entry in snapshots.list() {
            match entry.state() {
                SnapshotState::Ready(snapshot)
                    if is_of_a_sandbox(&snapshot) && entry.unload_if_unused(after) =>
                {
                    tracing::info!(tag = entry.tag, "unused branch unloaded from memory");
                }
                SnapshotState::Failed { job: Some(SnapshotJob::Branch(_)), .. }
                    if entry.current().is_some() && entry.is_unused(after) =>
                {
                    tracing::warn!(tag = entry.tag, "unsaved branch lost: no client used it");
                    entry.forget();
                }
                _ => {}
            }
        }
    }
}

fn is_of_a_sandbox(snapshot: &Snapshot) -> bool {
    snapshot.manifest().branched_from.as_deref().is_some_and(is_valid_sandbox_id)
}

fn interval(limits: &Limits) -> Option<Duration> {
    match (limits.branch_max_age, limits.branch_max_count) {
        (None, None) => None,
        (Some(age), _) => Some((age / 4).clamp(SOON, EVERY)),
        (None, Some(_)) => Some(EVERY),
    }
}

/// All branches of sandboxes that are on disk, or could not be saved, oldest first.
fn branches(snapshots: &SnapshotRegistry) -> Vec<Candidate> {
    let branch = |entry: &Arc<Entry>| match entry.state() {
        SnapshotState::Ready(snapshot) => {
            let manifest = snapshot.manifest();
            let is_suspending = manifest.measured.mode.as_deref() == Some(Mode::Suspend.name());
            (is_of_a_sandbox(&snapshot) && !is_suspending).then(|| Candidate {
                created_at_unix: manifest.created_at_unix,
                saved_at: snapshot.saved_at(),
                tag: snapshot.tag().to_owned(),
                owner: entry.owner(),
            })
        }
        SnapshotState::Failed { job: Some(SnapshotJob::Branch(branch)), .. } => unsaved(entry, &branch),
        SnapshotState::Saving(branch) if branch.shortage().is_some() => unsaved(entry, &branch),
        _ => None,
    };
    let mut all: Vec<Candidate> = snapshots.list().iter().filter_map(branch).collect();
    all.sort();
    all
}

/// A branch that is in memory only.
fn unsaved(entry: &Entry, branch: &BranchJob) -> Option<Candidate> {
    let is_suspending = branch.mode == Mode::Suspend;
    (is_valid_sandbox_id(&branch.source) && !is_suspending).then(|| Candidate {
        created_at_unix: branch.begun_at_unix,
        saved_at: SystemTime::UNIX_EPOCH,
        tag: entry.tag.clone(),
        owner: entry.owner(),
    })
}

/// The tags of those of the sorted `branches` that are too old or too many, oldest first.
fn expired(branches: &[Candidate], limits: &Limits, now: u64) -> Vec<String> {
    let mut left = BTreeMap::new();
    branches.iter().for_each(|branch| *left.entry(branch.owner.as_str()).or_insert(0) += 1);
    // The oldest of each owner, until no more than the maximum are left.
    let mut is_excess = |branch: &Candidate| {
        let Some(left) = left.get_mut(branch.owner.as_str()) else { return false };
        let excess = limits.branch_max_count.is_some_and(|max| *left > max);
        *left -= usize::from(excess);
        excess
    };
    let too_old = |branch: &Candidate| {
        limits.branch_max_age.is_some_and(|age| branch.created_at_unix.saturating_add(age.as_secs()) < now)
    };
    let expired = branches.iter().filter(|branch| is_excess(branch) | too_old(branch));
    expired.map(|branch| branch.tag.clone()).collect()
}

#[cfg(test)]
mod tests;
