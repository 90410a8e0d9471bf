//! Calls to the agent that also end when the sandbox is paused: a stream would only stall then.

use crate::agent;
use crate::error::{Code, Error, Result};
use crate::sandbox::{Phase, Sandbox};

impl Sandbox {
    /// Does `work` with the agent, and counts as a use for that time. If the sandbox ends, becomes unresponsive or
    /// is paused first, the error says so.
    pub(crate) async fn undisturbed<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let _in_use = self.in_use();
        self.unnoticed(work).await
    }

    /// As [`undisturbed`](Sandbox::undisturbed), but does not count as a use.
    pub(crate) async fn unnoticed<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        tokio::select! {
            done = self.ask_agent(work) => done,
            error = self.paused() => Err(error),
        }
    }

    /// Waits until the sandbox is paused, and returns that as an error. A pause because of a full disk does not count:
    /// it ends by itself, and the stream continues.
    async fn paused(&self) -> Error {
        let mut phases = self.phase.subscribe();
        let paused =
            |phase: &Phase| matches!(phase, Phase::Paused) && !self.read_runtime(|facts| facts.disk_full);
        if phases.wait_for(paused).await.is_err() {
            // Not reached: `self` holds the sender.
            std::future::pending::<()>().await;
        }
        let text = format!("sandbox {id} was paused meanwhile; `forkd resume {id}` resumes it", id = self.id);
        Error::new(Code::SandboxPaused, text)
    }
}
