//! Paused sandboxes of the E2B API: each is a suspended workspace that is called like its sandbox.
//!
//! So a pause has the crash rules of a suspend. No time-out and no gc removes what it stores (docs/LIFECYCLE.md).

use std::sync::Arc;

use tokio::sync::OwnedMutexGuard;

use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
use crate::sandbox::e2b::E2bState;
use crate::sandbox::{End, Phase, RuntimeInfo, Sandbox};
use crate::snapshot::branch_job::Mode;
use crate::util::random::new_id;
use crate::util::time::now_unix;
use crate::workspace::deadline::is_expired;
use crate::workspace::suspend::SuspendMode;
use crate::workspace::{Status, Workspace, WorkspaceRecord, WorkspaceState, Workspaces, no_workspace};

/// A pause stores the difference to the snapshot that the sandbox came from, until that many depend on each other:
/// a longer chain takes longer to load.
const MAX_CHAIN: usize = 4;

/// How a sandbox of the E2B API is paused.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PauseSpec {
    /// Otherwise the sandbox boots when it is resumed.
    pub(crate) keeps_memory: bool,
    /// Whether the pause fails if the agent does not answer, or does not freeze the guest's processes in time.
    pub(crate) requires_healthy_guest: bool,
}

/// Whether there is a state to resume from. A record without one is of a sandbox whose first pause has not finished.
fn is_paused(record: &WorkspaceRecord, status: Status) -> bool {
    !record.deleted && status != Status::Running && record.current_state_tag.is_some() && !is_expired(record)
}

impl Workspaces {
    /// The state of a paused sandbox, with its record; none if the sandbox `id` is not paused.
    pub(crate) fn paused(&self, id: &str) -> Option<(WorkspaceRecord, Box<E2bState>)> {
        let (record, status) = self.show(id).ok()?;
        let state = record.e2b.clone().filter(|_| is_paused(&record, status))?;
        Some((record, state))
    }

    /// A paused sandbox whose state fits, with its record. Copies no other record: any client can let all be searched.
    pub(crate) fn find_paused(
        &self,
        fits: impl Fn(&E2bState) -> bool,
    ) -> Option<(WorkspaceRecord, Box<E2bState>)> {
        let all: Vec<_> =
            self.all.lock().iter().map(|(name, workspace)| (name.clone(), workspace.clone())).collect();
        let has_it = |workspace: &Workspace| match &*workspace.state.lock() {
            WorkspaceState::Kept(record) => record.e2b.as_ref().is_some_and(|state| fits(state)),
            _ => false,
        };
        all.iter().filter(|(_, workspace)| has_it(workspace)).find_map(|(name, _)| self.paused(name))
    }

    /// All paused sandboxes that `who` may see.
    pub(crate) fn all_paused(&self, who: &Principal) -> Vec<(WorkspaceRecord, Box<E2bState>)> {
        let theirs = self
            .list()
            .into_iter()
            .filter(|(record, status)| who.owns(&record.owner) && is_paused(record, *status));
        theirs.filter_map(|(record, _)| record.e2b.clone().map(|state| (record, state))).collect()
    }

    /// Pauses a sandbox of the E2B API: stores it, and ends its process. Without its memory, it boots when it is
    /// resumed. Does nothing unless `is_due` says so when no other change of the sandbox is under way.
    pub(crate) async fn pause_to_disk(
        &self,
        sandbox: &Arc<Sandbox>,
        pause: PauseSpec,
        who: &Principal,
        is_due: impl FnOnce(&RuntimeInfo) -> bool,
    ) -> Result<()> {
        if pause.requires_healthy_guest && matches!(sandbox.phase(), Phase::Unresponsive) {
            let text =
                format!("the agent of sandbox {} does not answer, and the pause requires that", sandbox.id);
            return Err(Error::new(Code::SandboxUnresponsive, text));
        }
        // One turn for all of it: a request that resumes the sandbox waits for the whole pause.
        let (workspace, turn, record) = self.take_in(sandbox).await?;
        let mode = match pause.keeps_memory {
            false => Mode::Disk,
            true if self.depth(&record) < MAX_CHAIN => Mode::Diff,
            true => Mode::Full,
        };
        let how = SuspendMode { mode, requires_quiesced: pause.requires_healthy_guest };
        let paused = self.suspend_locked(&sandbox.id, &workspace, how, who, |_, now| is_due(now)).await;
        drop(turn);
        if paused.is_err() {
            // The sandbox may have ended meanwhile.
            self.delete_if_useless(&sandbox.id).await;
        }
        paused.map(drop)
    }

