//! The socket device against a guest that is played in [`super::test_guest`], with real sockets on
//! the host's side.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::packet::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND};
use super::test_guest::{
    GUEST_TIMEOUT, Guest, ROOM, SLOTS, device, guest, guest_without_buffers, is_closed, packet,
};
use super::*;
use crate::devices::virtio::test_driver::{BUFFERS, Descriptor, Driver};
use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

#[test]
fn the_host_calls_the_guest_and_both_talk() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    stream.write_all(b"from the host").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"from the host");
    guest.send(&packet(Op::Data, ports), b"from the guest");
    let mut seen = [0; 14];
    stream.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"from the guest");
}

#[test]
fn the_guest_calls_the_host_and_both_talk() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open_from_guest();
    guest.send(&packet(Op::Data, ports), b"ping");
    let mut seen = [0; 4];
    stream.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"ping");
    stream.write_all(b"pong").unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"pong");
}

#[test]
fn a_connection_outlives_a_pause_and_what_is_said_meanwhile_is_heard_once() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    for _ in 0..20 {
        guest.control.park();
        // What a branch does, with its copy.
        guest.driver.lock().freeze();
        stream.write_all(b"from the host").unwrap();
        guest.send(&packet(Op::Data, ports), b"from the guest");
        assert!(guest.poll().is_empty());
        stream.set_nonblocking(true).unwrap();
        assert_eq!(stream.read(&mut [0; 1]).unwrap_err().kind(), ErrorKind::WouldBlock);
        stream.set_nonblocking(false).unwrap();
        guest.control.run();
        assert_eq!(guest.expect(Op::Data).1, b"from the host");
        let mut seen = [0; 14];
        stream.read_exact(&mut seen).unwrap();
        assert_eq!(&seen, b"from the guest");
    }
    guest.expect_nothing();
}

#[test]
fn a_port_nobody_wants_to_serve_is_reset() {
    let mut guest = guest();
    guest.send(&packet(Op::Request, (99, 5000)), &[]);
    let (reset, _) = guest.expect(Op::Reset);
    assert_eq!((reset.src_port, reset.dst_port), (99, 5000));
}

#[test]
fn a_caller_the_guest_refuses_is_closed_without_an_ok() {
    let mut guest = guest();
    let mut stream = guest.call("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    guest.send(&packet(Op::Reset, (request.src_port, 1024)), &[]);
    assert!(is_closed(&mut stream));
    guest.expect_nothing();
}

#[test]
fn a_caller_that_says_anything_else_is_closed() {
    let mut guest = guest();
    for line in
        ["\n", "CONNECT\n", "CONNECT \n", "CONNECT x\n", "CONNECT -1\n", "CONNECT 4294967296\n", "HELLO 5\n"]
    {
        assert!(is_closed(&mut guest.call(line)), "{line:?}");
    }
    assert!(is_closed(&mut guest.call(&"x".repeat(32))));
    assert!(is_closed(&mut guest.call("CONNECT 00000000000000000000000000000001\n")));
    guest.expect_nothing();
}

#[test]
fn a_line_in_pieces_is_put_together_and_what_follows_it_is_data() {
    let mut guest = guest();
    let mut stream = guest.call("CONN");
    std::thread::sleep(Duration::from_millis(20));
    stream.write_all(b"ECT 10").unwrap();
    std::thread::sleep(Duration::from_millis(20));
    stream.write_all(b"24\nearly bird").unwrap();
    let (request, _) = guest.expect(Op::Request);
    guest.send(&packet(Op::Response, (request.src_port, 1024)), &[]);
    assert_eq!(guest.expect(Op::Data).1, b"early bird");
}

#[test]
fn a_caller_that_leaves_before_the_answer_is_forgotten() {
    let mut guest = guest();
    let stream = guest.call("CONNECT 1024\n");
    let (request, _) = guest.expect(Op::Request);
    drop(stream);
    guest.expect(Op::Reset);
    guest.send(&packet(Op::Response, (request.src_port, 1024)), &[]);
    guest.expect(Op::Reset);
}

#[test]
fn each_direction_is_closed_on_its_own() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    stream.write_all(b"last words").unwrap();
    stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(guest.expect(Op::Data).1, b"last words");
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    guest.send(&packet(Op::Data, ports), b"answer");
    guest.send(&Header { flags: SHUTDOWN_SEND, ..packet(Op::Shutdown, ports) }, &[]);
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).unwrap();
    assert_eq!(seen, b"answer");
    // Nothing can be said any more in either direction: that is the end.
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND | SHUTDOWN_RECEIVE);
    guest.send(&packet(Op::Data, ports), b"too late");
    guest.expect(Op::Reset);
}

