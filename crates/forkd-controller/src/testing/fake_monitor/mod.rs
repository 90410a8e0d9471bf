//! A monitor that a thread of the test plays: it speaks the control protocol over a real socket, with descriptors,
//! and has a real process with real children. A test scripts its answers, and reads the requests it received.
//!
//! What a real monitor does is tested with real guests.

mod serve;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Child as Process;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forkd_protocol::control::{Channel, EndReason, Event, Message, Reply, Request, Role, VmEnd, WaitStatus};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serve::wait_for;
use tokio::runtime::Handle;

use crate::host::process::ProcessId;
use crate::monitor::{Launch, Monitor, control_socket};
use crate::testing::fake_guest::FakeGuest;
use crate::testing::fake_process::Shell;

/// For answers that come, on a busy computer too.
const TIMEOUT: Duration = Duration::from_secs(60);

/// What a fake monitor does about a request.
pub(crate) enum Act {
    /// What a real one does.
    Execute,
    Answer(Reply),
    AnswerWith(Reply, Vec<OwnedFd>),
    /// Several messages, and no answer if none of them is one.
    Say(Vec<Message>),
    /// What the test does with its end of the connection.
    Play(Box<dyn FnOnce(&Channel) + Send>),
    /// Nothing.
    Hang,
    /// It closes the connection.
    HangUp,
    /// Its process ends.
    Die,
}

type Script = Box<dyn FnMut(&Request) -> Act + Send>;

/// A fake monitor. The last handle that is dropped ends its process.
#[derive(Clone)]
pub(crate) struct FakeMonitor {
    pub(crate) pid: i32,
    shared: Arc<Shared>,
    _end: Arc<End>,
}

struct Shared {
    pidfd: OwnedFd,
    shell: Mutex<Shell>,
    /// If the test is its parent, and no daemon waits for it.
    process: Mutex<Option<Process>>,
    listener: Option<Arc<OwnedFd>>,
    script: Mutex<Script>,
    state: Mutex<State>,
    runtime: Handle,
}

struct State {
    role: Role,
    running: bool,
    /// Its guest has written to the ready port.
    ready: bool,
    /// Its guest waits for room on the host's disk.
    disk_full: bool,
    /// Whether the guests of its children do the same.
    children_are_ready: bool,
    /// What its branches do.
    branch_script: fn(&Request) -> Act,
    /// The guest of its children.
    guest: Option<Arc<FakeGuest>>,
    requests: Vec<Request>,
    /// How many descriptors came with each request that had some.
    descriptors: Vec<usize>,
    /// The layers it sends, of one disk.
    layers: Vec<OwnedFd>,
    /// What it sends beside the answer that it has branched, of a guest with a disk.
    branched: Branched,
    children: Vec<Forked>,
    control: Option<Arc<Channel>>,
}

/// What a sandbox sends beside the answer that it has branched.
#[derive(Default)]
pub(crate) struct Branched {
    /// In the place of the layer that was frozen.
    pub(crate) layer: Option<OwnedFd>,
    /// In the place of the branch's process.
    pub(crate) process: Option<Pid>,
}

/// A child of a template.
struct Forked {
    name: String,
    pid: i32,
    pidfd: Arc<OwnedFd>,
    monitor: Option<FakeMonitor>,
    /// How it ended, or how it is to be said to have ended.
    status: Option<WaitStatus>,
    ended: bool,
}

/// Ends the process with the last handle.
struct End(Arc<Shared>);

impl Drop for End {
    fn drop(&mut self) {
        self.0.die();
        // The children have handles of their own.
        let children = std::mem::take(&mut self.0.state().children);
        for child in children {
            let _ = pidfd_send_signal(&*child.pidfd, Signal::KILL);
        }
    }
}

