//! The states of a sandbox from its fork to its end. Fake monitors play template and child; what is between them
//! and the client is real.

use crate::host::process::ProcessId;
use std::time::Duration;

use forkd_api::EventKind;
use forkd_protocol::control::{Event, Message, Reply, Request, Role};
use forkd_store::BaseImage;

use super::*;
use crate::error::Code;
use crate::host::cgroup::Leaf;
use crate::sandbox::resources::Resources;
use crate::snapshot::template::PersistState;
use crate::testing::fake_guest::{FakeGuest, eventually};
use crate::testing::fake_host::{
    Daemon, FakeHost, TIMEOUT, bare_guest, bare_spec, end_of, is_pause, is_resume, one_child, reaches, runs,
};
use crate::testing::fake_monitor::{Act, FakeMonitor};
use crate::util::random::new_id;

/// The kinds of all events of sandboxes.
fn told(daemon: &Daemon) -> Vec<EventKind> {
    daemon.sandbox_events().into_iter().map(|(kind, _)| kind).collect()
}

/// A guest with an agent.
fn guest_with_agent() -> forkd_store::GuestSpec {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 512]).unwrap();
    let image = BaseImage::of("py", "", &std::fs::File::open(path).unwrap()).unwrap();
    forkd_store::GuestSpec { image: Some(image), ..bare_guest() }
}

/// A child with an agent, its guest, and what plays its monitor.
async fn child_with_agent(daemon: &Daemon) -> (Arc<Sandbox>, Arc<FakeGuest>, FakeMonitor) {
    let live = daemon.live_with("t", guest_with_agent()).await;
    let guest = Arc::new(FakeGuest::default());
    live.monitor.guest(&guest);
    let (sandbox, monitor) = daemon.child(&live).await;
    // It lives as long as the sandbox's template.
    std::mem::forget(live.monitor.clone());
    (sandbox, guest, monitor)
}

#[tokio::test]
async fn a_forked_sandbox_runs_and_the_next_daemon_can_find_it() {
    let (_host, daemon, live, sandbox, monitor) = one_child().await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    let runtime = sandbox.runtime();
    assert_eq!(runtime.pid, Some(monitor.pid as u32));
    assert!(runtime.ready_ms.is_some() && runtime.boot_ms.is_none());
    let identity = ProcessId::read(&sandbox.folder).read().unwrap();
    assert_eq!(identity.pid, monitor.pid);
    assert_eq!(sandbox.record().unwrap().template, live.template.id);
    assert_eq!(told(&daemon), [EventKind::SandboxCreated, EventKind::SandboxRunning]);
    assert_eq!(sandbox.spec.snapshot_tag.as_deref(), Some("t"));
}

#[tokio::test]
async fn a_forked_sandbox_with_an_agent_runs_when_the_agent_has_its_name() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, guest, _monitor) = child_with_agent(&daemon).await;
    assert!(matches!(sandbox.phase(), Phase::Running));
    let became = guest.calls.lock().unwrap()[0].clone();
    assert_eq!(became.1["sandboxId"], sandbox.id.as_str(), "{became:?}");
    assert!(sandbox.last_heard().is_some());
}

#[tokio::test]
async fn a_fork_that_the_template_refuses_is_an_error_and_leaves_nothing() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    live.monitor.script(|request| match request {
        Request::Fork(_) => Act::Answer(Reply::Error { message: "too many".into() }),
        _ => Act::Execute,
    });
    let spawned = daemon.spawn(daemon.spawn_spec("t", 2)).await.unwrap();
    assert!(spawned.children.is_empty());
    for (_, error) in &spawned.errors {
        assert_eq!(error.code(), Code::GuestFailed);
        assert!(error.to_string().contains("too many"), "{error}");
        assert!(!error.public().contains("too many"), "the template's words are for the operator");
    }
    let folders = || std::fs::read_dir(&daemon.registry.folder).unwrap().count();
    eventually("the folders to go", || folders() == 0).await;
    assert!(daemon.registry.list().is_empty());
}

