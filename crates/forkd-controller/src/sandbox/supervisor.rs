//! The keeper of a sandbox: brings it up, watches it, and accounts for its end.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use forkd_protocol::agent::{Pong, WarmRequest};
use forkd_protocol::control::{Channel, EndReason, WaitStatus};
use tokio::sync::mpsc;

use crate::agent::bringup;
use crate::config::{Config, Timing};
use crate::error::Error;
use crate::host::disk_layer;
use crate::host::images::Assets;
use crate::host::process::Identity;
use crate::monitor::{Launch, Monitor, MonitorEnd, boot_files, console, control_socket};
use crate::sandbox::command::Command;
use crate::sandbox::lifetime::deadline;
use crate::sandbox::rollback::Succession;
use crate::sandbox::{END, End, Phase, ROLLED_BACK, Sandbox, Wish};
use crate::snapshot::template::{Asked, lost};
use crate::telemetry::metrics;
use crate::telemetry::otlp::Over;

/// How a sandbox comes to be.
#[derive(Debug)]
pub(crate) enum Origin {
    /// From an image.
    Boot {
        assets: Assets,
        /// The image's warm-up, if it is to run before the sandbox counts as running.
        warm: Option<WarmRequest>,
        /// Whether it is to outlive this daemon.
        lasting: bool,
    },
    /// From a template.
    Fork(Birth),
    /// In the place of another process.
    Rollback(Box<Succession>),
    /// It was there before us.
    Adopted(Monitor),
}

/// A fork that was asked for.
#[derive(Debug)]
pub(crate) struct Birth {
    pub(crate) asked: Asked,
    /// The connection that waits for it.
    pub(crate) control: Channel,
    /// When the request for it arrived.
    pub(crate) arrived: Instant,
    /// What its agent is told beside its name.
    pub(crate) envs: BTreeMap<String, String>,
}

/// Why a guest did not come up.
enum Failure {
    /// Nobody wants it any more. What is half-made is not left to the next daemon, either.
    Dismissed,
    /// The host's side failed: trying again would fail again.
    Host(Error),
    /// The guest's side failed: what happened, and the end of its console if the monitor told it.
    Guest(String, Option<String>),
}

/// How a keeper's work is over.
pub(crate) enum Outcome {
    Ended(End),
    /// It runs on without us.
    Left,
}

impl Sandbox {
    /// Brings it up, watches it, and returns when the process is gone or left.
    pub(crate) async fn keep(self: Arc<Self>, origin: Origin, config: Arc<Config>) {
        let (adopted, again) = (matches!(origin, Origin::Adopted(_)), matches!(origin, Origin::Rollback(_)));
        let (metrics, begun) = (&self.telling.metrics, Instant::now());
        let counted = match &origin {
            Origin::Boot { .. } => Some(&metrics.boots),
            Origin::Fork(_) => Some(&metrics.spawns),
            Origin::Rollback(_) | Origin::Adopted(_) => None,
        };
        let started = match origin {
            Origin::Boot { assets, warm, lasting } => {
                let booted = self.boot(&assets, warm.as_ref(), &config).await;
                match lasting {
                    true => self.record_boot(booted).await,
                    false => booted,
                }
            }
            Origin::Fork(birth) => self.be_born(birth, &config.timing).await,
            Origin::Rollback(succession) => self.succeed(*succession, &config).await,
            Origin::Adopted(monitor) => Ok(monitor),
        };
        if let Some(counted) = counted {
            let how = how_it_started(&started);
            counted.add(how, 1);
            self.trace_start(begun, how);
        }
        let outcome = match started {
            Ok(mut monitor) => {
                let facts = self.facts();
                tracing::debug!(sandbox = self.id, facts.boot_ms, facts.ready_ms, "sandbox runs");
                let paused = adopted && self.is_paused(&mut monitor, &config.timing).await;
                match (paused, again) {
                    (true, _) => self.turn_to(Phase::Paused),
                    (false, true) => self.runs_again(),
                    (false, false) => self.turn_to(Phase::Running),
                }
                // Forked, it still has the score of its template. Those who wait for it have their answer.
                monitor.rank_as_sandbox();
                self.watch(monitor, &config.timing).await
            }
            Err(outcome) => outcome,
        };
        let Outcome::Ended(end) = outcome else { return };
        match end.is_wished() || end.reason == ROLLED_BACK {
            true => tracing::debug!(sandbox = self.id, reason = end.reason, "sandbox ended"),
            false => {
                tracing::info!(sandbox = self.id, reason = end.reason, detail = end.detail, "sandbox ended")
            }
        }
        self.record_end(&end);
        self.learn(|facts| facts.pid = None);
        self.turn_to(Phase::Ended(Arc::new(end)));
    }

