//! Plays the controller towards one `forkd-vmm`, to test the monitor by itself with real guests.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use forkd_protocol::agent::AGENT_PORT;
use forkd_protocol::control::{
    BootConfig, Channel, DiskConfig, Event, FdRef, ForkConfig, LISTENER_FD, Message, NetConfig, Reply,
    Request, VERSION, VmEnd, VsockConfig,
};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};
use rustix::process::Signal;

use crate::http::{self, Response};
use crate::{TIMEOUT, binary, eventually};

/// A monitor process and the test's connection to it.
pub struct Monitor {
    process: Process,
    channel: Channel,
    folder: tempfile::TempDir,
    console: File,
    /// For each disk, whether the guest may write.
    disks: Vec<bool>,
}

/// The parent of the process.
enum Process {
    /// The test.
    Started(Child),
    /// A template: its pid, and a pidfd.
    Forked(u32, OwnedFd),
}

/// The only port of the host a guest may call.
pub const GUEST_CALL_PORT: u32 = 5005;

/// What a test wants of a VM; the rest is the same for all.
pub struct Guest<'a> {
    /// Kernel image.
    pub kernel: &'a Path,
    /// Initial RAM file system.
    pub initramfs: Option<&'a [u8]>,
    /// vCPUs.
    pub vcpus: u8,
    /// Memory.
    pub mem_mib: u64,
    /// Disks: image, and whether the guest may write (to a layer of its own).
    pub disks: Vec<(&'a Path, bool)>,
    /// A tap for the network interface.
    pub tap: Option<OwnedFd>,
    /// Most bytes of console kept.
    pub console_limit: u64,
    /// Added to the kernel's command line.
    pub cmdline: &'a str,
}

impl<'a> Guest<'a> {
    /// One vCPU, 512 MiB, no disk.
    pub fn new(kernel: &'a Path) -> Self {
        Guest {
            kernel,
            initramfs: None,
            vcpus: 1,
            mem_mib: 512,
            disks: Vec::new(),
            tap: None,
            console_limit: 1 << 20,
            cmdline: "",
        }
    }
}

impl Monitor {
    /// Starts a jailed monitor and shakes hands with it.
    pub fn start() -> Monitor {
        let folder = tempfile::tempdir().unwrap();
        let (listener, channel) = control_pair(folder.path());
        let mut command = Command::new(binary("forkd-vmm"));
        command.args(["--uid", "64000", "--gid", "64000"]);
        // Out of the way of the number it gets in the monitor: dup2 onto itself would leave
        // close-on-exec set.
        let listener = rustix::io::fcntl_dupfd_cloexec(&listener, LISTENER_FD + 1).unwrap();
        let inherited = listener.as_raw_fd();
        // SAFETY: between fork and exec only dup2 is called, which is async-signal-safe; the descriptors
        // borrowed there are open, and after exec nothing owns the one written over.
        unsafe {
            command.pre_exec(move || {
                let mut target =
                    std::mem::ManuallyDrop::new(std::os::fd::FromRawFd::from_raw_fd(LISTENER_FD));
                rustix::io::dup2(BorrowedFd::borrow_raw(inherited), &mut target)?;
                Ok(())
            });
        }
        let process = Process::Started(command.spawn().unwrap());
        drop(listener);
        let console = new_file(&folder.path().join("console.log"));
        let mut monitor = Monitor { process, channel, folder, console, disks: Vec::new() };
        monitor.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        monitor.shake_hands();
        monitor
    }

    fn shake_hands(&mut self) {
        match self.reply("hello") {
            (Reply::Hello { version, .. }, _) => assert_eq!(version, VERSION),
            other => panic!("unexpected answer to hello: {other:?}"),
        }
    }

    /// Turns the VM into a template.
    pub fn freeze(&mut self) {
        assert_eq!(self.ask(&Request::Freeze, &[]), Reply::Frozen);
    }

    /// Forks a child of this template.
    pub fn fork(&mut self, name: &str) -> Monitor {
        let folder = tempfile::tempdir().unwrap();
        let (listener, channel) = control_pair(folder.path());
        // Sent before the child exists: a child needs no round trip to start.
        channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        let console = new_file(&folder.path().join("console.log"));
        let vsock = UnixListener::bind(folder.path().join("vsock.sock")).unwrap();
        let mut fds: Vec<OwnedFd> = vec![listener, console.try_clone().unwrap().into(), vsock.into()];
        let layers = self.disks.iter().map(|writable| {
            writable.then(|| {
                fds.push(file_with(b"").into());
                FdRef(fds.len() - 1)
            })
        });
        let config = ForkConfig {
            child: name.into(),
            control: FdRef(0),
            console: FdRef(1),
            console_limit: 1 << 20,
            layers: layers.collect(),
            tap: None,
            vsock: Some(FdRef(2)),
            cgroup: None,
        };
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.channel.send(&Request::Fork(config), &borrowed).unwrap();
        let (pid, pidfd) = match self.reply("fork") {
            (Reply::Forked { pid }, fds) => (pid as u32, fds.into_iter().next().expect("a pidfd")),
            other => panic!("unexpected answer to fork: {other:?}"),
        };
        let process = Process::Forked(pid, pidfd);
        let mut child = Monitor { process, channel, folder, console, disks: self.disks.clone() };
        child.shake_hands();
        child
    }

