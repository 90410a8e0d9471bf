//! The changes of a snapshot's state: those of the diagram happen, with their events; all others change nothing.

use std::sync::Mutex;
use std::time::Duration;

use forkd_api::EventKind::{SnapshotFailed, SnapshotReady};

use super::*;
use crate::snapshot::branch_job::Mode;
use crate::snapshot::create::{From, SnapshotSpec};
use crate::snapshot::template::TemplateRecord;
use crate::snapshot::unknown::Unread;
use crate::testing::fake_host::{Daemon, FakeHost, bare_guest};

const NAMES: [&str; 7] = ["creating", "branching", "saving", "left", "ready", "failed", "unknown"];

fn name(state: &SnapshotState) -> &'static str {
    match state {
        SnapshotState::Creating(_) => "creating",
        SnapshotState::Branching(_) => "branching",
        SnapshotState::Saving(_) => "saving",
        SnapshotState::Left(_) => "left",
        SnapshotState::Ready(_) => "ready",
        SnapshotState::Failed { .. } => "failed",
        SnapshotState::Unknown(_) => "unknown",
    }
}

fn branch_job() -> Arc<BranchJob> {
    Arc::new(BranchJob::new("t".into(), "tp".into(), "sbone".into(), bare_guest(), Mode::Full))
}

fn create_job() -> Arc<CreateJob> {
    let (from, warm_command, warm_python) = (From::Image("python".into()), Vec::new(), None);
    let spec = SnapshotSpec {
        tag: "t".into(),
        from,
        vcpus: 1,
        mem_mib: 64,
        network: false,
        warm_command,
        warm_python,
    };
    Arc::new(CreateJob::new(spec))
}

fn broken() -> Error {
    Error::new(Code::GuestFailed, "the saver failed")
}

/// A daemon with one snapshot on disk.
struct Setup {
    host: FakeHost,
    daemon: Daemon,
    stored: Snapshot,
}

impl Setup {
    async fn new() -> Self {
        let host = FakeHost::new();
        let stored = host.store("stored", |_| {});
        let daemon = host.daemon().await;
        Setup { host, daemon, stored }
    }

    fn state(&self, name: &str) -> SnapshotState {
        match name {
            "creating" => SnapshotState::Creating(create_job()),
            "branching" => SnapshotState::Branching(branch_job()),
            "saving" => SnapshotState::Saving(branch_job()),
            "left" => SnapshotState::Left(branch_job()),
            "ready" => SnapshotState::Ready(Box::new(self.stored.clone())),
            "failed" => {
                SnapshotState::Failed { error: broken(), job: Some(SnapshotJob::Branch(branch_job())) }
            }
            _ => {
                let folder = self.host.template_folder("tpunknown");
                let unread =
                    Unread { id: "tpunknown".into(), folder, why: "it is torn".into(), identity: None };
                SnapshotState::Unknown(UnknownTemplate::new(unread, &self.daemon.host.lineages))
            }
        }
    }

    fn entry(&self, name: &str) -> Arc<Entry> {
        Entry::new("t", "ann", self.state(name), self.daemon.host.telemetry.clone())
    }

    /// The events so far, and what each one says besides its kind.
    fn events(&self) -> Vec<(EventKind, Option<String>, Option<String>)> {
        let events = self.daemon.events();
        let events = events.iter().filter(|event| event.about.snapshot.as_deref() == Some("t"));
        events.map(|event| (event.kind, event.about.sandbox.clone(), event.about.detail.clone())).collect()
    }
}

#[tokio::test]
async fn the_state_changes_only_along_the_arrows_of_the_diagram() {
    let setup = Setup::new().await;
    let (ready, failed) = (Some(SnapshotReady), Some(SnapshotFailed));
    let arrows = [
        ("creating", "ready", ready),
        ("creating", "failed", failed),
        ("branching", "saving", None),
        ("branching", "failed", failed),
        ("saving", "ready", ready),
        ("saving", "failed", failed),
        ("saving", "left", None),
    ];
    for from in NAMES {
        for to in ["saving", "ready", "failed", "left"] {
            let entry = setup.entry(from);
            let mut seen = entry.state.subscribe();
            let before = setup.events().len();
            match to {
                "saving" => entry.saving(),
                "ready" => entry.ready(setup.stored.clone()),
                "failed" => entry.fail(broken()),
                _ => entry.leave_to_next_daemon(),
            }
            let arrow = arrows.iter().find(|(a, b, _)| (*a, *b) == (from, to));
            let (now, event) = arrow.map_or((from, None), |(_, to, event)| (*to, *event));
            assert_eq!(name(&entry.state()), now, "{from} to {to}");
            assert_eq!(seen.has_changed().unwrap(), arrow.is_some(), "{from} to {to}");
            seen.mark_unchanged();
            let emitted: Vec<EventKind> = setup.events()[before..].iter().map(|event| event.0).collect();
            assert_eq!(emitted, event.into_iter().collect::<Vec<_>>(), "{from} to {to}");
        }
    }
}

#[tokio::test]
async fn an_event_names_the_source_of_the_branch_and_the_reason_of_the_failure() {
    let setup = Setup::new().await;
    let (failing, stored) = (setup.entry("saving"), setup.entry("saving"));
    failing.fail(broken());
    stored.ready(setup.stored.clone());
    stored.removed();
    let source = Some("sbone".to_owned());
    assert_eq!(
        setup.events(),
        [
            (SnapshotFailed, source.clone(), Some("the saver failed".into())),
            (SnapshotReady, source, None),
            // The branch is over: the snapshot does not depend on its source.
            (EventKind::SnapshotRemoved, None, None),
        ]
    );
}

