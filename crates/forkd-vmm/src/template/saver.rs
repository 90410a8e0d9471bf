//! A process that writes a template, or layers of its disks, to files.
//!
//! Its job is checked before there is a process, so that a refusal is an answer. From then on it depends on
//! no other process, begins at the lowest priority, and reports with its exit status whether all is safely on
//! disk. It writes the reason of a failure behind the progress: its standard error may be a file of the
//! process that began the lineage.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

use forkd_protocol::control::{FdRef, MergeConfig, ReplacedLayers, SaveConfig, SaveProgress};

use super::{name_process, share_all};
use crate::config::{Access, Attached};
use crate::seccomp::IOPRIO_WHO_PROCESS;
use crate::state::{Frozen, MergedLayers, SaveFiles, Saving};
use crate::{Error, Result};

/// The job of a saver.
pub(super) enum Job {
    /// And where it writes why it failed.
    Save(Saving, Option<File>),
    Merge(Vec<Option<MergedLayers>>),
}

impl Job {
    /// Everything is written.
    pub(super) fn save(frozen: &Frozen, config: SaveConfig, fds: Vec<OwnedFd>) -> Result<Job> {
        let mut fds = Attached::new(fds);
        let state = fds.take("state", config.state, Access::Both)?.into();
        let memory = config.memory.map(|fd| fds.take("memory", fd, Access::Both)).transpose()?;
        let memory = memory.map(File::from);
        let parent = share_all(&mut fds, "parent", &config.parent)?;
        let pagemap = config.pagemap.map(|fd| fds.share("pagemap", fd)).transpose()?.map(File::from);
        let mut disks = Vec::with_capacity(config.disks.len());
        for (index, disk) in config.disks.into_iter().enumerate() {
            let take = |fd: FdRef| fds.take(&format!("disks[{index}]"), fd, Access::Both).map(File::from);
            disks.push(disk.map(take).transpose()?);
        }
        let progress = config.progress.map(|fd| fds.take("progress", fd, Access::Both)).transpose()?;
        let progress = progress.map(File::from);
        let report = progress.as_ref().map(File::try_clone).transpose();
        let report = report.map_err(Error::system("copy a descriptor"))?;
        let files = SaveFiles { state, memory, parent, pagemap, disks, progress };
        Ok(Job::Save(frozen.prepare_save(files)?, report))
    }

    /// Frozen layers are merged.
    pub(super) fn merge(frozen: &Frozen, config: MergeConfig, fds: Vec<OwnedFd>) -> Result<Job> {
        let mut fds = Attached::new(fds);
        let disks = merged_layers(&config.disks, &mut fds, Access::Both)?;
        frozen.check_merge(&disks)?;
        Ok(Job::Merge(disks))
    }
}

/// The layers of a request, opened for `access`.
pub(super) fn merged_layers(
    disks: &[Option<ReplacedLayers>],
    fds: &mut Attached,
    access: Access,
) -> Result<Vec<Option<MergedLayers>>> {
    let mut merged = Vec::with_capacity(disks.len());
    for (index, disk) in disks.iter().enumerate() {
        let take = |disk: &ReplacedLayers| {
            let layer = fds.take(&format!("disks[{index}]"), disk.layer, access)?.into();
            Ok(MergedLayers { count: disk.count.into(), layer })
        };
        merged.push(disk.as_ref().map(take).transpose()?);
    }
    Ok(merged)
}

/// The process, right after the fork.
pub(crate) struct Saver {
    frozen: Frozen,
    job: Job,
}

impl Saver {
    pub(super) fn new(frozen: Frozen, job: Job) -> Saver {
        Saver { frozen, job }
    }

    /// Writes all files. When this returns without an error they are safely on disk.
    pub(crate) fn save(mut self) -> Result<()> {
        name_process(c"forkd-saver");
        lower_priority();
        match self.job {
            Job::Save(saving, report) => {
                self.frozen.save(saving).inspect_err(|error| report_failure(error, report.as_ref()))
            }
            Job::Merge(disks) => self.frozen.merge_layers(disks),
        }
    }
}

/// Writes the reason of a failure behind the progress. If even that cannot be, there is the exit status.
fn report_failure(error: &Error, report: Option<&File>) {
    let text = error.chain();
    let text = &text.as_bytes()[..text.len().min(SaveProgress::MAX_REASON)];
    let _ = report.map(|report| report.write_all_at(text, SaveProgress::LENGTH as u64));
}

/// Lowers its priority everywhere: a save must not slow down other processes. A branch of a running guest,
/// above all, takes a CPU away from a saver at once. Beside guests that never rest a save would take minutes
/// like that: so the controller gives it a small share of the CPUs after a while, one of this priority.
fn lower_priority() {
    const LOW_PRIORITY: libc::c_int = 10;
    const IDLE: libc::c_long = 3 << 13;
    let no_priority = libc::sched_param { sched_priority: 0 };
    // SAFETY: the calls take integers, and one reads a struct that lives as long. A failure has no effect but
    // a higher priority.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, LOW_PRIORITY);
        libc::sched_setscheduler(0, libc::SCHED_IDLE, &raw const no_priority);
        libc::syscall(libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS, 0, IDLE);
    }
}
