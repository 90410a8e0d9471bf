//! Compacting: storing a snapshot that is built on others once more, in full, under another tag.

use std::sync::Arc;

use crate::auth::principal::{Principal, SHARED};
use crate::error::{Code, Error, Result};
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::util::task::{self, Task};

impl SnapshotRegistry {
    /// Makes snapshot `to` with all of `tag`: one memory layer, and one layer for each disk.
    pub(crate) async fn compact(
        self: &Arc<Self>,
        tag: &str,
        to: &str,
        who: &Principal,
    ) -> Result<Arc<Entry>> {
        if tag == to {
            return Err(Error::invalid("`to` names the snapshot itself; give a new tag"));
        }
        let from = self.usable(tag, who)?;
        let owner = Some(from.owner()).filter(|owner| owner != SHARED).unwrap_or_else(|| who.owner.clone());
        let snapshot = from.snapshot()?;
        let loaded = from.current().is_some();
        let job = Arc::new(BranchJob::compacting(&snapshot, to));
        let entry = self.reserve(to, SnapshotState::Saving(job.clone()), &owner, &who.quota)?;
        let (snapshots, made) = (self.clone(), entry.clone());
        let (registry, failed) = (self.clone(), entry.clone());
        let work = async move {
            let saved = async {
                snapshots.record_owner(&made).await?;
                let template = snapshots.template(&from.tag).await?;
                if template.snapshot().as_deref() != Some(snapshot.id()) {
                    return Err(Error::new(
                        Code::SnapshotReplaced,
                        "the snapshot was made again meanwhile; compact it again",
                    ));
                }
                snapshots.save_branch(&job, &template).await
            };
            let saved = saved.await;
            if !loaded {
                from.unload();
            }
            match saved {
                Ok(snapshot) => made.ready(snapshot),
                Err(error) => snapshots.discard(&made, error).await,
            }
        };
        task::spawn_or(Task::Compact, work, move |error| registry.discard_now(&failed, error));
        entry.wait_done().await?;
        Ok(entry)
    }
}
