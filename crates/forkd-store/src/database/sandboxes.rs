//! The table `sandboxes`: those there are, and those that were not long ago.
//!
//! The folders of sandboxes are the source of truth for what runs. This table remains when such a folder is
//! gone, or all of them with the host's memory.

use std::collections::{BTreeMap, HashSet};

use rusqlite::{OptionalExtension, Row, params};

use super::Database;
use crate::Result;

/// A sandbox that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadeSandbox {
    /// Its id.
    pub id: String,
    /// Whose it is.
    pub owner: String,
    /// The boot of the host in which it runs.
    pub boot_id: String,
    /// The snapshot it was forked from.
    pub snapshot_tag: Option<String>,
    /// What its owner wrote on it.
    pub labels: BTreeMap<String, String>,
    /// When it was made.
    pub created_at_unix: u64,
}

/// A sandbox that ended and was removed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchiveEntry {
    /// The sandbox, as it was created.
    pub made: MadeSandbox,
    /// When it ended; `None` if no end is recorded yet.
    pub ended_at_unix: Option<u64>,
    /// The reason of the end, as one identifier.
    pub reason: String,
    /// The reason of the end, as one sentence.
    pub detail: String,
}

/// A change to write to the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// A sandbox was made, or runs again, or has other labels.
    Made(MadeSandbox),
    /// A sandbox ended. Its first end counts.
    Ended {
        /// Which one.
        id: String,
        /// When.
        at_unix: u64,
        /// The reason of the end, as one identifier.
        reason: String,
        /// The reason of the end, as one sentence.
        detail: String,
    },
}

impl Database {
    /// Writes changes down, all of them or none.
    pub fn note_sandboxes(&self, changes: &[Change]) -> Result<()> {
        self.call("record sandboxes", |connection| {
            let transaction = connection.transaction()?;
            {
                let mut made = transaction.prepare_cached(
                    "INSERT OR REPLACE INTO sandboxes
                         (id, owner, boot_id, snapshot_tag, labels, created_at_unix)
                     VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
                )?;
                let mut ended = transaction.prepare_cached(
                    "UPDATE sandboxes SET ended_at_unix = ?2, reason = ?3, detail = ?4
                     WHERE id = ?1 AND ended_at_unix IS NULL",
                )?;
                for change in changes {
                    match change {
                        Change::Made(it) => made.execute(params![
                            it.id,
                            it.owner,
                            it.boot_id,
                            it.snapshot_tag,
                            serde_json::to_string(&it.labels).unwrap_or_default(),
                            it.created_at_unix
                        ])?,
                        Change::Ended { id, at_unix, reason, detail } => {
                            ended.execute(params![id, at_unix, reason, detail])?
                        }
                    };
                }
            }
            transaction.commit()
        })
    }

    /// The record of the sandbox `id`.
    pub fn sandbox(&self, id: &str) -> Result<Option<ArchiveEntry>> {
        self.call("look for a sandbox", |connection| {
            connection
                .prepare_cached(&format!("{SELECT} WHERE id = ?1"))?
                .query_row(params![id], read)
                .optional()
        })
    }

    /// Those that ended since `since`, oldest first.
    pub fn archived_sandboxes(&self, since: u64) -> Result<Vec<ArchiveEntry>> {
        self.call("list sandboxes", |connection| {
            connection
                .prepare_cached(&format!("{SELECT} WHERE ended_at_unix >= ?1 ORDER BY created_at_unix, id"))?
                .query_map(params![since], read)?
                .collect()
        })
    }

    /// Records an end, now, for sandboxes that are not `alive` and have none: by a reboot of the host, or for
    /// an unknown reason. Returns how many of each.
    pub fn end_absent_sandboxes(
        &self,
        alive: &HashSet<String>,
        boot_id: &str,
        now: u64,
    ) -> Result<(usize, usize)> {
        self.call("find sandboxes that are gone", |connection| {
            let transaction = connection.transaction()?;
            let mut count = (0, 0);
            {
                let mut open =
                    transaction.prepare("SELECT id, boot_id FROM sandboxes WHERE ended_at_unix IS NULL")?;
                let mut end = transaction.prepare(
                    "UPDATE sandboxes SET ended_at_unix = ?2, reason = ?3, detail = ?4 WHERE id = ?1",
                )?;
                let open: Vec<(String, String)> = open
                    .query_map((), |row| Ok((row.get(0)?, row.get(1)?)))?
                    .collect::<rusqlite::Result<_>>()?;
                for (id, boot) in open.into_iter().filter(|(id, _)| !alive.contains(id)) {
                    let (reason, detail) = if boot == boot_id {
                        count.1 += 1;
                        ("unknown", "it was gone when the daemon started")
                    } else {
                        count.0 += 1;
                        ("host_rebooted", "the host was rebooted, and it went with its memory")
                    };
                    end.execute(params![id, now, reason, detail])?;
                }
            }
            transaction.commit()?;
            Ok(count)
        })
    }

