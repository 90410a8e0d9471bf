//! Controller ⇄ monitor: messages over a unix `SEQPACKET` socket, descriptors attached.
//!
//! One packet is one JSON message. The controller sends a [`Request`] and gets one [`Message::Reply`] for it;
//! [`Message::Event`]s come at any time, also between a request and its reply. The controller may send several requests
//! before the first reply: replies come in the order of the requests. The first
//! request on a connection is [`Request::Hello`]; a monitor without the offered version answers with an error
//! and closes. A monitor serves one connection at a time. When the controller ends, the monitor keeps its VM running.
//!
//! # Versions
//!
//! A controller offers the oldest version it speaks, [`OLDEST_VERSION`], before it knows anything of the monitor:
//! a `Hello` may wait in a socket before its reader exists. The reply has the newest version that the monitor
//! speaks. The controller sends a request, or a field, of a newer version only to a monitor that speaks it. A
//! monitor sends replies of a newer version only to requests of that version.
//!
//! | version | adds |
//! |---|---|
//! | 2 | a boot on frozen disk layers ([`BootConfig::disk_state`]), a save without memory ([`SaveConfig::memory`]) |
//!
//! Descriptors travel with the message that names them: a [`FdRef`] is an index into the list
//! attached to it. The monitor never opens anything by name.

mod channel;

use serde::{Deserialize, Serialize};

pub use channel::{Channel, fuzz_messages};

/// The version of this protocol. A monitor may run longer than the controller that started it, so a controller also
/// supports the previous version.
pub const VERSION: u32 = 2;
/// The oldest version that both sides support, and that a controller offers.
pub const OLDEST_VERSION: u32 = 1;
/// The longest message: a list of all children of a template. A kernel's default socket buffer takes a little more.
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

/// A request of the controller to a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Request {
    /// First on every connection.
    Hello {
        /// The oldest version that the controller supports.
        version: u32,
    },
    /// Build a VM and run it. Once per monitor.
    Boot(BootConfig),
    /// Turn the running VM into a template, for good: vCPUs and devices stop, their state is kept
    /// in memory beside the guest's, one thread stays and forks children when asked.
    Freeze,
    /// Give up write access to frozen layers. All children of a template inherit its descriptors, and they
    /// share the frozen layers.
    Seal {
        /// For each disk its topmost frozen layer, the same file opened for reading only; none for a
        /// disk that has none.
        layers: Vec<Option<FdRef>>,
    },
    /// Sandboxes only: fork a template off the VM, which goes on. vCPUs and devices stop before the fork and go on after
    /// it.
    Branch(BranchConfig),
    /// Sandboxes only: vCPUs and devices stand still until [`Request::Resume`].
    Pause,
    /// Sandboxes only: let a paused VM go on.
    Resume,
    /// Use one file in the place of several frozen layers, which hold the same blocks.
    ReplaceLayers {
        /// For each disk the layers to replace, if any.
        disks: Vec<Option<ReplacedLayers>>,
    },
    /// Templates only: the frozen layers of all disks.
    Layers,
    /// Become the template of a snapshot on disk. Once, on a monitor that has not booted.
    Load(LoadConfig),
    /// Templates only: fork a child that runs on from the frozen state.
    Fork(ForkConfig),
    /// Templates only: fork a saver that writes the template to files, as far as it differs from a
    /// parent on disk, and exits with 0 when they are safely on disk.
    Save(SaveConfig),
    /// Templates only: fork a process that copies frozen layers of disks into one file each, and exits
    /// with 0 when these are safely on disk. See [`Request::ReplaceLayers`].
    Merge(MergeConfig),
    /// Templates only: all children that are alive or whose end was not acknowledged.
    Children,
    /// Templates only: drop the recorded ends of these children.
    Acknowledge {
        /// Their names.
        children: Vec<String>,
    },
    /// Report the state of the VM.
    Status,
    /// End the VM at once, like a power loss, and exit.
    Stop,
}

