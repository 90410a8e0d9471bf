//! One stream between a socket on the host and a port in the guest.
//!
//! Credit keeps both directions bounded: the guest sends no more than the receive buffer announced to it
//! holds, and gets no more than it announced. Data that cannot be sent to the guest stays in the socket; data
//! that the socket does not take waits in `outgoing`.
//!
//! Each direction ends on its own, from either side. A stream that both directions of the guest have left is
//! answered with a reset, as its driver expects; one that the host has left gets a shutdown and is dropped.

use std::collections::VecDeque;
use std::io;
use std::num::Wrapping;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Instant;

use rustix::io::{Errno, retry_on_intr};
use rustix::net::{SendFlags, Shutdown, send, shutdown};

use super::packet::{Header, Op, SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use crate::devices::virtio::buffers::Buffers;
use crate::event_loop::Readiness;

/// The receive buffer announced to the guest: the most bytes of one connection held here.
pub(super) const RECEIVE_BUFFER: u32 = 128 << 10;
/// The most data in one packet to the guest, however large its buffer is: no connection waits long behind
/// another one's packet.
const MAX_DATA: usize = 64 << 10;

/// How far a connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ConnectionState {
    /// The guest was asked, and has until then to answer.
    Requested(Instant),
    /// Both sides talk.
    Open,
}

/// The fate of a connection after an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It goes on.
    Lives,
    /// It is over, and the guest knows.
    Ends,
    /// It is over, and the guest is to get a reset.
    Resets,
}

/// The header of a packet for the guest; its data is in the buffer already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outgoing {
    pub(super) op: Op,
    pub(super) flags: u32,
    pub(super) data_len: usize,
}

#[derive(Debug)]
pub(super) struct Connection {
    pub(super) socket: OwnedFd,
    pub(super) host_port: u32,
    pub(super) guest_port: u32,
    pub(super) state: ConnectionState,
    /// It is in the queue of connections that may have a packet for the guest.
    pub(super) queued: bool,

    // Control packets the guest is to get. One of each kind is enough, so a guest that takes none
    // makes nothing grow.
    /// The packet that opens the connection: [`Op::Request`] or [`Op::Response`].
    opening: Option<Op>,
    credit_update: bool,
    credit_request: bool,

    // From the guest to the socket.
    /// Data that the socket has not taken yet; at most [`RECEIVE_BUFFER`] bytes.
    outgoing: VecDeque<u8>,
    /// Bytes the guest has sent.
    received: Wrapping<u32>,
    /// Bytes the socket has taken.
    forwarded: Wrapping<u32>,
    /// `forwarded` as the guest knows it.
    announced: Wrapping<u32>,
    /// The socket takes bytes, as far as we know.
    writable: bool,
    /// The guest will send no more, by its shutdown.
    guest_sent_all: bool,
    /// Whether the socket was shut down for that. It wakes the peer, which may then cause another event of
    /// the socket: repeated at every event, neither of the two would ever rest.
    end_passed_on: bool,
    /// The socket's peer will take no more.
    host_takes_none: bool,

    // From the socket to the guest.
    /// Bytes sent to the guest.
    sent: Wrapping<u32>,
    /// The guest's receive buffer.
    guest_buffer: u32,
    /// Bytes the guest has passed on, by its last credit update.
    guest_forwarded: Wrapping<u32>,
    /// The guest was asked for credit because there was none, and there still is none.
    asked_for_credit: bool,
    /// The socket has bytes, or an end, as far as we know.
    readable: bool,
    /// The socket's peer will send no more.
    host_sent_all: bool,
    /// The guest will take no more, by its shutdown.
    guest_takes_none: bool,
    /// Which directions the guest knows the host to have left, as the flags of a shutdown.
    shutdown_sent: u32,
}

impl Connection {
    fn new(
        socket: OwnedFd,
        host_port: u32,
        guest_port: u32,
        state: ConnectionState,
        opening: Op,
    ) -> Connection {
        Connection {
            socket,
            host_port,
            guest_port,
            state,
            queued: false,
            opening: Some(opening),
            credit_update: false,
            credit_request: false,
            outgoing: VecDeque::new(),
            received: Wrapping(0),
            forwarded: Wrapping(0),
            announced: Wrapping(0),
            writable: true,
            guest_sent_all: false,
            end_passed_on: false,
            host_takes_none: false,
            sent: Wrapping(0),
            guest_buffer: 0,
            guest_forwarded: Wrapping(0),
            asked_for_credit: false,
            readable: true,
            host_sent_all: false,
            guest_takes_none: false,
            shutdown_sent: 0,
        }
    }

