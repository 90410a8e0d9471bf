//! The JSON-lines protocol: one JSON object and a newline in, one out, then the connection is closed.
//!
//! Clients of the reference use it to talk to a guest, so its words are theirs. The agent serves it in the
//! guest, the daemon on a loopback port and over HTTP; all three use this module. There are three actions:
//!
//! ```text
//! {"action": "ping"}                                   {"pong": true, "numpy_version": null, "pid": 1, …}
//! {"action": "exec", "args": ["ls"], "timeout": 30}    {"stdout": "…", "stderr": "…", "exit_code": 0}
//! {"action": "eval", "code": "6 * 7"}                  {"result": "42", "exit_code": 0}
//! ```
//!
//! Whatever goes wrong is `error`, with an `exit_code` that is not 0. Clients check whether a key is present:
//! a key without a value is left out.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The TCP port in the guest.
pub const LINE_PORT: u16 = 8888;
/// The longest request.
pub const MAX_LINE: usize = 1 << 20;
/// The default time limit of a command or an evaluation.
const DEFAULT_TIME: Duration = Duration::from_secs(30);
/// The longest it can ask for: 30 days.
const MAX_SECS: f64 = 30.0 * 24.0 * 3600.0;

/// A request.
#[derive(Debug, Clone, PartialEq)]
pub enum Request {
    /// Whether the agent is there.
    Ping,
    /// Run a command to its end.
    Exec {
        /// Program and arguments; at least the program.
        args: Vec<String>,
        /// After this it is killed.
        timeout: Duration,
    },
    /// Evaluate Python.
    Eval {
        /// The code.
        code: String,
        /// After this it is interrupted.
        timeout: Duration,
    },
}

impl Request {
    /// Reads a request. Unknown keys are ignored, an unknown action is an error.
    pub fn parse(line: &[u8]) -> Result<Request, Failure> {
        let object = match serde_json::from_slice::<Value>(line) {
            Ok(Value::Object(object)) => object,
            Ok(_) => return Err(Failure::new("a request is one JSON object on one line")),
            Err(error) => {
                return Err(Failure::new(format!("a request is one JSON object on one line: {error}")));
            }
        };
        let timeout = || match object.get("timeout") {
            None | Some(Value::Null) => Ok(DEFAULT_TIME),
            Some(value) => match value.as_f64() {
                Some(secs) if secs > 0.0 && secs <= MAX_SECS => Ok(Duration::from_secs_f64(secs)),
                _ => Err(Failure::new(format!(
                    "timeout is a number of seconds, above 0 and at most {MAX_SECS}"
                ))),
            },
        };
        match object.get("action").and_then(Value::as_str) {
            Some("ping") => Ok(Request::Ping),
            Some("exec") => {
                let args = object.get("args").and_then(Value::as_array).filter(|args| !args.is_empty());
                let args =
                    args.and_then(|args| args.iter().map(|arg| Some(arg.as_str()?.to_owned())).collect());
                let args = args.ok_or_else(|| {
                    Failure::new("args is a list of strings, the program first: [\"ls\", \"-l\"]")
                })?;
                Ok(Request::Exec { args, timeout: timeout()? })
            }
            Some("eval") => {
                let code = object.get("code").and_then(Value::as_str);
                let code = code.ok_or_else(|| Failure::new("code is a string"))?.to_owned();
                Ok(Request::Eval { code, timeout: timeout()? })
            }
            other => {
                let what = other
                    .map_or_else(|| "there is no action".into(), |name| format!("unknown action {name:?}"));
                Err(Failure::new(format!("{what}; there are ping, exec and eval")))
            }
        }
    }
}

/// The line of a request while it comes in.
#[derive(Debug, Default)]
pub struct Incoming(Vec<u8>);

