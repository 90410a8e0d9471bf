//! All sandboxes: making them, finding them, ending them, and cleaning up after a daemon that was
//! killed.

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use forkd_protocol::control::MIN_MEM_MIB;
use forkd_protocol::names::{NAME_RULE, is_valid_name, is_valid_sandbox_id};
use tokio::task::JoinHandle;

use crate::assets::Finder;
use crate::config::Config;
use crate::count::Count;
use crate::error::{Error, Kind, Result};
use crate::process::Identity;
use crate::sandbox::{Sandbox, Spec};

/// How often a failed removal of a folder is tried again.
const REMOVE_RETRY: Duration = Duration::from_secs(5);
const REMOVE_TRIES: u32 = 12;

/// All sandboxes of a daemon.
#[derive(Debug)]
pub(crate) struct Registry {
    config: Arc<Config>,
    finder: Arc<Finder>,
    /// Where each sandbox has its folder.
    folder: PathBuf,
    inner: Mutex<Inner>,
    /// How many sandboxes were deleted and are not gone yet.
    leaving: Count,
}

#[derive(Debug, Default)]
struct Inner {
    sandboxes: HashMap<String, Entry>,
    /// Slots in use: each stands for a user id of its own.
    slots: BTreeSet<u32>,
    closed: bool,
}

#[derive(Debug)]
struct Entry {
    sandbox: Arc<Sandbox>,
    slot: u32,
    keeper: JoinHandle<()>,
}

