//! Freezing the file systems of disks: everything is on the disk then, the journal is empty, and nothing writes. A
//! guest that boots on a copy of the disk made meanwhile finds it clean.
//!
//! A freeze writes everything out first, and cannot be called off. So it runs on a thread of its own, which thaws
//! again if it ends too late.

use std::{
    fs::File,
    io,
    path::PathBuf,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Instant,
};

use super::system::FileSystemCalls;
use crate::log;

/// All its thread does is to wait for the kernel.
const STACK: usize = 128 << 10;
/// Kinds of file systems that are on disks and can be frozen. No other kind is touched: some are served by user
/// processes, which stand still.
const KINDS: [&str; 6] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"];

pub(super) struct FileSystems {
    calls: FileSystemCalls,
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    /// Whether a thread freezes them now.
    running: bool,
    /// Whether they are to be frozen when it ends.
    wanted: bool,
    /// Those that are frozen, the first first. None while a thread runs.
    frozen: Vec<File>,
    /// Whether all of them are.
    all: bool,
}

impl FileSystems {
    pub(super) fn new(calls: FileSystemCalls) -> Self {
        FileSystems { calls, shared: Arc::default() }
    }

    /// Freezes them. `false` if that failed or takes until `deadline`; nothing is, or stays, frozen then.
    pub(super) fn freeze_by(&self, deadline: Instant) -> io::Result<bool> {
        let mut state = self.shared.lock();
        if state.running {
            return Ok(false);
        }
        let (calls, shared) = (self.calls, self.shared.clone());
        thread::Builder::new().name("freeze".into()).stack_size(STACK).spawn(move || {
            let mut frozen = Vec::new();
            let done = freeze_all(calls, &mut frozen);
            if let Err(error) = &done {
                log::error!("cannot freeze the file systems: {error}");
            }
            let mut state = shared.lock();
            (state.running, state.frozen, state.all) = (false, frozen, done.is_ok());
            if !state.wanted || !state.all {
                state.thaw(calls);
            }
            shared.ended.notify_all();
        })?;
        (state.running, state.wanted) = (true, true);
        let left = deadline.saturating_duration_since(Instant::now());
        let waited = self.shared.ended.wait_timeout_while(state, left, |state| state.running);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        if state.running {
            state.wanted = false;
        }
        Ok(!state.running && state.all)
    }

