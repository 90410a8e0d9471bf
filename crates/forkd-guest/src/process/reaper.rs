//! The one place where children are waited for.
//!
//! PID 1 inherits every orphan of the guest and has to reap it, but must not take the status of a process
//! that another thread waits for. So one thread waits for all children and hands each status to the thread
//! that registered the pid; no other code in this program calls wait.

use std::{
    collections::HashMap,
    io, mem,
    os::fd::OwnedFd,
    sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError},
    thread,
    time::{Duration, Instant},
};

use crate::log;

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExitStatus {
    Code(i32),
    Signal { number: i32, core_dumped: bool },
}

/// Filled in when a process has ended.
#[derive(Debug, Default)]
pub(crate) struct Exit {
    status: Mutex<Option<ExitStatus>>,
    done: Condvar,
}

impl Exit {
    /// Waits for the end.
    pub(crate) fn wait(&self) -> ExitStatus {
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(status) = *status {
                return status;
            }
            status = self.done.wait(status).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn set(&self, status: ExitStatus) {
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = Some(status);
        self.done.notify_all();
    }
}

/// The registered waiters, by pid. Its lock is held while a child is made or reaped, so that a child can
/// neither end before it is registered nor be signalled after its pid is free for another.
#[derive(Default)]
struct Children {
    waited_for: HashMap<i32, Arc<Exit>>,
    /// Counts the children ever made, so that the thread sees one made while it looked away.
    made: u64,
    /// There is no child at all, known or not.
    none: bool,
}

#[derive(Default)]
struct Reaper {
    children: Mutex<Children>,
    changed: Condvar,
}

static REAPER: OnceLock<Reaper> = OnceLock::new();

/// The reaper; the first call starts its thread.
fn reaper() -> &'static Reaper {
    REAPER.get_or_init(|| {
        let spawned = thread::Builder::new().name("reaper".into()).spawn(|| reaper().run());
        if let Err(error) = spawned {
            log::error!("cannot start the reaper: {error}; ended processes will not be noticed");
        }
        Reaper::default()
    })
}

/// Starts reaping orphans.
pub(crate) fn start() {
    reaper();
}

/// Makes a child with `make`, which returns its pid and pidfd, and registers it.
pub(crate) fn register(
    make: impl FnOnce() -> io::Result<(i32, OwnedFd)>,
) -> io::Result<(i32, OwnedFd, Arc<Exit>)> {
    let mut children = reaper().lock();
    let (pid, pidfd) = make()?;
    let exit = Arc::<Exit>::default();
    children.waited_for.insert(pid, exit.clone());
    children.made += 1;
    reaper().changed.notify_all();
    Ok((pid, pidfd, exit))
}

/// Signals the process group of a registered child. `false` if it has ended.
pub(crate) fn signal_group(pid: i32, signal: i32) -> bool {
    let children = reaper().lock();
    // SAFETY: plain integers. The lock keeps the pid, and so its group, from being another's.
    children.waited_for.contains_key(&pid) && unsafe { libc::kill(-pid, signal) } == 0
}

/// Signals the main thread of a registered child. `false` if it has ended.
pub(crate) fn signal_main_thread(pid: i32, signal: i32) -> bool {
    let children = reaper().lock();
    // SAFETY: plain integers. The lock keeps the pid from being another's.
    children.waited_for.contains_key(&pid)
        && unsafe { libc::syscall(libc::SYS_tgkill, pid, pid, signal) } == 0
}

/// Waits until this process has no children at all; `false` if `limit` is over before.
pub(crate) fn wait_until_childless(limit: Duration) -> bool {
    let until = Instant::now() + limit;
    let mut children = reaper().lock();
    while !children.none {
        let wait = until.saturating_duration_since(Instant::now());
        if wait.is_zero() {
            return false;
        }
        let waited = reaper().changed.wait_timeout(children, wait);
        children = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
    true
}

impl Reaper {
    fn lock(&self) -> MutexGuard<'_, Children> {
        self.children.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        loop {
            let made = self.lock().made;
            match next_ended() {
                Ok(pid) => {
                    let mut children = self.lock();
                    let status = reap(pid);
                    let exit = children.waited_for.remove(&pid);
                    drop(children);
                    if let (Some(exit), Some(status)) = (exit, status) {
                        exit.set(status);
                    }
                }
                // No children: none can come but by being made here, since every orphan descends
                // from one.
                Err(error) if error.raw_os_error() == Some(libc::ECHILD) => {
                    let mut children = self.lock();
                    children.none = true;
                    self.changed.notify_all();
                    while children.made == made {
                        children = self.changed.wait(children).unwrap_or_else(PoisonError::into_inner);
                    }
                    children.none = false;
                }
                Err(_) => {}
            }
        }
    }
}

/// Waits for any child to end and leaves its status where it is.
fn next_ended() -> io::Result<i32> {
    // SAFETY: siginfo_t is plain data for which all zeroes is a valid value.
    let mut info: libc::siginfo_t = unsafe { mem::zeroed() };
    // SAFETY: `info` lives through the call.
    let waited = unsafe { libc::waitid(libc::P_ALL, 0, &raw mut info, libc::WEXITED | libc::WNOWAIT) };
    if waited < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: waitid succeeded, so the fields of a SIGCHLD are filled in.
    Ok(unsafe { info.si_pid() })
}

/// Takes the status of an ended child.
fn reap(pid: i32) -> Option<ExitStatus> {
    let mut status = 0;
    // SAFETY: `status` lives through the call.
    let reaped = unsafe { libc::waitpid(pid, &raw mut status, libc::WNOHANG) };
    if reaped != pid {
        return None;
    }
    Some(if libc::WIFSIGNALED(status) {
        ExitStatus::Signal { number: libc::WTERMSIG(status), core_dumped: libc::WCOREDUMP(status) }
    } else {
        ExitStatus::Code(libc::WEXITSTATUS(status))
    })
}
