//! Starting a template from a snapshot on disk.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use forkd_protocol::control::{DiskFiles, FdRef, LoadConfig};
use forkd_store::{BaseImage, GuestSpec, Snapshot};

use crate::error::{Code, Error, Result};
use crate::host::Host;
use crate::host::cgroup::CgroupLimits;
use crate::host::lineage::Lineage;
use crate::monitor::{Launch, Monitor, boot_files};
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::{MemorySource, Template, TemplateParts, TemplateSpec};
use crate::util::fs::make_private_dir;
use crate::util::random::new_id;
use crate::util::task::blocking;

impl SnapshotRegistry {
    pub(crate) async fn load(&self, entry: &Entry) -> Result<Arc<Template>> {
        let (host, id) = (self.host.clone(), new_id("tp")?);
        // Read anew: the manifest on disk counts, not the one the daemon read earlier.
        let (store, wanted) = (self.store.clone(), entry.tag.clone());
        let snapshot = blocking("reading a snapshot", move || Ok(store.get(&wanted)?)).await?;
        let folder = self.folder.join(&id);
        let dir = TemplateDir { id: id.clone(), folder: folder.clone() };
        let known = snapshot.clone();
        // Finds everything that can be wrong with the files before a process starts.
        let opened = blocking("opening a snapshot", move || {
            let (config, fds) = open(&host, &known)?;
            let (lineage, launch) = dir.prepare(&host, known.manifest().guest.mem_size_mib)?;
            for FdRef(layer) in config.disks.iter().flat_map(|disk: &DiskFiles| &disk.layers) {
                fds.get(*layer).map_or(Ok(()), |layer: &OwnedFd| lineage.layers.add(layer))?;
            }
            Ok((config, fds, lineage, launch))
        });
        let (config, fds, lineage, launch) = opened.await?;
        let loaded = async {
            let monitor = Monitor::launch(launch, self.host.config.timing.call).await?;
            let guest = snapshot.manifest().guest.clone();
            let plan = self.plan(id, &folder, snapshot.tag(), MemorySource::Disk, guest, lineage);
            let template = Template::load(plan, monitor, config, fds, self.host.config.timing.boot).await;
            let template = template.map_err(|error| {
                let code = match error.code() {
                    Code::MonitorRefused => Code::SnapshotUnusable,
                    other => other,
                };
                error.within(code, format!("snapshot {} cannot be used here", snapshot.tag()))
            })?;
            SnapshotState::Ready(Box::new(snapshot.clone()))
                .write_record(&template, entry.owner(), true)
                .map_err(|error| Error::host("cannot write the record of a template", error))?;
            tracing::info!(tag = snapshot.tag(), template = template.id, "template started from disk");
            Ok(template)
        };
        let loaded = loaded.await;
        if loaded.is_err() {
            self.host.cleanup_queue.remove_folder(folder).await;
        }
        loaded
    }

    pub(crate) fn plan(
        &self,
        id: String,
        folder: &std::path::Path,
        tag: &str,
        source: MemorySource,
        guest: GuestSpec,
        lineage: Arc<Lineage>,
    ) -> TemplateParts {
        let (tag, cgroup) = (tag.to_owned(), lineage.name.clone());
        let about = TemplateSpec { tag, source, lineage: lineage.slot, cgroup, guest, fork: None };
        TemplateParts {
            id,
            folder: folder.to_owned(),
            about,
            lineage,
            cleanup_queue: self.host.cleanup_queue.clone(),
        }
    }
}

/// The id and folder of a template that is about to be started.
#[derive(Debug, Clone)]
pub(crate) struct TemplateDir {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
}

impl TemplateDir {
    /// Makes the folder, the lineage and the cgroup for a guest with `mem_mib` MiB. Blocks.
    pub(crate) fn prepare(&self, host: &Host, mem_mib: u64) -> Result<(Arc<Lineage>, Launch)> {
        let lineage = host.lineages.begin(&self.id)?;
        let limits = CgroupLimits::of_template(mem_mib);
        let leaf = lineage.cgroup.as_ref().map(|cgroup| cgroup.template(&limits));
        let procs_fd = leaf
            .map(|leaf| leaf.and_then(|leaf| leaf.procs_fd()))
            .transpose()
            .map_err(|error| Error::host("cannot make a cgroup", error))?;
        make_private_dir(&self.folder)
            .map_err(|error| Error::host(format!("cannot make {}", self.folder.display()), error))?;
        let launch = Launch {
            id: self.id.clone(),
            folder: self.folder.clone(),
            vmm: host.config.vmm.clone(),
            uid: lineage.uid(),
            procs_fd: procs_fd.map(Arc::new),
        };
        Ok((lineage, launch))
    }
}

/// Checks that the image found under the name is the one the snapshot was made from.
pub(crate) fn check_image(snapshot: &Snapshot, found: std::result::Result<&BaseImage, &Error>) -> Result<()> {
    let base = found.map_err(|error| {
        let text = format!("snapshot {} needs its image", snapshot.tag());
        error.clone().within(Code::SnapshotUnusable, text)
    })?;
    // The store's text names images, no files of the host.
    snapshot.check_image(base).map_err(|error| Error::new(Code::SnapshotUnusable, error.to_string()))
}

/// Opens and checks everything a template of `snapshot` is loaded from. Blocks.
fn open(host: &Host, snapshot: &Snapshot) -> Result<(LoadConfig, Vec<OwnedFd>)> {
    let guest = &snapshot.manifest().guest;
    if guest.guest_ports != boot_files::GUEST_PORTS {
        return Err(Error::new(
            Code::SnapshotUnusable,
            format!(
                "snapshot {} lets its guest call the host's ports {:?}, which no guest may; make it again",
                snapshot.tag(),
                guest.guest_ports
            ),
        ));
    }
    let image = match &guest.image {
        Some(image) => {
            let found = host.finder.disk(&host.config, &image.name);
            check_image(snapshot, found.as_ref().map(|(_, base)| base))?;
            found.ok().map(|(disk, _)| disk)
        }
        None => None,
    };
    let files = snapshot.open()?;
    let mut fds = Vec::new();
    let mut attach = |fd: OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let mut config = LoadConfig {
        kvm: attach(boot_files::kvm()?),
        state: attach(files.state.into()),
        memory: files.memory.into_iter().map(|layer| attach(layer.into())).collect(),
        disks: Vec::new(),
        // Limits and quotas count these two: the monitor refuses a state with other values.
        vcpus: Some(guest.vcpus),
        mem_mib: Some(guest.mem_size_mib),
        guest_ports: boot_files::GUEST_PORTS.into(),
    };
    if let (Some(base), Some(disk)) = (image, files.disks.into_iter().next()) {
        let layers = disk.layers.into_iter().map(|layer| attach(layer.into())).collect();
        config.disks = vec![DiskFiles { base: attach(base), layers }];
    }
    Ok((config, fds))
}
