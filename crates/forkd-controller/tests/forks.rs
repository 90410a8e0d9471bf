//! Forking for real, with guests of a few instructions: they run wherever `/dev/kvm` opens. The daemon
//! is a process of its own (this binary again), so that it can be killed; the monitor is the
//! `forkd-vmm` built beside it.
//!
//! Failures panic: everything here runs in tests only.
#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use forkd_controller::{Config, serve};
use forkd_vmm::{guest_code, tiny};
use serde_json::{Value, json};

guest_code! {
    /// Says that it is ready, waits until the VM generation id changes, which it does in every child,
    /// says it again and sleeps.
    fn ready_again_in_every_child,
    "mov edx, 0x602",
    "mov rbx, qword ptr [0xe8000]",
    "out dx, al",
    "2: pause",
    "cmp rbx, qword ptr [0xe8000]",
    "je 2b",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

guest_code! {
    /// Is ready once, never again.
    fn ready_only_once,
    "mov edx, 0x602",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

/// Names the data directory in the environment of the process that is the daemon.
const DAEMON: &str = "FORKD_TEST_DAEMON";

/// Not a test, but the daemon, when another test starts this binary with [`DAEMON`] set.
#[test]
fn the_daemon() {
    let Some(folder) = std::env::var_os(DAEMON) else { return };
    let mut config = Config::new(PathBuf::from(folder));
    config.bind.set_port(0);
    config.vmm = vmm();
    config.timing.boot = Duration::from_secs(10);
    // Shown when a test fails.
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(serve(config, |_| {})).unwrap();
}

fn vmm() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("forkd-vmm")
}

struct Daemon {
    child: Child,
    folder: tempfile::TempDir,
}

impl Daemon {
    /// `None`, and said so, where there is nothing to test with.
    fn start() -> Option<Daemon> {
        if std::fs::File::options().write(true).open("/dev/kvm").is_err() || !vmm().is_file() {
            let _ = writeln!(std::io::stderr(), "NOT RUN: forks need /dev/kvm and a built forkd-vmm");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("kernel"), tiny::elf_kernel(ready_again_in_every_child())).unwrap();
        std::fs::write(folder.path().join("mute"), tiny::elf_kernel(ready_only_once())).unwrap();
        let daemon = Daemon { child: launch(folder.path()), folder };
        daemon.up();
        Some(daemon)
    }

    fn path(&self) -> &Path {
        self.folder.path()
    }

    fn up(&self) {
        eventually("the daemon", || self.try_request("GET", "/healthz", None).is_some());
    }

    fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    fn restart(&mut self) {
        self.kill();
        self.child = launch(self.folder.path());
        self.up();
    }

    fn terminate(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    fn try_request(&self, method: &str, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
        let mut stream = UnixStream::connect(self.path().join("forkd.sock")).ok()?;
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        let (head, body) = answer.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, serde_json::from_str(body).unwrap_or(Value::Null)))
    }

    fn request(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.try_request(method, path, body).unwrap_or_else(|| panic!("{method} {path}\n{}", self.log()))
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    fn snapshot(&self, tag: &str, kernel: &str) -> Value {
        let kernel = self.path().join(kernel);
        let body = json!({"tag": tag, "kernel": kernel, "mem_size_mib": 64});
        let (status, info) = self.request("POST", "/v1/snapshots", Some(body));
        assert_eq!(status, 201, "{info}\n{}", self.log());
        info
    }

    fn spawn(&self, tag: &str, n: usize) -> Vec<Value> {
        let body = json!({"snapshot_tag": tag, "n": n});
        let (status, children) = self.request("POST", "/v1/sandboxes", Some(body));
        assert_eq!(status, 201, "{children}\n{}", self.log());
        children.as_array().unwrap().clone()
    }

    fn list(&self) -> Vec<Value> {
        self.request("GET", "/v1/sandboxes", None).1.as_array().unwrap().clone()
    }

    fn delete_all(&self) {
        for sandbox in self.list() {
            let id = sandbox["id"].as_str().unwrap();
            assert_eq!(self.request("DELETE", &format!("/v1/sandboxes/{id}"), None).0, 204);
        }
    }

    /// Processes that are monitors of this daemon: the folder of each is open in them, or they are
    /// recorded in ours.
    fn monitors(&self) -> Vec<i32> {
        let mut pids = Vec::new();
        for folder in ["sandboxes", "templates"] {
            for entry in std::fs::read_dir(self.place(folder)).into_iter().flatten().flatten() {
                let record = std::fs::read(entry.path().join("process.json")).unwrap_or_default();
                let record: Value = serde_json::from_slice(&record).unwrap_or_default();
                pids.extend(record["pid"].as_i64().map(|pid| pid as i32));
            }
        }
        pids.retain(|pid| runs(*pid));
        pids
    }

    fn left(&self, folder: &str) -> usize {
        std::fs::read_dir(self.place(folder)).map_or(0, |entries| entries.count())
    }

    /// Where the daemon has its folder of that name: what lives no longer than the host is in memory.
    fn place(&self, folder: &str) -> PathBuf {
        let run = std::fs::read_link(self.path().join("run")).unwrap_or_else(|_| self.path().to_owned());
        if folder == "snapshots" { self.path().join(folder) } else { run.join(folder) }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", self.log());
        }
        for pid in self.monitors() {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if let Ok(run) = std::fs::read_link(self.path().join("run")) {
            let _ = std::fs::remove_dir_all(run);
        }
    }
}

fn launch(folder: &Path) -> Child {
    let log = std::fs::File::options().create(true).append(true).open(folder.join("log")).unwrap();
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_daemon", "--nocapture"])
        .env(DAEMON, folder)
        .stdin(Stdio::null())
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap()
}

fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

fn eventually(what: &str, check: impl Fn() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(30), "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn pid(info: &Value) -> i32 {
    info["pid"].as_i64().unwrap() as i32
}

#[test]
fn children_are_forked_from_memory_and_from_disk_and_leave_nothing() {
    let Some(daemon) = Daemon::start() else { return };
    let snapshot = daemon.snapshot("tiny", "kernel");
    assert_eq!(snapshot["status"], "ready");
    assert_eq!(snapshot["template"]["source"], "memory", "{snapshot}");
    let mut children = daemon.spawn("tiny", 1);
    children.extend(daemon.spawn("tiny", 20));
    for child in &children {
        assert_eq!(child["state"], "running", "{child}");
        assert_eq!(child["snapshot_tag"], "tiny");
        assert!(child["ready_ms"].as_f64().unwrap() > 0.0 && runs(pid(child)), "{child}");
    }
    let id = children[0]["id"].as_str().unwrap();
    let (status, stats) = daemon.request("GET", &format!("/v1/sandboxes/{id}/stats"), None);
    assert!(status == 200 && stats["private_kib"].as_u64().unwrap() > 0, "{stats}");
    let (status, error) = daemon.request("POST", &format!("/v1/sandboxes/{id}/ping"), None);
    assert!(status == 409 && error["error"].as_str().unwrap().contains("bare"), "{error}");

    // From here on, from disk: the old template goes with its last child.
    let old = snapshot["template"]["pid"].as_i64().unwrap() as i32;
    assert_eq!(daemon.request("POST", "/v1/snapshots/tiny/unload", None).0, 204);
    let from_disk = daemon.spawn("tiny", 5);
    assert_eq!(from_disk.len(), 5);
    let (_, info) = daemon.request("GET", "/v1/snapshots/tiny", None);
    assert_eq!(info["template"]["source"], "disk", "{info}");
    assert_eq!(info["template"]["children"], 5);
    assert!(runs(old));
    let new = info["template"]["pid"].as_i64().unwrap() as i32;

    daemon.delete_all();
    eventually("the old template's end", || !runs(old));
    assert!(runs(new), "the current one stays");
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/tiny", None).0, 204);
    eventually("the new template's end", || !runs(new));
    eventually("empty folders", || {
        ["sandboxes", "templates", "snapshots"].iter().all(|it| daemon.left(it) == 0)
    });
    assert!(children.iter().chain(&from_disk).all(|child| !runs(pid(child))));
}

#[test]
fn a_new_daemon_takes_over_templates_and_children() {
    let Some(mut daemon) = Daemon::start() else { return };
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", 4);
    let template = daemon.request("GET", "/v1/snapshots/tiny", None).1["template"]["pid"].clone();
    // One ends while nobody watches, one while somebody does.
    daemon.kill();
    let kill = |child: &Value| {
        let pid = rustix::process::Pid::from_raw(pid(child)).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    };
    kill(&children[0]);
    eventually("its end", || !runs(pid(&children[0])));
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    kill(&children[1]);
    let state = |child: &Value| {
        let id = child["id"].as_str().unwrap();
        daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).1
    };
    eventually("the end of the second", || state(&children[1])["state"] == "ended");
    for ended in &children[..2] {
        let ended = state(ended);
        assert_eq!(ended["state"], "ended");
        assert!(ended["detail"].as_str().unwrap().contains("signal 9"), "{ended}");
    }
    for alive in &children[2..] {
        assert_eq!(state(alive)["state"], "running");
        assert_eq!(state(alive)["pid"], alive["pid"]);
    }
    let info = daemon.request("GET", "/v1/snapshots/tiny", None).1;
    assert_eq!(info["template"]["pid"], template, "{info}");
    assert_eq!(daemon.spawn("tiny", 2).len(), 2, "and it forks on");

    // Asked to stop, it leaves them alone, too.
    daemon.terminate();
    assert!(runs(pid(&children[2])) && runs(template.as_i64().unwrap() as i32));
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    assert_eq!(daemon.list().len(), 6);
    assert_eq!(daemon.list().iter().filter(|it| it["state"] == "running").count(), 4);

    // A template that died: its children go on, and how they end is not guessed.
    let pid_of_template = rustix::process::Pid::from_raw(template.as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid_of_template, rustix::process::Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    daemon.restart();
    assert_eq!(daemon.list().iter().filter(|it| it["state"] == "running").count(), 4, "{}", daemon.log());
    kill(&children[2]);
    let end = |child: &Value| {
        let id = child["id"].as_str().unwrap();
        daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).1
    };
    eventually("its end", || end(&children[2])["state"] == "ended");
    assert_eq!(end(&children[2])["reason"], "unknown", "{}", end(&children[2]));
    daemon.delete_all();
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/tiny", None).0, 204);
    eventually("empty folders", || {
        ["sandboxes", "templates", "snapshots"].iter().all(|it| daemon.left(it) == 0)
    });
    assert!(daemon.monitors().is_empty());
}

