//! `fork(2)` by hand: straight into a cgroup, and with a pidfd that cannot be somebody else's.
//!
//! The C library's `fork` can do neither. What it does on top is to repair what other threads may have
//! left half done: locks of the heap, of files, of the list of thread stacks. A template has no other
//! threads, so nothing is half done. The C library also remembers the thread's id, which is the parent's
//! in the child from here on; it only uses that to signal oneself and for recursive locks, and nothing
//! here does either.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Who is who after a fork.
#[derive(Debug)]
pub(super) enum Forked {
    /// The new process.
    Child,
    /// The old one.
    Parent {
        /// The child's process id.
        pid: i32,
        /// The child, whatever becomes of its id.
        pidfd: OwnedFd,
    },
}

/// As in `linux/sched.h`; the C bindings cut it off.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// Forks. The process must have one thread only.
pub(super) fn fork(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
    let mut pidfd: libc::c_int = -1;
    // SAFETY: all zero is a valid value of this struct of numbers.
    let mut arguments: libc::clone_args = unsafe { std::mem::zeroed() };
    arguments.flags = libc::CLONE_PIDFD as u64;
    arguments.pidfd = (&raw mut pidfd) as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        arguments.flags |= CLONE_INTO_CGROUP;
        arguments.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and without a stack this is a fork: the child goes on here, on a copy of
    // everything. With one thread in the process that copy is whole (see above).
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) };
    match pid {
        0 => Ok(Forked::Child),
        // SAFETY: the call has opened the descriptor and nobody else owns it.
        1.. => Ok(Forked::Parent { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }),
        _ => Err(io::Error::last_os_error()),
    }
}
