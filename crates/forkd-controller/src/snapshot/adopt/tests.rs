//! What a daemon takes over of the templates that an earlier one left.

use std::sync::Mutex;

use forkd_protocol::control::Reply;

use super::*;
use crate::error::Code;
use crate::testing::fake_guest::eventually;
use crate::testing::fake_host::{Daemon, FakeHost, LeftTemplate, unsaved};
use crate::testing::fake_monitor::Act;
use crate::util::records;

/// Whether the tag's entry has `left` as its template.
fn is_current(daemon: &Daemon, tag: &str, left: &LeftTemplate) -> bool {
    let current = daemon.snapshots.get(tag).unwrap().current();
    current.is_some_and(|template| template.id == left.id)
}

/// Waits until the snapshot is on disk; what is said of it there.
async fn saved(daemon: &Daemon, tag: &str) -> forkd_store::Snapshot {
    let entry = daemon.snapshots.get(tag).unwrap();
    eventually(tag, || matches!(entry.state(), SnapshotState::Ready(_))).await;
    entry.snapshot().unwrap()
}

#[tokio::test]
async fn an_adopted_template_is_the_one_of_its_snapshot() {
    let host = FakeHost::new();
    let snapshot = host.store("t", |_| {});
    let left = host.leave_template("t", PersistState::Saved(snapshot.id().into()));
    let daemon = host.daemon().await;
    assert!(is_current(&daemon, "t", &left));
    let template = daemon.snapshots.template("t").await.unwrap();
    assert_eq!((template.pid, template.snapshot().as_deref()), (left.monitor.pid, Some(snapshot.id())));
    daemon.stop().await;
    assert!(left.monitor.runs());
}

#[tokio::test]
async fn an_adopted_template_of_an_earlier_snapshot_with_its_tag_lives_as_long_as_its_children() {
    let host = FakeHost::new();
    host.store("t", |_| {});
    let left = host.leave_template("t", PersistState::Saved("an earlier one".into()));
    let child = host.leave_child(&left);
    let idle = host.leave_template("t", PersistState::Saved("another one".into()));
    let daemon = host.daemon().await;
    assert!(daemon.snapshots.get("t").unwrap().current().is_none());
    eventually("the end of the one that has no children", || !idle.monitor.runs()).await;
    assert!(left.monitor.runs() && child.monitor.runs());
    daemon.registry.delete(&child.id).unwrap();
    eventually("the end of the other", || !left.monitor.runs() && !left.folder.exists()).await;
}

#[tokio::test]
async fn a_template_whose_process_is_gone_is_removed_at_adoption() {
    let host = FakeHost::new();
    let snapshot = host.store("t", |_| {});
    let left = host.leave_template("t", PersistState::Saved(snapshot.id().into()));
    left.monitor.die();
    let daemon = host.daemon().await;
    assert!(!left.folder.exists());
    let entry = daemon.snapshots.get("t").unwrap();
    assert!(entry.current().is_none() && entry.snapshot().is_ok());
}

#[tokio::test]
async fn a_half_made_template_is_ended_at_adoption() {
    let host = FakeHost::new();
    let (known, unseen) = (
        host.leave_template("t", PersistState::Forgotten),
        host.leave_template("t", PersistState::Forgotten),
    );
    for left in [&known, &unseen] {
        std::fs::remove_file(left.folder.join(crate::snapshot::template::RECORD)).unwrap();
    }
    // Forked, and its process not recorded: its socket leads to it.
    std::fs::remove_file(unseen.folder.join(crate::host::process::RECORD)).unwrap();
    let _daemon = host.daemon().await;
    for left in [&known, &unseen] {
        assert!(!left.monitor.runs() && !left.folder.exists());
    }
    assert_eq!(unseen.monitor.requests(), [Request::Stop]);
    assert!(known.monitor.requests().is_empty());
}

#[tokio::test]
async fn a_process_that_is_no_template_or_does_not_answer_is_ended_at_adoption() {
    let host = FakeHost::with(|config| config.timing.call = Duration::from_millis(200));
    let liar = host.leave_template("t", PersistState::Forgotten);
    liar.monitor.script(|request| match request {
        Request::Status => {
            let role = forkd_protocol::control::Role::Sandbox;
            Act::Answer(Reply::Status(forkd_protocol::control::Status { role, running: true, ready: true }))
        }
        _ => Act::Execute,
    });
    let mute = host.leave_template("t", PersistState::Forgotten);
    mute.monitor.script(|_| Act::Hang);
    let _daemon = host.daemon().await;
    for left in [&liar, &mute] {
        assert!(!left.monitor.runs() && !left.folder.exists());
    }
}

