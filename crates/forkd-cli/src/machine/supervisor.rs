//! The supervisor: QEMU's parent. It starts the machine and its daemon, watches both, and ends them.
//!
//! It is a separate process in its own session, so that it outlives the command that started it. SIGTERM
//! shuts the machine down. SIGHUP makes it read the plan again and restart the daemon from the build named
//! there. It is the only writer of the machine's [`State`]. However it ends, QEMU ends with it, and the state
//! is no longer valid.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use forkd_controller::agent::Agent;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::agent;
use super::guest_daemon::GuestDaemon;
use super::log::Log;
use super::state::{Folder, Phase, Plan, State};
use super::vm::Vm;
use crate::client::Daemon;
use crate::host::clock;
use crate::host::files::Lock;
use crate::host::paths::DataDir;
use crate::host::process::ProcessId;

/// The limit of the supervisor's log.
const LOG_LIMIT: u64 = 1 << 20;
/// The time limit of a boot, from QEMU's start to the agent's first answer.
const BOOT_TIMEOUT: Duration = Duration::from_secs(180);
/// The time in which the daemon in the machine must answer after its start.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(120);
/// The time limit of a clean shutdown; then QEMU is killed.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(60);
/// The interval of health checks.
const PING_EVERY: Duration = Duration::from_secs(5);
/// A machine that breaks after this time of health is restarted again; one that breaks sooner is given up,
/// because it would only break again.
const HEALTHY_AFTER: Duration = Duration::from_secs(600);

/// How one run of the machine ended.
enum MachineExit {
    /// A signal stopped it.
    Stopped(String),
    /// A user in the machine powered it off.
    PoweredOff,
    /// It hung or ended unexpectedly.
    Broken(String),
}

/// Runs the machine until it is stopped. Returns at once if another supervisor has it.
pub(crate) fn supervise(data: &DataDir) -> Result<()> {
    let folder = Folder::new(data.machine());
    let Some(_lock) = Lock::try_take(&folder.supervisor_lock())? else { return Ok(()) };
    let plan = folder.plan()?.context("there is no plan to start from; run `forkd machine start`")?;
    // QEMU ends with the thread that started it, so that must be the main one: use one thread.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let supervisor = Supervisor {
        state: State {
            supervisor: ProcessId::current()?,
            phase: Phase::Booting,
            detail: String::new(),
            qemu: None,
            agent_port: 0,
            rest_port: 0,
            build: None,
            started_at: clock::now(),
            restarts: 0,
        },
        token: String::from_utf8(crate::host::files::read_small(&folder.token())?.unwrap_or_default())?,
        log: Log::open(&folder.supervisor_log(), LOG_LIMIT)?,
        share: data.root().to_path_buf(),
        folder,
        plan,
    };
    runtime.block_on(supervisor.run())
}

struct Supervisor {
    folder: Folder,
    share: PathBuf,
    plan: Plan,
    /// The daemon's token.
    token: String,
    state: State,
    log: Log,
}

impl Supervisor {
    async fn run(mut self) -> Result<()> {
        let mut stop = signal(SignalKind::terminate())?;
        let mut reload = signal(SignalKind::hangup())?;
        loop {
            let started = Instant::now();
            let end = match self.live(&mut stop, &mut reload).await {
                Ok(end) => end,
                Err(error) => MachineExit::Broken(format!("{error:#}")),
            };
            match end {
                MachineExit::Stopped(detail) => return self.finish(Phase::Stopped, &detail),
                MachineExit::PoweredOff => {
                    return self.finish(Phase::Stopped, "it was powered off from inside");
                }
                MachineExit::Broken(reason) => {
                    let well = started.elapsed() >= HEALTHY_AFTER;
                    if self.state.restarts > 0 && !well {
                        self.notice(&format!("the machine failed again and is not restarted: {reason}"));
                        return self.finish(Phase::Failed, &reason);
                    }
                    self.notice(&format!("the machine failed and was restarted: {reason}"));
                    self.state.restarts += 1;
                }
            }
        }
    }

