//! Folders of `forkd bench`: one per run, in the data directory, with the id of the process that owns it. A
//! killed run leaves its folder and the sandboxes of its daemon behind.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::process::Signal;

use super::owners::Owner;
use super::{folders_in, processes};
use crate::host::process::ProcessId;

/// The prefix of the folders' names; the number of the process follows.
const PREFIX: &str = "bench-";
/// The file in such a folder that names its owner.
const OWNER: &str = "owner.json";
/// How many times processes are searched: one may start another before it is killed.
const LOOKS: usize = 5;

/// The folder of a run of this process.
pub(crate) fn bench_folder(data: &Path) -> PathBuf {
    data.join(format!("{PREFIX}{}", std::process::id()))
}

/// Records this process as the owner of the folder.
pub(crate) fn claim_bench(folder: &Path) -> Result<()> {
    let owner = serde_json::to_vec(&ProcessId::current()?)?;
    let file = folder.join(OWNER);
    fs::write(&file, owner).with_context(|| format!("cannot write {}", file.display()))
}

/// Removes such a folder, and every process and network of the daemon in it. `forkd cleanup` finds what
/// could not be removed.
pub(crate) fn remove_bench(folder: &Path) {
    let run = fs::read_link(folder.join("run")).ok();
    let places: Vec<&Path> = std::iter::once(folder).chain(run.as_deref()).collect();
    for _ in 0..LOOKS {
        let found = processes::with_sockets_in(&places);
        if found.is_empty() {
            break;
        }
        // Kill all before waiting for any.
        found.iter().for_each(|process| process.signal(Signal::KILL));
        for process in found {
            // The next search finds a process that stays.
            let _ = process.wait(Duration::from_secs(1));
        }
    }
    if let Some(run) = run {
        for namespace in forkd_net::leftovers().map(|left| left.namespaces).unwrap_or_default() {
            if Path::new(&namespace).starts_with(&run) {
                let _ = forkd_net::remove_namespace(Path::new(&namespace));
            }
        }
        let _ = fs::remove_dir_all(run);
    }
    let _ = fs::remove_dir_all(folder);
}

/// Folders of runs on this data directory, and the owner of each.
pub(super) fn find(data: &Path) -> Vec<(PathBuf, Owner)> {
    let folders = folders_in(data).into_iter();
    folders.filter_map(|folder| owner(&folder).map(|owner| (folder, owner))).collect()
}

/// The owner of a folder; `None` if it is not a folder of a run.
pub(super) fn owner(folder: &Path) -> Option<Owner> {
    let pid: i32 = folder.file_name()?.to_str()?.strip_prefix(PREFIX)?.parse().ok()?;
    let runs = match fs::read(folder.join(OWNER)) {
        Ok(text) => serde_json::from_slice::<ProcessId>(&text).ok()?.is_alive(),
        // The run was killed before it recorded itself, or it is about to.
        Err(_) => ProcessId::of(pid).is_some(),
    };
    Some(match runs {
        true => Owner::Runs(folder.to_owned()),
        false => Owner::Orphaned("its benchmark has ended"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;
    use std::process::{Command, Stdio};

    #[test]
    fn a_folder_is_its_benchs_while_that_runs_and_nobodys_afterwards() {
        let data = tempfile::tempdir().unwrap();
        let folder = bench_folder(data.path());
        fs::create_dir(&folder).unwrap();
        let is_nobodys = || owner(&folder).map(|owner| owner.is_nobody());
        assert_eq!(is_nobodys(), Some(false), "a process of that number runs");
        claim_bench(&folder).unwrap();
        assert_eq!(is_nobodys(), Some(false));
        let mut child = Command::new("true").spawn().unwrap();
        let gone = ProcessId::of(child.id() as i32);
        child.wait().unwrap();
        fs::write(folder.join(OWNER), serde_json::to_vec(&gone).unwrap()).unwrap();
        // One that ended before it was looked at left nothing to read.
        assert_eq!(is_nobodys(), gone.map(|_| true));
        fs::write(folder.join(OWNER), "nonsense").unwrap();
        assert_eq!(is_nobodys(), None, "what cannot be read is kept");
        fs::create_dir(data.path().join("bench-results")).unwrap();
        assert_eq!(find(data.path()), []);
    }

    #[test]
    fn a_folder_is_removed_with_the_processes_that_listen_in_it_and_no_others() {
        let data = tempfile::tempdir().unwrap();
        let (folder, other) = (data.path().join("bench-1"), data.path().join("other"));
        let listen = |folder: &Path| {
            fs::create_dir(folder).unwrap();
            let listener = UnixListener::bind(folder.join("s")).unwrap();
            // The child has the socket as its standard input; here it is closed.
            let input = Stdio::from(std::os::fd::OwnedFd::from(listener));
            Command::new("sleep").arg("1000").stdin(input).spawn().unwrap()
        };
        let (mut inside, mut outside) = (listen(&folder), listen(&other));
        remove_bench(&folder);
        assert!(!folder.exists() && other.exists());
        assert!(!inside.wait().unwrap().success());
        assert!(outside.try_wait().unwrap().is_none());
        outside.kill().unwrap();
        outside.wait().unwrap();
    }
}
