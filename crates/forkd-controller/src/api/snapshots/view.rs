//! Snapshots as the API shows them: their facts, their status, and only names that the caller may see.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use axum::Json;
use forkd_api::{Progress, SnapshotInfo, SnapshotKind, SnapshotPhase, SnapshotStatus, TemplateInfo};
use forkd_store::{BaseImage, GuestSpec, Snapshot};

use crate::api::ApiContext;
use crate::auth::principal::Principal;
use crate::error::{Error, Result};
use crate::snapshot::branch_job::BranchJob;
use crate::snapshot::create::{CreateJob, CreatePhase, From};
use crate::snapshot::load::check_image;
use crate::snapshot::registry::{Entry, SnapshotJob, SnapshotState};
use crate::snapshot::template::MemorySource;
use crate::snapshot::tree::COMPACTED;
use crate::util::task::blocking;

/// A snapshot as the caller may see it.
pub(crate) async fn info(app: &ApiContext, who: &Principal, entry: Arc<Entry>) -> Result<Json<SnapshotInfo>> {
    // Only snapshots on disk need file reads. A client that waits for a branch gets the reply without delay.
    let state = entry.state();
    if !matches!(state, SnapshotState::Ready(_)) {
        return Ok(Json(Look::new(app, who).at_state(&entry, state)));
    }
    let (app, who) = (app.clone(), who.clone());
    blocking("looking at a snapshot", move || Ok(Json(Look::new(&app, &who).at(&entry)))).await
}

/// A view on snapshots for one caller.
pub(crate) struct Look<'a> {
    app: &'a ApiContext,
    who: &'a Principal,
    /// Images that were read already, by name: many snapshots have the same image.
    images: RefCell<HashMap<String, Result<BaseImage>>>,
}

impl<'a> Look<'a> {
    pub(crate) fn new(app: &'a ApiContext, who: &'a Principal) -> Self {
        Look { app, who, images: RefCell::default() }
    }

    /// The caller's view of a snapshot. Blocks.
    pub(crate) fn at(&self, entry: &Entry) -> SnapshotInfo {
        self.at_state(entry, entry.state())
    }

    /// The same for a known state. Blocks if the snapshot is on disk.
    fn at_state(&self, entry: &Entry, state: SnapshotState) -> SnapshotInfo {
        let (app, current) = (self.app, entry.current());
        let mut info = self.standing(entry, state, current.is_some());
        info.owner = entry.owner();
        if entry.is_disk_only() {
            info.kind = SnapshotKind::Disk;
            // The process that writes it forks nothing.
            info.bootable &= info.status == SnapshotStatus::Ready;
        }
        info.dir = app.snapshots.store.folder().join(&entry.tag).display().to_string();
        let loaded = current.map(|template| TemplateInfo {
            pid: template.pid,
            source: match template.about.source {
                MemorySource::Disk => "disk".into(),
                MemorySource::Memory => "memory".into(),
            },
            children: app.registry.children_of(&template.id),
        });
        info.template = loaded.or(info.template);
        // Names of snapshots that the caller may not see are left out.
        let named = |tag: &str| app.snapshots.may_name(tag, self.who);
        info.parent_tag = info.parent_tag.filter(|tag| named(tag));
        info.branched_from =
            info.branched_from.filter(|source| source.strip_prefix(COMPACTED).is_none_or(named));
        info
    }

