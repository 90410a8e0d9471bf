//! Taking a branch: the preparation before the source is paused, the fork, and the checks after it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::agent::FreezeSync;
use forkd_protocol::control::{BranchConfig, Channel, FdRef};

use crate::branch::merge::BranchSource;
use crate::error::{Code, Error, Result};
use crate::host::handed_layers::are_kept;
use crate::host::images::reopen;
use crate::host::lineage::Lineage;
use crate::monitor::{DISKS_ALONE, Monitor, control_socket};
use crate::sandbox::command::{ForkedBranch, MonitorCommand};
use crate::sandbox::quiesce::{freeze, freeze_disks};
use crate::sandbox::{DesiredState, Phase, Sandbox};
use crate::snapshot::branch_job::{BranchJob, CaptureStats, Mode};
use crate::snapshot::registry::SnapshotRegistry;
use crate::snapshot::template::{MemorySource, Template};
use crate::util::fs::make_private_dir;
use crate::util::task::{self, Task, blocking};

/// How often the daemon checks, for seconds each time, whether a source still has a layer open for writing.
const LOOKS: usize = 5;

/// What a branch needs before the source is paused.
struct Prepared {
    config: BranchConfig,
    fds: Vec<OwnedFd>,
    /// The daemon's end of the branch's control socket.
    control: Channel,
}

/// Takes the branch. `record` writes the record of its template. Returns the template, and the source with the disk layers that both share.
pub(crate) async fn take(
    snapshots: &SnapshotRegistry,
    sandbox: &Arc<Sandbox>,
    branch: &BranchJob,
    record: impl FnOnce(&Template) -> io::Result<()>,
) -> Result<(Arc<Template>, BranchSource)> {
    let folder = snapshots.folder.join(&branch.template);
    let taken = attempt(snapshots, sandbox, branch, record, &folder).await;
    if taken.is_err() {
        snapshots.host.cleanup_queue.remove_folder(folder).await;
    }
    taken
}

async fn attempt(
    snapshots: &SnapshotRegistry,
    sandbox: &Arc<Sandbox>,
    branch: &BranchJob,
    record: impl FnOnce(&Template) -> io::Result<()>,
    folder: &Path,
) -> Result<(Arc<Template>, BranchSource)> {
    let timing = &snapshots.host.config.timing;
    let (place, data, bare) =
        (folder.to_owned(), snapshots.host.config.data_dir.clone(), sandbox.spec.is_bare());
    let Some(lineage) = sandbox.resources().lineage.clone() else {
        let id = &sandbox.id;
        return Err(match sandbox.desired() {
            DesiredState::Replace => Error::new(
                Code::SandboxReplaced,
                format!("sandbox {id} was rolled back meanwhile; ask again"),
            ),
            _ => Error::new(Code::SandboxEnded, format!("sandbox {id} is being deleted")),
        });
    };
    let family = lineage.clone();
    let prepared = blocking("preparing a branch", move || prepare(&place, &data, bare, &family)).await?;

    // No request may pause the sandbox, or roll it back, between the freeze and the thaw.
    let _turn = sandbox.lock_exclusive().await?;
    let generation = sandbox.disks.generation.lock().await;
    let Prepared { config, fds, control } = prepared;
    let limit = sandbox.spec.memory_limit_mib << 20;
    let room = sandbox.resources().leaf.as_ref().map_or(Ok(()), |leaf| leaf.make_room(limit));
    room.map_err(|error| Error::host("cannot raise the limit of a cgroup for a branch", error))?;
    let disks_alone = branch.mode == Mode::Disk;
    let frozen = match disks_alone {
        true => freeze_disks(sandbox, timing.call).await,
        false => freeze(sandbox, timing.freeze, FreezeSync::Quick).await,
    };
    if disks_alone && !frozen.is_clean() {
        frozen.thaw(timing.call).await;
        return Err(not_clean(sandbox, timing.call));
    }
    let forked = sandbox.ask(|reply| MonitorCommand::Branch(config, fds, reply)).await;
    // First of all, and also after an error: the guest's processes must go on.
    let thawing = task::spawn(Task::Thaw, frozen.thaw(timing.call));
    let taken = async {
        let ForkedBranch { branched, identity } = match forked {
            Ok(forked) => forked,
            Err(error) => {
                // If there is a branch all the same, the stop request is the first it receives.
                control_socket::stop_unseen(control);
                return Err(advised(error, sandbox));
            }
        };
        // A guest without disks has no layers that could be merged.
        if !branched.layers.is_empty() {
            sandbox.disks.frozen.send_modify(|frozen| *frozen += 1);
        }
        let frozen = *sandbox.disks.frozen.borrow();
        let source = BranchSource { sandbox: sandbox.clone(), generation: *generation, frozen };
        let (id, pid, pause) = (branch.template.clone(), branched.pid, branched.pause);
        let watched = Monitor::branched(id.clone(), folder.to_owned(), pid, branched.pidfd, control);
        let mut monitor = watched.map_err(|error| Error::host("cannot watch a branch", error))?;
        // Until its record is written below, the next daemon ends the branch, and finds its process by this.
        identity.write(folder).map_err(|error| Error::host("cannot record a branch", error))?;
        let layers = match returned(&lineage, branched.layers) {
            Ok(layers) => layers,
            Err(why) => {
                sandbox.distrust(&why).await;
                return Err(Error::host("the sandbox was ended", why));
            }
        };
        let sealed = async {
            monitor.hello(timing.call).await?;
            if disks_alone {
                monitor.require(DISKS_ALONE)?;
            }
            if !layers.is_empty() {
                let sealed = monitor.seal(&for_reading(&layers)?, timing.call).await;
                sealed.map_err(|error| branch_ended(branch, error))?;
            }
            Ok::<_, Error>(())
        };
        let source_sealed = async {
            if layers.is_empty() {
                return Ok(());
            }
            let layers = for_reading(&layers)?;
            match sandbox.ask(|reply| MonitorCommand::Seal(layers, reply)).await {
                // A source that has ended writes nothing.
                Err(_) if matches!(sandbox.phase(), Phase::Ended(_)) => Ok(()),
                other => other,
            }
        };
        if let Err(error) = tokio::try_join!(sealed, source_sealed) {
            // The next branch must not find the source's layers open for writing in this one.
            let end = monitor.end().await;
            return Err(match error.code() {
                Code::TemplateEnded => error.because(end.account()),
                _ => error,
            });
        }
        let frozen: Vec<OwnedFd> = layers.into_iter().flatten().collect();
        if are_kept(&frozen).await? {
            return Err(not_given_back(sandbox, monitor, &frozen).await);
        }
        let guest = branch.guest.clone();
        let mut plan = snapshots.plan(id, folder, &branch.tag, MemorySource::Memory, guest, lineage);
        plan.about.fork = branch.fork.clone();
        Ok((Template::new(plan, monitor)?, pause, source))
    };
    let (taken, thawed) = tokio::join!(taken, thawing);
    let (template, pause, source) = taken?;
    let (frozen_ms, quiesced) = thawed.unwrap_or((None, false));
    let pause_ms = pause.as_micros() as f64 / 1e3;
    sandbox.pauses.add(pause_ms, frozen_ms, branch.name());
    branch.set_capture_stats(CaptureStats { pause_ms: Some(pause_ms), frozen_ms, quiesced: Some(quiesced) });
    record(&template).map_err(|error| Error::host("cannot record a branch", error))?;
    Ok((template, source))
}

