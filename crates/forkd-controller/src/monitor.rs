//! One monitor process: starting it, telling it what to run, hearing how it ends.
//!
//! The monitor is the process a guest would have to break into first. What it says is checked
//! like anything else from outside, and it gets nothing but the descriptors it needs.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::{
    BootConfig, Channel, Event, LISTENER_FD, Message, Reply, Request, VERSION, VmEnd,
};
use rustix::io::{dup2, fcntl_dupfd_cloexec};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use rustix::process::Pid;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::boot::{create, remove_stale};
use crate::console;
use crate::error::{Error, Result};
use crate::process::{self, Pidfd};

/// The file in a sandbox's folder that its monitor complains into.
const LOG: &str = "monitor.log";
/// How much of it an error repeats.
const LOG_TAIL: u64 = 2 << 10;

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
}

/// How a monitor ended.
#[derive(Debug)]
pub(crate) struct MonitorEnd {
    /// What it said about its VM, if it came to that.
    pub(crate) vm: Option<VmEnd>,
    /// What became of the process, in words.
    pub(crate) process: String,
}

/// A running monitor. Dropping it kills the process.
#[derive(Debug)]
pub(crate) struct Monitor {
    launch: Launch,
    /// `None` once it was waited for.
    child: Option<Child>,
    pidfd: Arc<Pidfd>,
    control: Option<AsyncFd<Socket>>,
    vm_end: Option<VmEnd>,
}

impl Monitor {
    /// Starts the process and shakes hands with it.
    pub(crate) async fn launch(launch: Launch, patience: Duration) -> Result<Self> {
        let plan = launch.clone();
        let started = tokio::task::spawn_blocking(move || spawn(&plan)).await;
        let (child, control) = started
            .map_err(|error| Error::host("starting a monitor", error))?
            .map_err(|error| Error::host(format!("cannot start {}", launch.vmm.display()), error))?;
        let mut monitor = Monitor::adopt(launch, child, control)?;
        monitor.hello(patience).await?;
        Ok(monitor)
    }

