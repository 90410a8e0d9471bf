//! A queue of clean-up jobs, run on one thread at a time.
//!
//! Without it, the deletion of a thousand sandboxes would be a thousand threads that wait for the same file system.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot};

use crate::util::task::{self, Task};

/// How many jobs run before the thread is given back.
const BATCH: usize = 64;
/// How long to wait before a failed removal of a folder is repeated.
const REMOVE_RETRY: Duration = Duration::from_secs(5);
const REMOVE_TRIES: u32 = 12;

type CleanupJob = Box<dyn FnOnce() + Send>;

/// Runs blocking jobs in order. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct CleanupQueue(mpsc::UnboundedSender<CleanupJob>);

impl CleanupQueue {
    /// Must be called in a runtime.
    pub(crate) fn new() -> Self {
        let (sender, jobs) = mpsc::unbounded_channel::<CleanupJob>();
        let jobs = Arc::new(tokio::sync::Mutex::new(jobs));
        task::keep_running(Task::CleanupQueue, move || work(jobs.clone()));
        CleanupQueue(sender)
    }

    /// Runs `job` and returns its result; `None` if it panicked or the runtime ended.
    pub(crate) async fn run<T: Send + 'static>(&self, job: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (reply, replied) = oneshot::channel();
        let job = Box::new(move || drop(reply.send(job())));
        self.0.send(job).ok()?;
        replied.await.ok()
    }

    /// Runs `job` at some time.
    pub(crate) fn later(&self, job: impl FnOnce() + Send + 'static) {
        // Fails only when the runtime ends; the next start sweeps then.
        let _ = self.0.send(Box::new(job));
    }

    /// Removes a folder. The next start sweeps a folder that cannot be removed now.
    pub(crate) async fn remove_folder(&self, folder: PathBuf) {
        for attempt in 1..=REMOVE_TRIES {
            let path = folder.clone();
            match self.run(move || std::fs::remove_dir_all(path)).await {
                Some(Ok(())) | None => return,
                Some(Err(error)) if error.kind() == io::ErrorKind::NotFound => return,
                Some(Err(error)) => {
                    tracing::error!(folder = %folder.display(), %error, attempt, "folder not removed");
                    tokio::time::sleep(REMOVE_RETRY).await;
                }
            }
        }
    }
}

/// Runs all jobs of the queue.
async fn work(jobs: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<CleanupJob>>>) {
    // The lock is free except after a panic, while the previous worker ends.
    let (mut jobs, mut batch) = (jobs.lock().await, Vec::with_capacity(BATCH));
    while jobs.recv_many(&mut batch, BATCH).await > 0 {
        let work = std::mem::replace(&mut batch, Vec::with_capacity(BATCH));
        let done = task::spawn_blocking(Task::CleanupQueue, move || work.into_iter().for_each(attempt)).await;
        if let Err(error) = done {
            tracing::error!(%error, "clean-up jobs failed: the next start removes the rest");
        }
    }
}

/// Runs a job. A panic does not affect the other jobs.
fn attempt(job: CleanupJob) {
    if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job)) {
        task::note(Task::CleanupQueue, &*panic, "the next start removes what is left");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_thousand_folders_go_with_one_thread_at_a_time() {
        use std::sync::Arc;
        use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
        let cleanup_queue = CleanupQueue::new();
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let jobs = (0..1000).map(|_| {
            let (now, most) = (now.clone(), most.clone());
            cleanup_queue.run(move || {
                most.fetch_max(now.fetch_add(1, SeqCst) + 1, SeqCst);
                std::thread::yield_now();
                now.fetch_sub(1, SeqCst);
            })
        });
        let done = futures_util::future::join_all(jobs).await;
        assert!(done.iter().all(Option::is_some));
        assert_eq!(most.load(SeqCst), 1);
    }

    #[tokio::test]
    async fn a_job_that_panics_does_not_stop_the_next() {
        let cleanup_queue = CleanupQueue::new();
        assert_eq!(cleanup_queue.run(|| -> u8 { panic!("on purpose") }).await, None);
        assert_eq!(cleanup_queue.run(|| 7).await, Some(7));
    }
}
