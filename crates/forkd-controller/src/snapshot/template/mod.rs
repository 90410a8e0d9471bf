//! One template process: how it forks children, reports their ends, and ends itself.
//!
//! A [`Template`] is a handle. The snapshot's entry holds one, and so does each child: the process is the parent
//! of its children, and only a parent learns how they end. When the last handle is dropped, the daemon ends the
//! process and removes its folder. One task owns the connection (`connection`): requests are pipelined, replies
//! come in their order.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::{ForkConfig, LoadConfig, MergeConfig, Request, Role, SaveConfig, WaitStatus};
use forkd_store::GuestSpec;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use crate::error::{Code, Error, Result};
use crate::host::cleanup::CleanupQueue;
use crate::host::fd_limit::TemplateFiles;
use crate::host::lineage::Lineage;
use crate::host::oom;
use crate::host::process::ProcessId;
use crate::monitor::{Forked, Monitor, MonitorParts, Replacement, replace_request};
use crate::snapshot::forks::ForkReservation;
use crate::snapshot::template::connection::{Ask, ConnectionActor, Note, Pending, process};
use crate::util::records::{self, Found, VersionedRecord};
use crate::util::task::{self, Task};

/// The file in a template's folder that describes the template. Written when the template is complete.
pub(crate) const RECORD: &str = "template.json";
/// The most requests that wait to be sent: enough to keep a template busy, few enough that a fan-out does
/// not hold thousands of descriptors.
const QUEUE: usize = 32;

/// Where a template's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MemorySource {
    /// The snapshot's files.
    Disk,
    /// The memory of the guest that the snapshot was made of.
    Memory,
}

/// The part of a template's record that does not change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TemplateSpec {
    pub(crate) tag: String,
    pub(crate) source: MemorySource,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    /// The name of its lineage's cgroup.
    pub(crate) cgroup: String,
    /// The properties of its guest, which each child has, too.
    pub(crate) guest: GuestSpec,
    /// For the template of a fork: its source. Its tag is empty then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) fork: Option<ForkSource>,
}

impl TemplateSpec {
    /// The tag of its snapshot; none for the template of a fork.
    pub(crate) fn snapshot_tag(&self) -> Option<&str> {
        self.fork.is_none().then_some(&self.tag)
    }
}

/// The running sandbox that a fork was taken of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForkSource {
    /// The sandbox's id.
    pub(crate) sandbox: String,
    /// The sandbox's owner: the template counts as one of the owner's snapshots.
    pub(crate) owner: String,
}

/// The content of [`RECORD`]: what the next daemon needs to take a template over.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TemplateRecord {
    pub(crate) about: TemplateSpec,
    pub(crate) standing: PersistState,
}

/// Whether a template's memory is on disk.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PersistState {
    /// The snapshot with this id was made of the template, or the template was loaded from it. A later snapshot
    /// may have the same tag.
    Saved(String),
    /// The template is a branch that is not on disk yet.
    Unsaved(Box<crate::snapshot::branch_job::BranchRecord>),
    /// The branch was removed before it was on disk, or the template is that of a fork: it lives as long as its
    /// children.
    Forgotten,
}

impl TemplateRecord {
    /// The record of the template in `folder`. An incomplete template has none.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }
}

impl VersionedRecord for TemplateRecord {
    const FILE: &'static str = RECORD;
}

/// A handle on a template.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) id: String,
    pub(crate) pid: i32,
    folder: PathBuf,
    pub(crate) about: TemplateSpec,
    pub(crate) lineage: Arc<Lineage>,
    /// The id of its snapshot, once that is on disk.
    snapshot: Mutex<Option<String>>,
    /// For the template of a fork: its share of the owner's quota.
    reservation: Mutex<Option<ForkReservation>>,
    /// Held while the frozen layers of its disks must not change.
    pub(crate) disks: tokio::sync::Mutex<()>,
    forks: mpsc::Sender<Ask>,
    notes: mpsc::UnboundedSender<Note>,
    gone: watch::Receiver<bool>,
}

/// A process that the template is to fork: a child, a saver or a merge process.
#[derive(Debug)]
pub(crate) struct PendingChild {
    /// The process, or why there is none.
    pub(crate) forked: oneshot::Receiver<Result<Forked>>,
    /// The exit status of the process; an error if the template is gone first.
    pub(crate) ended: oneshot::Receiver<WaitStatus>,
}