    fn adopt(launch: Launch, mut child: Child, control: OwnedFd) -> Result<Self> {
        // The child cannot be waited for by anybody else, so its pid still means it.
        let opened = Pid::from_raw(child.id() as i32)
            .ok_or_else(|| io::Error::from(rustix::io::Errno::SRCH))
            .and_then(|pid| Ok((Pidfd::open(pid)?, Socket::watched(control)?)));
        match opened {
            Ok((pidfd, control)) => Ok(Monitor {
                launch,
                child: Some(child),
                pidfd: Arc::new(pidfd),
                control: Some(control),
                vm_end: None,
            }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::host("cannot watch a monitor", error))
            }
        }
    }

    pub(crate) fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    async fn hello(&mut self, patience: Duration) -> Result<()> {
        match self.ask(&Request::Hello { version: VERSION }, &[], patience).await? {
            Reply::Hello { version: VERSION, monitor } => {
                tracing::debug!(sandbox = self.launch.id, monitor, "monitor is up");
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Builds the VM and runs it. `fds` are what `config` refers to.
    pub(crate) async fn boot(
        &mut self,
        config: BootConfig,
        fds: &[OwnedFd],
        patience: Duration,
    ) -> Result<()> {
        match self.ask(&Request::Boot(config), fds, patience).await? {
            Reply::Booted => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    async fn ask(&mut self, request: &Request, fds: &[OwnedFd], patience: Duration) -> Result<Reply> {
        let asked = tokio::time::timeout(patience, self.exchange(request, fds)).await;
        let cause = match asked {
            Ok(Ok(Some(Reply::Error { message }))) => {
                return Err(Error::host("the monitor refused", message));
            }
            Ok(Ok(Some(reply))) => return Ok(reply),
            Ok(Ok(None)) => {
                // One that hangs up but does not end is not waited for, either.
                let end = match tokio::time::timeout(patience, self.wait()).await {
                    Ok(end) => end,
                    Err(_) => self.end().await,
                };
                return Err(Error::host("the monitor ended before its VM ran", end.describe()));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {patience:?}"),
        };
        Err(Error::host("the monitor cannot be talked to", cause + &self.log_tail()))
    }

    /// The reply to `request`; `None` if the monitor went away instead.
    async fn exchange(&mut self, request: &Request, fds: &[OwnedFd]) -> io::Result<Option<Reply>> {
        let Some(control) = &self.control else { return Ok(None) };
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let sent = control.async_io(Interest::WRITABLE, |socket| socket.0.send(request, &fds)).await;
        match sent {
            Err(error) if is_gone(&error) => {}
            other => other?,
        }
        loop {
            match control.async_io(Interest::READABLE, |socket| socket.0.recv()).await? {
                Some((Message::Reply(reply), _)) => return Ok(Some(reply)),
                Some((Message::Event(event), fds)) => note(&mut self.vm_end, event, fds),
                None => return Ok(None),
            }
        }
    }

    /// Returns when the process has ended, with what it said before. Cancel-safe.
    pub(crate) async fn wait(&mut self) -> MonitorEnd {
        loop {
            tokio::select! {
                // Messages first, so that the last one is read before the end is noticed.
                biased;
                message = next_message(&self.control) => match message {
                    Ok(Some((Message::Event(event), fds))) => note(&mut self.vm_end, event, fds),
                    Ok(Some((Message::Reply(reply), _))) => {
                        tracing::warn!(sandbox = self.launch.id, ?reply, "a reply nobody asked for");
                    }
                    Ok(None) => self.control = None,
                    Err(error) => {
                        // Whatever it is now, it is not a monitor of ours: do not let it run on.
                        tracing::error!(sandbox = self.launch.id, %error, "the monitor talks nonsense; ending it");
                        self.control = None;
                        let _ = self.pidfd.kill();
                    }
                },
                _ = self.pidfd.ended() => return self.reap(),
            }
        }
    }

    /// Kills the process and waits until it is gone.
    pub(crate) async fn end(&mut self) -> MonitorEnd {
        self.pidfd.end(&self.launch.id).await;
        self.reap()
    }

    /// For a process that has ended: collects its status, which therefore does not block.
    fn reap(&mut self) -> MonitorEnd {
        let process = match self.child.take().map(|mut child| child.wait()) {
            Some(Ok(status)) => describe(status) + &self.log_tail(),
            Some(Err(error)) => format!("the monitor's status is unknown: {error}"),
            None => "the monitor had ended before".into(),
        };
        MonitorEnd { vm: self.vm_end.take(), process }
    }

    fn log_tail(&self) -> String {
        match console::tail(&self.launch.folder.join(LOG), LOG_TAIL).trim() {
            "" => String::new(),
            text => format!("; it wrote: {text}"),
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            // The end of a VM takes milliseconds, too long for the runtime's threads.
            std::thread::spawn(move || child.wait());
        }
    }
}

impl MonitorEnd {
    /// In one sentence.
    pub(crate) fn describe(&self) -> String {
        match &self.vm {
            Some(vm) if !vm.detail.is_empty() => console::printable(vm.detail.as_bytes()),
            Some(vm) => format!("{:?}", vm.reason),
            None => self.process.clone(),
        }
    }
}

/// A [`Channel`] whose socket does not block: its calls then fail with `WouldBlock`, which is what
/// [`AsyncFd`] needs.
#[derive(Debug)]
struct Socket(Channel);

impl Socket {
    fn watched(socket: OwnedFd) -> io::Result<AsyncFd<Self>> {
        // SAFETY: a channel owns its descriptor and keeps it open as long as it lives.
        Ok(unsafe { AsyncFd::register(Socket(Channel::new(socket))) }?)
    }
}

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

async fn next_message(control: &Option<AsyncFd<Socket>>) -> io::Result<Option<(Message, Vec<OwnedFd>)>> {
    match control {
        Some(control) => control.async_io(Interest::READABLE, |socket| socket.0.recv()).await,
        None => std::future::pending().await,
    }
}

fn note(vm_end: &mut Option<VmEnd>, event: Event, fds: Vec<OwnedFd>) {
    match event {
        Event::Ended(end) => *vm_end = Some(end),
        // Nothing on the host listens for guests yet: closing the descriptor is the reset.
        Event::GuestConnection { port } => tracing::debug!(port, "a guest's connection was reset"),
    }
    drop(fds);
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

fn unexpected(reply: &Reply) -> Error {
    Error::host("the monitor gave the wrong answer", format!("{reply:?}"))
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("the monitor exited with status {code}"),
        (None, Some(signal)) => format!("the monitor was killed by signal {signal}"),
        (None, None) => "the monitor ended".into(),
    }
}

/// Binds the control socket, starts the process with it and connects.
fn spawn(launch: &Launch) -> io::Result<(Child, OwnedFd)> {
    let (listener, control) = control_pair(&launch.folder.join("control.sock"))?;
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
    let before_exec = move || {
        // Written by the child itself: a daemon killed right now would have no time to.
        process::record_self(&boot, record.as_fd())?;
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

/// A listening control socket at `path` and a connection to it.
fn control_pair(path: &Path) -> io::Result<(OwnedFd, OwnedFd)> {
    remove_stale(path)?;
    let address = SocketAddrUnix::new(path)?;
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    bind(&listener, &address)?;
    listen(&listener, 4)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let control = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&control, &address)?;
    Ok((listener, control))
}

#[cfg(test)]
mod tests;
