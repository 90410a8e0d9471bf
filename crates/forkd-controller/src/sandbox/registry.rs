//! The registry: creates, finds and deletes sandboxes, and enforces limits and quotas.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use forkd_protocol::control::MIN_MEM_MIB;
use forkd_protocol::names::{NAME_RULE, is_valid_name, is_valid_sandbox_id};
use forkd_store::{GuestSpec, Quota};
use parking_lot::Mutex;
use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;
use tokio_util::task::TaskTracker;

use crate::agent::bringup;
use crate::auth::principal::Principal;
use crate::auth::quota::{Claim, QuotaUsage};
use crate::config::Limits;
use crate::error::{Code, Error, Result};
use crate::host::images::BootSource;
use crate::host::{Host, cgroup, fd_limit, run_dir};
use crate::sandbox::archive::Archive;
use crate::sandbox::rollback::RollbackPlan;
use crate::sandbox::spawn::make_folder;
use crate::sandbox::supervisor::SandboxOrigin;
use crate::sandbox::{DesiredState, End, Phase, Resources, Sandbox, Spec};
use crate::snapshot::unknown::Remains;
use crate::util::fs::make_private_dir;
use crate::util::random::new_id;
use crate::util::task::{self, Task, blocking};

/// All sandboxes of a daemon.
#[derive(Debug)]
pub(crate) struct Registry {
    pub(crate) host: Arc<Host>,
    /// The folder that holds the sandboxes' folders.
    pub(crate) folder: PathBuf,
    inner: Mutex<Inner>,
    /// How many sandboxes were deleted and are not gone yet.
    leaving: TaskTracker,
    /// What is remembered of those that are gone.
    pub(crate) archive: Arc<Archive>,
}

#[derive(Debug, Default)]
struct Inner {
    sandboxes: HashMap<String, Entry>,
    /// The number of reservations.
    reserved: usize,
    /// By owner, without deleted sandboxes.
    usage: QuotaUsage,
    closed: bool,
}

#[derive(Debug)]
struct Entry {
    sandbox: Arc<Sandbox>,
    supervisor: JoinHandle<()>,
    reservation: Reservation,
}

/// What of the image's warm-up runs before a booted sandbox counts as running.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum WarmAtBoot {
    #[default]
    Nothing,
    /// All of it. If it fails, so does the boot.
    All,
    /// Its command, until clients can use that: for a guest that was warm before it was stored. If it fails, the sandbox
    /// runs without it.
    Command,
}

/// How a sandbox boots.
#[derive(Debug, Clone, Default)]
pub(crate) struct BootRequest {
    pub(crate) warm: WarmAtBoot,
    /// Whether it outlives this daemon.
    pub(crate) lasting: bool,
    /// Variables for its processes.
    pub(crate) envs: BTreeMap<String, String>,
    /// The id, which no other sandbox may have; a new one when absent.
    pub(crate) id: Option<String>,
}

/// A reservation for one sandbox, held from before its creation until its process and files are gone.
#[derive(Debug)]
pub(crate) struct Reservation {
    registry: Arc<Registry>,
    /// Its share of the owner's quota; `None` once it is deleted.
    claim: Option<Claim>,
}

impl Reservation {
    /// Returns its share to the owner's quota.
    fn release(&mut self) {
        if let Some(claim) = self.claim.take() {
            self.registry.inner.lock().usage.release(&claim);
        }
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.release();
        self.registry.inner.lock().reserved -= 1;
    }
}

impl Registry {
    /// A registry for the host's run directory. The caller holds the lock of the data directory.
    pub(crate) fn new(host: Arc<Host>) -> Result<Arc<Self>> {
        let folder = run_dir::sandboxes(&host.config.run_dir);
        make_private_dir(&folder)
            .map_err(|error| Error::host(format!("cannot make {}", folder.display()), error))?;
        let archive = Arc::new(Archive::new(host.database.clone()));
        Ok(Arc::new(Registry { host, folder, inner: Mutex::default(), leaving: task::tracker(), archive }))
    }

    pub(crate) fn get(&self, id: &str) -> Result<Arc<Sandbox>> {
        let found = self.inner.lock().sandboxes.get(id).map(|entry| entry.sandbox.clone());
        found.ok_or_else(|| no_sandbox(id))
    }

    /// As [`get`](Registry::get), but fails if the sandbox's record cannot be read.
    pub(crate) fn known(&self, id: &str) -> Result<Arc<Sandbox>> {
        let sandbox = self.get(id)?;
        sandbox.known()?;
        Ok(sandbox)
    }

