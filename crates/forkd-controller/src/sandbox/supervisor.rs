//! The supervisor of a sandbox: a task that owns its monitor, brings the guest up (`start`), watches it (`watchdog`),
//! runs the commands of requests (`command`), and records the end.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use forkd_protocol::agent::WarmRequest;
use forkd_protocol::control::{Channel, EndReason, WaitStatus};
use tokio::sync::mpsc;

use crate::config::{Config, Timing};
use crate::error::Error;
use crate::host::images::BootSource;
use crate::monitor::{Monitor, MonitorEnd, console};
use crate::sandbox::command::MonitorCommand;
use crate::sandbox::rollback::RollbackPlan;
use crate::sandbox::{DesiredState, END, End, Phase, ROLLED_BACK, Sandbox};
use crate::snapshot::template::PendingChild;
use crate::telemetry::metrics;
use crate::telemetry::otlp::Over;

/// The way a sandbox starts.
#[derive(Debug)]
pub(crate) enum SandboxOrigin {
    /// A boot from an image.
    Boot {
        assets: BootSource,
        /// What of the image's warm-up runs before the sandbox counts as running.
        warm: Option<WarmRequest>,
        /// Whether it is to outlive this daemon.
        lasting: bool,
        /// The variables that the agent gets with the sandbox's id.
        envs: BTreeMap<String, String>,
    },
    /// A fork of a template.
    Fork(PendingFork),
    /// A rollback, which replaces another process.
    Rollback(Box<RollbackPlan>),
    /// A sandbox of an earlier daemon, which runs already.
    Adopted(Monitor),
}

/// A fork that was requested from the template.
#[derive(Debug)]
pub(crate) struct PendingFork {
    pub(crate) pending: PendingChild,
    /// The daemon's end of the control connection, which the child will answer on.
    pub(crate) control: Channel,
    /// When the request for it arrived.
    pub(crate) arrived: Instant,
    /// The variables that the agent gets with the sandbox's id.
    pub(crate) envs: BTreeMap<String, String>,
}

/// How a supervisor's work ends.
pub(crate) enum Outcome {
    Ended(End),
    /// The sandbox runs on, for the next daemon.
    Left,
}

impl Sandbox {
    /// Brings the sandbox up, watches it, and returns when the process is gone or left to the next daemon.
    pub(crate) async fn supervise(self: Arc<Self>, origin: SandboxOrigin, config: Arc<Config>) {
        let (adopted, again) =
            (matches!(origin, SandboxOrigin::Adopted(_)), matches!(origin, SandboxOrigin::Rollback(_)));
        let (metrics, begun) = (&self.telemetry.metrics, Instant::now());
        let counted = match &origin {
            SandboxOrigin::Boot { .. } => Some(&metrics.boots),
            SandboxOrigin::Fork(_) => Some(&metrics.spawns),
            SandboxOrigin::Rollback(_) | SandboxOrigin::Adopted(_) => None,
        };
        let started = match origin {
            SandboxOrigin::Boot { assets, warm, lasting, envs } => {
                let booted = self.boot(&assets, warm.as_ref(), &envs, &config).await;
                match lasting {
                    true => self.record_boot(booted, envs).await,
                    false => booted,
                }
            }
            SandboxOrigin::Fork(pending) => self.finish_fork(pending, &config.timing).await,
            SandboxOrigin::Rollback(plan) => self.complete_rollback(*plan, &config).await,
            SandboxOrigin::Adopted(monitor) => Ok(monitor),
        };
        if let Some(counted) = counted {
            let how = how_it_started(&started);
            counted.add(how, 1);
            self.trace_start(begun, how);
        }
        let outcome = match started {
            Ok(mut monitor) => {
                let runtime = self.runtime();
                tracing::debug!(
                    sandbox = self.id,
                    boot_ms = runtime.boot_ms,
                    ready_ms = runtime.ready_ms,
                    "sandbox runs"
                );
                let paused = adopted && self.is_paused(&mut monitor, &config.timing).await;
                match (paused, again) {
                    (true, _) => self.set_phase(Phase::Paused),
                    (false, true) => self.note_rolled_back(),
                    (false, false) => self.set_phase(Phase::Running),
                }
                // A forked process still has its template's OOM score. This comes after the waiting requests are
                // answered.
                monitor.rank_as_sandbox();
                self.watch(monitor, &config.timing).await
            }
            Err(outcome) => outcome,
        };
        let Outcome::Ended(end) = outcome else { return };
        match end.is_requested() || end.reason == ROLLED_BACK {
            true => tracing::debug!(sandbox = self.id, reason = end.reason, "sandbox ended"),
            false => {
                tracing::info!(sandbox = self.id, reason = end.reason, detail = end.detail, "sandbox ended")
            }
        }
        self.record_end(&end);
        self.update_runtime(|runtime| runtime.pid = None);
        self.set_phase(Phase::Ended(Arc::new(end)));
    }

