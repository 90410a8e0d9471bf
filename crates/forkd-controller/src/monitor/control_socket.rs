//! The controller's end of a control connection, without blocking: used for one monitor at a time
//! (`monitor`) and for templates, whose requests are pipelined (`template`).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::time::Duration;

use forkd_protocol::control::{Channel, Message, Request, VERSION};
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use crate::monitor::boot_files::remove_stale;
use crate::util::task::{self, Task};

/// The file in a process's folder by which it is controlled.
pub(crate) const CONTROL: &str = "control.sock";

/// How long a process that nobody saw may take to be told to stop.
const STOP_WAIT: Duration = Duration::from_secs(10);

/// A message and the descriptors attached to it.
pub(crate) type Received = (Message, Vec<OwnedFd>);

/// A connection.
#[derive(Debug)]
pub(crate) struct Link(AsyncFd<Socket>);

impl Link {
    /// Takes a connected socket that does not block.
    pub(crate) fn new(channel: Channel) -> io::Result<Self> {
        // SAFETY: a channel owns its descriptor and keeps it open as long as it lives.
        Ok(Link(unsafe { AsyncFd::register(Socket(channel)) }?))
    }

    /// Sends `request`. Cancel-safe: it was sent whole or not at all.
    pub(crate) async fn send(&self, request: &Request, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        self.0.async_io(Interest::WRITABLE, |socket| socket.0.send(request, fds)).await
    }

    /// The next message; `None` when the peer is gone. Cancel-safe.
    pub(crate) async fn recv(&self) -> io::Result<Option<Received>> {
        self.0.async_io(Interest::READABLE, |socket| socket.0.recv()).await
    }
}

/// A [`Channel`] whose socket does not block: its calls then fail with `WouldBlock`, which is what
/// [`AsyncFd`] needs.
#[derive(Debug)]
struct Socket(Channel);

impl AsRawFd for Socket {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_fd().as_raw_fd()
    }
}

/// Ends whoever is at the other end of `control`, or will be: a process that may have been forked though
/// nobody was told. Must be called in a runtime.
pub(crate) fn stop_unseen(control: Channel) {
    let _ = control.send(&Request::Stop, &[]);
    task::spawn(Task::StopUnseen, async move {
        // Held until it is gone: what it has not read yet would be lost with the connection.
        let Ok(link) = Link::new(control) else { return };
        let gone = async { while let Ok(Some(_)) = link.recv().await {} };
        let _ = tokio::time::timeout(STOP_WAIT, gone).await;
    });
}

/// Whether `error` means that the peer is gone.
pub(crate) fn is_gone(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

/// A listening control socket at `path` and a connection to it, on which hello is said already: the
/// kernel keeps it until somebody accepts.
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

/// Connects to the control socket at `path` and says hello.
pub(crate) fn open(path: &Path) -> io::Result<Channel> {
    open_at(&SocketAddrUnix::new(path)?)
}

fn open_at(address: &SocketAddrUnix) -> io::Result<Channel> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    connect(&socket, address)?;
    let channel = Channel::new(socket);
    channel.send(&Request::Hello { version: VERSION }, &[])?;
    Ok(channel)
}
