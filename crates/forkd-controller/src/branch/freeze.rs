//! Having a guest's processes stand still for a branch, and having them go on, whatever happens.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::agent::FreezeSync;
use tokio::task::JoinHandle;

use crate::agent;
use crate::sandbox::{Phase, Sandbox};

/// User processes that may stand still.
pub(super) struct Frozen {
    since: Option<Instant>,
    quiesced: bool,
    /// A call that was not answered in time, and may still be done.
    late: Option<JoinHandle<agent::Result<bool>>>,
}

/// Has the agent of `sandbox` stand its processes still, if it has one and does so within `limit`.
pub(super) async fn freeze(sandbox: &Arc<Sandbox>, limit: Duration) -> Frozen {
    if sandbox.spec.is_bare() || matches!(sandbox.phase(), Phase::Paused) {
        return Frozen { since: None, quiesced: false, late: None };
    }
    let since = Some(Instant::now());
    let source = sandbox.clone();
    // The guest gives up first: then it is known that nothing stands still in it.
    let within = limit - limit / 10;
    let call = async move { source.agent.freeze(within, FreezeSync::Quick).await.map(|it| it.frozen) };
    let mut call = tokio::spawn(call);
    match tokio::time::timeout(limit, &mut call).await {
        Ok(answer) => {
            let quiesced = matches!(answer, Ok(Ok(true)));
            Frozen { since, quiesced, late: None }
        }
        Err(_) => Frozen { since, quiesced: false, late: Some(call) },
    }
}

impl Frozen {
    /// Lets them go on. How long they stood still, if they did, and whether they did at the pause.
    pub(super) async fn thaw(self, sandbox: Arc<Sandbox>, patience: Duration) -> (Option<f64>, bool) {
        let Some(since) = self.since else { return (None, false) };
        if let Some(late) = self.late {
            // It may yet freeze them: once more when that is known.
            let source = sandbox.clone();
            tokio::spawn(async move {
                let _ = late.await;
                thaw_for_sure(&source).await;
            });
        }
        match tokio::time::timeout(patience, sandbox.agent.thaw()).await {
            Ok(Ok(())) => (self.quiesced.then(|| since.elapsed().as_secs_f64() * 1e3), self.quiesced),
            _ => {
                tokio::spawn(async move { thaw_for_sure(&sandbox).await });
                (None, self.quiesced)
            }
        }
    }
}

/// Lets the processes of `sandbox` go on, however long its agent takes to answer. For sandboxes whose
/// daemon was killed in the middle of a branch, too.
pub(crate) async fn thaw_for_sure(sandbox: &Sandbox) {
    while !matches!(sandbox.phase(), Phase::Ended(_)) && sandbox.agent.thaw().await.is_err() {
        tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(1)) => {}
            _ = sandbox.dismissed() => return,
        }
    }
}
