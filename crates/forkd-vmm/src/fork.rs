//! `fork(2)`: of a template, which has one thread, and of a VM's process, whose other threads wait.
//!
//! Neither is right at any moment. So neither is a free function: [`SingleThreaded`] is the proof that the
//! process has one thread, and [`Paused`](crate::vm::Paused) that the threads of the VM wait at their gates.
//!
//! A template forks by hand: straight into a cgroup, and with a pidfd that cannot be another process's. The C
//! library's `fork` can do neither. What it does on top is to repair what other threads may have
//! left half done: locks of the heap, of files, of the list of thread stacks. A template has no other
//! threads, so nothing is half done. The C library also remembers the thread's id, which is the parent's
//! in the child from here on; it only uses that to signal oneself and for recursive locks, and nothing
//! here does either.

use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, WaitOptions};

use crate::{Error, Result};

/// Which process this is after a fork.
#[derive(Debug)]
pub enum Forked {
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

/// How long threads that have ended are waited for. Joining a thread returns when it is done with its memory:
/// the kernel counts it a moment longer. KVM's own thread of a VM is in the process, too, and stays until the last
/// descriptor of the VM is closed: a branch that was just forked has copies of them for a moment.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait before the kernel is asked again.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Proof that this process has one thread: the one that holds this.
///
/// ```no_run
/// use forkd_vmm::fork::SingleThreaded;
///
/// let alone = SingleThreaded::check()?;
/// let forked = alone.fork(None)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Without the proof there is no fork:
///
/// ```compile_fail,E0061
/// use forkd_vmm::fork::SingleThreaded;
///
/// let forked = SingleThreaded::fork(None);
/// ```
///
/// Only the check makes one, and other threads cannot get it:
///
/// ```compile_fail,E0423
/// let alone = forkd_vmm::fork::SingleThreaded(std::marker::PhantomData);
/// ```
///
/// ```compile_fail,E0277
/// let alone = forkd_vmm::fork::SingleThreaded::check().unwrap();
/// std::thread::spawn(move || drop(alone));
/// ```
#[derive(Debug)]
pub struct SingleThreaded(PhantomData<*const ()>);

impl SingleThreaded {
    /// Asks the kernel how many threads the process has. More than one, and staying so, is an error.
    pub fn check() -> Result<SingleThreaded> {
        SingleThreaded::check_within(THREAD_EXIT_TIMEOUT)
    }

    fn check_within(patience: Duration) -> Result<SingleThreaded> {
        let deadline = Instant::now() + patience;
        loop {
            match is_single_threaded() {
                Ok(true) => return Ok(SingleThreaded(PhantomData)),
                Ok(false) if Instant::now() < deadline => std::thread::sleep(POLL_INTERVAL),
                Ok(false) => return Err(Error::system("become a template")(several_threads())),
                Err(error) => return Err(Error::system("count the threads of this process")(error)),
            }
        }
    }

