//! Workspaces: sandboxes with a name that can be suspended and resumed.
//!
//! A workspace is a record on disk (`record`) and, while it runs, a sandbox like any other. Suspending a workspace
//! suspends that sandbox (`crate::branch::suspend`, with its crash rules); resuming it forks a sandbox from the
//! stored snapshot. So a workspace outlives the daemon and the host. If its sandbox is lost with them, the workspace
//! is `stale`, and resumes from its last state.
//!
//! The order of writes makes crashes safe. The tag of a new state is in the record, in the list of tags to remove,
//! before the snapshot is made. One write makes it the current state and removes the sandbox from the record. A
//! sandbox's own record names its workspace before the sandbox is forked. So after a crash at any point the next
//! daemon finds each sandbox that its workspace's record does not name, ends it, and removes each unused tag.

mod deadline;
mod e2b;
mod record;
mod remove_snapshot;
mod suspend;
pub(crate) mod sweep;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::{EventKind, EventSubject};
use forkd_protocol::names::{NAME_RULE, is_valid_sandbox_id};
use parking_lot::Mutex;
use record::{Folder, MAX_NAME, is_valid_workspace};
use tokio::sync::OwnedMutexGuard;

use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
use crate::sandbox::cold_boot::start_children;
use crate::sandbox::lifetime::Lifetime;
use crate::sandbox::registry::{Bound, Registry};
use crate::sandbox::spawn;
use crate::sandbox::{End, Phase, Sandbox};
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::random::{ID_LENGTH, new_id};
use crate::util::task::{self, Task, blocking};
use crate::util::time::now_unix;

pub(crate) use e2b::PauseSpec;
pub(crate) use record::WorkspaceRecord;

#[cfg(test)]
pub(crate) use record::{VERSION, read_and_write};

/// All workspaces of a daemon.
#[derive(Debug)]
pub(crate) struct Workspaces {
    folder: Folder,
    registry: Arc<Registry>,
    snapshots: Arc<SnapshotRegistry>,
    all: Mutex<BTreeMap<String, Arc<Workspace>>>,
}

/// One workspace: its state in memory, and the lock for changes.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// Held during a change of the workspace: one change at a time.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Held while the record is written. A write of the deadline does not wait for the turn.
    writing: tokio::sync::Mutex<()>,
    state: Mutex<WorkspaceState>,
}

#[derive(Debug, Clone)]
enum WorkspaceState {
    /// The first sandbox is being forked; nothing is on disk.
    CreateJob,
    /// The record, as it is on disk.
    Kept(Box<WorkspaceRecord>),
    /// The file cannot be used, with the reason.
    Broken(String),
}

/// The status of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    Running,
    Suspended,
    /// Its sandbox is gone, and it was not suspended.
    Stale,
}

/// The order for a new workspace.
#[derive(Debug)]
pub(crate) struct WorkspaceSpec {
    pub(crate) name: String,
    pub(crate) snapshot_tag: String,
    pub(crate) network: bool,
    pub(crate) memory_limit_mib: Option<u64>,
    /// The principal that will own the workspace, with its quota.
    pub(crate) who: Principal,
}

impl Workspace {
    fn new(state: WorkspaceState) -> Arc<Self> {
        Arc::new(Workspace { turn: Arc::default(), writing: Default::default(), state: Mutex::new(state) })
    }

    fn state(&self) -> WorkspaceState {
        self.state.lock().clone()
    }
}

/// Whether the name could be the id of a sandbox: paused sandboxes of the E2B API have workspaces of that name.
fn is_like_an_id(name: &str) -> bool {
    is_valid_sandbox_id(name) && name.len() == ID_LENGTH
}

fn being_made(name: &str) -> Error {
    Error::new(Code::WorkspaceBusy, format!("workspace {name} is being made; try again"))
}

fn no_workspace(name: &str) -> Error {
    let text = format!("there is no workspace {name}; `forkd workspace create {name}` makes one");
    Error::new(Code::WorkspaceNotFound, text)
}

