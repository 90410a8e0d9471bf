//! Every change of a sandbox's state, and the event that tells it.

use std::sync::Arc;

use forkd_api::EventKind::*;

use super::*;
use crate::sandbox::End;
use crate::testing::fake_host::{Daemon, FakeHost, bare_spec};

/// A sandbox without a process.
fn sandbox(daemon: &Daemon) -> Sandbox {
    Sandbox::new("sb1".into(), bare_spec(), "/nonexistent".into(), Default::default(), &daemon.host)
}

fn ended(reason: &str) -> Phase {
    Phase::Ended(Arc::new(End::new(reason, "why", String::new())))
}

#[tokio::test]
async fn each_transition_of_a_sandbox_emits_the_event_it_is() {
    let host = FakeHost::new();
    for (from, to, kind) in [
        (Phase::Starting, Phase::Running, Some(SandboxRunning)),
        (Phase::Starting, Phase::Paused, Some(SandboxPaused)),
        (Phase::Paused, Phase::Running, Some(SandboxResumed)),
        (Phase::Unresponsive, Phase::Running, Some(SandboxRunning)),
        (Phase::Running, Phase::Unresponsive, Some(SandboxUnresponsive)),
        (Phase::Running, Phase::Paused, Some(SandboxPaused)),
        (Phase::Running, ended("panicked"), Some(SandboxEnded)),
        (Phase::Starting, ended("fork_failed"), Some(SandboxEnded)),
        (Phase::Running, ended("rolled_back"), None),
        (Phase::Starting, Phase::Unknown("damaged".into()), None),
    ] {
        let daemon = host.daemon().await;
        let sandbox = sandbox(&daemon);
        sandbox.phase.send_replace(from.clone());
        sandbox.set_phase(to.clone());
        assert_eq!(format!("{:?}", sandbox.phase()), format!("{to:?}"));
        let told: Vec<_> = daemon.sandbox_events().into_iter().map(|(kind, _)| kind).collect();
        assert_eq!(told, kind.into_iter().collect::<Vec<_>>(), "{from:?} {to:?}");
    }
}

#[tokio::test]
async fn an_ended_sandbox_stays_ended_and_an_unknown_one_can_only_end() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    for (from, to) in [
        (ended("panicked"), Phase::Running),
        (ended("panicked"), Phase::Paused),
        (ended("panicked"), ended("failed")),
        (Phase::Unknown("damaged".into()), Phase::Running),
        (Phase::Running, Phase::Starting),
        (Phase::Running, Phase::Unknown("damaged".into())),
        (Phase::Paused, Phase::Unresponsive),
    ] {
        let sandbox = sandbox(&daemon);
        sandbox.phase.send_replace(from.clone());
        sandbox.set_phase(to.clone());
        assert_eq!(format!("{:?}", sandbox.phase()), format!("{from:?}"), "{to:?}");
    }
    assert!(daemon.sandbox_events().is_empty());
    let unknown = sandbox(&daemon);
    unknown.set_phase(Phase::Unknown("damaged".into()));
    unknown.set_phase(ended("deleted"));
    assert!(matches!(unknown.phase(), Phase::Ended(_)));
}

#[tokio::test]
async fn an_agents_silence_matters_to_a_sandbox_that_runs_and_to_no_other() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    for (from, answers, news) in [
        (Phase::Running, true, None),
        (Phase::Running, false, Some("Unresponsive")),
        (Phase::Unresponsive, false, None),
        (Phase::Unresponsive, true, Some("Running")),
        (Phase::Paused, false, None),
        (Phase::Paused, true, None),
        (Phase::Starting, false, None),
        (ended("panicked"), true, None),
    ] {
        let sandbox = sandbox(&daemon);
        sandbox.phase.send_replace(from.clone());
        assert_eq!(sandbox.answers(answers), news.is_some(), "{from:?} {answers}");
        let expected = news.map_or(format!("{from:?}"), str::to_owned);
        assert_eq!(format!("{:?}", sandbox.phase()), expected, "{from:?} {answers}");
    }
    assert_eq!(daemon.sandbox_events().len(), 2);
}

#[tokio::test]
async fn the_events_of_a_sandbox_say_whose_it_is_and_why_it_ended() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let mut sandbox = sandbox(&daemon);
    sandbox.spec.owner = "ann".into();
    sandbox.spec.snapshot_tag = Some("t".into());
    sandbox.update_runtime(|runtime| {
        runtime.saved.workspace = Some("w".into());
        runtime.ready_ms = Some(1.5);
    });
    sandbox.created();
    sandbox.set_phase(Phase::Running);
    sandbox.branched("b");
    sandbox.set_phase(ended("panicked"));
    let events = daemon.events();
    let about =
        |kind| events.iter().find(|event| event.kind == kind).map(|event| event.about.clone()).unwrap();
    for kind in [SandboxCreated, SandboxRunning, SandboxBranched, SandboxEnded] {
        let about = about(kind);
        let of = (about.sandbox.as_deref(), about.owner.as_deref(), about.workspace.as_deref());
        assert_eq!(of, (Some("sb1"), Some("ann"), Some("w")), "{kind:?}");
        let tag = if kind == SandboxBranched { "b" } else { "t" };
        assert_eq!(about.snapshot.as_deref(), Some(tag), "{kind:?}");
        assert_eq!(about.ready_ms.is_some(), kind == SandboxRunning, "{kind:?}");
    }
    let end = about(SandboxEnded);
    assert_eq!((end.reason.as_deref(), end.detail.as_deref()), (Some("panicked"), Some("why")));
    assert_eq!(about(SandboxRunning).reason, None);
}

#[tokio::test]
async fn the_event_of_a_pause_has_a_reason_only_if_the_disk_is_full() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let sandbox = sandbox(&daemon);
    sandbox.phase.send_replace(Phase::Running);
    sandbox.paused_for_room();
    sandbox.update_runtime(|runtime| runtime.disk_full = false);
    sandbox.set_phase(Phase::Running);
    sandbox.set_phase(Phase::Paused);
    let reasons: Vec<_> = daemon.sandbox_events().into_iter().map(|(_, reason)| reason).collect();
    assert_eq!(reasons, [Some(DISK_FULL.into()), None, None]);
}

#[tokio::test]
async fn waiting_requests_get_the_start_and_the_end_of_a_sandbox() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let sandbox = sandbox(&daemon);
    let (started, ()) = tokio::join!(sandbox.started(), async { sandbox.set_phase(Phase::Running) });
    started.unwrap();
    let (trouble, ()) = tokio::join!(sandbox.trouble(), async { sandbox.set_phase(ended("panicked")) });
    assert!(trouble.public().contains("has ended: why"), "{trouble}");
    assert!(sandbox.started().await.is_err());
}
