//! Branching: forking a template off a running sandbox.
//!
//! A branch is a task of its own: whoever asked may go away. In order: the tag is reserved; it waits until
//! its source takes another one; everything the pause needs is prepared; the agent stands its processes
//! still, for a bounded time; the monitor forks; the agent lets them go on, whatever happened; both processes
//! lose the right to write to what is shared now; what the template is is written down, and then whose it is. From
//! then on children can be forked from it, also by the next daemon. How it comes to disk is `persist`'s.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_store::{GuestSpec, Quota};
use tracing::Instrument;

use crate::branch::admission::Admission;
use crate::branch::capture::take;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Leaf, Leaving};
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::branch_job::{Branch, BranchOrigin, Mode};
use crate::snapshot::registry::{Entry, SnapshotJob, SnapshotRegistry};
use crate::snapshot::template::PersistState;
use crate::snapshot::template::cgroup::move_to_own_cgroup;
use crate::telemetry::metrics;
use crate::telemetry::otlp::{self, Over};
use crate::util::random::new_id;
use crate::util::task::{self, Task};

/// How long a branch that nobody waits for is left to its first children. Moving it to a cgroup of its own holds
/// up whoever forks then; so does a saver, which is a fork of the template, and it takes turns with children on
/// the host's CPUs.
const CHILDREN_FIRST: Duration = Duration::from_millis(100);

/// What is asked for.
#[derive(Debug)]
pub(crate) struct BranchSpec {
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

impl SnapshotRegistry {
    /// Begins to branch `sandbox`. The work goes on whether or not anybody waits for it.
    pub(crate) fn branch(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        order: BranchSpec,
    ) -> Result<(Arc<Entry>, Arc<Branch>)> {
        let refused = |_: &Error| self.host.telemetry.metrics.branches.add(metrics::Outcome::Refused, 1);
        self.begin(sandbox, order).inspect_err(refused)
    }

    fn begin(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        order: BranchSpec,
    ) -> Result<(Arc<Entry>, Arc<Branch>)> {
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
        let branch = Arc::new(branch.from(origin, parent, sandbox.spec.owner.clone(), order.wait));
        let (work, owner) = (SnapshotJob::Branch(branch.clone()), &sandbox.spec.owner);
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
    fn check(&self, sandbox: &Sandbox, order: &BranchSpec) -> Result<(GuestSpec, Option<BranchOrigin>)> {
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
        guest.python = sandbox.facts().saved.python.or(guest.python);
        let template = sandbox.resources().template.clone();
        let origin = template.map(|template| BranchOrigin {
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
        place: Admission,
    ) {
        let begun = Instant::now();
        // The branch is born in the source's cgroup, which goes with the source.
        let leaving = sandbox.resources().leaf.as_ref().map(Leaf::leaving);
        let taken = async {
            let turn = self.turn(&sandbox, &branch, place).await?;
            let (template, source) = take(&self, &sandbox, &branch).await?;
            drop(turn);
            // After the fork, so that the source does not wait for the database, and before a client hears of the
            // branch. Until here its record says whose it is.
            if let Err(error) = self.record_owner(&entry).await {
                if let Err(error) = template.record(PersistState::Forgotten) {
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
        self.host.telemetry.traces.work(otlp::current(), over);
        let (template, source) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(tag = branch.tag, %error, "a branch could not be taken");
                self.host.telemetry.metrics.branches.add(metrics::Outcome::Failed, 1);
                entry.failed(error.clone());
                self.forget_owner(&entry).await;
                self.remove_unwritten(&entry);
                return branch.fail(error);
            }
        };
        let metrics = &self.host.telemetry.metrics;
        metrics.branches.add(metrics::Outcome::Ok, 1);
        if let Some(pause_ms) = branch.taken().pause_ms {
            metrics.branch_pause.observe(pause_ms.max(0.0) / 1e3);
        }
        entry.set_current(template.clone());
        branch.forked();
        // Whoever asked has their answer now. Nothing of what follows is to hold up their first children.
        if !branch.waited_for {
            let _ = tokio::time::timeout(CHILDREN_FIRST, branch.dismissed()).await;
        }
        match move_to_own_cgroup(&template).await {
            true => drop(leaving),
            false => leaving.into_iter().for_each(Leaving::stay),
        }
        tracing::info!(
            tag = branch.tag,
            sandbox = sandbox.id,
            pause_ms = branch.taken().pause_ms,
            "branched"
        );
        self.persist(entry, branch, template, source).await;
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
pub(crate) mod merge;
pub(crate) mod suspend;
#[cfg(test)]
mod tests;
