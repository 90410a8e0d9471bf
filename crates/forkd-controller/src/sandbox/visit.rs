//! Access of a caller to a sandbox's agent: as a use, or as a read only.
//!
//! A token of scope `read` changes nothing. Its requests neither resume an auto-paused sandbox nor count as uses, so the
//! idle time-out still comes.

use std::sync::Arc;

use crate::agent;
use crate::auth::principal::{Principal, Scope};
use crate::error::{Code, Error, Result};
use crate::sandbox::{Phase, Sandbox};

/// A caller's access to the agent of a sandbox.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) sandbox: Arc<Sandbox>,
    only_looks: bool,
}

impl Visit {
    /// Fails unless the sandbox runs and has an agent. Resumes an auto-paused sandbox if the caller may use it.
    pub(crate) async fn begin(sandbox: Arc<Sandbox>, who: &Principal) -> Result<Self> {
        let only_looks = who.scope == Scope::Read;
        match sandbox.phase() {
            Phase::Paused if only_looks => {
                let text = format!(
                    "sandbox {} is paused, and token {} may only read; resume it with a token of scope write",
                    sandbox.id, who.name
                );
                return Err(Error::new(Code::SandboxPaused, text));
            }
            _ if only_looks => sandbox.runs().await?,
            _ => sandbox.ready().await?,
        }
        Ok(Visit { sandbox, only_looks })
    }

    /// Does `work` with the agent. If the sandbox ends, becomes unresponsive or is paused first, the error says so.
    pub(crate) async fn undisturbed<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        match self.only_looks {
            true => self.sandbox.unnoticed(work).await,
            false => self.sandbox.undisturbed(work).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::fake_guest::FakeDaemon;

    fn who(scope: Scope) -> Principal {
        Principal { name: "ann".into(), scope, ..Principal::local() }
    }

    #[tokio::test]
    async fn who_may_only_look_is_answered_and_is_no_use_of_it() {
        let daemon = FakeDaemon::start().await;
        let stamp = || daemon.sandbox.activity.stamp();
        for (scope, counts) in [(Scope::Read, false), (Scope::Write, true)] {
            let before = stamp();
            let visit = Visit::begin(daemon.sandbox.clone(), &who(scope)).await.unwrap();
            let pong = visit.undisturbed(visit.sandbox.agent.ping()).await.unwrap();
            assert_eq!((pong.version.as_str(), stamp() != before), ("fake", counts), "{scope:?}");
        }
    }

    #[tokio::test]
    async fn who_may_only_look_does_not_wake_what_dozes() {
        let daemon = FakeDaemon::start().await;
        daemon.sandbox.update_runtime(|facts| facts.saved.lifetime.auto_paused = true);
        daemon.sandbox.phase.send_replace(Phase::Paused);
        let before = daemon.sandbox.activity.stamp();
        let error = Visit::begin(daemon.sandbox.clone(), &who(Scope::Read)).await.unwrap_err();
        assert_eq!(error.code(), Code::SandboxPaused, "{error}");
        assert_eq!(daemon.sandbox.activity.stamp(), before);
        assert!(daemon.sandbox.is_auto_paused());
    }
}
