//! Cgroups (v2): where monitors live, what they may use, and how to end what is left of them.
//!
//! ```text
//! <base>/forkd/<lineage>/template        the template a lineage began with, or the VM it was made from
//!                       /<template id>…  branches, one leaf each
//!                       /<sandbox id>…   sandboxes, one leaf each
//! ```
//!
//! `base` is the folder *above* the daemon's own cgroup, or the root if it is there itself: a cgroup
//! with processes cannot hand controllers to folders below it, so we work beside ourselves and move
//! nobody. A daemon that is started again by its service finds the same base.
//!
//! A template forks its children straight into their leaves. The kernel allows it to the owner of
//! `cgroup.procs` of the leaf and of the lineage's folder, so these two files, and nothing else,
//! belong to the lineage's user. Moving a process later costs more than the fork itself.
//!
//! Hosts without the v2 controllers get [`Cgroups::reason`] and no limits. Knows nothing of
//! sandboxes beyond their ids. Calls block, shortly; only removing may wait.

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

/// Without these there are no limits worth the name.
const NEEDED: &[&str] = &["memory", "pids"];
/// Used where the host has them.
const WELCOME: &[&str] = &["cpu", "io"];
/// What every leaf gets of them. Each controller costs every fork a little; nothing limits I/O yet.
const IN_LEAVES: &[&str] = &["memory", "pids", "cpu"];
/// Our folder in the base.
const FORKD: &str = "forkd";
/// Where we go if the base is our own place and must be empty.
const DAEMON: &str = "forkd.daemon";
/// A template's leaf; no sandbox id is like it.
const TEMPLATE: &str = "template";
/// The most threads of a whole lineage: a thousand children of common size.
const LINEAGE_PIDS: u32 = 32 << 10;
/// The largest file of a cgroup that is read.
const MAX_FILE: u64 = 64 << 10;
/// How long removing waits for processes that were killed: this often, each wait twice the last,
/// from one millisecond on. Two seconds in all.
const REMOVE_TRIES: u32 = 11;
/// How long a leaf is kept for a process that is to leave it, and how often that is looked at.
const LEAVE_WAIT: Duration = Duration::from_secs(10);
const LEAVE_STEP: Duration = Duration::from_millis(1);

/// The host's cgroups, as far as they are ours.
#[derive(Debug)]
pub(crate) struct Cgroups {
    /// `<base>/forkd`, or why there is none.
    forkd: Result<PathBuf, String>,
}

impl Cgroups {
    /// Finds our place and makes our folder. Never fails: see [`Cgroups::reason`].
    pub(crate) fn open() -> Cgroups {
        let forkd = find_place().and_then(|place| prepare(&place, NEEDED));
        Cgroups { forkd }
    }

    /// Why there are no limits, if there are none, and what to do.
    pub(crate) fn reason(&self) -> Option<&str> {
        self.forkd.as_ref().err().map(String::as_str)
    }

    /// Makes the folder of lineage `id`, whose processes run as `uid`, or takes the one that is
    /// there. `None` without cgroups.
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

    /// The id of the lineage that process `pid` is in a leaf of.
    pub(crate) fn lineage_of(&self, pid: i32) -> Option<String> {
        let forkd = self.forkd.as_ref().ok()?;
        let text = fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let place = Path::new(text.lines().find_map(|line| line.strip_prefix("0::"))?);
        let (leaf, lineage) = (place.file_name()?, place.parent()?.file_name()?);
        let id = lineage.to_str().filter(|id| is_valid_name(id))?;
        // Our own, and not one that only ends alike.
        let procs = fs::read_to_string(forkd.join(id).join(leaf).join(PROCS)).ok()?;
        procs.lines().any(|line| line.parse() == Ok(pid)).then(|| id.to_owned())
    }

    /// The ids of all lineages that have a folder. Several daemons may share a host: some may be
    /// another one's, so nothing may be done to an id our own data does not know.
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

    /// Makes the leaf of the template it begins with.
    pub(crate) fn template(&self, limits: &CgroupLimits) -> io::Result<Leaf> {
        self.leaf(TEMPLATE, limits)
    }

