//! The table `answers`: the stored responses to requests with an idempotency key.

use rusqlite::{OptionalExtension, params};

use super::Database;
use crate::Result;

/// An answer that was given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its HTTP status.
    pub status: u16,
    /// Its body; none if that was too large to keep.
    pub body: Option<Vec<u8>>,
}

/// The state of a request's key when the request comes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Begun {
    /// Nothing: it was noted now.
    New,
    /// It came before, and was answered.
    Answered(Answer),
    /// It came before, and no answer was kept: it is under way, or was cut off.
    Unanswered,
    /// Another request came with that key.
    Other,
}

impl Database {
    /// Notes that a request came with `key`, unless one has since `since`. Two requests are the same if all
    /// their `parts` are.
    pub fn begin_answer(
        &self,
        owner: &str,
        key: &str,
        parts: &[&[u8]],
        now: u64,
        since: u64,
    ) -> Result<Begun> {
        type Row = (Vec<u8>, Option<u16>, Option<Vec<u8>>);
        let mut hasher = blake3::Hasher::new();
        for part in parts {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        let request = hasher.finalize().as_bytes().to_vec();
        self.call("note a request", |connection| {
            let transaction = connection.transaction()?;
            transaction.execute(
                "DELETE FROM answers WHERE owner = ?1 AND key = ?2 AND created_at_unix < ?3",
                params![owner, key, since],
            )?;
            let found: Option<Row> = transaction
                .query_row(
                    "SELECT request, status, body FROM answers WHERE owner = ?1 AND key = ?2",
                    params![owner, key],
                    |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
                )
                .optional()?;
            let begun = match found {
                Some((known, _, _)) if known != request => Begun::Other,
                Some((_, Some(status), body)) => Begun::Answered(Answer { status, body }),
                Some((_, None, _)) => Begun::Unanswered,
                None => {
                    transaction.execute(
                        "INSERT INTO answers (owner, key, request, created_at_unix) VALUES (?1, ?2, ?3, ?4)",
                        params![owner, key, request, now],
                    )?;
                    Begun::New
                }
            };
            transaction.commit()?;
            Ok(begun)
        })
    }

    /// Keeps the answer to a request that was noted.
    pub fn keep_answer(&self, owner: &str, key: &str, answer: &Answer) -> Result<()> {
        self.call("keep an answer", |connection| {
            connection.execute(
                "UPDATE answers SET status = ?3, body = ?4 WHERE owner = ?1 AND key = ?2",
                params![owner, key, answer.status, answer.body],
            )?;
            Ok(())
        })
    }

    /// Deletes a request's entry: the next request with that key is a new one.
    pub fn forget_answer(&self, owner: &str, key: &str) -> Result<()> {
        self.call("forget a request", |connection| {
            connection.execute("DELETE FROM answers WHERE owner = ?1 AND key = ?2", params![owner, key])?;
            Ok(())
        })
    }

    /// Deletes entries from before `since`, and of each owner the oldest responses beyond `max_count` or
    /// `max_bytes` of bodies. Requests under way stay.
    pub fn prune_answers(&self, since: u64, max_count: u64, max_bytes: u64) -> Result<usize> {
        self.call("forget old answers", |connection| {
            let old = connection.execute("DELETE FROM answers WHERE created_at_unix < ?1", params![since])?;
            let many = connection.execute(
                "DELETE FROM answers WHERE rowid IN (
                     SELECT id FROM (
                         SELECT rowid AS id,
                                row_number() OVER newest AS place,
                                sum(coalesce(length(body), 0)) OVER newest AS bytes
                         FROM answers WHERE status IS NOT NULL
                         WINDOW newest AS (PARTITION BY owner ORDER BY created_at_unix DESC, rowid DESC)
                     ) WHERE place > ?1 OR bytes > ?2
                 )",
                params![max_count, max_bytes],
            )?;
            Ok(old + many)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn open() -> (tempfile::TempDir, Database) {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("forkd.db")).unwrap();
        (folder, database)
    }

    #[test]
    fn a_key_belongs_to_one_owner_and_one_request_until_it_is_old() {
        let (_folder, database) = open();
        let begin = |owner: &str, request: &[u8], now| {
            database.begin_answer(owner, "k", &[b"POST", request], now, now.saturating_sub(10)).unwrap()
        };
        assert_eq!(begin("ann", b"one", 100), Begun::New);
        assert_eq!(begin("ann", b"one", 101), Begun::Unanswered);
        assert_eq!(begin("ann", b"two", 101), Begun::Other);
        assert_eq!(begin("bob", b"two", 101), Begun::New);
        let answer = Answer { status: 201, body: Some(b"[]".to_vec()) };
        database.keep_answer("ann", "k", &answer).unwrap();
        assert_eq!(begin("ann", b"one", 105), Begun::Answered(answer));
        assert_eq!(begin("bob", b"two", 105), Begun::Unanswered);
        assert_eq!(begin("ann", b"two", 111), Begun::New, "the old one is forgotten");
        database.forget_answer("bob", "k").unwrap();
        assert_eq!(begin("bob", b"two", 105), Begun::New);
    }

    #[test]
    fn the_oldest_answers_go_when_there_are_too_many_or_they_are_too_large() {
        let (_folder, database) = open();
        for age in 0..5u64 {
            let key = age.to_string();
            database.begin_answer("ann", &key, &[b"r"], 100 + age, 0).unwrap();
            let body = Some(vec![0; 10]);
            database.keep_answer("ann", &key, &Answer { status: 200, body }).unwrap();
        }
        assert_eq!(database.prune_answers(101, 100, 1000).unwrap(), 1);
        assert_eq!(database.prune_answers(0, 3, 1000).unwrap(), 1);
        assert_eq!(database.prune_answers(0, 100, 20).unwrap(), 1);
        let begun = |key: &str| database.begin_answer("ann", key, &[b"r"], 200, 0).unwrap();
        assert!(matches!(begun("4"), Begun::Answered(_)));
        assert_eq!(begun("2"), Begun::New);
        // Requests of one owner remove no answers of another owner, and no request under way.
        database.begin_answer("bob", "first", &[b"r"], 1, 0).unwrap();
        database.keep_answer("bob", "first", &Answer { status: 200, body: None }).unwrap();
        assert_eq!(database.prune_answers(0, 1, 1000).unwrap(), 1);
        assert_eq!(begun("2"), Begun::Unanswered);
        let first = database.begin_answer("bob", "first", &[b"r"], 2, 0).unwrap();
        assert!(matches!(first, Begun::Answered(_)), "{first:?}");
    }
}