/// A message of a monitor.
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
    /// Both sides support this version.
    Hello {
        /// The version that the controller offered.
        version: u32,
        /// The build of the monitor, for people.
        monitor: String,
        /// The newest version that the monitor speaks. Monitors of version 1 do not send it.
        #[serde(default = "first_version")]
        newest: u32,
    },
    /// The vCPUs run.
    Booted,
    /// The VM is a template now.
    Frozen,
    /// The frozen layers are read-only.
    Sealed,
    /// The template is ready to fork.
    Loaded,
    /// The branch exists, and the source runs again (unless it was paused before). Attached are a pidfd
    /// of the branch and the layers it froze. Both processes can still write to those: see
    /// [`Request::Seal`], which a sandbox takes, too.
    Branched {
        /// The process id of the branch.
        pid: i32,
        /// How long the vCPUs stood still, in microseconds.
        pause_us: u64,
        /// For each disk the layer that was its topmost one until now; none for a read-only disk.
        layers: Vec<Option<FdRef>>,
    },
    /// The VM stands still.
    Paused,
    /// The VM runs again.
    Resumed,
    /// One file is used in the place of several.
    Replaced,
    /// The frozen layers of all disks, attached.
    Layers {
        /// For each disk its layers, oldest first; the base is not among them.
        disks: Vec<Vec<FdRef>>,
    },
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
    /// Their recorded ends are dropped.
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

fn first_version() -> u32 {
    1
}

/// What happened in a monitor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Event {
    /// The VM ended by itself, or a child could not be restored (then this comes without a hello);
    /// the process exits next.
    Ended(VmEnd),
    /// The guest wrote to the ready port for the first time since it was booted or forked: the ready signal
    /// of guests without an agent.
    Ready,
    /// The guest wrote to a disk, and the host's disk has no room for that. The monitor has paused the VM.
    /// [`Request::Resume`] tries the write again; [`Request::Pause`] makes it an ordinary pause. Until then
    /// every controller that connects gets this event right after its hello.
    DiskFull,
    /// A child of this template ended. The template keeps the status, and lists it in [`Reply::Children`],
    /// until it is acknowledged.
    ChildEnded {
        /// Its name.
        child: String,
        /// Its exit status.
        status: WaitStatus,
    },
    /// The guest connected to a vsock port of the host. The attached descriptor is the host's end;
    /// closing it ends the connection.
    GuestConnection {
        /// The port the guest asked for.
        port: u32,
    },
}

/// The state of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The current role of the process.
    pub role: Role,
    /// Whether a VM's vCPUs run: those of a paused one do not.
    pub running: bool,
    /// Whether the guest has written to the ready port.
    pub ready: bool,
}

/// The role of a monitor's process.
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
    /// Its process id; the kernel may give it to another process once this one has ended.
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
    /// The kind of the end.
    pub reason: EndReason,
    /// A sentence about it.
    pub detail: String,
    /// The end of the guest's console output, at most [`CONSOLE_TAIL`] bytes.
    pub console_tail: String,
}

/// The kinds of ends of a VM.
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

/// The resources of a VM.
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
    /// For disks with frozen layers: the state of all disks, as a saver writes it without memory, opened for
    /// reading. It says which layer holds which block. Version 2.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_state: Option<FdRef>,
    /// A network interface.
    pub net: Option<NetConfig>,
    /// The socket device.
    pub vsock: Option<VsockConfig>,
}

/// The most vCPUs of a VM.
pub const MAX_VCPUS: u8 = 32;
/// The least memory of a Linux guest.
pub const MIN_MEM_MIB: u64 = 64;

/// A snapshot on disk, from which a template is loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadConfig {
    /// `/dev/kvm`, opened for reading and writing.
    pub kvm: FdRef,
    /// The state file, opened for reading.
    pub state: FdRef,
    /// The memory layers, opened for reading, the oldest first. The oldest holds all of guest memory,
    /// one range after the other, with holes where it is zero; every other one holds the pages that
    /// differ from those below it. Mapped privately and never written.
    pub memory: Vec<FdRef>,
    /// The files of each disk, in the order of `/dev/vda`, `/dev/vdb`, …
    pub disks: Vec<DiskFiles>,
    /// How many vCPUs the state must have, because limits and quotas count them. A controller of an older
    /// version sends none.
    #[serde(default)]
    pub vcpus: Option<u8>,
    /// How much memory the state must have, in MiB, for the same reason.
    #[serde(default)]
    pub mem_mib: Option<u64>,
    /// Ports of the host the guest may call, as in [`VsockConfig`]. A state with others is refused.
    #[serde(default)]
    pub guest_ports: Vec<u32>,
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

