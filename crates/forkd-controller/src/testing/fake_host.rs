//! A host on which daemons come and go: its folders, what an earlier daemon left in them, and daemons without
//! listeners. Their monitors are fake ones (`fake_monitor`).

use std::collections::BTreeMap;
use std::os::unix::fs::DirBuilderExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use forkd_api::{Event, EventKind};
use forkd_protocol::control::{Request, Role};
use forkd_store::{Contents, Database, GuestSpec, Quota, Snapshot, Store};

use crate::auth::principal::{LOCAL, Principal};
use crate::config::Config;
use crate::error::Result;
use crate::host::{Host, run_dir};
use crate::sandbox::lifetime::Lifetime;
use crate::sandbox::registry::Registry;
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::SandboxOrigin;
use crate::sandbox::{End, Phase, Sandbox, SandboxRecord, SavedState, Spec, adopt, spawn};
use crate::snapshot::branch_job::{self, BranchJob, Mode};
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::{self, MemorySource, PersistState, Template, TemplateSpec};
use crate::telemetry::Telemetry;
use crate::telemetry::events::{News, Since};
use crate::testing::fake_monitor::FakeMonitor;
use crate::util::random::new_id;
use crate::util::records;

/// For what comes by itself, on a busy computer too.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// What branches were taken of that no sandbox is there of.
const SOURCE: &str = "sbsource";

/// A guest of a kernel alone: its only word is that it is ready.
pub(crate) fn bare_guest() -> GuestSpec {
    GuestSpec {
        image: None,
        kernel: None,
        vcpus: 1,
        mem_size_mib: 64,
        network: false,
        python: None,
        guest_ports: Vec::new(),
    }
}

/// A sandbox of such a guest.
pub(crate) fn bare_spec() -> Spec {
    Spec {
        owner: LOCAL.into(),
        image: None,
        snapshot_tag: None,
        forked_from: None,
        vcpus: 1,
        mem_mib: 64,
        network: false,
        memory_limit_mib: 128,
        guest: Some(bare_guest()),
    }
}

/// A computer.
pub(crate) struct FakeHost {
    _folder: tempfile::TempDir,
    pub(crate) config: Arc<Config>,
    pub(crate) database: Arc<Database>,
    /// Numbers of lineages that were not used yet.
    lineages: AtomicU32,
}

/// A template that an earlier daemon left.
pub(crate) struct LeftTemplate {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) about: TemplateSpec,
    pub(crate) monitor: FakeMonitor,
}

/// A sandbox that an earlier daemon left.
pub(crate) struct LeftSandbox {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    pub(crate) record: SandboxRecord,
    pub(crate) monitor: FakeMonitor,
}

impl FakeHost {
    pub(crate) fn new() -> Self {
        FakeHost::with(|_| {})
    }

    /// One whose daemons are configured like that.
    pub(crate) fn with(change: impl FnOnce(&mut Config)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new(folder.path());
        let timing = &mut config.timing;
        (timing.call, timing.stall, timing.freeze) = (TIMEOUT, TIMEOUT, TIMEOUT);
        change(&mut config);
        let database = Arc::new(Database::open(&folder.path().join("forkd.db")).unwrap());
        FakeHost { _folder: folder, config: Arc::new(config), database, lineages: AtomicU32::new(100) }
    }

    /// Starts a daemon, which takes over what is there.
    pub(crate) async fn daemon(&self) -> Daemon {
        let telemetry = Telemetry::open(&self.config).unwrap();
        let host = Host::new(self.config.clone(), self.database.clone(), telemetry);
        let (snapshots, leftovers) = SnapshotRegistry::open(host.clone()).await.unwrap();
        let registry = Registry::new(host.clone()).unwrap();
        adopt::adopt(&registry, leftovers).await.unwrap();
        Daemon { host, snapshots, registry }
    }

