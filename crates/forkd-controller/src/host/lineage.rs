//! Lineages: a VM that was booted or loaded from disk, and all its forks: children, branches, and their forks.
//! All processes of a lineage share a user id (a fork cannot change it) and a cgroup. No two lineages share
//! either.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use crate::error::{Code, Error, Result};
use crate::host::cgroup::{self, Cgroups};
use crate::host::cleanup::CleanupQueue;
use crate::host::handed_layers::Handed;
use crate::host::process;

/// All lineages.
#[derive(Debug)]
pub(crate) struct Lineages {
    /// By number. A lineage without holders stays here until its cgroup is removed.
    used: Mutex<BTreeMap<u32, Weak<Lineage>>>,
    max: u32,
    /// The user id of lineage 0, when the daemon is root.
    uid_base: Option<u32>,
    cgroups: Cgroups,
    cleanup_queue: CleanupQueue,
}

/// One lineage. Its number becomes free, and its cgroup is removed, when the last holder drops it. So every
/// object that may still have a process of this user holds it.
#[derive(Debug)]
pub(crate) struct Lineage {
    all: Arc<Lineages>,
    /// Its number, which determines its user id.
    pub(crate) slot: u32,
    /// The name of its cgroup: the id of its first template or sandbox.
    pub(crate) name: String,
    /// The cgroup of its processes; `None` on hosts without cgroups.
    pub(crate) cgroup: Option<cgroup::LineageCgroup>,
    /// The disk layers that the daemon passed to its processes.
    pub(crate) layers: Handed,
    /// Whether the cgroup stays for the next daemon.
    left: std::sync::atomic::AtomicBool,
}

impl Lineages {
    pub(crate) fn new(max: u32, uid_base: u32, cleanup_queue: CleanupQueue) -> Arc<Self> {
        let root = rustix::process::geteuid().is_root();
        let cgroups = Cgroups::open();
        match cgroups.reason() {
            Some(reason) if root => tracing::warn!(reason, "cgroups not available"),
            Some(reason) => tracing::info!(reason, "cgroups not available"),
            None => {}
        }
        let used = Mutex::default();
        Arc::new(Lineages { used, max, uid_base: root.then_some(uid_base), cgroups, cleanup_queue })
    }

    /// A new lineage, for the template or the sandbox `id`. Blocks for a moment.
    pub(crate) fn begin(self: &Arc<Self>, id: &str) -> Result<Arc<Lineage>> {
        let slot = {
            let mut used = self.used.lock();
            let Some(slot) = (0..self.max).find(|slot| !used.contains_key(slot)) else {
                let text = format!(
                    "there are {} booted guests and templates, the limit; delete some first",
                    self.max
                );
                return Err(Error::new(Code::LimitReached, text));
            };
            used.insert(slot, Weak::new());
            slot
        };
        self.lineage(slot, id, Handed::nothing()).map_err(|error| Error::host("cannot make a cgroup", error))
    }

    /// The lineage with this number and name, which an earlier daemon began. All its processes get the same one.
    /// `None` if another lineage has the number.
    pub(crate) fn resume(self: &Arc<Self>, slot: u32, name: &str) -> Option<Arc<Lineage>> {
        // Never dropped while the lock is held: the last holder takes it, too.
        let known = self.used.lock().get(&slot).map(Weak::upgrade);
        if let Some(known) = known {
            return known.filter(|known| known.name == name);
        }
        if slot >= self.max || self.used.lock().insert(slot, Weak::new()).is_some() {
            return None;
        }
        self.lineage(slot, name, Handed::unknown()).ok()
    }

    /// The lineage of process `pid`, from its user and its cgroup, when its record cannot be read. `guess` is the
    /// name if no cgroup shows it; `None` if both are missing.
    pub(crate) fn of_process(self: &Arc<Self>, pid: i32, guess: Option<&str>) -> Option<Arc<Lineage>> {
        let slot = process::uid(pid)?.checked_sub(self.uid_base?)?;
        // Never dropped while the lock is held, as in `resume`.
        let known = self.used.lock().get(&slot).map(Weak::upgrade);
        if let Some(known) = known {
            return known;
        }
        let name = self.cgroups.lineage_of(pid);
        self.resume(slot, name.as_deref().or(guess)?)
    }

