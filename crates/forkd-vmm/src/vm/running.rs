//! A VM that runs: its threads, made to stand still, to go on, to end.
//!
//! Knows nothing of how a VM is built, and of processes only that one can be copied while the VM stands
//! still. It does not know the purpose of the copy.

use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use forkd_protocol::control::{CONSOLE_TAIL, EndReason, VmEnd};
use kvm_bindings::CpuId;
use kvm_ioctls::{Kvm, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::EventFd;

use super::THREAD_STACK;
use crate::bus::Bus;
use crate::devices::generation_id::GenerationId;
use crate::devices::serial::ConsoleLog;
use crate::devices::virtio::block::Disk;
use crate::event_loop::{EventLoop, LoopControl};
use crate::exit::VmReport;
use crate::fork;
use crate::seccomp::{self, ThreadKind};
use crate::state::frozen::save_interrupts;
use crate::state::{
    ClockState, Frozen, GenerationState, InterruptState, MachineState, MemoryRange, VcpuState, vcpu,
};
use crate::vcpu::VcpuThreads;
use crate::{Error, GuestMemory, Result, memory};

/// The thread that serves the devices.
pub(crate) struct DeviceThread {
    thread: JoinHandle<()>,
    control: LoopControl,
}

impl DeviceThread {
    pub(super) fn spawn(
        mut event_loop: EventLoop,
        report: Arc<VmReport>,
        seccomp: seccomp::Mode,
    ) -> Result<DeviceThread> {
        let control = event_loop.control().map_err(Error::system("control the event loop"))?;
        event_loop.report_to(Arc::clone(&report));
        let body = move || {
            let outcome = seccomp::install(ThreadKind::Device, seccomp)
                .and_then(|()| event_loop.run().map_err(Error::system("serve the devices")));
            if let Err(error) = outcome {
                report.report(EndReason::Failed, error.chain());
            }
        };
        let builder = std::thread::Builder::new().name("devices".into()).stack_size(THREAD_STACK);
        let thread = builder.spawn(body).map_err(Error::system("start the device thread"))?;
        Ok(DeviceThread { thread, control })
    }

    /// Ends it between two events. Returns whether it was well until then.
    fn stop(self) -> bool {
        self.control.stop();
        self.thread.join().is_ok()
    }
}

/// A VM whose threads exist.
pub struct Running {
    pub(crate) vcpus: VcpuThreads,
    pub(crate) devices: DeviceThread,
    /// Whether it stands still until it is resumed.
    pub(crate) paused: bool,
    pub(crate) bus: Arc<Bus>,
    pub(crate) console: Arc<ConsoleLog>,
    pub(crate) report: Arc<VmReport>,
    pub(crate) generation: GenerationId,
    // Alive as long as anything may use it, and dropped before the memory it maps.
    pub(crate) fd: VmFd,
    pub(crate) kvm: Kvm,
    pub(crate) host_tsc_khz: u32,
    pub(crate) cpuids: Vec<CpuId>,
    pub(crate) msrs: Vec<u32>,
    pub(crate) memory: GuestMemory,
}

impl Running {
    /// Readable when the guest became ready, the host's disk is full or the VM has ended by itself, until it is read.
    pub fn report_event(&self) -> &EventFd {
        self.report.event()
    }

    /// Whether the guest has signalled that it runs.
    pub fn is_ready(&self) -> bool {
        self.report.is_ready()
    }

    /// Whether a write of the guest waits for room on the host's disk, as was found since the last call.
    pub fn take_disk_full(&self) -> bool {
        self.report.take_disk_full()
    }

    /// How the VM ended, if it has.
    pub fn end(&self) -> Option<VmEnd> {
        let (mut reason, mut detail) = self.report.get()?;
        // A kernel that panics resets the machine; only the console knows why.
        if reason == EndReason::Reset
            && let Some(message) = self.console.panic_message()
        {
            (reason, detail) = (EndReason::Panicked, message);
        }
        Some(VmEnd { reason, detail, console_tail: self.console.tail(CONSOLE_TAIL) })
    }

    /// Makes the VM stand still: no vCPU is in the guest, and the device thread waits between two events.
    /// It goes on when the guard is dropped. A VM that has ended, or ends meanwhile, is refused.
    pub fn pause(&mut self) -> Result<Paused<'_>> {
        let mut since = Instant::now();
        if !self.paused {
            // Devices first: the guest does not notice, and it stands still no longer than it must.
            self.devices.control.park();
            since = Instant::now();
            self.vcpus.park();
        }
        let paused = Paused { vm: self, since };
        match paused.vm.report.get() {
            None => Ok(paused),
            Some((_, detail)) => Err(Error::Config(format!("the VM has ended ({detail})"))),
        }
    }

    /// Whether it stands still until it is resumed.
    pub fn is_paused(&self) -> bool {
        self.paused
    }

    /// Lets a VM that was [kept paused](Paused::keep) go on. Requests that found the host's disk full are tried
    /// again.
    pub fn resume(&mut self) -> Result<()> {
        if !self.paused {
            return Ok(());
        }
        self.vcpus.parked().iter().try_for_each(|vcpu| vcpu::notify_pause(vcpu))?;
        self.paused = false;
        for device in self.bus.virtio() {
            device.lock().unwrap_or_else(PoisonError::into_inner).look_again();
        }
        self.go_on();
        Ok(())
    }

    fn go_on(&self) {
        self.vcpus.run();
        self.devices.control.run();
    }

    /// Ends the VM as if its plug was pulled. When this returns, nothing of it runs.
    pub fn stop(self) {
        self.vcpus.stop();
        self.devices.stop();
    }

    /// Stops everything and keeps it as it is. Afterwards the VM has no threads, its KVM VM is closed, and
    /// only its data is left. A VM that has ended, or ends while it is stopped, is refused; like after every
    /// error, nothing of it is left then.
    pub fn freeze(self) -> Result<Frozen> {
        let Running {
            vcpus,
            devices,
            bus,
            report,
            generation,
            fd,
            kvm,
            host_tsc_khz,
            cpuids,
            msrs,
            memory,
            ..
        } = self;
        // vCPUs first: then the devices get no new work. They come back with their last register access done.
        let vcpus = vcpus.stop();
        // Then the device thread, between two events: requests taken from a queue are finished, and the
        // others are found again after the thaw.
        let joined = devices.stop();
        if let Some((_, detail)) = report.get() {
            return Err(Error::Config(format!("the VM has ended ({detail}): there is nothing to freeze")));
        }
        if !joined {
            return Err(Error::Config("the device thread has failed: the VM cannot be frozen".into()));
        }
        let vcpus: Vec<_> = vcpus.iter().collect();
        let mut saved = KvmState::save(&fd, &vcpus, &cpuids, &msrs)?;
        vcpu::keep_settable(&vcpus, &mut saved.vcpus)?;
        let (state, disks) = collect(saved, &bus, &generation, &memory)?;
        memory::use_small_pages(&memory);
        Frozen::new(kvm, host_tsc_khz, state, memory, disks)
    }

    /// Does something with the disks, in order, between two events of theirs.
    pub(crate) fn with_disks<T>(&self, work: impl FnOnce(Vec<&mut Disk>) -> T) -> T {
        let devices = self.bus.virtio().iter();
        let mut devices: Vec<_> =
            devices.map(|device| device.lock().unwrap_or_else(PoisonError::into_inner)).collect();
        work(devices.iter_mut().filter_map(|device| device.disk()).collect())
    }

    /// The guest's memory.
    pub fn memory(&self) -> &GuestMemory {
        &self.memory
    }
}