    fn standing(&self, entry: &Entry, state: SnapshotState, has_template: bool) -> SnapshotInfo {
        match state {
            SnapshotState::Ready(snapshot) => {
                let warning = self.in_the_way(&snapshot);
                ready(entry, &snapshot, has_template || warning.is_none(), warning)
            }
            SnapshotState::Creating(job) => SnapshotInfo {
                phase: Some(phase(*job.phase.borrow())),
                bootable: has_template,
                ..planned(&job, SnapshotStatus::Writing)
            },
            SnapshotState::Branching(job) | SnapshotState::Saving(job) | SnapshotState::Left(job) => self
                .with_error(
                    SnapshotInfo {
                        phase: Some(SnapshotPhase::Saving),
                        bootable: has_template,
                        ..branched(&job, SnapshotStatus::Writing)
                    },
                    job.shortage().as_ref(),
                ),
            SnapshotState::Failed { error, job } => {
                let status = SnapshotStatus::Failed;
                let known = match job {
                    Some(SnapshotJob::Create(job)) => planned(&job, status),
                    Some(SnapshotJob::Branch(job)) => branched(&job, status),
                    None => blank(&entry.tag, status),
                };
                self.with_error(SnapshotInfo { bootable: has_template, ..known }, Some(&error))
            }
            SnapshotState::Unknown(template) => self.with_error(
                SnapshotInfo {
                    vcpus: template.vcpus(),
                    mem_size_mib: template.mem_mib(),
                    template: template.pid().map(|pid| TemplateInfo {
                        pid,
                        source: "unknown".into(),
                        children: self.app.registry.children_of(template.id()),
                    }),
                    ..blank(&entry.tag, SnapshotStatus::Unknown)
                },
                entry.snapshot().err().as_ref(),
            ),
        }
    }

    /// Why no template could start from the snapshot. The check does not read every file in full.
    fn in_the_way(&self, snapshot: &Snapshot) -> Option<String> {
        let name = &snapshot.manifest().guest.image.as_ref()?.name;
        let mut images = self.images.borrow_mut();
        let found = images.entry(name.clone()).or_insert_with(|| {
            let host = &self.app.snapshots.host;
            host.finder.disk(&host.config, name).map(|(_, base)| base)
        });
        check_image(snapshot, found.as_ref()).err().map(|error| error.shown(self.who.is_admin()))
    }

    fn with_error(&self, info: SnapshotInfo, error: Option<&Error>) -> SnapshotInfo {
        SnapshotInfo {
            error: error.map(|error| error.shown(self.who.is_admin())),
            error_code: error.map(|error| error.code().name().into()),
            ..info
        }
    }
}

/// A snapshot that is on disk.
fn ready(entry: &Entry, snapshot: &Snapshot, bootable: bool, warning: Option<String>) -> SnapshotInfo {
    let (manifest, sizes) = (snapshot.manifest(), snapshot.sizes());
    let (guest, measured) = (&manifest.guest, &manifest.measured);
    let branched = manifest.branched_from.is_some();
    SnapshotInfo {
        created_at_unix: manifest.created_at_unix,
        memory_bytes: sizes.memory.physical,
        disk_bytes: sizes.disks.physical,
        state_bytes: sizes.state.physical,
        bootable,
        warning,
        branched_from: manifest.branched_from.clone(),
        parent_tag: manifest.parent.as_ref().map(|parent| parent.tag.clone()),
        chain_depth: snapshot.depth(),
        mode: measured.mode.clone(),
        pause_ms: measured.pause_ms,
        frozen_ms: measured.frozen_ms,
        quiesced: measured.quiesced,
        diff_ms: measured.save_ms.filter(|_| branched),
        diff_physical_bytes: branched.then_some(sizes.own_memory.physical),
        diff_logical_bytes: branched.then_some(sizes.own_memory.logical),
        bytes_written: measured.written_bytes.filter(|_| branched),
        ..of_guest(guest, blank(&entry.tag, SnapshotStatus::Ready))
    }
}

fn phase(phase: CreatePhase) -> SnapshotPhase {
    match phase {
        CreatePhase::Booting => SnapshotPhase::Booting,
        CreatePhase::Warming => SnapshotPhase::Warming,
        CreatePhase::Freezing => SnapshotPhase::Freezing,
        CreatePhase::Saving => SnapshotPhase::Saving,
    }
}

/// A branch that is not on disk.
fn branched(branch: &BranchJob, status: SnapshotStatus) -> SnapshotInfo {
    let captured = branch.capture_stats();
    let progress = branch.progress();
    let progress = progress.map(|it| Progress::new(it.scanned_bytes, it.total, it.written));
    // The snapshot that the branch is stored as a difference to.
    let parent = branch.origin.as_ref().filter(|_| branch.mode.is_difference());
    SnapshotInfo {
        created_at_unix: branch.begun_at_unix,
        branched_from: Some(branch.source.clone()),
        parent_tag: parent.map(|origin| origin.tag.clone()),
        mode: Some(branch.mode.name().into()),
        pause_ms: captured.pause_ms,
        frozen_ms: captured.frozen_ms,
        quiesced: captured.quiesced,
        progress,
        ..of_guest(&branch.guest, blank(&branch.tag, status))
    }
}

