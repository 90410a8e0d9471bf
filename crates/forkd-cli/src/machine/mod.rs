//! The emulated machine: one QEMU virtual machine in which `/dev/kvm` is real and the daemon runs.
//!
//! All its files are in the folder `machine` of the data directory. A command that needs the machine writes
//! what to run ([`state::Plan`]) and starts a [`supervisor`]. The supervisor is QEMU's parent and writes what
//! runs ([`state::State`]). This module is the commands' side: start, stop, status.
//!
//! The machine knows nothing of sandboxes; the daemon in it does not know that it is emulated.

mod agent;
mod builds;
mod disk;
mod guest_daemon;
mod log;
pub(crate) use log::tail as log_tail;
mod prepare;
pub(crate) use prepare::find_qemu;
pub(crate) mod qemu;
pub(crate) mod shell;
pub(crate) mod state;
pub(crate) mod status;
pub(crate) mod supervisor;
mod vm;

use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::process::Signal;

use crate::client::Daemon;
use crate::host::files::{self, Lock};
use crate::host::paths::{Binaries, DataDir};
use crate::host::process;
use crate::ui::{Progress, Ui};
use state::{Build, Folder, Phase, Plan, State};

/// The limit of a start. The supervisor gives up much sooner and reports the reason.
const START_TIMEOUT: Duration = Duration::from_secs(900);
/// The limit of a shutdown. A supervisor that takes longer is broken and is killed.
const STOP_TIMEOUT: Duration = Duration::from_secs(150);
/// How long QEMU may outlive its supervisor.
const QEMU_END_TIMEOUT: Duration = Duration::from_secs(30);

/// The machine of a data directory, running or not.
#[derive(Debug)]
pub(crate) struct Machine {
    data: DataDir,
    folder: Folder,
    ui: Ui,
}

/// A machine whose daemon answers.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) state: State,
    pub(crate) plan: Plan,
}

impl Machine {
    pub(crate) fn new(data: &DataDir, ui: Ui) -> Self {
        Machine { data: data.clone(), folder: Folder::new(data.machine()), ui }
    }

    pub(crate) fn folder(&self) -> &Folder {
        &self.folder
    }

    /// A client of the daemon in the machine.
    pub(crate) fn daemon(&self, state: &State) -> Result<Daemon> {
        let token = files::read_small(&self.folder.token())?
            .with_context(|| format!("{} is missing", self.folder.token().display()))?;
        Ok(Daemon::loopback(state.rest_port, String::from_utf8(token)?.trim().to_owned()))
    }

    /// The machine, if it runs and its daemon answers. Starts nothing.
    pub(crate) fn running(&self) -> Result<Option<Running>> {
        let state = self.folder.live_state()?.filter(|state| state.phase == Phase::Ready);
        let plan = self.folder.plan()?;
        Ok(state.zip(plan).map(|(state, plan)| Running { state, plan }))
    }

    /// Starts the machine, and the daemon of this build in it, unless they run. Prints what it does, and `why`.
    pub(crate) fn ensure(&self, why: &str) -> Result<Running> {
        prepare::make_private_folder(self.folder.root())?;
        self.say_notices();
        let binaries = Binaries::find()?;
        let planned = self.folder.plan()?;
        let build = builds::identify(&binaries, planned.as_ref().map(|plan| &plan.build))?;
        if let Some(running) = self.running()?
            && running.plan.build.id == build.id
            && running.state.build.as_ref() == Some(&build.id)
        {
            return Ok(running);
        }
        let _lock = Lock::take(&self.folder.start_lock(), || {
            self.ui.note("another forkd command starts or stops the machine; waiting for it");
        })?;
        // The previous holder of the lock may have done everything.
        let progress = match (self.folder.live_state()?, self.folder.plan()?) {
            (Some(state), Some(plan))
                if !matches!(state.phase, Phase::Stopping | Phase::Stopped | Phase::Failed) =>
            {
                self.restart_changed(&binaries, &build, &state, plan, why)?
            }
            (Some(state), _) => {
                state.supervisor.wait(STOP_TIMEOUT);
                self.start(&binaries, &build, why)?
            }
            (None, _) => self.start(&binaries, &build, why)?,
        };
        self.wait_until_ready(&build, progress)
    }

