//! A thread plays the template over a real socket, with real processes as children. Tests with real guests
//! cover real templates.

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use forkd_protocol::control::{Channel, Event, FdRef, Message, Reply};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::*;
use crate::host::lineage::Lineages;
use crate::monitor::Launch;
use crate::testing::fake_process::{Shell, runs};

/// A fake template: its process is a shell, which starts a `sleep` for each line it reads and writes the pid
/// of the `sleep`. A thread answers the requests.
pub(crate) struct Fake {
    template: Option<Arc<Template>>,
    folder: tempfile::TempDir,
    /// The names of acknowledged children.
    acknowledged: std::sync::mpsc::Receiver<String>,
    /// What the fake sends as the layers of its disk.
    layers: Arc<Mutex<Vec<OwnedFd>>>,
    /// How many events of its flood the daemon took.
    flooded: Arc<AtomicUsize>,
}

impl Fake {
    pub(crate) fn start() -> Fake {
        let folder = tempfile::tempdir().unwrap();
        let place = folder.path().join("tp");
        std::fs::create_dir(&place).unwrap();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        rustix::io::ioctl_fionbio(&ours, true).unwrap();
        let (tell, acknowledged) = std::sync::mpsc::channel();
        let launch =
            Launch { id: "tp".into(), folder: place.clone(), vmm: PathBuf::new(), uid: None, door: None };
        let (process, shell) = Shell::start();
        let layers = Arc::new(Mutex::new(Vec::new()));
        let flooded = Arc::new(AtomicUsize::new(0));
        let (sent, taken) = (layers.clone(), flooded.clone());
        std::thread::spawn(move || play(Channel::new(theirs), shell, tell, &sent, &taken));
        let monitor = Monitor::started(launch, process, Channel::new(ours)).unwrap();
        let janitor = CleanupQueue::new();
        let lineages = Lineages::new(4, u32::MAX - 10, janitor.clone());
        let guest = GuestSpec {
            image: None,
            kernel: None,
            vcpus: 1,
            mem_size_mib: 64,
            network: false,
            python: None,
            guest_ports: Vec::new(),
        };
        let lineage = lineages.begin("template-tests").unwrap();
        let cgroup = lineage.name.clone();
        let about = TemplateSpec {
            tag: "t".into(),
            source: MemorySource::Memory,
            lineage: lineage.slot,
            cgroup,
            guest,
        };
        let plan = TemplateParts { id: "tp".into(), folder: place, about, lineage, janitor };
        let template = Some(Template::new(plan, monitor).unwrap());
        Fake { template, folder, acknowledged, layers, flooded }
    }

