//! Fuzz bodies of the devices: plain functions that take bytes and must return.
//!
//! Each plays a driver that follows the input bytes, against a real device, and checks what must always hold:
//! no panic, no write outside the memory offered for writing, no change to a disk's base. The tests run them
//! over the corpus in `fuzz/corpus`; `cargo fuzz` drives the same functions from `fuzz/`.

use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{SocketAddr, UnixDatagram, UnixListener, UnixStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::fs::{MemfdFlags, memfd_create};

use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::block::{Block, Disk};
use crate::devices::virtio::net::Net;
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::test_driver::{
    BUFFERS, Descriptor, Driver, INDIRECT, MEMORY, QUEUE_SIZE, WRITE, table_at, used_at,
};
use crate::devices::virtio::vsock::Vsock;
use crate::event_loop::EventLoop;
use crate::state::{QueuePosition, TransportState};

/// The most actions per input; more found nothing.
const MAX_STEPS: usize = 100;
const PAGE: usize = 4096;
const DISK: u64 = 20 * 512;
const GUEST_CID: u32 = 3;

/// Accesses of any width to any register of any device, in any order.
pub fn fuzz_mmio_registers(data: &[u8]) {
    let mut input = FuzzInput(data);
    let device = any_device(input.byte());
    let Ok(driver) = device.and_then(Driver::new) else { return };
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let action = input.byte();
        let offset = u64::from(input.byte()) << (action >> 4 & 1);
        let width = usize::from(input.byte() % 9);
        match action % 8 {
            0..4 => driver.lock().write(offset, &input.bytes(width)),
            4 => driver.lock().read(offset, &mut vec![0; width]),
            // The registers that matter, whole.
            5 => driver.write(offset & !3, input.u32()),
            6 => driver.poke(input.address(), &input.bytes(width)),
            _ => driver.lock().queue_event(width),
        }
        assert_eq!(driver.read(0), 0x7472_6976, "the first register never changes");
    }
    driver.write(0x70, 0);
    assert_eq!(driver.read(0x70), 0, "a reset always works");
}

fn any_device(kind: u8) -> io::Result<Box<dyn VirtioDevice>> {
    match kind % 4 {
        0 => Ok(Box::new(Rng::new())),
        1 => disk().map(|(block, _)| block as _),
        2 => network().map(|(net, _)| net as _),
        _ => sockets(&Host::default()).map(|(vsock, _)| vsock as _),
    }
}

/// A device restored from arbitrary registers, as a state file may have them: refused, or good for any
/// further access.
pub fn fuzz_device_state(data: &[u8]) {
    let mut input = FuzzInput(data);
    let kind = input.byte();
    let (Ok(mut driver), Ok(copy)) = (any_device(kind).and_then(Driver::started), any_device(kind)) else {
        return;
    };
    for queue in 0..usize::from(input.byte() % 4) {
        let writable = input.byte() % 2 == 0;
        driver.add(queue.min(driver.queues() - 1), &[(BUFFERS, 64, writable)]);
    }
    let change = |state: &mut TransportState| {
        for _ in 0..input.byte() % 8 {
            let field = input.byte();
            let index = usize::from(input.byte()) % state.queues.len().max(1);
            let value = input.u32();
            let queue = state.queues.get_mut(index);
            match (field % 12, queue) {
                (0, _) => state.status = value,
                (1, _) => state.interrupt_status = value,
                (2, _) => state.driver_features ^= u64::from(value),
                (3, _) => (state.queue_select, state.driver_features_select) = (value, value),
                (4, Some(queue)) => queue.size = value,
                (5, Some(queue)) => queue.descriptors = value.into(),
                (6, Some(queue)) => queue.available = value.into(),
                (7, Some(queue)) => queue.used = value.into(),
                (8, Some(queue)) => queue.position = None,
                (9 | 10, Some(queue)) => {
                    let (next_available, next_used) = (value as u16, (value >> 16) as u16);
                    queue.position = Some(QueuePosition { next_available, next_used });
                }
                _ => state.queues.truncate(index),
            }
        }
    };
    let Ok(driver) = driver.thawed_after(change, |_, _| copy) else { return };
    for _ in 0..8 {
        driver.lock().queue_event(usize::from(input.byte() % 4));
        driver.write(u64::from(input.byte()) & !3, input.u32());
        assert_eq!(driver.read(0), 0x7472_6976, "the first register never changes");
    }
    driver.write(0x70, 0);
    assert_eq!(driver.read(0x70), 0, "a reset always works");
}

