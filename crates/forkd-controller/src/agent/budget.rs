//! A global budget for guest output that the daemon has collected whole and no client has taken yet. It holds for
//! all sandboxes together, so chatty guests and slow clients cannot use up the daemon's memory.

use std::sync::{Arc, LazyLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The whole budget, in bytes.
const MAX: usize = 256 << 20;
static ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(MAX)));

/// A share of the budget, for one response. Dropping it gives the bytes back, so keep it until the last byte is
/// sent.
#[derive(Debug)]
pub struct ResponseBudget {
    all: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Default for ResponseBudget {
    /// An empty share.
    fn default() -> Self {
        ResponseBudget::in_all(ALL.clone())
    }
}

impl ResponseBudget {
    fn in_all(all: Arc<Semaphore>) -> Self {
        ResponseBudget { all, taken: None }
    }

    /// Takes as many bytes more; false if the budget has fewer left. It never waits: holders that wait for each
    /// other's shares would deadlock.
    pub(crate) fn take(&mut self, bytes: usize) -> bool {
        let Ok(bytes) = u32::try_from(bytes) else { return false };
        let Ok(more) = self.all.clone().try_acquire_many_owned(bytes) else { return false };
        match &mut self.taken {
            Some(taken) => taken.merge(more),
            None => self.taken = Some(more),
        }
        true
    }
}

#[cfg(test)]
impl ResponseBudget {
    /// The whole budget, in bytes.
    pub(crate) const ALL: usize = MAX;

    /// A share of a separate budget of `bytes`.
    pub(crate) fn of(bytes: usize) -> Self {
        ResponseBudget::in_all(Arc::new(Semaphore::new(bytes)))
    }

    /// Bytes that no share holds.
    pub(crate) fn left(&self) -> usize {
        self.all.available_permits()
    }

    /// Another share of the same budget.
    pub(crate) fn beside(&self) -> Self {
        ResponseBudget::in_all(self.all.clone())
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }
}
