//! virtio-vsock in user space: streams between sockets of the host and ports of the guest.
//!
//! A client on the host connects to the device's listening socket, writes `CONNECT port\n`, reads `OK n\n`
//! and is connected to that port in the guest; a connection that is closed before the `OK` was refused. For a
//! connection that the guest begins, a socket pair is made and one end offered to the monitor.
//!
//! To avoid a deadlock, packets of the guest are always taken, whatever the state of the other direction,
//! because credit bounds the data and one flag of each kind the control packets of a connection. Packets to
//! the guest wait for its buffers in their sockets. Connections that have something for the guest are in one
//! queue and take turns.
//!
//! No connection survives into a copy of a VM. The copy's guest gets an event, upon which it drops its ends.
//! Until it has taken the event, clients on the host wait, because it would drop a new connection with the
//! old ones.

mod connection;
mod listener;
mod packet;
#[cfg(test)]
mod test_guest;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use virtio_bindings::virtio_ids::VIRTIO_ID_VSOCK;

use super::block::Disk;
use super::buffers::Buffers;
use super::queue::{Malformed, VirtQueue};
use super::{VirtioDevice, read_config_bytes};
use crate::GuestMemory;
use crate::event_loop::{Poller, Readiness};
use crate::state::{DevicePart, VsockState};
use connection::{Connection, ConnectionState, Fate};
use listener::HostListener;
use packet::{HEADER_SIZE, HOST_CID, Header, Op, TYPE_STREAM};

const RX: usize = 0;
const TX: usize = 1;
const EVENTS: usize = 2;
/// The event "transport reset": all connections are gone.
const TRANSPORT_RESET: [u8; 4] = [0; 4];
/// The most connections at a time, those being made included.
const MAX_CONNECTIONS: usize = 1023;
/// The most resets waiting for the guest: enough for every connection to end at once. One that is
/// lost costs its receiver a timeout.
const MAX_RESETS: usize = 1024;
/// After so many packets, in each direction, other devices get their turn.
const MAX_PACKETS_PER_EVENT: usize = 32;
/// How long a guest has to answer. One that has no listener answers at once.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The first port given to connections of the host; far from those the guest might look for.
const FIRST_HOST_PORT: u32 = 1 << 30;

/// Offers the host's end of a connection to a port of the host; `false` refuses it.
pub type GuestConnections = Box<dyn FnMut(u32, OwnedFd) -> bool + Send>;

/// The device.
pub struct Vsock {
    cid: u64,
    /// The ports of the host the guest may call; none means all.
    guest_ports: Option<Vec<u32>>,
    guest_connections: GuestConnections,
    listener: HostListener,
    connections: HashMap<u32, Connection>,
    /// Finds a connection's token by host port and guest port.
    by_ports: HashMap<(u32, u32), u32>,
    /// Tokens of the connections that may have a packet for the guest, in their order.
    queue: VecDeque<u32>,
    resets: VecDeque<Header>,
    next_host_port: u32,
    active: bool,
    /// The guest must get the transport reset.
    reset_due: bool,
    /// The event was sent; clients wait until the guest has offered more event buffers than this, for which
    /// it has to take the event.
    told_at: Option<u16>,
}

impl Vsock {
    /// A device whose guest has the address `cid`. `guest_connections` is called on the device
    /// thread, under the device's lock: it must not block.
    pub fn new(cid: u32, listener: UnixListener, guest_connections: GuestConnections) -> io::Result<Vsock> {
        listener.set_nonblocking(true)?;
        Ok(Vsock {
            cid: cid.into(),
            guest_ports: None,
            guest_connections,
            listener: HostListener::new(listener),
            connections: HashMap::new(),
            by_ports: HashMap::new(),
            queue: VecDeque::new(),
            resets: VecDeque::new(),
            next_host_port: FIRST_HOST_PORT,
            active: false,
            reset_due: false,
            told_at: None,
        })
    }

