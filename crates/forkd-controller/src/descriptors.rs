//! How many files the daemon may have open, and for how many sandboxes that is enough.

use std::path::PathBuf;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result};

/// What the daemon keeps open for one sandbox: control connection, pidfd, cgroup, line port, and a call.
const EACH: usize = 5;
/// What the daemon needs beside that.
const RESERVED: usize = 128;
/// What one that is taken over needs at least: control connection, pidfd, cgroup.
const TAKEN_OVER_EACH: usize = 3;
/// What is open before anything is taken over.
const AT_START: usize = 64;
/// What to do about too few.
const FIX: &str = "raise its limit (`ulimit -n`, or LimitNOFILE of its service)";

/// Takes what the daemon may have: the usual soft limit is far too low.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
}

/// How many files may be open.
fn limit() -> usize {
    getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX)
}

/// How many sandboxes there are descriptors for, and what to say to who wants more.
pub(crate) fn carried() -> (usize, String) {
    let files = limit();
    let carried = files.saturating_sub(RESERVED) / EACH;
    let text =
        format!("this daemon may have {files} open files, which is enough for {carried} sandboxes; {FIX}");
    (carried, text)
}

/// Fails if there are surely too few descriptors for what an earlier daemon left in `folders`: who runs out
/// of them half-way cannot tell what is there from what is not.
pub(crate) fn check_for_all_in(folders: &[PathBuf]) -> Result<()> {
    let count = |folder: &PathBuf| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let (files, left) = (limit(), folders.iter().map(count).sum::<usize>());
    let needed = AT_START + left.saturating_mul(TAKEN_OVER_EACH);
    if needed <= files {
        return Ok(());
    }
    let text = format!(
        "it may have {files} open files and needs {needed}: an earlier daemon left {left} sandboxes and \
         templates; {FIX} and start again: nothing was touched"
    );
    Err(Error::host("cannot take over what runs", text))
}
