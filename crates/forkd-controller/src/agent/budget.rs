//! Room for what guests say: everything that is collected whole and that nobody has taken yet counts, of all
//! sandboxes together, so that many guests that say much to clients that read slowly take no more than that.

use std::sync::{Arc, LazyLock};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// All there is, in bytes.
const MAX: usize = 256 << 20;
static ALL: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(MAX)));

/// The room that something a guest said takes. It is given back when this is dropped: to be kept until the last
/// byte is on its way.
#[derive(Debug)]
pub struct ResponseBudget {
    all: Arc<Semaphore>,
    taken: Option<OwnedSemaphorePermit>,
}

impl Default for ResponseBudget {
    /// None yet.
    fn default() -> Self {
        ResponseBudget::in_all(ALL.clone())
    }
}

impl ResponseBudget {
    fn in_all(all: Arc<Semaphore>) -> Self {
        ResponseBudget { all, taken: None }
    }

    /// Takes as many bytes more; false if so many are not left. It never waits: who has some room must not wait
    /// for others who have some, too.
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
    /// How much there is for all.
    pub(crate) const ALL: usize = MAX;

    /// In a world of its own, of as many bytes.
    pub(crate) fn of(bytes: usize) -> Self {
        ResponseBudget::in_all(Arc::new(Semaphore::new(bytes)))
    }

    /// How much is left for others.
    pub(crate) fn left(&self) -> usize {
        self.all.available_permits()
    }

    /// Another one in the same world.
    pub(crate) fn beside(&self) -> Self {
        ResponseBudget::in_all(self.all.clone())
    }

    pub(crate) fn taken(&self) -> usize {
        self.taken.as_ref().map_or(0, OwnedSemaphorePermit::num_permits)
    }
}
