//! Cgroups (v2) for what the agent starts: one per command, each in a [`Part`] of one folder `user`.
//!
//! They exist so that a command can be killed with everything it started, whatever sessions and
//! groups its descendants made, and so that all of them can be frozen together by freezing `user`.
//! The parts let a child thaw in steps: the kernel keeps a cgroup frozen as long as one above it is,
//! so for a step `user` is thawed while each cgroup that is to wait is frozen by itself.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    fs::{Mode, OFlags},
};

use crate::{log, sys};

/// The most cgroups that are looked into for processes.
const MAX_FOLDERS: usize = 10_000;

/// In the cgroup of an interpreter: the processes that it started and that wait while it runs.
const REST: &str = "rest";

/// Where below `user` a process is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    /// Processes that clients and the warm-up start.
    Commands,
    /// The warmed interpreter.
    Python,
    /// Programs that run in a child before its other processes do.
    Hooks,
}

impl Part {
    const ALL: [Part; 3] = [Part::Commands, Part::Python, Part::Hooks];

    fn name(self) -> &'static str {
        match self {
            Part::Commands => "commands",
            Part::Python => "python",
            Part::Hooks => "hooks",
        }
    }
}

/// The folder `user`, if there are cgroups.
#[derive(Debug)]
pub(crate) struct Cgroups {
    user: Option<PathBuf>,
    next: AtomicU64,
    /// Frozen by themselves, see [`Cgroups::hold`].
    held: Mutex<Vec<PathBuf>>,
    /// Of commands that ended and left processes behind: removed when those are gone.
    outlived: Mutex<Vec<PathBuf>>,
}

impl Cgroups {
    /// Works under `user`, which exists, or without cgroups.
    pub(crate) fn new(user: Option<PathBuf>) -> Arc<Self> {
        // Here and not where they are needed: no child has to make them.
        for folder in user.iter().flat_map(|user| Part::ALL.map(|part| user.join(part.name()))) {
            if let Err(error) = make_folder(&folder) {
                log::error!("cannot create the cgroup {}: {error}", folder.display());
            }
        }
        Arc::new(Cgroups {
            user,
            next: AtomicU64::new(1),
            held: Mutex::default(),
            outlived: Mutex::default(),
        })
    }

    /// A fresh cgroup, `None` if there are none: then only the process group can be killed.
    pub(crate) fn create(self: &Arc<Self>, part: Part) -> Option<Cgroup> {
        self.sweep();
        let name = format!("p{}", self.next.fetch_add(1, Ordering::Relaxed));
        let path = self.user.as_ref()?.join(part.name()).join(name);
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

    /// Freezes every process; `false` if that takes longer than `limit`, and then none is frozen.
    pub(crate) fn freeze(&self, limit: Duration) -> io::Result<bool> {
        let user = self.user()?;
        let until = Instant::now() + limit;
        fs::write(user.join("cgroup.freeze"), "1")?;
        let frozen = wait_until_frozen(user, until);
        if !matches!(frozen, Ok(true)) {
            self.thaw()?;
        }
        frozen
    }

    /// Lets every process run.
    pub(crate) fn thaw(&self) -> io::Result<()> {
        let Some(user) = &self.user else { return Ok(()) };
        let held = std::mem::take(&mut *self.held());
        let thawed = fs::write(user.join("cgroup.freeze"), "0");
        // All of them, whatever is wrong with one.
        held.iter().map(|folder| set_frozen(folder, false)).fold(thawed, io::Result::and)
    }

    /// Makes room for hooks: frozen processes stay so until [`thaw`](Self::thaw), but a process started in
    /// [`Part::Hooks`] from here on runs. Processes left by earlier hooks wait like the rest.
    pub(crate) fn hold(&self) -> io::Result<()> {
        let Some(user) = &self.user else { return Ok(()) };
        let hooks = user.join(Part::Hooks.name());
        for folder in folders_in(user).filter(|folder| *folder != hooks).chain(folders_in(&hooks)) {
            self.hold_one(folder)?;
        }
        fs::write(user.join("cgroup.freeze"), "0")
    }

    /// Lets the process `pid` of [`Part::Python`] run, and only that one, after [`hold`](Self::hold): the
    /// processes it started wait as well. `false` if it is not there.
    pub(crate) fn thaw_alone(&self, pid: i32) -> io::Result<bool> {
        let Some(user) = &self.user else { return Ok(true) };
        let python = user.join(Part::Python.name());
        let mut found = false;
        for folder in folders_in(&python) {
            let mut others = pids_in(&folder);
            if !others.contains(&pid) {
                self.hold_one(folder)?;
                continue;
            }
            found = true;
            for below in folders_in(&folder) {
                self.hold_one(below)?;
            }
            others.retain(|other| *other != pid);
            if others.is_empty() {
                continue;
            }
            // Below the interpreter's cgroup, so that a kill of that one kills them too.
            let rest = folder.join(REST);
            make_folder(&rest)?;
            self.hold_one(rest.clone())?;
            for other in others {
                match fs::write(rest.join("cgroup.procs"), other.to_string()) {
                    // It was killed meanwhile.
                    Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                    moved => moved?,
                }
            }
        }
        self.held().retain(|folder| *folder != python);
        set_frozen(&python, false)?;
        Ok(found)
    }

    fn hold_one(&self, folder: PathBuf) -> io::Result<()> {
        let mut held = self.held();
        if !held.contains(&folder) {
            set_frozen(&folder, true)?;
            held.push(folder);
        }
        Ok(())
    }

    fn held(&self) -> MutexGuard<'_, Vec<PathBuf>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Every process, in cgroups that users made below as well.
    pub(crate) fn pids(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        let mut folders: Vec<PathBuf> = self.user.iter().cloned().collect();
        let mut seen = 0;
        while let Some(folder) = folders.pop() {
            seen += 1;
            if seen > MAX_FOLDERS {
                break;
            }
            pids.extend(pids_in(&folder));
            folders.extend(folders_in(&folder));
        }
        pids
    }

    fn user(&self) -> io::Result<&Path> {
        self.user.as_deref().ok_or_else(|| io::Error::new(ErrorKind::Unsupported, "there are no cgroups"))
    }

    fn sweep(&self) {
        let mut outlived = self.outlived.lock().unwrap_or_else(PoisonError::into_inner);
        outlived.retain(is_busy);
    }
}

/// The cgroups right below one.
fn folders_in(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path()).take(MAX_FOLDERS)
}

