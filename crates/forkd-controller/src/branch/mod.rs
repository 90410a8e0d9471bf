//! Branching: forking a template off a running sandbox.
//!
//! A branch is a task of its own: whoever asked may go away. In order: the tag is reserved; it waits until
//! its source takes another one; everything the pause needs is prepared; the agent stands its processes
//! still, for a bounded time; the monitor forks; the agent lets them go on, whatever happened; both processes
//! lose the right to write to what is shared now; what the template is is written down, and then whose it is. From
//! then on children can be forked from it, also by the next daemon. How it comes to disk is `persist`'s.

use std::fs::File;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use forkd_protocol::control::SaveProgress;
use forkd_store::{Facts, Quota, Snapshot};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tracing::Instrument;

use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Leaf, Leaving};
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::registry::{Entry, Snapshots, Work};
use crate::snapshot::template::{Standing, Template};
use crate::telemetry::metrics;
use crate::telemetry::otlp::{self, Over};
use crate::util::random::new_id;
use crate::util::task::{self, Task};

pub(crate) use crate::branch::admission::Disks;
use crate::branch::admission::Place;
pub(crate) use crate::branch::capture::settle;
use crate::branch::capture::take;

/// How long a branch that nobody waits for is left to its first children. Moving it to a cgroup of its own holds
/// up whoever forks then; so does a saver, which is a fork of the template, and it takes turns with children on
/// the host's CPUs.
const CHILDREN_FIRST: Duration = Duration::from_millis(100);

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

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Order {
    /// A tag is made up if there is none.
    pub(crate) tag: Option<String>,
    pub(crate) mode: Mode,
    /// Whether somebody waits until it is on disk: then a branch that cannot be stored is gone.
    pub(crate) wait: bool,
    /// The snapshot the difference is to be stored to.
    pub(crate) parent_tag: Option<String>,
    /// The most the sandbox's owner may have, as whoever asks has it.
    pub(crate) quota: Quota,
}

/// The snapshot a branch's source was forked from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Origin {
    pub(crate) tag: String,
    /// Its id; none if it was not on disk yet.
    pub(crate) snapshot: Option<String>,
    /// The template that forked the source.
    pub(crate) template: String,
}

/// What was measured when it was taken.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Taken {
    /// None for what was not taken of a running sandbox.
    pub(crate) pause_ms: Option<f64>,
    pub(crate) frozen_ms: Option<f64>,
    pub(crate) quiesced: Option<bool>,
}

/// What the next daemon needs to finish a branch.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    pub(crate) source: String,
    pub(crate) mode: Mode,
    pub(crate) begun_at_unix: u64,
    pub(crate) origin: Option<Origin>,
    pub(crate) taken: Taken,
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
pub(crate) enum Wish {
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
    pub(crate) guest: Facts,
    pub(crate) mode: Mode,
    pub(crate) begun_at_unix: u64,
    pub(crate) origin: Option<Origin>,
    /// The branch its origin is, while that is not on disk.
    pub(crate) parent: Option<Arc<Branch>>,
    /// Whether it is gone if it cannot be stored.
    pub(crate) waited_for: bool,
    taken: OnceLock<Taken>,
    progress: Mutex<Option<File>>,
    published: OnceLock<Snapshot>,
    error: OnceLock<Error>,
    stage: watch::Sender<Stage>,
    wish: watch::Sender<Wish>,
    /// Why it is not being written now: the disk is full.
    shortage: watch::Sender<Option<Error>>,
}