#[test]
fn a_guest_that_closes_gets_its_reset_after_its_data_was_delivered() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    guest.send(&packet(Op::Data, ports), b"bye");
    guest.send(&Header { flags: 3, ..packet(Op::Shutdown, ports) }, &[]);
    guest.expect(Op::Reset);
    let mut seen = Vec::new();
    stream.read_to_end(&mut seen).unwrap();
    assert_eq!(seen, b"bye");
}

#[test]
fn a_guest_that_will_not_read_makes_writes_on_the_host_fail() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    guest.send(&Header { flags: SHUTDOWN_RECEIVE, ..packet(Op::Shutdown, ports) }, &[]);
    assert_eq!(guest.expect(Op::Shutdown).0.flags, SHUTDOWN_SEND);
    assert_eq!(stream.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
    guest.send(&packet(Op::Data, ports), b"still heard");
    let mut seen = [0; 11];
    stream.read_exact(&mut seen).unwrap();
    assert_eq!(&seen, b"still heard");
}

#[test]
fn a_reset_from_the_guest_closes_the_socket() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    guest.send(&packet(Op::Reset, ports), &[]);
    assert!(is_closed(&mut stream));
    guest.expect_nothing();
}

#[test]
fn a_guest_never_gets_more_than_it_has_room_for() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    guest.send(&Header { buf_alloc: 100, ..packet(Op::CreditUpdate, ports) }, &[]);
    // The update must be seen before there is data.
    guest.send(&Header { buf_alloc: 100, ..packet(Op::CreditRequest, ports) }, &[]);
    guest.expect(Op::CreditUpdate);
    stream.write_all(&[7; 250]).unwrap();
    assert_eq!(guest.expect(Op::Data).1.len(), 100);
    guest.expect(Op::CreditRequest);
    guest.send(&Header { buf_alloc: 100, fwd_cnt: 0, ..packet(Op::CreditUpdate, ports) }, &[]);
    guest.expect_nothing();
    guest.send(&Header { buf_alloc: 100, fwd_cnt: 60, ..packet(Op::CreditUpdate, ports) }, &[]);
    assert_eq!(guest.expect(Op::Data).1.len(), 60);
    guest.expect(Op::CreditRequest);
    // Numbers that cannot be give no credit.
    guest.send(&Header { buf_alloc: 100, fwd_cnt: 5000, ..packet(Op::CreditUpdate, ports) }, &[]);
    guest.expect_nothing();
    guest.send(&Header { buf_alloc: 100, fwd_cnt: 160, ..packet(Op::CreditUpdate, ports) }, &[]);
    assert_eq!(guest.expect(Op::Data).1.len(), 90);
}

#[test]
fn a_guest_that_sends_more_than_there_is_room_for_is_reset() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    // The client does not read: first the socket fills up, then the receive buffer, and an honest guest
    // stops.
    let mut sent = 0;
    loop {
        guest.send(&packet(Op::Data, ports), &[1; ROOM as usize]);
        sent += ROOM as usize;
        assert!(sent < 64 << 20, "the device buffers without end");
        let packets = guest.poll();
        if packets.iter().any(|(header, _)| header.op == Some(Op::Reset)) {
            break;
        }
    }
    let mut received = 0;
    let mut buffer = [0; 4096];
    while let Ok(len @ 1..) = stream.read(&mut buffer) {
        received += len;
    }
    assert!(received < sent);
}

