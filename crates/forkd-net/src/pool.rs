//! Slots made before they are asked for: making one takes longer than forking a guest.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::network::in_parallel;
use crate::{Network, Result, Slot};

/// How long nothing is made ahead after it failed.
const RETRY_INTERVAL: Duration = Duration::from_secs(5);

/// Keeps a number of slots ready. On drop it destroys the unused ones.
#[derive(Debug)]
pub struct Pool {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    network: Network,
    size: usize,
    state: Mutex<State>,
    /// A caller took a slot, or it is time to end.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ready: VecDeque<Slot>,
    ending: bool,
}

impl Pool {
    /// Starts to make slots, until `size` are ready.
    pub fn new(network: Network, size: usize) -> io::Result<Self> {
        let shared = Arc::new(Shared { network, size, state: Mutex::default(), changed: Condvar::new() });
        let filling = Arc::clone(&shared);
        let thread =
            std::thread::Builder::new().name("network-slots".into()).spawn(move || filling.fill())?;
        Ok(Pool { shared, thread: Some(thread) })
    }

    /// A slot that is ready, or else a new one, made while the caller waits.
    pub fn get(&self) -> Result<Slot> {
        let ready = self.shared.state().ready.pop_front();
        self.shared.changed.notify_all();
        match ready {
            Some(slot) => Ok(slot),
            None => self.shared.network.make(),
        }
    }

    /// How many are ready.
    pub fn ready(&self) -> usize {
        self.shared.state().ready.len()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.state().ending = true;
        self.shared.changed.notify_all();
        if let Some(thread) = self.thread.take() {
            // It does not panic; and if it did, its slots can still be destroyed.
            let _ = thread.join();
        }
        let unused = std::mem::take(&mut self.shared.state().ready);
        in_parallel(unused.into(), |mut slot| {
            if let Err(error) = slot.destroy() {
                tracing::warn!(slot = slot.name(), %error, "a network slot could not be removed");
            }
        });
    }
}

impl Shared {
    /// Makes slots until it is time to end.
    fn fill(&self) {
        let mut state = self.state();
        while !state.ending {
            if state.ready.len() >= self.size {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            drop(state);
            let made = self.network.make();
            state = self.state();
            match made {
                Ok(slot) => state.ready.push_back(slot),
                Err(error) => {
                    tracing::warn!(%error, "a network slot could not be made ahead");
                    let waited =
                        self.changed.wait_timeout_while(state, RETRY_INTERVAL, |state| !state.ending);
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
