//! Agent ports: loopback ports that pass lines of the JSON-lines protocol on to the daemon.
//!
//! With them, clients of the reference reach a sandbox wherever the daemon is: of the emulated machine, only
//! the daemon's own port is reachable. An agent port needs no token, so only the user whose process serves
//! it may use it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read};
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail, ensure};
use forkd_protocol::json_lines::{Failure, Incoming, Reply};
use hyper::Method;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use crate::client::Daemon;
use crate::client::types;
use crate::commands::Context;
use crate::host::paths::{Binaries, DataDir};
use crate::host::process;
use crate::machine::Machine;
use crate::settings;

/// The time in which a request line must arrive.
const LINE_TIMEOUT: Duration = Duration::from_secs(30);
/// How long surplus input is read and dropped, so that the peer sees the reply and not a reset.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(1);
/// The time in which a detached process must serve its ports.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// The limit of concurrent connections to one port.
const MAX_CONNECTIONS: usize = 64;
/// The prefix of a printed address.
pub(crate) const PREFIX: &str = "FORKD_TARGET=";

/// A loopback port whose requests go to a sandbox of the daemon.
#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) id: String,
    pub(crate) target: SocketAddr,
    server: AbortHandle,
}

impl Relay {
    /// Binds a loopback port: the wanted one, or a free one.
    pub(crate) async fn bind(wanted: Option<SocketAddr>) -> Result<TcpListener> {
        let address = wanted.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, 0).into());
        ensure!(
            address.ip().is_loopback(),
            "{address} is not on loopback: the JSON-lines protocol has no token, so no other host may reach it"
        );
        let bound = TcpListener::bind(address).await;
        bound.with_context(|| format!("cannot listen on {address}; choose another port, or none"))
    }

    /// Serves a bound port until this process ends or the relay is closed. Clients that have already connected
    /// are served as well.
    pub(crate) fn serve(listener: TcpListener, daemon: VerifiedDaemon, id: &str) -> Result<Relay> {
        let target = listener.local_addr()?;
        let path = types::json_lines_path(id);
        let server = tokio::spawn(serve(listener, daemon, path)).abort_handle();
        Ok(Relay { id: id.to_owned(), target, server })
    }

    /// Closes the port. Open requests are still answered.
    pub(crate) fn close(self) {
        self.server.abort();
    }

    /// Starts another process that serves a port for each sandbox while it runs. Returns the addresses.
    pub(crate) fn spawn_detached(
        data: &DataDir,
        daemon: &Daemon,
        ids: &[&str],
    ) -> Result<BTreeMap<String, String>> {
        let mut command = Command::new(Binaries::find()?.forkd);
        command.arg("--data-dir").arg(data.root()).args(["--quiet", "agent-port", "--json"]).args(ids);
        if let Some(file) = settings::path() {
            command.arg("--config").arg(std::path::absolute(file)?);
        }
        // Other users can read the command line, but not the environment.
        command.env("FORKD_URL", daemon.url());
        if let Some(token) = &daemon.token {
            command.env("FORKD_TOKEN", token);
        }
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut relay = process::detach(&mut command).spawn().context("cannot start a process for them")?;
        let (tell, told) = std::sync::mpsc::channel();
        let output = relay.stdout.take();
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = output.map(|output| BufReader::new(output).read_line(&mut line));
            let _ = tell.send(read.map(|_| line));
        });
        let line = told.recv_timeout(START_TIMEOUT).ok().flatten().unwrap_or_default();
        if let Ok(targets) = serde_json::from_str::<Vec<AgentPort>>(&line) {
            return Ok(targets.into_iter().map(|it| (it.id, it.target)).collect());
        }
        let _ = relay.kill();
        let mut why = String::new();
        if let Some(mut stderr) = relay.stderr.take() {
            let _ = stderr.read_to_string(&mut why);
        }
        bail!(
            "{}",
            if why.is_empty() {
                "the process that serves the ports did not start in time"
            } else {
                why.trim()
            }
        )
    }
}

/// A port, as `--json` prints it.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct AgentPort {
    pub(crate) id: String,
    pub(crate) target: String,
}

/// A daemon that receives requests only while its identity is certain. After the machine's end another
/// process may listen on its port, and must not receive the token.
#[derive(Clone)]
pub(crate) struct VerifiedDaemon {
    daemon: Daemon,
    machine: Option<Arc<Machine>>,
}

impl VerifiedDaemon {
    pub(crate) fn new(context: &Context, daemon: Daemon) -> Self {
        let machine = Arc::new(Machine::new(&context.data, context.ui));
        let port = daemon.port();
        VerifiedDaemon { machine: Some(machine).filter(|it| port.is_some() && port_of(it) == port), daemon }
    }

    /// The daemon, if it is still the same one.
    pub(crate) fn daemon(&self) -> Result<&Daemon> {
        match &self.machine {
            Some(machine) if port_of(machine) != self.daemon.port() => bail!("the machine is not running"),
            _ => Ok(&self.daemon),
        }
    }
}

/// The port of the daemon in a running machine.
fn port_of(machine: &Machine) -> Option<u16> {
    machine.running().ok().flatten().map(|running| running.state.rest_port)
}

async fn serve(listener: TcpListener, daemon: VerifiedDaemon, path: String) {
    let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    while let Ok(place) = room.clone().acquire_owned().await {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        };
        let (daemon, path) = (daemon.clone(), path.clone());
        tokio::spawn(async move {
            // A peer that left needs no reply.
            let _ = pass_on(stream, &daemon, &path).await;
            drop(place);
        });
    }
}

/// Whether the peer may use this port: this process's user, the user that ran it with sudo, and root may.
async fn admit(stream: &TcpStream) -> std::io::Result<Result<(), Failure>> {
    let peer = stream.as_fd().try_clone_to_owned()?;
    let user = tokio::task::spawn_blocking(move || forkd_net::connected_user(peer)).await??;
    let us = rustix::process::geteuid().as_raw();
    let by_sudo = std::env::var("SUDO_UID").ok().filter(|_| us == 0).and_then(|uid| uid.parse().ok());
    Ok(match user {
        Some(uid) if uid == 0 || uid == us || Some(uid) == by_sudo => Ok(()),
        Some(uid) => Err(Failure::new(format!(
            "this port is for user {us}, not for user {uid}; open your own with `forkd agent-port SANDBOX`"
        ))),
        None => Err(Failure::new("the peer of this connection has left")),
    })
}

/// Sends one line to the daemon, and its reply back.
async fn pass_on(mut stream: TcpStream, daemon: &VerifiedDaemon, path: &str) -> std::io::Result<()> {
    let line = match admit(&stream).await? {
        Ok(()) => tokio::time::timeout(LINE_TIMEOUT, read_line(&mut stream)).await??,
        Err(failure) => Err(failure),
    };
    let answer = match line {
        Ok(line) => {
            let asked = async { daemon.daemon()?.ask(Method::POST, path, Some(&line)).await };
            asked.await.map_err(|error| format!("{error:#}"))
        }
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
    let _ = tokio::time::timeout(DISCARD_TIMEOUT, discard).await;
    Ok(())
}

/// Reads the line as JSON. Anything else is refused here; HTTP is refused at its first byte.
async fn read_line(stream: &mut TcpStream) -> std::io::Result<Result<Value, Failure>> {
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
