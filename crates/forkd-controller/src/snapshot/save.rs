//! From memory to disk: a saver writes a template, and the daemon publishes the result as a snapshot.
//!
//! A save never holds up the template, which goes on forking children. The saver writes the difference to the
//! snapshot a branch came from, where there is one; if that snapshot is being written itself, the save waits for
//! it. If a saver fails, the daemon starts it a second time. A branch that the full disk has no space for waits
//! in memory, for as long as unused branches stay there.

use std::convert::Infallible;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::control::{CONSOLE_TAIL, FdRef, SaveConfig, SaveProgress, WaitStatus};
use forkd_store::{Contents, Draft, MAX_DEPTH, Measured, Snapshot, SnapshotKind};
use tokio_util::task::TaskTracker;

use crate::error::{Code, Error, Result};
use crate::host::disk_space::is_shortage;
use crate::host::{oom, process};
use crate::monitor::{Forked, console};
use crate::snapshot::branch_job::{BranchJob, Disposition, Mode};
use crate::snapshot::held_draft::HeldDraft;
use crate::snapshot::merge::{LayerSource, merge};
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::{self, PendingChild, Template};
use crate::telemetry::metrics;
use crate::util::fs::create;
use crate::util::random::new_id;
use crate::util::task::{self, blocking};

/// How long a saver may take: a slow disk takes a minute for some GiB.
const SAVE_WAIT: Duration = Duration::from_secs(3600);
/// How often the daemon checks whether a saver gets CPU time.
const LOOK: Duration = Duration::from_millis(100);
/// How often a save is tried.
const TRIES: u32 = 2;
/// The file in a template's folder into which the saver writes its progress.
const PROGRESS: &str = "progress";

/// The order for one save.
#[derive(Debug)]
pub(crate) struct SaveJob {
    pub(crate) tag: String,
    /// What is written.
    pub(crate) kind: SnapshotKind,
    /// The snapshot the branch came from.
    pub(crate) origin: Option<Snapshot>,
    /// Whether only the difference to the origin is written.
    pub(crate) diff: bool,
    /// Whether the saver writes each disk's layers as one.
    pub(crate) merge: bool,
    pub(crate) branched_from: Option<String>,
    /// When the branch was taken; none for a new snapshot, which is dated by its publication.
    pub(crate) created_at_unix: Option<u64>,
    pub(crate) measured: Measured,
}

impl SnapshotRegistry {
    /// Saves a branch: its snapshot becomes ready, failed or left. Stops if the daemon no longer wants the branch.
    pub(crate) async fn persist(
        self: &Arc<Self>,
        entry: Arc<Entry>,
        branch: Arc<BranchJob>,
        template: Arc<Template>,
        source: impl LayerSource,
    ) {
        let merged = tokio::select! {
            biased;
            _ = branch.disposition_changed() => Ok(()),
            merged = merge(self, source, &template) => merged,
        };
        if let Err(error) = merged {
            tracing::warn!(tag = branch.tag, %error, "disk layers not merged");
        }
        let saved = self.save_when_possible(&entry, &branch, &template).await;
        match saved {
            Ok(snapshot) => {
                tracing::info!(tag = branch.tag, "branch is on disk");
                entry.ready(snapshot);
            }
            Err(_) if branch.disposition() == Disposition::Leave => {
                entry.leave_to_next_daemon();
                return;
            }
            Err(error) => {
                tracing::warn!(tag = branch.tag, %error, "branch not saved");
                match branch.waited_for {
                    true => self.discard(&entry, error).await,
                    false => entry.fail(error),
                }
            }
        }
        self.gc_wakeup.notify_one();
    }

    /// Saves a branch, with a second try if the saver fails. An error if the daemon no longer wants the branch.
    pub(crate) async fn save_branch(&self, branch: &BranchJob, template: &Arc<Template>) -> Result<Snapshot> {
        let mut tries = 1;
        loop {
            let begun = async {
                let origin = self.origin(branch).await;
                (origin, self.saving.acquire().await)
            };
            let (origin, _turn) = tokio::select! {
                biased;
                error = unwanted(branch) => return Err(error),
                begun = begun => begun,
            };
            let job = job(branch, origin);
            let progress = |file| branch.watch_progress(file);
            match save(self, template, job, progress, unwanted(branch)).await {
                Err(error)
                    if tries < TRIES
                        && !error.is_no_room()
                        && template.is_alive()
                        && branch.disposition() == Disposition::Keep =>
                {
                    tracing::warn!(tag = branch.tag, %error, "branch save failed; trying once more");
                    tries += 1;
                }
                other => return other,
            }
        }
    }

