//! How many files the daemon may have open, and for how many sandboxes that is enough.

use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::error::{Error, Result};

/// What the daemon keeps open for one sandbox: control connection, pidfd, cgroup, line port, and a call.
const EACH: usize = 5;
/// What the daemon keeps open for one template: control connection, pidfd, and a call.
const TEMPLATE_EACH: usize = 3;
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

/// How many templates this process is connected to. Of the process, as the limit is.
static TEMPLATES: AtomicUsize = AtomicUsize::new(0);

/// A template that is counted as long as this lives.
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

/// How many sandboxes there are descriptors for, and what to say to who wants more.
pub(crate) fn carried() -> (usize, String) {
    let (files, templates) = (limit(), TEMPLATES.load(Relaxed));
    let carried = sandboxes_with(files, templates);
    let text = format!(
        "this daemon may have {files} open files and has {templates} templates, which leaves enough for {carried} \
         sandboxes; {FIX}, or unload snapshots"
    );
    (carried, text)
}

/// For how many sandboxes `files` descriptors are enough beside so many templates.
fn sandboxes_with(files: usize, templates: usize) -> usize {
    files.saturating_sub(RESERVED).saturating_sub(templates.saturating_mul(TEMPLATE_EACH)) / EACH
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
        // Other tests have templates, too: at least these two are there.
        let (one, two) = (TemplateFiles::count(), TemplateFiles::count());
        assert!(TEMPLATES.load(Relaxed) >= 2);
        assert!(carried().0 <= sandboxes_with(limit(), 2));
        drop((one, two));
    }
}
