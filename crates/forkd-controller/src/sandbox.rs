//! One sandbox: booting it, watching it, ending it.
//!
//! A sandbox has one *keeper*, a task that owns its monitor from the start of the process to its
//! end. Requests never own the process: they watch the [`Phase`] and talk to the agent. So a
//! request that goes away leaves nothing half done, and a sandbox that ends tells everybody who
//! waits for it at once.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use forkd_protocol::agent::{AGENT_PORT, Pong, WarmState};
use forkd_protocol::control::{CONSOLE_TAIL, EndReason};
use tokio::sync::watch;

use crate::agent::{self, Agent, Endpoint};
use crate::assets::Assets;
use crate::boot;
use crate::config::{Config, Timing};
use crate::console;
use crate::error::{Error, Kind, Result};
use crate::monitor::{Launch, Monitor, MonitorEnd};

/// After a connection broke, how long to wait for the reason to become known.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// What to make a sandbox of.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) image: String,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    /// Run the image's warm-up before the sandbox counts as running.
    pub(crate) warm: bool,
}

/// Where a sandbox stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// It boots.
    Starting,
    /// Its agent answers.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// There is no process any more.
    Ended(Arc<End>),
}

/// How a sandbox ended.
#[derive(Debug, Clone)]
pub(crate) struct End {
    /// One word for programs.
    pub(crate) reason: &'static str,
    /// One sentence for people.
    pub(crate) detail: String,
    /// The end of its console.
    pub(crate) console_tail: String,
}

impl End {
    fn deleted() -> Self {
        End { reason: "deleted", detail: "the sandbox was deleted".into(), console_tail: String::new() }
    }
}

/// Why a guest did not come up.
enum BootFailure {
    /// Somebody deleted it meanwhile.
    Stopped,
    /// The host's side failed: trying again would fail again.
    Host(Error),
    /// The guest's side failed: what happened, and the end of its console if the monitor told it.
    Guest(String, Option<String>),
}

/// A sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) spec: Spec,
    pub(crate) created: SystemTime,
    /// Its files. Removed after the process is gone.
    pub(crate) folder: PathBuf,
    /// The user its monitor runs as, when it has one of its own.
    pub(crate) uid: Option<u32>,
    pub(crate) agent: Agent,
    phase: watch::Sender<Phase>,
    /// Set once, to end it.
    stop: watch::Sender<bool>,
    facts: Mutex<Facts>,
}

/// What becomes known while it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    pub(crate) pid: Option<u32>,
    /// From the monitor's start until it was ready, its warm-up included.
    pub(crate) boot_ms: Option<u64>,
    /// Whether the image has a Python.
    pub(crate) python: Option<bool>,
}

impl Sandbox {
    pub(crate) fn new(id: String, spec: Spec, uid: Option<u32>, folder: PathBuf, timing: &Timing) -> Self {
        let endpoint = Endpoint::Vsock { socket: folder.join(boot::VSOCK), port: AGENT_PORT };
        Sandbox {
            id,
            spec,
            created: SystemTime::now(),
            folder,
            uid,
            agent: Agent::new(endpoint, timing.call),
            phase: watch::Sender::new(Phase::Starting),
            stop: watch::Sender::new(false),
            facts: Mutex::default(),
        }
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    pub(crate) fn facts(&self) -> Facts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.folder.join(boot::CONSOLE)
    }

    /// Ends it: the keeper kills the process and finishes.
    pub(crate) fn stop(&self) {
        self.stop.send_replace(true);
    }

    /// Returns when somebody asked for its end.
    pub(crate) async fn stopped(&self) {
        // An error would mean that `self` is gone.
        let _ = self.stop.subscribe().wait_for(|stop| *stop).await;
    }

    /// Returns when it runs, or why it never will.
    pub(crate) async fn started(&self) -> Result<()> {
        let mut phases = self.phase.subscribe();
        let phase = phases.wait_for(|phase| !matches!(phase, Phase::Starting)).await;
        match phase.map(|phase| phase.clone()) {
            Ok(Phase::Ended(end)) => {
                let text = format!("sandbox {} did not start: {}", self.id, end.detail);
                Err(Error::new(Kind::Guest, with_console(&text, &end)))
            }
            _ => Ok(()),
        }
    }

    /// Fails unless it is running now.
    pub(crate) async fn ready(&self) -> Result<()> {
        match self.phase() {
            Phase::Running => Ok(()),
            Phase::Starting => {
                let text =
                    format!("sandbox {} is still starting; wait for its state to be `running`", self.id);
                Err(Error::new(Kind::Conflict, text))
            }
            Phase::Unresponsive => Err(self.unresponsive().await),
            Phase::Ended(end) => Err(self.ended(Kind::Conflict, &end)),
        }
    }

