//! Spawning: forks the requested number of children from the template of a snapshot, or of a running sandbox.
//!
//! One thread prepares the children one after the other. It hands each to the template at once, so the template forks
//! the first while the thread prepares the last. A child needs little, in this order: a folder, a listening control
//! socket with a connection on which `Hello` is sent, empty files, and the record for the next daemon. The child's
//! supervisor does the rest (the process's identity, the first answer) once the process exists.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::control::{Channel, FdRef, ForkConfig};
use tokio::sync::mpsc;

use crate::auth::principal::Principal;
use crate::auth::quota::Claim;
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::{self, CgroupLimits};
use crate::host::{Host, disk_layer};
use crate::monitor::{boot_files, control_socket};
use crate::sandbox::e2b::E2bState;
use crate::sandbox::lifetime::{Lifetime, deadline};
use crate::sandbox::registry::{Bound, Registry, Reservation};
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::{PendingFork, SandboxOrigin};
use crate::sandbox::{Sandbox, SandboxRecord, SavedState, Spec};
use crate::snapshot::registry::SnapshotRegistry;
use crate::snapshot::template::Template;
use crate::telemetry::{metrics, otlp};
use crate::util::random::new_id;
use crate::util::task::{self, Task};

/// A request to fork children.
#[derive(Debug, Clone)]
pub(crate) struct SpawnSpec {
    /// The tag of the snapshot to fork; [`spawn_from`] does not use it.
    pub(crate) tag: String,
    /// The caller, who must be allowed to use the snapshot; it carries the owner's quota.
    pub(crate) who: Principal,
    /// The owner of the children.
    pub(crate) owner: String,
    pub(crate) n: usize,
    /// Whether to wait until each child runs.
    pub(crate) wait: bool,
    pub(crate) network: bool,
    pub(crate) memory_limit_mib: Option<u64>,
    pub(crate) envs: BTreeMap<String, String>,
    /// The workspace that gets the child.
    pub(crate) workspace: Option<String>,
    /// The time until each child's deadline.
    pub(crate) time_to_live: Option<Duration>,
    pub(crate) lifetime: Lifetime,
    /// When the request arrived.
    pub(crate) arrived: Instant,
    /// The id of the child, which no other sandbox may have; a new one when absent. Only for one child.
    pub(crate) id: Option<String>,
    /// The state of the E2B API.
    pub(crate) e2b: Option<Box<E2bState>>,
}

/// How long a child waits for the files of an earlier process with its id.
const FOLDER_WAIT: Duration = Duration::from_secs(10);
/// How often it looks.
const FOLDER_TICK: Duration = Duration::from_millis(2);

/// The result of a [`SpawnSpec`].
#[derive(Debug, Default)]
pub(crate) struct Spawned {
    /// Each is deleted when its [`Bound`] is dropped.
    pub(crate) children: Vec<Bound>,
    /// Why the other children failed, by their indexes.
    pub(crate) errors: Vec<(usize, Error)>,
}

/// The children to fork from one template.
#[derive(Debug, Clone)]
struct Batch {
    spec: Arc<SpawnSpec>,
    template: Arc<Template>,
    n: usize,
}

/// Forks children of a snapshot.
///
/// A template may be killed at any moment, for example by the kernel when memory is short. The snapshot still exists,
/// so the children that this template did not fork are requested once more, from the next template.
pub(crate) async fn spawn(
    registry: &Arc<Registry>,
    snapshots: &Arc<SnapshotRegistry>,
    spec: SpawnSpec,
) -> Result<Spawned> {
    let spec = Arc::new(spec);
    let batch = async |n| {
        let template = snapshots.template_for(&spec.tag, &spec.who).await?;
        Ok::<_, Error>(Batch { spec: spec.clone(), template, n })
    };
    let first = batch(spec.n).await?;
    let Spawned { mut children, mut errors } = attempt(registry, first.clone()).await?;
    if !errors.is_empty() && !first.template.is_alive() {
        let lost = std::mem::take(&mut errors);
        let again = async { attempt(registry, batch(lost.len()).await?).await };
        match again.await {
            Ok(more) => {
                children.extend(more.children);
                errors.extend(more.errors.into_iter().map(|(index, error)| (lost[index].0, error)));
            }
            Err(error) => errors.extend(lost.into_iter().map(|(index, _)| (index, error.clone()))),
        }
    }
    Ok(Spawned { children, errors })
}

