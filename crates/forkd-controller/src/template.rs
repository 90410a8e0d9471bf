//! One template process: forking children, hearing how they end, and its own end.
//!
//! A [`Template`] is a handle; everybody who needs the process keeps one: the tag it is the template
//! of, and each child, because the process is its children's parent and the only one that learns how
//! they end. When the last handle is dropped the process is ended and its folder removed. A task of
//! its own owns the connection: requests are pipelined, replies come in their order.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::{
    Event, ForkConfig, LoadConfig, Message, Reply, Request, Role, SaveConfig, WaitStatus,
};
use serde::{Deserialize, Serialize};
use tokio::sync::{mpsc, oneshot, watch};

use crate::console;
use crate::error::{Error, Kind, Result};
use crate::janitor::Janitor;
use crate::lineage::Lineage;
use crate::link::Link;
use crate::monitor::{Forked, Monitor, Parts};
use crate::process::{Identity, Pidfd};

/// The file in a template's folder that says whose it is. Written when the template is complete.
pub(crate) const RECORD: &str = "template.json";
/// Forks asked for and not sent yet: enough to keep a template busy, few enough that a fan-out does
/// not hold thousands of descriptors.
const QUEUE: usize = 32;
/// Ends acknowledged with one message.
const ACKNOWLEDGE: usize = 256;

/// What a template's guest is like: what a child of it has and needs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Guest {
    /// Its image; a guest without one is a bare kernel, without agent, disk or sockets.
    pub(crate) image: Option<String>,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    /// Whether it has a network interface.
    pub(crate) network: bool,
    pub(crate) python: Option<bool>,
}

/// Where a template's memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Source {
    /// The snapshot's file.
    Disk,
    /// The guest the snapshot was made of.
    Memory,
}

/// What the next daemon needs to know of a template.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct About {
    pub(crate) tag: String,
    pub(crate) source: Source,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    pub(crate) guest: Guest,
}

/// What is in [`RECORD`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// When its snapshot was made: a later one may have the same tag.
    pub(crate) created_at_unix: u64,
    pub(crate) about: About,
}

impl Record {
    /// That of the template in `folder`, if it is complete.
    pub(crate) fn read(folder: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(folder.join(RECORD)).ok()?).ok()
    }
}

/// A handle on a template.
#[derive(Debug)]
pub(crate) struct Template {
    pub(crate) id: String,
    pub(crate) pid: i32,
    folder: PathBuf,
    pub(crate) about: About,
    pub(crate) lineage: Arc<Lineage>,
    forks: mpsc::Sender<Ask>,
    notes: mpsc::UnboundedSender<Note>,
    gone: watch::Receiver<bool>,
}

/// A process to fork.
#[derive(Debug)]
struct Ask {
    name: String,
    request: Request,
    fds: Vec<OwnedFd>,
    reply: oneshot::Sender<Result<Forked>>,
    ended: oneshot::Sender<WaitStatus>,
}

#[derive(Debug)]
enum Note {
    /// The end of this child is recorded.
    Acknowledge(String),
    /// The daemon stops: let the process run on.
    Leave,
}

/// A process that was asked for.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The process, or why there is none.
    pub(crate) forked: oneshot::Receiver<Result<Forked>>,
    /// How it ended; never if the template goes first.
    pub(crate) ended: oneshot::Receiver<WaitStatus>,
}

/// What a new template starts with.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) about: About,
    pub(crate) lineage: Arc<Lineage>,
    pub(crate) janitor: Janitor,
}

impl Template {
    /// The template that `monitor` has become. Nothing is recorded yet: until
    /// [`record`](Template::record) a new daemon would end it.
    pub(crate) fn new(plan: Plan, monitor: Monitor) -> Result<Arc<Self>> {
        Template::watched(plan, monitor, HashMap::new())
    }

    fn watched(
        plan: Plan,
        monitor: Monitor,
        ends: HashMap<String, oneshot::Sender<WaitStatus>>,
    ) -> Result<Arc<Self>> {
        let Parts { pid, child, pidfd, control } = monitor.into_parts();
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
        let keeper = Keeper {
            id: plan.id.clone(),
            link: control,
            pidfd,
            asks,
            noted,
            pending: VecDeque::new(),
            ends,
            acknowledged: Vec::new(),
        };
        let (folder, janitor, lineage) = (plan.folder.clone(), plan.janitor, plan.lineage.clone());
        tokio::spawn(async move {
            if keeper.keep(child, tell_gone).await {
                janitor.remove_folder(folder).await;
            }
            // Only now may its user id be somebody else's.
            drop(lineage);
        });
        Ok(Arc::new(Template {
            id: plan.id,
            pid,
            folder: plan.folder,
            about: plan.about,
            lineage: plan.lineage,
            forks,
            notes,
            gone,
        }))
    }

