//! The monitor's binary started, and guests in it frozen and forked.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses a part of this"
)]

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use forkd_protocol::control::{Event, Reply, Request};
use forkd_vmm::asm_guest;

use crate::support::{Boot, Controller, Fork, Forked, Monitor, file_with};

/// A monitor of this build.
pub fn start(arguments: &[&str]) -> Monitor {
    Monitor::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), arguments)
}

/// Boots `code` in `monitor`, waits until it is ready, and freezes it.
pub fn freeze(kvm: File, monitor: &Monitor, code: &[u8]) -> Controller {
    let mut controller = monitor.attach();
    let boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(code)));
    boot_ready(&boot, &mut controller);
    assert_eq!(controller.request(&Request::Freeze, &[]), Reply::Frozen);
    controller
}

/// Boots a guest and waits until it is ready.
pub fn boot_ready(boot: &Boot, controller: &mut Controller) {
    assert_eq!(boot.send(controller), Reply::Booted);
    assert_eq!(controller.event().0, Event::Ready);
}

/// A child whose guest runs.
pub fn fork(template: &mut Controller, name: &str) -> Forked {
    let mut child = Fork::new(name).run(template).unwrap();
    child.ready();
    child
}

/// The same file, opened for reading only.
pub fn read_only(file: &File) -> File {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
}