#[test]
fn packets_that_belong_to_nobody_are_reset_and_resets_are_not_answered() {
    let mut guest = guest();
    for op in [Op::Response, Op::Shutdown, Op::Data, Op::CreditUpdate, Op::CreditRequest] {
        guest.send(&packet(op, (1, 2)), &[]);
        let (reset, _) = guest.expect(Op::Reset);
        assert_eq!((reset.src_port, reset.dst_port), (1, 2));
    }
    guest.send(&packet(Op::Reset, (1, 2)), &[]);
    guest.expect_nothing();
    // A datagram, an unknown address, a packet for another guest, an undefined operation.
    guest.send(&Header { socket_type: 3, ..packet(Op::Request, (1, 2)) }, &[]);
    guest.expect(Op::Reset);
    guest.send(&Header { src_cid: 43, ..packet(Op::Request, (1, 2)) }, &[]);
    guest.expect_nothing();
    guest.send(&Header { op: None, ..packet(Op::Request, (1, 2)) }, &[]);
    guest.expect(Op::Reset);
}

#[test]
fn a_second_request_for_the_same_ports_ends_the_first() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open_from_guest();
    guest.send(&packet(Op::Request, ports), &[]);
    guest.expect(Op::Reset);
    assert!(is_closed(&mut stream));
}

#[test]
fn a_packet_shorter_than_it_says_stops_the_device_and_closes_its_sockets() {
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    let header = Header { len: 100, ..packet(Op::Data, ports) };
    guest.driver.poke(Guest::tx_at(0), &header.to_bytes());
    let descriptor = Descriptor { address: Guest::tx_at(0), len: HEADER_SIZE as u32 + 99, flags: 0, next: 0 };
    guest.driver.set_descriptor(TX, 0, descriptor);
    guest.driver.publish(TX, 0);
    guest.driver.notify(TX);
    assert!(is_closed(&mut stream));
    assert!(guest.driver.needs_reset());
}

#[test]
fn a_reset_of_the_device_closes_everything_and_callers_are_turned_away() {
    let mut guest = guest();
    let (mut stream, _) = guest.open();
    guest.driver.write(0x70, 0);
    assert!(is_closed(&mut stream));
    let mut early = UnixStream::connect(&guest.listener_path).unwrap();
    early.set_read_timeout(Some(GUEST_TIMEOUT)).unwrap();
    assert!(is_closed(&mut early));
    guest.driver.start(u64::MAX);
    guest.free_slots = (0..SLOTS).collect();
    guest.add_buffers();
    guest.open();
}

#[test]
fn data_waits_in_its_socket_while_the_guest_has_no_buffers() {
    let mut guest = guest_without_buffers();
    let mut callers: Vec<_> = (0..3).map(|_| guest.call("CONNECT 1024\n")).collect();
    for caller in &mut callers {
        caller.set_nonblocking(true).unwrap();
        let mut written = 0;
        while let Ok(len) = caller.write(&[9; 4096]) {
            written += len;
            assert!(written < 16 << 20, "the device reads what it cannot deliver");
        }
    }
    guest.add_buffers();
    let deadline = Instant::now() + GUEST_TIMEOUT;
    let mut requests = 0;
    while requests < 3 {
        for (header, _) in guest.poll() {
            if header.op == Some(Op::Request) {
                requests += 1;
            }
        }
        assert!(Instant::now() < deadline);
    }
}

