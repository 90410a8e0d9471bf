//! The work of a session: boot, start, pump, and the last event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::agent::{Event, Pty, PtySize};
use tokio::sync::mpsc;

use super::failed;
use super::wire::{Client, Input, Outgoing};
use crate::agent::{self, Agent, Process, StartOptions};
use crate::api::App;
use crate::api::exec::{self, TIMED_OUT, Unfinished};
use crate::companion::Companion;
use crate::error::Result;
use crate::frames::{Channel, ClientMessage, RunRequest, ServerEvent};
use crate::host::Host;
use crate::sandbox::Spec;

/// The work itself: from the request to the last event.
pub(super) async fn work(
    app: &App,
    request: RunRequest,
    client: &Arc<Client>,
    controls: mpsc::Receiver<ClientMessage>,
    outgoing: &Outgoing,
) -> ServerEvent {
    attempt(app, request, client, controls, outgoing).await.unwrap_or_else(failed)
}

async fn attempt(
    app: &App,
    request: RunRequest,
    client: &Arc<Client>,
    mut controls: mpsc::Receiver<ClientMessage>,
    outgoing: &Outgoing,
) -> Result<ServerEvent> {
    let limit = request.timeout_secs.map(exec::check_timeout).transpose()?;
    let mut start = exec::start_request(request.args, request.env, request.cwd, true)?;
    start.pty = request.tty.map(|size| terminal(size.cols, size.rows));
    let options = StartOptions { user: request.user, timeout: limit };
    let message = format!("booting a sandbox of {}", request.image);
    let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
    let spec = Spec {
        image: Some(request.image),
        snapshot_tag: None,
        vcpus: request.vcpus.unwrap_or(1),
        mem_mib,
        network: request.network.unwrap_or(true),
        memory_limit_mib: Host::memory_limit_mib(mem_mib),
        guest: None,
    };
    // Bound to this future: when it is dropped, for whatever reason, the sandbox is deleted.
    let bound = app.registry.boot(spec, false).await?;
    outgoing.event(&ServerEvent::Progress { message }).await;
    let sandbox = bound.sandbox();
    tokio::select! {
        started = sandbox.started() => started?,
        signal = first_signal(&mut controls) => {
            return Ok(ServerEvent::Exit { exit_code: 128 + signal, signal: Some(signal), timed_out: false });
        }
    }
    let tty = start.pty.is_some();
    let run = Run { agent: sandbox.agent.clone(), tty, grace: app.config.timing.call, client, outgoing };
    let pumped = sandbox.with_agent(async {
        let pumped = async {
            let process = sandbox.agent.start(&start, &options).await?;
            run.pump(&sandbox.id, process, limit, controls).await
        };
        match pumped.await {
            Ok(event) => Ok(Ok(event)),
            Err(error) => exec::unfinished(error).map(Err),
        }
    });
    match pumped.await? {
        Ok(event) => Ok(event),
        Err(Unfinished::TimedOut) => {
            Ok(ServerEvent::Exit { exit_code: TIMED_OUT, signal: None, timed_out: true })
        }
        Err(Unfinished::NotStarted(exit_code, why)) => {
            let why = crate::console::printable(format!("forkd: {why}\n").as_bytes());
            outgoing.data(Channel::Stderr, why.as_bytes()).await;
            Ok(ServerEvent::Exit { exit_code, signal: None, timed_out: false })
        }
    }
}

/// A command and its client.
struct Run<'r> {
    agent: Agent,
    tty: bool,
    /// How much longer than the agent we wait before we give the command up ourselves.
    grace: Duration,
    client: &'r Arc<Client>,
    outgoing: &'r Outgoing,
}

