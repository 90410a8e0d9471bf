//! Boots sandboxes on the disks of a snapshot that has no memory: a new guest, which finds the files of the old one.

use std::path::Path;
use std::sync::Arc;

use forkd_store::Snapshot;

use crate::error::{Code, Error, Result};
use crate::host::images::{BootSource, DiskLayers};
use crate::host::{Host, cgroup};
use crate::monitor::boot_files;
use crate::sandbox::Spec;
use crate::sandbox::registry::{BootRequest, Bound, Registry, WarmAtBoot};
use crate::sandbox::spawn::{SpawnSpec, Spawned, spawn};
use crate::snapshot::load::check_image;
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::task::blocking;

/// Starts the children that `spec` asks for: forks them, or boots them if the snapshot has no memory.
pub(crate) async fn start_children(
    registry: &Arc<Registry>,
    snapshots: &Arc<SnapshotRegistry>,
    spec: SpawnSpec,
) -> Result<Spawned> {
    match snapshots.usable(&spec.tag, &spec.who)?.is_disk_only() {
        true => boot_children(registry, snapshots, spec).await,
        false => spawn(registry, snapshots, spec).await,
    }
}

/// Boots the requested number of sandboxes on the disks of a snapshot. vCPUs and memory are those of the guest that
/// the snapshot was made of; each sandbox has a lineage of its own.
async fn boot_children(
    registry: &Arc<Registry>,
    snapshots: &Arc<SnapshotRegistry>,
    spec: SpawnSpec,
) -> Result<Spawned> {
    let entry = snapshots.usable(&spec.tag, &spec.who)?;
    entry.snapshot()?;
    // Read anew: the manifest on disk counts, not the one the daemon read earlier.
    let (store, tag) = (snapshots.store.clone(), spec.tag.clone());
    let snapshot = blocking("reading a snapshot", move || Ok(store.get(&tag)?)).await?;
    if !snapshot.is_disk_only() {
        let text = "the snapshot was made again meanwhile; try again";
        return Err(Error::new(Code::SnapshotReplaced, text));
    }
    let mut spawned = Spawned { children: Vec::new(), errors: Vec::new() };
    let mut begun = Vec::with_capacity(spec.n);
    for index in 0..spec.n {
        match boot_from(registry, &snapshot, &spec).await {
            Ok(bound) => begun.push((index, bound)),
            Err(error) => spawned.errors.push((index, error)),
        }
    }
    for (index, bound) in begun {
        match if spec.wait { bound.sandbox().started().await } else { Ok(()) } {
            Ok(_) => spawned.children.push(bound),
            Err(error) => spawned.errors.push((index, error)),
        }
    }
    Ok(spawned)
}

/// Boots one sandbox on the disks of `snapshot`. It is deleted when the result is dropped.
async fn boot_from(registry: &Arc<Registry>, snapshot: &Snapshot, spawn: &SpawnSpec) -> Result<Bound> {
    let guest = &snapshot.manifest().guest;
    let spec = Spec {
        owner: spawn.owner.clone(),
        image: guest.image.as_ref().map(|image| image.name.clone()),
        snapshot_tag: Some(snapshot.tag().to_owned()),
        forked_from: None,
        vcpus: guest.vcpus,
        mem_mib: guest.mem_size_mib,
        network: spawn.network && guest.network,
        memory_limit_mib: spawn.memory_limit_mib.unwrap_or_else(|| cgroup::memory_mib(guest.mem_size_mib)),
        guest: None,
    };
    // The guest of the snapshot had the image's command; its template's memory, in which it ran, is not here.
    let warm = WarmAtBoot::Command;
    let boot = BootRequest { warm, lasting: true, envs: spawn.envs.clone(), id: spawn.id.clone() };
    let known = snapshot.clone();
    let find = move |host: &Host| find(host, &known);
    let bound = registry.boot_from(spec, boot, &spawn.who.quota, find).await?;
    bound.sandbox().update_runtime(|runtime| {
        runtime.saved.lifetime = spawn.lifetime.clone();
        runtime.saved.workspace = spawn.workspace.clone();
        runtime.saved.e2b = spawn.e2b.clone();
        runtime.time_to_live = spawn.time_to_live;
    });
    // The ledger gets the labels, which are set only now.
    registry.archive.made(bound.sandbox());
    Ok(bound)
}

/// Opens and checks the files of a boot on the disks of `snapshot`. Blocks.
fn find(host: &Host, snapshot: &Snapshot) -> Result<(BootSource, Option<String>)> {
    let guest = &snapshot.manifest().guest;
    let unusable = |text: String| Error::new(Code::SnapshotUnusable, text);
    if guest.guest_ports != boot_files::GUEST_PORTS {
        return Err(unusable(format!(
            "snapshot {} lets its guest call the host's ports {:?}, which no guest may; make it again",
            snapshot.tag(),
            guest.guest_ports
        )));
    }
    let Some(image) = &guest.image else {
        return Err(unusable(format!(
            "snapshot {} names no image under its disk; make it again",
            snapshot.tag()
        )));
    };
    // A guest of a disk outside the library may have a kernel of its own, given by its path.
    let kernel = guest.kernel.as_deref().filter(|kernel| kernel.starts_with('/'));
    let source = match image.name.starts_with('/') {
        true => host.finder.find_disk(&host.config, kernel.map(Path::new), Path::new(&image.name)),
        false => host.finder.find(&image.name),
    };
    let base = source.as_ref().map_err(Clone::clone).and_then(BootSource::base);
    let base = base.and_then(|base| {
        base.ok_or_else(|| Error::host("cannot boot on a snapshot's disks", "its image has no disk"))
    });
    check_image(snapshot, base.as_ref())?;
    let files = snapshot.open()?;
    let mut disks = files.disks.into_iter();
    let (Some(disk), None) = (disks.next(), disks.next()) else {
        return Err(unusable(format!("snapshot {} has not exactly one disk; make it again", snapshot.tag())));
    };
    let layers = disk.layers.into_iter().map(Into::into).collect();
    let source = source?.on(DiskLayers { state: files.state.into(), layers });
    Ok((source, guest.kernel.clone()))
}
