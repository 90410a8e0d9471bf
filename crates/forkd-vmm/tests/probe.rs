//! The probe as `forkd doctor` uses it: the binary, with a descriptor and a line of JSON.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs::File;
use std::process::Command;
use std::time::{Duration, Instant};

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
    let test = "a_kvm_that_opens_runs_at_least_a_tiny_guest_and_the_verdict_has_a_reason";
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
