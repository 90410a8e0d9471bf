//! The task that owns the connection to a template. It sends requests one after the other without waiting for
//! replies. Replies come in the order of the requests, events about ended children at any time.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::{Event, FdRef, MAX_CHILD_NAME, Message, Reply, Request, WaitStatus};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;

use crate::error::{Error, Result};
use crate::host::lineage::Lineage;
use crate::host::process::{Pidfd, child_pidfd};
use crate::monitor::control_socket::Link;
use crate::monitor::{Forked, console};
use crate::snapshot::template::PendingChild;

/// The most ended children in one acknowledgement.
const ACKNOWLEDGE: usize = 256;
/// How long a template may be silent while it owes an answer. Everything it does takes milliseconds; a template
/// that hangs would hold up for ever each client that wants a child of it.
pub(crate) const SILENCE: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 60 });

/// How many events about unknown things a template may send. A daemon that took a template over may get events of
/// children that the earlier daemon asked for and never saw: no more than fit into a socket.
pub(crate) const MAX_STRAYS: usize = 512;

/// A request, with the channels for its answer.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) request: Request,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) pending: Pending,
    /// For the request of a process: the channel for its exit status.
    pub(crate) ended: Option<oneshot::Sender<WaitStatus>>,
}

#[derive(Debug)]
pub(crate) enum Note {
    /// The end of this child is recorded.
    Acknowledge(String),
    /// The daemon stops: let the process run on.
    Leave,
}

/// The kind of reply that is due, and the channel for it.
#[derive(Debug)]
pub(crate) enum Pending {
    Process(String, oneshot::Sender<Result<Forked>>),
    Layers(oneshot::Sender<Result<Vec<Vec<OwnedFd>>>>),
    Replaced(oneshot::Sender<Result<()>>),
    Acknowledgement,
}

/// A request for a process.
pub(crate) fn process(name: String, request: Request, fds: Vec<OwnedFd>) -> (Ask, PendingChild) {
    let (reply, forked) = oneshot::channel();
    let (end, ended) = oneshot::channel();
    let ask = Ask { request, fds, pending: Pending::Process(name, reply), ended: Some(end) };
    (ask, PendingChild { forked, ended })
}

/// The task that owns the connection.
#[derive(Debug)]
pub(crate) struct ConnectionActor {
    pub(crate) id: String,
    pub(crate) pid: i32,
    pub(crate) lineage: Arc<Lineage>,
    pub(crate) link: Link,
    pub(crate) pidfd: Arc<Pidfd>,
    pub(crate) asks: mpsc::Receiver<Ask>,
    pub(crate) notes: mpsc::UnboundedReceiver<Note>,
    pub(crate) pending: VecDeque<Pending>,
    /// For each child by name, the channel for its exit status.
    pub(crate) ends: HashMap<String, oneshot::Sender<WaitStatus>>,
    pub(crate) acknowledged: Vec<String>,
    /// How many events about unknown things came.
    pub(crate) strays: usize,
    /// Since when the template owes an answer, or when it gave the last one. Events are no answers.
    pub(crate) heard_at: Instant,
}

/// Why the task stops.
enum Over {
    /// All handles are dropped.
    Unneeded,
    /// The daemon stops.
    Left,
    /// The template is gone, or breaks the protocol: the reason.
    Broken(String),
}