#[tokio::test]
async fn a_fork_whose_guest_panics_at_once_is_an_error_with_its_console() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    live.monitor.children_are_not_ready();
    let mut spec = daemon.spawn_spec("t", 1);
    spec.wait = false;
    let spawned = daemon.spawn(spec).await.unwrap();
    let sandbox = spawned.children[0].sandbox().clone();
    eventually("the fork", || live.monitor.child(&sandbox.child).is_some()).await;
    let child = live.monitor.child(&sandbox.child).unwrap();
    eventually("the daemon", || child.is_connected()).await;
    child.end(EndReason::Panicked, "its kernel panicked", "Kernel panic!");
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.console_tail.as_str()), ("fork_failed", "Kernel panic!"));
    let error = sandbox.started().await.unwrap_err();
    assert!(error.public().contains("its kernel panicked"), "{error}");
}

#[tokio::test]
async fn a_fork_whose_guest_is_never_ready_is_ended() {
    let host = FakeHost::with(|config| config.timing.boot = Duration::from_millis(50));
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    live.monitor.children_are_not_ready();
    let spawned = daemon.spawn(daemon.spawn_spec("t", 1)).await.unwrap();
    let error = &spawned.errors[0].1;
    assert!(error.public().contains("was not ready"), "{error}");
    eventually("its process's end", || live.monitor.children_that_run() == 0).await;
    assert!(told(&daemon).ends_with(&[EventKind::SandboxEnded]), "{:?}", told(&daemon));
}

#[tokio::test]
async fn a_sandbox_that_is_deleted_while_it_starts_ends_as_deleted_with_its_process() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    live.monitor.children_are_not_ready();
    let mut spec = daemon.spawn_spec("t", 1);
    spec.wait = false;
    let sandbox = daemon.spawn(spec).await.unwrap().children.pop().unwrap().release();
    eventually("its process", || sandbox.runtime().pid.is_some()).await;
    daemon.registry.delete(&sandbox.id).unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
    eventually("its end", || live.monitor.children_that_run() == 0 && !sandbox.folder.exists()).await;
    assert_eq!(sandbox.started().await.unwrap_err().code(), Code::GuestFailed);
}

#[tokio::test]
async fn a_sandbox_that_is_deleted_before_its_template_answers_has_its_process_stopped_when_it_comes() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (tell, told) = std::sync::mpsc::channel::<()>();
    live.monitor.script(move |request| {
        if matches!(request, Request::Fork(_)) {
            told.recv().unwrap();
        }
        Act::Execute
    });
    let mut spec = daemon.spawn_spec("t", 1);
    spec.wait = false;
    let sandbox = daemon.spawn(spec).await.unwrap().children.pop().unwrap().release();
    daemon.registry.delete(&sandbox.id).unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
    tell.send(()).unwrap();
    eventually("the fork", || live.monitor.has_received(|request| matches!(request, Request::Fork(_)))).await;
    eventually("its end", || live.monitor.children_that_run() == 0).await;
}

#[tokio::test]
async fn a_template_that_dies_while_it_forks_is_replaced_or_named() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    live.monitor.script(|request| match request {
        Request::Fork(_) => Act::Die,
        _ => Act::Execute,
    });
    // A branch that is not on disk has no next template.
    let spawned = daemon.spawn(daemon.spawn_spec("t", 1)).await.unwrap();
    assert_eq!(spawned.errors[0].1.code(), Code::SnapshotNotReady, "{:?}", spawned.errors);
}

#[tokio::test]
async fn what_a_template_that_died_did_not_fork_is_asked_of_the_next_one() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (first, next) = (daemon.live("t").await, daemon.live("next").await);
    let (entry, template) = (first.entry.clone(), next.template.clone());
    first.monitor.script(move |request| match request {
        Request::Fork(_) => {
            entry.set_current(template.clone());
            Act::Die
        }
        _ => Act::Execute,
    });
    let spawned = daemon.spawn(daemon.spawn_spec("t", 3)).await.unwrap();
    assert_eq!((spawned.children.len(), spawned.errors.len()), (3, 0), "{:?}", spawned.errors);
    assert_eq!(next.monitor.times(|request| matches!(request, Request::Fork(_))), 3);
}

#[tokio::test]
async fn a_monitor_that_dies_ends_its_sandbox_with_the_signal() {
    let (_host, daemon, live, sandbox, monitor) = one_child().await;
    monitor.die();
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "monitor_died");
    assert!(end.detail.contains("signal 9"), "{end:?}");
    assert_eq!(End::read(&sandbox.folder).read().unwrap(), *end);
    assert_eq!(sandbox.runtime().pid, None);
    assert_eq!(daemon.sandbox_events().last().unwrap().1.as_deref(), Some("monitor_died"));
    eventually("the acknowledgement", || live.monitor.remembers().is_empty()).await;
}

