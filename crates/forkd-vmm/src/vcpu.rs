//! vCPU threads: run the guest, serve its register accesses, stop on an order.
//!
//! All vCPUs of a VM obey one [`ParkGate`]: it orders them to run, park or end. A parked thread waits at the
//! gate holding no lock, not even that of its vCPU, with no half-done register access, so that its vCPU can
//! be saved and the process can fork.
//!
//! A vCPU that is in the guest comes out when its thread gets a signal. The signals come from POSIX timers
//! that point at the thread: the kernel lets a timer signal threads of its own process only. So the filters
//! need to allow no call that could signal another process, a sibling with the same user id for example, and
//! nothing in them depends on a process id, which a fork changes.

use std::io;
use std::sync::atomic::{AtomicI32, AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use forkd_protocol::control::EndReason;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{SIGRTMIN, register_signal_handler};

use crate::affinity;
use crate::bus::{Bus, Effect};
use crate::exit::VmReport;
use crate::gate::{Order, ParkGate};
use crate::seccomp::{self, ThreadKind};
use crate::vm::THREAD_STACK;
use crate::{Error, Result};

/// Pause before an attempt that may fail again at once.
const RETRY_INTERVAL: Duration = Duration::from_millis(1);

/// How often in a row KVM may refuse to run a vCPU just now.
const MAX_REFUSALS: u32 = 1000;

/// Makes a vCPU come out of the guest: sets a flag in the memory it shares with KVM, so that it does
/// not go in again, and a signal gets it out if it is in. Without the flag a signal that comes just
/// before the vCPU enters the guest would be lost.
#[derive(Debug)]
struct Kick {
    immediate_exit: *const AtomicU8,
}

// SAFETY: the pointer is to a byte that is only accessed atomically and outlives this (see `spawn`).
unsafe impl Send for Kick {}

impl Kick {
    fn new(vcpu: &mut VcpuFd) -> Kick {
        Kick { immediate_exit: (&raw mut vcpu.get_kvm_run().immediate_exit).cast() }
    }

    fn flag(&self) -> &AtomicU8 {
        // SAFETY: the byte lies in memory shared with KVM that stays mapped as long as the vCPU's `VcpuFd`
        // lives; the owner of a `Kick` keeps that alive beside it.
        unsafe { &*self.immediate_exit }
    }
}

/// A timer that sends a signal to one thread of this process, once, at once.
#[derive(Debug)]
struct Alarm {
    timer: libc::c_int,
}

impl Alarm {
    /// Signals the thread with id `thread`.
    fn ring(thread: libc::pid_t) -> io::Result<Alarm> {
        // SAFETY: all zero is a valid value of this struct of numbers and addresses.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGRTMIN();
        event.sigev_notify_thread_id = thread;
        let mut timer: libc::c_int = 0;
        let clock = libc::CLOCK_MONOTONIC;
        // SAFETY: both pointers are to values that live through the call, which fills in the second.
        let created = unsafe { libc::syscall(libc::SYS_timer_create, clock, &raw mut event, &raw mut timer) };
        if created != 0 {
            return Err(io::Error::last_os_error());
        }
        let alarm = Alarm { timer };
        let never = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let now = libc::timespec { tv_sec: 0, tv_nsec: 1 };
        let once = libc::itimerspec { it_interval: never, it_value: now };
        let old = std::ptr::null_mut::<libc::itimerspec>();
        // SAFETY: the timer was just made, and the new value lives through the call.
        let set = unsafe { libc::syscall(libc::SYS_timer_settime, timer, 0, &raw const once, old) };
        if set == 0 { Ok(alarm) } else { Err(io::Error::last_os_error()) }
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: the timer is this object's own.
        unsafe { libc::syscall(libc::SYS_timer_delete, self.timer) };
    }
}

#[derive(Debug)]
struct VcpuThread {
    kick: Kick,
    /// Locked by the thread, except while it waits at the gate. Kept here too: `kick` points into it.
    vcpu: Arc<Mutex<VcpuFd>>,
    /// The thread's id, once it runs.
    id: Arc<AtomicI32>,
    /// The CPU it was on when it last came to the gate.
    cpu: Arc<AtomicUsize>,
    thread: JoinHandle<()>,
}

/// The vCPU threads of a VM.
#[derive(Debug)]
pub struct VcpuThreads {
    gate: Arc<ParkGate>,
    threads: Vec<VcpuThread>,
}

impl VcpuThreads {
    /// Starts a thread for each of `vcpus`. They filter themselves and wait at the gate.
    pub fn spawn(
        vcpus: Vec<VcpuFd>,
        bus: Arc<Bus>,
        report: Arc<VmReport>,
        seccomp: seccomp::Mode,
    ) -> Result<VcpuThreads> {
        // The signal only has to interrupt; its handler has nothing to do.
        extern "C" fn interrupt(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), interrupt)
            .map_err(|error| Error::system("set up a signal")(std::io::Error::from(error)))?;

        let mut all = VcpuThreads { gate: Arc::new(ParkGate::new(Order::Park)), threads: Vec::new() };
        for (index, mut vcpu) in vcpus.into_iter().enumerate() {
            let kick = Kick::new(&mut vcpu);
            let id = Arc::new(AtomicI32::new(0));
            let cpu = Arc::new(AtomicUsize::new(usize::MAX));
            let own_kick = Kick::new(&mut vcpu);
            let vcpu = Arc::new(Mutex::new(vcpu));
            let runner = Runner {
                kick: own_kick,
                vcpu: vcpu.clone(),
                cpu: cpu.clone(),
                bus: bus.clone(),
                report: report.clone(),
                gate: all.gate.clone(),
            };
            all.gate.enter();
            let own_id = id.clone();
            let builder = std::thread::Builder::new().name(format!("vcpu{index}")).stack_size(THREAD_STACK);
            let thread = builder.spawn(move || {
                own_id.store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::SeqCst);
                match seccomp::install(ThreadKind::Vcpu, seccomp) {
                    // A kick that came before the thread had an id is not lost: the gate comes first.
                    Ok(()) if runner.gate.pass() => runner.run(),
                    Ok(()) => {}
                    Err(error) => runner.report.report(EndReason::Failed, error.chain()),
                }
                runner.gate.leave();
            });
            match thread {
                Ok(thread) => all.threads.push(VcpuThread { kick, vcpu, id, cpu, thread }),
                Err(source) => {
                    all.gate.leave();
                    all.stop();
                    return Err(Error::System { what: "start a vCPU thread", source });
                }
            }
        }
        Ok(all)
    }

    /// Lets the guest run.
    pub fn run(&self) {
        drop(self.give(Order::Run));
    }

    /// Returns when every vCPU is out of the guest and waits, or has ended.
    pub fn park(&self) {
        let _alarms = self.give(Order::Park);
        self.gate.wait_until_parked();
    }

    /// Takes the calling thread to where the first vCPU ran until it was parked.
    pub fn move_to_vcpu(&self) {
        if let Some(first) = self.threads.first() {
            affinity::move_to(first.cpu.load(Ordering::Relaxed));
        }
    }

    /// The vCPUs, in order, while all threads are parked.
    pub fn parked(&self) -> Vec<MutexGuard<'_, VcpuFd>> {
        self.threads.iter().map(|thread| lock(&thread.vcpu)).collect()
    }

    /// Ends all threads and returns their vCPUs, in order, with no register access half done. The vCPU
    /// of a thread that panicked is missing.
    pub fn stop(self) -> Vec<VcpuFd> {
        let _alarms = self.give(Order::Stop);
        let join = |VcpuThread { thread, vcpu, .. }: VcpuThread| {
            thread.join().ok()?;
            Arc::into_inner(vcpu)?.into_inner().ok()
        };
        self.threads.into_iter().filter_map(join).collect()
    }

    /// Gives the order. The alarms returned get the vCPUs out of the guest; they are to be kept until
    /// that has happened.
    fn give(&self, order: Order) -> Vec<Alarm> {
        // The order before the flags: a vCPU that sees its flag looks at the order next.
        self.gate.order(order);
        if order == Order::Run {
            return Vec::new();
        }
        let ring = |VcpuThread { kick, id, .. }: &VcpuThread| {
            // The flag before the id: a thread without one has not been at the gate yet.
            kick.flag().store(1, Ordering::SeqCst);
            // It fails for a thread that has ended, and with EAGAIN while all signals the user may have
            // waiting are in use.
            loop {
                match Alarm::ring(id.load(Ordering::SeqCst)) {
                    Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => {
                        std::thread::sleep(RETRY_INTERVAL)
                    }
                    result => return result.ok(),
                }
            }
        };
        self.threads.iter().filter_map(ring).collect()
    }
}

