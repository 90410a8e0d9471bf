//! The control thread: serves the controller, one connection after the other.
//!
//! The VM does not depend on the controller. When a connection ends, however it ends, the VM goes on
//! and the next connection is accepted. What cannot be understood closes its connection and nothing
//! else. A controller that connects while another one is served waits in the socket's queue.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::time::{Duration, Instant};

use forkd_protocol::control::{BootConfig, Channel, Event, Message, Reply, Request, Status, VERSION, VmEnd};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::SocketFlags;
use rustix::net::sockopt::Timeout;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::config;
use crate::event_loop::as_fd;
use crate::vm::{Running, Vm};
use crate::{Error, Result, seccomp};

/// How long a peer may take to say hello, and to take a message out of a full socket. A peer that is
/// slower is taken for dead.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait before trying again what could fail again at once.
const BREATH: Duration = Duration::from_millis(20);
/// Connections of the guest that wait to be passed to the controller. More are refused.
const WAITING_CONNECTIONS: usize = 64;

/// How serving ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Finish {
    /// The controller said stop.
    Stopped,
    /// The VM ended by itself.
    Ended(VmEnd),
}

/// Serves controllers that connect to `listener` until the VM has ended.
pub fn serve(listener: &OwnedFd, seccomp: seccomp::Mode) -> Result<Finish> {
    if !rustix::net::sockopt::socket_acceptconn(listener).unwrap_or(false) {
        return Err(Error::Config("the control descriptor is not a listening socket".into()));
    }
    let (guest_connections, inbox) = guest_connections()?;
    Monitor { listener, seccomp, peer: None, running: None, guest_connections, inbox }.serve()
}

struct Monitor<'a> {
    listener: &'a OwnedFd,
    seccomp: seccomp::Mode,
    peer: Option<Peer>,
    running: Option<Running>,
    guest_connections: Outbox,
    inbox: Inbox,
}

/// The connected controller.
struct Peer {
    channel: Channel,
    connected: Instant,
    greeted: bool,
}