    /// Deletes the workspace of a sandbox that has ended and was never paused: it is listed nowhere, and would keep the
    /// sandbox's snapshot from being removed.
    pub(crate) async fn delete_if_useless(&self, id: &str) {
        let Ok(workspace) = self.get(id) else { return };
        let _turn = workspace.turn.clone().lock_owned().await;
        let WorkspaceState::Kept(record) = workspace.state() else { return };
        let is_current = self.get(id).is_ok_and(|now| Arc::ptr_eq(&now, &workspace));
        if !is_current || record.e2b.is_none() || self.is_of_use(&record) {
            return;
        }
        if let Err(error) = self.delete_locked(id, &workspace, None).await {
            tracing::warn!(workspace = id, %error, "workspace of an ended sandbox not deleted yet");
        }
    }

    /// How many snapshots depend on each other below the one that the sandbox came from.
    fn depth(&self, record: &WorkspaceRecord) -> usize {
        let snapshot = self.snapshots.get(record.tag()).and_then(|entry| entry.snapshot());
        snapshot.map_or(usize::MAX, |snapshot| snapshot.depth())
    }

    /// Makes the workspace of a running sandbox, or brings its record up to date. Returns it with its turn.
    pub(super) async fn take_in(
        &self,
        sandbox: &Arc<Sandbox>,
    ) -> Result<(Arc<Workspace>, OwnedMutexGuard<()>, WorkspaceRecord)> {
        let Some(state) = sandbox.read_runtime(|runtime| runtime.saved.e2b.clone()) else {
            let text = format!("sandbox {} was not made by the E2B API", sandbox.id);
            return Err(Error::new(Code::SandboxUnfit, text));
        };
        let (id, spec) = (&sandbox.id, &sandbox.spec);
        let workspace = {
            let mut all = self.all.lock();
            all.entry(id.clone()).or_insert_with(|| Workspace::new(WorkspaceState::CreateJob)).clone()
        };
        let turn = workspace.turn.clone().lock_owned().await;
        if !self.registry.get(id).is_ok_and(|now| Arc::ptr_eq(&now, sandbox)) {
            if matches!(workspace.state(), WorkspaceState::CreateJob) {
                self.all.lock().remove(id);
            }
            let text = format!("sandbox {id} was paused or ended by another request");
            return Err(Error::new(Code::WorkspaceNotRunning, text));
        }
        let is_its = |record: &WorkspaceRecord| {
            record.owner == spec.owner && record.live_sandbox_id.as_deref() == Some(id) && !record.deleted
        };
        let record = match workspace.state() {
            WorkspaceState::Kept(record) if is_its(&record) => *record,
            WorkspaceState::Kept(_) => {
                let text = format!("a workspace of another sandbox is called {id}; delete it first");
                return Err(Error::new(Code::NameTaken, text));
            }
            WorkspaceState::Broken(_) => self.record_of(id, &workspace)?,
            WorkspaceState::CreateJob => {
                let source = spec.snapshot_tag.clone().unwrap_or_default();
                let made = WorkspaceRecord::new(new_id("ws")?, id, &source, now_unix());
                WorkspaceRecord {
                    owner: spec.owner.clone(),
                    network: spec.network,
                    memory_limit_mib: Some(spec.memory_limit_mib),
                    live_sandbox_id: Some(id.clone()),
                    ..made
                }
            }
        };
        let request = sandbox.read_runtime(|runtime| runtime.saved.lifetime.request.clone());
        let record = WorkspaceRecord { e2b: Some(state), request, ..record };
        if let Err(error) = self.keep(&workspace, record.clone()).await {
            if matches!(workspace.state(), WorkspaceState::CreateJob) {
                self.all.lock().remove(id);
            }
            return Err(error);
        }
        let named = sandbox.update_persisted(|runtime| runtime.saved.workspace = Some(id.clone()));
        named.map_err(|error| Error::host("cannot write the record of a sandbox", error))?;
        Ok((workspace, turn, record))
    }

    /// Deletes the workspace of `sandbox` however long the change takes that is under way; the sandbox ends as `end`
    /// says. Nothing to do if that change suspended it: a client that pauses a sandbox in time keeps it. Nothing either
    /// unless `is_due` says so then.
    pub(crate) async fn delete_of(
        &self,
        sandbox: &Arc<Sandbox>,
        end: End,
        is_due: impl FnOnce() -> bool,
    ) -> Result<()> {
        let Ok(workspace) = self.get(&sandbox.id) else { return Ok(()) };
        let _turn = workspace.turn.clone().lock_owned().await;
        let has_it = self.get(&sandbox.id).is_ok_and(|now| Arc::ptr_eq(&now, &workspace));
        let runs = self.registry.get(&sandbox.id).is_ok_and(|now| Arc::ptr_eq(&now, sandbox));
        match has_it && runs && is_due() {
            true => self.delete_locked(&sandbox.id, &workspace, Some(end)).await,
            false => Ok(()),
        }
    }

