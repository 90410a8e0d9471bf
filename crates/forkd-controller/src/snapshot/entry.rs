//! One snapshot: its state, the job that makes it, and its template.
//!
//! ```text
//! SnapshotRegistry::reserve                 Entry::ready
//! ------------------------> Writing(job) -----------------> Ready    the snapshot is on disk
//!                                |
//!                                | Entry::failed
//!                                v
//!                       Failed { work: Some(job) }    nothing is on disk; the tag may be used again
//!
//! a starting daemon finds                            and the entry begins as
//!   a snapshot on disk                               Ready
//!   a snapshot on disk that cannot be used           Failed { work: None }
//!   a running template of a branch not on disk yet   Writing(job), Stage::Saving
//!   a template whose record cannot be read           Unknown, until a client removes it
//!
//! stages of a branch job   Branching -----> Saving ------> Done
//! state of its entry       Writing          Writing        Ready | Failed | removed | Writing
//! children can be forked   no               yes            yes, while there is a template or a snapshot on disk
//! ```
//!
//! A branch that waits for disk space stays in `Saving`. After `Done` the entry is removed if the branch was never
//! taken, or if its client waits for the save and the save failed. The entry stays `Writing` if the daemon stops
//! before the save ends: the next daemon goes on. A compact job has no `Saving` stage: its template is that of
//! the snapshot it compacts.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::{EventKind, EventSubject};
use forkd_protocol::names::is_valid_sandbox_id;
use forkd_store::Snapshot;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::error::{Code, Error, Result};
use crate::snapshot::branch_job::{Branch, Disposition, Stage};
use crate::snapshot::template::{PersistState, Template};
use crate::snapshot::unknown::{self, UnknownTemplate};
use crate::telemetry::Telemetry;

/// One snapshot in the registry. The module's page draws its states.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) tag: String,
    owner: Mutex<String>,
    state: Mutex<SnapshotState>,
    pub(crate) current: Mutex<Option<Arc<Template>>>,
    /// When a client last asked for the template, or when the template was set.
    used: Mutex<Instant>,
    /// Held while a template is started from disk: one start at a time.
    pub(crate) starting: tokio::sync::Mutex<()>,
    telemetry: Arc<Telemetry>,
}

/// The state of a snapshot. The module's page draws the changes between them.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotState {
    Writing(SnapshotJob),
    Ready(Box<Snapshot>),
    /// The snapshot on disk cannot be used, or, with `work`, the job did not finish it. `error` is the reason.
    Failed {
        error: Error,
        work: Option<SnapshotJob>,
    },
    /// A template runs whose record cannot be read. Whether the snapshot is on disk is unknown.
    Unknown(Arc<UnknownTemplate>),
}

/// The job that makes a snapshot.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotJob {
    /// Boots a guest and warms it up.
    CreateJob(Arc<CreateJob>),
    /// Branches a sandbox, or compacts a snapshot.
    Branch(Arc<Branch>),
}

impl SnapshotJob {
    /// The memory of the snapshot's guest, in MiB.
    pub(crate) fn mem_mib(&self) -> u64 {
        match self {
            SnapshotJob::CreateJob(making) => making.order.mem_mib,
            SnapshotJob::Branch(branch) => branch.guest.mem_size_mib,
        }
    }

    /// Cancels the job and returns when it is over.
    pub(crate) async fn cancel(&self) {
        match self {
            SnapshotJob::CreateJob(making) => {
                making.cancelled.send_replace(true);
                let _ = making.done.subscribe().wait_for(|done| *done).await;
            }
            SnapshotJob::Branch(branch) => {
                branch.set_desired(Disposition::Cancel);
                let _ = branch.reached(Stage::Done).await;
            }
        }
    }
}

/// The job that boots a guest and makes a snapshot of it.
#[derive(Debug)]
pub(crate) struct CreateJob {
    pub(crate) order: crate::snapshot::create::SnapshotSpec,
    pub(crate) begun_at_unix: u64,
    pub(crate) phase: watch::Sender<crate::snapshot::create::CreatePhase>,
    pub(crate) cancelled: watch::Sender<bool>,
    pub(crate) done: watch::Sender<bool>,
}

impl CreateJob {
    /// Returns when the job is cancelled.
    pub(crate) async fn cancelled(&self) {
        let _ = self.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}

impl Entry {
    pub(crate) fn new(tag: &str, owner: &str, state: SnapshotState, telemetry: Arc<Telemetry>) -> Arc<Self> {
        let (state, current, starting) = (Mutex::new(state), Mutex::default(), Default::default());
        let (owner, used) = (Mutex::new(owner.to_owned()), Mutex::new(Instant::now()));
        Arc::new(Entry { tag: tag.to_owned(), owner, state, current, used, starting, telemetry })
    }

    /// The name of the snapshot's owner.
    pub(crate) fn owner(&self) -> String {
        self.owner.lock().clone()
    }

    /// Changes the owner and returns the previous one.
    pub(crate) fn set_owner(&self, owner: &str) -> String {
        std::mem::replace(&mut *self.owner.lock(), owner.to_owned())
    }

