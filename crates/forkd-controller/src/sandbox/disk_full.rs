//! Pauses because the host's disk is full: the monitor pauses the guest, and the daemon resumes it.

use crate::error::Result;
use crate::sandbox::command::MonitorCommand;
use crate::sandbox::{Phase, Sandbox};

/// The reason of such a pause, as one word for programs; [`DISK_FULL_DETAIL`] is a sentence for people.
pub(crate) const DISK_FULL: &str = "host_disk_full";

pub(crate) const DISK_FULL_DETAIL: &str =
    "the host's disk is full; it goes on by itself when there is room: free space, or remove snapshots";

impl Sandbox {
    /// Whether the sandbox is paused until the host's disk has room for what the guest writes.
    pub(crate) fn waits_for_room(&self) -> bool {
        matches!(self.phase(), Phase::Paused) && self.read_runtime(|runtime| runtime.disk_full)
    }

    /// Records that the monitor has paused the guest because the host's disk is full.
    pub(crate) fn paused_for_room(&self) {
        tracing::warn!(
            sandbox = self.id,
            "sandbox paused: the host's disk is full; it resumes when there is room"
        );
        self.update_runtime(|runtime| runtime.disk_full = true);
        self.pauses.begin();
        self.set_phase(Phase::Paused);
    }

    /// Resumes the sandbox if it still waits for room; the monitor then repeats the failed write.
    pub(crate) async fn try_again(&self) -> Result<()> {
        let _turn = self.lock_exclusive().await?;
        // A sandbox that is being suspended stays paused: later work of the guest would be lost.
        if !self.waits_for_room() || self.check_not_suspending().is_err() {
            return Ok(());
        }
        tracing::info!(sandbox = self.id, "sandbox resumed: the host's disk has room again");
        // Does not count as a use: no client sent a request.
        self.ask(MonitorCommand::Resume).await?;
        self.forget_pause();
        Ok(())
    }
}
