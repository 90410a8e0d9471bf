//! Plays the controller: starts a monitor, talks to it, hands it descriptors.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    unused_imports,
    unused_macros,
    reason = "each test binary uses a part of this"
)]

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use forkd_protocol::control::{
    BootConfig, Channel, DiskFiles, Event, FdRef, ForkConfig, LISTENER_FD, LoadConfig, Message, Reply,
    Request, Status, VERSION,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

forkd_vmm::guest_code! {
    /// Reports ready, and once more after a change of its generation id. Then it sleeps for ever, so that the
    /// cost of a child is the fork.
    pub fn sleeps_once_forked,
    "mov rbx, qword ptr [0xe8000]",
    "mov dx, 0x602",
    "out dx, al",
    "2: pause",
    "cmp qword ptr [0xe8000], rbx",
    "je 2b",
    "out dx, al",
    "cli",
    "3: hlt",
    "jmp 3b",
}

/// No answer of a monitor takes longer, whatever the machine is busy with.
const GUEST_TIMEOUT: Duration = Duration::from_secs(60);

/// The name of the test function around it, for [`not_run`].
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::support::outer_function(here)
    }};
}
pub(crate) use test_name;

/// The name of the function in which `inner` is defined.
pub fn outer_function<F>(_inner: F) -> &'static str {
    std::any::type_name::<F>().rsplit("::").nth(1).unwrap_or("a test")
}

/// Reports that a test did not run, past the harness, which swallows what passing tests print.
pub fn not_run(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "NOT RUN: {test}: {why}");
}

/// `/dev/kvm`, or `None` with a line that names the test that does not run.
pub fn open_kvm(test: &str) -> Option<File> {
    match File::options().read(true).write(true).open("/dev/kvm") {
        Ok(file) => Some(file),
        Err(error) => {
            not_run(test, &format!("/dev/kvm does not open: {error}"));
            None
        }
    }
}

/// A file with `bytes`, open for reading and writing, that has no name.
pub fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file
}

/// A running monitor process.
pub struct Monitor {
    child: Child,
    socket: PathBuf,
    _folder: tempfile::TempDir,
}

impl Monitor {
    /// Starts `binary` with `arguments` and a listening control socket.
    pub fn start(binary: &Path, arguments: &[&str]) -> Monitor {
        Monitor::start_with(Command::new(binary), arguments)
    }

    /// The same with a command that was prepared.
    pub fn start_with(mut command: Command, arguments: &[&str]) -> Monitor {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = listen(&socket);
        command.args(arguments).stdin(Stdio::null());
        pass_as_3(&mut command, listener);
        let child = command.spawn().unwrap();
        Monitor { child, socket, _folder: folder }
    }

    /// A connection that has not sent `Hello`.
    pub fn connect(&self) -> Controller {
        Controller::connect(&self.socket)
    }

    /// A connection that has sent `Hello`.
    pub fn attach(&self) -> Controller {
        Controller::attach(&self.socket)
    }

