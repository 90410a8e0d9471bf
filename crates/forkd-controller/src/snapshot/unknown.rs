//! Templates whose records the daemon cannot read (`records`). The daemon keeps such a template: it lists it in state
//! `unknown` with the reason. It changes none of the template's files, so that a daemon that can read the record
//! takes the template over. Only a client ends it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_protocol::control::WaitStatus;
use forkd_protocol::names::is_valid_name;
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::error::{Code, Error};
use crate::host::lineage::{Lineage, Lineages};
use crate::host::process::{self, Pidfd, ProcessId};
use crate::snapshot::adopt;
use crate::snapshot::template::{self, Adopted};
use crate::util::records::{self, VersionedRecord};

/// A template whose record cannot be read.
#[derive(Debug)]
pub(crate) struct UnknownTemplate {
    pub(crate) why: String,
    remains: Remains,
    seen: Glimpse,
    lineage: Mutex<Option<Arc<Lineage>>>,
}

impl UnknownTemplate {
    pub(crate) fn new(unread: Unread, lineages: &Arc<Lineages>) -> Arc<Self> {
        tracing::error!(
            template = unread.id,
            why = unread.why,
            "template record cannot be read; the template is kept"
        );
        let seen = Glimpse::of::<template::TemplateRecord>(&unread.folder);
        let remains = Remains::new(&unread, None);
        let lineage = seen.lineage(lineages, "/about");
        let lineage = lineage.or_else(|| lineages.of_process(remains.pid()?, None));
        Arc::new(UnknownTemplate { why: unread.why, remains, seen, lineage: Mutex::new(lineage) })
    }

    /// Finds the template's lineage by the process's user id. To be called after the templates with readable
    /// records are taken over: their records name the lineages.
    pub(crate) fn claim(&self, lineages: &Arc<Lineages>) {
        let mut lineage = self.lineage.lock();
        if lineage.is_none() {
            *lineage = self.remains.pid().and_then(|pid| lineages.of_process(pid, Some(&self.remains.id)));
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.remains.id
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.remains.pid()
    }

    /// The tag of the branch that exists only in this template; none if the tag cannot be read.
    pub(crate) fn tag(&self) -> Option<String> {
        let standing = self.seen.0.get("standing");
        let on_disk = standing.is_some_and(|standing| standing.get("saved").is_some());
        let forgotten = standing.is_some_and(|standing| standing == "forgotten");
        self.seen.text("/about/tag").filter(|tag| is_valid_name(tag) && !on_disk && !forgotten)
    }

    pub(crate) fn vcpus(&self) -> u8 {
        self.seen.number("/about/guest/vcpus").unwrap_or(0)
    }

    pub(crate) fn mem_mib(&self) -> u64 {
        self.seen.number("/about/guest/mem_size_mib").unwrap_or(0)
    }

    /// Whether the template may be a branch that is not on disk yet and is to be stored as a difference to `tag`.
    pub(crate) fn may_need(&self, tag: &str) -> bool {
        let standing = self.seen.0.get("standing");
        match standing.and_then(Value::as_object).map(|it| (it.get("saved"), it.get("unsaved"))) {
            // A branch that is on disk, or is to be stored in full, needs no other snapshot.
            Some((Some(_), _)) => false,
            Some((None, Some(_))) => match self.seen.0.pointer("/standing/unsaved/origin") {
                Some(Value::Null) => false,
                Some(origin) => origin.get("tag").is_none_or(|origin| origin == tag),
                None => true,
            },
            Some((None, None)) => true,
            None => standing.is_none_or(|standing| standing != "forgotten"),
        }
    }

    /// Removes the record. If this daemon is killed before it ends the template, the next daemon ends it.
    pub(crate) fn mark_deleted(&self) -> std::io::Result<()> {
        match std::fs::remove_file(self.remains.folder.join(template::RECORD)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends the template and removes its cgroup and folder. Its children go on.
    pub(crate) async fn end(&self, cleanup_queue: &crate::host::cleanup::CleanupQueue) {
        let lineage = self.lineage.lock().clone();
        let cgroup = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref());
        // Only a branch has a leaf of its own; the leaf of any other template goes with its lineage.
        let leaf = cgroup.and_then(|cgroup| cgroup.existing(&self.remains.id).ok());
        self.remains.end(|| drop(leaf.as_ref().map(|leaf| leaf.kill()))).await;
        if let Some(leaf) = leaf {
            cleanup_queue.run(move || leaf.kill().and_then(|()| leaf.remove())).await;
        }
        cleanup_queue.remove_folder(self.remains.folder.clone()).await;
        drop(self.lineage.lock().take());
    }

    /// Leaves the template to the next daemon.
    pub(crate) fn leave(&self) {
        if let Some(lineage) = &*self.lineage.lock() {
            lineage.leave();
        }
    }
}

/// The folder of a sandbox or a template with a record that cannot be read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    /// Which file cannot be read, and why.
    pub(crate) why: String,
    /// Its process, if the process record can be read.
    pub(crate) identity: Option<ProcessId>,
}

/// Why a sandbox is in state `unknown`, in one word.
pub(crate) const UNREADABLE: &str = "record_unreadable";

/// The reason for clients that may not read causes.
pub(crate) const UNREAD: &str = "the daemon cannot read its record";

/// The reason `why` in one sentence, with what to do; `end` is the command that ends the sandbox or template.
pub(crate) fn advice(why: &str, end: &str) -> String {
    format!("{why}; end it (`{end}`), or start the version of the daemon that wrote it")
}

/// The error of every operation on an unknown sandbox or template except showing it and ending it.
pub(crate) fn refused(what: &str, why: &str, end: &str) -> Error {
    let text = format!("the state of {what} is unknown: {}", advice(UNREAD, end));
    Error::new(Code::StateUnknown, text).because(why.to_owned())
}

/// What is left of a sandbox or template with an unreadable record: its folder and, if found, its process.
#[derive(Debug)]
pub(crate) struct Remains {
    id: String,
    folder: PathBuf,
    process: Option<(i32, Pidfd)>,
    /// Held and not read: so the exit status is not acknowledged, and the template keeps it for a daemon that can read
    /// the record.
    _end: Option<oneshot::Receiver<WaitStatus>>,
}

impl Remains {
    pub(crate) fn new(unread: &Unread, child: Option<(i32, Adopted)>) -> Self {
        let recorded = unread.identity.as_ref().and_then(|it| Some((it.pid, it.open()?)));
        let (forked, end) = match child {
            Some((template, Adopted::Alive(pid, end))) => (child_of(pid, template), Some(end)),
            Some((_, Adopted::Ended(_))) | None => (None, None),
        };
        let (id, folder) = (unread.id.clone(), unread.folder.clone());
        Remains { id, folder, process: recorded.or(forked), _end: end }
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(|(pid, _)| *pid)
    }

