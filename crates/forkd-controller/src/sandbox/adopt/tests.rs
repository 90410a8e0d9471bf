//! What a daemon takes over of the sandboxes that an earlier one left: their monitors are fake ones with real
//! processes and sockets.

use forkd_api::EventKind;
use forkd_protocol::control::{Child, Reply, Request};
use forkd_store::{Change, MadeSandbox, Quota};

use super::*;
use crate::error::Code;
use crate::snapshot::template::PersistState;
use crate::testing::fake_guest::{FakeGuest, eventually, serve_guest};
use crate::testing::fake_host::{FakeHost, bare_spec, end_of, publish, runs};
use crate::testing::fake_monitor::Act;
use crate::testing::fake_process::{self, Shell};

/// The names in the folder of all sandboxes.
fn folders(host: &FakeHost) -> Vec<String> {
    let folder = crate::host::run_dir::sandboxes(&host.config.run_dir);
    let entries = std::fs::read_dir(folder).unwrap().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

#[tokio::test]
async fn adoption_takes_over_a_child_with_its_process_and_its_template() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let mut left = host.leave_child(&template);
    left.amend(|record| {
        record.saved.deadline_unix = Some(4_000_000_000);
        record.created_nanos = 5;
        record.saved.workspace = Some("w".into());
        record.saved.history.branch_count = 3;
        record.saved.lifetime.labels.insert("team".into(), "x".into());
    });
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running), "{:?}", sandbox.phase());
    let runtime = sandbox.runtime();
    assert_eq!(runtime.pid, Some(left.monitor.pid as u32));
    assert_eq!(runtime.saved.deadline_unix, Some(4_000_000_000));
    assert_eq!((runtime.saved.workspace.as_deref(), runtime.saved.history.branch_count), (Some("w"), 3));
    assert_eq!(runtime.saved.lifetime.labels["team"], "x");
    assert_eq!((sandbox.created_at_unix(), sandbox.created_nanos()), (1_700_000_000, 5));
    assert_eq!(daemon.registry.children_of(&template.id), 1);
    assert!(left.monitor.runs() && template.monitor.runs());
    assert_eq!(sandbox.record().unwrap(), left.record);
}

#[tokio::test]
async fn adoption_emits_running_and_not_created() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    let daemon = host.daemon().await;
    assert!(matches!(daemon.registry.get(&left.id).unwrap().phase(), Phase::Running));
    assert_eq!(daemon.sandbox_events(), [(EventKind::SandboxRunning, None)]);
}

#[tokio::test]
async fn adoption_learns_the_end_of_a_child_from_its_template() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    template.monitor.end_child(&left.id, WaitStatus::Exited(7));
    let end = end_of(&sandbox).await;
    assert_eq!((end.reason.as_str(), end.detail.contains("status 7")), ("monitor_died", true), "{end:?}");
    eventually("the acknowledgement", || template.monitor.remembers().is_empty()).await;
}

#[tokio::test]
async fn adoption_lists_a_child_that_ended_meanwhile_and_lets_its_template_forget_it() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    std::fs::write(left.folder.join("console.log"), "last words").unwrap();
    template.monitor.end_child(&left.id, WaitStatus::Exited(7));
    eventually("its end", || !left.monitor.runs()).await;
    let daemon = host.daemon().await;
    let end = end_of(&daemon.registry.get(&left.id).unwrap()).await;
    assert_eq!(end.reason, "monitor_died");
    assert!(end.detail.contains("status 7") && end.detail.contains("no daemon watched"), "{end:?}");
    assert_eq!(end.console_tail, "last words");
    // What the next daemon finds.
    assert_eq!(End::read(&left.folder).read().unwrap(), *end);
    eventually("the acknowledgement", || template.monitor.remembers().is_empty()).await;
}

#[tokio::test]
async fn adoption_keeps_the_end_that_an_earlier_daemon_wrote_down() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    End::new("panicked", "its kernel panicked", "oops".into()).write(&left.folder).unwrap();
    template.monitor.end_child(&left.id, WaitStatus::Exited(1));
    eventually("its end", || !left.monitor.runs()).await;
    let daemon = host.daemon().await;
    let end = end_of(&daemon.registry.get(&left.id).unwrap()).await;
    assert_eq!((end.reason.as_str(), end.console_tail.as_str()), ("panicked", "oops"));
}