    /// Kills the process.
    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// The process's id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Whether the process still runs.
    pub fn is_alive(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits for the process to exit.
    pub fn wait(&mut self) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < GUEST_TIMEOUT, "the monitor does not exit");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Gives `fd` to the process that `command` starts, as descriptor 3.
pub fn pass_as_3(command: &mut Command, fd: impl Into<OwnedFd>) {
    let fd = fd.into();
    // SAFETY: between fork and exec only system calls that are safe there are made.
    unsafe {
        command.pre_exec(move || {
            // A descriptor that has the right number already would keep its close-on-exec flag.
            let spare = libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD, LISTENER_FD + 1);
            if spare < 0 || libc::dup2(spare, LISTENER_FD) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
}

/// A listening control socket at `path`.
pub fn listen(path: &Path) -> OwnedFd {
    let listener = seqpacket();
    rustix::net::bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    listener
}

fn seqpacket() -> OwnedFd {
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
}

/// The controller's end of a control connection.
pub struct Controller {
    pub channel: Channel,
    events: VecDeque<(Event, Vec<OwnedFd>)>,
}

impl Controller {
    /// A connection that has not sent `Hello`.
    pub fn connect(path: &Path) -> Controller {
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(GUEST_TIMEOUT)).unwrap();
        Controller { channel: Channel::new(socket), events: VecDeque::new() }
    }

    /// A connection that has sent `Hello`.
    pub fn attach(path: &Path) -> Controller {
        let mut controller = Controller::connect(path);
        let reply = controller.request(&Request::Hello { version: VERSION }, &[]);
        assert!(matches!(reply, Reply::Hello { version: VERSION, .. }), "{reply:?}");
        controller
    }

    /// Sends a request and returns its reply; events that come before it are kept.
    pub fn request(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        self.channel.send(request, fds).unwrap();
        self.reply()
    }

    /// The next reply.
    pub fn reply(&mut self) -> Reply {
        self.reply_with_fds().0
    }

    /// The next reply and its descriptors.
    pub fn reply_with_fds(&mut self) -> (Reply, Vec<OwnedFd>) {
        loop {
            match self.channel.recv::<Message>().unwrap().expect("the monitor closed the connection") {
                (Message::Reply(reply), fds) => return (reply, fds),
                (Message::Event(event), fds) => self.events.push_back((event, fds)),
            }
        }
    }

    /// The next message, whatever it is.
    pub fn next(&mut self) -> Message {
        self.channel.recv::<Message>().unwrap().expect("the monitor closed the connection").0
    }

    /// Whether an event came before the last reply.
    pub fn has_event(&self) -> bool {
        !self.events.is_empty()
    }

    /// The next event.
    pub fn event(&mut self) -> (Event, Vec<OwnedFd>) {
        if let Some(event) = self.events.pop_front() {
            return event;
        }
        match self.channel.recv::<Message>().unwrap().expect("the monitor closed the connection") {
            (Message::Event(event), fds) => (event, fds),
            (Message::Reply(reply), _) => panic!("an unexpected reply: {reply:?}"),
        }
    }

    /// Whether the monitor has closed the connection.
    pub fn is_closed(&self) -> bool {
        matches!(self.channel.recv::<Message>(), Ok(None))
    }
}

/// A request to boot, with the descriptors it names.
pub struct Boot {
    pub config: BootConfig,
    pub fds: Vec<OwnedFd>,
    /// What the guest writes to its console.
    pub console: File,
}

impl Boot {
    /// One vCPU and the least memory.
    pub fn new(kvm: File, kernel: File) -> Boot {
        let console = tempfile::tempfile().unwrap();
        let fds = vec![kvm.into(), kernel.into(), console.try_clone().unwrap().into()];
        let config = BootConfig {
            kvm: FdRef(0),
            vcpus: 1,
            mem_mib: 64,
            kernel: FdRef(1),
            initramfs: None,
            cmdline: String::new(),
            console: FdRef(2),
            console_limit: 1 << 20,
            disks: Vec::new(),
            disk_state: None,
            net: None,
            vsock: None,
        };
        Boot { config, fds, console }
    }

    /// Attaches `fd`.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdRef {
        self.fds.push(fd.into());
        FdRef(self.fds.len() - 1)
    }

    /// Sends the request.
    pub fn send(&self, controller: &mut Controller) -> Reply {
        let fds: Vec<_> = self.fds.iter().map(|fd| fd.as_fd()).collect();
        controller.request(&Request::Boot(self.config.clone()), &fds)
    }
}

/// A request to load `/dev/kvm` (0) and a state (1) with `memory` and `disks`, by a controller that does not
/// know more about it.
pub fn load_config(memory: Vec<FdRef>, disks: Vec<DiskFiles>) -> LoadConfig {
    LoadConfig {
        kvm: FdRef(0),
        state: FdRef(1),
        memory,
        disks,
        vcpus: None,
        mem_mib: None,
        guest_ports: Vec::new(),
    }
}

/// A request to fork, with the descriptors it names and the connection that waits for the child.
pub struct Fork {
    pub config: ForkConfig,
    pub fds: Vec<OwnedFd>,
    /// What the guest writes to its console.
    pub console: File,
    controller: Controller,
    folder: tempfile::TempDir,
}

impl Fork {
    /// A child without devices. The controller has connected and sent `Hello` before there is a child.
    pub fn new(name: &str) -> Fork {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = listen(&socket);
        let controller = Controller::connect(&socket);
        controller.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        let console = tempfile::tempfile().unwrap();
        let fds = vec![listener, console.try_clone().unwrap().into()];
        let config = ForkConfig {
            child: name.into(),
            control: FdRef(0),
            console: FdRef(1),
            console_limit: 1 << 20,
            layers: Vec::new(),
            tap: None,
            vsock: None,
            cgroup: None,
        };
        Fork { config, fds, console, controller, folder }
    }

