//! A guest played for tests: its driver, its sockets, and the loop that serves the device.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::packet::{HEADER_SIZE, HOST_CID, Header, Op, TYPE_STREAM};
use super::{RX, TX, Vsock};
use crate::devices::virtio::buffers::Buffers;
use crate::devices::virtio::test_driver::{BUFFERS, Descriptor, Driver, WRITE};
use crate::event_loop::{EventLoop, LoopControl};

const CID: u64 = 42;
const SLOT: u64 = 0x1100;
pub(super) const SLOTS: u16 = 16;
pub(super) const ROOM: u32 = 4096;
pub(super) const GUEST_TIMEOUT: Duration = Duration::from_secs(20);

pub(super) type Arrivals = Arc<Mutex<Vec<(u32, UnixStream)>>>;

/// A guest's driver, and the loop that serves the device.
pub(super) struct Guest {
    pub(super) driver: Driver,
    pub(super) listener_path: std::path::PathBuf,
    pub(super) arrivals: Arrivals,
    pub(super) control: LoopControl,
    thread: Option<JoinHandle<io::Result<()>>>,
    pub(super) free_slots: Vec<u16>,
    /// Packets that came together with the one that was looked for.
    inbox: VecDeque<(Header, Vec<u8>)>,
    _folder: tempfile::TempDir,
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.control.stop();
        self.thread.take().unwrap().join().unwrap().unwrap();
    }
}

/// A device that accepts all connections of the guest, except to port 99.
pub(super) fn device() -> (Vsock, std::path::PathBuf, tempfile::TempDir, Arrivals) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("vsock");
    let arrivals = Arrivals::default();
    let taken = Arc::clone(&arrivals);
    let accept = move |port, end: OwnedFd| {
        let wanted = port != 99;
        if wanted {
            taken.lock().unwrap().push((port, UnixStream::from(end)));
        }
        wanted
    };
    let vsock = Vsock::new(CID as u32, UnixListener::bind(&path).unwrap(), Box::new(accept)).unwrap();
    (vsock, path, folder, arrivals)
}

pub(super) fn guest() -> Guest {
    let mut guest = guest_without_buffers();
    guest.add_buffers();
    guest
}

pub(super) fn guest_without_buffers() -> Guest {
    let (vsock, listener_path, folder, arrivals) = device();
    let driver = Driver::started(Box::new(vsock)).unwrap();
    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let control = event_loop.control().unwrap();
    let thread = Some(std::thread::spawn(move || event_loop.run()));
    let free_slots = (0..SLOTS).collect();
    Guest {
        driver,
        listener_path,
        arrivals,
        control,
        thread,
        free_slots,
        inbox: VecDeque::new(),
        _folder: folder,
    }
}

pub(super) fn packet(op: Op, ports: (u32, u32)) -> Header {
    Header {
        src_cid: CID,
        dst_cid: HOST_CID,
        src_port: ports.1,
        dst_port: ports.0,
        len: 0,
        socket_type: TYPE_STREAM,
        op: Some(op),
        flags: 0,
        buf_alloc: 1 << 20,
        fwd_cnt: 0,
    }
}

impl Guest {
    fn rx_at(slot: u16) -> u64 {
        BUFFERS + u64::from(slot) * SLOT
    }

    pub(super) fn tx_at(slot: u16) -> u64 {
        BUFFERS + u64::from(SLOTS + slot) * SLOT
    }

    pub(super) fn add_buffers(&mut self) {
        (0..SLOTS).for_each(|slot| self.add_buffer(slot));
        self.driver.notify(RX);
    }

    fn add_buffer(&mut self, slot: u16) {
        let len = HEADER_SIZE as u32 + ROOM;
        let descriptor = Descriptor { address: Self::rx_at(slot), len, flags: WRITE, next: 0 };
        self.driver.set_descriptor(RX, slot, descriptor);
        self.driver.publish(RX, slot);
    }