#[tokio::test]
async fn adoption_lists_a_booted_sandbox_whose_process_is_gone_as_ended_for_unknown_reasons() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    left.monitor.die();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "unknown");
    assert_eq!(sandbox.runtime().pid, None);
}

#[tokio::test]
async fn adoption_ends_a_half_made_sandbox_and_removes_its_folder() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    std::fs::remove_file(left.folder.join(crate::sandbox::RECORD)).unwrap();
    let daemon = host.daemon().await;
    assert_eq!(daemon.registry.get(&left.id).unwrap_err().code(), Code::SandboxNotFound);
    assert!(!left.monitor.runs());
    assert!(folders(&host).is_empty(), "{:?}", folders(&host));
}

#[tokio::test]
async fn adoption_ends_a_child_that_was_forked_and_not_recorded() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    std::fs::remove_file(left.folder.join(process::RECORD)).unwrap();
    let daemon = host.daemon().await;
    assert!(daemon.registry.list().is_empty());
    assert_eq!(left.monitor.requests(), [Request::Stop], "its socket leads to it");
    eventually("its end", || !left.monitor.runs() && folders(&host).is_empty()).await;
    eventually("the acknowledgement", || template.monitor.remembers().is_empty()).await;
}

#[tokio::test]
async fn adoption_of_a_paused_sandbox_finds_it_paused() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    left.monitor.stands_still();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused), "{:?}", sandbox.phase());
    assert!(!sandbox.waits_for_room());
    assert_eq!(daemon.sandbox_events(), [(EventKind::SandboxPaused, None)]);
    sandbox.go_on().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running));
}

#[tokio::test]
async fn adoption_of_a_sandbox_that_waits_for_room_on_the_disk_knows_why_it_is_paused() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    left.monitor.waits_for_room();
    let daemon = host.daemon().await;
    assert!(daemon.registry.get(&left.id).unwrap().waits_for_room());
    let told = daemon.sandbox_events();
    assert_eq!(told, [(EventKind::SandboxPaused, Some("host_disk_full".into()))]);
}

#[tokio::test]
async fn adoption_keeps_a_sandbox_whose_record_is_unreadable() {
    let host = FakeHost::new();
    for damaged in ["{\"version\":99,\"netns\":null}", "{\"netns\":null", ""] {
        let left = host.leave_booted();
        let path = left.folder.join(crate::sandbox::RECORD);
        std::fs::write(&path, damaged).unwrap();
        let daemon = host.daemon().await;
        let sandbox = daemon.registry.get(&left.id).unwrap();
        assert!(matches!(sandbox.phase(), Phase::Unknown(_)), "{damaged}: {:?}", sandbox.phase());
        assert_eq!(daemon.registry.known(&left.id).unwrap_err().code(), Code::StateUnknown);
        assert_eq!(sandbox.runtime().pid, Some(left.monitor.pid as u32));
        daemon.stop().await;
        assert!(left.monitor.runs(), "{damaged}: the next daemon may read it");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), damaged);
        left.monitor.die();
        std::fs::remove_dir_all(&left.folder).unwrap();
    }
}

#[tokio::test]
async fn adoption_keeps_a_sandbox_whose_process_record_is_unreadable_and_deletes_it_when_asked() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    std::fs::write(left.folder.join(process::RECORD), "?").unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Unknown(_)));
    // Its template knows which process it is.
    assert_eq!(sandbox.runtime().pid, Some(left.monitor.pid as u32));
    daemon.registry.delete(&left.id).unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
    eventually("its process's end", || !left.monitor.runs() && folders(&host).is_empty()).await;
}

#[tokio::test]
async fn adoption_removes_the_files_of_a_rollback_that_had_not_begun() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    let next = left.folder.join(rollback::NEXT);
    std::fs::create_dir(&next).unwrap();
    std::fs::write(next.join("console.log"), "").unwrap();
    let daemon = host.daemon().await;
    assert!(matches!(daemon.registry.get(&left.id).unwrap().phase(), Phase::Running));
    assert!(!next.exists());
}