/// What a new template starts with.
#[derive(Debug)]
pub(crate) struct TemplateParts {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) about: TemplateSpec,
    pub(crate) lineage: Arc<Lineage>,
    pub(crate) cleanup_queue: CleanupQueue,
}

impl Template {
    /// The template that `monitor` has become. It has no record yet: until [`record`](Template::record) a new
    /// daemon would end it.
    pub(crate) fn new(plan: TemplateParts, monitor: Monitor) -> Result<Arc<Self>> {
        Template::watched(plan, monitor, HashMap::new())
    }

    fn watched(
        plan: TemplateParts,
        monitor: Monitor,
        ends: HashMap<String, oneshot::Sender<WaitStatus>>,
    ) -> Result<Arc<Self>> {
        let MonitorParts { pid, child, pidfd, control } = monitor.into_parts();
        let Some(control) = control else {
            let _ = pidfd.kill();
            if let Some(mut child) = child {
                std::thread::spawn(move || child.wait());
            }
            return Err(Error::host("the template ended", "it closed the connection"));
        };
        let (forks, asks) = mpsc::channel(QUEUE);
        let (notes, received) = mpsc::unbounded_channel();
        let (ended, gone) = watch::channel(false);
        let actor = ConnectionActor {
            id: plan.id.clone(),
            pid,
            lineage: plan.lineage.clone(),
            link: control,
            pidfd,
            asks,
            notes: received,
            pending: VecDeque::new(),
            ends,
            acknowledged: Vec::new(),
            strays: 0,
            heard_at: tokio::time::Instant::now(),
        };
        let (folder, cleanup_queue, lineage) =
            (plan.folder.clone(), plan.cleanup_queue, plan.lineage.clone());
        let (id, files) = (plan.id.clone(), TemplateFiles::count());
        task::spawn(Task::Template, async move {
            // Until here the process has the OOM score of a sandbox. In the task, because a client waits for `new`.
            oom::set(actor.pid, actor.pidfd.as_fd(), oom::Role::Template);
            if actor.run(child, ended).await {
                // A branch has a leaf of its own; any other template's goes with its lineage.
                if let Some(leaf) = lineage.cgroup.as_ref().and_then(|cgroup| cgroup.existing(&id).ok()) {
                    // A saver may still be in it.
                    cleanup_queue.run(move || leaf.kill().and_then(|()| leaf.remove())).await;
                }
                cleanup_queue.remove_folder(folder).await;
            }
            // Only now may another lineage get its user id.
            drop((lineage, files));
        });
        Ok(Arc::new(Template {
            id: plan.id,
            pid,
            folder: plan.folder,
            about: plan.about,
            lineage: plan.lineage,
            snapshot: Mutex::default(),
            reservation: Mutex::default(),
            disks: tokio::sync::Mutex::default(),
            forks,
            notes,
            gone,
        }))
    }

    /// Makes `monitor`, which has done nothing yet, the template of a snapshot on disk.
    pub(crate) async fn load(
        plan: TemplateParts,
        mut monitor: Monitor,
        config: LoadConfig,
        fds: Vec<OwnedFd>,
        patience: Duration,
    ) -> Result<Arc<Self>> {
        monitor.load(config, &fds, patience).await?;
        drop(fds);
        Template::new(plan, monitor)
    }

    /// Takes over a template an earlier daemon left running. Returns its children by name, each with its exit
    /// status or the channel for it.
    pub(crate) async fn adopt(
        plan: TemplateParts,
        patience: Duration,
    ) -> Result<(Arc<Self>, HashMap<String, Adopted>)> {
        let identity = ProcessId::read(&plan.folder).read();
        let process = identity.as_ref().and_then(|identity| Some((identity.pid, identity.open()?)));
        let Some((pid, pidfd)) = process else {
            return Err(Error::host("cannot take it over", "its process is gone"));
        };
        let failed = |error| Error::host("cannot reach it", error);
        let mut monitor =
            Monitor::adopted(plan.id.clone(), plan.folder.clone(), pid, pidfd, &mut None).map_err(failed)?;
        monitor.hello(patience).await?;
        if monitor.status(patience).await?.role != Role::Template {
            return Err(Error::host("cannot take it over", "it is not a template"));
        }
        let (mut ends, mut children) = (HashMap::new(), HashMap::new());
        for child in monitor.children(patience).await? {
            let adopted = match child.status {
                Some(status) => Adopted::Ended(status),
                None => {
                    let (end, ended) = oneshot::channel();
                    ends.insert(child.name.clone(), end);
                    Adopted::Alive(child.pid, ended)
                }
            };
            children.insert(child.name, adopted);
        }
        Ok((Template::watched(plan, monitor, ends)?, children))
    }