    /// Makes the leaf of sandbox `id`, or of template `id`, a branch.
    pub(crate) fn leaf(&self, id: &str, limits: &CgroupLimits) -> io::Result<Leaf> {
        let path = child(&self.path, id)?;
        let made = fs::create_dir(&path).or_else(|error| {
            if error.kind() != io::ErrorKind::AlreadyExists {
                return Err(error);
            }
            // Left by a sandbox that has ended; its counts are not ours. Refused if still in use.
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

    /// The leaf called `name` that is already there, for a daemon that finds its sandboxes again.
    pub(crate) fn existing(&self, name: &str) -> io::Result<Leaf> {
        Leaf::open(child(&self.path, name)?)
    }

    /// The names of all leaves, the template's included.
    pub(crate) fn leaves(&self) -> Vec<String> {
        folders(&self.path)
    }

    /// Kills every process of the lineage.
    pub(crate) fn kill(&self) -> io::Result<()> {
        kill(&self.path)
    }

    /// Removes it with all its leaves. Waits a little for killed processes to go; the error is
    /// `ResourceBusy` if they do not.
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
    fn open(path: PathBuf) -> io::Result<Leaf> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let folder = rustix::fs::open(&path, flags, Mode::empty())
            .map_err(|error| naming("open", &path)(error.into()))?;
        let tasks = Tasks::new(path.clone());
        Ok(Leaf { path, folder, tasks })
    }

    /// Limits the tasks in it, beside those of branches that have not left yet.
    pub(crate) fn limit_tasks(&self, max: u32) -> io::Result<()> {
        self.tasks.limit(max)
    }

    /// Says that a branch which begins in here is to leave: there is room for it, and it is not to be killed
    /// with the others.
    pub(crate) fn leaving(&self) -> Leaving {
        Leaving::new(self.tasks.clone())
    }

    /// Waits for those that are to leave; whether they have. Blocks.
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

    /// For `CLONE_INTO_CGROUP`.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.folder.as_fd()
    }

    /// For [`join`]: opened before the fork, used after it.
    pub(crate) fn door(&self) -> io::Result<OwnedFd> {
        let path = self.path.join(PROCS);
        File::options().write(true).open(&path).map(OwnedFd::from).map_err(naming("open", &path))
    }

    /// Moves the process `pid` here.
    pub(crate) fn admit(&self, pid: i32) -> io::Result<()> {
        set(&self.path, PROCS, pid)
    }

    /// How often the kernel has killed a process in here because its memory was used up.
    pub(crate) fn oom_kills(&self) -> io::Result<u64> {
        Ok(value(&read(&self.path, "memory.events")?, "oom_kill").unwrap_or(0))
    }

    /// How many bytes of memory it uses; `None` if nobody counts.
    pub(crate) fn memory_current(&self) -> Option<u64> {
        read(&self.path, "memory.current").ok()?.trim().parse().ok()
    }

    /// Makes room for a copy of what is in it, beside `limit` bytes: pages that a branch has in common with its
    /// source stay counted here, and so are the copies of them that the source makes when it writes to them.
    pub(crate) fn make_room(&self, limit: u64) -> io::Result<()> {
        let shared = self.memory_current().unwrap_or(0).max(limit);
        set(&self.path, "memory.max", shared.saturating_add(limit))
    }

    /// How many microseconds of CPU time its processes have used, those that ended included.
    pub(crate) fn cpu_usec(&self) -> Option<u64> {
        value(&read(&self.path, "cpu.stat").ok()?, "usage_usec")
    }

    /// Kills every process in it.
    pub(crate) fn kill(&self) -> io::Result<()> {
        kill(&self.path)
    }

    /// Removes it. Waits a little for killed processes to go; the error is `ResourceBusy` if they do
    /// not.
    pub(crate) fn remove(&self) -> io::Result<()> {
        remove(&self.path)
    }
}

/// Puts the calling process into the leaf whose [`Leaf::door`] this is. For between `fork` and
/// `exec`: one system call, nothing else.
pub(crate) fn join(door: BorrowedFd<'_>) -> io::Result<()> {
    rustix::io::write(door, b"0")?;
    Ok(())
}

const PROCS: &str = "cgroup.procs";
const SUBTREE: &str = "cgroup.subtree_control";

/// Where our folder goes.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    base: PathBuf,
    /// Whether we are in `base` ourselves, as at the root.
    ours: bool,
}

/// Finds it. The error is for [`Cgroups::reason`].
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

/// Our place, from the texts of `/proc/self/mountinfo` and `/proc/self/cgroup`.
fn place(mounts: &str, own: &str) -> Option<Place> {
    let own = Path::new(own.lines().find_map(|line| line.strip_prefix("0::"))?);
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        if kind.split(' ').next()? != "cgroup2" {
            return None;
        }
        // Which part of the tree is mounted, and where.
        let mut fields = mount.split(' ').skip(3);
        let (part, point) = (fields.next()?, Path::new(fields.next()?));
        let below = own.strip_prefix(part).ok()?;
        // A place outside our cgroup namespace is told with dots, and is nowhere we could go.
        if below.components().any(|part| part.as_os_str() == "..") {
            return None;
        }
        Some(match below.parent() {
            Some(above) => Place { base: point.join(above), ours: false },
            None => Place { base: point.to_owned(), ours: true },
        })
    })
}

/// Makes `<base>/forkd` and brings the controllers there.
fn prepare(place: &Place, needed: &[&str]) -> Result<PathBuf, String> {
    let base = &place.base;
    let forkd = base.join(FORKD);
    let cannot = |error: io::Error| format!("no limits for sandboxes: {error}");
    match fs::create_dir(&forkd) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
        other => other.map_err(naming("create", &forkd)).map_err(cannot)?,
    }
    // From the top: a folder can only hand on what it was given. What did not work shows below.
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
        // That the base lacks them itself needs no second sentence.
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

/// In a container our own place may look like the root and yet be under the rule that a cgroup with
/// processes hands nothing on. If we are alone in it, a folder of our own helps; if not, we go back.
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

/// Hands what we need, and what we like, on from `folder`: all we need, or nothing at all. Of a folder
/// with processes in it the kernel would take some controllers and then run nothing below it.
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

/// Hands those `controllers` that `folder` has on to the folders in it, in one step.
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

/// Lets `uid` put processes into the cgroup `folder`.
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

/// `folder/name`, if `name` is a name and no path.
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

/// Writes `value` to a file of a cgroup: at once, as the kernel wants it, and never making the file.
fn set(folder: &Path, file: &str, value: impl std::fmt::Display) -> io::Result<()> {
    let path = folder.join(file);
    let text = value.to_string();
    File::options()
        .write(true)
        .open(&path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .map_err(naming("write", &path))
}

/// As [`set`], where the host has that file.
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

/// For `map_err`: says where it happened and keeps the kind.
fn naming<'p>(doing: &'static str, path: &'p Path) -> impl FnOnce(io::Error) -> io::Error + 'p {
    move |error| io::Error::new(error.kind(), format!("cannot {doing} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests;
