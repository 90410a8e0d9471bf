//! The daemon's background tasks: each has a name, and a rule for a panic.
//!
//! A panic is a bug. The daemon logs it, counts it (`forkd_task_panics_total`), and then follows the rule:
//!
//! - [`spawn`]: a request or an object waits for this work. The waiter gets the panic through the handle.
//! - [`spawn_or`]: the same for a waiter without the handle: a callback reports the panic to it.
//! - [`keep_running`]: a loop that serves the whole daemon. It starts again, after a pause that doubles.
//! - [`Vital::spawn`]: the daemon breaks its promises without this task, and the task cannot start again. The daemon
//!   stops, with an error.
//!
//! Nothing else in the daemon calls `tokio::spawn`.

use std::any::Any;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use futures_util::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::task::{AbortOnDropHandle, TaskTracker};

use crate::error::{Error, Result};

/// The pause before a loop starts again for the first time.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);
/// A loop that ran this long starts again after the first pause.
const CALM: Duration = Duration::from_secs(60);

macro_rules! tasks {
    ($($task:ident $name:literal,)*) => {
        /// The kind of a task.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Task {
            $($task,)*
        }

        impl Task {
            /// All kinds, in the order of their numbers.
            const ALL: &[Task] = &[$(Task::$task),*];

            /// The name in logs and metrics.
            pub(crate) fn name(self) -> &'static str {
                match self {
                    $(Task::$task => $name,)*
                }
            }
        }
    };
}

tasks! {
    Accept "accept",
    AgentConnection "agent_connection",
    AgentPort "agent_port",
    Answer "answer",
    Archive "archive",
    AuditLine "audit_line",
    AuditReopen "audit_reopen",
    Blocking "blocking",
    Branch "branch",
    CleanupQueue "cleanup_queue",
    Companion "companion",
    Compact "compact",
    Connection "connection",
    CreateJob "create_job",
    DiskSpace "disk_space",
    Download "download",
    Fork "fork",
    Freeze "freeze",
    JsonLinesConnection "json_lines_connection",
    LoadTemplate "load_template",
    McpSessions "mcp_sessions",
    Owners "owners",
    Refresh "refresh",
    Rollback "rollback",
    Sandbox "sandbox",
    Save "save",
    SnapshotGc "snapshot_gc",
    StopUnseen "stop_unseen",
    Suspend "suspend",
    TearDown "tear_down",
    Template "template",
    Thaw "thaw",
    TimeoutAction "timeout_action",
    TimeoutLoop "timeout_loop",
    Traces "traces",
    Unload "unload",
    Workspace "workspace",
    WorkspaceSweep "workspace_sweep",
}

/// Panics by kind of task. A static, because panics belong to the process.
static PANICS: [AtomicU64; Task::ALL.len()] = [const { AtomicU64::new(0) }; Task::ALL.len()];

fn panics(task: Task) -> &'static AtomicU64 {
    &PANICS[task as usize]
}

/// Every task with the number of its panics.
pub(crate) fn panic_counts() -> impl Iterator<Item = (&'static str, u64)> {
    Task::ALL.iter().map(|task| (task.name(), panics(*task).load(Relaxed)))
}

/// Logs and counts a panic, and returns its text.
pub(crate) fn note(task: Task, panic: &(dyn Any + Send), then: &str) -> String {
    panics(task).fetch_add(1, Relaxed);
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no text".into());
    tracing::error!(task = task.name(), panic = text, then, "a task panicked: report this bug of forkd");
    text
}

/// Starts work that a caller waits for: the handle gives what it returns, or its panic.
pub(crate) fn spawn<T: Send + 'static>(
    task: Task,
    work: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(async move {
        AssertUnwindSafe(work).catch_unwind().await.unwrap_or_else(|panic| {
            note(task, &*panic, "its waiter gets an error");
            std::panic::resume_unwind(panic)
        })
    })
}

