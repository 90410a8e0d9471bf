//! `GET /v1/run`: one command in a new sandbox.

use forkd_api::stream::{ClientMessage, RunRequest, ServerEvent};
use tokio::sync::mpsc;

use crate::auth::principal::Principal;
use crate::error::Result;
use crate::exec::counted;
use crate::exec::run::{check_timeout, start_request};
use crate::exec::stream::pump::{StreamCommand, follow, last_event};
use crate::exec::stream::{Conversation, StreamContext, Wires};
use crate::host::cgroup;
use crate::sandbox::Spec;
use crate::sandbox::agent_call::AgentCall;

/// A command in a sandbox that is created for it.
pub(crate) struct Run {
    pub(crate) who: Principal,
}

impl Conversation for Run {
    type Request = RunRequest;
    const REQUEST: &'static str = "a run request";

    async fn work(
        self,
        context: &StreamContext,
        request: RunRequest,
        mut wires: Wires<'_>,
    ) -> Result<ServerEvent> {
        let limit = request.timeout_secs.map(check_timeout).transpose()?;
        let start = start_request(request.args, request.env, request.cwd, true)?;
        let command = StreamCommand { start, user: request.user, limit, tty: request.tty };
        let message = format!("booting a sandbox of {}", request.image);
        let mem_mib = request.mem_size_mib.unwrap_or(context.config.limits.default_mem_mib);
        let spec = Spec {
            owner: self.who.owner.clone(),
            image: Some(request.image),
            snapshot_tag: None,
            forked_from: None,
            vcpus: request.vcpus.unwrap_or(1),
            mem_mib,
            network: request.network.unwrap_or(true),
            memory_limit_mib: cgroup::memory_mib(mem_mib),
            guest: None,
        };
        // Bound to this future: the daemon deletes the sandbox when the future is dropped.
        let bound = context.registry.boot(spec, false, false, &self.who.quota).await?;
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
        let followed = follow(sandbox, command, wires, context.config.timing.call);
        let finish = counted(sandbox, AgentCall::COMMAND.run(sandbox, followed)).await?;
        Ok(last_event(finish, outgoing).await)
    }
}

/// Waits for a signal that arrives before the command has started, and returns its number. A signal of unknown number
/// ends the session like SIGTERM.
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