/// A child's own resources.
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
    /// For each disk an empty file, opened for reading and writing, for the writes of the child; none for a disk that is
    /// read-only.
    pub layers: Vec<Option<FdRef>>,
    /// Its tap, as in [`NetConfig`]. Without one the interface the guest may have loses its link.
    pub tap: Option<FdRef>,
    /// Its vsock listener, as in [`VsockConfig`]; needed if the guest has the socket device.
    pub vsock: Option<FdRef>,
    /// The cgroup that the child starts in: a folder of the cgroup file system, opened.
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
    /// An empty file opened for reading and writing, for the memory. Without it, which is version 2, only the
    /// disks are saved: the state is theirs alone, and there is neither parent nor pagemap.
    pub memory: Option<FdRef>,
    /// The memory layers of the parent, the oldest first, as in [`LoadConfig`]: their contents are not
    /// written again. The template must come from this parent, directly or not. Empty: everything is written.
    pub parent: Vec<FdRef>,
    /// The `pagemap` of the template's process, opened for reading: it shows which pages may differ from the
    /// parent. Without it the saver compares all pages.
    pub pagemap: Option<FdRef>,
    /// For each disk an empty file opened for reading and writing that takes all frozen layers as one, or
    /// none to keep them as they are. The saved state describes the merged disks. An empty list means none for each.
    pub disks: Vec<Option<FdRef>>,
    /// A file for the progress: [`SaveProgress`] at its beginning and, after a failure, the reason as text
    /// behind that, at most [`SaveProgress::MAX_REASON`] bytes.
    pub progress: Option<FdRef>,
}

/// How far a saver is: three little-endian `u64`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SaveProgress {
    /// Bytes of guest memory scanned.
    pub scanned_bytes: u64,
    /// Bytes of guest memory in all.
    pub total: u64,
    /// Bytes written to the memory layer and to merged disk layers.
    pub written: u64,
}

impl SaveProgress {
    /// Its length in a file.
    pub const LENGTH: usize = 24;
    /// How long the reason of a failure behind it can be.
    pub const MAX_REASON: usize = 1024;

    /// As in a file.
    pub fn to_bytes(self) -> [u8; SaveProgress::LENGTH] {
        let mut bytes = [0; SaveProgress::LENGTH];
        for (place, number) in bytes.chunks_exact_mut(8).zip([self.scanned_bytes, self.total, self.written]) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    /// From a file.
    pub fn from_bytes(bytes: [u8; SaveProgress::LENGTH]) -> SaveProgress {
        let number = |at: usize| {
            let mut number = [0; 8];
            number.copy_from_slice(&bytes[at..at + 8]);
            u64::from_le_bytes(number)
        };
        SaveProgress { scanned_bytes: number(0), total: number(8), written: number(16) }
    }
}

/// The resources of a branch and its source.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BranchConfig {
    /// The listening control socket of the branch.
    pub control: FdRef,
    /// For each disk of the source an empty file, opened for reading and writing, for the writes of the source from now
    /// on; none for a disk that is read-only.
    pub layers: Vec<Option<FdRef>>,
}

/// Frozen layers of a disk that become one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReplacedLayers {
    /// How many, counted from the oldest; all of them frozen.
    pub count: u8,
    /// The file: empty and opened for reading and writing in [`MergeConfig`], with their blocks and
    /// opened for reading only in [`Request::ReplaceLayers`].
    pub layer: FdRef,
}

/// The layers to merge.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MergeConfig {
    /// A name for the process, as for any child.
    pub child: String,
    /// For each disk the layers to merge, if any.
    pub disks: Vec<Option<ReplacedLayers>>,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DiskConfig {
    /// The image, opened for reading only. Never written.
    pub base: FdRef,
    /// An empty file, opened for reading and writing, for the writes of the guest. Without it the disk is read-only.
    pub layer: Option<FdRef>,
    /// Frozen layers, oldest first, opened for reading only. With [`BootConfig::disk_state`] only. Version 2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub frozen: Vec<FdRef>,
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
    /// A listening unix stream socket. A client writes `CONNECT port\n`, reads `OK n\n`, and is then
    /// connected to that port in the guest.
    pub listener: FdRef,
    /// Ports of the host the guest may call. A call to any other is refused by the monitor alone: a guest
    /// cannot keep the controller busy with unwanted calls.
    pub guest_ports: Vec<u32>,
}
