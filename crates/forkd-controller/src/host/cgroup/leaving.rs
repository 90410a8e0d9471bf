//! Processes that begin in a leaf and are to leave it: branches. A branch is born in the cgroup of its source,
//! because moving it takes longer than the fork, and its first children come before that.
//!
//! As long as a branch is there, the leaf has room for its tasks. So a train of branches does not use up the
//! limit of its source, and the limit is low again when they have left.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::host::cgroup::set_if_there;

/// Tasks of a branch that has not left yet: the template, and a saver.
const TASKS_OF_BRANCH: u32 = 2;

/// The tasks of a leaf.
#[derive(Debug)]
pub(crate) struct Tasks {
    leaf: PathBuf,
    counted: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    /// How many the leaf may have beside those of branches; no limit without a figure.
    own: Option<u32>,
    /// How many branches have not left yet.
    leaving: u32,
}

impl Tasks {
    pub(crate) fn new(leaf: PathBuf) -> Arc<Tasks> {
        Arc::new(Tasks { leaf, counted: Mutex::default() })
    }

    /// Limits them to `own`, beside those of branches.
    pub(crate) fn limit(&self, own: u32) -> io::Result<()> {
        self.change(|counted| counted.own = Some(own))
    }

    /// How many branches have not left yet.
    pub(crate) fn leaving(&self) -> u32 {
        self.counted.lock().leaving
    }

    /// Changes the count and the limit. The lock is held meanwhile, so that the last count is the limit.
    fn change(&self, change: impl FnOnce(&mut Counted)) -> io::Result<()> {
        let mut counted = self.counted.lock();
        change(&mut counted);
        let Some(own) = counted.own else { return Ok(()) };
        let max = own.saturating_add(counted.leaving.saturating_mul(TASKS_OF_BRANCH));
        set_if_there(&self.leaf, "pids.max", max)
    }
}

/// That a branch in a leaf is to be moved to a leaf of its own. Dropped when it was moved, or is gone.
#[derive(Debug)]
pub(crate) struct Leaving(Arc<Tasks>);

impl Leaving {
    pub(crate) fn new(tasks: Arc<Tasks>) -> Leaving {
        if let Err(error) = tasks.change(|counted| counted.leaving = counted.leaving.saturating_add(1)) {
            // The fork fails then, and the client hears of it.
            tracing::warn!(%error, "a cgroup has no more room for a branch");
        }
        Leaving(tasks)
    }

    /// The branch stays where it is, for good.
    pub(crate) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // The leaf may be gone. A limit that stays high is set anew by the next branch.
        let _ = self.0.change(|counted| counted.leaving = counted.leaving.saturating_sub(1));
    }
}
