//! Branches of a sandbox whose guest has broken into its monitor: the monitor answers with other descriptors than
//! those it was handed. A thread plays the monitor; its process and that of the branch are real ones. Tests with real
//! guests cover honest monitors.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};

use forkd_protocol::control::{Channel, FdRef, Message, Reply, Request, Role, Status, VERSION};
use rustix::fs::{CWD, Mode as Bits, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open};

use super::*;
use crate::monitor::{Launch, Monitor};
use crate::sandbox::Spec;
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::SandboxOrigin as Came;
use crate::snapshot::branch_job::Stage;
use crate::testing::fake_guest::{FakeDaemon, eventually};
use crate::testing::fake_process::{Shell, runs};

/// How long a test waits for an event, long enough for a busy computer.
const PATIENCE: Duration = Duration::from_secs(60);

/// What a monitor sends beside the answer that it has branched.
struct Sent {
    /// In the place of the layer that was frozen.
    layer: Option<OwnedFd>,
    /// In the place of the branch's process.
    process: Option<Pid>,
}

/// A sandbox with a disk, and the process of its monitor.
struct Source {
    sandbox: Arc<Sandbox>,
    pid: i32,
    /// The process of its branch.
    branch: Arc<AtomicI32>,
}

impl Source {
    /// `sent` is made from the layer of its disk that the monitor was handed.
    async fn start(daemon: &FakeDaemon, sent: impl FnOnce(OwnedFd) -> Sent) -> Source {
        let host = &daemon.app.registry.host;
        let id = new_id("sb").unwrap();
        let lineage = host.lineages.begin(&id).unwrap();
        let sent = sent(lineage.layer(&host.config.data_dir).unwrap());
        let guest = GuestSpec {
            image: None,
            kernel: None,
            vcpus: 1,
            mem_size_mib: 64,
            network: false,
            python: None,
            guest_ports: Vec::new(),
        };
        let spec = Spec { guest: Some(guest), ..daemon.sandbox.spec.clone() };
        let resources = Resources { lineage: Some(lineage), ..Resources::default() };
        // Its agent is that of the daemon's other sandbox.
        let folder = daemon.sandbox.folder.clone();
        let sandbox = Arc::new(Sandbox::new(id, spec, folder.clone(), resources, host));

        let (process, shell) = Shell::start();
        let (pid, branch) = (process.id() as i32, Arc::new(AtomicI32::new(0)));
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        let theirs = Channel::new(theirs);
        let hello = Reply::Hello { version: VERSION, monitor: "hostile".into() };
        theirs.send(&Message::Reply(hello), &[]).unwrap();
        let born = branch.clone();
        std::thread::spawn(move || play(&theirs, shell, sent, &born));
        let launch = Launch { id: sandbox.id.clone(), folder, vmm: PathBuf::new(), uid: None, door: None };
        let mut monitor = Monitor::started(launch, process, Channel::new(ours)).unwrap();
        monitor.hello(PATIENCE).await.unwrap();
        tokio::spawn(sandbox.clone().supervise(Came::Adopted(monitor), host.config.clone()));
        sandbox.started().await.unwrap();
        Source { sandbox, pid, branch }
    }

    /// Branches the sandbox. Returns the result, or an error after `PATIENCE`.
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
        let (_, branch) = daemon.app.snapshots.branch(&self.sandbox, order).unwrap();
        tokio::time::timeout(PATIENCE, branch.reached(Stage::Saving)).await
    }
}

/// Plays the monitor of a source. Its branch is played by another thread.
fn play(control: &Channel, mut shell: Shell, mut sent: Sent, born: &AtomicI32) {
    let reply = |reply: Reply| control.send(&Message::Reply(reply), &[]).unwrap();
    while let Ok(Some((request, fds))) = control.recv::<Request>() {
        match request {
            Request::Status => {
                reply(Reply::Status(Status { role: Role::Sandbox, running: true, ready: true }))
            }
            Request::Branch(_) => {
                let pid = shell.fork();
                born.store(pid.as_raw_nonzero().get(), Ordering::SeqCst);
                let pidfd = pidfd_open(sent.process.unwrap_or(pid), PidfdFlags::empty()).unwrap();
                let listener = fds.into_iter().next().unwrap();
                std::thread::spawn(move || play_branch(&Channel::new(accept(listener).unwrap())));
                let answer = Reply::Branched {
                    pid: pid.as_raw_nonzero().get(),
                    pause_us: 1,
                    layers: vec![Some(FdRef(1))],
                };
                let fds: Vec<_> = [Some(pidfd.as_fd()), sent.layer.as_ref().map(AsFd::as_fd)]
                    .into_iter()
                    .flatten()
                    .collect();
                control.send(&Message::Reply(answer), &fds).unwrap();
            }
            Request::Seal { .. } => {
                sent.layer = None;
                reply(Reply::Sealed);
            }
            other => panic!("{other:?}"),
        }
    }
    // The shell would end with its input, but is to end only when the daemon ends it.
    std::mem::forget(shell);
}