    /// A client on the host connects to a port in the guest, which must answer until `deadline`.
    pub(super) fn from_host(socket: OwnedFd, host_port: u32, guest_port: u32, deadline: Instant) -> Self {
        Connection::new(socket, host_port, guest_port, ConnectionState::Requested(deadline), Op::Request)
    }

    /// The guest wants to talk to a port on the host, and may.
    pub(super) fn from_guest(socket: OwnedFd, request: &Header) -> Self {
        let (host_port, guest_port) = (request.dst_port, request.src_port);
        let mut connection =
            Connection::new(socket, host_port, guest_port, ConnectionState::Open, Op::Response);
        connection.take_credit(request);
        connection
    }

    /// The socket's readiness changed.
    pub(super) fn ready(&mut self, readiness: Readiness) -> Fate {
        self.readable |= readiness.readable;
        self.writable |= readiness.writable;
        if readiness.hung_up {
            if self.state != ConnectionState::Open {
                return Fate::Resets;
            }
            self.lose_receiver();
        }
        self.flush()
    }

    /// A packet came from the guest; `data` has exactly the length in its header.
    pub(super) fn receive(&mut self, header: &Header, data: Buffers<'_>) -> Fate {
        self.take_credit(header);
        match (header.op, self.state) {
            (Some(Op::Reset), _) => Fate::Ends,
            (Some(Op::Response), ConnectionState::Requested(_)) => self.open(),
            (Some(Op::Data), ConnectionState::Open) => self.receive_data(data),
            (Some(Op::Shutdown), ConnectionState::Open) => self.receive_shutdown(header.flags),
            (Some(Op::CreditUpdate), ConnectionState::Open) => Fate::Lives,
            (Some(Op::CreditRequest), ConnectionState::Open) => {
                self.credit_update = true;
                Fate::Lives
            }
            // Anything else makes no sense now: its sender has another idea of this connection.
            _ => Fate::Resets,
        }
    }

    fn take_credit(&mut self, header: &Header) {
        self.guest_buffer = header.buf_alloc;
        self.guest_forwarded = Wrapping(header.fwd_cnt);
        // Only real credit ends the wait: asking again for every "none" would never end.
        if self.credit() > 0 {
            self.asked_for_credit = false;
        }
    }

    /// The guest accepted: answers the client.
    fn open(&mut self) -> Fate {
        self.state = ConnectionState::Open;
        let line = format!("OK {}\n", self.host_port);
        let sent = send(&self.socket, line.as_bytes(), SendFlags::DONTWAIT | SendFlags::NOSIGNAL);
        // The first bytes into an empty socket: if they do not fit, its peer is gone.
        if sent == Ok(line.len()) { Fate::Lives } else { Fate::Resets }
    }

