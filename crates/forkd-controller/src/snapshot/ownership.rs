//! Owners of snapshots: which snapshots a principal may see and fork from, and how the owner is recorded.
//!
//! The daemon writes the owner to the database before anything of a snapshot is on disk, and deletes it after nothing
//! is left, so that no snapshot is ever found without its owner. A snapshot without a row belongs to the host owner.
//!
//! A branch is forked first: its source does not wait for the database. The record of the branch's template, written
//! right after the fork, names the owner. Then the daemon writes to the database, and then it answers the client. If
//! the daemon is killed in between, the next one reads the record and writes to the database before it saves the
//! branch.

use std::sync::Arc;

use crate::auth::principal::{Principal, local_owner};
use crate::error::{Error, Result};
use crate::snapshot::registry::{Entry, SnapshotRegistry, no_snapshot};
use crate::snapshot::template::Template;

impl SnapshotRegistry {
    /// The snapshot `tag`, if the principal may look at it and fork from it; otherwise the error "not found".
    pub(crate) fn usable(&self, tag: &str, who: &Principal) -> Result<Arc<Entry>> {
        let entry = self.get(tag)?;
        self.check_use(&entry, who)?;
        Ok(entry)
    }

    /// See [`SnapshotRegistry::usable`].
    pub(crate) fn check_use(&self, entry: &Entry, who: &Principal) -> Result<()> {
        match who.may_use(&entry.owner()) {
            true => Ok(()),
            false => Err(no_snapshot(&entry.tag)),
        }
    }

    /// Whether the principal may see the name of a snapshot that another object came from. Names of snapshots that it
    /// may not use are hidden, and so are names of removed ones: their owners are not recorded any more.
    pub(crate) fn may_name(&self, tag: &str, who: &Principal) -> bool {
        who.is_admin() || self.usable(tag, who).is_ok()
    }

    /// The template of a snapshot that the principal may fork from.
    pub(crate) async fn template_for(self: &Arc<Self>, tag: &str, who: &Principal) -> Result<Arc<Template>> {
        self.usable(tag, who)?;
        // `template` looks the entry up before its first await: it is the one that was checked.
        self.template(tag).await
    }

    /// Gives the snapshot to `owner`.
    pub(crate) async fn give(&self, tag: &str, owner: &str) -> Result<Arc<Entry>> {
        // Until a branch is taken, its job writes the template's record, with the owner of that time.
        let entry = self.get(tag)?;
        if entry.branch().is_some() {
            let _ = entry.wait_forkable().await;
        }
        let entry = self.get(tag)?;
        let before = entry.set_owner(owner);
        if let Err(error) = self.record_owner(&entry).await {
            entry.set_owner(&before);
            return Err(error);
        }
        // For a branch that is not on disk the next daemon takes the owner from the template's record.
        entry.update_record().map_err(|error| Error::host("cannot record the owner of a branch", error))?;
        Ok(entry)
    }

    /// Writes the snapshot's owner to the database.
    pub(crate) async fn record_owner(&self, entry: &Entry) -> Result<()> {
        self.owners.set(&entry.tag, || Some(entry.owner())).written().await
    }

    /// Deletes the snapshot's owner from the database. To be called while its tag is still taken; if another
    /// snapshot has the tag all the same, the owner of that one stays.
    pub(crate) async fn forget_owner(self: &Arc<Self>, entry: &Arc<Entry>) {
        // Another snapshot is in the registry before its owner is queued: if not there now, its write comes later.
        let is_gone = || self.get(&entry.tag).map_or(true, |now| Arc::ptr_eq(&now, entry));
        let forgotten = self.owners.set(&entry.tag, || is_gone().then(local_owner));
        if let Err(error) = forgotten.written().await {
            // The next snapshot with the tag overwrites the row.
            tracing::warn!(tag = entry.tag, %error, "snapshot owner not deleted from the database");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::fake_guest::FakeDaemon;

    /// The runtime has one thread: a request that waited for the database on it would panic here, and on a slow disk it
    /// would stop all other requests.
    #[tokio::test]
    async fn no_request_waits_for_the_database_on_a_thread_that_serves_others() {
        let daemon = FakeDaemon::start().await;
        forkd_store::deny_waiting_here();
        let made = daemon.json("POST /v1/tokens", Some(json!({"name": "ann"}))).await;
        assert_eq!(made.0, 201, "{made:?}");
        assert_eq!(daemon.json("POST /v1/tokens/ann/rotate", None).await.0, 200);
        assert_eq!(daemon.json("GET /v1/tokens", None).await.0, 200);
        assert_eq!(daemon.json("DELETE /v1/tokens/ann", None).await.0, 204);
        assert_eq!(daemon.json("GET /v1/sandboxes?archived=true", None).await.0, 200);
        assert_eq!(daemon.json("GET /v1/sandboxes/sb0", None).await.0, 404);
        let key = "Idempotency-Key: k\r\nContent-Type: application/json\r\n";
        let body = br#"{"snapshot_tag": "none"}"#;
        for _ in 0..2 {
            assert_eq!(daemon.ask("POST /v1/sandboxes", key, body).await.0, 404);
        }
        assert_eq!(daemon.json("DELETE /v1/snapshots/none", None).await.0, 404);
    }

    #[tokio::test]
    async fn while_the_database_does_not_write_all_other_requests_are_answered() {
        let daemon = FakeDaemon::start().await;
        let database = daemon.app.registry.host.database.clone();
        let (release, released) = std::sync::mpsc::channel::<()>();
        let (notify, notified) = tokio::sync::oneshot::channel();
        let holder = std::thread::spawn(move || {
            let _still = database.stop();
            notify.send(()).unwrap();
            released.recv().unwrap();
        });
        notified.await.unwrap();
        let making = daemon.json("POST /v1/tokens", Some(json!({"name": "ann"})));
        let others = async {
            for path in ["/healthz", "/v1/snapshots", "/v1/tokens", "/metrics", "/healthz"] {
                assert_eq!(daemon.ask(&format!("GET {path}"), "", b"").await.0, 200, "{path}");
            }
            release.send(()).unwrap();
        };
        let (made, ()) = tokio::join!(making, others);
        assert_eq!(made.0, 201, "{made:?}");
        holder.join().unwrap();
    }
}
