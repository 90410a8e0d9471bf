//! The snapshots that clients of the E2B API took: each has a name in the database until a client removes it.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::snapshot::registry::{SnapshotRegistry, SnapshotState};
use crate::util::task::blocking;

impl SnapshotRegistry {
    /// The tags that have a name.
    pub(crate) async fn named_tags(&self) -> Result<BTreeSet<String>> {
        let database = self.host.database.clone();
        let named = blocking("reading the names of snapshots", move || Ok(database.templates()?)).await?;
        Ok(named.into_iter().map(|named| named.tag).collect())
    }

    /// Removes the names of snapshots that are gone: an earlier daemon was killed before it took the snapshot, or after it
    /// removed it. A branch that is still to be saved has its entry by now, and keeps its name.
    pub(super) async fn forget_gone_names(&self) {
        // A template whose record cannot be read may be of any tag.
        if self.list().iter().any(|entry| matches!(entry.state(), SnapshotState::Unknown(_))) {
            return;
        }
        let forgotten = async {
            let mut gone = self.named_tags().await?;
            gone.retain(|tag| self.get(tag).is_err_and(|error| error.code().is_not_found()));
            let database = self.host.database.clone();
            let forget = move || Ok(gone.iter().try_for_each(|tag| database.forget_templates(tag))?);
            blocking("removing the names of snapshots", forget).await
        };
        if let Err(error) = forgotten.await {
            tracing::warn!(%error, "names of removed snapshots not removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use forkd_store::TemplateName;

    use crate::auth::principal::LOCAL;
    use crate::testing::fake_host::{FakeHost, unsaved};

    #[tokio::test]
    async fn a_daemon_forgets_the_names_of_snapshots_that_are_gone_and_no_others() {
        let host = FakeHost::new();
        host.store("stored", |_| {});
        let _unsaved = host.leave_template("unsaved", unsaved(1, None));
        for tag in ["stored", "unsaved", "gone"] {
            let (owner, sandbox) = (LOCAL.to_owned(), "sb1".to_owned());
            let name = format!("name-of-{tag}");
            let named = TemplateName { owner, name, tag: tag.into(), sandbox, created_at_unix: 1 };
            host.database.name_template(&named).unwrap();
        }
        let _daemon = host.daemon().await;
        let left: Vec<_> = host.database.templates().unwrap().into_iter().map(|it| it.tag).collect();
        assert_eq!(left, ["stored", "unsaved"]);
    }
}
