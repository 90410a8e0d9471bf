//! Serving connections: requests on each, until its peer leaves.

use std::{
    io,
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use super::{Connection, Exchange, Transport};
use crate::{
    listener::{BACK_OFF, Service, accept_all},
    sys::Socket,
};

/// The most peers served at once.
const MAX_CONNECTIONS: usize = 256;

impl Transport for Socket {
    fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        Socket::set_timeouts(self, read, write)
    }

    fn is_gone(&self) -> bool {
        Socket::is_gone(self)
    }

    fn has_left(&self) -> bool {
        Socket::has_left(self)
    }

    fn wait_readable(&self, wait: Duration) -> io::Result<bool> {
        Socket::wait_readable(self, wait)
    }

    fn shutdown_write(&self) {
        Socket::shutdown_write(self);
    }
}

/// Answers requests with a function.
pub(crate) type Handler = Arc<dyn Fn(&mut Exchange) -> io::Result<()> + Send + Sync>;

/// Serves all connections that reach `listener`. Returns when the listener itself is broken.
pub(crate) fn serve(listener: &OwnedFd, handler: Handler) -> io::Error {
    let serve = Box::new(move |socket| serve_connection(socket, &handler));
    accept_all(listener, Service { name: "connection", max: MAX_CONNECTIONS, turn_away, serve })
}

fn turn_away(mut socket: Socket) {
    let _ = socket.set_timeouts(Some(BACK_OFF), Some(BACK_OFF));
    let text = "the agent serves as many connections as it can; try again";
    let _ = Connection::new(&mut socket).refuse(503, text);
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
