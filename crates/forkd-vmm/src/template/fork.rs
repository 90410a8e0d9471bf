//! `fork(2)`, in a template and in a VM's process.
//!
//! A template forks by hand: straight into a cgroup, and with a pidfd that cannot be somebody else's. The C
//! library's `fork` can do neither. What it does on top is to repair what other threads may have
//! left half done: locks of the heap, of files, of the list of thread stacks. A template has no other
//! threads, so nothing is half done. The C library also remembers the thread's id, which is the parent's
//! in the child from here on; it only uses that to signal oneself and for recursive locks, and nothing
//! here does either.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};

use rustix::process::WaitOptions;

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

/// Forks a process whose other threads all wait at their gates. Returns the child's process id, or none in
/// the child, where only the calling thread exists.
///
/// This is the C library's `fork`: with threads there is something to repair, if only its list of their
/// stacks. The child is to be [let go](let_go) of.
pub(crate) fn fork_beside_threads() -> io::Result<Option<i32>> {
    // One that ends at once must not be gone, and its id another's, before somebody has hold of it.
    set_child_signal(libc::SIG_DFL);
    // SAFETY: no other thread holds a lock or has anything half done, and the C library sees to its own. The
    // child goes on here on a copy of everything.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        pid @ 1.. => Ok(Some(pid)),
        _ => {
            let error = io::Error::last_os_error();
            forget_children();
            Err(error)
        }
    }
}

/// Gets hold of the child that was just forked. How it ends, and how those before it did, is for whoever has
/// hold of it: the kernel reaps them.
pub(crate) fn let_go(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes two integers.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let opened = if pidfd < 0 {
        Err(io::Error::last_os_error())
    } else {
        // SAFETY: the call has opened the descriptor and nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(pidfd as RawFd) })
    };
    forget_children();
    opened
}

/// Has children reaped by the kernel, also those that have ended before this.
fn forget_children() {
    set_child_signal(libc::SIG_IGN);
    while matches!(rustix::process::wait(WaitOptions::NOHANG), Ok(Some(_))) {}
}

fn set_child_signal(action: libc::sighandler_t) {
    // SAFETY: neither action replaces a handler of this process, which has none for this signal. It fails
    // for no signal that exists.
    unsafe { libc::signal(libc::SIGCHLD, action) };
}