    /// The sandbox that the request with this idempotency key made, if it was paused since.
    pub(crate) fn made_by(&self, mark: &str) -> Option<String> {
        let all = self.all.lock();
        let is_its = |workspace: &Workspace| match &*workspace.state.lock() {
            WorkspaceState::Kept(record) => record.request.as_deref() == Some(mark),
            _ => false,
        };
        all.iter().find(|(_, workspace)| is_its(workspace)).map(|(name, _)| name.clone())
    }

    /// Resumes the paused sandbox `id` for `timeout_secs`, or for as long as the last time. Returns whether it was
    /// paused, and the sandbox.
    pub(crate) async fn wake(
        &self,
        id: &str,
        timeout_secs: Option<u64>,
        who: &Principal,
    ) -> Result<(bool, Arc<Sandbox>)> {
        // However long a pause takes that is under way.
        let workspace = self.get(id)?;
        let _turn = workspace.turn.clone().lock_owned().await;
        if !Arc::ptr_eq(&self.get(id)?, &workspace) {
            return Err(no_workspace(id));
        }
        self.check_owner(id, who)?;
        let mut record = self.usable(id, &workspace)?;
        if let Some(sandbox) = self.live(&record) {
            return Ok((false, sandbox));
        }
        if !is_paused(&record, self.status(&record)) {
            return Err(no_workspace(id));
        }
        let Some(state) = &mut record.e2b else {
            let text = format!(
                "workspace {id} was not made by the E2B API; `forkd workspace resume {id}` starts it"
            );
            return Err(Error::new(Code::SandboxUnfit, text));
        };
        state.timeout_secs = timeout_secs.unwrap_or_else(|| state.resume_secs());
        let (record, _) = self.start_again(&workspace, record, who).await?;
        let id = record.live_sandbox_id.as_deref().unwrap_or(id);
        Ok((true, self.registry.get(id)?))
    }
}

#[cfg(test)]
impl Workspaces {
    /// Enters a record in memory, as if the sandbox `id` had been paused to the snapshot `tag` and resumed.
    pub(crate) fn enter_running(&self, id: &str, tag: &str, state: E2bState) {
        self.enter_paused(id, tag, state, None);
        let workspace = self.get(id).unwrap();
        if let WorkspaceState::Kept(record) = &mut *workspace.state.lock() {
            record.live_sandbox_id = Some(id.to_owned());
        }
    }

    /// Enters a record in memory, as if the sandbox `id` were paused to the snapshot `tag`.
    pub(crate) fn enter_paused(&self, id: &str, tag: &str, state: E2bState, request: Option<&str>) {
        let record = WorkspaceRecord {
            current_state_tag: Some(tag.to_owned()),
            e2b: Some(Box::new(state)),
            request: request.map(str::to_owned),
            ..WorkspaceRecord::new("ws1".into(), id, tag, 1)
        };
        self.all.lock().insert(id.to_owned(), Workspace::new(WorkspaceState::Kept(Box::new(record))));
    }
}

#[cfg(test)]
mod tests {
    use forkd_api::OnTimeout;
    use tokio_util::sync::CancellationToken;

    use super::*;
    use crate::auth::tokens::Tokens;
    use crate::lifecycle::timeouts::Timeouts;
    use crate::sandbox::lifetime::Attempt;
    use crate::testing::fake_guest::eventually;
    use crate::testing::fake_host::{FakeHost, end_of};

