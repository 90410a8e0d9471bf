//! The transport and the queues against honest and dishonest drivers. The random-number device
//! stands in for all of them, because a request of it is just a buffer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::rng::Rng;
use super::test_driver::{
    BUFFERS, Descriptor, Driver, INDIRECT, MEMORY, NEXT, WRITE, available_at, table_at, used_at,
};
use crate::event_loop::EventLoop;

const STATUS: u64 = 0x70;
const QUEUE_READY: u64 = 0x44;

fn started() -> Driver {
    Driver::started(Box::new(Rng::new())).unwrap()
}

fn descriptor(address: u64, len: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { address, len, flags, next }
}

#[test]
fn a_request_is_answered_and_the_driver_is_interrupted() {
    let mut driver = started();
    let head = driver.add(0, &[(BUFFERS, 64, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(u32::from(head), 64)]);
    assert_ne!(driver.peek(BUFFERS, 64), [0; 64]);
    assert_eq!(driver.peek(BUFFERS + 64, 64), [0; 64], "nothing outside the buffer");
    assert_eq!(driver.interrupt.read().unwrap(), 1);
    assert_eq!(driver.read(0x60), 1);
    driver.write(0x64, 1);
    assert_eq!(driver.read(0x60), 0);
}

#[test]
fn a_driver_finds_what_it_looks_for_in_the_registers() {
    let driver = started();
    assert_eq!(driver.read(0x00), 0x7472_6976);
    assert_eq!(driver.read(0x04), 2);
    assert_eq!(driver.read(0x08), 4);
    assert_eq!(driver.read(STATUS), 15);
    driver.write(0x30, 0);
    assert_eq!(driver.read(0x34), 64);
    driver.write(0x30, 1);
    assert_eq!(driver.read(0x34), 0, "there is no second queue");
    driver.write(0x30, u32::MAX);
    assert_eq!(driver.read(0x34), 0);
    assert_eq!(driver.read(0xb0), u32::MAX, "no shared memory");
}

#[test]
fn a_driver_that_does_not_speak_version_1_or_wants_more_than_is_offered_is_not_accepted() {
    let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
    driver.negotiate(!(1 << 32));
    assert_eq!(driver.read(STATUS) & 8, 0);
    driver.write(STATUS, 0);
    driver.write(STATUS, 1);
    driver.write(STATUS, 3);
    driver.write(0x24, 1);
    driver.write(0x20, u32::MAX);
    driver.write(STATUS, 11);
    assert_eq!(driver.read(STATUS), 3);
    driver.write(0x44, 1);
    assert_eq!(driver.read(QUEUE_READY), 0, "no queue before the features are settled");
}

#[test]
fn steps_taken_in_the_wrong_order_are_not_taken() {
    let driver = Driver::new(Box::new(Rng::new())).unwrap();
    driver.write(STATUS, 4);
    assert_eq!(driver.read(STATUS), 0);
    driver.write(STATUS, 8);
    assert_eq!(driver.read(STATUS), 0);
    driver.write(STATUS, 2);
    assert_eq!(driver.read(STATUS), 0);
    driver.write(STATUS, 0x40);
    assert_eq!(driver.read(STATUS), 0, "only the device says that it needs a reset");
}

#[test]
fn features_and_queues_stay_as_agreed_once_the_device_runs() {
    let mut driver = started();
    driver.write(0x30, 0);
    driver.write(0x44, 0);
    driver.write(0x38, 8);
    driver.write(0x80, 0xffff_0000);
    driver.write(0x20, 0);
    assert_eq!(driver.read(QUEUE_READY), 1);
    driver.add(0, &[(BUFFERS, 16, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0).len(), 1);
}

#[test]
fn a_reset_brings_a_device_back_whatever_happened() {
    let mut driver = started();
    driver.publish(0, 9999);
    driver.kick(0);
    assert!(driver.needs_reset());
    assert_eq!(driver.read(0x60), 2, "the driver is told through a configuration interrupt");
    driver.add(0, &[(BUFFERS, 16, true)]);
    driver.kick(0);
    assert!(driver.finished(0).is_empty(), "a broken device does nothing");
    driver.start(u64::MAX);
    driver.add(0, &[(BUFFERS, 16, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0).len(), 1);
    assert!(!driver.needs_reset());
}

#[test]
fn a_driver_that_has_given_up_is_left_alone() {
    let mut driver = started();
    driver.write(STATUS, 0x80 | 15);
    driver.add(0, &[(BUFFERS, 16, true)]);
    driver.kick(0);
    assert!(driver.finished(0).is_empty());
}

#[test]
fn a_notification_before_the_driver_is_ready_is_not_lost() {
    let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
    driver.kick(0);
    driver.negotiate(u64::MAX);
    driver.set_up_queue(0, 64, table_at(0), available_at(0), used_at(0));
    driver.add(0, &[(BUFFERS, 16, true)]);
    driver.kick(0);
    assert!(driver.finished(0).is_empty(), "nothing is done before the driver is ready");
    driver.write(STATUS, 15);
    let notified = driver.lock().queue_notifiers()[0].read();
    assert!(notified.is_ok(), "and then the device looks by itself");
}

#[test]
fn accesses_of_any_width_at_any_offset_are_harmless() {
    let driver = started();
    for offset in (0..0x1100).chain([u64::MAX - 8, u64::MAX]) {
        for width in 0..=9 {
            let mut data = vec![0xa5; width];
            driver.lock().read(offset, &mut data);
            if width != 4 && offset < 0x100 {
                assert_eq!(data, vec![0; width], "{offset:#x}");
                driver.lock().write(offset, &vec![0xff; width]);
            }
        }
    }
    assert_eq!(driver.read(STATUS), 15);
}

#[test]
fn rings_that_cannot_be_are_refused_before_they_are_used() {
    let (table, available, used) = (table_at(0), available_at(0), used_at(0));
    let end = MEMORY;
    let bad = [
        (table + 8, available, used, "unaligned table"),
        (table, available + 1, used, "unaligned available ring"),
        (table, available, used + 2, "unaligned used ring"),
        (end - 16, available, used, "table over the end"),
        (table, end - 4, used, "available ring over the end"),
        (table, available, end - 4, "used ring over the end"),
        (u64::MAX - 15, available, used, "table at the end of everything"),
        (table, u64::MAX - 1, used, "available ring at the end of everything"),
        (table, available, u64::MAX - 3, "used ring at the end of everything"),
        (table, 0, used, "available ring nowhere"),
    ];
    for (table, available, used, what) in bad {
        let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
        driver.negotiate(u64::MAX);
        driver.set_up_queue(0, 64, table, available, used);
        assert_eq!(driver.read(QUEUE_READY), 0, "{what}");
        assert!(driver.needs_reset(), "{what}");
        driver.write(STATUS, 15);
        driver.kick(0);
        assert_eq!(driver.read(STATUS) & 4, 0, "{what}");
    }
}

#[test]
fn queue_sizes_that_cannot_be_are_refused() {
    for size in [0, 3, 63, 65, 128, 0x8000, 0x1_0000, 0x1_0040, u32::MAX] {
        let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
        driver.negotiate(u64::MAX);
        driver.write(0x30, 0);
        driver.write(0x38, size);
        driver.write(0x80, table_at(0) as u32);
        driver.write(0x90, available_at(0) as u32);
        driver.write(0xa0, used_at(0) as u32);
        driver.write(0x44, 1);
        assert_eq!(driver.read(QUEUE_READY), 0, "{size}");
        assert!(driver.needs_reset(), "{size}");
    }
}

#[test]
fn broken_chains_stop_the_device_and_write_nothing() {
    let good = BUFFERS;
    let cases: &[(&str, &[Descriptor])] = &[
        ("a loop of one", &[descriptor(good, 16, WRITE | NEXT, 0)]),
        ("a loop of two", &[descriptor(good, 16, WRITE | NEXT, 1), descriptor(good, 16, WRITE | NEXT, 0)]),
        ("a next outside the table", &[descriptor(good, 16, WRITE | NEXT, 64)]),
        ("an address outside memory", &[descriptor(MEMORY, 16, WRITE, 0)]),
        ("an address that wraps", &[descriptor(u64::MAX - 7, 16, WRITE, 0)]),
        ("a length over the end", &[descriptor(MEMORY - 8, 16, WRITE, 0)]),
        ("the largest length", &[descriptor(good, u32::MAX, WRITE, 0)]),
        (
            "two lengths that overflow",
            &[descriptor(good, u32::MAX, WRITE | NEXT, 1), descriptor(good, u32::MAX, WRITE, 0)],
        ),
        ("readable after writable", &[descriptor(good, 16, WRITE | NEXT, 1), descriptor(good, 16, 0, 0)]),
        ("an empty indirect table", &[descriptor(good, 0, INDIRECT, 0)]),
        ("an indirect table of no whole entries", &[descriptor(good, 17, INDIRECT, 0)]),
        ("an indirect table outside memory", &[descriptor(MEMORY + 16, 16, INDIRECT, 0)]),
        ("an indirect table over the end", &[descriptor(MEMORY - 8, 32, INDIRECT, 0)]),
        ("the largest indirect table", &[descriptor(good, 0xffff_fff0, INDIRECT, 0)]),
    ];
    for (what, descriptors) in cases {
        let mut driver = started();
        for (index, descriptor) in (0..).zip(*descriptors) {
            driver.set_descriptor(0, index, *descriptor);
        }
        driver.publish(0, 0);
        driver.kick(0);
        assert!(driver.needs_reset(), "{what}");
        assert!(driver.finished(0).is_empty(), "{what}");
        assert_eq!(driver.peek(good, 64), [0; 64], "{what}");
    }
}

#[test]
fn an_indirect_table_works_and_one_inside_another_does_not() {
    let mut driver = started();
    let table = BUFFERS + 0x1000;
    driver.poke(table, &descriptor(BUFFERS, 8, WRITE | NEXT, 1).to_bytes());
    driver.poke(table + 16, &descriptor(BUFFERS + 8, 8, WRITE, 0).to_bytes());
    driver.set_descriptor(0, 0, descriptor(table, 32, INDIRECT, 0));
    driver.publish(0, 0);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(0, 16)]);
    driver.poke(table + 16, &descriptor(table, 32, INDIRECT, 0).to_bytes());
    driver.publish(0, 0);
    driver.kick(0);
    assert!(driver.needs_reset());
}

#[test]
fn an_indirect_table_longer_than_any_honest_one_is_refused() {
    let mut driver = started();
    let table = BUFFERS;
    for index in 0..1024u16 {
        let entry = descriptor(BUFFERS + 0x8000, 1, WRITE | NEXT, index + 1);
        driver.poke(table + u64::from(index) * 16, &entry.to_bytes());
    }
    driver.set_descriptor(0, 0, descriptor(table, 1024 * 16, INDIRECT, 0));
    driver.publish(0, 0);
    driver.kick(0);
    assert!(driver.needs_reset());
}

#[test]
fn a_buffer_without_bytes_is_an_answer_without_bytes() {
    let mut driver = started();
    let empty = driver.add(0, &[(u64::MAX, 0, true)]);
    let readable = driver.add(0, &[(BUFFERS, 16, false)]);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(empty.into(), 0), (readable.into(), 0)]);
    assert_eq!(driver.peek(BUFFERS, 16), [0; 16]);
}

