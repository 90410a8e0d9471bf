//! Admission of branches: how many the daemon takes at a time, and which ones wait until layers are merged.
//!
//! Every branch adds a layer to the disks of its source, and a monitor takes few layers. The daemon merges them while
//! it saves earlier branches, which takes a while. A branch of a sandbox with many layers waits meanwhile in the
//! queue of that sandbox, and holds none of the permits that all sandboxes share.

use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, OwnedSemaphorePermit};
use tokio::time::timeout;

use crate::error::{Code, Error, Result};
use crate::sandbox::disks::MAX_WAITING;
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::branch_job::{BranchJob, Disposition};
use crate::snapshot::registry::SnapshotRegistry;

/// How long a branch waits for fewer layers, and then for a permit.
const ADMISSION_TIMEOUT: Duration = Duration::from_secs(120);

/// The place of a branch: a permit, or a place in a sandbox's queue.
#[derive(Debug)]
pub(crate) enum Admission {
    /// One of the permits for branches that are being taken.
    Taking(OwnedSemaphorePermit),
    /// A place in the queue of a sandbox with many layers.
    Waiting(OwnedSemaphorePermit),
}

/// The right to take a branch now. Dropping it lets the next branch in.
#[derive(Debug)]
pub(crate) struct AdmissionTurn {
    _permit: OwnedSemaphorePermit,
    _first: Option<OwnedMutexGuard<()>>,
}

impl SnapshotRegistry {
    /// A place for a branch of `sandbox`; an error if there is none.
    pub(crate) fn place(&self, sandbox: &Sandbox) -> Result<Admission> {
        if !sandbox.disks.are_crowded() {
            let permit = self.branching.clone().try_acquire_owned();
            return permit.map(Admission::Taking).map_err(|_| self.no_place());
        }
        let permit = sandbox.disks.waiting.clone().try_acquire_owned();
        permit.map(Admission::Waiting).map_err(|_| {
            let text = format!(
                "{MAX_WAITING} branches of sandbox {} wait for earlier ones, the limit; try again when those are \
                 on disk",
                sandbox.id
            );
            Error::new(Code::LimitReached, text)
        })
    }

    /// Returns when `branch`, which has `place`, may be taken; an error if the daemon no longer wants it, or its sandbox ends.
    pub(crate) async fn turn(
        &self,
        sandbox: &Sandbox,
        branch: &BranchJob,
        place: Admission,
    ) -> Result<AdmissionTurn> {
        let _waiting = match place {
            Admission::Taking(_permit) => return Ok(AdmissionTurn { _permit, _first: None }),
            Admission::Waiting(waiting) => waiting,
        };
        let come = async {
            // After the time-out tries all the same: a monitor takes a few more layers, and refuses if it does not.
            let _first = timeout(ADMISSION_TIMEOUT, sandbox.disks.room()).await.ok();
            match timeout(ADMISSION_TIMEOUT, self.branching.clone().acquire_owned()).await {
                Ok(Ok(_permit)) => Ok(AdmissionTurn { _permit, _first }),
                _ => Err(self.no_place()),
            }
        };
        let mut phases = sandbox.phase.subscribe();
        tokio::select! {
            biased;
            disposition = branch.disposition_changed() => Err(match disposition {
                Disposition::Leave => Error::new(Code::ShuttingDown, "the daemon is stopping; branch again when it runs"),
                _ => Error::new(Code::Cancelled, "the branch was removed before it was taken"),
            }),
            Ok(_) = phases.wait_for(|phase| matches!(phase, Phase::Ended(_))) => Err(match sandbox.phase() {
                Phase::Ended(end) => sandbox.ended(Code::SandboxEnded, &end),
                _ => Error::new(Code::SandboxEnded, format!("sandbox {} ended meanwhile", sandbox.id)),
            }),
            turn = come => turn,
        }
    }

    fn no_place(&self) -> Error {
        let max = self.host.config.limits.max_branches;
        let text = format!("{max} branches are being taken, the limit; try again in a moment");
        Error::new(Code::DaemonBusy, text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::disks::CROWDED;
    use crate::sandbox::disks::Disks;
    use std::sync::Arc;

    /// Whether `work` is still waiting after a moment.
    async fn waits<T>(work: &mut tokio::task::JoinHandle<T>) -> bool {
        tokio::time::sleep(Duration::from_millis(20)).await;
        !work.is_finished()
    }

    #[tokio::test]
    async fn waiting_branches_are_admitted_one_by_one_as_layers_become_fewer() {
        let disks = Arc::new(Disks::default());
        disks.frozen.send_replace(CROWDED);
        assert!(disks.are_crowded());
        let come = || {
            let disks = disks.clone();
            tokio::spawn(async move { disks.room().await })
        };
        let (mut one, mut other) = (come(), come());
        assert!(waits(&mut one).await && waits(&mut other).await);
        disks.frozen.send_replace(CROWDED - 1);
        let first = tokio::select! { first = &mut one => first, first = &mut other => first };
        // The first branch adds a layer before the next one comes in, so there is no room for that.
        let mut next = if one.is_finished() { other } else { one };
        assert!(waits(&mut next).await);
        disks.frozen.send_modify(|frozen| *frozen += 1);
        drop(first.unwrap());
        assert!(waits(&mut next).await);
        disks.frozen.send_replace(3);
        next.await.unwrap();
        assert!(!disks.are_crowded());
    }

    #[tokio::test]
    async fn the_queue_of_a_sandbox_has_a_limit() {
        let disks = Disks::default();
        let come = || disks.waiting.clone().try_acquire_owned();
        let waiting: Vec<_> = (0..MAX_WAITING).map(|_| come().unwrap()).collect();
        assert!(come().is_err());
        drop(waiting);
        assert!(come().is_ok());
    }
}
