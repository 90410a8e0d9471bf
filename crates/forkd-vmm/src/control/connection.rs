//! The listening control socket and the controller connected to it, one at a time.
//!
//! Knows the handshake and the time limits of a connection, not the meaning of requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::{Duration, Instant};

use forkd_protocol::control::{Channel, Event, Message, OLDEST_VERSION, Reply, Request, VERSION};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;
use rustix::net::sockopt::Timeout;

use crate::{Error, Result};

/// How long a controller may take to send `Hello`, and to take a message out of a full socket. A slower one
/// counts as dead.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause between two attempts to accept a connection.
const ACCEPT_RETRY: Duration = Duration::from_millis(20);

/// The listening socket for controllers, and the connected one.
pub(crate) struct ControlSocket {
    listener: OwnedFd,
    connection: Option<ControllerConnection>,
}

/// The connected controller.
struct ControllerConnection {
    channel: Channel,
    connected: Instant,
    greeted: bool,
}

impl ControlSocket {
    /// No controller is connected yet.
    pub(crate) fn new(listener: OwnedFd) -> Result<ControlSocket> {
        if !rustix::net::sockopt::socket_acceptconn(&listener).unwrap_or(false) {
            return Err(Error::Config("the control descriptor is not a listening socket".into()));
        }
        Ok(ControlSocket { listener, connection: None })
    }

    /// The listening socket.
    pub(crate) fn listener(&self) -> RawFd {
        self.listener.as_raw_fd()
    }

    /// Whether a controller is connected and has sent `Hello`.
    pub(crate) fn attached(&self) -> bool {
        self.connection.as_ref().is_some_and(|connection| connection.greeted)
    }

    /// Waits until something happens: on the connection if there is one, else on the listener; or on one of
    /// `others`. Returns a flag for each, the controller first.
    pub(crate) fn wait(&self, others: &[BorrowedFd<'_>]) -> Result<Vec<bool>> {
        let control =
            self.connection.as_ref().map_or(self.listener.as_fd(), |connection| connection.channel.as_fd());
        let all = std::iter::once(&control).chain(others);
        let mut fds: Vec<_> = all.map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)).collect();
        let silent = self.connection.as_ref().is_some_and(|connection| !connection.greeted);
        let timeout = silent.then_some(Timespec { tv_sec: 1, tv_nsec: 0 });
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::system("wait for the controller")(error)),
        }
        Ok(fds.iter().map(|fd| !fd.revents().is_empty()).collect())
    }

    /// One step, to be called when [`ControlSocket::wait`] flags the controller: accepts a connection,
    /// answers a `Hello`, or returns a request.
    pub(crate) fn step(&mut self) -> Option<(Request, Vec<OwnedFd>)> {
        let Some(connection) = &self.connection else {
            self.accept();
            return None;
        };
        match connection.channel.recv::<Request>() {
            Ok(Some((Request::Hello { version }, _))) => self.greet(version),
            Ok(Some((request, fds))) if connection.greeted => return Some((request, fds)),
            Ok(Some(_)) => self.refuse("the first request on a connection must be hello".into()),
            Ok(None) => self.connection = None,
            Err(error) => self.refuse(format!("that was no request: {error}")),
        }
        None
    }

    fn accept(&mut self) {
        let Ok(socket) = rustix::net::accept_with(&self.listener, SocketFlags::CLOEXEC) else {
            // The peer is gone again, or no descriptor is left: the next step tries again.
            return std::thread::sleep(ACCEPT_RETRY);
        };
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(HELLO_TIMEOUT));
        let channel = Channel::new(socket);
        self.connection = Some(ControllerConnection { channel, connected: Instant::now(), greeted: false });
    }

    fn greet(&mut self, version: u32) {
        if !(OLDEST_VERSION..=VERSION).contains(&version) {
            return self.refuse(format!(
                "this monitor speaks versions {OLDEST_VERSION} to {VERSION} of the control protocol, not {version}"
            ));
        }
        if let Some(connection) = &mut self.connection {
            connection.greeted = true;
        }
        let monitor = env!("CARGO_PKG_VERSION").into();
        self.reply(Reply::Hello { version, monitor, newest: VERSION });
    }

    /// Hangs up on a controller that never sent `Hello`.
    pub(crate) fn drop_silent(&mut self) {
        if self
            .connection
            .as_ref()
            .is_some_and(|connection| !connection.greeted && connection.connected.elapsed() > HELLO_TIMEOUT)
        {
            self.connection = None;
        }
    }

    /// Answers a request.
    pub(crate) fn reply(&mut self, reply: Reply) {
        self.send(Message::Reply(reply), &[]);
    }

    /// Answers a request with descriptors.
    pub(crate) fn reply_with(&mut self, reply: Reply, fds: &[BorrowedFd<'_>]) {
        self.send(Message::Reply(reply), fds);
    }

    /// Answers a request that was not done.
    pub(crate) fn reply_error(&mut self, error: &Error) {
        self.reply(Reply::Error { message: error.chain() });
    }

    /// Sends an event to the controller, if one is connected and has sent `Hello`. Returns whether it was
    /// sent.
    pub(crate) fn send_event(&mut self, event: Event, fds: &[BorrowedFd<'_>]) -> bool {
        self.attached() && self.send(Message::Event(event), fds)
    }

    /// Sends an event to the controller in the listener's queue, as the reason why its `Hello` gets no
    /// answer.
    pub(crate) fn send_to_waiting(mut self, event: Event) {
        // That controller has connected before: accepting need not wait.
        if self.connection.is_none() && rustix::io::ioctl_fionbio(&self.listener, true).is_ok() {
            self.accept();
        }
        self.send(Message::Event(event), &[]);
    }

    fn refuse(&mut self, message: String) {
        self.reply(Reply::Error { message });
        self.connection = None;
    }

    fn send(&mut self, message: Message, fds: &[BorrowedFd<'_>]) -> bool {
        let Some(connection) = &self.connection else { return false };
        let sent: io::Result<()> = connection.channel.send(&message, fds);
        if sent.is_err() {
            self.connection = None;
        }
        sent.is_ok()
    }
}