    /// The snapshot `branch` came from, once it is on disk; none if it was removed, failed, or waits for disk space.
    async fn origin(&self, branch: &BranchJob) -> Option<Snapshot> {
        let origin = branch.origin.as_ref()?;
        let id = match (&origin.snapshot, &branch.parent) {
            (Some(id), _) => id.clone(),
            (None, Some(parent)) => {
                parent.wait_done_or_short_of_space().await;
                let SnapshotState::Ready(snapshot) = parent.state() else { return None };
                snapshot.id().to_owned()
            }
            (None, None) => return None,
        };
        self.get(&origin.tag).ok()?.snapshot().ok().filter(|snapshot| snapshot.id() == id)
    }
}

/// Returns, with the error of the save, when the daemon no longer wants `branch`.
async fn unwanted(branch: &BranchJob) -> Error {
    branch.disposition_changed().await;
    Error::new(Code::Cancelled, "the branch was removed before it was on disk")
}

/// The save of a branch.
fn job(branch: &BranchJob, origin: Option<Snapshot>) -> SaveJob {
    let fits = origin.as_ref().is_some_and(|origin| {
        let theirs = origin.manifest().guest.mem_size_mib;
        origin.depth() < MAX_DEPTH && theirs == branch.guest.mem_size_mib
    });
    let captured = branch.capture_stats();
    let compacted = branch.source.starts_with("compact:");
    SaveJob {
        tag: branch.tag.clone(),
        kind: if branch.mode == Mode::Disk { SnapshotKind::Disk } else { SnapshotKind::Full },
        origin,
        diff: fits && branch.mode.is_difference(),
        merge: !branch.mode.is_difference(),
        branched_from: Some(branch.source.clone()),
        created_at_unix: Some(branch.begun_at_unix),
        measured: Measured {
            mode: (!compacted).then(|| branch.mode.name().into()),
            pause_ms: captured.pause_ms,
            frozen_ms: captured.frozen_ms,
            quiesced: captured.quiesced,
            ..Measured::default()
        },
    }
}

/// Has a saver write `template` to disk and publishes the snapshot. If `unwanted` returns before all is written,
/// nothing is left.
pub(crate) async fn save(
    snapshots: &SnapshotRegistry,
    template: &Arc<Template>,
    job: SaveJob,
    progress: impl FnOnce(File),
    unwanted: impl Future<Output = Error>,
) -> Result<Snapshot> {
    let (begun, saves) = (Instant::now(), &snapshots.host.telemetry.metrics.saves);
    let failed = |_: &Error| saves.add(metrics::Outcome::Failed, 1);
    let drafts = task::tracker();
    let written = tokio::select! {
        biased;
        error = unwanted => {
            saves.add(metrics::Outcome::Cancelled, 1);
            Err(error)
        }
        written = write(snapshots, template, job, progress, &drafts) => written.inspect_err(failed),
    };
    let written = match written {
        Ok(written) => written,
        Err(error) => {
            // The next try needs the room.
            drafts.wait().await;
            return Err(error);
        }
    };
    // From here on no cancelling: the caller could not know whether the snapshot was published.
    let Written { draft, job, disks, bytes } = written;
    let guest = template.about.guest.clone();
    let published = blocking("publishing a snapshot", move || {
        let save_ms = Some(begun.elapsed().as_secs_f64() * 1e3);
        let measured = Measured { save_ms, written_bytes: bytes, ..job.measured };
        let (parent, origin) = match job.diff {
            true => (job.origin, None),
            false => (None, job.origin),
        };
        let draft = draft.take().ok_or_else(|| Error::host("publishing a snapshot", "there is no draft"))?;
        Ok(draft.publish(Contents {
            kind: job.kind,
            guest,
            parent,
            origin,
            branched_from: job.branched_from,
            created_at_unix: job.created_at_unix,
            disks,
            measured,
        })?)
    });
    let snapshot = published.await.inspect_err(failed)?;
    saves.add(metrics::Outcome::Ok, 1);
    Ok(snapshot)
}

/// A draft that a saver has filled.
struct Written {
    draft: HeldDraft,
    job: SaveJob,
    disks: Vec<Vec<File>>,
    bytes: Option<u64>,
}

