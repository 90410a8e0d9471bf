//! A sandbox that its monitor paused because the host's disk is full.

use crate::error::Result;
use crate::sandbox::command::MonitorCommand;
use crate::sandbox::{Phase, Sandbox};

/// Why a sandbox is paused that no client paused, in one word and in one sentence.
pub(crate) const DISK_FULL: &str = "host_disk_full";

pub(crate) const DISK_FULL_DETAIL: &str =
    "the host's disk is full; it goes on by itself when there is room: free space, or remove snapshots";

impl Sandbox {
    /// Whether it is paused because its guest writes and the host's disk is full.
    pub(crate) fn waits_for_room(&self) -> bool {
        matches!(self.phase(), Phase::Paused) && self.read_runtime(|facts| facts.disk_full)
    }

    /// Its monitor has paused it, because the host's disk is full.
    pub(crate) fn paused_for_room(&self) {
        tracing::warn!(
            sandbox = self.id,
            "the host's disk is full; the sandbox is paused until there is room"
        );
        self.update_runtime(|facts| facts.disk_full = true);
        self.pauses.begin();
        self.set_phase(Phase::Paused);
    }

    /// Lets it go on if it still waits for room: what its guest writes is tried again.
    pub(crate) async fn try_again(&self) -> Result<()> {
        let _turn = self.lock_exclusive().await?;
        // What it did while it is being stored would be lost.
        if !self.waits_for_room() || self.check_not_suspending().is_err() {
            return Ok(());
        }
        tracing::info!(sandbox = self.id, "there is room on the host's disk; the sandbox goes on");
        // Not a use of it: no client asked for anything.
        self.ask(MonitorCommand::Resume).await?;
        self.forget_pause();
        Ok(())
    }
}
