//! Taking over the templates an earlier daemon left running, and saving the branches among them that are not on
//! disk. Half-made templates are ended and removed; templates whose records cannot be read are kept (`unknown`).

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::Request;
use forkd_protocol::names::is_valid_name;
use forkd_store::{Quota, Snapshot};

use crate::auth::principal::local_owner;
use crate::error::{Error, Result};
use crate::host::lineage::Lineage;
use crate::host::process::ProcessId;
use crate::monitor::control_socket::{self, Link};
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::merge::NoSource;
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::cgroup::move_to_own_cgroup;
use crate::snapshot::template::{Adopted, PersistState, Template, TemplateParts, TemplateRecord};
use crate::snapshot::unknown::{UnknownTemplate, Unread};
use crate::util::records::Found;
use crate::util::task::{self, Task};

/// How long a half-made process may take to stop.
pub(crate) const STOP_WAIT: Duration = Duration::from_secs(5);

/// The templates that an earlier daemon left.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Templates that live, with their children by name.
    pub(crate) templates: HashMap<String, (Arc<Template>, HashMap<String, Adopted>)>,
    /// All lineages with a template or sandbox left, held until all of these are taken over.
    pub(crate) lineages: Vec<Arc<Lineage>>,
    /// Templates whose records cannot be read.
    pub(crate) unknown: Vec<Arc<UnknownTemplate>>,
}

/// A branch that is not on disk.
type Unsaved = (Arc<Template>, crate::snapshot::branch_job::BranchRecord);

impl SnapshotRegistry {
    /// Takes over the templates an earlier daemon left running, and ends half-made ones.
    pub(crate) async fn adopt(self: &Arc<Self>) -> Result<Leftovers> {
        let read = |error| Error::host(format!("cannot read {}", self.folder.display()), error);
        let (mut leftovers, mut unsaved) = (Leftovers::default(), Vec::new());
        for found in std::fs::read_dir(&self.folder).map_err(read)? {
            let folder = found.map_err(read)?.path();
            let id = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !is_valid_name(&id) {
                tracing::warn!(path = %folder.display(), "not a template folder; left alone");
                continue;
            }
            let (record, identity) = (TemplateRecord::read(&folder), ProcessId::read(&folder));
            let unreadable = match (&record, &identity) {
                // Half-made: `take_over` refuses it.
                (Found::Missing, _) => None,
                (Found::Unreadable(why), _) | (_, Found::Unreadable(why)) => Some(why.clone()),
                (Found::Read(_), _) => None,
            };
            if let Some(why) = unreadable {
                let unread = Unread { id, folder, why, identity: identity.read() };
                leftovers.unknown.push(UnknownTemplate::new(unread, &self.host.lineages));
                continue;
            }
            if let Err(error) =
                self.take_over(&id, &folder, record.read(), &mut leftovers, &mut unsaved).await
            {
                tracing::warn!(template = id, %error, "template not taken over; ending it");
                end(&id, &folder).await;
                self.host.lineages.forget(&id);
                self.host.cleanup_queue.remove_folder(folder).await;
            }
        }
        // Before branches reserve their tags: an unknown template keeps its tag.
        leftovers.unknown.iter().for_each(|template| self.list_unknown(template));
        self.resume_saving(unsaved, &leftovers).await;
        Ok(leftovers)
    }

    async fn take_over(
        &self,
        id: &str,
        folder: &Path,
        record: Option<TemplateRecord>,
        leftovers: &mut Leftovers,
        unsaved: &mut Vec<Unsaved>,
    ) -> Result<()> {
        let half_made = |why| Err(Error::host("the template is half-made", why));
        let Some(TemplateRecord { about, standing }) = record else {
            return half_made("it has no record");
        };
        let Some(lineage) = self.host.lineages.resume(about.lineage, &about.cgroup) else {
            return half_made("another lineage has its user id");
        };
        leftovers.lineages.push(lineage.clone());
        let (id, folder, cleanup_queue) = (id.to_owned(), folder.to_owned(), self.host.cleanup_queue.clone());
        let plan = TemplateParts { id: id.clone(), folder, about, lineage, cleanup_queue };
        let (template, children) = Template::adopt(plan, self.host.config.timing.call).await?;
        match standing {
            PersistState::Saved(snapshot) => {
                template.is_of(&snapshot);
                self.install(&template, &snapshot);
            }
            PersistState::Unsaved(record) => unsaved.push((template.clone(), *record)),
            PersistState::Forgotten => {
                if let Some(fork) = &template.about.fork {
                    template.keep_reservation(self.forks.reserve(&fork.owner));
                }
                // The earlier daemon may have been killed before the move: it would end with its source.
                move_to_own_cgroup(&template).await;
            }
        }
        leftovers.templates.insert(id, (template, children));
        Ok(())
    }

