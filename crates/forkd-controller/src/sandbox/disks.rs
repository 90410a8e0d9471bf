//! The number of frozen layers of a sandbox's disks, and the queue of branches that wait to add one.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore, watch};

/// At this many frozen layers a branch waits for a merge: a monitor takes only a few more.
pub(crate) const CROWDED: usize = 18;

/// How many branches may wait for one sandbox.
pub(crate) const MAX_WAITING: usize = 8;

/// The frozen layers of a sandbox's disks, as the daemon knows them.
#[derive(Debug)]
pub(crate) struct Disks {
    /// How often a merge replaced frozen layers. A branch and a merge hold the lock while they change layers.
    pub(crate) generation: Mutex<u64>,
    /// The frozen layers of the disk that has most.
    pub(crate) frozen: watch::Sender<usize>,
    /// A branch that waits for a merge holds one permit.
    pub(crate) waiting: Arc<Semaphore>,
    /// The branch that is next holds this lock until its layer is counted in `frozen`.
    queue: Arc<Mutex<()>>,
}

impl Default for Disks {
    fn default() -> Self {
        let waiting = Arc::new(Semaphore::new(MAX_WAITING));
        Disks { generation: Mutex::default(), frozen: watch::Sender::new(0), waiting, queue: Arc::default() }
    }
}

impl Disks {
    /// Whether a branch must wait for a merge.
    pub(crate) fn are_crowded(&self) -> bool {
        *self.frozen.borrow() >= CROWDED
    }

    /// Waits until it is this branch's turn and its disks have room for a layer. The guard is the turn.
    pub(crate) async fn room(&self) -> OwnedMutexGuard<()> {
        let turn = self.queue.clone().lock_owned().await;
        let _ = self.frozen.subscribe().wait_for(|frozen| *frozen < CROWDED).await;
        turn
    }
}