#[test]
fn what_the_host_does_not_read_waits_and_arrives_in_order() {
    const TOTAL: usize = 4 << 20;
    let mut guest = guest();
    let (mut stream, ports) = guest.open();
    let (mut sent, mut room, mut forwarded) = (0usize, 0u32, 0u32);
    guest.send(&packet(Op::CreditRequest, ports), &[]);
    let mut reader = None;
    let mut last_progress = Instant::now();
    while sent < TOTAL {
        for (header, _) in guest.poll() {
            (room, forwarded) = (header.buf_alloc, header.fwd_cnt);
            last_progress = Instant::now();
        }
        let free = room.saturating_sub((sent as u32).wrapping_sub(forwarded)) as usize;
        let len = free.min(1000).min(TOTAL - sent);
        let bytes: Vec<u8> = (sent..sent + len).map(|place| expected_byte(3, place)).collect();
        if len > 0 && guest.try_send(&packet(Op::Data, ports), &bytes) {
            sent += len;
            last_progress = Instant::now();
        }
        // The client does not read until the guest has been without credit for a while.
        if reader.is_none() && last_progress.elapsed() > Duration::from_millis(200) {
            let mut stream = stream.try_clone().unwrap();
            reader = Some(std::thread::spawn(move || {
                let mut seen = vec![0; TOTAL];
                stream.read_exact(&mut seen).unwrap();
                seen
            }));
            last_progress = Instant::now();
        }
        assert!(last_progress.elapsed() < GUEST_TIMEOUT, "stalled after {sent} bytes");
    }
    let seen = reader.expect("the guest ran out of credit").join().unwrap();
    assert!((0..).zip(&seen).all(|(place, byte)| *byte == expected_byte(3, place)));
    guest.send(&Header { flags: 3, ..packet(Op::Shutdown, ports) }, &[]);
    assert!(is_closed(&mut stream));
}

#[test]
fn a_socket_that_takes_little_at_a_time_gets_everything_in_order() {
    const TOTAL: usize = 100 << 10;
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 1).unwrap();
    theirs.set_nonblocking(true).unwrap();
    let mut connection = Connection::from_guest(ours.into(), &packet(Op::Request, (7, 5000)));
    let memory = GuestMemory::from_ranges(&[(GuestAddress(0), TOTAL)]).unwrap();
    let expected: Vec<u8> = (0..TOTAL).map(|place| expected_byte(4, place)).collect();
    memory.write_slice(&expected, GuestAddress(0)).unwrap();
    let mut data = Buffers::default();
    data.push(memory.get_slice(GuestAddress(0), TOTAL).unwrap());
    assert_eq!(connection.receive(&packet(Op::Data, (7, 5000)), data), Fate::Lives);
    let mut seen: Vec<u8> = Vec::new();
    while seen.len() < TOTAL {
        let mut bytes = [0; 700];
        let len = theirs.read(&mut bytes).expect("there is always something to read");
        seen.extend(&bytes[..len]);
        let room = Readiness { readable: false, writable: true, hung_up: false };
        assert_eq!(connection.ready(room), Fate::Lives);
    }
    assert_eq!(seen, expected);
}

#[test]
fn the_end_of_what_a_guest_sends_is_passed_on_once() {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut connection = Connection::from_guest(ours.into(), &packet(Op::Request, (7, 5000)));
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).unwrap();
    let changes = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
    epoll::add(&epoll, &theirs, EventData::new_u64(0), changes).unwrap();
    let is_told = || {
        let mut events = Vec::with_capacity(1);
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        epoll::wait(&epoll, spare_capacity(&mut events), Some(&now)).unwrap() > 0
    };
    let end = Header { flags: SHUTDOWN_SEND, ..packet(Op::Shutdown, (7, 5000)) };
    assert_eq!(connection.receive(&end, Buffers::default()), Fate::Lives);
    assert!(is_told());
    let news = Readiness { readable: true, writable: true, hung_up: false };
    for _ in 0..3 {
        assert_eq!(connection.ready(news), Fate::Lives);
        assert!(!is_told());
    }
}

#[test]
fn looking_in_vain_for_data_costs_the_guest_no_buffer() {
    let mut guest = guest();
    // Every connection is looked at once when it opens, and there are more than buffers.
    let connections: Vec<_> = (0..2 * SLOTS).map(|_| guest.open()).collect();
    for (mut stream, _) in connections {
        stream.write_all(b"x").unwrap();
        assert_eq!(guest.expect(Op::Data).1, b"x");
        drop(stream);
        guest.expect(Op::Shutdown);
    }
}