    /// Makes an adopted template the current one of its tag, if the tag still has the same snapshot.
    fn install(&self, template: &Arc<Template>, snapshot: &str) {
        let Ok(entry) = self.get(&template.about.tag) else { return };
        // A template of a snapshot of disks alone was only needed to write it.
        let is_its = |now: Snapshot| now.id() == snapshot && !now.is_disk_only();
        if entry.snapshot().is_ok_and(is_its) && entry.current().is_none() {
            entry.set_current(template.clone());
        }
    }

    /// Starts to save the branches that are not on disk.
    async fn resume_saving(self: &Arc<Self>, mut unsaved: Vec<Unsaved>, leftovers: &Leftovers) {
        // The earlier daemon may have been killed before the move: the branches would end with their sources.
        for (template, _) in &unsaved {
            move_to_own_cgroup(template).await;
        }
        // By age: a branch reserves its tag after the branch it came from.
        unsaved.sort_by(|(a, x), (b, y)| (x.begun_at_unix, &a.id).cmp(&(y.begun_at_unix, &b.id)));
        let mut entries: HashMap<String, Arc<Entry>> = HashMap::new();
        let mut waiting: Vec<Unsaved> = Vec::new();
        let mut jobs: Vec<(Arc<Entry>, Arc<BranchJob>, Arc<Template>)> = Vec::new();
        for (template, record) in unsaved {
            // The snapshot is on disk; the daemon was killed before it recorded that.
            if let Ok(entry) = self.get(&template.about.tag)
                && let Ok(snapshot) = entry.snapshot()
            {
                if let Err(error) = entry.write_record(&template) {
                    tracing::warn!(tag = entry.tag, %error, "template record not updated: branch is on disk");
                }
                self.install(&template, snapshot.id());
                continue;
            }
            waiting.push((template, record));
        }
        while !waiting.is_empty() {
            let before = waiting.len();
            let names: Vec<String> = waiting.iter().map(|(template, _)| template.id.clone()).collect();
            let (ready, rest): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|(_, record)| {
                // After the branch it came from, if that waits here, too.
                record.origin.as_ref().is_none_or(|it| it.snapshot.is_some() || !names.contains(&it.template))
            });
            // Branches that came from each other in a circle: no honest daemon writes such records.
            waiting = if ready.len() + rest.len() == before && ready.is_empty() { Vec::new() } else { rest };
            for (template, mut record) in ready {
                let mut parent = None;
                if let Some(origin) = &mut record.origin
                    && origin.snapshot.is_none()
                {
                    parent = entries.get(&origin.template).cloned();
                    let known = leftovers.templates.get(&origin.template);
                    origin.snapshot = known.and_then(|(template, _)| template.snapshot());
                }
                // The earlier daemon may have been killed before it wrote to the database: the record counts first.
                let known = || self.owners.of(&template.about.tag).unwrap_or_else(local_owner);
                let owner = record.owner.clone().unwrap_or_else(known);
                let branch = Arc::new(BranchJob::adopted(&template, record, parent));
                let state = SnapshotState::Saving(branch.clone());
                match self.reserve(&branch.tag, state, &owner, &Quota::default()) {
                    Ok(entry) => {
                        entry.set_current(template.clone());
                        entries.insert(template.id.clone(), entry.clone());
                        jobs.push((entry, branch, template));
                    }
                    Err(error) => tracing::warn!(tag = branch.tag, %error, "branch not saved"),
                }
            }
        }
        for (entry, branch, template) in jobs {
            tracing::info!(tag = branch.tag, "branch of an earlier daemon is not on disk yet; writing it");
            let snapshots = self.clone();
            let failed = entry.clone();
            let work = async move {
                match snapshots.record_owner(&entry).await {
                    Ok(()) => snapshots.persist(entry, branch, template, NoSource).await,
                    Err(error) => {
                        tracing::error!(tag = branch.tag, %error, "branch not saved: its owner is not recorded");
                        entry.fail(error);
                    }
                }
            };
            task::spawn_or(Task::Save, work, move |error| failed.fail(error));
        }
    }
}

/// Ends a template that is not taken over.
async fn end(id: &str, folder: &Path) {
    match ProcessId::read(folder).read().and_then(|identity| identity.open()) {
        Some(process) => process.end(id).await,
        // The process may have been forked and not recorded: it listens on its control socket.
        None => {
            if stop(folder).await.is_err() {
                tracing::warn!(template = id, "half-made template did not stop");
            }
        }
    }
}

/// Asks the process that listens on the control socket in `folder` to stop; an error if it does not in time.
pub(crate) async fn stop(folder: &Path) -> std::result::Result<(), tokio::time::error::Elapsed> {
    let stopped = async {
        let link = Link::new(control_socket::open(&folder.join(control_socket::CONTROL)).ok()?).ok()?;
        link.send(&Request::Stop, &[]).await.ok()?;
        while let Ok(Some(_)) = link.recv().await {}
        Some(())
    };
    tokio::time::timeout(STOP_WAIT, stopped).await.map(drop)
}

#[cfg(test)]
mod tests;
