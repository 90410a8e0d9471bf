//! Requests to a monitor, and its replies.
//!
//! There are two kinds of requests. While a monitor is being set up, its end counts as a reply, with a full
//! report. A running sandbox's supervisor sends the other kind: it watches the process all the time, so it
//! notices the end by itself.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use forkd_protocol::control::{
    BootConfig, BranchConfig, Child as ForkedChild, FdRef, LoadConfig, Message, OLDEST_VERSION,
    ReplacedLayers, Reply, Request, Status,
};

use super::{Monitor, note};
use crate::error::{Code, Error, Result};
use crate::host::process::child_pidfd;
use crate::monitor::{console, control_socket};

/// The version of the control protocol that saves disks without memory, and boots on them.
pub(crate) const DISKS_ALONE: u32 = 2;

/// A template that was forked off a running sandbox.
#[derive(Debug)]
pub(crate) struct Branched {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    /// How long the source's vCPUs stood still.
    pub(crate) pause: Duration,
    /// For each disk the frozen layer, if it has one.
    pub(crate) layers: Vec<Option<OwnedFd>>,
}

/// A file that replaces the oldest layers of a disk.
#[derive(Debug)]
pub(crate) struct Replacement {
    /// How many layers it replaces.
    pub(crate) count: u8,
    /// The file, opened for reading only.
    pub(crate) layer: OwnedFd,
}

