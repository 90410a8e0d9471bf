//! The forks of running sandboxes, as far as they concern all of them: their jobs, and what their templates count.
//!
//! No list of the daemon has the template of a fork. It counts as a snapshot of its owner while it lives.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use forkd_store::Quota;
use parking_lot::Mutex;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::error::{Code, Error, Result};
use crate::snapshot::branch_job::{BranchJob, Disposition};
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::task;

/// The forks of a daemon.
#[derive(Debug)]
pub(crate) struct Forks {
    /// The number of templates, by owner.
    reservations: Arc<Mutex<HashMap<String, usize>>>,
    jobs: Mutex<ForkJobs>,
    running: TaskTracker,
}

#[derive(Debug, Default)]
struct ForkJobs {
    /// Those that are not over, and maybe some that are.
    begun: Vec<Weak<BranchJob>>,
    closed: bool,
}

impl Default for Forks {
    fn default() -> Self {
        Forks { reservations: Arc::default(), jobs: Mutex::default(), running: task::tracker() }
    }
}

/// What the template of a fork counts against the quota of its owner, until this is dropped.
#[derive(Debug)]
pub(crate) struct ForkReservation {
    owner: String,
    reservations: Arc<Mutex<HashMap<String, usize>>>,
}

impl Drop for ForkReservation {
    fn drop(&mut self) {
        let mut reservations = self.reservations.lock();
        let Some(count) = reservations.get_mut(&self.owner) else { return };
        *count -= 1;
        // Owners without forks take no memory.
        if *count == 0 {
            reservations.remove(&self.owner);
        }
    }
}

impl Forks {
    /// How many templates of forks `owner` has.
    pub(crate) fn count(&self, owner: &str) -> usize {
        self.reservations.lock().get(owner).copied().unwrap_or(0)
    }

    /// A reservation for a template of `owner`. The caller has checked the quota, or the template is there already.
    pub(crate) fn reserve(&self, owner: &str) -> ForkReservation {
        *self.reservations.lock().entry(owner.to_owned()).or_default() += 1;
        ForkReservation { owner: owner.to_owned(), reservations: self.reservations.clone() }
    }

    /// Enters the job of a fork. The job is over when the token is dropped.
    pub(crate) fn begin(&self, job: &Arc<BranchJob>) -> Result<TaskTrackerToken> {
        let mut jobs = self.jobs.lock();
        if jobs.closed {
            let text = "the daemon is stopping; fork again when it runs";
            return Err(Error::new(Code::ShuttingDown, text));
        }
        jobs.begun.retain(|job| job.strong_count() > 0);
        jobs.begun.push(Arc::downgrade(job));
        Ok(self.running.token())
    }

    /// Stops all jobs; no new one begins.
    pub(crate) async fn close(&self) {
        {
            let mut jobs = self.jobs.lock();
            jobs.closed = true;
            let begun = jobs.begun.drain(..).filter_map(|job| job.upgrade());
            begun.for_each(|job| job.set_disposition(Disposition::Leave));
        }
        self.running.wait().await;
    }
}

impl SnapshotRegistry {
    /// A reservation for the template of a fork, if the owner's quota has room for another snapshot of `mem_mib` MiB.
    pub(crate) fn reserve_fork(&self, owner: &str, mem_mib: u64, quota: &Quota) -> Result<ForkReservation> {
        self.check_quota(owner, mem_mib, quota, || self.forks.reserve(owner))
    }
}
