//! Freezes a guest's processes for a branch or a pause, and makes sure that they are thawed, whatever happens.

use std::time::{Duration, Instant};

use forkd_protocol::agent::{FreezeRequest, FreezeResponse, FreezeSync};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::agent::{self, Agent};
use crate::error::Result;
use crate::sandbox::command::MonitorCommand;
use crate::sandbox::{DesiredState, Phase, Sandbox};
use crate::util::task::{self, Task};

/// The time between two attempts to thaw a guest.
const AGAIN: Duration = Duration::from_secs(1);

/// The result of a freeze: user processes that are frozen, if the guest complied.
pub(crate) struct Frozen {
    quiesced: bool,
    /// Whether its file systems are frozen, too, with everything on the disks.
    is_clean: bool,
    /// When the freeze began, and the thaw that is owed; `None` for a paused guest, and for one without an agent.
    standing: Option<(Instant, Owed)>,
}

/// Asks the agent of `sandbox` to freeze the guest's processes within `limit`. The caller holds the `exclusive` lock.
/// A paused guest is not asked: its processes were frozen before the pause, or cannot be now.
pub(crate) async fn freeze(sandbox: &Sandbox, limit: Duration, sync: FreezeSync) -> Frozen {
    freeze_as(sandbox, limit, FreezeRequest { sync, ..FreezeRequest::default() }).await
}

/// As [`freeze`], and the file systems of disks, too: see [`Frozen::is_clean`].
pub(crate) async fn freeze_disks(sandbox: &Sandbox, limit: Duration) -> Frozen {
    let request = FreezeRequest { sync: FreezeSync::Full, file_systems: true, ..FreezeRequest::default() };
    freeze_as(sandbox, limit, request).await
}

async fn freeze_as(sandbox: &Sandbox, limit: Duration, request: FreezeRequest) -> Frozen {
    let paused = matches!(sandbox.phase(), Phase::Paused);
    if sandbox.spec.is_bare() || paused {
        let quiesced = paused && sandbox.read_runtime(|runtime| runtime.saved.lifetime.frozen);
        return Frozen { quiesced, is_clean: false, standing: None };
    }
    // A thaw that is under way would undo this freeze. If it stays under way, the agent does not answer.
    let begun = Instant::now();
    let free = tokio::time::timeout(limit, sandbox.thaws.wait()).await.is_ok();
    let mut owed = Owed::to(sandbox);
    let left = limit.saturating_sub(begun.elapsed());
    let answer = if free { owed.after_freeze(limit, request, left).await } else { None };
    let answer = answer.unwrap_or_default();
    let is_clean = answer.frozen && answer.file_systems;
    Frozen { quiesced: answer.frozen, is_clean, standing: Some((begun, owed)) }
}

impl Frozen {
    /// Whether a guest that boots on a copy of the disks as they are finds clean file systems.
    pub(crate) fn is_clean(&self) -> bool {
        self.is_clean
    }

    /// Thaws the processes. Returns how many milliseconds they were frozen, if known, and whether they were at the fork.
    pub(crate) async fn thaw(self, patience: Duration) -> (Option<f64>, bool) {
        let Some((since, owed)) = self.standing else { return (None, self.quiesced) };
        let thawed = owed.settle(patience).await;
        ((thawed && self.quiesced).then(|| since.elapsed().as_secs_f64() * 1e3), self.quiesced)
    }
}

/// A thaw that a guest is owed. If it is dropped before the agent has thawed, a task retries until the agent has, or
/// the sandbox ends. It waits while the guest is paused.
#[derive(Debug)]
pub(crate) struct Owed(Option<Thaw>);

#[derive(Debug)]
struct Thaw {
    agent: Agent,
    /// The call of the freeze, while it has no answer and the guest may still freeze.
    freeze: Option<JoinHandle<agent::Result<FreezeResponse>>>,
    phases: watch::Receiver<Phase>,
    desired: watch::Receiver<DesiredState>,
    /// No freeze begins as long as there is one.
    _counted: TaskTrackerToken,
}