    /// Brings a running machine to this build, with the smallest possible restart.
    fn restart_changed(
        &self,
        binaries: &Binaries,
        build: &Build,
        state: &State,
        plan: Plan,
        why: &str,
    ) -> Result<Progress> {
        if plan.build.boot != build.boot {
            self.ui.note("the agent in the machine has another build; restarting the machine");
            self.stop_supervisor(state)?;
            return self.start(binaries, build, why);
        }
        if plan.build.id == build.id {
            // The command that wrote the plan may have been killed before it signalled the supervisor.
            if state.phase == Phase::Ready && state.build.as_ref() != Some(&build.id) {
                state.supervisor.signal(Signal::HUP);
            }
            return Ok(self.ui.progress("waiting for the emulated machine"));
        }
        self.ui.note("the daemon in the machine has another build; restarting it");
        builds::publish(binaries, build, &self.folder)?;
        self.folder.write_plan(&Plan { build: build.clone(), ..plan })?;
        state.supervisor.signal(Signal::HUP);
        Ok(self.ui.progress("restarting the daemon in the machine"))
    }

    fn start(&self, binaries: &Binaries, build: &Build, why: &str) -> Result<Progress> {
        self.ui.note(format!("{why}: starting the emulated machine, which takes about 20 s"));
        // QEMU ends a moment after its killed supervisor: two QEMUs must not write to one disk.
        if let Some(qemu) = self.folder.state()?.and_then(|state| state.qemu)
            && !qemu.wait(QEMU_END_TIMEOUT)
        {
            bail!("the QEMU of an earlier machine still runs; end it with `kill {}`", qemu.pid);
        }
        let plan = prepare::prepare(&self.data, &self.folder, binaries, build, self.ui)?;
        self.folder.write_plan(&plan)?;
        let mut command = Command::new(&binaries.forkd);
        command.arg("--data-dir").arg(self.data.root()).args(["machine", "supervise"]);
        process::spawn_detached(&mut command, &self.folder.supervisor_log())?;
        Ok(self.ui.progress("starting the emulated machine"))
    }

    fn wait_until_ready(&self, build: &Build, progress: Progress) -> Result<Running> {
        let started = Instant::now();
        loop {
            if let Some(running) = self.running()?
                && running.state.build.as_ref() == Some(&build.id)
            {
                progress.done("the emulated machine is up");
                self.say_notices();
                return Ok(running);
            }
            // A supervisor that has just started has written nothing yet.
            let settled = started.elapsed() > Duration::from_secs(5);
            match self.folder.live_state()? {
                // Ready, but with another build: the restart has not begun yet.
                Some(state) if state.phase == Phase::Ready => {}
                Some(state) => progress.update(&state.detail),
                None if settled => {
                    drop(progress);
                    // The notices would only repeat the error.
                    self.folder.take_notices();
                    bail!("the emulated machine did not start: {}", self.why_not());
                }
                None => {}
            }
            if started.elapsed() > START_TIMEOUT {
                bail!("the emulated machine is not up after {} s; {}", START_TIMEOUT.as_secs(), self.logs());
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }

    /// Shuts the machine down; returns how it ended, or `None` if no machine runs.
    pub(crate) fn stop(&self) -> Result<Option<String>> {
        if !self.folder.root().is_dir() {
            return Ok(None);
        }
        let _lock = Lock::take(&self.folder.start_lock(), || {
            self.ui.note("another forkd command starts or stops the machine; waiting for it");
        })?;
        match self.folder.live_state()? {
            Some(state) => self.stop_supervisor(&state).map(Some),
            None => Ok(None),
        }
    }

    fn stop_supervisor(&self, state: &State) -> Result<String> {
        let progress = self.ui.progress("stopping the emulated machine");
        state.supervisor.signal(Signal::TERM);
        if !state.supervisor.wait(STOP_TIMEOUT) {
            state.supervisor.signal(Signal::KILL);
            state.supervisor.wait(Duration::from_secs(5));
            return Ok(format!("it did not stop in {} s and was killed", STOP_TIMEOUT.as_secs()));
        }
        drop(progress);
        Ok(self.folder.state()?.map(|state| state.detail).unwrap_or_default())
    }

    /// Prints the notices since the last command.
    pub(crate) fn say_notices(&self) {
        for line in self.folder.take_notices().iter().filter(|line| !line.trim().is_empty()) {
            self.ui.warn(line);
        }
    }

    /// The reason why the last machine failed, as far as known.
    fn why_not(&self) -> String {
        match self.folder.state() {
            Ok(Some(state)) if state.phase == Phase::Failed => format!("{}; {}", state.detail, self.logs()),
            _ => {
                let tail = log::tail(&self.folder.supervisor_log(), 1000);
                format!("its supervisor ended; {}\n{tail}", self.logs())
            }
        }
    }

    fn logs(&self) -> String {
        let folder = &self.folder;
        format!("see {} and {}", folder.supervisor_log().display(), folder.console_log().display())
    }
}
