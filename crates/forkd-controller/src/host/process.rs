//! Processes of the daemon, identified by pid *and* start time, and watched through a pidfd.
//!
//! A pid alone is no identity: it may belong to another process by the time a new daemon reads it.

use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};
use tokio::io::unix::AsyncFd;

use crate::util::records::{self, Found, VersionedRecord};

/// The file in a sandbox's folder that records its process.
pub(crate) const RECORD: &str = "process.json";

/// The identity of a process: no later process with the same pid equals it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    /// The boot of the host in which it started: start times count from there.
    pub(crate) boot: String,
    pub(crate) pid: i32,
    /// In clock ticks since the host's boot.
    pub(crate) start_time: u64,
}

impl ProcessId {
    /// The process recorded in `folder`.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }

    /// The process `pid`, if `parent` forked it and has not reaped it yet.
    pub(crate) fn of_child(pid: i32, parent: i32) -> io::Result<Self> {
        static BOOT: std::sync::LazyLock<String> = std::sync::LazyLock::new(boot_id);
        let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
        if field(&stat, 4) != Some(parent) {
            return Err(io::Error::other(format!("process {pid} is not a child of {parent}")));
        }
        let start_time = start_time(&stat).ok_or(rustix::io::Errno::SRCH)?;
        Ok(ProcessId { boot: BOOT.clone(), pid, start_time })
    }

    /// Records it in `folder`, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        records::write(self, folder)
    }

    /// A pidfd of the process if it still runs. The pidfd refers to this process even after its pid is reused.
    pub(crate) fn open(&self) -> Option<Pidfd> {
        if self.boot != boot_id() {
            return None;
        }
        let pid = Pid::from_raw(self.pid)?;
        let pidfd = Pidfd::open(pid).ok()?;
        // Read after the pidfd was opened: the process that has this pid now is the one of the pidfd.
        let stat = std::fs::read(format!("/proc/{}/stat", self.pid)).ok()?;
        (start_time(&stat)? == self.start_time).then_some(pidfd)
    }
}

impl VersionedRecord for ProcessId {
    const FILE: &'static str = RECORD;
}

/// The host's current boot.
pub(crate) fn boot_id() -> String {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default().trim().to_owned()
}

/// Writes the calling process's [`ProcessId`] to `record`. Called between `fork` and `exec`, where threads that
/// no longer exist may hold the program's locks: it allocates nothing.
pub(crate) fn record_self(boot: &str, record: BorrowedFd<'_>) -> io::Result<()> {
    let stat = rustix::fs::open(c"/proc/self/stat", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
    let mut bytes = [0u8; 1024];
    let len = rustix::io::read(&stat, &mut bytes)?;
    let start = start_time(&bytes[..len]).ok_or(rustix::io::Errno::INVAL)?;
    let pid = rustix::process::getpid().as_raw_nonzero();
    let mut text = [0u8; 160];
    let mut rest = &mut text[..];
    let version = ProcessId::VERSION;
    write!(rest, r#"{{"version":{version},"boot":"{boot}","pid":{pid},"start_time":{start}}}"#)?;
    let unused = rest.len();
    let used = text.len() - unused;
    rustix::io::write(record, &text[..used])?;
    Ok(())
}

/// The parent of process `pid`.
pub(crate) fn parent(pid: i32) -> Option<i32> {
    field(&std::fs::read(format!("/proc/{pid}/stat")).ok()?, 4)
}

/// The pidfd of its child `pid` that process `parent` sent. A monitor that its guest broke into could send the
/// pidfd of any process and make the daemon kill that one. So the daemon checks it before use.
pub(crate) fn child_pidfd(pidfd: OwnedFd, pid: i32, parent: i32) -> io::Result<OwnedFd> {
    let info = format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd());
    // Twice: the process may end and be reaped between the two reads.
    for _ in 0..2 {
        let text = std::fs::read_to_string(&info)?;
        let meant = text.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse::<i32>().ok());
        let ended = meant == Some(-1);
        if ended || (meant == Some(pid) && self::parent(pid) == Some(parent)) {
            return Ok(pidfd);
        }
    }
    Err(io::Error::other(format!("the descriptor sent for process {pid} is not one of a child of {parent}")))
}

