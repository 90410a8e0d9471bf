//! One monitor process: how it starts, what it runs, and how it ends.
//!
//! A guest that attacks the host has to break into its monitor first. So the daemon checks a monitor's messages
//! like any other outside input, and passes it only the descriptors it needs.

pub(crate) mod boot_files;
pub(crate) mod console;
pub(crate) mod control_socket;
mod launch;
mod requests;

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, ExitStatus};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::control::{Channel, EndReason, Event, Message, OLDEST_VERSION, Reply, VmEnd, WaitStatus};
use launch::spawn;
use rustix::process::Pid;
use tokio::sync::oneshot;

use crate::error::{Error, Result};
use crate::host::oom;
use crate::host::process::Pidfd;
use crate::monitor::control_socket::{Link, Received};

pub(crate) use launch::Launch;
pub(crate) use requests::{Branched, DISKS_ALONE, Replacement, replace_request};

/// The file in a sandbox's folder that takes its monitor's standard output and error.
pub(crate) const LOG: &str = "monitor.log";
/// How many bytes of its end an error quotes.
const LOG_TAIL: u64 = 2 << 10;
/// How long to wait for a template's report of a child's exit status. The report follows the exit at once.
const STATUS_WAIT: Duration = Duration::from_secs(5);

/// How a monitor ended.
#[derive(Debug)]
pub(crate) struct MonitorEnd {
    /// What the monitor reported about its VM, if it did.
    pub(crate) vm: Option<VmEnd>,
    /// The exit status of the process, if it is known.
    pub(crate) status: Option<WaitStatus>,
    /// The exit status in words.
    pub(crate) process: String,
    /// The end of the monitor's log. For the operator only.
    pub(crate) log: String,
}

/// The source of a monitor's exit status.
#[derive(Debug)]
enum Parent {
    /// The daemon started the process and waits for it.
    Us(Child),
    /// A template forked the process and reports its exit status.
    Template(oneshot::Receiver<WaitStatus>),
    /// None: the status was collected already, or the parent process is gone.
    Nobody,
}

/// A running monitor. Dropping it kills the process, unless it was [left](Monitor::leave).
#[derive(Debug)]
pub(crate) struct Monitor {
    /// The id of its sandbox or template, for the log.
    id: String,
    /// The folder of its log.
    folder: PathBuf,
    pid: i32,
    parent: Parent,
    pidfd: Arc<Pidfd>,
    control: Option<Link>,
    vm_end: Option<VmEnd>,
    /// Why the daemon killed it, if it violated the protocol.
    distrusted: Option<String>,
    /// The newest version of the control protocol that it speaks; the oldest until it has replied to `Hello`.
    version: u32,
    /// How many replies are still to come. The first is the reply to `Hello`.
    owed: u32,
    /// What a late reply reports, after its request timed out: whether the VM is paused now.
    late_pause: Option<bool>,
    /// When the monitor closed the control connection.
    hung_up: Option<Instant>,
    /// Whether the guest has written to the ready port.
    ready: bool,
    /// Whether it has paused its VM because the host's disk is full, and the daemon has not read this flag yet.
    disk_full: bool,
    left: bool,
}

impl Monitor {
    /// Starts the process and waits for its `Hello`.
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