/// A branch that does what it is asked, and can neither be merged nor saved.
fn play_branch(control: &Channel) {
    while let Ok(Some((request, _))) = control.recv::<Request>() {
        let reply = match request {
            Request::Hello { .. } => Reply::Hello { version: VERSION, monitor: "branch".into() },
            Request::Seal { .. } => Reply::Sealed,
            _ => Reply::Error { message: "no".into() },
        };
        if control.send(&Message::Reply(reply), &[]).is_err() {
            return;
        }
    }
}

/// A FIFO that no process writes to: a plain `open` for reading waits for ever.
fn fifo(folder: &Path) -> (PathBuf, OwnedFd) {
    let path = folder.join("fifo");
    rustix::fs::mkfifoat(CWD, &path, Bits::RUSR | Bits::WUSR).unwrap();
    let fd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC, Bits::empty());
    (path, fd.unwrap())
}

/// Branches a source that sends `sent`, and checks that the daemon refuses the branch and ends both.
async fn is_refused(what: &str, daemon: &FakeDaemon, sent: Sent) {
    let lies_about_process = sent.process.is_some();
    let source = Source::start(daemon, |_| sent).await;
    let branched = source.branch(daemon).await;
    let error = branched.unwrap_or_else(|_| panic!("{what}: the daemon waits")).unwrap_err();
    assert_eq!(error.code(), Code::Internal, "{what}: {error}");
    // The daemon ends the monitor and its branch. It ends a branch whose pidfd it did not get with the cgroup of the
    // source, and this source has none.
    let ended = || match source.sandbox.phase() {
        Phase::Ended(end) => Some(end),
        _ => None,
    };
    eventually("the end of the source", || ended().is_some()).await;
    assert_eq!(ended().unwrap().reason, "monitor_died", "{what}");
    let branch = source.branch.load(Ordering::SeqCst);
    if lies_about_process {
        let _ = rustix::process::kill_process(Pid::from_raw(branch).unwrap(), Signal::KILL);
    }
    eventually(what, || !runs(source.pid) && !runs(branch)).await;
    // Nothing is left of the branch, and the daemon goes on.
    assert_eq!(daemon.app.snapshots.get("b").unwrap_err().code(), Code::SnapshotNotFound, "{what}");
    let folder = crate::host::run_dir::templates(&daemon.app.config.run_dir);
    eventually("the folder of the branch to go", || std::fs::read_dir(&folder).unwrap().count() == 0).await;
    assert_eq!(daemon.json("GET /v1/sandboxes", None).await.0, 200, "{what}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_what_it_was_not_handed_is_ended_and_its_branch_refused() {
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
        is_refused(what, &daemon, Sent { layer: Some(layer), process: None }).await;
    }
    is_refused("nothing", &daemon, Sent { layer: None, process: None }).await;
    let layer = Some(crate::host::disk_layer::layer(folder.path()).unwrap());
    let process = Some(rustix::process::getpid());
    is_refused("the daemon as the branch", &daemon, Sent { layer, process }).await;
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
    is_refused("a FIFO", &daemon, Sent { layer: Some(fifo), process: None }).await;
    drop(released);
    releasing.join().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_that_sends_the_layer_it_was_handed_is_branched() {
    let daemon = FakeDaemon::start().await;
    let source = Source::start(&daemon, |layer| Sent { layer: Some(layer), process: None }).await;
    source.branch(&daemon).await.unwrap().unwrap();
    assert!(matches!(source.sandbox.phase(), Phase::Running) && runs(source.pid));
}
