//! Suspending a sandbox: the daemon stores it as a snapshot, then ends it. Time-outs and workspaces both do it here.
//!
//! # Crash rules
//!
//! The first step writes a note into the sandbox's record: [`Suspending`], with the snapshot's tag. The last step is
//! one write, the commit: for a workspace its record, which names the snapshot and no sandbox any more; for any other
//! sandbox its end. A daemon that finds a note in the record of a sandbox that is not ended undoes that suspend: it
//! resumes the sandbox if the suspend paused it, removes the snapshot, then removes the note. Each of these can be
//! done again, so a daemon that is killed meanwhile changes nothing.
//!
//! | killed after | on disk | the next daemon |
//! |---|---|---|
//! | the note | the tag | removes the note |
//! | the branch | and a snapshot, or a template that is being saved | removes both |
//! | the pause, which is noted before it | and that the suspend paused it | resumes the sandbox, removes both |
//! | the save | the same, and the snapshot is on disk | the same |
//! | the commit | the workspace names the snapshot | ends the sandbox, keeps the snapshot |
//! | the end | nothing of the sandbox that could be taken over | ends its process, keeps the snapshot |
//!
//! A daemon does the same when a suspend fails, and when a client uses an idle sandbox meanwhile. A sandbox that dies
//! by itself while it is paused is the exception: its snapshot is all that is left of it, and stays.

use std::sync::Arc;

use forkd_store::Quota;
use tokio::sync::OwnedMutexGuard;

use crate::branch;
use crate::error::{Code, Error, Result};
use crate::sandbox::lifetime::{Lifetime, Suspending};
use crate::sandbox::registry::Registry;
use crate::sandbox::{End, Phase, Sandbox};
use crate::snapshot::branch_job::Mode;
use crate::snapshot::registry::{Entry, Removal, SnapshotRegistry, SnapshotState};
use crate::util::task::{self, Task};

/// The order for a suspend.
#[derive(Debug)]
pub(crate) struct SuspendSpec {
    /// The snapshot to store it as; no other may have the tag.
    pub(crate) tag: String,
    pub(crate) mode: Mode,
    /// Whether the suspend fails if the agent did not freeze the guest's processes for the branch.
    pub(crate) requires_quiesced: bool,
    /// The most the sandbox's owner may have.
    pub(crate) quota: Quota,
    /// If given, a use of the sandbox since then cancels the suspend.
    pub(crate) unused_since: Option<(u64, usize)>,
    /// How the sandbox ends.
    pub(crate) end: End,
}

/// The right to suspend a sandbox: one at a time.
pub(crate) struct Suspend {
    registry: Arc<Registry>,
    snapshots: Arc<SnapshotRegistry>,
    sandbox: Arc<Sandbox>,
    _alone: OwnedMutexGuard<()>,
}

impl Suspend {
    /// Waits for its turn, and undoes what an earlier suspend left.
    pub(crate) async fn begin(
        registry: &Arc<Registry>,
        snapshots: &Arc<SnapshotRegistry>,
        sandbox: &Arc<Sandbox>,
    ) -> Result<Self> {
        let _alone = sandbox.suspends.clone().lock_owned().await;
        let (registry, snapshots, sandbox) = (registry.clone(), snapshots.clone(), sandbox.clone());
        let suspend = Suspend { registry, snapshots, sandbox, _alone };
        suspend.undo().await?;
        Ok(suspend)
    }

    /// Suspends the sandbox. `commit` runs when the snapshot is on disk and the sandbox is paused; from its
    /// success on the sandbox is suspended. `false`: a client uses the sandbox, and it goes on.
    pub(crate) async fn run(
        self,
        order: SuspendSpec,
        commit: impl Future<Output = Result<()>>,
    ) -> Result<bool> {
        let suspended = self.attempt(order, commit).await;
        if matches!(suspended, Ok(true)) {
            return suspended;
        }
        let undone = self.undo().await;
        // The error of the suspend matters more than that of the undo.
        let suspended = suspended?;
        undone.map(|()| suspended)
    }