impl Workspaces {
    /// Opens the workspaces in the host's data directory. Ends sandboxes that name a workspace whose record does not
    /// name them, and finishes deletions that an earlier daemon began.
    pub(crate) async fn open(registry: Arc<Registry>, snapshots: Arc<SnapshotRegistry>) -> Result<Arc<Self>> {
        let path = registry.host.config.data_dir.join("workspaces");
        let shown = path.display().to_string();
        let (folder, found) = blocking("reading the workspaces", move || {
            Folder::open(&path).map_err(|error| Error::host(format!("cannot read {}", path.display()), error))
        })
        .await?;
        let all = found.into_iter().map(|(name, read)| {
            let state = match read {
                Ok(record) => WorkspaceState::Kept(Box::new(record)),
                Err(why) => {
                    tracing::error!(folder = shown, workspace = name, why, "workspace file cannot be used");
                    WorkspaceState::Broken(why)
                }
            };
            (name, Workspace::new(state))
        });
        let all = Mutex::new(all.collect());
        let workspaces = Arc::new(Workspaces { folder, registry, snapshots, all });
        workspaces.end_strangers();
        let (sweeper, mut to_remove) = (workspaces.clone(), Vec::new());
        for (name, workspace) in workspaces.all.lock().iter() {
            let WorkspaceState::Kept(record) = workspace.state() else { continue };
            if record.deleted || record.e2b.is_some() && !workspaces.is_of_use(&record) {
                to_remove.push(name.clone());
            }
        }
        task::spawn(Task::WorkspaceSweep, async move {
            for name in to_remove {
                if let Err(error) = sweeper.delete(&name).await {
                    tracing::warn!(workspace = name, %error, "workspace not deleted yet");
                }
            }
            for name in sweeper.names() {
                sweeper.sweep(&name).await;
            }
        });
        Ok(workspaces)
    }

    /// Ends every sandbox that names a workspace whose record does not name that sandbox.
    fn end_strangers(&self) {
        for sandbox in self.registry.list() {
            let Some(name) = sandbox.runtime().saved.workspace else { continue };
            let ours = match self.get(&name).map(|workspace| workspace.state()) {
                Ok(WorkspaceState::Kept(record)) => record.live_sandbox_id.as_deref() == Some(&sandbox.id),
                // The operator may repair the file and want the sandbox.
                Ok(WorkspaceState::Broken(_)) => true,
                Ok(WorkspaceState::CreateJob) | Err(_) => false,
            };
            if !ours {
                tracing::warn!(
                    sandbox = sandbox.id,
                    workspace = name,
                    "sandbox not in its workspace; ending it"
                );
                let _ = self.registry.delete(&sandbox.id);
            }
        }
    }

    fn names(&self) -> Vec<String> {
        self.all.lock().keys().cloned().collect()
    }

    fn get(&self, name: &str) -> Result<Arc<Workspace>> {
        if !is_valid_workspace(name) {
            let text = format!("a workspace's name must be {NAME_RULE}, and at most {MAX_NAME} of them");
            return Err(Error::invalid(text));
        }
        let found = self.all.lock().get(name).cloned();
        found.ok_or_else(|| no_workspace(name))
    }

    /// Checks that the principal owns the workspace; if not, the error is "not found".
    pub(crate) fn check_owner(&self, name: &str, who: &Principal) -> Result<()> {
        let workspace = self.get(name)?;
        let theirs = match workspace.state() {
            WorkspaceState::Kept(record) => who.owns(&record.owner),
            // There is no record with a trusted owner.
            WorkspaceState::CreateJob | WorkspaceState::Broken(_) => who.is_admin(),
        };
        if theirs { Ok(()) } else { Err(no_workspace(name)) }
    }

