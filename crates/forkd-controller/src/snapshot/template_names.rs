//! The snapshots that clients of the E2B API took: each has a name in the database until a client removes it.

use std::collections::BTreeSet;

use crate::error::Result;
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::task::blocking;

impl SnapshotRegistry {
    /// The tags that have a name.
    pub(crate) async fn named_tags(&self) -> Result<BTreeSet<String>> {
        let database = self.host.database.clone();
        let named = blocking("reading the names of snapshots", move || Ok(database.templates()?)).await?;
        Ok(named.into_iter().map(|named| named.tag).collect())
    }
}