/// A VM that stands still, as long as this lives.
///
/// Its threads wait at their gates, and the monitor has no others but the one that holds this. So this is what
/// a fork beside them takes:
///
/// ```no_run
/// # fn f(vm: &mut forkd_vmm::vm::Running) -> forkd_vmm::Result<()> {
/// let forked = vm.pause()?.fork()?;
/// # Ok(())
/// # }
/// ```
///
/// A VM that runs cannot be forked:
///
/// ```compile_fail,E0599
/// # fn f(vm: &mut forkd_vmm::vm::Running) -> forkd_vmm::Result<()> {
/// let forked = vm.fork()?;
/// # Ok(())
/// # }
/// ```
///
/// Nor can one that goes on again:
///
/// ```compile_fail,E0382
/// # fn f(vm: &mut forkd_vmm::vm::Running) -> forkd_vmm::Result<()> {
/// let paused = vm.pause()?;
/// drop(paused);
/// let forked = paused.fork()?;
/// # Ok(())
/// # }
/// ```
pub struct Paused<'a> {
    pub(crate) vm: &'a mut Running,
    since: Instant,
}

/// Which process this is after [`Paused::fork`].
pub enum ForkedBeside<'a> {
    /// The new process. Only the calling thread is here: nothing of the VM may be resumed.
    Child,
    /// The old one, whose VM still stands still.
    Parent {
        /// The child's process id.
        pid: i32,
        /// The VM, as before.
        paused: Paused<'a>,
    },
}

