//! Room, quotas, and the way of a sandbox into the registry and out of it.

use forkd_protocol::control::Request;

use super::*;
use crate::auth::principal::Scope;
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{FakeHost, end_of, one_child, runs};
use crate::testing::fake_monitor::Act;

fn claim(owner: &str, mem_mib: u64) -> Claim {
    Claim { owner: owner.into(), mem_mib }
}

fn quota(max_sandboxes: Option<u64>, max_memory_mib: Option<u64>) -> Quota {
    Quota { max_sandboxes, max_memory_mib, max_snapshots: None }
}

#[tokio::test]
async fn reservations_count_towards_the_limit_until_they_are_dropped() {
    let host = FakeHost::with(|config| config.limits.max_sandboxes = 3);
    let registry = host.daemon().await.registry;
    let (reservations, missing) = registry.reserve(2, &claim("ann", 1), &Quota::default()).unwrap();
    assert!(reservations.len() == 2 && missing.is_none());
    let error = registry.reserve(2, &claim("bob", 1), &Quota::default()).unwrap_err();
    assert_eq!(error.code(), Code::LimitReached);
    assert!(error.public().contains("there are 2 sandboxes, and 3 is the limit"), "{error}");
    drop(reservations);
    assert_eq!(registry.reserve(3, &claim("bob", 1), &Quota::default()).unwrap().0.len(), 3);
}

#[tokio::test]
async fn a_quota_counts_sandboxes_and_memory_of_its_owner_alone() {
    let host = FakeHost::new();
    let registry = host.daemon().await.registry;
    let reservations = registry.reserve(2, &claim("ann", 100), &quota(Some(3), Some(300))).unwrap().0;
    for (n, mem_mib) in [(2, 1), (1, 101)] {
        let error = registry.reserve(n, &claim("ann", mem_mib), &quota(Some(3), Some(300))).unwrap_err();
        assert_eq!(error.code(), Code::QuotaExceeded, "{n} {mem_mib}");
    }
    assert!(registry.reserve(1, &claim("ann", 100), &quota(Some(3), Some(300))).is_ok());
    assert!(registry.reserve(3, &claim("bob", 100), &quota(Some(3), Some(300))).is_ok());
    // What was refused counts nothing.
    drop(reservations);
    assert!(registry.reserve(3, &claim("ann", 100), &quota(Some(3), Some(300))).is_ok());
}

#[tokio::test]
async fn a_deleted_sandbox_gives_its_quota_back_at_once_and_its_reservation_when_its_process_is_gone() {
    let host = FakeHost::with(|config| config.limits.max_sandboxes = 2);
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (sandbox, monitor) = daemon.child(&live).await;
    let reserve = |n, max| daemon.registry.reserve(n, &claim("local", 64), &quota(Some(max), None));
    assert_eq!(reserve(1, 1).unwrap_err().code(), Code::QuotaExceeded);
    daemon.registry.delete(&sandbox.id).unwrap();
    assert!(reserve(1, 1).is_ok());
    assert_eq!(reserve(2, 2).unwrap_err().code(), Code::LimitReached, "its process is there");
    eventually("its reservation", || reserve(2, 2).is_ok()).await;
    assert!(!monitor.runs());
}

#[tokio::test]
async fn a_bound_sandbox_ends_with_what_it_is_bound_to() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let spawned = daemon.spawn(daemon.spawn_spec("t", 1)).await.unwrap();
    let sandbox = spawned.children[0].sandbox().clone();
    let monitor = live.monitor.child(&sandbox.child).unwrap();
    drop(spawned);
    assert!(daemon.registry.get(&sandbox.id).is_err());
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
    eventually("its folder's end", || !monitor.runs() && !sandbox.folder.exists()).await;
}

#[tokio::test]
async fn a_released_sandbox_lives_until_a_client_deletes_it() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let mut spawned = daemon.spawn(daemon.spawn_spec("t", 2)).await.unwrap();
    let released = spawned.children.pop().unwrap().release();
    let bound = spawned.children[0].sandbox().clone();
    drop(spawned);
    assert_eq!(end_of(&bound).await.reason, "deleted");
    assert!(matches!(released.phase(), Phase::Running));
    assert!(live.monitor.child(&released.child).unwrap().runs());
}

