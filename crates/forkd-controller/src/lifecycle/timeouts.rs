//! Time-outs of sandboxes: one task checks all sandboxes every second.
//!
//! Deleting a sandbox takes a moment. Pausing it, or suspending it (`suspend`), is a task of its own. If that fails,
//! the daemon tries again later and the sandbox goes on meanwhile: a full disk loses nothing. A client that uses an
//! idle sandbox while it is being suspended cancels the suspend.

use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_api::OnTimeout;
use tokio_util::sync::CancellationToken;

use crate::auth::principal::{Principal, Scope};
use crate::auth::tokens::Tokens;
use crate::branch::suspend::{self, Suspend};
use crate::error::{Code, Error, Result};
use crate::sandbox::lifetime::{Attempt, IDLE, SUSPENDED, SuspendGuard, TIMED_OUT};
use crate::sandbox::registry::Registry;
use crate::sandbox::{End, Phase, RuntimeInfo, Sandbox};
use crate::snapshot::branch_job::Mode;
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::task::{self, Task};
use crate::util::time::{self, now_unix};
use crate::workspace::{PauseSpec, Workspaces};

/// How often the task checks all sandboxes.
const EVERY: Duration = Duration::from_secs(1);
/// How often `prune` removes old data.
const PRUNE_EVERY: Duration = Duration::from_secs(60);
/// How long after a failed attempt the next one begins.
const AGAIN: Duration = Duration::from_secs(30);
/// How many tags are tried for the snapshot of a suspended sandbox.
const MAX_NAMES: u32 = 100;

/// Why a sandbox's time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due {
    /// Its deadline has passed.
    Expired,
    /// No client has used it for so many seconds.
    Idle(u64),
}

impl Due {
    /// The reason, for texts.
    fn because(self) -> String {
        match self {
            Due::Expired => "its time was up (timeout_secs)".into(),
            Due::Idle(secs) => format!("no client used it for {secs} s (idle_timeout_secs)"),
        }
    }
}

/// Acts on sandboxes whose time is over.
#[derive(Debug, Clone)]
pub(crate) struct Timeouts {
    pub(crate) registry: Arc<Registry>,
    pub(crate) snapshots: Arc<SnapshotRegistry>,
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) tokens: Arc<Tokens>,
}

impl Sandbox {
    /// Why the sandbox's time is over, if it is; none while an attempt to act on it is under way or has just failed.
    fn due(&self, now: u64) -> Option<Due> {
        let phase = self.phase();
        if matches!(phase, Phase::Ended(_)) {
            return None;
        }
        self.read_runtime(|runtime| {
            match runtime.attempt {
                Attempt::UnderWay => return None,
                Attempt::Failed(at) if at.elapsed() < AGAIN => return None,
                Attempt::None | Attempt::Failed(_) => {}
            }
            let kill = runtime.saved.lifetime.on_timeout == OnTimeout::Kill;
            let started = !matches!(phase, Phase::Starting);
            if runtime.saved.deadline_unix.is_some_and(|at| at <= now) && (started || kill) {
                return Some(Due::Expired);
            }
            // There is nothing left to do for `pause`: a paused sandbox has no uses.
            let stays_paused =
                matches!(phase, Phase::Paused) && runtime.saved.lifetime.on_timeout == OnTimeout::Pause;
            let idle = runtime.saved.lifetime.idle_timeout_secs.filter(|_| started && !stays_paused)?;
            (self.activity.idle() >= Duration::from_secs(idle)).then_some(Due::Idle(idle))
        })
    }

    /// Whether the time is still over because of `due`, and `action` is what follows. A client may have changed both since
    /// the daemon looked.
    fn is_still(&self, due: Due, action: OnTimeout, runtime: &RuntimeInfo) -> bool {
        let lifetime = &runtime.saved.lifetime;
        let is_over = match due {
            Due::Expired => runtime.saved.deadline_unix.is_some_and(|at| at <= now_unix()),
            Due::Idle(_) => lifetime
                .idle_timeout_secs
                .is_some_and(|secs| self.activity.idle() >= Duration::from_secs(secs)),
        };
        is_over && lifetime.on_timeout == action
    }
}

impl Timeouts {
    /// Looks every second, until the daemon stops.
    pub(crate) async fn enforce(self, stopping: CancellationToken, prune: impl AsyncFn()) {
        let mut every = tokio::time::interval(EVERY);
        every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut pruned: Option<Instant> = None;
        let mut steps = time::ClockStepDetector::new();
        loop {
            tokio::select! {
                _ = every.tick() => {}
                () = stopping.cancelled() => return,
            }
            let (step, now) = (steps.look(), now_unix());
            for sandbox in self.registry.list() {
                if let Some(secs) = step
                    && let Err(error) = self.follow_clock(&sandbox, secs).await
                {
                    tracing::warn!(sandbox = sandbox.id, %error, "sandbox deadline not updated");
                }
                match sandbox.due(now) {
                    Some(due) => self.act(sandbox, due),
                    None => self.remove_ended(&sandbox),
                }
            }
            if pruned.is_none_or(|at| at.elapsed() >= PRUNE_EVERY) {
                prune().await;
                let workspaces = self.workspaces.clone();
                task::spawn(Task::TimeoutAction, async move { workspaces.delete_expired().await });
                pruned = Some(Instant::now());
            }
        }
    }