#[tokio::test]
async fn the_first_failure_is_the_one_that_counts() {
    let setup = Setup::new().await;
    let entry = setup.entry("saving");
    entry.fail(broken());
    entry.fail(Error::new(Code::Cancelled, "too late"));
    entry.ready(setup.stored.clone());
    assert_eq!(entry.wait_done().await.unwrap_err().code(), Code::GuestFailed);
    assert_eq!(entry.snapshot().unwrap_err().code(), Code::SnapshotFailed);
}

/// Whether `wait` returns at once, and with which error.
async fn outcome(wait: impl Future<Output = Result<()>>) -> Option<std::result::Result<(), Code>> {
    let waited = tokio::time::timeout(Duration::ZERO, wait).await.ok()?;
    Some(waited.map_err(|error| error.code()))
}

#[tokio::test]
async fn each_state_answers_the_requests_that_wait_for_the_job() {
    let setup = Setup::new().await;
    let (stopping, broken) = (Some(Err(Code::ShuttingDown)), Some(Err(Code::GuestFailed)));
    for (state, forkable, done) in [
        ("creating", None, None),
        ("branching", None, None),
        ("saving", Some(Ok(())), None),
        ("left", stopping, stopping),
        ("ready", Some(Ok(())), Some(Ok(()))),
        ("failed", broken, broken),
    ] {
        let entry = setup.entry(state);
        assert_eq!(outcome(entry.wait_forkable()).await, forkable, "{state}");
        assert_eq!(outcome(entry.wait_done()).await, done, "{state}");
    }
}

#[tokio::test]
async fn a_request_that_waits_learns_of_the_change() {
    let setup = Setup::new().await;
    let entry = setup.entry("branching");
    let order = Mutex::new(Vec::new());
    let forkable = async {
        entry.wait_forkable().await.unwrap();
        order.lock().unwrap().push("forkable");
        entry.ready(setup.stored.clone());
    };
    let done = async {
        entry.wait_done().await.unwrap();
        order.lock().unwrap().push("done");
    };
    let change = async { entry.saving() };
    tokio::join!(done, forkable, change);
    assert_eq!(*order.lock().unwrap(), ["forkable", "done"]);
}

#[tokio::test]
async fn a_branch_that_waits_for_disk_space_holds_up_no_branch_of_it() {
    let setup = Setup::new().await;
    let entry = setup.entry("saving");
    let held_up = || {
        outcome(async {
            entry.wait_done_or_short_of_space().await;
            Ok(())
        })
    };
    assert_eq!(held_up().await, None);
    entry.branch().unwrap().set_shortage(Some(Error::no_room("the disk is full")));
    assert_eq!(held_up().await, Some(Ok(())));
}

#[tokio::test]
async fn the_record_of_the_template_follows_the_state() {
    let setup = Setup::new().await;
    let says = |name: &str, is_kept| match setup.state(name).record("ann".into(), is_kept) {
        None => "nothing".to_owned(),
        Some(PersistState::Unsaved(record)) => format!("unsaved of {}", record.owner.unwrap()),
        Some(PersistState::Saved(id)) if id == setup.stored.id() => "saved".to_owned(),
        Some(PersistState::Forgotten) => "forgotten".to_owned(),
        Some(other) => format!("{other:?}"),
    };
    for (name, kept, dropped) in [
        ("creating", "nothing", "nothing"),
        ("branching", "unsaved of ann", "forgotten"),
        ("saving", "unsaved of ann", "forgotten"),
        ("left", "unsaved of ann", "forgotten"),
        ("ready", "saved", "nothing"),
        ("failed", "unsaved of ann", "forgotten"),
        ("unknown", "nothing", "nothing"),
    ] {
        assert_eq!((says(name, true).as_str(), says(name, false).as_str()), (kept, dropped), "{name}");
    }
}

#[tokio::test]
async fn the_record_says_that_a_branch_is_on_disk_before_a_client_learns_of_it() {
    let setup = Setup::new().await;
    let live = setup.daemon.live("b").await;
    let recorded = || TemplateRecord::read(live.template.folder()).read().map(|record| record.standing);
    live.entry.write_record(&live.template).unwrap();
    assert!(matches!(recorded(), Some(PersistState::Unsaved(_))));
    live.entry.ready(setup.stored.clone());
    assert_eq!(recorded(), Some(PersistState::Saved(setup.stored.id().into())));
    assert_eq!(live.template.snapshot().as_deref(), Some(setup.stored.id()));
    // The record of a snapshot on disk stays when the entry lets go of the template.
    live.entry.forget();
    assert_eq!(recorded(), Some(PersistState::Saved(setup.stored.id().into())));
}

#[tokio::test]
async fn a_discarded_branch_is_not_listed_when_its_client_gets_the_error() {
    let setup = Setup::new().await;
    let live = setup.daemon.live("b").await;
    let snapshots = &setup.daemon.snapshots;
    let (waited, ()) = tokio::join!(live.entry.wait_done(), snapshots.discard(&live.entry, broken()));
    assert_eq!(waited.unwrap_err().code(), Code::GuestFailed);
    assert_eq!(snapshots.get("b").unwrap_err().code(), Code::SnapshotNotFound);
    let kinds: Vec<EventKind> = setup.daemon.events().iter().map(|event| event.kind).collect();
    assert_eq!(kinds, [EventKind::SnapshotWriting, SnapshotFailed, EventKind::SnapshotRemoved]);
    let record = TemplateRecord::read(live.template.folder()).read().unwrap();
    assert_eq!(record.standing, PersistState::Forgotten);
}
