//! The state of a stopped VM, and how it becomes a running one.
//!
//! - [`MachineState`]: everything about a VM except the contents of its memory and its disks, as plain data;
//!   every part of it may come from an edited file, so the code that restores a part checks every number in
//!   it;
//! - [`file`]: the machine state as a file;
//! - [`vcpu`]: a vCPU's state, out of KVM and into it;
//! - [`features`]: whether this host's CPU has the features of the one where the guest stopped;
//! - `expected`: what its controller expects of a state;
//! - `msrs`: which model-specific registers a state may set;
//! - `memory_layer`: guest memory as files;
//! - [`frozen`]: a stopped VM as a whole: made by [`Running::freeze`](crate::vm::Running::freeze) or
//!   from files, thawed in a child;
//! - `save`: a stopped VM saved to files, and its disks' layers merged and sealed.
//!
//! Nothing here knows about processes and forks.

mod expected;
pub mod features;
pub mod file;
pub mod frozen;
mod memory_layer;
mod msrs;
mod save;
pub mod vcpu;

use std::fmt;

use kvm_bindings::{kvm_clock_data, kvm_irqchip};
use serde::{Deserialize, Serialize};

pub use expected::Expected;
pub use frozen::{ChildParts, Frozen};
pub(crate) use memory_layer::check_any_bytes as check_any_memory_layer;
pub use save::{MergedLayers, SaveFiles, Saving};
pub use vcpu::VcpuState;

/// A VM without its memory and its disks.
pub struct MachineState {
    /// Where its memory is, in the order of memory layers.
    pub memory: Vec<MemoryRange>,
    /// Its vCPUs, in the order of their ids.
    pub vcpus: Vec<VcpuState>,
    /// Its interrupt chips.
    pub interrupts: InterruptState,
    /// Its clock.
    pub clock: ClockState,
    /// Its serial console.
    pub serial: SerialState,
    /// Which generation of the VM this is.
    pub generation: GenerationState,
    /// Its virtio devices, in the order the guest finds them.
    pub devices: Vec<DeviceState>,
}

impl fmt::Debug for MachineState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MachineState")
            .field("memory", &self.memory)
            .field("vcpus", &self.vcpus.len())
            .field("devices", &self.devices)
            .finish_non_exhaustive()
    }
}

/// A range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryRange {
    /// Its first address in the guest.
    pub start: u64,
    /// Bytes in it.
    pub length: u64,
}

/// The two halves of the legacy interrupt controller (which the guest does not use, but KVM has),
/// and the I/O APIC.
#[derive(Clone, Serialize, Deserialize)]
pub struct InterruptState {
    /// As KVM numbers them.
    pub chips: [kvm_irqchip; 3],
}

/// The clock the guest reads.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ClockState {
    /// As KVM gave it.
    pub clock: kvm_clock_data,
}

/// The registers of the serial port.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SerialState {
    /// Divisor latch: low byte, high byte.
    pub baud_divisor: (u8, u8),
    /// Interrupt enable and interrupt identification.
    pub interrupt: (u8, u8),
    /// Line control and line status.
    pub line: (u8, u8),
    /// Modem control and modem status.
    pub modem: (u8, u8),
    /// The scratch register.
    pub scratch: u8,
    /// Input that the guest has not read yet.
    pub input: Vec<u8>,
}

/// The generation id that the guest has. For people and tests: a child gets another one.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GenerationState {
    /// The id.
    pub id: [u8; 16],
}

/// A virtio device: the state of its transport, and its own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceState {
    /// The transport's state.
    pub transport: TransportState,
    /// The device's own state.
    pub part: DevicePart,
}

/// The registers of a virtio-mmio transport, without those that follow from the device. The reserved offsets
/// (0x0c4 to 0x0f8) read as 0 and ignore writes.
///
/// The file format has no field names, so a new field here breaks every old file. In one change: raise the version of
/// `Kind::Device` (`file.rs`), keep this struct for files of version 1, and let `file::section` return the version, since it
/// refuses every version but the newest. The closure `change` of `fuzz_device_state` (`fuzz.rs`) gets a line for the field.
/// The examples in `fuzz/corpus/state_file` stay, because tests read them. Add new ones: the bytes of `good()` in
/// `file_tests.rs`, and the same without the header. `good()` has no disk: for a disk's field, add one to its state first.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransportState {
    /// How far driver and device have come.
    pub status: u32,
    /// Why the interrupt was raised, as far as not acknowledged.
    pub interrupt_status: u32,
    /// The features the driver chose.
    pub driver_features: u64,
    /// Which half of the offered features the driver reads.
    pub device_features_select: u32,
    /// Which half of its features the driver writes.
    pub driver_features_select: u32,
    /// Which queue's registers the driver sees.
    pub queue_select: u32,
    /// Counts changes of the configuration space.
    pub config_generation: u32,
    /// The queues.
    pub queues: Vec<QueueState>,
}

/// One queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueueState {
    /// Number of descriptors, as the driver wrote it.
    pub size: u32,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the ring the driver writes.
    pub available: u64,
    /// Guest address of the ring the device writes.
    pub used: u64,
    /// How far the device has come in both rings; none for a queue that is not set up.
    pub position: Option<QueuePosition>,
}

/// How far a device has come in a queue.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QueuePosition {
    /// The next request it takes.
    pub next_available: u16,
    /// Where it puts the next request it has finished.
    pub next_used: u16,
}

/// The part of a device's state that depends on its kind.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum DevicePart {
    /// A disk.
    Block(BlockState),
    /// A network interface.
    Net(NetState),
    /// The socket device.
    Vsock(VsockState),
    /// The source of random numbers, which has no state.
    Rng,
}

/// A disk. It is also all of a `Kind::Disk` section: a new field raises the versions of `Kind::Device` and `Kind::Disk`. See
/// [`TransportState`] for the steps.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BlockState {
    /// The serial number shown to the guest.
    pub id: [u8; 20],
    /// Bytes on the disk.
    pub size: u64,
    /// Whether the guest may write: then every child needs a layer of its own.
    pub writable: bool,
    /// How many files it is made of: the base and its layers.
    pub files: u8,
    /// Which of them holds each block, as (number of blocks, index of the file).
    pub runs: Vec<(u64, u8)>,
}

/// A network interface.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetState {
    /// Its hardware address.
    pub mac: [u8; 6],
    /// Whether the guest was notified that its link is up.
    pub link_up: bool,
}

/// The socket device. Connections do not outlive a freeze.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VsockState {
    /// The guest's address.
    pub cid: u32,
    /// The ports of the host the guest may call; none means all.
    pub guest_ports: Option<Vec<u32>>,
    /// The port the next connection of the host gets: never one the guest may still know.
    pub next_host_port: u32,
}