/// Has a saver write the draft. If the future is dropped, the saver is killed and nothing is left.
async fn write(
    snapshots: &SnapshotRegistry,
    template: &Arc<Template>,
    job: SaveJob,
    progress: impl FnOnce(File),
    drafts: &TaskTracker,
) -> Result<Written> {
    // The saver and the published manifest must refer to the same disk layers.
    let alone = template.disks.lock().await;
    let has_disk = template.about.guest.image.is_some();
    let layers = if has_disk { template.layers().await? } else { Vec::new() };
    let (store, folder, pid) = (snapshots.store.clone(), template.folder().to_owned(), template.pid);
    let drafts = drafts.clone();
    let prepared = blocking("preparing to save", move || {
        let mut draft = store.begin(&job.tag)?;
        let prepared = prepare(&mut draft, job, layers, &folder, pid);
        // In this closure: the caller may be gone.
        let draft = HeldDraft::new(draft, &drafts);
        Ok((draft, prepared?))
    });
    let (draft, Prepared { job, config, fds, disks, progress_file }) = prepared.await?;
    progress(progress_file.try_clone().map_err(|error| Error::host("cannot follow a saver", error))?);
    let name = config.child.clone();
    let pending = template.save(config, fds).await;
    let ended = follow(template, pending, move || drop(alone)).await;
    finish(template, &name, ended, "the snapshot could not be written", Some(&progress_file))?;
    let mut bytes = [0; SaveProgress::LENGTH];
    let read = std::os::unix::fs::FileExt::read_exact_at(&progress_file, &mut bytes, 0);
    let bytes = read.ok().map(|()| SaveProgress::from_bytes(bytes).written);
    Ok(Written { draft, job, disks, bytes })
}

/// A draft with everything the saver needs.
struct Prepared {
    job: SaveJob,
    config: SaveConfig,
    fds: Vec<OwnedFd>,
    /// The layer files of each disk in the snapshot.
    disks: Vec<Vec<File>>,
    /// The file into which the saver writes its progress, and why it failed.
    progress_file: File,
}

fn prepare(
    draft: &mut Draft,
    job: SaveJob,
    layers: Vec<Vec<OwnedFd>>,
    folder: &std::path::Path,
    pid: i32,
) -> Result<Prepared> {
    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut attach = |fd: OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let parent = match &job.origin {
        Some(origin) if job.diff => {
            draft.keep(origin)?;
            origin.open()?.memory.into_iter().map(|layer| attach(layer.into())).collect()
        }
        _ => Vec::new(),
    };
    let progress_file = create(&folder.join(PROGRESS));
    let progress_file = progress_file.map_err(|error| Error::host("cannot follow a saver", error))?;
    let copy = progress_file.try_clone().map_err(|error| Error::host("cannot follow a saver", error))?;
    let has_memory = job.kind == SnapshotKind::Full;
    // Without the page map the saver reads all memory.
    let pagemap = has_memory.then(|| process::pagemap(pid).ok()).flatten();
    let state = attach(draft.create_state()?.into());
    let memory = has_memory.then(|| draft.create_memory()).transpose()?;
    let mut config = SaveConfig {
        child: new_id("saver")?,
        state,
        memory: memory.map(|memory| attach(memory.into())),
        parent,
        pagemap: pagemap.map(|pagemap| attach(pagemap.into())),
        disks: Vec::new(),
        progress: Some(attach(copy.into())),
    };
    let mut disks = Vec::with_capacity(layers.len());
    for (index, layers) in layers.into_iter().enumerate() {
        let merged = if job.merge && layers.len() > 1 { Some(draft.create_disk(index)?) } else { None };
        let again = merged.as_ref().map(|file| file.try_clone()).transpose();
        let again = again.map_err(|error| Error::host("cannot use a disk layer", error))?;
        config.disks.push(again.map(|file| attach(file.into())));
        disks.push(match merged {
            Some(merged) => vec![merged],
            None => layers.into_iter().map(File::from).collect(),
        });
    }
    Ok(Prepared { job, config, fds, disks, progress_file })
}

/// The pidfd of a saver or merge process. Dropping it kills the process.
struct Helper(OwnedFd);

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = rustix::process::pidfd_send_signal(&self.0, rustix::process::Signal::KILL);
    }
}

/// Raises a saver's share of the CPU when it gets no CPU time. A saver runs at idle priority, and beside guests
/// that never rest it would never run.
async fn keep_going(saver: i32, template: &Template) -> Infallible {
    let mut had = Duration::ZERO;
    loop {
        tokio::time::sleep(LOOK).await;
        let has = process::cpu_time(saver).unwrap_or(had);
        // The pid may belong to another process by now: only a child of the template is the saver.
        if has.saturating_sub(had) < LOOK / 10 && process::parent(saver) == Some(template.pid) {
            process::give_share(saver);
        }
        had = has;
    }
}

