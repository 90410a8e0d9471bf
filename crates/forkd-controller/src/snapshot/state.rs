//! The states of a snapshot ([`SnapshotState`]): the one place where they change, and where each change becomes an
//! event.
//!
//! ```text
//!                 the guest is warm, frozen and saved
//!   Creating ──────────────────────────────────────────────────► Ready
//!      │                                                           ▲
//!      │            the source is forked          the saver is done│
//!      │  Branching ─────────────────────► Saving ─────────────────┤
//!      │      │                               │                    │
//!      ▼      ▼                               ▼                    └──► Left, when the daemon stops
//!    Failed ◄─┴───────────────────────────────┘
//!
//!   Unknown: the daemon cannot read the record of the template; it can only be removed.
//! ```
//!
//! | state | means | children can be forked | template's record | API |
//! |---|---|---|---|---|
//! | `Creating` | a guest boots and warms up | no | none yet | `writing` |
//! | `Branching` | the branch waits for its turn, or its source is being forked | no | `unsaved`, right after the fork | `writing` |
//! | `Saving` | a saver writes the snapshot, or the disk has no space for it | yes, while there is a template | `unsaved` | `writing` |
//! | `Left` | the daemon stops; the next one saves the branch | as while `Saving` | `unsaved` | `writing` |
//! | `Ready` | the snapshot is on disk | yes | `saved` | `ready` |
//! | `Failed` | the job failed, or the snapshot on disk cannot be used | while there is a template | `unsaved` | `failed` |
//! | `Unknown` | a template runs whose record cannot be read | no | left as it is | `unknown` |
//!
//! A snapshot begins as `Creating` (a client asks for a new one), `Branching` (a branch) or `Saving` (a compact job, which
//! uses the template of another snapshot). A starting daemon finds `Ready` and `Failed` snapshots on disk, `Unknown`
//! templates, and templates of branches that are not on disk, which begin as `Saving`.
//!
//! A failed job leaves an entry only if its memory can still be of use: see `SnapshotRegistry::discard`. When an entry
//! lets go of the template of an unsaved branch, the template's record becomes `forgotten`.
//!
//! From a snapshot of disks alone no child is ever forked: its template only writes it, and ends when it is `Ready`.

use std::io;
use std::sync::Arc;

use forkd_api::{EventKind, EventSubject};
use forkd_protocol::names::is_valid_sandbox_id;
use forkd_store::Snapshot;

use crate::error::{Code, Error, Result};
use crate::snapshot::branch_job::{BranchJob, Disposition, Mode};
use crate::snapshot::create::CreateJob;
use crate::snapshot::entry::Entry;
use crate::snapshot::template::{PersistState, Template};
use crate::snapshot::unknown::{self, UnknownTemplate};

/// The state of a snapshot. The module's page draws the changes between them.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotState {
    Creating(Arc<CreateJob>),
    Branching(Arc<BranchJob>),
    Saving(Arc<BranchJob>),
    Left(Arc<BranchJob>),
    Ready(Box<Snapshot>),
    /// Without a job, the snapshot on disk cannot be used.
    Failed {
        error: Error,
        job: Option<SnapshotJob>,
    },
    Unknown(Arc<UnknownTemplate>),
}

/// The job that makes a snapshot.
#[derive(Debug, Clone)]
pub(crate) enum SnapshotJob {
    /// Boots a guest and warms it up.
    Create(Arc<CreateJob>),
    /// Branches a sandbox, or compacts a snapshot.
    Branch(Arc<BranchJob>),
}

impl SnapshotJob {
    /// The memory of the snapshot's guest, in MiB.
    pub(crate) fn mem_mib(&self) -> u64 {
        match self {
            SnapshotJob::Create(job) => job.order.mem_mib,
            SnapshotJob::Branch(job) => job.guest.mem_size_mib,
        }
    }

    fn cancel(&self) {
        match self {
            SnapshotJob::Create(job) => job.cancel(),
            SnapshotJob::Branch(job) => job.set_disposition(Disposition::Cancel),
        }
    }

    /// Leaves a branch to the next daemon, and cancels any other job.
    fn leave(&self) {
        match self {
            SnapshotJob::Create(job) => job.cancel(),
            SnapshotJob::Branch(job) => job.set_disposition(Disposition::Leave),
        }
    }
}

impl SnapshotState {
    /// The arrows of the diagram.
    fn may_become(&self, next: &SnapshotState) -> bool {
        use SnapshotState::{Branching, Creating, Failed, Left, Ready, Saving};
        matches!(
            (self, next),
            (Creating(_), Ready(_) | Failed { .. })
                | (Branching(_), Saving(_) | Failed { .. })
                | (Saving(_), Ready(_) | Failed { .. } | Left(_))
        )
    }