/// The error of a request to the branch's own process. That process may end while the source runs, so the code is not
/// that of an ended sandbox.
fn branch_ended(branch: &BranchJob, error: Error) -> Error {
    match error.code() {
        Code::SandboxEnded => {
            let text =
                format!("the process of branch {} ended before it could be used; branch again", branch.tag);
            Error::new(Code::TemplateEnded, text)
        }
        _ => error,
    }
}

/// The error of a branch of the disks alone whose source did not freeze its file systems.
fn not_clean(sandbox: &Sandbox, limit: Duration) -> Error {
    let text = format!(
        "sandbox {} did not freeze its file systems within {} s: its agent is busy, or of an older version; try again, or branch it with mode full",
        sandbox.id,
        limit.as_secs()
    );
    Error::new(Code::GuestTimeout, text)
}

/// The error of a refused branch, with what to do if the cause may be layers that are not merged yet.
fn advised(error: Error, sandbox: &Sandbox) -> Error {
    let ended = matches!(sandbox.phase(), Phase::Ended(_));
    if !error.code().is_conflict() || ended || !sandbox.disks.are_crowded() {
        return error;
    }
    let text = "there is no branch now; try again when the branches before it are on disk";
    error.within(Code::DaemonBusy, text)
}

/// Does everything that takes time before the source is paused. Blocks.
fn prepare(folder: &Path, data: &Path, bare: bool, lineage: &Lineage) -> Result<Prepared> {
    let failed = |error: io::Error| Error::host("cannot prepare a branch", error);
    make_private_dir(folder).map_err(failed)?;
    let (listener, control) = control_socket::pair(&folder.join(control_socket::CONTROL)).map_err(failed)?;
    let mut fds = vec![listener];
    let mut config = BranchConfig { control: FdRef(0), layers: Vec::new() };
    if !bare {
        fds.push(lineage.layer(data)?);
        config.layers = vec![Some(FdRef(1))];
    }
    Ok(Prepared { config, fds, control })
}

/// The frozen layers that the source returned, opened for reading; an error if one of them was not handed to it.
fn returned(
    lineage: &Lineage,
    layers: Vec<Option<OwnedFd>>,
) -> std::result::Result<Vec<Option<OwnedFd>>, String> {
    layers.into_iter().map(|layer| layer.map(|layer| lineage.layers.returned(layer)).transpose()).collect()
}

/// Ends a branch that shares a layer with a process that can still write to the layer. If that process is the
/// source, ends the source, too.
async fn not_given_back(sandbox: &Sandbox, mut branch: Monitor, frozen: &[OwnedFd]) -> Error {
    let why = "a monitor kept the right to write to a frozen disk layer";
    let error = Error::host("the branch was ended", why);
    branch.end().await;
    // An earlier failed branch may take a while to end, and has the source's layers open until then.
    for _ in 0..LOOKS {
        if matches!(are_kept(frozen).await, Ok(false)) {
            tracing::error!(sandbox = sandbox.id, why, "branch of the sandbox ended");
            return error;
        }
    }
    sandbox.distrust(why).await;
    error
}

/// Reopens the files for reading.
fn for_reading(layers: &[Option<OwnedFd>]) -> Result<Vec<Option<OwnedFd>>> {
    layers.iter().map(|layer| layer.as_ref().map(|layer| reopen(layer.as_fd())).transpose()).collect()
}