fn of_guest(guest: &GuestSpec, info: SnapshotInfo) -> SnapshotInfo {
    SnapshotInfo {
        image: guest.image.as_ref().map(|image| image.name.clone()),
        kernel: guest.kernel.clone(),
        vcpus: guest.vcpus,
        mem_size_mib: guest.mem_size_mib,
        network: guest.network,
        python: guest.python,
        ..info
    }
}

/// A snapshot that is being created, as the request asked for it.
fn planned(making: &CreateJob, status: SnapshotStatus) -> SnapshotInfo {
    let order = &making.order;
    let (image, kernel) = match &order.from {
        From::Image(image) => (Some(image.clone()), None),
        From::Disk { rootfs, .. } => (Some(rootfs.display().to_string()), None),
        From::Kernel(kernel) => (None, Some(kernel.display().to_string())),
    };
    SnapshotInfo {
        created_at_unix: making.begun_at_unix,
        image,
        kernel,
        vcpus: order.vcpus,
        mem_size_mib: order.mem_mib,
        network: order.network,
        ..blank(&order.tag, status)
    }
}

fn blank(tag: &str, status: SnapshotStatus) -> SnapshotInfo {
    SnapshotInfo {
        owner: String::new(),
        tag: tag.to_owned(),
        status,
        kind: SnapshotKind::Full,
        phase: None,
        error: None,
        error_code: None,
        created_at_unix: 0,
        image: None,
        kernel: None,
        vcpus: 0,
        mem_size_mib: 0,
        network: false,
        python: None,
        memory_bytes: 0,
        disk_bytes: 0,
        state_bytes: 0,
        bootable: false,
        warning: None,
        branched_from: None,
        parent_tag: None,
        chain_depth: 0,
        mode: None,
        pause_ms: None,
        frozen_ms: None,
        quiesced: None,
        diff_ms: None,
        diff_physical_bytes: None,
        diff_logical_bytes: None,
        bytes_written: None,
        progress: None,
        dir: String::new(),
        template: None,
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write;

    use forkd_store::Contents;

    use super::*;
    use crate::testing::fake_guest::FakeDaemon;

    #[tokio::test]
    async fn a_missing_or_changed_image_is_a_warning_of_the_snapshot() {
        let daemon = FakeDaemon::start().await;
        let app = &daemon.app;
        let images = app.config.library_dir.join("images");
        std::fs::create_dir_all(&images).unwrap();
        let path = images.join("disk.ext4");
        std::fs::write(&path, [0; 512]).unwrap();
        let name = path.display().to_string();
        let image = BaseImage::of(&name, "", &File::open(&path).unwrap()).unwrap();
        let guest = GuestSpec {
            image: Some(image),
            kernel: None,
            vcpus: 1,
            mem_size_mib: 1,
            network: false,
            python: None,
            guest_ports: Vec::new(),
        };
        let mut draft = app.snapshots.store.begin("x").unwrap();
        draft.create_state().unwrap().write_all(b"state").unwrap();
        draft.create_memory().unwrap().set_len(1 << 20).unwrap();
        let mut layer = draft.create_disk(0).unwrap();
        layer.write_all(&[1; 4096]).unwrap();
        let snapshot = draft.publish(Contents { disks: vec![vec![layer]], ..Contents::new(guest) }).unwrap();

        let who = Principal::local();
        let why = || Look::new(app, &who).in_the_way(&snapshot);
        assert_eq!(why(), None);
        std::fs::write(&path, [0; 1024]).unwrap();
        assert!(why().unwrap().contains("built again or edited"), "{:?}", why());
        std::fs::remove_file(&path).unwrap();
        assert!(why().unwrap().contains("snapshot x needs its image"), "{:?}", why());
    }
}
