//! A VM: built from its parts, started, paused, frozen, ended.
//!
//! `Vm` (built or thawed, nothing runs) → [`Running`], which may be [`Paused`] while a guard lives → ended,
//! or [`Frozen`], from which a copy of the process makes a `Vm` again.

use std::fs::File;
use std::os::fd::{FromRawFd, IntoRawFd};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use forkd_protocol::control::{CONSOLE_TAIL, EndReason, VmEnd};
use kvm_bindings::{CpuId, kvm_userspace_memory_region};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::boot::{self, BootSource, cpuid, registers};
use crate::bus::Bus;
use crate::devices::generation_id::GenerationId;
use crate::devices::serial::{ConsoleLog, Serial};
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::mmio::{MmioDevice, NOTIFY_OFFSET};
use crate::ending::Ending;
use crate::event_loop::EventLoop;
use crate::layout::{
    GENERATION_GSI, GENERATION_ID, KVM_TSS, MAX_VIRTIO, SERIAL_GSI, virtio_base, virtio_gsi,
};
use crate::seccomp::{self, ThreadKind};
use crate::state::frozen::save_interrupts;
use crate::state::{
    ClockState, Frozen, GenerationState, MachineState, MemoryRange, SerialState, TransportState, vcpu,
};
use crate::vcpu::VcpuThreads;
use crate::{Error, GuestMemory, Result, memory};

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

/// What KVM has of a VM, and the memory under it.
pub(crate) struct Machine {
    // Fields drop in this order: vCPUs before their VM, and the VM before the memory it maps.
    pub(crate) vcpus: Vec<VcpuFd>,
    pub(crate) fd: VmFd,
    pub(crate) kvm: Kvm,
    /// Frequency of the host's TSC; 0 if KVM does not know.
    pub(crate) host_tsc_khz: u32,
    /// The CPUs the vCPUs were told to be.
    pub(crate) cpuids: Vec<CpuId>,
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

        let machine =
            Machine { host_tsc_khz: vcpus.first().map_or(0, tsc_khz), vcpus, cpuids, fd, kvm, memory };
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
        // number twice without having been told.
        let changed = interrupt(fd, GENERATION_GSI)?;
        let generation = GenerationId::restore(memory.clone(), GuestAddress(GENERATION_ID), changed);
        generation.renew().map_err(Error::system("write the VM generation id"))?;
        let bus = Arc::new(Bus::new(serial, virtio));
        Ok(Vm { machine, bus, event_loop, console, generation })
    }

    /// Starts all threads and lets the guest run.
    pub fn start(self, seccomp: seccomp::Mode) -> Result<Running> {
        let Vm {
            machine: Machine { vcpus, fd, kvm, host_tsc_khz, cpuids, memory },
            bus,
            event_loop,
            console,
            generation,
        } = self;
        let ending = Arc::new(Ending::new()?);
        let stop_devices = event_loop.stopper().map_err(Error::system("control the event loop"))?;
        let vcpus = VcpuThreads::spawn(vcpus, bus.clone(), ending.clone(), seccomp)?;
        let devices = match spawn_device_thread(event_loop, ending.clone(), seccomp) {
            Ok(thread) => thread,
            Err(error) => {
                vcpus.stop();
                return Err(error);
            }
        };
        vcpus.run();
        Ok(Running {
            vcpus,
            devices,
            stop_devices,
            bus,
            console,
            ending,
            generation,
            fd,
            kvm,
            host_tsc_khz,
            cpuids,
            memory,
        })
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.machine.memory
    }
}

fn spawn_device_thread(
    event_loop: EventLoop,
    ending: Arc<Ending>,
    seccomp: seccomp::Mode,
) -> Result<JoinHandle<()>> {
    let body = move || {
        let outcome = seccomp::install(ThreadKind::Device, seccomp)
            .and_then(|()| event_loop.run().map_err(Error::system("serve the devices")));
        if let Err(error) = outcome {
            ending.report(EndReason::Failed, error.chain());
        }
    };
    let builder = std::thread::Builder::new().name("devices".into()).stack_size(THREAD_STACK);
    builder.spawn(body).map_err(Error::system("start the device thread"))
}

/// A VM whose threads exist.
pub struct Running {
    vcpus: VcpuThreads,
    devices: JoinHandle<()>,
    stop_devices: EventFd,
    bus: Arc<Bus>,
    console: Arc<ConsoleLog>,
    ending: Arc<Ending>,
    generation: GenerationId,
    // Alive as long as anything may use it, and dropped before the memory it maps.
    fd: VmFd,
    kvm: Kvm,
    host_tsc_khz: u32,
    cpuids: Vec<CpuId>,
    memory: GuestMemory,
}

impl Running {
    /// Readable when the guest became ready or the VM has ended by itself, until it is read.
    pub fn news(&self) -> &EventFd {
        self.ending.event()
    }

