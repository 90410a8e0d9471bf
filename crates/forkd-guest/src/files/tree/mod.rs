//! A folder with all below it, as a stream: names, attributes and hashes (`Agent/Tree`).

mod walk;

use std::{
    io, mem,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Instant,
};

use forkd_protocol::{
    agent::{MAX_TREE_BATCH, MAX_TREE_ENTRIES, TreeEntries, TreeEntry, TreeRequest},
    connect::{Code, Error},
};

use self::walk::{Options, Stop, Visit};
use super::service::failed;
use crate::{
    http::{Exchange, Head},
    rpc::{self, Outgoing},
    users::{self, User},
};

/// The most walks at once: each holds the names of the folders it is in.
const MAX_WALKS: usize = 4;
/// A message is sent when its entries have so many bytes.
const BATCH: usize = 32 << 10;
/// The bytes of an entry beside its texts.
const ENTRY_COST: usize = 160;

/// All walks.
#[derive(Default)]
pub(crate) struct Trees {
    running: AtomicUsize,
}

/// The place of one walk.
struct Slot<'t>(&'t Trees);

impl Drop for Slot<'_> {
    fn drop(&mut self) {
        self.0.running.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Trees {
    /// Answers one call. `user` looks up the user that the caller names.
    pub(crate) fn call(
        &self,
        user: &dyn Fn(&Head) -> Result<User, Error>,
        exchange: &mut Exchange,
    ) -> io::Result<()> {
        let request = rpc::stream_request::<TreeRequest>(exchange)?;
        let begun = request.and_then(|request| {
            let until = rpc::timeout(exchange.head())?.and_then(|limit| Instant::now().checked_add(limit));
            let user = user(exchange.head())?;
            let path = user.resolve(&request.path)?;
            let slot = self.slot()?;
            let acting = users::act_as(&user).map_err(|error| failed(Path::new(&user.name), &error))?;
            let root = walk::open_root(&path)?;
            Ok((root, request.hash, until, slot, acting))
        });
        let stream = Outgoing::begin(exchange)?;
        let (root, hash, until, _slot, _acting) = match begun {
            Ok(begun) => begun,
            Err(error) => return stream.end(Some(error)),
        };
        let mut batches = Batches { stream, entries: Vec::new(), size: 0, until, sent: Instant::now() };
        let options = Options { hash, max_entries: MAX_TREE_ENTRIES };
        let walked = match hash {
            // Hashes take long: a folder with too many entries is refused before the first one.
            true => walk::walk(&root, Options { hash: false, ..options }, &mut Count(&mut batches)),
            false => Ok(()),
        };
        match walked.and_then(|()| walk::walk(&root, options, &mut batches)).and_then(|()| batches.send()) {
            Ok(()) => batches.stream.end(None),
            Err(Stop::Refused(error)) => batches.stream.end(Some(error)),
            Err(Stop::Gone(error)) => Err(error),
        }
    }

    fn slot(&self) -> Result<Slot<'_>, Error> {
        let slot = Slot(self);
        if self.running.fetch_add(1, Ordering::SeqCst) >= MAX_WALKS {
            let message =
                format!("{MAX_WALKS} other walks through folders run; ask again when one has ended");
            return Err(Error::new(Code::Unavailable, message));
        }
        Ok(slot)
    }
}

/// Sends entries in messages.
struct Batches<'x, 'e> {
    stream: Outgoing<'x, 'e>,
    entries: Vec<TreeEntry>,
    size: usize,
    until: Option<Instant>,
    /// When the last message was sent.
    sent: Instant,
}

impl Batches<'_, '_> {
    fn send(&mut self) -> Result<(), Stop> {
        (self.size, self.sent) = (0, Instant::now());
        let message = TreeEntries { entries: mem::take(&mut self.entries) };
        self.stream.send(&message).map_err(Stop::Gone)
    }
}

impl Visit for Batches<'_, '_> {
    fn found(&mut self, entry: TreeEntry) -> Result<(), Stop> {
        self.size += ENTRY_COST + entry.path.len() + entry.target.as_ref().map_or(0, String::len);
        self.entries.push(entry);
        if self.size >= BATCH || self.entries.len() >= MAX_TREE_BATCH { self.send() } else { Ok(()) }
    }

    fn tick(&mut self) -> Result<(), Stop> {
        let now = Instant::now();
        if self.until.is_some_and(|until| now >= until) {
            let message =
                "the time for this folder is over: choose a smaller folder, or leave out the hashes";
            return Err(Stop::Refused(Error::new(Code::DeadlineExceeded, message)));
        }
        if now.duration_since(self.sent) < rpc::PEER_TICK {
            return Ok(());
        }
        if self.stream.peer_is_gone() {
            return Err(Stop::Gone(io::ErrorKind::BrokenPipe.into()));
        }
        // Without entries, too: the caller gives up an agent that sends nothing, and a caller that left is noticed.
        self.send()
    }
}

/// Sends no entries.
struct Count<'b, 'x, 'e>(&'b mut Batches<'x, 'e>);

impl Visit for Count<'_, '_, '_> {
    fn found(&mut self, _: TreeEntry) -> Result<(), Stop> {
        Ok(())
    }

    fn tick(&mut self) -> Result<(), Stop> {
        self.0.tick()
    }
}

#[cfg(test)]
mod tests;
