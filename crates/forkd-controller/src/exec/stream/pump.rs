//! Connects a command in a guest with its client: start, input and output, and the last event.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::stream::{Channel, ClientMessage, ServerEvent, TtySize};
use forkd_protocol::agent::{Event, Pty, PtySize, StartRequest};
use tokio::sync::mpsc;

use crate::agent::{self, Agent, Process, StartOptions};
use crate::exec::Finish;
use crate::exec::stream::Wires;
use crate::exec::stream::client::{Client, Input, Outgoing};
use crate::sandbox::Sandbox;
use crate::util::task;

/// The command to run.
pub(crate) struct StreamCommand {
    pub(crate) start: StartRequest,
    pub(crate) user: Option<String>,
    pub(crate) limit: Option<Duration>,
    /// Runs on a terminal of this size.
    pub(crate) tty: Option<TtySize>,
}

/// The last event of a command. If the command never ran, its client gets the reason as standard error.
pub(crate) async fn last_event(finish: Finish, outgoing: &Outgoing) -> ServerEvent {
    let exit_code = finish.exit_code();
    let (signal, timed_out) = match finish {
        Finish::Ended { signal, .. } => (signal, false),
        Finish::TimedOut => (None, true),
        Finish::NotStarted { why, .. } => {
            let why = crate::monitor::console::printable(format!("forkd: {why}\n").as_bytes());
            outgoing.data(Channel::Stderr, why.as_bytes()).await;
            (None, false)
        }
    };
    ServerEvent::Exit { exit_code, signal, timed_out }
}

/// Starts a command, and passes input and output until it ends. `grace` is how long the daemon waits for the agent after
/// the command's deadline. The error is an error of the agent.
pub(crate) async fn follow(
    sandbox: &Sandbox,
    command: StreamCommand,
    wires: Wires<'_>,
    grace: Duration,
) -> agent::Result<Finish> {
    let StreamCommand { mut start, user, limit, tty } = command;
    start.pty = tty.map(|size| terminal(size.cols, size.rows));
    let options = StartOptions { user, timeout: limit };
    let Wires { client, controls, outgoing } = wires;
    let following = Following { agent: sandbox.agent.clone(), tty: tty.is_some(), grace, client, outgoing };
    let followed = async {
        let process = sandbox.agent.start(&start, &options).await?;
        following.pump(&sandbox.id, process, limit, controls).await
    };
    followed.await.or_else(Finish::failed)
}

/// A running command and its client.
struct Following<'r> {
    agent: Agent,
    tty: bool,
    /// How long the daemon waits for the agent after the command's deadline.
    grace: Duration,
    client: &'r Arc<Client>,
    outgoing: &'r Outgoing,
}

impl Following<'_> {
    /// Passes output to the client until the command ends. Reads a piece from the guest only after the client has
    /// taken the previous one.
    async fn pump(
        &self,
        sandbox: &str,
        mut process: Process,
        limit: Option<Duration>,
        controls: mpsc::Receiver<ClientMessage>,
    ) -> agent::Result<Finish> {
        let deadline = limit.map(|limit| Instant::now() + limit);
        let mut controls = Some(controls);
        let mut companions = Vec::new();
        loop {
            match next(&mut process, deadline, self.grace).await? {
                Event::Start { pid } => {
                    self.outgoing.event(&ServerEvent::Started { sandbox: sandbox.to_owned(), pid }).await;
                    // Only the first start event is valid; the agent may be hostile.
                    if let Some(controls) = controls.take() {
                        let (agent, client, outgoing) =
                            (self.agent.clone(), self.client.clone(), self.outgoing.clone());
                        companions.push(task::companion(feed(
                            agent.clone(),
                            pid,
                            self.tty,
                            client,
                            outgoing,
                        )));
                        companions.push(task::companion(steer(agent, pid, controls)));
                    }
                }
                Event::Data(output) => self.outgoing.output(output).await,
                Event::Keepalive {} => {}
                Event::End(end) => return Ok(Finish::ended(&end)),
            }
        }
    }
}

/// The next event. The agent enforces the deadline; the daemon does not wait for an agent that fails to.
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

/// Passes input to the command as it arrives. A command that no longer reads is not an error: the rest is discarded,
/// as for a closed pipe.
async fn feed(agent: Agent, pid: u32, tty: bool, client: Arc<Client>, outgoing: Outgoing) {
    let mut input = agent.input(pid, tty).await.ok();
    loop {
        match client.input().await {
            Input::Bytes(data) => {
                if let Some(open) = &mut input
                    && let Err(error) = open.send(&data).await
                {
                    tracing::debug!(%error, pid, "command input not written");
                    input = None;
                }
                client.acknowledge(data.len());
                outgoing.event(&ServerEvent::StdinAck { bytes: data.len() }).await;
            }
            Input::Eof => {
                if let Some(open) = input.take()
                    && let Err(error) = open.close().await
                {
                    tracing::debug!(%error, pid, "command input already closed");
                }
                return;
            }
        }
    }
}

/// Passes signals and terminal sizes to the command.
async fn steer(agent: Agent, pid: u32, mut controls: mpsc::Receiver<ClientMessage>) {
    while let Some(control) = controls.recv().await {
        let passed = match control {
            ClientMessage::Signal { signal } => agent.signal(pid, &signal).await,
            ClientMessage::Resize { cols, rows } => agent.resize(pid, terminal(cols, rows)).await,
            ClientMessage::StdinEof => Ok(()),
        };
        if let Err(error) = passed {
            tracing::debug!(%error, pid, "signal or terminal size not passed to the command");
        }
    }
}

fn terminal(cols: u16, rows: u16) -> Pty {
    Pty { size: PtySize { cols: cols.into(), rows: rows.into() } }
}
