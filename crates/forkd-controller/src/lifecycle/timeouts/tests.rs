//! What becomes of a sandbox whose time is over.

use std::cell::Cell;

use forkd_protocol::control::Request;

use super::*;
use crate::snapshot::registry::SnapshotState;
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{Daemon, FakeHost, end_of, is_pause, is_resume, one_child, reaches, runs};
use crate::testing::fake_monitor::{Act, FakeMonitor};
use tokio_util::sync::CancellationToken;

fn sandbox(phase: Phase, action: OnTimeout, deadline: Option<u64>, idle: Option<u64>) -> Sandbox {
    let sandbox = Sandbox::bare("sb1");
    sandbox.phase.send_replace(phase);
    sandbox.update_runtime(|runtime| {
        runtime.saved.deadline_unix = deadline;
        runtime.saved.lifetime.idle_timeout_secs = idle;
        runtime.saved.lifetime.on_timeout = action;
    });
    sandbox
}

#[tokio::test]
async fn a_time_is_over_when_it_has_come_and_something_can_be_done() {
    use OnTimeout::{Kill, Pause, Suspend};
    let ended = || Phase::Ended(Arc::new(End::deleted()));
    for (phase, action, deadline, idle, due) in [
        (Phase::Running, Kill, Some(99), None, None),
        (Phase::Running, Kill, Some(100), None, Some(Due::Expired)),
        (Phase::Starting, Kill, Some(100), None, Some(Due::Expired)),
        (Phase::Starting, Pause, Some(100), None, None),
        (Phase::Paused, Suspend, Some(100), None, Some(Due::Expired)),
        (ended(), Kill, Some(100), Some(0), None),
        (Phase::Running, Kill, None, Some(0), Some(Due::Idle(0))),
        (Phase::Running, Kill, None, Some(60), None),
        (Phase::Running, Kill, None, None, None),
        (Phase::Starting, Kill, None, Some(0), None),
        (Phase::Paused, Pause, None, Some(0), None),
        (Phase::Paused, Suspend, None, Some(0), Some(Due::Idle(0))),
    ] {
        let now = if deadline == Some(99) { 98 } else { 100 };
        let shown = format!("{phase:?} {action:?} {deadline:?} {idle:?}");
        assert_eq!(sandbox(phase, action, deadline, idle).due(now), due, "{shown}");
    }
}

#[tokio::test]
async fn what_is_being_done_is_not_begun_again_and_what_failed_has_its_pause() {
    let sandbox = sandbox(Phase::Running, OnTimeout::Suspend, Some(1), None);
    for (attempt, due) in [
        (Attempt::UnderWay, None),
        (Attempt::Failed(Instant::now()), None),
        (Attempt::None, Some(Due::Expired)),
    ] {
        sandbox.update_runtime(|runtime| runtime.attempt = attempt);
        assert_eq!(sandbox.due(2), due, "{attempt:?}");
    }
}

async fn timeouts(host: &FakeHost, daemon: &Daemon) -> Timeouts {
    let (registry, snapshots) = (daemon.registry.clone(), daemon.snapshots.clone());
    let tokens = Tokens::open(host.database.clone(), host.config.token_file.clone()).unwrap();
    let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
    Timeouts { registry, snapshots, workspaces, tokens: Arc::new(tokens) }
}

/// Has all sandboxes looked at once.
async fn look(timeouts: &Timeouts) {
    let stop = CancellationToken::new();
    let stopping = stop.clone();
    let looks = Cell::new(0);
    let prune = async || {
        looks.set(looks.get() + 1);
        stop.cancel();
    };
    timeouts.clone().enforce(stopping, prune).await;
    assert_eq!(looks.get(), 1);
}

/// Makes the time of a sandbox one that is over.
fn expire(sandbox: &Sandbox, action: OnTimeout) {
    sandbox
        .update_lifetime(|lifetime, deadline| (lifetime.on_timeout, *deadline) = (action, Some(1)))
        .unwrap();
}

/// Makes it one that no client may leave unused at all.
fn idle(sandbox: &Sandbox, action: OnTimeout) {
    sandbox
        .update_lifetime(|lifetime, _| (lifetime.on_timeout, lifetime.idle_timeout_secs) = (action, Some(0)))
        .unwrap();
}

#[tokio::test]
async fn a_sandbox_whose_deadline_has_passed_is_ended() {
    let (host, daemon, live, sandbox, monitor) = one_child().await;
    let (other, _) =
        daemon.child_with(&live, |spec| spec.time_to_live = Some(Duration::from_secs(3600))).await;
    expire(&sandbox, OnTimeout::Kill);
    look(&timeouts(&host, &daemon).await).await;
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.detail.contains("timeout_secs")), (TIMED_OUT, true), "{end:?}");
    assert!(!monitor.runs() && daemon.registry.get(&sandbox.id).is_err());
    assert!(matches!(other.phase(), Phase::Running));
}

