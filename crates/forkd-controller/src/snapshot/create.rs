//! Making a snapshot: boot, warm up, freeze, save.
//!
//! The guest boots in the folder of its future template. When the guest is frozen, its process *is* the
//! template; the snapshot on disk is a copy that a forked saver writes. If a step fails or the job is
//! cancelled, nothing is left.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forkd_protocol::agent::AGENT_PORT;
use forkd_protocol::control::CONSOLE_TAIL;
use forkd_store::{GuestSpec, Measured, Snapshot, SnapshotKind};
use tokio::sync::watch;
use tracing::Instrument;

use crate::agent::bringup::{self, combine};
use crate::agent::{Agent, Endpoint};
use crate::auth::principal::Principal;
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::host::disk_layer;
use crate::host::handed_layers::are_kept;
use crate::host::images::BootSource;
use crate::monitor::{Launch, Monitor, boot_files, console};
use crate::snapshot::entry::Entry;
use crate::snapshot::load::TemplateDir;
use crate::snapshot::registry::SnapshotRegistry;
use crate::snapshot::save::{self, SaveJob};
use crate::snapshot::state::SnapshotState;
use crate::snapshot::template::{MemorySource, Template};
use crate::util::random::new_id;
use crate::util::task::{self, Task, blocking};

/// The order for a new snapshot.
#[derive(Debug, Clone)]
pub(crate) struct SnapshotSpec {
    pub(crate) tag: String,
    pub(crate) from: From,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    pub(crate) network: bool,
    /// Added to the image's own warm-up.
    pub(crate) warm_command: Vec<String>,
    pub(crate) warm_python: Option<String>,
}

/// What the daemon boots.
#[derive(Debug, Clone)]
pub(crate) enum From {
    Image(String),
    /// A disk outside the image library, with a kernel of its own or the default one.
    Disk {
        kernel: Option<PathBuf>,
        rootfs: PathBuf,
    },
    /// A kernel without a disk.
    Kernel(PathBuf),
}

/// The step that the job is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CreatePhase {
    Booting,
    Warming,
    Freezing,
    Saving,
}

/// The job that boots a guest and makes a snapshot of it.
#[derive(Debug)]
pub(crate) struct CreateJob {
    pub(crate) order: SnapshotSpec,
    pub(crate) begun_at_unix: u64,
    pub(crate) phase: watch::Sender<CreatePhase>,
    cancelled: watch::Sender<bool>,
}