    /// Whether there is a workspace of that name, in whatever state.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.all.lock().contains_key(name)
    }

    /// Whether the workspace has a sandbox, or a state to resume one from.
    fn is_of_use(&self, record: &WorkspaceRecord) -> bool {
        record.current_state_tag.is_some() || self.live(record).is_some()
    }

    /// Whether the file of the workspace cannot be used.
    pub(crate) fn is_broken(&self, name: &str) -> bool {
        self.get(name).is_ok_and(|workspace| matches!(workspace.state(), WorkspaceState::Broken(_)))
    }

    fn record_of(&self, name: &str, workspace: &Workspace) -> Result<WorkspaceRecord> {
        match workspace.state() {
            WorkspaceState::Kept(record) => Ok(*record),
            WorkspaceState::CreateJob => Err(being_made(name)),
            WorkspaceState::Broken(why) => {
                let text = format!(
                    "the record of workspace {name} cannot be used: the operator mends its file and restarts \
                     the daemon, or you delete the workspace"
                );
                let path = self.folder.path(name);
                Err(Error::new(Code::WorkspaceUnusable, text).because(format!("{}: {why}", path.display())))
            }
        }
    }

    /// The record and status of one workspace.
    pub(crate) fn show(&self, name: &str) -> Result<(WorkspaceRecord, Status)> {
        let record = self.record_of(name, self.get(name)?.as_ref())?;
        let status = self.status(&record);
        Ok((record, status))
    }

    /// All workspaces with a usable record, by name.
    pub(crate) fn list(&self) -> Vec<(WorkspaceRecord, Status)> {
        let shown = self.names().into_iter().filter_map(|name| self.show(&name).ok());
        shown.collect()
    }

    /// The tags that `gc` must leave alone: those that workspaces resume from, and those that workspaces remove
    /// themselves. The next state of a workspace that is being suspended is among the latter.
    /// An error if the file of a workspace cannot be used: its tags are unknown.
    pub(crate) fn tags(&self) -> Result<BTreeSet<String>> {
        let mut tags = BTreeSet::new();
        for name in self.names() {
            let Ok(workspace) = self.get(&name) else { continue };
            match (workspace.state(), self.record_of(&name, &workspace)) {
                (_, Ok(record)) => tags.extend([vec![record.tag().to_owned()], record.retired].concat()),
                (WorkspaceState::Broken(_), Err(error)) => return Err(error),
                // A workspace that is being made: its first sandbox uses the snapshot.
                (_, Err(_)) => {}
            }
        }
        Ok(tags)
    }

    /// The name of a workspace that would be lost, or could not be resumed, without the snapshot `tag`.
    pub(crate) fn user_of(&self, tag: &str) -> Option<String> {
        let all = self.all.lock();
        let uses = |workspace: &Workspace| match workspace.state() {
            WorkspaceState::Kept(record) => !record.deleted && record.tag() == tag,
            _ => false,
        };
        all.iter().find(|(_, workspace)| uses(workspace)).map(|(name, _)| name.clone())
    }

    fn status(&self, record: &WorkspaceRecord) -> Status {
        match (self.live(record), &record.live_sandbox_id, &record.current_state_tag) {
            (Some(_), _, _) => Status::Running,
            (None, None, Some(_)) => Status::Suspended,
            (None, _, _) => Status::Stale,
        }
    }

    /// The workspace's sandbox, if it has one that has not ended.
    fn live(&self, record: &WorkspaceRecord) -> Option<Arc<Sandbox>> {
        let sandbox = self.registry.get(record.live_sandbox_id.as_deref()?).ok()?;
        (!matches!(sandbox.phase(), Phase::Ended(_))).then_some(sandbox)
    }

    /// Makes a workspace and forks its first sandbox.
    pub(crate) async fn create(&self, order: WorkspaceSpec) -> Result<(WorkspaceRecord, Status)> {
        let name = &order.name;
        if is_like_an_id(name) {
            let text = format!("a workspace cannot be called {name}, like a sandbox; choose another name");
            return Err(Error::invalid(text));
        }
        match self.get(name) {
            Err(error) if error.code().is_not_found() => {}
            Err(error) => return Err(error),
            Ok(_) => {
                let text = format!("workspace {name} exists; delete it, or choose another name");
                return Err(Error::new(Code::NameTaken, text));
            }
        }
        self.snapshots.usable(&order.snapshot_tag, &order.who)?;
        let workspace = Workspace::new(WorkspaceState::CreateJob);
        {
            let mut all = self.all.lock();
            if all.contains_key(name) {
                return Err(being_made(name));
            }
            all.insert(name.clone(), workspace.clone());
        }
        let made = async {
            let record = WorkspaceRecord::new(new_id("ws")?, name, &order.snapshot_tag, now_unix());
            let record = WorkspaceRecord {
                network: order.network,
                memory_limit_mib: order.memory_limit_mib,
                ..record
            };
            let record = WorkspaceRecord { owner: order.who.owner.clone(), ..record };
            self.start(&workspace, record, &order.who).await
        };
        let made = made.await;
        match &made {
            Ok((record, _)) => self.emit(EventKind::WorkspaceCreated, record),
            Err(_) => drop(self.all.lock().remove(name)),
        }
        made
    }

    /// Forks a sandbox for `record` and writes the record with the sandbox's id.
    async fn start(
        &self,
        workspace: &Workspace,
        record: WorkspaceRecord,
        who: &Principal,
    ) -> Result<(WorkspaceRecord, Status)> {
        let bound = self.fork(&record, who).await?;
        let record = WorkspaceRecord {
            live_sandbox_id: Some(bound.sandbox().id.clone()),
            last_active_unix: now_unix(),
            ..record
        };
        self.keep(workspace, record.clone()).await?;
        // The record on disk names the sandbox now. Until here, dropping `bound` ends the sandbox.
        bound.release();
        let status = self.status(&record);
        Ok((record, status))
    }

    async fn fork(&self, record: &WorkspaceRecord, who: &Principal) -> Result<Bound> {
        let e2b = record.e2b.clone();
        let lifetime = e2b.as_ref().map(|e2b| e2b.lifetime()).unwrap_or_default();
        let spec = spawn::SpawnSpec {
            tag: record.tag().to_owned(),
            // A snapshot of another owner may have the tag by now.
            who: who.clone(),
            owner: record.owner.clone(),
            n: 1,
            wait: true,
            network: record.network,
            memory_limit_mib: record.memory_limit_mib,
            envs: e2b.as_ref().map(|e2b| e2b.variables(&record.name)).unwrap_or_default(),
            workspace: Some(record.name.clone()),
            time_to_live: e2b.as_ref().map(|e2b| Duration::from_secs(e2b.timeout_secs)),
            lifetime: Lifetime { request: record.request.clone(), ..lifetime },
            arrived: Instant::now(),
            id: e2b.is_some().then(|| record.name.clone()),
            e2b,
        };
        let mut spawned = start_children(&self.registry, &self.snapshots, spec).await?;
        let error = spawned.errors.pop().map(|(_, error)| error);
        let bound = spawned.children.pop();
        bound
            .ok_or_else(|| error.unwrap_or_else(|| Error::host("cannot fork", "the spawn returned no child")))
    }

    /// Resumes a workspace: forks a sandbox from its last state.
    pub(crate) async fn resume(&self, name: &str, who: &Principal) -> Result<(WorkspaceRecord, Status)> {
        let (workspace, _turn) = self.lock_exclusive(name).await?;
        self.check_owner(name, who)?;
        let mut record = self.usable(name, &workspace)?;
        if let Some(state) = &mut record.e2b {
            state.timeout_secs = state.resume_secs();
        }
        if let Some(sandbox) = self.live(&record) {
            let text = format!("workspace {name} is running already, in sandbox {}", sandbox.id);
            return Err(Error::new(Code::WorkspaceRunning, text));
        }
        self.start_again(&workspace, record, who).await
    }

    /// Forks the next sandbox of a workspace that has none.
    async fn start_again(
        &self,
        workspace: &Workspace,
        record: WorkspaceRecord,
        who: &Principal,
    ) -> Result<(WorkspaceRecord, Status)> {
        // What is left of the earlier sandbox, which ended by itself. The next one may have its id.
        if let Some(lost) = &record.live_sandbox_id {
            let _ = self.registry.delete(lost);
        }
        let name = record.name.clone();
        let resumed = self.start(workspace, record, who).await?;
        self.emit(EventKind::WorkspaceResumed, &resumed.0);
        self.sweep_retired(&name, workspace).await;
        Ok(resumed)
    }

    /// Ends a workspace's sandbox and removes its states. Snapshots that were built on them are not touched.
    pub(crate) async fn delete(&self, name: &str) -> Result<()> {
        let (workspace, _turn) = self.lock_exclusive(name).await?;
        self.delete_locked(name, &workspace, None).await
    }

    /// Deletes a workspace however long the change takes that is under way. Nothing to do if there is no workspace.
    pub(crate) async fn delete_patiently(&self, name: &str) -> Result<()> {
        loop {
            let Ok(workspace) = self.get(name) else { return Ok(()) };
            let _turn = workspace.turn.clone().lock_owned().await;
            if self.get(name).is_ok_and(|now| Arc::ptr_eq(&now, &workspace)) {
                return self.delete_locked(name, &workspace, None).await;
            }
        }
    }

    async fn delete_locked(&self, name: &str, workspace: &Workspace, end: Option<End>) -> Result<()> {
        let mut owner = None;
        if let WorkspaceState::Kept(record) = workspace.state() {
            owner = Some(record.owner.clone());
            // First of all: if this daemon is killed, the next one finishes the deletion.
            let record = WorkspaceRecord { deleted: true, ..*record };
            self.keep(workspace, record.clone()).await?;
            if let Some(id) = &record.live_sandbox_id {
                match (self.registry.get(id), end) {
                    (Ok(sandbox), Some(end)) => self.registry.end(&sandbox, end),
                    _ => drop(self.registry.delete(id)),
                }
            }
            for tag in record.retired.iter().chain(&record.current_state_tag) {
                self.remove_snapshot(tag, &record.owner).await?;
            }
        }
        let (folder, file) = (self.folder.clone(), name.to_owned());
        blocking("deleting a workspace", move || {
            folder.remove(&file).map_err(|error| {
                Error::host(format!("cannot remove {}", folder.path(&file).display()), error)
            })
        })
        .await?;
        self.all.lock().remove(name);
        let about = EventSubject { workspace: Some(name.to_owned()), owner, ..EventSubject::default() };
        self.registry.host.telemetry.events.emit(EventKind::WorkspaceRemoved, about);
        Ok(())
    }

    fn emit(&self, kind: EventKind, record: &WorkspaceRecord) {
        let about = EventSubject {
            workspace: Some(record.name.clone()),
            sandbox: record.live_sandbox_id.clone(),
            snapshot: Some(record.tag().to_owned()),
            owner: Some(record.owner.clone()),
            ..EventSubject::default()
        };
        self.registry.host.telemetry.events.emit(kind, about);
    }

    /// The right to change the workspace, for as long as the returned guard lives.
    async fn lock_exclusive(&self, name: &str) -> Result<(Arc<Workspace>, OwnedMutexGuard<()>)> {
        let busy = || {
            let text = format!("workspace {name} is being made, suspended, resumed or deleted; try again");
            Error::new(Code::WorkspaceBusy, text)
        };
        let workspace = self.get(name)?;
        let patience = self.registry.host.config.timing.call;
        let turn = tokio::time::timeout(patience, workspace.turn.clone().lock_owned()).await;
        let turn = turn.map_err(|_| busy())?;
        // The request that had the turn before may have deleted it, and another request made a new one.
        if matches!(workspace.state(), WorkspaceState::CreateJob)
            || !Arc::ptr_eq(&self.get(name)?, &workspace)
        {
            return Err(busy());
        }
        Ok((workspace, turn))
    }

    fn usable(&self, name: &str, workspace: &Workspace) -> Result<WorkspaceRecord> {
        let record = self.record_of(name, workspace)?;
        match record.deleted {
            true => {
                let text = format!("workspace {name} is half deleted; delete it again");
                Err(Error::new(Code::WorkspaceUnusable, text))
            }
            false => Ok(record),
        }
    }

    /// Writes a record with the deadline of now to disk, and only then sets it in memory.
    async fn keep(&self, workspace: &Workspace, record: WorkspaceRecord) -> Result<()> {
        let _writing = workspace.writing.lock().await;
        let kill_at_unix = self.kill_at(&record);
        self.write(workspace, WorkspaceRecord { kill_at_unix, ..record }).await
    }

    /// The same for a caller that holds `writing`, with the deadline as it is in the record.
    async fn write(&self, workspace: &Workspace, record: WorkspaceRecord) -> Result<()> {
        let (folder, written) = (self.folder.clone(), record.clone());
        blocking("writing a workspace's file", move || {
            folder.write(&written).map_err(|error| {
                Error::host(format!("cannot write {}", folder.path(&written.name).display()), error)
            })
        })
        .await?;
        *workspace.state.lock() = WorkspaceState::Kept(Box::new(record));
        Ok(())
    }
}
