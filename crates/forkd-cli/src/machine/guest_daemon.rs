//! The daemon in the machine: a process that the machine's agent runs for the supervisor.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use forkd_controller::agent::{Agent, Process, StartOptions};
use forkd_protocol::agent::{Event, ProcessConfig, StartRequest};

use super::log::printable;
use super::qemu::{MACHINE_DATA, REST_PORT, SHARE};

/// The time in which the daemon must end after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(20);

/// The path of its log, in the machine.
pub(crate) const LOG: &str = "/var/lib/forkd-machine/daemon.log";

/// A started daemon.
#[derive(Debug)]
pub(super) struct GuestDaemon {
    pid: u32,
    events: Process,
}

impl GuestDaemon {
    /// Starts the daemon from `build`.
    pub(super) async fn start(agent: &Agent, build: &str) -> Result<Self> {
        let process = ProcessConfig {
            cmd: "/bin/sh".into(),
            args: vec!["-c".into(), script(build)],
            cwd: Some("/".into()),
            // Guests boot many times slower here than on hardware.
            envs: [("FORKD_BOOT_TIMEOUT_SECS", "300"), ("FORKD_UNRESPONSIVE_SECS", "180")]
                .map(|(name, value)| (name.into(), value.into()))
                .into(),
        };
        let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
        let failed = "the daemon cannot be started in the machine";
        let mut events = agent.start(&request, &StartOptions::default()).await.context(failed)?;
        loop {
            match events.next().await.context(failed)? {
                Some(Event::Start { pid }) => return Ok(GuestDaemon { pid, events }),
                Some(Event::Keepalive {}) => {}
                other => bail!("{failed}: the agent sent {other:?} first"),
            }
        }
    }

    /// Waits until it has ended; returns how. Safe to cancel.
    pub(super) async fn ended(&mut self) -> String {
        loop {
            match self.events.next().await {
                Ok(Some(Event::End(end))) => return end.status,
                Ok(Some(_)) => {}
                Ok(None) => return "the agent did not report how".to_owned(),
                // The machine itself has a problem; the watchdog detects it.
                Err(error) => return error.to_string(),
            }
        }
    }

    pub(super) async fn signal(&self, agent: &Agent, name: &str) -> Result<()> {
        Ok(agent.signal(self.pid, name).await?)
    }

    /// Sends SIGTERM and waits for its end; kills it after the time limit.
    pub(super) async fn stop(mut self, agent: &Agent) {
        for name in ["SIGTERM", "SIGKILL"] {
            let asked = self.signal(agent, name).await.is_ok();
            if !asked || tokio::time::timeout(STOP_TIMEOUT, self.ended()).await.is_ok() {
                return;
            }
        }
    }

    /// The end of its log, for error messages.
    pub(super) async fn log_tail(agent: &Agent) -> String {
        match agent.read_file(LOG, None, 16 << 20).await {
            Ok(bytes) => {
                let text = printable(&bytes[bytes.len().saturating_sub(4000)..]);
                let lines: Vec<_> = text.lines().collect();
                lines[lines.len().saturating_sub(5)..].join("\n")
            }
            Err(error) => format!("(cannot read its log: {error})"),
        }
    }
}

/// The script for the machine's shell. The build is a hexadecimal number and needs no quotes. The machine
/// also sees the host's configuration file, but that one's addresses and certificates are not for a daemon
/// behind QEMU.
fn script(build: &str) -> String {
    format!(
        "log={LOG}
         if [ -f $log ] && [ \"$(stat -c %s $log)\" -gt 4194304 ]; then mv $log $log.old; fi
         exec {SHARE}/machine/bin/{build}/forkd --config /dev/null serve --data-dir {MACHINE_DATA}/forkd --library {SHARE} \
         --bind 127.0.0.1:{REST_PORT} --in-machine --token-file {SHARE}/machine/token >>$log 2>&1"
    )
}