    /// Deletes records of sandboxes that ended before `since`, and the oldest beyond `max`.
    pub fn prune_sandboxes(&self, since: u64, max: u64) -> Result<usize> {
        self.call("forget sandboxes", |connection| {
            let old = connection.execute("DELETE FROM sandboxes WHERE ended_at_unix < ?1", params![since])?;
            let many = connection.execute(
                "DELETE FROM sandboxes WHERE id IN (
                     SELECT id FROM sandboxes WHERE ended_at_unix IS NOT NULL
                     ORDER BY ended_at_unix DESC, id LIMIT -1 OFFSET ?1
                 )",
                params![max],
            )?;
            Ok(old + many)
        })
    }
}

const SELECT: &str = "SELECT id, owner, boot_id, snapshot_tag, labels, created_at_unix, ended_at_unix, reason, \
                      detail FROM sandboxes";

fn read(row: &Row<'_>) -> rusqlite::Result<ArchiveEntry> {
    let labels: String = row.get(4)?;
    Ok(ArchiveEntry {
        made: MadeSandbox {
            id: row.get(0)?,
            owner: row.get(1)?,
            boot_id: row.get(2)?,
            snapshot_tag: row.get(3)?,
            labels: serde_json::from_str(&labels).unwrap_or_default(),
            created_at_unix: row.get(5)?,
        },
        ended_at_unix: row.get(6)?,
        reason: row.get::<_, Option<String>>(7)?.unwrap_or_default(),
        detail: row.get::<_, Option<String>>(8)?.unwrap_or_default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(id: &str, boot: &str) -> Change {
        Change::Made(MadeSandbox {
            id: id.into(),
            owner: "ann".into(),
            boot_id: boot.into(),
            snapshot_tag: Some("py".into()),
            labels: BTreeMap::from([("job".into(), "7".into())]),
            created_at_unix: 50,
        })
    }

    fn ended(id: &str, at_unix: u64, reason: &str) -> Change {
        Change::Ended { id: id.into(), at_unix, reason: reason.into(), detail: "so it was".into() }
    }

    #[test]
    fn the_first_end_counts_and_what_nobody_saw_end_is_told_from_a_reboot() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("forkd.db")).unwrap();
        let notes = [
            made("sb1", "a"),
            made("sb2", "a"),
            made("sb3", "b"),
            made("sb4", "b"),
            ended("sb1", 60, "panicked"),
        ];
        database.note_sandboxes(&notes).unwrap();
        database.note_sandboxes(&[ended("sb1", 70, "deleted"), ended("sb9", 70, "deleted")]).unwrap();
        let alive = HashSet::from(["sb4".to_owned()]);
        assert_eq!(database.end_absent_sandboxes(&alive, "b", 80).unwrap(), (1, 1));
        let gone = database.archived_sandboxes(0).unwrap();
        let told: Vec<_> = gone.iter().map(|it| (it.made.id.as_str(), it.reason.as_str())).collect();
        assert_eq!(told, [("sb1", "panicked"), ("sb2", "host_rebooted"), ("sb3", "unknown")]);
        assert_eq!(gone[0].ended_at_unix, Some(60));
        assert_eq!(gone[0].made.labels["job"], "7");
        assert_eq!(database.sandbox("sb4").unwrap().unwrap().ended_at_unix, None);
        assert_eq!(database.sandbox("sb9").unwrap(), None);

        // It runs again.
        database.note_sandboxes(&[made("sb1", "b")]).unwrap();
        assert_eq!(database.archived_sandboxes(0).unwrap().len(), 2);
        database.note_sandboxes(&[ended("sb1", 60, "panicked")]).unwrap();
        assert_eq!(database.prune_sandboxes(61, 100).unwrap(), 1);
        assert_eq!(database.prune_sandboxes(0, 1).unwrap(), 1);
        assert_eq!(database.archived_sandboxes(0).unwrap().len(), 1);
        assert!(database.sandbox("sb4").unwrap().is_some(), "it is alive");
    }
}