impl ConnectionActor {
    /// Serves the connection until all handles are dropped, the daemon stops, or the template breaks. Returns whether
    /// the process is gone and its folder may be removed.
    pub(crate) async fn run(mut self, child: Option<std::process::Child>, gone: watch::Sender<bool>) -> bool {
        let over = self.serve().await;
        gone.send_replace(true);
        let broken = match over {
            Over::Left => return false,
            Over::Unneeded => false,
            Over::Broken(why) => {
                tracing::error!(template = self.id, why, "template lost; its children go on");
                true
            }
        };
        self.pidfd.end(&self.id).await;
        if let Some(mut child) = child {
            // The process has ended, so this does not block.
            let _ = child.wait();
        }
        // Dropping the channels wakes the tasks that wait for answers which will not come.
        self.pending.clear();
        self.ends.clear();
        self.asks.close();
        while self.asks.recv().await.is_some() {}
        // The folder stays as long as there are handles: a new daemon finds the children's template by it.
        while broken && let Some(note) = self.notes.recv().await {
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
            let owes = match self.owes() {
                Ok(owes) => owes,
                Err(why) => return Over::Broken(why),
            };
            tokio::select! {
                biased;
                message = self.link.recv() => {
                    if let Err(why) = self.received(message) {
                        return Over::Broken(why);
                    }
                    acknowledge = !self.acknowledged.is_empty() && self.notes.is_empty();
                }
                // Before the asks: after `Leave`, the drop of the last handle must not end the process.
                Some(note) = self.notes.recv() => match note {
                    Note::Leave => return Over::Left,
                    Note::Acknowledge(child) => {
                        self.acknowledged.push(child);
                        // Children often end together: one message for all of them.
                        acknowledge = self.notes.is_empty() || self.acknowledged.len() >= ACKNOWLEDGE;
                    }
                },
                next = self.asks.recv() => match next {
                    Some(next) => ask = Some(next),
                    None => return Over::Unneeded,
                },
                _ = self.pidfd.ended() => return Over::Broken("its process ended".into()),
                () = silence(owes) => return Over::Broken(hangs()),
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
        // Before the request is sent: the event of the child's end may arrive before the reply is handled.
        if let (Pending::Process(name, _), Some(ended)) = (&ask.pending, ask.ended) {
            self.ends.insert(name.clone(), ended);
        }
        self.owe(ask.pending);
        self.send(&ask.request, &fds).await
    }

    /// Adds an answer that the template owes.
    fn owe(&mut self, pending: Pending) {
        if self.pending.is_empty() {
            self.heard_at = Instant::now();
        }
        self.pending.push_back(pending);
    }

    /// Since when the template has been silent, if it owes an answer. An error if that is too long: under endless
    /// events the timer in `select!` would never be polled.
    fn owes(&self) -> std::result::Result<Option<Instant>, String> {
        let since = (!self.pending.is_empty()).then_some(self.heard_at);
        match since.is_some_and(|since| since.elapsed() > SILENCE) {
            true => Err(hangs()),
            false => Ok(since),
        }
    }

    async fn send_acknowledgement(&mut self) -> std::result::Result<(), String> {
        let rest = self.acknowledged.split_off(self.acknowledged.len().min(ACKNOWLEDGE));
        let children = std::mem::replace(&mut self.acknowledged, rest);
        self.owe(Pending::Acknowledgement);
        self.send(&Request::Acknowledge { children }, &[]).await
    }

    /// Sends `request` and receives meanwhile: a template that is blocked on sending its replies takes no
    /// requests.
    async fn send(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> std::result::Result<(), String> {
        loop {
            let owes = self.owes()?;
            tokio::select! {
                biased;
                sent = self.link.send(request, fds) => return sent.map_err(|error| error.to_string()),
                message = self.link.recv() => self.received(message)?,
                () = silence(owes) => return Err(hangs()),
            }
        }
    }

    fn received(
        &mut self,
        message: io::Result<Option<crate::monitor::control_socket::Received>>,
    ) -> std::result::Result<(), String> {
        match message {
            Ok(Some((Message::Reply(reply), fds))) => {
                self.heard_at = Instant::now();
                self.answered(reply, fds)
            }
            Ok(Some((Message::Event(Event::ChildEnded { child, .. }), _)))
                if child.len() > MAX_CHILD_NAME =>
            {
                Err(format!("it sent the end of a child with a name of {} bytes", child.len()))
            }
            Ok(Some((Message::Event(Event::ChildEnded { child, status }), _))) => {
                let waiting = match self.ends.remove(&child) {
                    Some(waiting) => waiting.send(status),
                    None => self.stray().map(|()| Err(status))?,
                };
                // No task waits for this child, so none would acknowledge its end.
                if waiting.is_err() {
                    self.acknowledged.push(child);
                }
                Ok(())
            }
            Ok(Some((Message::Event(_), _))) => self.stray(),
            Ok(None) => Err("it closed the connection".into()),
            Err(error) => Err(error.to_string()),
        }
    }

    /// Counts an event about an unknown thing; an error if there were too many.
    fn stray(&mut self) -> std::result::Result<(), String> {
        self.strays += 1;
        match self.strays > MAX_STRAYS {
            true => Err(format!("it sent more than {MAX_STRAYS} events of things the daemon does not know")),
            false => Ok(()),
        }
    }

    fn answered(&mut self, reply: Reply, fds: Vec<OwnedFd>) -> std::result::Result<(), String> {
        match (self.pending.pop_front(), reply) {
            (Some(Pending::Process(_, waiter)), Reply::Forked { pid }) if pid > 0 => {
                let Some(pidfd) = fds.into_iter().next() else {
                    return Err("a child came without pidfd".into());
                };
                let pidfd = child_pidfd(pidfd, pid, self.pid).map_err(|error| error.to_string())?;
                // If the caller no longer waits for the process, the process must not run on.
                if let Err(Ok(unwanted)) = waiter.send(Ok(Forked { pid, pidfd })) {
                    let _ = rustix::process::pidfd_send_signal(unwanted.pidfd, rustix::process::Signal::KILL);
                }
                Ok(())
            }
            (Some(Pending::Process(name, waiter)), Reply::Error { message }) => {
                self.ends.remove(&name);
                let message = console::printable(message.as_bytes());
                let _ = waiter.send(Err(Error::host("the template did not fork", message)));
                Ok(())
            }
            (Some(Pending::Layers(waiter)), Reply::Layers { disks }) => {
                let returned = |fd| self.lineage.layers.returned(fd);
                let disks = sorted(disks, fds)?.into_iter();
                let disks = disks.map(|layers| layers.into_iter().map(returned).collect());
                drop(waiter.send(Ok(disks.collect::<std::result::Result<_, String>>()?)));
                Ok(())
            }
            (Some(Pending::Layers(waiter)), Reply::Error { message }) => {
                drop(waiter.send(Err(refused(&message))));
                Ok(())
            }
            (Some(Pending::Replaced(waiter)), Reply::Replaced) => {
                drop(waiter.send(Ok(())));
                Ok(())
            }
            (Some(Pending::Replaced(waiter)), Reply::Error { message }) => {
                drop(waiter.send(Err(refused(&message))));
                Ok(())
            }
            (Some(Pending::Acknowledgement), Reply::Acknowledged | Reply::Error { .. }) => Ok(()),
            (_, reply) => Err(format!("it gave the wrong answer: {}", console::brief(&reply))),
        }
    }
}

/// Returns when a template that owes an answer has been silent for too long since `since`; never without one.
async fn silence(since: Option<Instant>) {
    match since {
        Some(since) => tokio::time::sleep_until(since + SILENCE).await,
        None => std::future::pending().await,
    }
}

fn hangs() -> String {
    format!("it did not answer for {} s", SILENCE.as_secs())
}

fn refused(message: &str) -> Error {
    Error::host("the template refused", console::printable(message.as_bytes()))
}

/// The descriptors that came with an answer, in the order in which the answer names them.
fn sorted(disks: Vec<Vec<FdRef>>, fds: Vec<OwnedFd>) -> std::result::Result<Vec<Vec<OwnedFd>>, String> {
    let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
    let mut take = |FdRef(index): FdRef| {
        let fd = fds.get_mut(index).and_then(Option::take);
        fd.ok_or_else(|| String::from("layers came without their descriptors"))
    };
    disks.into_iter().map(|layers| layers.into_iter().map(&mut take).collect()).collect()
}
