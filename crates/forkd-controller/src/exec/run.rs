//! Commands that run to their end, with their output collected.

use std::time::Duration;

use forkd_api::stream::MAX_CHUNK;
use forkd_api::{ExecReply, ExecRequest, MAX_TIMEOUT_SECS};
use forkd_protocol::agent::{End, Event, Output, ProcessConfig, StartRequest};

use crate::agent::{self, Agent, Process, ResponseBudget, StartOptions};
use crate::config::Config;
use crate::error::{Error, Result};
use crate::exec::{Finish, counted};
use crate::sandbox::Sandbox;
use crate::sandbox::agent_call::AgentCall;
use crate::util::task;

/// Runs a command within `limit`, which overrides the request's. The caller holds the reply's budget until the reply
/// is sent.
pub(crate) async fn run_to_end(
    sandbox: &Sandbox,
    config: &Config,
    request: ExecRequest,
    limit: Duration,
) -> Result<(ExecReply, ResponseBudget)> {
    let start = start_request(request.args, request.env, request.cwd, request.stdin.is_some())?;
    sandbox.ready().await?;
    let options = StartOptions { user: request.user, timeout: Some(limit) };
    let mut collected = Collected::new(config.limits.max_output, ResponseBudget::default());
    let run = async {
        let process = sandbox.agent.start(&start, &options).await?;
        collect(&sandbox.agent, process, request.stdin, &mut collected).await
    };
    // The agent kills the command at its timeout, and needs time to report it.
    let patience = limit.saturating_add(config.timing.call);
    let ran = AgentCall::COMMAND.run(sandbox, async {
        match tokio::time::timeout(patience, run).await {
            Ok(Err(error)) => Finish::failed(error),
            Ok(Ok(end)) => Ok(Finish::ended(&end)),
            Err(_) => Ok(Finish::TimedOut),
        }
    });
    let finish = counted(sandbox, ran).await?;
    Ok(collected.reply(finish, limit))
}

/// Checks the timeout of a request.
pub(crate) fn check_timeout(secs: u64) -> Result<Duration> {
    match secs {
        1..=MAX_TIMEOUT_SECS => Ok(Duration::from_secs(secs)),
        _ => Err(Error::invalid(format!("timeout_secs is {secs}; it must be 1 to {MAX_TIMEOUT_SECS}"))),
    }
}

pub(crate) fn check_args(args: &[String]) -> Result<()> {
    match args.first() {
        Some(cmd) if !cmd.is_empty() => Ok(()),
        _ => Err(Error::invalid("args is empty; its first element is the program")),
    }
}

/// Builds the agent's request for a command.
pub(crate) fn start_request(
    args: Vec<String>,
    envs: std::collections::BTreeMap<String, String>,
    cwd: Option<String>,
    stdin: bool,
) -> Result<StartRequest> {
    check_args(&args)?;
    let mut args = args.into_iter();
    let cmd = args.next().unwrap_or_default();
    let process = ProcessConfig { cmd, args: args.collect(), envs, cwd };
    Ok(StartRequest { process, stdin: Some(stdin), ..StartRequest::default() })
}

async fn collect(
    agent: &Agent,
    mut process: Process,
    mut stdin: Option<String>,
    collected: &mut Collected,
) -> agent::Result<End> {
    let mut _feeder = None;
    loop {
        match process.next().await? {
            Some(Event::Start { pid }) => {
                if let Some(stdin) = stdin.take() {
                    _feeder = Some(task::companion(feed(agent.clone(), pid, stdin)));
                }
            }
            Some(Event::Data(output)) => collected.add(output),
            Some(Event::Keepalive {}) => {}
            Some(Event::End(end)) => return Ok(end),
            None => return Err(agent::Error::Protocol("a process's stream ended before the process".into())),
        }
    }
}

/// Sends a process its whole input. A process that does not read it, or has ended, is not an error.
async fn feed(agent: Agent, pid: u32, stdin: String) {
    let fed = async {
        let mut input = agent.input(pid, false).await?;
        for piece in stdin.as_bytes().chunks(MAX_CHUNK) {
            input.send(piece).await?;
        }
        input.close().await
    };
    if let Err(error) = fed.await {
        tracing::debug!(%error, pid, "command input not written");
    }
}