    /// Its keeper panicked: what it held was dropped, so the process is ended. Nothing more is known of it.
    pub(crate) fn lose_keeper(&self, error: Error) {
        let end = End::failed("failed", &error, String::new());
        self.record_end(&end);
        self.learn(|facts| facts.pid = None);
        self.turn_to(Phase::Ended(Arc::new(end)));
    }

    fn trace_start(&self, begun: Instant, how: metrics::Outcome) {
        let (name, attributes) = (
            if self.spec.snapshot_tag.is_some() { "spawn" } else { "boot" },
            [
                ("forkd.sandbox", Some(self.id.as_str())),
                ("forkd.snapshot", self.spec.snapshot_tag.as_deref()),
                ("forkd.image", self.spec.image.as_deref()),
            ],
        );
        let over = Over { name, begun, failed: how == metrics::Outcome::Failed, attributes: &attributes };
        self.telling.traces.work(self.trace, over);
    }

    /// Whether an adopted one stands still.
    async fn is_paused(&self, monitor: &mut Monitor, timing: &Timing) -> bool {
        let Ok(status) = monitor.status(timing.call).await else { return false };
        // It lives: a rollback that was cut off had not come to its end.
        let _ = std::fs::remove_file(self.folder.join(END));
        // It has told why before it answered.
        let disk_full = monitor.take_disk_full();
        self.learn(|facts| facts.disk_full = disk_full);
        !status.running
    }

    /// Makes one that has booted one that the next daemon takes over. One that cannot be is ended.
    async fn record_boot(&self, booted: Result<Monitor, Outcome>) -> Result<Monitor, Outcome> {
        let mut monitor = booted?;
        match self.outlive() {
            Ok(()) => Ok(monitor),
            Err(error) => {
                monitor.end().await;
                let error = Error::host("cannot write down what a sandbox is", error);
                Err(Outcome::Ended(End::failed("boot_failed", &error, String::new())))
            }
        }
    }

    /// Writes down how one with a record ended, and lets its template forget it.
    fn record_end(&self, end: &End) {
        let template = self.belongings().template.clone();
        if self.record().is_none() {
            return;
        }
        // What was deleted leaves no trace, and whoever takes its place has one of its own.
        if !end.is_wished()
            && end.reason != ROLLED_BACK
            && let Err(error) = self.own(|folder| end.write(folder))
        {
            tracing::error!(sandbox = self.id, %error, "cannot write down how it ended");
            return;
        }
        if let Some(template) = template {
            template.acknowledge(&self.child);
        }
    }