#[test]
fn a_ring_index_that_jumps_too_far_stops_the_device() {
    let mut driver = started();
    driver.set_available_index(0, 65);
    driver.kick(0);
    assert!(driver.needs_reset());
}

#[test]
fn an_event_does_a_bounded_amount_of_work_and_comes_back_for_the_rest() {
    let mut driver = started();
    for _ in 0..64 {
        driver.add(0, &[(BUFFERS, 4096, true)]);
    }
    driver.kick(0);
    assert_eq!(driver.finished(0).len(), 32);
    assert!(driver.lock().queue_notifiers()[0].read().is_ok(), "it notified itself");
    driver.kick(0);
    assert_eq!(driver.finished(0).len(), 32);
}

#[test]
fn the_loop_serves_devices_until_it_is_stopped() {
    let mut driver = started();
    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let control = event_loop.control().unwrap();
    let thread = std::thread::spawn(move || event_loop.run());
    for _ in 0..200 {
        driver.add(0, &[(BUFFERS, 16, true)]);
        driver.notify(0);
        let deadline = Instant::now() + Duration::from_secs(10);
        while driver.finished(0).is_empty() {
            assert!(Instant::now() < deadline, "nobody served the queue");
            std::thread::yield_now();
        }
    }
    control.stop();
    thread.join().unwrap().unwrap();
}