/// Any bytes as a state file, and as the contents of one whose checksum fits.
pub fn fuzz_state_file(data: &[u8]) {
    crate::state::file::check_any_bytes(data);
}

/// Any bytes as a memory layer, and as the index of one whose checksum fits.
pub fn fuzz_memory_layer(data: &[u8]) {
    crate::state::check_any_memory_layer(data);
}

/// Garbage and requests in a block device's queue.
pub fn fuzz_block_queue(data: &[u8]) {
    let Ok((device, base)) = disk() else { return };
    play(data, device, |_, _| {});
    assert_eq!(base_contents(&base), base_pattern(), "the base is never written");
}

/// Garbage and requests in a network device's queues, and packets from its network.
pub fn fuzz_net_queue(data: &[u8]) {
    let Ok((device, network)) = network() else { return };
    play(data, device, |_, input| {
        let len = usize::from(input.u16() % 2048);
        // Data that does not fit or is not read is dropped.
        let _ = network.send(&input.bytes(len));
        while network.recv(&mut [0; 1]).is_ok() {}
    });
}

/// Garbage and requests in a random-number device's queue.
pub fn fuzz_rng_queue(data: &[u8]) {
    play(data, Box::new(Rng::new()), |_, _| {});
}

/// Garbage and packets in a socket device's queues, and callers that behave as they like.
pub fn fuzz_vsock_queue(data: &[u8]) {
    let host = Host::default();
    let Ok((device, address)) = sockets(&host) else { return };
    play(data, device, |_, input| {
        let mut streams = host.lock().unwrap_or_else(PoisonError::into_inner);
        let index = usize::from(input.byte());
        let action = input.byte();
        let count = streams.len().max(1);
        match action % 6 {
            0 => streams.extend(call(&address, b"CONNECT 5\n")),
            1 => {
                let line = input.bytes(index % 40);
                streams.extend(call(&address, &line));
            }
            2 if !streams.is_empty() => drop(streams.swap_remove(index % count)),
            _ => {
                let Some(stream) = streams.get_mut(index % count) else { return };
                // Whether the device takes it, or has anything, is its business.
                let _ = match action % 6 {
                    3 => stream.write(&input.bytes(usize::from(action) * 64)),
                    4 => stream.read(&mut [0; 4096]),
                    _ => stream.shutdown(std::net::Shutdown::Write).map(|()| 0),
                };
            }
        }
        // A host with a thousand callers shows nothing that ten do not.
        streams.truncate(10);
    });
}