/// The state of a vCPU's thread.
struct Runner {
    vcpu: Arc<Mutex<VcpuFd>>,
    cpu: Arc<AtomicUsize>,
    kick: Kick,
    bus: Arc<Bus>,
    report: Arc<VmReport>,
    gate: Arc<ParkGate>,
}

impl Runner {
    /// Runs the vCPU until the gate orders a stop or the VM ends.
    fn run(&self) {
        let mut refused = 0;
        let mut vcpu = lock(&self.vcpu);
        loop {
            let exit = vcpu.run();
            // A vCPU that waits to be woken comes back with this error when it is. So does one that KVM
            // cannot run for want of something, at first a thread of its own.
            if exit.as_ref().is_err_and(|error| error.errno() == libc::EAGAIN) {
                refused += 1;
                if refused > MAX_REFUSALS {
                    let detail = "KVM has no room to run the vCPU; are there too many processes?";
                    return self.report.report(EndReason::Failed, detail.into());
                }
                if refused > 1 {
                    std::thread::sleep(RETRY_INTERVAL);
                }
            } else {
                refused = 0;
            }
            match exit {
                Ok(VcpuExit::IoIn(port, data)) => self.bus.read_port(port, data),
                Ok(VcpuExit::IoOut(port, data)) => match self.bus.write_port(port, data) {
                    None => {}
                    Some(Effect::Ready) => self.report.report_ready(),
                    Some(Effect::End(reason, detail)) => {
                        return self.report.report(reason, detail.into());
                    }
                },
                Ok(VcpuExit::MmioRead(address, data)) => self.bus.read_memory(address, data),
                Ok(VcpuExit::MmioWrite(address, data)) => self.bus.write_memory(address, data),
                Ok(VcpuExit::Intr) => {}
                Ok(VcpuExit::Shutdown) => {
                    let detail = "the guest ran into a triple fault, where a real machine resets itself";
                    return self.report.report(EndReason::Failed, detail.into());
                }
                Ok(exit) => {
                    let exit = format!("{exit:?}");
                    let detail = explain_exit(&mut vcpu, &exit);
                    return self.report.report(EndReason::Failed, detail);
                }
                // KVM comes back with this only when it has finished the guest's last register access: the
                // place to park, if ordered to.
                Err(error) if is_retry(&error) => {
                    if self.kick.flag().swap(0, Ordering::SeqCst) == 1 {
                        drop(vcpu);
                        self.cpu.store(affinity::current(), Ordering::Relaxed);
                        if !self.gate.pass() {
                            return;
                        }
                        vcpu = lock(&self.vcpu);
                    }
                }
                Err(error) => {
                    return self.report.report(EndReason::Failed, Error::kvm("KVM_RUN")(error).chain());
                }
            }
        }
    }
}

fn lock(vcpu: &Mutex<VcpuFd>) -> MutexGuard<'_, VcpuFd> {
    vcpu.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether `KVM_RUN` is to be called again.
pub(crate) fn is_retry(error: &kvm_ioctls::Error) -> bool {
    matches!(error.errno(), libc::EINTR | libc::EAGAIN)
}

/// A sentence about an exit after which KVM cannot go on, `exit` being its name.
pub(crate) fn explain_exit(vcpu: &mut VcpuFd, exit: &str) -> String {
    const INTERNAL_ERROR: u32 = 17;
    const EMULATION: u32 = 1;
    let run = vcpu.get_kvm_run();
    if run.exit_reason != INTERNAL_ERROR {
        return format!("KVM stopped the guest with {exit}");
    }
    // SAFETY: by the exit reason this is the part of the union KVM filled in; it holds numbers.
    let suberror = unsafe { run.__bindgen_anon_1.internal.suberror };
    if suberror == EMULATION {
        "KVM cannot emulate an instruction the guest used".into()
    } else {
        format!("KVM stopped the guest with internal error {suberror}")
    }
}
