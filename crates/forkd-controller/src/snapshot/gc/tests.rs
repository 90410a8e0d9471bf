//! Which branches are removed, and which are let go of in memory.

use std::cell::Cell;

use forkd_store::Quota;

use super::*;
use crate::error::{Code, Error};
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{Daemon, FakeHost, bare_guest};
use crate::util::time::now_unix;

fn branch(created_at_unix: u64, tag: &str) -> Candidate {
    Candidate { created_at_unix, saved_at: SystemTime::UNIX_EPOCH, tag: tag.into(), owner: "ann".into() }
}

#[test]
fn the_oldest_branches_are_removed_first_and_no_more_than_needed() {
    let all = [branch(10, "a"), branch(20, "b"), branch(30, "c")];
    let limits = |age, count| Limits { branch_max_age: age, branch_max_count: count, ..Limits::default() };
    let secs = Duration::from_secs;
    assert_eq!(expired(&all, &limits(None, None), 1000), Vec::<String>::new());
    assert_eq!(expired(&all, &limits(None, Some(2)), 1000), ["a"]);
    assert_eq!(expired(&all, &limits(None, Some(0)), 1000), ["a", "b", "c"]);
    assert_eq!(expired(&all, &limits(Some(secs(25)), None), 46), ["a", "b"]);
    assert_eq!(expired(&all, &limits(Some(secs(25)), None), 45), ["a"]);
    assert_eq!(expired(&all, &limits(Some(secs(25)), Some(1)), 36), ["a", "b"]);
    assert_eq!(expired(&all, &limits(Some(secs(1 << 40)), Some(5)), 1000), Vec::<String>::new());
    let of_bob = |created, tag| Candidate { owner: "bob".into(), ..branch(created, tag) };
    let all = [of_bob(1, "x"), branch(10, "a"), branch(20, "b"), of_bob(25, "y"), branch(30, "c")];
    assert_eq!(expired(&all, &limits(None, Some(2)), 1000), ["a"], "nobody's many are another's");
    assert_eq!(expired(&all, &limits(None, Some(1)), 1000), ["x", "a", "b"]);
}

/// Stores a branch of the sandbox `of`, that old.
fn store(host: &FakeHost, tag: &str, of: &str, age: u64) {
    store_as(host, tag, of, age, "full");
}

fn store_as(host: &FakeHost, tag: &str, of: &str, age: u64, mode: &str) {
    host.store(tag, |contents| {
        contents.branched_from = Some(of.into());
        contents.created_at_unix = Some(now_unix() - age);
        contents.measured.mode = Some(mode.into());
    });
}

fn tags(daemon: &Daemon) -> Vec<String> {
    daemon.snapshots.list().iter().map(|entry| entry.tag.clone()).collect()
}

/// A host whose owners may have so many branches.
fn host_with_at_most(count: usize) -> FakeHost {
    FakeHost::with(|config| config.limits.branch_max_count = Some(count))
}

/// Has the branches looked at once; how often it was asked what is needed.
async fn look(daemon: &Daemon, needed: impl Fn() -> Result<BTreeSet<String>>) -> usize {
    let asked = Cell::new(0);
    let counted = || {
        asked.set(asked.get() + 1);
        needed()
    };
    remove_expired(&daemon.snapshots, &daemon.host.config.limits, &counted).await;
    asked.get()
}

fn nothing() -> Result<BTreeSet<String>> {
    Ok(BTreeSet::new())
}

#[tokio::test]
async fn gc_removes_the_oldest_branches_and_keeps_the_newest() {
    let host = host_with_at_most(2);
    for (tag, age) in [("b1", 40), ("b3", 20), ("b2", 30), ("b4", 10)] {
        store(&host, tag, "sbone", age);
    }
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["b3", "b4"]);
    assert!(daemon.snapshots.store.get("b1").is_err() && daemon.snapshots.store.get("b4").is_ok());
}

#[tokio::test]
async fn gc_removes_branches_that_are_too_old_whatever_their_number() {
    let host = FakeHost::with(|config| config.limits.branch_max_age = Some(Duration::from_secs(3600)));
    store(&host, "old", "sbone", 7200);
    store(&host, "young", "sbone", 60);
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["young"]);
}

#[tokio::test]
async fn gc_touches_no_snapshot_that_is_no_branch_of_a_sandbox_and_no_suspended_sandbox() {
    let host = host_with_at_most(0);
    host.store("image", |contents| contents.created_at_unix = Some(1));
    store(&host, "compacted", "compact:image", 40);
    store_as(&host, "suspended", "sbone", 40, "suspend");
    store(&host, "branch", "sbone", 40);
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["compacted", "image", "suspended"]);
}

