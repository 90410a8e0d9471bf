//! The table `template_names`: names that clients of the E2B API gave to snapshots.

use rusqlite::{OptionalExtension, Row, params};

use super::Database;
use crate::Result;

/// A name for a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateName {
    /// The owner of the name, and of the snapshot.
    pub owner: String,
    /// The name.
    pub name: String,
    /// The tag of the snapshot.
    pub tag: String,
    /// The sandbox that the snapshot was made of.
    pub sandbox: String,
    /// When the name was given.
    pub created_at_unix: u64,
}

impl Database {
    /// Gives a name to a snapshot that has none or is called like its tag. An earlier snapshot with the name is called
    /// like its tag from then on.
    pub fn name_template(&self, it: &TemplateName) -> Result<()> {
        self.call("name a template", |connection| {
            let transaction = connection.transaction()?;
            let text = "INSERT OR IGNORE INTO template_names (owner, name, tag, sandbox, created_at_unix)
                        SELECT owner, tag, tag, sandbox, created_at_unix FROM template_names
                        WHERE owner = ?1 AND name = ?2 AND tag <> ?3";
            transaction.execute(text, params![it.owner, it.name, it.tag])?;
            let text = "INSERT OR REPLACE INTO template_names (owner, name, tag, sandbox, created_at_unix)
                        VALUES (?1, ?2, ?3, ?4, ?5)";
            transaction.execute(text, params![it.owner, it.name, it.tag, it.sandbox, it.created_at_unix])?;
            let text =
                "DELETE FROM template_names WHERE owner = ?1 AND name = ?2 AND tag = ?2 AND name <> ?3";
            transaction.execute(text, params![it.owner, it.tag, it.name])?;
            transaction.commit()
        })
    }

    /// The snapshot that `name` means to `owner`.
    pub fn template(&self, owner: &str, name: &str) -> Result<Option<TemplateName>> {
        self.call("look for a template", |connection| {
            connection
                .prepare_cached(&format!("{SELECT} WHERE owner = ?1 AND name = ?2"))?
                .query_row(params![owner, name], read)
                .optional()
        })
    }

    /// All names, oldest first.
    pub fn templates(&self) -> Result<Vec<TemplateName>> {
        self.call("list templates", |connection| {
            connection
                .prepare_cached(&format!("{SELECT} ORDER BY created_at_unix, owner, name"))?
                .query_map((), read)?
                .collect()
        })
    }

    /// Removes all names of the snapshot `tag`.
    pub fn forget_templates(&self, tag: &str) -> Result<()> {
        self.call("remove the names of a template", |connection| {
            connection.execute("DELETE FROM template_names WHERE tag = ?1", params![tag]).map(drop)
        })
    }
}

const SELECT: &str = "SELECT owner, name, tag, sandbox, created_at_unix FROM template_names";

fn read(row: &Row<'_>) -> rusqlite::Result<TemplateName> {
    Ok(TemplateName {
        owner: row.get(0)?,
        name: row.get(1)?,
        tag: row.get(2)?,
        sandbox: row.get(3)?,
        created_at_unix: row.get(4)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_means_one_snapshot_to_each_owner() {
        let folder = tempfile::tempdir().unwrap();
        let database = Database::open(&folder.path().join("forkd.db")).unwrap();
        let name = |owner: &str, tag: &str, at| TemplateName {
            owner: owner.into(),
            name: "mine".into(),
            tag: tag.into(),
            sandbox: "sb1".into(),
            created_at_unix: at,
        };
        database.name_template(&name("ann", "one", 1)).unwrap();
        database.name_template(&name("bob", "two", 2)).unwrap();
        let tag = |owner: &str| database.template(owner, "mine").unwrap().map(|it| it.tag);
        assert_eq!((tag("ann").as_deref(), tag("bob").as_deref()), (Some("one"), Some("two")));
        database.name_template(&name("ann", "three", 3)).unwrap();
        assert_eq!(tag("ann").as_deref(), Some("three"));
        let earlier = TemplateName { name: "one".into(), ..name("ann", "one", 1) };
        assert_eq!(database.templates().unwrap(), [earlier, name("bob", "two", 2), name("ann", "three", 3)]);
        let unnamed = TemplateName { name: "four".into(), ..name("ann", "four", 4) };
        database.name_template(&unnamed).unwrap();
        assert_eq!(tag("ann").as_deref(), Some("three"), "until it is there");
        database.name_template(&name("ann", "four", 4)).unwrap();
        assert_eq!(tag("ann").as_deref(), Some("four"));
        assert_eq!(database.template("ann", "four").unwrap(), None, "it has one name");
        database.forget_templates("four").unwrap();
        database.forget_templates("four").unwrap();
        assert_eq!((tag("ann"), tag("bob").as_deref()), (None, Some("two")));
    }
}
