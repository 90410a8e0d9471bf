//! All snapshots: those on disk, those being made, and the template each has while it is in use.
//!
//! A tag has at most one *current* template. The first spawn starts it from disk, or it is left over
//! from making the snapshot. A template that is no longer current (unloaded, deleted, lost) lives on as long
//! as its children do: see [`Template`].

use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::path::PathBuf;
use std::sync::Arc;

use forkd_protocol::names::{NAME_RULE, is_valid_name};
use forkd_store::{Quota, Store};
use parking_lot::Mutex;
use tokio::sync::{Notify, Semaphore};

use crate::auth::principal::{LOCAL, local_owner};
use crate::auth::quota::check_snapshots;
use crate::error::{Code, Error, Result};
use crate::host::{Host, run_dir};
use crate::snapshot::adopt::Leftovers;
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::forks::Forks;
use crate::snapshot::owner_records::Owners;
use crate::snapshot::template::Template;
use crate::snapshot::unknown::UnknownTemplate;
use crate::util::fs::make_private_dir;
use crate::util::task::{self, Task, blocking};

pub(crate) use crate::snapshot::entry::Entry;
pub(crate) use crate::snapshot::state::{SnapshotJob, SnapshotState};

/// Savers at a time: more would only wait for the same disk.
const SAVERS: usize = 2;

/// All snapshots of a daemon.
#[derive(Debug)]
pub(crate) struct SnapshotRegistry {
    pub(crate) host: Arc<Host>,
    pub(crate) store: Store,
    /// The folder that holds each template's folder.
    pub(crate) folder: PathBuf,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
    /// The owners as the database has them. See `ownership`.
    pub(crate) owners: Owners,
    /// The forks of running sandboxes, which are in no list.
    pub(crate) forks: Forks,
    /// One permit for each branch that is being taken.
    pub(crate) branching: Arc<Semaphore>,
    /// One permit for each running save.
    pub(crate) saving: Semaphore,
    /// Wakes `gc` when there is a new branch or disk space runs out.
    pub(crate) gc_wakeup: Notify,
}

/// What a removal does with snapshots that depend on the removed one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Removal {
    /// Refuse if another snapshot depends on it.
    Plain,
    /// Remove the dependents, too.
    Cascade,
    /// Remove only the name: the layers stay as long as another snapshot depends on them.
    Force,
}

impl SnapshotRegistry {
    /// Opens the snapshots in the host's data directory, and takes over the templates an earlier daemon left
    /// running, with what they report of their children.
    pub(crate) async fn open(host: Arc<Host>) -> Result<(Arc<Self>, Leftovers)> {
        let (data, telemetry) = (host.config.data_dir.clone(), host.telemetry.clone());
        let folder = run_dir::templates(&host.config.run_dir);
        make_private_dir(&folder)
            .map_err(|error| Error::host(format!("cannot make {}", folder.display()), error))?;
        let database = host.database.clone();
        let read = move || {
            let owners = database.snapshot_owners()?;
            let store = Store::open(&data.join("snapshots"))?;
            let entries = store.list()?.into_iter().map(|(tag, snapshot)| {
                let state = match snapshot {
                    Ok(snapshot) => SnapshotState::Ready(Box::new(snapshot)),
                    Err(error) => SnapshotState::Failed { error: error.into(), job: None },
                };
                let owner = owners.get(&tag).map_or(LOCAL, String::as_str);
                (tag.clone(), Entry::new(&tag, owner, state, telemetry.clone()))
            });
            let entries = entries.collect();
            Ok((store, entries, owners))
        };
        let (store, entries, owners) = blocking("reading the snapshots", read).await?;
        let owners = Owners::new(host.database.clone(), owners);
        let branching = Arc::new(Semaphore::new(host.config.limits.max_branches));
        let snapshots = Arc::new(SnapshotRegistry {
            host,
            store,
            folder,
            entries: Mutex::new(entries),
            owners,
            forks: Forks::default(),
            branching,
            saving: Semaphore::new(SAVERS),
            gc_wakeup: Notify::new(),
        });
        let leftovers = snapshots.adopt().await?;
        snapshots.forget_gone_names().await;
        Ok((snapshots, leftovers))
    }

