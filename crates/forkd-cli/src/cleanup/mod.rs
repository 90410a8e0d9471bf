//! Finds and removes leftovers of dead daemons and benchmarks on this host.
//!
//! An object with an owner is kept: a running daemon uses it, or the next daemon on the same data directory
//! adopts it. Listing changes nothing. [`owners`] finds the owner of a run folder, [`processes`] the run
//! folder of a guest's process, [`benches`] the owner of a benchmark's folder.

mod benches;
mod owners;
mod processes;

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustix::process::Signal;
use serde::Serialize;

pub(crate) use self::benches::{bench_folder, claim_bench, remove_bench};
use self::owners::{Owner, RunFolder};
use crate::host::paths::DataDir;
use crate::host::process::ProcessId;

/// The kind of an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum LeftoverKind {
    Process,
    Namespace,
    Link,
    Folder,
    /// The folder of a run of `forkd bench`.
    Bench,
    Cgroup,
    Rules,
}

/// What `forkd cleanup` does with an object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    /// Keep it: it has an owner.
    Skip,
    /// Delete it: it has no owner.
    Delete,
}

/// One object of forkd on this host.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Leftover {
    pub(crate) kind: LeftoverKind,
    /// Its path, name or process number.
    pub(crate) path: String,
    pub(crate) action: Action,
    /// The reason for the action.
    pub(crate) why: String,
    /// The process, identified so that a later process with the same number is not killed.
    #[serde(skip)]
    process: Option<ProcessId>,
}

impl Leftover {
    fn new(kind: LeftoverKind, path: impl Into<String>, owner: Owner) -> Self {
        let action = if owner.is_nobody() { Action::Delete } else { Action::Skip };
        Leftover { kind, path: path.into(), action, why: owner.to_string(), process: None }
    }

    /// Removes it.
    pub(crate) fn remove(&self) -> Result<()> {
        let path = Path::new(&self.path);
        match self.kind {
            LeftoverKind::Process => {
                if let Some(process) = &self.process {
                    process.signal(Signal::KILL);
                    if !process.wait(std::time::Duration::from_secs(10)) {
                        anyhow::bail!("process {} still exists after SIGKILL", self.path);
                    }
                }
                Ok(())
            }
            LeftoverKind::Namespace => Ok(forkd_net::remove_namespace(path)?),
            // The kernel removes it with its namespace: both ends of a veth pair go together.
            LeftoverKind::Link => Ok(()),
            LeftoverKind::Folder => {
                fs::remove_dir_all(path).with_context(|| format!("cannot remove {}", self.path))
            }
            LeftoverKind::Bench => {
                remove_bench(path);
                if path.exists() {
                    anyhow::bail!("cannot remove {}: `sudo` may help", self.path);
                }
                Ok(())
            }
            LeftoverKind::Cgroup => {
                remove_cgroup(path).with_context(|| format!("cannot remove {}", self.path))
            }
            LeftoverKind::Rules => Ok(forkd_net::remove_rules()?),
        }
    }
}

/// All objects of forkd on this host that may be leftovers, in the order in which they can be removed.
pub(crate) fn find(data: &DataDir) -> Vec<Leftover> {
    let daemons = processes::daemons();
    let folders = owners::run_folders(data, daemons > 0);
    let mut found: Vec<Leftover> = processes::find(&folders, daemons > 0);
    let anybody = folders.iter().any(|folder| !folder.owner.is_nobody());
    found.extend(network(&folders, anybody));
    found.extend(folders.iter().map(|folder| {
        Leftover::new(LeftoverKind::Folder, folder.path.display().to_string(), folder.owner.clone())
    }));
    found.extend(cgroups(Path::new("/sys/fs/cgroup"), daemons > 0));
    let benches = benches::find(data.root()).into_iter();
    found.extend(
        benches
            .map(|(folder, owner)| Leftover::new(LeftoverKind::Bench, folder.display().to_string(), owner)),
    );
    found
}

