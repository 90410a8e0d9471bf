//! Accepting connections: one thread each, and never more than a fixed number.

use std::{
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use super::{Connection, Exchange, Transport};
use crate::{
    log,
    sys::{self, Socket},
};

/// As many peers as are served at once.
const MAX_CONNECTIONS: usize = 256;
/// Plenty for what a service does on its stack, little enough for [`MAX_CONNECTIONS`] of them.
const STACK: usize = 512 << 10;
/// How long to wait when the guest has no thread or descriptor to spare.
const BACK_OFF: Duration = Duration::from_millis(100);

impl Transport for Socket {
    fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        Socket::set_timeouts(self, read, write)
    }

    fn is_gone(&self) -> bool {
        Socket::is_gone(self)
    }

    fn shutdown_write(&self) {
        Socket::shutdown_write(self);
    }
}

/// Answers requests with a function.
pub(crate) type Handler = Arc<dyn Fn(&mut Exchange) -> io::Result<()> + Send + Sync>;

/// Serves all connections that reach `listener`. Returns when the listener itself is broken.
pub(crate) fn serve(listener: &OwnedFd, handler: Handler) -> io::Error {
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
        let slot = Slot::take(&open);
        if slot.is_none() {
            turn_away(socket);
            continue;
        }
        let handler = handler.clone();
        let spawned = thread::Builder::new().name("connection".into()).stack_size(STACK).spawn(move || {
            let _slot = slot;
            serve_connection(socket, &handler);
        });
        if let Err(error) = spawned {
            // The processes of the guest may have taken all threads there are.
            log::error!("cannot serve a connection: no thread: {error}");
            thread::sleep(BACK_OFF);
        }
    }
}

/// One of the [`MAX_CONNECTIONS`] places.
struct Slot(Arc<AtomicUsize>);

impl Slot {
    fn take(open: &Arc<AtomicUsize>) -> Option<Slot> {
        let taken = open
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < MAX_CONNECTIONS).then_some(n + 1));
        taken.ok().map(|_| Slot(open.clone()))
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn turn_away(mut socket: Socket) {
    // On the accepting thread, so it must not wait for this peer.
    let _ = socket.set_timeouts(Some(BACK_OFF), Some(BACK_OFF));
    let _ = socket
        .write_all(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
}

/// Serves one peer until it leaves. A service that panics costs its own connection and no more.
pub(crate) fn serve_connection(mut socket: Socket, handler: &Handler) {
    Connection::new(&mut socket).run(&|exchange| {
        // The exchange is not used again after a panic but to send the last answer.
        match catch_unwind(AssertUnwindSafe(|| handler(exchange))) {
            Ok(handled) => handled,
            Err(_) => {
                if !exchange.has_responded() {
                    let body =
                        br#"{"code":"internal","message":"the agent failed; its console has the reason"}"#;
                    let headers = [("content-type", "application/json"), ("connection", "close")];
                    exchange.respond(500, &headers, body)?;
                }
                Err(io::Error::other("a service panicked"))
            }
        }
    });
}