#[test]
fn bad_requests_and_damaged_snapshots_are_refused_before_anything_starts() {
    let Some(daemon) = Daemon::start() else { return };
    let post = |path: &str, body: Value| daemon.request("POST", path, Some(body));
    for (status, body, why) in [
        (400, json!({"snapshot_tag": "tiny", "n": 0}), "n is 0"),
        (400, json!({"snapshot_tag": "tiny", "n": 1001}), "n is 1001"),
        (400, json!({"snapshot_tag": "../x"}), "tag must be"),
        (400, json!({"snapshot_tag": "tiny", "image": "x"}), "either"),
        (400, json!({}), "either"),
        (404, json!({"snapshot_tag": "nope"}), "no snapshot nope"),
    ] {
        let (got, error) = post("/v1/sandboxes", body);
        assert_eq!(got, status, "{error}");
        assert!(error["error"].as_str().unwrap().contains(why), "{error}");
    }
    let kernel = daemon.path().join("kernel");
    for (status, body, why) in [
        (400, json!({"tag": "-x", "kernel": kernel}), "tag must be"),
        (400, json!({"tag": "x", "kernel": "relative"}), "absolute"),
        (400, json!({"tag": "x"}), "either"),
        (404, json!({"tag": "x", "kernel": "/nonexistent/kernel"}), "/nonexistent/kernel"),
        (404, json!({"tag": "x", "image": "nope"}), "forkd image build nope"),
    ] {
        let (got, error) = post("/v1/snapshots", body);
        assert_eq!(got, status, "{error}");
        assert!(error["error"].as_str().unwrap().contains(why), "{error}");
    }
    // What failed is listed with the reason, and can be made again.
    let failed = daemon.request("GET", "/v1/snapshots/x", None).1;
    assert_eq!(failed["status"], "failed", "{failed}");
    daemon.snapshot("x", "kernel");
    assert_eq!(post("/v1/snapshots", json!({"tag": "x", "kernel": kernel})).0, 409);

    // An edited file is named, and nothing starts.
    assert_eq!(daemon.request("POST", "/v1/snapshots/x/unload", None).0, 204);
    let memory = daemon.path().join("snapshots/x/memory");
    let file = std::fs::File::options().write(true).open(&memory).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"edited", 1 << 20).unwrap();
    let (status, error) = post("/v1/sandboxes", json!({"snapshot_tag": "x"}));
    assert_eq!(status, 409, "{error}");
    assert!(error["error"].as_str().unwrap().contains("snapshots/x/memory"), "{error}");
    eventually("no template", || daemon.left("templates") == 0);
    assert!(daemon.list().is_empty());
}

