//! The archive: a database table of sandboxes that existed, with how each ended, for requests after the end.
//!
//! While a sandbox lives, its folder holds its data; the archive matters only afterwards. So no request waits for a
//! write: changes are queued, and a task writes them a moment later, many in one transaction. If a daemon is killed
//! before it wrote a change, the next one finds the difference by comparing (`compare`).

use std::sync::Arc;
use std::time::Duration;

use forkd_store::{ArchiveEntry, Change, Database, MadeSandbox};
use tokio::sync::{mpsc, oneshot};

use crate::error::Result;
use crate::host::process::boot_id;
use crate::sandbox::{End, Phase, ROLLED_BACK, Sandbox};
use crate::util::task::{self, Task, blocking};
use crate::util::time::now_unix;

/// How long the writer collects further changes after the first of a transaction.
const GATHER: Duration = Duration::from_millis(100);
/// The most changes in the queue. If the disk does not keep up, changes beyond that are dropped.
const QUEUE: usize = 1 << 16;
/// How long the archive keeps a sandbox that ended.
const MAX_AGE_SECS: u64 = 24 * 3600;
/// How many ended sandboxes the archive keeps.
const MAX_COUNT: u64 = 10_000;

/// A message to the writer task.
#[derive(Debug)]
enum Message {
    Write(Change),
    /// Answer when everything queued before is written.
    Flush(oneshot::Sender<()>),
}

/// The archive. A read sees every change that was noted before it.
#[derive(Debug)]
pub(crate) struct Archive {
    database: Arc<Database>,
    boot_id: String,
    queue: mpsc::Sender<Message>,
}

impl Archive {
    /// Starts the writer task; must be called in a runtime.
    pub(crate) fn new(database: Arc<Database>) -> Self {
        let (queue, queued) = mpsc::channel(QUEUE);
        let (written, queued) = (database.clone(), Arc::new(tokio::sync::Mutex::new(queued)));
        task::keep_running(Task::Archive, move || write(written.clone(), queued.clone()));
        Archive { database, boot_id: boot_id(), queue }
    }

    fn note(&self, sandbox: &str, change: Change) {
        if self.queue.try_send(Message::Write(change)).is_err() {
            tracing::warn!(sandbox, "sandbox archive change dropped: queue is full");
        }
    }

    /// Notes that a sandbox was created, runs again, or has other labels.
    pub(crate) fn made(&self, sandbox: &Sandbox) {
        let made = Change::Made(MadeSandbox {
            id: sandbox.id.clone(),
            owner: sandbox.spec.owner.clone(),
            boot_id: self.boot_id.clone(),
            snapshot_tag: sandbox.spec.snapshot_tag.clone(),
            labels: sandbox.read_runtime(|runtime| runtime.saved.lifetime.labels.clone()),
            created_at_unix: sandbox.created_at_unix(),
        });
        self.note(&sandbox.id, made);
    }

    /// Notes the end of a sandbox, requested or not.
    pub(crate) fn ended(&self, id: &str, end: &End) {
        if end.reason == ROLLED_BACK {
            return;
        }
        let (reason, detail) = (end.reason.clone(), end.detail.clone());
        self.note(id, Change::Ended { id: id.to_owned(), at_unix: now_unix(), reason, detail });
    }

    /// Notes the end of `sandbox` if it has ended.
    pub(crate) fn note_phase(&self, sandbox: &Sandbox) {
        if let Phase::Ended(end) = sandbox.phase() {
            self.ended(&sandbox.id, &end);
        }
    }

    /// Waits until every noted change is written.
    pub(crate) async fn flush(&self) {
        let (notify, notified) = oneshot::channel();
        if self.queue.send(Message::Flush(notify)).await.is_ok() {
            let _ = notified.await;
        }
    }

    /// What the archive has about the sandbox `id`.
    pub(crate) async fn find(&self, id: &str) -> Result<Option<ArchiveEntry>> {
        self.flush().await;
        let (database, id) = (self.database.clone(), id.to_owned());
        blocking("asking the archive", move || Ok(database.sandbox(&id)?)).await
    }

    /// The sandboxes that ended within [`MAX_AGE_SECS`], by age.
    pub(crate) async fn archived(&self) -> Result<Vec<ArchiveEntry>> {
        self.flush().await;
        let database = self.database.clone();
        let since = now_unix().saturating_sub(MAX_AGE_SECS);
        blocking("asking the archive", move || Ok(database.archived_sandboxes(since)?)).await
    }

    /// At the start of a daemon: marks sandboxes that are not among `there` and have no end yet as gone, and logs how
    /// many a reboot of the host ended.
    pub(crate) async fn compare(&self, there: Vec<String>) -> Result<()> {
        self.flush().await;
        let (database, boot) = (self.database.clone(), self.boot_id.clone());
        let there = there.into_iter().collect();
        let absent = move || Ok(database.end_absent_sandboxes(&there, &boot, now_unix())?);
        let (rebooted, unknown) = blocking("comparing the archive", absent).await?;
        if rebooted > 0 {
            tracing::warn!(
                sandboxes = rebooted,
                "the host was rebooted, which ended sandboxes; `GET /v1/sandboxes?archived=true` lists them"
            );
        }
        if unknown > 0 {
            tracing::info!(sandboxes = unknown, "sandboxes are gone without a recorded end");
        }
        Ok(())
    }

    /// Removes old sandboxes from the archive.
    pub(crate) async fn prune(&self) -> Result<()> {
        let database = self.database.clone();
        let since = now_unix().saturating_sub(MAX_AGE_SECS);
        blocking("forgetting sandboxes", move || Ok(database.prune_sandboxes(since, MAX_COUNT)?)).await?;
        Ok(())
    }
}

/// Writes queued changes until the last sender is gone.
async fn write(database: Arc<Database>, queued: Arc<tokio::sync::Mutex<mpsc::Receiver<Message>>>) {
    // Another writer takes this lock only after a panic of this one.
    let mut queued = queued.lock().await;
    while let Some(first) = queued.recv().await {
        let (mut changes, mut waiting) = (Vec::new(), Vec::new());
        take(first, &mut changes, &mut waiting);
        let until = tokio::time::Instant::now() + GATHER;
        // Collect more changes, unless a caller of `flush` waits.
        while waiting.is_empty() {
            match tokio::time::timeout_at(until, queued.recv()).await {
                Ok(Some(message)) => take(message, &mut changes, &mut waiting),
                _ => break,
            }
        }
        if !changes.is_empty() {
            let database = database.clone();
            let written = blocking("writing the archive", move || Ok(database.note_sandboxes(&changes)?));
            if let Err(error) = written.await {
                tracing::error!(%error, "sandbox archive not written");
            }
        }
        for notify in waiting {
            let _ = notify.send(());
        }
    }
}

fn take(message: Message, changes: &mut Vec<Change>, waiting: &mut Vec<oneshot::Sender<()>>) {
    match message {
        Message::Write(change) => changes.push(change),
        Message::Flush(notify) => waiting.push(notify),
    }
}
