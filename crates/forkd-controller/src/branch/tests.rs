//! Branches of a sandbox whose monitor its guest has broken into: it answers with other descriptors than it was
//! handed. What honest monitors do is tested with real guests.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use forkd_protocol::control::{Reply, Request, Role};
use rustix::fs::{CWD, Mode as Bits, OFlags};

use super::*;
use crate::sandbox::Spec;
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::SandboxOrigin as Came;
use crate::testing::fake_guest::{FakeDaemon, eventually};
use crate::testing::fake_host::bare_guest;
use crate::testing::fake_monitor::{Act, Branched, FakeMonitor};

/// For what comes by itself, on a busy computer too.
const PATIENCE: Duration = Duration::from_secs(60);

/// A sandbox with a disk, and what plays its monitor.
struct Source {
    sandbox: Arc<Sandbox>,
    monitor: FakeMonitor,
}

impl Source {
    /// What it sends is made from the layer of its disk that the monitor was handed.
    async fn start(daemon: &FakeDaemon, sent: impl FnOnce(OwnedFd) -> Branched) -> Source {
        let host = &daemon.app.registry.host;
        let id = new_id("sb").unwrap();
        let lineage = host.lineages.begin(&id).unwrap();
        let sent = sent(lineage.layer(&host.config.data_dir).unwrap());
        let spec = Spec { guest: Some(bare_guest()), ..daemon.sandbox.spec.clone() };
        let resources = Resources { lineage: Some(lineage), ..Resources::default() };
        // Its agent is that of the daemon's other sandbox.
        let folder = daemon.sandbox.folder.clone();
        let sandbox = Arc::new(Sandbox::new(id, spec, folder.clone(), resources, host));
        let (monitor, started) = FakeMonitor::launched_in(&sandbox.id, &folder, Role::Sandbox).await;
        // A branch does what it is asked, and can neither be merged nor saved.
        monitor.sends(sent).script_branches(|request| match request {
            Request::Hello { .. } | Request::Seal { .. } => Act::Execute,
            _ => Act::Answer(Reply::Error { message: "no".into() }),
        });
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
        tokio::time::timeout(PATIENCE, branch.wait_forkable()).await
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
        let _ = release.recv_timeout(2 * PATIENCE);
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