    pub(crate) fn template(&self) -> Arc<Template> {
        self.template.clone().unwrap()
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

/// Forks a `sleep` for each child. It refuses children called `refused…`; those with `brief` in their names
/// end at once, and those called `slow…` are answered late. For `quit` it hangs up; it never answers for `mute…`.
/// Other names make it send events of children that do not exist. Requests for savers are never answered.
fn play(
    channel: Channel,
    mut shell: Shell,
    acknowledged: std::sync::mpsc::Sender<String>,
    layers: &Mutex<Vec<OwnedFd>>,
    flooded: &AtomicUsize,
) {
    // For as long as the daemon listens, and without reading.
    let flood = |event: &dyn Fn(usize) -> Message| {
        while channel.send(&event(flooded.load(Ordering::SeqCst)), &[]).is_ok() {
            flooded.fetch_add(1, Ordering::SeqCst);
        }
    };
    let mut children = Vec::new();
    while let Ok(Some((request, _))) = channel.recv::<Request>() {
        match request {
            Request::Fork(config) if config.child == "quit" => break,
            Request::Fork(config) if config.child.starts_with("mute") => {}
            Request::Save(_) => {}
            // Gives the answer that it owes, so that the daemon does not end it for silence.
            Request::Fork(config) if config.child == "long-name" => {
                channel.send(&Message::Reply(Reply::Error { message: "no".into() }), &[]).unwrap();
                let _ = channel.send(&end_of("x".repeat(10_000)), &[]);
            }
            // Sends events of children that do not exist.
            Request::Fork(config) if config.child == "flood" => {
                flood(&|number| end_of(format!("stray-{number}")));
            }
            // Gives the answer that it owes, then sends events that only sandboxes send.
            Request::Fork(config) if config.child == "answered-flood" => {
                channel.send(&Message::Reply(Reply::Error { message: "no".into() }), &[]).unwrap();
                flood(&|_| Message::Event(Event::Ready));
            }
            // The same, but slowly.
            Request::Fork(config) if config.child == "drip" => {
                while channel.send(&end_of("stray".into()), &[]).is_ok() {
                    flooded.fetch_add(1, Ordering::SeqCst);
                    std::thread::sleep(Duration::from_millis(100));
                }
            }
            Request::Fork(config) if config.child == "forgotten" => {
                for number in 0..100 {
                    channel.send(&end_of(format!("stray-{number}")), &[]).unwrap();
                }
                channel.send(&Message::Reply(Reply::Error { message: "no".into() }), &[]).unwrap();
            }
            Request::Fork(config) if config.child.starts_with("refused") => {
                let message = format!("no {}", config.child);
                channel.send(&Message::Reply(Reply::Error { message }), &[]).unwrap();
            }
            Request::Fork(config) if config.child == "imposter" => {
                let us = rustix::process::getpid();
                let pidfd = pidfd_open(us, PidfdFlags::empty()).unwrap();
                let reply = Reply::Forked { pid: shell.fork().as_raw_nonzero().get() };
                channel.send(&Message::Reply(reply), &[pidfd.as_fd()]).unwrap();
            }
            Request::Fork(config) => {
                if config.child.starts_with("slow") {
                    std::thread::sleep(Duration::from_millis(300));
                }
                let pid = shell.fork();
                let pidfd = pidfd_open(pid, PidfdFlags::empty()).unwrap();
                let reply = Reply::Forked { pid: pid.as_raw_nonzero().get() };
                channel.send(&Message::Reply(reply), &[pidfd.as_fd()]).unwrap();
                if config.child.contains("brief") {
                    pidfd_send_signal(&pidfd, Signal::KILL).unwrap();
                    let ended = Event::ChildEnded { child: config.child, status: WaitStatus::Signaled(9) };
                    channel.send(&Message::Event(ended), &[]).unwrap();
                }
                children.push(pidfd);
            }
            Request::Acknowledge { children } => {
                children.into_iter().for_each(|child| drop(acknowledged.send(child)));
                channel.send(&Message::Reply(Reply::Acknowledged), &[]).unwrap();
            }
            Request::Layers => {
                let layers = layers.lock();
                let disks = vec![(0..layers.len()).map(FdRef).collect()];
                let fds: Vec<_> = layers.iter().map(AsFd::as_fd).collect();
                channel.send(&Message::Reply(Reply::Layers { disks }), &fds).unwrap();
            }
            other => panic!("{other:?}"),
        }
    }
    for child in children {
        let _ = pidfd_send_signal(&child, Signal::KILL);
    }
    // The shell would end with its input, but is to end only when the daemon ends it.
    std::mem::forget(shell);
}

/// The event that `child` has ended.
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
    let fake = Fake::start();
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
async fn a_template_that_owes_an_answer_for_too_long_is_ended_and_everybody_told() {
    let fake = Fake::start();
    // More than the queue takes: each of them gets an error.
    let names: Vec<String> = (0..QUEUE + 8).map(|index| format!("mute-{index}")).collect();
    for asked in futures_util::future::join_all(names.iter().map(|name| fake.fork(name))).await {
        assert!(!matches!(asked.forked.await, Ok(Ok(_))));
    }
    assert!(!fake.template().is_alive());
    eventually("its end", || !runs(fake.template().pid)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_child_nobody_waits_for_is_killed_when_it_comes() {
    let fake = Fake::start();
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
    let fake = Fake::start();
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
        let fake = Fake::start();
        let template = fake.template();
        let handed = template.lineage.layer(fake.folder.path()).unwrap();
        fake.layers.lock().push(handed);
        let sent = template.layers().await.unwrap();
        let mode = rustix::fs::fcntl_getfl(&sent[0][0]).unwrap() & rustix::fs::OFlags::RWMODE;
        assert_eq!(mode, rustix::fs::OFlags::RDONLY);
        fake.layers.lock().push(wrong(&fake));
        assert!(template.layers().await.is_err());
        eventually("its end", || !template.is_alive() && !runs(template.pid)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn how_a_child_ended_is_told_and_forgotten_only_when_it_is_recorded() {
    let fake = Fake::start();
    let asked = fake.fork("brief").await;
    assert_eq!(asked.ended.await.unwrap(), WaitStatus::Signaled(9));
    assert!(fake.acknowledged.recv_timeout(Duration::from_millis(200)).is_err(), "not before");
    fake.template().acknowledge("brief");
    assert_eq!(fake.acknowledged.recv_timeout(Duration::from_secs(10)).unwrap(), "brief");
    // A child whose caller is gone when it ends is acknowledged at once.
    drop(fake.fork("slow-brief").await);
    assert_eq!(fake.acknowledged.recv_timeout(Duration::from_secs(10)).unwrap(), "slow-brief");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_template_that_tells_of_children_without_end_is_ended() {
    for how in ["long-name", "flood", "answered-flood", "drip"] {
        let fake = Fake::start();
        assert!(!matches!(fake.fork(how).await.forked.await, Ok(Ok(_))), "{how}");
        let template = fake.template();
        eventually("its end", || !template.is_alive() && !runs(template.pid)).await;
        let flooded = fake.flooded.load(Ordering::SeqCst);
        // The daemon ends a flood for the number of events: those it takes, and those that fit into the socket. It
        // ends a drip earlier, for silence: events are no answers.
        let most = if how == "drip" { connection::MAX_STRAYS } else { 8 * connection::MAX_STRAYS };
        assert!(flooded < most, "{how}: {flooded} events were taken");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ends_of_children_the_daemon_does_not_know_are_acknowledged() {
    let fake = Fake::start();
    assert!(fake.fork("forgotten").await.forked.await.unwrap().is_err());
    for number in 0..100 {
        let next = fake.acknowledged.recv_timeout(Duration::from_secs(10));
        assert_eq!(next.unwrap(), format!("stray-{number}"));
    }
    assert!(fake.fork("one").await.forked.await.unwrap().is_ok(), "it goes on");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_template_fails_what_is_asked_of_it_and_its_folder_goes_with_the_last_handle() {
    let mut fake = Fake::start();
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
        let mut fake = Fake::start();
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