impl Incoming {
    /// Takes the next bytes; `true` when the line is complete. Refuses at once a first line that is no request: a web page
    /// can make a browser send an HTTP request whose body is such a line.
    pub fn push(&mut self, bytes: &[u8]) -> Result<bool, Failure> {
        let (line, complete) = match bytes.iter().position(|byte| *byte == b'\n') {
            Some(end) => (&bytes[..end], true),
            None => (bytes, false),
        };
        if self.0.len() + line.len() > MAX_LINE {
            return Err(Failure::new(format!("the request is longer than {MAX_LINE} bytes")));
        }
        self.0.extend_from_slice(line);
        match self.0.trim_ascii_start().first() {
            Some(b'{') => Ok(complete),
            None if !complete => Ok(false),
            _ => Err(Failure::new("a request is one JSON object on one line; this is not HTTP")),
        }
    }

    /// The request, once its line is complete or the connection is at its end.
    pub fn request(&self) -> Result<Request, Failure> {
        Request::parse(&self.0)
    }

    /// The line as it came, without its end.
    pub fn line(&self) -> &[u8] {
        &self.0
    }
}

/// A reply.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Reply {
    /// To `ping`.
    Pong(Pong),
    /// To `exec`, when the command was started.
    Exec(Ran),
    /// To `eval`, when it went well.
    Eval(Evaluated),
    /// To anything that did not.
    Failed(Failure),
}

impl Reply {
    /// The line that is sent.
    pub fn to_line(&self) -> Vec<u8> {
        // Plain data: it always serialises.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

impl From<Result<Reply, Failure>> for Reply {
    fn from(result: Result<Reply, Failure>) -> Self {
        result.unwrap_or_else(Reply::Failed)
    }
}

/// A sign of life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pong {
    /// True.
    pub pong: bool,
    /// The version of the numpy that the warm-up imported; null if it did not.
    pub numpy_version: Option<String>,
    /// The agent's process: always 1.
    pub pid: u32,
    /// What `eval` evaluates: `python`, or `none` in an image without.
    pub agent_lang: String,
    /// Whether the warm-up is done.
    pub warmup_ready: bool,
}

/// How a command ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ran {
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are replaced.
    pub stderr: String,
    /// Its status; 128 and the number of the signal that ended it; 1 when its time ran out.
    pub exit_code: i32,
    /// Set if its time ran out. The output is complete up to then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether there was more standard output than is kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stdout_truncated: bool,
    /// Whether there was more standard error than is kept.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stderr_truncated: bool,
}

/// What an evaluation gave.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evaluated {
    /// `repr` of the value; null for statements and for `None`.
    pub result: Option<String>,
    /// 0.
    pub exit_code: i32,
    /// Its standard output.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stdout: String,
    /// Its standard error.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr: String,
}

/// Why something did not happen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What happened and what to do.
    pub error: String,
    /// Never 0.
    pub exit_code: i32,
    /// Where in the evaluated code.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub traceback: Option<String>,
    /// Its standard output until then.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stdout: String,
    /// Its standard error until then.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub stderr: String,
}

impl Failure {
    /// With the status 1.
    pub fn new(error: impl Into<String>) -> Self {
        Failure { error: error.into(), exit_code: 1, ..Failure::default() }
    }
}

