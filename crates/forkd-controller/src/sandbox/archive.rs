//! The ledger: which sandboxes there were, and how each ended, for whoever asks after it is gone.
//!
//! The folder of a sandbox says what it is while it lives; the ledger is only for afterwards. So nothing waits
//! for it: what happens is queued, and written a moment later together with what else has happened, in one
//! transaction. What a killed daemon had not written yet, the next one finds out by comparing.

use std::sync::Arc;
use std::time::Duration;

use forkd_store::{Change, Database, GoneSandbox, MadeSandbox};
use tokio::sync::{mpsc, oneshot};

use crate::error::Result;
use crate::host::process::boot_id;
use crate::sandbox::{End, Phase, ROLLED_BACK, Sandbox};
use crate::util::task::{self, Task, blocking};
use crate::util::time::now_unix;

/// How long it waits for more to write with the first.
const GATHER: Duration = Duration::from_millis(100);
/// How much may wait to be written: beyond that, with a disk that does not keep up, it is forgotten.
const QUEUE: usize = 1 << 16;
/// How long a sandbox that ended is remembered.
const MAX_AGE_SECS: u64 = 24 * 3600;
/// How many are.
const MAX_COUNT: u64 = 10_000;

/// Something for the writer.
#[derive(Debug)]
enum Message {
    Write(Change),
    /// Tell when all before it is written.
    Flush(oneshot::Sender<()>),
}

/// The ledger. What was noted is found by whoever asks later.
#[derive(Debug)]
pub(crate) struct Archive {
    database: Arc<Database>,
    boot_id: String,
    queue: mpsc::Sender<Message>,
}

impl Archive {
    /// Must be called in a runtime.
    pub(crate) fn new(database: Arc<Database>) -> Self {
        let (queue, queued) = mpsc::channel(QUEUE);
        let (written, queued) = (database.clone(), Arc::new(tokio::sync::Mutex::new(queued)));
        task::keep_running(Task::Archive, move || write(written.clone(), queued.clone()));
        Archive { database, boot_id: boot_id(), queue }
    }

    fn note(&self, change: Change) {
        if self.queue.try_send(Message::Write(change)).is_err() {
            tracing::warn!("the ledger of sandboxes does not keep up; something is missing in it");
        }
    }

    /// A sandbox was made, or runs again, or has other labels.
    pub(crate) fn made(&self, sandbox: &Sandbox) {
        self.note(Change::Made(MadeSandbox {
            id: sandbox.id.clone(),
            owner: sandbox.spec.owner.clone(),
            boot_id: self.boot_id.clone(),
            snapshot_tag: sandbox.spec.snapshot_tag.clone(),
            labels: sandbox.read_runtime(|facts| facts.saved.lifetime.labels.clone()),
            created_at_unix: sandbox.created_at_unix(),
        }));
    }

    /// A sandbox ended, by itself or because it was asked to.
    pub(crate) fn ended(&self, id: &str, end: &End) {
        if end.reason == ROLLED_BACK {
            return;
        }
        let (reason, detail) = (end.reason.clone(), end.detail.clone());
        self.note(Change::Ended { id: id.to_owned(), at_unix: now_unix(), reason, detail });
    }

    /// Its end, if it has one.
    pub(crate) fn note_phase(&self, sandbox: &Sandbox) {
        if let Phase::Ended(end) = sandbox.phase() {
            self.ended(&sandbox.id, &end);
        }
    }

    /// Returns when all that was noted is written.
    pub(crate) async fn flush(&self) {
        let (tell, told) = oneshot::channel();
        if self.queue.send(Message::Flush(tell)).await.is_ok() {
            let _ = told.await;
        }
    }

    /// What is known of a sandbox that is not there.
    pub(crate) async fn find(&self, id: &str) -> Result<Option<GoneSandbox>> {
        self.flush().await;
        let (database, id) = (self.database.clone(), id.to_owned());
        blocking("asking the ledger", move || Ok(database.sandbox(&id)?)).await
    }

    /// Those that ended not long ago, by age.
    pub(crate) async fn gone(&self) -> Result<Vec<GoneSandbox>> {
        self.flush().await;
        let database = self.database.clone();
        let since = now_unix().saturating_sub(MAX_AGE_SECS);
        blocking("asking the ledger", move || Ok(database.gone_sandboxes(since)?)).await
    }

    /// At the start of a daemon: those that are not among `there`, and did not end that anybody knows of,
    /// are gone. Says how many went with the host.
    pub(crate) async fn compare(&self, there: Vec<String>) -> Result<()> {
        self.flush().await;
        let (database, boot) = (self.database.clone(), self.boot_id.clone());
        let there = there.into_iter().collect();
        let absent = move || Ok(database.end_absent_sandboxes(&there, &boot, now_unix())?);
        let (rebooted, unknown) = blocking("comparing the ledger", absent).await?;
        if rebooted > 0 {
            tracing::warn!(
                sandboxes = rebooted,
                "the host was rebooted, and sandboxes went with it; `GET /v1/sandboxes?gone=true` lists them"
            );
        }
        if unknown > 0 {
            tracing::info!(sandboxes = unknown, "sandboxes are gone whose end nobody wrote down");
        }
        Ok(())
    }

    /// Forgets what is old.
    pub(crate) async fn prune(&self) -> Result<()> {
        let database = self.database.clone();
        let since = now_unix().saturating_sub(MAX_AGE_SECS);
        blocking("forgetting sandboxes", move || Ok(database.prune_sandboxes(since, MAX_COUNT)?)).await?;
        Ok(())
    }
}

/// Writes what is queued, until nobody can queue any more.
async fn write(database: Arc<Database>, queued: Arc<tokio::sync::Mutex<mpsc::Receiver<Message>>>) {
    // Only after a panic is there another one to come.
    let mut queued = queued.lock().await;
    while let Some(first) = queued.recv().await {
        let (mut changes, mut waiting) = (Vec::new(), Vec::new());
        take(first, &mut changes, &mut waiting);
        let until = tokio::time::Instant::now() + GATHER;
        // Nobody waits: more may come. Somebody does: only what is there.
        while waiting.is_empty() {
            match tokio::time::timeout_at(until, queued.recv()).await {
                Ok(Some(message)) => take(message, &mut changes, &mut waiting),
                _ => break,
            }
        }
        if !changes.is_empty() {
            let database = database.clone();
            let written = blocking("writing the ledger", move || Ok(database.note_sandboxes(&changes)?));
            if let Err(error) = written.await {
                tracing::error!(%error, "the ledger of sandboxes cannot be written");
            }
        }
        for tell in waiting {
            let _ = tell.send(());
        }
    }
}

fn take(message: Message, changes: &mut Vec<Change>, waiting: &mut Vec<oneshot::Sender<()>>) {
    match message {
        Message::Write(change) => changes.push(change),
        Message::Flush(tell) => waiting.push(tell),
    }
}
