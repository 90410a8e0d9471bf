//! Controller ⇄ monitor: messages over a unix `SEQPACKET` socket, descriptors attached.
//!
//! One packet is one JSON message. The controller sends a [`Request`] and gets one
//! [`Message::Reply`] for it; [`Message::Event`]s come whenever something happens, also between a
//! request and its reply. Requests may be sent without waiting for the reply to the one before:
//! replies come in the order of the requests. The first request on a connection is [`Request::Hello`]; a monitor that
//! does not speak the version offered says so and closes. A monitor serves one connection at a
//! time and goes on running its VM when the controller goes away.
//!
//! Descriptors travel with the message that names them: a [`FdRef`] is an index into the list
//! attached to it. The monitor never opens anything by name.

use std::io;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// The version of this protocol. A monitor lives longer than the controller that started it, so
/// a controller also speaks the version before.
pub const VERSION: u32 = 1;
/// The longest message. The longest honest one lists the children of a template. A kernel's default
/// socket buffer takes a little more.
pub const MAX_MESSAGE: usize = 192 << 10;
/// The most descriptors attached to one message.
pub const MAX_FDS: usize = 64;
/// The number under which a monitor finds its listening control socket when it starts.
pub const LISTENER_FD: i32 = 3;
/// How many bytes of the console's end a report holds at most.
pub const CONSOLE_TAIL: usize = 4 << 10;

/// Index into the descriptors attached to a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct FdRef(pub usize);

/// What the controller asks of a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// First on every connection.
    Hello {
        /// The version the controller speaks.
        version: u32,
    },
    /// Build a VM and run it. Once per monitor.
    Boot(BootConfig),
    /// Turn the running VM into a template, for good: vCPUs and devices stop, their state is kept
    /// in memory beside the guest's, one thread stays and forks children when asked.
    Freeze,
    /// Templates only: let go of the right to write to frozen layers. What a template can write, so
    /// can all its children, and a frozen layer is everybody's.
    Seal {
        /// For each disk its topmost layer, the same file opened for reading only; none for a disk
        /// that has none.
        layers: Vec<Option<FdRef>>,
    },
    /// Become the template of a snapshot on disk. Once, on a monitor that has not booted.
    Load(LoadConfig),
    /// Templates only: fork a child that runs on from the frozen state.
    Fork(ForkConfig),
    /// Templates only: fork a saver that writes the template to files and exits with 0 when they
    /// are safely on disk.
    Save(SaveConfig),
    /// Templates only: all children that are alive or whose end was not acknowledged.
    Children,
    /// Templates only: forget the ends of these children.
    Acknowledge {
        /// Their names.
        children: Vec<String>,
    },
    /// How is it?
    Status,
    /// End the VM at once, as if its plug was pulled, and exit.
    Stop,
}

/// What a monitor sends.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The answer to the last request.
    Reply(Reply),
    /// Something happened.
    Event(Event),
}

/// The answer to a [`Request`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reply {
    /// Both sides speak this version.
    Hello {
        /// The version in use from here on.
        version: u32,
        /// The build of the monitor, for people.
        monitor: String,
    },
    /// The vCPUs run.
    Booted,
    /// The VM is a template now.
    Frozen,
    /// The frozen layers are read-only.
    Sealed,
    /// The template is ready to fork.
    Loaded,
    /// The child, or the saver, exists. A pidfd of it is attached.
    Forked {
        /// Its process id.
        pid: i32,
    },
    /// The children of a template.
    Children {
        /// In the order they were forked.
        children: Vec<Child>,
    },
    /// Their ends are forgotten.
    Acknowledged,
    /// As of now.
    Status(Status),
    /// The VM is ended; the process exits next.
    Stopped,
    /// The request was not done, and nothing has changed.
    Error {
        /// What happened and what to do.
        message: String,
    },
}

/// What happened in a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The VM ended by itself, or a child could not be restored (then this comes without a hello);
    /// the process exits next.
    Ended(VmEnd),
    /// The guest wrote to the ready port for the first time since it was booted or forked: what
    /// guests without an agent do to say that they run.
    Ready,
    /// A child of this template ended. Kept, and told by [`Request::Children`], until it is
    /// acknowledged.
    ChildEnded {
        /// Its name.
        child: String,
        /// How.
        status: WaitStatus,
    },
    /// The guest connected to a vsock port of the host. The attached descriptor is the host's end;
    /// closing it ends the connection.
    GuestConnection {
        /// The port the guest asked for.
        port: u32,
    },
}

/// How a VM is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// What the process is by now.
    pub role: Role,
    /// Whether a VM's vCPUs run.
    pub running: bool,
    /// Whether the guest has written to the ready port.
    pub ready: bool,
}

