//! Whom the kernel kills first when the host has no memory left.
//!
//! By itself the kernel takes the process with the most memory: a template, which maps all of its guest's. But
//! its pages are its children's, too, so its death frees little and takes a snapshot out of memory. So each
//! process has a score for its role. A fork inherits the score of its parent: the daemon corrects it when
//! the fork has a role of its own. The jail of a monitor has no `/proc`, so the daemon writes it.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::BorrowedFd;
use std::sync::Once;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};

/// What a process is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Role {
    /// Without it the rest cannot be reached.
    Daemon,
    /// Others share what it holds.
    Template,
    /// Its work can be done again.
    Saver,
    /// Its memory is its own: its death frees most.
    Sandbox,
}

impl Role {
    /// Its `oom_score_adj`: thousandths of the host's memory that are added to what the process has.
    const fn score(self) -> &'static str {
        match self {
            Role::Daemon => "-900",
            Role::Template => "-500",
            Role::Saver => "0",
            Role::Sandbox => "300",
        }
    }
}

/// Has the kernel spare the daemon. A score that is lower already stays.
pub(crate) fn spare_daemon() {
    const OWN: &str = "/proc/self/oom_score_adj";
    let known = |text: &str| text.trim().parse::<i32>().ok();
    let now = std::fs::read_to_string(OWN).ok().and_then(|text| known(&text));
    if now > known(Role::Daemon.score()) {
        note(File::options().write(true).open(OWN), Role::Daemon);
    }
}

/// Gives the process `pid`, which is the one behind `pidfd`, the score of its role. One that has ended needs none.
pub(crate) fn set(pid: i32, pidfd: BorrowedFd<'_>, role: Role) {
    let file = File::options().write(true).open(format!("/proc/{pid}/oom_score_adj"));
    // Looked at after the file was opened: if the process lives, the file is its own.
    if has_ended(pidfd) {
        return;
    }
    note(file, role);
}

/// Gives the calling process the score of a sandbox. For between `fork` and `exec`: system calls, nothing else.
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

/// Writes the score. The first time that the daemon may not, it says so.
fn note(file: io::Result<File>, role: Role) {
    static TOLD: Once = Once::new();
    let written = file.and_then(|mut file| file.write_all(role.score().as_bytes()));
    match written {
        // It ended meanwhile.
        Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
        Err(error) => TOLD.call_once(|| {
            tracing::warn!(
                %error, ?role,
                "cannot tell the kernel whom to kill last when memory runs out; run the daemon as root with \
                 CAP_SYS_RESOURCE"
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
        // Scores that need no privilege: they are above the test's own.
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let mut other = Command::new("sleep").arg("1000").spawn().unwrap();
        let before = score(other.id());
        let open = |pid: u32| Pidfd::open(rustix::process::Pid::from_raw(pid as i32).unwrap()).unwrap();
        let pidfd = open(child.id());
        set(child.id() as i32, pidfd.as_fd(), Role::Sandbox);
        assert_eq!(score(child.id()), Role::Sandbox.score());
        child.kill().unwrap();
        child.wait().unwrap();
        // As if the number of the first were the second's now.
        set(other.id() as i32, pidfd.as_fd(), Role::Sandbox);
        assert_eq!(score(other.id()), before);
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
