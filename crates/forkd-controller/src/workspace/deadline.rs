//! The deadline of a sandbox of the E2B API that was paused once and runs again.
//!
//! Its last pause is on disk, so if its process is lost with the host it is a paused sandbox again. Its record has the
//! deadline that would have ended it, and the daemon obeys that.

use std::sync::Arc;

use forkd_api::OnTimeout;

use crate::error::{Error, Result};
use crate::sandbox::{Phase, Sandbox};
use crate::util::task::{self, Task};
use crate::util::time::now_unix;
use crate::workspace::{WorkspaceRecord, WorkspaceState, Workspaces};

/// Whether the deadline in the record has passed. It counts if the sandbox does not run.
pub(super) fn is_expired(record: &WorkspaceRecord) -> bool {
    record.kill_at_unix.is_some_and(|at| at <= now_unix())
}

impl Workspaces {
    /// Writes the deadline of a sandbox into its workspace's record, if it has one, before a client is told of a change: a
    /// daemon that finds the sandbox lost obeys it. To its end, also if the client disconnects.
    pub(crate) async fn keep_deadline(self: &Arc<Self>, sandbox: &Arc<Sandbox>) -> Result<()> {
        let Ok(workspace) = self.get(&sandbox.id) else { return Ok(()) };
        let (workspaces, id) = (self.clone(), sandbox.id.clone());
        let work = async move {
            let _writing = workspace.writing.lock().await;
            let WorkspaceState::Kept(record) = workspace.state() else { return Ok(()) };
            let kill_at_unix = workspaces.kill_at(&record);
            let is_its = record.live_sandbox_id.as_ref() == Some(&id) && !record.deleted;
            if !is_its || kill_at_unix == record.kill_at_unix {
                return Ok(());
            }
            workspaces.write(&workspace, WorkspaceRecord { kill_at_unix, ..*record }).await
        };
        let written = task::spawn(Task::Suspend, work).await;
        written.unwrap_or_else(|error| Err(Error::host("writing a deadline", error)))
    }

    /// When the sandbox of the E2B API that runs is ended, if its deadline does that. If it is lost, what was written.
    pub(super) fn kill_at(&self, record: &WorkspaceRecord) -> Option<u64> {
        record.e2b.as_ref()?;
        record.live_sandbox_id.as_ref()?;
        // The state of a sandbox whose record cannot be read is not known.
        match self.live(record).filter(|sandbox| !matches!(sandbox.phase(), Phase::Unknown(_))) {
            Some(sandbox) => sandbox.read_runtime(|runtime| {
                let kills = runtime.saved.lifetime.on_timeout == OnTimeout::Kill;
                runtime.saved.deadline_unix.filter(|_| kills)
            }),
            None => record.kill_at_unix,
        }
    }

