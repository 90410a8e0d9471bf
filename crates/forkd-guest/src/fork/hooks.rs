//! Programs of the image that want to know of a fork, in [`FORK_HOOKS`].
//!
//! [`FORK_HOOKS`]: forkd_protocol::agent::FORK_HOOKS

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use forkd_protocol::agent::{ProcessConfig, StartRequest};

use crate::{
    process::{self, ExitStatus, Next, Outcome, Part, Processes},
    users::User,
};

/// How much of the end of a failed hook's output goes into the warning.
const TAIL: usize = 1 << 10;
/// More files than this are not hooks.
const MAX_HOOKS: usize = 256;
/// How long a hook that was killed may take to be gone.
const KILL_TIME: Duration = Duration::from_secs(1);

/// The executable files in `folder`, in the order of names. Folders in it are not hooks.
pub(super) fn find(folder: &Path) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut hooks: Vec<PathBuf> = entries
        .take(MAX_HOOKS)
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| !path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b".")))
        .filter(|path| {
            fs::metadata(path).is_ok_and(|known| known.is_file() && known.permissions().mode() & 0o111 != 0)
        })
        .collect();
    hooks.sort();
    hooks
}

/// Runs programs as root, one after the other, in a cgroup that is not frozen with the users'. All of
/// them together have one limit of time.
pub(super) struct Runner<'r> {
    processes: &'r Processes,
    limit: Duration,
    left: Duration,
}

impl<'r> Runner<'r> {
    pub(super) fn new(processes: &'r Processes, limit: Duration) -> Self {
        Runner { processes, limit, left: limit }
    }

    /// Runs hooks; a failure is a warning.
    pub(super) fn run_all(&mut self, hooks: &[PathBuf], warnings: &mut Vec<String>) {
        for hook in hooks {
            if let Err(why) = self.run(hook, &[]) {
                warnings.push(format!("hook {}: {why}", hook.display()));
            }
        }
    }

    /// Runs one program to its end. One whose time is over is killed with everything it started.
    pub(super) fn run(&mut self, program: &Path, args: &[&str]) -> Result<(), String> {
        if self.left.is_zero() {
            return Err(format!("not run: the {:?} for all hooks are over", self.limit));
        }
        let begun = Instant::now();
        let done = run_one(program, args, self.processes, self.left);
        self.left = self.left.saturating_sub(begun.elapsed());
        done
    }
}

fn run_one(program: &Path, args: &[&str], processes: &Processes, limit: Duration) -> Result<(), String> {
    // By number: an image need not have a user of that name.
    let root = User::find("0").map_err(|error| error.message)?;
    let cmd = program.to_str().ok_or("its name is not UTF-8")?;
    let args = args.iter().map(|arg| arg.to_string()).collect();
    let process = ProcessConfig { cmd: cmd.into(), args, ..ProcessConfig::default() };
    let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
    let started = processes.start_in(Part::Hooks, &request, &root, Some(limit));
    let (_, listener) = started.map_err(|error| error.message)?;
    // User processes stand still meanwhile: they go on even if a killed hook does not end.
    let until = Instant::now() + limit + KILL_TIME;
    let mut tail: Vec<u8> = Vec::new();
    let why: String = loop {
        match listener.next(until.saturating_duration_since(Instant::now())) {
            Next::Piece((_, bytes)) => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(TAIL));
            }
            Next::End(Outcome::Ended(ExitStatus::Code(0))) => return Ok(()),
            Next::End(Outcome::Ended(status)) => break process::describe(status),
            Next::End(Outcome::DeadlineExceeded) => break "killed: the time for all hooks is over".into(),
            Next::Idle if Instant::now() >= until => break "killed, but it does not end".into(),
            Next::Idle => {}
        }
    };
    Err(format!("{why}: {}", String::from_utf8_lossy(&tail).trim_end()).trim_end_matches(": ").to_string())
}