#[tokio::test]
async fn a_sandbox_that_no_client_used_for_its_idle_time_is_ended() {
    let (host, daemon, _live, sandbox, _monitor) = one_child().await;
    idle(&sandbox, OnTimeout::Kill);
    look(&timeouts(&host, &daemon).await).await;
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.detail.contains("idle_timeout_secs")), (IDLE, true), "{end:?}");
}

#[tokio::test]
async fn a_sandbox_that_is_in_use_is_not_idle() {
    let (host, daemon, _live, sandbox, _monitor) = one_child().await;
    sandbox.update_lifetime(|lifetime, _| lifetime.idle_timeout_secs = Some(1)).unwrap();
    let timeouts = timeouts(&host, &daemon).await;
    {
        // Used just now, and not for a whole second.
        sandbox.activity.touch();
        look(&timeouts).await;
        assert!(matches!(sandbox.phase(), Phase::Running));
    }
    let user = sandbox.in_use();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(sandbox.activity.idle(), Duration::ZERO, "however long it takes");
    assert_eq!(sandbox.due(now_unix()), None);
    drop(user);
    idle(&sandbox, OnTimeout::Kill);
    assert_eq!(sandbox.due(now_unix()), Some(Due::Idle(0)));
}

#[tokio::test]
async fn an_idle_sandbox_is_paused_and_wakes_when_a_client_uses_it() {
    let (host, daemon, _live, sandbox, monitor) = one_child().await;
    idle(&sandbox, OnTimeout::Pause);
    let timeouts = timeouts(&host, &daemon).await;
    look(&timeouts).await;
    reaches(&sandbox, "it is to be paused", |phase| matches!(phase, Phase::Paused)).await;
    assert!(sandbox.is_auto_paused());
    // The next daemon is to know why.
    let recorded = || crate::sandbox::SandboxRecord::read(&sandbox.folder).read().unwrap().saved.lifetime;
    assert!(recorded().auto_paused);
    settled(&sandbox).await;
    look(&timeouts).await;
    assert_eq!(monitor.times(is_pause), 1, "it is paused already");
    sandbox.auto_resume().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running) && !sandbox.is_auto_paused());
    assert!(!recorded().auto_paused);
    assert_eq!(monitor.times(is_resume), 1);
}

/// Waits until what was begun because of its time is over.
async fn settled(sandbox: &Sandbox) {
    eventually("the attempt", || {
        sandbox.read_runtime(|runtime| !matches!(runtime.attempt, Attempt::UnderWay))
    })
    .await;
}

#[tokio::test]
async fn a_sandbox_paused_at_its_deadline_does_not_wake_by_itself_and_is_due_no_more() {
    let (host, daemon, _live, sandbox, monitor) = one_child().await;
    expire(&sandbox, OnTimeout::Pause);
    let timeouts = timeouts(&host, &daemon).await;
    look(&timeouts).await;
    settled(&sandbox).await;
    assert!(matches!(sandbox.phase(), Phase::Paused) && !sandbox.is_auto_paused());
    assert_eq!(sandbox.runtime().saved.deadline_unix, None, "it was given its time once");
    sandbox.auto_resume().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused));
    sandbox.go_on().await.unwrap();
    look(&timeouts).await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(monitor.times(is_pause), 1);
}

#[tokio::test]
async fn a_client_that_uses_a_sandbox_while_it_is_being_paused_finds_it_running() {
    let (host, daemon, _live, sandbox, monitor) = one_child().await;
    idle(&sandbox, OnTimeout::Pause);
    let (release, released) = std::sync::mpsc::channel::<()>();
    monitor.script(move |request| {
        if is_pause(request) {
            released.recv().unwrap();
        }
        Act::Execute
    });
    look(&timeouts(&host, &daemon).await).await;
    eventually("the pause", || monitor.has_received(is_pause)).await;
    sandbox.activity.touch();
    release.send(()).unwrap();
    settled(&sandbox).await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(monitor.times(is_resume), 1);
}

#[tokio::test]
async fn a_pause_at_a_deadline_that_fails_is_tried_again_later_and_the_sandbox_goes_on() {
    let (host, daemon, _live, sandbox, monitor) = one_child().await;
    expire(&sandbox, OnTimeout::Pause);
    monitor.script(|request| match request {
        Request::Pause => Act::Answer(forkd_protocol::control::Reply::Error { message: "no".into() }),
        _ => Act::Execute,
    });
    let timeouts = timeouts(&host, &daemon).await;
    look(&timeouts).await;
    settled(&sandbox).await;
    assert!(matches!(sandbox.read_runtime(|runtime| runtime.attempt), Attempt::Failed(_)));
    look(&timeouts).await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(monitor.times(is_pause), 1, "not at once");
    assert_eq!(sandbox.runtime().saved.deadline_unix, Some(1));
}