    fn receive_data(&mut self, mut data: Buffers<'_>) -> Fate {
        let held = (self.received - self.forwarded).0;
        let fits = data.len() <= RECEIVE_BUFFER.saturating_sub(held) as usize;
        if !fits || self.guest_sent_all {
            return Fate::Resets;
        }
        self.received += data.len() as u32;
        // Straight into the socket if nothing waits before it; the rest waits.
        if self.outgoing.is_empty() && self.writable && !data.is_empty() {
            match data.send_to(self.socket.as_fd()) {
                Ok(taken) => {
                    self.forwarded += taken as u32;
                    data.split_to(taken);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.writable = false,
                Err(_) => self.lose_receiver(),
            }
        }
        let mut rest = vec![0; data.len()];
        if data.copy_to(&mut rest) {
            self.outgoing.extend(rest);
        }
        self.flush()
    }

    fn receive_shutdown(&mut self, flags: u32) -> Fate {
        self.guest_sent_all |= flags & SHUTDOWN_SEND != 0;
        if flags & SHUTDOWN_RECEIVE != 0 && !self.guest_takes_none {
            self.guest_takes_none = true;
            // The peer gets an error when it writes what is not read.
            let _ = shutdown(&self.socket, Shutdown::Read);
            self.host_sent_all = true;
        }
        self.flush()
    }

    /// Gives the socket what it takes, and passes the end on when the guest has sent all.
    fn flush(&mut self) -> Fate {
        if self.host_takes_none {
            self.outgoing.clear();
            self.forwarded = self.received;
        }
        while self.writable && !self.outgoing.is_empty() {
            let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
            match retry_on_intr(|| send(&self.socket, self.outgoing.as_slices().0, flags)) {
                Ok(taken) => {
                    self.outgoing.drain(..taken);
                    self.forwarded += taken as u32;
                }
                Err(Errno::AGAIN) => self.writable = false,
                Err(_) => {
                    self.lose_receiver();
                    return self.flush();
                }
            }
        }
        if self.outgoing.is_empty() {
            // An idle connection holds no memory.
            self.outgoing = VecDeque::new();
            if self.guest_sent_all && self.guest_takes_none {
                return Fate::Resets;
            }
            if self.guest_sent_all && !self.host_takes_none && !self.end_passed_on {
                self.end_passed_on = true;
                // It fails only if the peer is gone, which a read reports.
                let _ = shutdown(&self.socket, Shutdown::Write);
            }
        }
        // The guest may send what it believes to be free. Correct it before that runs dry, but not
        // for every byte.
        let believed_free = RECEIVE_BUFFER.saturating_sub((self.received - self.announced).0);
        if self.forwarded != self.announced && believed_free < RECEIVE_BUFFER / 2 {
            self.credit_update = true;
        }
        Fate::Lives
    }

    /// The peer takes no more from the guest. What it wrote before can still be read, so reading goes on to
    /// its end.
    fn lose_receiver(&mut self) {
        self.host_takes_none = true;
        self.readable = true;
    }

    /// How many bytes the guest has room for. Whatever numbers it sends, this is at most the size
    /// it gave.
    fn credit(&self) -> u32 {
        self.guest_buffer.saturating_sub((self.sent - self.guest_forwarded).0)
    }

    /// The directions the host has left.
    fn left(&self) -> u32 {
        let send = if self.host_sent_all { SHUTDOWN_SEND } else { 0 };
        let receive = if self.host_takes_none { SHUTDOWN_RECEIVE } else { 0 };
        send | receive
    }

    fn can_read(&self) -> bool {
        self.state == ConnectionState::Open && self.readable && !self.host_sent_all
    }

    /// Whether there may be a packet for the guest.
    pub(super) fn has_work(&self) -> bool {
        self.opening.is_some()
            || self.credit_update
            || self.credit_request
            || self.can_read() && !self.asked_for_credit
            || self.state == ConnectionState::Open && self.left() != self.shutdown_sent
    }

    /// The next packet for the guest, if there is one. Its data is read into `room`.
    pub(super) fn next_packet(&mut self, room: &Buffers<'_>) -> Option<Outgoing> {
        let control = |op, flags| Some(Outgoing { op, flags, data_len: 0 });
        if let Some(op) = self.opening.take() {
            return control(op, 0);
        }
        if std::mem::take(&mut self.credit_update) {
            return control(Op::CreditUpdate, 0);
        }
        if self.can_read() && self.credit() == 0 && !self.asked_for_credit {
            self.asked_for_credit = true;
            self.credit_request = true;
        }
        if std::mem::take(&mut self.credit_request) {
            return control(Op::CreditRequest, 0);
        }
        if self.can_read() && self.credit() > 0 {
            let data_len = self.read_socket(room);
            if data_len > 0 {
                return Some(Outgoing { op: Op::Data, flags: 0, data_len });
            }
        }
        if self.state == ConnectionState::Open && self.left() != self.shutdown_sent {
            self.shutdown_sent = self.left();
            return control(Op::Shutdown, self.shutdown_sent);
        }
        None
    }

    /// Reads what fits into `room` and the guest's buffer; 0 when there is nothing now, or nothing
    /// any more.
    fn read_socket(&mut self, room: &Buffers<'_>) -> usize {
        let count = room.len().min(MAX_DATA).min(self.credit() as usize);
        let Some(data) = room.clone().split_to(count).filter(|data| !data.is_empty()) else { return 0 };
        match data.receive_from(self.socket.as_fd()) {
            Ok(0) => self.host_sent_all = true,
            Ok(len) => {
                self.sent += len as u32;
                return len;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.readable = false,
            Err(_) => {
                self.host_sent_all = true;
                self.host_takes_none = true;
            }
        }
        0
    }

    /// Whether the guest got the host's shutdown of both directions: nothing is left to send.
    pub(super) fn is_over(&self) -> bool {
        self.shutdown_sent == SHUTDOWN_SEND | SHUTDOWN_RECEIVE
    }

    /// The credit fields of every header to the guest: the receive buffer's size and how much was passed on
    /// from it. From now on the guest knows it.
    pub(super) fn announce(&mut self) -> (u32, u32) {
        self.announced = self.forwarded;
        (RECEIVE_BUFFER, self.forwarded.0)
    }
}