    fn new_folder(&self, place: PathBuf, id: &str) -> PathBuf {
        let folder = place.join(id);
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&folder).unwrap();
        folder
    }

    /// The folder of a sandbox, which it makes.
    pub(crate) fn sandbox_folder(&self, id: &str) -> PathBuf {
        self.new_folder(run_dir::sandboxes(&self.config.run_dir), id)
    }

    /// The same for a template.
    pub(crate) fn template_folder(&self, id: &str) -> PathBuf {
        self.new_folder(run_dir::templates(&self.config.run_dir), id)
    }

    fn lineage(&self) -> u32 {
        self.lineages.fetch_add(1, Ordering::Relaxed)
    }

    /// Leaves a template of `tag` that runs.
    pub(crate) fn leave_template(&self, tag: &str, standing: PersistState) -> LeftTemplate {
        self.leave_template_as(&new_id("tp").unwrap(), tag, standing)
    }

    pub(crate) fn leave_template_as(&self, id: &str, tag: &str, standing: PersistState) -> LeftTemplate {
        let (id, folder) = (id.to_owned(), self.template_folder(id));
        let monitor = FakeMonitor::left_in(&folder, Role::Template);
        let about = TemplateSpec {
            tag: tag.into(),
            source: MemorySource::Memory,
            lineage: self.lineage(),
            cgroup: id.clone(),
            guest: bare_guest(),
            fork: None,
        };
        records::write(&template::TemplateRecord { about: about.clone(), standing }, &folder).unwrap();
        LeftTemplate { id, folder, about, monitor }
    }

    /// Leaves a sandbox that was booted and runs.
    pub(crate) fn leave_booted(&self) -> LeftSandbox {
        let id = new_id("sb").unwrap();
        let folder = self.sandbox_folder(&id);
        let monitor = FakeMonitor::left_in(&folder, Role::Sandbox);
        let record = record("", self.lineage(), &id);
        record.write(&folder).unwrap();
        LeftSandbox { id, folder, record, monitor }
    }

    /// Leaves a child of `template` that runs.
    pub(crate) fn leave_child(&self, template: &LeftTemplate) -> LeftSandbox {
        let id = new_id("sb").unwrap();
        let folder = self.sandbox_folder(&id);
        let monitor = template.monitor.child_in(&id, &folder);
        let identity = crate::host::process::ProcessId::of_child(monitor.pid, template.monitor.pid);
        identity.unwrap().write(&folder).unwrap();
        let record = record(&template.id, template.about.lineage, &template.about.cgroup);
        record.write(&folder).unwrap();
        LeftSandbox { id, folder, record, monitor }
    }

    /// Stores a snapshot.
    pub(crate) fn store(&self, tag: &str, change: impl FnOnce(&mut Contents)) -> Snapshot {
        let store = Store::open(&self.config.data_dir.join("snapshots")).unwrap();
        publish(&store, tag, change)
    }
}

/// Stores a snapshot.
pub(crate) fn publish(store: &Store, tag: &str, change: impl FnOnce(&mut Contents)) -> Snapshot {
    use std::io::Write;
    let mut draft = store.begin(tag).unwrap();
    draft.create_state().unwrap().write_all(b"state").unwrap();
    draft.create_memory().unwrap().write_all(&[1; 4096]).unwrap();
    let mut contents = Contents::new(bare_guest());
    change(&mut contents);
    draft.publish(contents).unwrap()
}

impl LeftSandbox {
    /// Changes what the daemon that left it wrote down.
    pub(crate) fn amend(&mut self, change: impl FnOnce(&mut SandboxRecord)) -> &Self {
        change(&mut self.record);
        self.record.write(&self.folder).unwrap();
        self
    }
}

/// The record of a sandbox with a bare guest.
pub(crate) fn record(template: &str, lineage: u32, cgroup: &str) -> SandboxRecord {
    SandboxRecord {
        template: template.into(),
        lineage,
        cgroup: cgroup.into(),
        spec: bare_spec(),
        created_at_unix: 1_700_000_000,
        created_nanos: 0,
        netns: None,
        generation: 0,
        envs: BTreeMap::new(),
        saved: SavedState::default(),
    }
}

/// What a daemon writes of a branch that is not on disk.
pub(crate) fn unsaved(begun_at_unix: u64, over: Option<(&str, &str)>) -> PersistState {
    let origin = over.map(|(tag, template)| branch_job::BranchOrigin {
        tag: tag.into(),
        snapshot: None,
        template: template.into(),
    });
    PersistState::Unsaved(Box::new(branch_job::BranchRecord {
        source: SOURCE.into(),
        mode: Mode::Diff,
        begun_at_unix,
        origin,
        taken: branch_job::CaptureStats::default(),
        owner: None,
    }))
}

/// A daemon without listeners.
pub(crate) struct Daemon {
    pub(crate) host: Arc<Host>,
    pub(crate) snapshots: Arc<SnapshotRegistry>,
    pub(crate) registry: Arc<Registry>,
}

/// A template of a daemon, and what plays it.
pub(crate) struct Live {
    pub(crate) template: Arc<Template>,
    pub(crate) monitor: FakeMonitor,
    pub(crate) entry: Arc<Entry>,
}

impl Daemon {
    /// Stops it as a daemon stops.
    pub(crate) async fn stop(self) {
        self.registry.close().await;
        self.snapshots.close().await;
    }

    /// A branch of the tag `tag` that is not on disk, with its template.
    pub(crate) async fn live(&self, tag: &str) -> Live {
        self.live_with(tag, bare_guest()).await
    }

    pub(crate) async fn live_with(&self, tag: &str, guest: GuestSpec) -> Live {
        let id = new_id("tp").unwrap();
        let folder = self.snapshots.folder.join(&id);
        std::fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let (monitor, started) = FakeMonitor::launched_in(&id, &folder, Role::Template).await;
        let lineage = self.host.lineages.begin(&id).unwrap();
        let branch = BranchJob::new(tag.into(), id.clone(), SOURCE.into(), guest.clone(), Mode::Full);
        let plan = self.snapshots.plan(id, &folder, tag, MemorySource::Memory, guest, lineage);
        let template = Template::new(plan, started).unwrap();
        let state = SnapshotState::Saving(Arc::new(branch));
        let entry = self.snapshots.reserve(tag, state, LOCAL, &Quota::default()).unwrap();
        entry.set_current(template.clone());
        Live { template, monitor, entry }
    }

