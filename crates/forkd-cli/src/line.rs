//! The line protocol from this side: asking somebody who speaks it, and a port of loopback that passes lines
//! on to the daemon.
//!
//! A [`Relay`] is how clients of the reference reach a sandbox wherever the daemon is: in the emulated
//! machine only the daemon's own port can be reached. What needs the daemon's token outside needs none on
//! the relay's port, so there is one only as long as a command runs that was asked for it.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use forkd_protocol::line::{Failure, Incoming, Reply};
use hyper::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;

use crate::api;
use crate::client::Daemon;

/// How long connecting may take.
const CONNECT_LIMIT: Duration = Duration::from_secs(5);
/// How much longer than what was asked for an answer may take.
const ANSWER_LIMIT: Duration = Duration::from_secs(10);
/// The longest answer.
const MAX_ANSWER: u64 = 128 << 20;
/// How long a line may take to come to a relay.
const LINE_LIMIT: Duration = Duration::from_secs(30);
/// How long what nobody asked for is read on, so that the peer sees the answer and not a reset.
const DISCARD_LIMIT: Duration = Duration::from_secs(1);
/// Connections at a time, to one relay.
const MAX_CONNECTIONS: usize = 64;

/// A question, and how long its answer may take.
#[derive(Debug)]
pub(crate) struct Question {
    line: Value,
    limit: Duration,
}

/// Whether somebody is there.
pub(crate) fn ping_request() -> Question {
    Question { line: json!({ "action": "ping" }), limit: Duration::ZERO }
}

/// A command to run.
pub(crate) fn exec_request(args: &[String], secs: u64) -> Question {
    let line = json!({ "action": "exec", "args": args, "timeout": secs });
    Question { line, limit: Duration::from_secs(secs) }
}

/// Python to evaluate.
pub(crate) fn eval_request(code: &str, secs: u64) -> Question {
    let line = json!({ "action": "eval", "code": code, "timeout": secs });
    Question { line, limit: Duration::from_secs(secs) }
}

/// Asks whoever speaks the protocol at `target`.
pub(crate) fn ask(target: &str, question: &Question) -> Result<Value> {
    let address = target.to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    let address = address.with_context(|| {
        format!("`{target}` is no address; give HOST:PORT, such as 127.0.0.1:40123 or [::1]:8888")
    })?;
    let lost = || format!("no answer from {target}; `forkd ls` tells whether its sandbox runs");
    let mut stream = TcpStream::connect_timeout(&address, CONNECT_LIMIT).with_context(lost)?;
    stream.set_read_timeout(Some(question.limit.saturating_add(ANSWER_LIMIT))).with_context(lost)?;
    stream.write_all(format!("{}\n", question.line).as_bytes()).with_context(lost)?;
    stream.shutdown(Shutdown::Write).with_context(lost)?;
    let mut answer = Vec::new();
    stream.take(MAX_ANSWER).read_to_end(&mut answer).with_context(lost)?;
    ensure!(!answer.is_empty(), "{target} closed the connection without an answer");
    match serde_json::from_slice(&answer) {
        Ok(Value::Object(answer)) => Ok(Value::Object(answer)),
        _ => bail!("{target} does not speak the line protocol"),
    }
}

/// A port of loopback whose lines go to a sandbox of the daemon's. Served until the process ends.
#[derive(Debug)]
pub(crate) struct Relay {
    target: SocketAddr,
    server: JoinHandle<()>,
}

impl Relay {
    /// Takes a port of loopback: the one that is wanted, or any.
    pub(crate) async fn bind(wanted: Option<SocketAddr>) -> Result<TcpListener> {
        let address = wanted.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, 0).into());
        ensure!(
            address.ip().is_loopback(),
            "{address} is not on loopback: the line protocol has no token, so it is not served to others"
        );
        let bound = TcpListener::bind(address).await;
        bound.with_context(|| format!("cannot listen on {address}; choose another port, or none"))
    }

    /// Serves a port that was taken. Whoever has connected to it already is served, too.
    pub(crate) fn serve(listener: TcpListener, daemon: Daemon, id: &str) -> Result<Self> {
        let target = listener.local_addr()?;
        let path = format!("{}/line", api::sandbox_path(id));
        Ok(Relay { target, server: tokio::spawn(serve(listener, daemon, path)) })
    }

    /// Where it listens.
    pub(crate) fn target(&self) -> SocketAddr {
        self.target
    }

    /// Returns when it does not any more, which is never.
    pub(crate) async fn ended(self) {
        let _ = self.server.await;
    }
}

async fn serve(listener: TcpListener, daemon: Daemon, path: String) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(place) = room.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (daemon, path) = (daemon.clone(), path.clone());
        tokio::spawn(async move {
            // A peer that left needs no answer.
            let _ = pass_on(stream, &daemon, &path).await;
            drop(place);
        });
    }
}

/// One line to the daemon, its answer back.
async fn pass_on(mut stream: tokio::net::TcpStream, daemon: &Daemon, path: &str) -> std::io::Result<()> {
    let line = tokio::time::timeout(LINE_LIMIT, read_line(&mut stream)).await??;
    let answer = match line {
        Ok(line) => daemon.ask(Method::POST, path, Some(&line)).await.map_err(|error| format!("{error:#}")),
        Err(failure) => Err(failure.error),
    };
    let mut answer = match answer {
        Ok(answer) => answer.to_string().into_bytes(),
        Err(error) => Reply::Failed(Failure::new(error)).to_line(),
    };
    if !answer.ends_with(b"\n") {
        answer.push(b'\n');
    }
    stream.write_all(&answer).await?;
    stream.shutdown().await?;
    let mut rest = [0; 4 << 10];
    let discard = async { while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {} };
    let _ = tokio::time::timeout(DISCARD_LIMIT, discard).await;
    Ok(())
}

/// The line as JSON: what is none is refused here, HTTP at its first byte.
async fn read_line(stream: &mut tokio::net::TcpStream) -> std::io::Result<Result<Value, Failure>> {
    let mut incoming = Incoming::default();
    let mut piece = [0; 8 << 10];
    loop {
        let n = stream.read(&mut piece).await?;
        match incoming.push(&piece[..n]) {
            Ok(complete) if complete || n == 0 => break,
            Ok(_) => {}
            Err(failure) => return Ok(Err(failure)),
        }
    }
    Ok(serde_json::from_slice(incoming.line())
        .map_err(|error| Failure::new(format!("a request is one JSON object on one line: {error}"))))
}