impl Registry {
    /// A registry on `config`'s data directory, which the caller holds the lock of. What an earlier
    /// daemon left behind is ended and removed.
    pub(crate) async fn open(config: Arc<Config>) -> Result<Arc<Self>> {
        let folder = config.data_dir.join("sandboxes");
        make_private_dir(&folder)
            .map_err(|error| Error::host(format!("cannot make {}", folder.display()), error))?;
        sweep(&folder).await?;
        let finder = Arc::new(Finder::new(&config));
        Ok(Arc::new(Registry { config, finder, folder, inner: Mutex::default(), leaving: Count::new() }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn get(&self, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.lock().sandboxes.get(id).map(|entry| entry.sandbox.clone());
        found.ok_or_else(|| {
            let shown = if is_valid_sandbox_id(id) { id } else { "with that id" };
            Error::new(Kind::NotFound, format!("there is no sandbox {shown}"))
        })
    }

    /// All of them, oldest first.
    pub(crate) fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut list: Vec<_> = self.lock().sandboxes.values().map(|entry| entry.sandbox.clone()).collect();
        list.sort_by_key(|sandbox| (sandbox.created, sandbox.id.clone()));
        list
    }

    /// Starts a sandbox. It is deleted when the returned [`Bound`] is dropped, until that is
    /// [released](Bound::release).
    pub(crate) async fn create(self: &Arc<Self>, spec: Spec) -> Result<Bound> {
        self.check(&spec)?;
        let (finder, image) = (self.finder.clone(), spec.image.clone());
        let found = tokio::task::spawn_blocking(move || finder.find(&image)).await;
        let assets = found.map_err(|error| Error::host("looking up the image", error))??;

        let id = new_id()?;
        let folder = self.folder.join(&id);
        let sandbox = {
            let mut inner = self.lock();
            let slot = self.take_slot(&mut inner)?;
            let made = make_private_dir(&folder);
            if let Err(error) = made {
                inner.slots.remove(&slot);
                return Err(Error::host(format!("cannot make {}", folder.display()), error));
            }
            let uid = rustix::process::geteuid().is_root().then(|| self.config.jail_uid_base + slot);
            let sandbox = Arc::new(Sandbox::new(id.clone(), spec, uid, folder, &self.config.timing));
            let keeper = tokio::spawn(sandbox.clone().keep(assets, self.config.clone()));
            inner.sandboxes.insert(id, Entry { sandbox: sandbox.clone(), slot, keeper });
            sandbox
        };
        tracing::info!(sandbox = sandbox.id, image = sandbox.spec.image, "sandbox starts");
        Ok(Bound { registry: self.clone(), sandbox, bound: true })
    }

    fn check(&self, spec: &Spec) -> Result<()> {
        let limits = &self.config.limits;
        if !is_valid_name(&spec.image) {
            return Err(Error::invalid(format!("the image's name must be {NAME_RULE}")));
        }
        if !(1..=limits.max_vcpus).contains(&spec.vcpus) {
            let text = format!("vcpus is {}; it must be 1 to {}", spec.vcpus, limits.max_vcpus);
            return Err(Error::invalid(text));
        }
        if !(MIN_MEM_MIB..=limits.max_mem_mib).contains(&spec.mem_mib) {
            let (mem, max) = (spec.mem_mib, limits.max_mem_mib);
            let text = format!("mem_size_mib is {mem}; it must be {MIN_MEM_MIB} to {max}");
            return Err(Error::invalid(text));
        }
        Ok(())
    }

    fn take_slot(&self, inner: &mut Inner) -> Result<u32> {
        if inner.closed {
            return Err(Error::new(Kind::Busy, "the daemon is stopping"));
        }
        let max = self.config.limits.max_sandboxes;
        // Slots, not sandboxes: one that is being deleted still has its process and its user id.
        let free = (0u32..).take(max).find(|slot| !inner.slots.contains(slot));
        let Some(slot) = free else {
            let text = format!("there are {max} sandboxes, which is the limit; delete some first");
            return Err(Error::new(Kind::Busy, text));
        };
        inner.slots.insert(slot);
        Ok(slot)
    }

    /// Takes a sandbox out of the registry. Its process and its files go in the background.
    pub(crate) fn delete(self: &Arc<Self>, id: &str) -> Result<()> {
        let entry = self.lock().sandboxes.remove(id);
        let Some(entry) = entry else { return self.get(id).map(|_| ()) };
        let leaving = self.leaving.enter();
        entry.sandbox.stop();
        let registry = self.clone();
        tokio::spawn(async move {
            registry.tear_down(entry).await;
            drop(leaving);
        });
        Ok(())
    }

    async fn tear_down(&self, entry: Entry) {
        let id = &entry.sandbox.id;
        if let Err(error) = entry.keeper.await {
            tracing::error!(sandbox = id, %error, "the keeper of a sandbox failed");
        }
        remove_folder(&entry.sandbox.folder).await;
        self.lock().slots.remove(&entry.slot);
        tracing::debug!(sandbox = id, "sandbox is gone");
    }

    /// Deletes everything, lets nothing new start, and returns when all is gone.
    pub(crate) async fn close(self: &Arc<Self>) {
        let ids: Vec<String> = {
            let mut inner = self.lock();
            inner.closed = true;
            inner.sandboxes.keys().cloned().collect()
        };
        for id in ids {
            // One that somebody else deletes at this moment is fine.
            let _ = self.delete(&id);
        }
        self.leaving.none().await;
    }
}

/// A sandbox bound to something that may go away at any moment: a request, a connection.
#[derive(Debug)]
pub(crate) struct Bound {
    registry: Arc<Registry>,
    sandbox: Arc<Sandbox>,
    bound: bool,
}

impl Bound {
    pub(crate) fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    /// From here on it lives until somebody deletes it.
    pub(crate) fn release(mut self) -> Arc<Sandbox> {
        self.bound = false;
        self.sandbox.clone()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.bound {
            // It may have been deleted by other means.
            let _ = self.registry.delete(&self.sandbox.id);
        }
    }
}

/// `sb` and 16 random letters and digits.
fn new_id() -> Result<String> {
    let mut random = [0u8; 16];
    crate::auth::fill_random(&mut random)?;
    let digit = |byte: &u8| char::from_digit(u32::from(*byte) % 36, 36).unwrap_or('0');
    Ok(format!("sb{}", random.iter().map(digit).collect::<String>()))
}

/// Ends and removes what an earlier daemon left behind.
async fn sweep(folder: &Path) -> Result<()> {
    let read = |error| Error::host(format!("cannot read {}", folder.display()), error);
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !is_valid_sandbox_id(&name) {
            tracing::warn!(path = %path.display(), "not a sandbox's folder; left alone");
            continue;
        }
        match Identity::read(&path).and_then(|identity| identity.open()) {
            Some(process) => {
                tracing::warn!(sandbox = name, "left running by a daemon that was killed; ending it");
                process.end(&name).await;
            }
            None => tracing::info!(sandbox = name, "left behind by a daemon that was killed; removing it"),
        }
        remove_folder(&path).await;
    }
    Ok(())
}

/// Removes a sandbox's folder; what cannot be removed now is swept at the next start.
async fn remove_folder(folder: &Path) {
    for attempt in 1..=REMOVE_TRIES {
        let path = folder.to_owned();
        let removed = tokio::task::spawn_blocking(move || std::fs::remove_dir_all(path)).await;
        match removed.unwrap_or_else(|error| Err(io::Error::other(error))) {
            Ok(()) => return,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return,
            Err(error) => {
                tracing::error!(folder = %folder.display(), %error, attempt, "cannot remove a sandbox's folder");
                tokio::time::sleep(REMOVE_RETRY).await;
            }
        }
    }
}

pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_follow_the_rule_and_differ() {
        let ids: BTreeSet<String> = (0..100).map(|_| new_id().unwrap()).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| is_valid_sandbox_id(id)));
    }
}