#[tokio::test]
async fn every_end_of_a_guest_has_its_reason_and_console() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    for (how, reason) in [
        (EndReason::PoweredOff, "powered_off"),
        (EndReason::Reset, "reset"),
        (EndReason::Panicked, "panicked"),
        (EndReason::Failed, "failed"),
    ] {
        let (sandbox, monitor) = daemon.child(&live).await;
        monitor.end(how, "so it was", "the \u{1b}[31mend");
        let end = end_of(&sandbox).await;
        assert_eq!((end.reason.as_str(), end.detail.as_str()), (reason, "so it was"));
        assert!(end.console_tail.contains("end") && !end.console_tail.contains('\u{1b}'), "{end:?}");
        assert_eq!(end.cause, None);
    }
}

#[tokio::test]
async fn an_error_number_of_the_host_in_a_guests_end_is_for_the_operator_alone() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.end(EndReason::Failed, "KVM_RUN: Bad address (os error 14)", "");
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.detail.contains("os error")), ("failed", false), "{end:?}");
    assert!(end.cause.as_deref().unwrap().contains("os error 14"));
}

#[tokio::test]
async fn a_sandbox_that_the_kernel_killed_for_its_memory_ended_out_of_memory() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let cgroup = tempfile::tempdir().unwrap();
    for (kills, status, reason) in [
        (1, WaitStatus::Signaled(9), "out_of_memory"),
        (0, WaitStatus::Signaled(9), "monitor_died"),
        (1, WaitStatus::Exited(1), "monitor_died"),
    ] {
        let (sandbox, _monitor) = daemon.child(&live).await;
        std::fs::write(cgroup.path().join("memory.events"), format!("oom 1\noom_kill {kills}\n")).unwrap();
        sandbox.resources().leaf = Some(Leaf::open(cgroup.path().into()).unwrap());
        live.monitor.end_child(&sandbox.child, status);
        let end = end_of(&sandbox).await;
        assert_eq!(end.reason, reason, "{kills} {status:?}");
        assert_eq!(end.detail.contains("memory_limit_mib"), reason == "out_of_memory", "{end:?}");
        sandbox.resources().leaf.take();
    }
}

#[tokio::test]
async fn a_pause_and_a_resume_go_to_the_monitor_and_emit_events() {
    let (_host, daemon, _live, sandbox, monitor) = one_child().await;
    sandbox.pause().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused));
    assert_eq!(monitor.times(is_pause), 1);
    sandbox.go_on().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(monitor.times(is_resume), 1);
    use EventKind::{SandboxCreated, SandboxPaused, SandboxResumed, SandboxRunning};
    assert_eq!(told(&daemon), [SandboxCreated, SandboxRunning, SandboxPaused, SandboxResumed]);
    assert_eq!(sandbox.pauses.list().len(), 1);
}

#[tokio::test]
async fn a_pause_that_the_monitor_refuses_or_answers_wrongly_leaves_the_sandbox_running() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    for (reply, code) in
        [(Reply::Error { message: "no".into() }, Code::MonitorRefused), (Reply::Resumed, Code::Internal)]
    {
        monitor.script(move |request| match request {
            Request::Pause => Act::Answer(reply.clone()),
            _ => Act::Execute,
        });
        assert_eq!(sandbox.pause().await.unwrap_err().code(), code);
        assert!(matches!(sandbox.phase(), Phase::Running) && monitor.runs());
    }
}

#[tokio::test]
async fn an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_command() {
    let host = FakeHost::with(|config| config.timing.call = Duration::from_millis(50));
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, monitor) = daemon.child(&live).await;
    monitor.script(|request| match request {
        Request::Pause => Act::Hang,
        Request::Resume => {
            let late = Reply::Error { message: "the pause failed".into() };
            Act::Say(vec![Message::Reply(late), Message::Reply(Reply::Resumed)])
        }
        _ => Act::Execute,
    });
    let error = sandbox.pause().await.unwrap_err();
    assert!(error.to_string().contains("no answer within"), "{error}");
    assert!(matches!(sandbox.phase(), Phase::Running));
    sandbox.go_on().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running) && monitor.runs());
}

