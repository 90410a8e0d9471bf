//! A draft of a snapshot that a task may drop at any point: a thread that may wait for the disk removes it.

use forkd_store::Draft;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::util::task::{self, Task};

/// A draft that tasks hold. Dropping it removes the draft, in the background.
#[derive(Debug)]
pub(crate) struct HeldDraft(Option<(Draft, TaskTrackerToken)>);

impl HeldDraft {
    /// Counted by `count` until nothing is left of it.
    pub(crate) fn new(draft: Draft, count: &TaskTracker) -> Self {
        HeldDraft(Some((draft, count.token())))
    }

    /// The draft, for a thread that may wait for the disk.
    pub(crate) fn take(mut self) -> Option<Draft> {
        self.0.take().map(|(draft, _)| draft)
    }
}

impl Drop for HeldDraft {
    fn drop(&mut self) {
        let Some(held) = self.0.take() else { return };
        // Removing a draft collects garbage, too: it reads all manifests. Outside a runtime it holds up no task.
        if tokio::runtime::Handle::try_current().is_ok() {
            task::spawn_blocking(Task::Blocking, move || drop(held));
        }
    }
}
