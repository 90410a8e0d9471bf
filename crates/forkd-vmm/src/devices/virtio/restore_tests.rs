//! Devices frozen and thawed under a driver that goes on with the rings it had.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::block::{Block, Disk};
use super::mmio::{MmioDevice, restore_queues};
use super::net::Net;
use super::rng::Rng;
use super::test_driver::{BUFFERS, Driver, MEMORY, QUEUE_SIZE, available_at, table_at, used_at};
use super::vsock::Vsock;
use crate::GuestMemory;
use crate::event_loop::EventLoop;
use crate::state::{BlockState, DevicePart, QueuePosition, TransportState};

fn rng(_: &DevicePart, _: Option<Disk>) -> Box<dyn super::VirtioDevice> {
    Box::new(Rng::new())
}

#[test]
fn a_thawed_device_goes_on_in_the_middle_of_its_rings() {
    let mut driver = Driver::started(Box::new(Rng::new())).unwrap();
    // Once around the ring and a little further, several times.
    for round in 0..10 {
        for _ in 0..13 {
            let head = driver.add(0, &[(BUFFERS, 64, true)]);
            driver.poke(BUFFERS, &[0; 64]);
            driver.kick(0);
            assert_eq!(driver.finished(0), [(u32::from(head), 64)], "round {round}");
            assert_ne!(driver.peek(BUFFERS, 64), [0; 64]);
        }
        driver = driver.thawed(rng).unwrap();
        assert_eq!(driver.read(0x70), 15);
    }
}

#[test]
fn a_request_nobody_had_looked_at_is_served_after_the_thaw() {
    let mut driver = Driver::started(Box::new(Rng::new())).unwrap();
    driver.serve();
    let head = driver.add(0, &[(BUFFERS, 64, true)]);
    // The notification is lost with the old device.
    driver.notify(0);
    let mut driver = driver.thawed(rng).unwrap();
    assert_eq!(driver.finished(0), []);
    driver.serve();
    assert_eq!(driver.finished(0), [(u32::from(head), 64)]);
}

#[test]
fn an_interrupt_the_driver_has_not_seen_is_raised_again() {
    let mut driver = Driver::started(Box::new(Rng::new())).unwrap();
    driver.add(0, &[(BUFFERS, 64, true)]);
    driver.kick(0);
    let driver = driver.thawed(rng).unwrap();
    assert_eq!(driver.interrupt.read().unwrap(), 1);
    assert_eq!(driver.read(0x60), 1);
    driver.write(0x64, 1);
    let driver = driver.thawed(rng).unwrap();
    assert!(driver.interrupt.read().is_err(), "it has seen it now");
}

