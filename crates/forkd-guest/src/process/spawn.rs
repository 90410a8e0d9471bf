//! Starting a program as a user, in a session of its own.
//!
//! Not `std::process`: its children wait for themselves, which PID 1's reaper must not allow, and it
//! cannot start a process inside a cgroup. Between `clone3` and `execve` the child shares nothing
//! with the other threads but a frozen copy of the memory, in which any lock may be held for ever:
//! it makes plain system calls on what was prepared before, and allocates nothing.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString},
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::Path,
    ptr,
    sync::Arc,
};

use rustix::pipe::PipeFlags;

use super::reaper::{self, Exit};
use crate::users::User;

/// Descriptors handed to a child are moved above this first, so that putting one in its place never
/// overwrites another that still waits for its own.
const FIRST_FREE: RawFd = 16;

/// Bit 33 of `clone3`'s flags: too wide for libc's constant.
const CLONE_INTO_CGROUP: u64 = 1 << 33;

/// The program to start.
pub(crate) struct Program<'p> {
    pub(crate) cmd: &'p str,
    pub(crate) args: &'p [String],
    pub(crate) env: &'p BTreeMap<String, String>,
    pub(crate) cwd: &'p Path,
    /// Start in `/` if `cwd` cannot be entered.
    pub(crate) cwd_may_be_missing: bool,
    pub(crate) user: &'p User,
    /// Descriptors the program gets as 0, 1, 2 and so on. Fewer than [`FIRST_FREE`].
    pub(crate) fds: Vec<OwnedFd>,
    /// Descriptor 0 is a terminal and becomes the one that controls the session.
    pub(crate) terminal: bool,
    pub(crate) cgroup: Option<BorrowedFd<'p>>,
}

/// A started program.
#[derive(Debug)]
pub(crate) struct Child {
    pub(crate) pid: i32,
    /// Readable when it has ended.
    pub(crate) pidfd: OwnedFd,
    pub(crate) exit: Arc<Exit>,
}

/// Why a program did not start.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SpawnError {
    /// An argument, variable or path holds a NUL byte.
    #[error("arguments, variables and paths cannot hold a NUL byte")]
    Nul,
    /// The working directory cannot be entered.
    #[error("cannot enter the working directory: {0}")]
    Cwd(io::Error),
    /// The program cannot be executed.
    #[error("cannot execute the program: {0}")]
    Exec(io::Error),
    /// The guest cannot start anything now.
    #[error("cannot start a process: {0}")]
    System(io::Error),
}

/// The step that failed in the child, which it reports together with the error number.
#[derive(Clone, Copy)]
#[repr(u8)]
enum Step {
    Setup = 0,
    Cwd = 1,
    Exec = 2,
}

/// Everything the child needs, in the form system calls take.
struct Prepared {
    /// The program's path, or one for each folder of `PATH`.
    candidates: Vec<CString>,
    argv: Vec<*const libc::c_char>,
    envp: Vec<*const libc::c_char>,
    /// The strings that `argv` and `envp` point into.
    _strings: Vec<CString>,
    cwd: CString,
    cwd_may_be_missing: bool,
    fds: Vec<OwnedFd>,
    terminal: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    report: OwnedFd,
}

/// Starts a program and waits until it runs.
pub(crate) fn spawn(program: Program) -> Result<Child, SpawnError> {
    let (failure, report) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(system)?;
    let cgroup = program.cgroup;
    let prepared = prepare(program, report)?;
    let (pid, pidfd, exit) =
        reaper::register(|| clone_child(&prepared, cgroup)).map_err(SpawnError::System)?;
    // The child has its own copies; ours would keep the pipes open.
    drop(prepared);

    let mut message = [0; 5];
    let n = rustix::io::retry_on_intr(|| rustix::io::read(&failure, &mut message)).map_err(system)?;
    if n < message.len() {
        // The pipe closed with the successful execve, or with the death of the child, which its waiter then
        // reports.
        return Ok(Child { pid, pidfd, exit });
    }
    exit.wait();
    let [step, errno @ ..] = message;
    let error = io::Error::from_raw_os_error(i32::from_ne_bytes(errno));
    Err(match step {
        step if step == Step::Cwd as u8 => SpawnError::Cwd(error),
        step if step == Step::Exec as u8 => SpawnError::Exec(error),
        _ => SpawnError::System(error),
    })
}

fn system(errno: rustix::io::Errno) -> SpawnError {
    SpawnError::System(errno.into())
}

