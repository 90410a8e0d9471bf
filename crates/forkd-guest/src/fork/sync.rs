//! Making the file systems clean by a given time. A sync cannot be called off, and how long it takes is up
//! to the processes of the guest and to its disk. So it runs on a thread of its own, and the agent waits for
//! it only as long as there is time.

use std::{
    io,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

/// All its thread does is to wait for the kernel.
const STACK: usize = 128 << 10;

pub(super) struct Syncing {
    sync: fn(),
    under_way: Arc<UnderWay>,
}

/// Whether there is a thread, and the callers that wait for it to end.
#[derive(Default)]
struct UnderWay {
    running: Mutex<bool>,
    ended: Condvar,
}

impl Syncing {
    pub(super) fn new(sync: fn()) -> Self {
        Syncing { sync, under_way: Arc::default() }
    }

    /// Writes to the disk what is not there when this is called. `false` if that takes until `deadline`; it
    /// goes on then. There is never more than one: with `join` the next call first waits for it to end, and
    /// without it gives up at once, so that a sync that hangs holds up no later call.
    pub(super) fn finish_by(&self, deadline: Instant, join: bool) -> io::Result<bool> {
        // One that is under way may have passed what was written since it began.
        let mut running = if join { self.under_way.wait(deadline) } else { self.under_way.lock() };
        if *running || Instant::now() >= deadline {
            return Ok(false);
        }
        let (sync, under_way) = (self.sync, self.under_way.clone());
        thread::Builder::new().name("sync".into()).stack_size(STACK).spawn(move || {
            sync();
            *under_way.lock() = false;
            under_way.ended.notify_all();
        })?;
        *running = true;
        drop(running);
        Ok(!*self.under_way.wait(deadline))
    }
}

impl UnderWay {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until there is no thread, or no time.
    fn wait(&self, deadline: Instant) -> MutexGuard<'_, bool> {
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.ended.wait_timeout_while(self.lock(), left, |running| *running);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}
