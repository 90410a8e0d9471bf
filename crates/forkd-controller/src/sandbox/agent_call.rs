//! Work with a sandbox's agent that a pause ends, too: what streams, and would only stand still.

use crate::agent;
use crate::error::{Code, Error, Result};
use crate::sandbox::{Phase, Sandbox};

impl Sandbox {
    /// Does `work` with the agent, unless the sandbox ends, hangs or is paused meanwhile: then that is the
    /// error. Meanwhile it is in use.
    pub(crate) async fn undisturbed<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let _in_use = self.in_use();
        self.unnoticed(work).await
    }

    /// As [`undisturbed`](Sandbox::undisturbed), but it is not in use by that.
    pub(crate) async fn unnoticed<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        tokio::select! {
            done = self.ask_agent(work) => done,
            error = self.paused() => Err(error),
        }
    }

    /// Returns when it is paused, with that as an error. One that waits for room on the host's disk goes on by
    /// itself, and so does what streams.
    async fn paused(&self) -> Error {
        let mut phases = self.phase.subscribe();
        let paused =
            |phase: &Phase| matches!(phase, Phase::Paused) && !self.read_runtime(|facts| facts.disk_full);
        if phases.wait_for(paused).await.is_err() {
            // Would mean that `self` is gone.
            std::future::pending::<()>().await;
        }
        let text =
            format!("sandbox {id} was paused meanwhile; `forkd resume {id}` lets it go on", id = self.id);
        Error::new(Code::SandboxPaused, text)
    }
}