/// Forks children of `template`, which a fork made of a running sandbox. If the template ends meanwhile, the children
/// that are missing are errors: no other template has the same memory.
pub(crate) async fn spawn_from(
    registry: &Arc<Registry>,
    template: Arc<Template>,
    spec: SpawnSpec,
) -> Result<Spawned> {
    let n = spec.n;
    attempt(registry, Batch { spec: Arc::new(spec), template, n }).await
}

/// Forks children of one template, and waits for them as the request says.
async fn attempt(registry: &Arc<Registry>, batch: Batch) -> Result<Spawned> {
    let wait = batch.spec.wait;
    let mut given = begin(registry, batch)?;
    let mut pending = Vec::new();
    while let Some(bound) = given.recv().await {
        pending.push(bound);
    }
    let (mut children, mut errors) = (Vec::with_capacity(pending.len()), Vec::new());
    for (index, bound) in pending.into_iter().enumerate() {
        let started = async {
            let bound = bound?;
            if wait {
                bound.sandbox().started().await?;
            }
            Ok(bound)
        };
        match started.await {
            Ok(bound) => children.push(bound),
            Err(error) => errors.push((index, error)),
        }
    }
    Ok(Spawned { children, errors })
}

/// Begins to fork. The channel yields each child, or its error, in the order of the indexes, as soon as the template
/// has the request. A child is deleted when its [`Bound`] is dropped.
fn begin(registry: &Arc<Registry>, batch: Batch) -> Result<mpsc::UnboundedReceiver<Result<Bound>>> {
    let n = batch.n;
    let refused = |count: usize| {
        registry.host.telemetry.metrics.spawns.add(metrics::Outcome::Refused, count as u64);
    };
    let guest = &batch.template.about.guest;
    let claim = Claim { owner: batch.spec.owner.clone(), mem_mib: guest.mem_size_mib };
    let reserved = registry.reserve(n, &claim, &batch.spec.who.quota).inspect_err(|_| refused(n));
    let (mut reservations, mut reason) = reserved?;
    if let Err((fitting, error)) = check_threads(n, guest.vcpus) {
        reservations.truncate(fitting);
        reason = Some(error);
    }
    let missing = n - reservations.len();
    refused(missing);
    let reason = match (missing, reservations.is_empty()) {
        (0, _) => None,
        (_, true) => return Err(reason.unwrap_or_else(|| Error::host("forking", "no place was reserved"))),
        (_, false) => reason,
    };
    let (give, given) = mpsc::unbounded_channel();
    let (registry, span, context) = (registry.clone(), tracing::Span::current(), otlp::current());
    task::spawn_blocking(Task::Blocking, move || {
        let _entered = span.entered();
        for reservation in reservations {
            // The request was cancelled: no more children are prepared, and the others are deleted.
            if give.send(otlp::carry_blocking(context, || prepare(&registry, &batch, reservation))).is_err() {
                return;
            }
        }
        for error in std::iter::repeat_n(reason, missing).flatten() {
            let _ = give.send(Err(error));
        }
    });
    Ok(given)
}

/// Threads of a monitor beside its vCPUs: control, devices, and the task by which KVM recovers huge pages. That one
/// belongs to the process, or to the kernel before Linux 6.13; the host's limits count it either way.
const THREADS_EACH: u64 = 3;

