//! The table `snapshot_owners`: whose a snapshot is.

use std::collections::HashMap;

use super::Database;
use crate::Result;

impl Database {
    /// Who owns what, by tag; what is not here belongs to whoever owns the host.
    pub fn snapshot_owners(&self) -> Result<HashMap<String, String>> {
        self.call("read whose snapshots are", |connection| {
            let mut query = connection.prepare_cached("SELECT tag, owner FROM snapshot_owners")?;
            query.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })
    }

    /// Says whose a snapshot is.
    pub fn set_snapshot_owner(&self, tag: &str, owner: &str) -> Result<()> {
        self.call("write whose a snapshot is", |connection| {
            let text = "INSERT INTO snapshot_owners VALUES (?1, ?2) \
                        ON CONFLICT (tag) DO UPDATE SET owner = excluded.owner";
            connection.prepare_cached(text)?.execute((tag, owner)).map(drop)
        })
    }

    /// Forgets whose a snapshot was.
    pub fn forget_snapshot_owner(&self, tag: &str) -> Result<()> {
        self.call("forget whose a snapshot was", |connection| {
            let mut query = connection.prepare_cached("DELETE FROM snapshot_owners WHERE tag = ?1")?;
            query.execute((tag,)).map(drop)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_has_one_owner_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("forkd.db")).unwrap();
        database.set_snapshot_owner("py", "ann").unwrap();
        database.set_snapshot_owner("py", "*").unwrap();
        database.set_snapshot_owner("numpy", "bob").unwrap();
        database.forget_snapshot_owner("numpy").unwrap();
        database.forget_snapshot_owner("numpy").unwrap();
        assert_eq!(database.snapshot_owners().unwrap(), HashMap::from([("py".into(), "*".into())]));
    }
}