/// Plays a driver that follows `data`; `host` plays the other side.
fn play(data: &[u8], device: Box<dyn VirtioDevice>, mut host: impl FnMut(&Driver, &mut FuzzInput<'_>)) {
    let queues = device.queue_sizes().len();
    let Ok(mut driver) = Driver::started(device) else { return };
    let Ok(mut event_loop) = EventLoop::new() else { return };
    if event_loop.add_device(Arc::clone(&driver.device)).is_err() {
        return;
    }
    let mut events = Vec::with_capacity(16);
    let mut before = vec![0; MEMORY as usize];
    let mut input = FuzzInput(data);
    for _ in 0..MAX_STEPS {
        if input.is_empty() {
            break;
        }
        let action = input.byte();
        let queue = usize::from(action >> 4) % queues;
        match action % 8 {
            0 => driver.set_descriptor(queue, u16::from(input.byte()) % QUEUE_SIZE, input.descriptor()),
            1 => {
                let (address, len) = (input.address(), usize::from(input.byte()));
                driver.poke(address, &input.bytes(len));
            }
            2 => driver.publish(queue, u16::from(input.byte()) % (QUEUE_SIZE + 1)),
            3 => driver.set_available_index(queue, input.u16()),
            4 => host(&driver, &mut input),
            5 if action > 0xe0 => driver.start(input.u64() | 1 << 32),
            5 => driver.write(0x70, if action > 0x80 { 0x8f } else { 15 }),
            6 => {
                let count = 1 + input.byte() % 4;
                let pieces: Vec<_> = (0..count).map(|_| input.piece()).collect();
                driver.add(queue, &pieces);
            }
            _ => {}
        }
        // Served now or later, as the device thread would.
        if action & 8 != 0 {
            check_writes(&driver, queues, &mut before, || {
                driver.write(0x50, queue as u32);
                for _ in 0..4 {
                    let _ = event_loop.turn(&mut events, Some(Duration::ZERO));
                }
            });
        }
    }
}

/// Has the device do something and checks that it wrote only where it may: into used rings and into
/// memory that descriptors offer for writing. `before` has room for all of memory.
fn check_writes(driver: &Driver, queues: usize, before: &mut [u8], serve: impl FnOnce()) {
    let mut allowed: Vec<Range<u64>> = Vec::new();
    let mut checkable = true;
    for queue in 0..queues {
        let used_size = 6 + 8 * u64::from(QUEUE_SIZE);
        allowed.push(used_at(queue)..used_at(queue) + used_size);
        for bytes in driver.peek(table_at(queue), usize::from(QUEUE_SIZE) * 16).chunks(16) {
            let descriptor = Descriptor::from_bytes(bytes);
            // Indirect tables are anywhere, and a descriptor that offers the rings themselves makes
            // new descriptors while the device runs: what is allowed then is not known here.
            checkable &= descriptor.flags & INDIRECT == 0;
            if descriptor.flags & WRITE != 0 && descriptor.len > 0 {
                checkable &= descriptor.address >= BUFFERS;
                allowed.push(descriptor.address..descriptor.address.saturating_add(descriptor.len.into()));
            }
        }
    }
    driver.peek_into(0, before);
    serve();
    if !checkable {
        return;
    }
    for (page, old) in (0..).step_by(PAGE).zip(before.chunks(PAGE)) {
        let mut new = [0; PAGE];
        driver.peek_into(page, &mut new);
        if old == new {
            continue;
        }
        for (address, (old, new)) in (page..).zip(old.iter().zip(&new)) {
            let may_change = || allowed.iter().any(|range| range.contains(&address));
            assert!(old == new || may_change(), "{address:#x} was written but was not offered");
        }
    }
}

fn base_pattern() -> Vec<u8> {
    (0..DISK).map(|at| (at / 512 * 3 + at % 253) as u8).collect()
}

fn base_contents(base: &File) -> Vec<u8> {
    let mut bytes = vec![0; DISK as usize];
    let _ = base.read_at(&mut bytes, 0);
    bytes
}

fn disk() -> io::Result<(Box<Block>, File)> {
    let base = File::from(memfd_create("base", MemfdFlags::CLOEXEC)?);
    base.write_all_at(&base_pattern(), 0)?;
    let layer = File::from(memfd_create("layer", MemfdFlags::CLOEXEC)?);
    let disk = Disk::new(base.try_clone()?, Some(layer)).map_err(io::Error::other)?;
    Ok((Box::new(Block::new(disk, "fuzz")), base))
}

fn network() -> io::Result<(Box<Net>, UnixDatagram)> {
    let (tap, network) = UnixDatagram::pair()?;
    tap.set_nonblocking(true)?;
    network.set_nonblocking(true)?;
    Ok((Box::new(Net::new(tap.into(), [2, 0, 0, 0, 0, 1])), network))
}

/// The host's ends of connections.
type Host = Arc<Mutex<Vec<UnixStream>>>;

fn sockets(host: &Host) -> io::Result<(Box<Vsock>, SocketAddr)> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let address = SocketAddr::from_abstract_name(format!("forkd-fuzz-{}-{number}", std::process::id()))?;
    let listener = UnixListener::bind_addr(&address)?;
    let host = Arc::clone(host);
    let accept = move |port: u32, end: OwnedFd| {
        let stream = UnixStream::from(end);
        let taken = port.is_multiple_of(2) && stream.set_nonblocking(true).is_ok();
        if taken {
            host.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        }
        taken
    };
    Ok((Box::new(Vsock::new(GUEST_CID, listener, Box::new(accept))?), address))
}

fn call(address: &SocketAddr, line: &[u8]) -> io::Result<UnixStream> {
    let mut stream = UnixStream::connect_addr(address)?;
    stream.set_nonblocking(true)?;
    stream.write_all(line)?;
    Ok(stream)
}

