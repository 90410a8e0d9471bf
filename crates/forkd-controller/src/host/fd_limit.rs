//! The limit of open files, and how many sandboxes it allows.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result};

/// Descriptors of the daemon for one sandbox: control connection, pidfd, cgroup, agent port, and a call.
const EACH: usize = 5;
/// Descriptors of the daemon for one template: control connection, pidfd, and a call.
const TEMPLATE_EACH: usize = 3;
/// Descriptors that the daemon needs beside those.
const RESERVED: usize = 128;
/// Descriptors that an adopted object needs at least: control connection, pidfd, cgroup.
const TAKEN_OVER_EACH: usize = 3;
/// Descriptors that are open before anything is adopted.
const AT_START: usize = 64;
/// The remedy when there are too few.
const FIX: &str = "raise its limit (`ulimit -n`, or LimitNOFILE of its service)";

/// Raises the soft limit to the hard limit: the usual soft limit is far too low.
pub(crate) fn raise_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(%error, "limit of open files not raised");
    }
}

/// How many files may be open.
fn limit() -> usize {
    getrlimit(Resource::Nofile).current.and_then(|files| usize::try_from(files).ok()).unwrap_or(usize::MAX)
}

/// How many templates this process is connected to. A static, because the limit is per process.
static TEMPLATES: AtomicUsize = AtomicUsize::new(0);

/// Counts a template while it exists.
#[derive(Debug)]
pub(crate) struct TemplateFiles(());

impl TemplateFiles {
    pub(crate) fn count() -> Self {
        TEMPLATES.fetch_add(1, Relaxed);
        TemplateFiles(())
    }
}

impl Drop for TemplateFiles {
    fn drop(&mut self) {
        TEMPLATES.fetch_sub(1, Relaxed);
    }
}

/// How many sandboxes the descriptors allow, and the error text for a client that wants more.
pub(crate) fn carried() -> (usize, String) {
    let (files, templates) = (limit(), TEMPLATES.load(Relaxed));
    let carried = sandboxes_with(files, templates);
    let text = format!(
        "this daemon may have {files} open files and has {templates} templates, which leaves enough for {carried} \
         sandboxes; {FIX}, or unload snapshots"
    );
    (carried, text)
}

/// How many sandboxes `files` descriptors allow beside so many templates.
fn sandboxes_with(files: usize, templates: usize) -> usize {
    files.saturating_sub(RESERVED).saturating_sub(templates.saturating_mul(TEMPLATE_EACH)) / EACH
}

/// Fails if there are too few descriptors for the objects of an earlier daemon in `folders`. A daemon that runs
/// out of descriptors halfway cannot tell which objects still run.
pub(crate) fn check_for_all_in(folders: &[PathBuf]) -> Result<()> {
    let count = |folder: &PathBuf| std::fs::read_dir(folder).map_or(0, Iterator::count);
    let (files, left) = (limit(), folders.iter().map(count).sum::<usize>());
    let needed = AT_START + left.saturating_mul(TAKEN_OVER_EACH);
    if needed <= files {
        return Ok(());
    }
    let text = format!(
        "the daemon may have {files} open files and needs {needed}: an earlier daemon left {left} sandboxes and \
                 templates; {FIX} and start again; the daemon changed nothing"
    );
    Err(Error::host("cannot adopt the running sandboxes and templates", text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_take_descriptors_from_sandboxes() {
        assert_eq!(sandboxes_with(1128, 0), 200);
        assert_eq!(sandboxes_with(1128, 100), 140);
        assert_eq!(sandboxes_with(1128, 1000), 0);
        assert_eq!(sandboxes_with(usize::MAX, 10), (usize::MAX - RESERVED - 30) / EACH);
        assert_eq!(sandboxes_with(100, 0), 0);
    }

    #[test]
    fn a_template_is_counted_as_long_as_it_lives() {
        // Tests beside this one have templates, too: at least these two exist.
        let (one, two) = (TemplateFiles::count(), TemplateFiles::count());
        assert!(TEMPLATES.load(Relaxed) >= 2);
        assert!(carried().0 <= sandboxes_with(limit(), 2));
        drop((one, two));
    }
}