    /// Records the end after the supervisor panicked: that dropped the monitor, which ended the process.
    pub(crate) fn supervisor_panicked(&self, error: Error) {
        let end = End::failed("failed", &error, String::new());
        self.record_end(&end);
        self.update_runtime(|runtime| runtime.pid = None);
        self.set_phase(Phase::Ended(Arc::new(end)));
    }

    fn trace_start(&self, begun: Instant, how: metrics::Outcome) {
        let (name, attributes) = (
            if self.spec.is_booted() { "boot" } else { "spawn" },
            [
                ("forkd.sandbox", Some(self.id.as_str())),
                ("forkd.snapshot", self.spec.snapshot_tag.as_deref()),
                ("forkd.image", self.spec.image.as_deref()),
            ],
        );
        let over = Over { name, begun, failed: how == metrics::Outcome::Failed, attributes: &attributes };
        self.telemetry.traces.work(self.trace, over);
    }

    /// Whether an adopted sandbox is paused.
    async fn is_paused(&self, monitor: &mut Monitor, timing: &Timing) -> bool {
        let Ok(status) = monitor.status(timing.call).await else { return false };
        // The process lives, so the end that a cut-off rollback wrote is void.
        let _ = std::fs::remove_file(self.folder.join(END));
        // The monitor reports a full disk before it answers.
        let disk_full = monitor.take_disk_full();
        self.update_runtime(|runtime| runtime.disk_full = disk_full);
        !status.running
    }

    /// Writes the record of a booted sandbox for the next daemon. If that fails, the sandbox is ended.
    async fn record_boot(
        &self,
        booted: Result<Monitor, Outcome>,
        envs: BTreeMap<String, String>,
    ) -> Result<Monitor, Outcome> {
        let mut monitor = booted?;
        match self.persist_for_adoption(envs) {
            Ok(()) => Ok(monitor),
            Err(error) => {
                monitor.end().await;
                let error = Error::host("cannot write the record of a sandbox", error);
                Err(Outcome::Ended(End::failed("boot_failed", &error, String::new())))
            }
        }
    }

    /// Writes the end of a sandbox that has a record, and lets its template forget the child.
    fn record_end(&self, end: &End) {
        let template = self.resources().template.clone();
        if self.record().is_none() {
            return;
        }
        // A requested end removes the folder, and the process after a rollback has an end of its own.
        if !end.is_requested()
            && end.reason != ROLLED_BACK
            && let Err(error) = self.write_if_not_deleted(|folder| end.write(folder))
        {
            tracing::error!(sandbox = self.id, %error, "sandbox end not written");
            return;
        }
        if let Some(template) = template {
            template.acknowledge(&self.child);
        }
    }