    async fn boot(
        &self,
        assets: &Assets,
        warm: Option<&WarmRequest>,
        config: &Config,
    ) -> Result<Monitor, Outcome> {
        let mut retried = false;
        loop {
            let (failure, ended) = match self.attempt(assets, warm, config).await {
                Ok(monitor) => return Ok(monitor),
                Err(failed) => failed,
            };
            let process = ended.as_ref().map(MonitorEnd::account).unwrap_or_default();
            let (detail, told) = match failure {
                Failure::Dismissed => return Err(Outcome::Ended(self.farewell())),
                Failure::Host(error) => {
                    tracing::warn!(sandbox = self.id, %error, process, "boot failed");
                    let end = End::failed("boot_failed", &error, self.tail().await);
                    return Err(Outcome::Ended(end));
                }
                Failure::Guest(detail, told) => (detail, told),
            };
            let console_tail = match told {
                Some(tail) => tail,
                None => self.tail().await,
            };
            // Seen under nested virtualization: a boot now and then ends before the kernel's first
            // word. Nothing of the guest ran yet, so once more does no harm.
            if console_tail.trim().is_empty() && !retried {
                tracing::warn!(
                    sandbox = self.id,
                    detail,
                    "the boot ended with an empty console; trying once more"
                );
                retried = true;
                continue;
            }
            tracing::warn!(sandbox = self.id, detail, process, "boot failed");
            let cause = ended.and_then(|ended| ended.cause());
            return Err(Outcome::Ended(End { cause, ..End::new("boot_failed", detail, console_tail) }));
        }
    }

    /// One boot. On failure the process is gone, and its own account of it comes along.
    async fn attempt(
        &self,
        assets: &Assets,
        warm: Option<&WarmRequest>,
        config: &Config,
    ) -> Result<Monitor, (Failure, Option<MonitorEnd>)> {
        let begun = Instant::now();
        let host = |error| (Failure::Host(error), None);
        let launch = self.launch(config).map_err(host)?;
        let mut monitor = Monitor::launch(launch, config.timing.call).await.map_err(host)?;
        self.learn(|facts| facts.pid = u32::try_from(monitor.pid()).ok());
        let outcome = tokio::select! {
            biased;
            _ = self.dismissed() => Err(Failure::Dismissed),
            up = self.bring_up(&mut monitor, assets, warm, config) => up,
        };
        match outcome {
            Ok(pong) => {
                self.heard();
                let boot_ms = begun.elapsed().as_millis() as u64;
                self.learn(|facts| {
                    facts.deadline_unix = facts.lifetime.map(deadline).or(facts.deadline_unix);
                    facts.boot_ms = Some(boot_ms);
                    facts.python = Some(pong.python);
                });
                Ok(monitor)
            }
            Err(failure) => Err((failure, Some(monitor.end().await))),
        }
    }

    fn launch(&self, config: &Config) -> crate::error::Result<Launch> {
        let belongings = self.belongings();
        let door = belongings.leaf.as_ref().map(|leaf| leaf.door()).transpose();
        Ok(Launch {
            id: self.id.clone(),
            folder: self.folder.clone(),
            vmm: config.vmm.clone(),
            uid: belongings.lineage.as_ref().and_then(|lineage| lineage.uid()),
            door: door.map_err(|error| Error::host("cannot use a cgroup", error))?.map(Arc::new),
        })
    }

    /// An empty disk layer for its monitor.
    fn layer(&self, config: &Config) -> crate::error::Result<OwnedFd> {
        match &self.belongings().lineage {
            Some(lineage) => lineage.layer(&config.data_dir),
            None => disk_layer::layer(&config.data_dir),
        }
    }

    async fn bring_up(
        &self,
        monitor: &mut Monitor,
        assets: &Assets,
        warm: Option<&WarmRequest>,
        config: &Config,
    ) -> Result<Pong, Failure> {
        let tap = self.belongings().slot.as_mut().map(|slot| slot.take_tap()).transpose();
        let tap = tap.map_err(|error| Failure::Host(Error::host("cannot use a network slot", error)))?;
        let plan = boot_files::Plan {
            folder: self.folder.clone(),
            vcpus: self.spec.vcpus,
            mem_mib: self.spec.mem_mib,
            console_limit: config.limits.console_limit,
            tap,
            layer: Some(self.layer(config).map_err(Failure::Host)?),
        };
        let assets = assets.clone();
        let prepared = tokio::task::spawn_blocking(move || boot_files::prepare(plan, &assets)).await;
        let prepared = prepared.unwrap_or_else(|error| Err(Error::host("preparing a boot", error)));
        let (boot, fds) = prepared.map_err(Failure::Host)?;
        monitor.boot(boot, &fds, config.timing.boot).await.map_err(Failure::Host)?;
        drop(fds);
        let up = async {
            let pong = bringup::up(&self.agent, &config.timing).await?;
            // It runs without, as those whose agent is older do.
            if let Err(error) = self.agent.name(&self.id).await {
                tracing::debug!(sandbox = self.id, %error, "the guest does not know which sandbox it is");
            }
            if let Some(warm) = warm {
                bringup::warm_up(&self.agent, warm, &config.timing).await?;
            }
            Ok(pong)
        };
        tokio::select! {
            biased;
            end = monitor.wait() => {
                let told = end.vm.as_ref().map(|vm| console::printable(vm.console_tail.as_bytes()));
                Err(Failure::Guest(end.describe(), told))
            }
            up = up => up.map_err(|detail| Failure::Guest(detail, None)),
        }
    }