    /// Runs QEMU from its start to its end.
    async fn live(&mut self, stop: &mut Signal, reload: &mut Signal) -> Result<MachineExit> {
        let mut vm = Vm::start(&self.plan, &self.folder, &self.share)?;
        self.state.qemu = vm.id.clone();
        self.state.agent_port = vm.ports.agent;
        self.state.rest_port = vm.ports.rest;
        self.state.started_at = clock::now();
        self.state.build = None;
        let agent = agent::connect(vm.ports.agent, &self.plan.agent_token);
        let mut daemon = None;
        let broken = tokio::select! {
            watched = self.watch(&agent, &mut daemon, reload) => match watched {
                Ok(never) => match never {},
                Err(error) => format!("{error:#}"),
            },
            exited = ended(&mut vm) => {
                let status = exited?;
                let console = vm.end();
                if status.success() && !console.contains("Kernel panic") {
                    return Ok(MachineExit::PoweredOff);
                }
                match console.as_str() {
                    "" => format!("QEMU ended ({status}) without output"),
                    console => format!("QEMU ended ({status}); its last output:\n{console}"),
                }
            }
            _ = stop.recv() => return self.shut_down(&mut vm, &agent, daemon).await.map(MachineExit::Stopped),
        };
        self.log.line(&format!("killing QEMU: {broken}"));
        let console = vm.end();
        if !console.is_empty() {
            self.log.line(&format!("the end of the console:\n{console}"));
        }
        Ok(MachineExit::Broken(broken))
    }

    /// Boots, starts the daemon and supervises both for ever; an error ends this run of the machine.
    async fn watch(
        &mut self,
        agent: &Agent,
        daemon: &mut Option<GuestDaemon>,
        reload: &mut Signal,
    ) -> Result<std::convert::Infallible> {
        self.set_phase(Phase::Booting, "Linux boots")?;
        let patience = BOOT_TIMEOUT.max(self.patience());
        answer_within(patience, agent).await?;
        self.start_daemon(agent, daemon).await?;
        let mut tick = tokio::time::interval(PING_EVERY);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut answered = Instant::now();
        let mut healthy = Instant::now();
        loop {
            tokio::select! {
                _ = tick.tick() => {
                    if let Err(error) = agent.ping().await {
                        self.log.line(&format!("no answer: {error}"));
                        let silent = answered.elapsed();
                        if silent >= self.patience() {
                            bail!("it gave no answer for {} s ({error})", silent.as_secs());
                        }
                        continue;
                    }
                    if daemon.is_none() {
                        let tail = GuestDaemon::log_tail(agent).await;
                        self.notice(&format!("the daemon in the machine ended and was restarted:\n{tail}"));
                        self.start_daemon(agent, daemon).await?;
                    }
                    answered = Instant::now();
                    if self.rest_client().is_healthy(PING_EVERY).await {
                        healthy = Instant::now();
                    } else if healthy.elapsed() >= self.patience()
                        && let Some(daemon) = &*daemon
                    {
                        self.notice("the daemon in the machine hung and was killed");
                        daemon.signal(agent, "SIGKILL").await?;
                        healthy = Instant::now();
                    }
                }
                reason = gone(daemon) => {
                    if let Some(daemon) = daemon.take() {
                        // It may only have lost its connection to this process: two daemons would fight over the data.
                        let _ = daemon.signal(agent, "SIGKILL").await;
                    }
                    // The daemon is started again at the next answer of the machine.
                    self.log.line(&format!("the daemon in the machine ended: {reason}"));
                    self.set_phase(Phase::StartingDaemon, "the daemon ended and is started again")?;
                }
                _ = reload.recv() => {
                    self.plan = self.folder.plan()?.context("the plan is gone")?;
                    self.log.line(&format!("restarting the daemon from build {}", self.plan.build.id));
                    self.set_phase(Phase::StartingDaemon, "the daemon is restarted from another build")?;
                    if let Some(daemon) = daemon.take() {
                        daemon.stop(agent).await;
                    }
                    self.start_daemon(agent, daemon).await?;
                    (answered, healthy) = (Instant::now(), Instant::now());
                }
            }
        }
    }

