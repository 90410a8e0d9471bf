//! Branching: forking a template off a running sandbox.
//!
//! A branch is a task of its own, so that it goes on when its client goes away. The steps, in this order:
//!
//! 1. The daemon checks the sandbox (`sandbox_starting`, `sandbox_ended`, `sandbox_replaced`, `state_unknown`,
//!    `sandbox_unfit`, in mode `disk` `sandbox_paused`), the disk (`disk_full`) and the limits (`daemon_busy`,
//!    `limit_reached`), and reserves the tag (`tag_taken`, `quota_exceeded`).
//! 2. The branch waits until its source takes another one (`admission`: `sandbox_ended`, `sandbox_replaced`, `daemon_busy`,
//!    `cancelled` if a client removes the tag, `shutting_down`).
//! 3. The daemon prepares everything the pause needs (`capture`, up to step 7; `sandbox_busy` while another request
//!    pauses it or rolls it back; `sandbox_replaced` and `sandbox_ended` if that ended it).
//! 4. The agent freezes the guest's processes, for a bounded time, and in mode `disk` the file systems, too. If it does not
//!    answer in time, there is no branch in mode `disk` (`guest_timeout`); in other modes the branch goes on without it.
//! 5. The monitor forks (`monitor_refused`, `sandbox_ended`, `sandbox_replaced`; `daemon_busy` if layers are not merged yet).
//! 6. The agent thaws the processes, also after an error.
//! 7. Both monitors give up the right to write to the layers that they share now (`template_ended` if the branch's process
//!    ends, `sandbox_unfit` and `monitor_refused` if a monitor refuses, `internal` if one breaks the protocol); the
//!    template's record is written.
//! 8. The owner is written to the database. From here on children can be forked, also by the next daemon.
//!
//! Then `SnapshotRegistry::persist` saves the branch (`cancelled`, `disk_full`, `shutting_down`, `tag_taken`;
//! `snapshot_unusable` if the snapshot that the source came from is damaged). A request with an idempotency key may also get its codes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_store::{GuestSpec, Quota};
use tracing::Instrument;

use crate::branch::admission::Admission;
use crate::branch::capture::take;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{Leaf, Leaving};
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::branch_job::{BranchJob, BranchOrigin, Mode};
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::Template;
use crate::snapshot::template::cgroup::move_to_own_cgroup;
use crate::telemetry::metrics;
use crate::telemetry::otlp::{self, Over};
use crate::util::random::new_id;
use crate::util::task::{self, Task};

/// How long only first children use a new branch, if no client waits for its save. The move to its own cgroup and the
/// saver both hold up spawns: a saver is a fork of the template, and it competes with the children for the host's
/// CPUs.
const CHILDREN_FIRST: Duration = Duration::from_millis(100);

/// The order for a branch.
#[derive(Debug)]
pub(crate) struct BranchSpec {
    /// If there is none, the daemon makes up a tag.
    pub(crate) tag: Option<String>,
    pub(crate) mode: Mode,
    /// Whether the client waits until the branch is on disk: then a branch that cannot be stored is removed.
    pub(crate) wait: bool,
    /// The snapshot that the stored difference is to be based on.
    pub(crate) parent_tag: Option<String>,
    /// The quota of the request's principal: it limits the sandbox's owner here.
    pub(crate) quota: Quota,
}

impl SnapshotRegistry {
    /// Begins to branch `sandbox`. The job goes on if the client goes away.
    ///
    /// Does not call `check_not_suspending`: a suspend takes a branch itself. A client's branch during a suspend loses
    /// nothing, because it is a snapshot of its own.
    pub(crate) fn branch(self: &Arc<Self>, sandbox: &Arc<Sandbox>, order: BranchSpec) -> Result<Arc<Entry>> {
        let refused = |_: &Error| self.host.telemetry.metrics.branches.add(metrics::Outcome::Refused, 1);
        self.begin(sandbox, order).inspect_err(refused)
    }

    fn begin(self: &Arc<Self>, sandbox: &Arc<Sandbox>, order: BranchSpec) -> Result<Arc<Entry>> {
        let guest = check_source(sandbox)?;
        if order.mode == Mode::Disk {
            check_disks(sandbox)?;
        }
        let origin = check_origin(sandbox, &order)?;
        if order.mode == Mode::Live {
            self.check_room()?;
        }
        let tag = match order.tag {
            Some(tag) => tag,
            None => generate_tag(&sandbox.id)?,
        };
        let place = self.place(sandbox)?;
        let parent = origin.as_ref().filter(|origin| origin.snapshot.is_none()).and_then(|origin| {
            let entry = self.get(&origin.tag).ok()?;
            (entry.branch()?.template == origin.template).then_some(entry)
        });
        let branch = BranchJob::new(tag, new_id("tp")?, sandbox.id.clone(), guest, order.mode);
        let branch = Arc::new(branch.from(origin, parent, order.wait));
        let state = SnapshotState::Branching(branch.clone());
        let entry = self.reserve(&branch.tag, state, &sandbox.spec.owner, &order.quota)?;
        let (snapshots, sandbox, reserved) = (self.clone(), sandbox.clone(), entry.clone());
        let run = async move { snapshots.run(sandbox, reserved, branch, place).await };
        let failed = entry.clone();
        let run = otlp::carry(otlp::current(), run.in_current_span());
        task::spawn_or(Task::Branch, run, move |error| failed.fail(error));
        Ok(entry)
    }