/// Fuzz body: any bytes in any pieces end in a request or a reason, never in a panic.
pub fn fuzz_line(data: &[u8]) {
    let mut incoming = Incoming::default();
    for piece in data.chunks(7) {
        match incoming.push(piece) {
            Ok(false) => assert!(incoming.line().len() <= MAX_LINE),
            Ok(true) => break,
            Err(_) => return,
        }
    }
    let _ = incoming.request();
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Request, String> {
        Request::parse(line.as_bytes()).map_err(|failure| failure.error)
    }

    #[test]
    fn requests_of_the_published_client_are_understood() {
        let exec = read(r#"{"action": "exec", "args": ["/bin/sh", "-c", "echo hi"], "timeout": 5}"#).unwrap();
        let args = ["/bin/sh", "-c", "echo hi"].map(String::from).to_vec();
        assert_eq!(exec, Request::Exec { args, timeout: Duration::from_secs(5) });
        let eval = read(r#"{"action": "eval", "code": "1+1", "unheard_of": {}}"#).unwrap();
        assert_eq!(eval, Request::Eval { code: "1+1".into(), timeout: DEFAULT_TIME });
        assert_eq!(read(r#"{"action": "ping"}"#).unwrap(), Request::Ping);
        let short = read(r#"{"action": "exec", "args": ["x"], "timeout": 0.5}"#).unwrap();
        assert!(matches!(short, Request::Exec { timeout, .. } if timeout == Duration::from_millis(500)));
    }

    #[test]
    fn what_is_no_request_gets_a_reason_and_the_status_1() {
        for (line, why) in [
            ("", "one JSON object"),
            ("[]", "one JSON object"),
            ("{}", "no action"),
            (r#"{"action": "format"}"#, "unknown action \"format\""),
            (r#"{"action": 7}"#, "no action"),
            (r#"{"action": "exec"}"#, "args"),
            (r#"{"action": "exec", "args": []}"#, "args"),
            (r#"{"action": "exec", "args": ["ls", 7]}"#, "args"),
            (r#"{"action": "exec", "args": "ls"}"#, "args"),
            (r#"{"action": "exec", "args": ["ls"], "timeout": 0}"#, "timeout"),
            (r#"{"action": "exec", "args": ["ls"], "timeout": -1}"#, "timeout"),
            (r#"{"action": "exec", "args": ["ls"], "timeout": 1e300}"#, "timeout"),
            (r#"{"action": "exec", "args": ["ls"], "timeout": "5"}"#, "timeout"),
            (r#"{"action": "eval"}"#, "code"),
        ] {
            let failure = Request::parse(line.as_bytes()).unwrap_err();
            assert!(failure.error.contains(why), "{line}: {}", failure.error);
            assert_eq!(failure.exit_code, 1, "{line}");
        }
    }

    #[test]
    fn a_line_comes_in_pieces_and_ends_with_its_newline() {
        let mut incoming = Incoming::default();
        for piece in ["  ", "{\"action\"", ": \"pi"] {
            assert!(!incoming.push(piece.as_bytes()).unwrap());
        }
        assert!(incoming.push(b"ng\"}\n{\"action\": \"exec\"").unwrap());
        assert_eq!(incoming.request().unwrap(), Request::Ping);
    }

    #[test]
    fn http_and_lines_without_end_are_refused_before_they_are_complete() {
        for begin in ["P", "GET / HTTP/1.1\r\n", "\n{\"action\": \"ping\"}\n", "[", "\u{0}"] {
            assert!(Incoming::default().push(begin.as_bytes()).is_err(), "{begin:?}");
        }
        let mut endless = Incoming::default();
        assert!(!endless.push(b"{").unwrap());
        let piece = vec![b' '; 64 << 10];
        let refused = (0..100).find(|_| endless.push(&piece).is_err()).unwrap();
        assert_eq!(refused, MAX_LINE / piece.len() - 1);
    }

    #[test]
    fn the_fuzz_body_holds_on_its_corpus() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/json_lines");
        let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty());
        inputs.iter().for_each(|path| fuzz_line(&std::fs::read(path).unwrap()));
    }

    #[test]
    fn keys_that_have_nothing_to_say_are_left_out() {
        let line = |reply: Reply| String::from_utf8(reply.to_line()).unwrap();
        let ran = Ran { stdout: "hi\n".into(), ..Ran::default() };
        assert_eq!(line(Reply::Exec(ran)), "{\"stdout\":\"hi\\n\",\"stderr\":\"\",\"exit_code\":0}\n");
        let value = Evaluated { result: Some("42".into()), ..Evaluated::default() };
        assert_eq!(line(Reply::Eval(value)), "{\"result\":\"42\",\"exit_code\":0}\n");
        assert_eq!(line(Reply::Failed(Failure::new("no"))), "{\"error\":\"no\",\"exit_code\":1}\n");
    }
}