    /// Watches a running sandbox until its end, and runs commands with its monitor.
    async fn watch(&self, mut monitor: Monitor, timing: &Timing) -> Outcome {
        // The channel closes when this returns, so every request that still waits gets an error.
        let mut commands = self.take_commands();
        let mut watchdog = std::pin::pin!(self.watchdog(timing));
        let desired = loop {
            if monitor.take_disk_full() {
                self.paused_for_room();
            }
            if let Some(paused) = monitor.take_late_pause() {
                self.paused_late(paused);
            }
            let hung_up = monitor.hung_up(timing.call);
            let command = tokio::select! {
                biased;
                desired = self.desired_changed() => break desired,
                happened = monitor.next() => match happened {
                    Some(end) => return Outcome::Ended(self.account(end).await),
                    None => continue,
                },
                Some(command) = next_command(&mut commands) => command,
                () = hung_up => {
                    monitor.end_hung_up();
                    continue;
                }
                () = &mut watchdog => break DesiredState::End,
            };
            command.execute(self, &mut monitor, timing.call).await;
        };
        if desired == DesiredState::Leave {
            monitor.leave();
            return Outcome::Left;
        }
        monitor.end().await;
        Outcome::Ended(if desired == DesiredState::Replace { End::rolled_back() } else { self.end_reason() })
    }

    /// Sets the state that a late reply reports. Its client got an error before that.
    fn paused_late(&self, paused: bool) {
        tracing::warn!(
            sandbox = self.id,
            paused,
            "monitor did a pause or a resume after its request timed out"
        );
        match (paused, self.phase()) {
            (true, Phase::Running | Phase::Unresponsive) => {
                self.pauses.begin();
                self.set_phase(Phase::Paused);
            }
            (false, Phase::Paused) => {
                self.pauses.end();
                self.set_phase(Phase::Running);
            }
            _ => {}
        }
    }

    async fn account(&self, end: MonitorEnd) -> End {
        // An earlier daemon wrote this end before it ended the process.
        if let Some(recorded) = End::read(&self.folder).read() {
            return recorded;
        }
        if let Some(detail) = self.out_of_memory(end.status) {
            return End::new("out_of_memory", detail, self.tail().await);
        }
        let (detail, cause) = (end.describe(), end.cause());
        let Some(vm) = end.vm else {
            let reason = if end.status.is_some() { "monitor_died" } else { "unknown" };
            return End { cause, ..End::new(reason, detail, self.tail().await) };
        };
        let reason = match vm.reason {
            EndReason::PoweredOff => "powered_off",
            EndReason::Reset => "reset",
            EndReason::Panicked => "panicked",
            EndReason::Failed => "failed",
        };
        let console_tail = match vm.console_tail.is_empty() {
            true => self.tail().await,
            false => console::printable(vm.console_tail.as_bytes()),
        };
        End { cause, ..End::new(reason, detail, console_tail) }
    }

    /// The detail of the end if the kernel killed the process at its memory limit.
    pub(super) fn out_of_memory(&self, status: Option<WaitStatus>) -> Option<String> {
        let killed = matches!(status, Some(WaitStatus::Signaled(9)) | None);
        let kills = self.resources().leaf.as_ref().and_then(|leaf| leaf.oom_kills().ok()).unwrap_or(0);
        (killed && kills > 0).then(|| {
            let limit = self.spec.memory_limit_mib;
            format!("it used more than its {limit} MiB; create it with a larger memory_limit_mib")
        })
    }
}

fn how_it_started(started: &Result<Monitor, Outcome>) -> metrics::Outcome {
    match started {
        Ok(_) => metrics::Outcome::Ok,
        Err(Outcome::Ended(end)) if end.reason != "deleted" => metrics::Outcome::Failed,
        Err(_) => metrics::Outcome::Cancelled,
    }
}

async fn next_command(commands: &mut Option<mpsc::Receiver<MonitorCommand>>) -> Option<MonitorCommand> {
    match commands {
        Some(commands) => commands.recv().await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests;