    async fn run(
        self: Arc<Self>,
        sandbox: Arc<Sandbox>,
        entry: Arc<Entry>,
        branch: Arc<BranchJob>,
        place: Admission,
    ) {
        let begun = Instant::now();
        // The monitor forks the branch into the source's cgroup, which ends with the source.
        let leaving = sandbox.resources().leaf.as_ref().map(Leaf::leaving);
        let taken = async {
            let turn = self.turn(&sandbox, &branch, place).await?;
            let (template, source) =
                take(&self, &sandbox, &branch, |template| entry.write_record(template)).await?;
            drop(turn);
            // After the fork, so that the source does not wait for the database, and before the client gets its answer.
            // Until here only the template's record names the owner.
            if let Err(error) = self.record_owner(&entry).await {
                entry.forget_template(&template);
                return Err(error);
            }
            sandbox.branched(&branch.tag);
            Ok((template, source))
        };
        let taken = taken.await;
        self.note_capture(&branch, begun, taken.is_err());
        let (template, source) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(tag = branch.tag, %error, "branch not taken");
                return self.discard(&entry, error).await;
            }
        };
        entry.set_current(template.clone());
        entry.saving();
        // The client has its answer now. The following steps must not hold up its first children.
        leave_source(&branch, &template, leaving).await;
        tracing::info!(
            tag = branch.tag,
            sandbox = sandbox.id,
            pause_ms = branch.capture_stats().pause_ms,
            "branch taken"
        );
        self.persist(entry, branch, template, source).await;
    }
}

impl SnapshotRegistry {
    /// Adds a branch or a fork that was taken, or failed, to the traces and the metrics.
    fn note_capture(&self, job: &BranchJob, begun: Instant, failed: bool) {
        let tag = Some(job.tag.as_str()).filter(|tag| !tag.is_empty());
        let over = Over {
            name: job.name(),
            begun,
            failed,
            attributes: &[("forkd.sandbox", Some(&job.source)), ("forkd.snapshot", tag)],
        };
        self.host.telemetry.traces.work(otlp::current(), over);
        let metrics = &self.host.telemetry.metrics;
        let outcome = if failed { metrics::Outcome::Failed } else { metrics::Outcome::Ok };
        metrics.branches.add(outcome, 1);
        if let Some(pause_ms) = job.capture_stats().pause_ms.filter(|_| !failed) {
            metrics.branch_pause.observe(pause_ms.max(0.0) / 1e3);
        }
    }
}

/// Checks whether a sandbox can be branched or forked now. Returns the properties of its guest.
fn check_source(sandbox: &Sandbox) -> Result<GuestSpec> {
    match sandbox.phase() {
        Phase::Running | Phase::Unresponsive | Phase::Paused => {}
        Phase::Starting => {
            let text = format!("sandbox {} is still starting; branch or fork it later", sandbox.id);
            return Err(Error::new(Code::SandboxStarting, text));
        }
        Phase::Ended(end) => return Err(sandbox.ended(Code::SandboxEnded, &end)),
        Phase::Unknown(_) => sandbox.known()?,
    }
    let Some(mut guest) = sandbox.spec.guest.clone() else {
        let text = format!("sandbox {} was made by an older version; make it again", sandbox.id);
        return Err(Error::new(Code::SandboxUnfit, text));
    };
    guest.python = sandbox.runtime().saved.python.or(guest.python);
    Ok(guest)
}

/// The snapshot that a sandbox came from; none for a booted sandbox, and for a child of a fork. An error if the order
/// names another parent.
fn check_origin(sandbox: &Sandbox, order: &BranchSpec) -> Result<Option<BranchOrigin>> {
    let template = sandbox.resources().template.clone();
    let origin = template.and_then(|template| {
        let tag = template.about.snapshot_tag()?.to_owned();
        Some(BranchOrigin { tag, snapshot: template.snapshot(), template: template.id.clone() })
    });
    let Some(wanted) = &order.parent_tag else { return Ok(origin) };
    match &origin {
        Some(origin) if origin.tag == *wanted => {}
        Some(BranchOrigin { tag, .. }) => {
            let text = format!("parent_tag can only be {tag}, the snapshot sandbox {} came from", sandbox.id);
            return Err(Error::invalid(text));
        }
        None => {
            let text = format!("sandbox {} came from no snapshot; leave parent_tag out", sandbox.id);
            return Err(Error::invalid(text));
        }
    }
    Ok(origin)
}

/// Moves a new template out of its source's cgroup, after its first children unless a client waits for the save.
async fn leave_source(job: &BranchJob, template: &Arc<Template>, leaving: Option<Leaving>) {
    if !job.waited_for {
        let _ = tokio::time::timeout(CHILDREN_FIRST, job.disposition_changed()).await;
    }
    match move_to_own_cgroup(template).await {
        true => drop(leaving),
        false => leaving.into_iter().for_each(Leaving::stay),
    }
}

/// Checks that a branch of the disks alone can have clean file systems.
fn check_disks(sandbox: &Sandbox) -> Result<()> {
    if sandbox.spec.is_bare() {
        let text = format!("sandbox {} has no disk; branch it with mode full", sandbox.id);
        return Err(Error::new(Code::SandboxUnfit, text));
    }
    if matches!(sandbox.phase(), Phase::Paused) {
        let text = format!(
            "sandbox {} is paused and cannot write out its file systems; resume it first, or branch it with mode full",
            sandbox.id
        );
        return Err(Error::new(Code::SandboxPaused, text));
    }
    Ok(())
}

/// A new tag for a branch of `sandbox`.
fn generate_tag(sandbox: &str) -> Result<String> {
    let mut random = [0u8; 2];
    crate::util::random::fill_random(&mut random)?;
    let now = crate::util::time::now_unix();
    Ok(format!("branch-{sandbox}-{now}-{:02x}{:02x}", random[0], random[1]))
}

pub(crate) mod admission;
pub(crate) mod capture;
pub(crate) mod fork;
pub(crate) mod merge;
pub(crate) mod suspend;
#[cfg(test)]
mod tests;
