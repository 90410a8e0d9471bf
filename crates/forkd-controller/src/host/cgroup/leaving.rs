//! Branches that start in a leaf and are to move out of it. A branch starts in the cgroup of its source, because a
//! move takes longer than the fork, and the first children of the branch should not wait for it.
//!
//! While such a branch is there, the leaf's task limit is higher. So a series of branches does not use up the limit
//! of its source, and the limit is low again after they have moved.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::host::cgroup::set_if_there;

/// Tasks of a branch that has not moved yet: the template, and a saver.
const TASKS_OF_BRANCH: u32 = 2;

/// The task limit of a leaf.
#[derive(Debug)]
pub(crate) struct Tasks {
    leaf: PathBuf,
    counted: Mutex<Counted>,
}

#[derive(Debug, Default)]
struct Counted {
    /// The limit without branches; no limit if absent.
    own: Option<u32>,
    /// How many branches have not moved yet.
    leaving: u32,
}

impl Tasks {
    pub(crate) fn new(leaf: PathBuf) -> Arc<Tasks> {
        Arc::new(Tasks { leaf, counted: Mutex::default() })
    }

    /// Limits the tasks to `own`, beside those of branches.
    pub(crate) fn limit(&self, own: u32) -> io::Result<()> {
        self.change(|counted| counted.own = Some(own))
    }

    /// How many branches have not moved yet.
    pub(crate) fn leaving(&self) -> u32 {
        self.counted.lock().leaving
    }

    /// Changes the count and writes the limit. The lock is held for both, so that the limit matches the last count.
    fn change(&self, change: impl FnOnce(&mut Counted)) -> io::Result<()> {
        let mut counted = self.counted.lock();
        change(&mut counted);
        let Some(own) = counted.own else { return Ok(()) };
        let max = own.saturating_add(counted.leaving.saturating_mul(TASKS_OF_BRANCH));
        set_if_there(&self.leaf, "pids.max", max)
    }
}

/// A branch that is to move from a leaf to its own leaf. Dropped when it has moved, or has ended.
#[derive(Debug)]
pub(crate) struct Leaving(Arc<Tasks>);

impl Leaving {
    pub(crate) fn new(tasks: Arc<Tasks>) -> Leaving {
        if let Err(error) = tasks.change(|counted| counted.leaving = counted.leaving.saturating_add(1)) {
            // The fork fails then, and the client gets its error.
            tracing::warn!(%error, "task limit of a cgroup not raised for a branch");
        }
        Leaving(tasks)
    }

    /// The branch stays in the leaf for good.
    pub(crate) fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        // The leaf may be gone. If the limit stays high, the next branch sets it anew.
        let _ = self.0.change(|counted| counted.leaving = counted.leaving.saturating_sub(1));
    }
}