    /// Whether the guest has said that it runs.
    pub fn is_ready(&self) -> bool {
        self.ending.is_ready()
    }

    /// How the VM ended, if it has.
    pub fn end(&self) -> Option<VmEnd> {
        let (mut reason, mut detail) = self.ending.get()?;
        // A kernel that panics resets the machine; only the console knows why.
        if reason == EndReason::Reset
            && let Some(message) = self.console.panic_message()
        {
            (reason, detail) = (EndReason::Panicked, message);
        }
        Some(VmEnd { reason, detail, console_tail: self.console.tail(CONSOLE_TAIL) })
    }

    /// Takes all vCPUs out of the guest. They go on when the guard is dropped.
    pub fn pause(&mut self) -> Paused<'_> {
        self.vcpus.park();
        Paused { vm: self }
    }

    /// Ends the VM as if its plug was pulled. When this returns, nothing of it runs.
    pub fn stop(self) {
        self.vcpus.stop();
        // It fails only when it is set already.
        let _ = self.stop_devices.write(1);
        let _ = self.devices.join();
    }

    /// Stops everything and keeps it as it is. Afterwards the VM has no threads, KVM has forgotten it, and
    /// all that is left of it is data. A VM that has ended, or ends while it is stopped, is refused; like
    /// after every error, nothing of it is left then.
    pub fn freeze(self) -> Result<Frozen> {
        let Running {
            vcpus,
            devices,
            stop_devices,
            bus,
            ending,
            generation,
            fd,
            kvm,
            host_tsc_khz,
            cpuids,
            memory,
            ..
        } = self;
        // vCPUs first: nobody gives the devices anything to do any more. They come back with their last
        // register access done.
        let vcpus = vcpus.stop();
        // Then the device thread, between two events: what it took from a queue is finished, and what it
        // did not take is found again after the thaw.
        let _ = stop_devices.write(1);
        let joined = devices.join();
        if let Some((_, detail)) = ending.get() {
            return Err(Error::Config(format!("the VM has ended ({detail}): there is nothing to freeze")));
        }
        if joined.is_err() {
            return Err(Error::Config("the device thread has failed: the VM cannot be frozen".into()));
        }
        // Devices before KVM: whatever they raised is in the interrupt chip when that is read.
        let (serial, virtio) = Arc::into_inner(bus)
            .ok_or_else(|| Error::Config("somebody still uses the devices: the VM cannot be frozen".into()))?
            .into_devices();
        let mut states = Vec::with_capacity(virtio.len());
        let mut disks = Vec::new();
        for device in virtio {
            let device = Arc::into_inner(device).and_then(|device| device.into_inner().ok());
            let device =
                device.ok_or_else(|| Error::Config("a device has failed: the VM cannot be frozen".into()))?;
            let (state, disk) = device.freeze();
            states.push(state);
            disks.extend(disk);
        }
        let mut state = MachineState {
            vcpus: vcpu::save_all(&kvm, &vcpus, &cpuids)?,
            clock: ClockState { clock: fd.get_clock().map_err(Error::kvm("KVM_GET_CLOCK"))? },
            interrupts: save_interrupts(&fd)?,
            memory: memory
                .iter()
                .map(|region| MemoryRange { start: region.start_addr().0, length: region.len() })
                .collect(),
            serial: serial.state(),
            generation: GenerationState {
                id: generation.id().map_err(Error::system("read the VM generation id"))?,
            },
            devices: states,
        };
        vcpu::keep_settable(&vcpus, &mut state.vcpus)?;
        Frozen::new(kvm, host_tsc_khz, state, memory, disks)
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }
}

/// A VM whose vCPUs stand still, as long as this lives.
pub struct Paused<'a> {
    vm: &'a mut Running,
}

impl Paused<'_> {
    /// The guest's memory, which only devices change now.
    pub fn memory(&self) -> &GuestMemory {
        &self.vm.memory
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        self.vm.vcpus.run();
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
/// The order matters. Memory slots come before the interrupt chip and the vCPUs: each slot set later
/// waits for the grace periods those start (6.8 ms instead of 0.4 ms). The interrupt chip comes before
/// the vCPUs, which get their local APICs from it. There is no PIT: ACPI tells the guest so.
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
        // SAFETY: the region is mapped for as long as `memory` or a clone of it lives, and whoever
        // owns the VM keeps one and drops it last. Guest memory is only accessed as volatile here.
        unsafe { vm.set_user_memory_region(slot) }.map_err(Error::kvm("KVM_SET_USER_MEMORY_REGION"))?;
    }
    vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
    let vcpus = (0..u64::from(count)).map(|id| vm.create_vcpu(id).map_err(Error::kvm("KVM_CREATE_VCPU")));
    let vcpus = vcpus.collect::<Result<_>>()?;
    Ok((vm, vcpus))
}

/// What is needed of KVM; Linux 6.1 has all of it on any x86-64 host.
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
