//! Network slots for sandboxes. The network is opened when a sandbox first needs a slot, so a daemon without
//! network use does not pay for it.
//!
//! A host that cannot have slots (no root, no kernel support) still runs sandboxes. These have no network; their
//! descriptions show that, and the log has the reason. The cause may be temporary, so the daemon tries again,
//! but not for every sandbox. Calls block.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use forkd_net::{Network, NetworkConfig, Pool, Slot};
use parking_lot::{Mutex, MutexGuard};

use crate::config::Config;
use crate::error::chain;

/// The pause after a failed attempt on a host that never had a slot.
const PAUSE: Duration = Duration::from_secs(5);

/// The daemon's network.
#[derive(Debug)]
pub(crate) struct Slots {
    config: NetworkConfig,
    /// How many slots are made ahead.
    ahead: usize,
    state: Mutex<SlotState>,
    /// How many sandboxes use one of the slots of an earlier daemon without a known slot name.
    held: AtomicUsize,
}

/// Keeps all slots of an earlier daemon: a sandbox uses one of them, but it is not known which. A hold that is
/// dropped without [`Hold::release`] keeps them until this daemon ends.
#[derive(Debug)]
pub(crate) struct Hold(Arc<Slots>);

impl Hold {
    /// The sandbox has ended: removes the slots that no sandbox uses, if this was the last hold. Blocks.
    pub(crate) fn release(self) {
        self.0.held.fetch_sub(1, Ordering::SeqCst);
        self.0.sweep();
    }
}

#[derive(Debug, Default)]
struct SlotState {
    network: Option<Network>,
    /// Started after the first slot was made.
    pool: Option<Arc<Pool>>,
    attempts: Attempts,
    /// Set when the daemon ends: no slot is made any more.
    closed: bool,
}

impl Slots {
    /// The slots of this configuration.
    pub(crate) fn of(config: &Config) -> Self {
        let network = NetworkConfig {
            opened: config.egress_private.clone(),
            flows: config.slot_flows,
            ..NetworkConfig::new(config.run_dir.join("netns"))
        };
        Slots::new(network, config.network_pool)
    }

    fn new(config: NetworkConfig, ahead: usize) -> Self {
        Slots { config, ahead, state: Mutex::default(), held: AtomicUsize::new(0) }
    }

    /// A hold for a sandbox whose slot is not known.
    pub(crate) fn hold(self: &Arc<Self>) -> Hold {
        self.held.fetch_add(1, Ordering::SeqCst);
        Hold(self.clone())
    }

    fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock()
    }

    /// A slot; `None` if the host cannot have any, as far as is known.
    pub(crate) fn get(&self) -> forkd_net::Result<Option<Slot>> {
        let (network, pool) = {
            let mut state = self.state.lock();
            if !state.attempts.may_try(Instant::now()) {
                return Ok(None);
            }
            let Some(network) = self.open(&mut state) else { return Ok(None) };
            (network, state.pool.clone())
        };
        let made = match pool {
            Some(pool) => pool.get(),
            None => network.make(),
        };
        let mut state = self.state.lock();
        match made {
            Ok(slot) => {
                state.attempts.worked();
                if state.pool.is_none() && !state.closed {
                    match Pool::new(network, self.ahead) {
                        Ok(pool) => state.pool = Some(pool.into()),
                        Err(error) => tracing::warn!(%error, "network slots not made ahead"),
                    }
                }
                Ok(Some(slot))
            }
            // The network opened, and yet not even the first slot could be made.
            Err(error) if !state.attempts.proven => {
                state.attempts.failed(chain(&error), Instant::now());
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// The network, opened on first use; `None` if it cannot be opened.
    fn open(&self, state: &mut SlotState) -> Option<Network> {
        if state.closed || state.network.is_some() {
            return state.network.clone();
        }
        match Network::open(self.config.clone()).map_err(|error| chain(&error)) {
            Ok(network) => {
                if let Err(why) = network.outbound() {
                    tracing::warn!(why, "sandbox network has no way out");
                }
                state.network = Some(network);
            }
            Err(why) => state.attempts.failed(why, Instant::now()),
        }
        state.network.clone()
    }

    /// Whether an earlier daemon has left any slots.
    fn has_leftovers(&self) -> bool {
        std::fs::read_dir(&self.config.run_dir).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// The slot `name`, which a sandbox of an earlier daemon still uses.
    pub(crate) fn adopt(&self, name: &str) -> Option<Slot> {
        let mut state = self.state.lock();
        let network = self.open(&mut state)?;
        match network.adopt(name) {
            Ok(slot) => {
                state.attempts.worked();
                Some(slot)
            }
            Err(error) => {
                tracing::warn!(slot = name, error = chain(&error), "network slot of a sandbox not adopted");
                None
            }
        }
    }

    /// Gives adopted slots the packet filter rules of this daemon, and removes an earlier daemon's slots that no
    /// sandbox has adopted.
    pub(crate) fn sweep(&self) {
        if !self.has_leftovers() {
            return;
        }
        let Some(network) = self.open(&mut self.state.lock()) else { return };
        for error in network.renew() {
            let error = chain(&error);
            tracing::warn!(error, "packet filter rules of a network slot not renewed");
        }
        if self.held.load(Ordering::SeqCst) > 0 {
            tracing::warn!("no network slot removed: the slot of a sandbox in state unknown is not known");
            return;
        }
        match network.sweep() {
            Ok(swept) if swept.is_empty() => {}
            Ok(swept) => tracing::info!(slots = swept.len(), "unused network slots removed"),
            Err(error) => tracing::warn!(error = chain(&error), "unused network slots not removed"),
        }
    }

    /// Removes the daemon's own network objects from the host.
    pub(crate) fn close(&self) {
        let SlotState { network, pool, .. } =
            std::mem::replace(&mut *self.lock(), SlotState { closed: true, ..SlotState::default() });
        drop(pool);
        if let Some(Err(error)) = network.map(|network| network.close()) {
            tracing::warn!(error = chain(&error), "packet filter rules of the host not removed");
        }
    }
}

/// Whether this host can have slots, from earlier attempts.
#[derive(Debug, Default)]
struct Attempts {
    /// Whether a slot was ever made.
    proven: bool,
    /// Why and when the last attempt failed, if no slot was made since.
    failed: Option<(String, Instant)>,
}

impl Attempts {
    fn may_try(&self, now: Instant) -> bool {
        self.proven || self.failed.as_ref().is_none_or(|(_, at)| now.duration_since(*at) >= PAUSE)
    }

    fn worked(&mut self) {
        self.proven = true;
        if self.failed.take().is_some() {
            tracing::info!("network slots available: new sandboxes have a network");
        }
    }

    /// Records a failed attempt; logs each reason once.
    fn failed(&mut self, why: String, now: Instant) {
        if self.failed.as_ref().is_none_or(|(before, _)| *before != why) {
            tracing::warn!(
                why,
                "network slots not available: sandboxes have no network; later ones try again"
            );
        }
        self.failed = Some((why, now));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_is_tried_again_a_while_later_and_never_given_up() {
        let (mut attempts, begun) = (Attempts::default(), Instant::now());
        let after = |secs: u64| begun + Duration::from_secs(secs);
        for round in 0..100 {
            assert!(attempts.may_try(after(round * 5)), "{round}");
            attempts.failed("busy".into(), after(round * 5));
            assert!(!attempts.may_try(after(round * 5 + 4)), "{round}");
        }
        attempts.worked();
        assert!(attempts.may_try(after(0)) && attempts.failed.is_none());
    }

    #[test]
    fn no_slot_is_removed_while_it_is_not_known_which_one_a_sandbox_has() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("NOT RUN: only root has network slots");
            return;
        }
        // In its own network namespace: the test must not change the host's rules.
        let alone = std::thread::spawn(|| {
            // SAFETY: the call changes which network this thread is in, and touches no memory.
            if unsafe { libc::unshare(libc::CLONE_NEWNET) } != 0 {
                return eprintln!("NOT RUN: no network namespaces here");
            }
            let folder = tempfile::tempdir().unwrap();
            let left = folder.path().join("forkd-1");
            std::fs::write(&left, "").unwrap();
            let slots = Arc::new(Slots::new(NetworkConfig::new(folder.path()), 0));
            let holds = [slots.hold(), slots.hold()];
            slots.sweep();
            assert!(left.exists());
            let mut still = holds.len();
            for hold in holds {
                hold.release();
                still -= 1;
                assert_eq!(left.exists(), still > 0);
            }
            slots.close();
        });
        alone.join().unwrap();
    }

    #[test]
    fn a_sandbox_has_no_network_where_it_cannot_be_opened_and_none_is_made_after_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        std::fs::write(&blocked, "").unwrap();
        let slots = Slots::new(NetworkConfig::new(blocked.join("netns")), 1);
        assert!(slots.get().unwrap().is_none());
        let first = slots.state.lock().attempts.failed.clone().unwrap();
        // Right after it, nothing is tried.
        assert!(slots.get().unwrap().is_none());
        assert_eq!(slots.state.lock().attempts.failed.as_ref(), Some(&first));
        let longer = Instant::now() - PAUSE;
        slots.state.lock().attempts.failed = Some((first.0, longer));
        assert!(slots.get().unwrap().is_none());
        assert!(
            slots.state.lock().attempts.failed.as_ref().is_some_and(|(_, at)| *at > longer),
            "it was tried again"
        );
        slots.close();
        assert!(slots.get().unwrap().is_none());
    }
}