#[test]
fn a_child_that_never_answers_is_an_error_and_goes() {
    let Some(daemon) = Daemon::start() else { return };
    daemon.snapshot("mute", "mute");
    let (status, at_once) =
        daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "mute", "n": 2, "wait": false})));
    assert_eq!(status, 201, "{at_once}");
    assert_eq!(at_once[0]["state"], "starting");
    let (status, error) =
        daemon.request("POST", "/v1/sandboxes?results=each", Some(json!({"snapshot_tag": "mute"})));
    assert_eq!(status, 502, "{error}");
    assert!(error["error"].as_str().unwrap().contains("not ready after 10 s"), "{error}");
    eventually("the two that were not waited for", || daemon.list().iter().all(|it| it["state"] == "ended"));
    assert_eq!(daemon.list().len(), 2, "they are listed with the reason");
    daemon.delete_all();
    eventually("empty folders", || daemon.left("sandboxes") == 0);
}

/// `FORKD_TIMES=1` prints how long 1, 100 and 1000 children take.
#[test]
fn a_hundred_children_come_and_go_at_once() {
    let Some(daemon) = Daemon::start() else { return };
    daemon.snapshot("tiny", "kernel");
    let times = std::env::var_os("FORKD_TIMES").is_some();
    for n in if times { vec![1, 1, 1, 10, 100, 100, 1000, 1000] } else { vec![100] } {
        let begun = Instant::now();
        let children = daemon.spawn("tiny", n);
        let all = begun.elapsed();
        assert_eq!(children.len(), n);
        let mut ready: Vec<f64> = children.iter().map(|child| child["ready_ms"].as_f64().unwrap()).collect();
        ready.sort_by(f64::total_cmp);
        if times {
            eprintln!(
                "n={n}: all {all:?}, first {:.2} ms, median {:.2} ms, last {:.2} ms",
                ready[0],
                ready[n / 2],
                ready[n - 1]
            );
        }
        daemon.delete_all();
        eventually("empty folders", || daemon.left("sandboxes") == 0);
        assert!(children.iter().all(|child| !runs(pid(child))));
    }
}
