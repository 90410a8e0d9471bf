//! A branch on its way to disk: what it is of, how far it is, and what the next daemon needs to finish it.

use std::fs::File;
use std::sync::{Arc, OnceLock};

use forkd_protocol::control::SaveProgress;
use forkd_store::{GuestSpec, Snapshot};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::error::{Error, Result};
use crate::snapshot::template::Template;

/// How a branch is stored, and what a request for it waits for by default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Mode {
    /// All of it.
    Full,
    /// What differs from the snapshot its source came from.
    Diff,
    /// The same, and nobody needs to wait for it.
    Live,
    /// All of it, and the sandbox ends: it is all that is left of that, and is not removed as an old branch.
    Suspend,
}

impl Mode {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Mode::Full => "full",
            Mode::Diff => "diff",
            Mode::Live => "live",
            Mode::Suspend => "suspend",
        }
    }

    /// Whether it is stored as the difference to another snapshot.
    pub(crate) fn is_difference(self) -> bool {
        matches!(self, Mode::Diff | Mode::Live)
    }
}

/// The snapshot a branch's source was forked from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct BranchOrigin {
    pub(crate) tag: String,
    /// Its id; none if it was not on disk yet.
    pub(crate) snapshot: Option<String>,
    /// The template that forked the source.
    pub(crate) template: String,
}

/// What was measured when it was taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct CaptureStats {
    /// None for what was not taken of a running sandbox.
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
    /// Whose it is; none if the database says so.
    #[serde(default)]
    pub(crate) owner: Option<String>,
}

/// How far a branch is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
pub(crate) enum Stage {
    /// It is being forked.
    Branching,
    /// It can be forked from, and is being written.
    Saving,
    /// It is on disk, or failed, or is left to the next daemon.
    Done,
}

/// What is to become of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Disposition {
    Keep,
    /// Nobody wants it.
    Cancel,
    /// The daemon stops; the next one goes on.
    Leave,
}

/// A branch that is being made.
#[derive(Debug)]
pub(crate) struct Branch {
    pub(crate) tag: String,
    /// The id its template has.
    pub(crate) template: String,
    /// A sandbox's id, or `compact:` and a tag.
    pub(crate) source: String,
    /// Whose it was when it was asked for.
    owner: Option<String>,
    pub(crate) guest: GuestSpec,
    pub(crate) mode: Mode,
    pub(crate) begun_at_unix: u64,
    pub(crate) origin: Option<BranchOrigin>,
    /// The branch its origin is, while that is not on disk.
    pub(crate) parent: Option<Arc<Branch>>,
    /// Whether it is gone if it cannot be stored.
    pub(crate) waited_for: bool,
    taken: OnceLock<CaptureStats>,
    progress: Mutex<Option<File>>,
    published: OnceLock<Snapshot>,
    error: OnceLock<Error>,
    stage: watch::Sender<Stage>,
    wish: watch::Sender<Disposition>,
    /// Why it is not being written now: the disk is full.
    shortage: watch::Sender<Option<Error>>,
}

impl Branch {
    pub(crate) fn new(tag: String, template: String, source: String, guest: GuestSpec, mode: Mode) -> Self {
        Branch {
            tag,
            template,
            source,
            owner: None,
            guest,
            mode,
            begun_at_unix: crate::util::time::now_unix(),
            origin: None,
            parent: None,
            waited_for: false,
            taken: OnceLock::new(),
            progress: Mutex::default(),
            published: OnceLock::new(),
            error: OnceLock::new(),
            stage: watch::Sender::new(Stage::Branching),
            wish: watch::Sender::new(Disposition::Keep),
            shortage: watch::Sender::new(None),
        }
    }

    /// The same with where its source came from, who owns it, and whether it is gone if it cannot be stored.
    pub(crate) fn from(
        self,
        origin: Option<BranchOrigin>,
        parent: Option<Arc<Branch>>,
        owner: String,
        waited_for: bool,
    ) -> Self {
        Branch { origin, parent, owner: Some(owner), waited_for, ..self }
    }