    /// A sandbox that no template forked, and what plays its monitor, which can fork branches.
    pub(crate) async fn booted(&self) -> (Arc<Sandbox>, FakeMonitor) {
        let id = new_id("sb").unwrap();
        let folder = self.registry.folder.join(&id);
        std::fs::DirBuilder::new().mode(0o700).create(&folder).unwrap();
        let (monitor, started) = FakeMonitor::launched_in(&id, &folder, Role::Sandbox).await;
        let lineage = self.host.lineages.begin(&id).unwrap();
        let record = record("", lineage.slot, &lineage.name);
        let resources = Resources { lineage: Some(lineage), ..Resources::default() };
        let sandbox = Sandbox::new(id, record.spec.clone(), folder, resources, &self.host);
        record.write(&sandbox.folder).unwrap();
        sandbox.recorded(record);
        let reservation = self.registry.reserve_existing(&sandbox.spec);
        let sandbox = self.registry.add(reservation, sandbox, SandboxOrigin::Adopted(started)).release();
        runs(&sandbox).await;
        (sandbox, monitor)
    }

    /// What is asked for when a client wants `n` children of `tag`.
    pub(crate) fn spawn_spec(&self, tag: &str, n: usize) -> spawn::SpawnSpec {
        spawn::SpawnSpec {
            id: None,
            e2b: None,
            tag: tag.into(),
            who: Principal::local(),
            owner: LOCAL.into(),
            n,
            wait: true,
            network: false,
            memory_limit_mib: None,
            envs: BTreeMap::new(),
            workspace: None,
            time_to_live: None,
            lifetime: Lifetime::default(),
            arrived: Instant::now(),
        }
    }

    /// Forks what `spec` asks for.
    pub(crate) async fn spawn(&self, spec: spawn::SpawnSpec) -> Result<spawn::Spawned> {
        spawn::spawn(&self.registry, &self.snapshots, spec).await
    }

    /// A child of `live` that runs, and what plays it.
    pub(crate) async fn child(&self, live: &Live) -> (Arc<Sandbox>, FakeMonitor) {
        self.child_with(live, |_| {}).await
    }

    pub(crate) async fn child_with(
        &self,
        live: &Live,
        change: impl FnOnce(&mut spawn::SpawnSpec),
    ) -> (Arc<Sandbox>, FakeMonitor) {
        let mut spec = self.spawn_spec(&live.entry.tag, 1);
        change(&mut spec);
        let mut spawned = self.spawn(spec).await.unwrap();
        assert!(spawned.errors.is_empty(), "{:?}", spawned.errors);
        let sandbox = spawned.children.pop().unwrap().release();
        let monitor = live.monitor.child(&sandbox.child).unwrap();
        (sandbox, monitor)
    }

    /// What happened so far, in order: to sandboxes, with the reason of an end.
    pub(crate) fn sandbox_events(&self) -> Vec<(EventKind, Option<String>)> {
        let events = self.events();
        let of_one = |event: &&Arc<Event>| event.about.sandbox.as_deref().is_some_and(|id| id != SOURCE);
        let events = events.iter().filter(of_one);
        events.map(|event| (event.kind, event.about.reason.clone())).collect()
    }

    /// All that happened so far, in order.
    pub(crate) fn events(&self) -> Vec<Arc<Event>> {
        let mut news = self.host.telemetry.events.subscribe(Since::Number(0));
        let mut events = Vec::new();
        while let Some(News::Event(event)) = news.past() {
            events.push(event);
        }
        events
    }
}

/// A sandbox that was forked and runs, what plays its monitor, and all there must be for it.
pub(crate) async fn one_child() -> (FakeHost, Daemon, Live, Arc<Sandbox>, FakeMonitor) {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, monitor) = daemon.child(&live).await;
    (host, daemon, live, sandbox, monitor)
}

/// Waits until `sandbox` stands where `is_it` says.
pub(crate) async fn reaches(sandbox: &Sandbox, what: &str, is_it: impl FnMut(&Phase) -> bool) {
    let mut phases = sandbox.phase.subscribe();
    let reached = tokio::time::timeout(TIMEOUT, phases.wait_for(is_it)).await;
    assert!(reached.is_ok_and(|reached| reached.is_ok()), "{what}: it is {:?}", sandbox.phase());
}

/// Waits until it runs.
pub(crate) async fn runs(sandbox: &Sandbox) {
    reaches(sandbox, "it is to run", |phase| matches!(phase, Phase::Running)).await;
}

/// Waits for its end.
pub(crate) async fn end_of(sandbox: &Sandbox) -> Arc<End> {
    reaches(sandbox, "it is to end", |phase| matches!(phase, Phase::Ended(_))).await;
    match sandbox.phase() {
        Phase::Ended(end) => end,
        phase => panic!("{phase:?}"),
    }
}

/// Whether a request is one of those names.
pub(crate) fn is_pause(request: &Request) -> bool {
    matches!(request, Request::Pause)
}

pub(crate) fn is_resume(request: &Request) -> bool {
    matches!(request, Request::Resume)
}