#[tokio::test]
async fn a_sandbox_whose_time_is_over_is_suspended_to_a_snapshot_and_ends() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = daemon.booted().await;
    sandbox.update_lifetime(|lifetime, _| lifetime.suspend_as = Some("kept".into())).unwrap();
    expire(&sandbox, OnTimeout::Suspend);
    look(&timeouts(&host, &daemon).await).await;
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.detail.contains("snapshot kept")), (SUSPENDED, true), "{end:?}");
    let snapshot = daemon.snapshots.get("kept").unwrap().snapshot().unwrap();
    assert_eq!(snapshot.manifest().branched_from.as_deref(), Some(sandbox.id.as_str()));
    assert!(!monitor.runs());
    assert_eq!(monitor.times(is_pause), 1, "it stands still until it is on disk");
}

#[tokio::test]
async fn a_suspend_that_finds_its_name_taken_chooses_another() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let timeouts = timeouts(&host, &daemon).await;
    let (sandbox, _) = daemon.child(&live).await;
    sandbox.update_runtime(|runtime| runtime.saved.lifetime.suspend_as = Some("t".into()));
    let own = format!("idle-{}", sandbox.id);
    assert_eq!(timeouts.free_tag(&sandbox).unwrap(), own);
    let _other = daemon.live(&own).await;
    assert_eq!(timeouts.free_tag(&sandbox).unwrap(), format!("{own}-2"));
    sandbox.update_runtime(|runtime| runtime.saved.lifetime.suspend_as = Some("wanted".into()));
    assert_eq!(timeouts.free_tag(&sandbox).unwrap(), "wanted");
}

#[tokio::test]
async fn a_suspend_that_cannot_be_saved_leaves_the_sandbox_running_and_no_snapshot() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = daemon.booted().await;
    monitor.script_branches(|request| match request {
        Request::Save(_) => Act::Answer(forkd_protocol::control::Reply::Error { message: "no".into() }),
        _ => Act::Execute,
    });
    expire(&sandbox, OnTimeout::Suspend);
    look(&timeouts(&host, &daemon).await).await;
    settled(&sandbox).await;
    assert!(matches!(sandbox.phase(), Phase::Running), "{:?}", sandbox.phase());
    assert!(matches!(sandbox.read_runtime(|runtime| runtime.attempt), Attempt::Failed(_)));
    assert!(
        sandbox.read_runtime(|runtime| runtime.saved.lifetime.suspending.is_none() && !runtime.is_suspending)
    );
    let stored = daemon.snapshots.list();
    assert!(stored.iter().all(|entry| !matches!(entry.state(), SnapshotState::Ready(_))));
    assert!(daemon.snapshots.get(&format!("idle-{}", sandbox.id)).is_err());
}

#[tokio::test]
async fn a_client_that_uses_an_idle_sandbox_cancels_its_suspend() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = daemon.booted().await;
    idle(&sandbox, OnTimeout::Suspend);
    let user = sandbox.clone();
    monitor.script(move |request| {
        if matches!(request, Request::Branch(_)) {
            user.activity.touch();
        }
        Act::Execute
    });
    look(&timeouts(&host, &daemon).await).await;
    settled(&sandbox).await;
    assert!(matches!(sandbox.phase(), Phase::Running), "{:?}", sandbox.phase());
    assert_eq!(monitor.times(is_pause), 0);
    let tag = format!("idle-{}", sandbox.id);
    eventually("the snapshot to go", || daemon.snapshots.get(&tag).is_err()).await;
}

#[tokio::test]
async fn a_step_of_the_clock_moves_the_deadline_of_a_sandbox_and_its_record() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, _) =
        daemon.child_with(&live, |spec| spec.time_to_live = Some(Duration::from_secs(100))).await;
    let before = sandbox.runtime().saved.deadline_unix.unwrap();
    for (step, moved) in [(3600, before + 3600), (-3600, before)] {
        move_deadline(&sandbox, step).unwrap();
        assert_eq!(sandbox.runtime().saved.deadline_unix, Some(moved));
        let recorded = crate::sandbox::SandboxRecord::read(&sandbox.folder).read().unwrap();
        assert_eq!(recorded.saved.deadline_unix, Some(moved));
    }
    let (endless, _) = daemon.child(&live).await;
    move_deadline(&endless, 3600).unwrap();
    assert_eq!(endless.runtime().saved.deadline_unix, None);
}