#[tokio::test]
async fn gc_neither_removes_nor_counts_what_a_client_of_the_e2b_api_took() {
    let host = host_with_at_most(1);
    for (tag, age) in [("named", 50), ("unnamed", 40), ("b1", 30), ("b2", 20)] {
        store(&host, tag, "sbone", age);
    }
    for (name, tag) in [("team/mine", "named"), ("unnamed", "unnamed")] {
        let (owner, sandbox) = ("ann".into(), "sbone".into());
        let (name, tag) = (name.into(), tag.into());
        let named = forkd_store::TemplateName { owner, name, tag, sandbox, created_at_unix: 1 };
        host.database.name_template(&named).unwrap();
    }
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["b2", "named", "unnamed"]);
    host.database.forget_templates("unnamed").unwrap();
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["b2", "named"], "a name is what keeps it");
}

#[tokio::test]
async fn gc_keeps_what_a_sandbox_or_a_workspace_needs() {
    let host = host_with_at_most(1);
    for (tag, age) in [("b1", 30), ("b2", 20), ("b3", 10)] {
        store(&host, tag, "sbone", age);
    }
    let daemon = host.daemon().await;
    let asked = look(&daemon, || Ok(["b1".to_owned()].into())).await;
    assert_eq!(tags(&daemon), ["b1", "b3"]);
    assert_eq!(asked, 2, "for each branch that was to go");
}

#[tokio::test]
async fn gc_removes_nothing_while_the_needed_tags_are_unknown() {
    let host = host_with_at_most(0);
    store(&host, "b1", "sbone", 30);
    store(&host, "b2", "sbone", 20);
    let daemon = host.daemon().await;
    let asked = look(&daemon, || Err(Error::new(Code::StateUnknown, "a workspace cannot be read"))).await;
    assert_eq!((asked, tags(&daemon)), (1, vec!["b1".to_owned(), "b2".to_owned()]));
}

#[tokio::test]
async fn gc_keeps_a_branch_that_another_snapshot_is_a_difference_to() {
    let host = host_with_at_most(1);
    store(&host, "parent", "sbone", 30);
    let parent = host.store("unused", |_| {});
    drop(parent);
    let over =
        forkd_store::Store::open(&host.config.data_dir.join("snapshots")).unwrap().get("parent").unwrap();
    host.store("child", |contents| {
        contents.parent = Some(over);
        contents.branched_from = Some("sbtwo".into());
        contents.created_at_unix = Some(now_unix() - 10);
    });
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["child", "parent", "unused"]);
}

#[tokio::test]
async fn gc_counts_the_branches_of_each_owner_apart() {
    let host = host_with_at_most(1);
    for (tag, age) in [("ann1", 40), ("bob1", 30), ("bob2", 20)] {
        store(&host, tag, "sbone", age);
    }
    host.database.change_snapshot_owners(&[("ann1".into(), Some("ann".into()))]).unwrap();
    let daemon = host.daemon().await;
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["ann1", "bob2"]);
}

#[tokio::test]
async fn gc_counts_branches_that_could_not_be_saved() {
    let host = host_with_at_most(1);
    store(&host, "stored", "sbone", 10);
    let daemon = host.daemon().await;
    let live = failed(&daemon, "failed").await;
    // It was taken after the other one.
    look(&daemon, nothing).await;
    assert_eq!(tags(&daemon), ["failed"]);
    assert!(live.runs());
}

#[tokio::test]
async fn gc_looks_when_a_branch_is_stored() {
    let host = host_with_at_most(0);
    store(&host, "b", "sbone", 10);
    let daemon = host.daemon().await;
    let keeping = tokio::spawn(enforce_limits(daemon.snapshots.clone(), nothing));
    // Else half a minute later.
    daemon.snapshots.gc_wakeup.notify_one();
    eventually("the branch's end", || tags(&daemon).is_empty()).await;
    keeping.abort();
}

#[tokio::test]
async fn gc_without_limits_ends_at_once() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    enforce_limits(daemon.snapshots.clone(), nothing).await;
}

/// A branch that could not be saved, with its template.
async fn failed(daemon: &Daemon, tag: &str) -> crate::testing::fake_monitor::FakeMonitor {
    let live = daemon.live(tag).await;
    live.entry.fail(Error::new(Code::Internal, "the saver failed"));
    live.monitor
}