    /// The lineage of that name, if it has holders.
    fn named(&self, name: &str) -> Option<Arc<Lineage>> {
        let all: Vec<_> = self.used.lock().values().filter_map(Weak::upgrade).collect();
        all.into_iter().find(|lineage| lineage.name == name)
    }

    /// Removes the remains of `id`, with which an earlier daemon began a lineage: all of the lineage, or only this
    /// leaf if others of the lineage still run. Blocks.
    pub(crate) fn forget(&self, id: &str) {
        if let Some(lineage) = self.named(id) {
            if let Some(leaf) = lineage.cgroup.as_ref().and_then(|cgroup| cgroup.existing(id).ok()) {
                let _ = leaf.kill().and_then(|()| leaf.remove());
            }
            return;
        }
        let Some(uid) = self.uid_base else { return };
        // A resumed sandbox's lineage has a name of its own, which begins with the id.
        let is_its =
            |name: &str| name.strip_prefix(id).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'));
        for name in self.cgroups.lineages() {
            if !is_its(&name) || self.named(&name).is_some() {
                continue;
            }
            match self.cgroups.lineage(&name, uid) {
                Ok(Some(cgroup)) => remove(&cgroup),
                Ok(None) => {}
                Err(error) => tracing::warn!(lineage = name, %error, "cgroup of an ended lineage not opened"),
            }
        }
    }

    fn lineage(self: &Arc<Self>, slot: u32, name: &str, layers: Handed) -> std::io::Result<Arc<Lineage>> {
        let (all, name) = (self.clone(), name.to_owned());
        let mut lineage = Lineage { all, slot, name, cgroup: None, layers, left: false.into() };
        if let Some(uid) = lineage.uid() {
            lineage.cgroup = self.cgroups.lineage(&lineage.name, uid)?;
        }
        let lineage = Arc::new(lineage);
        self.used.lock().insert(slot, Arc::downgrade(&lineage));
        Ok(lineage)
    }
}

impl Lineage {
    /// The user id of its processes, if they have their own.
    pub(crate) fn uid(&self) -> Option<u32> {
        self.all.uid_base.map(|base| base + self.slot)
    }

    /// An empty disk layer for one of its processes, on the file system of `folder`.
    pub(crate) fn layer(&self, folder: &std::path::Path) -> Result<OwnedFd> {
        let layer = crate::host::disk_layer::layer(folder)?;
        self.layers.add(&layer)?;
        Ok(layer)
    }

    /// Leaves the cgroup for the next daemon.
    pub(crate) fn leave(&self) {
        self.left.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Kills the remaining processes of a lineage, such as a saver without a waiter, and removes its cgroup.
fn remove(cgroup: &cgroup::LineageCgroup) {
    let _ = cgroup.kill();
    if let Err(error) = cgroup.remove() {
        tracing::error!(%error, "cgroup not removed");
    }
}

impl Drop for Lineage {
    fn drop(&mut self) {
        let (all, slot) = (self.all.clone(), self.slot);
        let left = self.left.load(std::sync::atomic::Ordering::Relaxed);
        match self.cgroup.take().filter(|_| !left) {
            Some(cgroup) => self.all.cleanup_queue.later(move || {
                remove(&cgroup);
                all.used.lock().remove(&slot);
            }),
            None => drop(all.used.lock().remove(&slot)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_number_is_used_again_only_when_it_is_free() {
        let mut lineages = Lineages::new(2, 1000, CleanupQueue::new());
        Arc::get_mut(&mut lineages).unwrap().uid_base = None;
        let first = lineages.begin("a").unwrap();
        let child = first.clone();
        let second = lineages.begin("b").unwrap();
        assert_eq!((first.slot, second.slot), (0, 1));
        assert_eq!(lineages.begin("c").unwrap_err().code(), Code::LimitReached);
        drop(first);
        assert!(lineages.begin("c").is_err());
        assert!(lineages.resume(0, "c").is_none(), "somebody else's");
        let shared = lineages.resume(0, "a").unwrap();
        assert!(Arc::ptr_eq(&shared, &child), "the same for all that are of it");
        drop((shared, child));
        assert_eq!(lineages.resume(0, "c").unwrap().slot, 0);
        assert_eq!(lineages.begin("c").unwrap().slot, 0);
        assert!(lineages.resume(2, "c").is_none(), "beyond the limit");
    }
}
