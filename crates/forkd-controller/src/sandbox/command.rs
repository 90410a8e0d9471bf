//! What requests ask of a running sandbox's monitor, by way of its supervisor.
//!
//! The supervisor owns the monitor; commands come to it through a channel and are done one after the other,
//! each to its end: whoever asked may go away, and a sandbox that is deleted meanwhile is ended after.

use std::os::fd::OwnedFd;
use std::time::Duration;

use forkd_protocol::control::BranchConfig;
use tokio::sync::oneshot;

use crate::error::{Code, Error, Result};
use crate::host::process::ProcessId;
use crate::monitor::{Branched, Monitor, Replacement};
use crate::sandbox::{Phase, Sandbox};

/// How whoever asked is told.
pub(crate) type Reply<T> = oneshot::Sender<Result<T>>;

/// How many commands may wait for one sandbox.
pub(crate) const QUEUE: usize = 8;

/// What a supervisor does with its monitor when asked.
#[derive(Debug)]
pub(crate) enum MonitorCommand {
    /// Fork a template off the VM. The descriptors are what the config refers to.
    Branch(BranchConfig, Vec<OwnedFd>, Reply<ForkedBranch>),
    /// Stop vCPUs and devices.
    Pause(Reply<()>),
    /// Let them go on.
    Resume(Reply<()>),
    /// Let go of the right to write to the topmost frozen layer of each disk.
    Seal(Vec<Option<OwnedFd>>, Reply<()>),
    /// End the monitor, because it broke the rules: how.
    Distrust(String),
    /// Use one file in the place of several layers.
    ReplaceLayers(Vec<Option<Replacement>>, Reply<()>),
}

/// A branch that has just been forked.
#[derive(Debug)]
pub(crate) struct ForkedBranch {
    pub(crate) branched: Branched,
    pub(crate) identity: ProcessId,
}

impl MonitorCommand {
    /// Does it. `patience` is for one answer of the monitor.
    pub(crate) async fn obey(self, sandbox: &Sandbox, monitor: &mut Monitor, patience: Duration) {
        match self {
            MonitorCommand::Branch(config, fds, tell) => {
                let branched = monitor.branch(config, &fds, patience).await;
                // Looked up here, where the source is not ended meanwhile: it names the parent.
                let born =
                    branched.and_then(|branched| match ProcessId::of_child(branched.pid, monitor.pid()) {
                        Ok(identity) => Ok(ForkedBranch { branched, identity }),
                        Err(error) => {
                            kill(&branched);
                            Err(Error::host("cannot record a branch", error))
                        }
                    });
                if let Err(Ok(unwanted)) = tell.send(born) {
                    kill(&unwanted.branched);
                }
            }
            MonitorCommand::Pause(tell) => {
                let paused = monitor.pause(patience).await;
                if paused.is_ok() {
                    sandbox.update_runtime(|facts| facts.disk_full = false);
                    sandbox.pauses.begin();
                    sandbox.set_phase(Phase::Paused);
                }
                let _ = tell.send(paused);
            }
            MonitorCommand::Resume(tell) => {
                let resumed = monitor.resume(patience).await;
                if resumed.is_ok() {
                    sandbox.update_runtime(|facts| facts.disk_full = false);
                    sandbox.pauses.end();
                    sandbox.set_phase(Phase::Running);
                }
                let _ = tell.send(resumed);
            }
            MonitorCommand::Seal(layers, tell) => drop(tell.send(monitor.seal(&layers, patience).await)),
            MonitorCommand::Distrust(why) => monitor.distrust(&why),
            MonitorCommand::ReplaceLayers(disks, tell) => {
                let _ = tell.send(monitor.replace_layers(disks, patience).await);
            }
        }
    }
}

fn kill(branched: &Branched) {
    let _ = rustix::process::pidfd_send_signal(&branched.pidfd, rustix::process::Signal::KILL);
}

impl Sandbox {
    /// Has its supervisor end its monitor, which broke the rules: `why`.
    pub(crate) async fn distrust(&self, why: &str) {
        let _ = self.orders.commands.send(MonitorCommand::Distrust(why.to_owned())).await;
    }

    /// Asks its supervisor for a command and waits for the answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> MonitorCommand) -> Result<T> {
        self.known()?;
        let ended = || Error::new(Code::SandboxEnded, format!("sandbox {} ended meanwhile", self.id));
        if let Phase::Ended(end) = self.phase() {
            return Err(self.ended(Code::SandboxEnded, &end));
        }
        let (tell, told) = oneshot::channel();
        self.orders.commands.send(command(tell)).await.map_err(|_| ended())?;
        told.await.unwrap_or_else(|_| Err(ended()))
    }
}
