//! A `forkd serve` of the test's own, with its own data directory, and the `forkd` command aimed at it.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::Mutex;

use serde_json::Value;

use crate::http::{self, Response};
use crate::{TIMEOUT, binary, eventually, library_path};

/// A running daemon. Dropped, it is killed with -9, as is everything it started.
pub struct Daemon {
    child: Option<Child>,
    folder: tempfile::TempDir,
    port: u16,
    extra: Vec<String>,
    env: Vec<(String, String)>,
    /// Where its programs are; those under test if none is named.
    programs: Option<PathBuf>,
    /// A resource it may have only so much of.
    limit: Option<(libc::__rlimit_resource_t, u64)>,
}

impl Daemon {
    /// Starts a daemon on a new data directory.
    pub fn start() -> Daemon {
        Daemon::start_with(&[], &[], library_path())
    }

    /// Starts a daemon with more variables in its environment.
    pub fn start_with_env(env: &[(&str, &str)]) -> Daemon {
        Daemon::start_with(&[], env, library_path())
    }

    /// Starts a daemon with more arguments for `forkd serve`, more variables, or another library.
    pub fn start_with(extra: &[&str], env: &[(&str, &str)], library: PathBuf) -> Daemon {
        let mut daemon = Daemon::prepare(extra, env, library);
        daemon.restart();
        daemon
    }

    /// Starts a daemon of another build, whose programs are in `folder`.
    pub fn start_other(folder: &Path, library: PathBuf) -> Daemon {
        let mut daemon = Daemon::prepare(&[], &[], library);
        daemon.programs = Some(folder.to_path_buf());
        daemon.restart();
        daemon
    }

    /// Kills the daemon with -9 and starts the one under test in its place.
    pub fn upgrade(&mut self) {
        self.programs = None;
        self.restart();
    }

    fn prepare(extra: &[&str], env: &[(&str, &str)], library: PathBuf) -> Daemon {
        // A free port: bound, looked at, given back.
        let probe = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let port = probe.local_addr().unwrap().port();
        drop(probe);
        let extra = extra.iter().map(|arg| arg.to_string()).collect();
        let env = env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect();
        let folder = tempfile::tempdir().unwrap();
        for part in ["images", "kernels"] {
            std::os::unix::fs::symlink(library.join(part), folder.path().join(part)).unwrap();
        }
        Daemon { child: None, folder, port, extra, env, programs: None, limit: None }
    }

    /// Starts a daemon that may have only so much of a resource, and so may what it starts.
    pub fn start_limited(resource: libc::__rlimit_resource_t, most: u64) -> Daemon {
        let mut daemon = Daemon::start();
        daemon.limit = Some((resource, most));
        daemon.restart();
        daemon
    }

