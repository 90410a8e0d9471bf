//! The emulated machine itself. Tests that stop it or pull its plug have one of their own.

use std::io::Write;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Instant;

use forkd_tests::{eventually, library_path};
use rustix::process::{Pid, Signal, kill_process, test_kill_process};
use serde_json::Value;

use crate::cli::{forkd, text};

/// Whether there is a machine to test here; prints a line if not.
pub(crate) fn machine_is_used() -> bool {
    static USED: OnceLock<bool> = OnceLock::new();
    *USED.get_or_init(|| {
        let report: Value = serde_json::from_slice(&forkd(None, &["doctor", "--json"]).stdout).unwrap();
        let used = report["will_use"] == "machine";
        if !used {
            // Past the harness, which swallows what passing tests print.
            let _ = writeln!(std::io::stderr(), "NOT RUN: the emulated machine's tests: KVM runs Linux here");
        }
        used
    })
}

/// A data directory of its own, with copies of the images and kernels that are there already: a link
/// to them would lead nowhere inside the machine.
pub(crate) fn own_data_dir() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for part in ["images", "kernels"] {
        let mut copy = Command::new("cp");
        copy.args(["-a", "--sparse=always", "--reflink=auto"])
            .arg(library_path().join(part))
            .arg(folder.path());
        assert!(copy.status().unwrap().success());
    }
    folder
}

/// Stops the machine of a data directory when the test is over, however it ends.
pub(crate) struct Stop<'a>(pub(crate) &'a Path);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        forkd(Some(self.0), &["machine", "stop"]);
    }
}

pub(crate) fn shell(data: &Path, script: &str) -> String {
    let output = forkd(Some(data), &["machine", "shell", "--", "sh", "-c", script]);
    assert!(output.status.success(), "{script}: {}{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

pub(crate) fn status(data: &Path) -> Value {
    serde_json::from_slice(&forkd(Some(data), &["machine", "status", "--json"]).stdout).unwrap()
}

/// A pid from a machine's status.
pub(crate) fn pid(data: &Path, name: &str) -> Pid {
    let pid = status(data)["running"][name].as_i64().unwrap();
    Pid::from_raw(pid as i32).unwrap()
}

/// Ends a machine as a power cut does: nothing in it is told.
pub(crate) fn pull_plug(data: &Path) {
    let (supervisor, qemu) = (pid(data, "supervisor_pid"), pid(data, "qemu_pid"));
    kill_process(supervisor, Signal::KILL).unwrap();
    eventually("QEMU to end with its supervisor", || test_kill_process(qemu).is_err().then_some(()));
}

#[test]
fn run_from_outside_is_the_same_as_inside() {
    if !machine_is_used() {
        return;
    }
    let code = "import numpy; print(numpy.zeros(5).tolist())";
    let output = forkd(None, &["run", "--image", "python", "--", "python3", "-c", code]);
    assert_eq!(text(&output.stdout), "[0.0, 0.0, 0.0, 0.0, 0.0]\n", "{}", text(&output.stderr));
    assert_eq!(forkd(None, &["run", "--image", "python", "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    // The forwarded port, with the token the CLI finds.
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    let address = found["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned();
    let bearer = format!("Bearer {}", found["token"].as_str().unwrap());
    let get = |path: &str, headers: &[(&str, &str)]| {
        let stream = std::net::TcpStream::connect(&address).unwrap();
        forkd_tests::http::request(stream, "GET", path, headers, b"").unwrap()
    };
    assert_eq!(get("/v1/sandboxes", &[("authorization", &bearer)]).status, 200);
    assert_eq!(get("/v1/sandboxes", &[]).status, 401);
    assert_eq!(get("/version", &[("authorization", &bearer)]).json()["api"], "v1");
}

#[test]
fn a_command_passes_through_the_machines_shell_with_input_output_and_status() {
    if !machine_is_used() {
        return;
    }
    let output = forkd(None, &["machine", "shell", "--", "sh", "-c", "echo out; echo err >&2; exit 9"]);
    assert_eq!((output.status.code(), text(&output.stdout)), (Some(9), "out\n".into()));
    assert!(text(&output.stderr).contains("err\n"));
    let root = forkd(
        None,
        &["machine", "shell", "--", "sh", "-c", "test -w /dev/kvm && touch /usr/harmless && id -u"],
    );
    assert_eq!(text(&root.stdout), "0\n");
    assert!(!Path::new("/usr/harmless").exists(), "the machine wrote to the host's files");
}

#[test]
fn a_machine_comes_by_itself_survives_a_pulled_plug_and_a_hang_and_goes_when_told() {
    if !machine_is_used() {
        return;
    }
    let data = own_data_dir();
    let data = data.path();
    let _stop = Stop(data);
    assert_eq!(status(data)["state"], "stopped");

    // It starts by itself when a command needs it, and reports that.
    let output = forkd(Some(data), &["run", "--image", "python", "--", "echo", "hello"]);
    assert_eq!(text(&output.stdout), "hello\n", "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("emulated machine"), "{}", text(&output.stderr));
    assert_eq!(status(data)["state"], "running");

    // A hung machine is noticed and replaced, loudly.
    let log = status(data)["logs"]["daemon"].as_str().unwrap().to_owned();
    let folder = Path::new(&log).parent().unwrap().to_str().unwrap();
    shell(data, &format!("echo kept > {folder}/note && sync {folder}/note"));
    let before = pid(data, "qemu_pid");
    kill_process(before, Signal::STOP).unwrap();
    let start = Instant::now();
    eventually("a fresh machine", || {
        let status = status(data);
        (status["state"] == "running" && status["running"]["qemu_pid"] != before.as_raw_nonzero().get())
            .then_some(())
    });
    println!("a hung machine was replaced after {:.0?}", start.elapsed());
    let log = std::fs::read_to_string(data.join("machine/supervisor.log")).unwrap();
    assert!(log.contains("answer"), "{log}");
    assert_eq!(shell(data, &format!("cat {folder}/note")), "kept\n");

    // What was synced survives a pulled plug; the machine comes back when asked.
    shell(data, &format!("echo kept again > {folder}/note && sync {folder}/note"));
    pull_plug(data);
    assert_eq!(shell(data, &format!("cat {folder}/note")), "kept again\n");

    // And it stops on request, cleanly.
    shell(data, &format!("echo unsynced > {folder}/note"));
    let output = forkd(Some(data), &["machine", "stop"]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(status(data)["state"], "stopped");
    assert_eq!(shell(data, &format!("cat {folder}/note")), "unsynced\n");
}
