//! Plays the controller: starts a monitor, talks to it, hands it descriptors.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
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
    BootConfig, Channel, Event, FdRef, LISTENER_FD, Message, Reply, Request, VERSION,
};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

/// No answer of a monitor takes longer, whatever the machine is busy with.
const PATIENCE: Duration = Duration::from_secs(60);

/// Says that a test did not run, past the harness, which swallows what passing tests print.
pub fn not_run(test: &str, why: &str) {
    let _ = writeln!(std::io::stderr(), "NOT RUN: {test}: {why}");
}

/// `/dev/kvm`, or `None` with a line that says what does not run without it.
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
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = seqpacket();
        rustix::net::bind(&listener, &SocketAddrUnix::new(&socket).unwrap()).unwrap();
        rustix::net::listen(&listener, 8).unwrap();
        let mut command = Command::new(binary);
        command.args(arguments).stdin(Stdio::null());
        pass_as_3(&mut command, listener);
        let child = command.spawn().unwrap();
        Monitor { child, socket, _folder: folder }
    }

    /// A connection that has not said hello.
    pub fn connect(&self) -> Controller {
        let socket = seqpacket();
        rustix::net::connect(&socket, &SocketAddrUnix::new(&self.socket).unwrap()).unwrap();
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE)).unwrap();
        Controller { channel: Channel::new(socket), events: VecDeque::new() }
    }

    /// A connection that has said hello.
    pub fn attach(&self) -> Controller {
        let mut controller = self.connect();
        let reply = controller.request(&Request::Hello { version: VERSION }, &[]);
        assert!(matches!(reply, Reply::Hello { version: VERSION, .. }), "{reply:?}");
        controller
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
            assert!(start.elapsed() < PATIENCE, "the monitor does not exit");
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
    /// Sends a request and returns its reply; events that come before it are kept.
    pub fn request(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        self.channel.send(request, fds).unwrap();
        self.reply()
    }

    /// The next reply.
    pub fn reply(&mut self) -> Reply {
        loop {
            match self.channel.recv::<Message>().unwrap().expect("the monitor closed the connection") {
                (Message::Reply(reply), _) => return reply,
                (Message::Event(event), fds) => self.events.push_back((event, fds)),
            }
        }
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
