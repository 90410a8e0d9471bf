//! A VM: built from its parts, started, paused, frozen, ended.
//!
//! `Vm` (built or thawed, nothing runs) → [`Running`], which may be [`Paused`] while a guard lives, or
//! longer → ended, or [`Frozen`](crate::state::Frozen), from which a copy of the process makes a `Vm` again.

mod running;

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::{Arc, Mutex};

use kvm_bindings::{CpuId, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use rustix::mm::Advice;
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::boot::{self, BootSource, cpuid, registers};
use crate::bus::Bus;
use crate::devices::generation_id::GenerationId;
use crate::devices::serial::{ConsoleLog, Serial};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::mmio::{MmioDevice, NOTIFY_OFFSET};
use crate::event_loop::EventLoop;
use crate::exit::VmReport;
use crate::layout::{
    GENERATION_GSI, GENERATION_ID, KVM_TSS, MAX_VIRTIO, SERIAL_GSI, virtio_base, virtio_gsi,
};
use crate::seccomp;
use crate::state::{SerialState, TransportState, vcpu};
use crate::vcpu::VcpuThreads;
use crate::{Error, GuestMemory, Result, memory};
use running::DeviceThread;
pub use running::{ForkedBeside, Paused, Running};
pub(crate) use running::{KvmState, collect};

/// Stack of a device or vCPU thread: plenty for either. The usual 2 MiB would become one huge page on
/// hosts that hand those out freely, and every child would pay for all of it.
pub(crate) const THREAD_STACK: usize = 256 << 10;

/// KVM's only stable API version.
pub const KVM_API_VERSION: i32 = 12;

/// Everything a VM is made of.
pub struct VmParts {
    /// `/dev/kvm`.
    pub kvm: File,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub mem_mib: u64,
    /// Kernel, initramfs and command line.
    pub source: BootSource,
    /// Where the console's output goes.
    pub console: Arc<ConsoleLog>,
    /// Virtio devices, in the order the guest finds them.
    pub devices: Vec<Box<dyn VirtioDevice>>,
}

/// A VM's KVM objects, and the memory under it.
pub(crate) struct Machine {
    // Fields drop in this order: vCPUs before their VM, and the VM before the memory it maps.
    pub(crate) vcpus: Vec<VcpuFd>,
    pub(crate) fd: VmFd,
    pub(crate) kvm: Kvm,
    /// Frequency of the host's TSC; 0 if KVM does not know.
    pub(crate) host_tsc_khz: u32,
    /// The CPUIDs of the vCPUs.
    pub(crate) cpuids: Vec<CpuId>,
    /// The model-specific registers that make them up.
    pub(crate) msrs: Vec<u32>,
    pub(crate) memory: GuestMemory,
}

/// A VM that is ready to run: at its kernel's first instruction, or where it was frozen.
pub struct Vm {
    machine: Machine,
    bus: Arc<Bus>,
    event_loop: EventLoop,
    console: Arc<ConsoleLog>,
    generation: GenerationId,
}

impl Vm {
    /// Builds a VM. A failure leaves nothing behind.
    pub fn build(parts: VmParts) -> Result<Vm> {
        if parts.devices.len() > MAX_VIRTIO {
            let count = parts.devices.len();
            return Err(Error::Config(format!(
                "{count} virtio devices of at most {MAX_VIRTIO}; take fewer disks"
            )));
        }
        let kvm = open_kvm(parts.kvm)?;
        check_host(&kvm, parts.vcpus.into())?;
        let memory = memory::allocate(parts.mem_mib)?;
        let entry = boot::load(&memory, &parts.source, parts.vcpus, parts.devices.len())?;

        let (fd, vcpus) = create(&kvm, &memory, parts.vcpus)?;
        let supported = cpuid::supported(&kvm)?;
        let mut cpuids = Vec::with_capacity(vcpus.len());
        for (index, vcpu) in (0..).zip(&vcpus) {
            let cpuid = cpuid::for_vcpu(&supported, index, parts.vcpus)?;
            // Before the registers: it decides which of their bits are allowed.
            vcpu.set_cpuid2(&cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
            registers::set_common_state(vcpu)?;
            cpuids.push(cpuid);
        }
        if let Some(first) = vcpus.first() {
            registers::set_boot_state(first, entry)?;
        }

        let msrs = cpuids.first().map_or(Ok(Vec::new()), |cpuid| vcpu::find_msrs(&kvm, cpuid))?;
        let host_tsc_khz = vcpus.first().map_or(0, tsc_khz);
        let machine = Machine { host_tsc_khz, vcpus, cpuids, msrs, fd, kvm, memory };
        let Machine { fd, memory, .. } = &machine;
        let mut event_loop = EventLoop::new().map_err(Error::system("start an event loop"))?;
        let mut virtio = Vec::new();
        for (index, device) in parts.devices.into_iter().enumerate() {
            virtio.push(connect_virtio(&machine, &mut event_loop, index, device, None)?);
        }
        let serial = Serial::new(interrupt(fd, SERIAL_GSI)?, parts.console.clone());
        let bus = Arc::new(Bus::new(serial, virtio));
        let changed = interrupt(fd, GENERATION_GSI)?;
        let generation = GenerationId::new(memory.clone(), GuestAddress(GENERATION_ID), changed)
            .map_err(Error::system("write the VM generation id"))?;
        Ok(Vm { machine, bus, event_loop, console: parts.console, generation })
    }

    /// Puts the devices of a frozen VM around what KVM has of it again.
    pub(crate) fn resume(
        machine: Machine,
        console: Arc<ConsoleLog>,
        serial: &SerialState,
        devices: impl Iterator<Item = (Box<dyn VirtioDevice>, TransportState)>,
    ) -> Result<Vm> {
        let Machine { fd, memory, .. } = &machine;
        let mut event_loop = EventLoop::new().map_err(Error::system("start an event loop"))?;
        let mut virtio = Vec::new();
        for (index, (device, state)) in devices.enumerate() {
            virtio.push(connect_virtio(&machine, &mut event_loop, index, device, Some(&state))?);
        }
        let serial = Serial::restore(interrupt(fd, SERIAL_GSI)?, console.clone(), serial)
            .map_err(Error::system("restore the serial port"))?;
        // A new id and its interrupt before the first instruction, so that the guest cannot use a random
        // number twice without a notice.
        let changed = interrupt(fd, GENERATION_GSI)?;
        let generation = GenerationId::restore(memory.clone(), GuestAddress(GENERATION_ID), changed);
        generation.renew().map_err(Error::system("write the VM generation id"))?;
        let bus = Arc::new(Bus::new(serial, virtio));
        Ok(Vm { machine, bus, event_loop, console, generation })
    }

    /// Starts all threads and lets the guest run.
    pub fn start(self, seccomp: seccomp::Mode) -> Result<Running> {
        let Vm { machine, bus, event_loop, console, generation } = self;
        let Machine { vcpus, fd, kvm, host_tsc_khz, cpuids, msrs, memory } = machine;
        let report = Arc::new(VmReport::new()?);
        let vcpus = VcpuThreads::spawn(vcpus, bus.clone(), report.clone(), seccomp)?;
        let devices = match DeviceThread::spawn(event_loop, report.clone(), seccomp) {
            Ok(devices) => devices,
            Err(error) => {
                vcpus.stop();
                return Err(error);
            }
        };
        vcpus.run();
        Ok(Running {
            vcpus,
            devices,
            paused: false,
            bus,
            console,
            report,
            generation,
            fd,
            kvm,
            host_tsc_khz,
            cpuids,
            msrs,
            memory,
        })
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.machine.memory
    }
}

/// Takes a descriptor for `/dev/kvm`, after a look at whether it is one.
pub fn open_kvm(file: File) -> Result<Kvm> {
    // SAFETY: the descriptor is open and handed over. If it is not KVM's, its ioctls fail.
    let kvm = unsafe { Kvm::from_raw_fd(file.into_raw_fd()) };
    let version = kvm.get_api_version();
    if version != KVM_API_VERSION {
        return Err(Error::Config(format!(
            "the descriptor given for /dev/kvm answers with API version {version} instead of \
             {KVM_API_VERSION}: it is not KVM"
        )));
    }
    Ok(kvm)
}

/// Checks that this host's KVM can do what every VM needs, and `vcpus` vCPUs. Asked once, not for every
/// child.
pub fn check_host(kvm: &Kvm, vcpus: usize) -> Result<()> {
    for (capability, name) in NEEDED {
        if !kvm.check_extension(capability) {
            return Err(Error::Config(format!("this host's KVM lacks {name}; use a newer kernel")));
        }
    }
    let most = kvm.get_max_vcpus();
    if vcpus > most {
        return Err(Error::Config(format!("{vcpus} vCPUs: this host's KVM allows {most}")));
    }
    Ok(())
}

/// Frequency of a vCPU's TSC; 0 if KVM does not know.
pub(crate) fn tsc_khz(vcpu: &VcpuFd) -> u32 {
    vcpu.get_tsc_khz().unwrap_or(0)
}

/// Creates a VM over `memory` with `count` vCPUs.
///
/// The order matters. Memory slots come before the interrupt chip and the vCPUs: each slot set later waits
/// for the grace periods those start (6.8 ms instead of 0.4 ms). The interrupt chip comes before the vCPUs,
/// which get their local APICs from it. There is no PIT: the ACPI tables declare none.
pub fn create(kvm: &Kvm, memory: &GuestMemory, count: u8) -> Result<(VmFd, Vec<VcpuFd>)> {
    let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
    vm.set_tss_address(KVM_TSS).map_err(Error::kvm("KVM_SET_TSS_ADDR"))?;
    for (slot, region) in (0..).zip(memory.iter()) {
        let slot = kvm_userspace_memory_region {
            slot,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: region.as_ptr() as u64,
            flags: 0,
        };
        // SAFETY: the region is mapped for as long as `memory` or a clone of it lives, and the owner of the
        // VM keeps one and drops it last. Guest memory is only accessed as volatile here.
        unsafe { vm.set_user_memory_region(slot) }.map_err(Error::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    }
    vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
    let mut vcpus = Vec::with_capacity(count.into());
    for id in 0..u64::from(count) {
        let mut vcpu = vm.create_vcpu(id).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
        keep_from_forks(&mut vcpu, vm.run_size())?;
        vcpus.push(vcpu);
    }
    Ok((vm, vcpus))
}

/// Leaves the memory a vCPU shares with KVM out of forks, which have no use for it: mapped in one, it
/// would keep the whole VM from going away.
fn keep_from_forks(vcpu: &mut VcpuFd, size: usize) -> Result<()> {
    let shared: *mut kvm_bindings::kvm_run = vcpu.get_kvm_run();
    // SAFETY: the memory is mapped, `size` bytes of it, for as long as the vCPU is there. The advice changes
    // none of its bytes.
    unsafe { rustix::mm::madvise(shared.cast(), size, Advice::LinuxDontFork) }
        .map_err(Error::system("keep a vCPU's memory out of forks"))
}

/// The required KVM capabilities; Linux 6.1 has all of them on any x86-64 host.
const NEEDED: [(Cap, &str); 7] = [
    (Cap::Irqchip, "an interrupt chip"),
    (Cap::Irqfd, "interrupts by eventfd"),
    (Cap::Ioeventfd, "notifications by eventfd"),
    (Cap::UserMemory, "user memory"),
    (Cap::ExtCpuid, "CPUID"),
    (Cap::ImmediateExit, "immediate exit"),
    (Cap::TscDeadlineTimer, "the TSC deadline timer"),
];

/// An eventfd that raises interrupt `gsi` when written.
fn interrupt(vm: &VmFd, gsi: u32) -> Result<EventFd> {
    let event = EventFd::new(EFD_NONBLOCK).map_err(Error::system("create an eventfd"))?;
    // The kernel raises and lowers the line in a thread of its own. A VM that was saved in between has it up
    // for ever, and the next interrupt would change nothing: a driver that waits for it waits for ever too.
    vm.set_irq_line(gsi, false).map_err(Error::kvm("KVM_IRQ_LINE"))?;
    vm.register_irqfd(&event, gsi).map_err(Error::kvm("KVM_IRQFD"))?;
    Ok(event)
}

/// Puts `device` behind the registers of virtio device `index`, in the `state` a frozen VM had it in, with
/// its interrupt and notifications, and has it served.
fn connect_virtio(
    machine: &Machine,
    event_loop: &mut EventLoop,
    index: usize,
    device: Box<dyn VirtioDevice>,
    state: Option<&TransportState>,
) -> Result<Arc<Mutex<MmioDevice>>> {
    let interrupt = interrupt(&machine.fd, virtio_gsi(index))?;
    let memory = machine.memory.clone();
    let mut device = match state {
        None => MmioDevice::new(device, memory, interrupt),
        Some(state) => MmioDevice::restore(device, memory, interrupt, state),
    }
    .map_err(Error::system("create a device"))?;
    // A notification does not end KVM_RUN: it wakes the device thread through the eventfd.
    let address = IoEventAddress::Mmio(virtio_base(index) + NOTIFY_OFFSET);
    for (queue, notifier) in (0u32..).zip(device.queue_notifiers()) {
        machine.fd.register_ioevent(notifier, &address, queue).map_err(Error::kvm("KVM_IOEVENTFD"))?;
    }
    if state.is_some() {
        device.resume();
    }
    let device = Arc::new(Mutex::new(device));
    event_loop.add_device(device.clone()).map_err(Error::system("serve a device"))?;
    Ok(device)
}
