//! Commands: requests reach a running sandbox's monitor through its supervisor.
//!
//! The supervisor owns the monitor. It takes commands from a channel and completes one before it begins the next, even
//! if the request is cancelled. A delete takes effect after the current command.

use std::os::fd::OwnedFd;
use std::time::Duration;

use forkd_protocol::control::BranchConfig;
use tokio::sync::oneshot;

use crate::error::{Code, Error, Result};
use crate::host::process::ProcessId;
use crate::monitor::{Branched, Monitor, Replacement};
use crate::sandbox::{Phase, Sandbox};

/// The sender for the answer to a command.
pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// How many commands may wait for one sandbox.
pub(crate) const QUEUE: usize = 8;

/// A command to a supervisor.
#[derive(Debug)]
pub(crate) enum MonitorCommand {
    /// Fork a template off the VM. The config refers to the descriptors by index.
    Branch(BranchConfig, Vec<OwnedFd>, Reply<ForkedBranch>),
    /// Stop vCPUs and devices.
    Pause(Reply<()>),
    /// Start vCPUs and devices again.
    Resume(Reply<()>),
    /// Give up write access to the topmost frozen layer of each disk.
    Seal(Vec<Option<OwnedFd>>, Reply<()>),
    /// Kill the monitor, which may be under the guest's control; the text says why.
    Distrust(String),
    /// Replace several layers of each disk by one file.
    ReplaceLayers(Vec<Option<Replacement>>, Reply<()>),
}

/// A branch that has just been forked.
#[derive(Debug)]
pub(crate) struct ForkedBranch {
    pub(crate) branched: Branched,
    pub(crate) identity: ProcessId,
}

impl MonitorCommand {
    /// Runs the command. `patience` is how long one answer of the monitor may take.
    pub(crate) async fn execute(self, sandbox: &Sandbox, monitor: &mut Monitor, patience: Duration) {
        match self {
            MonitorCommand::Branch(config, fds, reply) => {
                let branched = monitor.branch(config, &fds, patience).await;
                // Looked up here, where the supervisor cannot end the source: its pid identifies the parent.
                let forked =
                    branched.and_then(|branched| match ProcessId::of_child(branched.pid, monitor.pid()) {
                        Ok(identity) => Ok(ForkedBranch { branched, identity }),
                        Err(error) => {
                            kill(&branched);
                            Err(Error::host("cannot record a branch", error))
                        }
                    });
                if let Err(Ok(unwanted)) = reply.send(forked) {
                    kill(&unwanted.branched);
                }
            }
            MonitorCommand::Pause(reply) => {
                let paused = monitor.pause(patience).await;
                if paused.is_ok() {
                    sandbox.update_runtime(|runtime| runtime.disk_full = false);
                    sandbox.pauses.begin();
                    sandbox.set_phase(Phase::Paused);
                }
                let _ = reply.send(paused);
            }
            MonitorCommand::Resume(reply) => {
                let resumed = monitor.resume(patience).await;
                if resumed.is_ok() {
                    sandbox.update_runtime(|runtime| runtime.disk_full = false);
                    sandbox.pauses.end();
                    sandbox.set_phase(Phase::Running);
                }
                let _ = reply.send(resumed);
            }
            MonitorCommand::Seal(layers, reply) => drop(reply.send(monitor.seal(&layers, patience).await)),
            MonitorCommand::Distrust(why) => monitor.distrust(&why),
            MonitorCommand::ReplaceLayers(disks, reply) => {
                let _ = reply.send(monitor.replace_layers(disks, patience).await);
            }
        }
    }
}

fn kill(branched: &Branched) {
    let _ = rustix::process::pidfd_send_signal(&branched.pidfd, rustix::process::Signal::KILL);
}

impl Sandbox {
    /// Has the supervisor kill the monitor, which may be under the guest's control, because of `why`.
    pub(crate) async fn distrust(&self, why: &str) {
        let _ = self.supervisor.commands.send(MonitorCommand::Distrust(why.to_owned())).await;
    }

    /// Sends the supervisor a command and waits for the answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> MonitorCommand) -> Result<T> {
        self.known()?;
        let ended = || Error::new(Code::SandboxEnded, format!("sandbox {} ended meanwhile", self.id));
        if let Phase::Ended(end) = self.phase() {
            return Err(self.ended(Code::SandboxEnded, &end));
        }
        let (reply, replied) = oneshot::channel();
        self.supervisor.commands.send(command(reply)).await.map_err(|_| ended())?;
        replied.await.unwrap_or_else(|_| Err(ended()))
    }
}

#[cfg(test)]
mod tests;
