//! Starting a monitor's process: what it inherits, and nothing else.

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

/// What to start a monitor with.
#[derive(Debug, Clone)]
pub(crate) struct Launch {
    /// Whose it is, for the log.
    pub(crate) id: String,
    /// The sandbox's folder.
    pub(crate) folder: PathBuf,
    /// The `forkd-vmm` binary.
    pub(crate) vmm: PathBuf,
    /// The user it becomes; `None` when we are not root and it stays who we are.
    pub(crate) uid: Option<u32>,
    /// The cgroup it goes into: [`Leaf::door`](crate::host::cgroup::Leaf::door).
    pub(crate) door: Option<Arc<OwnedFd>>,
}

/// Binds the control socket, starts the process with it and connects.
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
    // Not number 3 itself, or `dup2` below would leave it to be closed by `exec`; and if 3 is free,
    // taken for the moment, so that the pipe `spawn` reports failures through does not get it.
    let listener = fcntl_dupfd_cloexec(&listener, LISTENER_FD + 1)?;
    let _taken = fcntl_dupfd_cloexec(&listener, LISTENER_FD)?;
    let door = launch.door.clone();
    let before_exec = move || {
        // Written by the child itself: a daemon killed right now would have no time to.
        process::record_self(&boot, record.as_fd())?;
        if let Some(door) = &door {
            cgroup::join(door.as_fd())?;
        }
        // Else it would be spared as the daemon is. A score too low is no reason to do without it.
        let _ = oom::join_sandboxes();
        // Ours are all closed by `exec`; what whoever started us left open must be, too.
        close_others_on_exec()?;
        place(&listener, LISTENER_FD)?;
        Ok(())
    };
    // SAFETY: between fork and exec only async-signal-safe functions may be called: the closure
    // makes plain system calls and formats integers into a buffer on its stack.
    unsafe { command.pre_exec(before_exec) };
    Ok((command.spawn()?, control))
}

/// Has `exec` close everything but standard input, output and error.
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