#[test]
fn a_flood_of_packets_is_served_in_turns() {
    let (vsock, _path, _folder, _arrivals) = device();
    let mut driver = Driver::started(Box::new(vsock)).unwrap();
    driver.poke(BUFFERS, &packet(Op::Data, (1, 2)).to_bytes());
    for _ in 0..40 {
        driver.add(TX, &[(BUFFERS, HEADER_SIZE as u32, false)]);
    }
    for turn in [32, 8] {
        driver.kick(TX);
        assert_eq!(driver.finished(TX).len(), turn);
        let again = driver.lock().queue_notifiers()[TX].read().is_ok();
        assert_eq!(again, turn == 32);
    }
    for _ in 0..60 {
        driver.add(RX, &[(BUFFERS + 0x1000, HEADER_SIZE as u32, true)]);
    }
    for turn in [32, 8] {
        driver.kick(RX);
        assert_eq!(driver.finished(RX).len(), turn);
        let again = driver.lock().queue_notifiers()[RX].read().is_ok();
        assert_eq!(again, turn == 32);
    }
}

/// Bytes that differ by place and direction, so that loss and order show.
fn expected_byte(direction: u8, place: usize) -> u8 {
    (place / 251 + place) as u8 ^ direction
}

#[test]
fn much_data_in_both_directions_at_once_arrives_whole() {
    const TOTAL: usize = 64 << 20;
    const GUEST_BUFFER: u32 = 32 << 10;
    let mut guest = guest();
    let (stream, ports) = guest.open();
    let progress = Arc::new(AtomicUsize::new(0));
    let mut writer = stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        let mut at = 0;
        while at < TOTAL {
            let len = (1 + at % 70_001).min(TOTAL - at);
            let bytes: Vec<u8> = (at..at + len).map(|place| expected_byte(1, place)).collect();
            writer.write_all(&bytes).unwrap();
            at += len;
        }
        writer.shutdown(std::net::Shutdown::Write).unwrap();
    });
    let mut reader = stream;
    let seen = Arc::clone(&progress);
    let reading = std::thread::spawn(move || {
        let mut buffer = vec![0; 50_000];
        let mut at = 0;
        while at < TOTAL {
            let len = reader.read(&mut buffer).unwrap();
            assert_ne!(len, 0, "closed after {at} bytes");
            for (offset, byte) in buffer[..len].iter().enumerate() {
                assert_eq!(*byte, expected_byte(2, at + offset));
            }
            at += len;
            seen.store(at, Ordering::Relaxed);
        }
    });

    // The guest: reads slowly enough to run out of credit, and keeps to the host's.
    let (mut sent, mut received, mut told) = (0usize, 0usize, 0usize);
    let (mut host_room, mut host_forwarded) = (0u32, 0u32);
    let mut ended = false;
    guest.send(&Header { buf_alloc: GUEST_BUFFER, ..packet(Op::CreditRequest, ports) }, &[]);
    let mut last_progress = Instant::now();
    while sent < TOTAL || received < TOTAL || !ended {
        let mut moved = false;
        for (header, data) in guest.poll() {
            moved = true;
            host_room = header.buf_alloc;
            host_forwarded = header.fwd_cnt;
            match header.op {
                Some(Op::Data) => {
                    // What is sent before the guest's small buffer is known may exceed it.
                    for (offset, byte) in data.iter().enumerate() {
                        assert_eq!(*byte, expected_byte(1, received + offset));
                    }
                    received += data.len();
                }
                Some(Op::Shutdown) => ended = true,
                Some(Op::CreditRequest) => told = usize::MAX,
                Some(Op::CreditUpdate) => {}
                other => panic!("{other:?}"),
            }
        }
        let credit =
            Header { buf_alloc: GUEST_BUFFER, fwd_cnt: received as u32, ..packet(Op::CreditUpdate, ports) };
        if told == usize::MAX || received - told > 10_000 {
            guest.send(&credit, &[]);
            told = received;
        }
        let free = host_room.saturating_sub((sent as u32).wrapping_sub(host_forwarded)) as usize;
        let len = free.min(ROOM as usize).min(TOTAL - sent);
        if len > 0 {
            let bytes: Vec<u8> = (sent..sent + len).map(|place| expected_byte(2, place)).collect();
            if guest.try_send(&Header { op: Some(Op::Data), ..credit }, &bytes) {
                sent += len;
                told = received;
                moved = true;
            }
        }
        if moved {
            last_progress = Instant::now();
        } else {
            std::thread::yield_now();
        }
        let done = progress.load(Ordering::Relaxed);
        assert!(
            last_progress.elapsed() < GUEST_TIMEOUT,
            "stalled: {sent} sent, {done} of them read, {received} received, credit {free}"
        );
    }
    writing.join().unwrap();
    reading.join().unwrap();
    assert_eq!(received, TOTAL);
}