    async fn start_daemon(&mut self, agent: &Agent, daemon: &mut Option<GuestDaemon>) -> Result<()> {
        self.set_phase(Phase::StartingDaemon, "the daemon starts")?;
        let mut started = GuestDaemon::start(agent, &self.plan.build.id).await?;
        let deadline = Instant::now() + DAEMON_TIMEOUT.max(self.patience());
        loop {
            tokio::select! {
                // An answer counts only while the daemon's process exists.
                biased;
                reason = started.ended() => {
                    let tail = GuestDaemon::log_tail(agent).await;
                    bail!("the daemon in the machine ended during its start ({reason}):\n{tail}");
                }
                healthy = self.looks_healthy() => if healthy { break },
            }
            if Instant::now() >= deadline {
                let tail = GuestDaemon::log_tail(agent).await;
                bail!("the daemon in the machine does not answer:\n{tail}");
            }
        }
        *daemon = Some(started);
        self.state.build = Some(self.plan.build.id.clone());
        self.set_phase(Phase::Ready, "the daemon answers")
    }

    async fn looks_healthy(&self) -> bool {
        tokio::time::sleep(Duration::from_millis(200)).await;
        self.rest_client().is_healthy(PING_EVERY).await
    }

    /// Ends the daemon and the machine, in that order, each in bounded time.
    async fn shut_down(&mut self, vm: &mut Vm, agent: &Agent, daemon: Option<GuestDaemon>) -> Result<String> {
        self.set_phase(Phase::Stopping, "the daemon is asked to end")?;
        if let Some(daemon) = daemon {
            daemon.stop(agent).await;
        }
        self.set_phase(Phase::Stopping, "Linux shuts down")?;
        if let Err(error) = agent.shutdown().await {
            self.log.line(&format!("cannot request a shutdown: {error}"));
            vm.end();
            return Ok(format!("it did not accept the shutdown request ({error}), so QEMU was killed"));
        }
        match tokio::time::timeout(SHUTDOWN_TIMEOUT, ended(vm)).await {
            Ok(status) => {
                vm.end();
                status.map(|_| "shut down cleanly".to_owned())
            }
            Err(_) => {
                vm.end();
                Ok(format!("it did not shut down in {} s, so QEMU was killed", SHUTDOWN_TIMEOUT.as_secs()))
            }
        }
    }

    fn finish(&mut self, phase: Phase, detail: &str) -> Result<()> {
        self.state.qemu = None;
        self.set_phase(phase, detail)
    }

    fn set_phase(&mut self, phase: Phase, detail: &str) -> Result<()> {
        self.log.line(&format!("{phase:?}: {detail}"));
        self.state.phase = phase;
        self.state.detail = detail.to_owned();
        self.folder.write_state(&self.state)
    }

    /// Stores a notice, which the next command prints.
    fn notice(&self, text: &str) {
        self.log.line(text);
        if let Err(error) = self.folder.leave_notice(text) {
            self.log.line(&format!("cannot store this notice: {error:#}"));
        }
    }

    fn patience(&self) -> Duration {
        Duration::from_secs(self.plan.watchdog_secs)
    }

    fn rest_client(&self) -> Daemon {
        Daemon::loopback(self.state.rest_port, self.token.clone())
    }
}

/// Waits for the daemon's end; for ever if there is no daemon.
async fn gone(daemon: &mut Option<GuestDaemon>) -> String {
    match daemon {
        Some(daemon) => daemon.ended().await,
        None => std::future::pending().await,
    }
}

async fn answer_within(limit: Duration, agent: &Agent) -> Result<()> {
    let started = Instant::now();
    loop {
        match agent.ping().await {
            Ok(_) => return Ok(()),
            Err(error) if started.elapsed() >= limit => {
                bail!("it did not come up in {} s ({error})", limit.as_secs());
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(200)).await,
        }
    }
}

async fn ended(vm: &mut Vm) -> Result<std::process::ExitStatus> {
    loop {
        if let Some(status) = vm.try_wait()? {
            return Ok(status);
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}
