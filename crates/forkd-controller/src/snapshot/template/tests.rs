//! Templates played by a thread over a real socket, with real processes as children. What a real
//! template does is tested with real guests.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use forkd_protocol::control::{Channel, Event, FdRef, Message, Reply};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::*;
use crate::host::lineage::Lineages;
use crate::testing::fake_host::bare_guest;
use crate::testing::fake_monitor::{Act, FakeMonitor};
use crate::testing::fake_process::runs;

/// A template of the test's own.
pub(crate) struct Fake {
    template: Option<Arc<Template>>,
    monitor: FakeMonitor,
    folder: tempfile::TempDir,
    /// How many events of its flood were taken.
    flooded: Arc<AtomicUsize>,
}

impl Fake {
    pub(crate) async fn start() -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("tp");
        std::fs::create_dir(&place).unwrap();
        let (monitor, started) = FakeMonitor::launched_in("tp", &place, Role::Template).await;
        let flooded = Arc::new(AtomicUsize::new(0));
        let taken = flooded.clone();
        monitor.script(move |request| act(request, &taken));
        let cleanup_queue = CleanupQueue::new();
        let lineages = Lineages::new(4, u32::MAX - 10, cleanup_queue.clone());
        let lineage = lineages.begin("template-tests").unwrap();
        let (cgroup, guest) = (lineage.name.clone(), bare_guest());
        let about = TemplateSpec {
            tag: "t".into(),
            source: MemorySource::Memory,
            lineage: lineage.slot,
            cgroup,
            guest,
            fork: None,
        };
        let plan = TemplateParts { id: "tp".into(), folder: place, about, lineage, cleanup_queue };
        let template = Some(Template::new(plan, started).unwrap());
        Fake { template, monitor, folder, flooded }
    }

    pub(crate) fn template(&self) -> Arc<Template> {
        self.template.clone().unwrap()
    }

    /// What it was told to forget, in order.
    fn acknowledged(&self) -> Vec<String> {
        let told = self.monitor.requests().into_iter().filter_map(|request| match request {
            Request::Acknowledge { children } => Some(children),
            _ => None,
        });
        told.flatten().collect()
    }

    async fn fork(&self, name: &str) -> PendingChild {
        let (template, name) = (self.template(), name.to_owned());
        tokio::task::spawn_blocking(move || {
            let config = ForkConfig {
                child: name,
                control: FdRef(0),
                console: FdRef(0),
                console_limit: 0,
                layers: Vec::new(),
                tap: None,
                vsock: None,
                cgroup: None,
            };
            template.fork(config, Vec::new())
        })
        .await
        .unwrap()
    }
}

/// What it does goes by the name of the child that it is to fork. Savers are never answered.
fn act(request: &Request, flooded: &Arc<AtomicUsize>) -> Act {
    let Request::Fork(config) = request else {
        return if matches!(request, Request::Save(_)) { Act::Hang } else { Act::Execute };
    };
    let refused = |message: &str| Message::Reply(Reply::Error { message: message.into() });
    let flooded = flooded.clone();
    // For as long as the daemon listens, and reading nothing.
    let flood = move |control: &Channel, pause: Duration, event: &dyn Fn(usize) -> Message| {
        while control.send(&event(flooded.load(Ordering::SeqCst)), &[]).is_ok() {
            flooded.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(pause);
        }
    };
    match config.child.as_str() {
        "quit" => Act::HangUp,
        name if name.starts_with("mute") => Act::Hang,
        name if name.starts_with("refused") => {
            Act::Answer(Reply::Error { message: format!("no {}", config.child) })
        }
        name if name.starts_with("slow") => {
            std::thread::sleep(Duration::from_millis(300));
            Act::Execute
        }
        // Gives the answer that it owes, so that it is not ended for silence.
        "long-name" => Act::Say(vec![refused("no"), end_of("x".repeat(10_000))]),
        "forgotten" => {
            let strays = (0..100).map(|number| end_of(format!("stray-{number}")));
            Act::Say(strays.chain([refused("no")]).collect())
        }
        // Tells of children that do not exist.
        "flood" => Act::Play(Box::new(move |control| {
            flood(control, Duration::ZERO, &|number| end_of(format!("stray-{number}")));
        })),
        // Gives the answer that it owes, and then tells of what only sandboxes tell.
        "answered-flood" => Act::Play(Box::new(move |control| {
            let _ = control.send(&refused("no"), &[]);
            flood(control, Duration::ZERO, &|_| Message::Event(Event::Ready));
        })),
        // The same as a flood, but slowly.
        "drip" => Act::Play(Box::new(move |control| {
            flood(control, Duration::from_millis(100), &|_| end_of("stray".into()));
        })),
        "imposter" => {
            let pidfd = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
            Act::AnswerWith(Reply::Forked { pid: 1 }, vec![pidfd])
        }
        _ => Act::Execute,
    }
}