impl FakeMonitor {
    /// One with a process of its own, which nobody waits for, behind the control socket in `folder`.
    pub(crate) fn left_in(folder: &Path, role: Role) -> FakeMonitor {
        let (process, shell) = Shell::start();
        let pid = process.id() as i32;
        let (listener, _) = control_socket::pair(&folder.join(control_socket::CONTROL)).unwrap();
        ProcessId::of_child(pid, std::process::id() as i32).unwrap().write(folder).unwrap();
        let fake = FakeMonitor::new(pid, shell, role, true, Some(listener), Handle::current());
        *fake.shared.process.lock().unwrap() = Some(process);
        fake
    }

    /// One that the daemon started in `folder`.
    pub(crate) async fn launched_in(id: &str, folder: &Path, role: Role) -> (FakeMonitor, Monitor) {
        let (process, shell) = Shell::start();
        let (listener, control) = control_socket::pair(&folder.join(control_socket::CONTROL)).unwrap();
        let pid = process.id() as i32;
        ProcessId::of_child(pid, std::process::id() as i32).unwrap().write(folder).unwrap();
        let fake = FakeMonitor::new(pid, shell, role, true, Some(listener), Handle::current());
        let launch =
            Launch { id: id.into(), folder: folder.into(), vmm: PathBuf::new(), uid: None, procs_fd: None };
        let mut monitor = Monitor::started(launch, process, control).unwrap();
        monitor.hello(TIMEOUT).await.unwrap();
        (fake, monitor)
    }

    fn new(
        pid: i32,
        shell: Shell,
        role: Role,
        ready: bool,
        listener: Option<OwnedFd>,
        runtime: Handle,
    ) -> FakeMonitor {
        FakeMonitor::silent(pid, shell, role, ready, listener, runtime).start()
    }

    /// One that answers nothing before its [`start`](FakeMonitor::start): its script can be set before the first request.
    fn silent(
        pid: i32,
        shell: Shell,
        role: Role,
        ready: bool,
        listener: Option<OwnedFd>,
        runtime: Handle,
    ) -> FakeMonitor {
        let shared = Arc::new(Shared {
            pidfd: pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap(),
            shell: Mutex::new(shell),
            process: Mutex::default(),
            listener: listener.map(Arc::new),
            script: Mutex::new(Box::new(|_| Act::Execute)),
            state: Mutex::new(State {
                role,
                running: true,
                ready,
                disk_full: false,
                children_are_ready: true,
                branch_script: |_| Act::Execute,
                guest: None,
                requests: Vec::new(),
                descriptors: Vec::new(),
                layers: Vec::new(),
                branched: Branched::default(),
                children: Vec::new(),
                control: None,
            }),
            runtime,
        });
        FakeMonitor { pid, shared: shared.clone(), _end: Arc::new(End(shared)) }
    }

    fn start(self) -> FakeMonitor {
        let (playing, watched) = (self.shared.clone(), self.shared.clone());
        std::thread::spawn(move || playing.play());
        std::thread::spawn(move || {
            wait_for(&watched.pidfd);
            watched.close();
        });
        self
    }

    /// Has `script` say what it does about each request from here on.
    pub(crate) fn script(&self, script: impl FnMut(&Request) -> Act + Send + 'static) -> &Self {
        *self.shared.script.lock().unwrap() = Box::new(script);
        self
    }

    /// The same for its branches.
    pub(crate) fn script_branches(&self, script: fn(&Request) -> Act) -> &Self {
        self.shared.state().branch_script = script;
        self
    }

    /// Its guest is paused, as by an earlier daemon.
    pub(crate) fn stands_still(&self) -> &Self {
        self.shared.state().running = false;
        self
    }

    /// Its guest is paused because the host's disk is full. Says so now, and to every daemon that connects.
    pub(crate) fn waits_for_room(&self) -> &Self {
        {
            let mut state = self.shared.state();
            (state.running, state.disk_full) = (false, true);
        }
        self.emit(Event::DiskFull);
        self
    }

    /// The guests of its children do not say that they are ready.
    pub(crate) fn children_are_not_ready(&self) -> &Self {
        self.shared.state().children_are_ready = false;
        self
    }

