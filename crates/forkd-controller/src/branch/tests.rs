//! Branches of a sandbox whose monitor its guest has broken into: it answers with other descriptors than it was
//! handed. What honest monitors do is tested with real guests.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use forkd_protocol::control::{Reply, Request, Role};
use forkd_store::BaseImage;
use rustix::fs::{CWD, Mode as Bits, OFlags};
use serde_json::json;

use super::*;
use crate::sandbox::Spec;
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::SandboxOrigin as Came;
use crate::testing::fake_guest::{FakeDaemon, eventually};
use crate::testing::fake_host::bare_guest;
use crate::testing::fake_monitor::{Act, Branched, FakeMonitor};

/// For what comes by itself, on a busy computer too.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A sandbox with a disk, and what plays its monitor.
struct Source {
    sandbox: Arc<Sandbox>,
    monitor: FakeMonitor,
}

impl Source {
    /// What it sends is made from the layer of its disk that the monitor was handed.
    async fn start(daemon: &FakeDaemon, sent: impl FnOnce(OwnedFd) -> Branched) -> Source {
        // A branch does what it is asked, and can neither be merged nor saved.
        let script = |request: &Request| match request {
            Request::Hello { .. } | Request::Seal { .. } => Act::Execute,
            _ => Act::Answer(Reply::Error { message: "no".into() }),
        };
        Source::start_with(daemon, bare_guest(), sent, script).await
    }

    async fn start_with(
        daemon: &FakeDaemon,
        guest: GuestSpec,
        sent: impl FnOnce(OwnedFd) -> Branched,
        script: fn(&Request) -> Act,
    ) -> Source {
        let host = &daemon.app.registry.host;
        let id = new_id("sb").unwrap();
        let lineage = host.lineages.begin(&id).unwrap();
        let sent = sent(lineage.layer(&host.config.data_dir).unwrap());
        let spec = Spec { guest: Some(guest), ..daemon.sandbox.spec.clone() };
        let resources = Resources { lineage: Some(lineage), ..Resources::default() };
        // Its agent is that of the daemon's other sandbox.
        let folder = daemon.sandbox.folder.clone();
        let sandbox = Arc::new(Sandbox::new(id, spec, folder.clone(), resources, host));
        let (monitor, started) = FakeMonitor::launched_in(&sandbox.id, &folder, Role::Sandbox).await;
        monitor.sends(sent).script_branches(script);
        tokio::spawn(sandbox.clone().supervise(Came::Adopted(started), host.config.clone()));
        sandbox.started().await.unwrap();
        Source { sandbox, monitor }
    }

    /// Branches it; what came of that, within the patience of the test.
    async fn branch(
        &self,
        daemon: &FakeDaemon,
    ) -> std::result::Result<Result<()>, tokio::time::error::Elapsed> {
        let order = BranchSpec {
            tag: Some("b".into()),
            mode: Mode::Full,
            wait: false,
            parent_tag: None,
            quota: Quota::default(),
        };
        let branch = daemon.app.snapshots.branch(&self.sandbox, order).unwrap();
        tokio::time::timeout(TIMEOUT, branch.wait_forkable()).await
    }
}

/// A FIFO that no process writes to: who opens it for reading without care waits for ever.
fn fifo(folder: &Path) -> (PathBuf, OwnedFd) {
    let path = folder.join("fifo");
    rustix::fs::mkfifoat(CWD, &path, Bits::RUSR | Bits::WUSR).unwrap();
    let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Bits::empty());
    (path, fd.unwrap())
}

