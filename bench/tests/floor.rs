//! The floor, measured for real: children fork, build their VMs and run their guests.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;

use forkd_bench::{floor, guest};

fn main() {
    if File::options().read(true).write(true).open("/dev/kvm").is_err() {
        println!("NOT RUN: the floor (no /dev/kvm here)");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let memory = folder.path().join("memory");
    guest::write_memory_file(&memory, 64).unwrap();
    every_child_answers_and_none_is_left(&memory);
    a_guest_that_does_not_run_is_a_failed_child_and_not_a_time(folder.path());
    assert!(floor::burst(0, &memory).is_err() && floor::burst(1001, &memory).is_err());
    println!("test floor ... ok");
}

fn every_child_answers_and_none_is_left(memory: &std::path::Path) {
    let burst = floor::burst(5, memory).unwrap();
    assert_eq!((burst.asked, burst.times_ms.len(), burst.errors.len()), (5, 5, 0), "{burst:?}");
    assert!(burst.times_ms.iter().all(|ms| *ms > 0.0 && *ms <= burst.all_ms), "{burst:?}");
    assert!(burst.memory.len() == 5 && burst.memory.iter().all(|one| one.private_kib > 0), "{burst:?}");
    let children = std::fs::read_to_string("/proc/thread-self/children").unwrap_or_default();
    assert!(children.trim().is_empty(), "children are left: {children}");
}

fn a_guest_that_does_not_run_is_a_failed_child_and_not_a_time(folder: &std::path::Path) {
    let empty = folder.join("empty");
    File::create(&empty).unwrap().set_len(64 << 20).unwrap();
    let burst = floor::burst(2, &empty).unwrap();
    assert!(burst.times_ms.is_empty() && !burst.errors.is_empty(), "{burst:?}");
}