/// The user that process `pid` runs as.
pub(crate) fn uid(pid: i32) -> Option<u32> {
    // Not the owner of its folder in `/proc`: that is root for processes that cannot be dumped.
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("Uid:")?.split_whitespace().next()?.parse().ok())
}

/// The page map of process `pid`, to be passed into the jail: it shows which pages are present, not their place in
/// the host's memory. The kernel checks CAP_SYS_ADMIN when the file is opened, not when it is read. So a thread
/// gives up this capability, opens the file and ends. Blocks.
pub(crate) fn pagemap(pid: i32) -> io::Result<std::fs::File> {
    let open = move || {
        let mut own = rustix::thread::capabilities(None)?;
        own.effective.remove(CapabilitySet::SYS_ADMIN);
        rustix::thread::set_capabilities(None, own)?;
        std::fs::File::open(format!("/proc/{pid}/pagemap"))
    };
    let thread = std::thread::Builder::new().spawn(open)?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("the thread that opens a page map failed")))
}

/// How long process `pid`, which has one thread, ran on the host's CPUs.
pub(crate) fn cpu_time(pid: i32) -> Option<Duration> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/schedstat")).ok()?;
    text.split_whitespace().next()?.parse().ok().map(Duration::from_nanos)
}

/// Moves a process from idle scheduling (only CPU time that no other process wants) to the usual share.
pub(crate) fn give_share(pid: i32) {
    let no_priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the call reads a struct that lives as long. If there is no such process, the call does nothing.
    unsafe { libc::sched_setscheduler(pid, libc::SCHED_OTHER, &raw const no_priority) };
}

/// The start time in a `/proc/PID/stat`.
fn start_time(stat: &[u8]) -> Option<u64> {
    field(stat, 22)
}

/// A field of `/proc/PID/stat`, counted from 1. Only fields after the second: that one is the command's name in
/// parentheses, which may contain any character.
pub(crate) fn field<T: std::str::FromStr>(stat: &[u8], number: usize) -> Option<T> {
    let name_end = stat.iter().rposition(|&byte| byte == b')')?;
    let field = stat.get(name_end + 2..)?.split(|&byte| byte == b' ').nth(number.checked_sub(3)?)?;
    std::str::from_utf8(field).ok()?.parse().ok()
}

/// A pidfd: it refers to the same process even after its pid is reused.
#[derive(Debug)]
pub(crate) struct Pidfd(AsyncFd<OwnedFd>);

impl Pidfd {
    /// Call it while `pid` cannot be reused (a child that is not reaped), or check the process afterwards.
    pub(crate) fn open(pid: Pid) -> io::Result<Self> {
        Pidfd::new(pidfd_open(pid, PidfdFlags::NONBLOCK)?)
    }

    /// Takes a pidfd that another process opened.
    pub(crate) fn new(pidfd: OwnedFd) -> io::Result<Self> {
        // SAFETY: an `OwnedFd` is the same open descriptor as long as it lives.
        Ok(Pidfd(unsafe { AsyncFd::register(pidfd) }?))
    }