/// Checks the kernel's thread limits. The error has the number of children that fit, and what to do.
fn check_threads(n: usize, vcpus: u8) -> std::result::Result<(), (usize, Error)> {
    let number = |path: &str| -> Option<u64> { std::fs::read_to_string(path).ok()?.trim().parse().ok() };
    let limits = ["/proc/sys/kernel/threads-max", "/proc/sys/kernel/pid_max"].map(number);
    let now = std::fs::read_to_string("/proc/loadavg").ok().and_then(|text| threads(&text));
    let (Some(max), Some(now)) = (limits.into_iter().flatten().min(), now) else { return Ok(()) };
    let fitting = fitting(max, now, vcpus);
    if fitting >= n as u64 {
        return Ok(());
    }
    let text = format!(
        "this host has {now} threads and allows {max}, enough for {fitting} more sandboxes: raise \
         kernel.threads-max and kernel.pid_max, or delete sandboxes first"
    );
    Err((fitting as usize, Error::new(Code::LimitReached, text)))
}

/// How many children fit on a host that has `now` threads and allows `max`.
fn fitting(max: u64, now: u64, vcpus: u8) -> u64 {
    max.saturating_sub(now) / (u64::from(vcpus) + THREADS_EACH)
}

/// The number of all threads in a `/proc/loadavg`.
fn threads(loadavg: &str) -> Option<u64> {
    loadavg.split(' ').nth(3)?.split_once('/')?.1.parse().ok()
}

fn prepare(registry: &Arc<Registry>, batch: &Batch, reservation: Reservation) -> Result<Bound> {
    let id = batch.spec.id.clone().map_or_else(|| new_id("sb"), Ok)?;
    let folder = registry.folder.join(&id);
    make_folder(&folder)?;
    match prepare_child(&registry.host, batch, id, &folder) {
        Ok((sandbox, pending)) => Ok(registry.add(reservation, sandbox, SandboxOrigin::Fork(pending))),
        Err(error) => {
            registry.host.telemetry.metrics.spawns.add(metrics::Outcome::Failed, 1);
            let _ = std::fs::remove_dir_all(&folder);
            Err(error)
        }
    }
}

/// Makes the folder of a sandbox. A sandbox that was suspended may be resumed under its id while the files of its last
/// process are still being removed: this waits for that.
pub(super) fn make_folder(folder: &Path) -> Result<()> {
    let until = Instant::now() + FOLDER_WAIT;
    loop {
        match std::fs::DirBuilder::new().mode(0o700).create(folder) {
            Ok(()) => return Ok(()),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && Instant::now() < until => {
                std::thread::sleep(FOLDER_TICK);
            }
            Err(error) => return Err(Error::host(format!("cannot make {}", folder.display()), error)),
        }
    }
}

/// Prepares one child in `folder` and asks its template for it.
fn prepare_child(host: &Host, batch: &Batch, id: String, folder: &Path) -> Result<(Sandbox, PendingFork)> {
    let (spawn, template, guest) = (&batch.spec, &batch.template, &batch.template.about.guest);
    let limit = spawn.memory_limit_mib.unwrap_or_else(|| cgroup::memory_mib(guest.mem_size_mib));
    let limits = CgroupLimits::of_sandbox(guest.vcpus, limit);
    let network = spawn.network && guest.network;
    let equipped =
        Resources::allocate(host, template.lineage.clone(), Some(template.clone()), &id, network, &limits);
    let mut resources = equipped?;
    let attached = attach(&resources, &id, folder, guest.image.is_none(), &host.config);
    let tapped = attached.and_then(|mut attached| {
        attached.attach_tap(&mut resources)?;
        Ok(attached)
    });
    let Attached { config, fds, control } = tapped.inspect_err(|_| resources.release(&id))?;
    let spec = Spec {
        owner: spawn.owner.clone(),
        image: guest.image.as_ref().map(|image| image.name.clone()),
        snapshot_tag: template.about.snapshot_tag().map(str::to_owned),
        forked_from: template.about.fork.as_ref().map(|fork| fork.sandbox.clone()),
        vcpus: guest.vcpus,
        mem_mib: guest.mem_size_mib,
        network: resources.slot.is_some(),
        memory_limit_mib: limit,
        guest: Some(guest.clone()),
    };
    let sandbox = Sandbox::new(id, spec, folder.to_owned(), resources, host);
    record(&sandbox, spawn, template).map_err(|error| {
        sandbox.resources().release(&sandbox.id);
        Error::host("cannot write the record of a sandbox", error)
    })?;
    let pending = PendingFork {
        pending: template.fork(config, fds),
        control,
        arrived: spawn.arrived,
        envs: spawn.envs.clone(),
    };
    Ok((sandbox, pending))
}