    /// The subject of events about the snapshot: its tag, its owner and the sandbox it is being branched from.
    pub(crate) fn about(&self) -> EventSubject {
        let sandbox = self.branch().map(|branch| branch.source.clone());
        let sandbox = sandbox.filter(|source| is_valid_sandbox_id(source));
        EventSubject {
            snapshot: Some(self.tag.clone()),
            sandbox,
            owner: Some(self.owner()),
            ..EventSubject::default()
        }
    }

    pub(crate) fn emit(&self, kind: EventKind, about: EventSubject) {
        self.telemetry.events.emit(kind, about);
    }

    pub(crate) fn state(&self) -> SnapshotState {
        self.state.lock().clone()
    }

    /// The snapshot's template, if its process is alive.
    pub(crate) fn current(&self) -> Option<Arc<Template>> {
        self.current.lock().clone().filter(|template| template.is_alive())
    }

    /// Drops the handle on the template. The template ends with its last child.
    pub(crate) fn unload(&self) {
        self.current.lock().take();
    }

    /// Unloads the template if it is unused for `for_this_long`. Returns whether there was one.
    pub(crate) fn unload_if_unused(&self, for_this_long: Duration) -> bool {
        if !self.is_unused(for_this_long) {
            return false;
        }
        // Whoever asks just now has it: it does not end before they are done with it.
        let unloaded = self.current.lock().take();
        unloaded.is_some()
    }

    /// Whether no client has asked for the template for `for_this_long`.
    pub(crate) fn is_unused(&self, for_this_long: Duration) -> bool {
        self.used.lock().elapsed() >= for_this_long
    }

    /// The live template, to fork children from. Counts as a use.
    pub(crate) fn use_current(&self) -> Option<Arc<Template>> {
        *self.used.lock() = Instant::now();
        self.current()
    }

    pub(crate) fn set_current(&self, template: Arc<Template>) {
        *self.used.lock() = Instant::now();
        *self.current.lock() = Some(template);
    }

    /// The snapshot is on disk: the state becomes `Ready`.
    pub(crate) fn ready(&self, snapshot: Snapshot) {
        let about = self.about();
        *self.state.lock() = SnapshotState::Ready(Box::new(snapshot));
        self.emit(EventKind::SnapshotReady, about);
    }

    /// The job failed: the state becomes `Failed`, if it is `Writing`.
    pub(crate) fn failed(&self, error: Error) {
        let why = error.public().into_owned();
        {
            let mut state = self.state.lock();
            let SnapshotState::Writing(work) = &*state else { return };
            let work = Some(work.clone());
            *state = SnapshotState::Failed { error, work };
        }
        self.emit(EventKind::SnapshotFailed, EventSubject { detail: Some(why), ..self.about() });
    }

    /// The branch job of the snapshot, while it runs or if it failed.
    pub(crate) fn branch(&self) -> Option<Arc<Branch>> {
        match self.state() {
            SnapshotState::Writing(SnapshotJob::Branch(branch)) => Some(branch),
            SnapshotState::Failed { work: Some(SnapshotJob::Branch(branch)), .. } => Some(branch),
            _ => None,
        }
    }

    /// The snapshot on disk, or why it cannot be used.
    pub(crate) fn snapshot(&self) -> Result<Snapshot> {
        match self.state() {
            SnapshotState::Ready(snapshot) => Ok(*snapshot),
            SnapshotState::Writing(_) => {
                let text = format!("snapshot {} is still being made; try again later", self.tag);
                Err(Error::new(Code::SnapshotNotReady, text))
            }
            SnapshotState::Failed { error, work: Some(_) } => {
                let text = format!("snapshot {} was not finished; make it again", self.tag);
                Err(error.within(Code::SnapshotFailed, text))
            }
            SnapshotState::Failed { error, work: None } => Err(error),
            SnapshotState::Unknown(template) => {
                let what = format!("snapshot {}", self.tag);
                Err(unknown::refused(&what, &template.why, &self.remove_command()))
            }
        }
    }

    /// Writes the owner into the template's record, if the snapshot is a branch that is not on disk yet.
    pub(crate) fn record_owner(&self) -> std::io::Result<()> {
        // Held meanwhile: what is forgotten is not recorded as wanted again.
        let current = self.current.lock();
        let (Some(template), SnapshotState::Writing(SnapshotJob::Branch(branch))) = (&*current, self.state())
        else {
            return Ok(());
        };
        let record =
            crate::snapshot::branch_job::BranchRecord { owner: Some(self.owner()), ..branch.record() };
        template.record(PersistState::Unsaved(Box::new(record)))
    }

    /// The command that removes the snapshot, for error texts.
    pub(crate) fn remove_command(&self) -> String {
        format!("forkd rmi {}", self.tag)
    }

    /// Drops the handle on the template for good: the next daemon does not save a branch that is not on disk.
    pub(crate) fn forget(&self) {
        let Some(template) = self.current.lock().take() else { return };
        if self.branch().is_some()
            && let Err(error) = template.record(PersistState::Forgotten)
        {
            tracing::warn!(tag = self.tag, %error, "template record not updated: branch is removed");
        }
    }
}