    /// Lets the guest call these ports of the host and no others.
    pub fn limit_calls(mut self, ports: Vec<u32>) -> Vsock {
        self.guest_ports = Some(ports);
        self
    }

    /// The device of a copy of a VM.
    pub fn restore(
        state: &VsockState,
        listener: UnixListener,
        guest_connections: GuestConnections,
    ) -> io::Result<Vsock> {
        let mut device = Vsock::new(state.cid, listener, guest_connections)?;
        device.guest_ports = state.guest_ports.clone();
        device.next_host_port = state.next_host_port.max(FIRST_HOST_PORT);
        Ok(device)
    }

    /// Receive, transmit, events.
    pub const QUEUE_SIZES: &'static [u16] = &[256, 256, 16];

    /// Sends the guest the transport reset, once it has a buffer for that.
    fn tell_of_reset(&mut self, queue: &mut VirtQueue, memory: &GuestMemory) -> Result<(), Malformed> {
        if !self.reset_due {
            return Ok(());
        }
        // Before the guest can have taken it.
        let offered = queue.offered(memory)?;
        let Some(event) = queue.pop(memory)? else { return Ok(()) };
        // A driver notifies only when it adds to a queue the device has seen the end of.
        let mut rest = Vec::new();
        for _ in 0..queue.max_size() {
            let Some(chain) = queue.pop(memory)? else { break };
            rest.push(chain);
        }
        for chain in rest.into_iter().rev() {
            queue.put_back(chain);
        }
        if !event.writable.copy_from(&TRANSPORT_RESET) {
            return Err(Malformed("an event buffer without room"));
        }
        queue.finish(memory, event, TRANSPORT_RESET.len())?;
        self.reset_due = false;
        self.told_at = Some(offered);
        Ok(())
    }

    /// Whether callers have to wait: the guest has not taken its event yet.
    fn holds_callers(&mut self, events: &VirtQueue, memory: &GuestMemory) -> Result<bool, Malformed> {
        if let Some(told_at) = self.told_at
            && events.offered(memory)? != told_at
        {
            self.told_at = None;
        }
        Ok(self.reset_due || self.told_at.is_some())
    }

    /// Takes packets from the guest.
    fn transmit(&mut self, queue: &mut VirtQueue, memory: &GuestMemory) -> Result<(), Malformed> {
        for _ in 0..MAX_PACKETS_PER_EVENT {
            let Some(mut chain) = queue.pop(memory)? else { return Ok(()) };
            let packet = &mut chain.readable;
            let header = Header::take_from(packet).ok_or(Malformed("a packet without header"))?;
            let data =
                packet.split_to(header.len as usize).ok_or(Malformed("a packet shorter than its header"))?;
            self.receive(&header, data);
            queue.finish(memory, chain, 0)?;
        }
        queue.call_again();
        Ok(())
    }

    fn receive(&mut self, header: &Header, data: Buffers<'_>) {
        // A guest has one address; with another one it cannot even be answered.
        if header.src_cid != self.cid {
            return;
        }
        let is_ours = header.dst_cid == HOST_CID && header.socket_type == TYPE_STREAM;
        let token = self.by_ports.get(&(header.dst_port, header.src_port)).copied();
        let connection = token.filter(|_| is_ours).and_then(|token| self.connections.get_mut(&token));
        if let (Some(connection), Some(token)) = (connection, token) {
            let fate = connection.receive(header, data);
            return self.settle(token, fate);
        }
        match header.op {
            Some(Op::Reset) => {}
            Some(Op::Request) if is_ours && self.offer(header) => {}
            _ => self.queue_reset(header.reset()),
        }
    }

    /// The guest wants a connection: makes one if the controller takes the other end.
    fn offer(&mut self, request: &Header) -> bool {
        let may_call = self.guest_ports.as_ref().is_none_or(|ports| ports.contains(&request.dst_port));
        if self.is_full() || !may_call {
            return false;
        }
        let Ok((ours, theirs)) =
            socketpair(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None)
        else {
            return false;
        };
        if !(self.guest_connections)(request.dst_port, theirs) {
            return false;
        }
        let token = self.listener.new_token(|token| self.connections.contains_key(&token));
        if self.listener.watch(ours.as_fd(), token).is_err() {
            return false;
        }
        self.insert(token, Connection::from_guest(ours, request));
        true
    }