/// Network namespaces, links and rules. Only root sees them.
fn network(folders: &[RunFolder], anybody: bool) -> Vec<Leftover> {
    let Ok(left) = forkd_net::leftovers() else { return Vec::new() };
    let mut found = Vec::new();
    for file in &left.namespaces {
        let owner = folders.iter().find(|folder| Path::new(file).starts_with(&folder.path));
        let owner = owner.map_or(Owner::Unknown, |folder| folder.owner.clone());
        found.push(Leftover::new(LeftoverKind::Namespace, file, owner));
    }
    for link in &left.links {
        let of = |one: &&Leftover| Path::new(&one.path).file_name().is_some_and(|name| name == link.as_str());
        let owner = match found.iter().find(of) {
            Some(namespace) if namespace.action == Action::Delete => {
                Owner::Orphaned("it goes with its namespace")
            }
            Some(_) => Owner::Runs(PathBuf::from(link)),
            None => Owner::Unknown,
        };
        found.push(Leftover::new(LeftoverKind::Link, link, owner));
    }
    let needed = anybody || found.iter().any(|one| one.action == Action::Skip);
    for table in &left.tables {
        let owner = if needed { Owner::Shared } else { Owner::Orphaned("no network of a sandbox is left") };
        found.push(Leftover::new(LeftoverKind::Rules, table, owner));
    }
    found
}

/// Folders of forkd's cgroups without a process. A running daemon may use them at any moment.
fn cgroups(root: &Path, daemon_runs: bool) -> Vec<Leftover> {
    const DEPTH: usize = 4;
    let mut ours = Vec::new();
    find_ours(root, DEPTH, &mut ours);
    let lineages = ours.iter().flat_map(|folder| folders_in(folder));
    let judged = lineages.map(|lineage| {
        let events = fs::read_to_string(lineage.join("cgroup.events")).unwrap_or_default();
        let owner = match (events.lines().any(|line| line == "populated 0"), daemon_runs) {
            (false, _) => Owner::Runs(lineage.clone()),
            (true, true) => Owner::Shared,
            (true, false) => Owner::Orphaned("no process is in it"),
        };
        Leftover::new(LeftoverKind::Cgroup, lineage.display().to_string(), owner)
    });
    judged.collect()
}

fn find_ours(folder: &Path, depth: usize, found: &mut Vec<PathBuf>) {
    if depth == 0 {
        return;
    }
    for inner in folders_in(folder) {
        // A service may have this name as well, but no service has lineages.
        if inner.file_name().is_some_and(|name| name == "forkd") {
            found.push(inner);
        } else {
            find_ours(&inner, depth - 1, found);
        }
    }
}

fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    entries.flatten().filter(is_folder).map(|entry| entry.path()).collect()
}

/// Removes children first: the kernel removes only a cgroup without children.
fn remove_cgroup(folder: &Path) -> std::io::Result<()> {
    for leaf in folders_in(folder) {
        fs::remove_dir(leaf)?;
    }
    fs::remove_dir(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_cgroups_are_left_while_a_daemon_runs_and_full_ones_always() {
        let root = tempfile::tempdir().unwrap();
        let lineage = |name: &str, populated: u8| {
            let folder = root.path().join("system.slice/forkd").join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("cgroup.events"), format!("populated {populated}\nfrozen 0\n")).unwrap();
        };
        lineage("empty", 0);
        lineage("full", 1);
        let action = |daemon_runs, name: &str| {
            let found = cgroups(root.path(), daemon_runs);
            found.into_iter().find(|one| one.path.ends_with(name)).unwrap().action
        };
        assert_eq!((action(false, "empty"), action(false, "full")), (Action::Delete, Action::Skip));
        assert_eq!((action(true, "empty"), action(true, "full")), (Action::Skip, Action::Skip));
    }

    #[test]
    fn what_is_removed_is_gone_and_a_process_is_the_one_that_was_found() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("forkd-x");
        fs::create_dir_all(folder.join("sandboxes/sb1")).unwrap();
        let nobody = || Owner::Orphaned("a test says so");
        Leftover::new(LeftoverKind::Folder, folder.display().to_string(), nobody()).remove().unwrap();
        assert!(!folder.exists());
        let cgroup = root.path().join("lineage");
        fs::create_dir_all(cgroup.join("leaf")).unwrap();
        Leftover::new(LeftoverKind::Cgroup, cgroup.display().to_string(), nobody()).remove().unwrap();
        assert!(!cgroup.exists());
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let process = ProcessId::of(child.id() as i32);
        let found = Leftover { process, ..Leftover::new(LeftoverKind::Process, "sleep", nobody()) };
        found.remove().unwrap();
        assert!(!child.wait().unwrap().success());
        // The same once more: its number may be another's by now.
        found.remove().unwrap();
    }
}