    /// Fails as for a missing sandbox unless `who` may see it.
    pub(crate) fn check_owner(&self, sandbox: &Sandbox, who: &Principal) -> Result<()> {
        match who.owns(&sandbox.spec.owner) {
            true => Ok(()),
            false => Err(no_sandbox(&sandbox.id)),
        }
    }

    /// All of them, oldest first.
    pub(crate) fn list(&self) -> Vec<Arc<Sandbox>> {
        let mut list: Vec<_> =
            self.inner.lock().sandboxes.values().map(|entry| entry.sandbox.clone()).collect();
        list.sort_by(|a, b| (a.created, &a.id).cmp(&(b.created, &b.id)));
        list
    }

    /// How many sandboxes were forked from the template `id`.
    pub(crate) fn children_of(&self, id: &str) -> usize {
        let of_it = |entry: &&Entry| {
            let resources = entry.sandbox.resources();
            resources.template.as_ref().is_some_and(|template| template.id == id)
        };
        self.inner.lock().sandboxes.values().filter(of_it).count()
    }

    /// Boots a sandbox. It is deleted when the returned [`Bound`] is dropped, unless that is
    /// [released](Bound::release). A `lasting` sandbox outlives this daemon once it has booted.
    pub(crate) async fn boot(
        self: &Arc<Self>,
        spec: Spec,
        warm: bool,
        lasting: bool,
        quota: &Quota,
    ) -> Result<Bound> {
        let image = spec.image.clone().unwrap_or_default();
        check_image(&image)?;
        let find = move |host: &Host| Ok((host.finder.find(&image)?, None));
        let warm = if warm { WarmAtBoot::All } else { WarmAtBoot::Nothing };
        self.boot_from(spec, BootRequest { warm, lasting, ..BootRequest::default() }, quota, find).await
    }

    /// Boots a sandbox on the files that `find` returns, with the kernel's description if it is not the default one.
    /// `find` blocks.
    pub(crate) async fn boot_from(
        self: &Arc<Self>,
        spec: Spec,
        request: BootRequest,
        quota: &Quota,
        find: impl FnOnce(&Host) -> Result<(BootSource, Option<String>)> + Send + 'static,
    ) -> Result<Bound> {
        check(&self.host.config.limits, spec.vcpus, spec.mem_mib)?;
        let (mut reservations, _) = self.reserve(1, &spec.claim(), quota)?;
        let BootRequest { warm, lasting, envs, id } = request;
        // A resumed sandbox has its id again. Its earlier lineage, which may still have holders, has the id as its name.
        let resumed = id.is_some().then(|| new_id("-")).transpose()?;
        let id = id.map_or_else(|| new_id("sb"), Ok)?;
        let lineage_name = format!("{id}{}", resumed.unwrap_or_default());
        let folder = self.folder.join(&id);
        let registry = self.clone();
        let prepared = blocking("preparing a sandbox", move || {
            let host = &registry.host;
            let (assets, kernel) = find(host)?;
            make_folder(&folder)?;
            let failed = |_: &Error| drop(std::fs::remove_dir(&folder));
            let lineage = host.lineages.begin(&lineage_name).inspect_err(failed)?;
            for layer in assets.disk_layers() {
                lineage.layers.add(layer).inspect_err(|_| drop(std::fs::remove_dir(&folder)))?;
            }
            let limits = cgroup::CgroupLimits::of_sandbox(spec.vcpus, spec.memory_limit_mib);
            let resources = Resources::allocate(host, lineage, None, &id, spec.network, &limits);
            let mut resources = resources.inspect_err(|_| drop(std::fs::remove_dir(&folder)))?;
            let network = resources.slot.is_some();
            let guest = GuestSpec {
                image: assets.base().inspect_err(|_| resources.release(&id))?,
                kernel,
                vcpus: spec.vcpus,
                mem_size_mib: spec.mem_mib,
                network,
                python: None,
                guest_ports: Vec::new(),
            };
            let spec = Spec { network, guest: Some(guest), ..spec };
            Ok((Sandbox::new(id, spec, folder, resources, host), assets))
        });
        let (sandbox, assets) = prepared.await?;
        tracing::info!(sandbox = sandbox.id, image = sandbox.spec.image, "sandbox starts");
        let of_image = || assets.image().map(|image| image.warm.clone()).unwrap_or_default();
        let warm = match warm {
            WarmAtBoot::Nothing => None,
            WarmAtBoot::All => Some(of_image()),
            WarmAtBoot::Command => bringup::start_of(&of_image()),
        };
        let reservation =
            reservations.pop().ok_or_else(|| Error::host("making a sandbox", "no place was reserved"))?;
        Ok(self.add(reservation, sandbox, SandboxOrigin::Boot { assets, warm, lasting, envs }))
    }

