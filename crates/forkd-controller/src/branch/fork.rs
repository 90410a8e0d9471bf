//! Forking a running sandbox: a branch that is never written to disk and has no tag.
//!
//! A fork takes the steps of a branch up to the template's record (`branch`), and no other: no list has it, no saver
//! writes it, and the database has no row of it. The caller gets the template and forks children from it
//! (`spawn::spawn_from`). The template ends with its last handle, and each child holds one. Its record says
//! `forgotten` from the beginning, so that the next daemon adopts the template for its children alone.

use std::sync::Arc;
use std::time::Instant;

use forkd_store::Quota;
use tokio::sync::oneshot;
use tracing::Instrument;

use crate::branch::admission::Admission;
use crate::branch::capture::take;
use crate::branch::merge::BranchSource;
use crate::branch::{check_source, leave_source};
use crate::error::{Error, Result};
use crate::host::cgroup::Leaf;
use crate::sandbox::Sandbox;
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::forks::ForkReservation;
use crate::snapshot::merge::merge;
use crate::snapshot::registry::SnapshotRegistry;
use crate::snapshot::template::{ForkSource, PersistState, Template};
use crate::telemetry::{metrics, otlp};
use crate::util::random::new_id;
use crate::util::task::{self, Task};

/// A fork that is admitted.
struct AdmittedFork {
    sandbox: Arc<Sandbox>,
    job: Arc<BranchJob>,
    place: Admission,
    reservation: ForkReservation,
}

impl SnapshotRegistry {
    /// Forks a template off the running `sandbox`, to fork children from it. The job goes on if the client goes away;
    /// the template ends then. It counts as a snapshot of the sandbox's owner, whom `quota` limits.
    pub(crate) async fn capture_for_fork(
        self: &Arc<Self>,
        sandbox: &Arc<Sandbox>,
        quota: &Quota,
    ) -> Result<Arc<Template>> {
        let refused = |_: &Error| self.host.telemetry.metrics.branches.add(metrics::Outcome::Refused, 1);
        let fork = self.admit_fork(sandbox, quota).inspect_err(refused)?;
        let running = self.forks.begin(&fork.job).inspect_err(refused)?;
        let (give, given) = oneshot::channel();
        let snapshots = self.clone();
        let run = async move {
            snapshots.run_fork(fork, give).await;
            drop(running);
        };
        task::spawn(Task::Fork, otlp::carry(otlp::current(), run.in_current_span()));
        let lost = || Error::host("cannot fork the sandbox", "the job of the fork failed");
        given.await.unwrap_or_else(|_| Err(lost()))
    }

    fn admit_fork(&self, sandbox: &Arc<Sandbox>, quota: &Quota) -> Result<AdmittedFork> {
        let guest = check_source(sandbox)?;
        let place = self.place(sandbox)?;
        let owner = sandbox.spec.owner.clone();
        let reservation = self.reserve_fork(&owner, guest.mem_size_mib, quota)?;
        let source = ForkSource { sandbox: sandbox.id.clone(), owner };
        let job = Arc::new(BranchJob::forking(new_id("tp")?, source, guest));
        Ok(AdmittedFork { sandbox: sandbox.clone(), job, place, reservation })
    }

    async fn run_fork(self: Arc<Self>, fork: AdmittedFork, give: oneshot::Sender<Result<Arc<Template>>>) {
        let AdmittedFork { sandbox, job, place, reservation } = fork;
        let begun = Instant::now();
        let leaving = sandbox.resources().leaf.as_ref().map(Leaf::leaving);
        let taken = async {
            let _turn = self.turn(&sandbox, &job, place).await?;
            take(&self, &sandbox, &job, |template| template.record(PersistState::Forgotten)).await
        };
        let taken = taken.await;
        self.note_capture(&job, begun, taken.is_err());
        let (template, source) = match taken {
            Ok(taken) => taken,
            Err(error) => {
                tracing::warn!(sandbox = sandbox.id, %error, "sandbox not forked");
                drop((reservation, leaving));
                let _ = give.send(Err(error));
                return;
            }
        };
        template.keep_reservation(reservation);
        let pause_ms = job.capture_stats().pause_ms;
        tracing::info!(sandbox = sandbox.id, template = template.id, pause_ms, "sandbox forked");
        // If the client is gone, the template has no other handle than the one of this job.
        let _ = give.send(Ok(template.clone()));
        leave_source(&job, &template, leaving).await;
        self.merge_fork(&job, &template, source).await;
    }

    /// Every fork adds a layer to the disks of its source, as a branch does. A branch merges them before its save.
    async fn merge_fork(&self, job: &BranchJob, template: &Arc<Template>, source: BranchSource) {
        let merged = tokio::select! {
            biased;
            _ = job.disposition_changed() => Ok(()),
            merged = merge(self, source, template) => merged,
        };
        if let Err(error) = merged {
            tracing::warn!(sandbox = job.source, %error, "disk layers not merged");
        }
    }
}

#[cfg(test)]
mod tests;
