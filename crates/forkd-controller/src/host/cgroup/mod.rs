//! Cgroups (v2): the place and the limits of monitors, and the way to kill what remains of them.
//!
//! ```text
//! <base>/forkd/<lineage>/template        the template a lineage began with, or the VM it was made from
//!                       /<template id>…  branches, one leaf each
//!                       /<sandbox id>…   sandboxes, one leaf each
//! ```
//!
//! `base` is the folder *above* the daemon's own cgroup, or the root if the daemon is there itself. A cgroup with
//! processes cannot delegate controllers to folders below it. So the daemon works beside its own cgroup, and moves
//! no other process. A daemon that its service starts again finds the same base.
//!
//! A template forks its children straight into their leaves. The kernel allows that to the owner of `cgroup.procs`
//! of the leaf and of the lineage's folder. So the lineage's user owns these two files, and no others. To move a
//! process later costs more than the fork itself.
//!
//! Hosts without the v2 controllers have a [`Cgroups::reason`] and no limits. This module knows only the ids of
//! sandboxes. Calls block for a short time; only a removal may wait.

mod leaving;
mod limits;

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::names::is_valid_name;
use leaving::Tasks;
use rustix::fs::{AtFlags, Mode, OFlags, Uid};

pub(crate) use leaving::Leaving;
pub(crate) use limits::{CgroupLimits, memory_mib};

/// Without these controllers there are no useful limits.
const NEEDED: &[&str] = &["memory", "pids"];
/// Controllers that are used where the host has them.
const WELCOME: &[&str] = &["cpu", "io"];
/// The controllers of a leaf. Each one costs every fork a little; nothing limits I/O yet.
const IN_LEAVES: &[&str] = &["memory", "pids", "cpu"];
/// The daemon's folder in the base.
const FORKD: &str = "forkd";
/// The folder for the daemon itself, if the base is its own cgroup and must have no processes.
const DAEMON: &str = "forkd.daemon";
/// The name of a template's leaf; no sandbox has this id.
const TEMPLATE: &str = "template";
/// The task limit of a whole lineage: a thousand children of common size.
const LINEAGE_PIDS: u32 = 32 << 10;
/// The largest file of a cgroup that is read.
const MAX_FILE: u64 = 64 << 10;
/// How often a removal is tried while killed processes end. The waits double, from one millisecond on: two
/// seconds in all.
const REMOVE_TRIES: u32 = 11;
/// How long a leaf is kept for branches that are to move out of it, and the pause between two checks.
const LEAVE_WAIT: Duration = Duration::from_secs(10);
const LEAVE_STEP: Duration = Duration::from_millis(1);

/// The daemon's cgroups on this host.
#[derive(Debug)]
pub(crate) struct Cgroups {
    /// `<base>/forkd`, or why it does not exist.
    forkd: Result<PathBuf, String>,
}

impl Cgroups {
    /// Finds the base and creates `forkd` in it. Never fails: see [`Cgroups::reason`].
    pub(crate) fn open() -> Cgroups {
        let forkd = find_place().and_then(|place| prepare(&place, NEEDED));
        Cgroups { forkd }
    }

    /// Why there are no limits, and what to do; `None` if there are limits.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.forkd.as_ref().err().map(String::as_str)
    }

    /// Creates or opens the folder of lineage `id`, whose processes run as `uid`. `None` without cgroups.
    pub(crate) fn lineage(&self, id: &str, uid: u32) -> io::Result<Option<LineageCgroup>> {
        let Ok(forkd) = &self.forkd else { return Ok(None) };
        let path = child(forkd, id)?;
        match fs::create_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            other => other.map_err(naming("create", &path))?,
        }
        let lineage = LineageCgroup { path, uid };
        if let Err(error) = lineage.prepare() {
            let _ = fs::remove_dir(&lineage.path);
            return Err(error);
        }
        Ok(Some(lineage))
    }

    /// The id of the lineage that has process `pid` in one of its leaves.
    pub(crate) fn lineage_of(&self, pid: i32) -> Option<String> {
        let forkd = self.forkd.as_ref().ok()?;
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let place = Path::new(text.lines().find_map(|line| line.strip_prefix("0::"))?);
        let (leaf, lineage) = (place.file_name()?, place.parent()?.file_name()?);
        let id = lineage.to_str().filter(|id| is_valid_name(id))?;
        // The process must be in this daemon's leaf, not in another one whose path ends alike.
        let procs = fs::read_to_string(forkd.join(id).join(leaf).join(PROCS)).ok()?;
        procs.lines().any(|line| line.parse() == Ok(pid)).then(|| id.to_owned())
    }

    /// The ids of all lineages that have a folder. Several daemons may share a host, so do nothing to an id that
    /// this daemon's data does not contain.
    pub(crate) fn lineages(&self) -> Vec<String> {
        self.forkd.as_deref().map(folders).unwrap_or_default()
    }
}