    /// Does `work` with the agent, unless the sandbox ends or hangs meanwhile: then the reason for
    /// that is the error.
    pub(crate) async fn with_agent<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let error = tokio::select! {
            done = work => match done {
                Ok(value) => return Ok(value),
                Err(error) => error,
            },
            trouble = self.trouble() => return Err(trouble),
        };
        if matches!(error, agent::Error::Unreachable(_) | agent::Error::Timeout(_)) {
            // A broken connection is often the first sign of an end whose reason comes later.
            if let Ok(trouble) = tokio::time::timeout(REASON_WAIT, self.trouble()).await {
                return Err(trouble);
            }
        }
        Err(self.agent_error(error))
    }

    /// Returns when the sandbox has ended or does not answer any more, with that as an error.
    pub(crate) async fn trouble(&self) -> Error {
        let mut phases = self.phase.subscribe();
        let bad = |phase: &Phase| matches!(phase, Phase::Ended(_) | Phase::Unresponsive);
        let phase = phases.wait_for(bad).await.map(|phase| phase.clone());
        match phase {
            Ok(Phase::Ended(end)) => self.ended(Kind::Guest, &end),
            _ => self.unresponsive().await,
        }
    }

    /// An agent's failure in words for the caller.
    pub(crate) fn agent_error(&self, error: agent::Error) -> Error {
        use forkd_protocol::connect::Code;
        let kind = match &error {
            agent::Error::Refused(error) => match error.code {
                Code::InvalidArgument | Code::OutOfRange => Kind::Invalid,
                Code::NotFound => Kind::NotFound,
                Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => Kind::Conflict,
                Code::PermissionDenied => Kind::Forbidden,
                Code::DeadlineExceeded => Kind::Timeout,
                Code::ResourceExhausted | Code::Unavailable => Kind::Busy,
                _ => Kind::Guest,
            },
            agent::Error::Timeout(_) => Kind::Timeout,
            agent::Error::Unreachable(_) | agent::Error::Protocol(_) => Kind::Guest,
        };
        Error::new(kind, console::printable(error.to_string().as_bytes()))
    }

    fn ended(&self, kind: Kind, end: &End) -> Error {
        let text = format!("sandbox {} has ended: {}", self.id, end.detail);
        Error::new(kind, with_console(&text, end))
    }

    async fn unresponsive(&self) -> Error {
        let text = format!("sandbox {} does not answer any more; delete it if it stays so", self.id);
        Error::new(Kind::Timeout, console::with_tail(&text, &self.tail().await))
    }

    /// The end of its console.
    async fn tail(&self) -> String {
        let path = self.console_path();
        let read = tokio::task::spawn_blocking(move || console::tail(&path, CONSOLE_TAIL as u64));
        read.await.unwrap_or_default()
    }

    /// The keeper: boots it, watches it, and returns when the process is gone.
    pub(crate) async fn keep(self: Arc<Self>, assets: Assets, config: Arc<Config>) {
        let end = match self.start(&assets, &config).await {
            Ok(monitor) => {
                tracing::info!(sandbox = self.id, boot_ms = self.facts().boot_ms, "sandbox runs");
                self.phase.send_replace(Phase::Running);
                self.watch(monitor, &config.timing).await
            }
            Err(end) => end,
        };
        tracing::info!(sandbox = self.id, reason = end.reason, detail = end.detail, "sandbox ended");
        self.learn(|facts| facts.pid = None);
        self.phase.send_replace(Phase::Ended(Arc::new(end)));
    }

    async fn start(&self, assets: &Assets, config: &Config) -> std::result::Result<Monitor, End> {
        let mut retried = false;
        loop {
            let (failure, ended) = match self.attempt(assets, config).await {
                Ok(monitor) => return Ok(monitor),
                Err(failed) => failed,
            };
            let (detail, told) = match failure {
                BootFailure::Stopped => return Err(End::deleted()),
                BootFailure::Host(error) => {
                    let console_tail = self.tail().await;
                    return Err(End { reason: "boot_failed", detail: error.message, console_tail });
                }
                BootFailure::Guest(detail, told) => (detail, told),
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
            tracing::warn!(sandbox = self.id, detail, process = ended, "boot failed");
            return Err(End { reason: "boot_failed", detail, console_tail });
        }
    }

    /// One boot. On failure the process is gone, and its own account of it comes along.
    async fn attempt(
        &self,
        assets: &Assets,
        config: &Config,
    ) -> std::result::Result<Monitor, (BootFailure, String)> {
        let begun = Instant::now();
        let launch = Launch {
            id: self.id.clone(),
            folder: self.folder.clone(),
            vmm: config.vmm.clone(),
            uid: self.uid,
        };
        let launched = Monitor::launch(launch, config.timing.call).await;
        let mut monitor = launched.map_err(|error| (BootFailure::Host(error), String::new()))?;
        self.learn(|facts| facts.pid = monitor.pid());
        let outcome = tokio::select! {
            biased;
            () = self.stopped() => Err(BootFailure::Stopped),
            up = self.bring_up(&mut monitor, assets, config) => up,
        };
        match outcome {
            Ok(pong) => {
                let boot_ms = begun.elapsed().as_millis() as u64;
                self.learn(|facts| {
                    facts.boot_ms = Some(boot_ms);
                    facts.python = Some(pong.python);
                });
                Ok(monitor)
            }
            Err(failure) => Err((failure, monitor.end().await.process)),
        }
    }

    async fn bring_up(
        &self,
        monitor: &mut Monitor,
        assets: &Assets,
        config: &Config,
    ) -> std::result::Result<Pong, BootFailure> {
        let (folder, spec, assets_open) = (self.folder.clone(), self.spec.clone(), assets.clone());
        let console_limit = config.limits.console_limit;
        let prepare = move || boot::prepare(&folder, &spec, &assets_open, console_limit);
        let prepared = tokio::task::spawn_blocking(prepare).await;
        let prepared = prepared.unwrap_or_else(|error| Err(Error::host("preparing a boot", error)));
        let (boot, fds) = prepared.map_err(BootFailure::Host)?;
        monitor.boot(boot, &fds, config.timing.boot).await.map_err(BootFailure::Host)?;
        drop(fds);
        tokio::select! {
            biased;
            end = monitor.wait() => {
                let told = end.vm.as_ref().map(|vm| console::printable(vm.console_tail.as_bytes()));
                Err(BootFailure::Guest(end.describe(), told))
            }
            up = self.agent_up(assets, &config.timing) => up.map_err(|detail| BootFailure::Guest(detail, None)),
        }
    }

    async fn agent_up(&self, assets: &Assets, timing: &Timing) -> std::result::Result<Pong, String> {
        let mut pause = Duration::from_millis(5);
        // A knock can get lost in a guest that is just coming up: the first are not waited for long.
        let mut patience = timing.call.min(Duration::from_secs(2));
        let mut last = String::from("nothing was tried");
        let knocking = async {
            loop {
                match tokio::time::timeout(patience, self.agent.ping()).await {
                    Ok(Ok(pong)) => return pong,
                    Ok(Err(error)) => last = error.to_string(),
                    Err(_) => {
                        last = format!("no answer within {patience:?}");
                        patience = (patience * 2).min(timing.call);
                    }
                }
                tokio::time::sleep(pause).await;
                pause = (pause * 3 / 2).min(Duration::from_millis(250));
            }
        };
        let Ok(pong) = tokio::time::timeout(timing.boot, knocking).await else {
            let secs = timing.boot.as_secs();
            return Err(format!("the agent was not up after {secs} s ({last})"));
        };
        if self.spec.warm {
            self.warm_up(assets, timing).await?;
        }
        Ok(pong)
    }

    async fn warm_up(&self, assets: &Assets, timing: &Timing) -> std::result::Result<(), String> {
        let deadline = Instant::now() + timing.warm;
        loop {
            let status = self.agent.warm(&assets.warm).await;
            let status = status.map_err(|error| format!("the warm-up failed: {error}"))?;
            match status.state {
                WarmState::Ready => return Ok(()),
                WarmState::Failed => {
                    let error = status.error.unwrap_or_else(|| "no reason given".into());
                    let error = console::printable(error.as_bytes());
                    return Err(format!("the warm-up failed: {error}"));
                }
                WarmState::Cold | WarmState::Warming if Instant::now() > deadline => {
                    let secs = timing.warm.as_secs();
                    return Err(format!("the warm-up took longer than {secs} s"));
                }
                WarmState::Cold | WarmState::Warming => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        }
    }

    /// Watches a running sandbox to its end.
    async fn watch(&self, mut monitor: Monitor, timing: &Timing) -> End {
        tokio::select! {
            biased;
            () = self.stopped() => {}
            end = monitor.wait() => return self.account(end).await,
            () = self.watchdog(timing) => {}
        }
        monitor.end().await;
        End::deleted()
    }

    /// Pings the agent for ever and keeps the phase up to date.
    async fn watchdog(&self, timing: &Timing) {
        let mut heard = Instant::now();
        loop {
            tokio::time::sleep(timing.ping_every).await;
            match self.agent.ping().await {
                Ok(_) => heard = Instant::now(),
                Err(error) => tracing::debug!(sandbox = self.id, %error, "ping failed"),
            }
            let silent = heard.elapsed() > timing.unresponsive_after;
            self.phase.send_if_modified(|phase| match (&phase, silent) {
                (Phase::Running, true) => {
                    tracing::warn!(sandbox = self.id, "sandbox does not answer");
                    *phase = Phase::Unresponsive;
                    true
                }
                (Phase::Unresponsive, false) => {
                    tracing::info!(sandbox = self.id, "sandbox answers again");
                    *phase = Phase::Running;
                    true
                }
                _ => false,
            });
        }
    }

    async fn account(&self, end: MonitorEnd) -> End {
        let detail = end.describe();
        let Some(vm) = end.vm else {
            return End { reason: "monitor_died", detail, console_tail: self.tail().await };
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
        End { reason, detail, console_tail }
    }
}

fn with_console(text: &str, end: &End) -> String {
    match end.reason {
        "deleted" => text.to_owned(),
        _ => console::with_tail(text, &end.console_tail),
    }
}
