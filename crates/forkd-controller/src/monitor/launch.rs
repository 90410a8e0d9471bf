//! Starts a monitor's process, and limits what it inherits.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use forkd_protocol::control::{Channel, LISTENER_FD};
use rustix::io::{dup2, fcntl_dupfd_cloexec};

use super::LOG;
use crate::host::{cgroup, oom, process};
use crate::monitor::control_socket;
use crate::util::fs::create;

/// The parameters of a monitor's start.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// The id of its sandbox or template, for the log.
    pub(crate) id: String,
    /// The sandbox's folder.
    pub(crate) folder: PathBuf,
    /// The `forkd-vmm` binary.
    pub(crate) vmm: PathBuf,
    /// The user it switches to; `None` when the daemon is not root, and both keep the same user.
    pub(crate) uid: Option<u32>,
    /// The cgroup it joins: [`Leaf::procs_fd`](crate::host::cgroup::Leaf::procs_fd).
    pub(crate) procs_fd: Option<Arc<OwnedFd>>,
}

/// Binds the control socket, starts the process with it, and connects.
pub(super) fn spawn(launch: &Launch) -> io::Result<(Child, Channel)> {
    let (listener, control) = control_socket::pair(&launch.folder.join(control_socket::CONTROL))?;
    let log = create(&launch.folder.join(LOG))?;
    let record = create(&launch.folder.join(process::RECORD))?;
    let boot = process::boot_id();

    let mut command = Command::new(&launch.vmm);
    command.env_clear().current_dir("/").process_group(0);
    command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    if let Some(uid) = launch.uid {
        command.args(["--uid", &uid.to_string(), "--gid", &uid.to_string()]);
    }
    // The number must not be 3 itself: `dup2` below would then keep close-on-exec. If 3 is free it is taken
    // meanwhile, so that the pipe by which `spawn` reports failures does not get it.
    let listener = fcntl_dupfd_cloexec(&listener, LISTENER_FD + 1)?;
    let _taken = fcntl_dupfd_cloexec(&listener, LISTENER_FD)?;
    let procs_fd = launch.procs_fd.clone();
    let before_exec = move || {
        // The child writes it itself: a daemon that is killed at this moment could not.
        process::record_self(&boot, record.as_fd())?;
        if let Some(procs_fd) = &procs_fd {
            cgroup::join(procs_fd.as_fd())?;
        }
        // Else it inherits the daemon's low score. A failure here is no reason not to start.
        let _ = oom::join_sandboxes();
        // `exec` closes the daemon's own descriptors, but not those that the daemon inherited.
        close_others_on_exec()?;
        place(&listener, LISTENER_FD)?;
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called: the closure
    // makes plain system calls and formats integers into a buffer on its stack.
    unsafe { command.pre_exec(before_exec) };
    Ok((command.spawn()?, control))
}

/// Makes `exec` close everything but standard input, output and error.
fn close_others_on_exec() -> io::Result<()> {
    // SAFETY: the call sets a flag on descriptors and touches no memory.
    match unsafe { libc::close_range(3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC as libc::c_int) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Makes `number` a copy of `fd` that survives `exec`.
fn place(fd: &OwnedFd, number: RawFd) -> io::Result<()> {
    // SAFETY: nothing else in this process, a child about to exec, owns that number; and it is
    // never closed from here.
    let mut target = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(number) });
    dup2(fd, &mut target)?;
    Ok(())
}
