//! Whose snapshots are: what may be seen, what may be forked from, and what is written down of it.
//!
//! The database is told before anything of a snapshot is on disk, and forgets after nothing is left, so that
//! no snapshot is ever found without its owner. What is not in the database is the host owner's.
//!
//! A branch is forked first: its source does not wait for the database. Its template's record, which the fork comes
//! with, says whose it is. The database is told next, and then the client. A daemon that is killed in between leaves
//! a record, and the next one tells the database before the branch is on disk.

use std::sync::Arc;

use crate::auth::principal::{Principal, local_owner};
use crate::error::{Error, Result};
use crate::snapshot::branch_job::Stage;
use crate::snapshot::registry::{Entry, SnapshotRegistry, no_snapshot};
use crate::snapshot::template::Template;

impl SnapshotRegistry {
    /// A snapshot they may look at and fork from; one they may not is none.
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

    /// Whether they may be told the name of a snapshot that something else came from. Of one they may not use
    /// nothing is told, and nothing of one that is gone: whose it was is forgotten with it.
    pub(crate) fn may_name(&self, tag: &str, who: &Principal) -> bool {
        who.is_admin() || self.usable(tag, who).is_ok()
    }

    /// The template of a snapshot they may fork from.
    pub(crate) async fn template_for(self: &Arc<Self>, tag: &str, who: &Principal) -> Result<Arc<Template>> {
        self.usable(tag, who)?;
        // Nobody else comes in between: which one it is is decided before anything is waited for.
        self.template(tag).await
    }

    /// Gives a snapshot to somebody.
    pub(crate) async fn give(&self, tag: &str, owner: &str) -> Result<Arc<Entry>> {
        // A branch has the owner that its record says until it is taken.
        if let Some(branch) = self.get(tag)?.branch().filter(|branch| !branch.template.is_empty()) {
            let _ = branch.reached(Stage::Saving).await;
        }
        let entry = self.get(tag)?;
        let before = entry.set_owner(owner);
        if let Err(error) = self.record_owner(&entry).await {
            entry.set_owner(&before);
            return Err(error);
        }
        // The record of a branch that is not on disk says whose it is, too, and counts.
        entry.record_owner().map_err(|error| Error::host("cannot record whose a branch is", error))?;
        Ok(entry)
    }

    /// Writes down whose a snapshot is.
    pub(crate) async fn record_owner(&self, entry: &Entry) -> Result<()> {
        self.owners.set(&entry.tag, || Some(entry.owner())).written().await
    }

    /// Forgets whose a snapshot was. To be called while its tag is still taken; if another one has its tag all
    /// the same, that one's owner stays.
    pub(crate) async fn forget_owner(self: &Arc<Self>, entry: &Arc<Entry>) {
        // Another one is known before its owner is written down: if it is not now, that comes after this.
        let is_gone = || self.get(&entry.tag).map_or(true, |now| Arc::ptr_eq(&now, entry));
        let forgotten = self.owners.set(&entry.tag, || is_gone().then(local_owner));
        if let Err(error) = forgotten.written().await {
            // The next one with its tag says whose it is.
            tracing::warn!(tag = entry.tag, %error, "the owner of a snapshot is still written down");
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::testing::fake_guest::FakeDaemon;

    /// The runtime has one thread: a request that waited for the database on it would panic here, and stop all
    /// others on a slow disk.
    #[tokio::test]
    async fn no_request_waits_for_the_database_on_a_thread_that_serves_others() {
        let daemon = FakeDaemon::start().await;
        forkd_store::deny_waiting_here();
        let made = daemon.json("POST /v1/tokens", Some(json!({"name": "ann"}))).await;
        assert_eq!(made.0, 201, "{made:?}");
        assert_eq!(daemon.json("POST /v1/tokens/ann/rotate", None).await.0, 200);
        assert_eq!(daemon.json("GET /v1/tokens", None).await.0, 200);
        assert_eq!(daemon.json("DELETE /v1/tokens/ann", None).await.0, 204);
        assert_eq!(daemon.json("GET /v1/sandboxes?gone=true", None).await.0, 200);
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
        let (tell, told) = tokio::sync::oneshot::channel();
        let holder = std::thread::spawn(move || {
            let _still = database.stop();
            tell.send(()).unwrap();
            released.recv().unwrap();
        });
        told.await.unwrap();
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
