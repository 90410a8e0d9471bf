//! Does this `/dev/kvm` run Linux? Asked by running real guest instructions.
//!
//! A `/dev/kvm` that opens is not KVM that works: some sandboxes offer one that interprets
//! instructions one by one, hundreds of times too slow and with gaps no Linux survives. The probe
//! runs tiny guests that do what Linux does early and looks at whether and how fast they get through.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use kvm_bindings::{kvm_regs, kvm_segment};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use serde::Serialize;
use vm_memory::{Bytes, GuestAddress};

use crate::boot::{cpuid, registers};
use crate::{Error, GuestMemory, Result, asm_guest, guest_code, memory, vcpu, vm};

/// The number under which the probe finds `/dev/kvm`.
pub const KVM_FD: i32 = 3;
/// Below this a kernel boots in minutes or never. Emulated hardware virtualization, the slowest KVM
/// that is still usable, is ten times faster; KVM that interprets is ten times slower.
pub const MIN_INSTRUCTIONS_PER_SECOND: u64 = 10_000_000;
/// A KVM that works needs milliseconds.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// How long the timed loop goes on at least.
const TIMED: Duration = Duration::from_millis(50);

/// The result of the probe.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Whether the descriptor answers as KVM.
    pub opens: bool,
    /// KVM's API version; 12 everywhere.
    pub api_version: i32,
    /// Whether a guest of a few real-mode instructions ran.
    pub tiny_guest: bool,
    /// Whether a guest that does what Linux does ran, fast enough.
    pub runs_linux: bool,
    /// A sentence: the missing feature, or that none is missing.
    pub reason: String,
    /// How fast a guest's loop went; 0 if it never came so far.
    pub instructions_per_second: u64,
}

/// Probes `kvm`. Ends in bounded time whatever that KVM does.
pub fn run(kvm: OwnedFd) -> Report {
    let report = Arc::new(Mutex::new(Report::default()));
    let (done, finished) = mpsc::channel();
    let shared = report.clone();
    // A guest that hangs holds its thread; the process exits without waiting for it.
    std::thread::spawn(move || {
        let outcome = probe(kvm, &shared);
        let _ = done.send(outcome);
    });
    let outcome = finished.recv_timeout(TIME_LIMIT);
    let mut report = report.lock().map(|report| report.clone()).unwrap_or_default();
    match outcome {
        Ok(Ok(())) => {
            report.runs_linux = true;
            report.reason = "KVM runs real guests at a usable speed".into();
        }
        Ok(Err(error)) => report.reason = error.chain(),
        Err(_) => report.reason = format!("a tiny guest did not end within {TIME_LIMIT:?}"),
    }
    report
}

fn probe(kvm: OwnedFd, report: &Mutex<Report>) -> Result<()> {
    let update = |change: &dyn Fn(&mut Report)| {
        if let Ok(mut report) = report.lock() {
            change(&mut report);
        }
    };
    let kvm = vm::open_kvm(File::from(kvm))?;
    let version = kvm.get_api_version();
    update(&|report| (report.opens, report.api_version) = (true, version));
    run_real_mode(&kvm)?;
    update(&|report| report.tiny_guest = true);
    let speed = run_loop(&kvm)?;
    update(&|report| report.instructions_per_second = speed);
    run_long_mode(&kvm)?;
    if speed < MIN_INSTRUCTIONS_PER_SECOND {
        return Err(Error::Config(format!(
            "guests run, but at {speed} instructions per second (Linux needs {MIN_INSTRUCTIONS_PER_SECOND}): \
             this KVM interprets instead of using virtualization hardware"
        )));
    }
    Ok(())
}

guest_code! {
    /// Real mode: writes memory, reads it back, reports and stops.
    fn real_mode,
    ".code16",
    "mov word ptr [0x2000], 0x1234",
    "mov ax, word ptr [0x2000]",
    "out 0x80, ax",
    "hlt",
}

guest_code! {
    /// The early steps of Linux, a stage after the other, each reported by its number.
    fn long_mode,
    "mov al, 0",
    "out 0x80, al",

    "mov eax, 1",
    "cpuid",
    "mov r12d, ecx",
    "bt r12d, 13",
    "jnc 2f",
    "mov edi, 0x200000",
    "mov qword ptr [rdi], 1",
    "mov qword ptr [rdi + 8], 2",
    "mov eax, 1",
    "mov edx, 2",
    "mov ebx, 3",
    "mov ecx, 4",
    "lock cmpxchg16b [rdi]",
    "jne 8f",
    "cmp qword ptr [rdi], 3",
    "jne 8f",
    "cmp qword ptr [rdi + 8], 4",
    "jne 8f",
    "2: mov al, 1",
    "out 0x80, al",

    "bt r12d, 26",
    "jnc 3f",
    "mov rax, cr4",
    "or eax, 0x40200",
    "mov cr4, rax",
    "xor ecx, ecx",
    "xor edx, edx",
    "mov eax, 3",
    "xsetbv",
    "mov edi, 0x201000",
    "xsave [rdi]",
    "xrstor [rdi]",
    "3: mov al, 2",
    "out 0x80, al",

    "lea rax, [rip + 9f]",
    "mov edi, 0x202030",
    "mov word ptr [rdi], ax",
    "mov word ptr [rdi + 2], 0x10",
    "mov word ptr [rdi + 4], 0x8e00",
    "shr rax, 16",
    "mov word ptr [rdi + 6], ax",
    "mov qword ptr [rdi + 8], 0",
    "mov edi, 0x203000",
    "mov word ptr [rdi], 0xfff",
    "mov qword ptr [rdi + 2], 0x202000",
    "lidt [rdi]",
    "xor ebx, ebx",
    "int3",
    "cmp ebx, 0x1234",
    "jne 8f",
    "mov al, 3",
    "out 0x80, al",

    "8: mov al, 0xff",
    "out 0x80, al",
    "9: mov ebx, 0x1234",
    "iretq",
}

