//! The owner of a run folder. Run folders hold the files and sockets of sandboxes in memory; a link in each
//! leads to its data directory.

use std::fmt;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{benches, folders_in};
use crate::host::paths::DataDir;

/// The owner of an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Owner {
    /// A running daemon on this data directory, or a running process.
    Runs(PathBuf),
    /// The next daemon on this data directory, which adopts it.
    Next(PathBuf),
    /// All daemons of this host.
    Shared,
    /// Unknown, so the object is kept.
    Unknown,
    /// None, for this reason.
    Orphaned(&'static str),
}

impl Owner {
    pub(super) fn is_nobody(&self) -> bool {
        matches!(self, Owner::Orphaned(_))
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Runs(of) => write!(formatter, "live: {}", of.display()),
            Owner::Next(data) => {
                write!(formatter, "live: the next daemon on {} adopts it", data.display())
            }
            Owner::Shared => formatter.write_str("live: daemons share it"),
            Owner::Unknown => formatter.write_str("its owner is unknown"),
            Owner::Orphaned(why) => formatter.write_str(why),
        }
    }
}

/// A folder in memory with the run-time files of a daemon's sandboxes and templates.
#[derive(Debug, Clone)]
pub(super) struct RunFolder {
    pub(super) path: PathBuf,
    pub(super) owner: Owner,
}

/// All run folders of this host. A folder without a link to a data directory has no owner if no socket in
/// it is open and no daemon runs.
pub(super) fn run_folders(data: &DataDir, daemon_runs: bool) -> Vec<RunFolder> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let bases = [PathBuf::from("/run"), PathBuf::from("/dev/shm")].into_iter().chain(own);
    let list = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let (locks, sockets) = (list("/proc/locks"), list("/proc/net/unix"));
    let mut folders = run_folders_in(bases, data.root(), &locks);
    for folder in &mut folders {
        let in_use = daemon_runs || sockets.contains(&format!(" {}/", folder.path.display()));
        if folder.owner == Owner::Unknown && !in_use {
            folder.owner = Owner::Orphaned("no process uses it");
        }
    }
    folders
}

fn run_folders_in(bases: impl Iterator<Item = PathBuf>, data: &Path, locks: &str) -> Vec<RunFolder> {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.strip_prefix("forkd-").is_some_and(|rest| rest.len() >= 8)
            && folders_in(path).iter().all(|part| {
                part.file_name()
                    .is_some_and(|name| ["netns", "sandboxes", "templates"].iter().any(|it| name == *it))
            })
    };
    let found = bases.flat_map(|base| folders_in(&base)).filter(is_ours);
    found.map(|path| RunFolder { owner: owner(&path, data, locks), path }).collect()
}

fn owner(folder: &Path, data: &Path, locks: &str) -> Owner {
    let leads_here = |data: &Path| fs::read_link(data.join("run")).is_ok_and(|place| place == folder);
    let data = match fs::read_link(folder.join("data")) {
        Ok(data) => data,
        Err(_) if leads_here(data) => data.to_owned(),
        Err(_) => return Owner::Unknown,
    };
    // Check this first: the daemon of a killed benchmark may hold its lock until the kernel has ended it as well.
    if let Some(owner) = benches::owner(&data).filter(|_| leads_here(&data)) {
        owner
    } else if is_locked(&data.join("daemon.lock"), locks) {
        Owner::Runs(data)
    } else if leads_here(&data) {
        Owner::Next(data)
    } else {
        Owner::Orphaned("its data directory is gone or uses another run folder")
    }
}

/// Whether a daemon holds the lock, according to the kernel's list. Trying to take the lock could stop a
/// daemon that starts at that moment.
fn is_locked(file: &Path, locks: &str) -> bool {
    let Ok(inode) = fs::metadata(file).map(|data| data.ino().to_string()) else { return false };
    let place =
        |line: &str| line.split_whitespace().find(|word| word.split(':').count() == 3).map(str::to_owned);
    let held = |line: &str| {
        line.contains("FLOCK") && place(line).is_some_and(|it| it.ends_with(&format!(":{inode}")))
    };
    locks.lines().any(held)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_run_folder_is_its_daemons_as_long_as_there_is_one_or_can_be() {
        let (memory, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let folder = memory.path().join("forkd-0123456789abcdef");
        fs::create_dir_all(folder.join("sandboxes/sb1")).unwrap();
        let look = |locks: &str| {
            let bases = std::iter::once(memory.path().to_owned());
            run_folders_in(bases, Path::new("/nonexistent"), locks)[0].owner.clone()
        };
        assert_eq!(look(""), Owner::Unknown);
        symlink(data.path(), folder.join("data")).unwrap();
        assert!(look("").is_nobody(), "its data directory uses another one");
        symlink(&folder, data.path().join("run")).unwrap();
        assert_eq!(look(""), Owner::Next(data.path().to_owned()));
        let lock = data.path().join("daemon.lock");
        fs::write(&lock, "1").unwrap();
        let inode = fs::metadata(&lock).unwrap().ino();
        let locks = format!(
            "1: FLOCK  ADVISORY  WRITE 77 00:2b:{inode} 0 EOF\n2: POSIX  ADVISORY  READ 5 08:01:1 0 EOF"
        );
        assert_eq!(look(&locks), Owner::Runs(data.path().to_owned()));
        drop(data);
        assert!(look(&locks).is_nobody());
    }

    #[test]
    fn a_folder_that_only_is_called_like_one_is_not_one() {
        let memory = tempfile::tempdir().unwrap();
        fs::create_dir_all(memory.path().join("forkd-0123456789abcdef/precious")).unwrap();
        fs::create_dir_all(memory.path().join("forkd")).unwrap();
        let bases = std::iter::once(memory.path().to_owned());
        assert!(run_folders_in(bases, Path::new("/nonexistent"), "").is_empty());
    }
}