impl Owed {
    pub(crate) fn to(sandbox: &Sandbox) -> Self {
        let (phases, desired) = (sandbox.phase.subscribe(), sandbox.watch_desired());
        let (agent, _counted) = (sandbox.agent.clone(), sandbox.thaws.token());
        Owed(Some(Thaw { agent, freeze: None, phases, desired, _counted }))
    }

    /// Asks the agent to freeze its processes. Returns its answer, if that comes within `patience`.
    async fn after_freeze(
        &mut self,
        limit: Duration,
        request: FreezeRequest,
        patience: Duration,
    ) -> Option<FreezeResponse> {
        let thaw = self.0.as_mut()?;
        // The guest's own limit is shorter: if it gives up, its answer says that no process is frozen.
        let (agent, within) = (thaw.agent.clone(), limit - limit / 10);
        let freeze = async move { agent.freeze(within, request).await };
        let call = task::spawn(Task::Freeze, freeze);
        let answer = tokio::time::timeout(patience, thaw.freeze.insert(call)).await;
        if answer.is_ok() {
            thaw.freeze = None;
        }
        answer.ok()?.ok()?.ok()
    }

    /// Cancels a freeze without an answer: its connection ends, and a guest that reads it later does not freeze.
    async fn take_back_freeze(&mut self) {
        if let Some(call) = self.0.as_mut().and_then(|thaw| thaw.freeze.take()) {
            call.abort();
            let _ = call.await;
        }
    }

    /// Asks the agent to thaw its processes. Returns whether it did within `patience`; if not, the thaw stays owed.
    pub(crate) async fn settle(mut self, patience: Duration) -> bool {
        let Some(thaw) = &self.0 else { return true };
        let thawed = matches!(tokio::time::timeout(patience, thaw.agent.thaw()).await, Ok(Ok(())));
        // A freeze without an answer may still happen: thaw again after its answer.
        if thawed && thaw.freeze.is_none() {
            self.forgo();
        }
        thawed
    }

    /// Drops the obligation: the thaw is done, or not due now.
    fn forgo(&mut self) {
        self.0 = None;
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        // Without a runtime the daemon is ending, and the next one thaws the sandboxes it adopts.
        if let (Some(thaw), Ok(runtime)) = (self.0.take(), Handle::try_current()) {
            runtime.spawn(thaw.insist());
        }
    }
}

