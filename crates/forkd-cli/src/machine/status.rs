//! The state of the machine, for `forkd machine status`.

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Result;
use serde::Serialize;

use super::guest_daemon;
use super::state::{Phase, State};
use super::{Machine, agent};
use crate::host::clock;
use crate::ui::{bytes, seconds};

/// The time in which the machine and its daemon must answer.
const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// The state of the machine, as `--json` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct MachineStatus {
    /// `running`, `starting`, `stopping`, `stopped`, `failed` or `hung`.
    pub(crate) state: &'static str,
    pub(crate) detail: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) running: Option<RunningStatus>,
    pub(crate) disk: Option<Disk>,
    pub(crate) logs: Logs,
}

/// The part of the state that only a running machine has.
#[derive(Debug, Serialize)]
pub(crate) struct RunningStatus {
    pub(crate) uptime_secs: u64,
    pub(crate) memory_mib: u64,
    pub(crate) qemu_pid: Option<i32>,
    pub(crate) supervisor_pid: i32,
    pub(crate) agent_port: u16,
    pub(crate) daemon_url: String,
    pub(crate) daemon_healthy: bool,
    /// How often a machine that hung or died was replaced.
    pub(crate) restarts: u32,
    /// The build of the daemon in it.
    pub(crate) build: Option<String>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Disk {
    pub(crate) path: PathBuf,
    pub(crate) size_bytes: u64,
    /// Its bytes on the host's disk.
    pub(crate) used_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct Logs {
    pub(crate) console: PathBuf,
    pub(crate) supervisor: PathBuf,
    /// In the machine.
    pub(crate) daemon: &'static str,
}

/// Collects the state of the machine.
pub(crate) async fn look(machine: &Machine) -> Result<MachineStatus> {
    let folder = machine.folder();
    let disk = std::fs::metadata(folder.disk()).ok().map(|data| Disk {
        path: folder.disk(),
        size_bytes: data.len(),
        used_bytes: data.blocks() * 512,
    });
    let logs = Logs {
        console: folder.console_log(),
        supervisor: folder.supervisor_log(),
        daemon: guest_daemon::LOG,
    };
    let (Some(state), Some(plan)) = (folder.live_state()?, folder.plan()?) else {
        let (state, detail) = at_rest(folder.state()?.as_ref());
        return Ok(MachineStatus { state, detail, running: None, disk, logs });
    };
    let daemon = machine.daemon(&state)?;
    let agent = agent::connect(state.agent_port, &plan.agent_token);
    let answers = matches!(tokio::time::timeout(STATUS_TIMEOUT, agent.ping()).await, Ok(Ok(_)));
    let running = RunningStatus {
        uptime_secs: clock::now().saturating_sub(state.started_at),
        memory_mib: plan.memory_mib,
        qemu_pid: state.qemu.as_ref().map(|process| process.pid),
        supervisor_pid: state.supervisor.pid,
        agent_port: state.agent_port,
        daemon_url: daemon.url(),
        daemon_healthy: answers && daemon.is_healthy(STATUS_TIMEOUT).await,
        restarts: state.restarts,
        build: state.build.clone(),
    };
    let name = match state.phase {
        Phase::Booting => "starting",
        Phase::StartingDaemon | Phase::Ready if !answers => "hung",
        Phase::StartingDaemon => "starting",
        Phase::Ready => "running",
        Phase::Stopping | Phase::Stopped => "stopping",
        Phase::Failed => "failed",
    };
    let detail = match name {
        "hung" => format!("it does not answer; the supervisor restarts it after {} s", plan.watchdog_secs),
        _ => state.detail.clone(),
    };
    Ok(MachineStatus { state: name, detail, running: Some(running), disk, logs })
}

fn at_rest(last: Option<&State>) -> (&'static str, String) {
    match last {
        None => ("stopped", "it was never started".to_owned()),
        Some(state) => match state.phase {
            Phase::Stopped => ("stopped", state.detail.clone()),
            Phase::Failed => ("failed", state.detail.clone()),
            _ => ("stopped", "its supervisor was killed, which ended it".to_owned()),
        },
    }
}

impl MachineStatus {
    /// The state as text.
    pub(crate) fn to_text(&self) -> String {
        let mut lines = vec![format!("machine:  {} ({})", self.state, self.detail)];
        if let Some(running) = &self.running {
            let health = if running.daemon_healthy { "healthy" } else { "does not answer" };
            lines.push(format!("daemon:   {} ({health})", running.daemon_url));
            lines.push(format!("uptime:   {}", seconds(running.uptime_secs)));
            lines.push(format!("memory:   {} MiB", running.memory_mib));
            if running.restarts > 0 {
                lines.push(format!("replaced: {} times after it hung or died", running.restarts));
            }
        }
        if let Some(disk) = &self.disk {
            let (used, size) = (bytes(disk.used_bytes), bytes(disk.size_bytes));
            lines.push(format!("disk:     {used} of {size} in {}", disk.path.display()));
        }
        lines.push(format!("console:  {}", self.logs.console.display()));
        lines.push(format!("log:      {}", self.logs.supervisor.display()));
        lines.push(format!("daemon's: forkd machine shell -- cat {}", self.logs.daemon));
        lines.join("\n")
    }
}