    /// Attaches `fd`.
    pub fn add(&mut self, fd: impl Into<OwnedFd>) -> FdRef {
        self.fds.push(fd.into());
        FdRef(self.fds.len() - 1)
    }

    /// Sends the request and does not wait for the reply. The descriptors are the template's now.
    pub fn send(&mut self, template: &mut Controller) {
        let fds: Vec<_> = self.fds.iter().map(|fd| fd.as_fd()).collect();
        template.channel.send(&Request::Fork(self.config.clone()), &fds).unwrap();
        self.fds.clear();
    }

    /// Takes the reply: a child, or why there is none.
    pub fn finish(self, template: &mut Controller) -> Result<Forked, String> {
        match template.reply_with_fds() {
            (Reply::Forked { pid }, mut fds) => {
                let pidfd = fds.pop().expect("a pidfd");
                let Fork { controller, console, folder, .. } = self;
                Ok(Forked { pid, pidfd, controller, console, folder })
            }
            (Reply::Error { message }, _) => Err(message),
            other => panic!("{other:?}"),
        }
    }

    /// Sends the request and takes the reply.
    pub fn run(mut self, template: &mut Controller) -> Result<Forked, String> {
        self.send(template);
        self.finish(template)
    }
}

/// A forked child. Killed when it is dropped.
pub struct Forked {
    pub pid: i32,
    pub pidfd: OwnedFd,
    /// Has sent `Hello`; the answer was not read yet.
    pub controller: Controller,
    pub console: File,
    folder: tempfile::TempDir,
}

impl Forked {
    /// Reads the answer to `Hello` and waits until the guest reports ready.
    pub fn ready(&mut self) {
        let reply = self.controller.reply();
        assert!(matches!(reply, Reply::Hello { version: VERSION, .. }), "{reply:?}");
        assert_eq!(self.controller.event().0, Event::Ready);
    }

    /// Hangs up and connects again.
    pub fn reconnect(&mut self) {
        let path = self.folder.path().join("control.sock");
        self.controller = Controller::connect(&path);
        self.controller.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        assert!(matches!(self.controller.reply(), Reply::Hello { version: VERSION, .. }));
    }

    /// Kills the process.
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
    }

    /// Whether the process has ended.
    pub fn has_ended(&self) -> bool {
        let mut fds = [rustix::event::PollFd::new(&self.pidfd, rustix::event::PollFlags::IN)];
        let now = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() > 0
    }

    /// What the guest has written to its console.
    pub fn console(&self) -> String {
        use std::os::unix::fs::FileExt;
        let mut bytes = vec![0; 4096];
        let count = self.console.read_at(&mut bytes, 0).unwrap();
        String::from_utf8_lossy(&bytes[..count]).into_owned()
    }
}

impl Drop for Forked {
    fn drop(&mut self) {
        self.kill();
    }
}

/// How a monitor is.
#[track_caller]
pub fn status(controller: &mut Controller) -> Status {
    match controller.request(&Request::Status, &[]) {
        Reply::Status(status) => status,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < Duration::from_secs(30), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