    async fn attempt(&self, order: SuspendSpec, commit: impl Future<Output = Result<()>>) -> Result<bool> {
        let SuspendSpec { tag, mode, requires_quiesced, quota, unused_since, end } = order;
        let sandbox = &self.sandbox;
        let used = || unused_since.is_some_and(|stamp| sandbox.activity.stamp() != stamp);
        let note = Suspending { tag: tag.clone(), paused: false };
        self.update_lifetime(|lifetime| lifetime.suspending = Some(note))?;
        self.at("noted");
        // While the sandbox runs: the agent freezes the guest's processes for the branch.
        let order = branch::BranchSpec { tag: Some(tag.clone()), mode, wait: true, parent_tag: None, quota };
        let branch = self.snapshots.branch(sandbox, order)?;
        let job = branch.branch();
        branch.wait_forkable().await?;
        let quiesced = job.is_some_and(|job| job.capture_stats().quiesced == Some(true));
        if requires_quiesced && !quiesced {
            let text = format!(
                "the agent of sandbox {} did not freeze its processes in time; try again, or leave out the requirement",
                sandbox.id
            );
            return Err(Error::new(Code::GuestTimeout, text));
        }
        self.at("branched");
        {
            let _turn = sandbox.lock_exclusive().await?;
            if used() {
                return Ok(false);
            }
            if !matches!(sandbox.phase(), Phase::Paused) {
                // Before the pause: the next daemon must know the reason for it. With `auto_paused` a use resumes it.
                self.update_lifetime(|lifetime| {
                    lifetime.auto_paused = unused_since.is_some();
                    lifetime.suspending.iter_mut().for_each(|note| note.paused = true);
                })?;
                self.at("pausing");
                sandbox.pause().await?;
            }
        }
        self.at("paused");
        branch.wait_done().await?;
        self.at("stored");
        let _turn = sandbox.lock_exclusive().await?;
        match sandbox.phase() {
            _ if used() => return Ok(false),
            Phase::Paused => {}
            // The snapshot has the state of the pause, so the suspend can still be committed.
            Phase::Ended(end) if !end.is_requested() => {}
            Phase::Ended(end) => return Err(sandbox.ended(Code::SandboxEnded, &end)),
            _ => return Ok(false),
        }
        commit.await?;
        self.at("committed");
        // The snapshot is on disk: its template need not stay in memory.
        let _ = self.snapshots.unload(&tag);
        self.registry.end(sandbox, end);
        self.at("ended");
        Ok(true)
    }

    /// Undoes a suspend that is not committed. See the module's page.
    async fn undo(&self) -> Result<()> {
        let sandbox = &self.sandbox;
        let note = || sandbox.read_runtime(|runtime| runtime.saved.lifetime.suspending.clone());
        let Some(Suspending { tag, .. }) = note() else { return Ok(()) };
        let died = {
            let _turn = sandbox.lock_exclusive().await?;
            let paused = note().is_some_and(|note| note.paused);
            match sandbox.phase() {
                Phase::Paused | Phase::Unresponsive if paused => {
                    sandbox.go_on().await?;
                    false
                }
                Phase::Ended(end) => paused && !end.is_requested(),
                _ => false,
            }
        };
        self.at("resumed");
        if !died {
            self.remove(&tag).await?;
        }
        self.at("removed");
        self.update_lifetime(|lifetime| {
            let paused = lifetime.suspending.take().is_some_and(|note| note.paused);
            lifetime.auto_paused &= !paused;
        })
    }

    /// Removes the snapshot of a sandbox that goes on.
    async fn remove(&self, tag: &str) -> Result<()> {
        // A client may have removed the snapshot, and another one may have its tag.
        if !self.snapshots.get(tag).is_ok_and(|entry| is_of(&entry, &self.sandbox.id)) {
            return Ok(());
        }
        match self.snapshots.remove(tag, Removal::Force).await {
            Err(error) if error.code().is_not_found() => Ok(()),
            other => other,
        }
    }

    fn update_lifetime(&self, change: impl FnOnce(&mut Lifetime)) -> Result<()> {
        let written = self.sandbox.update_lifetime(|lifetime, _| change(lifetime));
        written.map_err(|error| Error::host("cannot write the record of a sandbox", error))
    }

    fn at(&self, step: &'static str) {
        if let Some(at_step) = self.registry.host.config.at_step {
            at_step(step);
        }
    }
}

/// Undoes the suspends that an earlier daemon began and did not commit. Before this, workspaces end the sandboxes
/// whose suspends are committed. A suspend that cannot be undone now is undone before its sandbox is suspended again.
pub(crate) async fn undo_unfinished(
    registry: &Arc<Registry>,
    snapshots: &Arc<SnapshotRegistry>,
    is_kept: impl Fn(&str) -> bool,
) {
    let mut undoing = Vec::new();
    for sandbox in registry.list() {
        let (has_note, workspace) = sandbox.read_runtime(|runtime| {
            (runtime.saved.lifetime.suspending.is_some(), runtime.saved.workspace.clone())
        });
        // The record that cannot be read may name the snapshot.
        if !has_note || workspace.is_some_and(|name| is_kept(&name)) {
            continue;
        }
        let (registry, snapshots) = (registry.clone(), snapshots.clone());
        undoing.push(task::spawn(Task::Suspend, async move {
            // Until then the daemon does not know whether the sandbox is paused.
            let _ = sandbox.started().await;
            match Suspend::begin(&registry, &snapshots, &sandbox).await {
                Ok(_) => tracing::info!(sandbox = sandbox.id, "unfinished suspend undone"),
                Err(error) => {
                    tracing::warn!(sandbox = sandbox.id, %error, "unfinished suspend not undone yet");
                }
            }
        }));
    }
    let all = async {
        for undone in undoing {
            let _ = undone.await;
        }
    };
    // Undoes that take longer go on in their tasks.
    let _ = tokio::time::timeout(registry.host.config.timing.call, all).await;
}

/// Whether a snapshot is a branch of the sandbox `id`.
fn is_of(entry: &Entry, id: &str) -> bool {
    match entry.state() {
        SnapshotState::Ready(snapshot) => snapshot.manifest().branched_from.as_deref() == Some(id),
        _ => entry.branch().is_some_and(|branch| branch.source == id),
    }
}