#[tokio::test]
async fn of_two_templates_with_one_lineage_number_one_is_ended_at_adoption() {
    let host = FakeHost::new();
    let one = host.leave_template("a", unsaved(1, None));
    let two = host.leave_template("b", unsaved(1, None));
    let about = crate::snapshot::template::TemplateSpec { lineage: one.about.lineage, ..two.about.clone() };
    records::write(&TemplateRecord { about, standing: unsaved(1, None) }, &two.folder).unwrap();
    let _daemon = host.daemon().await;
    assert!(one.monitor.runs() != two.monitor.runs(), "one user for one lineage");
}

#[tokio::test]
async fn a_template_whose_record_is_unreadable_is_kept_and_its_tag_is_taken() {
    let host = FakeHost::new();
    let left = host.leave_template("t", unsaved(1, None));
    let path = left.folder.join(crate::snapshot::template::RECORD);
    let text = std::fs::read_to_string(&path).unwrap().replacen("\"version\":1", "\"version\":99", 1);
    std::fs::write(&path, &text).unwrap();
    let daemon = host.daemon().await;
    let entry = daemon.snapshots.get("t").unwrap();
    assert!(matches!(entry.state(), SnapshotState::Unknown(_)));
    assert_eq!(entry.snapshot().unwrap_err().code(), Code::StateUnknown);
    daemon.stop().await;
    assert!(left.monitor.runs() && left.monitor.requests().is_empty());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), text);

    let daemon = host.daemon().await;
    daemon.snapshots.remove("t", crate::snapshot::registry::Removal::Plain).await.unwrap();
    eventually("its end, when a client asks", || !left.monitor.runs() && !left.folder.exists()).await;
}

#[tokio::test]
async fn a_branch_that_was_not_on_disk_is_saved_after_adoption() {
    let host = FakeHost::new();
    let left = host.leave_template("b", unsaved(1_700_000_000, None));
    let daemon = host.daemon().await;
    assert!(is_current(&daemon, "b", &left), "children can be forked meanwhile");
    let snapshot = saved(&daemon, "b").await;
    assert_eq!(snapshot.manifest().created_at_unix, 1_700_000_000);
    assert_eq!(snapshot.manifest().branched_from.as_deref(), Some("sbsource"));
    let recorded = || TemplateRecord::read(&left.folder).read().unwrap().standing;
    eventually("the note", || recorded() == PersistState::Saved(snapshot.id().into())).await;
}

/// The record with the later time is that of the branch the other one came from: somebody set the clock back.
#[tokio::test]
async fn unfinished_saves_are_resumed_parents_first_whatever_their_clocks_say() {
    let host = FakeHost::new();
    let oldest = host.leave_template_as("tpc", "c", unsaved(300, None));
    let middle = host.leave_template_as("tpb", "b", unsaved(200, Some(("c", "tpc"))));
    let newest = host.leave_template_as("tpa", "a", unsaved(100, Some(("b", "tpb"))));
    let order: Arc<Mutex<Vec<&str>>> = Arc::default();
    for (tag, left) in [("a", &newest), ("b", &middle), ("c", &oldest)] {
        let order = order.clone();
        left.monitor.script(move |request| {
            if matches!(request, Request::Save(_)) {
                order.lock().unwrap().push(tag);
            }
            Act::Execute
        });
    }
    let daemon = host.daemon().await;
    let branch = |tag: &str| daemon.snapshots.get(tag).unwrap().branch();
    let parent = |tag: &str| branch(tag).map(|it| it.parent.as_ref().map(|parent| parent.tag.clone()));
    // Unless it is on disk already.
    assert!(matches!(parent("a").as_ref().map(Option::as_deref), None | Some(Some("b"))));
    assert!(matches!(parent("b").as_ref().map(Option::as_deref), None | Some(Some("c"))));
    let (a, b, c) = (saved(&daemon, "a").await, saved(&daemon, "b").await, saved(&daemon, "c").await);
    assert_eq!(*order.lock().unwrap(), ["c", "b", "a"]);
    assert_eq!((a.depth(), b.depth(), c.depth()), (c.depth() + 2, c.depth() + 1, c.depth()));
    let over = |snapshot: &forkd_store::Snapshot| snapshot.manifest().parent.clone().map(|it| it.id);
    assert_eq!((over(&a).as_deref(), over(&b).as_deref(), over(&c)), (Some(b.id()), Some(c.id()), None));
}

