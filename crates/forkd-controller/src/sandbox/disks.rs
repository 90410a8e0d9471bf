//! How many frozen layers a sandbox's disks have, and the queue of branches that would add one more.

use std::sync::Arc;

use tokio::sync::{Mutex, OwnedMutexGuard, Semaphore, watch};

/// From this many frozen layers on, a branch waits until they are merged: a monitor takes few more.
pub(crate) const CROWDED: usize = 18;

/// How many wait for one sandbox.
pub(crate) const MAX_WAITING: usize = 8;

/// What is known of a sandbox's disks.
#[derive(Debug)]
pub(crate) struct Disks {
    /// How often their frozen layers were replaced. Held by whoever adds to them or replaces them.
    pub(crate) generation: Mutex<u64>,
    /// How many frozen layers the fullest one has, as far as is known.
    pub(crate) frozen: watch::Sender<usize>,
    /// Held by branches that wait until they are fewer.
    pub(crate) waiting: Arc<Semaphore>,
    /// Held by the one among them whose turn it is, until it is taken and counted.
    queue: Arc<Mutex<()>>,
}

impl Default for Disks {
    fn default() -> Self {
        let waiting = Arc::new(Semaphore::new(MAX_WAITING));
        Disks { generation: Mutex::default(), frozen: watch::Sender::new(0), waiting, queue: Arc::default() }
    }
}

impl Disks {
    /// Whether they take hardly another layer.
    pub(crate) fn are_crowded(&self) -> bool {
        *self.frozen.borrow() >= CROWDED
    }

    /// Returns when they take another layer, and it is nobody else's turn to add one.
    pub(crate) async fn room(&self) -> OwnedMutexGuard<()> {
        let turn = self.queue.clone().lock_owned().await;
        let _ = self.frozen.subscribe().wait_for(|frozen| *frozen < CROWDED).await;
        turn
    }
}