guest_code! {
    /// Loops for ever and reports every [`ROUND`] instructions.
    fn endless_loop,
    "4: mov ecx, 10000",
    "5: add qword ptr [0x200000], rax",
    "dec ecx",
    "jnz 5b",
    "out 0x80, al",
    "jmp 4b",
}

/// The step of [`long_mode`] before the stage of that number.
const STAGES: [&str; 4] =
    ["its first instruction", "`cmpxchg16b`", "`xsave` and `xrstor`", "an exception handler (`int3`)"];
/// Instructions between two reports of [`endless_loop`].
const ROUND: u64 = 3 * 10_000;
const PORT: u16 = 0x80;

fn run_real_mode(kvm: &Kvm) -> Result<()> {
    const AT: u64 = 0x1000;
    let (_vm, mut vcpu, memory) = tiny_vm(kvm)?;
    load(&memory, real_mode(), AT)?;
    let mut special = vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
    let flat = |segment: kvm_segment| kvm_segment { base: 0, selector: 0, ..segment };
    (special.cs, special.ds) = (flat(special.cs), flat(special.ds));
    vcpu.set_sregs(&special).map_err(Error::kvm("KVM_SET_SREGS"))?;
    vcpu.set_regs(&kvm_regs { rip: AT, rflags: 2, ..Default::default() })
        .map_err(Error::kvm("KVM_SET_REGS"))?;
    match next_report(&mut vcpu)? {
        Ok(0x1234) => Ok(()),
        Ok(other) => Err(Error::Config(format!("a real-mode guest calculated {other:#x} for 0x1234"))),
        Err(stop) => Err(Error::Config(format!("a real-mode guest did not run: {stop}"))),
    }
}

fn run_long_mode(kvm: &Kvm) -> Result<()> {
    let (_vm, mut vcpu, _memory) = tiny_vm_64(kvm, long_mode())?;
    for (stage, name) in STAGES.iter().enumerate() {
        match next_report(&mut vcpu)? {
            Ok(told) if told == stage as u64 => {}
            Ok(_) => return Err(Error::Config(format!("a 64-bit guest got a wrong result from {name}"))),
            Err(stop) => {
                return Err(Error::Config(format!("a 64-bit guest did not get through {name}: {stop}")));
            }
        }
    }
    Ok(())
}

/// How many instructions per second [`endless_loop`] makes.
fn run_loop(kvm: &Kvm) -> Result<u64> {
    let (_vm, mut vcpu, _memory) = tiny_vm_64(kvm, endless_loop())?;
    let mut round = || -> Result<u64> {
        let told = next_report(&mut vcpu)?;
        told.map_err(|stop| Error::Config(format!("a 64-bit guest's loop ended: {stop}")))
    };
    // The first round pays for page faults and translation.
    round()?;
    let (start, mut rounds) = (Instant::now(), 0);
    while start.elapsed() < TIMED {
        round()?;
        rounds += 1;
    }
    Ok((rounds as f64 * ROUND as f64 / start.elapsed().as_secs_f64()) as u64)
}

/// A [`tiny_vm`] that stands at the first instruction of `code`, in 64-bit mode.
fn tiny_vm_64(kvm: &Kvm, code: &[u8]) -> Result<(VmFd, VcpuFd, GuestMemory)> {
    let (vm, vcpu, memory) = tiny_vm(kvm)?;
    load(&memory, code, asm_guest::CODE)?;
    registers::write_boot_tables(&memory)?;
    registers::set_boot_state(&vcpu, asm_guest::CODE)?;
    Ok((vm, vcpu, memory))
}

/// A VM with 4 MiB and one vCPU.
fn tiny_vm(kvm: &Kvm) -> Result<(VmFd, VcpuFd, GuestMemory)> {
    let memory = memory::allocate(4)?;
    vm::check_host(kvm, 1)?;
    let (vm, mut vcpus) = vm::create(kvm, &memory, 1)?;
    let vcpu = vcpus.pop().ok_or_else(|| Error::Config("a VM without vCPUs".into()))?;
    let cpuid = cpuid::for_vcpu(&cpuid::supported(kvm)?, 0, 1)?;
    vcpu.set_cpuid2(&cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    registers::set_common_state(&vcpu)?;
    Ok((vm, vcpu, memory))
}

fn load(memory: &GuestMemory, code: &[u8], address: u64) -> Result<()> {
    memory.write_slice(code, GuestAddress(address)).map_err(|error| Error::Config(error.to_string()))
}

/// Runs until the guest reports, or stops for another reason, which is returned.
fn next_report(vcpu: &mut VcpuFd) -> Result<std::result::Result<u64, String>> {
    loop {
        match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, data)) => {
                return Ok(Ok(data.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte))));
            }
            Ok(VcpuExit::Intr) => {}
            Ok(exit) => {
                let exit = format!("{exit:?}");
                return Ok(Err(vcpu::explain_exit(vcpu, &exit)));
            }
            Err(error) if vcpu::is_retry(&error) => {}
            Err(error) => return Err(Error::kvm("KVM_RUN")(error)),
        }
    }
}