/// What a monitor's process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Nothing yet: it waits for `Boot` or `Load`.
    Idle,
    /// It runs a VM.
    Sandbox,
    /// It holds a frozen VM and forks.
    Template,
}

/// A process a template forked.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Child {
    /// The name it was given.
    pub name: String,
    /// Its process id; may be somebody else's once it has ended.
    pub pid: i32,
    /// How it ended, if it has.
    pub status: Option<WaitStatus>,
}

/// How a process ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaitStatus {
    /// With this status.
    Exited(i32),
    /// By this signal.
    Signaled(i32),
}

/// How a VM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmEnd {
    /// What kind of end.
    pub reason: EndReason,
    /// A sentence about it.
    pub detail: String,
    /// The last of what the guest wrote to its console, at most [`CONSOLE_TAIL`] bytes.
    pub console_tail: String,
}

/// What kind of end a VM came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EndReason {
    /// The guest powered off.
    PoweredOff,
    /// The guest asked for a reset.
    Reset,
    /// The guest's kernel panicked.
    Panicked,
    /// KVM or a device could not go on: the guest did something no hardware allows, or the
    /// monitor failed.
    Failed,
}

/// Everything a VM is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootConfig {
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdRef,
    /// Number of vCPUs, 1 to [`MAX_VCPUS`].
    pub vcpus: u8,
    /// Guest memory in MiB, at least [`MIN_MEM_MIB`].
    pub mem_mib: u64,
    /// Kernel: an ELF vmlinux or a bzImage.
    pub kernel: FdRef,
    /// Initial RAM file system.
    pub initramfs: Option<FdRef>,
    /// Added to the command line the monitor makes.
    pub cmdline: String,
    /// Where the console's output goes: a file opened for reading and writing.
    pub console: FdRef,
    /// How many bytes of it are kept at most; the oldest are given up for the newest.
    pub console_limit: u64,
    /// Disks, in the order of `/dev/vda`, `/dev/vdb`, …
    pub disks: Vec<DiskConfig>,
    /// A network interface.
    pub net: Option<NetConfig>,
    /// The socket device.
    pub vsock: Option<VsockConfig>,
}

/// The most vCPUs of a VM.
pub const MAX_VCPUS: u8 = 32;
/// The least memory a Linux guest is given.
pub const MIN_MEM_MIB: u64 = 64;

/// A snapshot on disk: what a template is loaded from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadConfig {
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdRef,
    /// The state file, opened for reading.
    pub state: FdRef,
    /// The memory file, opened for reading: all of guest memory, one range after the other, holes
    /// where it is zero. Mapped privately and never written.
    pub memory: FdRef,
    /// The files of each disk, in the order of `/dev/vda`, `/dev/vdb`, …
    pub disks: Vec<DiskFiles>,
}

/// The files of a frozen disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskFiles {
    /// The image, opened for reading only.
    pub base: FdRef,
    /// Frozen layers, oldest first, opened for reading only.
    pub layers: Vec<FdRef>,
}

/// What a child gets of its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ForkConfig {
    /// A name for it, unique in this template: at most [`MAX_CHILD_NAME`] bytes.
    pub child: String,
    /// Its listening control socket.
    pub control: FdRef,
    /// Where its console's output goes: an empty file opened for reading and writing.
    pub console: FdRef,
    /// How many bytes of it are kept at most.
    pub console_limit: u64,
    /// For each disk an empty file opened for reading and writing that takes what the child
    /// writes; none for a disk that is read-only.
    pub layers: Vec<Option<FdRef>>,
    /// Its tap, as in [`NetConfig`]. Without one the interface the guest may have loses its link.
    pub tap: Option<FdRef>,
    /// Its vsock listener, as in [`VsockConfig`]; needed if the guest has the socket device.
    pub vsock: Option<FdRef>,
    /// The cgroup it is born into: a folder of the cgroup file system, opened.
    pub cgroup: Option<FdRef>,
}

/// The longest name of a child.
pub const MAX_CHILD_NAME: usize = 64;

/// Where a template is saved to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SaveConfig {
    /// A name for the saver, as for any child.
    pub child: String,
    /// An empty file opened for reading and writing, for the state.
    pub state: FdRef,
    /// An empty file opened for reading and writing, for the memory.
    pub memory: FdRef,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The image, opened for reading only. Never written.
    pub base: FdRef,
    /// An empty file opened for reading and writing that takes what the guest writes. Without it
    /// the disk is read-only.
    pub layer: Option<FdRef>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct NetConfig {
    /// A tap opened with `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, header size 12, non-blocking.
    pub tap: FdRef,
    /// The guest's hardware address.
    pub mac: [u8; 6],
}

