//! Forks of running sandboxes, with fake monitors: what is kept of a fork, for how long, and what it counts.

use std::path::PathBuf;
use std::time::Duration;

use forkd_protocol::control::{Request, WaitStatus};

use super::*;
use crate::auth::principal::{LOCAL, Principal};
use crate::branch::BranchSpec;
use crate::error::Code;
use crate::sandbox::rollback::roll_back;
use crate::sandbox::spawn::{SpawnSpec, Spawned, spawn_from};
use crate::sandbox::{Phase, SandboxRecord};
use crate::snapshot::branch_job::Mode;
use crate::snapshot::registry::SnapshotState;
use crate::snapshot::template::TemplateRecord;
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{Daemon, FakeHost, end_of, runs};
use crate::testing::fake_monitor::{Act, FakeMonitor};

/// A daemon with a running sandbox, and what plays its monitor.
async fn start() -> (FakeHost, Daemon, Arc<Sandbox>, FakeMonitor) {
    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, monitor) = daemon.booted().await;
    (host, daemon, sandbox, monitor)
}

fn of(max_snapshots: u64) -> Quota {
    Quota { max_snapshots: Some(max_snapshots), ..Quota::default() }
}

impl Daemon {
    async fn fork(&self, sandbox: &Arc<Sandbox>) -> Arc<Template> {
        self.snapshots.capture_for_fork(sandbox, &Quota::default()).await.unwrap()
    }

    /// Forks one child of `template`.
    async fn child_of(&self, template: &Arc<Template>, id: Option<&str>) -> Arc<Sandbox> {
        let spec = SpawnSpec { id: id.map(str::to_owned), ..self.spawn_spec("", 1) };
        let spawned = spawn_from(&self.registry, template.clone(), spec).await;
        let Spawned { mut children, errors } = spawned.unwrap();
        assert!(errors.is_empty(), "{errors:?}");
        let child = children.pop().unwrap().release();
        runs(&child).await;
        child
    }

    fn templates(&self) -> Vec<PathBuf> {
        let folders = std::fs::read_dir(&self.snapshots.folder).unwrap().flatten();
        folders.map(|folder| folder.path()).collect()
    }
}

