//! One snapshot: where it stands, how it comes to be, and its template.

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

/// One snapshot.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) tag: String,
    owner: Mutex<String>,
    state: Mutex<SnapshotState>,
    pub(crate) current: Mutex<Option<Arc<Template>>>,
    /// When a template was last asked for, or came to be.
    used: Mutex<Instant>,
    /// Held by whoever starts a template: one at a time.
    pub(crate) starting: tokio::sync::Mutex<()>,
    telemetry: Arc<Telemetry>,
}

/// Where a snapshot stands.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotState {
    Writing(SnapshotJob),
    Ready(Box<Snapshot>),
    /// It cannot be used, or was never finished: why.
    Failed {
        error: Error,
        work: Option<SnapshotJob>,
    },
    /// It is a template whose record cannot be read. Nothing is known of what is on disk.
    Unknown(Arc<UnknownTemplate>),
}

/// How a snapshot comes to be.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotJob {
    /// A guest is booted and warmed up.
    CreateJob(Arc<CreateJob>),
    /// A sandbox is branched, or a snapshot compacted.
    Branch(Arc<Branch>),
}

impl SnapshotJob {
    /// The memory of the guest it is made of.
    pub(crate) fn mem_mib(&self) -> u64 {
        match self {
            SnapshotJob::CreateJob(making) => making.order.mem_mib,
            SnapshotJob::Branch(branch) => branch.guest.mem_size_mib,
        }
    }

    /// Nobody wants it any more: returns when it is over.
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

/// A snapshot that is being made.
#[derive(Debug)]
pub(crate) struct CreateJob {
    pub(crate) order: crate::snapshot::create::SnapshotSpec,
    pub(crate) begun_at_unix: u64,
    pub(crate) phase: watch::Sender<crate::snapshot::create::CreatePhase>,
    pub(crate) cancelled: watch::Sender<bool>,
    pub(crate) done: watch::Sender<bool>,
}

impl CreateJob {
    /// Returns when somebody does not want it any more.
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

    /// Whose it is.
    pub(crate) fn owner(&self) -> String {
        self.owner.lock().clone()
    }

    /// Makes it somebody's; whose it was.
    pub(crate) fn set_owner(&self, owner: &str) -> String {
        std::mem::replace(&mut *self.owner.lock(), owner.to_owned())
    }

    /// What events say of it: its tag, and the sandbox it is being branched from.
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

    /// Its live template.
    pub(crate) fn current(&self) -> Option<Arc<Template>> {
        self.current.lock().clone().filter(|template| template.is_alive())
    }

    /// Lets go of its template: it ends with its last child.
    pub(crate) fn unload(&self) {
        self.current.lock().take();
    }

    /// The same if nobody has asked for it for so long. Whether there was one.
    pub(crate) fn unload_if_unused(&self, for_this_long: Duration) -> bool {
        if !self.is_unused(for_this_long) {
            return false;
        }
        // Whoever asks just now has it: it does not end before they are done with it.
        let unloaded = self.current.lock().take();
        unloaded.is_some()
    }

    /// Whether no client has asked for a template of it for so long.
    pub(crate) fn is_unused(&self, for_this_long: Duration) -> bool {
        self.used.lock().elapsed() >= for_this_long
    }

    /// Its live template, for children.
    pub(crate) fn use_current(&self) -> Option<Arc<Template>> {
        *self.used.lock() = Instant::now();
        self.current()
    }

    pub(crate) fn set_current(&self, template: Arc<Template>) {
        *self.used.lock() = Instant::now();
        *self.current.lock() = Some(template);
    }

    /// It is on disk.
    pub(crate) fn ready(&self, snapshot: Snapshot) {
        let about = self.about();
        *self.state.lock() = SnapshotState::Ready(Box::new(snapshot));
        self.emit(EventKind::SnapshotReady, about);
    }

    /// It could not be made.
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

    /// The branch it is while that is being written, or if that failed.
    pub(crate) fn branch(&self) -> Option<Arc<Branch>> {
        match self.state() {
            SnapshotState::Writing(SnapshotJob::Branch(branch)) => Some(branch),
            SnapshotState::Failed { work: Some(SnapshotJob::Branch(branch)), .. } => Some(branch),
            _ => None,
        }
    }

    /// What is on disk, or why there is nothing.
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

    /// Writes whose it is into the record of its template, if it is a branch that is not on disk yet.
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

    /// What removes it, for people.
    pub(crate) fn remove_command(&self) -> String {
        format!("forkd rmi {}", self.tag)
    }

    /// Lets go of its template for good: one that is not on disk will not be.
    pub(crate) fn forget(&self) {
        let Some(template) = self.current.lock().take() else { return };
        if self.branch().is_some()
            && let Err(error) = template.record(PersistState::Forgotten)
        {
            tracing::warn!(tag = self.tag, %error, "cannot record that a branch is gone");
        }
    }
}
