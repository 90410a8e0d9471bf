//! The children of a template: the living ones, and how the others ended.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use forkd_protocol::control::{Child, MAX_CHILD_NAME, MAX_MESSAGE, WaitStatus};
use rustix::process::WaitOptions;

use crate::{Error, Result};

/// The size of an entry of the list in a message, besides its name: more than the longest there is.
const ENTRY: usize = 64;

/// The children that are alive or whose end was not acknowledged, in the order they were forked.
#[derive(Debug, Default)]
pub(super) struct Children {
    list: Vec<Child>,
}

impl Children {
    /// Whether a child may get this name. Names come back in messages: the list of all must fit one.
    pub(super) fn check_name(&self, name: &str) -> Result<()> {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
        if name.is_empty() || name.len() > MAX_CHILD_NAME || !name.bytes().all(plain) {
            return Err(Error::Config(format!(
                "a child's name has 1 to {MAX_CHILD_NAME} letters, digits, '-', '_' or '.'; {name:?} is none"
            )));
        }
        if self.list.iter().any(|child| child.name == name) {
            return Err(Error::Config(format!(
                "there is a child {name} already, or its end was not acknowledged"
            )));
        }
        let taken: usize = self.list.iter().map(|child| child.name.len() + ENTRY).sum();
        if taken + name.len() + 2 * ENTRY > MAX_MESSAGE {
            return Err(Error::Config(format!(
                "this template has {} children, which is all it can keep track of; load another one",
                self.list.len()
            )));
        }
        Ok(())
    }

    /// Takes a new child into the list.
    pub(super) fn add(&mut self, name: String, pid: i32) {
        self.list.push(Child { name, pid, status: None });
    }

    /// All of them.
    pub(super) fn list(&self) -> &[Child] {
        &self.list
    }

    /// Removes those of `names` that have ended.
    pub(super) fn acknowledge(&mut self, names: &[String]) {
        self.list.retain(|child| child.status.is_none() || !names.contains(&child.name));
    }

    /// Takes the status of every child that has ended since the last time; returns its name and status.
    pub(super) fn reap(&mut self) -> Vec<(String, WaitStatus)> {
        let mut ended = Vec::new();
        // It fails when there are no children left.
        while let Ok(Some((pid, status))) = rustix::process::wait(WaitOptions::NOHANG) {
            let how = match (status.exit_status(), status.terminating_signal()) {
                (Some(code), _) => WaitStatus::Exited(code),
                (None, Some(signal)) => WaitStatus::Signaled(signal),
                (None, None) => continue,
            };
            let pid = pid.as_raw_nonzero().get();
            // A process id is only free again once it was waited for: no two living entries share one.
            let alive = self.list.iter_mut().find(|child| child.pid == pid && child.status.is_none());
            if let Some(child) = alive {
                child.status = Some(how);
                ended.push((child.name.clone(), how));
            }
        }
        ended
    }
}

/// A descriptor that is readable when a child has ended. While this exists, SIGCHLD is blocked.
#[derive(Debug)]
pub(super) struct ChildSignal {
    fd: OwnedFd,
    previous: libc::sigset_t,
}

impl ChildSignal {
    pub(super) fn new() -> Result<ChildSignal> {
        let failed = || Error::system("watch for the ends of children")(io::Error::last_os_error());
        // The parent of this process may have ignored it, which is inherited: then no signal would come, and
        // the exit status would be lost.
        // SAFETY: the default action replaces no handler of this process, which has none for this signal.
        if unsafe { libc::signal(libc::SIGCHLD, libc::SIG_DFL) } == libc::SIG_ERR {
            return Err(failed());
        }
        let mut set = MaybeUninit::uninit();
        let mut previous = MaybeUninit::uninit();
        // SAFETY: the first call fills in the set, which then holds a valid signal; the last one fills in
        // what it replaces. All pointers are to values that live through the calls.
        let fd = unsafe {
            libc::sigemptyset(set.as_mut_ptr());
            libc::sigaddset(set.as_mut_ptr(), libc::SIGCHLD);
            if libc::pthread_sigmask(libc::SIG_BLOCK, set.as_ptr(), previous.as_mut_ptr()) != 0 {
                return Err(failed());
            }
            libc::signalfd(-1, set.as_ptr(), libc::SFD_CLOEXEC | libc::SFD_NONBLOCK)
        };
        if fd < 0 {
            return Err(failed());
        }
        // SAFETY: the descriptor was just opened and nothing else owns it; the set was filled in above.
        Ok(unsafe { ChildSignal { fd: OwnedFd::from_raw_fd(fd), previous: previous.assume_init() } })
    }

    /// Clears the signals so far. To be called before the children are reaped: a child that ends in between
    /// signals again.
    pub(super) fn clear(&self) {
        let mut buffer = [0u8; size_of::<libc::signalfd_siginfo>()];
        while rustix::io::read(&self.fd, &mut buffer).is_ok_and(|count| count > 0) {}
    }
}

impl AsFd for ChildSignal {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Drop for ChildSignal {
    fn drop(&mut self) {
        // SAFETY: the set is one the kernel gave; the old value is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.previous, std::ptr::null_mut()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_and_unique_until_acknowledged() {
        let mut children = Children::default();
        for name in ["", "a b", "a\"b", "ä", &"x".repeat(MAX_CHILD_NAME + 1)] {
            assert!(children.check_name(name).is_err(), "{name}");
        }
        children.check_name("sb1").unwrap();
        children.add("sb1".into(), 7);
        assert!(children.check_name("sb1").is_err());
        children.acknowledge(&["sb1".into()]);
        assert!(children.check_name("sb1").is_err(), "it is alive");
        children.list[0].status = Some(WaitStatus::Exited(0));
        assert!(children.check_name("sb1").is_err(), "not acknowledged");
        children.acknowledge(&["sb1".into()]);
        children.check_name("sb1").unwrap();
    }

    #[test]
    fn the_list_always_fits_a_message() {
        let mut children = Children::default();
        let name = |index: usize| format!("{index:0>MAX_CHILD_NAME$}");
        let mut count = 0;
        while children.check_name(&name(count)).is_ok() {
            children.add(name(count), i32::MIN);
            count += 1;
        }
        children.list.iter_mut().for_each(|child| child.status = Some(WaitStatus::Signaled(i32::MIN)));
        let reply = forkd_protocol::control::Message::Reply(forkd_protocol::control::Reply::Children {
            children: children.list.clone(),
        });
        let length = serde_json::to_vec(&reply).unwrap().len();
        assert!(length <= MAX_MESSAGE, "{count} children take {length} bytes");
        assert!(count >= 1000, "only {count} children fit");
    }
}
