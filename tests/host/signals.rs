//! A daemon that is stopped while a request is under way; and its log, as programs read it.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

use forkd_tests::{binary, eventually, test_name};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::fanout::can_run;

/// `forkd serve` with a data directory of its own.
struct Served {
    folder: tempfile::TempDir,
    daemon: Child,
}

impl Served {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let log = File::create(folder.path().join("log")).unwrap();
        let served = Served::logging_to(log, folder);
        eventually("the daemon to be ready", || served.said("forkd is ready"));
        served
    }

    fn logging_to(log: File, folder: tempfile::TempDir) -> Self {
        let mut command = Command::new(binary("forkd"));
        command.env("FORKD_DATA_DIR", folder.path()).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        command.args(["serve", "--bind", "127.0.0.1:0", "--log-format", "json"]);
        Served { daemon: command.spawn().unwrap(), folder }
    }

    fn log(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.folder.path().join("log")).unwrap();
        // The last line may be under way.
        let whole = text.rfind('\n').map_or("", |end| &text[..end]);
        whole.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    fn said(&self, message: &str) -> Option<Value> {
        self.log().into_iter().find(|line| line["message"] == message)
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.daemon), signal).unwrap();
    }

    /// A request of which the daemon has the beginning, and waits for the end.
    fn request_under_way(&self) -> UnixStream {
        let mut stream = UnixStream::connect(self.folder.path().join("forkd.sock")).unwrap();
        let head = "POST /v1/snapshots HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
                    Content-Length: 100\r\nExpect: 100-continue\r\n\r\n";
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"HTTP/1.1 100");
        stream
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = (self.daemon.kill(), self.daemon.wait());
    }
}

#[test]
fn a_second_signal_ends_a_daemon_that_drains() {
    if !can_run(test_name!()) {
        return;
    }
    for signal in [Signal::TERM, Signal::INT] {
        let mut served = Served::start();
        let _under_way = served.request_under_way();
        // What asks for files to be read again does not count.
        served.signal(Signal::HUP);
        served.signal(signal);
        eventually("the daemon to stop", || served.said("stopping"));
        served.signal(signal);
        assert_eq!(served.daemon.wait().unwrap().code(), Some(128 + signal.as_raw()));
    }
}

#[test]
fn every_line_of_the_log_has_the_fields_that_readers_know() {
    if !can_run(test_name!()) {
        return;
    }
    let mut served = Served::start();
    served.signal(Signal::TERM);
    assert_eq!(served.daemon.wait().unwrap().code(), Some(0));
    let names = |line: &Value| line.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    for line in served.log() {
        for name in ["ts", "level", "target", "message"] {
            assert!(line[name].is_string(), "{line}");
        }
    }
    let mut ready = names(&served.said("forkd is ready").unwrap());
    ready.sort();
    assert_eq!(ready, ["address", "data", "level", "message", "socket", "target", "ts"]);
}

#[test]
fn a_daemon_whose_log_cannot_be_written_serves_all_the_same() {
    if !can_run(test_name!()) {
        return;
    }
    let full = File::options().write(true).open("/dev/full").unwrap();
    let mut served = Served::logging_to(full, tempfile::tempdir().unwrap());
    let socket = served.folder.path().join("forkd.sock");
    eventually("an answer", || {
        let mut stream = UnixStream::connect(&socket).ok()?;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").ok()?;
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).ok()?;
        (&answer == b"HTTP/1.1 200").then_some(())
    });
    served.signal(Signal::TERM);
    assert_eq!(served.daemon.wait().unwrap().code(), Some(0));
}
