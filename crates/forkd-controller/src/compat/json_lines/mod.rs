//! The JSON-lines protocol for clients on the host: the protocol of a guest's TCP port 8888, without the guest's
//! network. Each line becomes calls of the agent. [`ports`] has the loopback ports that accept lines; the API accepts
//! them over HTTP.

pub(crate) mod peer_check;
pub(crate) mod ports;

use std::time::Duration;

use forkd_api::{EvalReply, EvalRequest, ExecReply, ExecRequest};
use forkd_protocol::agent::WarmState;
use forkd_protocol::json_lines::{Evaluated, Failure, Incoming, Pong, Ran, Reply, Request};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use crate::agent::ResponseBudget;
use crate::config::Config;
use crate::error::Result;
use crate::exec::{eval, run};
use crate::monitor::console::printable;
use crate::sandbox::Sandbox;
use crate::sandbox::agent_call::AgentCall;

/// Timeout for a request to arrive.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// Timeout for the peer to read the reply.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// How long unread input is discarded, so that the peer gets the reply and not a reset.
const DISCARD_TIME: Duration = Duration::from_secs(1);

/// Serves one connection: one line in, one line out. Returns whether the request succeeded.
pub(crate) async fn converse(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    answer: impl AsyncFnOnce(Request) -> (Reply, ResponseBudget),
) -> std::io::Result<bool> {
    let read = tokio::time::timeout(REQUEST_TIME, read_request(&mut stream)).await;
    // `_room` is released after the reply was sent.
    let (reply, _room) =
        match read.unwrap_or_else(|_| Ok(Err(Failure::new("the request took too long to come"))))? {
            Ok(request) => answer(request).await,
            Err(failure) => (Reply::Failed(failure), ResponseBudget::default()),
        };
    let done = !matches!(reply, Reply::Failed(_));
    say(&mut stream, &reply).await?;
    Ok(done)
}

/// Sends a reply and closes the connection.
async fn say(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), reply: &Reply) -> std::io::Result<()> {
    let line = reply.to_line();
    let sent = async {
        stream.write_all(&line).await?;
        stream.shutdown().await
    };
    tokio::time::timeout(ANSWER_TIME, sent).await??;
    let mut rest = [0; 4 << 10];
    let discard = async { while matches!(stream.read(&mut rest).await, Ok(n) if n > 0) {} };
    let _ = tokio::time::timeout(DISCARD_TIME, discard).await;
    Ok(())
}

async fn read_request(
    stream: &mut (impl AsyncRead + Unpin),
) -> std::io::Result<std::result::Result<Request, Failure>> {
    let mut incoming = Incoming::default();
    let mut piece = [0; 8 << 10];
    loop {
        let n = stream.read(&mut piece).await?;
        match incoming.push(&piece[..n]) {
            Ok(complete) if complete || n == 0 => return Ok(incoming.request()),
            Ok(_) => {}
            Err(failure) => return Ok(Err(failure)),
        }
    }
}

/// Runs a request in a sandbox. The caller holds the reply's budget until the reply is sent.
pub(crate) async fn answer(sandbox: &Sandbox, config: &Config, request: Request) -> (Reply, ResponseBudget) {
    let answered = match request {
        Request::Ping => ping(sandbox).await.map(|reply| (reply, ResponseBudget::default())),
        Request::Exec { args, timeout } => {
            let request = ExecRequest { args, timeout_secs: whole_secs(timeout), ..ExecRequest::default() };
            let done = run::run_to_end(sandbox, config, request, timeout).await;
            done.map(|(reply, room)| (ran(reply), room))
        }
        Request::Eval { code, timeout } => {
            let request = EvalRequest { code, timeout_secs: whole_secs(timeout) };
            let done = eval::evaluate(sandbox, request, timeout).await;
            done.map(|(reply, room)| (evaluated(reply), room))
        }
    };
    answered.unwrap_or_else(|error| {
        if error.private().is_some() {
            tracing::warn!(sandbox = sandbox.id, code = error.code().name(), %error, "JSON-lines request failed");
        }
        (Reply::Failed(Failure::new(error.public())), ResponseBudget::default())
    })
}

async fn ping(sandbox: &Sandbox) -> Result<Reply> {
    sandbox.ready().await?;
    let pong = AgentCall::COMMAND.run(sandbox, sandbox.agent.ping()).await?;
    Ok(Reply::Pong(Pong {
        pong: true,
        numpy_version: pong.numpy_version.map(|version| printable(version.as_bytes())),
        pid: AGENT_PID,
        agent_lang: language(pong.python).into(),
        warmup_ready: pong.warm.state == WarmState::Ready,
    }))
}

/// The agent's process id: it is the guest's init.
pub(crate) const AGENT_PID: u32 = 1;

/// The language of evaluations.
pub(crate) fn language(python: bool) -> &'static str {
    if python { "python" } else { "none" }
}

fn ran(reply: ExecReply) -> Reply {
    match reply.error {
        // Clients show an error as such only without output.
        Some(error) if !reply.timed_out => {
            Reply::Failed(Failure { error, exit_code: reply.exit_code, ..Failure::default() })
        }
        error => Reply::Exec(Ran {
            exit_code: if reply.timed_out { 1 } else { reply.exit_code },
            stdout: reply.stdout,
            stderr: reply.stderr,
            error,
            stdout_truncated: reply.stdout_truncated,
            stderr_truncated: reply.stderr_truncated,
        }),
    }
}

fn evaluated(reply: EvalReply) -> Reply {
    let EvalReply { result, error, stdout, stderr, traceback, .. } = reply;
    match error {
        None => Reply::Eval(Evaluated { result, exit_code: 0, stdout, stderr }),
        Some(error) => Reply::Failed(Failure { error, exit_code: 1, traceback, stdout, stderr }),
    }
}

fn whole_secs(timeout: Duration) -> u64 {
    timeout.as_secs().max(1)
}

#[cfg(test)]
mod tests;