impl Run<'_> {
    /// Moves output to the client until the command ends. The next piece is taken from the guest
    /// when the client has taken the last.
    async fn pump(
        &self,
        sandbox: &str,
        mut process: Process,
        limit: Option<Duration>,
        controls: mpsc::Receiver<ClientMessage>,
    ) -> agent::Result<ServerEvent> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut controls = Some(controls);
        let mut companions = Vec::new();
        loop {
            match next(&mut process, deadline, self.grace).await? {
                Event::Start { pid } => {
                    self.outgoing.event(&ServerEvent::Started { sandbox: sandbox.to_owned(), pid }).await;
                    // Only the first start is believed.
                    if let Some(controls) = controls.take() {
                        let (agent, client, outgoing) =
                            (self.agent.clone(), self.client.clone(), self.outgoing.clone());
                        companions.push(Companion::spawn(feed(
                            agent.clone(),
                            pid,
                            self.tty,
                            client,
                            outgoing,
                        )));
                        companions.push(Companion::spawn(steer(agent, pid, controls)));
                    }
                }
                Event::Data(output) => self.outgoing.output(output).await,
                Event::Keepalive {} => {}
                Event::End(end) => {
                    let (exit_code, signal) = exec::exit_status(&end);
                    return Ok(ServerEvent::Exit { exit_code, signal, timed_out: false });
                }
            }
        }
    }
}

/// The next event. The agent keeps the deadline; one that does not is not waited for.
async fn next(process: &mut Process, deadline: Option<Instant>, grace: Duration) -> agent::Result<Event> {
    let event = match deadline {
        None => process.next().await?,
        Some(deadline) => {
            let patience = deadline.saturating_duration_since(Instant::now()) + grace;
            match tokio::time::timeout(patience, process.next()).await {
                Ok(event) => event?,
                Err(_) => {
                    use forkd_protocol::connect::{Code, Error};
                    let late = "the agent did not stop the command";
                    return Err(Error::new(Code::DeadlineExceeded, late).into());
                }
            }
        }
    };
    event.ok_or_else(|| agent::Error::Protocol("a process's stream ended before the process".into()))
}

/// Gives the command its input as it comes. A command that does not want it any more is not an
/// error: the rest is thrown away, as by a closed pipe.
async fn feed(agent: Agent, pid: u32, tty: bool, client: Arc<Client>, outgoing: Outgoing) {
    let mut input = agent.input(pid, tty).await.ok();
    loop {
        match client.input().await {
            Input::Bytes(data) => {
                if let Some(open) = &mut input
                    && let Err(error) = open.send(&data).await
                {
                    tracing::debug!(%error, pid, "a command did not take its input");
                    input = None;
                }
                client.acknowledge(data.len());
                outgoing.event(&ServerEvent::StdinAck { bytes: data.len() }).await;
            }
            Input::Eof => {
                if let Some(open) = input.take()
                    && let Err(error) = open.close().await
                {
                    tracing::debug!(%error, pid, "a command's input was closed already");
                }
                return;
            }
        }
    }
}

/// Passes signals and sizes on.
async fn steer(agent: Agent, pid: u32, mut controls: mpsc::Receiver<ClientMessage>) {
    while let Some(control) = controls.recv().await {
        let passed = match control {
            ClientMessage::Signal { signal } => agent.signal(pid, &signal).await,
            ClientMessage::Resize { cols, rows } => agent.resize(pid, terminal(cols, rows)).await,
            ClientMessage::StdinEof => Ok(()),
        };
        if let Err(error) = passed {
            tracing::debug!(%error, pid, "a command could not be signalled");
        }
    }
}

fn terminal(cols: u16, rows: u16) -> Pty {
    Pty { size: PtySize { cols: cols.into(), rows: rows.into() } }
}

/// A signal sent before there is a command to take it; its number. One whose number is not known
/// here ends the session like SIGTERM.
async fn first_signal(controls: &mut mpsc::Receiver<ClientMessage>) -> i32 {
    loop {
        match controls.recv().await {
            Some(ClientMessage::Signal { signal }) => {
                return match signal.as_str() {
                    "SIGHUP" => 1,
                    "SIGINT" => 2,
                    "SIGQUIT" => 3,
                    "SIGKILL" => 9,
                    _ => 15,
                };
            }
            Some(_) => {}
            None => return std::future::pending().await,
        }
    }
}