impl<'a> Paused<'a> {
    /// Forks the process beside the threads of the VM. Where that fails, the VM goes on.
    pub fn fork(self) -> Result<ForkedBeside<'a>> {
        // SAFETY: the monitor has no threads but this one and those of its VM, which wait at their gates with no
        // lock held and nothing half done. They do not go on as long as `self` lives.
        match unsafe { fork::fork_beside_threads() }.map_err(Error::system("fork a branch"))? {
            None => {
                // Its drop would act on the threads of the source.
                std::mem::forget(self);
                Ok(ForkedBeside::Child)
            }
            Some(pid) => Ok(ForkedBeside::Parent { pid, paused: self }),
        }
    }

    /// The guest's memory, which does not change now.
    pub fn memory(&self) -> &GuestMemory {
        &self.vm.memory
    }

    /// Keeps the VM paused, until [`Running::resume`].
    pub fn keep(self) {
        self.vm.paused = true;
    }

    /// Takes the calling thread to where the guest ran. The page tables and the kernel's notes of the pages
    /// it wrote are in the caches there, and all of them are needed to copy its memory.
    pub(crate) fn move_to_vcpu(&self) {
        self.vm.vcpus.move_to_vcpu();
    }

    /// The VM's state in KVM.
    pub(crate) fn save(&self) -> Result<KvmState> {
        let Running { vcpus, fd, cpuids, msrs, .. } = &*self.vm;
        let vcpus = vcpus.parked();
        let vcpus: Vec<_> = vcpus.iter().map(|vcpu| &**vcpu).collect();
        KvmState::save(fd, &vcpus, cpuids, msrs)
    }

    /// Lets the vCPUs go on before the devices do. Returns for how long they stood still because of this
    /// pause.
    pub(crate) fn run_vcpus(&self) -> Duration {
        let time = self.since.elapsed();
        if !self.vm.paused {
            self.vm.vcpus.run();
        }
        time
    }
}

impl Drop for Paused<'_> {
    fn drop(&mut self) {
        if !self.vm.paused {
            self.vm.go_on();
        }
    }
}

/// The state in KVM of a VM that stands still.
pub(crate) struct KvmState {
    vcpus: Vec<VcpuState>,
    clock: ClockState,
    interrupts: InterruptState,
}

impl KvmState {
    fn save(fd: &VmFd, vcpus: &[&VcpuFd], cpuids: &[CpuId], msrs: &[u32]) -> Result<KvmState> {
        Ok(KvmState {
            vcpus: vcpu::save_all(vcpus, cpuids, msrs)?,
            clock: ClockState { clock: fd.get_clock().map_err(Error::kvm("KVM_GET_CLOCK"))? },
            interrupts: save_interrupts(fd)?,
        })
    }
}

/// Puts the state of a VM together: the state from KVM, and its devices, which end by that.
pub(crate) fn collect(
    saved: KvmState,
    bus: &Bus,
    generation: &GenerationId,
    memory: &GuestMemory,
) -> Result<(MachineState, Vec<Disk>)> {
    let mut devices = Vec::new();
    let mut disks = Vec::new();
    for device in bus.virtio() {
        // No thread uses them any more. In a fork, waiting for a lock that is taken would be waiting for
        // ever.
        let Ok(mut device) = device.try_lock() else {
            return Err(Error::Config("a device has failed: the VM cannot be frozen".into()));
        };
        let (state, disk) = device.freeze();
        devices.push(state);
        disks.extend(disk);
    }
    let KvmState { vcpus, clock, interrupts } = saved;
    let range = |region: &vm_memory::GuestRegionMmap<crate::memory::Mapping>| MemoryRange {
        start: region.start_addr().0,
        length: region.len(),
    };
    let state = MachineState {
        vcpus,
        clock,
        interrupts,
        memory: memory.iter().map(range).collect(),
        serial: bus.serial(),
        generation: GenerationState {
            id: generation.id().map_err(Error::system("read the VM generation id"))?,
        },
        devices,
    };
    Ok((state, disks))
}
