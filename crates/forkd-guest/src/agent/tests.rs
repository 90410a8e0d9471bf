//! An agent to test against, over TCP as the emulated machine has it, and tests of its access rules.

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::Duration,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use forkd_protocol::{
    agent::{End, Event, ProcessEvent},
    connect::{Decoder, END_STREAM, EndStream, Error, encode},
};
use serde_json::{Value, json};

use super::*;

/// An agent that listens on a port of this machine, with its own folder and, where the machine has
/// cgroups to give, its own cgroup.
pub(crate) struct TestAgent {
    pub(crate) address: SocketAddr,
    /// Where it speaks the JSON-lines protocol.
    pub(crate) lines: SocketAddr,
    pub(crate) folder: tempfile::TempDir,
    pub(crate) cgroup: Option<PathBuf>,
    token: Option<String>,
}

static SHUT_DOWN: AtomicU32 = AtomicU32::new(0);

impl TestAgent {
    pub(crate) fn new() -> Self {
        Self::with(None, None)
    }

    pub(crate) fn with(token: Option<&str>, default_user: Option<&str>) -> Self {
        assert!(rustix::process::geteuid().is_root(), "the agent runs as root, and so do its tests");
        let folder = tempfile::Builder::new().prefix("forkd-guest-").tempdir().unwrap();
        // Users other than root must be able to pass through it.
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        fs::create_dir_all(folder.path().join("root/etc")).unwrap();
        let cgroup = make_cgroup();
        let agent = Agent::new(Config {
            default_user: default_user.map(String::from),
            token: token.map(String::from),
            cgroup: cgroup.clone(),
            run_dir: folder.path().join("run"),
            system: crate::fork::tests::system(folder.path().join("root")),
            shut_down: || _ = SHUT_DOWN.fetch_add(1, Ordering::SeqCst),
        });
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let listener = OwnedFd::from(listener);
        let for_lines = TcpListener::bind("127.0.0.1:0").unwrap();
        let lines = for_lines.local_addr().unwrap();
        let (for_lines, serving) = (OwnedFd::from(for_lines), agent.clone());
        thread::spawn(move || serving.serve_lines(&for_lines, None));
        thread::spawn(move || agent.serve(&listener));
        TestAgent { address, lines, folder, cgroup, token: token.map(String::from) }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub(crate) fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    pub(crate) fn connect_for_lines(&self) -> TcpStream {
        let stream = TcpStream::connect(self.lines).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    /// Sends a request on a connection of its own.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &[u8]) -> Response {
        let mut stream = self.connect();
        let mut head =
            format!("{method} {path} HTTP/1.1\r\nhost: guest\r\ncontent-length: {}\r\n", body.len());
        if let Some(token) = &self.token {
            head.push_str(&format!("x-access-token: {token}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str("\r\n");
        stream.write_all(head.as_bytes()).unwrap();
        // One that answers early may not read it all.
        let _ = stream.write_all(body);
        Response::read(stream)
    }

    /// A unary call.
    pub(crate) fn call(&self, path: &str, message: Value) -> Result<Value, Error> {
        self.call_with(path, &[], message)
    }

    pub(crate) fn call_with(
        &self,
        path: &str,
        headers: &[(&str, &str)],
        message: Value,
    ) -> Result<Value, Error> {
        let mut response = self.send("POST", path, headers, message.to_string().as_bytes());
        let body = response.body();
        if response.status == 200 {
            return Ok(serde_json::from_slice(&body).unwrap());
        }
        Err(serde_json::from_slice(&body).unwrap_or_else(|_| panic!("{}", String::from_utf8_lossy(&body))))
    }

    /// Makes the guest another one, for sure with other random numbers.
    pub(crate) fn become_child(&self, id: &str, more: Value) -> Result<Value, Error> {
        static FORKS: AtomicU32 = AtomicU32::new(0);
        let entropy = FORKS.fetch_add(1, Ordering::SeqCst).to_ne_bytes().repeat(8);
        let mut request = json!({
            "sandboxId": id, "hostname": id, "machineId": "0123456789abcdef".repeat(2),
            "unixNanos": "1700000000000000000", "entropy": BASE64_STANDARD.encode(entropy),
        });
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        self.call("/forkd.Agent/Become", request)
    }

    /// A server stream.
    pub(crate) fn stream(&self, path: &str, headers: &[(&str, &str)], message: Value) -> Events {
        Events(self.messages(path, headers, message))
    }

    /// A server stream of any messages.
    pub(crate) fn messages(&self, path: &str, headers: &[(&str, &str)], message: Value) -> Messages {
        let mut all = vec![("content-type", "application/connect+json")];
        all.extend_from_slice(headers);
        Messages::of(self.send("POST", path, &all, &encode(0, &message)))
    }

    pub(crate) fn start(&self, request: Value) -> Events {
        self.stream("/process.Process/Start", &[], request)
    }

    /// Runs a shell script to its end, with an empty standard input.
    pub(crate) fn sh(&self, script: &str) -> Collected {
        self.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": false})).collect()
    }
}

impl Drop for TestAgent {
    fn drop(&mut self) {
        let Some(cgroup) = &self.cgroup else { return };
        let _ = fs::write(cgroup.join("cgroup.kill"), "1");
        for _ in 0..100 {
            if remove_cgroup(cgroup).is_ok() {
                return;
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Removes a cgroup and those below it.
fn remove_cgroup(cgroup: &Path) -> io::Result<()> {
    for entry in fs::read_dir(cgroup)?.flatten().filter(|entry| entry.path().is_dir()) {
        remove_cgroup(&entry.path())?;
    }
    fs::remove_dir(cgroup)
}

/// A cgroup for one test, where the machine's version 2 hierarchy is.
fn make_cgroup() -> Option<PathBuf> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let name = format!("forkd-guest-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::SeqCst));
    let made = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        .into_iter()
        .map(Path::new)
        .filter(|root| root.join("cgroup.controllers").exists())
        .map(|root| root.join(&name))
        .find(|path| fs::create_dir(path).is_ok());
    if made.is_none() {
        // Past the harness, which swallows what passing tests print.
        let _ =
            writeln!(std::io::stderr(), "NOT RUN: killing by cgroup in the agent's tests: no cgroup v2 here");
    }
    made
}

/// The head of a response, and its body as it comes.
pub(crate) struct Response {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(String, String)>,
    reader: BufReader<TcpStream>,
    chunked: bool,
    left: usize,
}

impl Response {
    pub(crate) fn read(stream: TcpStream) -> Self {
        let mut reader = BufReader::new(stream);
        let line = read_line(&mut reader);
        let status = line.split(' ').nth(1).unwrap_or_else(|| panic!("{line:?}")).parse().unwrap();
        let mut headers = Vec::new();
        loop {
            let line = read_line(&mut reader);
            let Some((name, value)) = line.split_once(": ") else { break };
            headers.push((name.to_string(), value.to_string()));
        }
        let mut response = Response { status, headers, reader, chunked: false, left: 0 };
        response.chunked = response.header("transfer-encoding") == Some("chunked");
        response.left = response.header("content-length").map_or(0, |len| len.parse().unwrap());
        response
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// The next piece of the body; `None` at its end.
    pub(crate) fn piece(&mut self) -> Option<Vec<u8>> {
        let len = if self.chunked {
            usize::from_str_radix(&read_line(&mut self.reader), 16).ok()?
        } else {
            std::mem::take(&mut self.left).min(1 << 20)
        };
        let mut piece = vec![0; len];
        self.reader.read_exact(&mut piece).ok()?;
        if self.chunked {
            read_line(&mut self.reader);
        }
        (len > 0).then_some(piece)
    }

    pub(crate) fn body(&mut self) -> Vec<u8> {
        let mut body = Vec::new();
        if !self.chunked {
            body.resize(std::mem::take(&mut self.left), 0);
            self.reader.read_exact(&mut body).unwrap();
            return body;
        }
        while let Some(piece) = self.piece() {
            body.extend(piece);
        }
        body
    }
}

fn read_line(reader: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    reader.read_line(&mut line).unwrap();
    line.trim_end().to_string()
}

/// The messages of a stream.
pub(crate) struct Messages {
    response: Response,
    decoder: Decoder,
}

impl Messages {
    pub(crate) fn of(response: Response) -> Self {
        assert_eq!(response.status, 200);
        assert_eq!(response.header("content-type"), Some("application/connect+json"));
        Messages { response, decoder: Decoder::new() }
    }

    /// The next message, or how the stream ended.
    pub(crate) fn next(&mut self) -> Result<Value, Option<Error>> {
        loop {
            if let Some(envelope) = self.decoder.next_envelope().unwrap() {
                if envelope.flags == END_STREAM {
                    return Err(serde_json::from_slice::<EndStream>(&envelope.payload).unwrap().error);
                }
                return Ok(serde_json::from_slice(&envelope.payload).unwrap());
            }
            let piece = self.response.piece().expect("the stream broke off");
            self.decoder.push(&piece);
        }
    }
}

/// The messages of a process's stream.
pub(crate) struct Events(Messages);

impl Events {
    /// The next event, or how the stream ended.
    pub(crate) fn next(&mut self) -> Result<Event, Option<Error>> {
        let message = self.0.next()?;
        Ok(serde_json::from_value::<ProcessEvent>(message).unwrap().event)
    }

    /// The pid, from the first event.
    pub(crate) fn pid(&mut self) -> u32 {
        match self.next() {
            Ok(Event::Start { pid }) => pid,
            other => panic!("{other:?}"),
        }
    }

    /// Reads on until `wanted` was printed.
    pub(crate) fn until(&mut self, wanted: &str) -> String {
        let mut text = String::new();
        while !text.contains(wanted) {
            match self.next() {
                Ok(Event::Data(data)) => {
                    let bytes = data.stdout.or(data.stderr).or(data.pty).unwrap();
                    text.push_str(&String::from_utf8_lossy(&bytes));
                }
                Ok(_) => {}
                Err(error) => panic!("ended ({error:?}) after {text:?}"),
            }
        }
        text
    }

    pub(crate) fn collect(mut self) -> Collected {
        let mut all = Collected::default();
        loop {
            match self.next() {
                Ok(Event::Start { pid }) => all.pid = pid,
                Ok(Event::Data(data)) => {
                    assert!(all.end.is_none(), "output after the end");
                    all.stdout.extend(data.stdout.unwrap_or_default());
                    all.stderr.extend(data.stderr.unwrap_or_default());
                    all.pty.extend(data.pty.unwrap_or_default());
                }
                Ok(Event::Keepalive {}) => all.keepalives += 1,
                Ok(Event::End(end)) => all.end = Some(end),
                Err(error) => {
                    all.error = error;
                    return all;
                }
            }
        }
    }
}

/// All that a stream gave.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pub(crate) pid: u32,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) pty: Vec<u8>,
    pub(crate) keepalives: u32,
    pub(crate) end: Option<End>,
    pub(crate) error: Option<Error>,
}

impl Collected {
    pub(crate) fn out(&self) -> String {
        String::from_utf8(self.stdout.clone()).unwrap()
    }

    pub(crate) fn code(&self) -> i32 {
        self.end.as_ref().unwrap_or_else(|| panic!("{self:?}")).exit_code
    }

    /// Why the stream failed.
    pub(crate) fn failure(self) -> Error {
        self.error.unwrap_or_else(|| {
            panic!("it did not fail: {:?} {:?}", self.end, String::from_utf8_lossy(&self.stderr))
        })
    }
}

/// The header that makes a call act as `user`.
pub(crate) fn basic(user: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:")))
}

/// Waits until `done`, and fails if that takes too long.
pub(crate) fn eventually(what: &str, done: impl Fn() -> bool) {
    for _ in 0..3000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("{what} did not happen");
}

#[test]
fn a_ping_tells_what_the_guest_is() {
    let pong = TestAgent::new().call("/forkd.Agent/Ping", json!({})).unwrap();
    assert_eq!(pong["version"], env!("CARGO_PKG_VERSION"));
    assert!(pong["uptimeMs"].as_u64().unwrap() > 0);
    assert_eq!(pong["warm"]["state"], "cold");
}

#[test]
fn nobody_gets_in_without_the_token_and_everybody_may_ask_for_health() {
    let agent = TestAgent::with(Some("right"), None);
    assert!(agent.call("/forkd.Agent/Ping", json!({})).is_ok());
    let stranger = |path: &str, token: &str| {
        let mut stream = agent.connect();
        let request = format!("POST {path} HTTP/1.1\r\ncontent-length: 0\r\nx-access-token: {token}\r\n\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        Response::read(stream).status
    };
    for token in ["", "wrong", "righ", "rightt", "Right"] {
        for path in ["/forkd.Agent/Ping", "/files?path=/etc/passwd", "/process.Process/Start", "/nonsense"] {
            assert_eq!(stranger(path, token), 401, "{path} {token}");
        }
        assert_eq!(stranger("/health", token), 204);
    }
    assert_eq!(stranger("/forkd.Agent/Ping", "right"), 200);
}

#[test]
fn the_daemon_names_the_default_user_of_a_request_and_an_image_need_not_have_it() {
    let agent = TestAgent::with(None, Some("daemon"));
    let id = |headers: &[(&str, &str)]| {
        let request = json!({"process": {"cmd": "id", "args": ["-un"]}, "stdin": false});
        agent.stream("/process.Process/Start", headers, request).collect().out()
    };
    assert_eq!(id(&[]), "daemon\n");
    assert_eq!(id(&[(DEFAULT_USER_HEADER, "nobody")]), "nobody\n");
    assert_eq!(id(&[(DEFAULT_USER_HEADER, "no-such-user")]), "daemon\n");
    assert_eq!(id(&[(DEFAULT_USER_HEADER, "nobody"), ("authorization", &*basic("root"))]), "root\n");
    let entry = |headers: &[(&str, &str)]| {
        agent.call_with("/filesystem.Filesystem/Stat", headers, json!({"path": ""})).unwrap()["entry"].clone()
    };
    assert_eq!(entry(&[(DEFAULT_USER_HEADER, "root")])["path"], "/root");
    let secret = agent.path("secret");
    fs::write(&secret, "x").unwrap();
    fs::set_permissions(&secret, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let get = |query: &str, user: &str| {
        let url = format!("/files?path={}{query}", secret.display());
        agent.send("GET", &url, &[(DEFAULT_USER_HEADER, user)], b"").status
    };
    assert_eq!((get("", "root"), get("", "nobody"), get("&username=root", "nobody")), (200, 403, 200));
}

#[test]
fn a_client_of_files_without_the_token_gets_the_error_of_files() {
    let agent = TestAgent::with(Some("right"), None);
    let mut stream = agent.connect();
    stream.write_all(b"GET /files?path=/etc/passwd HTTP/1.1\r\n\r\n").unwrap();
    let mut response = Response::read(stream);
    let body: Value = serde_json::from_slice(&response.body()).unwrap();
    assert_eq!((response.status, &body["code"]), (401, &json!(401)));
}

#[test]
fn what_does_not_exist_is_said_to_clients_in_their_own_terms() {
    let agent = TestAgent::new();
    for path in ["/process.Process/Fly", "/nothing.Here/Ping", "/filesystem.Filesystem/"] {
        assert_eq!(agent.call(path, json!({})).unwrap_err().code, Code::Unimplemented, "{path}");
    }
    assert_eq!(agent.call("/nothing", json!({})).unwrap_err().code, Code::NotFound);
    let mut refused = agent.send("GET", "/forkd.Agent/Ping", &[], b"");
    let body: Value = serde_json::from_slice(&refused.body()).unwrap();
    assert_eq!((refused.status, &body["code"]), (405, &json!("unimplemented")));
    let garbage = agent.send("POST", "/forkd.Agent/Eval", &[], b"{\"code\":").body();
    assert!(String::from_utf8_lossy(&garbage).contains("invalid_argument"));
}

#[test]
fn a_shutdown_is_answered_before_it_happens() {
    let before = SHUT_DOWN.load(Ordering::SeqCst);
    assert_eq!(TestAgent::new().call("/forkd.Agent/Shutdown", json!({})).unwrap(), json!({}));
    eventually("the shutdown", || SHUT_DOWN.load(Ordering::SeqCst) > before);
}

#[test]
fn a_warm_up_is_ready_when_its_command_and_its_imports_are_done() {
    let agent = TestAgent::new();
    let marker = agent.path("warmed");
    let request = json!({
        "command": ["sh", "-c", format!("echo done > {}", marker.display())],
        "python": "import json\nwarmed = 41",
    });
    assert_eq!(agent.call("/forkd.Agent/Warm", request).unwrap()["state"], "warming");
    let state = || agent.call("/forkd.Agent/Ping", json!({})).unwrap()["warm"]["state"].clone();
    eventually("ready", || state() == "ready");
    assert!(marker.exists());
    let response = agent.call("/forkd.Agent/Eval", json!({"code": "warmed + 1"})).unwrap();
    assert_eq!(response["result"], "42");
    // A repeated request only returns the progress.
    let again = agent.call("/forkd.Agent/Warm", json!({"command": ["false"]})).unwrap();
    assert_eq!(again["state"], "ready");
}

#[test]
fn a_warm_up_that_goes_on_is_ready_when_it_says_so() {
    let agent = TestAgent::with(None, Some("nobody"));
    let go = agent.path("go");
    let script = format!(
        "while [ ! -e {} ]; do sleep 0.02; done; touch \"$FORKD_READY_FILE\"; sleep 1000",
        go.display()
    );
    agent.call("/forkd.Agent/Warm", json!({"command": ["sh", "-c", script]})).unwrap();
    let state = || agent.call("/forkd.Agent/Warm", json!({})).unwrap()["state"].clone();
    thread::sleep(Duration::from_millis(200));
    assert_eq!(state(), "warming");
    fs::write(go, "").unwrap();
    eventually("ready", || state() == "ready");
    let list = agent.call("/process.Process/List", json!({})).unwrap();
    assert_eq!(list["processes"].as_array().unwrap().len(), 1, "it goes on running");
}

#[test]
fn a_command_of_a_guest_in_use_may_be_ready_before_it_is_warm() {
    let agent = TestAgent::new();
    let script = "[ \"$FORKD_READY_WHEN\" = usable ] || exit 3; touch \"$FORKD_READY_FILE\"; exec sleep 1000";
    let request = json!({"command": ["sh", "-c", script], "python": "1 / 0", "untilUsable": true});
    agent.call("/forkd.Agent/Warm", request).unwrap();
    let warm = || agent.call("/forkd.Agent/Ping", json!({})).unwrap()["warm"].clone();
    eventually("ready", || warm()["state"] != "warming");
    assert_eq!(warm()["state"], "ready", "{}: nothing is imported", warm());
}

#[test]
fn a_failed_warm_up_says_why() {
    for (request, expected) in [
        (json!({"command": ["sh", "-c", "echo no disk >&2; exit 3"]}), "no disk"),
        (json!({"command": ["no-such-program"]}), "not found in this image"),
        (json!({"python": "import no_such_module"}), "ModuleNotFoundError"),
    ] {
        let agent = TestAgent::new();
        agent.call("/forkd.Agent/Warm", request).unwrap();
        let warm = || agent.call("/forkd.Agent/Ping", json!({})).unwrap()["warm"].clone();
        eventually("the failure", || warm()["state"] == "failed");
        assert!(warm()["error"].as_str().unwrap().contains(expected), "{}", warm());
    }
}