    /// Writes the template's record: from here on a new daemon takes the template over.
    pub(crate) fn record(&self, standing: PersistState) -> io::Result<()> {
        if let PersistState::Saved(id) = &standing {
            self.is_of(id);
        }
        records::write(&TemplateRecord { about: self.about.clone(), standing }, &self.folder)
    }

    /// Sets the id of its snapshot.
    pub(crate) fn is_of(&self, id: &str) {
        *self.snapshot.lock() = Some(id.to_owned());
    }

    /// The id of its snapshot, if that is on disk.
    pub(crate) fn snapshot(&self) -> Option<String> {
        self.snapshot.lock().clone()
    }

    /// Keeps the reservation of a fork until the last handle is dropped.
    pub(crate) fn keep_reservation(&self, reservation: ForkReservation) {
        *self.reservation.lock() = Some(reservation);
    }

    /// Requests a child. Blocks while the queue is full.
    pub(crate) fn fork(&self, config: ForkConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        let (ask, pending) = process(name, Request::Fork(config), fds);
        // If the process is gone, the request is dropped, and the receivers in `pending` return an error.
        let _ = self.forks.blocking_send(ask);
        pending
    }

    /// Requests a saver.
    pub(crate) async fn save(&self, config: SaveConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        self.process(process(name, Request::Save(config), fds)).await
    }

    /// Requests a process that merges layers.
    pub(crate) async fn merge(&self, config: MergeConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        self.process(process(name, Request::Merge(config), fds)).await
    }

    async fn process(&self, (ask, pending): (Ask, PendingChild)) -> PendingChild {
        let _ = self.forks.send(ask).await;
        pending
    }

    /// The frozen layers of its disks, oldest first.
    pub(crate) async fn layers(&self) -> Result<Vec<Vec<OwnedFd>>> {
        let (reply, replied) = oneshot::channel();
        let pending = Pending::Layers(reply);
        let _ =
            self.forks.send(Ask { request: Request::Layers, fds: Vec::new(), pending, ended: None }).await;
        replied.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Replaces several layers by one file, for each disk that has a replacement.
    pub(crate) async fn replace_layers(&self, disks: Vec<Option<Replacement>>) -> Result<()> {
        let (request, fds) = replace_request(disks);
        let (reply, replied) = oneshot::channel();
        let _ = self.forks.send(Ask { request, fds, pending: Pending::Replaced(reply), ended: None }).await;
        replied.await.unwrap_or_else(|_| Err(lost()))
    }

    /// The folder with the template's files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The end of `child` is recorded: the template may forget the exit status.
    pub(crate) fn acknowledge(&self, child: &str) {
        let _ = self.notes.send(Note::Acknowledge(child.to_owned()));
    }

    /// Lets the template run on when the handles are dropped, for the next daemon.
    pub(crate) fn leave(&self) {
        let _ = self.notes.send(Note::Leave);
    }

    /// Whether the process was still there a moment ago.
    pub(crate) fn is_alive(&self) -> bool {
        // Without the connection's task the template takes no requests.
        !*self.gone.borrow() && self.gone.has_changed().is_ok()
    }
}

/// A child of a template that was taken over.
#[derive(Debug)]
pub(crate) enum Adopted {
    /// Its pid, and the channel for its exit status.
    Alive(i32, oneshot::Receiver<WaitStatus>),
    Ended(WaitStatus),
}

/// The error of every request to a template that went away.
pub(crate) fn lost() -> Error {
    Error::new(Code::TemplateEnded, "the template ended; ask again: a new one is started from the snapshot")
}

pub(crate) mod cgroup;
pub(crate) mod connection;
#[cfg(test)]
pub(crate) mod tests;