    /// Kills the daemon with -9, if it runs, and starts it again on the same data.
    pub fn restart(&mut self) {
        self.kill();
        let program = self.programs.as_ref().map_or_else(|| binary("forkd"), |folder| folder.join("forkd"));
        let mut command = Command::new(program);
        let log = std::fs::File::options().create(true).append(true).open(self.data_dir().join("daemon.log"));
        command
            .args(["serve", "--data-dir"])
            .arg(self.data_dir())
            .args(["--bind", &format!("127.0.0.1:{}", self.port)])
            .args(&self.extra)
            .env("FORKD_SOCKET", self.socket())
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stderr(log.unwrap());
        if let Some((resource, most)) = self.limit {
            let limit = libc::rlimit { rlim_cur: most, rlim_max: most };
            // SAFETY: between fork and exec only setrlimit is called, which is async-signal-safe.
            unsafe {
                command.pre_exec(move || match libc::setrlimit(resource, &limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                })
            };
        }
        let child = command.spawn().unwrap();
        let mut ended = ENDED_AT_EXIT.lock().unwrap();
        ended.iter_mut().filter(|(_, folder)| *folder == self.data_dir()).for_each(|it| it.0 = child.id());
        drop(ended);
        self.child = Some(child);
        eventually("the daemon", || {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
                panic!("the daemon exited with {status}:\n{}", self.log());
            }
            let response = self.try_request("GET", "/healthz", None).ok()?;
            (response.status == 200).then_some(())
        });
    }

    /// Has the daemon stop, and waits until it has.
    pub fn stop(&mut self) {
        let Some(mut child) = self.child.take() else { return };
        let pid = rustix::process::Pid::from_child(&child);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        let status = child.wait().unwrap();
        assert!(status.success(), "the daemon exited with {status}:\n{}", self.log());
    }

    /// Kills the daemon with -9.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Has the daemon ended, and its data removed, when this process exits: for one that lives in a
    /// static, which is never dropped.
    pub fn end_with_this_process(&self) {
        ENDED_AT_EXIT.lock().unwrap().push((self.pid(), self.data_dir().to_path_buf()));
        extern "C" fn end() {
            for (pid, folder) in ENDED_AT_EXIT.lock().unwrap().drain(..) {
                end_all(
                    &[vec![pid], recorded(&folder, "sandboxes"), recorded(&folder, "templates")].concat(),
                );
                let _ = std::fs::remove_dir_all(run_dir(&folder));
                let _ = std::fs::remove_dir_all(folder);
            }
        }
        // SAFETY: the function may be called at exit, when no other thread of the test runs.
        assert_eq!(unsafe { libc::atexit(end) }, 0);
    }

    /// Where its data is.
    pub fn data_dir(&self) -> &Path {
        self.folder.path()
    }

    /// Where the folders of its sandboxes and templates are.
    pub fn run_dir(&self) -> PathBuf {
        run_dir(self.data_dir())
    }

    /// Its unix socket.
    pub fn socket(&self) -> PathBuf {
        self.data_dir().join("forkd.sock")
    }

    /// Its TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// What it logged.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.data_dir().join("daemon.log")).unwrap_or_default()
    }

    /// One request over the unix socket.
    pub fn request(&self, method: &str, path: &str, body: Option<Value>) -> Response {
        self.try_request(method, path, body)
            .unwrap_or_else(|error| panic!("{method} {path}: {error}\n{}", self.log()))
    }

    /// One request over the unix socket, of a daemon that may be killed meanwhile.
    pub fn try_request(&self, method: &str, path: &str, body: Option<Value>) -> std::io::Result<Response> {
        let stream = UnixStream::connect(self.socket())?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        http::request(stream, method, path, &[("content-type", "application/json")], body.as_bytes())
    }

    /// One request over TCP, with these headers only.
    pub fn tcp_request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        http::request(stream, method, path, headers, body).unwrap()
    }

    /// Makes a sandbox and gives its id.
    pub fn create(&self, body: Value) -> String {
        let response = self.request("POST", "/v1/sandboxes", Some(body));
        assert_eq!(response.status, 201, "{}\n{}", String::from_utf8_lossy(&response.body), self.log());
        response.json()[0]["id"].as_str().unwrap().to_owned()
    }

    /// Ids of all sandboxes.
    pub fn sandboxes(&self) -> Vec<String> {
        let list = self.request("GET", "/v1/sandboxes", None).json();
        let ids = list.as_array().unwrap().iter().map(|sandbox| sandbox["id"].as_str().unwrap().to_owned());
        ids.collect()
    }

    /// Runs a command in a sandbox.
    pub fn exec(&self, id: &str, body: Value) -> Value {
        let response = self.request("POST", &format!("/v1/sandboxes/{id}/exec"), Some(body));
        assert_eq!(response.status, 200, "{}\n{}", String::from_utf8_lossy(&response.body), self.log());
        response.json()
    }

    /// Makes a snapshot and waits until it is there.
    pub fn snapshot(&self, body: Value) -> Value {
        let response = self.request("POST", "/v1/snapshots", Some(body));
        assert_eq!(response.status, 201, "{}\n{}", String::from_utf8_lossy(&response.body), self.log());
        response.json()
    }

    /// Forks children and gives what is known of each; all must start.
    pub fn spawn(&self, body: Value) -> Vec<Value> {
        let response = self.request("POST", "/v1/sandboxes?results=each", Some(body));
        assert_eq!(response.status, 201, "{}\n{}", String::from_utf8_lossy(&response.body), self.log());
        let answer = response.json();
        assert_eq!(answer["errors"], serde_json::json!([]), "{answer}\n{}", self.log());
        answer["children"].as_array().unwrap().clone()
    }

    /// Forks children and gives their ids; all must start.
    pub fn fork(&self, tag: &str, n: usize) -> Vec<String> {
        let children = self.spawn(serde_json::json!({"snapshot_tag": tag, "n": n}));
        assert_eq!(children.len(), n);
        children.iter().map(|child| child["id"].as_str().unwrap().to_owned()).collect()
    }

    /// Branches a sandbox. The daemon may have its hands full with others: then it is asked again.
    pub fn branch(&self, id: &str, body: Value) -> Value {
        let response = self.try_branch(id, body);
        assert!([201, 202].contains(&response.status), "{response:?}\n{}", self.log());
        response.json()
    }

    /// Branches a sandbox, whatever the answer, unless it is "later".
    pub fn try_branch(&self, id: &str, body: Value) -> Response {
        let path = format!("/v1/sandboxes/{id}/branch");
        eventually("a free hand for a branch", || {
            Some(self.request("POST", &path, Some(body.clone()))).filter(|response| response.status != 503)
        })
    }

    /// What is known of a sandbox.
    pub fn sandbox(&self, id: &str) -> Value {
        let response = self.request("GET", &format!("/v1/sandboxes/{id}"), None);
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    }

    /// Asks something of a sandbox that must be done.
    pub fn tell(&self, id: &str, verb: &str, body: Value) -> Value {
        let response = self.request("POST", &format!("/v1/sandboxes/{id}/{verb}"), Some(body));
        assert_eq!(response.status, 200, "{verb}: {response:?}\n{}", self.log());
        response.json()
    }

    /// Has a sandbox whose guest never rests come last: a saver gets only what others leave of the computer.
    pub fn leave_time_for_savers(&self, id: &str) {
        let pid = self.sandbox(id)["pid"].clone();
        let threads = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        for thread in threads.filter_map(|entry| entry.file_name().to_string_lossy().parse().ok()) {
            let _ = rustix::process::setpriority_process(rustix::process::Pid::from_raw(thread), 19);
        }
    }

    /// Waits until a snapshot is no longer being written; it must be whole then.
    pub fn when_ready(&self, tag: &str) -> Value {
        let info = self.when_written(tag);
        assert_eq!(info["status"], "ready", "{info}\n{}", self.log());
        info
    }

    /// Waits until a snapshot is no longer being written, however that ends.
    pub fn when_written(&self, tag: &str) -> Value {
        eventually(&format!("the snapshot {tag}"), || {
            let response = self.request("GET", &format!("/v1/snapshots/{tag}"), None);
            assert_eq!(response.status, 200, "{tag}: {response:?}\n{}", self.log());
            Some(response.json()).filter(|info| info["status"] != "writing")
        })
    }

    /// All about a snapshot: its chain, its layers, what they take.
    pub fn snapshot_info(&self, tag: &str) -> Value {
        let response = self.request("GET", &format!("/v1/snapshots/{tag}/info"), None);
        assert_eq!(response.status, 200, "{tag}: {response:?}\n{}", self.log());
        response.json()
    }

    /// Ends a snapshot's template: the next child comes from the disk.
    pub fn unload(&self, tag: &str) {
        let response = self.request("POST", &format!("/v1/snapshots/{tag}/unload"), None);
        assert_eq!(response.status, 204, "{tag}: {response:?}\n{}", self.log());
    }

    /// Deletes a snapshot, with a query or none.
    pub fn delete_snapshot(&self, tag: &str, query: &str) -> Response {
        self.request("DELETE", &format!("/v1/snapshots/{tag}{query}"), None)
    }

    /// Evaluates Python in a sandbox, which must go well: the value's `repr`, or nothing.
    pub fn eval(&self, id: &str, code: &str) -> String {
        let body = serde_json::json!({"code": code, "timeout_secs": 120});
        let response = self.request("POST", &format!("/v1/sandboxes/{id}/eval"), Some(body));
        assert_eq!(response.status, 200, "{}\n{}", String::from_utf8_lossy(&response.body), self.log());
        let answer = response.json();
        assert_eq!(answer["error"], Value::Null, "{code}: {answer}");
        answer["result"].as_str().unwrap_or_default().to_owned()
    }

    /// Runs a shell command in a sandbox, which must succeed: what it printed.
    pub fn sh(&self, id: &str, script: &str) -> String {
        let answer = self.exec(id, serde_json::json!({"args": ["sh", "-c", script], "timeout_secs": 120}));
        assert_eq!(answer["exit_code"], 0, "{script}: {answer}");
        answer["stdout"].as_str().unwrap().to_owned()
    }

    /// Deletes sandboxes and waits until nothing of them is left.
    pub fn delete(&self, ids: &[String]) {
        for id in ids {
            assert_eq!(self.request("DELETE", &format!("/v1/sandboxes/{id}"), None).status, 204, "{id}");
        }
        let folders: Vec<_> = ids.iter().map(|id| self.run_dir().join("sandboxes").join(id)).collect();
        eventually("deleted sandboxes to go", || {
            (!folders.iter().any(|folder| folder.exists())).then_some(())
        });
    }

    /// The `forkd` command, aimed at this daemon.
    pub fn forkd(&self, args: &[&str]) -> Command {
        let mut command = Command::new(binary("forkd"));
        command.args(args).env("FORKD_DATA_DIR", self.data_dir()).env("FORKD_SOCKET", self.socket());
        command
    }

    /// Runs `forkd` with `stdin` to its end.
    pub fn forkd_output(&self, args: &[&str], stdin: &[u8]) -> Output {
        let mut command = self.forkd(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut pipe = child.stdin.take().unwrap();
        let stdin = stdin.to_vec();
        // From a thread: a child that writes before it has read everything must not wait for us.
        let feeder = std::thread::spawn(move || pipe.write_all(&stdin));
        let output = child.wait_with_output().unwrap();
        let _ = feeder.join();
        output
    }

    /// Monitor processes of sandboxes that belong to this daemon's data directory.
    pub fn monitors(&self) -> Vec<u32> {
        recorded(self.data_dir(), "sandboxes")
    }

    /// Template processes that belong to this daemon's data directory.
    pub fn templates(&self) -> Vec<u32> {
        recorded(self.data_dir(), "templates")
    }

    /// Folders of sandboxes that are still there.
    pub fn folders(&self) -> usize {
        std::fs::read_dir(self.run_dir().join("sandboxes")).map(|entries| entries.count()).unwrap_or(0)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the daemon ---\n{}", self.log());
        }
        self.kill();
        end_all(&[self.monitors(), self.templates()].concat());
        let _ = std::fs::remove_dir_all(self.run_dir());
    }
}

