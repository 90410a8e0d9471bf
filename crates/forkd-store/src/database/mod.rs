//! The database: state of the daemon that no folder holds.
//!
//! One SQLite file in WAL mode, brought up to date when it is opened. When a call returns, its change is on
//! disk. Every table has a module with its operations; no other code knows SQL.

mod idempotency;
mod owners;
mod sandboxes;
mod template_names;
mod tokens;

use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use rusqlite::{Connection, OpenFlags};

use crate::waits::waits;
use crate::{Error, Result};

pub use idempotency::{Answer, Begun};
pub use sandboxes::{ArchiveEntry, Change, MadeSandbox};
pub use template_names::TemplateName;
pub use tokens::{Quota, Scope, Token, TokenHash};

/// What brings the database from one version to the next: the first from nothing to version 1.
const MIGRATIONS: &[&str] = &[include_str!("schema-1.sql"), include_str!("schema-2.sql")];
/// For a reader beside the daemon, such as `sqlite3`.
const BUSY_WAIT: Duration = Duration::from_secs(5);

/// The daemon's memory. Calls block.
#[derive(Debug)]
pub struct Database {
    connection: Mutex<Connection>,
}

impl Database {
    /// Opens the database in `path`; makes it if there is none. One that a newer version wrote is refused.
    pub fn open(path: &Path) -> Result<Self> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE
            | OpenFlags::SQLITE_OPEN_CREATE
            | OpenFlags::SQLITE_OPEN_NO_MUTEX
            | OpenFlags::SQLITE_OPEN_NOFOLLOW;
        let connection = Connection::open_with_flags(path, flags).map_err(failed("open the database"))?;
        let mut database = Database { connection: Mutex::new(connection) };
        database.prepare().map_err(failed("open the database"))?;
        database.migrate(path)?;
        Ok(database)
    }

    fn prepare(&mut self) -> rusqlite::Result<()> {
        let connection = self.connection.get_mut().unwrap_or_else(PoisonError::into_inner);
        connection.busy_timeout(BUSY_WAIT)?;
        connection.pragma_update(None, "journal_mode", "wal")?;
        // Acknowledged changes survive a power cut.
        connection.pragma_update(None, "synchronous", "full")?;
        connection.pragma_update(None, "foreign_keys", true)
    }

    fn migrate(&mut self, path: &Path) -> Result<()> {
        let connection = self.connection.get_mut().unwrap_or_else(PoisonError::into_inner);
        let version = |connection: &Connection| {
            connection.pragma_query_value(None, "user_version", |row| row.get::<_, usize>(0))
        };
        let found = version(connection).map_err(failed("read the database's version"))?;
        if found > MIGRATIONS.len() {
            return Err(Error::Newer(format!(
                "{} is of version {found}, and this forkd knows up to {}; start the newer forkd again, or \
                 move the file away",
                path.display(),
                MIGRATIONS.len()
            )));
        }
        for (index, step) in MIGRATIONS.iter().enumerate().skip(found) {
            let migrated = (|| {
                let transaction = connection.transaction()?;
                transaction.execute_batch(step)?;
                transaction.pragma_update(None, "user_version", index + 1)?;
                transaction.commit()
            })();
            migrated.map_err(failed("bring the database up to date"))?;
        }
        Ok(())
    }

    /// For tests: as long as the answer lives, no other call goes on.
    #[doc(hidden)]
    pub fn stop(&self) -> impl Sized + '_ {
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does something with the database; `what` is for the error.
    pub(crate) fn call<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&mut Connection) -> rusqlite::Result<T>,
    ) -> Result<T> {
        waits(what);
        let mut connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        work(&mut connection).map_err(failed(what))
    }
}

fn failed(what: &'static str) -> impl FnOnce(rusqlite::Error) -> Error {
    move |source| Error::Database { what, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_database_is_made_once_and_found_again() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forkd.db");
        let write = |connection: &mut Connection| {
            connection.execute("INSERT INTO snapshot_owners VALUES ('py', 'ann')", ())
        };
        Database::open(&path).unwrap().call("write", write).unwrap();
        let database = Database::open(&path).unwrap();
        let read = |connection: &mut Connection| {
            connection.query_row("SELECT owner FROM snapshot_owners", (), |row| row.get::<_, String>(0))
        };
        assert_eq!(database.call("read", read).unwrap(), "ann");
        let mode = |connection: &mut Connection| {
            connection.pragma_query_value(None, "journal_mode", |row| row.get::<_, String>(0))
        };
        assert_eq!(database.call("ask", mode).unwrap(), "wal");
    }

    #[test]
    fn a_database_of_a_newer_version_is_refused_and_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forkd.db");
        let newer = Connection::open(&path).unwrap();
        newer.pragma_update(None, "user_version", MIGRATIONS.len() + 1).unwrap();
        drop(newer);
        let error = Database::open(&path).unwrap_err();
        assert!(error.to_string().contains("newer forkd"), "{error}");
    }
}