impl Monitor {
    /// The reply to `Hello`, which was sent when the connection was opened.
    pub(crate) async fn hello(&mut self, patience: Duration) -> Result<()> {
        match self.ask(None, &[], patience).await? {
            Reply::Hello { version: OLDEST_VERSION, monitor, newest } => {
                tracing::debug!(sandbox = self.id, monitor, newest, "monitor is up");
                self.version = newest;
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Fails if it does not speak `version` of the control protocol. It says which in its reply to `Hello`.
    pub(crate) fn require(&self, version: u32) -> Result<()> {
        if self.version >= version {
            return Ok(());
        }
        let text = "its process runs an older version of forkd, which cannot do this";
        let cause = format!("it speaks version {} of the control protocol, not {version}", self.version);
        Err(Error::new(Code::SandboxUnfit, text).because(cause))
    }

    /// Builds the VM and runs it. `fds` are the descriptors that `config` refers to.
    pub(crate) async fn boot(
        &mut self,
        config: BootConfig,
        fds: &[OwnedFd],
        patience: Duration,
    ) -> Result<()> {
        if config.disk_state.is_some() {
            self.require(DISKS_ALONE)?;
        }
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

    /// Revokes its right to write to frozen layers: for each disk the topmost one, opened for reading.
    pub(crate) async fn seal(&mut self, layers: &[Option<OwnedFd>], patience: Duration) -> Result<()> {
        let (mut fds, mut named) = (Vec::new(), Vec::with_capacity(layers.len()));
        for layer in layers {
            named.push(layer.as_ref().map(|layer| attach(&mut fds, layer)));
        }
        match self.command(&Request::Seal { layers: named }, &fds, patience).await?.0 {
            Reply::Sealed => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Forks a template off the running VM. `fds` are the descriptors that `config` refers to.
    pub(crate) async fn branch(
        &mut self,
        config: BranchConfig,
        fds: &[OwnedFd],
        patience: Duration,
    ) -> Result<Branched> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match self.command(&Request::Branch(config), &fds, patience).await? {
            (Reply::Branched { pid, pause_us, layers }, fds) if pid > 0 => {
                let branched = branched(self.pid, pid, pause_us, &layers, fds);
                branched.inspect_err(|error| self.distrust(&error.to_string()))
            }
            (other, _) => Err(unexpected(&other)),
        }
    }

    /// Pauses its vCPUs and devices.
    pub(crate) async fn pause(&mut self, patience: Duration) -> Result<()> {
        match self.command(&Request::Pause, &[], patience).await?.0 {
            // Earlier reports of a full disk or of a late resume no longer hold.
            Reply::Paused => {
                self.disk_full = false;
                self.late_pause = None;
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Resumes a paused VM.
    pub(crate) async fn resume(&mut self, patience: Duration) -> Result<()> {
        match self.command(&Request::Resume, &[], patience).await?.0 {
            Reply::Resumed => {
                self.disk_full = false;
                self.late_pause = None;
                Ok(())
            }
            other => Err(unexpected(&other)),
        }
    }

    /// Replaces several layers by one file, for each disk that is named.
    pub(crate) async fn replace_layers(
        &mut self,
        disks: Vec<Option<Replacement>>,
        patience: Duration,
    ) -> Result<()> {
        let (request, fds) = replace_request(disks);
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        match self.command(&request, &fds, patience).await?.0 {
            Reply::Replaced => Ok(()),
            other => Err(unexpected(&other)),
        }
    }

    /// Turns it into the template of a snapshot. `fds` are the descriptors that `config` refers to.
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

    /// The current state of the monitor.
    pub(crate) async fn status(&mut self, patience: Duration) -> Result<Status> {
        match self.command(&Request::Status, &[], patience).await?.0 {
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

    /// Sends a request to a monitor that is being set up: its end counts as a reply.
    async fn ask(&mut self, request: Option<&Request>, fds: &[OwnedFd], patience: Duration) -> Result<Reply> {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let asked = tokio::time::timeout(patience, self.exchange(request, &fds)).await;
        let cause = match asked {
            Ok(Ok(Some((Reply::Error { message }, _)))) => return Err(refused(&message)),
            Ok(Ok(Some((reply, _)))) => return Ok(reply),
            Ok(Ok(None)) => {
                // A monitor that closes the connection but does not end is killed after `patience`.
                let end = match tokio::time::timeout(patience, self.wait()).await {
                    Ok(end) => end,
                    Err(_) => self.end().await,
                };
                return Err(Error::host("the monitor ended before its VM ran", end.full()));
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {patience:?}"),
        };
        Err(Error::host("the monitor does not answer", cause + &self.log_tail()))
    }

    /// Sends a request to a running monitor. Its end is reported by [`wait`](Monitor::wait), not here.
    async fn command(
        &mut self,
        request: &Request,
        fds: &[BorrowedFd<'_>],
        patience: Duration,
    ) -> Result<(Reply, Vec<OwnedFd>)> {
        let cause = match tokio::time::timeout(patience, self.exchange(Some(request), fds)).await {
            Ok(Ok(Some((Reply::Error { message }, _)))) => return Err(refused(&message)),
            Ok(Ok(Some(answer))) => return Ok(answer),
            Ok(Ok(None)) => return Err(Error::new(Code::SandboxEnded, "the sandbox ended meanwhile")),
            Ok(Err(error)) => {
                let error = error.to_string();
                self.distrust(&error);
                error
            }
            Err(_) => format!("no answer within {patience:?}"),
        };
        Err(Error::host("the monitor does not answer", cause))
    }

    /// The reply to `request`, or to the last one sent; `None` if the monitor closed the connection.
    async fn exchange(
        &mut self,
        request: Option<&Request>,
        fds: &[BorrowedFd<'_>],
    ) -> io::Result<Option<(Reply, Vec<OwnedFd>)>> {
        let Some(control) = &self.control else { return Ok(None) };
        if let Some(request) = request {
            match control.send(request, fds).await {
                Err(error) if control_socket::is_gone(&error) => {}
                other => other?,
            }
            self.owed += 1;
        }
        loop {
            match control.recv().await? {
                Some((Message::Reply(reply), fds)) => {
                    self.owed = self.owed.saturating_sub(1);
                    if self.owed == 0 {
                        return Ok(Some((reply, fds)));
                    }
                    // The reply to a request that was given up: replies come in order.
                    Monitor::note_late(&mut self.late_pause, &reply);
                    discard(self.pid, reply, fds);
                }
                Some((Message::Event(event), fds)) => {
                    note(&mut self.vm_end, &mut self.ready, &mut self.disk_full, event, fds);
                }
                None => return Ok(None),
            }
        }
    }
}

/// Drops a reply that came too late, and kills the branch in it.
pub(super) fn discard(source: i32, reply: Reply, fds: Vec<OwnedFd>) {
    if let (Reply::Branched { pid, .. }, Some(pidfd)) = (reply, fds.into_iter().next())
        && let Ok(pidfd) = child_pidfd(pidfd, pid, source)
    {
        let _ = rustix::process::pidfd_send_signal(pidfd, rustix::process::Signal::KILL);
    }
}

/// The request for [`Replacement`]s, and its descriptors.
pub(crate) fn replace_request(disks: Vec<Option<Replacement>>) -> (Request, Vec<OwnedFd>) {
    let (mut fds, mut named) = (Vec::new(), Vec::with_capacity(disks.len()));
    for disk in disks {
        named.push(disk.map(|disk| {
            fds.push(disk.layer);
            ReplacedLayers { count: disk.count, layer: FdRef(fds.len() - 1) }
        }));
    }
    (Request::ReplaceLayers { disks: named }, fds)
}

fn attach<'a>(fds: &mut Vec<BorrowedFd<'a>>, fd: &'a OwnedFd) -> FdRef {
    fds.push(fd.as_fd());
    FdRef(fds.len() - 1)
}

/// A branch from its source's reply: a pidfd, then layers.
fn branched(
    source: i32,
    pid: i32,
    pause_us: u64,
    layers: &[Option<FdRef>],
    fds: Vec<OwnedFd>,
) -> Result<Branched> {
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    let mut take = |index: usize| fds.get_mut(index).and_then(Option::take);
    let wrong = || Error::host("the monitor gave the wrong answer", "a branch without its descriptors");
    let pidfd = child_pidfd(take(0).ok_or_else(wrong)?, pid, source)
        .map_err(|error| Error::host("the monitor gave the wrong answer", error))?;
    let layers = layers.iter().map(|layer| match layer {
        Some(FdRef(index)) => take(*index).map(Some).ok_or_else(wrong),
        None => Ok(None),
    });
    let layers = layers.collect::<Result<_>>().inspect_err(|_| {
        let _ = rustix::process::pidfd_send_signal(&pidfd, rustix::process::Signal::KILL);
    })?;
    Ok(Branched { pid, pidfd, pause: Duration::from_micros(pause_us), layers })
}

fn refused(message: &str) -> Error {
    let message = console::printable(message.as_bytes());
    Error::new(Code::MonitorRefused, "the monitor refused").because(message)
}

fn unexpected(reply: &Reply) -> Error {
    Error::host("the monitor gave the wrong answer", console::brief(reply))
}