fn branch(tag: &str, parent_tag: Option<&str>) -> BranchSpec {
    let (tag, parent_tag) = (Some(tag.into()), parent_tag.map(str::to_owned));
    BranchSpec { tag, mode: Mode::Diff, wait: true, parent_tag, quota: Quota::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn one_capture_serves_many_requests_and_is_in_no_list() {
    let (_host, daemon, source, monitor) = start().await;
    let template = daemon.fork(&source).await;
    let ids = ["sbone", "sbtwo", "sbthree"];
    let children = ids.map(|id| daemon.child_of(&template, Some(id)));
    let children = futures_util::future::join_all(children).await;
    for (child, id) in children.iter().zip(ids) {
        assert_eq!(child.id, id);
        assert_eq!((&child.spec.snapshot_tag, &child.spec.forked_from), (&None, &Some(source.id.clone())));
        let record = SandboxRecord::read(&child.folder).read().unwrap();
        assert_eq!(
            (record.spec.forked_from, record.template),
            (Some(source.id.clone()), template.id.clone())
        );
    }
    assert_eq!(monitor.times(|request| matches!(request, Request::Branch(_))), 1, "one capture");
    assert!(daemon.snapshots.list().is_empty() && daemon.snapshots.store.list().unwrap().is_empty());
    assert_eq!(daemon.snapshots.owners.of(""), None);
    let record = TemplateRecord::read(template.folder()).read().unwrap();
    assert_eq!(record.standing, PersistState::Forgotten);
    let history = source.runtime().saved.history;
    assert_eq!((history.branch_count, history.last_branch_tag), (0, None), "a fork is no branch");
    assert_eq!(source.pauses.list()[0].why, "fork");

    // It ends with the last of its children, and not before.
    let (pid, folder) = (template.pid, template.folder().to_owned());
    drop(template);
    let runs = || crate::testing::fake_process::runs(pid);
    for child in &children {
        assert!(runs() && folder.exists(), "there are children left");
        daemon.registry.delete(&child.id).unwrap();
    }
    drop(children);
    eventually("the end of the template", || !runs() && !folder.exists()).await;
    assert!(matches!(source.phase(), Phase::Running), "the source goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_counts_as_a_snapshot_of_its_owner_while_it_lives() {
    let (_host, daemon, source, _monitor) = start().await;
    let first = daemon.snapshots.capture_for_fork(&source, &of(1)).await.unwrap();
    let child = daemon.child_of(&first, None).await;
    drop(first);
    let over = daemon.snapshots.capture_for_fork(&source, &of(1)).await.unwrap_err();
    assert_eq!(over.code(), Code::QuotaExceeded);
    let order = BranchSpec { quota: of(1), ..branch("b", None) };
    assert_eq!(daemon.snapshots.branch(&source, order).unwrap_err().code(), Code::QuotaExceeded);
    let small = Quota { max_memory_mib: Some(32), ..Quota::default() };
    let large = daemon.snapshots.capture_for_fork(&source, &small).await.unwrap_err();
    assert_eq!(large.code(), Code::QuotaExceeded);
    assert_eq!((daemon.templates().len(), daemon.snapshots.forks.count(LOCAL)), (1, 1), "nothing was taken");
    daemon.registry.delete(&child.id).unwrap();
    drop(child);
    eventually("the end of what it counted", || daemon.snapshots.forks.count(LOCAL) == 0).await;
    daemon.snapshots.capture_for_fork(&source, &of(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_daemon_keeps_a_fork_for_its_children_alone() {
    let (host, daemon, source, _monitor) = start().await;
    let (used, unused) = (daemon.fork(&source).await, daemon.fork(&source).await);
    let child = daemon.child_of(&used, None).await;
    let (id, used_pid, unused_pid) = (child.id.clone(), used.pid, unused.pid);
    // As if it were killed: what ends with a handle stays.
    unused.leave();
    drop((source, child, used, unused));
    daemon.stop().await;

    let daemon = host.daemon().await;
    let runs = |pid| crate::testing::fake_process::runs(pid);
    eventually("the end of the fork without children", || !runs(unused_pid)).await;
    assert!(runs(used_pid) && daemon.snapshots.list().is_empty());
    eventually("the folder of the other alone", || daemon.templates().len() == 1).await;
    eventually("the reservation of the other alone", || daemon.snapshots.forks.count(LOCAL) == 1).await;
    let child = daemon.registry.get(&id).unwrap();
    assert!(child.spec.forked_from.is_some() && child.resources().template.is_some());
    daemon.registry.delete(&id).unwrap();
    drop(child);
    eventually("the end of the template", || !runs(used_pid)).await;
    assert_eq!(daemon.snapshots.forks.count(LOCAL), 0);
    assert!(daemon.snapshots.list().is_empty() && daemon.snapshots.store.list().unwrap().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_goes_on_without_its_client_and_leaves_nothing() {
    let (_host, daemon, source, monitor) = start().await;
    let quota = Quota::default();
    {
        let mut forking = Box::pin(daemon.snapshots.capture_for_fork(&source, &quota));
        // The client goes away as soon as the job has begun.
        assert!(futures_util::poll!(&mut forking).is_pending());
    }
    eventually("the fork", || monitor.has_received(|request| matches!(request, Request::Branch(_)))).await;
    eventually("the end of its template", || daemon.templates().is_empty()).await;
    assert!(!monitor.child("branch").unwrap().runs());
    assert!(matches!(source.phase(), Phase::Running) && monitor.runs());
    assert_eq!(daemon.snapshots.forks.count(LOCAL), 0);
    // The next one has its turn at once.
    drop(daemon.fork(&source).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fork_that_fails_is_an_error_and_leaves_nothing() {
    let (_host, daemon, source, monitor) = start().await;
    monitor.script(|request| match request {
        Request::Branch(_) => {
            Act::Answer(forkd_protocol::control::Reply::Error { message: "no branch today".into() })
        }
        _ => Act::Execute,
    });
    let quota = Quota::default();
    let error = daemon.snapshots.capture_for_fork(&source, &quota).await.unwrap_err();
    assert!(error.to_string().contains("no branch today"), "{error}");
    eventually("nothing left", || daemon.templates().is_empty()).await;
    assert_eq!(daemon.snapshots.forks.count(LOCAL), 0);
    assert!(matches!(source.phase(), Phase::Running));
    monitor.die();
    end_of(&source).await;
    let error = daemon.snapshots.capture_for_fork(&source, &quota).await.unwrap_err();
    assert_eq!(error.code(), Code::SandboxEnded);
    // A daemon that stops begins no fork.
    daemon.snapshots.close().await;
    let (other, _monitor) = daemon.booted().await;
    let error = daemon.snapshots.capture_for_fork(&other, &quota).await.unwrap_err();
    assert_eq!(error.code(), Code::ShuttingDown);
}

#[tokio::test(flavor = "multi_thread")]
async fn children_of_a_template_that_ended_are_errors() {
    let (_host, daemon, source, monitor) = start().await;
    let template = daemon.fork(&source).await;
    monitor.child("branch").unwrap().die();
    eventually("the end of the template", || !template.is_alive()).await;
    let spawned = spawn_from(&daemon.registry, template, daemon.spawn_spec("", 2)).await.unwrap();
    assert_eq!((spawned.children.len(), spawned.errors.len()), (0, 2));
    eventually("no children", || daemon.registry.list().len() == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_of_a_fork_has_no_snapshot_to_differ_from_or_to_go_back_to() {
    let (_host, daemon, source, monitor) = start().await;
    let template = daemon.fork(&source).await;
    let child = daemon.child_of(&template, None).await;
    // A fake monitor whose last handle is dropped ends its branches.
    let _held = monitor.child("branch").unwrap().child(&child.child).unwrap();
    let who = Principal::local();
    let back = roll_back(&daemon.registry, &daemon.snapshots, &child.id, None, &who).await.unwrap_err();
    assert_eq!(back.code(), Code::NoRollbackTarget);
    assert!(back.public().contains(&source.id), "{back}");
    let wrong = daemon.snapshots.branch(&child, branch("b", Some("root"))).unwrap_err();
    assert_eq!(wrong.code(), Code::InvalidRequest, "{wrong}");
    let entry = daemon.snapshots.branch(&child, branch("b", None)).unwrap();
    assert!(entry.branch().is_none_or(|job| job.origin.is_none() && job.parent.is_none()));
    entry.wait_done().await.unwrap();
    let SnapshotState::Ready(snapshot) = entry.state() else { panic!("{:?}", entry.state()) };
    let manifest = snapshot.manifest();
    assert_eq!((manifest.ancestors.len(), manifest.branched_from.as_deref()), (0, Some(&*child.id)));
    // The branch is a target now.
    let to = roll_back(&daemon.registry, &daemon.snapshots, &child.id, None, &who).await.unwrap();
    assert_eq!((&to.spec.snapshot_tag, &to.spec.forked_from), (&None, &Some(source.id.clone())));
    // A fork of a fork's child names that child.
    let again = daemon.fork(&to).await;
    let grandchild = daemon.child_of(&again, None).await;
    assert_eq!(grandchild.spec.forked_from.as_ref(), Some(&child.id));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_of_a_fork_ends_as_any_child_does() {
    let (_host, daemon, source, monitor) = start().await;
    let template = daemon.fork(&source).await;
    let child = daemon.child_of(&template, None).await;
    monitor.child("branch").unwrap().end_child(&child.child, WaitStatus::Exited(3));
    let end = tokio::time::timeout(Duration::from_secs(60), end_of(&child)).await.unwrap();
    assert!(end.detail.contains('3'), "{end:?}");
}
