//! The states of a sandbox ([`Phase`]): the one place where they change, and where each change becomes an event.
//!
//! ```text
//!            boot, fork or rollback                agent silent too long
//!   Starting ───────────────────────► Running ──────────────────────────► Unresponsive
//!      │                               ▲  │   ◄─────────────────────────      │
//!      │                        resume │  │ pause    agent answers again,     │ pause
//!      │    adopted while paused       │  ▼          or resume                │
//!      ├─────────────────────────────► Paused ◄───────────────────────────────┘
//!      ▼
//!   Ended(reason) ◄── from every state
//!
//!   Unknown ──► Ended
//! ```
//!
//! - *pause*: a client, a time-out or a suspend asks for it, or the host's disk is full.
//! - *resume*: a client asks for it, the disk has room again, or a client uses a sandbox that an idle time-out paused.
//! - *Unknown*: a daemon that starts cannot read the record of the sandbox. A client can only delete it.
//!
//! | code | changes |
//! |---|---|
//! | the supervisor | `Starting` to `Running` or `Paused`, any to `Ended`; to `Paused` when the disk is full |
//! | a command, and [`quiesce`](crate::sandbox::quiesce) | pause, resume |
//! | the watchdog | `Running` and `Unresponsive` |
//! | adoption, and `unknown` | to `Unknown`; to `Ended` if the process is gone, or an unknown sandbox is deleted |
//!
//! [`Phase::may_become`] has the arrows; no other change is made. Requests never change the state. They set what is
//! desired ([`DesiredState`](crate::sandbox::DesiredState)), and the supervisor acts on it.
//!
//! [`forkd_api::SandboxInfo::reason`] lists the reasons of an end. One more, `rolled_back`, is the end of a process and
//! not of its sandbox, which continues as another process: no client gets it.
//!
//! This file emits events and counts nothing: each operation adds to its own metrics where it ends.

use std::sync::atomic::Ordering;

use forkd_api::{EventKind, EventSubject};

use crate::sandbox::disk_full::{DISK_FULL, DISK_FULL_DETAIL};
use crate::sandbox::{Phase, ROLLED_BACK, Sandbox};
use crate::util::time;

impl Phase {
    /// The arrows of the diagram, and a pause or a resume that is repeated.
    fn may_become(&self, next: &Phase) -> bool {
        use Phase::{Ended, Paused, Running, Starting, Unknown, Unresponsive};
        matches!(
            (self, next),
            (Starting, Running | Paused | Unknown(_))
                | (Running | Unresponsive | Paused, Running | Unresponsive | Paused)
                | (Starting | Running | Unresponsive | Paused | Unknown(_), Ended(_))
        ) && !matches!((self, next), (Paused, Unresponsive))
    }
}

impl Sandbox {
    /// Changes the phase and emits the event of that change.
    pub(crate) fn set_phase(&self, phase: Phase) {
        self.transition(|old| {
            let kind = match (old, &phase) {
                (Phase::Paused, Phase::Running) => Some(EventKind::SandboxResumed),
                (_, Phase::Running) => Some(EventKind::SandboxRunning),
                (_, Phase::Paused) => Some(EventKind::SandboxPaused),
                (_, Phase::Unresponsive) => Some(EventKind::SandboxUnresponsive),
                // Another process replaces this one; the event comes when that one runs.
                (_, Phase::Ended(end)) if end.reason == ROLLED_BACK => None,
                (_, Phase::Ended(_)) => Some(EventKind::SandboxEnded),
                // `created` emits an event for a start. A daemon that can read the record emits the later ones.
                (_, Phase::Starting | Phase::Unknown(_)) => None,
            };
            Some((phase.clone(), kind))
        });
    }

    /// Sets the phase to running after a rollback.
    pub(crate) fn note_rolled_back(&self) {
        self.transition(|_| Some((Phase::Running, Some(EventKind::SandboxRolledBack))));
    }

    /// Sets whether the agent answers, in the phases running and unresponsive. Returns whether that changed the phase.
    pub(crate) fn answers(&self, answers: bool) -> bool {
        self.transition(|old| match (old, answers) {
            (Phase::Running, false) => Some((Phase::Unresponsive, Some(EventKind::SandboxUnresponsive))),
            (Phase::Unresponsive, true) => Some((Phase::Running, Some(EventKind::SandboxRunning))),
            _ => None,
        })
    }

    fn transition(&self, next: impl FnOnce(&Phase) -> Option<(Phase, Option<EventKind>)>) -> bool {
        self.phase.send_if_modified(|phase| {
            let Some((new, kind)) = next(phase) else { return false };
            if !phase.may_become(&new) {
                tracing::warn!(sandbox = self.id, from = ?phase, to = ?new, "state not changed: no such change exists");
                return false;
            }
            *phase = new;
            // While the phase is locked: events come in the order of the changes.
            if let Some(kind) = kind {
                self.emit(kind, phase);
            }
            true
        })
    }

    fn emit(&self, kind: EventKind, phase: &Phase) {
        let runtime = self.runtime();
        let snapshot = match kind {
            EventKind::SandboxBranched => runtime.saved.history.last_branch_tag,
            EventKind::SandboxRolledBack => runtime.saved.history.rolled_back_to,
            _ => self.spec.snapshot_tag.clone(),
        };
        let end = match phase {
            Phase::Ended(end) => Some(end.clone()),
            _ => None,
        };
        let disk_full = kind == EventKind::SandboxPaused && runtime.disk_full;
        let about = EventSubject {
            sandbox: Some(self.id.clone()),
            snapshot,
            owner: Some(self.spec.owner.clone()),
            workspace: runtime.saved.workspace,
            reason: end.as_ref().map(|end| end.reason.clone()).or(disk_full.then(|| DISK_FULL.into())),
            detail: end.map(|end| end.detail.clone()).or(disk_full.then(|| DISK_FULL_DETAIL.into())),
            ready_ms: runtime.ready_ms.filter(|_| kind == EventKind::SandboxRunning),
        };
        self.telemetry.events.emit(kind, about);
    }

    /// Emits the event of its creation.
    pub(crate) fn created(&self) {
        self.emit(EventKind::SandboxCreated, &Phase::Starting);
    }

    /// Emits the event of a branch.
    pub(crate) fn note_branched(&self) {
        self.emit(EventKind::SandboxBranched, &Phase::Running);
    }

    /// Records that the agent answered now.
    pub(crate) fn heard(&self) {
        self.heard.store(time::now_ms(), Ordering::Relaxed);
    }

    /// The time of the agent's last answer, in milliseconds since 1970; `None` before the first.
    pub(crate) fn last_heard(&self) -> Option<u64> {
        Some(self.heard.load(Ordering::Relaxed)).filter(|at| *at > 0)
    }
}

#[cfg(test)]
mod tests;
