//! The daemon's end of a control connection, without blocking. A [`Monitor`](super::Monitor) uses it for one
//! request at a time, a template for pipelined requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use forkd_protocol::control::{Channel, Message, OLDEST_VERSION, Request};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::monitor::boot_files::remove_stale;
use crate::util::task::{self, Task};

/// The control socket in a process's folder.
pub(crate) const CONTROL: &str = "control.sock";

/// How long a process that the daemon has not seen may take to read its stop request.
const STOP_WAIT: Duration = Duration::from_secs(10);

/// A message and the descriptors attached to it.
pub(crate) type Received = (Message, Vec<OwnedFd>);

/// A control connection.
#[derive(Debug)]
pub(crate) struct Link(AsyncFd<Socket>);

impl Link {
    /// Takes a connected, non-blocking socket.
    pub(crate) fn new(channel: Channel) -> io::Result<Self> {
        // SAFETY: a channel owns its descriptor and keeps it open as long as it lives.
        Ok(Link(unsafe { AsyncFd::register(Socket(channel)) }?))
    }

    /// Sends `request`. Cancel-safe: either the whole request is sent, or nothing.
    pub(crate) async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.0.async_io(Interest::WRITABLE, |socket| socket.0.send(request, fds)).await
    }

    /// The next message; `None` when the peer has closed the connection. Cancel-safe.
    pub(crate) async fn recv(&self) -> io::Result<Option<Received>> {
        self.0.async_io(Interest::READABLE, |socket| socket.0.recv()).await
    }
}

/// A [`Channel`] with a non-blocking socket: its calls fail with `WouldBlock`, as [`AsyncFd`] requires.
#[derive(Debug)]
struct Socket(Channel);

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Stops the process that has, or will have, the other end of `control`: a fork that may have succeeded, but
/// was never reported. Must be called in a runtime.
pub(crate) fn stop_unseen(control: Channel) {
    let _ = control.send(&Request::Stop, &[]);
    task::spawn(Task::StopUnseen, async move {
        // The connection stays open until the process is gone: closing it would lose an unread request.
        let Ok(link) = Link::new(control) else { return };
        let gone = async { while let Ok(Some(_)) = link.recv().await {} };
        let _ = tokio::time::timeout(STOP_WAIT, gone).await;
    });
}

/// Whether `error` means that the peer has closed the connection.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// A listening control socket at `path`, and a connection to it on which `Hello` is sent already. The kernel
/// keeps the message until the process accepts the connection.
pub(crate) fn pair(path: &Path) -> io::Result<(OwnedFd, Channel)> {
    let listener = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    let address = SocketAddrUnix::new(path)?;
    match bind(&listener, &address) {
        Err(rustix::io::Errno::ADDRINUSE) => {
            remove_stale(path)?;
            bind(&listener, &address)?;
        }
        other => other?,
    }
    listen(&listener, 4)?;
    Ok((listener, open_at(&address)?))
}

/// Connects to the control socket at `path` and sends `Hello`.
pub(crate) fn open(path: &Path) -> io::Result<Channel> {
    open_at(&SocketAddrUnix::new(path)?)
}

fn open_at(address: &SocketAddrUnix) -> io::Result<Channel> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, address)?;
    let channel = Channel::new(socket);
    // The newest version that the monitor speaks is in its reply.
    channel.send(&Request::Hello { version: OLDEST_VERSION }, &[])?;
    Ok(channel)
}