/// The cgroup of one lineage.
#[derive(Debug, Clone)]
pub(crate) struct LineageCgroup {
    path: PathBuf,
    uid: u32,
}

impl LineageCgroup {
    fn prepare(&self) -> io::Result<()> {
        enable(&self.path, IN_LEAVES)?;
        give(&self.path, self.uid)?;
        set_if_there(&self.path, "pids.max", LINEAGE_PIDS)
    }

    /// Creates the leaf of its first template.
    pub(crate) fn template(&self, limits: &CgroupLimits) -> io::Result<Leaf> {
        self.leaf(TEMPLATE, limits)
    }

    /// Creates the leaf of sandbox `id`, or of template `id`, a branch.
    pub(crate) fn leaf(&self, id: &str, limits: &CgroupLimits) -> io::Result<Leaf> {
        let path = child(&self.path, id)?;
        let made = fs::create_dir(&path).or_else(|error| {
            if error.kind() != io::ErrorKind::AlreadyExists {
                return Err(error);
            }
            // Left by an ended sandbox, with counts of its own. The removal fails if it is still in use.
            fs::remove_dir(&path)?;
            fs::create_dir(&path)
        });
        made.map_err(naming("create", &path))?;
        let prepared = limits.apply(&path).and_then(|()| give(&path, self.uid));
        let opened = prepared.and_then(|()| Leaf::open(path.clone()));
        let limited = opened.and_then(|leaf| {
            limits.pids_max.map_or(Ok(()), |max| leaf.limit_tasks(max))?;
            Ok(leaf)
        });
        limited.inspect_err(|_| drop(fs::remove_dir(&path)))
    }

    /// The existing leaf `name`, for a daemon that adopts its sandboxes.
    pub(crate) fn existing(&self, name: &str) -> io::Result<Leaf> {
        Leaf::open(child(&self.path, name)?)
    }

    /// The names of all leaves, including the template's.
    pub(crate) fn leaves(&self) -> Vec<String> {
        folders(&self.path)
    }

    /// Kills every process of the lineage.
    pub(crate) fn kill(&self) -> io::Result<()> {
        kill(&self.path)
    }

    /// Removes it with all its leaves. Waits a little for killed processes to end; `ResourceBusy` if they do
    /// not.
    pub(crate) fn remove(&self) -> io::Result<()> {
        for name in self.leaves() {
            remove(&child(&self.path, &name)?)?;
        }
        remove(&self.path)
    }
}

/// The cgroup of one process: a template or a sandbox. Dropping it removes nothing.
#[derive(Debug)]
pub(crate) struct Leaf {
    path: PathBuf,
    folder: OwnedFd,
    tasks: Arc<Tasks>,
}

impl Leaf {
    pub(crate) fn open(path: PathBuf) -> io::Result<Leaf> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|error| naming("open", &path)(error.into()))?;
        let tasks = Tasks::new(path.clone());
        Ok(Leaf { path, folder, tasks })
    }

    /// Limits its tasks, beside those of branches that have not moved yet.
    pub(crate) fn limit_tasks(&self, max: u32) -> io::Result<()> {
        self.tasks.limit(max)
    }

    /// Announces a branch that starts in this leaf and is to move: the task limit rises, and the branch is not
    /// killed with the other processes.
    pub(crate) fn leaving(&self) -> Leaving {
        Leaving::new(self.tasks.clone())
    }

    /// Waits until all such branches have moved; false if some have not in time. Blocks.
    pub(crate) fn is_left(&self) -> bool {
        let begun = Instant::now();
        while self.tasks.leaving() > 0 {
            if begun.elapsed() > LEAVE_WAIT {
                return false;
            }
            std::thread::sleep(LEAVE_STEP);
        }
        true
    }

    /// The descriptor for `CLONE_INTO_CGROUP`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// The descriptor for [`join`]: opened before the fork, used after it.
    pub(crate) fn procs_fd(&self) -> io::Result<OwnedFd> {
        let path = self.path.join(PROCS);
        File::options().write(true).open(&path).map(OwnedFd::from).map_err(naming("open", &path))
    }

    /// Moves process `pid` into this leaf.
    pub(crate) fn admit(&self, pid: i32) -> io::Result<()> {
        set(&self.path, PROCS, pid)
    }

    /// How often the kernel has killed a process of this leaf because its memory was used up.
    pub(crate) fn oom_kills(&self) -> io::Result<u64> {
        Ok(value(&read(&self.path, "memory.events")?, "oom_kill").unwrap_or(0))
    }

    /// How many bytes of memory it uses; `None` without a memory controller.
    pub(crate) fn memory_current(&self) -> Option<u64> {
        read(&self.path, "memory.current").ok()?.trim().parse().ok()
    }

    /// Raises the memory limit by a copy of its content, beside `limit` bytes. Pages that a branch shares with its
    /// source stay charged here, and so do the copies that the source makes when it writes to them.
    pub(crate) fn make_room(&self, limit: u64) -> io::Result<()> {
        let shared = self.memory_current().unwrap_or(0).max(limit);
        set(&self.path, "memory.max", shared.saturating_add(limit))
    }

    /// Microseconds of CPU time that its processes have used, including ended ones.
    pub(crate) fn cpu_usec(&self) -> Option<u64> {
        value(&read(&self.path, "cpu.stat").ok()?, "usage_usec")
    }

    /// Kills all its processes.
    pub(crate) fn kill(&self) -> io::Result<()> {
        kill(&self.path)
    }

    /// Removes it. Waits a little for killed processes to end; `ResourceBusy` if they do not.
    pub(crate) fn remove(&self) -> io::Result<()> {
        remove(&self.path)
    }
}

