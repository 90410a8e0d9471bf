//! One template process: forking children, hearing how they end, and its own end.
//!
//! A [`Template`] is a handle; everybody who needs the process keeps one: the tag it is the template
//! of, and each child, because the process is its children's parent and the only one that learns how
//! they end. When the last handle is dropped the process is ended and its folder removed. A task of
//! its own owns the connection: requests are pipelined, replies come in their order.

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
use crate::snapshot::template::connection::{Ask, ConnectionActor, Note, Pending, process};
use crate::util::records::{self, Found, VersionedRecord};
use crate::util::task::{self, Task};

/// The file in a template's folder that says whose it is. Written when the template is complete.
pub(crate) const RECORD: &str = "template.json";
/// Forks asked for and not sent yet: enough to keep a template busy, few enough that a fan-out does
/// not hold thousands of descriptors.
const QUEUE: usize = 32;

/// Where a template's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum MemorySource {
    /// The snapshot's file.
    Disk,
    /// The guest the snapshot was made of.
    Memory,
}

/// What the next daemon needs to know of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TemplateSpec {
    pub(crate) tag: String,
    pub(crate) source: MemorySource,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    /// The name of its lineage's cgroup.
    pub(crate) cgroup: String,
    /// What its guest is like: what a child of it has and needs.
    pub(crate) guest: GuestSpec,
}

/// What is in [`RECORD`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TemplateRecord {
    pub(crate) about: TemplateSpec,
    pub(crate) standing: PersistState,
}

/// How a template stands to what is on disk under its tag.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum PersistState {
    /// It is what the snapshot with this id was made of, or is loaded from. A later snapshot may have the
    /// same tag.
    Saved(String),
    /// It is a branch that is not on disk yet.
    Unsaved(Box<crate::snapshot::branch_job::BranchRecord>),
    /// Nobody wants it on disk: it lives as long as its children.
    Forgotten,
}

impl TemplateRecord {
    /// That of the template in `folder`. One that is not complete has none.
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
    /// The id of the snapshot it is the template of, once there is one.
    snapshot: Mutex<Option<String>>,
    /// Held while its disks' layers must stay those that they are.
    pub(crate) disks: tokio::sync::Mutex<()>,
    forks: mpsc::Sender<Ask>,
    notes: mpsc::UnboundedSender<Note>,
    gone: watch::Receiver<bool>,
}

/// A process that was asked for.
#[derive(Debug)]
pub(crate) struct PendingChild {
    /// The process, or why there is none.
    pub(crate) forked: oneshot::Receiver<Result<Forked>>,
    /// How it ended; never if the template goes first.
    pub(crate) ended: oneshot::Receiver<WaitStatus>,
}

/// What a new template starts with.
#[derive(Debug)]
pub(crate) struct TemplateParts {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) about: TemplateSpec,
    pub(crate) lineage: Arc<Lineage>,
    pub(crate) janitor: CleanupQueue,
}

