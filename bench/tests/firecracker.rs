//! The guest of Firecracker's fan-out: on bare KVM, and in a real Firecracker where there is one.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forkd_bench::firecracker::{self, Firecracker};
use forkd_vmm::boot::{cpuid, registers};
use forkd_vmm::layout::KVM_TSS;
use forkd_vmm::{GuestMemory, asm_guest, memory, vm};
use kvm_bindings::{
    KVM_GUESTDBG_ENABLE, KVM_GUESTDBG_SINGLESTEP, kvm_guest_debug, kvm_regs, kvm_userspace_memory_region,
};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// The first bytes of an ELF file of one segment, before the code.
const HEADERS: usize = 64 + 56;
const MEM_MIB: u64 = 4;
/// More instructions than the guest needs for anything but waiting.
const STEPS: usize = 1000;

struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    /// Last, as fields are dropped in this order: the VM uses it.
    memory: GuestMemory,
}

impl Guest {
    /// A guest with `memory`, before the kernel's first instruction.
    fn new(kvm: &Kvm, memory: GuestMemory) -> Guest {
        let vm = kvm.create_vm().unwrap();
        vm.set_tss_address(KVM_TSS).unwrap();
        for (slot, region) in (0..).zip(memory.iter()) {
            let slot = kvm_userspace_memory_region {
                slot,
                guest_phys_addr: region.start_addr().0,
                memory_size: region.len(),
                userspace_addr: region.as_ptr() as u64,
                flags: 0,
            };
            // SAFETY: the mapping outlives the VM, and only the guest writes to it while it runs.
            unsafe { vm.set_user_memory_region(slot) }.unwrap();
        }
        vm.create_irq_chip().unwrap();
        let vcpu = vm.create_vcpu(0).unwrap();
        vcpu.set_cpuid2(&cpuid::for_vcpu(&cpuid::supported(kvm).unwrap(), 0, 1).unwrap()).unwrap();
        registers::set_common_state(&vcpu).unwrap();
        registers::set_boot_state(&vcpu, asm_guest::CODE).unwrap();
        let control = KVM_GUESTDBG_ENABLE | KVM_GUESTDBG_SINGLESTEP;
        let debug = kvm_guest_debug { control, ..Default::default() };
        vcpu.set_guest_debug(&debug).unwrap();
        Guest { vcpu, _vm: vm, memory }
    }

    fn boot(kvm: &Kvm) -> Guest {
        let memory = memory::allocate(MEM_MIB).unwrap();
        registers::write_boot_tables(&memory).unwrap();
        memory.write_slice(&firecracker::kernel()[HEADERS..], GuestAddress(asm_guest::CODE)).unwrap();
        Guest::new(kvm, memory)
    }

    fn load(kvm: &Kvm, file: &Path, registers: &kvm_regs) -> Guest {
        let memory = memory::allocate(MEM_MIB).unwrap();
        memory.write_slice(&std::fs::read(file).unwrap(), GuestAddress(0)).unwrap();
        let guest = Guest::new(kvm, memory);
        guest.vcpu.set_regs(registers).unwrap();
        guest
    }

    fn save(&self, file: &Path) {
        let mut bytes = vec![0; (MEM_MIB << 20) as usize];
        self.memory.read_slice(&mut bytes, GuestAddress(0)).unwrap();
        File::create(file).unwrap().write_all_at(&bytes, 0).unwrap();
    }

    /// Runs instruction after instruction. Whether the guest says its byte within the most it needs for that.
    fn says_its_byte(&mut self) -> bool {
        for _ in 0..STEPS {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(0x3f8, bytes)) => {
                    assert_eq!(bytes, [7]);
                    return true;
                }
                Ok(VcpuExit::Debug(_) | VcpuExit::Intr) => {}
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                other => panic!("{other:?}"),
            }
        }
        false
    }
}

#[test]
fn the_guest_waits_in_the_parent_and_answers_once_loaded_from_a_file_with_the_flag() {
    let Ok(device) = File::options().read(true).write(true).open("/dev/kvm") else {
        let _ = writeln!(std::io::stderr(), "NOT RUN: the guest of Firecracker's fan-out (no /dev/kvm here)");
        return;
    };
    let kvm = vm::open_kvm(device).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("memory");

    let mut parent = Guest::boot(&kvm);
    assert!(parent.says_its_byte(), "it says that it runs");
    assert!(!parent.says_its_byte(), "without the flag it waits");
    parent.save(&file);
    let registers = parent.vcpu.get_regs().unwrap();
    assert!(!Guest::load(&kvm, &file, &registers).says_its_byte(), "and so it does in a child");

    firecracker::raise_flag(&file).unwrap();
    assert!(Guest::load(&kvm, &file, &registers).says_its_byte(), "with the flag a child answers");
    assert!(!parent.says_its_byte(), "its parent's memory is not the file");
}

#[test]
fn children_of_a_real_firecracker_answer() {
    let Some(program) = std::env::var_os("FORKD_TEST_FIRECRACKER") else {
        let _ = writeln!(
            std::io::stderr(),
            "NOT RUN: children of a real Firecracker (FORKD_TEST_FIRECRACKER names no program)"
        );
        return;
    };
    let folder = tempfile::tempdir().unwrap();
    let snapshot = Firecracker::snapshot(Path::new(&program), folder.path(), 512).unwrap();
    let burst = snapshot.burst(10).unwrap();
    assert_eq!((burst.times_ms.len(), burst.errors), (10, Vec::new()));
}