    /// From the template's answer to the child's first.
    pub(crate) async fn be_born(&self, birth: Birth, timing: &Timing) -> Result<Monitor, Outcome> {
        let Birth { asked, control, arrived, envs } = birth;
        let forked = tokio::select! {
            biased;
            forked = asked.forked => forked.unwrap_or_else(|_| Err(lost())),
            _ = self.dismissed() => {
                control_socket::stop_unseen(control);
                return Err(Outcome::Ended(self.farewell()));
            }
        };
        let forked = match forked {
            Ok(forked) => forked,
            Err(error) => {
                // A template that was killed may have forked it before.
                control_socket::stop_unseen(control);
                return Err(Outcome::Ended(self.fork_failed(&error)));
            }
        };
        self.telling.metrics.spawn.observe(arrived.elapsed().as_secs_f64());
        let pid = forked.pid;
        let monitor = Monitor::forked(self.id.clone(), self.folder.clone(), forked, control, asked.ended);
        let monitor =
            monitor.map_err(|error| self.fork_failed(&Error::host("cannot watch its process", error)));
        let mut monitor = monitor.map_err(Outcome::Ended)?;
        self.learn(|facts| facts.pid = u32::try_from(pid).ok());

        let answered = tokio::select! {
            biased;
            answered = self.first_answer(&mut monitor, &envs, timing) => answered,
            _ = self.dismissed() => Err(Failure::Dismissed),
        };
        let took = arrived.elapsed();
        // Half-made until here: what names its process makes the next daemon take it over.
        let recorded = answered.and_then(|python| {
            let template = self.belongings().template.as_ref().map_or(0, |template| template.pid);
            let identity = Identity::of_child(pid, template);
            let written = identity.and_then(|identity| self.own(|folder| identity.write(folder)));
            written.map_err(|error| Failure::Host(Error::host("cannot record its process", error)))?;
            Ok(python)
        });
        match recorded {
            Ok(python) => {
                self.telling.metrics.first_answer.observe(took.as_secs_f64());
                self.learn(|facts| {
                    facts.ready_ms = Some(took.as_secs_f64() * 1e3);
                    facts.python = python.or(facts.python);
                });
                Ok(monitor)
            }
            Err(failure) => {
                let process = monitor.end().await;
                Err(match failure {
                    Failure::Dismissed => Outcome::Ended(self.farewell()),
                    Failure::Host(error) => Outcome::Ended(self.fork_failed(&error)),
                    Failure::Guest(detail, told) => {
                        let detail = self.out_of_memory(process.status).unwrap_or(detail);
                        let tail = match told {
                            Some(tail) => tail,
                            None => self.tail().await,
                        };
                        Outcome::Ended(End {
                            cause: process.cause(),
                            ..End::new("fork_failed", detail, tail)
                        })
                    }
                })
            }
        }
    }