    /// A monitor of a process that the daemon started.
    pub(crate) fn started(launch: Launch, mut child: Child, control: Channel) -> Result<Self> {
        let pid = child.id() as i32;
        // Only this process can wait for the child, so the pid cannot be reused yet.
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

    /// A monitor of a template's child. `ended` gives its exit status, unless the template ends first.
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

    /// A template that was forked off a sandbox, with its open control connection. The kernel reaps it, so its
    /// exit status is never known.
    pub(crate) fn branched(
        id: String,
        folder: PathBuf,
        pid: i32,
        pidfd: OwnedFd,
        control: Channel,
    ) -> io::Result<Self> {
        let pidfd = Pidfd::new(pidfd)?;
        match Link::new(control) {
            Ok(control) => Ok(Monitor::new(id, folder, pid, Parent::Nobody, pidfd, control)),
            Err(error) => {
                let _ = pidfd.kill();
                Err(error)
            }
        }
    }

    /// A process that an earlier daemon left running. Its template, if it has one, reports its exit status through
    /// `ended`, which is taken only if the process can be reached.
    pub(crate) fn adopted(
        id: String,
        folder: PathBuf,
        pid: i32,
        pidfd: Pidfd,
        ended: &mut Option<oneshot::Receiver<WaitStatus>>,
    ) -> io::Result<Self> {
        let control = Link::new(control_socket::open(&folder.join(control_socket::CONTROL))?)?;
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
            distrusted: None,
            version: OLDEST_VERSION,
            owed: 1,
            late_pause: None,
            hung_up: None,
            ready: false,
            disk_full: false,
            left: false,
        }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Lets the kernel kill it before the daemon and the templates when the host runs out of memory.
    pub(crate) fn rank_as_sandbox(&self) {
        oom::set(self.pid, self.pidfd.as_fd(), oom::Role::Sandbox);
    }

    /// Returns when the process has ended, with its last messages. Cancel-safe.
    pub(crate) async fn wait(&mut self) -> MonitorEnd {
        loop {
            if let Some(end) = self.next().await {
                return end;
            }
        }
    }

    /// Returns when the guest has written to the ready port, or with an error when the process has ended.
    /// Cancel-safe.
    pub(crate) async fn ready(&mut self) -> std::result::Result<(), MonitorEnd> {
        while !self.ready {
            if let Some(end) = self.next().await {
                return Err(end);
            }
        }
        Ok(())
    }

    /// Whether it has paused its VM because the host's disk is full since the last call.
    pub(crate) fn take_disk_full(&mut self) -> bool {
        std::mem::take(&mut self.disk_full)
    }

    /// Whether the VM is paused, if a late reply to a pause or a resume reported that since the last call.
    pub(crate) fn take_late_pause(&mut self) -> Option<bool> {
        self.late_pause.take()
    }

    /// Returns once a monitor that closed the control connection has not exited within `grace`. Until then the close
    /// is the beginning of its exit.
    pub(crate) fn hung_up(&self, grace: Duration) -> impl Future<Output = ()> + use<> {
        let until = self.hung_up.map(|since| tokio::time::Instant::from_std(since + grace));
        async move {
            match until {
                Some(until) => tokio::time::sleep_until(until).await,
                None => std::future::pending().await,
            }
        }
    }

    /// Kills a monitor that closed the control connection and did not exit: nothing can control it.
    pub(crate) fn end_hung_up(&mut self) {
        self.hung_up = None;
        match self.vm_end {
            Some(_) => drop(self.pidfd.kill()),
            None => self.distrust("it closed the control connection and did not exit"),
        }
    }

    /// Notes what a reply reports that comes after its request timed out.
    fn note_late(late_pause: &mut Option<bool>, reply: &Reply) {
        match reply {
            Reply::Paused => *late_pause = Some(true),
            Reply::Resumed => *late_pause = Some(false),
            _ => {}
        }
    }

    /// Handles one message, or returns the end of the process. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<MonitorEnd> {
        tokio::select! {
            // Messages first, so that the last one is read before the end of the process.
            biased;
            message = next_message(&self.control) => match message {
                Ok(Some((Message::Event(event), fds))) => {
                    note(&mut self.vm_end, &mut self.ready, &mut self.disk_full, event, fds);
                }
                Ok(Some((Message::Reply(reply), fds))) => {
                    let said = (self.owed == 0).then(|| console::brief(&reply));
                    self.owed = self.owed.saturating_sub(1);
                    Monitor::note_late(&mut self.late_pause, &reply);
                    requests::discard(self.pid, reply, fds);
                    if let Some(said) = said {
                        self.distrust(&format!("it gave an answer without a question: {said}"));
                    }
                }
                Ok(None) => {
                    self.control = None;
                    self.hung_up = Some(Instant::now());
                }
                Err(error) => self.distrust(&error.to_string()),
            },
            _ = self.pidfd.ended() => return Some(self.collect().await),
        }
        None
    }

    /// Kills a monitor that violates the protocol, because of `why`: its guest may control it.
    pub(crate) fn distrust(&mut self, why: &str) {
        tracing::error!(sandbox = self.id, why, "monitor violated the protocol: killed");
        self.distrusted.get_or_insert_with(|| why.to_owned());
        self.control = None;
        let _ = self.pidfd.kill();
    }

    /// Kills the process and waits until it is gone.
    pub(crate) async fn end(&mut self) -> MonitorEnd {
        self.pidfd.end(&self.id).await;
        self.collect().await
    }

    /// Lets the process run on after the daemon ends.
    pub(crate) fn leave(mut self) {
        self.left = true;
    }