fn prepare(program: Program, report: OwnedFd) -> Result<Prepared, SpawnError> {
    let c_string = |text: &str| CString::new(text).map_err(|_| SpawnError::Nul);
    let candidates = if program.cmd.contains('/') {
        vec![c_string(program.cmd)?]
    } else {
        let path = program.env.get("PATH").map_or("", String::as_str);
        let folders = path.split(':').filter(|folder| !folder.is_empty());
        folders.map(|folder| c_string(&format!("{folder}/{}", program.cmd))).collect::<Result<_, _>>()?
    };
    let mut strings = vec![c_string(program.cmd)?];
    for arg in program.args {
        strings.push(c_string(arg)?);
    }
    for (name, value) in program.env {
        strings.push(c_string(&format!("{name}={value}"))?);
    }
    let (args, vars) = strings.split_at(1 + program.args.len());
    let pointers = |strings: &[CString]| -> Vec<*const libc::c_char> {
        strings.iter().map(|s| s.as_ptr()).chain([ptr::null()]).collect()
    };
    let (argv, envp) = (pointers(args), pointers(vars));
    let lift = |fd: OwnedFd| rustix::io::fcntl_dupfd_cloexec(fd, FIRST_FREE).map_err(system);
    Ok(Prepared {
        candidates,
        argv,
        envp,
        _strings: strings,
        cwd: c_string(&program.cwd.to_string_lossy())?,
        cwd_may_be_missing: program.cwd_may_be_missing,
        fds: program.fds.into_iter().map(lift).collect::<Result<_, _>>()?,
        terminal: program.terminal,
        uid: program.user.uid,
        gid: program.user.gid,
        groups: program.user.groups.clone(),
        report: lift(report)?,
    })
}

fn clone_child(prepared: &Prepared, cgroup: Option<BorrowedFd>) -> io::Result<(i32, OwnedFd)> {
    let mut pidfd: RawFd = -1;
    // SAFETY: clone_args is plain data for which all zeroes is a valid value.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    args.flags = libc::CLONE_PIDFD as u64;
    args.pidfd = (&raw mut pidfd) as u64;
    args.exit_signal = libc::SIGCHLD as u64;
    if let Some(cgroup) = cgroup {
        // The child starts in the cgroup: moving a process afterwards waits for every CPU of the guest.
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM this is a fork: the child goes on with a copy of the memory. It only
    // runs `run_child`, which keeps to what is allowed there and never returns.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw mut args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => {
            // SAFETY: this is the child.
            unsafe { run_child(prepared) }
        }
        // SAFETY: clone3 succeeded and put a descriptor of our own into `pidfd`.
        pid => Ok((pid as i32, unsafe { OwnedFd::from_raw_fd(pidfd) })),
    }
}

/// The child's whole life before it is another program.
///
/// # Safety
///
/// Only to be called in a freshly forked child. Everything here must be async-signal-safe.
unsafe fn run_child(prepared: &Prepared) -> ! {
    // SAFETY: as promised by the caller; every pointer is into `prepared`, which outlives the calls.
    unsafe {
        let (step, errno) = become_program(prepared);
        let mut message = [step as u8, 0, 0, 0, 0];
        message[1..].copy_from_slice(&errno.to_ne_bytes());
        libc::write(prepared.report.as_raw_fd(), message.as_ptr().cast(), message.len());
        libc::_exit(127)
    }
}

/// Returns only if something failed.
///
/// # Safety
///
/// As for [`run_child`].
unsafe fn become_program(prepared: &Prepared) -> (Step, i32) {
    // SAFETY: async-signal-safe calls on prepared memory, in a child that has one thread. Ids are
    // set by raw system calls: libc's functions would look for the threads of the parent.
    unsafe {
        let failed = |step| (step, *libc::__errno_location());
        if libc::setsid() < 0 {
            return failed(Step::Setup);
        }
        for (place, fd) in prepared.fds.iter().enumerate() {
            if libc::dup2(fd.as_raw_fd(), place as RawFd) < 0 {
                return failed(Step::Setup);
            }
        }
        if prepared.terminal && libc::ioctl(0, libc::TIOCSCTTY, 0) < 0 {
            return failed(Step::Setup);
        }
        forget_agents_privileges();
        let groups = (prepared.groups.len(), prepared.groups.as_ptr());
        let (uid, gid) = (prepared.uid, prepared.gid);
        // The user last: after it the rest would not be allowed any more.
        if libc::syscall(libc::SYS_setgroups, groups.0, groups.1) < 0
            || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
            || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
        {
            return failed(Step::Setup);
        }
        // As the user: a folder it may not enter is not one it can start in.
        if libc::chdir(prepared.cwd.as_ptr()) < 0
            && !(prepared.cwd_may_be_missing && libc::chdir(c"/".as_ptr()) == 0)
        {
            return failed(Step::Cwd);
        }
        let first = prepared.fds.len() as libc::c_uint;
        libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
        let mut denied = false;
        for candidate in &prepared.candidates {
            libc::execve(candidate.as_ptr(), prepared.argv.as_ptr(), prepared.envp.as_ptr());
            match *libc::__errno_location() {
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => denied = true,
                errno => return (Step::Exec, errno),
            }
        }
        (Step::Exec, if denied { libc::EACCES } else { libc::ENOENT })
    }
}

/// Undoes what protects the agent and must not protect what it starts.
///
/// # Safety
///
/// As for [`run_child`].
unsafe fn forget_agents_privileges() {
    // SAFETY: async-signal-safe calls with constant arguments and a local signal set.
    unsafe {
        let adjustment: &CStr = c"/proc/self/oom_score_adj";
        let fd = libc::open(adjustment.as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
        if fd >= 0 {
            libc::write(fd, c"0".as_ptr().cast(), 1);
            libc::close(fd);
        }
        libc::setpriority(libc::PRIO_PROCESS, 0, 0);
        libc::umask(0o022);
        // Rust ignores SIGPIPE, and what is ignored stays so in the next program.
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, ptr::null_mut());
    }
}
