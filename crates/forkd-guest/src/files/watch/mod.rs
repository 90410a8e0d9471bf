//! Watchers of folders: as a stream (`WatchDir`), and with events that a client fetches (`CreateWatcher`,
//! `GetWatcherEvents`, `RemoveWatcher`).
//!
//! There are few watchers, each has few events that wait, and all together have a limited number of folders.

mod folders;

use std::{
    fs, io, mem,
    os::fd::{AsFd, OwnedFd},
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicUsize},
    thread,
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::{
        EmptyMessage, FilesystemEvent, MAX_ENTRIES, WatchDirRequest, WatchDirResponse, WatcherEvents,
        WatcherRef,
    },
    connect::{Code, Error},
};
use rustix::event::EventfdFlags;
use serde_json::json;

use self::folders::{Change, ChangeKind, Folders, lost};
use super::service::{Links, entry, failed};
use crate::{
    http::{Exchange, Head},
    rpc::{self, Outgoing},
    users::{self, IdNames, User},
};

/// The most watchers, streams included.
const MAX_WATCHERS: usize = 64;
/// A watcher whose events no client fetches for so long makes place for another.
const ABANDONED: Duration = Duration::from_secs(600);
/// The most bytes of events that wait for a client.
const MAX_QUEUE: usize = 4 << 20;
/// The overhead of an event, and that of its entry.
const EVENT_COST: usize = 96;
const ENTRY_COST: usize = 512;
/// Threads that only wait and copy; a batch of the kernel's reports is on their stack.
const STACK: usize = 128 << 10;

/// File systems whose changes other machines make, or user processes, unnoticed by the kernel: NFS, SMB, CIFS, SMB2,
/// FUSE, 9P.
const NETWORK: [u32; 6] = [0x6969, 0x517b, 0xff53_4d42, 0xfe53_4d42, 0x6573_5546, 0x0102_1997];

/// All watchers.
#[derive(Default)]
pub(crate) struct Watchers {
    table: Arc<Mutex<WatcherTable>>,
    /// How many folders they watch together.
    folders: Arc<AtomicUsize>,
}

#[derive(Default)]
struct WatcherTable {
    /// How many streams there are.
    streams: usize,
    /// How many watchers were made for clients that fetch.
    made: u64,
    fetched: Vec<FetchedWatcher>,
}

/// A watcher whose events a client fetches. Dropping it ends its thread.
struct FetchedWatcher {
    id: String,
    queue: Arc<Mutex<EventQueue>>,
    last_fetch: Instant,
    stop: Arc<OwnedFd>,
}

impl Drop for FetchedWatcher {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
    }
}

/// Events that wait for a client.
#[derive(Default)]
struct EventQueue {
    events: Vec<FilesystemEvent>,
    size: usize,
    error: Option<Error>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The place of a stream among the watchers.
struct StreamSlot(Arc<Mutex<WatcherTable>>);

impl Drop for StreamSlot {
    fn drop(&mut self) {
        lock(&self.0).streams -= 1;
    }
}

impl Watchers {
    /// Answers one call; `None` if there is no such method. `user` looks up the user that the caller names.
    pub(crate) fn call(
        &self,
        method: &str,
        user: &dyn Fn(&Head) -> Result<User, Error>,
        exchange: &mut Exchange,
    ) -> Option<io::Result<()>> {
        Some(match method {
            "WatchDir" => self.watch_call(user, exchange),
            "CreateWatcher" => {
                rpc::unary(exchange, |request: WatchDirRequest, head| self.create(&request, user(head)?))
            }
            "GetWatcherEvents" => rpc::unary(exchange, |request: WatcherRef, _| self.fetch(&request)),
            "RemoveWatcher" => rpc::unary(exchange, |request: WatcherRef, _| {
                let mut table = lock(&self.table);
                let at = table.position(&request)?;
                table.fetched.swap_remove(at);
                Ok(json!({}))
            }),
            _ => return None,
        })
    }

