//! `GET /v1/sandboxes/{id}/exec/stream`: a command in an existing sandbox.
//!
//! The sandbox outlives the session. When a caller disconnects, the agent keeps the process: the processes in children of
//! a branch have no callers and must keep running. So the session itself kills its process ([`KillOnDrop`]), unless the
//! client asks to keep it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forkd_api::stream::{ExecStreamRequest, ServerEvent};
use forkd_protocol::connect::Code;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::agent;
use crate::error::Result;
use crate::exec::counted;
use crate::exec::run::{check_timeout, start_request};
use crate::exec::stream::pump::{StreamCommand, follow, last_event};
use crate::exec::stream::{Conversation, StreamContext, Wires};
use crate::sandbox::agent_call::AgentCall;
use crate::sandbox::{Phase, Sandbox};

/// How many times the daemon tries to kill the process, which may still be starting.
const LOOKS: usize = 10;
/// Pause between two tries.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// A command in an existing sandbox.
pub(crate) struct Exec {
    pub(crate) sandbox: Arc<Sandbox>,
}

impl Conversation for Exec {
    type Request = ExecStreamRequest;
    const REQUEST: &'static str = "a request to run a command";

    async fn work(
        self,
        context: &StreamContext,
        request: ExecStreamRequest,
        wires: Wires<'_>,
    ) -> Result<ServerEvent> {
        let sandbox = self.sandbox;
        let limit = request.timeout_secs.map(check_timeout).transpose()?;
        let mut start = start_request(request.args, request.env, request.cwd, true)?;
        let tag = unique_tag();
        start.tag = Some(tag.clone());
        let command = StreamCommand { start, user: request.user, limit, tty: request.pty };
        let mut kill_on_drop =
            KillOnDrop { sandbox: sandbox.clone(), tag, counted: Some(context.sessions.token()) };
        if request.keep {
            kill_on_drop.spare();
        }
        let outgoing = wires.outgoing;
        let followed = follow(&sandbox, command, wires, context.config.timing.call);
        let finish = counted(&sandbox, AgentCall::STREAM.run(&sandbox, followed)).await?;
        // The command has ended, or the agent has ended it.
        kill_on_drop.spare();
        Ok(last_event(finish, outgoing).await)
    }
}

/// A tag that no other process has. The kernel reuses process ids, so an id is not enough.
fn unique_tag() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    format!("forkd-stream-{}-{number}", crate::util::time::unix_nanos())
}

/// Ends a process when it is dropped.
struct KillOnDrop {
    sandbox: Arc<Sandbox>,
    tag: String,
    /// While there is one, the drop kills the process. A daemon that stops waits for it.
    counted: Option<TaskTrackerToken>,
}

impl KillOnDrop {
    fn spare(&mut self) {
        self.counted = None;
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let (Some(counted), Ok(runtime)) = (self.counted.take(), tokio::runtime::Handle::try_current())
        else {
            return;
        };
        let (sandbox, tag) = (self.sandbox.clone(), std::mem::take(&mut self.tag));
        runtime.spawn(async move { kill(&sandbox, &tag, counted).await });
    }
}

/// Kills the process as soon as the sandbox runs. In a paused sandbox the process is paused until then, and a daemon
/// that stops does not wait for it; in a sandbox that has ended there is no process.
async fn kill(sandbox: &Sandbox, tag: &str, counted: TaskTrackerToken) {
    let mut phases = sandbox.phase.subscribe();
    let _counted = matches!(sandbox.phase(), Phase::Running).then_some(counted);
    for _ in 0..LOOKS {
        let settled = phases.wait_for(|phase| matches!(phase, Phase::Running | Phase::Ended(_))).await;
        if !settled.is_ok_and(|phase| matches!(*phase, Phase::Running)) {
            return;
        }
        match sandbox.agent.signal_tagged(tag, "SIGKILL").await {
            Ok(()) => return,
            Err(agent::Error::Refused(error)) if error.code == Code::NotFound => {}
            Err(error) => tracing::debug!(%error, sandbox = sandbox.id, "command not killed"),
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}