/// Moves the calling process into the leaf of this [`Leaf::procs_fd`]. For use between `fork` and `exec`: one system
/// call, nothing else.
pub(crate) fn join(procs_fd: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::write(procs_fd, b"0")?;
    Ok(())
}

const PROCS: &str = "cgroup.procs";
const SUBTREE: &str = "cgroup.subtree_control";

/// The place of the daemon's folder.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    base: PathBuf,
    /// Whether the daemon itself is in `base`, as at the root.
    ours: bool,
}

/// Finds the place. The error is for [`Cgroups::reason`].
fn find_place() -> Result<Place, String> {
    let text = |path: &str| {
        fs::read_to_string(path)
            .map_err(|error| format!("no limits for sandboxes: cannot read {path}: {error}"))
    };
    place(&text("/proc/self/mountinfo")?, &text("/proc/self/cgroup")?).ok_or_else(|| {
        "no limits for sandboxes: no cgroup v2 is mounted here; mount one with `mount -t cgroup2 cgroup2 \
         /sys/fs/cgroup`"
            .into()
    })
}

/// The place, from the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn place(mounts: &str, own: &str) -> Option<Place> {
    let own = Path::new(own.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        if kind.split(' ').next()? != "cgroup2" {
            return None;
        }
        // Which part of the tree is mounted, and the mount point.
        let mut fields = mount.split(' ').skip(3);
        let (part, point) = (fields.next()?, Path::new(fields.next()?));
        let below = own.strip_prefix(part).ok()?;
        // A cgroup outside our cgroup namespace is shown with dots, and cannot be reached.
        if below.components().any(|part| part.as_os_str() == "..") {
            return None;
        }
        Some(match below.parent() {
            Some(above) => Place { base: point.join(above), ours: false },
            None => Place { base: point.to_owned(), ours: true },
        })
    })
}

/// Creates `<base>/forkd` and enables the controllers there.
fn prepare(place: &Place, needed: &[&str]) -> Result<PathBuf, String> {
    let base = &place.base;
    let forkd = base.join(FORKD);
    let cannot = |error: io::Error| format!("no limits for sandboxes: {error}");
    match fs::create_dir(&forkd) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.map_err(naming("create", &forkd)).map_err(cannot)?,
    }
    // From the top: a folder can only delegate its own controllers. A failure shows in the check below.
    let above: Vec<&Path> = base.ancestors().skip(1).take_while(|path| path.join(SUBTREE).exists()).collect();
    for folder in above.into_iter().rev() {
        let _ = delegate(folder, needed);
    }
    let mut refused = delegate(base, needed).err();
    if place.ours && refused.as_ref().is_some_and(|error| error.kind() == io::ErrorKind::ResourceBusy) {
        refused = step_aside(base, needed).err();
    }
    let there = read(&forkd, "cgroup.controllers").map_err(cannot)?;
    let missing: Vec<&str> = needed.iter().copied().filter(|name| !has_word(&there, name)).collect();
    if !missing.is_empty() {
        let _ = fs::remove_dir(&forkd);
        // If the base itself lacks them, the error repeats only that.
        let refused = refused.filter(|error| error.kind() != io::ErrorKind::Unsupported);
        let why = refused.map(|error| format!(" ({error})")).unwrap_or_default();
        return Err(format!(
            "no limits for sandboxes: cgroup v2 in {} lacks the controllers {}{why}; if they are bound to \
             cgroup v1, boot with systemd.unified_cgroup_hierarchy=1",
            base.display(),
            missing.join(" and ")
        ));
    }
    delegate(&forkd, needed).map_err(cannot)?;
    Ok(forkd)
}

