//! Commands and evaluations that are waited for.

use std::convert::Infallible;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use axum::Json;
use axum::body::Body as HttpBody;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use forkd_protocol::agent::{self as wire, End, Event, Output, ProcessConfig, StartRequest};
use forkd_protocol::connect::Code;
use futures_util::stream;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::App;
use super::extract::{Body, Id};
use super::types::{EvalReply, EvalRequest, ExecReply, ExecRequest};
use crate::agent::{self, Agent, Process, StartOptions};
use crate::companion::Companion;
use crate::config::Config;
use crate::error::{Error, ErrorBody, Result};
use crate::frames::MAX_CHUNK;
use crate::sandbox::Sandbox;

/// Exit status of a command whose time ran out, as `timeout(1)` has it.
pub(crate) const TIMED_OUT: i32 = 124;
/// The longest time limit: 30 days.
const MAX_TIMEOUT_SECS: u64 = 30 * 24 * 3600;

/// Runs a command to its end.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/exec", params(("id" = String, Path)), request_body = ExecRequest,
    responses(
        (status = 200, body = ExecReply, description = "It ran and ended, or was killed when its time ran out"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(super) async fn exec(
    State(app): State<App>,
    Id(id): Id,
    Body(request): Body<ExecRequest>,
) -> Result<Response> {
    let limit = check_timeout(request.timeout_secs)?;
    check_args(&request.args)?;
    let sandbox = app.registry.get(&id)?;
    let (reply, room) = run_to_end(&sandbox, &app.config, request, limit).await?;
    let body = serde_json::to_vec(&reply).map_err(|error| Error::host("writing an answer", error))?;
    Ok(in_pieces(body.into(), room))
}

/// All output that commands may have written and nobody has taken yet, of all sandboxes together.
static OUTPUT: LazyLock<Arc<Semaphore>> = LazyLock::new(|| Arc::new(Semaphore::new(MAX_OUTPUT)));
const MAX_OUTPUT: usize = 256 << 20;

/// An answer that counts as output until it is taken: its pieces are asked for as the client takes them.
fn in_pieces(body: Bytes, room: Option<OwnedSemaphorePermit>) -> Response {
    const PIECE: usize = 64 << 10;
    let length = body.len();
    let pieces = stream::unfold((body, room), |(mut body, room)| async move {
        let piece = body.split_to(body.len().min(PIECE));
        (!piece.is_empty()).then_some((Ok::<_, Infallible>(piece), (body, room)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(length)),
    ];
    (headers, HttpBody::from_stream(pieces)).into_response()
}

/// Runs a command within `limit`, which counts instead of the request's. What it wrote counts as output as
/// long as what comes with the reply is kept.
pub(crate) async fn run_to_end(
    sandbox: &Sandbox,
    config: &Config,
    request: ExecRequest,
    limit: Duration,
) -> Result<(ExecReply, Option<OwnedSemaphorePermit>)> {
    let start = start_request(request.args, request.env, request.cwd, request.stdin.is_some())?;
    sandbox.ready().await?;
    let options = StartOptions { user: request.user, timeout: Some(limit) };
    let mut counted = sandbox.telling.metrics.exec();
    let mut collected = Collected::new(config.limits.max_output, OUTPUT.clone());
    let run = async {
        let process = sandbox.agent.start(&start, &options).await?;
        collect(&sandbox.agent, process, request.stdin, &mut collected).await
    };
    // The agent is the one to kill it, and needs its time to say so.
    let patience = limit.saturating_add(config.timing.call);
    let ran = sandbox.with_agent(async {
        match tokio::time::timeout(patience, run).await {
            Ok(Err(error)) => unfinished(error).map(Finish::Unfinished),
            Ok(Ok(end)) => Ok(Finish::Ended(end)),
            Err(_) => Ok(Finish::Unfinished(Unfinished::TimedOut)),
        }
    });
    let finish = ran.await?;
    let room = collected.room.take();
    let reply = collected.reply(finish, limit);
    counted.came_out(reply.exit_code, reply.timed_out);
    Ok((reply, room))
}

/// Evaluates Python in the sandbox's warmed interpreter.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/eval", params(("id" = String, Path)), request_body = EvalRequest,
    responses(
        (status = 200, body = EvalReply, description = "Also for code that raised, or whose time ran out"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running, or has no Python"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(super) async fn eval(
    State(app): State<App>,
    Id(id): Id,
    Body(request): Body<EvalRequest>,
) -> Result<Json<EvalReply>> {
    let limit = check_timeout(request.timeout_secs)?;
    let sandbox = app.registry.get(&id)?;
    Ok(Json(evaluate(&sandbox, request, limit).await?))
}

/// Evaluates within `limit`, which counts instead of the request's.
pub(crate) async fn evaluate(sandbox: &Sandbox, request: EvalRequest, limit: Duration) -> Result<EvalReply> {
    sandbox.ready().await?;
    let mut counted = sandbox.telling.metrics.exec();
    let code = wire::EvalRequest { code: request.code };
    let evaluated = sandbox.with_agent(async {
        match sandbox.agent.eval(&code, limit).await {
            Err(error) if error.is_deadline() => Ok(None),
            other => other.map(Some),
        }
    });
    let reply = match evaluated.await? {
        Some(answer) => EvalReply {
            exit_code: i32::from(answer.error.is_some()),
            result: answer.result,
            error: answer.error,
            stdout: answer.stdout,
            stderr: answer.stderr,
            traceback: answer.traceback,
            result_json: answer.result_json,
        },
        None => EvalReply { error: Some(ran_out(limit)), exit_code: TIMED_OUT, ..EvalReply::default() },
    };
    counted.came_out(reply.exit_code, reply.exit_code == TIMED_OUT);
    Ok(reply)
}

/// A time limit as a request gave it.
pub(crate) fn check_timeout(secs: u64) -> Result<Duration> {
    match secs {
        1..=MAX_TIMEOUT_SECS => Ok(Duration::from_secs(secs)),
        _ => Err(Error::invalid(format!("timeout_secs is {secs}; it must be 1 to {MAX_TIMEOUT_SECS}"))),
    }
}

fn check_args(args: &[String]) -> Result<()> {
    match args.first() {
        Some(cmd) if !cmd.is_empty() => Ok(()),
        _ => Err(Error::invalid("args is empty; its first element is the program")),
    }
}

/// What the agent is asked for a command.
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

/// The exit status a shell would give, and the signal if there was one.
pub(crate) fn exit_status(end: &End) -> (i32, Option<i32>) {
    match end.signal {
        Some(signal @ 1..=64) => (128 + signal, Some(signal)),
        _ => (end.exit_code, None),
    }
}

/// Why a command did not come to an end of its own.
pub(crate) enum Unfinished {
    TimedOut,
    /// It could not be started: the status a shell gives for that, and why.
    NotStarted(i32, String),
}

/// Tells failures that are about the command from failures of the agent.
pub(crate) fn unfinished(error: agent::Error) -> agent::Result<Unfinished> {
    match error {
        agent::Error::Refused(refused) => match refused.code {
            Code::DeadlineExceeded => Ok(Unfinished::TimedOut),
            // The agent refuses a program that is not there and one that is none with one code.
            Code::InvalidArgument if refused.message.contains("not found") => {
                Ok(Unfinished::NotStarted(127, refused.message))
            }
            Code::InvalidArgument => Ok(Unfinished::NotStarted(126, refused.message)),
            _ => Err(refused.into()),
        },
        other => Err(other),
    }
}

enum Finish {
    Ended(End),
    Unfinished(Unfinished),
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
                    _feeder = Some(Companion::spawn(feed(agent.clone(), pid, stdin)));
                }
            }
            Some(Event::Data(output)) => collected.add(output),
            Some(Event::Keepalive {}) => {}
            Some(Event::End(end)) => return Ok(end),
            None => return Err(agent::Error::Protocol("a process's stream ended before the process".into())),
        }
    }
}

/// Gives a process its whole input. One that does not want it, or has ended, is not an error.
async fn feed(agent: Agent, pid: u32, stdin: String) {
    let fed = async {
        let mut input = agent.input(pid, false).await?;
        for piece in stdin.as_bytes().chunks(MAX_CHUNK) {
            input.send(piece).await?;
        }
        input.close().await
    };
    if let Err(error) = fed.await {
        tracing::debug!(%error, pid, "a process did not take its input");
    }
}

fn ran_out(limit: Duration) -> String {
    format!("its time ran out: it was stopped after {} s; give it a longer timeout_secs", limit.as_secs_f64())
}

/// Output, up to a limit.
struct Collected {
    max: usize,
    /// All that may be kept, in bytes, and what this has of it.
    all: Arc<Semaphore>,
    room: Option<OwnedSemaphorePermit>,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    stdout_truncated: bool,
    stderr_truncated: bool,
}

impl Collected {
    fn new(max: usize, all: Arc<Semaphore>) -> Self {
        Collected {
            max,
            all,
            room: None,
            stdout: Vec::new(),
            stderr: Vec::new(),
            stdout_truncated: false,
            stderr_truncated: false,
        }
    }

    fn add(&mut self, output: Output) {
        // What is over the limit is dropped, not left unread: the command must be able to end.
        let (max, all, room) = (self.max, &self.all, &mut self.room);
        let mut keep = |kept: &mut Vec<u8>, truncated: &mut bool, new: Option<Vec<u8>>| {
            let new = new.unwrap_or_default();
            let fitting = &new[..new.len().min(max - kept.len())];
            let fits = take_room(all, room, fitting.len());
            if fits {
                kept.extend_from_slice(fitting);
            }
            *truncated |= !fits || fitting.len() < new.len();
        };
        keep(&mut self.stdout, &mut self.stdout_truncated, output.stdout);
        keep(&mut self.stderr, &mut self.stderr_truncated, output.stderr);
    }

    fn reply(self, finish: Finish, limit: Duration) -> ExecReply {
        let (exit_code, signal, error, timed_out) = match finish {
            Finish::Ended(end) => {
                let (exit_code, signal) = exit_status(&end);
                (exit_code, signal, None, false)
            }
            Finish::Unfinished(Unfinished::TimedOut) => (TIMED_OUT, None, Some(ran_out(limit)), true),
            Finish::Unfinished(Unfinished::NotStarted(code, why)) => (code, None, Some(why), false),
        };
        ExecReply {
            stdout: String::from_utf8_lossy(&self.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&self.stderr).into_owned(),
            exit_code,
            signal,
            error,
            timed_out,
            stdout_truncated: self.stdout_truncated,
            stderr_truncated: self.stderr_truncated,
        }
    }
}

/// Adds as many bytes of `all` to `room`; false if there are none left.
fn take_room(all: &Arc<Semaphore>, room: &mut Option<OwnedSemaphorePermit>, bytes: usize) -> bool {
    let Ok(bytes) = u32::try_from(bytes) else { return false };
    let Ok(more) = all.clone().try_acquire_many_owned(bytes) else { return false };
    match room {
        Some(room) => room.merge(more),
        None => *room = Some(more),
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn output_that_nobody_takes_leaves_room_for_no_more() {
        let all = Arc::new(Semaphore::new(1003));
        let mut collected = Collected::new(MAX_OUTPUT, all.clone());
        collected.add(Output { stdout: Some(vec![b'x'; 1000]), stderr: None, pty: None });
        collected.add(Output { stdout: Some(b"more".to_vec()), stderr: Some(b"yes".to_vec()), pty: None });
        assert!(collected.stdout_truncated && !collected.stderr_truncated);
        assert_eq!((collected.stdout.len(), collected.stderr.len()), (1000, 3));
        // It counts until the last piece was asked for.
        let response = in_pieces(vec![b'x'; 100 << 10].into(), collected.room.take());
        assert_eq!(all.available_permits(), 0);
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        assert_eq!((body.len(), all.available_permits()), (100 << 10, 1003));
    }

    #[test]
    fn output_over_the_limit_is_cut_and_said_to_be() {
        let mut collected = Collected::new(5, OUTPUT.clone());
        for piece in ["abc", "def", "ghi"] {
            collected.add(Output { stdout: Some(piece.into()), stderr: Some("x".into()), pty: None });
        }
        let reply = collected.reply(Finish::Ended(End::default()), Duration::from_secs(1));
        assert_eq!((reply.stdout.as_str(), reply.stdout_truncated), ("abcde", true));
        assert_eq!((reply.stderr.as_str(), reply.stderr_truncated), ("xxx", false));
    }

    #[test]
    fn a_killed_command_has_the_status_a_shell_gives() {
        let end = End { exit_code: -1, signal: Some(9), ..End::default() };
        assert_eq!(exit_status(&end), (137, Some(9)));
        assert_eq!(exit_status(&End { exit_code: 7, exited: true, ..End::default() }), (7, None));
        // What only a hostile agent says must not overflow.
        assert_eq!(exit_status(&End { exit_code: 3, signal: Some(i32::MAX), ..End::default() }), (3, None));
    }
}