/// Has the memory of unused branches looked at, a few times.
async fn unload(daemon: &Daemon) {
    let unloading = unload_unused(daemon.snapshots.clone());
    let _ = tokio::time::timeout(10 * SOON, unloading).await;
}

#[tokio::test]
async fn the_memory_of_an_unused_branch_is_freed_and_the_branch_stays_on_disk() {
    let host = FakeHost::with(|config| config.limits.branch_unload_after = Some(Duration::ZERO));
    store(&host, "b", "sbone", 10);
    let snapshot = host.store("image", |_| {});
    let daemon = host.daemon().await;
    // Both have a template; the one of the image is not a branch.
    let (branch, image) = (daemon.live("x").await, daemon.live("y").await);
    branch.template.is_of(daemon.snapshots.get("b").unwrap().snapshot().unwrap().id());
    image.template.is_of(snapshot.id());
    daemon.snapshots.get("b").unwrap().set_current(branch.template.clone());
    daemon.snapshots.get("image").unwrap().set_current(image.template.clone());
    for live in [&branch, &image] {
        daemon.snapshots.remove_unwritten(&live.entry);
    }
    drop((branch.template, image.template));
    unload(&daemon).await;
    assert!(daemon.snapshots.get("b").unwrap().current().is_none());
    eventually("the end of its template", || !branch.monitor.runs()).await;
    assert!(daemon.snapshots.get("b").unwrap().snapshot().is_ok());
    assert!(daemon.snapshots.get("image").unwrap().current().is_some() && image.monitor.runs());
}

#[tokio::test]
async fn a_branch_that_could_not_be_saved_is_lost_when_no_client_uses_it_for_long() {
    let host = FakeHost::with(|config| config.limits.branch_unload_after = Some(Duration::ZERO));
    let daemon = host.daemon().await;
    let monitor = failed(&daemon, "b").await;
    let entry = daemon.snapshots.get("b").unwrap();
    assert!(entry.current().is_some());
    unload(&daemon).await;
    assert!(entry.current().is_none());
    eventually("the end of its template", || !monitor.runs()).await;
    assert_eq!(entry.snapshot().unwrap_err().code(), Code::SnapshotFailed);
}

#[tokio::test]
async fn a_branch_that_a_client_forks_from_is_not_unused() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let live = daemon.live("b").await;
    assert!(live.entry.is_unused(Duration::ZERO));
    std::thread::sleep(Duration::from_millis(20));
    let age = Duration::from_millis(20);
    assert!(live.entry.is_unused(age) && live.entry.current().is_some(), "a look is no use");
    let begun = std::time::Instant::now();
    live.entry.use_current().unwrap();
    assert!(!live.entry.is_unused(age) || begun.elapsed() >= age);
    assert!(!live.entry.unload_if_unused(Duration::from_secs(60)) && live.entry.current().is_some());
}

#[tokio::test]
async fn a_branch_that_is_being_written_keeps_its_memory() {
    let host = FakeHost::with(|config| config.limits.branch_unload_after = Some(Duration::ZERO));
    let daemon = host.daemon().await;
    let live = daemon.live("b").await;
    unload(&daemon).await;
    assert!(live.entry.current().is_some() && live.monitor.runs());
}

#[tokio::test]
async fn the_children_of_a_branch_keep_its_template_when_its_memory_is_freed() {
    let host = FakeHost::with(|config| config.limits.branch_unload_after = Some(Duration::ZERO));
    let daemon = host.daemon().await;
    let live = daemon.live("b").await;
    let (sandbox, child) = daemon.child(&live).await;
    live.entry.fail(Error::new(Code::Internal, "the saver failed"));
    let monitor = live.monitor.clone();
    drop((live.template, live.monitor));
    unload(&daemon).await;
    assert!(live.entry.current().is_none());
    assert!(monitor.runs() && child.runs());
    daemon.registry.delete(&sandbox.id).unwrap();
    drop(sandbox);
    eventually("the end of the template", || !monitor.runs()).await;
}

#[tokio::test]
async fn a_tag_whose_branch_failed_can_be_taken_again() {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let monitor = failed(&daemon, "b").await;
    let again = BranchJob::new("b".into(), "tp".into(), "sbone".into(), bare_guest(), Mode::Full);
    let state = SnapshotState::Branching(Arc::new(again));
    let entry = daemon.snapshots.reserve("b", state, "local", &Quota::default()).unwrap();
    assert!(Arc::ptr_eq(&daemon.snapshots.get("b").unwrap(), &entry));
    eventually("the end of the first one", || !monitor.runs()).await;
}