    /// Returns when a forked guest has shown that it runs and is its own; whether it has a Python.
    async fn first_answer(
        &self,
        monitor: &mut Monitor,
        envs: &BTreeMap<String, String>,
        timing: &Timing,
    ) -> Result<Option<bool>, Failure> {
        let told = |end: MonitorEnd| {
            let tail = end.vm.as_ref().map(|vm| console::printable(vm.console_tail.as_bytes()));
            Failure::Guest(end.describe(), tail)
        };
        if self.spec.is_bare() {
            return match tokio::time::timeout(timing.boot, monitor.ready()).await {
                Ok(ready) => ready.map(|()| None).map_err(told),
                Err(_) => {
                    let text = format!("the guest was not ready after {} s", timing.boot.as_secs());
                    Err(Failure::Guest(text, None))
                }
            };
        }
        tokio::select! {
            biased;
            end = monitor.wait() => Err(told(end)),
            became = bringup::become_sandbox(&self.agent, &self.id, envs, timing) => {
                let became = became.map_err(|detail| Failure::Guest(detail, None))?;
                for warning in &became.warnings {
                    let warning = console::printable(warning.as_bytes());
                    tracing::warn!(sandbox = self.id, warning, "the child runs, but");
                }
                self.heard();
                Ok(Some(became.python))
            }
        }
    }

    /// Watches a running sandbox to its end, and does with its monitor what is asked.
    async fn watch(&self, mut monitor: Monitor, timing: &Timing) -> Outcome {
        // Closed when this returns: whoever still waits for an answer is told.
        let mut commands = self.take_commands();
        let mut watchdog = std::pin::pin!(self.watchdog(timing));
        let wish = loop {
            if monitor.take_disk_full() {
                self.paused_for_room();
            }
            let command = tokio::select! {
                biased;
                wish = self.dismissed() => break wish,
                happened = monitor.next() => match happened {
                    Some(end) => return Outcome::Ended(self.account(end).await),
                    None => continue,
                },
                Some(command) = next_command(&mut commands) => command,
                () = &mut watchdog => break Wish::End,
            };
            command.obey(self, &mut monitor, timing.call).await;
        };
        if wish == Wish::Leave {
            monitor.leave();
            return Outcome::Left;
        }
        monitor.end().await;
        Outcome::Ended(if wish == Wish::GiveWay { End::rolled_back() } else { self.farewell() })
    }

    /// Pings the agent for ever and keeps the phase up to date.
    async fn watchdog(&self, timing: &Timing) {
        if self.spec.is_bare() {
            return std::future::pending().await;
        }
        let mut heard = Instant::now();
        loop {
            tokio::time::sleep(timing.ping_every).await;
            if matches!(self.phase(), Phase::Paused) {
                heard = Instant::now();
                continue;
            }
            match self.agent.ping().await {
                Ok(_) => {
                    heard = Instant::now();
                    self.heard();
                }
                Err(error) => tracing::debug!(sandbox = self.id, %error, "ping failed"),
            }
            let silent = heard.elapsed() > timing.unresponsive_after;
            if self.answers(!silent) {
                match silent {
                    true => tracing::warn!(sandbox = self.id, "sandbox does not answer"),
                    false => tracing::info!(sandbox = self.id, "sandbox answers again"),
                }
            }
        }
    }

    async fn account(&self, end: MonitorEnd) -> End {
        // An earlier daemon wrote it down, and ended it.
        if let Some(noted) = End::read(&self.folder).read() {
            return noted;
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

    fn fork_failed(&self, error: &Error) -> End {
        tracing::warn!(sandbox = self.id, %error, "a fork failed");
        End::failed("fork_failed", error, String::new())
    }

    /// What to say if the kernel killed it because its memory was used up.
    fn out_of_memory(&self, status: Option<WaitStatus>) -> Option<String> {
        let killed = matches!(status, Some(WaitStatus::Signaled(9)) | None);
        let kills = self.belongings().leaf.as_ref().and_then(|leaf| leaf.oom_kills().ok()).unwrap_or(0);
        (killed && kills > 0).then(|| {
            let limit = self.spec.memory_limit_mib;
            format!("it used more than its {limit} MiB; make it with a larger memory_limit_mib")
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

async fn next_command(commands: &mut Option<mpsc::Receiver<Command>>) -> Option<Command> {
    match commands {
        Some(commands) => commands.recv().await,
        None => std::future::pending().await,
    }
}
