//! Names of templates: E2B's names map to tags of snapshots.
//!
//! | the client's name | the snapshot |
//! |---|---|
//! | a name that `POST /sandboxes/{id}/snapshots` gave | the one that the table in the database names |
//! | `NAME` | the tag `NAME` |
//! | `NAME:default`, `TEAM/NAME`, `TEAM/NAME:default` | the tag `NAME` |

use std::sync::Arc;

use crate::auth::principal::Principal;
use crate::compat::e2b::E2bContext;
use crate::error::{Code, Error, Result};
use crate::snapshot::registry::Entry;
use crate::util::task::blocking;

/// The longest name.
pub(super) const MAX_NAME: usize = 256;
/// The build tag that a name without one means.
const DEFAULT: &str = ":default";

/// The name without its build tag, if that is the default.
pub(super) fn without_default(name: &str) -> &str {
    name.strip_suffix(DEFAULT).unwrap_or(name)
}

/// The tag that a name means if the table does not have it.
fn plain_tag(name: &str) -> &str {
    let name = without_default(name);
    name.split_once('/').map_or(name, |(_, name)| name)
}

impl E2bContext {
    /// The tag of the snapshot that has the name in the table, which may be gone.
    pub(super) async fn named_tag(&self, name: &str, who: &Principal) -> Result<Option<String>> {
        let (database, owner) = (self.registry.host.database.clone(), who.owner.clone());
        let key = without_default(name).to_owned();
        let named = blocking("looking for a template", move || Ok(database.template(&owner, &key)?)).await?;
        Ok(named.map(|template| template.tag))
    }

    /// The snapshot of a template that `who` may use.
    pub(super) async fn template(&self, name: &str, who: &Principal) -> Result<Arc<Entry>> {
        if name.is_empty() || name.len() > MAX_NAME {
            return Err(Error::invalid(format!("a template's name must have 1 to {MAX_NAME} bytes")));
        }
        // The named snapshot may be gone, and the tag of that name may be another one.
        let named = self.named_tag(name, who).await?;
        if let Some(entry) = named.and_then(|tag| self.snapshots.usable(&tag, who).ok()) {
            return Ok(entry);
        }
        self.snapshots.usable(plain_tag(name), who).map_err(|error| match error.code() {
            Code::SnapshotNotFound | Code::InvalidRequest => missing(name),
            _ => error,
        })
    }
}

pub(super) fn missing(name: &str) -> Error {
    let shown: String = name.chars().filter(|c| !c.is_control()).take(MAX_NAME).collect();
    let text = match plain_tag(name) {
        built_in @ ("base" | "code-interpreter-v1") => {
            format!("template {shown} does not exist; make it with `forkd template prepare {built_in}`")
        }
        _ => format!(
            "template {shown} does not exist; make it with `forkd snapshot` (`forkd images` lists all), or prepare a \
             built-in one (`forkd template prepare base code-interpreter-v1`)"
        ),
    };
    Error::new(Code::SnapshotNotFound, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_e2b_mean_tags() {
        for (name, tag) in [
            ("base", "base"),
            ("base:default", "base"),
            ("team/base", "base"),
            ("team/base:default", "base"),
            ("a:b", "a:b"),
            ("", ""),
        ] {
            assert_eq!(plain_tag(name), tag, "{name}");
        }
    }

    #[test]
    fn a_missing_template_names_the_command_that_makes_it() {
        assert!(missing("base:default").public().contains("forkd template prepare base`"));
        assert!(missing("mine").public().contains("forkd snapshot"));
    }
}