    /// The job of a snapshot that is not on disk.
    pub(crate) fn job(&self) -> Option<SnapshotJob> {
        match self {
            SnapshotState::Creating(job) => Some(SnapshotJob::Create(job.clone())),
            SnapshotState::Branching(job) | SnapshotState::Saving(job) | SnapshotState::Left(job) => {
                Some(SnapshotJob::Branch(job.clone()))
            }
            SnapshotState::Failed { job, .. } => job.clone(),
            SnapshotState::Ready(_) | SnapshotState::Unknown(_) => None,
        }
    }

    /// The branch or compact job of a snapshot that is not on disk.
    pub(crate) fn branch(&self) -> Option<Arc<BranchJob>> {
        match self.job() {
            Some(SnapshotJob::Branch(job)) => Some(job),
            Some(SnapshotJob::Create(_)) | None => None,
        }
    }

    /// Whether the job has neither failed nor finished. A branch that is left to the next daemon counts.
    pub(crate) fn is_being_made(&self) -> bool {
        !matches!(self, SnapshotState::Ready(_) | SnapshotState::Failed { .. } | SnapshotState::Unknown(_))
    }

    /// Whether this daemon still works on the snapshot.
    fn has_running_job(&self) -> bool {
        self.is_being_made() && !matches!(self, SnapshotState::Left(_))
    }

    /// Why the job did not make the snapshot, or why the snapshot on disk cannot be used.
    fn error(&self) -> Option<Error> {
        match self {
            SnapshotState::Failed { error, .. } => Some(error.clone()),
            SnapshotState::Left(_) => {
                let text = "the daemon is stopping; the next one finishes the branch";
                Some(Error::new(Code::ShuttingDown, text))
            }
            _ => None,
        }
    }

    /// What the record of the snapshot's template says; none if the record does not change. `is_kept`: whether the
    /// entry wants the template.
    fn record(&self, owner: String, is_kept: bool) -> Option<PersistState> {
        if let SnapshotState::Ready(snapshot) = self {
            // Such a record changes no more: the next daemon compares the id with that of the snapshot on disk.
            return is_kept.then(|| PersistState::Saved(snapshot.id().to_owned()));
        }
        let job = self.branch()?;
        Some(match is_kept {
            true => PersistState::Unsaved(Box::new(job.record(owner))),
            false => PersistState::Forgotten,
        })
    }

    /// Writes the record of `template`, by which the next daemon takes it over. No other code writes the record of a
    /// snapshot's template; `branch::fork` writes that of a fork.
    pub(crate) fn write_record(&self, template: &Template, owner: String, is_kept: bool) -> io::Result<()> {
        self.record(owner, is_kept).map_or(Ok(()), |record| template.record(record))
    }
}

impl Entry {
    pub(crate) fn state(&self) -> SnapshotState {
        self.state.borrow().clone()
    }

    /// The source is forked, and the template is set: the state becomes `Saving`.
    pub(crate) fn saving(&self) {
        self.change(|state| state.branch().map(SnapshotState::Saving));
    }

    /// The snapshot is on disk: the state becomes `Ready`.
    pub(crate) fn ready(&self, snapshot: Snapshot) {
        let ready = SnapshotState::Ready(Box::new(snapshot));
        if !self.state.borrow().may_become(&ready) {
            return;
        }
        // Before a client learns of it: the next daemon must not save the branch again.
        if let Some(template) = &*self.current.lock()
            && let Err(error) = ready.write_record(template, self.owner(), true)
        {
            tracing::warn!(tag = self.tag, %error, "template record not updated: snapshot is on disk");
        }
        if self.is_disk_only() {
            self.unload();
        }
        self.change(|_| Some(ready));
    }

    /// The job failed: the state becomes `Failed`.
    pub(crate) fn fail(&self, error: Error) {
        self.change(|state| Some(SnapshotState::Failed { error, job: state.job() }));
    }

    /// The daemon stops before the branch is on disk: the state becomes `Left`.
    pub(crate) fn leave_to_next_daemon(&self) {
        self.change(|state| state.branch().map(SnapshotState::Left));
    }

    /// Changes the state, if the diagram has that change, and emits its event.
    fn change(&self, next: impl FnOnce(&SnapshotState) -> Option<SnapshotState>) {
        self.state.send_if_modified(|state| {
            let next = next(state).filter(|next| state.may_become(next));
            let Some(next) = next else { return false };
            let old = std::mem::replace(state, next);
            let about = self.about(&old);
            // While the state is locked: events come in the order of the changes.
            match state {
                SnapshotState::Ready(_) => self.emit(EventKind::SnapshotReady, about),
                SnapshotState::Failed { error, .. } => {
                    let detail = Some(error.public().into_owned());
                    self.emit(EventKind::SnapshotFailed, EventSubject { detail, ..about });
                }
                // The client sees both as `writing`.
                SnapshotState::Saving(_) | SnapshotState::Left(_) => {}
                SnapshotState::Creating(_) | SnapshotState::Branching(_) | SnapshotState::Unknown(_) => {}
            }
            true
        });
    }

