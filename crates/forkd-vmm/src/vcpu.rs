//! vCPU threads: run the guest, serve its register accesses, stop when told.
//!
//! All vCPUs of a VM listen to one [`Gate`]: it says whether they run, are parked or end. A parked
//! thread waits at the gate holding no lock, with no half-done register access, so that its vCPU can
//! be saved and the process can fork.

use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use forkd_protocol::control::EndReason;
use kvm_ioctls::{VcpuExit, VcpuFd};
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

use crate::bus::Bus;
use crate::ending::Ending;
use crate::seccomp::{self, ThreadKind};
use crate::{Error, Result};

/// What the vCPUs are to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Run the guest.
    Run,
    /// Wait at the gate.
    Park,
    /// End the thread.
    Stop,
}

/// Where the vCPU threads of a VM wait and are told to run or to end. Closed at first.
#[derive(Debug)]
pub struct Gate {
    state: Mutex<GateState>,
    changed: Condvar,
}

#[derive(Debug)]
struct GateState {
    order: Order,
    /// Threads that wait here.
    waiting: usize,
    /// Threads that have not ended.
    alive: usize,
}

impl Gate {
    fn new() -> Gate {
        let state = GateState { order: Order::Park, waiting: 0, alive: 0 };
        Gate { state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, GateState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while the order is to park. Returns whether to run on.
    fn pass(&self) -> bool {
        let mut state = self.lock();
        state.waiting += 1;
        self.changed.notify_all();
        while state.order == Order::Park {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.waiting -= 1;
        state.order == Order::Run
    }

    fn leave(&self) {
        self.lock().alive -= 1;
        self.changed.notify_all();
    }

    fn wait_until_parked(&self) {
        let mut state = self.lock();
        while state.waiting < state.alive {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

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
        // SAFETY: the byte lies in memory shared with KVM that stays mapped as long as the vCPU's
        // `VcpuFd` lives; its owner, a thread or `VcpuThread`, keeps that alive beside the `Kick`.
        unsafe { &*self.immediate_exit }
    }
}

#[derive(Debug)]
struct VcpuThread {
    kick: Kick,
    // Not dropped when the thread panics: `kick` points into it.
    thread: JoinHandle<ManuallyDrop<VcpuFd>>,
}

/// The vCPU threads of a VM.
#[derive(Debug)]
pub struct VcpuThreads {
    gate: Arc<Gate>,
    threads: Vec<VcpuThread>,
}

impl VcpuThreads {
    /// Starts a thread for each of `vcpus`. When this returns they wait at the gate, filtered.
    pub fn spawn(
        vcpus: Vec<VcpuFd>,
        bus: Arc<Bus>,
        ending: Arc<Ending>,
        seccomp: seccomp::Mode,
    ) -> Result<VcpuThreads> {
        // The signal only has to interrupt; its handler has nothing to do.
        extern "C" fn interrupt(_: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
        register_signal_handler(SIGRTMIN(), interrupt)
            .map_err(|error| Error::system("set up a signal")(std::io::Error::from(error)))?;

        let mut all = VcpuThreads { gate: Arc::new(Gate::new()), threads: Vec::new() };
        for (index, mut vcpu) in vcpus.into_iter().enumerate() {
            // Its first KVM_RUN comes right back, and the thread goes to the gate.
            vcpu.set_kvm_immediate_exit(1);
            let kick = Kick::new(&mut vcpu);
            let mut runner = Runner {
                kick: Kick::new(&mut vcpu),
                vcpu: ManuallyDrop::new(vcpu),
                bus: bus.clone(),
                ending: ending.clone(),
                gate: all.gate.clone(),
            };
            all.gate.lock().alive += 1;
            let thread = std::thread::Builder::new().name(format!("vcpu{index}")).spawn(move || {
                match seccomp::install(ThreadKind::Vcpu, seccomp) {
                    Ok(()) => runner.run(),
                    Err(error) => runner.ending.report(EndReason::Failed, error.chain()),
                }
                runner.gate.leave();
                runner.vcpu
            });
            match thread {
                Ok(thread) => all.threads.push(VcpuThread { kick, thread }),
                Err(source) => {
                    all.gate.lock().alive -= 1;
                    all.stop();
                    return Err(Error::System { what: "start a vCPU thread", source });
                }
            }
        }
        all.gate.wait_until_parked();
        Ok(all)
    }

    /// Lets the guest run.
    pub fn run(&self) {
        self.give(Order::Run);
    }

    /// Returns when every vCPU is out of the guest and waits, or has ended.
    pub fn park(&self) {
        self.give(Order::Park);
        self.gate.wait_until_parked();
    }

    /// Ends all threads.
    pub fn stop(self) {
        self.give(Order::Stop);
        for VcpuThread { thread, .. } in self.threads {
            if let Ok(vcpu) = thread.join() {
                drop(ManuallyDrop::into_inner(vcpu));
            }
        }
    }

    fn give(&self, order: Order) {
        // The order before the flags: a vCPU that sees its flag looks at the order next.
        self.gate.lock().order = order;
        self.gate.changed.notify_all();
        if order == Order::Run {
            return;
        }
        for VcpuThread { kick, thread } in &self.threads {
            kick.flag().store(1, Ordering::SeqCst);
            // It fails only for a thread that has ended.
            let _ = thread.kill(SIGRTMIN());
        }
    }
}

/// What a vCPU's thread holds.
struct Runner {
    vcpu: ManuallyDrop<VcpuFd>,
    kick: Kick,
    bus: Arc<Bus>,
    ending: Arc<Ending>,
    gate: Arc<Gate>,
}

impl Runner {
    /// Runs the vCPU until the gate says stop or the VM ends.
    fn run(&mut self) {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoIn(port, data)) => self.bus.read_port(port, data),
                Ok(VcpuExit::IoOut(port, data)) => {
                    if let Some((reason, detail)) = self.bus.write_port(port, data) {
                        return self.ending.report(reason, detail.into());
                    }
                }
                Ok(VcpuExit::MmioRead(address, data)) => self.bus.read_memory(address, data),
                Ok(VcpuExit::MmioWrite(address, data)) => self.bus.write_memory(address, data),
                Ok(VcpuExit::Intr) => {}
                Ok(VcpuExit::Shutdown) => {
                    let detail = "the guest ran into a triple fault, where a real machine resets itself";
                    return self.ending.report(EndReason::Failed, detail.into());
                }
                Ok(exit) => {
                    let exit = format!("{exit:?}");
                    let detail = explain_exit(&mut self.vcpu, &exit);
                    return self.ending.report(EndReason::Failed, detail);
                }
                // KVM comes back with this only when it has finished the guest's last register
                // access: the place to wait, if told to.
                Err(error) if is_retry(&error) => {
                    if self.kick.flag().swap(0, Ordering::SeqCst) == 1 && !self.gate.pass() {
                        return;
                    }
                }
                Err(error) => {
                    return self.ending.report(EndReason::Failed, Error::kvm("KVM_RUN")(error).chain());
                }
            }
        }
    }
}

/// Whether `KVM_RUN` is to be called again.
pub(crate) fn is_retry(error: &kvm_ioctls::Error) -> bool {
    matches!(error.errno(), libc::EINTR | libc::EAGAIN)
}

/// A sentence about an exit with which KVM says that it cannot go on, `exit` being its name.
pub(crate) fn explain_exit(vcpu: &mut VcpuFd, exit: &str) -> String {
    const INTERNAL_ERROR: u32 = 17;
    const EMULATION: u32 = 1;
    let run = vcpu.get_kvm_run();
    if run.exit_reason != INTERNAL_ERROR {
        return format!("KVM stopped the guest with {exit}");
    }
    // SAFETY: the exit reason says that this is the part of the union KVM filled in; it holds numbers.
    let suberror = unsafe { run.__bindgen_anon_1.internal.suberror };
    if suberror == EMULATION {
        "KVM cannot emulate an instruction the guest used".into()
    } else {
        format!("KVM stopped the guest with internal error {suberror}")
    }
}
