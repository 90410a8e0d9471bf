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
    process::{self, ExitStatus, Next, Outcome, Processes},
    users::User,
};

/// How much of the end of a failed hook's output goes into the warning.
const TAIL: usize = 1 << 10;
/// More files than this are not hooks.
const MAX_HOOKS: usize = 256;

/// Runs what can be executed in `folder`, in the order of names, one after the other, as root. All of
/// them together have the time `limit`.
pub(super) fn run(folder: &Path, limit: Duration, processes: &Processes, warnings: &mut Vec<String>) {
    let until = Instant::now() + limit;
    for hook in find(folder) {
        let left = until.saturating_duration_since(Instant::now());
        let done = match left {
            Duration::ZERO => Err(format!("not run: the {limit:?} for all hooks are over")),
            left => run_one(&hook, processes, left),
        };
        if let Err(why) = done {
            warnings.push(format!("hook {}: {why}", hook.display()));
        }
    }
}

fn find(folder: &Path) -> Vec<PathBuf> {
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

fn run_one(hook: &Path, processes: &Processes, limit: Duration) -> Result<(), String> {
    // By number: an image need not have a user of that name.
    let root = User::find("0").map_err(|error| error.message)?;
    let cmd = hook.to_str().ok_or("its name is not UTF-8")?;
    let process = ProcessConfig { cmd: cmd.into(), ..ProcessConfig::default() };
    let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
    let (_, listener) = processes.start(&request, &root, Some(limit)).map_err(|error| error.message)?;
    let mut tail: Vec<u8> = Vec::new();
    let why: String = loop {
        match listener.next(limit) {
            Next::Piece((_, bytes)) => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(TAIL));
            }
            Next::End(Outcome::Ended(ExitStatus::Code(0))) => return Ok(()),
            Next::End(Outcome::Ended(status)) => break process::describe(status),
            Next::End(Outcome::DeadlineExceeded) => break "killed: the time for all hooks is over".into(),
            Next::Idle => {}
        }
    };
    Err(format!("{why}: {}", String::from_utf8_lossy(&tail).trim_end()).trim_end_matches(": ").to_string())
}
