//! The order in which the kernel kills processes when the host runs out of memory.
//!
//! By default the kernel kills the process with the most memory: a template, which maps all of its guest's memory.
//! But its children share its pages, so its death frees little, and a snapshot is no longer loaded. So each process
//! has a score for its role. A fork inherits its parent's score; the daemon corrects it when the fork has another
//! role. It does so itself, because a monitor's jail has no `/proc`.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::Once;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};

/// The role of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// All other processes depend on it.
    Daemon,
    /// Its children share its memory.
    Template,
    /// Its work can be done again.
    Saver,
    /// Only it has its memory: its death frees most.
    Sandbox,
}

impl Role {
    /// Its `oom_score_adj`: thousandths of the host's memory, added to the memory of the process.
    const fn score(self) -> &'static str {
        match self {
            Role::Daemon => "-900",
            Role::Template => "-500",
            Role::Saver => "0",
            Role::Sandbox => "300",
        }
    }
}

/// Lowers the daemon's own score. A lower score stays.
pub(crate) fn spare_daemon() {
    const OWN: &str = "/proc/self/oom_score_adj";
    let known = |text: &str| text.trim().parse::<i32>().ok();
    let now = std::fs::read_to_string(OWN).ok().and_then(|text| known(&text));
    if now > known(Role::Daemon.score()) {
        note(File::options().write(true).open(OWN), Role::Daemon);
    }
}

/// Sets the score of process `pid`, the one behind `pidfd`, to that of its role. Skips a process that has ended.
pub(crate) fn set(pid: i32, pidfd: BorrowedFd<'_>, role: Role) {
    let file = File::options().write(true).open(format!("/proc/{pid}/oom_score_adj"));
    // Checked after the file was opened: if the process still runs, the file is its own.
    if has_ended(pidfd) {
        return;
    }
    note(file, role);
}

/// Gives the calling process the score of a sandbox. For use between `fork` and `exec`: system calls only.
pub(crate) fn join_sandboxes() -> io::Result<()> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
    rustix::io::write(&file, Role::Sandbox.score().as_bytes())?;
    Ok(())
}

fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut fds = [PollFd::from_borrowed_fd(pidfd, PollFlags::IN)];
    !matches!(rustix::event::poll(&mut fds, Some(&Timespec::default())), Ok(0))
}

/// Writes the score. Logs a missing permission once.
fn note(file: io::Result<File>, role: Role) {
    static TOLD: Once = Once::new();
    let written = file.and_then(|mut file| file.write_all(role.score().as_bytes()));
    match written {
        // The process ended meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        Err(error) => TOLD.call_once(|| {
            tracing::warn!(
                %error, ?role,
                "order of kills on memory exhaustion not set; run the daemon as root with CAP_SYS_RESOURCE"
            );
        }),
        Ok(()) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::process::Pidfd;
    use std::process::Command;

    fn score(pid: u32) -> String {
        std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().to_owned()
    }

    #[tokio::test]
    async fn a_process_gets_the_score_of_its_role_and_no_other_process_does() {
        // Scores that need no privilege: higher than the test's own.
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let before = score(other.id());
        let open = |pid: u32| Pidfd::open(rustix::process::Pid::from_raw(pid as i32).unwrap()).unwrap();
        let pidfd = open(child.id());
        set(child.id() as i32, pidfd.as_fd(), Role::Sandbox);
        assert_eq!(score(child.id()), Role::Sandbox.score());
        child.kill().unwrap();
        child.wait().unwrap();
        // As if the second process had the reused pid of the first.
        set(other.id() as i32, pidfd.as_fd(), Role::Sandbox);
        assert_eq!(score(other.id()), before);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
