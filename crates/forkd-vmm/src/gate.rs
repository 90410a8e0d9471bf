//! The gate at which the threads of a VM park.
//!
//! A thread that waits here holds no lock and has nothing half done: its vCPU can be saved, its devices read,
//! and the process can fork. In a fork, where the threads do not exist, the gate must not be touched: a
//! thread may have been about to take its lock.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// An order to the threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Do their work.
    Run,
    /// Wait at the gate.
    Park,
    /// End.
    Stop,
}

/// Parks threads, and orders them to run or to end.
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
    /// Threads that will come here on an order.
    alive: usize,
}

impl ParkGate {
    /// A gate without threads yet.
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

    /// Gives the order. A thread at work has to be woken to see it.
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
