//! A daemon in a process of its own (the test binary again), so that it can be killed; the monitor is the
//! `forkd-vmm` built beside it.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use forkd_controller::{Config, TlsFiles, serve};
use forkd_vmm::asm_guest;
use serde_json::{Value, json};

/// The environment variable with the data directory of the daemon's process.
pub(crate) const DAEMON: &str = "FORKD_TEST_DAEMON";

pub(crate) fn vmm() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().join("forkd-vmm")
}

pub(crate) struct Daemon {
    pub(crate) child: Child,
    pub(crate) folder: tempfile::TempDir,
}

impl Daemon {
    /// Starts a daemon with the code of some guests, by name. `None`, with a note, where the tests cannot run.
    pub(crate) fn start(kernels: &[(&str, &[u8])]) -> Option<Daemon> {
        if std::fs::File::options().write(true).open("/dev/kvm").is_err() || !vmm().is_file() {
            let _ = writeln!(std::io::stderr(), "NOT RUN: forks need /dev/kvm and a built forkd-vmm");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        for (name, code) in kernels {
            std::fs::write(folder.path().join(name), asm_guest::elf_kernel(code)).unwrap();
        }
        let daemon = Daemon { child: launch(folder.path()), folder };
        daemon.up();
        Some(daemon)
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn up(&self) {
        eventually("the daemon", || self.try_request("GET", "/healthz", None).is_some());
    }

    pub(crate) fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.kill();
        self.child = launch(self.folder.path());
        self.up();
    }

    pub(crate) fn terminate(&mut self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        assert!(self.child.wait().unwrap().success());
    }

    pub(crate) fn try_request(&self, method: &str, path: &str, body: Option<Value>) -> Option<(u16, Value)> {
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

    pub(crate) fn request(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        self.try_request(method, path, body).unwrap_or_else(|| panic!("{method} {path}\n{}", self.log()))
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.path().join("log")).unwrap_or_default()
    }

    pub(crate) fn snapshot(&self, tag: &str, kernel: &str) -> Value {
        let kernel = self.path().join(kernel);
        let body = json!({"tag": tag, "kernel": kernel, "mem_size_mib": 64});
        let (status, info) = self.request("POST", "/v1/snapshots", Some(body));
        assert_eq!(status, 201, "{info}\n{}", self.log());
        info
    }

    pub(crate) fn spawn(&self, tag: &str, n: usize) -> Vec<Value> {
        let body = json!({"snapshot_tag": tag, "n": n});
        let (status, children) = self.request("POST", "/v1/sandboxes", Some(body));
        assert_eq!(status, 201, "{children}\n{}", self.log());
        children.as_array().unwrap().clone()
    }

    pub(crate) fn list(&self) -> Vec<Value> {
        self.request("GET", "/v1/sandboxes", None).1.as_array().unwrap().clone()
    }

    pub(crate) fn delete_all(&self) {
        for sandbox in self.list() {
            let id = sandbox["id"].as_str().unwrap();
            assert_eq!(self.request("DELETE", &format!("/v1/sandboxes/{id}"), None).0, 204);
        }
    }

    /// The pids of this daemon's monitors: processes in its records, and processes that have a folder of it
    /// open.
    pub(crate) fn monitors(&self) -> Vec<i32> {
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

    /// How many entries the daemon's folder of that name has. For snapshots, layers count too, named or not.
    pub(crate) fn left(&self, folder: &str) -> usize {
        let count = |path: PathBuf| std::fs::read_dir(path).map_or(0, |entries| entries.count());
        let place = self.place(folder);
        match folder {
            "snapshots" => count(place.clone()) + count(place.join(".layers")) - 1,
            _ => count(place),
        }
    }

    /// The path of the daemon's folder of that name; the run directory is in memory.
    pub(crate) fn place(&self, folder: &str) -> PathBuf {
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
        // A sandbox that is being deleted has no record any more, but is still its template's child.
        let known = self.monitors();
        let forked = processes().into_iter().filter(|pid| known.contains(&parent(*pid)));
        for pid in forked.collect::<Vec<_>>().into_iter().chain(known.iter().copied()) {
            let pid = rustix::process::Pid::from_raw(pid).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
        if let Ok(run) = std::fs::read_link(self.path().join("run")) {
            let _ = std::fs::remove_dir_all(run);
        }
    }
}

pub(crate) fn launch(folder: &Path) -> Child {
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

pub(crate) fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

pub(crate) fn eventually(what: &str, check: impl Fn() -> bool) {
    within(Duration::from_secs(30), what, check);
}

pub(crate) fn within(patience: Duration, what: &str, check: impl Fn() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < patience, "gave up waiting: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

pub(crate) fn pid(info: &Value) -> i32 {
    info["pid"].as_i64().unwrap() as i32
}

/// Runs the daemon when another test has started this executable for it. Only the test `the_daemon` calls it.
pub(crate) fn run() {
    let Some(folder) = std::env::var_os(DAEMON) else { return };
    let folder = PathBuf::from(folder);
    let mut config = Config::new(folder.clone());
    config.bind.set_port(0);
    config.vmm = vmm();
    config.timing.boot = Duration::from_secs(10);
    // A file has the test's settings.
    let wants: Value = std::fs::read(folder.join("limits.json"))
        .map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).unwrap());
    config.limits.branch_max_count = wants["branch_max_count"].as_u64().map(|count| count as usize);
    config.limits.branch_max_age = wants["branch_max_age"].as_u64().map(Duration::from_secs);
    if let Some(secs) = wants["branch_unload_secs"].as_u64() {
        config.limits.branch_unload_after = Some(Duration::from_secs(secs));
    }
    // The test's folder may be on a small disk.
    config.limits.min_free_mib = wants["min_free_mib"].as_u64().unwrap_or(0);
    config.otlp_endpoint = wants["otlp_endpoint"].as_str().map(str::to_owned);
    if let Some(max) = wants["max_branches"].as_u64() {
        config.limits.max_branches = max as usize;
    }
    if let Some(max) = wants["max_sandboxes"].as_u64() {
        config.limits.max_sandboxes = max as usize;
    }
    if let Some(rate) = wants["rate_limit"].as_u64() {
        config.limits.rate_limit = rate as u32;
    }
    config.insecure_loopback = wants["insecure_loopback"] == true;
    if !wants["kill_at"].is_null() || !wants["hold_at"].is_null() {
        AT_STEP.set((wants.clone(), folder.clone())).unwrap();
        config.at_step = Some(at_step);
    }
    if wants["abroad"] == true {
        config.bind.set_ip(std::net::Ipv4Addr::UNSPECIFIED.into());
        config.tls = Some(TlsFiles { cert: folder.join("cert.pem"), key: folder.join("key.pem") });
    }
    // The harness shows the log when a test fails.
    tracing_subscriber::fmt().with_writer(std::io::stderr).with_ansi(false).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(serve(config, |_| {})).unwrap();
}

/// The step hook. At step `kill_at` the daemon kills itself; at step `hold_at` it waits while the folder has a file
/// `held`.
static AT_STEP: OnceLock<(Value, PathBuf)> = OnceLock::new();

fn at_step(step: &'static str) {
    let Some((wants, folder)) = AT_STEP.get() else { return };
    if wants["kill_at"] == step {
        let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    }
    if wants["hold_at"] == step {
        let held = folder.join("held");
        std::fs::write(&held, step).unwrap();
        tokio::task::block_in_place(|| {
            while held.exists() {
                std::thread::sleep(Duration::from_millis(10));
            }
        });
    }
}

fn processes() -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()).collect()
}

/// The parent of a process; 0 if there is no such process.
pub(crate) fn parent(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
    parent.unwrap_or(0)
}
