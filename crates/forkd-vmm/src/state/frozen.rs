//! A stopped VM: its state, its memory, its disks. Nothing of it runs, and its KVM VM is closed.
//!
//! Wherever it comes from, there is one way back: [`Frozen::thaw`] makes a new VM over the memory that
//! is here. It is called in a process that was forked for it, whose copy of everything is its own; so it
//! may use everything up, and what it can find prepared it does not do again.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use kvm_bindings::{CpuId, kvm_clock_data, kvm_irqchip};
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};

use super::vcpu::{self, Prepared};
use super::{
    DevicePart, DeviceState, InterruptState, MachineState, MemoryRange, features, memory_layer, msrs,
};
use crate::boot::cpuid;
use crate::devices::serial::{ConsoleLog, Serial};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::block::{Block, Disk};
use crate::devices::virtio::mmio::restore_queues;
use crate::devices::virtio::net::Net;
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::vsock::{GuestConnections, Vsock};
use crate::layout::{MAX_MEM_MIB, MAX_VIRTIO};
use crate::vm::{self, Machine, Vm};
use crate::{Error, GuestMemory, Result, memory};

/// A stopped VM.
pub struct Frozen {
    kvm: Kvm,
    /// Frequency of this host's TSC; 0 if it is not known.
    host_tsc_khz: u32,
    pub(super) state: MachineState,
    prepared: Vec<Prepared>,
    pub(super) memory: GuestMemory,
    pub(super) disks: Vec<Disk>,
}

/// A child's own resources.
pub struct ChildParts {
    /// Where its console's output goes.
    pub console: Arc<ConsoleLog>,
    /// For each disk the empty file for its writes; none for a disk that is read-only.
    pub layers: Vec<Option<File>>,
    /// Its tap, non-blocking. Without one the interface the guest may have has no link.
    pub tap: Option<OwnedFd>,
    /// Its vsock listener; needed if the guest has the socket device.
    pub vsock: Option<UnixListener>,
    /// Takes the guest's connections to the host.
    pub guest_connections: GuestConnections,
}

impl Frozen {
    /// Made by [`Running::freeze`](vm::Running::freeze).
    pub(crate) fn new(
        kvm: Kvm,
        host_tsc_khz: u32,
        state: MachineState,
        memory: GuestMemory,
        disks: Vec<Disk>,
    ) -> Result<Frozen> {
        let prepared =
            state.vcpus.iter().map(|vcpu| Prepared::new(vcpu, host_tsc_khz)).collect::<Result<_>>()?;
        Ok(Frozen { kvm, host_tsc_khz, state, prepared, memory, disks })
    }

    /// A VM from files: `state` as read by [`file::read`](super::file::read), the memory layers, the oldest
    /// first, and for each disk its base and its layers. A VM that could not be thawed is refused here, with
    /// the reason.
    pub fn load(
        kvm: Kvm,
        state: MachineState,
        memory: Vec<File>,
        disks: Vec<(File, Vec<File>)>,
    ) -> Result<Frozen> {
        vm::check_host(&kvm, state.vcpus.len())?;
        check_cpus(&kvm, &state)?;
        let disks = load_disks(&state.devices, disks)?;
        let memory = load_memory(&state.memory, memory)?;
        check_devices(&state.devices, &memory)?;
        Serial::check(&state.serial)?;

        // Restored once for nothing: a value this KVM does not take is found now, and not in a child.
        let (fd, vcpus) = vm::create(&kvm, &memory, state.vcpus.len() as u8)?;
        let host_tsc_khz = vcpus.first().map_or(0, vm::tsc_khz);
        let frozen = Frozen::new(kvm, host_tsc_khz, state, memory, disks)?;
        frozen.restore(&fd, &vcpus)?;
        Ok(frozen)
    }

    /// Makes it a VM again, which goes on exactly where it was when it is started.
    ///
    /// To be called in a forked process, or as the last thing done with this VM. The guest finds that it
    /// is a copy: another generation id, no vsock connections, perhaps no network link.
    pub fn thaw(mut self, parts: ChildParts) -> Result<Vm> {
        let disks = std::mem::take(&mut self.disks);
        let devices = thaw_devices(
            &self.state.devices,
            disks,
            parts.layers,
            parts.tap,
            parts.vsock,
            parts.guest_connections,
        )?;

        // VM, TSS, memory slots, interrupt chip, vCPUs: see there.
        let (fd, vcpus) = vm::create(&self.kvm, &self.memory, self.state.vcpus.len() as u8)?;
        self.restore(&fd, &vcpus)?;
        // Devices after the interrupt chip: setting that would undo what they raise.
        let Frozen { kvm, host_tsc_khz, state, prepared, memory, .. } = self;
        let cpuids = prepared.into_iter().map(Prepared::into_cpuid).collect();
        let msrs = vcpu::saved_msrs(&state.vcpus);
        let machine = Machine { kvm, host_tsc_khz, fd, vcpus, cpuids, msrs, memory };
        let transports = state.devices.into_iter().map(|device| device.transport);
        Vm::resume(machine, parts.console, &state.serial, devices.into_iter().zip(transports))
    }

