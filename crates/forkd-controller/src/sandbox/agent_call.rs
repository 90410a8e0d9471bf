//! Calls to the agent of a sandbox: whether a call counts as a use, and whether a pause ends it.
//!
//! A token of scope `read` changes nothing. Its calls neither resume an auto-paused sandbox nor count as uses, so the
//! idle time-out still comes.

use std::time::Duration;

use crate::agent;
use crate::auth::principal::{Principal, Scope};
use crate::error::{Code, Error, Result};
use crate::sandbox::{Phase, Sandbox};

/// How long a request waits for the reason after its connection to the agent broke.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// How a call to the agent behaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct AgentCall {
    /// Whether the sandbox is in use as long as the call takes.
    counts_as_use: bool,
    /// Whether the call ends with an error when the sandbox is paused: a stream would only stall then. A pause because
    /// of a full disk ends no call: it ends by itself, and the stream continues.
    stop_on_pause: bool,
}

impl AgentCall {
    /// A command with its output collected: counts as a use, and continues after a pause.
    pub(crate) const COMMAND: AgentCall = AgentCall { counts_as_use: true, stop_on_pause: false };

    /// A transfer or a stream: counts as a use, and ends at a pause.
    pub(crate) const STREAM: AgentCall = AgentCall { counts_as_use: true, stop_on_pause: true };

    /// The calls that the principal's scope allows. Fails unless the sandbox runs and has an agent. Resumes an
    /// auto-paused sandbox, if the calls count as uses.
    pub(crate) async fn begin(sandbox: &Sandbox, who: &Principal) -> Result<Self> {
        let call = AgentCall { counts_as_use: who.scope != Scope::Read, ..AgentCall::STREAM };
        match sandbox.phase() {
            _ if call.counts_as_use => sandbox.ready().await?,
            Phase::Paused => {
                let text = format!(
                    "sandbox {} is paused, and token {} may only read; resume it with a token of scope write",
                    sandbox.id, who.name
                );
                return Err(Error::new(Code::SandboxPaused, text));
            }
            _ => sandbox.runs().await?,
        }
        Ok(call)
    }

    /// Does `work` with the agent of `sandbox`. If the sandbox ends, becomes unresponsive or, for a call that a pause
    /// ends, is paused first, the error is the reason for that.
    pub(crate) async fn run<T>(
        self,
        sandbox: &Sandbox,
        work: impl Future<Output = agent::Result<T>>,
    ) -> Result<T> {
        let _in_use = self.counts_as_use.then(|| sandbox.in_use());
        tokio::select! {
            done = call(sandbox, work) => done,
            error = paused(sandbox), if self.stop_on_pause => Err(error),
        }
    }
}

async fn call<T>(sandbox: &Sandbox, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
    let error = tokio::select! {
        done = work => match done {
            Ok(value) => {
                sandbox.heard();
                // A suspend may have stored the sandbox before this work, which is lost then: the caller must not
                // get an answer as if it were kept.
                return sandbox.check_not_suspending().map(|()| value);
            }
            Err(error) => error,
        },
        trouble = sandbox.trouble() => return Err(trouble),
    };
    if matches!(error, agent::Error::Unreachable(_) | agent::Error::Timeout(_)) {
        // A connection often breaks before the daemon knows why the sandbox ends.
        if let Ok(trouble) = tokio::time::timeout(REASON_WAIT, sandbox.trouble()).await {
            return Err(trouble);
        }
    }
    Err(sandbox.agent_error(error))
}

/// Waits until the sandbox is paused, not because of a full disk, and returns that as an error.
async fn paused(sandbox: &Sandbox) -> Error {
    let mut phases = sandbox.phase.subscribe();
    let paused =
        |phase: &Phase| matches!(phase, Phase::Paused) && !sandbox.read_runtime(|runtime| runtime.disk_full);
    if phases.wait_for(paused).await.is_err() {
        // Not reached: `sandbox` holds the sender.
        std::future::pending::<()>().await;
    }
    let text = format!("sandbox {id} was paused meanwhile; `forkd resume {id}` resumes it", id = sandbox.id);
    Error::new(Code::SandboxPaused, text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_guest::FakeDaemon;

    fn who(scope: Scope) -> Principal {
        Principal { name: "ann".into(), scope, ..Principal::local() }
    }

    #[tokio::test]
    async fn a_call_of_a_read_token_is_answered_and_does_not_count_as_a_use() {
        let daemon = FakeDaemon::start().await;
        let (sandbox, stamp) = (&daemon.sandbox, || daemon.sandbox.activity.stamp());
        for (scope, counts) in [(Scope::Read, false), (Scope::Write, true)] {
            let before = stamp();
            let call = AgentCall::begin(sandbox, &who(scope)).await.unwrap();
            let pong = call.run(sandbox, sandbox.agent.ping()).await.unwrap();
            assert_eq!((pong.version.as_str(), stamp() != before), ("fake", counts), "{scope:?}");
        }
    }

    #[tokio::test]
    async fn a_call_of_a_read_token_does_not_resume_an_auto_paused_sandbox() {
        let daemon = FakeDaemon::start().await;
        daemon.sandbox.update_runtime(|runtime| runtime.saved.lifetime.auto_paused = true);
        daemon.sandbox.phase.send_replace(Phase::Paused);
        let before = daemon.sandbox.activity.stamp();
        let error = AgentCall::begin(&daemon.sandbox, &who(Scope::Read)).await.unwrap_err();
        assert_eq!(error.code(), Code::SandboxPaused, "{error}");
        assert_eq!(daemon.sandbox.activity.stamp(), before);
        assert!(daemon.sandbox.is_auto_paused());
    }

    #[tokio::test]
    async fn a_pause_ends_a_stream_and_only_holds_up_a_command() {
        let daemon = FakeDaemon::start().await;
        daemon.sandbox.phase.send_replace(Phase::Paused);
        let never = || std::future::pending::<agent::Result<()>>();
        let error = AgentCall::STREAM.run(&daemon.sandbox, never()).await.unwrap_err();
        assert_eq!(error.code(), Code::SandboxPaused, "{error}");
        let command = AgentCall::COMMAND.run(&daemon.sandbox, never());
        assert!(tokio::time::timeout(Duration::from_millis(20), command).await.is_err());
    }
}