    /// Deletes the sandboxes that were lost while they ran, and whose time is over.
    pub(crate) async fn delete_expired(&self) {
        let is_lost = |record: &WorkspaceRecord| is_expired(record) && self.live(record).is_none();
        for name in self.names() {
            let Ok(workspace) = self.get(&name) else { continue };
            let record = || match &*workspace.state.lock() {
                WorkspaceState::Kept(record) if is_expired(record) => Some(record.clone()),
                _ => None,
            };
            if !record().is_some_and(|record| is_lost(&record)) {
                continue;
            }
            let _turn = workspace.turn.clone().lock_owned().await;
            let has_it = self.get(&name).is_ok_and(|now| Arc::ptr_eq(&now, &workspace));
            // A client may have resumed it before.
            if !has_it || !record().is_some_and(|record| is_lost(&record)) {
                continue;
            }
            tracing::info!(sandbox = name, "lost sandbox of the E2B API deleted: its time is over");
            if let Err(error) = self.delete_locked(&name, &workspace, None).await {
                tracing::warn!(sandbox = name, %error, "lost sandbox whose time is over not deleted yet");
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::principal::Principal;
    use crate::error::Code;
    use crate::sandbox::e2b::E2bState;
    use crate::testing::fake_host::{Daemon, FakeHost};
    use crate::workspace::record::Folder;

    const ID: &str = "sb0123456789abcdef";

    /// A daemon after a reboot: the sandbox was paused, resumed, and is lost with this deadline in its record.
    async fn after_a_reboot(host: &FakeHost, kill_at_unix: Option<u64>) -> (Daemon, Arc<Workspaces>) {
        host.store("ws-1", |_| {});
        let (folder, _) = Folder::open(&host.config.data_dir.join("workspaces")).unwrap();
        let record = WorkspaceRecord {
            current_state_tag: Some("ws-1".into()),
            live_sandbox_id: Some(ID.into()),
            e2b: Some(Box::default()),
            kill_at_unix,
            ..WorkspaceRecord::new("ws1".into(), ID, "t", 1)
        };
        folder.write(&record).unwrap();
        let daemon = host.daemon().await;
        let workspaces = Workspaces::open(daemon.registry.clone(), daemon.snapshots.clone()).await.unwrap();
        (daemon, workspaces)
    }

    #[tokio::test]
    async fn a_lost_sandbox_whose_time_was_over_while_no_daemon_ran_is_gone_with_its_states() {
        let host = FakeHost::new();
        let (daemon, workspaces) = after_a_reboot(&host, Some(now_unix() - 1)).await;
        assert!(workspaces.paused(ID).is_none(), "no client sees it");
        let woken = workspaces.wake(ID, Some(60), &Principal::local()).await;
        assert_eq!(woken.unwrap_err().code(), Code::WorkspaceNotFound, "nor lengthens its life any more");
        workspaces.delete_expired().await;
        assert!(!workspaces.has(ID));
        assert!(daemon.snapshots.get("ws-1").is_err());
    }

    #[tokio::test]
    async fn a_lost_sandbox_is_paused_until_its_time_is_over() {
        for kill_at_unix in [Some(now_unix() + 3600), None] {
            let host = FakeHost::new();
            let (daemon, workspaces) = after_a_reboot(&host, kill_at_unix).await;
            workspaces.delete_expired().await;
            let (record, _) = workspaces.paused(ID).unwrap();
            assert_eq!(record.kill_at_unix, kill_at_unix, "the deadline is in force");
            assert!(daemon.snapshots.get("ws-1").is_ok());
        }
    }

    #[tokio::test]
    async fn the_record_has_the_deadline_that_ends_the_sandbox() {
        let host = FakeHost::new();
        let daemon = host.daemon().await;
        let (sandbox, _monitor) = daemon.booted().await;
        sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::new(E2bState::default()))).unwrap();
        let workspaces = Workspaces::open(daemon.registry.clone(), daemon.snapshots.clone()).await.unwrap();
        workspaces.keep_deadline(&sandbox).await.unwrap();
        assert!(!workspaces.has(&sandbox.id), "one that was never paused has none");
        sandbox.update_lifetime(|_, deadline| *deadline = Some(4_000_000_000)).unwrap();
        let (_, turn, _) = workspaces.take_in(&sandbox).await.unwrap();
        let written = || {
            let (_, found) = Folder::open(&host.config.data_dir.join("workspaces")).unwrap();
            found[0].1.as_ref().unwrap().kill_at_unix
        };
        assert_eq!(written(), Some(4_000_000_000));
        sandbox.update_lifetime(|_, deadline| *deadline = Some(4_000_000_060)).unwrap();
        // It does not wait for a change that is under way, and is not undone by that change.
        workspaces.keep_deadline(&sandbox).await.unwrap();
        assert_eq!(written(), Some(4_000_000_060));
        drop(turn);
        let (_, _turn, _) = workspaces.take_in(&sandbox).await.unwrap();
        assert_eq!(written(), Some(4_000_000_060));
        sandbox.update_lifetime(|lifetime, _| lifetime.on_timeout = OnTimeout::Suspend).unwrap();
        workspaces.keep_deadline(&sandbox).await.unwrap();
        assert_eq!(written(), None, "that deadline pauses it");
    }
}