    /// The process, for calls that take a descriptor.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.get_ref().as_fd()
    }

    pub(crate) fn kill(&self) -> io::Result<()> {
        match pidfd_send_signal(self.as_fd(), Signal::KILL) {
            Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Returns when the process has ended. Cancel-safe.
    pub(crate) async fn ended(&self) -> io::Result<()> {
        // A pidfd stays readable from then on.
        self.0.readable().await.map(|_| ())
    }

    /// Kills the process and waits until it has ended, without limit. Logs an error every ten seconds.
    pub(crate) async fn end(&self, whose: &str) {
        loop {
            if let Err(error) = self.kill() {
                tracing::error!(sandbox = whose, %error, "monitor not killed: trying again");
            }
            match tokio::time::timeout(Duration::from_secs(10), self.ended()).await {
                Ok(Ok(())) => return,
                Ok(Err(error)) => {
                    tracing::error!(
                        sandbox = whose, %error, fd = self.0.as_raw_fd(),
                        "monitor watch failed: trying again"
                    );
                    tokio::time::sleep(Duration::from_secs(10)).await;
                }
                Err(_) => tracing::error!(sandbox = whose, "killed monitor has not ended yet: waiting"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_start_time_is_found_whatever_the_process_calls_itself() {
        let stat = b"7 (a) b (c) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 98765 1 2 3";
        assert_eq!(start_time(stat), Some(98765));
        for bad in [&b""[..], b"7 (x", b"7 (x) S 1", b")"] {
            assert_eq!(start_time(bad), None);
        }
    }

    #[tokio::test]
    async fn a_recorded_process_is_found_again_and_a_later_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let record = std::fs::File::create(folder.path().join(RECORD)).unwrap();
        record_self(&boot_id(), record.as_fd()).unwrap();
        let identity = ProcessId::read(folder.path()).read().unwrap();
        assert_eq!(identity.pid, std::process::id() as i32);
        assert!(identity.open().is_some());
        let other = ProcessId { start_time: identity.start_time + 1, ..identity.clone() };
        assert!(other.open().is_none());
        let earlier = ProcessId { boot: "another boot".into(), ..identity };
        assert!(earlier.open().is_none());
    }

    #[test]
    fn a_template_cannot_pass_another_process_off_as_its_child() {
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let (pid, us) = (child.id() as i32, std::process::id() as i32);
        assert_eq!(ProcessId::of_child(pid, us).unwrap().pid, pid);
        assert!(ProcessId::of_child(pid, 1).is_err());
        assert!(ProcessId::of_child(us, pid).is_err());
        let open = |pid| pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        child_pidfd(open(pid), pid, us).unwrap();
        assert!(child_pidfd(open(us), us, us).is_err());
        assert!(child_pidfd(open(us), pid, us).is_err(), "another's under the child's number");
        assert!(child_pidfd(std::fs::File::open("/").unwrap().into(), pid, us).is_err());
        let last = open(pid);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(ProcessId::of_child(pid, us).is_err());
        child_pidfd(last, pid, us).unwrap();
    }

    #[test]
    fn a_page_map_for_the_jail_shows_pages_and_not_where_they_are() {
        use std::os::unix::fs::FileExt;
        let mut child = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        let pid = child.id() as i32;
        // The stack of a running process has pages.
        let entries = |map: &std::fs::File| -> Vec<u64> {
            let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
            let stack = maps.lines().find(|line| line.ends_with("[stack]")).unwrap();
            let (start, rest) = stack.split_once('-').unwrap();
            let address = |text| u64::from_str_radix(text, 16).unwrap();
            let (start, end) = (address(start), address(rest.split_once(' ').unwrap().0));
            let mut bytes = vec![0; ((end - start) / 4096 * 8) as usize];
            map.read_exact_at(&mut bytes, start / 4096 * 8).unwrap();
            bytes.chunks_exact(8).map(|entry| u64::from_le_bytes(entry.try_into().unwrap())).collect()
        };
        let (present, frame) = (1 << 63, (1 << 55) - 1);
        let shown = entries(&std::fs::File::open(format!("/proc/{pid}/pagemap")).unwrap());
        if shown.iter().all(|entry| entry & frame == 0) {
            eprintln!("NOT RUN: frame numbers are not shown to this user anyway");
        }
        let handed = entries(&pagemap(pid).unwrap());
        assert!(handed.iter().all(|entry| entry & frame == 0), "{handed:x?}");
        assert!(handed.iter().any(|entry| entry & present != 0), "{handed:x?}");
        let still = rustix::thread::capabilities(None).unwrap();
        let root = rustix::process::geteuid().is_root();
        assert!(!root || still.effective.contains(still.permitted), "the calling thread keeps what it has");
        child.kill().unwrap();
        child.wait().unwrap();
    }

    #[test]
    fn a_damaged_record_names_no_process() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(ProcessId::read(folder.path()), Found::Missing);
        std::fs::write(folder.path().join(RECORD), b"{\"pid\":").unwrap();
        assert!(matches!(ProcessId::read(folder.path()), Found::Unreadable(_)));
    }
}