    /// What speaks for the guests of its children.
    pub(crate) fn guest(&self, guest: &Arc<FakeGuest>) -> &Self {
        self.shared.state().guest = Some(guest.clone());
        self
    }

    /// What it sends as the next layer of its disk.
    pub(crate) fn add_layer(&self, layer: OwnedFd) {
        self.shared.state().layers.push(layer);
    }

    /// What it sends beside the answer that it has branched.
    pub(crate) fn sends(&self, branched: Branched) -> &Self {
        self.shared.state().branched = branched;
        self
    }

    /// All requests it received, in order, without greetings.
    pub(crate) fn requests(&self) -> Vec<Request> {
        let requests = self.shared.state().requests.clone();
        requests.into_iter().filter(|request| !matches!(request, Request::Hello { .. })).collect()
    }

    /// How many requests it received that `is_it` picks.
    pub(crate) fn times(&self, is_it: impl Fn(&Request) -> bool) -> usize {
        self.requests().iter().filter(|request| is_it(request)).count()
    }

    /// How many descriptors came with each request that had some.
    pub(crate) fn descriptors(&self) -> Vec<usize> {
        self.shared.state().descriptors.clone()
    }

    /// Whether it received a request that `is_it` picks.
    pub(crate) fn has_received(&self, is_it: impl Fn(&Request) -> bool) -> bool {
        self.times(is_it) > 0
    }

    /// Whether a daemon listens to it.
    pub(crate) fn is_connected(&self) -> bool {
        self.shared.state().control.is_some()
    }

    /// Sends a message to the daemon that listens, if one does.
    pub(crate) fn say(&self, message: Message) {
        self.shared.send(&message, &[]);
    }

    /// The same for an event.
    pub(crate) fn emit(&self, event: Event) -> &Self {
        self.shared.send(&Message::Event(event), &[]);
        self
    }

    /// Its VM ends, and so does it.
    pub(crate) fn end(&self, reason: EndReason, detail: &str, console: &str) {
        let end = VmEnd { reason, detail: detail.into(), console_tail: console.into() };
        self.emit(Event::Ended(end));
        self.shared.die();
    }

    /// Its process ends.
    pub(crate) fn die(&self) {
        self.shared.die();
    }

    /// Whether its process runs.
    pub(crate) fn runs(&self) -> bool {
        crate::testing::fake_process::runs(self.pid)
    }

    /// A child that an earlier daemon requested, with its files in `folder`.
    pub(crate) fn child_in(&self, name: &str, folder: &Path) -> FakeMonitor {
        let (listener, _) = control_socket::pair(&folder.join(control_socket::CONTROL)).unwrap();
        self.shared.fork(name, Some(listener))
    }

    /// A child that has nothing to be controlled by.
    pub(crate) fn stray_child(&self, name: &str) -> FakeMonitor {
        self.shared.fork(name, None)
    }

    /// The child `name`, if it was forked.
    pub(crate) fn child(&self, name: &str) -> Option<FakeMonitor> {
        let state = self.shared.state();
        let of_it = state.children.iter().find(|child| child.name == name);
        of_it.and_then(|child| child.monitor.clone())
    }

    /// How many of its children run.
    pub(crate) fn children_that_run(&self) -> usize {
        let state = self.shared.state();
        state.children.iter().filter(|child| crate::testing::fake_process::runs(child.pid)).count()
    }

    /// All children that were not acknowledged, by name.
    pub(crate) fn remembers(&self) -> Vec<String> {
        self.shared.state().children.iter().map(|child| child.name.clone()).collect()
    }

    /// The child `name` ends, and it says how.
    pub(crate) fn end_child(&self, name: &str, status: WaitStatus) {
        let pidfd = {
            let mut state = self.shared.state();
            let child = state.children.iter_mut().find(|child| child.name == name).unwrap();
            child.status = Some(status);
            child.pidfd.clone()
        };
        let _ = pidfd_send_signal(&*pidfd, Signal::KILL);
    }
}
