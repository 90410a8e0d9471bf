//! What all sandboxes use together. Reading it walks the page tables of every one of them, so it is read
//! rarely, by one at a time, however often somebody asks.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::host::process_stats;

/// It is never read more often than this.
const FRESH: Duration = Duration::from_secs(5);
/// Nor for more than this part of the time.
const SHARE: u32 = 20;
/// How long whoever asks waits for it; then the last figures have to do.
const PATIENCE: Duration = Duration::from_millis(500);

/// Memory of all sandboxes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// What only one of them has.
    pub(crate) private: u64,
    /// What more than one process has, counted for each sandbox.
    pub(crate) shared: u64,
}

/// The last figures, and when they were read.
#[derive(Debug, Default)]
pub(crate) struct MemoryUsage {
    last: std::sync::Arc<Mutex<(Memory, Option<Instant>)>>,
    reading: std::sync::Arc<tokio::sync::Mutex<()>>,
}

impl MemoryUsage {
    /// Of the processes `pids`.
    pub(crate) async fn memory(&self, pids: Vec<u32>) -> Memory {
        let last = || *self.last.lock();
        let Ok(turn) = self.reading.clone().try_lock_owned() else { return last().0 };
        if last().1.is_some_and(|due| Instant::now() < due) {
            return last().0;
        }
        let kept = self.last.clone();
        let read = tokio::task::spawn_blocking(move || {
            let begun = Instant::now();
            let memory = sum(&pids);
            let due = Instant::now() + FRESH.max(begun.elapsed() * SHARE);
            *kept.lock() = (memory, Some(due));
            drop(turn);
        });
        let _ = tokio::time::timeout(PATIENCE, read).await;
        last().0
    }
}

fn sum(pids: &[u32]) -> Memory {
    let mut memory = Memory::default();
    // One that is gone uses nothing.
    for stats in pids.iter().filter_map(|pid| process_stats::memory(*pid).ok()) {
        memory.private = memory.private.saturating_add(stats.private_kib << 10);
        memory.shared = memory.shared.saturating_add(stats.shared_kib << 10);
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn figures_are_kept_for_a_while_however_often_somebody_asks() {
        let usage = MemoryUsage::default();
        let first = usage.memory(vec![std::process::id()]).await;
        assert!(first.private > 0);
        // Nobody is looked at again: nothing would be the sum of nobody.
        assert_eq!(usage.memory(Vec::new()).await, first);
    }
}