    fn begin(&self, request: &WatchDirRequest, user: User) -> Result<Folders, Error> {
        let path = user.resolve(&request.path)?;
        if !request.allow_network_mounts {
            let _acting = users::act_as(&user).map_err(|error| failed(Path::new(&user.name), &error))?;
            let found = rustix::fs::statfs(&path).map_err(|errno| failed(&path, &errno.into()))?;
            // The magic numbers have 32 bits, whatever the type of the field.
            if NETWORK.contains(&(found.f_type as u32)) {
                let message = format!(
                    "{}: changes on a network file system may go unnoticed; allow network mounts to watch it",
                    path.display()
                );
                return Err(Error::new(Code::InvalidArgument, message));
            }
        }
        Folders::watch(path, request.recursive, user, self.folders.clone())
    }

    fn watch_call(
        &self,
        user: &dyn Fn(&Head) -> Result<User, Error>,
        exchange: &mut Exchange,
    ) -> io::Result<()> {
        let request = rpc::stream_request::<WatchDirRequest>(exchange)?;
        let keepalive = rpc::keepalive(exchange.head());
        let begun = request.and_then(|request| {
            let limit = rpc::timeout(exchange.head())?;
            let user = user(exchange.head())?;
            lock(&self.table).make_place()?.streams += 1;
            let slot = StreamSlot(self.table.clone());
            Ok((slot, self.begin(&request, user)?, request.include_entry, limit))
        });
        let stream = Outgoing::begin(exchange)?;
        match begun {
            Ok((_slot, folders, with_entry, limit)) => relay(stream, folders, with_entry, keepalive, limit),
            Err(error) => stream.end(Some(error)),
        }
    }

    fn create(&self, request: &WatchDirRequest, user: User) -> Result<WatcherRef, Error> {
        let no_resources = |error: io::Error| {
            Error::new(Code::ResourceExhausted, format!("the guest cannot start a watcher now: {error}"))
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let stop = Arc::new(rustix::event::eventfd(0, flags).map_err(|errno| no_resources(errno.into()))?);
        let folders = self.begin(request, user)?;
        let mut table = lock(&self.table);
        table.make_place()?;
        let queue = Arc::<Mutex<EventQueue>>::default();
        let (filling, stopping, with_entry) = (queue.clone(), stop.clone(), request.include_entry);
        let thread = thread::Builder::new().name("watcher".into()).stack_size(STACK);
        thread.spawn(move || fill(folders, with_entry, &filling, &stopping)).map_err(no_resources)?;
        table.made += 1;
        let id = format!("w{}", table.made);
        table.fetched.push(FetchedWatcher { id: id.clone(), queue, last_fetch: Instant::now(), stop });
        Ok(WatcherRef { watcher_id: id })
    }

    fn fetch(&self, request: &WatcherRef) -> Result<WatcherEvents, Error> {
        let mut table = lock(&self.table);
        let at = table.position(request)?;
        table.fetched[at].last_fetch = Instant::now();
        let queue = mem::take(&mut *lock(&table.fetched[at].queue));
        match queue.error {
            Some(error) => Err(error),
            None => Ok(WatcherEvents { events: queue.events }),
        }
    }
}

impl WatcherTable {
    fn position(&self, request: &WatcherRef) -> Result<usize, Error> {
        self.fetched.iter().position(|watcher| watcher.id == request.watcher_id).ok_or_else(|| {
            Error::new(Code::NotFound, format!("there is no watcher {:?}", request.watcher_id))
        })
    }

    /// Makes place for one more watcher.
    fn make_place(&mut self) -> Result<&mut Self, Error> {
        if self.streams + self.fetched.len() >= MAX_WATCHERS {
            let abandoned = |watcher: &FetchedWatcher| watcher.last_fetch.elapsed() >= ABANDONED;
            let Some(at) = self.fetched.iter().position(abandoned) else {
                let message = format!("there are {MAX_WATCHERS} watchers: remove one first");
                return Err(Error::new(Code::ResourceExhausted, message));
            };
            self.fetched.swap_remove(at);
        }
        Ok(self)
    }
}

impl EventQueue {
    fn push(&mut self, event: FilesystemEvent) {
        let metadata = |entry: &forkd_protocol::agent::EntryInfo| {
            ENTRY_COST
                + 2 * entry.path.len()
                + entry.metadata.iter().map(|(k, v)| k.len() + v.len()).sum::<usize>()
        };
        self.size += EVENT_COST + event.name.len() + event.entry.as_ref().map_or(0, metadata);
        if self.size > MAX_QUEUE || self.events.len() == MAX_ENTRIES {
            self.fail(lost());
        } else if self.error.is_none() {
            self.events.push(event);
        }
    }

