//! Commands go to the supervisor's monitor one after the other, each to its end.

use forkd_protocol::control::{FdRef, Reply, Request};

use super::*;
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{FakeHost, end_of, is_pause, is_resume, one_child, reaches};
use crate::testing::fake_monitor::Act;

#[tokio::test]
async fn a_command_is_done_to_its_end_when_its_caller_is_gone() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    monitor.script(move |request| {
        if is_pause(request) {
            released.recv().unwrap();
        }
        Act::Execute
    });
    let asked = sandbox.clone();
    let caller = tokio::spawn(async move { asked.ask(MonitorCommand::Pause).await });
    eventually("the command", || monitor.has_received(is_pause)).await;
    caller.abort();
    assert!(caller.await.unwrap_err().is_cancelled());
    release.send(()).unwrap();
    reaches(&sandbox, "it is to be paused", |phase| matches!(phase, Phase::Paused)).await;
}

#[tokio::test]
async fn commands_are_sent_one_after_the_other_in_the_order_they_were_asked() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    let (one, two, three) = tokio::join!(
        sandbox.ask(MonitorCommand::Pause),
        sandbox.ask(MonitorCommand::Resume),
        sandbox.ask(MonitorCommand::Pause)
    );
    assert!(one.is_ok() && two.is_ok() && three.is_ok());
    assert_eq!(monitor.requests(), [Request::Pause, Request::Resume, Request::Pause]);
    assert!(matches!(sandbox.phase(), Phase::Paused));
}

#[tokio::test]
async fn a_command_under_way_is_done_before_its_sandbox_is_deleted() {
    let (_host, daemon, _live, sandbox, monitor) = one_child().await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    monitor.script(move |request| {
        if is_pause(request) {
            released.recv().unwrap();
        }
        Act::Execute
    });
    let asked = sandbox.clone();
    let caller = tokio::spawn(async move { asked.ask(MonitorCommand::Pause).await });
    eventually("the command", || monitor.has_received(is_pause)).await;
    daemon.registry.delete(&sandbox.id).unwrap();
    tokio::task::yield_now().await;
    assert!(monitor.runs());
    release.send(()).unwrap();
    caller.await.unwrap().unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
}

#[tokio::test]
async fn a_command_whose_monitor_dies_fails_with_sandbox_ended() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.script(|_| Act::Die);
    let error = sandbox.ask(MonitorCommand::Pause).await.unwrap_err();
    assert_eq!(error.code(), Code::SandboxEnded);
    end_of(&sandbox).await;
    let error = sandbox.ask(MonitorCommand::Resume).await.unwrap_err();
    assert_eq!(error.code(), Code::SandboxEnded);
    assert!(error.public().contains("signal 9"), "{error}");
    assert_eq!(monitor.times(is_resume), 0);
}

#[tokio::test]
async fn commands_that_wait_when_their_sandbox_ends_fail() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.script(|request| if is_pause(request) { Act::Die } else { Act::Execute });
    // The queue is shorter than that.
    let asked = (0..QUEUE + 4).map(|_| sandbox.ask(MonitorCommand::Pause));
    let errors = futures_util::future::join_all(asked).await;
    assert!(errors.iter().all(|it| it.as_ref().is_err_and(|error| error.code() == Code::SandboxEnded)));
    assert_eq!(monitor.times(is_pause), 1);
}

#[tokio::test]
async fn a_seal_and_a_replacement_hand_the_monitor_their_descriptors() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    sandbox.ask(|tell| MonitorCommand::Seal(vec![None, Some(file()), Some(file())], tell)).await.unwrap();
    let disks = || vec![None, Some(Replacement { count: 3, layer: file() })];
    sandbox.ask(|tell| MonitorCommand::ReplaceLayers(disks(), tell)).await.unwrap();
    let asked = monitor.requests();
    assert_eq!(asked[0], Request::Seal { layers: vec![None, Some(FdRef(0)), Some(FdRef(1))] });
    let replaced = forkd_protocol::control::ReplacedLayers { count: 3, layer: FdRef(0) };
    assert_eq!(asked[1], Request::ReplaceLayers { disks: vec![None, Some(replaced)] });
    assert_eq!(monitor.descriptors(), [2, 1], "they came with the requests");
}

#[tokio::test]
async fn a_branch_whose_caller_is_gone_is_ended() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    left.monitor.script(move |request| {
        if matches!(request, Request::Branch(_)) {
            released.recv().unwrap();
        }
        Act::Execute
    });
    let folder = tempfile::tempdir().unwrap();
    let (listener, _control) = crate::monitor::control_socket::pair(&folder.path().join("c")).unwrap();
    let asked = sandbox.clone();
    let caller = tokio::spawn(async move {
        let config = BranchConfig { control: FdRef(0), layers: Vec::new() };
        asked.ask(|tell| MonitorCommand::Branch(config, vec![listener], tell)).await.map(drop)
    });
    let is_branch = |request: &Request| matches!(request, Request::Branch(_));
    eventually("the command", || left.monitor.has_received(is_branch)).await;
    caller.abort();
    let _ = caller.await;
    release.send(()).unwrap();
    eventually("the branch", || left.monitor.child("branch").is_some()).await;
    let branch = left.monitor.child("branch").unwrap();
    eventually("its end", || !branch.runs()).await;
    sandbox.ask(MonitorCommand::Pause).await.unwrap();
}

#[tokio::test]
async fn a_distrusted_monitor_is_ended_and_its_reports_are_ignored() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    sandbox.distrust("it sent a pipe as a disk").await;
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "monitor_died");
    assert_eq!(end.cause.as_deref(), Some("it sent a pipe as a disk"));
    assert!(!end.detail.contains("pipe"), "what the guest did is for the operator: {end:?}");
    assert!(!monitor.runs());
}

#[tokio::test]
async fn a_command_of_a_sandbox_in_state_unknown_is_refused() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    std::fs::write(left.folder.join(crate::sandbox::RECORD), "?").unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert_eq!(sandbox.ask(MonitorCommand::Pause).await.unwrap_err().code(), Code::StateUnknown);
    assert!(left.monitor.requests().is_empty());
}

#[tokio::test]
async fn a_monitor_that_sends_the_daemon_as_its_branch_is_ended() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    left.monitor.script(|request| match request {
        Request::Branch(_) => {
            let us = rustix::process::getpid();
            let pidfd = rustix::process::pidfd_open(us, rustix::process::PidfdFlags::empty()).unwrap();
            let pid = us.as_raw_nonzero().get();
            Act::AnswerWith(Reply::Branched { pid, pause_us: 1, layers: Vec::new() }, vec![pidfd])
        }
        _ => Act::Execute,
    });
    let config = BranchConfig { control: FdRef(0), layers: Vec::new() };
    let null = OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
    let refused = sandbox.ask(|tell| MonitorCommand::Branch(config, vec![null], tell)).await.unwrap_err();
    assert_eq!(refused.code(), Code::Internal);
    assert_eq!(end_of(&sandbox).await.reason, "unknown", "it has no parent that tells");
    assert!(!left.monitor.runs());
}
