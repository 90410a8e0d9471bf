//! `forkd run`, as a user meets it.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::Stdio;

use forkd_tests::daemon::Daemon;
use forkd_tests::{eventually, library_path};

use crate::assets::assets;

fn sh(script: &str) -> [&str; 7] {
    ["run", "--image", "python", "--", "sh", "-c", script]
}

#[test]
fn a_command_has_its_output_input_and_exit_status() {
    let daemon = Daemon::start();
    let output = daemon.forkd_output(&sh("cat; echo oops >&2; exit 7"), b"hello from outside\n");
    assert_eq!(output.status.code(), Some(7), "{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello from outside\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("oops\n"));
    // It counts like any command.
    let metrics = daemon.request("GET", "/metrics", None);
    let metrics = String::from_utf8_lossy(&metrics.body);
    assert!(metrics.lines().any(|line| line == "forkd_execs_total{outcome=\"nonzero\"} 1"), "{metrics}");
    eventually("its sandbox to go", || (daemon.folders() == 0 && daemon.monitors().is_empty()).then_some(()));
}

#[test]
fn python_and_numpy_are_in_the_default_image() {
    let daemon = Daemon::start();
    let code = "import numpy; print(numpy.zeros(5).tolist())";
    let output = daemon.forkd_output(&["run", "--image", "python", "--", "python3", "-c", code], b"");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "[0.0, 0.0, 0.0, 0.0, 0.0]\n");
    assert_eq!(output.status.code(), Some(0));
}

#[test]
fn a_kernel_given_by_its_path_boots_with_the_modules_beside_it() {
    let kernel = assets().bzimage.to_str().unwrap();
    let daemon = Daemon::start_with(&["--kernel", kernel], &[], library_path());
    let output = daemon.forkd_output(&sh("test -d /sys/module/virtio_mmio && echo loaded"), b"");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "loaded\n", "{output:?}");
}

#[test]
fn arguments_environment_folder_and_user_are_the_ones_asked_for() {
    let daemon = Daemon::start();
    let args = [
        "run",
        "--image",
        "python",
        "--env",
        "GREETING=hi there",
        "--cwd",
        "/usr/lib",
        "--user",
        "nobody",
        "--vcpus",
        "2",
        "--mem-size-mib",
        "700",
        "--",
        "sh",
        "-c",
        "printf '%s|%s|%s|%s|%s|' \"$GREETING\" \"$PWD\" \"$(id -un)\" \"$1\" \"$(nproc)\"; grep MemTotal /proc/meminfo",
        "sh",
        "two  words",
    ];
    let output = daemon.forkd_output(&args, b"");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.starts_with("hi there|/usr/lib|nobody|two  words|2|"), "{text} {output:?}");
    let kib: u64 = text.split_whitespace().rev().nth(1).unwrap().parse().unwrap();
    assert!((600 << 10..700 << 10).contains(&kib), "{text}");
}

#[test]
fn megabytes_pass_through_unchanged_both_ways() {
    let daemon = Daemon::start();
    let data: Vec<u8> = (0..8u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let output = daemon.forkd_output(&["run", "--image", "python", "--", "cat"], &data);
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stdout == data, "{} bytes of {} came back, or others", output.stdout.len(), data.len());
}

#[test]
fn output_comes_while_the_command_runs_and_a_signal_reaches_it() {
    let daemon = Daemon::start();
    let script = "trap 'echo caught; exit 42' INT; echo ready; while :; do sleep 0.1; done";
    let mut child = daemon.forkd(&sh(script)).stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    let pid = rustix::process::Pid::from_child(&child);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "caught");
    assert_eq!(child.wait().unwrap().code(), Some(42));
}

#[test]
fn a_command_killed_by_a_signal_and_one_out_of_time_say_so_by_their_status() {
    let daemon = Daemon::start();
    let output = daemon.forkd_output(&sh("kill -9 $$"), b"");
    assert_eq!(output.status.code(), Some(128 + 9));

    let args = ["run", "--image", "python", "--timeout", "15", "--", "sh", "-c", "echo begun; sleep 600"];
    let output = daemon.forkd_output(&args, b"");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "begun\n");
    assert_eq!(output.status.code(), Some(124));
    assert!(String::from_utf8_lossy(&output.stderr).contains("reached its time limit"), "{output:?}");
}

#[test]
fn a_client_killed_with_nine_takes_its_sandbox_along() {
    let daemon = Daemon::start();
    // Killed while the command runs …
    let mut child = daemon
        .forkd(&sh("echo ready; sleep 600"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut word = [0; 6];
    child.stdout.take().unwrap().read_exact(&mut word).unwrap();
    assert_eq!(daemon.monitors().len(), 1);
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the sandbox to go", || (daemon.monitors().is_empty() && daemon.folders() == 0).then_some(()));
    // … and while the guest still boots.
    let mut child = daemon.forkd(&sh("true")).stdin(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    eventually("a monitor", || (!daemon.monitors().is_empty()).then_some(()));
    child.kill().unwrap();
    child.wait().unwrap();
    eventually("the sandbox to go", || (daemon.monitors().is_empty() && daemon.folders() == 0).then_some(()));
    assert!(daemon.sandboxes().is_empty());
}

#[test]
fn a_command_that_is_not_there_is_named() {
    let daemon = Daemon::start();
    let output = daemon.forkd_output(&["run", "--image", "python", "--", "no-such-program"], b"");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("no-such-program"), "{stderr}");
    assert!(matches!(output.status.code(), Some(125..=127)), "{output:?}");

    let output = daemon.forkd_output(&["run", "--image", "nowhere", "--", "true"], b"");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("nowhere") && stderr.contains("forkd image build"), "{stderr}");
    assert_eq!(output.status.code(), Some(125));
    assert_eq!(daemon.folders(), 0);
}

#[test]
fn a_reader_that_goes_away_ends_the_command() {
    let daemon = Daemon::start();
    let mut child =
        daemon.forkd(&["run", "--image", "python", "--", "yes"]).stdout(Stdio::piped()).spawn().unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 1000]).unwrap();
    drop(stdout);
    let status = child.wait().unwrap();
    assert!(!status.success());
    eventually("the sandbox to go", || (daemon.folders() == 0).then_some(()));
    std::io::stdout().flush().unwrap();
}