    /// Waits for the reply to `what`; events in between are a failure.
    fn reply(&mut self, what: &str) -> (Reply, Vec<OwnedFd>) {
        match self.channel.recv::<Message>().unwrap() {
            Some((Message::Reply(reply), fds)) => (reply, fds),
            other => panic!("expected a reply to {what}, got {other:?}; console:\n{}", self.console()),
        }
    }

    /// Sends a request and waits for its reply; events in between are a failure.
    pub fn ask(&mut self, request: &Request, fds: &[BorrowedFd<'_>]) -> Reply {
        self.channel.send(request, fds).unwrap();
        self.reply(&format!("{request:?}")).0
    }

    /// Boots `guest`; returns the reply.
    pub fn try_boot(&mut self, guest: Guest<'_>) -> Reply {
        self.disks = guest.disks.iter().map(|(_, writable)| *writable).collect();
        let mut fds: Vec<OwnedFd> = Vec::new();
        let mut attach = |fd: OwnedFd| {
            fds.push(fd);
            FdRef(fds.len() - 1)
        };
        let kvm = attach(OpenOptions::new().read(true).write(true).open("/dev/kvm").unwrap().into());
        let kernel = attach(File::open(guest.kernel).unwrap().into());
        let initramfs = guest.initramfs.map(|bytes| attach(file_with(bytes).into()));
        let console = attach(self.console.try_clone().unwrap().into());
        let disks = guest.disks.iter().map(|(path, writable)| DiskConfig {
            base: attach(File::open(path).unwrap().into()),
            layer: writable.then(|| attach(file_with(b"").into())),
            frozen: Vec::new(),
        });
        let disks = disks.collect();
        let listener = UnixListener::bind(self.folder.path().join("vsock.sock")).unwrap();
        let vsock =
            VsockConfig { cid: 3, listener: attach(listener.into()), guest_ports: vec![GUEST_CALL_PORT] };
        let net = guest.tap.map(|tap| NetConfig { tap: attach(tap), mac: [0x06, 0, 0, 0, 0, 2] });
        let config = BootConfig {
            kvm,
            vcpus: guest.vcpus,
            mem_mib: guest.mem_mib,
            kernel,
            initramfs,
            cmdline: guest.cmdline.into(),
            console,
            console_limit: guest.console_limit,
            disks,
            disk_state: None,
            net,
            vsock: Some(vsock),
        };
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        self.ask(&Request::Boot(config), &borrowed)
    }

    /// Boots `guest`.
    pub fn boot(&mut self, guest: Guest<'_>) {
        let reply = self.try_boot(guest);
        assert_eq!(reply, Reply::Booted);
    }

    /// Boots `guest` and waits until its agent answers.
    pub fn boot_to_agent(&mut self, guest: Guest<'_>) {
        self.boot(guest);
        eventually("the guest's agent", || {
            if self.has_ended() {
                panic!("the guest ended before its agent answered; console:\n{}", self.console());
            }
            let response = self.agent("GET", "/health", &[], b"").ok()?;
            (response.status == 204).then_some(())
        });
    }

    /// A connection to a vsock port in the guest.
    pub fn connect(&self, port: u32) -> std::io::Result<UnixStream> {
        connect_to_guest(self.folder.path(), port)
    }

    /// One HTTP request to the agent.
    pub fn agent(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: &[u8],
    ) -> std::io::Result<Response> {
        http::request(self.connect(AGENT_PORT)?, method, path, headers, body)
    }

    /// Runs a shell command as root in the guest: standard output if it succeeded.
    pub fn sh(&self, script: &str) -> String {
        let (code, stdout, stderr) = self.sh_status(script);
        assert_eq!(code, 0, "{script}: {stdout}{stderr}");
        stdout
    }

    /// Runs a shell command as root in the guest: exit code, standard output and error.
    pub fn sh_status(&self, script: &str) -> (i64, String, String) {
        let message =
            serde_json::json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false});
        let body = forkd_protocol::connect::encode(0, &message);
        let headers = [("content-type", "application/connect+json"), ("authorization", "Basic cm9vdDo=")];
        let response = self.agent("POST", "/process.Process/Start", &headers, &body).unwrap();
        assert_eq!(response.status, 200, "{response:?}");
        collect_output(&response.body)
    }

    /// Starts a shell command as root in the guest and leaves: the command goes on.
    pub fn start_in_background(&self, script: &str) {
        let message =
            serde_json::json!({"process": {"cmd": "/bin/sh", "args": ["-c", script]}, "stdin": false});
        let body = forkd_protocol::connect::encode(0, &message);
        let mut stream = self.connect(AGENT_PORT).unwrap();
        let head = format!(
            "POST /process.Process/Start HTTP/1.1\r\nhost: guest\r\ncontent-type: application/connect+json\r\n\
             content-length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&body).unwrap();
        // The answer's first bytes prove that it was started.
        stream.read_exact(&mut [0; 16]).unwrap();
    }

    /// What the guest wrote to its console so far.
    pub fn console(&self) -> String {
        let mut file = self.console.try_clone().unwrap();
        let mut text = Vec::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_end(&mut text).unwrap();
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Waits for an event.
    pub fn event(&mut self) -> (Event, Vec<OwnedFd>) {
        match self.channel.recv::<Message>().unwrap() {
            Some((Message::Event(event), fds)) => (event, fds),
            other => panic!("expected an event, got {other:?}; console:\n{}", self.console()),
        }
    }

    /// Waits until the VM has ended by itself and its process is gone. Connections the guest opens
    /// meanwhile are refused.
    pub fn wait_end(&mut self) -> VmEnd {
        let end = loop {
            if let (Event::Ended(end), _) = self.event() {
                break end;
            }
        };
        if let Process::Started(child) = &mut self.process {
            let status = child.wait().unwrap();
            assert!(status.success(), "the monitor exited with {status}");
        }
        end
    }

    /// Whether the process is gone.
    pub fn has_ended(&mut self) -> bool {
        match &mut self.process {
            Process::Started(child) => child.try_wait().unwrap().is_some(),
            // A pidfd becomes readable at the end of its process.
            Process::Forked(_, pidfd) => {
                let mut poll = [rustix::event::PollFd::new(pidfd, rustix::event::PollFlags::IN)];
                rustix::event::poll(&mut poll, Some(&Default::default())).unwrap() > 0
            }
        }
    }

    /// The monitor's process id.
    pub fn pid(&self) -> u32 {
        match &self.process {
            Process::Started(child) => child.id(),
            Process::Forked(pid, _) => *pid,
        }
    }
}

/// A connection to a vsock port in the guest whose monitor's sockets are in `folder`.
pub fn connect_to_guest(folder: &Path, port: u32) -> std::io::Result<UnixStream> {
    let stream = UnixStream::connect(folder.join("vsock.sock"))?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    writeln!(&stream, "CONNECT {port}")?;
    let mut line = String::new();
    // A one-byte buffer: what follows the line is not ours to read.
    BufReader::with_capacity(1, &stream).read_line(&mut line)?;
    match line.starts_with("OK ") {
        true => Ok(stream),
        false => Err(std::io::Error::other(format!("vsock port {port}: {line:?}"))),
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        match &mut self.process {
            Process::Started(child) => {
                let _ = child.kill();
                let _ = child.wait();
            }
            Process::Forked(_, pidfd) => {
                let _ = rustix::process::pidfd_send_signal(pidfd, Signal::KILL);
            }
        }
    }
}

/// A listening control socket in `folder` and a connection to it.
fn control_pair(folder: &Path) -> (OwnedFd, Channel) {
    let socket = || {
        let flags = SocketFlags::CLOEXEC;
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap()
    };
    let address = SocketAddrUnix::new(folder.join("control.sock")).unwrap();
    let (listener, connection) = (socket(), socket());
    rustix::net::bind(&listener, &address).unwrap();
    rustix::net::listen(&listener, 8).unwrap();
    rustix::net::connect(&connection, &address).unwrap();
    (listener, Channel::new(connection))
}

fn new_file(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap()
}

/// Exit code and output of a `Process/Start` stream.
pub fn collect_output(stream: &[u8]) -> (i64, String, String) {
    use base64::Engine;
    let mut decoder = forkd_protocol::connect::Decoder::new();
    decoder.push(stream);
    let (mut code, mut stdout, mut stderr) = (None, Vec::new(), Vec::new());
    while let Some(envelope) = decoder.next_envelope().unwrap() {
        let message: serde_json::Value = serde_json::from_slice(&envelope.payload).unwrap();
        assert!(message.get("error").is_none(), "{message}");
        let event = &message["event"];
        for (name, into) in [("stdout", &mut stdout), ("stderr", &mut stderr)] {
            if let Some(text) = event["data"][name].as_str() {
                into.extend(base64::prelude::BASE64_STANDARD.decode(text).unwrap());
            }
        }
        if event.get("end").is_some() {
            code = Some(event["end"]["exitCode"].as_i64().unwrap_or(0));
        }
    }
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    (code.expect("the stream has an end"), text(stdout), text(stderr))
}

/// A file without a name that holds `bytes`.
pub fn file_with(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(bytes).unwrap();
    file.rewind().unwrap();
    file
}
