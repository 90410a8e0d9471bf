//! Accepting connections: one thread each, and never more than a fixed number.

use std::{
    io,
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use crate::{
    log,
    sys::{self, Socket},
};

/// Plenty for what a service does on its stack, little enough for a few hundred of them.
const STACK: usize = 512 << 10;
/// How long to wait when the guest has no thread or descriptor to spare, and for a peer that is turned
/// away.
pub(crate) const BACK_OFF: Duration = Duration::from_millis(100);

/// How connections are served.
pub(crate) struct Service {
    /// The name of its threads.
    pub(crate) name: &'static str,
    /// The most peers served at once.
    pub(crate) max: usize,
    /// Called for a connection above `max`, on the accepting thread: it must not wait for the peer.
    pub(crate) turn_away: fn(Socket),
    /// Called for a connection within `max`, on a thread of its own.
    pub(crate) serve: Box<dyn Fn(Socket) + Send + Sync>,
}

/// Serves all connections that reach `listener`. Returns when the listener itself is broken.
pub(crate) fn accept_all(listener: &OwnedFd, service: Service) -> io::Error {
    let service = Arc::new(service);
    let open = Arc::new(AtomicUsize::new(0));
    loop {
        let socket = match sys::accept(listener.as_fd()) {
            Ok(socket) => socket,
            Err(error) => match error.raw_os_error() {
                Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EOPNOTSUPP) => return error,
                Some(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS) => {
                    thread::sleep(BACK_OFF);
                    continue;
                }
                // One peer's trouble, or one that may not come in. A fork resets connections at any
                // moment, the listener stays.
                _ => continue,
            },
        };
        let slot = Slot::take(&open, service.max);
        if slot.is_none() {
            (service.turn_away)(socket);
            continue;
        }
        let serving = service.clone();
        let spawned = thread::Builder::new().name(service.name.into()).stack_size(STACK).spawn(move || {
            let _slot = slot;
            (serving.serve)(socket);
        });
        if let Err(error) = spawned {
            // The processes of the guest may have taken all threads there are.
            log::error!("cannot serve a connection: no thread: {error}");
            thread::sleep(BACK_OFF);
        }
    }
}

/// One of the places.
pub(crate) struct Slot(Arc<AtomicUsize>);

impl Slot {
    pub(crate) fn take(open: &Arc<AtomicUsize>, max: usize) -> Option<Slot> {
        let taken = open.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < max).then_some(n + 1));
        taken.ok().map(|_| Slot(open.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}