pub(crate) fn ran_out(limit: Duration) -> String {
    format!("its time ran out: it was stopped after {} s; give it a longer timeout_secs", limit.as_secs_f64())
}

/// The collected output, up to a limit.
struct Collected {
    max: usize,
    /// The budget for the output.
    room: ResponseBudget,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    stdout_truncated: bool,
    stderr_truncated: bool,
}

impl Collected {
    fn new(max: usize, room: ResponseBudget) -> Self {
        Collected {
            max,
            room,
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_truncated: false,
            stderr_truncated: false,
        }
    }

    fn add(&mut self, output: Output) {
        // Output over the limit is dropped and not left unread: the command must be able to end.
        let (max, room) = (self.max, &mut self.room);
        let mut keep = |kept: &mut Vec<u8>, truncated: &mut bool, new: Option<Vec<u8>>| {
            let new = new.unwrap_or_default();
            let fitting = &new[..new.len().min(max - kept.len())];
            let fits = room.take(encoded_len(fitting));
            if fits {
                kept.extend_from_slice(fitting);
            }
            *truncated |= !fits || fitting.len() < new.len();
        };
        keep(&mut self.stdout, &mut self.stdout_truncated, output.stdout);
        keep(&mut self.stderr, &mut self.stderr_truncated, output.stderr);
    }

    fn reply(self, finish: Finish, limit: Duration) -> (ExecReply, ResponseBudget) {
        let exit_code = finish.exit_code();
        let (signal, error, timed_out) = match finish {
            Finish::Ended { signal, .. } => (signal, None, false),
            Finish::TimedOut => (None, Some(ran_out(limit)), true),
            Finish::NotStarted { why, .. } => (None, Some(why), false),
        };
        let reply = ExecReply {
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            exit_code,
            signal,
            error,
            timed_out,
            stdout_truncated: self.stdout_truncated,
            stderr_truncated: self.stderr_truncated,
        };
        (reply, self.room)
    }
}

/// The most bytes that output takes as a JSON string, which is its form in the reply.
fn encoded_len(output: &[u8]) -> usize {
    let length = |byte: &u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => r"\u0000".len(),
        // Bytes that are not UTF-8 are replaced.
        0x80.. => char::REPLACEMENT_CHARACTER.len_utf8(),
        _ => 1,
    };
    output.iter().map(length).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unread_output_uses_up_the_budget() {
        let mut collected = Collected::new(1 << 20, ResponseBudget::of(1003));
        collected.add(Output { stdout: Some(vec![b'x'; 1000]), stderr: None, pty: None });
        collected.add(Output { stdout: Some(b"more".to_vec()), stderr: Some(b"yes".to_vec()), pty: None });
        assert!(collected.stdout_truncated && !collected.stderr_truncated);
        assert_eq!((collected.stdout.len(), collected.stderr.len()), (1000, 3));
        let (_, room) = collected.reply(Finish::ended(&End::default()), Duration::from_secs(1));
        assert_eq!(room.left(), 0, "it counts as long as the reply is there");
    }

    #[test]
    fn output_counts_as_what_is_sent_of_it() {
        let every: Vec<u8> = (0..=255).collect();
        for output in [&every[..], &[0; 100], &[0xff; 100], "Grüße \u{1f600}\n".as_bytes(), b"\"\\\x7f"] {
            let text = String::from_utf8_lossy(output);
            let sent = serde_json::to_vec(&text).unwrap().len() - 2;
            assert!(encoded_len(output) >= sent, "{text:?}");
        }
        assert_eq!((encoded_len(&[0; 100]), encoded_len(b"plain")), (600, 5));
    }

    #[test]
    fn output_over_the_limit_is_cut_and_marked_as_cut() {
        let mut collected = Collected::new(5, ResponseBudget::default());
        for piece in ["abc", "def", "ghi"] {
            collected.add(Output { stdout: Some(piece.into()), stderr: Some("x".into()), pty: None });
        }
        let (reply, _) = collected.reply(Finish::ended(&End::default()), Duration::from_secs(1));
        assert_eq!((reply.stdout.as_str(), reply.stdout_truncated), ("abcde", true));
        assert_eq!((reply.stderr.as_str(), reply.stderr_truncated), ("xxx", false));
    }
}
