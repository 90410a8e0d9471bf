//! A draft of a snapshot that is given up somewhere in a task: it goes on a thread that may wait for the disk.

use forkd_store::Draft;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::util::task::{self, Task};

/// A draft in the hands of tasks. Dropping it removes the draft, in the background.
#[derive(Debug)]
pub(crate) struct HeldDraft(Option<(Draft, TaskTrackerToken)>);

impl HeldDraft {
    /// Counted by `count` until nothing is left of it.
    pub(crate) fn new(draft: Draft, count: &TaskTracker) -> Self {
        HeldDraft(Some((draft, count.token())))
    }

    /// The draft, for a thread that may wait.
    pub(crate) fn take(mut self) -> Option<Draft> {
        self.0.take().map(|(draft, _)| draft)
    }
}

impl Drop for HeldDraft {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        // Removing it collects garbage, too: all manifests are read. Outside a runtime no task is held up.
        if tokio::runtime::Handle::try_current().is_ok() {
            task::spawn_blocking(Task::Blocking, move || drop(held));
        }
    }
}