/// The files and descriptors of a child, and the daemon's end of its control connection.
pub(crate) struct Attached {
    pub(crate) config: ForkConfig,
    pub(crate) fds: Vec<OwnedFd>,
    pub(crate) control: Channel,
}

/// Makes the files of the child `name` in `folder`: everything but its tap.
pub(crate) fn attach(
    resources: &Resources,
    name: &str,
    folder: &Path,
    bare: bool,
    host: &Config,
) -> Result<Attached> {
    let failed = |error: io::Error| Error::host("cannot prepare a fork", error);
    let (listener, control) = control_socket::pair(&folder.join(control_socket::CONTROL)).map_err(failed)?;
    let mut fds = Vec::with_capacity(6);
    let mut attach = |fd: OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let mut config = ForkConfig {
        child: name.to_owned(),
        control: attach(listener),
        console: attach(disk_layer::file(folder, boot_files::CONSOLE)?),
        console_limit: host.limits.console_limit,
        layers: Vec::new(),
        tap: None,
        vsock: None,
        cgroup: None,
    };
    if !bare {
        let layer = match &resources.lineage {
            Some(lineage) => lineage.layer(&host.data_dir)?,
            None => disk_layer::layer(&host.data_dir)?,
        };
        config.layers = vec![Some(attach(layer))];
        config.vsock = Some(attach(boot_files::listener(folder)?));
    }
    if let Some(leaf) = &resources.leaf {
        config.cgroup = Some(attach(leaf.fd().try_clone_to_owned().map_err(failed)?));
    }
    Ok(Attached { config, fds, control })
}

impl Attached {
    /// Adds the tap of its network slot, if it has one. No other process may have the tap open.
    pub(crate) fn attach_tap(&mut self, resources: &mut Resources) -> Result<()> {
        let Some(slot) = &mut resources.slot else { return Ok(()) };
        let tap = slot.take_tap().map_err(|error| Error::host("cannot use a network slot", error))?;
        self.config.tap = Some(FdRef(self.fds.len()));
        self.fds.push(tap);
        Ok(())
    }
}

/// Writes the record for the next daemon. Not synced: the sandbox does not survive a reboot either.
fn record(sandbox: &Sandbox, spec: &SpawnSpec, template: &Template) -> io::Result<()> {
    let saved = SavedState {
        deadline_unix: spec.time_to_live.map(deadline),
        python: template.about.guest.python,
        workspace: spec.workspace.clone(),
        lifetime: spec.lifetime.clone(),
        e2b: spec.e2b.clone(),
        ..SavedState::default()
    };
    let record = SandboxRecord {
        template: template.id.clone(),
        envs: spec.envs.clone(),
        ..SandboxRecord::new(sandbox, template.about.lineage, &template.about.cgroup, saved)
    };
    record.write(&sandbox.folder)?;
    sandbox.recorded(record);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_counts_its_vcpus_two_threads_and_a_task_of_kvm() {
        assert_eq!(fitting(1000, 600, 1), 100);
        assert_eq!(fitting(1003, 600, 1), 100);
        assert_eq!(fitting(1000, 600, 5), 50);
        assert_eq!(fitting(1000, 997, 1), 0);
        assert_eq!(fitting(1000, 2000, 1), 0);
    }

    #[test]
    fn more_threads_than_the_kernel_can_have_are_refused_with_the_fix() {
        assert_eq!(threads("0.20 0.18 0.12 1/80 11206\n"), Some(80));
        assert_eq!(threads("nonsense"), None);
        check_threads(1, 1).unwrap();
        let (fitting, error) = check_threads(usize::MAX, 32).unwrap_err();
        assert!(fitting < 1 << 22);
        assert_eq!(error.code(), Code::LimitReached);
        assert!(error.public().contains("threads-max"), "{error}");
    }
}
