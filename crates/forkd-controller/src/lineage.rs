//! Lineages: a booted VM, or a template and all it forked. What is of one lineage shares a user id
//! (a fork cannot change it) and a cgroup; no two lineages ever do.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::cgroup::{self, Cgroups};
use crate::error::{Error, Kind, Result};
use crate::janitor::Janitor;

/// All lineages.
#[derive(Debug)]
pub(crate) struct Lineages {
    used: Mutex<BTreeSet<u32>>,
    max: u32,
    /// The user of lineage 0, when the daemon is root.
    uid_base: Option<u32>,
    cgroups: Cgroups,
    janitor: Janitor,
}

/// One lineage. Its number is free again, and its cgroup gone, when the last holder has dropped it:
/// whoever may still have a process of that user keeps it.
#[derive(Debug)]
pub(crate) struct Lineage {
    all: Arc<Lineages>,
    /// Its number: stands for its user.
    pub(crate) slot: u32,
    /// Where its processes live; `None` on hosts without cgroups.
    pub(crate) cgroup: Option<cgroup::Lineage>,
    /// Whether the cgroup is left to the next daemon.
    left: std::sync::atomic::AtomicBool,
}

impl Lineages {
    pub(crate) fn new(max: u32, uid_base: u32, janitor: Janitor) -> Arc<Self> {
        let root = rustix::process::geteuid().is_root();
        let cgroups = Cgroups::open();
        match cgroups.reason() {
            Some(reason) if root => tracing::warn!("{reason}"),
            Some(reason) => tracing::info!("{reason}"),
            None => {}
        }
        let used = Mutex::default();
        Arc::new(Lineages { used, max, uid_base: root.then_some(uid_base), cgroups, janitor })
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<u32>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A new lineage, for the template or the sandbox `id`. Blocks for a moment.
    pub(crate) fn begin(self: &Arc<Self>, id: &str) -> Result<Arc<Lineage>> {
        let slot = {
            let mut used = self.lock();
            let Some(slot) = (0..self.max).find(|slot| !used.contains(slot)) else {
                let text = format!(
                    "there are {} booted guests and templates, the limit; delete some first",
                    self.max
                );
                return Err(Error::new(Kind::Busy, text));
            };
            used.insert(slot);
            slot
        };
        self.lineage(slot, id).map_err(|error| Error::host("cannot make a cgroup", error))
    }

    /// The one with number `slot`, which an earlier daemon began for `id`. `None` if it cannot be.
    pub(crate) fn resume(self: &Arc<Self>, slot: u32, id: &str) -> Option<Arc<Lineage>> {
        if slot >= self.max || !self.lock().insert(slot) {
            return None;
        }
        self.lineage(slot, id).ok()
    }

    /// Removes what is left of the lineage an earlier daemon began for `id`. Blocks.
    pub(crate) fn forget(&self, id: &str) {
        let Some(uid) = self.uid_base else { return };
        if !self.cgroups.lineages().iter().any(|known| known == id) {
            return;
        }
        match self.cgroups.lineage(id, uid) {
            Ok(Some(cgroup)) => remove(&cgroup),
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "cannot look for an old cgroup"),
        }
    }

    fn lineage(self: &Arc<Self>, slot: u32, id: &str) -> std::io::Result<Arc<Lineage>> {
        let mut lineage = Lineage { all: self.clone(), slot, cgroup: None, left: false.into() };
        if let Some(uid) = lineage.uid() {
            lineage.cgroup = self.cgroups.lineage(id, uid)?;
        }
        Ok(Arc::new(lineage))
    }
}

impl Lineage {
    /// The user its processes run as, when they have one of their own.
    pub(crate) fn uid(&self) -> Option<u32> {
        self.all.uid_base.map(|base| base + self.slot)
    }

    /// The next daemon takes it over.
    pub(crate) fn leave(&self) {
        self.left.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}

/// Ends whatever is left in a lineage's cgroup, such as a saver nobody waits for, and removes it.
fn remove(cgroup: &cgroup::Lineage) {
    let _ = cgroup.kill();
    if let Err(error) = cgroup.remove() {
        tracing::error!(%error, "a cgroup is left behind");
    }
}

impl Drop for Lineage {
    fn drop(&mut self) {
        let (all, slot) = (self.all.clone(), self.slot);
        let left = self.left.load(std::sync::atomic::Ordering::Relaxed);
        match self.cgroup.take().filter(|_| !left) {
            Some(cgroup) => self.all.janitor.later(move || {
                remove(&cgroup);
                all.lock().remove(&slot);
            }),
            None => drop(all.lock().remove(&slot)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_number_is_used_again_only_when_nobody_holds_it() {
        let mut lineages = Lineages::new(2, 1000, Janitor::new());
        Arc::get_mut(&mut lineages).unwrap().uid_base = None;
        let first = lineages.begin("a").unwrap();
        let child = first.clone();
        let second = lineages.begin("b").unwrap();
        assert_eq!((first.slot, second.slot), (0, 1));
        assert_eq!(lineages.begin("c").unwrap_err().kind, Kind::Busy);
        drop(first);
        assert!(lineages.begin("c").is_err());
        assert!(lineages.resume(0, "c").is_none());
        drop(child);
        assert_eq!(lineages.resume(0, "c").unwrap().slot, 0);
        assert_eq!(lineages.begin("c").unwrap().slot, 0);
        assert!(lineages.resume(2, "c").is_none(), "beyond the limit");
    }
}