#[test]
fn a_parked_loop_serves_nothing_and_afterwards_everything_once() {
    let mut driver = started();
    let mut event_loop = EventLoop::new().unwrap();
    event_loop.add_device(Arc::clone(&driver.device)).unwrap();
    let control = event_loop.control().unwrap();
    let thread = std::thread::spawn(move || event_loop.run());
    for _ in 0..50 {
        control.park();
        driver.add(0, &[(BUFFERS, 16, true)]);
        driver.notify(0);
        std::thread::sleep(Duration::from_micros(200));
        assert!(driver.finished(0).is_empty(), "it is parked");
        control.run();
        let deadline = Instant::now() + Duration::from_secs(10);
        let mut served = 0;
        while served == 0 {
            assert!(Instant::now() < deadline, "what came meanwhile is lost");
            std::thread::yield_now();
            served = driver.finished(0).len();
        }
        assert_eq!(served + driver.finished(0).len(), 1);
    }
    // One that is parked can be stopped, and one that has ended needs no waiting for.
    control.park();
    control.stop();
    thread.join().unwrap().unwrap();
    control.park();
}

#[test]
fn a_driver_without_index_notifications_is_served_too() {
    let mut driver = Driver::new(Box::new(Rng::new())).unwrap();
    driver.start(1 << 32);
    for _ in 0..100 {
        driver.add(0, &[(BUFFERS, 16, true)]);
        driver.kick(0);
        assert_eq!(driver.finished(0).len(), 1);
        assert!(driver.interrupt.read().is_ok());
    }
}

#[test]
fn nobody_gets_more_random_bytes_at_once_than_one_request_may_have() {
    let mut driver = started();
    driver.add(0, &[(BUFFERS, 0x8000, true)]);
    driver.kick(0);
    assert_eq!(driver.finished(0), [(0, 4096)]);
    assert_eq!(driver.peek(BUFFERS + 4096, 16), [0; 16]);
}