#[test]
fn there_is_an_end_to_connections() {
    let (mut vsock, _path, _folder, _arrivals) = device();
    vsock.guest_connections = Box::new(|_, end| {
        // Kept open without a descriptor of ours for each of a thousand ends: leaking them is what
        // a careless host would do, and the numbers still hold.
        std::mem::forget(end);
        true
    });
    let limit = rustix::process::Resource::Nofile;
    let maximum = rustix::process::getrlimit(limit).maximum;
    rustix::process::setrlimit(limit, rustix::process::Rlimit { current: maximum, maximum }).unwrap();
    vsock.activate(0);
    for port in 0..MAX_CONNECTIONS as u32 + 10 {
        vsock.receive(&packet(Op::Request, (7, port)), Buffers::default());
    }
    assert_eq!(vsock.connections.len(), MAX_CONNECTIONS);
    assert_eq!(vsock.resets.len(), 10);
    for port in 0..2000 {
        vsock.receive(&packet(Op::Data, (8, port)), Buffers::default());
    }
    assert_eq!(vsock.resets.len(), MAX_RESETS);
    vsock.receive(&packet(Op::Reset, (7, 0)), Buffers::default());
    vsock.receive(&packet(Op::Request, (7, 5000)), Buffers::default());
    assert_eq!(vsock.connections.len(), MAX_CONNECTIONS);
}

#[test]
fn whoever_takes_too_long_is_dropped() {
    let (mut vsock, path, _folder, _arrivals) = device();
    vsock.activate(0);
    let mut silent = UnixStream::connect(&path).unwrap();
    let mut unanswered = UnixStream::connect(&path).unwrap();
    unanswered.write_all(b"CONNECT 5\n").unwrap();
    vsock.listener.accept(MAX_CONNECTIONS, true, |_| false);
    assert_eq!(vsock.listener.len(), 2);
    (2..4).for_each(|token| vsock.read_port(token));
    assert_eq!((vsock.listener.len(), vsock.connections.len()), (1, 1));
    vsock.sweep(Instant::now());
    assert_eq!((vsock.listener.len(), vsock.connections.len()), (1, 1));
    vsock.sweep(Instant::now() + Duration::from_secs(6));
    assert_eq!((vsock.listener.len(), vsock.connections.len()), (0, 1));
    assert!(is_closed(&mut silent));
    vsock.sweep(Instant::now() + Duration::from_secs(11));
    assert_eq!((vsock.listener.len(), vsock.connections.len()), (0, 0));
    assert!(is_closed(&mut unanswered));
    assert_eq!(vsock.resets.len(), 1);
}

#[test]
fn a_guest_that_never_takes_a_packet_makes_nothing_grow() {
    let (mut vsock, _path, _folder, arrivals) = device();
    vsock.activate(0);
    for port in 0..5000 {
        for op in [Op::Request, Op::CreditRequest, Op::Data, Op::Reset] {
            vsock.receive(&packet(op, (7, port)), Buffers::default());
        }
        arrivals.lock().unwrap().clear();
    }
    assert_eq!((vsock.connections.len(), vsock.by_ports.len(), vsock.queue.len()), (0, 0, 0));
}