    #[tokio::test]
    async fn a_client_that_resumes_a_sandbox_while_its_time_out_pauses_it_waits_for_the_pause() {
        let host = FakeHost::new();
        let daemon = host.daemon().await;
        let (sandbox, _monitor) = daemon.booted().await;
        let state = E2bState { keeps_memory: true, ..E2bState::default() };
        sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::new(state))).unwrap();
        let (registry, snapshots) = (daemon.registry.clone(), daemon.snapshots.clone());
        let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
        let tokens = Tokens::open(host.database.clone(), host.config.token_file.clone()).unwrap();
        let timeouts =
            Timeouts { registry, snapshots, workspaces: workspaces.clone(), tokens: Arc::new(tokens) };
        let (_, turn, _) = workspaces.take_in(&sandbox).await.unwrap();
        sandbox
            .update_lifetime(|lifetime, deadline| {
                (lifetime.on_timeout, *deadline) = (OnTimeout::Suspend, Some(1))
            })
            .unwrap();
        let stop = CancellationToken::new();
        timeouts.enforce(stop.clone(), async || stop.cancel()).await;
        let waits = async || {
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        };
        waits().await;
        sandbox.check_not_suspending().expect("no use is refused before the pause has its turn");
        let (waker, id) = (workspaces.clone(), sandbox.id.clone());
        let woken = tokio::spawn(async move { waker.wake(&id, None, &Principal::local()).await });
        waits().await;
        drop(turn);
        // No monitor starts here, so the resume fails, but it did not find the sandbox that is being paused.
        let woken = woken.await.unwrap();
        assert!(!matches!(woken, Ok((false, _))));
        assert!(workspaces.paused(&sandbox.id).is_some());
    }

    #[tokio::test]
    async fn a_client_that_lengthens_a_life_in_time_keeps_the_sandbox_and_one_that_is_late_gets_an_error() {
        for action in [OnTimeout::Kill, OnTimeout::Suspend] {
            let host = FakeHost::new();
            let daemon = host.daemon().await;
            let (sandbox, _monitor) = daemon.booted().await;
            let state = E2bState { keeps_memory: true, ..E2bState::default() };
            sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::new(state))).unwrap();
            let (registry, snapshots) = (daemon.registry.clone(), daemon.snapshots.clone());
            let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
            let tokens = Tokens::open(host.database.clone(), host.config.token_file.clone()).unwrap();
            let timeouts =
                Timeouts { registry, snapshots, workspaces: workspaces.clone(), tokens: Arc::new(tokens) };
            let expire = async || {
                sandbox
                    .update_lifetime(|lifetime, deadline| {
                        (lifetime.on_timeout, *deadline) = (action, Some(1))
                    })
                    .unwrap();
                let stop = CancellationToken::new();
                timeouts.clone().enforce(stop.clone(), async || stop.cancel()).await;
            };
            let lengthen = || {
                sandbox.try_update_persisted(|runtime| {
                    sandbox.check_time_is_open(runtime)?;
                    runtime.saved.deadline_unix = Some(now_unix() + 3600);
                    Ok(())
                })
            };
            // A client's pause is under way, and fails.
            let (_, turn, _) = workspaces.take_in(&sandbox).await.unwrap();
            expire().await;
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
            lengthen().unwrap();
            drop(turn);
            eventually("the time-out's turn", || {
                sandbox.read_runtime(|runtime| matches!(runtime.attempt, Attempt::None))
            })
            .await;
            assert!(matches!(sandbox.phase(), Phase::Running), "{action:?}: {:?}", sandbox.phase());
            assert!(daemon.registry.get(&sandbox.id).is_ok(), "{action:?}");
            assert!(daemon.snapshots.list().is_empty(), "{action:?}");
            expire().await;
            end_of(&sandbox).await;
            let late = lengthen();
            match action {
                OnTimeout::Kill => assert_eq!(late.unwrap_err().code(), Code::SandboxNotFound),
                _ => eventually("the pause", || workspaces.paused(&sandbox.id).is_some()).await,
            }
        }
    }

    #[tokio::test]
    async fn a_pause_that_requires_a_healthy_guest_is_undone_if_no_agent_froze_its_processes() {
        let host = FakeHost::new();
        let daemon = host.daemon().await;
        // Its guest has no agent.
        let (sandbox, _monitor) = daemon.booted().await;
        sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::default())).unwrap();
        let workspaces = Workspaces::open(daemon.registry.clone(), daemon.snapshots.clone()).await.unwrap();
        let pause = async |requires_healthy_guest| {
            let pause = PauseSpec { keeps_memory: true, requires_healthy_guest };
            workspaces.pause_to_disk(&sandbox, pause, &Principal::local(), |_| true).await
        };
        let error = pause(true).await.unwrap_err();
        assert_eq!(error.code(), Code::GuestTimeout, "{error}");
        assert!(matches!(sandbox.phase(), Phase::Running), "{:?}", sandbox.phase());
        assert!(workspaces.paused(&sandbox.id).is_none());
        assert!(daemon.snapshots.list().is_empty(), "nothing is left of it");
        pause(false).await.unwrap();
        assert!(workspaces.paused(&sandbox.id).is_some());
    }
}