    /// Makes `monitor`, which has done nothing yet, the template of a snapshot on disk.
    pub(crate) async fn load(
        plan: Plan,
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
        plan: Plan,
        patience: Duration,
    ) -> Result<(Arc<Self>, HashMap<String, Adopted>)> {
        let identity = Identity::read(&plan.folder);
        let process = identity.as_ref().and_then(|identity| Some((identity.pid, identity.open()?)));
        let Some((pid, pidfd)) = process else {
            return Err(Error::new(Kind::NotFound, "its process is gone"));
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

    /// Records it as the template of the snapshot made then: from here on a new daemon takes it over.
    pub(crate) fn record(&self, created_at_unix: u64) -> io::Result<()> {
        let record = Record { created_at_unix, about: self.about.clone() };
        let temporary = self.folder.join("template.json.new");
        std::fs::write(&temporary, serde_json::to_vec(&record)?)?;
        std::fs::rename(temporary, self.folder.join(RECORD))
    }

    /// Asks for a child. Blocks while the queue is full.
    pub(crate) fn fork(&self, config: ForkConfig, fds: Vec<OwnedFd>) -> Asked {
        let name = config.child.clone();
        self.ask(name, Request::Fork(config), fds)
    }

    /// Asks for a saver. Blocks while the queue is full.
    pub(crate) fn save(&self, config: SaveConfig, fds: Vec<OwnedFd>) -> Asked {
        let name = config.child.clone();
        self.ask(name, Request::Save(config), fds)
    }

    fn ask(&self, name: String, request: Request, fds: Vec<OwnedFd>) -> Asked {
        let (reply, forked) = oneshot::channel();
        let (tell_end, ended) = oneshot::channel();
        // If the process is gone, dropping the question is the answer.
        let _ = self.forks.blocking_send(Ask { name, request, fds, reply, ended: tell_end });
        Asked { forked, ended }
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
        !*self.gone.borrow()
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
    Error::host("the template ended", "ask again: a new one is started from the snapshot")
}

/// What a reply is the answer to.
#[derive(Debug)]
enum Pending {
    Process(String, oneshot::Sender<Result<Forked>>),
    Acknowledgement,
}

/// The task that owns the connection.
#[derive(Debug)]
struct Keeper {
    id: String,
    link: Link,
    pidfd: Arc<Pidfd>,
    asks: mpsc::Receiver<Ask>,
    noted: mpsc::UnboundedReceiver<Note>,
    pending: VecDeque<Pending>,
    /// Who waits for which child's end.
    ends: HashMap<String, oneshot::Sender<WaitStatus>>,
    acknowledged: Vec<String>,
}

/// Why a keeper stops.
enum Over {
    /// Nobody needs the process any more.
    Unneeded,
    /// The daemon stops.
    Left,
    /// It is gone, or talks nonsense: why.
    Broken(String),
}

impl Keeper {
    /// Returns when nobody needs the process any more; whether it is gone.
    async fn keep(mut self, child: Option<std::process::Child>, gone: watch::Sender<bool>) -> bool {
        let over = self.serve().await;
        gone.send_replace(true);
        let broken = match over {
            Over::Left => return false,
            Over::Unneeded => false,
            Over::Broken(why) => {
                tracing::error!(template = self.id, why, "a template is lost; its children go on");
                true
            }
        };
        self.pidfd.end(&self.id).await;
        if let Some(mut child) = child {
            // It has ended, so this does not block.
            let _ = child.wait();
        }
        // Nobody will tell those who wait.
        self.pending.clear();
        self.ends.clear();
        self.asks.close();
        while self.asks.recv().await.is_some() {}
        // The folder stays as long as there are handles: it is how a new daemon tells.
        while broken && let Some(note) = self.noted.recv().await {
            if matches!(note, Note::Leave) {
                return false;
            }
        }
        tracing::debug!(template = self.id, "template is gone");
        true
    }

    async fn serve(&mut self) -> Over {
        loop {
            let (mut ask, mut acknowledge) = (None, false);
            tokio::select! {
                biased;
                message = self.link.recv() => {
                    if let Err(why) = self.heard(message) {
                        return Over::Broken(why);
                    }
                    acknowledge = !self.acknowledged.is_empty() && self.noted.is_empty();
                }
                // Before the asks: that the last handle is gone means nothing after `Leave`.
                Some(note) = self.noted.recv() => match note {
                    Note::Leave => return Over::Left,
                    Note::Acknowledge(child) => {
                        self.acknowledged.push(child);
                        // Many ends come together: one message for all of them.
                        acknowledge = self.noted.is_empty() || self.acknowledged.len() >= ACKNOWLEDGE;
                    }
                },
                next = self.asks.recv() => match next {
                    Some(next) => ask = Some(next),
                    None => return Over::Unneeded,
                },
                _ = self.pidfd.ended() => return Over::Broken("its process ended".into()),
            }
            let sent = match ask {
                Some(ask) => self.send_ask(ask).await,
                None if acknowledge => self.send_acknowledgement().await,
                None => Ok(()),
            };
            if let Err(why) = sent {
                return Over::Broken(why);
            }
        }
    }

    async fn send_ask(&mut self, ask: Ask) -> std::result::Result<(), String> {
        let fds: Vec<_> = ask.fds.iter().map(AsFd::as_fd).collect();
        // Before it is sent: the child's end may be told before its beginning is looked at.
        self.ends.insert(ask.name.clone(), ask.ended);
        self.pending.push_back(Pending::Process(ask.name, ask.reply));
        self.send(&ask.request, &fds).await
    }

    async fn send_acknowledgement(&mut self) -> std::result::Result<(), String> {
        let rest = self.acknowledged.split_off(self.acknowledged.len().min(ACKNOWLEDGE));
        let children = std::mem::replace(&mut self.acknowledged, rest);
        self.pending.push_back(Pending::Acknowledgement);
        self.send(&Request::Acknowledge { children }, &[]).await
    }

    /// Sends `request`. Meanwhile goes on listening: a template that cannot get rid of its replies
    /// takes no requests.
    async fn send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> std::result::Result<(), String> {
        loop {
            tokio::select! {
                biased;
                sent = self.link.send(request, fds) => return sent.map_err(|error| error.to_string()),
                message = self.link.recv() => self.heard(message)?,
            }
        }
    }

    fn heard(
        &mut self,
        message: io::Result<Option<crate::link::Received>>,
    ) -> std::result::Result<(), String> {
        match message {
            Ok(Some((Message::Reply(reply), fds))) => self.answered(reply, fds),
            Ok(Some((Message::Event(Event::ChildEnded { child, status }), _))) => {
                match self.ends.remove(&child) {
                    Some(waiting) => drop(waiting.send(status)),
                    // One that nobody waited for.
                    None => self.acknowledged.push(child),
                }
                Ok(())
            }
            Ok(Some((Message::Event(event), _))) => {
                tracing::debug!(template = self.id, ?event, "not an event of a template");
                Ok(())
            }
            Ok(None) => Err("it hung up".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    fn answered(&mut self, reply: Reply, fds: Vec<OwnedFd>) -> std::result::Result<(), String> {
        match (self.pending.pop_front(), reply) {
            (Some(Pending::Process(_, tell)), Reply::Forked { pid }) if pid > 0 => {
                let Some(pidfd) = fds.into_iter().next() else {
                    return Err("a child came without pidfd".into());
                };
                // If nobody waits for it any more, it must not run on.
                if let Err(Ok(unwanted)) = tell.send(Ok(Forked { pid, pidfd })) {
                    let _ = rustix::process::pidfd_send_signal(unwanted.pidfd, rustix::process::Signal::KILL);
                }
                Ok(())
            }
            (Some(Pending::Process(name, tell)), Reply::Error { message }) => {
                self.ends.remove(&name);
                let message = console::printable(message.as_bytes());
                let _ = tell.send(Err(Error::host("the template did not fork", message)));
                Ok(())
            }
            (Some(Pending::Acknowledgement), Reply::Acknowledged | Reply::Error { .. }) => Ok(()),
            (_, reply) => Err(format!("it gave the wrong answer: {reply:?}")),
        }
    }
}

#[cfg(test)]
mod tests;
