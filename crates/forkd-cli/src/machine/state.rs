//! The records about the machine, in its folder.
//!
//! Two files with one writer each, so that no command undoes the writes of another. The command that starts
//! the machine writes the [`Plan`], what to run, under the start lock. The supervisor writes the [`State`],
//! what runs. Both files are replaced as a whole. A state is valid only while its supervisor runs, so SIGKILL
//! of any process leaves nothing to repair.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::{Deserialize, Serialize};

use crate::host::files;
use crate::host::process::ProcessId;

/// The paths in the machine's folder.
#[derive(Debug, Clone)]
pub(crate) struct Folder {
    root: PathBuf,
}

impl Folder {
    pub(crate) fn new(root: PathBuf) -> Self {
        Folder { root }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// The machine's disk.
    pub(crate) fn disk(&self) -> PathBuf {
        self.root.join("data.img")
    }

    /// Programs for the machine, one folder per build.
    pub(crate) fn programs(&self) -> PathBuf {
        self.root.join("bin")
    }

    pub(crate) fn initramfs(&self) -> PathBuf {
        self.root.join("initramfs")
    }

    /// The token of the daemon in the machine.
    pub(crate) fn token(&self) -> PathBuf {
        self.root.join("token")
    }

    pub(crate) fn console_log(&self) -> PathBuf {
        self.root.join("console.log")
    }

    pub(crate) fn supervisor_log(&self) -> PathBuf {
        self.root.join("supervisor.log")
    }

    /// Held by the command that starts or stops the machine.
    pub(crate) fn start_lock(&self) -> PathBuf {
        self.root.join("start.lock")
    }

    /// Held by the supervisor while it runs.
    pub(crate) fn supervisor_lock(&self) -> PathBuf {
        self.root.join("supervisor.lock")
    }

    fn plan_file(&self) -> PathBuf {
        self.root.join("plan.json")
    }

    fn state_file(&self) -> PathBuf {
        self.root.join("state.json")
    }

    fn notices_file(&self) -> PathBuf {
        self.root.join("notices")
    }

    pub(crate) fn plan(&self) -> Result<Option<Plan>> {
        files::read_record(&self.plan_file())
    }

    pub(crate) fn write_plan(&self, plan: &Plan) -> Result<()> {
        files::write_record(&self.plan_file(), plan)
    }

    pub(crate) fn state(&self) -> Result<Option<State>> {
        files::read_record(&self.state_file())
    }

    pub(crate) fn write_state(&self, state: &State) -> Result<()> {
        files::write_record(&self.state_file(), state)
    }

    /// The state, if its supervisor runs.
    pub(crate) fn live_state(&self) -> Result<Option<State>> {
        Ok(self.state()?.filter(|state| state.supervisor.is_alive()))
    }

    /// Stores a notice, which the next command prints.
    pub(crate) fn leave_notice(&self, text: &str) -> Result<()> {
        let mut notices = files::read_small(&self.notices_file())?.unwrap_or_default();
        // A machine that fails for days must not fill the disk; the first notices matter most.
        if notices.len() < 16 << 10 {
            notices.extend_from_slice(text.as_bytes());
            notices.push(b'\n');
        }
        files::write_private(&self.notices_file(), &notices)
    }

    /// Takes the stored notices.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        let taken = self.root.join("notices.taken");
        // Rename first: of two concurrent commands only one prints them.
        if std::fs::rename(self.notices_file(), &taken).is_err() {
            return Vec::new();
        }
        let text = files::read_small(&taken).ok().flatten().unwrap_or_default();
        let _ = std::fs::remove_file(&taken);
        String::from_utf8_lossy(&text).lines().map(str::to_owned).collect()
    }
}

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Plan {
    /// QEMU's program.
    pub(crate) qemu: PathBuf,
    /// The machine's kernel.
    pub(crate) kernel: PathBuf,
    /// Memory of the machine.
    pub(crate) memory_mib: u64,
    /// The token that the agent in the machine requires; it is in the initramfs.
    pub(crate) agent_token: String,
    /// The build whose programs the daemon in the machine runs.
    pub(crate) build: Build,
    /// The seconds without an answer after which the machine counts as hung.
    pub(crate) watchdog_secs: u64,
}

impl files::Record for Plan {}

/// A set of forkd's programs, named after its content.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Build {
    /// Name of the folder with these programs.
    pub(crate) id: String,
    /// Name of the machine's boot files, its agent and plan: a change needs a reboot.
    pub(crate) boot: String,
    /// Sizes and times of the source files: while they are the same, so is the build.
    pub(crate) seen: String,
}

/// What runs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// The supervisor that wrote this state.
    pub(crate) supervisor: ProcessId,
    pub(crate) phase: Phase,
    /// A sentence about the phase.
    pub(crate) detail: String,
    /// QEMU's process.
    pub(crate) qemu: Option<ProcessId>,
    /// The loopback port of the machine's agent.
    pub(crate) agent_port: u16,
    /// The loopback port of the daemon.
    pub(crate) rest_port: u16,
    /// The build of the running daemon.
    pub(crate) build: Option<String>,
    /// The start of this QEMU, in seconds since 1970.
    pub(crate) started_at: u64,
    /// How many times a hung or dead machine was restarted.
    pub(crate) restarts: u32,
}

impl files::Record for State {}

/// The phase of the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Phase {
    /// QEMU runs; the agent has not answered yet.
    Booting,
    /// The agent answers; the daemon does not yet.
    StartingDaemon,
    /// The daemon answers.
    Ready,
    /// Shutting down.
    Stopping,
    /// Shut down; the supervisor is about to end, or has ended.
    Stopped,
    /// Given up; `detail` has the reason.
    Failed,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(supervisor: ProcessId) -> State {
        State {
            supervisor,
            phase: Phase::Ready,
            detail: String::new(),
            qemu: None,
            agent_port: 1,
            rest_port: 2,
            build: Some("x".into()),
            started_at: 3,
            restarts: 0,
        }
    }

    #[test]
    fn a_state_is_believed_only_while_its_supervisor_lives() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().to_path_buf());
        assert!(folder.live_state().unwrap().is_none());

        let ours = state(ProcessId::current().unwrap());
        folder.write_state(&ours).unwrap();
        assert_eq!(folder.live_state().unwrap(), Some(ours));

        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let theirs = state(ProcessId::of(child.id() as i32).unwrap());
        folder.write_state(&theirs).unwrap();
        assert!(folder.live_state().unwrap().is_some());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(folder.live_state().unwrap().is_none());
        assert!(folder.state().unwrap().is_some());
    }

    #[test]
    fn the_files_of_every_version_are_read_and_the_newest_is_written() {
        files::assert_golden::<Plan>("machine-plan");
        files::assert_golden::<State>("machine-state");
    }

    #[test]
    fn a_state_that_cannot_be_read_is_no_machine_that_does_not_run() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().to_path_buf());
        std::fs::write(folder.state_file(), "{").unwrap();
        assert!(folder.state().is_err() && folder.live_state().is_err());
    }

    #[test]
    fn a_notice_is_said_once() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().to_path_buf());
        folder.leave_notice("it hung").unwrap();
        folder.leave_notice("again").unwrap();
        assert_eq!(folder.take_notices(), ["it hung", "again"]);
        assert!(folder.take_notices().is_empty());
    }

    #[test]
    fn notices_do_not_pile_up_without_end() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().to_path_buf());
        for _ in 0..100 {
            folder.leave_notice(&"x".repeat(1000)).unwrap();
        }
        assert!(folder.take_notices().len() < 20);
    }
}