/// Waits until a saver or merge process of `template` ends; `forked` is called when the process exists.
pub(crate) async fn follow(
    template: &Template,
    pending: PendingChild,
    forked: impl FnOnce(),
) -> Result<WaitStatus> {
    let Forked { pid, pidfd } = pending.forked.await.unwrap_or_else(|_| Err(template::lost()))?;
    oom::set(pid, pidfd.as_fd(), oom::Role::Saver);
    let helper = Helper(pidfd);
    forked();
    let ended = tokio::select! {
        ended = tokio::time::timeout(SAVE_WAIT, pending.ended) => ended,
        never = keep_going(pid, template) => match never {},
    };
    drop(helper);
    match ended {
        Ok(Ok(status)) => Ok(status),
        Ok(Err(_)) => Err(template::lost()),
        Err(_) => Err(Error::host("gave up", format!("it took longer than {} s", SAVE_WAIT.as_secs()))),
    }
}

/// Acknowledges the end of a saver or merge process; any status but success is an error. In `progress_file` a saver has
/// written why it failed.
pub(crate) fn finish(
    template: &Template,
    name: &str,
    ended: Result<WaitStatus>,
    failed: &str,
    progress_file: Option<&File>,
) -> Result<()> {
    template.acknowledge(name);
    match ended {
        Ok(WaitStatus::Exited(0)) => Ok(()),
        Ok(status) => {
            if let Some(why) = progress_file.and_then(reason) {
                return Err(match is_shortage(&why) {
                    true => Error::no_room(format!("{failed}: {why}")),
                    false => Error::host(failed, why),
                });
            }
            let text = crate::monitor::describe(Some(status));
            // Only the template that began a lineage has a log file.
            let log = console::tail(&template.folder().join(crate::monitor::LOG), CONSOLE_TAIL as u64);
            let log = match log.trim() {
                "" => String::new(),
                log => format!("; it wrote: {log}"),
            };
            Err(Error::host(failed, text + &log))
        }
        Err(error) => Err(Error::host(failed, error)),
    }
}

/// Why a saver failed, if it wrote that down. The saver maps a guest's memory, so its text is not trusted.
fn reason(progress_file: &File) -> Option<String> {
    let mut bytes = [0; SaveProgress::MAX_REASON];
    let read =
        std::os::unix::fs::FileExt::read_at(progress_file, &mut bytes, SaveProgress::LENGTH as u64).ok()?;
    let text = console::printable(bytes.get(..read)?).replace(['\n', '\t'], " ");
    Some(text.trim().to_owned()).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::snapshot::template::tests::Fake;
    use crate::testing::fake_guest::FakeDaemon;
    use tokio::sync::oneshot;

    /// The runtime has one thread, which must not wait for the disk.
    #[tokio::test]
    async fn a_save_that_is_cancelled_leaves_nothing_and_holds_up_no_other_task() {
        let (daemon, fake) = (FakeDaemon::start().await, Fake::start().await);
        forkd_store::deny_waiting_here();
        let (snapshots, template) = (daemon.app.snapshots.clone(), fake.template());
        let drafts = || {
            let names = std::fs::read_dir(snapshots.store.folder()).unwrap().flatten();
            names.filter(|entry| entry.file_name().to_string_lossy().starts_with(".new-")).count()
        };
        let job = SaveJob {
            tag: "b".into(),
            kind: SnapshotKind::Full,
            origin: None,
            diff: false,
            merge: false,
            branched_from: None,
            created_at_unix: None,
            measured: Measured::default(),
        };
        let (begin, begun) = oneshot::channel();
        let (cancel, cancelled) = oneshot::channel::<()>();
        let unwanted = async {
            let _ = cancelled.await;
            Error::new(Code::Cancelled, "it was removed")
        };
        let saving = save(&snapshots, &template, job, |_| begin.send(()).unwrap(), unwanted);
        let cancelling = async {
            begun.await.unwrap();
            assert_eq!(drafts(), 1);
            cancel.send(()).unwrap();
        };
        let (saved, ()) = tokio::join!(saving, cancelling);
        assert_eq!(saved.unwrap_err().code(), Code::Cancelled);
        assert_eq!(drafts(), 0);
    }
}
