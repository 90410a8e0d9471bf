//! How guests end, and how that is reported.

use forkd_protocol::control::EndReason;
use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use forkd_tests::monitor::{Guest, Monitor};
use serde_json::json;

use crate::assets::assets;

fn booted() -> Monitor {
    let assets = assets();
    let mut monitor = Monitor::start();
    monitor.boot_to_agent(Guest { disks: vec![(&assets.disk, true)], ..assets.guest() });
    monitor
}

#[test]
fn a_guest_asked_to_shut_down_powers_off() {
    let mut monitor = booted();
    let _ = monitor.agent("POST", "/forkd.Agent/Shutdown", &[("content-type", "application/json")], b"{}");
    let end = monitor.wait_end();
    assert_eq!(end.reason, EndReason::PoweredOff, "{end:?}");
}

#[test]
fn a_kernel_panic_is_reported_with_its_message() {
    let mut monitor = booted();
    crash(&monitor, "echo c > /proc/sysrq-trigger");
    let end = monitor.wait_end();
    assert_eq!(end.reason, EndReason::Panicked, "{end:?}");
    assert!(end.detail.contains("sysrq triggered crash"), "{end:?}");
    assert!(end.console_tail.contains("Kernel panic"), "{end:?}");
}

#[test]
fn a_reset_is_reported() {
    let mut monitor = booted();
    crash(&monitor, "python3 -c 'import ctypes; ctypes.CDLL(None).reboot(0x1234567)'");
    assert_eq!(monitor.wait_end().reason, EndReason::Reset);
}

/// Runs what ends the guest: no answer will come.
fn crash(monitor: &Monitor, script: &str) {
    let message = json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false});
    let body = forkd_protocol::connect::encode(0, &message);
    let headers = [("content-type", "application/connect+json")];
    let _ = monitor.agent("POST", "/process.Process/Start", &headers, &body);
}

#[test]
fn a_flooded_console_keeps_the_newest_within_its_limit() {
    let assets = assets();
    let mut monitor = Monitor::start();
    let disks = vec![(assets.disk.as_path(), true)];
    monitor.boot_to_agent(Guest { console_limit: 8 << 10, disks, ..assets.guest() });
    // Every byte is an exit from the guest, which takes a millisecond in the emulated machine.
    monitor.sh("seq 1 3000 > /dev/console; echo the-last-line > /dev/console");
    let console =
        eventually("the last line", || Some(monitor.console()).filter(|text| text.contains("the-last-line")));
    assert!(console.len() <= 8 << 10, "{} bytes", console.len());
    assert!(console.contains("\n2999\r\n") && !console.contains("\n100\r\n"));
    assert_eq!(monitor.sh("echo alive"), "alive\n");
}

#[test]
fn a_guest_that_panics_fails_the_command_with_the_reason() {
    let daemon = Daemon::start();
    let script = "echo bye; echo c > /proc/sysrq-trigger; sleep 100";
    let output = daemon.forkd_output(&["run", "--image", "python", "--", "sh", "-c", script], b"");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("panic") && stderr.contains("sysrq triggered crash"), "{stderr}");

    // Through the API: the sandbox shows how it ended until it is deleted.
    let id = daemon.create(json!({"image": "python"}));
    let body = json!({"args": ["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 100"], "timeout_secs": 100});
    let response = daemon.request("POST", &format!("/v1/sandboxes/{id}/exec"), Some(body));
    assert_eq!((response.status, &response.json()["code"]), (502, &json!("sandbox_lost")), "{response:?}");
    let info = daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).json();
    assert_eq!(info["state"], "ended", "{info}");
    assert!(info.to_string().contains("sysrq triggered crash"), "{info}");
    assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{id}"), None).status, 204);
}

#[test]
fn a_guest_that_hangs_is_noticed_and_reported() {
    let daemon = Daemon::start_with_env(&[("FORKD_UNRESPONSIVE_SECS", "12")]);
    // A real-time loop on the only CPU, with the kernel's safety margin off: nothing else runs.
    let script = "echo -1 > /proc/sys/kernel/sched_rt_runtime_us; \
                  exec python3 -c 'import os\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\nwhile 1: pass'";
    let output = daemon.forkd_output(&["run", "--image", "python", "--", "sh", "-c", script], b"");
    assert_eq!(output.status.code(), Some(125), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("not answer"), "{output:?}");
    assert_eq!(daemon.request("GET", "/healthz", None).status, 200);
    eventually("the hung sandbox to go", || (daemon.folders() == 0).then_some(()));
}