/// The socket device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VsockConfig {
    /// The guest's address, 3 or more.
    pub cid: u32,
    /// A listening unix stream socket. Who connects writes `CONNECT port\n`, reads `OK n\n`, and is
    /// then connected to that port in the guest.
    pub listener: FdRef,
    /// Ports of the host the guest may call. A call to any other is refused by the monitor alone: a
    /// guest cannot keep the controller busy with calls nobody waits for.
    pub guest_ports: Vec<u32>,
}

/// One end of a control connection. Calls block if its socket does.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// Takes a connected `SEQPACKET` socket.
    pub fn new(socket: OwnedFd) -> Self {
        Channel { socket }
    }

    /// Sends `message` with `fds` attached.
    pub fn send<T: Serialize>(&self, message: &T, fds: &[BorrowedFd<'_>]) -> io::Result<()> {
        let bytes = serde_json::to_vec(message)?;
        if bytes.len() > MAX_MESSAGE || fds.len() > MAX_FDS {
            let text =
                format!("a message of {} bytes and {} descriptors is over the limit", bytes.len(), fds.len());
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(fds));
        }
        let flags = SendFlags::NOSIGNAL;
        rustix::io::retry_on_intr(|| {
            rustix::net::sendmsg(&self.socket, &[IoSlice::new(&bytes)], &mut ancillary, flags)
        })?;
        Ok(())
    }

    /// Receives the next message and its descriptors; `None` when the peer closed.
    pub fn recv<T: DeserializeOwned>(&self) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
        // As much memory as the message takes, and not as much as one could take: a template that forks
        // pays for every page it touches between two forks.
        let look = || {
            let flags = RecvFlags::PEEK | RecvFlags::TRUNC;
            rustix::io::retry_on_intr(|| rustix::net::recv(&self.socket, &mut [0u8; 0], flags))
        };
        let (_, length) = match look() {
            // The peer closed without having read everything. What it said before is still there, and
            // was only overtaken by this error.
            Err(rustix::io::Errno::CONNRESET) => look()?,
            other => other?,
        };
        let mut bytes = vec![0u8; length.clamp(1, MAX_MESSAGE + 1)];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FDS))];
        let mut ancillary = RecvAncillaryBuffer::new(&mut space);
        let received = rustix::io::retry_on_intr(|| {
            let flags = RecvFlags::CMSG_CLOEXEC;
            rustix::net::recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut ancillary, flags)
        });
        let received = match received {
            Err(rustix::io::Errno::CONNRESET) => return Ok(None),
            other => other?,
        };
        let mut fds = Vec::new();
        for message in ancillary.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received.bytes == 0 {
            return Ok(None);
        }
        Ok(Some((parse(&bytes[..received.bytes])?, fds)))
    }
}

impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> io::Result<T> {
    if bytes.len() > MAX_MESSAGE {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the message is over the limit"));
    }
    serde_json::from_slice(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Fuzz body: parsing either side's messages ends without a panic, and what parses as a request
/// says the same after a round trip.
pub fn fuzz_messages(data: &[u8]) {
    if let Ok(request) = parse::<Request>(data) {
        let bytes = serde_json::to_vec(&request).unwrap_or_default();
        assert_eq!(parse::<Request>(&bytes).ok(), Some(request));
    }
    let _ = parse::<Message>(data);
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
    use std::io::Read;

    fn pair() -> (Channel, Channel) {
        let (a, b) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None).unwrap();
        (Channel::new(a), Channel::new(b))
    }

    #[test]
    fn descriptors_arrive_with_the_message_that_names_them() {
        let (ours, theirs) = pair();
        let (reader, writer) = std::io::pipe().unwrap();
        ours.send(&Request::Status, &[reader.as_fd()]).unwrap();
        drop(reader);
        let (request, fds) = theirs.recv::<Request>().unwrap().unwrap();
        assert_eq!(request, Request::Status);
        std::io::Write::write_all(&mut { writer }, b"x").unwrap();
        let mut text = String::new();
        std::fs::File::from(fds.into_iter().next().unwrap()).read_to_string(&mut text).unwrap();
        assert_eq!(text, "x");
    }

    #[test]
    fn a_closed_peer_is_an_end_and_garbage_is_an_error() {
        let (ours, theirs) = pair();
        rustix::net::send(&ours, b"{\"nonsense\":1}", SendFlags::empty()).unwrap();
        assert!(theirs.recv::<Request>().is_err());
        drop(ours);
        assert!(theirs.recv::<Request>().unwrap().is_none());
    }

    #[test]
    fn a_request_with_an_unknown_field_is_refused() {
        assert!(parse::<Request>(br#"{"hello":{"version":1,"extra":2}}"#).is_err());
        assert!(parse::<Request>(br#"{"surprise":{}}"#).is_err());
    }

    #[test]
    fn what_fuzzing_found_stays_harmless() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/control_messages");
        let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{folder} is empty");
        inputs.iter().for_each(|path| fuzz_messages(&std::fs::read(path).unwrap()));
    }
}