#[tokio::test]
async fn adoption_lists_a_sandbox_whose_rollback_was_cut_off_with_that_end() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    // The old process is gone, the next one was forked and not recorded.
    let mut left = host.leave_child(&template);
    std::fs::remove_file(left.folder.join(process::RECORD)).unwrap();
    left.amend(|record| record.generation = 1);
    let end = End::new("rollback_failed", "the daemon was stopped", String::new());
    end.write(&left.folder).unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert_eq!(*end_of(&sandbox).await, end);
    assert_eq!(sandbox.child, format!("{}-1", left.id));
    assert!(!left.monitor.runs(), "what was half-made is ended");
    assert!(left.folder.exists());
}

#[tokio::test]
async fn adoption_forgets_the_end_of_a_rollback_whose_sandbox_lives() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    End::new("rollback_failed", "the daemon was stopped", String::new()).write(&left.folder).unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert!(!left.folder.join(END).exists());
    left.monitor.die();
    assert_ne!(end_of(&sandbox).await.reason, "rollback_failed");
}

#[tokio::test]
async fn adoption_goes_on_with_a_child_whose_template_is_gone() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    std::fs::remove_dir_all(&template.folder).unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert!(sandbox.resources().template.is_none());
    left.monitor.die();
    assert_eq!(end_of(&sandbox).await.reason, "unknown", "no process tells how it ended");
}

#[tokio::test]
async fn adoption_ends_a_child_without_a_folder_and_no_process_of_another_parent() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let stray = template.monitor.stray_child("sbstray");
    let (mut foreign, _shell) = Shell::start();
    let pid = foreign.id() as i32;
    let child = |name: &str, pid| Child { name: name.into(), pid, status: None };
    let children = vec![child("sbstray", stray.pid), child("sbforeign", pid)];
    template.monitor.script(move |request| match request {
        Request::Children => Act::Answer(Reply::Children { children: children.clone() }),
        _ => Act::Execute,
    });
    let daemon = host.daemon().await;
    assert!(daemon.registry.list().is_empty());
    eventually("its end", || !stray.runs()).await;
    let forgets = |request: &Request, name: &str| match request {
        Request::Acknowledge { children } => children.iter().any(|child| child == name),
        _ => false,
    };
    for name in ["sbstray", "sbforeign"] {
        eventually(name, || template.monitor.has_received(|request| forgets(request, name))).await;
    }
    assert!(fake_process::runs(pid), "the template's word alone ends nothing");
    foreign.kill().unwrap();
    foreign.wait().unwrap();
}

#[tokio::test]
async fn adoption_ends_a_sandbox_that_cannot_be_reached() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    std::fs::remove_file(left.folder.join("control.sock")).unwrap();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    assert_eq!(end_of(&sandbox).await.reason, "unknown");
    eventually("its process's end", || !left.monitor.runs()).await;
}

#[tokio::test]
async fn adoption_of_a_sandbox_that_answers_nothing_holds_up_no_daemon() {
    let host = FakeHost::with(|config| config.timing.call = Duration::from_millis(20));
    let (mute, left) = (host.leave_booted(), host.leave_booted());
    mute.monitor.script(|_| Act::Hang);
    let daemon = host.daemon().await;
    runs(&daemon.registry.get(&left.id).unwrap()).await;
    // Its guest may run all the same.
    runs(&daemon.registry.get(&mute.id).unwrap()).await;
    assert!(mute.monitor.runs());
}

#[tokio::test]
async fn adoption_leaves_folders_alone_that_are_no_sandboxes() {
    let host = FakeHost::new();
    let folder = host.sandbox_folder("lost+found");
    let daemon = host.daemon().await;
    assert!(daemon.registry.list().is_empty() && folder.exists());
}

