//! Removing a snapshot for a client: the rules about snapshots and workspaces that need it.

use std::sync::Arc;

use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
use crate::snapshot::registry::Removal;
use crate::workspace::Workspaces;

impl Workspaces {
    /// Removes the snapshot `tag` for `who`, with its dependents if `how` says so. Refuses if a workspace is resumed
    /// from one of them, or if another owner needs one.
    pub(crate) async fn remove_snapshot_for(&self, tag: &str, how: Removal, who: &Principal) -> Result<()> {
        let entry = self.snapshots.usable(tag, who)?;
        let mut to_remove = match how {
            Removal::Cascade | Removal::Plain => self.snapshots.dependents(tag).await?,
            Removal::Force => Vec::new(),
        };
        // The caller may neither remove nor see the names of other owners' snapshots.
        if to_remove.iter().any(|tag| self.snapshots.get(tag).is_ok_and(|it| !who.owns(&it.owner()))) {
            let text = format!("others need snapshot {tag}; remove only its name with force (`--force`)");
            return Err(Error::new(Code::SnapshotInUse, text));
        }
        if how == Removal::Plain {
            to_remove.clear();
        }
        to_remove.push(tag.to_owned());
        if let Some((tag, name)) = to_remove.iter().find_map(|tag| Some((tag, self.user_of(tag)?))) {
            if self.check_owner(&name, who).is_err() {
                let text = format!(
                    "snapshot {tag} is the state of another owner's workspace; ask an admin to delete that workspace first"
                );
                return Err(Error::new(Code::SnapshotInUse, text));
            }
            let text = format!(
                "workspace {name} is resumed from snapshot {tag}; delete it first (`forkd workspace rm {name}`)"
            );
            return Err(Error::new(Code::SnapshotInUse, text));
        }
        // The removal must not hit a newer snapshot with the same tag.
        if !self.snapshots.get(tag).is_ok_and(|now| Arc::ptr_eq(&now, &entry)) {
            return Err(Error::new(
                Code::SnapshotReplaced,
                format!("snapshot {tag} was removed or replaced meanwhile; list the snapshots again"),
            ));
        }
        self.snapshots.remove(tag, how).await
    }
}
