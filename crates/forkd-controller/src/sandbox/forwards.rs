//! The requests that clients have under way into one sandbox.
//!
//! A forwarded request may last for ever, and holds a connection of the daemon. Without a limit for each sandbox, the
//! clients of one could take all of them. Clients of most ports need no token, so they share no places with those of
//! the agent and of the code interpreter, who do.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// The most requests at once to the agent and the code interpreter, and the most to all other ports.
pub(crate) const MAX_FORWARDS: usize = 256;

/// See the module's page.
#[derive(Debug)]
pub(crate) struct Forwards {
    guarded: Arc<Semaphore>,
    others: Arc<Semaphore>,
}

impl Default for Forwards {
    fn default() -> Self {
        let places = || Arc::new(Semaphore::new(MAX_FORWARDS));
        Forwards { guarded: places(), others: places() }
    }
}

impl Forwards {
    /// A place for one request, until it is dropped; none if there are too many. `is_guarded` says whether the
    /// request is to the agent or the code interpreter.
    pub(crate) fn enter(&self, is_guarded: bool) -> Option<OwnedSemaphorePermit> {
        let places = if is_guarded { &self.guarded } else { &self.others };
        places.clone().try_acquire_owned().ok()
    }
}
