//! How much room there is on the disk of the data directory, where snapshots and the disks of guests grow, and
//! what waits for room.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_store::Snapshot;

use crate::branch::Branch;
use crate::error::{Error, Result};
use crate::sandbox::command::Command;
use crate::sandbox::registry::Registry;
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::registry::{Entry, Snapshots};
use crate::snapshot::template::Template;
use crate::util::stopping::Stopping;

/// Why a sandbox is paused that no client paused, in one word and in one sentence.
pub(crate) const DISK_FULL: &str = "host_disk_full";
pub(crate) const DISK_FULL_DETAIL: &str =
    "the host's disk is full; it goes on by itself when there is room: free space, or remove snapshots";
/// So much must be free before guests that wait for room go on, or they would soon wait again.
const ROOM_FOR_GUESTS: u64 = 64 << 20;
/// How long a guest stays paused at least: a quota may be used up where the disk has room.
const SHORTEST_PAUSE: Duration = Duration::from_secs(5);
/// How long a branch without room on disk is left alone after a save has failed; then twice as long, up to
/// `LONGEST_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// How often the daemon looks whether there is room.
const LOOK_FOR_ROOM: Duration = Duration::from_secs(1);

/// Bytes that processes without privileges can still write to the file system of `folder`.
pub(crate) fn free(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether the text of an error says that a disk or a disk quota is full: a saver can hand on nothing but text.
pub(crate) fn is_shortage(text: &str) -> bool {
    let errors = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT];
    errors.iter().any(|error| text.contains(&format!("(os error {})", error.raw_os_error())))
}

impl Sandbox {
    /// Whether it is paused because its guest writes and the host's disk is full.
    pub(crate) fn waits_for_room(&self) -> bool {
        matches!(self.phase(), Phase::Paused) && self.look(|facts| facts.disk_full)
    }

    /// Its monitor has paused it, because the host's disk is full.
    pub(crate) fn paused_for_room(&self) {
        tracing::warn!(
            sandbox = self.id,
            "the host's disk is full; the sandbox is paused until there is room"
        );
        self.learn(|facts| facts.disk_full = true);
        self.pauses.begin();
        self.turn_to(Phase::Paused);
    }

    /// Lets it go on if it still waits for room: what its guest writes is tried again.
    async fn try_again(&self) -> Result<()> {
        let _turn = self.take_turn().await?;
        // What it did while it is being stored would be lost.
        if !self.waits_for_room() || self.not_put_away().is_err() {
            return Ok(());
        }
        tracing::info!(sandbox = self.id, "there is room on the host's disk; the sandbox goes on");
        // Not a use of it: no client asked for anything.
        self.ask(Command::Resume).await?;
        self.forget_pause();
        Ok(())
    }
}

/// Lets sandboxes that wait for room on the disk go on when there is some, until the daemon stops.
pub(crate) async fn resume_waiting(registry: Arc<Registry>, mut stopping: Stopping) {
    let data = registry.host.config.data_dir.clone();
    loop {
        tokio::select! {
            () = tokio::time::sleep(LOOK_FOR_ROOM) => {}
            () = stopping.asked() => return,
        }
        let is_due = |sandbox: &Arc<Sandbox>| {
            sandbox.waits_for_room() && sandbox.pauses.lasts().is_none_or(|time| time >= SHORTEST_PAUSE)
        };
        let waiting: Vec<_> = registry.list().into_iter().filter(is_due).collect();
        // Where it cannot be found out, the write itself tells.
        if waiting.is_empty() || free(&data).is_ok_and(|free| free < ROOM_FOR_GUESTS) {
            continue;
        }
        for sandbox in waiting {
            if let Err(error) = sandbox.try_again().await {
                tracing::warn!(sandbox = sandbox.id, %error, "the sandbox stays paused");
            }
        }
    }
}

impl Snapshots {
    /// Whether `bytes` fit on the disk and leave as much free as the limits say. Yes where that cannot be found
    /// out: the write itself tells then.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let needed = (self.host.config.limits.min_free_mib << 20).saturating_add(bytes);
        free(self.store.folder()).map_or(true, |free| free >= needed)
    }

    /// Refuses what fills memory while the disk that is to take it is full.
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

    /// Has a branch written, as often as the disk is full; no client waits for it. An error also once the branch
    /// was unused for so long that its memory is to be freed.
    pub(crate) async fn save_when_possible(
        &self,
        entry: &Entry,
        branch: &Branch,
        template: &Arc<Template>,
    ) -> Result<Snapshot> {
        let mut pause = FIRST_PAUSE;
        loop {
            let error = match self.save_branch(branch, template).await {
                Err(error) if error.is_no_room() && !branch.waited_for => error,
                other => return other,
            };
            tracing::warn!(tag = branch.tag, %error, "a branch waits for room on the disk");
            branch.wait_for_room(Some(error.clone()));
            self.retain.notify_one();
            let room = tokio::select! {
                biased;
                _ = branch.dismissed() => false,
                room = self.room_again(entry, branch, template, pause) => room,
            };
            branch.wait_for_room(None);
            if !room {
                return Err(error);
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// Returns when a save that found the disk full is worth another try, not before `pause` is over. Not so if
    /// there is nothing to save any more, or no client used it for long.
    async fn room_again(&self, entry: &Entry, branch: &Branch, template: &Template, pause: Duration) -> bool {
        // At least what was written before the disk was full.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_disk_or_quota_is_a_shortage() {
        for (error, shortage) in
            [(libc::ENOSPC, true), (libc::EDQUOT, true), (libc::EIO, false), (libc::EROFS, false)]
        {
            let text = format!("cannot write a layer: {}", io::Error::from_raw_os_error(error));
            assert_eq!(is_shortage(&text), shortage, "{text}");
        }
    }
}
