//! One monitor process: starting it, telling it what to run, hearing how it ends.
//!
//! The monitor is the process a guest would have to break into first. What it says is checked
//! like anything else from outside, and it gets nothing but the descriptors it needs.

use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::{
    BootConfig, Channel, Child as ForkedChild, Event, FdRef, LISTENER_FD, LoadConfig, Message, Reply,
    Request, Status, VERSION, VmEnd, WaitStatus,
};
use rustix::io::{dup2, fcntl_dupfd_cloexec};
use rustix::process::Pid;
use tokio::sync::oneshot;

use crate::boot::create;
use crate::cgroup;
use crate::console;
use crate::error::{Error, Kind, Result};
use crate::link::{self, Link, Received};
use crate::process::{self, Pidfd};

/// The file in a sandbox's folder that its monitor complains into.
pub(crate) const LOG: &str = "monitor.log";
/// How much of it an error repeats.
const LOG_TAIL: u64 = 2 << 10;
/// A template tells how its child ended right after the child has.
const STATUS_WAIT: Duration = Duration::from_secs(5);

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
    /// The cgroup it goes into: [`Leaf::door`](crate::cgroup::Leaf::door).
    pub(crate) door: Option<Arc<OwnedFd>>,
}

/// How a monitor ended.
#[derive(Debug)]
pub(crate) struct MonitorEnd {
    /// What it said about its VM, if it came to that.
    pub(crate) vm: Option<VmEnd>,
    /// What became of the process, if that is known.
    pub(crate) status: Option<WaitStatus>,
    /// The same in words.
    pub(crate) process: String,
}

/// Who learns how a monitor's process ended.
#[derive(Debug)]
enum Parent {
    /// We started it and wait for it.
    Us(Child),
    /// A template forked it and tells.
    Template(oneshot::Receiver<WaitStatus>),
    /// Nobody any more: it was collected, or its parent is gone.
    Nobody,
}

/// A running monitor. Dropping it kills the process, unless it was [left](Monitor::leave).
#[derive(Debug)]
pub(crate) struct Monitor {
    /// Whose it is, for the log.
    id: String,
    /// Where its log is.
    folder: PathBuf,
    pid: i32,
    parent: Parent,
    pidfd: Arc<Pidfd>,
    control: Option<Link>,
    vm_end: Option<VmEnd>,
    /// Whether it answered the greeting.
    greeted: bool,
    /// Whether its guest has written to the ready port.
    ready: bool,
    left: bool,
}

impl Monitor {
    /// Starts the process and shakes hands with it.
    pub(crate) async fn launch(launch: Launch, patience: Duration) -> Result<Self> {
        let plan = launch.clone();
        let started = tokio::task::spawn_blocking(move || spawn(&plan)).await;
        let (child, control) = started
            .map_err(|error| Error::host("starting a monitor", error))?
            .map_err(|error| Error::host(format!("cannot start {}", launch.vmm.display()), error))?;
        let mut monitor = Monitor::started(launch, child, control)?;
        monitor.hello(patience).await?;
        Ok(monitor)
    }

