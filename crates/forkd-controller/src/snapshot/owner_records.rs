//! The owners of snapshots, as the database has them.
//!
//! One task writes the changes, in the order of the requests; changes that wait together go into one transaction. No
//! lock is held meanwhile: requests that look up an owner never wait for the disk.

use std::collections::HashMap;
use std::sync::Arc;

use forkd_store::Database;
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};

use crate::auth::principal::LOCAL;
use crate::error::{Error, Result};
use crate::util::task::{self, Task, blocking};

/// The most changes in one transaction.
const BATCH: usize = 256;

/// The owners of all snapshots. A snapshot that is not there belongs to the host owner.
#[derive(Debug)]
pub(crate) struct Owners {
    known: Arc<Mutex<Known>>,
    queue: mpsc::UnboundedSender<Change>,
}

/// Never locked for longer than a look-up takes.
#[derive(Debug, Default)]
struct Known {
    /// The owners on disk, by tag.
    written: HashMap<String, String>,
    /// How many changes of a tag wait to be written.
    waiting: HashMap<String, usize>,
}

#[derive(Debug)]
struct Change {
    tag: String,
    /// None: the host owner, which has no row.
    owner: Option<String>,
    done: oneshot::Sender<Result<()>>,
}

/// A change that waits to be written; none if there is nothing to write.
#[derive(Debug)]
pub(crate) struct PendingWrite(Option<oneshot::Receiver<Result<()>>>);

impl PendingWrite {
    /// Returns when the change is on disk.
    pub(crate) async fn written(self) -> Result<()> {
        let Some(done) = self.0 else { return Ok(()) };
        let lost =
            || Error::host("recording a snapshot's owner", "the task that writes it failed; try again");
        done.await.unwrap_or_else(|_| Err(lost()))
    }
}

impl Owners {
    /// `written` holds the rows of the database. Must be called in a runtime.
    pub(crate) fn new(database: Arc<Database>, written: HashMap<String, String>) -> Self {
        let known = Arc::new(Mutex::new(Known { written, waiting: HashMap::new() }));
        let (queue, changes) = mpsc::unbounded_channel();
        let (owners, changes) = (known.clone(), Arc::new(tokio::sync::Mutex::new(changes)));
        task::keep_running(Task::Owners, move || write(database.clone(), owners.clone(), changes.clone()));
        Owners { known, queue }
    }

    /// The owner of `tag` on disk.
    pub(crate) fn of(&self, tag: &str) -> Option<String> {
        self.known.lock().written.get(tag).cloned()
    }

    /// Queues a write of the owner of `tag`. `owner` is called when the change takes its place in the queue: of two
    /// changes the last one counts. None: nothing is to be written.
    pub(crate) fn set(&self, tag: &str, owner: impl FnOnce() -> Option<String>) -> PendingWrite {
        let mut known = self.known.lock();
        let Some(owner) = owner() else { return PendingWrite(None) };
        let owner = Some(owner).filter(|owner| owner != LOCAL);
        if !known.waiting.contains_key(tag) && known.written.get(tag) == owner.as_ref() {
            return PendingWrite(None);
        }
        *known.waiting.entry(tag.to_owned()).or_default() += 1;
        let (done, written) = oneshot::channel();
        // If the task is gone, `done` is dropped, and the waiter gets an error.
        let _ = self.queue.send(Change { tag: tag.to_owned(), owner, done });
        PendingWrite(Some(written))
    }
}

/// Writes changes, until all senders are gone.
async fn write(
    database: Arc<Database>,
    known: Arc<Mutex<Known>>,
    changes: Arc<tokio::sync::Mutex<mpsc::UnboundedReceiver<Change>>>,
) {
    // Uncontended: another run of this task starts only after a panic.
    let (mut changes, mut batch) = (changes.lock().await, Vec::new());
    while changes.recv_many(&mut batch, BATCH).await > 0 {
        let rows: Vec<_> = batch.iter().map(|change| (change.tag.clone(), change.owner.clone())).collect();
        let database = database.clone();
        let work = move || Ok(database.change_snapshot_owners(&rows)?);
        let written = blocking("writing down whose snapshots are", work).await;
        let mut known = known.lock();
        for Change { tag, owner, done } in batch.drain(..) {
            if let Some(waiting) = known.waiting.get_mut(&tag) {
                *waiting -= 1;
                if *waiting == 0 {
                    known.waiting.remove(&tag);
                }
            }
            if written.is_ok() {
                match owner {
                    Some(owner) => known.written.insert(tag, owner),
                    None => known.written.remove(&tag),
                };
            }
            let _ = done.send(written.clone());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> (tempfile::TempDir, Arc<Database>, Owners) {
        let folder = tempfile::tempdir().unwrap();
        let database = Arc::new(Database::open(&folder.path().join("forkd.db")).unwrap());
        let owners = Owners::new(database.clone(), HashMap::new());
        (folder, database, owners)
    }

    fn owned(owner: &str) -> impl FnOnce() -> Option<String> {
        move || Some(owner.to_owned())
    }

    /// The runtime has one thread, which must not wait for the disk. A database that does not write stops no look-up.
    #[tokio::test]
    async fn while_the_database_does_not_write_owners_are_looked_up_and_changes_keep_their_order() {
        let (_folder, database, owners) = open();
        forkd_store::deny_waiting_here();
        owners.set("py", owned("ann")).written().await.unwrap();
        let (held, (release, released)) = (database.clone(), std::sync::mpsc::channel::<()>());
        let (notify, notified) = oneshot::channel();
        let holder = std::thread::spawn(move || {
            let _still = held.stop();
            notify.send(()).unwrap();
            released.recv().unwrap();
        });
        notified.await.unwrap();
        let changes: Vec<_> =
            ["bob", "carl", LOCAL, "dora"].map(|owner| owners.set("py", owned(owner))).into();
        let other = owners.set("node", owned("eve"));
        let same = owners.set("js", owned(LOCAL));
        same.written().await.unwrap();
        assert_eq!(owners.of("py").as_deref(), Some("ann"), "nothing is believed that is not on disk");
        release.send(()).unwrap();
        for change in changes {
            change.written().await.unwrap();
        }
        other.written().await.unwrap();
        assert_eq!((owners.of("py").as_deref(), owners.of("node").as_deref()), (Some("dora"), Some("eve")));
        holder.join().unwrap();
        let stored = blocking("reading", move || Ok(database.snapshot_owners()?)).await.unwrap();
        assert_eq!(stored, HashMap::from([("py".into(), "dora".into()), ("node".into(), "eve".into())]));
        owners.set("py", owned(LOCAL)).written().await.unwrap();
        owners.set("node", || None).written().await.unwrap();
        assert_eq!((owners.of("py"), owners.of("node").as_deref()), (None, Some("eve")));
    }
}