impl Thaw {
    async fn insist(mut self) {
        if let Some(freeze) = self.freeze.take() {
            let _ = freeze.await;
        }
        loop {
            let moves = self.phases.wait_for(|phase| !matches!(phase, Phase::Starting | Phase::Paused));
            let changed = self.desired.wait_for(|desired| *desired != DesiredState::Run);
            let ended = tokio::select! {
                phase = moves => phase.is_ok_and(|phase| matches!(*phase, Phase::Ended(_))),
                _ = changed => true,
            };
            if ended || self.agent.thaw().await.is_ok() {
                return;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }
}

impl Sandbox {
    /// Freezes the processes, then pauses the guest. So in a child of a branch no process runs before the child has its
    /// own identity. A guest that does not answer is paused all the same. The caller holds the `exclusive` lock.
    pub(crate) async fn pause(&self) -> Result<()> {
        // The guest keeps its memory, so it need not sync its disk.
        let mut frozen = freeze(self, self.freeze_limit, FreezeSync::Skip).await;
        if let Some((_, owed)) = &mut frozen.standing {
            owed.take_back_freeze().await;
        }
        self.ask(MonitorCommand::Pause).await?;
        if let Some((_, mut owed)) = frozen.standing {
            owed.forgo();
        }
        self.note_frozen(frozen.quiesced);
        Ok(())
    }

    /// Resumes a paused guest and thaws its processes. The caller holds the `exclusive` lock.
    pub(crate) async fn go_on(&self) -> Result<()> {
        self.activity.touch();
        // Before the resume: a record with `frozen` must mean that the sandbox is paused.
        self.note_frozen(false);
        // Whatever the record says: an earlier daemon may have been killed before it wrote that.
        let owed = (!self.spec.is_bare()).then(|| Owed::to(self));
        self.ask(MonitorCommand::Resume).await?;
        self.forget_pause();
        if let Some(owed) = owed {
            owed.settle(self.freeze_limit).await;
        }
        Ok(())
    }

    /// Records whether the processes were frozen at the pause, for the next daemon too.
    fn note_frozen(&self, frozen: bool) {
        if self.read_runtime(|runtime| runtime.saved.lifetime.frozen == frozen) {
            return;
        }
        if let Err(error) = self.update_lifetime(|lifetime, _| lifetime.frozen = frozen) {
            tracing::error!(sandbox = self.id, %error, frozen, "sandbox record not updated: frozen");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::Mutex;

    use serde_json::json;

    use super::*;
    use crate::error::{Code, Error};
    use crate::testing::fake_guest::{FakeDaemon, eventually};

    /// Commands to a supervisor, each with how often the guest had been asked to freeze and to thaw by then.
    type Done = Arc<Mutex<Vec<(&'static str, usize, usize)>>>;

    /// Stands in for the sandbox's supervisor; with `refuses` it fails a pause.
    fn keep(daemon: &FakeDaemon, refuses: bool) -> Done {
        let (sandbox, guest) = (daemon.sandbox.clone(), daemon.guest.clone());
        let done = Done::default();
        let (mut commands, log) = (sandbox.take_commands().unwrap(), done.clone());
        tokio::spawn(async move {
            while let Some(command) = commands.recv().await {
                let (what, phase, reply) = match command {
                    MonitorCommand::Pause(reply) => ("pause", Phase::Paused, reply),
                    MonitorCommand::Resume(reply) => ("resume", Phase::Running, reply),
                    other => panic!("{other:?}"),
                };
                let asked = |method: &str| guest.calls_of(method).len();
                log.lock().unwrap().push((what, asked("Freeze"), asked("Thaw")));
                if refuses && what == "pause" {
                    let _ = reply.send(Err(Error::new(Code::Internal, "the monitor does not answer")));
                    continue;
                }
                sandbox.set_phase(phase);
                let _ = reply.send(Ok(()));
            }
        });
        done
    }

    fn is_frozen(sandbox: &Sandbox) -> bool {
        sandbox.read_runtime(|runtime| runtime.saved.lifetime.frozen)
    }

    #[tokio::test]
    async fn processes_freeze_before_a_pause_and_thaw_after_it() {
        let daemon = FakeDaemon::start().await;
        let (sandbox, done) = (&daemon.sandbox, keep(&daemon, false));
        sandbox.pause().await.unwrap();
        assert!(is_frozen(sandbox));
        assert_eq!(daemon.guest.calls_of("Freeze")[0]["sync"], json!("skip"));
        // A branch of a paused sandbox is quiesced, and thaws nothing.
        let branch = freeze(sandbox, Duration::from_secs(60), FreezeSync::Quick).await;
        assert_eq!(branch.thaw(Duration::from_secs(60)).await, (None, true));
        sandbox.go_on().await.unwrap();
        assert!(!is_frozen(sandbox));
        assert_eq!(*done.lock().unwrap(), [("pause", 1, 0), ("resume", 1, 0)]);
        assert_eq!(daemon.guest.calls_of("Thaw").len(), 1);
        // A branch of a running sandbox has its own freeze and thaw.
        let branch = freeze(sandbox, Duration::from_secs(60), FreezeSync::Quick).await;
        let (frozen_ms, quiesced) = branch.thaw(Duration::from_secs(60)).await;
        assert!(frozen_ms.is_some() && quiesced);
        assert_eq!((daemon.guest.calls_of("Freeze").len(), daemon.guest.calls_of("Thaw").len()), (2, 2));
    }

    #[tokio::test]
    async fn a_guest_that_does_not_answer_the_freeze_is_paused_all_the_same() {
        let daemon = FakeDaemon::impatient_with_guests().await;
        let (sandbox, done) = (&daemon.sandbox, keep(&daemon, false));
        *daemon.guest.ignores.lock().unwrap() = Some("Freeze".into());
        sandbox.pause().await.unwrap();
        assert!(matches!(sandbox.phase(), Phase::Paused) && !is_frozen(sandbox));
        let branch = freeze(sandbox, Duration::from_secs(60), FreezeSync::Quick).await;
        assert_eq!(branch.thaw(Duration::from_secs(60)).await, (None, false));
        sandbox.go_on().await.unwrap();
        assert_eq!(*done.lock().unwrap(), [("pause", 1, 0), ("resume", 1, 0)]);
        eventually("the thaw", || daemon.guest.calls_of("Thaw").len() == 1).await;
    }

    #[tokio::test]
    async fn processes_go_on_when_the_pause_fails_or_its_caller_leaves() {
        let daemon = FakeDaemon::start().await;
        let done = keep(&daemon, true);
        assert!(daemon.sandbox.pause().await.is_err());
        assert!(!is_frozen(&daemon.sandbox));
        eventually("the thaw", || daemon.guest.calls_of("Thaw").len() == 1).await;
        assert_eq!(*done.lock().unwrap(), [("pause", 1, 0)]);

        // The supervisor is busy, and the caller does not wait for it.
        let daemon = FakeDaemon::start().await;
        let _busy = daemon.sandbox.take_commands();
        let sandbox = daemon.sandbox.clone();
        let caller = tokio::spawn(async move { sandbox.pause().await });
        eventually("the freeze", || daemon.guest.calls_of("Freeze").len() == 1).await;
        caller.abort();
        eventually("the thaw", || daemon.guest.calls_of("Thaw").len() == 1).await;

        // The caller leaves before the guest has answered: the thaw comes after the freeze.
        let daemon = FakeDaemon::impatient_with_guests().await;
        *daemon.guest.ignores.lock().unwrap() = Some("Freeze".into());
        let sandbox = daemon.sandbox.clone();
        let caller =
            tokio::spawn(async move { freeze(&sandbox, Duration::from_secs(60), FreezeSync::Skip).await });
        eventually("the freeze", || daemon.guest.calls_of("Freeze").len() == 1).await;
        caller.abort();
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(daemon.guest.calls_of("Thaw").is_empty(), "the guest may yet freeze");
        daemon.guest.answers.notify_one();
        eventually("the thaw", || daemon.guest.calls_of("Thaw").len() == 1).await;
    }

    #[tokio::test]
    async fn a_thaw_that_is_owed_waits_for_a_paused_guest_and_holds_up_the_next_freeze() {
        let daemon = FakeDaemon::start().await;
        let sandbox = &daemon.sandbox;
        sandbox.set_phase(Phase::Paused);
        drop(Owed::to(sandbox));
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(daemon.guest.calls_of("Thaw").is_empty(), "it cannot hear that");
        *daemon.guest.ignores.lock().unwrap() = Some("Thaw".into());
        sandbox.set_phase(Phase::Running);
        eventually("the thaw", || daemon.guest.calls_of("Thaw").len() == 1).await;
        let frozen = sandbox.clone();
        let frozen =
            tokio::spawn(async move { freeze(&frozen, Duration::from_secs(60), FreezeSync::Quick).await });
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(daemon.guest.calls_of("Freeze").is_empty(), "the thaw would undo it");
        *daemon.guest.ignores.lock().unwrap() = None;
        daemon.guest.answers.notify_one();
        let frozen = frozen.await.unwrap();
        assert!(frozen.quiesced);
        let calls: Vec<String> =
            daemon.guest.calls.lock().unwrap().iter().map(|(method, _)| method.clone()).collect();
        assert_eq!(calls, ["Thaw", "Freeze"]);
    }
}