    /// For a process we started: takes it over.
    pub(crate) fn started(launch: Launch, mut child: Child, control: Channel) -> Result<Self> {
        let pid = child.id() as i32;
        // The child cannot be waited for by anybody else, so its pid still means it.
        let opened = Pid::from_raw(pid)
            .ok_or_else(|| io::Error::from(rustix::io::Errno::SRCH))
            .and_then(|pid| Ok((Pidfd::open(pid)?, Link::new(control)?)));
        match opened {
            Ok((pidfd, control)) => {
                Ok(Monitor::new(launch.id, launch.folder, pid, Parent::Us(child), pidfd, control))
            }
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(Error::host("cannot watch a monitor", error))
            }
        }
    }

    /// A child some template forked; `ended` tells how it ends, unless the template goes first.
    pub(crate) fn forked(
        id: String,
        folder: PathBuf,
        forked: Forked,
        control: Channel,
        ended: oneshot::Receiver<WaitStatus>,
    ) -> io::Result<Self> {
        let pidfd = Pidfd::new(forked.pidfd)?;
        match Link::new(control) {
            Ok(control) => Ok(Monitor::new(id, folder, forked.pid, Parent::Template(ended), pidfd, control)),
            Err(error) => {
                let _ = pidfd.kill();
                Err(error)
            }
        }
    }

    /// A process an earlier daemon left running. Its template tells how it `ended`, if it has one: that is
    /// taken only if the process can be reached.
    pub(crate) fn adopted(
        id: String,
        folder: PathBuf,
        pid: i32,
        pidfd: Pidfd,
        ended: &mut Option<oneshot::Receiver<WaitStatus>>,
    ) -> io::Result<Self> {
        let control = Link::new(link::open(&folder.join(link::CONTROL))?)?;
        let parent = ended.take().map_or(Parent::Nobody, Parent::Template);
        Ok(Monitor::new(id, folder, pid, parent, pidfd, control))
    }

    fn new(id: String, folder: PathBuf, pid: i32, parent: Parent, pidfd: Pidfd, control: Link) -> Self {
        Monitor {
            id,
            folder,
            pid,
            parent,
            pidfd: Arc::new(pidfd),
            control: Some(control),
            vm_end: None,
            greeted: false,
            ready: false,
            left: false,
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// The answer to the greeting, which was sent when the connection was made.
    pub(crate) async fn hello(&mut self, patience: Duration) -> Result<()> {
        match self.ask(None, &[], patience).await? {
            Reply::Hello { version: VERSION, monitor } => {
                tracing::debug!(sandbox = self.id, monitor, "monitor is up");
                self.greeted = true;
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
        match self.ask(Some(&Request::Boot(config)), fds, patience).await? {
            Reply::Booted => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Turns the running VM into a template.
    pub(crate) async fn freeze(&mut self, patience: Duration) -> Result<()> {
        match self.ask(Some(&Request::Freeze), &[], patience).await? {
            Reply::Frozen => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Takes from it the right to write to its disks' topmost layers: `layers` are the same files, opened
    /// for reading.
    pub(crate) async fn seal(&mut self, layers: &[OwnedFd], patience: Duration) -> Result<()> {
        let request = Request::Seal { layers: (0..layers.len()).map(|index| Some(FdRef(index))).collect() };
        match self.ask(Some(&request), layers, patience).await? {
            Reply::Sealed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Makes it the template of a snapshot. `fds` are what `config` refers to.
    pub(crate) async fn load(
        &mut self,
        config: LoadConfig,
        fds: &[OwnedFd],
        patience: Duration,
    ) -> Result<()> {
        match self.ask(Some(&Request::Load(config)), fds, patience).await? {
            Reply::Loaded => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// What it is by now.
    pub(crate) async fn status(&mut self, patience: Duration) -> Result<Status> {
        match self.ask(Some(&Request::Status), &[], patience).await? {
            Reply::Status(status) => Ok(status),
            other => Err(unexpected(&other)),
        }
    }

    /// The children of a template.
    pub(crate) async fn children(&mut self, patience: Duration) -> Result<Vec<ForkedChild>> {
        match self.ask(Some(&Request::Children), &[], patience).await? {
            Reply::Children { children } => Ok(children),
            other => Err(unexpected(&other)),
        }
    }

    async fn ask(&mut self, request: Option<&Request>, fds: &[OwnedFd], patience: Duration) -> Result<Reply> {
        let asked = tokio::time::timeout(patience, self.exchange(request, fds)).await;
        let cause = match asked {
            Ok(Ok(Some(Reply::Error { message }))) => {
                let message = console::printable(message.as_bytes());
                return Err(Error::new(Kind::Conflict, format!("the monitor refused: {message}")));
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

    /// The reply to `request`, or to the last one sent; `None` if the monitor went away instead.
    async fn exchange(&mut self, request: Option<&Request>, fds: &[OwnedFd]) -> io::Result<Option<Reply>> {
        let Some(control) = &self.control else { return Ok(None) };
        if let Some(request) = request {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            match control.send(request, &fds).await {
                Err(error) if link::is_gone(&error) => {}
                other => other?,
            }
        }
        loop {
            match control.recv().await? {
                Some((Message::Reply(reply), _)) => return Ok(Some(reply)),
                Some((Message::Event(event), fds)) => note(&mut self.vm_end, &mut self.ready, event, fds),
                None => return Ok(None),
            }
        }
    }

    /// Returns when the process has ended, with what it said before. Cancel-safe.
    pub(crate) async fn wait(&mut self) -> MonitorEnd {
        loop {
            if let Some(end) = self.next().await {
                return end;
            }
        }
    }

    /// Returns when the guest has written to the ready port, or how the process ended instead.
    /// Cancel-safe.
    pub(crate) async fn ready(&mut self) -> std::result::Result<(), MonitorEnd> {
        while !self.ready {
            if let Some(end) = self.next().await {
                return Err(end);
            }
        }
        Ok(())
    }

    /// Takes note of one thing that happens; the end of the process is returned. Cancel-safe.
    async fn next(&mut self) -> Option<MonitorEnd> {
        tokio::select! {
            // Messages first, so that the last one is read before the end is noticed.
            biased;
            message = next_message(&self.control) => match message {
                Ok(Some((Message::Event(event), fds))) => {
                    note(&mut self.vm_end, &mut self.ready, event, fds);
                }
                Ok(Some((Message::Reply(Reply::Hello { version: VERSION, .. }), _))) if !self.greeted => {
                    self.greeted = true;
                }
                Ok(Some((Message::Reply(reply), _))) => {
                    tracing::warn!(sandbox = self.id, ?reply, "a reply nobody asked for");
                }
                Ok(None) => self.control = None,
                Err(error) => {
                    // Whatever it is now, it is not a monitor of ours: do not let it run on.
                    tracing::error!(sandbox = self.id, %error, "the monitor talks nonsense; ending it");
                    self.control = None;
                    let _ = self.pidfd.kill();
                }
            },
            _ = self.pidfd.ended() => return Some(self.collect().await),
        }
        None
    }

    /// Kills the process and waits until it is gone.
    pub(crate) async fn end(&mut self) -> MonitorEnd {
        self.pidfd.end(&self.id).await;
        self.collect().await
    }

    /// Lets the process run on without us.
    pub(crate) fn leave(mut self) {
        self.left = true;
    }

    /// For a process that has ended: learns its status. Cancel-safe.
    async fn collect(&mut self) -> MonitorEnd {
        let lost = "the monitor ended; how is not known, because whoever started it is gone";
        let (status, process) = match &mut self.parent {
            // It has ended, so this does not block.
            Parent::Us(child) => match child.wait() {
                Ok(status) => (wait_status(status), describe(wait_status(status))),
                Err(error) => (None, format!("the monitor's status is unknown: {error}")),
            },
            Parent::Template(told) => match tokio::time::timeout(STATUS_WAIT, told).await {
                Ok(Ok(status)) => (Some(status), describe(Some(status))),
                _ => (None, lost.into()),
            },
            Parent::Nobody => (None, lost.into()),
        };
        self.parent = Parent::Nobody;
        MonitorEnd { vm: self.vm_end.take(), status, process: process + &self.log_tail() }
    }

    fn log_tail(&self) -> String {
        match console::tail(&self.folder.join(LOG), LOG_TAIL).trim() {
            "" => String::new(),
            text => format!("; it wrote: {text}"),
        }
    }

    /// For a monitor that is a template by now: its parts, for pipelined requests.
    pub(crate) fn into_parts(mut self) -> Parts {
        self.left = true;
        let child = match std::mem::replace(&mut self.parent, Parent::Nobody) {
            Parent::Us(child) => Some(child),
            _ => None,
        };
        Parts { pid: self.pid, child, pidfd: self.pidfd.clone(), control: self.control.take() }
    }
}

/// What a [`Monitor`] is made of.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) pid: i32,
    /// If we started it: to be waited for.
    pub(crate) child: Option<Child>,
    pub(crate) pidfd: Arc<Pidfd>,
    /// `None` if it hung up.
    pub(crate) control: Option<Link>,
}

/// A process a template has just forked.
#[derive(Debug)]
pub(crate) struct Forked {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
}

impl Drop for Monitor {
    fn drop(&mut self) {
        if self.left {
            return;
        }
        match std::mem::replace(&mut self.parent, Parent::Nobody) {
            Parent::Us(mut child) => {
                let _ = child.kill();
                // The end of a VM takes milliseconds, too long for the runtime's threads.
                std::thread::spawn(move || child.wait());
            }
            // One that is collected already is not there any more.
            Parent::Template(_) | Parent::Nobody => {
                let _ = self.pidfd.kill();
            }
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

async fn next_message(control: &Option<Link>) -> io::Result<Option<Received>> {
    match control {
        Some(control) => control.recv().await,
        None => std::future::pending().await,
    }
}

fn note(vm_end: &mut Option<VmEnd>, ready: &mut bool, event: Event, fds: Vec<OwnedFd>) {
    match event {
        Event::Ended(end) => *vm_end = Some(end),
        Event::Ready => *ready = true,
        // Only templates have children, and those are not listened to here.
        Event::ChildEnded { .. } => {}
        // Nothing on the host listens for guests yet: closing the descriptor is the reset.
        Event::GuestConnection { port } => tracing::debug!(port, "a guest's connection was reset"),
    }
    drop(fds);
}

fn unexpected(reply: &Reply) -> Error {
    Error::host("the monitor gave the wrong answer", format!("{reply:?}"))
}

fn wait_status(status: ExitStatus) -> Option<WaitStatus> {
    match (status.code(), status.signal()) {
        (Some(code), _) => Some(WaitStatus::Exited(code)),
        (None, Some(signal)) => Some(WaitStatus::Signaled(signal)),
        (None, None) => None,
    }
}

/// What became of a process, in words.
pub(crate) fn describe(status: Option<WaitStatus>) -> String {
    match status {
        Some(WaitStatus::Exited(code)) => format!("the monitor exited with status {code}"),
        Some(WaitStatus::Signaled(signal)) => format!("the monitor was killed by signal {signal}"),
        None => "the monitor ended".into(),
    }
}

/// Binds the control socket, starts the process with it and connects.
fn spawn(launch: &Launch) -> io::Result<(Child, Channel)> {
    let (listener, control) = link::pair(&launch.folder.join(link::CONTROL))?;
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

#[cfg(test)]
mod tests;