/// Starts work that ends when its handle is dropped. See [`spawn`].
pub(crate) fn companion<T: Send + 'static>(
    work: impl Future<Output = T> + Send + 'static,
) -> AbortOnDropHandle<T> {
    AbortOnDropHandle::new(spawn(Task::Companion, work))
}

/// Counts what holds a token of it: its `wait` returns once there is none.
pub(crate) fn tracker() -> TaskTracker {
    let tracker = TaskTracker::new();
    // An open one is never waited for to its end; a closed one still gives tokens.
    tracker.close();
    tracker
}

/// Starts work that waits for the disk or the like, on a thread of its own. See [`spawn`].
pub(crate) fn spawn_blocking<T: Send + 'static>(
    task: Task,
    work: impl FnOnce() -> T + Send + 'static,
) -> JoinHandle<T> {
    tokio::task::spawn_blocking(move || {
        std::panic::catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
            note(task, &*panic, "its waiter gets an error");
            std::panic::resume_unwind(panic)
        })
    })
}

/// Starts work whose waiter does not hold the handle. After a panic `last_word` reports it to the waiter.
pub(crate) fn spawn_or(
    task: Task,
    work: impl Future<Output = ()> + Send + 'static,
    last_word: impl FnOnce(Error) + Send + 'static,
) -> JoinHandle<()> {
    tokio::spawn(async move {
        if let Err(panic) = AssertUnwindSafe(work).catch_unwind().await {
            let text = note(task, &*panic, "its waiter gets an error");
            last_word(panicked(task, &text));
        }
    })
}

/// Starts a loop, and starts it again after each panic. It ends when the loop returns.
pub(crate) fn keep_running<W>(task: Task, mut start: impl FnMut() -> W + Send + 'static) -> JoinHandle<()>
where
    W: Future<Output = ()> + Send + 'static,
{
    tokio::spawn(async move {
        let mut pause = FIRST_PAUSE;
        loop {
            let begun = Instant::now();
            let Err(panic) = AssertUnwindSafe(async { start().await }).catch_unwind().await else { return };
            if begun.elapsed() >= CALM {
                pause = FIRST_PAUSE;
            }
            note(task, &*panic, "it starts again");
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    })
}

/// Starts tasks that the daemon cannot run without.
#[derive(Debug, Clone)]
pub(crate) struct Vital(watch::Sender<Option<Error>>);

/// Reports the first panic of a vital task.
#[derive(Debug)]
pub(crate) struct Failed(watch::Receiver<Option<Error>>);

impl Vital {
    pub(crate) fn new() -> (Self, Failed) {
        let (sender, receiver) = watch::channel(None);
        (Vital(sender), Failed(receiver))
    }

    /// Starts work. After a panic the daemon stops.
    pub(crate) fn spawn(
        &self,
        task: Task,
        work: impl Future<Output = ()> + Send + 'static,
    ) -> JoinHandle<()> {
        let failed = self.0.clone();
        tokio::spawn(async move {
            if let Err(panic) = AssertUnwindSafe(work).catch_unwind().await {
                let text = note(task, &*panic, "the daemon stops");
                failed.send_replace(Some(panicked(task, &text)));
            }
        })
    }
}

impl Failed {
    /// Returns when a vital task has panicked.
    pub(crate) async fn next(&mut self) -> Error {
        let failed = self.0.wait_for(Option::is_some).await.ok().and_then(|failed| failed.clone());
        match failed {
            Some(error) => error,
            // No task is left that could panic.
            None => std::future::pending().await,
        }
    }
}

fn panicked(task: Task, text: &str) -> Error {
    Error::host(
        format!("the task {} of the daemon panicked", task.name()),
        format!("{text}; report this bug"),
    )
}

/// Does blocking work on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    doing: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // The log lines of the work belong to the caller's span.
    let span = tracing::Span::current();
    let work = move || span.in_scope(work);
    spawn_blocking(Task::Blocking, work).await.unwrap_or_else(|error| Err(Error::host(doing, error)))
}

#[cfg(test)]
mod tests;