    /// A client on the host sent its port.
    fn call(&mut self, token: u32, socket: OwnedFd, guest_port: u32) {
        while self.by_ports.contains_key(&(self.next_host_port, guest_port)) {
            self.next_host_port = self.next_host_port.wrapping_add(1).max(FIRST_HOST_PORT);
        }
        let host_port = self.next_host_port;
        self.next_host_port = host_port.wrapping_add(1).max(FIRST_HOST_PORT);
        let deadline = Instant::now() + REQUEST_TIMEOUT;
        self.insert(token, Connection::from_host(socket, host_port, guest_port, deadline));
        self.listener.start_timer();
    }

    fn insert(&mut self, token: u32, connection: Connection) {
        self.by_ports.insert((connection.host_port, connection.guest_port), token);
        self.connections.insert(token, connection);
        self.settle(token, Fate::Lives);
    }

    fn settle(&mut self, token: u32, fate: Fate) {
        let Some(connection) = self.connections.get_mut(&token) else { return };
        match fate {
            Fate::Lives if connection.has_work() && !connection.queued => {
                connection.queued = true;
                self.queue.push_back(token);
            }
            Fate::Lives => {}
            Fate::Ends => self.remove(token),
            Fate::Resets => {
                let reset = header(self.cid, connection, Op::Reset, 0, 0);
                self.queue_reset(reset);
                self.remove(token);
            }
        }
    }

    fn remove(&mut self, token: u32) {
        if let Some(connection) = self.connections.remove(&token) {
            self.by_ports.remove(&(connection.host_port, connection.guest_port));
            self.listener.unwatch(connection.socket.as_fd());
            // The queue moves only when the guest has buffers: a guest that opens and closes without ever
            // offering one must not make it grow.
            if connection.queued {
                self.queue.retain(|standing| *standing != token);
            }
        }
    }

    fn queue_reset(&mut self, reset: Header) {
        if self.resets.len() < MAX_RESETS {
            self.resets.push_back(reset);
        }
    }

    fn is_full(&self) -> bool {
        self.connections.len() + self.listener.len() >= MAX_CONNECTIONS
    }

    /// Gives the guest what there is for it, as long as it has buffers.
    fn deliver(&mut self, queue: &mut VirtQueue, memory: &GuestMemory) -> Result<(), Malformed> {
        for _ in 0..MAX_PACKETS_PER_EVENT {
            if self.resets.is_empty() && self.queue.is_empty() {
                return Ok(());
            }
            let Some(mut chain) = queue.pop(memory)? else { return Ok(()) };
            let head = chain.writable.split_to(HEADER_SIZE).ok_or(Malformed("a buffer without room"))?;
            let Some(header) = self.next_packet(&chain.writable) else {
                queue.put_back(chain);
                return Ok(());
            };
            if !head.copy_from(&header.to_bytes()) {
                return Err(Malformed("a buffer without room"));
            }
            queue.finish(memory, chain, HEADER_SIZE + header.len as usize)?;
        }
        queue.call_again();
        Ok(())
    }

    /// The next packet for the guest; its data is in `room` already.
    fn next_packet(&mut self, room: &Buffers<'_>) -> Option<Header> {
        if let Some(reset) = self.resets.pop_front() {
            return Some(reset);
        }
        // A connection that turns out to have nothing leaves the queue.
        while let Some(token) = self.queue.pop_front() {
            let Some(connection) = self.connections.get_mut(&token) else { continue };
            connection.queued = false;
            let Some(packet) = connection.next_packet(room) else { continue };
            let header = header(self.cid, connection, packet.op, packet.flags, packet.data_len);
            let fate = if connection.is_over() { Fate::Ends } else { Fate::Lives };
            self.settle(token, fate);
            return Some(header);
        }
        None
    }