    /// Sends a packet if there is a free slot for it.
    pub(super) fn try_send(&mut self, header: &Header, data: &[u8]) -> bool {
        self.free_slots.extend(self.driver.finished(TX).iter().map(|(slot, _)| *slot as u16));
        let Some(slot) = self.free_slots.pop() else { return false };
        let header = Header { len: data.len() as u32, ..header.clone() };
        self.driver.poke(Self::tx_at(slot), &header.to_bytes());
        self.driver.poke(Self::tx_at(slot) + HEADER_SIZE as u64, data);
        let len = (HEADER_SIZE + data.len()) as u32;
        let descriptor = Descriptor { address: Self::tx_at(slot), len, flags: 0, next: 0 };
        self.driver.set_descriptor(TX, slot, descriptor);
        self.driver.publish(TX, slot);
        self.driver.notify(TX);
        true
    }

    pub(super) fn send(&mut self, header: &Header, data: &[u8]) {
        let deadline = Instant::now() + GUEST_TIMEOUT;
        while !self.try_send(header, data) {
            assert!(Instant::now() < deadline, "the device takes no packets");
            std::thread::yield_now();
        }
    }

    /// The packets that have come, with their data.
    pub(super) fn poll(&mut self) -> Vec<(Header, Vec<u8>)> {
        let mut packets = Vec::new();
        for (slot, len) in self.driver.finished(RX) {
            let memory = self.driver.memory.clone();
            let mut buffers = Buffers::default();
            buffers.push(memory.get_slice(GuestAddress(Self::rx_at(slot as u16)), len as usize).unwrap());
            let header = Header::take_from(&mut buffers).unwrap();
            assert_eq!(header.len as usize, buffers.len());
            assert_eq!((header.src_cid, header.dst_cid), (HOST_CID, CID));
            let mut data = vec![0; buffers.len()];
            assert!(buffers.copy_to(&mut data));
            packets.push((header, data));
            self.add_buffer(slot as u16);
        }
        if !packets.is_empty() {
            self.driver.notify(RX);
        }
        packets
    }

    /// The next packet, which must be of this kind.
    pub(super) fn expect(&mut self, op: Op) -> (Header, Vec<u8>) {
        let deadline = Instant::now() + GUEST_TIMEOUT;
        loop {
            let packets = self.poll();
            self.inbox.extend(packets);
            if let Some(packet) = self.inbox.pop_front() {
                assert_eq!(packet.0.op, Some(op), "{packet:?}");
                return packet;
            }
            assert!(Instant::now() < deadline, "no {op:?} came");
            std::thread::yield_now();
        }
    }

    pub(super) fn expect_nothing(&mut self) {
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!((self.poll(), self.inbox.len()), (vec![], 0));
    }

    pub(super) fn call(&self, line: &str) -> UnixStream {
        let mut stream = UnixStream::connect(&self.listener_path).unwrap();
        stream.set_read_timeout(Some(GUEST_TIMEOUT)).unwrap();
        stream.write_all(line.as_bytes()).unwrap();
        stream
    }

    /// A connection from the host, open on both sides, and its ports.
    pub(super) fn open(&mut self) -> (UnixStream, (u32, u32)) {
        let mut stream = self.call("CONNECT 1024\n");
        let (request, _) = self.expect(Op::Request);
        assert_eq!(request.dst_port, 1024);
        let ports = (request.src_port, 1024);
        self.send(&packet(Op::Response, ports), &[]);
        assert_eq!(read_line(&mut stream), format!("OK {}\n", ports.0));
        (stream, ports)
    }

    /// A connection from the guest, open on both sides.
    pub(super) fn open_from_guest(&mut self) -> (UnixStream, (u32, u32)) {
        let ports = (7, 5000);
        self.send(&packet(Op::Request, ports), &[]);
        self.expect(Op::Response);
        let (port, stream) = self.arrivals.lock().unwrap().pop().unwrap();
        assert_eq!(port, 7);
        stream.set_read_timeout(Some(GUEST_TIMEOUT)).unwrap();
        (stream, ports)
    }
}

fn read_line(stream: &mut UnixStream) -> String {
    let mut line = Vec::new();
    while line.last() != Some(&b'\n') {
        let mut byte = [0];
        if stream.read(&mut byte).unwrap() == 0 {
            break;
        }
        line.push(byte[0]);
    }
    String::from_utf8(line).unwrap()
}

pub(super) fn is_closed(stream: &mut UnixStream) -> bool {
    match stream.read(&mut [0; 16]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}
