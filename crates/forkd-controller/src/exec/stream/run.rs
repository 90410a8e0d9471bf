//! `GET /v1/run`: one command in a sandbox of its own.

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use tokio::sync::mpsc;

use crate::api::App;
use crate::api::error::Reader;
use crate::api::middleware::request_log::Session;
use crate::api::sandboxes::exec;
use crate::auth::principal::Identity;
use crate::error::Result;
use crate::exec::counted;
use crate::exec::stream::pump::{Command, follow, last_event};
use crate::exec::stream::{Upgrade, Wires, Work, begin};
use crate::host::cgroup;
use crate::sandbox::Spec;
use forkd_api::ErrorBody;
use forkd_api::stream::{ClientMessage, RunRequest, ServerEvent};

/// Runs a command in a sandbox of its own, over a WebSocket. The sandbox lives as long as the
/// connection.
///
/// The first message is text, a `RunRequest`. Then the server sends `ServerEvent`s as text and
/// output as binary frames, whose first byte is 1 for standard output and 2 for standard error; the
/// client sends `ClientMessage`s as text and input as binary frames, whose first byte is 0. At most
/// 262144 bytes of input may be under way; a `stdin_ack` gives room back.
#[utoipa::path(
    get, path = "/v1/run",
    responses(
        (status = 101, description = "Speak WebSocket"),
        (status = 400, body = ErrorBody, description = "Not the beginning of a WebSocket"),
    ),
)]
pub(crate) async fn run(
    State(app): State<App>,
    Extension(who): Extension<Identity>,
    talk: Session,
    reader: Reader,
    upgrade: Upgrade,
) -> Result<Response> {
    begin(upgrade, app, who.clone(), (talk, reader), Run { who })
}

struct Run {
    who: Identity,
}

impl Work for Run {
    type Request = RunRequest;
    const REQUEST: &'static str = "a run request";

    async fn work(self, app: &App, request: RunRequest, mut wires: Wires<'_>) -> Result<ServerEvent> {
        let limit = request.timeout_secs.map(exec::check_timeout).transpose()?;
        let start = exec::start_request(request.args, request.env, request.cwd, true)?;
        let command = Command { start, user: request.user, limit, tty: request.tty };
        let message = format!("booting a sandbox of {}", request.image);
        let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
        let spec = Spec {
            owner: self.who.owner.clone(),
            image: Some(request.image),
            snapshot_tag: None,
            vcpus: request.vcpus.unwrap_or(1),
            mem_mib,
            network: request.network.unwrap_or(true),
            memory_limit_mib: cgroup::memory_mib(mem_mib),
            guest: None,
        };
        // Bound to this future: when it is dropped, for whatever reason, the sandbox is deleted.
        let bound = app.registry.boot(spec, false, false, &self.who.quota).await?;
        wires.outgoing.event(&ServerEvent::Progress { message }).await;
        let sandbox = bound.sandbox();
        tokio::select! {
            started = sandbox.started() => started?,
            signal = first_signal(&mut wires.controls) => {
                let exit_code = 128 + signal;
                return Ok(ServerEvent::Exit { exit_code, signal: Some(signal), timed_out: false });
            }
        }
        let outgoing = wires.outgoing;
        let followed = follow(sandbox, command, wires, app.config.timing.call);
        let finish = counted(sandbox, sandbox.with_agent(followed)).await?;
        Ok(last_event(finish, outgoing).await)
    }
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