    /// A client's socket became ready: it may have sent its port.
    fn read_port(&mut self, token: u32) {
        if let Some((socket, port)) = self.listener.read_port(token) {
            self.call(token, socket, port);
        }
    }

    /// Ends connections that have taken too long.
    fn sweep(&mut self, now: Instant) {
        let mut late = Vec::new();
        let mut others_wait = false;
        for (token, connection) in &self.connections {
            match connection.state {
                ConnectionState::Requested(deadline) if deadline <= now => late.push(*token),
                ConnectionState::Requested(_) => others_wait = true,
                ConnectionState::Open => {}
            }
        }
        for token in late {
            self.settle(token, Fate::Resets);
        }
        self.listener.sweep(now, others_wait);
    }

    /// At the end of every event: there may be room for callers, and packets for the guest.
    fn conclude(&mut self, queues: &mut [VirtQueue], memory: &GuestMemory) -> Result<(), Malformed> {
        if !self.active || !self.holds_callers(&queues[EVENTS], memory)? {
            let room = MAX_CONNECTIONS.saturating_sub(self.connections.len());
            self.listener.accept(room, self.active, |token| self.connections.contains_key(&token));
        }
        self.deliver(&mut queues[RX], memory)
    }
}

/// A packet from the host's end of `connection`; the guest learns its credit from it.
fn header(cid: u64, connection: &mut Connection, op: Op, flags: u32, data_len: usize) -> Header {
    let (buf_alloc, fwd_cnt) = connection.announce();
    Header {
        src_cid: HOST_CID,
        dst_cid: cid,
        src_port: connection.host_port,
        dst_port: connection.guest_port,
        len: data_len as u32,
        socket_type: TYPE_STREAM,
        op: Some(op),
        flags,
        buf_alloc,
        fwd_cnt,
    }
}

impl VirtioDevice for Vsock {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_VSOCK
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        Self::QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.cid.to_le_bytes(), offset, data);
    }

    fn attach(&mut self, poller: Poller) -> io::Result<()> {
        self.listener.attach(poller)
    }

    fn activate(&mut self, _features: u64) {
        self.active = true;
    }

    fn resume(&mut self, queues: &mut [VirtQueue], memory: &GuestMemory) -> Result<(), Malformed> {
        // A driver that never set the queue up cannot get the event: it would keep clients waiting for ever.
        self.reset_due = queues[EVENTS].is_ready();
        self.tell_of_reset(&mut queues[EVENTS], memory)
    }

    fn freeze(&mut self) -> (DevicePart, Option<Disk>) {
        let state = VsockState {
            // It came as one.
            cid: self.cid as u32,
            guest_ports: self.guest_ports.clone(),
            next_host_port: self.next_host_port,
        };
        (DevicePart::Vsock(state), None)
    }

    fn reset(&mut self) {
        self.active = false;
        self.reset_due = false;
        self.told_at = None;
        self.listener.clear();
        for (_, connection) in self.connections.drain() {
            self.listener.unwatch(connection.socket.as_fd());
        }
        self.by_ports.clear();
        self.queue.clear();
        self.resets.clear();
    }

    fn queue_event(
        &mut self,
        index: usize,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        match index {
            TX => self.transmit(&mut queues[TX], memory)?,
            EVENTS => self.tell_of_reset(&mut queues[EVENTS], memory)?,
            _ => {}
        }
        self.conclude(queues, memory)
    }

    fn ready(
        &mut self,
        token: u32,
        readiness: Readiness,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        match token {
            listener::LISTENER => self.listener.accept_ready(),
            listener::TIMER => self.sweep(Instant::now()),
            _ => match self.connections.get_mut(&token) {
                Some(connection) => {
                    let fate = connection.ready(readiness);
                    self.settle(token, fate);
                }
                None => self.read_port(token),
            },
        }
        self.conclude(queues, memory)
    }
}
