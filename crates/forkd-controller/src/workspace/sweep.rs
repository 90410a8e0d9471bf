//! Removes earlier snapshots of a workspace that no sandbox and no snapshot needs. `snapshot::gc` removes old branches.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::error::Result;
use crate::sandbox::Sandbox;
use crate::snapshot::registry::Removal;
use crate::util::task::blocking;
use crate::workspace::{Workspace, WorkspaceRecord, Workspaces};

impl Workspaces {
    /// Removes the earlier snapshots of the workspace that no other sandbox or snapshot needs.
    pub(crate) async fn sweep(&self, name: &str) {
        if let Ok((workspace, _turn)) = self.lock_exclusive(name).await {
            self.sweep_retired(name, &workspace).await;
        }
    }

    pub(crate) async fn sweep_retired(&self, name: &str, workspace: &Workspace) {
        let Ok(record) = self.usable(name, workspace) else { return };
        let mut kept = Vec::new();
        for tag in &record.retired {
            if self.is_needed(&record, tag).await {
                kept.push(tag.clone());
            } else if let Err(error) = self.remove_snapshot(tag, &record.owner).await {
                tracing::warn!(workspace = name, tag, %error, "old state of a workspace not removed yet");
                kept.push(tag.clone());
            }
        }
        if kept != record.retired
            && let Err(error) = self.keep(workspace, WorkspaceRecord { retired: kept, ..record }).await
        {
            tracing::warn!(workspace = name, %error, "workspace record not updated");
        }
    }

    /// Whether a sandbox, or a snapshot that is not a state of this workspace, needs the state `tag`.
    async fn is_needed(&self, record: &WorkspaceRecord, tag: &str) -> bool {
        let sandboxes = self.registry.list();
        let forked = |sandbox: &Arc<Sandbox>| {
            sandbox.spec.snapshot_tag.as_deref() == Some(tag)
                || sandbox.runtime().saved.history.rolled_back_to.as_deref() == Some(tag)
        };
        if sandboxes
            .iter()
            .any(|sandbox| forked(sandbox) && record.live_sandbox_id.as_ref() != Some(&sandbox.id))
        {
            return true;
        }
        let own: BTreeSet<String> = record.retired.iter().chain(&record.current_state_tag).cloned().collect();
        let (store, wanted) = (self.snapshots.store.clone(), tag.to_owned());
        let dependents = blocking("looking for dependents", move || Ok(store.dependents(&wanted)?)).await;
        match dependents {
            Ok(dependents) => dependents.iter().any(|dependent| !own.contains(dependent)),
            Err(error) => !error.code().is_not_found(),
        }
    }

    /// Removes the snapshot `tag`; its layers stay as long as others are built on them. A snapshot that was given to
    /// another owner stays.
    pub(crate) async fn remove_snapshot(&self, tag: &str, owner: &str) -> Result<()> {
        if self.snapshots.get(tag).is_ok_and(|entry| entry.owner() != owner) {
            return Ok(());
        }
        match self.snapshots.remove(tag, Removal::Force).await {
            Err(error) if error.code().is_not_found() => Ok(()),
            other => other,
        }
    }
}