/// The processes right in a cgroup.
fn pids_in(folder: &Path) -> Vec<i32> {
    let list = fs::read_to_string(folder.join("cgroup.procs")).unwrap_or_default();
    list.lines().filter_map(|pid| pid.parse().ok()).collect()
}

fn make_folder(path: &Path) -> io::Result<()> {
    match fs::create_dir(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made,
    }
}

/// Freezes or thaws what is in one cgroup; one that is gone has no processes.
fn set_frozen(folder: &Path, frozen: bool) -> io::Result<()> {
    match fs::write(folder.join("cgroup.freeze"), if frozen { "1" } else { "0" }) {
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV)) => Ok(()),
        written => written,
    }
}

/// Waits until the kernel reports everything under `folder` as frozen.
fn wait_until_frozen(folder: &Path, until: Instant) -> io::Result<bool> {
    let events = File::open(folder.join("cgroup.events"))?;
    let mut text = [0; 256];
    loop {
        let n = rustix::io::pread(&events, &mut text, 0)?;
        if text[..n].split(|byte| *byte == b'\n').any(|line| line == b"frozen 1") {
            return Ok(true);
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(false);
        }
        sys::poll(&mut [PollFd::new(&events, PollFlags::PRI)], Some(left))?;
    }
}

/// Removes a cgroup; `true` if it still has processes.
fn is_busy(path: &PathBuf) -> bool {
    let busy = || fs::remove_dir(path).is_err_and(|error| error.kind() == ErrorKind::ResourceBusy);
    busy() && (fs::remove_dir(path.join(REST)).is_err() || busy())
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

#[cfg(test)]
mod tests {
    use super::*;

    fn told(folder: &Path) -> String {
        fs::read_to_string(folder.join("cgroup.freeze")).unwrap_or_default()
    }

    #[test]
    fn a_thaw_in_steps_lets_hooks_run_first_then_the_interpreter_then_the_rest() {
        let kept = tempfile::tempdir().unwrap();
        let user = kept.path();
        let cgroups = Cgroups::new(Some(user.into()));
        let of = |name: &str| {
            fs::create_dir_all(user.join(name)).unwrap();
            user.join(name)
        };
        let (commands, python, mine) = (of("commands"), of("python"), of("mine"));
        let (hooks, left_behind) = (of("hooks"), of("hooks/p1"));
        let (interpreter, nested, earlier) = (of("python/p3"), of("python/p3/own"), of("python/p2"));
        fs::write(interpreter.join("cgroup.procs"), "30\n31\n").unwrap();
        fs::write(user.join("cgroup.freeze"), "1").unwrap();

        cgroups.hold().unwrap();
        for waiting in [&commands, &python, &mine, &left_behind] {
            assert_eq!(told(waiting), "1", "{}", waiting.display());
        }
        assert_eq!((told(user), told(&hooks)), ("0".into(), "".into()));

        assert!(cgroups.thaw_alone(30).unwrap());
        assert_eq!((told(&python), told(&interpreter)), ("0".into(), "".into()));
        let rest = interpreter.join(REST);
        for waiting in [&commands, &mine, &left_behind, &nested, &earlier, &rest] {
            assert_eq!(told(waiting), "1", "{}", waiting.display());
        }
        assert_eq!(fs::read_to_string(rest.join("cgroup.procs")).unwrap(), "31");

        cgroups.thaw().unwrap();
        for running in [&commands, &python, &mine, &left_behind, &nested, &earlier, &rest] {
            assert_eq!(told(running), "0", "{}", running.display());
        }
        assert!(!cgroups.thaw_alone(99).unwrap(), "no such interpreter");
    }

    #[test]
    fn what_cannot_be_frozen_in_time_is_not_left_half_frozen() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("cgroup.events"), "populated 1\nfrozen 0\n").unwrap();
        let cgroups = Cgroups::new(Some(folder.path().into()));
        let begun = Instant::now();
        assert!(!cgroups.freeze(Duration::from_millis(200)).unwrap());
        assert!(begun.elapsed() >= Duration::from_millis(200));
        assert_eq!(fs::read_to_string(folder.path().join("cgroup.freeze")).unwrap(), "0");

        fs::write(folder.path().join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        assert!(cgroups.freeze(Duration::from_secs(60)).unwrap());
        assert_eq!(fs::read_to_string(folder.path().join("cgroup.freeze")).unwrap(), "1");
    }

    #[test]
    fn processes_in_cgroups_that_users_made_are_found_too() {
        let folder = tempfile::tempdir().unwrap();
        let deep = folder.path().join("p1/mine");
        fs::create_dir_all(&deep).unwrap();
        fs::write(deep.join("cgroup.procs"), "7\n8\n").unwrap();
        fs::write(folder.path().join("cgroup.procs"), "5\n").unwrap();
        let mut pids = Cgroups::new(Some(folder.path().into())).pids();
        pids.sort();
        assert_eq!(pids, [5, 7, 8]);
        assert!(Cgroups::new(None).pids().is_empty());
    }
}