#[tokio::test]
async fn a_monitor_that_answers_without_a_question_is_ended() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.say(Message::Reply(Reply::Paused));
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "monitor_died");
    assert!(end.cause.as_deref().unwrap().contains("an answer without a question"), "{end:?}");
    assert!(!monitor.runs());
}

#[tokio::test]
async fn a_monitor_that_hangs_up_and_lives_is_ended_after_a_while() {
    let host = FakeHost::with(|config| config.timing.call = Duration::from_millis(300));
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, monitor) = daemon.child(&live).await;
    monitor.script(|_| Act::HangUp);
    assert_eq!(sandbox.pause().await.unwrap_err().code(), Code::SandboxEnded);
    assert!(matches!(sandbox.phase(), Phase::Running) && monitor.runs());
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "monitor_died");
    assert!(end.cause.as_deref().unwrap().contains("closed the control connection"), "{end:?}");
    assert!(!monitor.runs());
}

#[tokio::test]
async fn a_pause_that_comes_after_its_time_is_shown() {
    let host = FakeHost::with(|config| config.timing.call = Duration::from_millis(50));
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, monitor) = daemon.child(&live).await;
    monitor.script(|request| if is_pause(request) { Act::Hang } else { Act::Execute });
    assert!(sandbox.pause().await.is_err());
    assert!(matches!(sandbox.phase(), Phase::Running));
    monitor.say(Message::Reply(Reply::Paused));
    reaches(&sandbox, "the late pause is seen", |phase| matches!(phase, Phase::Paused)).await;
    assert_eq!(sandbox.pauses.list().len(), 1);
    sandbox.go_on().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running) && monitor.runs());
}

#[tokio::test]
async fn a_full_disk_pauses_a_sandbox_until_there_is_room() {
    let (_host, daemon, _live, sandbox, monitor) = one_child().await;
    monitor.waits_for_room();
    reaches(&sandbox, "it is to be paused", |phase| matches!(phase, Phase::Paused)).await;
    assert!(sandbox.waits_for_room());
    let paused = (EventKind::SandboxPaused, Some("host_disk_full".to_owned()));
    assert_eq!(daemon.sandbox_events().last(), Some(&paused));
    let before = sandbox.activity.stamp();
    sandbox.try_again().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running) && !sandbox.waits_for_room());
    assert_eq!(sandbox.activity.stamp(), before, "no client used it");
    // Once it runs there is nothing to try.
    sandbox.try_again().await.unwrap();
    assert_eq!(monitor.times(is_resume), 1);
}

#[tokio::test]
async fn a_pause_of_a_sandbox_that_waits_for_disk_space_becomes_an_ordinary_pause() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.waits_for_room();
    reaches(&sandbox, "it is to be paused", |phase| matches!(phase, Phase::Paused)).await;
    sandbox.ask(MonitorCommand::Pause).await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused) && !sandbox.waits_for_room());
    sandbox.try_again().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused), "room on the disk does not resume it");
    assert_eq!(monitor.times(is_resume), 0);
}

#[tokio::test]
async fn a_silent_agent_makes_its_sandbox_unresponsive_until_it_answers() {
    let host = FakeHost::with(|config| {
        let timing = &mut config.timing;
        (timing.call, timing.ping_every) = (Duration::from_millis(20), Duration::from_millis(5));
        timing.unresponsive_after = Duration::from_millis(60);
    });
    let daemon = host.daemon().await;
    let (sandbox, guest, _monitor) = child_with_agent(&daemon).await;
    *guest.ignores.lock().unwrap() = Some("Ping".into());
    reaches(&sandbox, "it is to be unresponsive", |phase| matches!(phase, Phase::Unresponsive)).await;
    assert_eq!(sandbox.runs().await.unwrap_err().code(), Code::SandboxUnresponsive);
    *guest.ignores.lock().unwrap() = None;
    runs(&sandbox).await;
    let told = told(&daemon);
    assert_eq!(told[told.len() - 2..], [EventKind::SandboxUnresponsive, EventKind::SandboxRunning]);
}

#[tokio::test]
async fn an_agent_of_a_paused_sandbox_may_be_silent() {
    let host = FakeHost::with(|config| {
        let timing = &mut config.timing;
        (timing.call, timing.ping_every) = (Duration::from_millis(20), Duration::from_millis(2));
        timing.unresponsive_after = Duration::from_millis(30);
    });
    let daemon = host.daemon().await;
    let (sandbox, guest, _monitor) = child_with_agent(&daemon).await;
    sandbox.pause().await.unwrap();
    *guest.ignores.lock().unwrap() = Some("Ping".into());
    let pings = || guest.calls_of("Ping").len();
    // One may be under way.
    tokio::time::sleep(Duration::from_millis(50)).await;
    let before = pings();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(pings(), before, "it is not asked");
    assert!(matches!(sandbox.phase(), Phase::Paused));
}