    /// Adds a sandbox and starts its supervisor.
    pub(crate) fn add(
        self: &Arc<Self>,
        reservation: Reservation,
        sandbox: Sandbox,
        origin: SandboxOrigin,
    ) -> Bound {
        let sandbox = Arc::new(sandbox);
        if !matches!(origin, SandboxOrigin::Adopted(_)) {
            sandbox.created();
        }
        let supervisor = self.start_supervisor(&sandbox, origin);
        self.insert(Entry { sandbox: sandbox.clone(), supervisor, reservation });
        Bound { registry: self.clone(), sandbox, bound: true }
    }

    /// Starts the supervisor of a sandbox. The archive gets an entry now, and the end when the supervisor returns.
    fn start_supervisor(&self, sandbox: &Arc<Sandbox>, origin: SandboxOrigin) -> JoinHandle<()> {
        self.archive.made(sandbox);
        let (sandbox, archive, config) = (sandbox.clone(), self.archive.clone(), self.host.config.clone());
        let (lost, noted) = (sandbox.clone(), archive.clone());
        let work = async move {
            sandbox.clone().supervise(origin, config).await;
            archive.note_phase(&sandbox);
        };
        task::spawn_or(Task::Sandbox, work, move |error| {
            lost.supervisor_panicked(error);
            noted.note_phase(&lost);
        })
    }

    /// Adds a sandbox that ended under an earlier daemon.
    pub(crate) fn add_ended(self: &Arc<Self>, reservation: Reservation, sandbox: Sandbox) {
        self.archive.made(&sandbox);
        self.archive.note_phase(&sandbox);
        self.insert(Entry {
            sandbox: Arc::new(sandbox),
            supervisor: task::spawn(Task::Sandbox, async {}),
            reservation,
        });
    }

    /// Adds a sandbox whose record cannot be read. Its archive entry stays as it is.
    pub(crate) fn add_unknown(
        self: &Arc<Self>,
        reservation: Reservation,
        sandbox: Sandbox,
        remains: Remains,
    ) {
        let sandbox = Arc::new(sandbox);
        let supervisor = task::spawn(Task::Sandbox, sandbox.clone().keep_unknown(remains));
        self.insert(Entry { sandbox, supervisor, reservation });
    }

    /// Replaces `old` by `new` under the same id, and starts the supervisor of `new`, which ends `old`. Fails if `old`
    /// was deleted, or if `new` exceeds the owner's quota.
    pub(crate) fn replace(
        self: &Arc<Self>,
        old: &Arc<Sandbox>,
        new: Sandbox,
        quota: &Quota,
        plan: impl FnOnce(Arc<Sandbox>, JoinHandle<()>) -> RollbackPlan,
    ) -> Result<Arc<Sandbox>> {
        let new = Arc::new(new);
        let mut guard = self.inner.lock();
        let inner = &mut *guard;
        let closed = inner.closed;
        let entry = inner.sandboxes.get_mut(&old.id);
        let entry = entry.filter(|entry| !closed && Arc::ptr_eq(&entry.sandbox, old));
        let entry = entry.ok_or_else(|| {
            Error::new(Code::SandboxEnded, format!("sandbox {} was deleted meanwhile", old.id))
        });
        let fitting = entry.and_then(|entry| {
            if let Some(claim) = &mut entry.reservation.claim {
                inner.usage.resize(claim, new.spec.mem_mib, quota)?;
            }
            Ok(entry)
        });
        let entry = match fitting {
            Ok(entry) => entry,
            Err(error) => {
                drop(guard);
                // `new` was never forked: it has only a cgroup.
                self.host.cleanup_queue.later(move || new.resources().release(&new.id));
                return Err(error);
            }
        };
        let supervisor = std::mem::replace(&mut entry.supervisor, task::spawn(Task::Sandbox, async {}));
        let origin = SandboxOrigin::Rollback(Box::new(plan(old.clone(), supervisor)));
        entry.supervisor = self.start_supervisor(&new, origin);
        entry.sandbox = new.clone();
        Ok(new)
    }