impl Monitor<'_> {
    fn serve(mut self) -> Result<Finish> {
        loop {
            let ready = self.wait()?;
            // The end first: nothing said now can change it.
            if ready.ended
                && let Some(end) = self.running.as_ref().and_then(Running::end)
            {
                return Ok(self.finish(end));
            }
            if ready.guest_connections {
                self.pass_guest_connections();
            }
            if ready.control {
                if self.peer.is_none() {
                    self.accept();
                } else if let Some(finish) = self.receive() {
                    return Ok(finish);
                }
            }
            self.drop_silent_peer();
        }
    }

    /// Waits until something happens: on the connection if there is one, else on the listener.
    fn wait(&self) -> Result<Ready> {
        let control = self.peer.as_ref().map_or(self.listener.as_fd(), |peer| peer.channel.as_fd());
        let mut fds = vec![
            PollFd::from_borrowed_fd(control, PollFlags::IN),
            PollFd::from_borrowed_fd(as_fd(&self.inbox.event), PollFlags::IN),
        ];
        if let Some(running) = &self.running {
            fds.push(PollFd::from_borrowed_fd(as_fd(running.ended()), PollFlags::IN));
        }
        let timeout =
            self.peer.as_ref().filter(|peer| !peer.greeted).map(|_| Timespec { tv_sec: 1, tv_nsec: 0 });
        match rustix::event::poll(&mut fds, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::system("wait for the controller")(error)),
        }
        let ready = |index: usize| fds.get(index).is_some_and(|fd| !fd.revents().is_empty());
        Ok(Ready { control: ready(0), guest_connections: ready(1), ended: ready(2) })
    }

    fn accept(&mut self) {
        let Ok(socket) = rustix::net::accept_with(self.listener, SocketFlags::CLOEXEC) else {
            // A peer that is gone again, or no descriptor left: the next turn tries again, in a while.
            return std::thread::sleep(BREATH);
        };
        let _ = rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(PATIENCE));
        let channel = Channel::new(socket);
        self.peer = Some(Peer { channel, connected: Instant::now(), greeted: false });
    }

    fn drop_silent_peer(&mut self) {
        if self.peer.as_ref().is_some_and(|peer| !peer.greeted && peer.connected.elapsed() > PATIENCE) {
            self.hang_up();
        }
    }

    fn hang_up(&mut self) {
        self.guest_connections.attached.store(false, Ordering::SeqCst);
        self.peer = None;
    }

    /// Serves one message of the connected controller.
    fn receive(&mut self) -> Option<Finish> {
        let peer = self.peer.as_ref()?;
        match peer.channel.recv::<Request>() {
            Ok(Some((request, fds))) if peer.greeted => self.answer(request, fds),
            Ok(Some((Request::Hello { version }, _))) => {
                self.greet(version);
                None
            }
            Ok(Some(_)) => {
                self.refuse_and_hang_up("the first request on a connection must be hello".into());
                None
            }
            Ok(None) => {
                self.hang_up();
                None
            }
            Err(error) => {
                self.refuse_and_hang_up(format!("that was no request: {error}"));
                None
            }
        }
    }

    fn greet(&mut self, version: u32) {
        if version != VERSION {
            let text =
                format!("this monitor speaks version {VERSION} of the control protocol, not {version}");
            return self.refuse_and_hang_up(text);
        }
        if let Some(peer) = &mut self.peer {
            peer.greeted = true;
        }
        self.guest_connections.attached.store(true, Ordering::SeqCst);
        self.reply(Reply::Hello { version: VERSION, monitor: env!("CARGO_PKG_VERSION").into() });
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> Option<Finish> {
        match request {
            Request::Hello { version } => self.greet(version),
            Request::Status => self.reply(Reply::Status(Status { running: self.running.is_some() })),
            Request::Boot(config) => {
                let reply = match self.boot(config, fds) {
                    Ok(()) => Reply::Booted,
                    Err(error) => Reply::Error { message: error.chain() },
                };
                self.reply(reply);
            }
            Request::Stop => {
                if let Some(running) = self.running.take() {
                    running.stop();
                }
                self.reply(Reply::Stopped);
                return Some(Finish::Stopped);
            }
        }
        None
    }

    fn boot(&mut self, config: BootConfig, fds: Vec<OwnedFd>) -> Result<()> {
        if self.running.is_some() {
            return Err(Error::Config("this monitor runs a VM already; start another monitor".into()));
        }
        let outbox = self.guest_connections.clone();
        let parts = config::resolve(config, fds, Box::new(move |port, fd| outbox.offer(port, fd)))?;
        self.running = Some(Vm::build(parts)?.start(self.seccomp)?);
        Ok(())
    }

    /// Passes on what the guest connected to. With no controller to take it, a connection is closed.
    fn pass_guest_connections(&mut self) {
        let _ = self.inbox.event.read();
        // So many and no more: a guest that never stops connecting must not keep the controller, or
        // the VM's end, waiting.
        for _ in 0..WAITING_CONNECTIONS {
            let Ok((port, fd)) = self.inbox.connections.try_recv() else { return };
            self.send(Message::Event(Event::GuestConnection { port }), &[fd.as_fd()]);
        }
        // It fails only when it is set already.
        let _ = self.inbox.event.write(1);
    }

    fn finish(mut self, end: VmEnd) -> Finish {
        if let Some(running) = self.running.take() {
            running.stop();
        }
        self.send(Message::Event(Event::Ended(end.clone())), &[]);
        Finish::Ended(end)
    }

    fn reply(&mut self, reply: Reply) {
        self.send(Message::Reply(reply), &[]);
    }

    fn refuse_and_hang_up(&mut self, message: String) {
        self.reply(Reply::Error { message });
        self.hang_up();
    }

    /// Sends to a controller that has said hello, or is being told why it is sent away.
    fn send(&mut self, message: Message, fds: &[BorrowedFd<'_>]) {
        let Some(peer) = &self.peer else { return };
        if !peer.greeted && matches!(message, Message::Event(_)) {
            return;
        }
        if peer.channel.send(&message, fds).is_err() {
            self.hang_up();
        }
    }
}

/// What woke the control thread.
struct Ready {
    control: bool,
    guest_connections: bool,
    ended: bool,
}

/// The device thread's end of the queue of guest connections. It never waits for the controller.
#[derive(Clone)]
struct Outbox {
    attached: Arc<AtomicBool>,
    connections: SyncSender<(u32, OwnedFd)>,
    event: Arc<EventFd>,
}

/// The control thread's end.
struct Inbox {
    connections: Receiver<(u32, OwnedFd)>,
    event: Arc<EventFd>,
}

fn guest_connections() -> Result<(Outbox, Inbox)> {
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(Error::system("create an eventfd"))?);
    let (sender, connections) = sync_channel(WAITING_CONNECTIONS);
    let attached = Arc::new(AtomicBool::new(false));
    Ok((Outbox { attached, connections: sender, event: event.clone() }, Inbox { connections, event }))
}

impl Outbox {
    /// Hands over a connection if there is somebody to take it and room.
    fn offer(&self, port: u32, fd: OwnedFd) -> bool {
        let taken = self.attached.load(Ordering::SeqCst) && self.connections.try_send((port, fd)).is_ok();
        // It fails only when it is set already.
        let _ = self.event.write(1);
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn connection() -> OwnedFd {
        std::os::unix::net::UnixStream::pair().unwrap().0.into()
    }

    #[test]
    fn a_guest_connection_nobody_can_take_is_refused() {
        let (outbox, inbox) = guest_connections().unwrap();
        assert!(!outbox.offer(1, connection()), "no controller");
        outbox.attached.store(true, Ordering::SeqCst);
        for port in 0..WAITING_CONNECTIONS as u32 {
            assert!(outbox.offer(port, connection()));
        }
        assert!(!outbox.offer(99, connection()), "too many wait");
        assert_eq!(inbox.connections.try_recv().unwrap().0, 0);
        assert!(outbox.offer(100, connection()));
    }

    #[test]
    fn a_guest_that_connects_without_end_keeps_nobody_waiting() {
        let (outbox, inbox) = guest_connections().unwrap();
        outbox.attached.store(true, Ordering::SeqCst);
        (0..WAITING_CONNECTIONS as u32).for_each(|port| assert!(outbox.offer(port, connection())));
        let (guest_connections, listener, seccomp) = (outbox, connection(), seccomp::Mode::Kill);
        let mut monitor =
            Monitor { listener: &listener, seccomp, peer: None, running: None, guest_connections, inbox };
        monitor.pass_guest_connections();
        assert!(monitor.wait().unwrap().guest_connections, "there may be more, after others had a turn");
        monitor.pass_guest_connections();
        assert!(monitor.inbox.event.read().is_err(), "there was no more");
    }
}
