//! The client of the JSON-lines protocol: sends one question to an agent port and reads the answer.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How much longer than what was asked for an answer may take.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest answer.
const MAX_ANSWER: u64 = 128 << 20;

/// A question, and how long its answer may take.
#[derive(Debug)]
pub(crate) struct LineRequest {
    line: Value,
    limit: Duration,
}

/// Whether somebody is there.
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

/// Asks whoever speaks the protocol at `target`.
pub(crate) fn ask(target: &str, question: &LineRequest) -> Result<Value> {
    let address = target.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let address = address.with_context(|| {
        format!("`{target}` is no address; give HOST:PORT, such as 127.0.0.1:40123 or [::1]:8888")
    })?;
    let lost = || format!("no answer from {target}; `forkd ls` tells whether its sandbox runs");
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