    fn insert(&self, entry: Entry) {
        self.inner.lock().sandboxes.insert(entry.sandbox.id.clone(), entry);
    }

    /// A sandbox with its `exclusive` lock. The last holder may have been a rollback, which replaces the sandbox: then
    /// this locks the new one.
    pub(crate) async fn exclusive_lock_of(&self, id: &str) -> Result<(Arc<Sandbox>, OwnedMutexGuard<()>)> {
        loop {
            let sandbox = self.known(id)?;
            let turn = sandbox.lock_exclusive().await?;
            if self.get(id).is_ok_and(|now| Arc::ptr_eq(&now, &sandbox)) {
                return Ok((sandbox, turn));
            }
        }
    }

    /// Reserves places for `n` more sandboxes. If the daemon has descriptors for fewer, it returns reservations for that
    /// many, with the reason. Fails if there is no place at all, or if the quota does not allow all `n`.
    pub(crate) fn reserve(
        self: &Arc<Self>,
        n: usize,
        claim: &Claim,
        quota: &Quota,
    ) -> Result<(Vec<Reservation>, Option<Error>)> {
        let full = |text| Err(Error::new(Code::LimitReached, text));
        let (carried, too_few) = fd_limit::carried();
        let mut inner = self.inner.lock();
        if inner.closed {
            return Err(Error::new(Code::ShuttingDown, "the daemon is stopping; try again when it runs"));
        }
        let max = self.host.config.limits.max_sandboxes;
        // Sandboxes that are being deleted count: they still have their processes.
        if inner.reserved.saturating_add(n) > max {
            let text =
                format!("there are {} sandboxes, and {max} is the limit; delete some first", inner.reserved);
            return full(text);
        }
        let fitting = carried.saturating_sub(inner.reserved).min(n);
        if fitting == 0 {
            return full(too_few);
        }
        inner.usage.take(claim, n, fitting, quota)?;
        inner.reserved += fitting;
        drop(inner);
        let rest = (fitting < n).then(|| Error::new(Code::LimitReached, too_few));
        let reservation = |_| Reservation { registry: self.clone(), claim: Some(claim.clone()) };
        Ok(((0..fitting).map(reservation).collect(), rest))
    }

    /// Fails as [`reserve`](Registry::reserve) would.
    pub(crate) fn check_room(self: &Arc<Self>, n: usize, claim: &Claim, quota: &Quota) -> Result<()> {
        self.reserve(n, claim, quota).map(drop)
    }

    /// A reservation for a sandbox that exists already; no limit applies.
    pub(crate) fn reserve_existing(self: &Arc<Self>, spec: &Spec) -> Reservation {
        let claim = spec.claim();
        let mut inner = self.inner.lock();
        inner.reserved += 1;
        // The quota was checked when the sandbox was created.
        let _ = inner.usage.take(&claim, 1, 1, &Quota::default());
        Reservation { registry: self.clone(), claim: Some(claim) }
    }

    /// Deletes `sandbox` with the reason `end`, unless it was deleted or replaced before.
    pub(crate) fn end(self: &Arc<Self>, sandbox: &Arc<Sandbox>, end: End) {
        let mut inner = self.inner.lock();
        if !inner.sandboxes.get(&sandbox.id).is_some_and(|entry| Arc::ptr_eq(&entry.sandbox, sandbox)) {
            return;
        }
        let entry = inner.sandboxes.remove(&sandbox.id);
        drop(inner);
        let _ = sandbox.end_reason.set(end);
        entry.into_iter().for_each(|entry| self.release(entry, DesiredState::End));
    }

    /// Removes a sandbox from the registry. Its process and its files are removed in the background.
    pub(crate) fn delete(self: &Arc<Self>, id: &str) -> Result<()> {
        let entry = self.inner.lock().sandboxes.remove(id);
        let Some(entry) = entry else { return self.get(id).map(|_| ()) };
        self.release(entry, DesiredState::End);
        Ok(())
    }

    fn release(self: &Arc<Self>, mut entry: Entry, desired: DesiredState) {
        // At once: after the answer to a delete the owner may create another sandbox.
        entry.reservation.release();
        let leaving = self.leaving.token();
        if desired == DesiredState::End {
            entry.sandbox.mark_deleted();
            self.archive.ended(&entry.sandbox.id, &entry.sandbox.end_reason());
        }
        entry.sandbox.set_desired(desired);
        let registry = self.clone();
        task::spawn(Task::TearDown, async move {
            registry.tear_down(entry, desired).await;
            drop(leaving);
        });
    }

