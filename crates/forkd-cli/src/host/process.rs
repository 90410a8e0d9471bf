//! Processes that outlive the command that started them: identify, start and end them.

use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use rustix::process::{Pid, Resource, Rlimit, Signal, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// A process, identified so that another one with the same number is never mistaken for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ProcessId {
    pub(crate) pid: i32,
    /// Its start time in clock ticks since boot.
    start_time: u64,
    /// The boot from which those ticks count.
    boot_id: String,
}

impl ProcessId {
    /// This process.
    pub(crate) fn current() -> Result<Self> {
        Self::of(std::process::id() as i32).context("cannot read this process's own start time from /proc")
    }

    /// The process with this number now.
    pub(crate) fn of(pid: i32) -> Option<Self> {
        Some(ProcessId { pid, start_time: start_time(pid)?, boot_id: boot_id() })
    }

    /// Whether it still runs. A zombie does not.
    pub(crate) fn is_alive(&self) -> bool {
        self.boot_id == boot_id() && start_time(self.pid) == Some(self.start_time)
    }

    /// Sends it a signal, if it still runs.
    pub(crate) fn signal(&self, signal: Signal) {
        if let (true, Some(pid)) = (self.is_alive(), Pid::from_raw(self.pid)) {
            // It may end between the check and the signal; to end it is the aim of the signal anyway.
            let _ = rustix::process::kill_process(pid, signal);
        }
    }

    /// Waits until it has ended; `false` if it has not after `limit`.
    pub(crate) fn wait(&self, limit: Duration) -> bool {
        let started = Instant::now();
        while self.is_alive() {
            if started.elapsed() >= limit {
                return false;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        true
    }
}

/// The id that the kernel gives to each boot.
pub(crate) fn boot_id() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map(|text| text.trim().to_owned())
        .unwrap_or_default()
}

fn start_time(pid: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    parse_start_time(&stat)
}

fn parse_start_time(stat: &str) -> Option<u64> {
    // The second field, the name, may hold spaces and parentheses: count from the last one.
    let mut fields = stat.get(stat.rfind(')')? + 1..)?.split_whitespace();
    let state = fields.next()?;
    if matches!(state, "Z" | "X") {
        return None;
    }
    // Field 22, where the state was field 3.
    fields.nth(18)?.parse().ok()
}

/// Raises this process's limit of open files to the maximum: a port for each of a thousand children needs
/// more than usual.
pub(crate) fn raise_file_limit() {
    let limit = getrlimit(Resource::Nofile);
    // If this fails, opening one file too many reports it.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum });
}

/// Makes `command` outlive this one: in its own session, away from the terminal.
pub(crate) fn detach(command: &mut Command) -> &mut Command {
    command.stdin(Stdio::null()).current_dir("/");
    // SAFETY: between fork and exec only setsid is called, which is async-signal-safe.
    unsafe { command.pre_exec(|| rustix::process::setsid().map(drop).map_err(Into::into)) }
}

/// Starts a program that outlives this command, with its output in `log`.
pub(crate) fn spawn_detached(command: &mut Command, log: &Path) -> Result<ProcessId> {
    let output = fs::OpenOptions::new()
        .create(true)
        .append(true)
        .mode(0o600)
        .open(log)
        .with_context(|| format!("cannot write {}", log.display()))?;
    let errors = output.try_clone().context("cannot share the log")?;
    let child = detach(command)
        .stdout(output)
        .stderr(errors)
        .spawn()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    let pid = child.id() as i32;
    // This process does not wait for it: init reaps it after this command has ended.
    ProcessId::of(pid).with_context(|| format!("it ended at once; see {}", log.display()))
}

/// Makes the kernel kill `command`'s process when the thread that starts it ends, however it ends.
pub(crate) fn die_with_parent(command: &mut Command) {
    let parent = std::process::id();
    // SAFETY: between fork and exec only prctl and getppid are called, which are
    // async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
            // The parent may have died before the line above took effect.
            let ours =
                rustix::process::getppid().is_some_and(|pid| pid.as_raw_nonzero().get() as u32 == parent);
            if ours { Ok(()) } else { Err(std::io::Error::other("the parent is gone")) }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_known_by_more_than_its_number() {
        let me = ProcessId::current().unwrap();
        assert!(me.is_alive());
        assert!(!ProcessId { start_time: me.start_time + 1, ..me.clone() }.is_alive());
        assert!(!ProcessId { boot_id: "another".into(), ..me }.is_alive());
    }

    #[test]
    fn a_name_with_parentheses_does_not_confuse_the_start_time() {
        let stat = "7 (a) b) S 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 1 1";
        assert_eq!(parse_start_time(stat), Some(4242));
        assert_eq!(parse_start_time("7 (x) Z 1 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 1 1"), None);
        assert_eq!(parse_start_time("nonsense"), None);
    }

    #[test]
    fn a_child_that_ended_is_not_alive_even_before_it_is_reaped() {
        let mut child = Command::new("true").spawn().unwrap();
        let id = ProcessId::of(child.id() as i32);
        let begun = Instant::now();
        while id.as_ref().is_some_and(ProcessId::is_alive) {
            assert!(begun.elapsed() < Duration::from_secs(60), "it is said to be alive");
            std::thread::sleep(Duration::from_millis(10));
        }
        child.wait().unwrap();
    }
}