impl Template {
    /// The template that `monitor` has become. Nothing is recorded yet: until
    /// [`record`](Template::record) a new daemon would end it.
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
            return Err(Error::host("the template ended", "it hung up"));
        };
        let (forks, asks) = mpsc::channel(QUEUE);
        let (notes, noted) = mpsc::unbounded_channel();
        let (tell_gone, gone) = watch::channel(false);
        let keeper = ConnectionActor {
            id: plan.id.clone(),
            pid,
            lineage: plan.lineage.clone(),
            link: control,
            pidfd,
            asks,
            noted,
            pending: VecDeque::new(),
            ends,
            acknowledged: Vec::new(),
            strays: 0,
            heard_at: tokio::time::Instant::now(),
        };
        let (folder, janitor, lineage) = (plan.folder.clone(), plan.janitor, plan.lineage.clone());
        let (id, files) = (plan.id.clone(), TemplateFiles::count());
        task::spawn(Task::Template, async move {
            // Until here it has the score of a sandbox. Not before the spawn: a branch's client waits for that.
            oom::set(keeper.pid, keeper.pidfd.as_fd(), oom::Role::Template);
            if keeper.keep(child, tell_gone).await {
                // A branch has a leaf of its own; any other template's goes with its lineage.
                if let Some(leaf) = lineage.cgroup.as_ref().and_then(|cgroup| cgroup.existing(&id).ok()) {
                    // A saver may still be in it.
                    janitor.run(move || leaf.kill().and_then(|()| leaf.remove())).await;
                }
                janitor.remove_folder(folder).await;
            }
            // Only now may its user id be somebody else's.
            drop((lineage, files));
        });
        Ok(Arc::new(Template {
            id: plan.id,
            pid,
            folder: plan.folder,
            about: plan.about,
            lineage: plan.lineage,
            snapshot: Mutex::default(),
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

    /// Takes over a template an earlier daemon left running, and the names of its children with how
    /// they ended, or with a way to hear of it.
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
                    let (tell, told) = oneshot::channel();
                    ends.insert(child.name.clone(), tell);
                    Adopted::Alive(child.pid, told)
                }
            };
            children.insert(child.name, adopted);
        }
        Ok((Template::watched(plan, monitor, ends)?, children))
    }

    /// Records how it stands: from here on a new daemon takes it over.
    pub(crate) fn record(&self, standing: PersistState) -> io::Result<()> {
        if let PersistState::Saved(id) = &standing {
            self.is_of(id);
        }
        records::write(&TemplateRecord { about: self.about.clone(), standing }, &self.folder)
    }

    /// It is the template of the snapshot `id`.
    pub(crate) fn is_of(&self, id: &str) {
        *self.snapshot.lock() = Some(id.to_owned());
    }

    /// The snapshot it is the template of, if there is one.
    pub(crate) fn snapshot(&self) -> Option<String> {
        self.snapshot.lock().clone()
    }

    /// Asks for a child. Blocks while the queue is full.
    pub(crate) fn fork(&self, config: ForkConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        let (ask, asked) = process(name, Request::Fork(config), fds);
        // If the process is gone, dropping the question is the answer.
        let _ = self.forks.blocking_send(ask);
        asked
    }

    /// Asks for a saver.
    pub(crate) async fn save(&self, config: SaveConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        self.process(process(name, Request::Save(config), fds)).await
    }

    /// Asks for a process that merges layers.
    pub(crate) async fn merge(&self, config: MergeConfig, fds: Vec<OwnedFd>) -> PendingChild {
        let name = config.child.clone();
        self.process(process(name, Request::Merge(config), fds)).await
    }

    async fn process(&self, (ask, asked): (Ask, PendingChild)) -> PendingChild {
        let _ = self.forks.send(ask).await;
        asked
    }

    /// The frozen layers of its disks, oldest first.
    pub(crate) async fn layers(&self) -> Result<Vec<Vec<OwnedFd>>> {
        let (tell, told) = oneshot::channel();
        let pending = Pending::Layers(tell);
        let _ =
            self.forks.send(Ask { request: Request::Layers, fds: Vec::new(), pending, ended: None }).await;
        told.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Has it use one file in the place of several layers, for each disk that is named.
    pub(crate) async fn replace_layers(&self, disks: Vec<Option<Replacement>>) -> Result<()> {
        let (request, fds) = replace_request(disks);
        let (tell, told) = oneshot::channel();
        let _ = self.forks.send(Ask { request, fds, pending: Pending::Replaced(tell), ended: None }).await;
        told.await.unwrap_or_else(|_| Err(lost()))
    }

    /// Its files.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The end of `child` is recorded: the process may forget it.
    pub(crate) fn acknowledge(&self, child: &str) {
        let _ = self.notes.send(Note::Acknowledge(child.to_owned()));
    }

    /// Lets the process run on when the handles are dropped.
    pub(crate) fn leave(&self) {
        let _ = self.notes.send(Note::Leave);
    }

    /// Whether the process was still there a moment ago.
    pub(crate) fn is_alive(&self) -> bool {
        // Without its task nothing can be asked of it.
        !*self.gone.borrow() && self.gone.has_changed().is_ok()
    }
}

/// A child of a template that was taken over.
#[derive(Debug)]
pub(crate) enum Adopted {
    /// Its process, and a way to hear how it ends.
    Alive(i32, oneshot::Receiver<WaitStatus>),
    Ended(WaitStatus),
}

/// The error of everybody who asked a template that went away.
pub(crate) fn lost() -> Error {
    Error::new(Code::TemplateEnded, "the template ended; ask again: a new one is started from the snapshot")
}

pub(crate) mod cgroup;
pub(crate) mod connection;
#[cfg(test)]
pub(crate) mod tests;