    async fn tear_down(&self, entry: Entry, desired: DesiredState) {
        let Entry { sandbox, supervisor, reservation } = entry;
        if let Err(error) = supervisor.await {
            tracing::error!(sandbox = sandbox.id, %error, "sandbox supervisor failed");
        }
        let mut resources = std::mem::take(&mut *sandbox.resources());
        // A half-made sandbox cannot be left to the next daemon: its supervisor has ended it.
        let deleted = matches!(sandbox.phase(), Phase::Ended(end) if end.is_requested());
        if desired == DesiredState::Leave && !deleted {
            if let Some(template) = &resources.template {
                template.leave();
            }
            if let Some(lineage) = &resources.lineage {
                lineage.leave();
            }
            return;
        }
        let id = sandbox.id.clone();
        let discarded = self.host.cleanup_queue.run(move || {
            resources.release(&id);
            resources
        });
        let resources = discarded.await;
        self.host.cleanup_queue.remove_folder(sandbox.folder.clone()).await;
        // From here on its template may end, and another sandbox may have its place.
        drop((resources, reservation));
        tracing::debug!(sandbox = sandbox.id, "sandbox removed");
    }

    /// Closes the registry: no sandbox starts any more, sandboxes that the next daemon adopts keep running, and the
    /// others end. Returns when all supervisors have returned and the archive is written.
    pub(crate) async fn close(self: &Arc<Self>) {
        let entries: Vec<Entry> = {
            let mut inner = self.inner.lock();
            inner.closed = true;
            inner.sandboxes.drain().map(|(_, entry)| entry).collect()
        };
        for entry in entries {
            let unknown = matches!(entry.sandbox.phase(), Phase::Unknown(_));
            let lasting = unknown || entry.sandbox.record().is_some();
            if !lasting {
                let why = "the daemon was stopped before it had booted, or while its command ran";
                let _ = entry.sandbox.end_reason.set(End::new("deleted", why, String::new()));
            }
            self.release(entry, if lasting { DesiredState::Leave } else { DesiredState::End });
        }
        self.leaving.wait().await;
        self.archive.flush().await;
    }
}

fn no_sandbox(id: &str) -> Error {
    let shown = if is_valid_sandbox_id(id) { id } else { "with that id" };
    Error::new(Code::SandboxNotFound, format!("there is no sandbox {shown}"))
}

/// Fails unless the guest's size is within the limits.
pub(crate) fn check(limits: &Limits, vcpus: u8, mem_mib: u64) -> Result<()> {
    if !(1..=limits.max_vcpus).contains(&vcpus) {
        return Err(Error::invalid(format!("vcpus is {vcpus}; it must be 1 to {}", limits.max_vcpus)));
    }
    if !(MIN_MEM_MIB..=limits.max_mem_mib).contains(&mem_mib) {
        let max = limits.max_mem_mib;
        return Err(Error::invalid(format!("mem_size_mib is {mem_mib}; it must be {MIN_MEM_MIB} to {max}")));
    }
    Ok(())
}

/// Fails unless `image` is a valid name.
pub(crate) fn check_image(image: &str) -> Result<()> {
    match is_valid_name(image) {
        true => Ok(()),
        false => Err(Error::invalid(format!("the image's name must be {NAME_RULE}"))),
    }
}

/// A sandbox bound to a request or a connection: it is deleted when this is dropped, unless it is released.
#[derive(Debug)]
pub(crate) struct Bound {
    registry: Arc<Registry>,
    sandbox: Arc<Sandbox>,
    bound: bool,
}

impl Bound {
    pub(crate) fn sandbox(&self) -> &Arc<Sandbox> {
        &self.sandbox
    }

    /// Unbinds the sandbox: from here on it lives until a client or a time-out ends it.
    pub(crate) fn release(mut self) -> Arc<Sandbox> {
        self.bound = false;
        self.sandbox.clone()
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        if self.bound {
            // Another request may have deleted it before.
            let _ = self.registry.delete(&self.sandbox.id);
        }
    }
}

/// The time `unix` seconds after 1970, for [`Sandbox::created`] of an adopted sandbox.
pub(crate) fn time(unix: u64) -> SystemTime {
    SystemTime::UNIX_EPOCH.checked_add(Duration::from_secs(unix)).unwrap_or(SystemTime::UNIX_EPOCH)
}

#[cfg(test)]
mod tests;