    /// One that is all of `snapshot`, under another tag.
    pub(crate) fn compacting(snapshot: &Snapshot, to: &str) -> Self {
        let (tag, guest) = (snapshot.tag().to_owned(), snapshot.manifest().facts.clone());
        let source = format!("compact:{tag}");
        let branch = Branch::new(to.to_owned(), String::new(), source, guest, Mode::Full);
        let origin = BranchOrigin { tag, snapshot: Some(snapshot.id().to_owned()), template: String::new() };
        Branch { origin: Some(origin), waited_for: true, ..branch }
    }

    /// One an earlier daemon took.
    pub(crate) fn adopted(template: &Template, record: BranchRecord, parent: Option<Arc<Branch>>) -> Self {
        let about = &template.about;
        let branch = Branch::new(
            about.tag.clone(),
            template.id.clone(),
            record.source.clone(),
            about.guest.clone(),
            record.mode,
        );
        let _ = branch.taken.set(record.taken.clone());
        branch.stage.send_replace(Stage::Saving);
        let BranchRecord { begun_at_unix, origin, owner, .. } = record;
        Branch { begun_at_unix, origin, owner, parent, ..branch }
    }

    /// For the next daemon.
    pub(crate) fn record(&self) -> BranchRecord {
        BranchRecord {
            source: self.source.clone(),
            mode: self.mode,
            begun_at_unix: self.begun_at_unix,
            origin: self.origin.clone(),
            taken: self.taken(),
            owner: self.owner.clone(),
        }
    }

    /// It was forked: this was measured.
    pub(crate) fn note_taken(&self, taken: CaptureStats) {
        let _ = self.taken.set(taken);
    }

    /// Its template can be forked from.
    pub(crate) fn forked(&self) {
        self.stage.send_replace(Stage::Saving);
    }

    /// What was measured; nothing before it is taken.
    pub(crate) fn taken(&self) -> CaptureStats {
        self.taken.get().cloned().unwrap_or_default()
    }

    /// Returns when it is at `stage` or further; why it failed, if it has.
    pub(crate) async fn reached(&self, stage: Stage) -> Result<()> {
        let _ = self.stage.subscribe().wait_for(|now| *now >= stage).await;
        match self.error.get() {
            Some(error) => Err(error.clone()),
            None => Ok(()),
        }
    }

    pub(crate) fn set_desired(&self, wish: Disposition) {
        self.wish.send_replace(wish);
    }

    /// What is to become of it as of now.
    pub(crate) fn desired(&self) -> Disposition {
        *self.wish.borrow()
    }

    /// Returns when it is not to be kept by us, with what instead.
    pub(crate) async fn dismissed(&self) -> Disposition {
        let wish = self.wish.subscribe().wait_for(|wish| *wish != Disposition::Keep).await.map(|wish| *wish);
        wish.unwrap_or(Disposition::Leave)
    }

    /// There is no room for it on disk, or there is again.
    pub(crate) fn wait_for_room(&self, shortage: Option<Error>) {
        self.shortage.send_replace(shortage);
    }

    /// Why it waits for room on disk, if it does.
    pub(crate) fn shortage(&self) -> Option<Error> {
        self.shortage.borrow().clone()
    }

    /// Returns when it is on disk or failed, or waits for room on disk.
    pub(crate) async fn held_up(&self) {
        let mut shortage = self.shortage.subscribe();
        tokio::select! {
            _ = self.reached(Stage::Done) => {}
            _ = shortage.wait_for(Option::is_some) => {}
        }
    }

    /// What it is on disk, once it is.
    pub(crate) fn published(&self) -> Option<&Snapshot> {
        self.published.get()
    }

    /// Where its saver tells how far it is.
    pub(crate) fn watch_progress(&self, file: File) {
        *self.progress.lock() = Some(file);
    }

    /// How far its saver is, if it has one.
    pub(crate) fn progress(&self) -> Option<SaveProgress> {
        let file = self.progress.lock();
        let mut bytes = [0; SaveProgress::LENGTH];
        std::os::unix::fs::FileExt::read_exact_at(file.as_ref()?, &mut bytes, 0).ok()?;
        Some(SaveProgress::from_bytes(bytes))
    }

    pub(crate) fn succeed(&self, snapshot: Snapshot) {
        let _ = self.published.set(snapshot);
        self.stage.send_replace(Stage::Done);
    }

    pub(crate) fn fail(&self, error: Error) {
        let _ = self.error.set(error);
        self.stage.send_replace(Stage::Done);
    }
}