#[tokio::test]
async fn adoption_counts_what_it_takes_over_towards_limits_and_quotas() {
    let host = FakeHost::with(|config| config.limits.max_sandboxes = 3);
    let (_left, ended) = (host.leave_booted(), host.leave_booted());
    ended.monitor.die();
    let daemon = host.daemon().await;
    let claim = bare_spec().claim();
    let too_many = daemon.registry.reserve(2, &claim, &Quota::default()).unwrap_err();
    assert_eq!(too_many.code(), Code::LimitReached);
    let quota = Quota { max_sandboxes: Some(2), ..Quota::default() };
    assert_eq!(daemon.registry.reserve(1, &claim, &quota).unwrap_err().code(), Code::QuotaExceeded);
    assert!(daemon.registry.reserve(1, &claim, &Quota::default()).is_ok());
}

#[tokio::test]
async fn adoption_notes_in_the_archive_how_those_that_are_gone_ended() {
    let host = FakeHost::new();
    let made = |id: &str, boot_id: &str| {
        Change::Made(MadeSandbox {
            id: id.into(),
            owner: "local".into(),
            boot_id: boot_id.into(),
            snapshot_tag: None,
            labels: Default::default(),
            created_at_unix: 1,
        })
    };
    let boot = process::boot_id();
    host.database.note_sandboxes(&[made("sblost", &boot), made("sbreboot", "an earlier boot")]).unwrap();
    let left = host.leave_booted();
    let daemon = host.daemon().await;
    let reason = async |id: &str| daemon.registry.archive.find(id).await.unwrap().unwrap();
    assert_eq!(reason("sblost").await.reason, "unknown");
    assert_eq!(reason("sbreboot").await.reason, "host_rebooted");
    assert_eq!(reason(&left.id).await.ended_at_unix, None);
}

#[tokio::test]
async fn adoption_thaws_the_processes_of_a_guest_with_an_agent() {
    let host = FakeHost::new();
    let mut left = host.leave_booted();
    left.amend(|record| record.spec.image = Some("py".into()));
    let guest = Arc::new(FakeGuest::default());
    let listener = tokio::net::UnixListener::bind(left.folder.join("vsock.sock")).unwrap();
    tokio::spawn(serve_guest(listener, guest.clone()));
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    runs(&sandbox).await;
    eventually("the thaw", || !guest.calls_of("Thaw").is_empty()).await;
}

#[tokio::test]
async fn adoption_by_daemon_after_daemon_keeps_the_same_process() {
    let host = FakeHost::new();
    let template = host.leave_template("t", PersistState::Forgotten);
    let left = host.leave_child(&template);
    for _ in 0..3 {
        let daemon = host.daemon().await;
        let sandbox = daemon.registry.get(&left.id).unwrap();
        assert!(matches!(sandbox.phase(), Phase::Running));
        daemon.stop().await;
        assert!(left.monitor.runs() && template.monitor.runs());
    }
    assert_eq!(left.monitor.times(|request| *request == Request::Stop), 0);
}

#[tokio::test]
async fn adoption_of_what_a_daemon_forked_itself() {
    let host = FakeHost::new();
    let first = host.daemon().await;
    let live = first.live("t").await;
    let (sandbox, monitor) = first.child(&live).await;
    let snapshot = publish(&first.snapshots.store, "t", |_| {});
    live.template.record(PersistState::Saved(snapshot.id().into())).unwrap();
    live.entry.ready(snapshot);
    let (id, pid) = (sandbox.id.clone(), live.template.pid);
    drop(sandbox);
    let fake = live.monitor;
    drop((live.template, live.entry));
    first.stop().await;
    assert!(monitor.runs() && fake.runs());
    let second = host.daemon().await;
    let sandbox = second.registry.get(&id).unwrap();
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(sandbox.resources().template.as_ref().map(|template| template.pid), Some(pid));
}

#[tokio::test]
async fn clients_can_delete_an_adopted_sandbox() {
    let host = FakeHost::new();
    let left = host.leave_booted();
    let daemon = host.daemon().await;
    let sandbox = daemon.registry.get(&left.id).unwrap();
    daemon.registry.delete(&left.id).unwrap();
    assert!(!left.folder.join(crate::sandbox::RECORD).exists(), "the next daemon does not find it again");
    assert_eq!(end_of(&sandbox).await.reason, "deleted");
    eventually("its folder's end", || !left.monitor.runs() && folders(&host).is_empty()).await;
}