    /// All snapshots, by tag.
    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        self.entries.lock().values().cloned().collect()
    }

    pub(crate) fn get(&self, tag: &str) -> Result<Arc<Entry>> {
        check_tag(tag)?;
        let found = self.entries.lock().get(tag).cloned();
        found.ok_or_else(|| no_snapshot(tag))
    }

    /// Reserves `tag` for the snapshot that a job makes, if the tag is free and the owner's quota has room. The
    /// snapshot begins in `state`.
    pub(crate) fn reserve(
        &self,
        tag: &str,
        state: SnapshotState,
        owner: &str,
        quota: &Quota,
    ) -> Result<Arc<Entry>> {
        check_tag(tag)?;
        let mem_mib = state.job().map_or(0, |job| job.mem_mib());
        let entry = Entry::new(tag, owner, state, self.host.telemetry.clone());
        let earlier = {
            let mut entries = self.entries.lock();
            let taken = entries.get(tag).map(|entry| entry.state());
            let text = match taken {
                // A client learns nothing else of a snapshot of another owner.
                Some(_) if entries.get(tag).is_some_and(|entry| entry.owner() != owner) => {
                    Some(format!("the tag {tag} is taken; choose another"))
                }
                None | Some(SnapshotState::Failed { job: Some(_), .. }) => None,
                Some(state) if state.is_being_made() => Some(format!("snapshot {tag} is being made")),
                Some(_) => Some(format!("snapshot {tag} exists; remove it first, or choose another tag")),
            };
            if let Some(text) = text {
                return Err(Error::new(Code::TagTaken, text));
            }
            let have = entries.values().filter(|it| it.tag != tag && it.owner() == owner).count();
            let have = have + self.forks.count(owner);
            check_snapshots(owner, have, mem_mib, quota)?;
            entries.insert(tag.to_owned(), entry.clone())
        };
        if let Some(failed) = earlier {
            failed.forget();
        }
        entry.created();
        Ok(entry)
    }

    /// Calls `take` if the owner's quota has room for another snapshot. No other snapshot is counted meanwhile.
    pub(crate) fn check_quota<T>(
        &self,
        owner: &str,
        mem_mib: u64,
        quota: &Quota,
        take: impl FnOnce() -> T,
    ) -> Result<T> {
        let entries = self.entries.lock();
        let have = entries.values().filter(|it| it.owner() == owner).count() + self.forks.count(owner);
        check_snapshots(owner, have, mem_mib, quota)?;
        Ok(take())
    }

    /// Removes an entry that never was on disk.
    pub(crate) fn remove_unwritten(&self, entry: &Arc<Entry>) {
        self.unlist(entry);
        entry.forget();
    }

    /// The job of a snapshot failed, and the snapshot is removed: nothing of it can be of use. A client that waits for
    /// the job gets `error` when all is done.
    pub(crate) async fn discard(self: &Arc<Self>, entry: &Arc<Entry>, error: Error) {
        self.forget_owner(entry).await;
        self.discard_now(entry, error);
    }

    /// As [`discard`](SnapshotRegistry::discard), but the owner stays in the database.
    pub(crate) fn discard_now(&self, entry: &Arc<Entry>, error: Error) {
        entry.forget();
        // Locked for both: a client that gets the error does not find the snapshot any more.
        let mut entries = self.entries.lock();
        entry.fail(error);
        unlist(&mut entries, entry);
    }

    fn unlist(&self, entry: &Arc<Entry>) {
        unlist(&mut self.entries.lock(), entry);
    }

    /// Removes a snapshot, or cancels the job that makes it. Running children go on.
    pub(crate) async fn remove(self: &Arc<Self>, tag: &str, how: Removal) -> Result<()> {
        let entry = self.get(tag)?;
        if matches!(entry.state(), SnapshotState::Unknown(_)) {
            return self.remove_one(&entry).await;
        }
        entry.cancel().await;
        if entry.state().job().is_some() {
            self.forget_owner(&entry).await;
            self.remove_unwritten(&entry);
            return Ok(());
        }
        let mut gone = self.dependents(tag).await?;
        if !gone.is_empty() && how == Removal::Plain {
            let text = format!(
                "snapshot {tag} is needed by {}; remove them first, or all with cascade (`--cascade`), or \
                 only its name with force (`--force`)",
                gone.join(", ")
            );
            return Err(Error::new(Code::SnapshotInUse, text));
        }
        if how == Removal::Force {
            gone.clear();
        }
        // The deepest first: each snapshot goes before the one it is built on.
        gone.sort_by_key(|tag| {
            let depth = self.get(tag).ok().and_then(|entry| entry.snapshot().ok()).map(|it| it.depth());
            std::cmp::Reverse(depth)
        });
        for tag in gone {
            if let Ok(dependent) = self.get(&tag) {
                self.remove_one(&dependent).await?;
            }
        }
        self.remove_one(&entry).await
    }

    async fn remove_one(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<()> {
        if let SnapshotState::Unknown(template) = entry.state() {
            return self.end_unknown(entry, template).await;
        }
        entry.cancel().await;
        let (store, tag) = (self.store.clone(), entry.tag.clone());
        let removed = blocking("removing a snapshot", move || Ok(store.remove(&tag)?)).await;
        match removed {
            Ok(collected) => {
                if let Some(why) = collected.held_back {
                    tracing::warn!(tag = entry.tag, why, "unused layers not removed");
                }
            }
            Err(error) if error.code().is_not_found() => {}
            Err(error) => return Err(error),
        }
        self.forget_owner(entry).await;
        self.unlist(entry);
        entry.forget();
        Ok(())
    }

    /// Lists a template whose record cannot be read. It is listed under its tag, so that no other snapshot gets
    /// the tag, or under its id if the tag is taken or cannot be read.
    pub(crate) fn list_unknown(&self, template: &Arc<UnknownTemplate>) {
        let mut entries = self.entries.lock();
        let tag = template.tag().filter(|tag| !entries.contains_key(tag));
        let tag = tag.unwrap_or_else(|| template.id().to_owned());
        let owner = self.owners.of(&tag).unwrap_or_else(local_owner);
        let state = SnapshotState::Unknown(template.clone());
        entries.insert(tag.clone(), Entry::new(&tag, &owner, state, self.host.telemetry.clone()));
    }

    /// Ends a template whose record cannot be read, and removes it from the registry. Its children go on.
    async fn end_unknown(self: &Arc<Self>, entry: &Arc<Entry>, template: Arc<UnknownTemplate>) -> Result<()> {
        let failed = |error| Error::host("cannot remove the record of a template", error);
        template.mark_deleted().map_err(failed)?;
        self.forget_owner(entry).await;
        self.unlist(entry);
        let cleanup_queue = self.host.cleanup_queue.clone();
        task::spawn(Task::TearDown, async move { template.end(&cleanup_queue).await });
        Ok(())
    }

    /// The snapshots that are built on `tag`, including those that are being written.
    pub(crate) async fn dependents(&self, tag: &str) -> Result<Vec<String>> {
        let (store, wanted) = (self.store.clone(), tag.to_owned());
        let found = blocking("looking for dependents", move || Ok(store.dependents(&wanted)?)).await;
        let mut dependents = match found {
            Err(error) if error.code().is_not_found() => Vec::new(),
            other => other?,
        };
        let unknown = self.list().into_iter().filter(|entry| match entry.state() {
            SnapshotState::Unknown(template) => entry.tag != tag && template.may_need(tag),
            _ => false,
        });
        dependents.extend(unknown.map(|entry| entry.tag.clone()));
        let writing = self.list().into_iter().map(|entry| entry.state()).filter(SnapshotState::is_being_made);
        let writing = writing.filter_map(|state| state.branch().filter(|job| job.mode.is_difference()));
        let mut writing: Vec<_> = writing.collect();
        // Includes branches of branches: one that is found may be the origin of the next.
        let needs = |branch: &BranchJob, dependents: &[String]| {
            let over = branch.origin.as_ref().map(|origin| &origin.tag);
            over.is_some_and(|over| over == tag || dependents.contains(over))
        };
        while let Some(index) = writing.iter().position(|branch| needs(branch, &dependents)) {
            let branch = writing.swap_remove(index);
            if !dependents.contains(&branch.tag) {
                dependents.push(branch.tag.clone());
            }
        }
        Ok(dependents)
    }

    /// Drops the live template: it ends with its last child, and the next spawn starts another one.
    pub(crate) fn unload(&self, tag: &str) -> Result<()> {
        let entry = self.get(tag)?;
        entry.snapshot()?;
        entry.unload();
        Ok(())
    }

    /// The template to fork children of `tag` from: the live one, or one started from disk.
    pub(crate) async fn template(self: &Arc<Self>, tag: &str) -> Result<Arc<Template>> {
        let entry = self.get(tag)?;
        if entry.is_disk_only() {
            let text = format!(
                "snapshot {tag} has disks and no memory: boot a sandbox on it (`forkd fork --tag {tag}`)"
            );
            return Err(Error::new(Code::SnapshotDiskOnly, text));
        }
        // A branch has a template before anything of it is on disk.
        if let Some(template) = entry.use_current() {
            return Ok(template);
        }
        entry.snapshot()?;
        let snapshots = self.clone();
        // In a task of its own: other requests may wait for the start when the first client is gone.
        let started = task::spawn(Task::LoadTemplate, async move {
            let _alone = entry.starting.lock().await;
            if let Some(template) = entry.current() {
                return Ok(template);
            }
            entry.snapshot()?;
            let template = snapshots.load(&entry).await?;
            entry.set_current(template.clone());
            Ok(template)
        });
        started.await.unwrap_or_else(|error| Err(Error::host("starting a template", error)))
    }

    /// Stops all jobs and leaves the templates to the next daemon: they run on.
    pub(crate) async fn close(&self) {
        self.forks.close().await;
        for entry in self.list() {
            entry.stop_job().await;
            if let SnapshotState::Unknown(template) = entry.state() {
                template.leave();
            }
            if let Some(template) = entry.current.lock().take() {
                template.leave();
                template.lineage.leave();
            }
        }
    }
}

