//! The table `snapshot_owners`: whose a snapshot is.

use std::collections::HashMap;

use super::Database;
use crate::Result;

impl Database {
    /// The owner of each snapshot, by tag. A snapshot without an entry belongs to the owner of the host.
    pub fn snapshot_owners(&self) -> Result<HashMap<String, String>> {
        self.call("read whose snapshots are", |connection| {
            let mut query = connection.prepare_cached("SELECT tag, owner FROM snapshot_owners")?;
            query.query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?.collect()
        })
    }

    /// Writes the owners of snapshots, in this order and all or nothing; `None` deletes a snapshot's entry.
    pub fn change_snapshot_owners(&self, changes: &[(String, Option<String>)]) -> Result<()> {
        self.call("write whose snapshots are", |connection| {
            let transaction = connection.transaction()?;
            for (tag, owner) in changes {
                match owner {
                    Some(owner) => {
                        let text = "INSERT INTO snapshot_owners VALUES (?1, ?2) \
                                    ON CONFLICT (tag) DO UPDATE SET owner = excluded.owner";
                        transaction.prepare_cached(text)?.execute((tag, owner))?
                    }
                    None => {
                        let text = "DELETE FROM snapshot_owners WHERE tag = ?1";
                        transaction.prepare_cached(text)?.execute((tag,))?
                    }
                };
            }
            transaction.commit()
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
        let change = |tag: &str, owner: Option<&str>| (tag.to_owned(), owner.map(str::to_owned));
        database.change_snapshot_owners(&[change("py", Some("ann")), change("numpy", Some("bob"))]).unwrap();
        let forget = change("numpy", None);
        database.change_snapshot_owners(&[change("py", Some("*")), forget.clone(), forget]).unwrap();
        database.change_snapshot_owners(&[]).unwrap();
        assert_eq!(database.snapshot_owners().unwrap(), HashMap::from([("py".into(), "*".into())]));
    }
}