    /// Moves the deadline by a step of the host's clock, wherever it is written.
    async fn follow_clock(&self, sandbox: &Arc<Sandbox>, secs: i64) -> Result<()> {
        move_deadline(sandbox, secs)?;
        self.workspaces.keep_deadline(sandbox).await
    }

    fn act(&self, sandbox: Arc<Sandbox>, due: Due) {
        let action = sandbox.read_runtime(|runtime| runtime.saved.lifetime.on_timeout);
        tracing::info!(sandbox = sandbox.id, ?due, ?action, "sandbox timed out");
        if action == OnTimeout::Kill {
            return self.kill(&sandbox, due);
        }
        sandbox.update_runtime(|runtime| runtime.attempt = Attempt::UnderWay);
        let (timeouts, waiting) = (self.clone(), sandbox.clone());
        let work = async move {
            let acted = match action {
                OnTimeout::Pause => timeouts.pause(&sandbox, due).await,
                _ => timeouts.suspend(&sandbox, due).await,
            };
            let attempt = match acted {
                Ok(()) => Attempt::None,
                Err(error) => {
                    tracing::warn!(sandbox = sandbox.id, %error, "sandbox not paused or suspended; trying again later");
                    Attempt::Failed(Instant::now())
                }
            };
            sandbox.update_runtime(|runtime| runtime.attempt = attempt);
        };
        task::spawn_or(Task::TimeoutAction, work, move |_| {
            waiting.update_runtime(|runtime| runtime.attempt = Attempt::Failed(Instant::now()));
        });
    }

    /// Removes a sandbox of the E2B API that ended by itself: its clients never ask for its end, and never delete it.
    fn remove_ended(&self, sandbox: &Arc<Sandbox>) {
        let is_e2b = || sandbox.read_runtime(|runtime| runtime.saved.e2b.is_some());
        if let Phase::Ended(end) = sandbox.phase()
            && is_e2b()
        {
            tracing::info!(sandbox = sandbox.id, reason = end.reason, "ended sandbox of the E2B API removed");
            self.registry.end(sandbox, (*end).clone());
            let (workspaces, id) = (self.workspaces.clone(), sandbox.id.clone());
            task::spawn(Task::TimeoutAction, async move { workspaces.delete_if_useless(&id).await });
        }
    }

    /// Ends a sandbox. One of the E2B API that was paused earlier has states on disk, from which it must not come back:
    /// they are marked as deleted first, when no other change of them is under way. A client that lengthens the sandbox's
    /// life before that keeps it.
    fn kill(&self, sandbox: &Arc<Sandbox>, due: Due) {
        let reason = if due == Due::Expired { TIMED_OUT } else { IDLE };
        let end = End::new(reason, due.because(), String::new());
        let expire =
            move |sandbox: &Sandbox| sandbox.expire_if(|now| sandbox.is_still(due, OnTimeout::Kill, now));
        let is_e2b = sandbox.read_runtime(|runtime| runtime.saved.e2b.is_some());
        if !is_e2b || !self.workspaces.has(&sandbox.id) {
            if expire(sandbox) {
                self.registry.end(sandbox, end);
            }
            return;
        }
        sandbox.update_runtime(|runtime| runtime.attempt = Attempt::UnderWay);
        let (timeouts, sandbox) = (self.clone(), sandbox.clone());
        task::spawn(Task::TimeoutAction, async move {
            let mut expired = None;
            let decide = || *expired.insert(expire(&sandbox));
            let deleted = timeouts.workspaces.delete_of(&sandbox, end.clone(), decide).await;
            if let Err(error) = deleted {
                tracing::warn!(sandbox = sandbox.id, %error, "paused states of an ended sandbox not removed");
            }
            // Also if it had no state yet.
            if expired.unwrap_or_else(|| expire(&sandbox)) {
                timeouts.registry.end(&sandbox, end);
            }
            sandbox.update_runtime(|runtime| runtime.attempt = Attempt::None);
        });
    }

