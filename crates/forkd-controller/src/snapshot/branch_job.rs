//! A branch job: its source, its progress, and the record by which the next daemon finishes it. The state of the
//! snapshot says how far the job is (`state`).

use std::fs::File;
use std::sync::{Arc, OnceLock};

use forkd_protocol::control::SaveProgress;
use forkd_store::{GuestSpec, Snapshot};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::error::Error;
use crate::snapshot::entry::Entry;
use crate::snapshot::template::{ForkSource, Template};

/// How a branch is stored, and what a branch request waits for by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// All of its memory and disks.
    Full,
    /// The difference to the snapshot its source came from.
    Diff,
    /// The same, and by default the client does not wait for the save.
    Live,
    /// Its disks alone, with clean file systems: a sandbox can boot on them.
    Disk,
    /// All of it, and the sandbox ends. Only this snapshot is left of the sandbox, so `gc` never removes it.
    Suspend,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Full => "full",
            Mode::Diff => "diff",
            Mode::Live => "live",
            Mode::Disk => "disk",
            Mode::Suspend => "suspend",
        }
    }

    /// Whether the branch is stored as the difference to another snapshot.
    pub(crate) fn is_difference(self) -> bool {
        matches!(self, Mode::Diff | Mode::Live)
    }
}

/// The snapshot a branch's source was forked from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BranchOrigin {
    pub(crate) tag: String,
    /// The id of the snapshot; none if it was not on disk yet.
    pub(crate) snapshot: Option<String>,
    /// The template that forked the source.
    pub(crate) template: String,
}

/// What the daemon measured when the branch was taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CaptureStats {
    /// None if the branch was not taken of a running sandbox.
    pub(crate) pause_ms: Option<f64>,
    pub(crate) frozen_ms: Option<f64>,
    pub(crate) quiesced: Option<bool>,
}

/// What the next daemon needs to finish a branch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct BranchRecord {
    pub(crate) source: String,
    pub(crate) mode: Mode,
    pub(crate) begun_at_unix: u64,
    pub(crate) origin: Option<BranchOrigin>,
    pub(crate) taken: CaptureStats,
    /// The owner's name; none in records of older daemons: the database has the owner.
    #[serde(default)]
    pub(crate) owner: Option<String>,
}

/// What the daemon wants of a branch job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disposition {
    Keep,
    /// Stop the job: the branch is to be removed.
    Cancel,
    /// The daemon stops; the next one goes on with the job.
    Leave,
}

/// A branch job, the job that compacts a snapshot, or the job of a fork, which makes a template and no snapshot.
#[derive(Debug)]
pub(crate) struct BranchJob {
    /// Empty for a fork.
    pub(crate) tag: String,
    /// The id of its template; empty for a compact job.
    pub(crate) template: String,
    /// A sandbox's id, or `compact:` and a tag.
    pub(crate) source: String,
    pub(crate) guest: GuestSpec,
    pub(crate) mode: Mode,
    pub(crate) begun_at_unix: u64,
    pub(crate) origin: Option<BranchOrigin>,
    /// Its origin, if that was not on disk when this branch was taken.
    pub(crate) parent: Option<Arc<Entry>>,
    /// Whether a client waits for the save: then the branch is removed if it cannot be stored.
    pub(crate) waited_for: bool,
    /// For a fork: its source.
    pub(crate) fork: Option<ForkSource>,
    capture: OnceLock<CaptureStats>,
    progress: Mutex<Option<File>>,
    disposition: watch::Sender<Disposition>,
    /// Why the branch is not being written now: the error of the full disk.
    shortage: watch::Sender<Option<Error>>,
}

impl BranchJob {
    pub(crate) fn new(tag: String, template: String, source: String, guest: GuestSpec, mode: Mode) -> Self {
        BranchJob {
            tag,
            template,
            source,
            guest,
            mode,
            begun_at_unix: crate::util::time::now_unix(),
            origin: None,
            parent: None,
            waited_for: false,
            fork: None,
            capture: OnceLock::new(),
            progress: Mutex::default(),
            disposition: watch::Sender::new(Disposition::Keep),
            shortage: watch::Sender::new(None),
        }
    }

