//! The memory of all sandboxes together. A reading walks the page tables of each sandbox. So readings are rare,
//! and never concurrent, however often clients ask.

use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::host::process_stats;

/// The minimal time between two readings.
const FRESH: Duration = Duration::from_secs(5);
/// The pause after a reading, as a multiple of its duration.
const SHARE: u32 = 20;
/// How long a caller waits for a reading; then it gets the last figures.
const SAMPLE_TIMEOUT: Duration = Duration::from_millis(500);

/// Memory of all sandboxes, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Memory {
    /// Pages that only one sandbox has.
    pub(crate) private: u64,
    /// Pages that more than one process has, counted for each sandbox.
    pub(crate) shared: u64,
}

/// The last figures, and when the next reading is due.
#[derive(Debug, Default)]
pub(crate) struct MemoryUsage {
    last: std::sync::Arc<Mutex<(Memory, Option<Instant>)>>,
    reading: std::sync::Arc<tokio::sync::Mutex<()>>,
}

impl MemoryUsage {
    /// The memory of processes `pids`.
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
        let _ = tokio::time::timeout(SAMPLE_TIMEOUT, read).await;
        last().0
    }
}

fn sum(pids: &[u32]) -> Memory {
    let mut memory = Memory::default();
    // A process that has ended uses no memory.
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
    async fn figures_are_cached_for_a_while() {
        let usage = MemoryUsage::default();
        let first = usage.memory(vec![std::process::id()]).await;
        assert!(first.private > 0);
        // No process is read again: the sum of no processes would be zero.
        assert_eq!(usage.memory(Vec::new()).await, first);
    }
}