    /// Returns when the process has ended; never if the process was not found.
    pub(crate) async fn ended(&self) {
        match &self.process {
            Some((_, process)) if process.ended().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }

    /// Ends the process and returns when it is gone. A process that was not found is asked through its control socket;
    /// if it does not stop, `kill` is called.
    pub(crate) async fn end(&self, kill: impl Fn()) {
        if let Some((_, process)) = &self.process {
            return process.end(&self.id).await;
        }
        while adopt::stop(&self.folder).await.is_err() {
            tracing::error!(id = self.id, "process with an unreadable record does not stop; trying again");
            kill();
        }
    }
}

/// The process `pid`, if it is a child of `parent`.
fn child_of(pid: i32, parent: i32) -> Option<(i32, Pidfd)> {
    let pidfd = Pidfd::open(rustix::process::Pid::from_raw(pid)?).ok()?;
    // Looked up after the pidfd was opened: the process that has this pid now is the one that the pidfd refers to.
    (process::parent(pid) == Some(parent)).then_some((pid, pidfd))
}

/// The part of an unreadable record that parses as JSON: single values may still be of use.
#[derive(Debug)]
pub(crate) struct Glimpse(pub(crate) Value);

impl Glimpse {
    pub(crate) fn of<T: VersionedRecord>(folder: &Path) -> Self {
        Glimpse(records::glimpse::<T>(folder))
    }

    pub(crate) fn text(&self, place: &str) -> Option<String> {
        self.0.pointer(place)?.as_str().map(str::to_owned)
    }

    pub(crate) fn number<T: TryFrom<u64>>(&self, place: &str) -> Option<T> {
        self.0.pointer(place)?.as_u64()?.try_into().ok()
    }

    /// The lineage whose number and name are at `place`.
    pub(crate) fn lineage(&self, lineages: &Arc<Lineages>, place: &str) -> Option<Arc<Lineage>> {
        let name = self.text(&format!("{place}/cgroup")).filter(|name| is_valid_name(name))?;
        lineages.resume(self.number(&format!("{place}/lineage"))?, &name)
    }
}
