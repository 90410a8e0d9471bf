//! Who comes to a sandbox's agent: to use it, or only to look.
//!
//! A token of scope `read` changes nothing: what is asked with it neither wakes a sandbox that was paused because
//! nobody used it, nor keeps one from that.

use std::sync::Arc;

use crate::agent;
use crate::auth::principal::{Principal, Scope};
use crate::error::{Code, Error, Result};
use crate::sandbox::{Phase, Sandbox};

/// Somebody who may talk with the agent of a sandbox.
#[derive(Debug)]
pub(crate) struct Visit {
    pub(crate) sandbox: Arc<Sandbox>,
    only_looks: bool,
}

impl Visit {
    /// Fails unless the sandbox runs and has an agent. For who may use it, one that dozes goes on.
    pub(crate) async fn begin(sandbox: Arc<Sandbox>, who: &Principal) -> Result<Self> {
        let only_looks = who.scope == Scope::Read;
        match sandbox.phase() {
            Phase::Paused if only_looks => {
                let text = format!(
                    "sandbox {} is paused, and token {} may only look: one of scope use lets it go on",
                    sandbox.id, who.name
                );
                return Err(Error::new(Code::SandboxPaused, text));
            }
            _ if only_looks => sandbox.runs().await?,
            _ => sandbox.ready().await?,
        }
        Ok(Visit { sandbox, only_looks })
    }

    /// Does `work` with the agent, unless the sandbox ends, hangs or is paused meanwhile: then that is the
    /// error.
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
        for (scope, counts) in [(Scope::Read, false), (Scope::Use, true)] {
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