#[tokio::test]
async fn a_daemon_that_stops_leaves_forked_sandboxes_running_and_emits_no_event() {
    let (_host, daemon, live, sandbox, monitor) = one_child().await;
    let before = told(&daemon);
    daemon.registry.close().await;
    assert!(monitor.runs() && matches!(sandbox.phase(), Phase::Running));
    assert!(sandbox.folder.exists() && !sandbox.folder.join(END).exists());
    assert_eq!(told(&daemon), before);
    live.template.leave();
}

#[tokio::test]
async fn a_daemon_that_stops_ends_a_sandbox_that_no_record_is_of() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let id = new_id("sb").unwrap();
    let folder = host.sandbox_folder(&id);
    let (monitor, started) = FakeMonitor::launched_in(&id, &folder, Role::Sandbox).await;
    let sandbox = Sandbox::new(id, bare_spec(), folder, Resources::default(), &daemon.host);
    let reservation = daemon.registry.reserve_existing(&sandbox.spec);
    let sandbox = daemon.registry.add(reservation, sandbox, SandboxOrigin::Adopted(started)).release();
    runs(&sandbox).await;
    daemon.registry.close().await;
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "deleted");
    assert!(end.detail.contains("daemon was stopped"), "{end:?}");
    assert!(!monitor.runs() && !sandbox.folder.exists());
}

#[tokio::test]
async fn a_supervisor_that_panics_ends_its_sandbox_as_failed() {
    let (_host, _daemon, _live, sandbox, _monitor) = one_child().await;
    sandbox.supervisor_panicked(Error::host("the task sandbox of the daemon panicked", "on purpose"));
    let end = end_of(&sandbox).await;
    assert_eq!(end.reason, "failed");
    assert!(end.cause.as_deref().unwrap().contains("on purpose") && !end.detail.contains("on purpose"));
    assert_eq!(End::read(&sandbox.folder).read().unwrap(), *end);
    assert_eq!(sandbox.runtime().pid, None);
}

#[tokio::test]
async fn a_timeout_is_the_reason_of_an_end_that_it_asked_for() {
    let (_host, daemon, _live, sandbox, monitor) = one_child().await;
    let end = End::new("timed_out", "its time was up", String::new());
    daemon.registry.end(&sandbox, end.clone());
    assert_eq!(*end_of(&sandbox).await, end);
    assert!(!monitor.runs());
    assert_eq!(daemon.sandbox_events().last().unwrap().1.as_deref(), Some("timed_out"));
}

#[tokio::test]
async fn events_of_a_sandboxs_monitor_about_children_and_connections_are_ignored() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    monitor.emit(Event::GuestConnection { port: 1 });
    monitor.emit(Event::ChildEnded { child: sandbox.id.clone(), status: WaitStatus::Exited(0) });
    monitor.emit(Event::Ready);
    sandbox.pause().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused) && monitor.runs());
}

#[tokio::test]
async fn a_template_ends_with_its_last_child_and_not_before() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (one, _) = daemon.child(&live).await;
    let (two, _) = daemon.child(&live).await;
    live.template.record(PersistState::Forgotten).unwrap();
    let monitor = live.monitor.clone();
    live.entry.unload();
    drop(live);
    daemon.registry.delete(&one.id).unwrap();
    eventually("the end of the first", || !one.folder.exists()).await;
    assert!(monitor.runs());
    daemon.registry.delete(&two.id).unwrap();
    drop((one, two));
    eventually("the end of the template", || !monitor.runs()).await;
}

#[tokio::test]
async fn a_waiting_command_fails_with_the_reason_of_the_end() {
    let (_host, _daemon, _live, sandbox, monitor) = one_child().await;
    let waiting = tokio::time::timeout(TIMEOUT, sandbox.trouble());
    monitor.end(EndReason::PoweredOff, "it powered off", "");
    let error = waiting.await.unwrap();
    assert_eq!(error.code(), Code::SandboxLost);
    assert!(error.public().contains("it powered off"), "{error}");
}
