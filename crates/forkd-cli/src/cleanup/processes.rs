//! Processes of guests and their owners: each process has sockets whose paths lead to a run folder.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::owners::{Owner, RunFolder};
use super::{Leftover, LeftoverKind};
use crate::host::process::ProcessId;

/// Names of guest processes: a monitor has its program's name, its forks the name of their task.
const NAMES: &[&str] = &["forkd-vmm", "forkd-sandbox", "forkd-template", "forkd-saver"];

/// All guest processes that this user may inspect.
pub(super) fn find(folders: &[RunFolder], daemon_runs: bool) -> Vec<Leftover> {
    let sockets = sockets(&fs::read_to_string("/proc/net/unix").unwrap_or_default());
    let mut found = Vec::new();
    for pid in pids().filter(|pid| name(*pid).is_some_and(|name| NAMES.contains(&name.as_str()))) {
        let Some(process) = ProcessId::of(pid) else { continue };
        let owner = match paths(pid, &sockets) {
            Some(paths) => owner(&paths, folders, daemon_runs),
            None => Owner::Unknown,
        };
        found.push(Leftover {
            process: Some(process),
            ..Leftover::new(LeftoverKind::Process, pid.to_string(), owner)
        });
    }
    found
}

/// Every other process that has a socket in one of these folders.
pub(super) fn with_sockets_in(places: &[&Path]) -> Vec<ProcessId> {
    let sockets = sockets(&fs::read_to_string("/proc/net/unix").unwrap_or_default());
    let inside = |path: &PathBuf| places.iter().any(|place| path.starts_with(place));
    let sockets: HashMap<u64, PathBuf> = sockets.into_iter().filter(|(_, path)| inside(path)).collect();
    if sockets.is_empty() {
        return Vec::new();
    }
    let me = std::process::id() as i32;
    let has_one = |pid: &i32| *pid != me && paths(*pid, &sockets).is_some_and(|paths| !paths.is_empty());
    pids().filter(has_one).filter_map(ProcessId::of).collect()
}

/// The number of daemons that run, of any user.
pub(super) fn daemons() -> usize {
    let is_daemon = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0);
        let program = words.next().unwrap_or_default();
        program.ends_with(b"forkd") && words.any(|word| word == b"serve")
    };
    pids().filter(is_daemon).count()
}

fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn name(pid: i32) -> Option<String> {
    Some(fs::read_to_string(format!("/proc/{pid}/comm")).ok()?.trim().to_owned())
}

/// Paths of sockets by inode, from the kernel's list.
fn sockets(list: &str) -> HashMap<u64, PathBuf> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let inode = words.nth(6)?.parse().ok()?;
        Some((inode, PathBuf::from(words.next()?)))
    };
    list.lines().filter_map(parse).collect()
}

/// The paths of a process's sockets; `None` if this user may not read them.
fn paths(pid: i32, sockets: &HashMap<u64, PathBuf>) -> Option<Vec<PathBuf>> {
    let descriptors = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    let path = |entry: fs::DirEntry| {
        let target = fs::read_link(entry.path()).ok()?;
        let inode = target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()?;
        sockets.get(&inode).cloned()
    };
    Some(descriptors.flatten().filter_map(path).collect())
}

/// The owner of a process with these sockets. A folder that is not visible may belong to a daemon with
/// other mounts, as in a container.
fn owner(paths: &[PathBuf], folders: &[RunFolder], daemon_runs: bool) -> Owner {
    let holds = |folder: &&RunFolder| paths.iter().any(|path| path.starts_with(&folder.path));
    if let Some(folder) = folders.iter().find(holds) {
        return folder.owner.clone();
    }
    // No client can reach it: its folder was removed.
    let lost = |path: &PathBuf| path.is_absolute() && !path.parent().is_some_and(Path::exists);
    match paths.is_empty() {
        false if !daemon_runs && paths.iter().all(lost) => {
            Owner::Orphaned("its folder is gone, so no client can reach it")
        }
        _ => Owner::Unknown,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_by_the_paths_of_its_sockets() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
        let sockets = sockets(&fs::read_to_string("/proc/net/unix").unwrap());
        let me = std::process::id() as i32;
        assert!(paths(me, &sockets).unwrap().contains(&path));
    }

    #[test]
    fn a_process_belongs_to_the_owner_of_its_folder_and_one_without_a_folder_to_nobody() {
        let memory = tempfile::tempdir().unwrap();
        let kept = Owner::Next("/data".into());
        let folders = [RunFolder { path: memory.path().to_owned(), owner: kept.clone() }];
        assert_eq!(owner(&[memory.path().join("sandboxes/sb1/control")], &folders, false), kept);
        assert!(owner(&["/nonexistent/forkd-1/sandboxes/sb1/control".into()], &folders, false).is_nobody());
        let lost = ["/nonexistent/forkd-1/sandboxes/sb1/control".into()];
        assert_eq!(owner(&lost, &folders, true), Owner::Unknown, "a daemon may see it");
        assert_eq!(owner(&["/tmp/control".into()], &folders, false), Owner::Unknown);
        assert_eq!(owner(&[], &folders, false), Owner::Unknown);
    }
}