/// Where a daemon with this data directory has what lives no longer than the host.
fn run_dir(data_dir: &Path) -> PathBuf {
    std::fs::read_link(data_dir.join("run")).unwrap_or_else(|_| data_dir.to_path_buf())
}

/// Daemons that end with this process.
static ENDED_AT_EXIT: Mutex<Vec<(u32, PathBuf)>> = Mutex::new(Vec::new());

/// Monitors whose process is recorded in the folders of `kind`.
fn recorded(data_dir: &Path, kind: &str) -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir(run_dir(data_dir).join(kind)) else { return Vec::new() };
    // An entry may go while it is looked at.
    let records = entries.filter_map(|entry| std::fs::read(entry.ok()?.path().join("process.json")).ok());
    let pids = records.filter_map(|record| serde_json::from_slice::<Value>(&record).ok()?["pid"].as_u64());
    pids.map(|pid| pid as u32).filter(|pid| is_monitor(*pid)).collect()
}

fn end_all(pids: &[u32]) {
    for pid in pids.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid as i32)) {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

/// Whether `pid` is a monitor, or a template, that runs.
pub fn is_monitor(pid: u32) -> bool {
    // A process that is over has no program any more.
    let program = std::fs::read_link(format!("/proc/{pid}/exe")).unwrap_or_default();
    program.file_name().is_some_and(|name| name.to_string_lossy().starts_with("forkd-vmm"))
}