    /// Reads the exit status of a process that has ended. Cancel-safe.
    async fn collect(&mut self) -> MonitorEnd {
        let lost = "the monitor ended; its exit status is unknown, because its parent process is gone";
        let (status, process) = match &mut self.parent {
            // The process has ended, so this does not block.
            Parent::Us(child) => match child.wait() {
                Ok(status) => (wait_status(status), describe(wait_status(status))),
                Err(error) => (None, format!("the monitor's status is unknown: {error}")),
            },
            Parent::Template(end) => match tokio::time::timeout(STATUS_WAIT, end).await {
                Ok(Ok(status)) => (Some(status), describe(Some(status))),
                _ => (None, lost.into()),
            },
            Parent::Nobody => (None, lost.into()),
        };
        self.parent = Parent::Nobody;
        if let Some(why) = &self.distrusted {
            // Its report about the VM is not trusted, either.
            let process = "the daemon killed the monitor, which violated the protocol".to_owned();
            return MonitorEnd { vm: None, status, process, log: format!("; {why}") };
        }
        MonitorEnd { vm: self.vm_end.take(), status, process, log: self.log_tail() }
    }

    fn log_tail(&self) -> String {
        match console::tail(&self.folder.join(LOG), LOG_TAIL).trim() {
            "" => String::new(),
            text => format!("; it wrote: {text}"),
        }
    }

    /// The parts of a monitor that has become a template, for pipelined requests.
    pub(crate) fn into_parts(mut self) -> MonitorParts {
        self.left = true;
        let child = match std::mem::replace(&mut self.parent, Parent::Nobody) {
            Parent::Us(child) => Some(child),
            _ => None,
        };
        MonitorParts { pid: self.pid, child, pidfd: self.pidfd.clone(), control: self.control.take() }
    }
}

/// The parts of a [`Monitor`].
#[derive(Debug)]
pub(crate) struct MonitorParts {
    pub(crate) pid: i32,
    /// The process to wait for, if the daemon started it.
    pub(crate) child: Option<Child>,
    pub(crate) pidfd: Arc<Pidfd>,
    /// `None` if the monitor closed the connection.
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
                // Ending a VM takes milliseconds, too long for the runtime's threads.
                std::thread::spawn(move || child.wait());
            }
            // The pidfd of a process that was reaped already matches no process.
            Parent::Template(_) | Parent::Nobody => {
                let _ = self.pidfd.kill();
            }
        }
    }
}

impl MonitorEnd {
    /// One sentence, for every client that may read the sandbox.
    pub(crate) fn describe(&self) -> String {
        match &self.vm {
            Some(vm) if is_the_hosts(vm) => "the virtual machine failed on the host".into(),
            Some(vm) if !vm.detail.is_empty() => console::printable(vm.detail.as_bytes()),
            Some(vm) => format!("{:?}", vm.reason),
            None => self.process.clone(),
        }
    }

    /// The cause, for the operator only.
    pub(crate) fn cause(&self) -> Option<String> {
        match &self.vm {
            Some(vm) => is_the_hosts(vm).then(|| console::printable(vm.detail.as_bytes())),
            None => (!self.log.is_empty()).then(|| self.log.trim_start_matches("; ").to_owned()),
        }
    }

    /// Sentence and cause, for the operator.
    pub(crate) fn full(&self) -> String {
        match self.cause() {
            Some(cause) => format!("{}: {cause}", self.describe()),
            None => self.describe(),
        }
    }

    /// Exit status and log, for the operator.
    pub(crate) fn account(&self) -> String {
        format!("{}{}", self.process, self.log)
    }
}

/// Whether a VM's end has an error number of the host in its text.
fn is_the_hosts(vm: &VmEnd) -> bool {
    vm.reason == EndReason::Failed && vm.detail.contains("os error")
}

async fn next_message(control: &Option<Link>) -> io::Result<Option<Received>> {
    match control {
        Some(control) => control.recv().await,
        None => std::future::pending().await,
    }
}

fn note(vm_end: &mut Option<VmEnd>, ready: &mut bool, disk_full: &mut bool, event: Event, fds: Vec<OwnedFd>) {
    match event {
        Event::Ended(end) => *vm_end = Some(end),
        Event::Ready => *ready = true,
        Event::DiskFull => *disk_full = true,
        // Only templates have children, and another loop reads their messages.
        Event::ChildEnded { .. } => {}
        // No service of the host accepts guest connections yet: closing the descriptor resets this one.
        Event::GuestConnection { port } => tracing::debug!(port, "guest connection reset"),
    }
    drop(fds);
}

fn wait_status(status: ExitStatus) -> Option<WaitStatus> {
    match (status.code(), status.signal()) {
        (Some(code), _) => Some(WaitStatus::Exited(code)),
        (None, Some(signal)) => Some(WaitStatus::Signaled(signal)),
        (None, None) => None,
    }
}

/// An exit status in words.
pub(crate) fn describe(status: Option<WaitStatus>) -> String {
    match status {
        Some(WaitStatus::Exited(code)) => format!("the monitor exited with status {code}"),
        Some(WaitStatus::Signaled(signal)) => format!("the monitor was killed by signal {signal}"),
        None => "the monitor ended".into(),
    }
}

#[cfg(test)]
mod tests;