/// The news that the child `child` has ended.
fn end_of(child: String) -> Message {
    Message::Event(Event::ChildEnded { child, status: WaitStatus::Exited(0) })
}

async fn eventually(what: &str, mut check: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !check() {
        assert!(begun.elapsed() < Duration::from_secs(20), "gave up waiting: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_fork_is_an_error_for_that_child_alone() {
    let fake = Fake::start().await;
    let mut asked = Vec::new();
    for name in ["one", "refused-two", "three"] {
        asked.push(fake.fork(name).await);
    }
    let mut results = Vec::new();
    for asked in asked {
        results.push(asked.forked.await.unwrap());
    }
    assert!(runs(results[0].as_ref().unwrap().pid));
    assert!(results[1].as_ref().unwrap_err().to_string().contains("no refused-two"));
    assert!(runs(results[2].as_ref().unwrap().pid));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_owes_an_answer_for_too_long_is_ended_and_its_requests_fail() {
    let fake = Fake::start().await;
    // More than its queue takes: all of them are told.
    let names: Vec<String> = (0..QUEUE + 8).map(|index| format!("mute-{index}")).collect();
    for asked in futures_util::future::join_all(names.iter().map(|name| fake.fork(name))).await {
        assert!(!matches!(asked.forked.await, Ok(Ok(_))));
    }
    assert!(!fake.template().is_alive());
    eventually("its end", || !runs(fake.template().pid)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_without_a_waiter_is_killed_when_it_comes() {
    let fake = Fake::start().await;
    drop(fake.fork("slow").await);
    let next = fake.fork("next").await.forked.await.unwrap().unwrap();
    assert!(runs(next.pid), "the others do not suffer");
    let template = fake.template().pid;
    eventually("the unwanted child's end", || {
        let unwanted = std::fs::read_dir("/proc").unwrap().flatten().filter(|entry| {
            let pid = entry.file_name().to_string_lossy().parse::<i32>().unwrap_or(0);
            pid != next.pid && runs(pid) && crate::host::process::parent(pid) == Some(template)
        });
        unwanted.count() == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_sends_another_process_as_its_child_is_not_believed() {
    let fake = Fake::start().await;
    let asked = fake.fork("imposter").await;
    assert!(asked.forked.await.is_err(), "nothing came of it");
    let template = fake.template();
    eventually("the end of the template", || !template.is_alive()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_sends_something_it_was_not_handed_as_its_disk_is_ended() {
    let pipe = |_: &Fake| OwnedFd::from(std::io::pipe().unwrap().0);
    let foreign = |fake: &Fake| crate::host::disk_layer::layer(fake.folder.path()).unwrap();
    for wrong in [pipe, foreign] {
        let fake = Fake::start().await;
        let template = fake.template();
        let handed = template.lineage.layer(fake.folder.path()).unwrap();
        fake.monitor.add_layer(handed);
        let sent = template.layers().await.unwrap();
        let mode = rustix::fs::fcntl_getfl(&sent[0][0]).unwrap() & rustix::fs::OFlags::RWMODE;
        assert_eq!(mode, rustix::fs::OFlags::RDONLY);
        fake.monitor.add_layer(wrong(&fake));
        assert!(template.layers().await.is_err());
        eventually("its end", || !template.is_alive() && !runs(template.pid)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_exit_status_of_a_child_is_kept_until_it_is_recorded() {
    let fake = Fake::start().await;
    let asked = fake.fork("brief").await;
    eventually("its child", || fake.monitor.child("brief").is_some()).await;
    fake.monitor.child("brief").unwrap().die();
    assert_eq!(asked.ended.await.unwrap(), WaitStatus::Signaled(9));
    tokio::time::sleep(Duration::from_millis(200)).await;
    assert!(fake.acknowledged().is_empty(), "not before");
    fake.template().acknowledge("brief");
    eventually("the first", || fake.acknowledged() == ["brief"]).await;
    // One that nobody waits for any more when it ends need not be kept.
    drop(fake.fork("slow-brief").await);
    eventually("the second", || fake.acknowledged() == ["brief", "slow-brief"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_sends_endless_events_of_children_is_ended() {
    for how in ["long-name", "flood", "answered-flood", "drip"] {
        let fake = Fake::start().await;
        assert!(!matches!(fake.fork(how).await.forked.await, Ok(Ok(_))), "{how}");
        let template = fake.template();
        eventually("its end", || !template.is_alive() && !runs(template.pid)).await;
        let flooded = fake.flooded.load(Ordering::SeqCst);
        // A flood is ended for its number: what the daemon takes, and what fits into the socket. One that drips is
        // ended before that, for its silence: events are no answers.
        let most = if how == "drip" { connection::MAX_STRAYS } else { 8 * connection::MAX_STRAYS };
        assert!(flooded < most, "{how}: {flooded} events were taken");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_of_children_the_daemon_does_not_know_are_acknowledged() {
    let fake = Fake::start().await;
    assert!(fake.fork("forgotten").await.forked.await.unwrap().is_err());
    let strays: Vec<String> = (0..100).map(|number| format!("stray-{number}")).collect();
    eventually("all of them", || fake.acknowledged() == strays).await;
    assert!(fake.fork("one").await.forked.await.unwrap().is_ok(), "it goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_template_fails_what_is_asked_of_it_and_its_folder_goes_with_the_last_handle() {
    let mut fake = Fake::start().await;
    let (child, pid) = (fake.fork("one").await, fake.template().pid);
    assert!(child.forked.await.unwrap().is_ok());
    let asked = fake.fork("quit").await;
    assert!(asked.forked.await.is_err(), "the question is dropped");
    assert!(child.ended.await.is_err(), "how its children end is unknown");
    let template = fake.template();
    eventually("the news", || !template.is_alive()).await;
    assert!(fake.fork("late").await.forked.await.is_err());
    eventually("its process's end", || !runs(pid)).await;
    let folder = fake.folder.path().join("tp");
    assert!(folder.exists(), "a child still has a handle");
    fake.template.take();
    drop(template);
    eventually("its folder's end", || !folder.exists()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_handle_ends_the_process_unless_it_was_left() {
    for left in [false, true] {
        let mut fake = Fake::start().await;
        let (pid, folder) = (fake.template().pid, fake.folder.path().join("tp"));
        fake.template().record(PersistState::Saved("7".into())).unwrap();
        if left {
            fake.template().leave();
        }
        fake.template.take();
        if left {
            tokio::time::sleep(Duration::from_millis(300)).await;
            assert!(runs(pid) && folder.exists());
            assert_eq!(TemplateRecord::read(&folder).read().unwrap().about.tag, "t");
            rustix::process::kill_process(Pid::from_raw(pid).unwrap(), rustix::process::Signal::KILL)
                .unwrap();
        } else {
            eventually("its end", || !runs(pid) && !folder.exists()).await;
        }
    }
}