/// Has a source that sends `sent` branched, and looks at what becomes of it.
async fn is_refused(what: &str, daemon: &FakeDaemon, sent: Branched) {
    let lies_about_process = sent.process.is_some();
    let source = Source::start(daemon, |_| sent).await;
    let branched = source.branch(daemon).await;
    let error = branched.unwrap_or_else(|_| panic!("{what}: the daemon waits")).unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{what}: {error}");
    // Its monitor is ended, and so is its branch. One that the daemon was not shown goes with the cgroup of its
    // source, which this one has not.
    let ended = || match source.sandbox.phase() {
        Phase::Ended(end) => Some(end),
        _ => None,
    };
    eventually("the end of the source", || ended().is_some()).await;
    assert_eq!(ended().unwrap().reason, "monitor_died", "{what}");
    let branch = source.monitor.child("branch").unwrap();
    if lies_about_process {
        branch.die();
    }
    eventually(what, || !source.monitor.runs() && !branch.runs()).await;
    // Nothing is left of it, and the daemon goes on.
    assert_eq!(daemon.app.snapshots.get("b").unwrap_err().code(), Code::SnapshotNotFound, "{what}");
    let folder = crate::host::run_dir::templates(&daemon.app.config.run_dir);
    eventually("the folder of the branch to go", || std::fs::read_dir(&folder).unwrap().count() == 0).await;
    assert_eq!(daemon.json("GET /v1/sandboxes", None).await.0, 200, "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_a_foreign_layer_is_ended_and_its_branch_refused() {
    let daemon = FakeDaemon::start().await;
    let folder = tempfile::tempdir().unwrap();
    let (pipe, _writer) = std::io::pipe().unwrap();
    let (socket, _other) = UnixStream::pair().unwrap();
    let open = |path: &Path| OwnedFd::from(File::open(path).unwrap());
    for (what, layer) in [
        ("a pipe", OwnedFd::from(pipe)),
        ("a socket", OwnedFd::from(socket)),
        ("a directory", open(folder.path())),
        ("a device", open(Path::new("/dev/null"))),
        ("a layer of another lineage", crate::host::disk_layer::layer(folder.path()).unwrap()),
        ("a file of the host", open(Path::new("/etc/hostname"))),
    ] {
        is_refused(what, &daemon, Branched { layer: Some(layer), process: None }).await;
    }
    is_refused("nothing", &daemon, Branched { layer: None, process: None }).await;
    let layer = Some(crate::host::disk_layer::layer(folder.path()).unwrap());
    let process = Some(rustix::process::getpid());
    is_refused("the daemon as the branch", &daemon, Branched { layer, process }).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_a_fifo_holds_up_no_thread_of_the_daemon() {
    let daemon = FakeDaemon::start().await;
    let folder = tempfile::tempdir().unwrap();
    let (path, fifo) = fifo(folder.path());
    let (released, release) = std::sync::mpsc::channel::<()>();
    // If a thread waits in the FIFO, the test is to fail and not to hang.
    let releasing = std::thread::spawn(move || {
        let _ = release.recv_timeout(2 * TIMEOUT);
        drop(rustix::fs::open(&path, OFlags::RDWR | OFlags::NONBLOCK, Bits::empty()));
    });
    is_refused("a FIFO", &daemon, Branched { layer: Some(fifo), process: None }).await;
    drop(released);
    releasing.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_the_layer_it_was_handed_is_branched() {
    let daemon = FakeDaemon::start().await;
    let source = Source::start(&daemon, |layer| Branched { layer: Some(layer), process: None }).await;
    source.branch(&daemon).await.unwrap().unwrap();
    assert!(matches!(source.sandbox.phase(), Phase::Running) && source.monitor.runs());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_whose_process_ends_can_be_taken_again_because_its_source_runs() {
    let daemon = FakeDaemon::start().await;
    let source = Source::start(&daemon, |layer| Branched { layer: Some(layer), process: None }).await;
    source.monitor.script_branches(|request| match request {
        Request::Hello { .. } => Act::Execute,
        _ => Act::Die,
    });
    let error = source.branch(&daemon).await.unwrap().unwrap_err();
    assert_eq!(
        (error.code(), error.code().retry()),
        (Code::TemplateEnded, forkd_api::Retry::Later),
        "{error}"
    );
    assert!(matches!(source.sandbox.phase(), Phase::Running) && source.monitor.runs());
}

/// A source with a disk over an image, whose branches do as `script` says.
async fn with_image(daemon: &FakeDaemon, script: fn(&Request) -> Act) -> Source {
    let image = BaseImage { name: "fake".into(), digest: "d".into(), size: 4096, modified_ns: 1 };
    let guest = GuestSpec { image: Some(image), ..bare_guest() };
    Source::start_with(daemon, guest, |layer| Branched { layer: Some(layer), process: None }, script).await
}

fn of_disks() -> BranchSpec {
    let (tag, quota) = (Some("b".into()), Quota::default());
    BranchSpec { tag, mode: Mode::Disk, wait: true, parent_tag: None, quota }
}

/// Branches the disks of `source`; what came of that.
async fn branch_disks(daemon: &FakeDaemon, source: &Source) -> Result<()> {
    let entry = daemon.app.snapshots.branch(&source.sandbox, of_disks())?;
    tokio::time::timeout(TIMEOUT, entry.wait_done()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_branch_of_disks_has_no_memory_and_no_template_and_nothing_is_forked_from_it() {
    let daemon = FakeDaemon::start().await;
    let source = with_image(&daemon, |_| Act::Execute).await;
    branch_disks(&daemon, &source).await.unwrap();
    let freeze = &daemon.guest.calls_of("Freeze")[0];
    assert_eq!((&freeze["fileSystems"], &freeze["sync"]), (&json!(true), &json!("full")));
    assert_eq!(daemon.guest.calls_of("Thaw").len(), 1);

    let snapshots = &daemon.app.snapshots;
    let entry = snapshots.get("b").unwrap();
    let snapshot = entry.snapshot().unwrap();
    assert!(snapshot.is_disk_only() && entry.is_disk_only() && entry.current().is_none());
    assert_eq!(snapshot.manifest().measured.mode.as_deref(), Some("disk"));
    assert_eq!((snapshot.layers().len(), snapshot.sizes().memory), (1, Default::default()));
    assert_eq!(snapshots.template("b").await.unwrap_err().code(), Code::SnapshotDiskOnly);
    let branch = source.monitor.child("branch").unwrap();
    eventually("the end of the branch's process", || !branch.runs()).await;
    let shown = daemon.json("GET /v1/snapshots/b", None).await.1;
    assert_eq!((&shown["kind"], &shown["mode"]), (&json!("disk"), &json!("disk")), "{shown}");
    let shown = daemon.json("GET /v1/snapshots/b/info", None).await.1;
    assert_eq!((&shown["kind"], &shown["memory_logical_bytes"]), (&json!("disk"), &json!(0)), "{shown}");
    // Its image is not in the library: the boot says that, and leaves nothing.
    let (status, error) = daemon.json("POST /v1/sandboxes", Some(json!({"snapshot_tag": "b", "n": 2}))).await;
    assert_eq!((status, &error["code"]), (409, &json!("snapshot_unusable")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_are_not_branched_without_clean_file_systems() {
    let daemon = FakeDaemon::start().await;
    let source = with_image(&daemon, |_| Act::Execute).await;
    *daemon.guest.dirty.lock().unwrap() = true;
    let error = branch_disks(&daemon, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::GuestTimeout, "{error}");
    assert_eq!(daemon.guest.calls_of("Thaw").len(), 1);
    assert!(source.monitor.child("branch").is_none(), "there is a branch");
    let gone = || daemon.app.snapshots.get("b").is_err();
    eventually("the end of the branch", gone).await;

    source.sandbox.set_phase(Phase::Paused);
    assert_eq!(branch_disks(&daemon, &source).await.unwrap_err().code(), Code::SandboxPaused);
    source.sandbox.set_phase(Phase::Running);
    *daemon.guest.dirty.lock().unwrap() = false;
    branch_disks(&daemon, &source).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn disks_of_a_sandbox_with_an_older_monitor_are_not_branched() {
    let daemon = FakeDaemon::start().await;
    let source = with_image(&daemon, |request| match request {
        Request::Hello { version } => {
            Act::Answer(Reply::Hello { version: *version, monitor: "older".into(), newest: 1 })
        }
        _ => Act::Execute,
    });
    let source = source.await;
    let error = branch_disks(&daemon, &source).await.unwrap_err();
    assert_eq!(error.code(), Code::SandboxUnfit, "{error}");
    assert!(matches!(source.sandbox.phase(), Phase::Running) && source.monitor.runs());
    let branch = source.monitor.child("branch").unwrap();
    eventually("the end of the branch's process", || !branch.runs()).await;
}
