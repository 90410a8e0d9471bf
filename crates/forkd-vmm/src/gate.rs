//! Where the threads of a VM wait when they are told to.
//!
//! A thread that waits here holds no lock and has nothing half done: its vCPU can be saved, its devices
//! looked at, and the process can fork. In a fork, where the threads are no more, nobody may touch their
//! gate: one of them may have been about to look at it.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// What the threads are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Do their work.
    Run,
    /// Wait at the gate.
    Park,
    /// End.
    Stop,
}

/// Where threads wait and are told to run or to end.
#[derive(Debug)]
pub struct ParkGate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    order: Order,
    /// Threads that wait here.
    waiting: usize,
    /// Threads that will come here when told to.
    alive: usize,
}

impl ParkGate {
    /// A gate for nobody yet.
    pub fn new(order: Order) -> ParkGate {
        ParkGate { state: Mutex::new(GateState { order, waiting: 0, alive: 0 }), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread belongs here from now on. Called before it is started.
    pub fn enter(&self) {
        self.lock().alive += 1;
    }

    /// A thread has ended.
    pub fn leave(&self) {
        self.lock().alive -= 1;
        self.changed.notify_all();
    }

    /// Gives the order. A thread that is at work has to be made to look.
    pub fn order(&self, order: Order) {
        self.lock().order = order;
        self.changed.notify_all();
    }

    /// Waits while the order is to park. Returns whether to run on.
    pub fn pass(&self) -> bool {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        while state.order == Order::Park {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        state.order == Order::Run
    }

    /// Returns when every thread waits here, or has ended.
    pub fn wait_until_parked(&self) {
        let mut state = self.lock();
        while state.waiting < state.alive {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}