    /// Adds the origin of its source, and whether a client waits for the save.
    pub(crate) fn from(
        self,
        origin: Option<BranchOrigin>,
        parent: Option<Arc<Entry>>,
        waited_for: bool,
    ) -> Self {
        BranchJob { origin, parent, waited_for, ..self }
    }

    /// The job of a fork.
    pub(crate) fn forking(template: String, source: ForkSource, guest: GuestSpec) -> Self {
        let job = BranchJob::new(String::new(), template, source.sandbox.clone(), guest, Mode::Full);
        BranchJob { fork: Some(source), ..job }
    }

    /// The name of the job in traces and in lists of pauses.
    pub(crate) fn name(&self) -> &'static str {
        match self.fork {
            Some(_) => "fork",
            None => "branch",
        }
    }

    /// The job that stores all of `snapshot` in full as `to`.
    pub(crate) fn compacting(snapshot: &Snapshot, to: &str) -> Self {
        let (tag, guest) = (snapshot.tag().to_owned(), snapshot.manifest().guest.clone());
        let source = format!("compact:{tag}");
        let branch = BranchJob::new(to.to_owned(), String::new(), source, guest, Mode::Full);
        let origin = BranchOrigin { tag, snapshot: Some(snapshot.id().to_owned()), template: String::new() };
        BranchJob { origin: Some(origin), waited_for: true, ..branch }
    }

    /// The job of a branch that an earlier daemon took.
    pub(crate) fn adopted(template: &Template, record: BranchRecord, parent: Option<Arc<Entry>>) -> Self {
        let about = &template.about;
        let branch = BranchJob::new(
            about.tag.clone(),
            template.id.clone(),
            record.source.clone(),
            about.guest.clone(),
            record.mode,
        );
        branch.set_capture_stats(record.taken);
        let BranchRecord { begun_at_unix, origin, .. } = record;
        BranchJob { begun_at_unix, origin, parent, ..branch }
    }

    /// The record for the next daemon.
    pub(crate) fn record(&self, owner: String) -> BranchRecord {
        BranchRecord {
            source: self.source.clone(),
            mode: self.mode,
            begun_at_unix: self.begun_at_unix,
            origin: self.origin.clone(),
            taken: self.capture_stats(),
            owner: Some(owner),
        }
    }

    /// Sets what was measured when the branch was forked.
    pub(crate) fn set_capture_stats(&self, stats: CaptureStats) {
        let _ = self.capture.set(stats);
    }

    /// What was measured; empty before the branch is taken.
    pub(crate) fn capture_stats(&self) -> CaptureStats {
        self.capture.get().cloned().unwrap_or_default()
    }

    pub(crate) fn set_disposition(&self, disposition: Disposition) {
        self.disposition.send_replace(disposition);
    }

    /// What the daemon wants of the job now.
    pub(crate) fn disposition(&self) -> Disposition {
        *self.disposition.borrow()
    }

    /// Returns when the disposition is no longer [`Disposition::Keep`], with the new one.
    pub(crate) async fn disposition_changed(&self) -> Disposition {
        let mut dispositions = self.disposition.subscribe();
        let changed = dispositions.wait_for(|now| *now != Disposition::Keep).await.map(|now| *now);
        changed.unwrap_or(Disposition::Leave)
    }

    /// Sets why the branch waits for disk space; none if it waits no longer.
    pub(crate) fn set_shortage(&self, shortage: Option<Error>) {
        self.shortage.send_replace(shortage);
    }

    /// Why the branch waits for disk space, if it does.
    pub(crate) fn shortage(&self) -> Option<Error> {
        self.shortage.borrow().clone()
    }

    /// Returns when the branch waits for disk space.
    pub(crate) async fn short_of_space(&self) {
        let _ = self.shortage.subscribe().wait_for(Option::is_some).await;
    }

    /// Sets the file into which the saver writes its progress.
    pub(crate) fn watch_progress(&self, file: File) {
        *self.progress.lock() = Some(file);
    }

    /// The progress of the saver, if there is one.
    pub(crate) fn progress(&self) -> Option<SaveProgress> {
        let file = self.progress.lock();
        let mut bytes = [0; SaveProgress::LENGTH];
        std::os::unix::fs::FileExt::read_exact_at(file.as_ref()?, &mut bytes, 0).ok()?;
        Some(SaveProgress::from_bytes(bytes))
    }
}