/// An input, read piece by piece; zeros when it is over.
struct FuzzInput<'a>(&'a [u8]);

impl FuzzInput<'_> {
    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let (taken, rest) = self.0.split_at(count.min(self.0.len()));
        self.0 = rest;
        let mut bytes = taken.to_vec();
        bytes.resize(count, 0);
        bytes
    }

    fn byte(&mut self) -> u8 {
        self.bytes(1)[0]
    }

    fn u16(&mut self) -> u16 {
        u16::from(self.byte()) | u16::from(self.byte()) << 8
    }

    fn u32(&mut self) -> u32 {
        u32::from(self.u16()) | u32::from(self.u16()) << 16
    }

    fn u64(&mut self) -> u64 {
        u64::from(self.u32()) | u64::from(self.u32()) << 32
    }

    /// An address, mostly that of a buffer, at times of a ring, of nothing or near the end of all.
    fn address(&mut self) -> u64 {
        let value = u64::from(self.u16());
        match value & 0xf {
            0 => u64::MAX - (value >> 4),
            1 => MEMORY - (value >> 8),
            2 => value,
            _ => BUFFERS + (value >> 4) * 16,
        }
    }

    /// A length, mostly one that requests have.
    fn length(&mut self) -> u32 {
        let value = self.byte();
        match value {
            0..0x80 => value.into(),
            0x80..0xf0 => u32::from(value & 0x7f) * 512,
            0xf0..0xf8 => u32::from(value) << 12,
            _ => u32::MAX >> (value & 7),
        }
    }

    fn piece(&mut self) -> (u64, u32, bool) {
        let address = self.address();
        (address, self.length(), self.byte() & 1 == 1)
    }

    fn descriptor(&mut self) -> Descriptor {
        let (address, len) = (self.address(), self.length());
        let kind = self.byte();
        // Indirect descriptors are rare, so that what can be checked is.
        let flags = u16::from(kind & 3) | if kind > 0xf0 { INDIRECT } else { 0 };
        Descriptor { address, len, flags, next: self.byte().into() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a body over its corpus and over inputs made of pseudo-random bytes.
    fn run(name: &str, body: fn(&[u8])) {
        let folder = format!("{}/../../fuzz/corpus/{name}", env!("CARGO_MANIFEST_DIR"));
        let mut files = 0;
        for entry in std::fs::read_dir(&folder).expect(&folder) {
            body(&std::fs::read(entry.unwrap().path()).unwrap());
            files += 1;
        }
        assert_ne!(files, 0, "{folder} is empty");
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut random = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        for _ in 0..2000 {
            let len = random() % 600;
            let data: Vec<u8> = (0..len).map(|_| random() as u8).collect();
            body(&data);
        }
    }

    #[test]
    #[should_panic(expected = "was not offered")]
    fn a_write_nobody_offered_is_noticed() {
        let driver = Driver::started(Box::new(Rng::new())).unwrap();
        check_writes(&driver, 1, &mut vec![0; MEMORY as usize], || driver.poke(BUFFERS, &[1]));
    }

    #[test]
    fn any_register_accesses_are_harmless() {
        run("mmio_registers", fuzz_mmio_registers);
    }

    #[test]
    fn any_change_to_a_saved_device_is_harmless() {
        run("device_state", fuzz_device_state);
    }

    #[test]
    fn any_bytes_as_a_state_file_are_harmless() {
        run("state_file", fuzz_state_file);
    }

    #[test]
    fn any_bytes_as_a_memory_layer_are_harmless() {
        run("memory_layer", fuzz_memory_layer);
    }

    #[test]
    fn any_bytes_in_a_block_queue_are_harmless() {
        run("block_queue", fuzz_block_queue);
    }

    #[test]
    fn any_bytes_in_network_queues_are_harmless() {
        run("net_queue", fuzz_net_queue);
    }

    #[test]
    fn any_bytes_in_a_random_number_queue_are_harmless() {
        run("rng_queue", fuzz_rng_queue);
    }

    #[test]
    fn any_bytes_in_socket_queues_are_harmless() {
        run("vsock_queue", fuzz_vsock_queue);
    }
}
