//! The floor: what a fan-out costs with nothing around it.
//!
//! One single-threaded process maps the guest's memory privately from a file, takes a vCPU's state once, and
//! forks. Each child makes a VM over the memory it inherited, with the calls a complete restore needs and no
//! others, runs it to the guest's first `out` and reports the time. No daemon, no jail, no seccomp, no
//! control socket, no threads: the real path is measured by how near it comes to this.

use std::fs::File;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use forkd_vmm::boot::{cpuid, registers};
use forkd_vmm::layout::{KVM_TSS, MMIO_HOLE_START, READY_PORT, virtio_base, virtio_gsi};
use forkd_vmm::{Error as VmmError, asm_guest, vm};
use kvm_bindings::{
    CpuId, Msrs, kvm_clock_data, kvm_debugregs, kvm_irqchip, kvm_lapic_state, kvm_mp_state, kvm_msr_entry,
    kvm_regs, kvm_sregs, kvm_userspace_memory_region, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{IoEventAddress, Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{FileOffset, MmapRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::burst::{Burst, MAX_CHILDREN};
use crate::host::{self, MEMORY_SAMPLE};
use crate::{Error, Result, system};

/// Devices whose interrupt and notification each child connects: as many as a sandbox has.
const DEVICES: usize = 4;
/// No burst takes this long; a child that hangs is not waited for for ever.
const LIMIT: Duration = Duration::from_secs(120);
/// A child's report: its index and the nanoseconds since the start of the burst.
const WORD: usize = 12;

/// Forks `n` children that all stay alive until the last has answered, each over a private mapping
/// of the memory file at `memory`. Refused in a process with more than one thread.
pub fn burst(n: usize, memory: &Path) -> Result<Burst> {
    if n == 0 || n > MAX_CHILDREN {
        return Err(Error::Invalid(format!("{n} children: it must be 1 to {MAX_CHILDREN}")));
    }
    must_have_one_thread()?;
    let template = Template::new(memory)?;
    let (answers, answer) = rustix::pipe::pipe().map_err(system("make a pipe"))?;
    let (ended, end) = rustix::pipe::pipe().map_err(system("make a pipe"))?;

    let available = host::available_kib();
    let mut pids = Vec::with_capacity(n);
    let mut errors = Vec::new();
    let asked = Instant::now();
    for index in 0..n {
        // SAFETY: there is no other thread that could hold a lock the child needs.
        match unsafe { libc::fork() } {
            0 => {
                drop((answers, end));
                child(&template, index as u32, asked, answer, &ended)
            }
            -1 => {
                errors.push(format!("cannot fork: {}", std::io::Error::last_os_error()));
                break;
            }
            pid => pids.push(pid),
        }
    }
    // The children's ends are the only ones left: the answers end when all have answered or died.
    drop(answer);
    let times = collect(&File::from(answers), n);
    let memory = host::memory_of(pids.iter().take(MEMORY_SAMPLE).copied());
    let host_kib = host::difference_per_child(available, host::available_kib(), pids.len());
    drop(end);
    pids.iter().for_each(|pid| reap(*pid, times.is_err()));

    let times: Vec<f64> = times?.into_iter().flatten().collect();
    if times.len() < pids.len() {
        errors.push(format!(
            "{} children of the floor did not come to their guest's `out`",
            pids.len() - times.len()
        ));
    }
    let all_ms = times.iter().copied().fold(0.0, f64::max);
    Ok(Burst { asked: n, times_ms: times, all_ms, memory, host_kib, errors })
}

/// A child of a process with other threads could wait for ever for a lock one of them held.
pub(crate) fn must_have_one_thread() -> Result<()> {
    match std::fs::read_dir("/proc/self/task").map_err(system("count threads"))?.count() {
        1 => Ok(()),
        threads => {
            Err(Error::Invalid(format!("what forks is measured by a process of one thread, not {threads}")))
        }
    }
}

/// The children's times in milliseconds, by index; none for a child that died.
fn collect(mut answers: &File, n: usize) -> Result<Vec<Option<f64>>> {
    let started = Instant::now();
    let mut times = vec![None; n];
    let mut word = [0; WORD];
    loop {
        let mut ready = [rustix::event::PollFd::new(&answers, rustix::event::PollFlags::IN)];
        let patience = rustix::event::Timespec { tv_sec: 1, tv_nsec: 0 };
        rustix::event::poll(&mut ready, Some(&patience)).map_err(system("wait for the children"))?;
        if started.elapsed() > LIMIT {
            return Err(Error::Invalid(format!("a child of the floor hangs for {} s", LIMIT.as_secs())));
        }
        if ready[0].revents().is_empty() {
            continue;
        }
        match answers.read_exact(&mut word) {
            Ok(()) => {}
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(times),
            Err(error) => return Err(system("read the children's answers")(error)),
        }
        let (index, nanoseconds) = word.split_at(4);
        let index = u32::from_le_bytes(index.try_into().unwrap_or_default());
        let nanoseconds = u64::from_le_bytes(nanoseconds.try_into().unwrap_or_default());
        if let Some(time) = times.get_mut(index as usize) {
            *time = Some(nanoseconds as f64 / 1e6);
        }
    }
}

/// Waits for a child, after it was asked to end or, in an unknown state, killed.
fn reap(pid: libc::pid_t, kill: bool) {
    let Some(pid) = rustix::process::Pid::from_raw(pid) else { return };
    if kill {
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
    let wait = || rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
    let _ = rustix::io::retry_on_intr(wait);
}

/// A child, from its first instruction to its end.
fn child(template: &Template, index: u32, asked: Instant, answer: OwnedFd, ended: &OwnedFd) -> ! {
    let status = match template.run() {
        Ok(vm) => {
            let mut word = [0; WORD];
            word[..4].copy_from_slice(&index.to_le_bytes());
            // The clock is the same in all processes.
            word[4..].copy_from_slice(&(asked.elapsed().as_nanos() as u64).to_le_bytes());
            let told = rustix::io::write(&answer, &word).is_ok();
            drop(answer);
            // Alive until everyone has answered: the last is started beside all others.
            let _ = rustix::io::read(ended, &mut [0; 1]);
            std::mem::forget(vm);
            i32::from(!told)
        }
        Err(error) => {
            eprintln!("forkd: a child of the floor: {error}");
            1
        }
    };
    // SAFETY: ends this process without running what its parent may have left to be run at exit.
    unsafe { libc::_exit(status) }
}

/// What the children inherit.
struct Template {
    kvm: Kvm,
    memory: MmapRegion,
    state: State,
}

/// A vCPU at the guest's first instruction, and the interrupt chips and the clock beside it.
struct State {
    cpuid: CpuId,
    msrs: Msrs,
    regs: kvm_regs,
    sregs: kvm_sregs,
    xsave: kvm_xsave,
    xcrs: kvm_xcrs,
    debug: kvm_debugregs,
    lapic: kvm_lapic_state,
    mp: kvm_mp_state,
    events: kvm_vcpu_events,
    clock: kvm_clock_data,
    chips: Vec<kvm_irqchip>,
}

impl Template {
    fn new(memory: &Path) -> Result<Template> {
        let device = File::options().read(true).write(true).open("/dev/kvm");
        let kvm = vm::open_kvm(device.map_err(system("open /dev/kvm"))?)?;
        let failed = || format!("map {}", memory.display());
        let file = File::open(memory).map_err(system(failed()))?;
        let length = file.metadata().map_err(system(failed()))?.len();
        if length == 0 || length > MMIO_HOLE_START {
            let most = MMIO_HOLE_START >> 20;
            return Err(Error::Invalid(format!("the floor maps one range of memory, up to {most} MiB")));
        }
        let (protection, flags) =
            (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
        let memory = MmapRegion::build(Some(FileOffset::new(file, 0)), length as usize, protection, flags)
            .map_err(|error| Error::Invalid(format!("cannot {}: {error}", failed())))?;
        let state = State::take(&kvm)?;
        Ok(Template { kvm, memory, state })
    }

    /// Builds the VM and runs it until the guest has reported ready.
    fn run(&self) -> std::result::Result<(VmFd, VcpuFd, Vec<EventFd>), VmmError> {
        let vm = self.kvm.create_vm().map_err(VmmError::kvm("KVM_CREATE_VM"))?;
        vm.set_tss_address(KVM_TSS).map_err(VmmError::kvm("KVM_SET_TSS_ADDR"))?;
        let slot = kvm_userspace_memory_region {
            slot: 0,
            guest_phys_addr: 0,
            memory_size: self.memory.size() as u64,
            userspace_addr: self.memory.as_ptr() as u64,
            flags: 0,
        };
        // Before the interrupt chip: afterwards it would wait for what the chip has started.
        // SAFETY: the mapping lasts as long as the process, and only the guest uses it.
        unsafe { vm.set_user_memory_region(slot) }.map_err(VmmError::kvm("KVM_SET_USER_MEMORY_REGION"))?;
        vm.create_irq_chip().map_err(VmmError::kvm("KVM_CREATE_IRQCHIP"))?;
        let mut vcpu = vm.create_vcpu(0).map_err(VmmError::kvm("KVM_CREATE_VCPU"))?;
        self.state.restore(&vm, &vcpu)?;
        let events = connect_devices(&vm)?;
        loop {
            match vcpu.run() {
                Ok(VcpuExit::IoOut(READY_PORT, _)) => return Ok((vm, vcpu, events)),
                Ok(VcpuExit::Intr) => {}
                Ok(exit) => return Err(VmmError::Config(format!("the guest did not run: {exit:?}"))),
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                Err(error) => return Err(VmmError::kvm("KVM_RUN")(error)),
            }
        }
    }
}

fn connect_devices(vm: &VmFd) -> std::result::Result<Vec<EventFd>, VmmError> {
    let mut events = Vec::with_capacity(2 * DEVICES);
    let event = || EventFd::new(EFD_NONBLOCK).map_err(VmmError::system("create an eventfd"));
    for device in 0..DEVICES {
        let interrupt = event()?;
        vm.register_irqfd(&interrupt, virtio_gsi(device)).map_err(VmmError::kvm("KVM_IRQFD"))?;
        let notification = event()?;
        let address = IoEventAddress::Mmio(virtio_base(device) + 0x50);
        vm.register_ioevent(&notification, &address, 0u32).map_err(VmmError::kvm("KVM_IOEVENTFD"))?;
        events.extend([interrupt, notification]);
    }
    Ok(events)
}

impl State {
    fn take(kvm: &Kvm) -> std::result::Result<State, VmmError> {
        let vm = kvm.create_vm().map_err(VmmError::kvm("KVM_CREATE_VM"))?;
        vm.set_tss_address(KVM_TSS).map_err(VmmError::kvm("KVM_SET_TSS_ADDR"))?;
        vm.create_irq_chip().map_err(VmmError::kvm("KVM_CREATE_IRQCHIP"))?;
        let vcpu = vm.create_vcpu(0).map_err(VmmError::kvm("KVM_CREATE_VCPU"))?;
        let cpuid = cpuid::for_vcpu(&cpuid::supported(kvm)?, 0, 1)?;
        vcpu.set_cpuid2(&cpuid).map_err(VmmError::kvm("KVM_SET_CPUID2"))?;
        registers::set_common_state(&vcpu)?;
        registers::set_boot_state(&vcpu, asm_guest::CODE)?;
        let chip = |chip_id| {
            let mut chip = kvm_irqchip { chip_id, ..Default::default() };
            vm.get_irqchip(&mut chip).map(|()| chip).map_err(VmmError::kvm("KVM_GET_IRQCHIP"))
        };
        let mut clock = vm.get_clock().map_err(VmmError::kvm("KVM_GET_CLOCK"))?;
        clock.flags = 0;
        Ok(State {
            msrs: msrs(kvm, &vcpu)?,
            cpuid,
            regs: vcpu.get_regs().map_err(VmmError::kvm("KVM_GET_REGS"))?,
            sregs: vcpu.get_sregs().map_err(VmmError::kvm("KVM_GET_SREGS"))?,
            xsave: vcpu.get_xsave().map_err(VmmError::kvm("KVM_GET_XSAVE"))?,
            xcrs: vcpu.get_xcrs().map_err(VmmError::kvm("KVM_GET_XCRS"))?,
            debug: vcpu.get_debug_regs().map_err(VmmError::kvm("KVM_GET_DEBUGREGS"))?,
            lapic: vcpu.get_lapic().map_err(VmmError::kvm("KVM_GET_LAPIC"))?,
            mp: vcpu.get_mp_state().map_err(VmmError::kvm("KVM_GET_MP_STATE"))?,
            events: vcpu.get_vcpu_events().map_err(VmmError::kvm("KVM_GET_VCPU_EVENTS"))?,
            clock,
            chips: (0..3).map(chip).collect::<std::result::Result<_, _>>()?,
        })
    }

    /// In the order a complete restore has: CPUID first, it decides what the rest may hold.
    fn restore(&self, vm: &VmFd, vcpu: &VcpuFd) -> std::result::Result<(), VmmError> {
        vcpu.set_cpuid2(&self.cpuid).map_err(VmmError::kvm("KVM_SET_CPUID2"))?;
        vcpu.set_mp_state(self.mp).map_err(VmmError::kvm("KVM_SET_MP_STATE"))?;
        vcpu.set_regs(&self.regs).map_err(VmmError::kvm("KVM_SET_REGS"))?;
        vcpu.set_sregs(&self.sregs).map_err(VmmError::kvm("KVM_SET_SREGS"))?;
        // SAFETY: taken by KVM_GET_XSAVE of a vCPU alike, without features that would need more room.
        unsafe { vcpu.set_xsave(&self.xsave) }.map_err(VmmError::kvm("KVM_SET_XSAVE"))?;
        vcpu.set_xcrs(&self.xcrs).map_err(VmmError::kvm("KVM_SET_XCRS"))?;
        vcpu.set_debug_regs(&self.debug).map_err(VmmError::kvm("KVM_SET_DEBUGREGS"))?;
        vcpu.set_lapic(&self.lapic).map_err(VmmError::kvm("KVM_SET_LAPIC"))?;
        vcpu.set_msrs(&self.msrs).map_err(VmmError::kvm("KVM_SET_MSRS"))?;
        vcpu.set_vcpu_events(&self.events).map_err(VmmError::kvm("KVM_SET_VCPU_EVENTS"))?;
        vm.set_clock(&self.clock).map_err(VmmError::kvm("KVM_SET_CLOCK"))?;
        for chip in &self.chips {
            vm.set_irqchip(chip).map_err(VmmError::kvm("KVM_SET_IRQCHIP"))?;
        }
        Ok(())
    }
}

/// The model-specific registers that can be both read and written here.
fn msrs(kvm: &Kvm, vcpu: &VcpuFd) -> std::result::Result<Msrs, VmmError> {
    let list = |entries: &[kvm_msr_entry]| {
        Msrs::from_entries(entries).map_err(|_| VmmError::Config("too many MSRs for one call".into()))
    };
    let mut kept = Vec::new();
    let indices = kvm.get_msr_index_list().map_err(VmmError::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    for index in indices.as_slice() {
        let mut one = list(&[kvm_msr_entry { index: *index, ..Default::default() }])?;
        if matches!(vcpu.get_msrs(&mut one), Ok(1)) && matches!(vcpu.set_msrs(&one), Ok(1)) {
            kept.extend_from_slice(one.as_slice());
        }
    }
    list(&kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_with_threads_does_not_fork() {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || stopped.recv());
        let error = burst(1, Path::new("/nonexistent")).unwrap_err().to_string();
        drop(stop);
        assert!(thread.join().is_ok());
        assert!(error.contains("one thread"), "{error}");
    }
}