    async fn pause(&self, sandbox: &Sandbox, due: Due) -> Result<()> {
        let idle = due != Due::Expired;
        let stamp = sandbox.activity.stamp();
        let _turn = sandbox.lock_exclusive().await?;
        let used = || idle && sandbox.activity.stamp() != stamp;
        // A client changes the time in a turn of its own.
        let is_due = sandbox.read_runtime(|now| sandbox.is_still(due, OnTimeout::Pause, now));
        if used() || !is_due || matches!(sandbox.phase(), Phase::Ended(_)) {
            return Ok(());
        }
        if !matches!(sandbox.phase(), Phase::Paused) || sandbox.waits_for_room() {
            // Before the pause: the next daemon must know why the sandbox is paused.
            update_lifetime(sandbox, |lifetime, _| lifetime.auto_paused = idle)?;
            sandbox.pause().await?;
        }
        if !idle {
            // A deadline acts once: a client that wants more time resumes the sandbox.
            update_lifetime(sandbox, |lifetime, deadline| {
                *deadline = None;
                lifetime.auto_paused = false;
            })?;
        }
        // A client that used the sandbox before its phase was `Paused` did not resume it.
        if used() {
            sandbox.go_on().await?;
        }
        Ok(())
    }

    async fn suspend(&self, sandbox: &Arc<Sandbox>, due: Due) -> Result<()> {
        let idle = due != Due::Expired;
        let unused_since = idle.then(|| sandbox.activity.stamp());
        let is_due = |now: &RuntimeInfo| sandbox.is_still(due, OnTimeout::Suspend, now);
        let quota = self.tokens.quota_of(&sandbox.spec.owner);
        let e2b = sandbox.read_runtime(|runtime| runtime.saved.e2b.as_ref().map(|state| state.keeps_memory));
        if let Some(keeps_memory) = e2b {
            let owner = sandbox.spec.owner.clone();
            let who = Principal { quota, owner, scope: Scope::Write, ..Principal::local() };
            // It refuses uses from its turn on: a use that is refused resumes the sandbox, and waits for that turn.
            let pause = PauseSpec { keeps_memory, requires_healthy_guest: false };
            return self.workspaces.pause_to_disk(sandbox, pause, &who, is_due).await;
        }
        // A use cancels an idle suspend. After a deadline uses are refused instead: their effects would be lost.
        let suspending = SuspendGuard::begin_if(sandbox, |now| !idle && is_due(now));
        if !idle && suspending.is_none() {
            return Ok(());
        }
        if let Some(name) = sandbox.read_runtime(|runtime| runtime.saved.workspace.clone()) {
            let who = Principal { quota, ..Principal::local() };
            self.workspaces.suspend(&name, Mode::Full, &who, unused_since).await?;
            return Ok(());
        }
        let suspend = Suspend::begin(&self.registry, &self.snapshots, sandbox).await?;
        let tag = self.free_tag(sandbox)?;
        let text = format!("{}, and it was stored as snapshot {tag}; fork that to go on", due.because());
        let end = End::new(SUSPENDED, text, String::new());
        let (mode, requires_quiesced) = (Mode::Suspend, false);
        let order = suspend::SuspendSpec { tag, mode, requires_quiesced, quota, unused_since, end };
        // The end of the sandbox is the commit.
        suspend.run(order, async { Ok(()) }).await.map(drop)
    }

    /// The tag of the snapshot: `suspend_as`, or `idle-ID` with or without a number if that is taken.
    fn free_tag(&self, sandbox: &Sandbox) -> Result<String> {
        let own = format!("idle-{}", sandbox.id);
        let wanted = sandbox.read_runtime(|runtime| runtime.saved.lifetime.suspend_as.clone());
        let numbered = (2..MAX_NAMES).map(|number| format!("{own}-{number}"));
        for tag in wanted.into_iter().chain([own.clone()]).chain(numbered) {
            match self.snapshots.get(&tag) {
                Err(error) if error.code().is_not_found() => return Ok(tag),
                _ => {}
            }
        }
        let text = format!("there are too many snapshots called {own}; remove some (`forkd rmi`)");
        Err(Error::new(Code::TagTaken, text))
    }
}

/// Moves the deadline by a step of the host's clock, so that as much time is left as before.
fn move_deadline(sandbox: &Sandbox, secs: i64) -> Result<()> {
    if sandbox.read_runtime(|runtime| runtime.saved.deadline_unix.is_none()) {
        return Ok(());
    }
    update_lifetime(sandbox, |_, deadline| *deadline = deadline.map(|at| at.saturating_add_signed(secs)))
}

fn update_lifetime(
    sandbox: &Sandbox,
    change: impl FnOnce(&mut crate::sandbox::lifetime::Lifetime, &mut Option<u64>),
) -> Result<()> {
    sandbox
        .update_lifetime(change)
        .map_err(|error| Error::host("cannot write the record of a sandbox", error))
}

#[cfg(test)]
mod tests;