    fn fail(&mut self, error: Error) {
        *self = EventQueue { error: Some(error), ..EventQueue::default() };
    }
}

/// The thread of a watcher: keeps events until a client fetches them.
fn fill(mut folders: Folders, with_entry: bool, queue: &Mutex<EventQueue>, stop: &OwnedFd) {
    loop {
        let next = folders.next(None, Some(stop.as_fd()));
        let mut stopped = [0; 8];
        if rustix::io::read(stop, &mut stopped).is_ok() {
            return;
        }
        match next {
            Ok(Some(change)) => {
                let event = describe(&folders, change, with_entry);
                lock(queue).push(event);
            }
            Ok(None) => {}
            Err(error) => {
                let ended = error.code != Code::DataLoss && error.code != Code::ResourceExhausted;
                lock(queue).fail(error);
                if ended {
                    return;
                }
            }
        }
    }
}

/// Sends events to one peer until it leaves, or `limit` is over.
fn relay(
    mut stream: Outgoing,
    mut folders: Folders,
    with_entry: bool,
    keepalive: Duration,
    limit: Option<Duration>,
) -> io::Result<()> {
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    stream.send(&WatchDirResponse { start: Some(EmptyMessage {}), ..WatchDirResponse::default() })?;
    let mut last_sent = Instant::now();
    loop {
        let mut wait = rpc::PEER_TICK.min(keepalive.saturating_sub(last_sent.elapsed()));
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = "the time of this call is over";
                return stream.end(Some(Error::new(Code::DeadlineExceeded, message)));
            }
            wait = wait.min(left);
        }
        match folders.next(Some(wait), None) {
            Ok(Some(change)) => {
                let filesystem = Some(describe(&folders, change, with_entry));
                stream.send(&WatchDirResponse { filesystem, ..WatchDirResponse::default() })?;
                last_sent = Instant::now();
            }
            Ok(None) if stream.peer_is_gone() => return Err(io::ErrorKind::BrokenPipe.into()),
            Ok(None) if last_sent.elapsed() >= keepalive => {
                stream.send(&WatchDirResponse {
                    keepalive: Some(EmptyMessage {}),
                    ..WatchDirResponse::default()
                })?;
                last_sent = Instant::now();
            }
            Ok(None) => {}
            Err(error) => return stream.end(Some(error)),
        }
    }
}

/// The event of a change, with the file's metadata as it is now.
fn describe(folders: &Folders, change: Change, with_entry: bool) -> FilesystemEvent {
    let there = with_entry && !matches!(change.kind, ChangeKind::Remove | ChangeKind::Rename);
    let path = folders.root.join(&change.path);
    let entry = there.then(|| users::act_as(&folders.user)).and_then(|acting| {
        let _acting = acting.ok()?;
        let metadata = fs::symlink_metadata(&path).ok()?;
        Some(entry(&path, &metadata, &IdNames::load(), Links::Resolved))
    });
    let r#type = match change.kind {
        ChangeKind::Create => "EVENT_TYPE_CREATE",
        ChangeKind::Write => "EVENT_TYPE_WRITE",
        ChangeKind::Remove => "EVENT_TYPE_REMOVE",
        ChangeKind::Rename => "EVENT_TYPE_RENAME",
        ChangeKind::Chmod => "EVENT_TYPE_CHMOD",
    };
    FilesystemEvent { name: change.path.to_string_lossy().into_owned(), r#type: r#type.into(), entry }
}

#[cfg(test)]
mod tests;