#[tokio::test]
async fn a_client_that_extends_a_deadline_keeps_the_sandbox() {
    let (host, daemon, _live, sandbox, _monitor) = one_child().await;
    expire(&sandbox, OnTimeout::Kill);
    assert_eq!(sandbox.due(now_unix()), Some(Due::Expired));
    sandbox.update_lifetime(|_, deadline| *deadline = Some(now_unix() + 60)).unwrap();
    look(&timeouts(&host, &daemon).await).await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(sandbox.due(now_unix()), None);
}

#[tokio::test]
async fn a_sandbox_in_state_unknown_has_no_deadline() {
    let host = FakeHost::new();
    let mut left = host.leave_booted();
    left.amend(|record| record.saved.deadline_unix = Some(1));
    let path = left.folder.join("sandbox.json");
    let text = std::fs::read_to_string(&path).unwrap().replacen("\"version\":1", "\"version\":99", 1);
    std::fs::write(&path, text).unwrap();
    let daemon = host.daemon().await;
    look(&timeouts(&host, &daemon).await).await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Unknown(_)) && left.monitor.runs());
}

#[tokio::test]
async fn a_sandbox_whose_deadline_passed_while_no_daemon_ran_is_ended_by_the_next_one() {
    let host = FakeHost::new();
    let mut left = host.leave_booted();
    left.amend(|record| record.saved.deadline_unix = Some(1));
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    runs(&sandbox).await;
    look(&timeouts(&host, &daemon).await).await;
    assert_eq!(end_of(&sandbox).await.reason, TIMED_OUT);
    assert!(!left.monitor.runs());
}

#[tokio::test]
async fn a_sandbox_that_waits_for_room_on_the_disk_is_paused_for_its_client_at_its_deadline() {
    let (host, daemon, _live, sandbox, monitor) = one_child().await;
    monitor.waits_for_room();
    reaches(&sandbox, "it is to be paused", |phase| matches!(phase, Phase::Paused)).await;
    expire(&sandbox, OnTimeout::Pause);
    look(&timeouts(&host, &daemon).await).await;
    settled(&sandbox).await;
    assert!(matches!(sandbox.phase(), Phase::Paused) && !sandbox.waits_for_room());
    sandbox.try_again().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused));
}

const WITH_MEMORY: PauseSpec = PauseSpec { keeps_memory: true, requires_healthy_guest: false };

/// A sandbox of the E2B API, and what plays its monitor.
async fn e2b_sandbox(daemon: &Daemon) -> (Arc<Sandbox>, FakeMonitor) {
    let (sandbox, monitor) = daemon.booted().await;
    sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::default())).unwrap();
    (sandbox, monitor)
}

#[tokio::test]
async fn a_sandbox_that_is_being_paused_when_its_deadline_passes_is_kept() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = e2b_sandbox(&daemon).await;
    let (release, released) = std::sync::mpsc::channel::<()>();
    monitor.script(move |request| {
        if is_pause(request) {
            released.recv().unwrap();
        }
        Act::Execute
    });
    let timeouts = timeouts(&host, &daemon).await;
    let (workspaces, paused) = (timeouts.workspaces.clone(), sandbox.clone());
    let pausing = tokio::spawn(async move {
        workspaces.pause_to_disk(&paused, WITH_MEMORY, &Principal::local(), |_| true).await
    });
    eventually("the pause", || monitor.has_received(is_pause)).await;
    expire(&sandbox, OnTimeout::Kill);
    look(&timeouts).await;
    // Until the action of the time-out waits for its turn.
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    release.send(()).unwrap();
    pausing.await.unwrap().unwrap();
    // Its turn comes after that action's.
    timeouts.workspaces.sweep(&sandbox.id).await;
    assert!(timeouts.workspaces.paused(&sandbox.id).is_some(), "what the client paused in time is there");
}

#[tokio::test]
async fn nothing_is_left_of_a_sandbox_that_ends_by_itself_and_was_never_paused() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = e2b_sandbox(&daemon).await;
    monitor.script_branches(|request| match request {
        Request::Save(_) => Act::Answer(forkd_protocol::control::Reply::Error { message: "no".into() }),
        _ => Act::Execute,
    });
    let timeouts = timeouts(&host, &daemon).await;
    timeouts
        .workspaces
        .pause_to_disk(&sandbox, WITH_MEMORY, &Principal::local(), |_| true)
        .await
        .unwrap_err();
    assert!(matches!(sandbox.phase(), Phase::Running), "{:?}", sandbox.phase());
    assert!(timeouts.workspaces.has(&sandbox.id), "it has a workspace since the pause began");
    monitor.die();
    end_of(&sandbox).await;
    look(&timeouts).await;
    eventually("the workspace to go", || !timeouts.workspaces.has(&sandbox.id)).await;
    assert!(daemon.registry.get(&sandbox.id).is_err());
}