#[test]
fn a_driver_frozen_between_any_two_writes_finishes_its_start() {
    let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
    driver.negotiate(u64::MAX);
    driver = driver.thawed(rng).unwrap();
    assert_eq!(driver.read(0x70), 11);
    driver.write(0x30, 0);
    driver.write(0x38, 64);
    driver = driver.thawed(rng).unwrap();
    for (register, value) in [(0x80, 0x1000), (0x90, 0x2000), (0xa0, 0x3000)] {
        driver.write(register, value);
        driver = driver.thawed(rng).unwrap();
    }
    driver.write(0x44, 1);
    driver = driver.thawed(rng).unwrap();
    assert_eq!(driver.read(0x44), 1);
    driver.write(0x70, 15);
    let head = driver.add(0, &[(BUFFERS, 64, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(u32::from(head), 64)]);
}

#[test]
fn a_device_that_waits_for_a_reset_still_does() {
    let mut driver = Driver::started(Box::new(Rng::new())).unwrap();
    driver.add(0, &[(MEMORY, 64, true)]);
    driver.kick(0);
    assert!(driver.needs_reset());
    let mut driver = driver.thawed(rng).unwrap();
    assert!(driver.needs_reset());
    driver.start(u64::MAX);
    let head = driver.add(0, &[(BUFFERS, 64, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(u32::from(head), 64)]);
}

#[test]
fn registers_somebody_invented_are_refused_or_harmless() {
    let driver = Driver::started(Box::new(Rng::new())).unwrap();
    let memory = driver.memory.clone();
    let mut device = Arc::into_inner(driver.device).unwrap().into_inner().unwrap();
    let good = device.freeze().0.transport;
    let check = |change: &dyn Fn(&mut TransportState)| {
        let mut state = good.clone();
        change(&mut state);
        restore_queues(&state, 0, Rng::QUEUE_SIZES, &memory).map(drop)
    };
    assert!(check(&|_| {}).is_ok());
    let refused: [&dyn Fn(&mut TransportState); 14] = [
        &|state| state.queues.clear(),
        &|state| state.queues.push(state.queues[0]),
        &|state| state.status = 4,
        &|state| state.status = 0xff,
        &|state| state.status = 7,
        &|state| state.driver_features = 0,
        &|state| state.driver_features = u64::MAX,
        &|state| state.queues[0].size = 0,
        &|state| state.queues[0].size = 65,
        &|state| state.queues[0].size = u32::MAX,
        &|state| state.queues[0].descriptors = MEMORY,
        &|state| state.queues[0].available = u64::MAX,
        &|state| state.queues[0].used = 1,
        &|state| (state.status, state.queues[0].position) = (3, Some(QueuePosition::default())),
    ];
    for (index, change) in refused.iter().enumerate() {
        assert!(check(change).is_err(), "change {index}");
    }
    // Positions are for the guest to get wrong: nothing outside its rings is touched.
    for position in [0, 1, 63, 64, 0x8000, u16::MAX] {
        let mut state = good.clone();
        state.queues[0].position =
            Some(QueuePosition { next_available: position, next_used: position.wrapping_mul(3) });
        (state.queue_select, state.interrupt_status) = (u32::MAX, u32::MAX);
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let mut device =
            MmioDevice::restore(Box::new(Rng::new()), memory.clone(), interrupt, &state).unwrap();
        device.resume();
        device.queue_event(0);
        device.read(0x34, &mut [0; 4]);
    }
}

fn file_with(bytes: &[u8]) -> File {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(bytes, 0).unwrap();
    file
}

const BLOCK: usize = 4096;

/// Writes or reads (`kind` 1 or 0) one block through the driver.
fn transfer(driver: &mut Driver, kind: u32, block: u64) {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..].copy_from_slice(&(block * 8).to_le_bytes());
    driver.poke(BUFFERS, &header);
    let (data, status) = ((BUFFERS + 0x1000, BLOCK as u32, kind == 0), (BUFFERS + 0x100, 1, true));
    driver.add(0, &[(BUFFERS, 16, false), data, status]);
    driver.kick(0);
    assert_eq!(driver.finished(0).len(), 1);
    assert_eq!(driver.peek(BUFFERS + 0x100, 1), [0]);
}

fn write_block(driver: &mut Driver, block: u64, value: u8) {
    driver.poke(BUFFERS + 0x1000, &[value; BLOCK]);
    transfer(driver, 1, block);
}

fn read_block(driver: &mut Driver, block: u64) -> u8 {
    transfer(driver, 0, block);
    let bytes = driver.peek(BUFFERS + 0x1000, BLOCK);
    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
    bytes[0]
}

/// A child of the frozen disk: its own driver over a copy of the files.
fn child(files: &[File], state: &BlockState) -> (Driver, File) {
    let copies: Vec<File> = files.iter().map(|file| file.try_clone().unwrap()).collect();
    let layer = tempfile::tempfile().unwrap();
    let mut copies = copies.into_iter();
    let mut disk = Disk::frozen(copies.next().unwrap(), copies.collect(), state).unwrap();
    disk.add_layer(Some(layer.try_clone().unwrap())).unwrap();
    (Driver::started(Box::new(Block::with_id(disk, state.id))).unwrap(), layer)
}

#[test]
fn a_write_in_one_child_is_never_seen_by_another_or_by_the_frozen_disk() {
    let base = file_with(&[b'b'; 8 * BLOCK]);
    let layer = tempfile::tempfile().unwrap();
    let disk = Disk::new(base.try_clone().unwrap(), Some(layer.try_clone().unwrap())).unwrap();
    let mut driver = Driver::started(Box::new(Block::new(disk, "disk0"))).unwrap();
    write_block(&mut driver, 1, b't');
    write_block(&mut driver, 2, 0);
    let mut device = Arc::into_inner(driver.device).unwrap().into_inner().unwrap();
    let (state, disk) = device.freeze();
    let DevicePart::Block(state) = state.part else { panic!("a disk is a disk") };
    assert_eq!(state.runs, [(1, 0), (2, 1), (5, 0)]);
    assert!(state.writable && state.files == 2 && &state.id[..6] == b"disk0\0");
    let disk = disk.unwrap();

    let before = (bytes_of(&base), bytes_of(&layer));
    let (mut one, one_layer) = child(disk.files(), &state);
    let (mut two, _) = child(disk.files(), &state);
    write_block(&mut one, 1, b'1');
    write_block(&mut one, 5, b'1');
    write_block(&mut two, 2, b'2');
    let all = |driver: &mut Driver| (0..8).map(|block| read_block(driver, block)).collect::<Vec<u8>>();
    assert_eq!(all(&mut one), b"b1\0bb1bb");
    assert_eq!(all(&mut two), b"bt2bbbbb");
    assert_eq!((bytes_of(&base), bytes_of(&layer)), before, "what is frozen never changes");

    // A child of a child sees what its parent wrote, until then.
    let mut device = Arc::into_inner(one.device).unwrap().into_inner().unwrap();
    let (state, disk) = device.freeze();
    let DevicePart::Block(state) = state.part else { panic!("a disk is a disk") };
    assert_eq!(state.runs, [(1, 0), (1, 2), (1, 1), (2, 0), (1, 2), (2, 0)]);
    let (mut grandchild, _) = child(disk.unwrap().files(), &state);
    assert_eq!(all(&mut grandchild), b"b1\0bb1bb");
    // What is missing from a layer is found before the guest finds it.
    one_layer.set_len(5 * BLOCK as u64).unwrap();
    let files = [&base, &layer, &one_layer].map(|file| file.try_clone().unwrap());
    let [base, layers @ ..] = files;
    let error = Disk::frozen(base, layers.into(), &state).unwrap_err().to_string();
    assert!(error.contains("file 2 is truncated"), "{error}");
}

fn bytes_of(file: &File) -> Vec<u8> {
    let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

#[test]
fn a_disk_that_is_not_the_one_of_the_state_is_refused() {
    let good = BlockState { id: [0; 20], size: 8 * 4096, writable: true, files: 2, runs: vec![(8, 0)] };
    let frozen = |base: usize, layers: usize, state: &BlockState| {
        let layers = (0..layers).map(|_| tempfile::tempfile().unwrap()).collect();
        Disk::frozen(file_with(&vec![1; base]), layers, state)
    };
    assert!(frozen(8 * BLOCK, 1, &good).is_ok());
    assert!(frozen(7 * BLOCK, 1, &good).is_err(), "a truncated base");
    assert!(frozen(8 * BLOCK, 2, &good).is_err(), "a layer too many");
    assert!(frozen(8 * BLOCK, 24, &BlockState { files: 25, ..good.clone() }).is_err(), "too many layers");
    let maps: [&[(u64, u8)]; 6] =
        [&[], &[(7, 0)], &[(9, 0)], &[(8, 2)], &[(8, 1)], &[(u64::MAX, 0), (u64::MAX, 0)]];
    for runs in maps {
        assert!(frozen(8 * BLOCK, 1, &BlockState { runs: runs.into(), ..good.clone() }).is_err(), "{runs:?}");
    }
    assert!(
        frozen(8 * BLOCK, 23, &BlockState { files: 24, ..good.clone() }).is_err(),
        "no child could write"
    );
    let mut disk = frozen(8 * BLOCK, 22, &BlockState { files: 23, ..good.clone() }).unwrap();
    disk.add_layer(Some(tempfile::tempfile().unwrap())).unwrap();
    assert!(disk.add_layer(Some(tempfile::tempfile().unwrap())).is_err(), "no room for another");
    let mut disk = frozen(8 * BLOCK, 1, &good).unwrap();
    assert!(disk.add_layer(None).is_err(), "a child that writes needs a layer");
    let mut disk = frozen(8 * BLOCK, 1, &BlockState { writable: false, ..good }).unwrap();
    assert!(disk.add_layer(Some(tempfile::tempfile().unwrap())).is_err(), "and one that does not, none");
}

#[test]
fn an_interface_without_a_tap_loses_its_link_and_gets_it_back_with_one() {
    let tap = || {
        let (tap, network) = std::os::unix::net::UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        (tap, network)
    };
    let status = |driver: &Driver| {
        let mut bytes = [0; 8];
        driver.lock().read(0x100, &mut bytes);
        assert_eq!(bytes[..6], [2, 0, 0, 0, 0, 9]);
        bytes[6]
    };
    let (first, _network) = tap();
    let driver = Driver::started(Box::new(Net::new(first.into(), [2, 0, 0, 0, 0, 9]))).unwrap();
    assert_eq!(status(&driver), 1);
    let net = |tap: Option<std::os::unix::net::UnixDatagram>| {
        move |part: &DevicePart, _: Option<Disk>| -> Box<dyn super::VirtioDevice> {
            let DevicePart::Net(state) = part else { panic!("an interface is an interface") };
            Box::new(Net::restore(tap.map(Into::into), state))
        }
    };
    let generation = driver.read(0xfc);
    let mut driver = driver.thawed(net(None)).unwrap();
    assert_eq!((status(&driver), driver.read(0x60) & 2), (0, 2));
    assert_ne!(driver.read(0xfc), generation);
    assert!(driver.interrupt.read().is_ok());
    driver.write(0x64, 2);
    driver.add(1, &[(BUFFERS, 100, false)]);
    driver.kick(1);
    assert_eq!(driver.finished(1).len(), 1, "packets are dropped, not kept");

    let driver = driver.thawed(net(None)).unwrap();
    assert_eq!(driver.read(0x60) & 2, 0, "nothing has changed");
    let (second, network) = tap();
    let mut driver = driver.thawed(net(Some(second))).unwrap();
    assert_eq!((status(&driver), driver.read(0x60) & 2), (1, 2));
    driver.add(1, &[(BUFFERS, 100, false)]);
    driver.kick(1);
    network.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    assert_eq!(network.recv(&mut [0; 200]).unwrap(), 100);
}

/// A socket device that listens in `folder`.
fn vsock(
    part: Option<&DevicePart>,
    folder: &tempfile::TempDir,
    name: &str,
) -> (Box<dyn super::VirtioDevice>, std::path::PathBuf) {
    let path = folder.path().join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let device = match part {
        Some(DevicePart::Vsock(state)) => Vsock::restore(state, listener, Box::new(|_, _| true)).unwrap(),
        _ => Vsock::new(42, listener, Box::new(|_, _| true)).unwrap().limit_calls(vec![7]),
    };
    (Box::new(device), path)
}

const RX: usize = 0;
const EVENTS: usize = 2;

/// Serves the device until it has nothing to do.
fn settle(event_loop: &EventLoop) {
    let mut events = Vec::with_capacity(32);
    for _ in 0..10 {
        event_loop.turn(&mut events, Some(Duration::from_millis(10))).unwrap();
    }
}

#[test]
fn callers_wait_until_the_guest_has_taken_its_transport_reset() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::started(vsock(None, &folder, "parent").0).unwrap();
    for slot in 0..8 {
        driver.add(RX, &[(BUFFERS + slot * 0x1000, 0x1000, true)]);
        driver.add(EVENTS, &[(BUFFERS + 0x1_0000 + slot * 16, 4, true)]);
    }
    driver.serve();
    driver.notify(EVENTS);
    let mut path = None;
    let mut driver = driver
        .thawed(|part, _| {
            let DevicePart::Vsock(state) = part else { panic!("a socket device is one") };
            assert_eq!((state.cid, state.guest_ports.as_deref()), (42, Some(&[7][..])));
            let (device, at) = vsock(Some(part), &folder, "child");
            path = Some(at);
            device
        })
        .unwrap();
    assert_eq!(driver.finished(EVENTS), [(0, 4)], "the event is there before the guest runs");
    assert!(driver.interrupt.read().is_ok());

    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let mut caller = UnixStream::connect(path.unwrap()).unwrap();
    caller.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    caller.write_all(b"CONNECT 1024\n").unwrap();
    settle(&event_loop);
    assert_eq!(driver.finished(RX), [], "a new connection would be taken for an old one");
    assert!(caller.read(&mut [0]).is_err(), "the caller waits");

    // The guest takes the event, offers its buffer again, and notifies as it agreed to.
    driver.add(EVENTS, &[(BUFFERS + 0x1_0000, 4, true)]);
    driver.notify(EVENTS);
    settle(&event_loop);
    assert_eq!(driver.finished(RX).len(), 1, "now the guest is called");
    assert_eq!(driver.finished(EVENTS), [], "one reset is enough");
}

#[test]
fn a_guest_without_a_buffer_for_the_event_is_told_when_it_has_one() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Driver::started(vsock(None, &folder, "parent").0).unwrap();
    let mut driver = driver.thawed(|part, _| vsock(Some(part), &folder, "child").0).unwrap();
    driver.serve();
    assert_eq!(driver.finished(EVENTS), []);
    driver.add(EVENTS, &[(BUFFERS, 4, true)]);
    driver.poke(BUFFERS, &[0xff; 4]);
    driver.notify(EVENTS);
    driver.serve();
    assert_eq!(driver.finished(EVENTS), [(0, 4)]);
    assert_eq!(driver.peek(BUFFERS, 4), [0; 4]);
}

