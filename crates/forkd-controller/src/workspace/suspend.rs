//! Suspending a workspace.

use forkd_api::EventKind;

use crate::auth::principal::Principal;
use crate::branch::suspend::{self, Suspend};
use crate::error::{Code, Error, Result};
use crate::sandbox::lifetime::{SUSPENDED, SuspendGuard};
use crate::sandbox::{End, RuntimeInfo, Sandbox};
use crate::snapshot::branch_job::Mode;
use crate::util::time::now_unix;
use crate::workspace::{Status, Workspace, WorkspaceRecord, Workspaces};

/// How a workspace's sandbox is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct SuspendMode {
    pub(super) mode: Mode,
    /// Whether the suspend fails if the agent did not freeze the guest's processes.
    pub(super) requires_quiesced: bool,
}

impl Workspaces {
    /// Suspends a workspace: branches its sandbox, saves the branch as `mode` says, and ends the sandbox.
    ///
    /// Does nothing if the sandbox was used since `unused_since`, if that is given.
    pub(crate) async fn suspend(
        &self,
        name: &str,
        mode: Mode,
        who: &Principal,
        unused_since: Option<(u64, usize)>,
    ) -> Result<(WorkspaceRecord, Status)> {
        let (workspace, _turn) = self.lock_exclusive(name).await?;
        let how = SuspendMode { mode, requires_quiesced: false };
        let is_unused =
            |sandbox: &Sandbox, _: &_| unused_since.is_none_or(|stamp| sandbox.activity.stamp() == stamp);
        self.suspend_locked(name, &workspace, how, who, is_unused).await
    }

    /// The same for a caller that has the workspace's turn. Does nothing unless `is_due` says so of the sandbox.
    pub(super) async fn suspend_locked(
        &self,
        name: &str,
        workspace: &Workspace,
        how: SuspendMode,
        who: &Principal,
        is_due: impl FnOnce(&Sandbox, &RuntimeInfo) -> bool,
    ) -> Result<(WorkspaceRecord, Status)> {
        // Under the lock: before it, another workspace may have had the name.
        self.check_owner(name, who)?;
        let record = self.usable(name, workspace)?;
        let Some(sandbox) = self.live(&record) else {
            let text = match self.status(&record) {
                Status::Suspended => format!("workspace {name} is suspended already"),
                _ => format!(
                    "workspace {name} is not running: its sandbox is gone; `forkd workspace resume {name}` \
                     starts it from its last state"
                ),
            };
            return Err(Error::new(Code::WorkspaceNotRunning, text));
        };
        // From here on uses of the sandbox are refused: their effects would be lost.
        let Some(_suspending) = SuspendGuard::begin_if(&sandbox, |now| is_due(&sandbox, now)) else {
            return self.show(name);
        };
        let suspend = Suspend::begin(&self.registry, &self.snapshots, &sandbox).await?;
        let (number, tag) = self.next_tag(&record)?;
        // Until it is the current state, the tag is a retired one: `gc` leaves it alone, and a sweep removes it.
        let mut begun = WorkspaceRecord { states: number, ..record.clone() };
        begun.retired.push(tag.clone());
        self.keep(workspace, begun.clone()).await?;
        let mut quota = who.quota;
        // The current state is removed when there is a new one.
        let replaced = u64::from(record.current_state_tag.is_some());
        quota.max_snapshots = quota.max_snapshots.map(|max| max.saturating_add(replaced));
        let why = format!("workspace {name} was suspended; `forkd workspace resume {name}` goes on");
        let end = End::new(SUSPENDED, why, String::new());
        let mut suspended =
            WorkspaceRecord { current_state_tag: Some(tag.clone()), live_sandbox_id: None, ..begun };
        suspended.retired.retain(|retired| *retired != tag);
        suspended.retired.extend(record.current_state_tag);
        let SuspendMode { mode, requires_quiesced } = how;
        let order = suspend::SuspendSpec { tag, mode, requires_quiesced, quota, unused_since: None, end };
        let commit = async {
            let record = WorkspaceRecord { last_active_unix: now_unix(), ..suspended.clone() };
            self.keep(workspace, record).await
        };
        let done = suspend.run(order, commit).await;
        if matches!(done, Ok(true)) {
            self.emit(EventKind::WorkspaceSuspended, &suspended);
        }
        self.sweep_retired(name, workspace).await;
        done?;
        self.show(name)
    }

    /// The number and the tag of the next state; no snapshot has the tag.
    fn next_tag(&self, record: &WorkspaceRecord) -> Result<(u64, String)> {
        let mut number = record.states;
        loop {
            number += 1;
            let Some(tag) = record.state_tag(number) else {
                return Err(Error::new(
                    Code::WorkspaceUnusable,
                    format!(
                        "workspace {} had too many states; make a new one from its snapshot",
                        record.name
                    ),
                ));
            };
            match self.snapshots.get(&tag) {
                Err(error) if error.code().is_not_found() => return Ok((number, tag)),
                other => drop(other?),
            }
        }
    }
}
