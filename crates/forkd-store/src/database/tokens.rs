//! The table `tokens`: access over TCP. It holds only the hash of a token, from which the token cannot be
//! computed.

use rusqlite::types::{FromSql, FromSqlError, FromSqlResult, ValueRef};
use rusqlite::{ErrorCode, Row};
use serde::{Deserialize, Serialize};

use super::Database;
use crate::{Error, Result};

/// What a token allows. Each scope includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Look.
    Read,
    /// Make, use and end sandboxes and snapshots of their own.
    Write,
    /// Everything, with everybody's.
    Admin,
}

impl Scope {
    /// Its name on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Admin => "admin",
        }
    }

    /// Its name in the database. `use` is the older name of `write`: the table accepts no other, and an older daemon
    /// on the same database reads no other.
    fn stored(self) -> &'static str {
        match self {
            Scope::Write => "use",
            other => other.name(),
        }
    }
}

impl FromSql for Scope {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let all = [Scope::Read, Scope::Write, Scope::Admin];
        let name = value.as_str()?;
        let found = all.into_iter().find(|scope| scope.stored() == name || scope.name() == name);
        found.ok_or(FromSqlError::InvalidType)
    }
}

/// The most an owner may have; no limit where there is none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Quota {
    /// Sandboxes, including ended ones that were not deleted.
    pub max_sandboxes: Option<u64>,
    /// Memory of all their sandboxes together, in MiB.
    pub max_memory_mib: Option<u64>,
    /// Snapshots.
    pub max_snapshots: Option<u64>,
}

/// The BLAKE3 of a token.
pub type TokenHash = [u8; 32];

/// A token without its secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Token {
    /// Its name.
    pub name: String,
    /// Its scope.
    pub scope: Scope,
    /// The owner of the objects that it creates.
    pub owner: String,
    /// The owner's quota.
    pub quota: Quota,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// From when on it is refused.
    pub expires_at_unix: Option<u64>,
}

impl Database {
    /// All tokens with their hashes, by name.
    pub fn tokens(&self) -> Result<Vec<(Token, TokenHash)>> {
        self.call("read the tokens", |connection| {
            let text = "SELECT name, scope, owner, max_sandboxes, max_memory_mib, max_snapshots, \
                        created_at_unix, expires_at_unix, hash FROM tokens ORDER BY name";
            connection.prepare_cached(text)?.query_map((), read)?.collect()
        })
    }

    /// Adds a token; its name must be free.
    pub fn add_token(&self, token: &Token, hash: &TokenHash) -> Result<()> {
        let added = self.call("store a token", |connection| {
            let text = "INSERT INTO tokens (name, scope, owner, max_sandboxes, max_memory_mib, \
                        max_snapshots, created_at_unix, expires_at_unix, hash) \
                        VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)";
            let quota = &token.quota;
            connection.prepare_cached(text)?.execute((
                &token.name,
                token.scope.stored(),
                &token.owner,
                quota.max_sandboxes,
                quota.max_memory_mib,
                quota.max_snapshots,
                token.created_at_unix,
                token.expires_at_unix,
                hash,
            ))
        });
        match added {
            Err(Error::Database { source, .. })
                if source.sqlite_error_code() == Some(ErrorCode::ConstraintViolation) =>
            {
                let name = &token.name;
                Err(Error::Exists(format!("there is a token {name}; remove it first, or rotate it")))
            }
            other => other.map(drop),
        }
    }

    /// Gives a token another secret.
    pub fn replace_token(&self, name: &str, hash: &TokenHash) -> Result<()> {
        let changed = self.call("store a token", |connection| {
            connection.prepare_cached("UPDATE tokens SET hash = ?2 WHERE name = ?1")?.execute((name, hash))
        });
        found(name, changed?)
    }

    /// Removes a token.
    pub fn remove_token(&self, name: &str) -> Result<()> {
        let removed = self.call("remove a token", |connection| {
            connection.prepare_cached("DELETE FROM tokens WHERE name = ?1")?.execute((name,))
        });
        found(name, removed?)
    }
}

fn found(name: &str, rows: usize) -> Result<()> {
    match rows {
        0 => Err(Error::NotFound(format!("there is no token {name}; `forkd token ls` lists them"))),
        _ => Ok(()),
    }
}

fn read(row: &Row<'_>) -> rusqlite::Result<(Token, TokenHash)> {
    let token = Token {
        name: row.get(0)?,
        scope: row.get(1)?,
        owner: row.get(2)?,
        quota: Quota { max_sandboxes: row.get(3)?, max_memory_mib: row.get(4)?, max_snapshots: row.get(5)? },
        created_at_unix: row.get(6)?,
        expires_at_unix: row.get(7)?,
    };
    Ok((token, row.get(8)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn token(name: &str) -> Token {
        Token {
            name: name.into(),
            scope: Scope::Write,
            owner: "ann".into(),
            quota: Quota { max_sandboxes: Some(3), max_memory_mib: None, max_snapshots: Some(0) },
            created_at_unix: 7,
            expires_at_unix: Some(9),
        }
    }

    #[test]
    fn a_token_comes_back_as_it_was_stored_and_its_name_is_nobody_elses() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("forkd.db");
        let database = Database::open(&path).unwrap();
        database.add_token(&token("ci"), &[1; 32]).unwrap();
        let error = database.add_token(&token("ci"), &[2; 32]).unwrap_err();
        assert!(matches!(&error, Error::Exists(text) if text.contains("ci")), "{error}");
        drop(database);
        let database = Database::open(&path).unwrap();
        assert_eq!(database.tokens().unwrap(), [(token("ci"), [1; 32])]);
        database.replace_token("ci", &[3; 32]).unwrap();
        assert_eq!(database.tokens().unwrap(), [(token("ci"), [3; 32])]);
        database.remove_token("ci").unwrap();
        assert_eq!(database.tokens().unwrap(), []);
        for missing in [database.remove_token("ci"), database.replace_token("ci", &[4; 32])] {
            assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
        }
    }

    #[test]
    fn the_scope_write_is_stored_as_older_daemons_read_it_and_both_names_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("forkd.db")).unwrap();
        database.add_token(&token("ci"), &[1; 32]).unwrap();
        let stored: String = database
            .call("look", |it| {
                it.query_row("SELECT scope FROM tokens WHERE name = 'ci'", (), |row| row.get(0))
            })
            .unwrap();
        assert_eq!((stored.as_str(), token("ci").scope.name()), ("use", "write"));
        for name in ["use", "write"] {
            let read: Scope =
                database.call("look", |it| it.query_row("SELECT ?1", (name,), |row| row.get(0))).unwrap();
            assert_eq!(read, Scope::Write, "{name}");
        }
    }
}