#[tokio::test]
async fn a_batch_of_forks_is_refused_whole_when_the_quota_has_no_room_for_all() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let mut spec = daemon.spawn_spec("t", 3);
    spec.who.quota = quota(Some(2), None);
    assert_eq!(daemon.spawn(spec).await.unwrap_err().code(), Code::QuotaExceeded);
    assert_eq!(live.monitor.times(|request| matches!(request, Request::Fork(_))), 0);
    assert_eq!(daemon.registry.list().len(), 0);
}

#[tokio::test]
async fn the_list_of_sandboxes_is_sorted_by_age() {
    let host = FakeHost::new();
    let mut made = Vec::new();
    for created in [30, 10, 20] {
        let mut left = host.leave_booted();
        left.amend(|record| record.created_at_unix = created);
        made.push((created, left));
    }
    let daemon = host.daemon().await;
    made.sort_by_key(|(created, _)| *created);
    let listed: Vec<String> = daemon.registry.list().iter().map(|sandbox| sandbox.id.clone()).collect();
    assert_eq!(listed, made.iter().map(|(_, left)| left.id.clone()).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_sandbox_of_another_owner_is_not_found() {
    let (_host, daemon, _live, sandbox, _monitor) = one_child().await;
    let bob = Principal { owner: "bob".into(), scope: Scope::Write, ..Principal::local() };
    let error = daemon.registry.check_owner(&sandbox, &bob).unwrap_err();
    assert_eq!(
        error.to_string(),
        daemon.registry.get("sbnone").unwrap_err().to_string().replace("sbnone", &sandbox.id)
    );
    daemon.registry.check_owner(&sandbox, &Principal::local()).unwrap();
    let shown = daemon.registry.get("../x").unwrap_err();
    assert!(!shown.public().contains(".."), "{shown}");
}

#[tokio::test]
async fn the_archive_has_the_end_of_each_sandbox_and_the_first_one_counts() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (died, monitor) = daemon
        .child_with(&live, |spec| {
            spec.lifetime.labels.insert("team".into(), "x".into());
        })
        .await;
    let (deleted, _) = daemon.child(&live).await;
    let (alive, _) = daemon.child(&live).await;
    monitor.die();
    end_of(&died).await;
    daemon.registry.delete(&deleted.id).unwrap();
    let archive = &daemon.registry.archive;
    let find = async |id: &str| archive.find(id).await.unwrap().unwrap();
    let begun = std::time::Instant::now();
    while find(&died.id).await.ended_at_unix.is_none() {
        assert!(begun.elapsed() < Duration::from_secs(60), "no end was noted");
    }
    let noted = find(&died.id).await;
    assert_eq!((noted.reason.as_str(), noted.made.labels["team"].as_str()), ("monitor_died", "x"));
    assert_eq!(noted.made.snapshot_tag.as_deref(), Some("t"));
    daemon.registry.delete(&died.id).unwrap();
    assert_eq!(find(&died.id).await.reason, "monitor_died", "that it was deleted later is no end");
    assert_eq!(find(&deleted.id).await.reason, "deleted");
    assert_eq!(find(&alive.id).await.ended_at_unix, None);
    let gone: Vec<String> = archive.archived().await.unwrap().into_iter().map(|it| it.made.id).collect();
    assert!(gone.contains(&died.id) && gone.contains(&deleted.id) && !gone.contains(&alive.id), "{gone:?}");
}

#[tokio::test]
async fn a_closed_registry_takes_nothing_in_and_keeps_nothing() {
    let (_host, daemon, live, sandbox, monitor) = one_child().await;
    daemon.registry.close().await;
    assert!(daemon.registry.list().is_empty() && monitor.runs());
    let error = daemon.registry.reserve(1, &claim("ann", 1), &Quota::default()).unwrap_err();
    assert_eq!(error.code(), Code::ShuttingDown);
    assert_eq!(daemon.registry.delete(&sandbox.id).unwrap_err().code(), Code::SandboxNotFound);
    live.template.leave();
}

#[tokio::test]
async fn closing_returns_when_those_that_are_being_deleted_are_gone() {
    let (_host, daemon, _live, sandbox, monitor) = one_child().await;
    daemon.registry.delete(&sandbox.id).unwrap();
    daemon.registry.close().await;
    assert!(!monitor.runs() && !sandbox.folder.exists());
}

#[tokio::test]
async fn an_end_is_that_of_the_sandbox_it_was_meant_for_and_not_of_its_successor() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (old, _) = daemon.child(&live).await;
    let new = crate::sandbox::rollback::roll_back(
        &daemon.registry,
        &daemon.snapshots,
        &old.id,
        Some("t"),
        &Principal::local(),
    )
    .await
    .unwrap();
    daemon.registry.end(&old, End::new("timed_out", "too late", String::new()));
    assert!(matches!(new.phase(), Phase::Running));
    assert!(Arc::ptr_eq(&daemon.registry.get(&old.id).unwrap(), &new));
}

