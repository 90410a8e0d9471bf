//! A command in the machine that uses this process's terminal or pipes.

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use forkd_controller::agent::{Agent, Input, Process, StartOptions};
use forkd_protocol::agent::{End, Event, ProcessConfig, Pty, PtySize, StartRequest};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::{Running, agent};
use crate::stream::signals::Forwarded;
use crate::stream::stdio::{self, OutputStream, OutputWriter, RemoteExit};
use crate::stream::terminal::RawTerminal;

/// Runs `command`, or an interactive shell, and returns the exit status.
pub(crate) async fn run(machine: &Running, command: &[String]) -> Result<u8> {
    let agent = agent::connect(machine.state.agent_port, &machine.plan.agent_token);
    match command.split_first() {
        None if RawTerminal::is_there() => interactive(&agent).await,
        // Commands come from a pipe.
        None => piped(&agent, "/bin/sh", &[]).await,
        Some((program, arguments)) => piped(&agent, program, arguments).await,
    }
}

async fn interactive(agent: &Agent) -> Result<u8> {
    let terminal = RawTerminal::enter()?;
    let name = std::env::var("TERM").unwrap_or_else(|_| "linux".to_owned());
    let process = ProcessConfig {
        cmd: "/bin/sh".into(),
        args: vec![
            "-c".into(),
            "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi".into(),
        ],
        envs: [("TERM".to_owned(), name)].into(),
        cwd: None,
    };
    let request = StartRequest { process, pty: Some(pty()), ..StartRequest::default() };
    let status = follow(agent, &request, true).await;
    drop(terminal);
    status
}

/// A terminal of the same size as this one.
fn pty() -> Pty {
    let (cols, rows) = RawTerminal::size();
    Pty { size: PtySize { cols: cols.into(), rows: rows.into() } }
}

async fn piped(agent: &Agent, program: &str, arguments: &[String]) -> Result<u8> {
    let process =
        ProcessConfig { cmd: program.to_owned(), args: arguments.to_vec(), ..ProcessConfig::default() };
    let request = StartRequest { process, stdin: Some(true), ..StartRequest::default() };
    follow(agent, &request, false).await
}

/// Starts a process and forwards its terminal, or its pipes, until it ends.
async fn follow(agent: &Agent, request: &StartRequest, tty: bool) -> Result<u8> {
    let process = agent.start(request, &StartOptions::default()).await?;
    let output = OutputWriter::start();
    let mut signals = Forwarded::pass_on()?;
    let outcome = forward_streams(agent, process, tty, &output, &mut signals).await;
    output.conclude(outcome, &mut signals).await
}

async fn forward_streams(
    agent: &Agent,
    mut process: Process,
    tty: bool,
    output: &OutputWriter,
    signals: &mut Forwarded,
) -> Result<RemoteExit> {
    let mut resized = signal(SignalKind::window_change())?;
    let mut pid = None;
    loop {
        tokio::select! {
            event = async { output.room().await; process.next().await } => match event? {
                Some(Event::Start { pid: started }) => {
                    pid = Some(started);
                    tokio::spawn(feed(agent.input(started, tty).await?, stdio::read_stdin()));
                }
                Some(Event::Data(data)) => {
                    let to_stdout = data.stdout.or(data.pty);
                    for (target, bytes) in [(OutputStream::Stdout, to_stdout), (OutputStream::Stderr, data.stderr)] {
                        if let Some(bytes) = bytes {
                            output.write(target, Bytes::from(bytes)).await;
                        }
                    }
                }
                Some(Event::Keepalive {}) => {}
                Some(Event::End(end)) => return Ok(RemoteExit::Exit(exit_status(&end))),
                None => bail!("the machine's agent closed the connection without a result"),
            },
            // The reader of the output has left: the command gets the signal that it would get here.
            () = output.broken() => {
                end(agent, pid, "SIGKILL").await;
                return Ok(RemoteExit::Exit(128 + libc::SIGPIPE as u8));
            }
            caught = signals.next() => match pid {
                Some(pid) if !tty && !caught.insists => {
                    agent.signal(pid, caught.name).await.context("cannot forward the signal")?;
                }
                // On a terminal, keys are not signals: a signal means that this process must end.
                _ => {
                    end(agent, pid, if tty { "SIGHUP" } else { "SIGKILL" }).await;
                    return Ok(RemoteExit::Leave(caught.status()));
                }
            },
            _ = resized.recv(), if tty => {
                if let Some(pid) = pid {
                    let _ = agent.resize(pid, pty()).await;
                }
            }
        }
    }
}

/// Ends the process in the machine, if the machine answers.
async fn end(agent: &Agent, pid: Option<u32>, signal: &str) {
    if let Some(pid) = pid {
        let _ = agent.signal(pid, signal).await;
    }
}

/// Forwards standard input until it, or the process, ends.
async fn feed(mut input: Input, mut stdin: mpsc::Receiver<Bytes>) {
    while let Some(bytes) = stdin.recv().await {
        if input.send(&bytes).await.is_err() {
            return;
        }
    }
    let _ = input.close().await;
}

/// The exit status, as a shell computes it.
fn exit_status(end: &End) -> u8 {
    match end.signal {
        Some(signal) => 128u8.wrapping_add(signal as u8),
        None => end.exit_code as u8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ended_by_a_signal_has_the_status_a_shell_gives_it() {
        assert_eq!(exit_status(&End { exit_code: 7, exited: true, ..End::default() }), 7);
        assert_eq!(exit_status(&End { exit_code: -1, signal: Some(9), ..End::default() }), 137);
    }
}