    /// Puts everything that KVM keeps into a new VM over this memory.
    fn restore(&self, fd: &VmFd, vcpus: &[VcpuFd]) -> Result<()> {
        for ((vcpu, state), prepared) in vcpus.iter().zip(&self.state.vcpus).zip(&self.prepared) {
            vcpu::restore(vcpu, state, prepared)?;
        }
        // Before the clock, which is faster when all TSCs agree.
        vcpu::equalise_tsc(vcpus)?;
        // Before any vCPU runs and reads it. Without flags it goes on from the frozen value: a guest's
        // monotonic clock must not jump by the age of a snapshot. The time of day is the agent's.
        let clock = kvm_clock_data { clock: self.state.clock.clock.clock, ..Default::default() };
        fd.set_clock(&clock).map_err(Error::kvm("KVM_SET_CLOCK"))?;
        for chip in &self.state.interrupts.chips {
            fd.set_irqchip(chip).map_err(Error::kvm("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }

    /// Its parts.
    pub fn state(&self) -> &MachineState {
        &self.state
    }

    /// Its memory, in which nothing changes.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }

    /// All descriptors it owns.
    pub(crate) fn descriptors(&self) -> Vec<RawFd> {
        let disks = self.disks.iter().flat_map(Disk::files).map(AsRawFd::as_raw_fd);
        let memory = self.memory.iter().filter_map(|region| region.file_offset());
        let memory = memory.map(|offset| offset.file().as_raw_fd());
        [self.kvm.as_raw_fd()].into_iter().chain(disks).chain(memory).collect()
    }

    /// Its disks, in order.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }
}

/// Reads the three interrupt chips of a VM.
pub(crate) fn save_interrupts(fd: &VmFd) -> Result<InterruptState> {
    let mut chips = [kvm_irqchip::default(); 3];
    for (id, chip) in (0..).zip(&mut chips) {
        chip.chip_id = id;
        fd.get_irqchip(chip).map_err(Error::kvm("KVM_GET_IRQCHIP"))?;
    }
    Ok(InterruptState { chips })
}

/// Whether this host could resume the guest in a state file; the error has the reason why not.
pub fn check_state(kvm: OwnedFd, file: &File) -> Result<()> {
    // SAFETY: the descriptor is open, and given away here.
    let kvm = unsafe { Kvm::from_raw_fd(kvm.into_raw_fd()) };
    check_cpus(&kvm, &super::file::read(file)?)
}

/// Compares the state's CPUs with those of a VM that boots here.
fn check_cpus(kvm: &Kvm, state: &MachineState) -> Result<()> {
    let fresh = check_features(&cpuid::supported(kvm)?, state)?;
    let allowed = vcpu::find_msrs(kvm, &fresh)?;
    state.vcpus.iter().try_for_each(|vcpu| msrs::check(vcpu, &allowed))
}

/// Compares the CPUIDs in the state with those of a guest that boots on a host with `supported`. Returns the
/// CPUID that the first vCPU would have.
fn check_features(supported: &CpuId, state: &MachineState) -> Result<CpuId> {
    let grant = super::file::grant(state);
    let fresh = |index| cpuid::granted(supported, index, state.vcpus.len() as u8, grant);
    // All vCPUs are alike, but a file may differ.
    for (index, vcpu) in (0..).zip(&state.vcpus) {
        features::check(&vcpu.cpuid, fresh(index)?.as_slice(), supported.as_slice())?;
    }
    fresh(0)
}

fn load_memory(ranges: &[MemoryRange], layers: Vec<File>) -> Result<GuestMemory> {
    let total = ranges.iter().try_fold(0u64, |sum, range| sum.checked_add(range.length));
    let mib = total.filter(|bytes| bytes % (1 << 20) == 0).map_or(0, |bytes| bytes >> 20);
    let saved = ranges.iter().map(|range| (range.start, range.length));
    if mib == 0 || mib > MAX_MEM_MIB || !saved.eq(memory::ranges(mib)) {
        return Err(Error::Config(
            "the state's memory ranges are none a VM has; make the snapshot again".into(),
        ));
    }
    memory_layer::map(&memory_layer::LayerChain::open(layers, mib << 20)?)
}

fn load_disks(devices: &[DeviceState], files: Vec<(File, Vec<File>)>) -> Result<Vec<Disk>> {
    let states: Vec<_> = devices
        .iter()
        .filter_map(|device| if let DevicePart::Block(state) = &device.part { Some(state) } else { None })
        .collect();
    if states.len() != files.len() {
        let (expected, found) = (states.len(), files.len());
        return Err(Error::Config(format!("the snapshot's VM has {expected} disks, but {found} were given")));
    }
    let mut disks = Vec::new();
    for (index, (state, (base, layers))) in states.into_iter().zip(files).enumerate() {
        let disk = Disk::frozen(base, layers, state)
            .map_err(|error| Error::Config(format!("disk {index} of the snapshot: {error}")))?;
        disks.push(disk);
    }
    Ok(disks)
}

/// Looks at everything [`thaw_devices`] and the transport will, without the parts a child brings.
fn check_devices(devices: &[DeviceState], memory: &GuestMemory) -> Result<()> {
    if devices.len() > MAX_VIRTIO {
        return Err(Error::Config(format!(
            "the state has {} devices of at most {MAX_VIRTIO}",
            devices.len()
        )));
    }
    if devices.iter().filter(|device| matches!(device.part, DevicePart::Vsock(_))).count() > 1 {
        return Err(Error::Config("the state has more than one socket device".into()));
    }
    for (index, device) in devices.iter().enumerate() {
        let (features, sizes) = match &device.part {
            DevicePart::Block(state) => (Block::features_of(state.writable), Block::QUEUE_SIZES),
            DevicePart::Net(_) => (Net::FEATURES, Net::QUEUE_SIZES),
            DevicePart::Vsock(state) if (3..u32::MAX).contains(&state.cid) => (0, Vsock::QUEUE_SIZES),
            DevicePart::Vsock(state) => {
                return Err(Error::Config(format!("the state's vsock address {} is none", state.cid)));
            }
            DevicePart::Rng => (0, Rng::QUEUE_SIZES),
        };
        restore_queues(&device.transport, features, sizes, memory).map_err(|error| {
            Error::Config(format!(
                "device {index} of the state makes no sense: {error}; make the snapshot again"
            ))
        })?;
    }
    Ok(())
}

/// The devices of a child: from the state, over the child's own resources.
fn thaw_devices(
    states: &[DeviceState],
    disks: Vec<Disk>,
    layers: Vec<Option<File>>,
    tap: Option<OwnedFd>,
    vsock: Option<UnixListener>,
    guest_connections: GuestConnections,
) -> Result<Vec<Box<dyn VirtioDevice>>> {
    if layers.len() != disks.len() {
        let (expected, found) = (disks.len(), layers.len());
        return Err(Error::Config(format!("the VM has {expected} disks, but layers for {found} were given")));
    }
    let mut disks = disks.into_iter().zip(layers).enumerate();
    let (mut tap, mut vsock) = (tap, vsock.map(|listener| (listener, guest_connections)));
    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::with_capacity(states.len());
    for state in states {
        devices.push(match &state.part {
            DevicePart::Block(state) => {
                let Some((index, (mut disk, layer))) = disks.next() else {
                    return Err(Error::Config("the state has more disks than the VM".into()));
                };
                disk.add_layer(layer).map_err(|error| Error::Config(format!("layers[{index}]: {error}")))?;
                Box::new(Block::with_id(disk, state.id))
            }
            DevicePart::Net(state) => Box::new(Net::restore(tap.take(), state)),
            DevicePart::Vsock(state) => {
                let Some((listener, connections)) = vsock.take() else {
                    return Err(Error::Config(
                        "the VM has a socket device: a vsock listener is needed".into(),
                    ));
                };
                let device = Vsock::restore(state, listener, connections);
                Box::new(device.map_err(Error::system("set up the vsock listener"))?)
            }
            DevicePart::Rng => Box::new(Rng::new()),
        });
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use kvm_bindings::kvm_cpuid_entry2;

    use super::*;

    /// On any host, with any KVM.
    #[test]
    fn a_state_may_have_what_a_guest_that_boots_gets_and_not_all_that_kvm_offers() {
        let vmx = 1 << 5;
        let host = |ecx| {
            let leaves = [
                kvm_cpuid_entry2 { function: 0, eax: 1, ebx: 0x756e_6547, ..Default::default() },
                kvm_cpuid_entry2 { function: 1, ecx, ..Default::default() },
            ];
            CpuId::from_entries(&leaves).unwrap()
        };
        let mut state =
            super::super::file::parse(include_bytes!("../../../../fuzz/corpus/state_file/file")).unwrap();
        state.vcpus.truncate(1);
        state.vcpus[0].cpuid = host(1).as_slice().to_vec();
        check_features(&host(1 | vmx), &state).unwrap();
        state.vcpus[0].cpuid = host(1 | vmx).as_slice().to_vec();
        let text = check_features(&host(1 | vmx), &state).unwrap_err().to_string();
        assert!(text.contains("vmx"), "{text}");
    }
}