fn unlist(entries: &mut BTreeMap<String, Arc<Entry>>, entry: &Arc<Entry>) {
    // Another request may have removed the snapshot and made it again meanwhile.
    if entries.get(&entry.tag).is_some_and(|now| Arc::ptr_eq(now, entry)) {
        entries.remove(&entry.tag);
        entry.removed();
    }
}

/// The error for a snapshot that does not exist, or that the principal may not see.
pub(crate) fn no_snapshot(tag: &str) -> Error {
    let text = format!("there is no snapshot {tag}; `forkd images` lists them, `forkd snapshot` makes one");
    Error::new(Code::SnapshotNotFound, text)
}

fn check_tag(tag: &str) -> Result<()> {
    match is_valid_name(tag) {
        true => Ok(()),
        false => Err(Error::invalid(format!("a tag must be {NAME_RULE}"))),
    }
}

impl From<forkd_store::Error> for Error {
    fn from(error: forkd_store::Error) -> Self {
        use forkd_store::Error as Store;
        match &error {
            Store::Invalid(text) => Error::invalid(text),
            Store::NotFound(text) => Error::new(Code::SnapshotNotFound, text),
            Store::Exists(text) => Error::new(Code::TagTaken, text),
            // The store's text names files of the host: it is the cause, which only the host's owner may read.
            Store::Unusable { tag, .. } => {
                let text = format!(
                    "snapshot {tag} cannot be used: a file of it is missing or damaged, or of another version; \
                     remove it with `forkd rmi {tag}`, and make it again"
                );
                Error::new(Code::SnapshotUnusable, text).because(error)
            }
            Store::Io { source, .. }
                if matches!(source.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) =>
            {
                Error::no_room(error)
            }
            Store::Io { .. } | Store::Newer(_) | Store::Database { .. } => {
                Error::host("the snapshot store failed", crate::error::chain(&error))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_of_an_unusable_snapshot_names_the_tag_and_hides_the_files() {
        let folder = tempfile::tempdir().unwrap();
        let store = forkd_store::Store::open(folder.path()).unwrap();
        std::fs::create_dir(folder.path().join("numpy")).unwrap();
        let error = Error::from(store.get("numpy").unwrap_err());
        assert_eq!(error.code(), Code::SnapshotUnusable);
        let (text, path) = (error.public(), folder.path().to_str().unwrap());
        assert!(text.contains("snapshot numpy") && !text.contains(path), "{text}");
        assert!(error.to_string().contains(path), "{error}");
    }
}
