//! The start of processes that are no monitors, or end at once. They are real processes; tests with real guests
//! cover a real monitor's behaviour.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Instant;

use super::*;

/// The time limit for events that come, on a busy computer too.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A launch of `script` in the place of a monitor, in a folder of its own.
fn launch_of(script: &str) -> (Launch, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let vmm = folder.path().join("vmm");
    std::fs::write(&vmm, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&vmm, std::fs::Permissions::from_mode(0o755)).unwrap();
    (Launch { id: "sbtest".into(), folder: folder.path().into(), vmm, uid: None, procs_fd: None }, folder)
}

async fn failure_of(launch: Launch) -> String {
    failure_within(TIMEOUT, launch).await
}

async fn failure_within(patience: Duration, launch: Launch) -> String {
    Monitor::launch(launch, patience).await.unwrap_err().to_string()
}

/// Waits until the process that is recorded in `folder` has ended and was reaped.
async fn gone(folder: &Path) {
    let identity = crate::host::process::ProcessId::read(folder).read().expect("the process recorded itself");
    let begun = Instant::now();
    while Path::new(&format!("/proc/{}", identity.pid)).exists() {
        assert!(begun.elapsed() < TIMEOUT, "process {} is still there", identity.pid);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_binary_that_is_not_there_is_named() {
    let (mut launch, _folder) = launch_of("");
    launch.vmm = "/nonexistent/forkd-vmm".into();
    let error = failure_of(launch).await;
    assert!(error.contains("cannot start /nonexistent/forkd-vmm"), "{error}");
}

#[tokio::test]
async fn a_monitor_that_dies_at_once_is_quoted() {
    let (launch, folder) = launch_of("echo no walls today >&2; exit 3");
    let error = failure_of(launch).await;
    assert!(error.contains("status 3") && error.contains("no walls today"), "{error}");
    gone(folder.path()).await;
}

#[tokio::test]
async fn a_monitor_that_never_answers_is_given_up_and_killed() {
    let (launch, folder) = launch_of("exec sleep 1000");
    let error = failure_within(Duration::from_millis(500), launch).await;
    assert!(error.contains("no answer within"), "{error}");
    gone(folder.path()).await;
}

#[tokio::test]
async fn a_monitor_gets_the_control_socket_and_nothing_else() {
    let (launch, folder) = launch_of("");
    let seen = folder.path().join("seen");
    // A daemon's descriptors: its own, and those that its parent process did not close.
    let _ours: Vec<_> = (0..20).map(|_| std::io::pipe().unwrap()).collect();
    let _inherited = rustix::io::dup(std::io::stderr()).unwrap();
    let script = format!("#!/bin/sh\nexec ls -l /proc/self/fd > {}\n", seen.display());
    std::fs::write(&launch.vmm, script).unwrap();
    failure_of(launch).await;
    let seen = std::fs::read_to_string(seen).unwrap();
    let open: Vec<&str> = seen.lines().filter(|line| line.contains(" -> ")).collect();
    // Three for every process, the socket, and the folder `ls` reads.
    assert_eq!(open.len(), 5, "{seen}");
    assert!(open[3].contains(" 3 -> socket:"), "{seen}");
}

#[tokio::test]
async fn a_dropped_monitor_is_a_dead_one() {
    let (launch, folder) = launch_of("exec sleep 1000");
    let (child, control) = spawn(&launch).unwrap();
    let monitor = Monitor::started(launch, child, control).unwrap();
    drop(monitor);
    gone(folder.path()).await;
}

#[tokio::test]
async fn a_killed_monitor_is_noticed_at_once() {
    let (launch, folder) = launch_of("exec sleep 1000");
    let (child, control) = spawn(&launch).unwrap();
    let mut monitor = Monitor::started(launch, child, control).unwrap();
    monitor.pidfd.kill().unwrap();
    let end = tokio::time::timeout(TIMEOUT, monitor.wait()).await.unwrap();
    assert!(end.vm.is_none());
    assert!(end.describe().contains("killed by signal 9"), "{}", end.describe());
    gone(folder.path()).await;
}

#[tokio::test]
async fn a_monitor_that_answers_without_a_request_is_ended_with_the_reason() {
    use forkd_protocol::control::{OLDEST_VERSION, Reply, VERSION};
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    let (launch, folder) = launch_of("exec sleep 1000");
    let (child, _) = spawn(&launch).unwrap();
    let (ours, theirs) =
        socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
    rustix::io::ioctl_fionbio(&ours, true).unwrap();
    let theirs = Channel::new(theirs);
    let hello = Reply::Hello { version: OLDEST_VERSION, monitor: "m".into(), newest: VERSION };
    theirs.send(&Message::Reply(hello), &[]).unwrap();
    let mut monitor = Monitor::started(launch, child, Channel::new(ours)).unwrap();
    monitor.hello(TIMEOUT).await.unwrap();
    let unasked = Reply::Error { message: "x".repeat(100_000) };
    theirs.send(&Message::Reply(unasked), &[]).unwrap();
    let end = tokio::time::timeout(TIMEOUT, monitor.wait()).await.unwrap().account();
    assert!(end.contains("an answer without a question") && end.len() < 500, "{end}");
    gone(folder.path()).await;
}
