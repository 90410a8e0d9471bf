//! A daemon with scripted replies that records the requests.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::{Arc, Mutex};

use serde_json::Value;

/// A request: `METHOD /path`, and the body.
type Asked = (String, Value);

/// A daemon on a unix socket of its own, in a data directory of its own.
pub(crate) struct FakeDaemon {
    folder: tempfile::TempDir,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl FakeDaemon {
    /// Answers every request with what `answer` gives for it: a status and a body.
    pub(crate) fn start(answer: impl Fn(&str) -> (u16, Value) + Send + Sync + 'static) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(socket(folder.path())).unwrap();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (kept, answer) = (asked.clone(), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (kept, answer) = (kept.clone(), answer.clone());
                std::thread::spawn(move || converse(stream.unwrap(), &kept, &*answer));
            }
        });
        FakeDaemon { folder, asked }
    }

    /// The `forkd` command, to be run against this daemon.
    pub(crate) fn forkd(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkd"));
        command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.env("FORKD_URL", format!("unix:{}", socket(self.folder.path()).display()));
        command.env("FORKD_DATA_DIR", self.folder.path()).env_remove("FORKD_TARGET");
        command
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> std::path::PathBuf {
        socket(self.folder.path())
    }

    /// The data directory of the commands.
    pub(crate) fn data(&self) -> &Path {
        self.folder.path()
    }

    /// Runs the command to its end.
    pub(crate) fn run(&self, args: &[&str]) -> Said {
        Said::from(self.forkd(args).output().unwrap())
    }

    /// Everything asked until now.
    pub(crate) fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    /// The same, without bodies.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.asked().into_iter().map(|(line, _)| line).collect()
    }
}

fn socket(folder: &Path) -> std::path::PathBuf {
    folder.join("fake.sock")
}

/// One request, one answer, and good-bye.
fn converse(mut stream: UnixStream, kept: &Mutex<Vec<Asked>>, answer: &dyn Fn(&str) -> (u16, Value)) {
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") {
        stream.read_exact(&mut byte).unwrap();
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).unwrap();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |length| length.parse().unwrap())];
    stream.read_exact(&mut body).unwrap();
    let mut words = head.split(' ');
    let line = format!("{} {}", words.next().unwrap(), words.next().unwrap());
    // Remembered first: an answer may take its time.
    kept.lock().unwrap().push((line.clone(), serde_json::from_slice(&body).unwrap_or(Value::Null)));
    let (status, value) = answer(&line);
    let body = if value.is_null() { String::new() } else { value.to_string() };
    let length = body.len();
    // The client may have left already.
    let _ =
        write!(stream, "HTTP/1.1 {status} X\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{body}");
}

/// The output and the exit status of a command.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: Option<i32>,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Said {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }
}

impl From<Output> for Said {
    fn from(output: Output) -> Self {
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Said { status: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}
