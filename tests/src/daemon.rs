//! A `forkd serve` of the test's own, with its own data directory, and the `forkd` command aimed at it.

use std::io::Write;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;

use crate::http::{self, Response};
use crate::{PATIENCE, binary, eventually, library_path};

/// A running daemon. Dropped, it is killed with -9, as is everything it started.
pub struct Daemon {
    child: Option<Child>,
    folder: tempfile::TempDir,
    port: u16,
    extra: Vec<String>,
    env: Vec<(String, String)>,
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
        let mut daemon = Daemon { child: None, folder, port, extra, env };
        daemon.restart();
        daemon
    }

    /// Kills the daemon with -9, if it runs, and starts it again on the same data.
    pub fn restart(&mut self) {
        self.kill();
        let mut command = Command::new(binary("forkd"));
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
        self.child = Some(command.spawn().unwrap());
        eventually("the daemon", || {
            if let Some(status) = self.child.as_mut().and_then(|child| child.try_wait().unwrap()) {
                panic!("the daemon exited with {status}:\n{}", self.log());
            }
            let response = self.try_request("GET", "/healthz", None).ok()?;
            (response.status == 200).then_some(())
        });
    }

    /// Kills the daemon with -9.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// Where its data is.
    pub fn data_dir(&self) -> &Path {
        self.folder.path()
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

    fn try_request(&self, method: &str, path: &str, body: Option<Value>) -> std::io::Result<Response> {
        let stream = UnixStream::connect(self.socket())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        http::request(stream, method, path, &[("content-type", "application/json")], body.as_bytes())
    }

    /// One request over TCP, with these headers only.
    pub fn tcp_request(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
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

    /// Monitor processes that belong to this daemon's data directory.
    pub fn monitors(&self) -> Vec<u32> {
        let folder = self.data_dir().join("sandboxes");
        let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
        let records =
            entries.filter_map(|entry| std::fs::read(entry.unwrap().path().join("process.json")).ok());
        let pids =
            records.filter_map(|record| serde_json::from_slice::<Value>(&record).ok()?["pid"].as_u64());
        pids.map(|pid| pid as u32).filter(|pid| is_monitor(*pid)).collect()
    }

    /// Folders of sandboxes that are still there.
    pub fn folders(&self) -> usize {
        std::fs::read_dir(self.data_dir().join("sandboxes")).map(|entries| entries.count()).unwrap_or(0)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of the daemon ---\n{}", self.log());
        }
        self.kill();
        for pid in self.monitors() {
            let pid = rustix::process::Pid::from_raw(pid as i32).unwrap();
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
        }
    }
}

/// Whether `pid` is a monitor that runs.
pub fn is_monitor(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.contains("(forkd-vmm") && !stat.contains(") Z ")
}
