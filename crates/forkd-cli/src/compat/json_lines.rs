//! The client of the JSON-lines protocol: sends one question to an agent port and reads the answer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// The time limit of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The time limit of a reply, in addition to the request's own.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The limit of a reply's length.
const MAX_ANSWER: u64 = 128 << 20;

/// A request, and its own time limit.
#[derive(Debug)]
pub(crate) struct LineRequest {
    line: Value,
    limit: Duration,
}

/// A check whether the agent answers.
pub(crate) fn ping_request() -> LineRequest {
    LineRequest { line: json!({ "action": "ping" }), limit: Duration::ZERO }
}

/// A command to run.
pub(crate) fn exec_request(args: &[String], secs: u64) -> LineRequest {
    let line = json!({ "action": "exec", "args": args, "timeout": secs });
    LineRequest { line, limit: Duration::from_secs(secs) }
}

/// Python to evaluate.
pub(crate) fn eval_request(code: &str, secs: u64) -> LineRequest {
    let line = json!({ "action": "eval", "code": code, "timeout": secs });
    LineRequest { line, limit: Duration::from_secs(secs) }
}

/// Sends a request to the agent port at `target` and reads the reply.
pub(crate) fn ask(target: &str, question: &LineRequest) -> Result<Value> {
    let address = target.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let address = address.with_context(|| {
        format!("`{target}` is not an address; give HOST:PORT, such as 127.0.0.1:40123 or [::1]:8888")
    })?;
    let lost = || format!("no answer from {target}; `forkd ls` shows whether its sandbox runs");
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_TIMEOUT).with_context(lost)?;
    stream.set_read_timeout(Some(question.limit.saturating_add(ANSWER_TIMEOUT))).with_context(lost)?;
    stream.write_all(format!("{}\n", question.line).as_bytes()).with_context(lost)?;
    stream.shutdown(Shutdown::Write).with_context(lost)?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).with_context(lost)?;
    ensure!(!answer.is_empty(), "{target} closed the connection without an answer");
    match serde_json::from_slice(&answer) {
        Ok(Value::Object(answer)) => Ok(Value::Object(answer)),
        _ => bail!("{target} does not use the JSON-lines protocol"),
    }
}
