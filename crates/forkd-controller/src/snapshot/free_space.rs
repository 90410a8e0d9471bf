//! Disk space for snapshots: the daemon refuses live branches while there is none, and saves of branches wait for it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_store::Snapshot;

use crate::error::{Error, Result};
use crate::host::disk_space::free;
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::registry::{Entry, SnapshotRegistry};
use crate::snapshot::template::Template;

/// How often the daemon looks for space while a branch waits.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(1);

/// How long a branch pauses after a save that found the disk full. Each pause is twice as long as the one before,
/// up to `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_secs(1);

const LONGEST_PAUSE: Duration = Duration::from_secs(30);

impl SnapshotRegistry {
    /// Whether `bytes` fit on the disk and leave as much free as the limits demand. True if the free space cannot
    /// be read: then the write itself fails.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let needed = (self.host.config.limits.min_free_mib << 20).saturating_add(bytes);
        free(self.store.folder()).map_or(true, |free| free >= needed)
    }

    /// Refuses a live branch while the disk is full: the branch would stay in memory.
    pub(crate) fn check_room(&self) -> Result<()> {
        if self.has_room(0) {
            return Ok(());
        }
        let free = free(self.store.folder()).unwrap_or_default() >> 20;
        let floor = self.host.config.limits.min_free_mib;
        Err(Error::no_room(format!(
            "the disk of the data directory has {free} MiB free, and a live branch needs {floor} MiB \
             (`forkd serve --min-free-mib`); free space there, or remove snapshots with `forkd rmi`"
        )))
    }

    /// Saves a branch. While the disk is full, and if no client waits for the save, tries again. An error also once
    /// the branch was unused for so long that its memory is to be freed.
    pub(crate) async fn save_when_possible(
        &self,
        entry: &Entry,
        branch: &BranchJob,
        template: &Arc<Template>,
    ) -> Result<Snapshot> {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.save_branch(branch, template).await {
                Err(error) if error.is_no_room() && !branch.waited_for => error,
                other => return other,
            };
            tracing::warn!(tag = branch.tag, %error, "branch waits for disk space");
            branch.set_shortage(Some(error.clone()));
            self.gc_wakeup.notify_one();
            let room = tokio::select! {
                biased;
                _ = branch.disposition_changed() => false,
                room = self.room_again(entry, branch, template, pause) => room,
            };
            branch.set_shortage(None);
            if !room {
                return Err(error);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Returns true when a save that found the disk full is worth another try, not before `pause` is over. Returns
    /// false if the template is gone, or no client used the branch for long.
    async fn room_again(
        &self,
        entry: &Entry,
        branch: &BranchJob,
        template: &Template,
        pause: Duration,
    ) -> bool {
        // At least as much as the failed save wrote.
        let needed = branch.progress().map_or(0, |progress| progress.written);
        let patience = self.host.config.limits.branch_unload_after;
        let begun = Instant::now();
        loop {
            tokio::time::sleep(LOOK_FOR_ROOM.min(pause)).await;
            if !template.is_alive() || patience.is_some_and(|after| entry.is_unused(after)) {
                return false;
            }
            if begun.elapsed() >= pause && self.has_room(needed) {
                return true;
            }
        }
    }
}