impl CreateJob {
    pub(crate) fn new(order: SnapshotSpec) -> Self {
        CreateJob {
            order,
            begun_at_unix: crate::util::time::now_unix(),
            phase: watch::Sender::new(CreatePhase::Booting),
            cancelled: watch::Sender::new(false),
        }
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    /// Returns when the job is cancelled.
    async fn cancelled(&self) {
        let _ = self.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}

/// A booted guest that is to become a template.
struct Parent {
    monitor: Monitor,
    /// The layer with what the guest wrote to its disk; none without a disk.
    layer: Option<File>,
    agent: Agent,
    python: Option<bool>,
}

impl SnapshotRegistry {
    /// Begins to make a snapshot. The job goes on if its client disconnects; `claim` is dropped when the job is over.
    pub(crate) fn create(
        self: &Arc<Self>,
        order: SnapshotSpec,
        who: &Principal,
        claim: impl Send + 'static,
    ) -> Result<Arc<Entry>> {
        let job = Arc::new(CreateJob::new(order));
        let state = SnapshotState::Creating(job.clone());
        let entry = self.reserve(&job.order.tag, state, &who.owner, &who.quota)?;
        let (snapshots, created, failed) = (self.clone(), entry.clone(), entry.clone());
        let work = async move {
            snapshots.run_create(&created, &job).await;
            drop(claim);
        };
        task::spawn_or(Task::CreateJob, work.in_current_span(), move |error| failed.fail(error));
        Ok(entry)
    }

    async fn run_create(&self, entry: &Entry, job: &CreateJob) {
        let made = match self.record_owner(entry).await {
            Ok(()) => make(self, job).await,
            Err(error) => Err(error),
        };
        match made {
            Ok((snapshot, template)) => {
                tracing::info!(tag = entry.tag, "snapshot is ready");
                entry.set_current(template);
                entry.ready(snapshot);
            }
            Err(error) => {
                tracing::warn!(tag = entry.tag, %error, "snapshot not made");
                entry.fail(error);
            }
        }
    }
}

/// Makes a snapshot and its template.
async fn make(snapshots: &SnapshotRegistry, job: &CreateJob) -> Result<(Snapshot, Arc<Template>)> {
    let (host, order) = (snapshots.host.clone(), job.order.clone());
    let dir = TemplateDir { id: new_id("tp")?, folder: PathBuf::new() };
    let dir = TemplateDir { folder: snapshots.folder.join(&dir.id), ..dir };
    let place = dir.clone();
    let prepared = blocking("preparing a snapshot", move || {
        let assets = match &order.from {
            From::Image(image) => host.finder.find(image)?,
            From::Disk { kernel, rootfs } => {
                host.finder.find_disk(&host.config, kernel.as_deref(), rootfs)?
            }
            From::Kernel(kernel) => BootSource::bare(&host.config, kernel)?,
        };
        // A bare kernel has no use for a network interface.
        let slot = host.slot(order.network && assets.image().is_some())?;
        match place.prepare(&host, order.mem_mib) {
            Ok((lineage, launch)) => Ok((assets, slot, lineage, launch)),
            Err(error) => {
                drop(slot.map(|mut slot| slot.destroy()));
                Err(error)
            }
        }
    });
    let (assets, mut slot, lineage, launch) = prepared.await?;
    let tap = slot.as_mut().map(|slot| slot.take_tap()).transpose();
    let frozen = async {
        let tap = tap.map_err(|error| Error::host("cannot use a network slot", error))?;
        let network = tap.is_some();
        let mut parent = boot_and_warm(&snapshots.host.config, job, launch, &assets, tap).await?;
        job.phase.send_replace(CreatePhase::Freezing);
        let config = &snapshots.host.config;
        if assets.image().is_some() {
            // The warm-up may have written a lot, and syncing it to the disk takes time.
            let frozen = bringup::freeze(&parent.agent, config.timing.boot).await;
            frozen.map_err(|why| complaint(&dir.folder, why, None))?;
        }
        parent.monitor.freeze(config.timing.boot).await?;
        // From here on the layer belongs to the snapshot: no child may be able to write to it.
        if let Some(layer) = parent.layer.take() {
            lineage.layers.add(&layer)?;
            let (sealed, frozen) =
                (crate::host::images::reopen(&layer)?, [crate::host::images::reopen(&layer)?]);
            parent.monitor.seal(&[Some(sealed)], config.timing.call).await?;
            drop(layer);
            if are_kept(&frozen).await? {
                let text = "its monitor kept the right to write to its frozen disk; make it again";
                return Err(Error::host("the guest cannot become a snapshot", text));
            }
        }
        job.phase.send_replace(CreatePhase::Saving);
        let order = &job.order;
        let guest = GuestSpec {
            image: assets.base()?,
            kernel: match &order.from {
                From::Image(_) | From::Disk { .. } => None,
                From::Kernel(path) => Some(path.display().to_string()),
            },
            vcpus: order.vcpus,
            mem_size_mib: order.mem_mib,
            network,
            python: parent.python,
            guest_ports: Vec::new(),
        };
        let (id, folder) = (dir.id.clone(), &dir.folder);
        let plan = snapshots.plan(id, folder, &order.tag, MemorySource::Memory, guest, lineage);
        Template::new(plan, parent.monitor)
    };
    let cancelled = || Error::new(Code::Cancelled, "the snapshot was cancelled");
    let made = async {
        let template = tokio::select! {
            biased;
            () = job.cancelled() => return Err(cancelled()),
            frozen = frozen => frozen?,
        };
        let save = SaveJob {
            tag: job.order.tag.clone(),
            kind: SnapshotKind::Full,
            origin: None,
            diff: false,
            merge: false,
            branched_from: None,
            created_at_unix: None,
            measured: Measured::default(),
        };
        let unwanted = async {
            job.cancelled().await;
            cancelled()
        };
        let snapshot = save::save(snapshots, &template, save, drop, unwanted).await?;
        // Only a running guest needs these files.
        for name in [boot_files::VSOCK, boot_files::CONSOLE] {
            let _ = std::fs::remove_file(dir.folder.join(name));
        }
        Ok((snapshot, template))
    };
    let made = made.await;
    if let Some(mut slot) = slot {
        // The template does not use the slot: each child gets its own.
        snapshots.host.cleanup_queue.run(move || slot.destroy()).await;
    }
    if made.is_err() {
        snapshots.host.cleanup_queue.remove_folder(dir.folder.clone()).await;
    }
    made
}

/// Boots a guest and warms it up. Tries once more if the guest ends before its first console output: seen under
/// nested virtualization, and nothing of the guest ran yet.
async fn boot_and_warm(
    config: &Config,
    job: &CreateJob,
    launch: Launch,
    assets: &BootSource,
    tap: Option<OwnedFd>,
) -> Result<Parent> {
    let again = tap.as_ref().map(|tap| tap.try_clone()).transpose();
    let again = again.map_err(|error| Error::host("cannot use a network slot", error))?;
    let folder = launch.folder.clone();
    match attempt(config, job, launch.clone(), assets, tap).await {
        Err(error)
            if error.code() == Code::GuestFailed
                && *job.phase.borrow() == CreatePhase::Booting
                && console::tail(&folder.join(boot_files::CONSOLE), 64).trim().is_empty()
                && assets.image().is_some() =>
        {
            tracing::warn!(tag = job.order.tag, %error, "guest boot ended with an empty console; trying once more");
            attempt(config, job, launch, assets, again).await
        }
        other => other,
    }
}

async fn attempt(
    config: &Config,
    job: &CreateJob,
    launch: Launch,
    assets: &BootSource,
    tap: Option<OwnedFd>,
) -> Result<Parent> {
    let (timing, order, folder) = (&config.timing, &job.order, launch.folder.clone());
    let mut monitor = Monitor::launch(launch, timing.call).await?;
    let layer = assets.image().map(|_| disk_layer::layer(&config.data_dir)).transpose()?.map(File::from);
    let copy = layer.as_ref().map(|layer| layer.try_clone()).transpose();
    let copy = copy.map_err(|error| Error::host("cannot use a disk layer", error))?;
    let plan = boot_files::BootPlan {
        folder: folder.clone(),
        vcpus: order.vcpus,
        mem_mib: order.mem_mib,
        console_limit: config.limits.console_limit,
        tap,
        layer: copy.map(OwnedFd::from),
    };
    let files = assets.clone();
    let (boot, fds) = blocking("preparing a boot", move || boot_files::prepare(plan, &files)).await?;
    monitor.boot(boot, &fds, timing.boot).await?;
    drop(fds);
    let endpoint = Endpoint::Vsock { socket: folder.join(boot_files::VSOCK), port: AGENT_PORT };
    let agent = Agent::new(endpoint, timing.call);
    let Some(image) = assets.image() else {
        let ready = tokio::time::timeout(timing.boot, monitor.ready()).await;
        let (why, cause) = match ready {
            Ok(Ok(())) => return Ok(Parent { monitor, layer, agent, python: None }),
            Ok(Err(end)) => (end.describe(), end.cause()),
            Err(_) => {
                (format!("it did not write to the ready port within {} s", timing.boot.as_secs()), None)
            }
        };
        return Err(complaint(&folder, why, cause));
    };
    let mut warm = combine(&image.warm, order.warm_command.clone(), order.warm_python.clone());
    let up = async {
        let pong = bringup::up(&agent, timing).await?;
        job.phase.send_replace(CreatePhase::Warming);
        if !pong.python && order.warm_python.is_none() && matches!(order.from, From::Disk { .. }) {
            // The client did not ask for Python, and a disk outside the library has no manifest that names it.
            warm.python = None;
        }
        bringup::warm_up(&agent, &warm, timing).await?;
        Ok::<_, String>(pong)
    };
    let up = tokio::select! {
        biased;
        end = monitor.wait() => Err((end.describe(), end.cause())),
        up = up => up.map_err(|why| (why, None)),
    };
    match up {
        Ok(pong) => Ok(Parent { monitor, layer, agent, python: Some(pong.python) }),
        Err((why, cause)) => {
            monitor.end().await;
            Err(complaint(&folder, why, cause))
        }
    }
}

/// The error of a failed guest, with the end of its console.
fn complaint(folder: &Path, why: String, cause: Option<String>) -> Error {
    let tail = console::tail(&folder.join(boot_files::CONSOLE), CONSOLE_TAIL as u64);
    let error = Error::new(Code::GuestFailed, console::with_tail(&why, &tail));
    match cause {
        Some(cause) => error.because(cause),
        None => error,
    }
}
