//! The probe and the check of a state as `forkd doctor` uses them: the binary, with descriptors.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs::File;
use std::io::{Seek, Write};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_vmm::boot::BootSource;
use forkd_vmm::devices::serial::ConsoleLog;
use forkd_vmm::state::file;
use forkd_vmm::vm::{Vm, VmParts};
use forkd_vmm::{asm_guest, seccomp};
use support::test_name;

fn probe(kvm: File) -> serde_json::Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
    command.arg("probe");
    support::pass_as_3(&mut command, kvm);
    let start = Instant::now();
    let output = command.output().unwrap();
    assert!(output.status.success());
    assert!(start.elapsed() < Duration::from_secs(20));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn a_kvm_that_opens_runs_at_least_a_tiny_guest_and_the_verdict_has_a_reason() {
    let test = test_name!();
    let Some(kvm) = support::open_kvm(test) else { return };
    let report = probe(kvm);
    assert_eq!(report["opens"], true);
    assert_eq!(report["api_version"], 12);
    assert_eq!(report["tiny_guest"], true);
    assert!(report["instructions_per_second"].as_u64().unwrap() > 0);
    assert!(report["runs_linux"].is_boolean());
    assert!(!report["reason"].as_str().unwrap().is_empty());
}

#[test]
fn what_is_not_kvm_is_said_not_to_be() {
    let report = probe(File::open("/dev/null").unwrap());
    assert_eq!(report["opens"], false);
    assert_eq!(report["runs_linux"], false);
    assert!(report["reason"].as_str().unwrap().contains("not KVM"));
}

/// The check's verdict on a state.
fn check(kvm: File, mut state: File, options: &[&str]) -> Output {
    state.rewind().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
    command.arg("check").args(options).stdin(state);
    support::pass_as_3(&mut command, kvm);
    command.output().unwrap()
}

#[test]
fn a_state_is_checked_behind_the_walls_and_in_little_memory() {
    let test = test_name!();
    let Some(kvm) = support::open_kvm(test) else { return };
    let device = || kvm.try_clone().unwrap();
    let vm = Vm::build(VmParts {
        kvm: device(),
        vcpus: 1,
        mem_mib: 16,
        source: BootSource {
            kernel: support::file_with(&asm_guest::elf_kernel(support::sleeps_once_forked())),
            initramfs: None,
            cmdline: String::new(),
        },
        console: Arc::new(ConsoleLog::new(tempfile::tempfile().unwrap(), 4096).unwrap()),
        devices: Vec::new(),
    });
    let frozen = vm.unwrap().start(seccomp::Mode::Log).unwrap().freeze().unwrap();
    let good = tempfile::tempfile().unwrap();
    file::write(frozen.state(), &good).unwrap();
    let text = |output: &Output| String::from_utf8_lossy(&output.stderr).into_owned();

    let output = check(device(), good.try_clone().unwrap(), &[]);
    assert!(output.status.success(), "{}", text(&output));
    if rustix::process::geteuid().is_root() {
        let output = check(device(), good.try_clone().unwrap(), &["--uid", "23460", "--gid", "23460"]);
        assert!(output.status.success(), "{}", text(&output));
    }
    // The walls come before the state.
    let output = check(device(), good, &["--uid", "0", "--gid", "0"]);
    assert!(!output.status.success() && text(&output).contains("the jail"), "{}", text(&output));

    // Under a checksum that fits: a disk in so many pieces that its map takes more than a GiB.
    const RUNS: usize = 100 << 20;
    let mut payload = b"\x07\0\0\0\x01\0\0\0".to_vec();
    // A transport of eight zeros; a disk: its id, size, writable, one file; its runs.
    let mut section = vec![0; 8];
    section.push(0);
    section.extend([0; 20]);
    section.extend([0, 0, 1]);
    let mut count = RUNS / 2;
    while count >= 0x80 {
        section.push(count as u8 | 0x80);
        count >>= 7;
    }
    section.push(count as u8);
    section.resize(section.len() + RUNS, 1);
    payload.extend((section.len() as u64).to_le_bytes());
    payload.extend(section);
    let mut head = [&file::MAGIC[..], &file::FORMAT_VERSION.to_le_bytes()].concat();
    head.extend((payload.len() as u64).to_le_bytes());
    let sum = *blake3::Hasher::new().update(&head).update(&payload).finalize().as_bytes();
    let mut bomb = tempfile::tempfile().unwrap();
    for part in [&head[..], &sum, &payload] {
        bomb.write_all(part).unwrap();
    }
    let output = check(device(), bomb, &[]);
    assert!(!output.status.success() && text(&output).contains("memory allocation"), "{}", text(&output));
}