/// In a container the daemon's own cgroup may look like the root, and yet a cgroup with processes cannot delegate
/// there. If the daemon is alone in it, it moves to a folder of its own; if not, it moves back.
fn step_aside(base: &Path, needed: &[&str]) -> io::Result<()> {
    let aside = base.join(DAEMON);
    match fs::create_dir(&aside) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.map_err(naming("create", &aside))?,
    }
    let moved = set(&aside, PROCS, 0).and_then(|()| delegate(base, needed));
    if moved.is_err() {
        let _ = set(base, PROCS, 0);
        let _ = fs::remove_dir(&aside);
    }
    moved
}

/// Delegates the needed controllers from `folder`, and the optional ones: all needed ones, or nothing at all. In a
/// folder with processes the kernel would enable some controllers, and then run nothing below it.
fn delegate(folder: &Path, needed: &[&str]) -> io::Result<()> {
    let has = read(folder, "cgroup.controllers")?;
    if let Some(missing) = needed.iter().find(|name| !has_word(&has, name)) {
        let text = format!("{} has no {missing} controller", folder.display());
        return Err(io::Error::new(io::ErrorKind::Unsupported, text));
    }
    enable(folder, needed)?;
    for name in WELCOME {
        let _ = enable(folder, &[name]);
    }
    Ok(())
}

/// Enables those `controllers` that `folder` has for the folders in it, in one step.
fn enable(folder: &Path, controllers: &[&str]) -> io::Result<()> {
    let (has, gives) = (read(folder, "cgroup.controllers")?, read(folder, SUBTREE)?);
    let missing = controllers.iter().filter(|name| has_word(&has, name) && !has_word(&gives, name));
    let change: Vec<String> = missing.map(|name| format!("+{name}")).collect();
    if change.is_empty() {
        return Ok(());
    }
    set(folder, SUBTREE, change.join(" "))
}

fn has_word(text: &str, word: &str) -> bool {
    text.split_whitespace().any(|each| each == word)
}

/// Lets `uid` move processes into the cgroup `folder`.
fn give(folder: &Path, uid: u32) -> io::Result<()> {
    let path = folder.join(PROCS);
    let owner = Some(Uid::from_raw(uid));
    rustix::fs::chownat(rustix::fs::CWD, &path, owner, None, AtFlags::SYMLINK_NOFOLLOW)
        .map_err(|error| naming("give away", &path)(error.into()))
}

fn kill(folder: &Path) -> io::Result<()> {
    set(folder, "cgroup.kill", 1)
}

fn remove(folder: &Path) -> io::Result<()> {
    for attempt in 0..=REMOVE_TRIES {
        match fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy && attempt < REMOVE_TRIES => {
                std::thread::sleep(Duration::from_millis(1 << attempt));
            }
            other => return other.map_err(naming("remove", folder)),
        }
    }
    Ok(())
}

/// `folder/name`, if `name` is a valid name and no path.
fn child(folder: &Path, name: &str) -> io::Result<PathBuf> {
    if is_valid_name(name) {
        return Ok(folder.join(name));
    }
    Err(io::Error::new(io::ErrorKind::InvalidInput, format!("{name:?} is no name of a cgroup")))
}

/// The names of the folders in `folder`.
fn folders(folder: impl AsRef<Path>) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let folders = entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_valid_name(name))
        .collect()
}

/// Writes `value` to a file of a cgroup, in one write as the kernel requires. Never creates the file.
fn set(folder: &Path, file: &str, value: impl std::fmt::Display) -> io::Result<()> {
    let path = folder.join(file);
    let text = value.to_string();
    File::options()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(naming("write", &path))
}

/// As [`set`]; does nothing where the host lacks the file.
fn set_if_there(folder: &Path, file: &str, value: impl std::fmt::Display) -> io::Result<()> {
    match set(folder, file, value) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn read(folder: &Path, file: &str) -> io::Result<String> {
    let path = folder.join(file);
    let mut text = String::new();
    File::open(&path)
        .and_then(|file| file.take(MAX_FILE).read_to_string(&mut text))
        .map_err(naming("read", &path))?;
    Ok(text)
}

/// The number after `key` in a file of one `key number` per line.
fn value(text: &str, key: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok())
}

/// For `map_err`: adds the action and the path to the text, and keeps the kind.
fn naming<'p>(doing: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> io::Error + 'p {
    move |error| io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