#[tokio::test]
async fn a_rolled_back_sandbox_has_another_process_and_the_same_id_folder_and_reservation() {
    let host = FakeHost::with(|config| config.limits.max_sandboxes = 1);
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (old, before) = daemon.child(&live).await;
    let (registry, who) = (&daemon.registry, Principal::local());
    let roll_back =
        async || crate::sandbox::rollback::roll_back(registry, &daemon.snapshots, &old.id, None, &who).await;
    let new = roll_back().await.unwrap();
    let after = live.monitor.child(&format!("{}-1", old.id)).unwrap();
    assert!(!before.runs() && after.runs());
    assert_eq!((&new.id, &new.folder, new.created), (&old.id, &old.folder, old.created));
    assert_eq!(new.runtime().pid, Some(after.pid as u32));
    assert_eq!(new.runtime().saved.history.rolled_back_to.as_deref(), Some("t"));
    assert_eq!(end_of(&old).await.reason, "rolled_back");
    assert!(!new.folder.join("end.json").exists());
    // The process ended, the sandbox did not.
    let kinds: Vec<_> = daemon.sandbox_events().into_iter().map(|(kind, _)| kind).collect();
    use forkd_api::EventKind::{SandboxCreated, SandboxRolledBack, SandboxRunning};
    let (made, last) = kinds.split_at(2);
    assert_eq!(made, [SandboxCreated, SandboxRunning]);
    assert!(last.ends_with(&[SandboxRolledBack]), "{kinds:?}");
    assert_eq!(registry.archive.find(&old.id).await.unwrap().unwrap().ended_at_unix, None);
    let newer = roll_back().await.unwrap();
    assert_eq!(newer.child, format!("{}-2", old.id));
    runs(&newer).await;
}

#[tokio::test]
async fn a_rollback_that_its_template_refuses_ends_the_sandbox_with_advice_and_can_be_tried_again() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (old, _) = daemon.child(&live).await;
    live.monitor.script(|request| match request {
        Request::Fork(_) => Act::Answer(forkd_protocol::control::Reply::Error { message: "not now".into() }),
        _ => Act::Execute,
    });
    let (registry, who) = (&daemon.registry, Principal::local());
    let roll_back =
        async || crate::sandbox::rollback::roll_back(registry, &daemon.snapshots, &old.id, None, &who).await;
    roll_back().await.unwrap_err();
    let failed = registry.get(&old.id).unwrap();
    let end = end_of(&failed).await;
    assert_eq!(end.reason, "rollback_failed");
    assert!(end.detail.contains("roll it back again, or delete it"), "{end:?}");
    assert_eq!(End::read(&failed.folder).read().unwrap(), *end);
    live.monitor.script(|_| Act::Execute);
    runs(&roll_back().await.unwrap()).await;
}

#[tokio::test]
async fn a_rollback_of_a_sandbox_that_was_deleted_meanwhile_is_refused() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("t").await;
    let (old, _) = daemon.child(&live).await;
    let turn = old.lock_exclusive().await.unwrap();
    let (registry, snapshots, id) = (daemon.registry.clone(), daemon.snapshots.clone(), old.id.clone());
    let rolling = tokio::spawn(async move {
        crate::sandbox::rollback::roll_back(&registry, &snapshots, &id, None, &Principal::local()).await
    });
    tokio::task::yield_now().await;
    daemon.registry.delete(&old.id).unwrap();
    drop(turn);
    let error = rolling.await.unwrap().unwrap_err();
    assert!(matches!(error.code(), Code::SandboxNotFound | Code::SandboxEnded), "{error}");
    assert_eq!(live.monitor.times(|request| matches!(request, Request::Fork(_))), 1);
}