    /// Emits the event of its creation.
    pub(crate) fn created(&self) {
        self.emit(EventKind::SnapshotWriting, self.about(&self.state()));
    }

    /// Emits the event of its removal.
    pub(crate) fn removed(&self) {
        self.emit(EventKind::SnapshotRemoved, self.about(&self.state()));
    }

    fn emit(&self, kind: EventKind, about: EventSubject) {
        self.telemetry.events.emit(kind, about);
    }

    /// The subject of events about the snapshot: its tag, its owner and the sandbox it is being branched from.
    fn about(&self, state: &SnapshotState) -> EventSubject {
        let sandbox = state.branch().map(|job| job.source.clone());
        let sandbox = sandbox.filter(|source| is_valid_sandbox_id(source));
        let (snapshot, owner) = (Some(self.tag.clone()), Some(self.owner()));
        EventSubject { snapshot, sandbox, owner, ..EventSubject::default() }
    }

    /// Returns when children can be forked from the snapshot; its error if the job ended without that.
    pub(crate) async fn wait_forkable(&self) -> Result<()> {
        self.reached(|state| !matches!(state, SnapshotState::Creating(_) | SnapshotState::Branching(_))).await
    }

    /// Returns when the job is over; its error if the snapshot is not on disk.
    pub(crate) async fn wait_done(&self) -> Result<()> {
        self.reached(|state| !state.has_running_job()).await
    }

    async fn reached(&self, is_there: impl FnMut(&SnapshotState) -> bool) -> Result<()> {
        let mut states = self.state.subscribe();
        // An error would mean that the sender is gone; `self` holds it.
        let error = states.wait_for(is_there).await.ok().and_then(|state| state.error());
        error.map_or(Ok(()), Err)
    }

    /// Returns when the job is over, or waits for disk space.
    pub(crate) async fn wait_done_or_short_of_space(&self) {
        let Some(job) = self.branch() else { return };
        tokio::select! {
            _ = self.wait_done() => {}
            () = job.short_of_space() => {}
        }
    }

    /// Cancels the job, if there is one, and returns when it is over.
    pub(crate) async fn cancel(&self) {
        self.end_job(SnapshotJob::cancel).await;
    }

    /// The daemon stops: leaves a branch to the next daemon, cancels any other job, and returns when it is over.
    pub(crate) async fn stop_job(&self) {
        self.end_job(SnapshotJob::leave).await;
    }

    async fn end_job(&self, end: impl FnOnce(&SnapshotJob)) {
        let state = self.state();
        if let Some(job) = state.job().filter(|_| state.has_running_job()) {
            end(&job);
            let _ = self.wait_done().await;
        }
    }

    /// The branch or compact job of the snapshot, while it runs or if it failed.
    pub(crate) fn branch(&self) -> Option<Arc<BranchJob>> {
        self.state.borrow().branch()
    }

    /// Whether the snapshot has disks alone, or will have once it is written.
    pub(crate) fn is_disk_only(&self) -> bool {
        match self.state() {
            SnapshotState::Ready(snapshot) => snapshot.is_disk_only(),
            state => state.branch().is_some_and(|job| job.mode == Mode::Disk),
        }
    }

    /// The snapshot on disk, or why it cannot be used.
    pub(crate) fn snapshot(&self) -> Result<Snapshot> {
        match self.state() {
            SnapshotState::Ready(snapshot) => Ok(*snapshot),
            SnapshotState::Failed { error, job: Some(_) } => {
                let text = format!("snapshot {} was not finished; make it again", self.tag);
                Err(error.within(Code::SnapshotFailed, text))
            }
            SnapshotState::Failed { error, job: None } => Err(error),
            SnapshotState::Unknown(template) => {
                let what = format!("snapshot {}", self.tag);
                Err(unknown::refused(&what, &template.why, &self.remove_command()))
            }
            SnapshotState::Creating(_)
            | SnapshotState::Branching(_)
            | SnapshotState::Saving(_)
            | SnapshotState::Left(_) => {
                let text = format!("snapshot {} is still being made; try again later", self.tag);
                Err(Error::new(Code::SnapshotNotReady, text))
            }
        }
    }
}

#[cfg(test)]
mod tests;
