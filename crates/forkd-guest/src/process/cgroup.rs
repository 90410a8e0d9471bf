//! Cgroups (v2) for what the agent starts: one per command, all under one folder `user`.
//!
//! They exist so that a command can be killed with everything it started, whatever sessions and
//! groups its descendants made, and so that all of them can be frozen together by freezing `user`.

use std::{
    fs,
    io::ErrorKind,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use rustix::fs::{Mode, OFlags};

use crate::log;

/// The folder `user`, if there are cgroups.
#[derive(Debug)]
pub(crate) struct Cgroups {
    user: Option<PathBuf>,
    next: AtomicU64,
    /// Of commands that ended and left processes behind: removed when those are gone.
    outlived: Mutex<Vec<PathBuf>>,
}

impl Cgroups {
    /// Works under `user`, which exists, or without cgroups.
    pub(crate) fn new(user: Option<PathBuf>) -> Arc<Self> {
        Arc::new(Cgroups { user, next: AtomicU64::new(1), outlived: Mutex::new(Vec::new()) })
    }

    /// A fresh cgroup, `None` if there are none: then only the process group can be killed.
    pub(crate) fn create(self: &Arc<Self>) -> Option<Cgroup> {
        self.sweep();
        let path = self.user.as_ref()?.join(format!("p{}", self.next.fetch_add(1, Ordering::Relaxed)));
        let made = fs::create_dir(&path).and_then(|()| {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
            Ok(rustix::fs::open(&path, flags, Mode::empty())?)
        });
        match made {
            Ok(folder) => Some(Cgroup { path, folder, all: self.clone() }),
            Err(error) => {
                log::error!("cannot create the cgroup {}: {error}", path.display());
                None
            }
        }
    }

    fn sweep(&self) {
        let mut outlived = self.outlived.lock().unwrap_or_else(PoisonError::into_inner);
        outlived.retain(is_busy);
    }
}

/// Removes a cgroup; `true` if it still has processes.
fn is_busy(path: &PathBuf) -> bool {
    fs::remove_dir(path).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy)
}

/// The cgroup of one command.
#[derive(Debug)]
pub(crate) struct Cgroup {
    path: PathBuf,
    folder: OwnedFd,
    all: Arc<Cgroups>,
}

impl Cgroup {
    /// Kills every process in it. Root in the guest can move processes out, so this is never the only
    /// signal a command gets.
    pub(crate) fn kill(&self) {
        if let Err(error) = fs::write(self.path.join("cgroup.kill"), "1") {
            log::error!("cannot kill the cgroup {}: {error}", self.path.display());
        }
    }

    /// For starting a process right inside.
    pub(crate) fn folder(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        if is_busy(&self.path) {
            let path = std::mem::take(&mut self.path);
            self.all.outlived.lock().unwrap_or_else(PoisonError::into_inner).push(path);
        }
    }
}