    /// Lets them be written to again.
    pub(super) fn thaw(&self) {
        let mut state = self.shared.lock();
        state.wanted = false;
        state.thaw(self.calls);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// The last one first: a file system may be in a file of one that was frozen after it.
    fn thaw(&mut self, calls: FileSystemCalls) {
        self.all = false;
        while let Some(file_system) = self.frozen.pop() {
            if let Err(error) = (calls.thaw)(&file_system) {
                log::error!("cannot thaw a file system: {error}");
            }
        }
    }
}

fn freeze_all(calls: FileSystemCalls, frozen: &mut Vec<File>) -> io::Result<()> {
    for point in mount_points(&(calls.mounts)()?) {
        let file_system = File::open(point)?;
        (calls.freeze)(&file_system)?;
        frozen.push(file_system);
    }
    Ok(())
}

/// A mount point of each file system in a `mountinfo` that is to be frozen, those mounted last first.
fn mount_points(mountinfo: &str) -> Vec<PathBuf> {
    let mut found: Vec<(&str, PathBuf)> = Vec::new();
    for line in mountinfo.lines() {
        let Some((mount, file_system)) = line.split_once(" - ") else { continue };
        let mount: Vec<&str> = mount.split(' ').collect();
        let file_system: Vec<&str> = file_system.split(' ').collect();
        let (&[_, _, device, "/", point, ..], &[kind, _, options]) = (&mount[..], &file_system[..]) else {
            continue;
        };
        let is_writable = options.split(',').any(|option| option == "rw");
        if KINDS.contains(&kind) && is_writable && !found.iter().any(|(known, _)| *known == device) {
            found.push((device, unescaped(point).into()));
        }
    }
    found.into_iter().rev().map(|(_, point)| point).collect()
}

/// A path in a `mountinfo`, which writes some characters as a backslash and three octal digits.
fn unescaped(text: &str) -> String {
    let (mut path, mut rest) = (String::new(), text);
    while let Some((before, after)) = rest.split_once('\\') {
        path.push_str(before);
        match after.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) => {
                path.push(char::from(byte));
                rest = &after[3..];
            }
            None => {
                path.push('\\');
                rest = after;
            }
        }
    }
    path + rest
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicBool, Ordering},
        time::Duration,
    };

    use super::*;

    #[test]
    fn writable_file_systems_of_disks_are_frozen_once_and_in_reverse_order() {
        let mounts = "\
            21 1 254:0 / / rw,noatime - ext4 /dev/vda rw\n\
            22 21 0:5 / /proc rw - proc proc rw\n\
            23 21 0:6 / /run rw,nosuid shared:1 - tmpfs tmpfs rw\n\
            24 21 254:0 /home /mnt rw - ext4 /dev/vda rw\n\
            25 21 254:16 / /data\\040one rw master:2 - xfs /dev/vdb rw,attr2\n\
            26 21 254:16 / /again rw - xfs /dev/vdb rw,attr2\n\
            27 21 254:32 / /fixed ro - ext4 /dev/vdc ro\n\
            28 21 0:40 / /remote rw - fuse.sshfs /dev/fuse rw\n\
            nonsense\n";
        assert_eq!(mount_points(mounts), [PathBuf::from("/data one"), PathBuf::from("/")]);
        assert_eq!(unescaped("a\\x\\134b"), "a\\x\\b");
    }

    /// What the calls of these tests did.
    static LOG: Mutex<Vec<&str>> = Mutex::new(Vec::new());
    static SLOW: AtomicBool = AtomicBool::new(false);
    static FAILS: AtomicBool = AtomicBool::new(false);

    fn taken() -> Vec<&'static str> {
        std::mem::take(&mut LOG.lock().unwrap())
    }

    /// In one test: the log is everyone's.
    #[test]
    fn a_freeze_that_is_late_or_fails_leaves_nothing_frozen() {
        let calls = FileSystemCalls {
            mounts: || Ok("1 1 1:1 / / rw - ext4 a rw\n2 1 1:2 / /tmp rw - ext4 b rw\n".into()),
            freeze: |_| {
                while SLOW.load(Ordering::SeqCst) {
                    thread::sleep(Duration::from_millis(1));
                }
                let mut log = LOG.lock().unwrap();
                if FAILS.load(Ordering::SeqCst) && log.contains(&"freeze") {
                    return Err(io::ErrorKind::Unsupported.into());
                }
                log.push("freeze");
                Ok(())
            },
            thaw: |_| {
                LOG.lock().unwrap().push("thaw");
                Ok(())
            },
        };
        let file_systems = FileSystems::new(calls);
        let soon = || Instant::now() + Duration::from_secs(60);
        assert!(file_systems.freeze_by(soon()).unwrap());
        assert_eq!(taken(), ["freeze", "freeze"]);
        file_systems.thaw();
        file_systems.thaw();
        assert_eq!(taken(), ["thaw", "thaw"]);

        FAILS.store(true, Ordering::SeqCst);
        assert!(!file_systems.freeze_by(soon()).unwrap());
        assert_eq!(taken(), ["freeze", "thaw"]);
        FAILS.store(false, Ordering::SeqCst);

        SLOW.store(true, Ordering::SeqCst);
        assert!(!file_systems.freeze_by(Instant::now()).unwrap());
        assert!(!file_systems.freeze_by(soon()).unwrap(), "one at a time");
        file_systems.thaw();
        SLOW.store(false, Ordering::SeqCst);
        while LOG.lock().unwrap().len() < 4 {
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(taken(), ["freeze", "freeze", "thaw", "thaw"]);
    }
}
