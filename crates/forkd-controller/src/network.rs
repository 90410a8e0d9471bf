//! Network slots for sandboxes: opened when somebody first needs one, so that a daemon without
//! network use pays nothing for it.
//!
//! A host that cannot have slots (no root, no kernel support) still runs sandboxes: theirs have no
//! network, and the log says so once. Calls block.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use forkd_net::{Network, NetworkConfig, Pool, Slot};

/// The daemon's network.
#[derive(Debug)]
pub(crate) struct Slots {
    run_dir: PathBuf,
    /// How many are kept ready.
    ahead: usize,
    state: Mutex<State>,
    /// Whether a slot could ever be made.
    proven: AtomicBool,
}

#[derive(Debug)]
enum State {
    Unused,
    Open(Network, Option<std::sync::Arc<Pool>>),
    Impossible,
}

impl Slots {
    pub(crate) fn new(run_dir: PathBuf, ahead: usize) -> Self {
        Slots { run_dir, ahead, state: Mutex::new(State::Unused), proven: AtomicBool::new(false) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A slot; `None` where there can be none.
    pub(crate) fn get(&self) -> forkd_net::Result<Option<Slot>> {
        let pool = {
            let mut state = self.lock();
            self.open(&mut state);
            match &mut *state {
                State::Open(network, pool) => match pool {
                    Some(pool) => pool.clone(),
                    None => match Pool::new(network.clone(), self.ahead) {
                        Ok(made) => pool.insert(made.into()).clone(),
                        Err(error) => {
                            tracing::warn!(%error, "cannot make network slots ahead");
                            return network.make().map(Some);
                        }
                    },
                },
                _ => return Ok(None),
            }
        };
        match pool.get() {
            Ok(slot) => {
                self.proven.store(true, Ordering::Relaxed);
                Ok(Some(slot))
            }
            // The host is ready for slots, it seemed, and yet not even the first could be made.
            Err(error) if !self.proven.load(Ordering::Relaxed) => {
                tracing::warn!(error = chain(&error), "sandboxes have no network");
                *self.lock() = State::Impossible;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    fn open(&self, state: &mut State) {
        if !matches!(state, State::Unused) {
            return;
        }
        let made = std::fs::create_dir_all(&self.run_dir).map_err(|error| error.to_string());
        let config = NetworkConfig::new(&self.run_dir);
        *state = match made.and_then(|()| Network::open(config).map_err(|error| chain(&error))) {
            Ok(network) => {
                if let Err(why) = network.outbound() {
                    tracing::warn!(why, "sandboxes have a network, but no way out of it");
                }
                State::Open(network, None)
            }
            Err(why) => {
                tracing::warn!(why, "sandboxes have no network");
                State::Impossible
            }
        };
    }

    /// Whether an earlier daemon has left any.
    fn has_leftovers(&self) -> bool {
        std::fs::read_dir(&self.run_dir).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// The slot `name`, which a sandbox that an earlier daemon made still uses.
    pub(crate) fn adopt(&self, name: &str) -> Option<Slot> {
        let mut state = self.lock();
        self.open(&mut state);
        let State::Open(network, _) = &*state else { return None };
        match network.adopt(name) {
            Ok(slot) => Some(slot),
            Err(error) => {
                tracing::warn!(slot = name, error = chain(&error), "a sandbox's network is lost");
                None
            }
        }
    }

    /// Removes what an earlier daemon left and nobody has adopted.
    pub(crate) fn sweep(&self) {
        if !self.has_leftovers() {
            return;
        }
        let mut state = self.lock();
        self.open(&mut state);
        let State::Open(network, _) = &*state else { return };
        match network.sweep() {
            Ok(swept) if swept.is_empty() => {}
            Ok(swept) => tracing::info!(slots = swept.len(), "removed network slots nobody uses"),
            Err(error) => tracing::warn!(error = chain(&error), "cannot remove old network slots"),
        }
    }

    /// Gives back to the host what only we need.
    pub(crate) fn close(&self) {
        let state = std::mem::replace(&mut *self.lock(), State::Impossible);
        if let State::Open(network, pool) = state {
            drop(pool);
            if let Err(error) = network.close() {
                tracing::warn!(error = chain(&error), "cannot take back the network's rules");
            }
        }
    }
}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}