#[tokio::test]
async fn unfinished_saves_over_one_that_is_on_disk_are_differences_to_it() {
    let host = FakeHost::new();
    let snapshot = host.store("p", |_| {});
    let parent = host.leave_template_as("tpp", "p", PersistState::Saved(snapshot.id().into()));
    let _child = host.leave_template_as("tpc", "c", unsaved(2, Some(("p", "tpp"))));
    let daemon = host.daemon().await;
    let saved = saved(&daemon, "c").await;
    assert_eq!(saved.manifest().parent.as_ref().map(|it| it.id.as_str()), Some(snapshot.id()));
    assert!(is_current(&daemon, "p", &parent));
}

#[tokio::test]
async fn unfinished_saves_in_a_circle_are_given_up() {
    let host = FakeHost::new();
    let one = host.leave_template_as("tpa", "a", unsaved(1, Some(("b", "tpb"))));
    let two = host.leave_template_as("tpb", "b", unsaved(2, Some(("a", "tpa"))));
    let honest = host.leave_template_as("tpc", "c", unsaved(3, None));
    let daemon = host.daemon().await;
    saved(&daemon, "c").await;
    for tag in ["a", "b"] {
        assert_eq!(daemon.snapshots.get(tag).unwrap_err().code(), Code::SnapshotNotFound);
    }
    eventually("the end of those in the circle", || !one.monitor.runs() && !two.monitor.runs()).await;
    assert!(honest.monitor.runs());
}

#[tokio::test]
async fn a_branch_that_is_on_disk_already_is_not_saved_again_after_adoption() {
    let host = FakeHost::new();
    let snapshot = host.store("b", |_| {});
    let left = host.leave_template("b", unsaved(1, None));
    let daemon = host.daemon().await;
    assert!(is_current(&daemon, "b", &left));
    let recorded = TemplateRecord::read(&left.folder).read().unwrap().standing;
    assert_eq!(recorded, PersistState::Saved(snapshot.id().into()));
    assert_eq!(left.monitor.times(|request| matches!(request, Request::Save(_))), 0);
}

#[tokio::test]
async fn an_adopted_branch_has_the_owner_of_its_record() {
    let host = FakeHost::new();
    let PersistState::Unsaved(record) = unsaved(1, None) else { unreachable!() };
    let anns = crate::snapshot::branch_job::BranchRecord { owner: Some("ann".into()), ..*record };
    let _left = host.leave_template("b", PersistState::Unsaved(Box::new(anns)));
    let daemon = host.daemon().await;
    assert_eq!(daemon.snapshots.get("b").unwrap().owner(), "ann");
    saved(&daemon, "b").await;
    // The database is told before anything is on disk.
    assert_eq!(host.database.snapshot_owners().unwrap().get("b").map(String::as_str), Some("ann"));
}

#[tokio::test]
async fn a_save_that_fails_twice_after_adoption_is_reported_and_its_template_stays() {
    let host = FakeHost::new();
    let left = host.leave_template("b", unsaved(1, None));
    left.monitor.script(|request| match request {
        Request::Save(_) => Act::Answer(Reply::Error { message: "not today".into() }),
        _ => Act::Execute,
    });
    let daemon = host.daemon().await;
    let entry = daemon.snapshots.get("b").unwrap();
    let error = entry.wait_done().await.unwrap_err();
    assert!(error.to_string().contains("not today"), "{error}");
    assert_eq!(left.monitor.times(|request| matches!(request, Request::Save(_))), 2);
    assert!(matches!(entry.state(), SnapshotState::Failed { job: Some(_), .. }));
    assert!(is_current(&daemon, "b", &left), "what it holds can still be forked");
}

#[tokio::test]
async fn a_daemon_that_stops_while_it_saves_leaves_the_branch_to_the_next_one() {
    let host = FakeHost::new();
    let left = host.leave_template("b", unsaved(1, None));
    left.monitor.script(|request| match request {
        Request::Save(_) => Act::Hang,
        _ => Act::Execute,
    });
    let daemon = host.daemon().await;
    let asked = || left.monitor.times(|request| matches!(request, Request::Save(_)));
    eventually("the saver", || asked() == 1).await;
    daemon.stop().await;
    assert!(matches!(TemplateRecord::read(&left.folder).read().unwrap().standing, PersistState::Unsaved(_)));
    assert!(left.monitor.runs());
    left.monitor.script(|_| Act::Execute);
    let daemon = host.daemon().await;
    saved(&daemon, "b").await;
}

#[tokio::test]
async fn folders_that_are_no_templates_are_left_alone_at_adoption() {
    let host = FakeHost::new();
    let folder = host.template_folder("lost+found");
    let _daemon = host.daemon().await;
    assert!(folder.exists());
}
