//! Whose snapshots are: what may be seen, what may be forked from, and what is written down of it.
//!
//! The database is told before anything of a snapshot is on disk, and forgets after nothing is left, so that
//! no snapshot is ever found without its owner. What is not in the database is the host owner's.

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::host::blocking;
use crate::identity::{Identity, LOCAL};
use crate::snapshots::{Entry, Snapshots, lock, no_snapshot};
use crate::template::Template;

impl Snapshots {
    /// A snapshot they may look at and fork from; one they may not is none.
    pub(crate) fn usable(&self, tag: &str, who: &Identity) -> Result<Arc<Entry>> {
        let entry = self.get(tag)?;
        self.check_use(&entry, who)?;
        Ok(entry)
    }

    /// See [`Snapshots::usable`].
    pub(crate) fn check_use(&self, entry: &Entry, who: &Identity) -> Result<()> {
        match who.may_use(&entry.owner()) {
            true => Ok(()),
            false => Err(no_snapshot(&entry.tag)),
        }
    }

    /// Whether they may be told the name of a snapshot that something else came from. Of one they may not use
    /// nothing is told, and nothing of one that is gone: whose it was is forgotten with it.
    pub(crate) fn may_name(&self, tag: &str, who: &Identity) -> bool {
        who.is_admin() || self.usable(tag, who).is_ok()
    }

    /// The template of a snapshot they may fork from.
    pub(crate) async fn template_for(self: &Arc<Self>, tag: &str, who: &Identity) -> Result<Arc<Template>> {
        self.usable(tag, who)?;
        // Nobody else comes in between: which one it is is decided before anything is waited for.
        self.template(tag).await
    }

    /// Gives a snapshot to somebody.
    pub(crate) async fn give(&self, tag: &str, owner: &str) -> Result<Arc<Entry>> {
        let entry = self.get(tag)?;
        let before = entry.set_owner(owner);
        if let Err(error) = self.record_owner(&entry).await {
            entry.set_owner(&before);
            return Err(error);
        }
        Ok(entry)
    }

    /// Writes down whose a snapshot is.
    pub(crate) async fn record_owner(&self, entry: &Arc<Entry>) -> Result<()> {
        // The host owner's are the most, and need nothing.
        if entry.owner() == LOCAL && !lock(&self.owners).contains_key(&entry.tag) {
            return Ok(());
        }
        let (owners, database, entry) = (self.owners.clone(), self.host.database.clone(), entry.clone());
        blocking("writing down whose a snapshot is", move || {
            // Held while it is written: what is known here is what is known there.
            let mut owners = lock(&owners);
            let owner = entry.owner();
            if owner == LOCAL {
                database.forget_snapshot_owner(&entry.tag)?;
                owners.remove(&entry.tag);
            } else if owners.get(&entry.tag) != Some(&owner) {
                database.set_snapshot_owner(&entry.tag, &owner)?;
                owners.insert(entry.tag.clone(), owner);
            }
            Ok(())
        })
        .await
    }

    /// Forgets whose a snapshot was. To be called while its tag is still taken; if another one has its tag all
    /// the same, that one's owner stays.
    pub(crate) async fn forget_owner(self: &Arc<Self>, entry: &Arc<Entry>) {
        if !lock(&self.owners).contains_key(&entry.tag) {
            return;
        }
        let (snapshots, gone) = (self.clone(), entry.clone());
        let forgotten = blocking("forgetting whose a snapshot was", move || {
            // Another one is known before its owner is written down, for which it waits here.
            let mut owners = lock(&snapshots.owners);
            if snapshots.get(&gone.tag).is_ok_and(|now| !Arc::ptr_eq(&now, &gone)) {
                return Ok(());
            }
            snapshots.host.database.forget_snapshot_owner(&gone.tag)?;
            owners.remove(&gone.tag);
            Ok(())
        });
        if let Err(Error { message, .. }) = forgotten.await {
            // The next one with its tag says whose it is.
            tracing::warn!(tag = entry.tag, error = message, "the owner of a snapshot is still written down");
        }
    }
}