#[test]
fn without_a_driver_nobody_waits() {
    let folder = tempfile::tempdir().unwrap();
    let driver = Driver::new(vsock(None, &folder, "parent").0).unwrap();
    let mut path = None;
    let driver = driver
        .thawed(|part, _| {
            let (device, at) = vsock(Some(part), &folder, "child");
            path = Some(at);
            device
        })
        .unwrap();
    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let mut caller = UnixStream::connect(path.unwrap()).unwrap();
    caller.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
    settle(&event_loop);
    assert_eq!(caller.read(&mut [0]).unwrap(), 0, "turned away at once, as before a first start");
}

#[test]
fn a_driver_without_an_event_queue_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let mut driver = Driver::new(vsock(None, &folder, "parent").0).unwrap();
    driver.negotiate(u64::MAX);
    for queue in [RX, 1] {
        driver.set_up_queue(queue, QUEUE_SIZE.into(), table_at(queue), available_at(queue), used_at(queue));
    }
    driver.write(0x70, 15);
    driver.add(RX, &[(BUFFERS, 0x1000, true)]);
    let mut path = None;
    let mut driver = driver
        .thawed(|part, _| {
            let (device, at) = vsock(Some(part), &folder, "child");
            path = Some(at);
            device
        })
        .unwrap();
    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let mut caller = UnixStream::connect(path.unwrap()).unwrap();
    caller.write_all(b"CONNECT 1024\n").unwrap();
    settle(&event_loop);
    assert_eq!(driver.finished(RX).len(), 1, "the guest is called");
}

#[test]
fn memory_without_room_for_a_queue_is_no_reason_to_panic() {
    let driver = Driver::started(Box::new(Rng::new())).unwrap();
    let mut device = Arc::into_inner(driver.device).unwrap().into_inner().unwrap();
    let state = device.freeze().0.transport;
    let small = GuestMemory::from_ranges(&[(vm_memory::GuestAddress(0), 0x1000)]).unwrap();
    assert!(restore_queues(&state, 0, Rng::QUEUE_SIZES, &small).is_err());
}