impl Branch {
    pub(crate) fn new(tag: String, template: String, source: String, guest: Facts, mode: Mode) -> Self {
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
            wish: watch::Sender::new(Wish::Keep),
            shortage: watch::Sender::new(None),
        }
    }

    /// One that is all of `snapshot`, under another tag.
    pub(crate) fn compacting(snapshot: &Snapshot, to: &str) -> Self {
        let (tag, guest) = (snapshot.tag().to_owned(), snapshot.manifest().facts.clone());
        let source = format!("compact:{tag}");
        let branch = Branch::new(to.to_owned(), String::new(), source, guest, Mode::Full);
        let origin = Origin { tag, snapshot: Some(snapshot.id().to_owned()), template: String::new() };
        Branch { origin: Some(origin), waited_for: true, ..branch }
    }

    /// One an earlier daemon took.
    pub(crate) fn adopted(template: &Template, record: Record, parent: Option<Arc<Branch>>) -> Self {
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
        let Record { begun_at_unix, origin, owner, .. } = record;
        Branch { begun_at_unix, origin, owner, parent, ..branch }
    }

    /// For the next daemon.
    pub(crate) fn record(&self) -> Record {
        Record {
            source: self.source.clone(),
            mode: self.mode,
            begun_at_unix: self.begun_at_unix,
            origin: self.origin.clone(),
            taken: self.taken(),
            owner: self.owner.clone(),
        }
    }

    /// What was measured; nothing before it is taken.
    pub(crate) fn taken(&self) -> Taken {
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

    pub(crate) fn wish(&self, wish: Wish) {
        self.wish.send_replace(wish);
    }

    /// What is to become of it as of now.
    pub(crate) fn wished(&self) -> Wish {
        *self.wish.borrow()
    }

    /// Returns when it is not to be kept by us, with what instead.
    pub(crate) async fn dismissed(&self) -> Wish {
        let wish = self.wish.subscribe().wait_for(|wish| *wish != Wish::Keep).await.map(|wish| *wish);
        wish.unwrap_or(Wish::Leave)
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
        *self.progress.lock().unwrap_or_else(PoisonError::into_inner) = Some(file);
    }

    /// How far its saver is, if it has one.
    pub(crate) fn progress(&self) -> Option<SaveProgress> {
        let file = self.progress.lock().unwrap_or_else(PoisonError::into_inner);
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

/// A sandbox a branch was taken of.
#[derive(Debug)]
pub(crate) struct TakenFrom {
    pub(crate) sandbox: Arc<Sandbox>,
    /// Which generation of its disks' layers the branch has.
    pub(crate) generation: u64,
    /// How many frozen layers it was believed to have right after.
    pub(crate) frozen: usize,
}

impl Snapshots {
    /// Begins to branch `sandbox`. The work goes on whether or not anybody waits for it.
    pub(crate) fn branch(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        order: Order,
    ) -> Result<(Arc<Entry>, Arc<Branch>)> {
        let refused = |_: &Error| self.host.telling.metrics.branches.add(metrics::Outcome::Refused, 1);
        self.begin(sandbox, order).inspect_err(refused)
    }

    fn begin(self: &Arc<Self>, sandbox: &Arc<Sandbox>, order: Order) -> Result<(Arc<Entry>, Arc<Branch>)> {
        let (guest, origin) = self.check(sandbox, &order)?;
        if order.mode == Mode::Live {
            self.check_room()?;
        }
        let tag = match order.tag {
            Some(tag) => tag,
            None => made_up(&sandbox.id)?,
        };
        let place = self.place(sandbox)?;
        let parent = origin.as_ref().filter(|origin| origin.snapshot.is_none()).and_then(|origin| {
            let branch = self.get(&origin.tag).ok()?.branch()?;
            (branch.template == origin.template).then_some(branch)
        });
        let branch = Branch::new(tag, new_id("tp")?, sandbox.id.clone(), guest, order.mode);
        let owner = Some(sandbox.spec.owner.clone());
        let branch = Arc::new(Branch { origin, parent, owner, waited_for: order.wait, ..branch });
        let (work, owner) = (Work::Branch(branch.clone()), &sandbox.spec.owner);
        let entry = self.reserve(&branch.tag, work, owner, &order.quota)?;
        let (snapshots, sandbox, taken) = (self.clone(), sandbox.clone(), branch.clone());
        let reserved = entry.clone();
        let run = async move { snapshots.run(sandbox, reserved, taken, place).await };
        let (failed, over) = (entry.clone(), branch.clone());
        let run = otlp::carry(otlp::current(), run.in_current_span());
        task::spawn_or(Task::Branch, run, move |error| {
            failed.failed(error.clone());
            over.fail(error);
        });
        Ok((entry, branch))
    }

    /// What the branch's guest is like, and which snapshot its source came from.
    fn check(&self, sandbox: &Sandbox, order: &Order) -> Result<(Facts, Option<Origin>)> {
        match sandbox.phase() {
            Phase::Running | Phase::Unresponsive | Phase::Paused => {}
            Phase::Starting => {
                let text = format!("sandbox {} is still starting; branch it later", sandbox.id);
                return Err(Error::new(Code::SandboxStarting, text));
            }
            Phase::Ended(end) => return Err(sandbox.ended(Code::SandboxEnded, &end)),
            Phase::Unknown(_) => sandbox.known()?,
        }
        let Some(mut guest) = sandbox.spec.guest.clone() else {
            let text = format!("sandbox {} was made by an older version; make it again", sandbox.id);
            return Err(Error::new(Code::SandboxUnfit, text));
        };
        guest.python = sandbox.facts().python.or(guest.python);
        let template = sandbox.belongings().template.clone();
        let origin = template.map(|template| Origin {
            tag: template.about.tag.clone(),
            snapshot: template.snapshot(),
            template: template.id.clone(),
        });
        if let Some(wanted) = &order.parent_tag
            && origin.as_ref().is_none_or(|origin| origin.tag != *wanted)
        {
            let text = match &origin {
                Some(origin) => format!(
                    "parent_tag can only be {}, the snapshot sandbox {} came from",
                    origin.tag, sandbox.id
                ),
                None => format!("sandbox {} came from no snapshot; leave parent_tag out", sandbox.id),
            };
            return Err(Error::invalid(text));
        }
        Ok((guest, origin))
    }

    async fn run(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        entry: Arc<Entry>,
        branch: Arc<Branch>,
        place: Place,
    ) {
        let begun = Instant::now();
        // The branch is born in the source's cgroup, which goes with the source.
        let leaving = sandbox.belongings().leaf.as_ref().map(Leaf::leaving);
        let taken = async {
            let turn = self.turn(&sandbox, &branch, place).await?;
            let (template, source) = take(&self, &sandbox, &branch).await?;
            drop(turn);
            // After the fork, so that the source does not wait for the database, and before a client hears of the
            // branch. Until here its record says whose it is.
            if let Err(error) = self.record_owner(&entry).await {
                if let Err(error) = template.record(Standing::Forgotten) {
                    tracing::warn!(tag = branch.tag, %error, "cannot record that a branch is gone");
                }
                return Err(error);
            }
            sandbox.branched(&branch.tag);
            Ok((template, source))
        };
        let taken = taken.await;
        let over = Over {
            name: "branch",
            begun,
            failed: taken.is_err(),
            attributes: &[("forkd.sandbox", Some(&sandbox.id)), ("forkd.snapshot", Some(&branch.tag))],
        };
        self.host.telling.traces.work(otlp::current(), over);
        let (template, source) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(tag = branch.tag, %error, "a branch could not be taken");
                self.host.telling.metrics.branches.add(metrics::Outcome::Failed, 1);
                entry.failed(error.clone());
                self.forget_owner(&entry).await;
                self.vanish(&entry);
                return branch.fail(error);
            }
        };
        let metrics = &self.host.telling.metrics;
        metrics.branches.add(metrics::Outcome::Ok, 1);
        if let Some(pause_ms) = branch.taken().pause_ms {
            metrics.branch_pause.observe(Duration::from_secs_f64(pause_ms.max(0.0) / 1e3));
        }
        entry.set_current(template.clone());
        branch.stage.send_replace(Stage::Saving);
        // Whoever asked has their answer now. Nothing of what follows is to hold up their first children.
        if !branch.waited_for {
            let _ = tokio::time::timeout(CHILDREN_FIRST, branch.dismissed()).await;
        }
        match settle(&template).await {
            true => drop(leaving),
            false => leaving.into_iter().for_each(Leaving::stay),
        }
        tracing::info!(
            tag = branch.tag,
            sandbox = sandbox.id,
            pause_ms = branch.taken().pause_ms,
            "branched"
        );
        self.persist(entry, branch, template, Some(source)).await;
    }
}

/// A tag for a branch of `sandbox`.
fn made_up(sandbox: &str) -> Result<String> {
    let mut random = [0u8; 2];
    crate::util::random::fill_random(&mut random)?;
    let now = crate::util::time::now_unix();
    Ok(format!("branch-{sandbox}-{now}-{:02x}{:02x}", random[0], random[1]))
}

pub(crate) mod admission;
pub(crate) mod capture;
pub(crate) mod suspend;
#[cfg(test)]
mod tests;