    /// Forks. The process is looked at once more: safe code could have started a thread since the check.
    pub fn fork(&self, cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
        if !is_single_threaded()? {
            return Err(several_threads());
        }
        // SAFETY: the kernel has just confirmed that this thread is the only one, and only this one could
        // start another.
        unsafe { clone(cgroup) }
    }
}

/// Whether this process has one thread. The jail has no `/proc` to count them in; but the kernel lets a process
/// take its only thread out of the thread group, which changes nothing, and refuses where there are more.
fn is_single_threaded() -> io::Result<bool> {
    // SAFETY: the call takes an integer, and with this flag it changes nothing.
    if unsafe { libc::unshare(libc::CLONE_THREAD) } == 0 {
        return Ok(true);
    }
    match io::Error::last_os_error() {
        error if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        error => Err(error),
    }
}

fn several_threads() -> io::Error {
    let text = "this process has more than one thread; this is a bug in forkd, please report it";
    io::Error::new(io::ErrorKind::ResourceBusy, text)
}

/// Forks.
///
/// # Safety
///
/// The process has one thread only.
unsafe fn clone(cgroup: Option<BorrowedFd<'_>>) -> io::Result<Forked> {
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
    // everything. With one thread in the process, which the caller promises, that copy is whole (see above).
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size_of_val(&arguments)) };
    match pid {
        0 => Ok(Forked::Child),
        // SAFETY: the call has opened the descriptor and nothing else owns it.
        1.. => Ok(Forked::Parent { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Forks a process that has other threads. Returns the child's process id, or none in the child, where only
/// the calling thread exists. [`Paused::fork`](crate::vm::Paused::fork) is the way here.
///
/// This is the C library's `fork`: with threads there is something to repair, if only its list of their
/// stacks. The child is to be [detached](detach).
///
/// # Safety
///
/// No other thread holds a lock or has anything half done, and none of them goes on before this returns.
pub(crate) unsafe fn fork_beside_threads() -> io::Result<Option<i32>> {
    // One that ends at once must not be gone, and its id another's, before its pidfd is open.
    set_child_signal(libc::SIG_DFL);
    // SAFETY: no other thread holds a lock or has anything half done: the caller promises it. The C library
    // sees to its own. The child goes on here on a copy of everything.
    match unsafe { libc::fork() } {
        0 => Ok(None),
        pid @ 1.. => Ok(Some(pid)),
        _ => {
            let error = io::Error::last_os_error();
            let_kernel_reap();
            Err(error)
        }
    }
}

/// Opens the pidfd of the child that was just forked. How it ends, and how those before it did, is for the
/// owner of the pidfd: the kernel reaps them.
pub(crate) fn detach(pid: i32) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput);
    let opened = pid
        .map_err(io::Error::from)
        .and_then(|pid| Ok(rustix::process::pidfd_open(pid, PidfdFlags::empty())?));
    let_kernel_reap();
    opened
}

/// Has children reaped by the kernel, also those that have ended before this.
fn let_kernel_reap() {
    set_child_signal(libc::SIG_IGN);
    while matches!(rustix::process::wait(WaitOptions::NOHANG), Ok(Some(_))) {}
}

fn set_child_signal(action: libc::sighandler_t) {
    // SAFETY: neither action replaces a handler of this process, which has none for this signal. It fails
    // for no signal that exists.
    unsafe { libc::signal(libc::SIGCHLD, action) };
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    /// What `work` returns in a fork of this process, which has one thread.
    fn in_a_fork(work: fn() -> i32) -> i32 {
        // SAFETY: the C library repairs its own locks, and `work` takes no other.
        match unsafe { libc::fork() } {
            // SAFETY: ends the process without running what belongs to the parent.
            0 => unsafe { libc::_exit(work()) },
            pid => {
                let mut status = 0;
                // SAFETY: the call writes a number.
                assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
                assert!(libc::WIFEXITED(status), "{status:#x}");
                libc::WEXITSTATUS(status)
            }
        }
    }

    #[test]
    fn a_process_with_a_second_thread_gets_no_proof_and_no_fork() {
        let (hold, held) = mpsc::channel::<()>();
        let second = std::thread::spawn(move || held.recv());
        let busy = |error: &io::Error| error.kind() == io::ErrorKind::ResourceBusy;
        let refused = SingleThreaded::check_within(Duration::ZERO).unwrap_err();
        assert!(matches!(&refused, Error::System { source, .. } if busy(source)), "{refused:?}");
        // And one that was made before there was a second thread is worth nothing any more.
        let stale = SingleThreaded(PhantomData);
        assert!(busy(&stale.fork(None).unwrap_err()));
        drop(hold);
        let _ = second.join();
    }

    #[test]
    fn a_process_with_one_thread_gets_a_proof_and_forks() {
        let made = in_a_fork(|| {
            let Ok(alone) = SingleThreaded::check_within(Duration::ZERO) else { return 1 };
            match alone.fork(None) {
                // SAFETY: ends the process without running what belongs to the parent.
                Ok(Forked::Child) => unsafe { libc::_exit(0) },
                Ok(Forked::Parent { .. }) => 0,
                Err(_) => 2,
            }
        });
        assert_eq!(made, 0);
    }

    #[test]
    fn a_thread_that_was_joined_is_waited_for() {
        let made = in_a_fork(|| {
            for _ in 0..200 {
                if std::thread::spawn(|| ()).join().is_err() {
                    return 1;
                }
                if SingleThreaded::check().is_err() {
                    return 2;
                }
            }
            0
        });
        assert_eq!(made, 0);
    }
}
