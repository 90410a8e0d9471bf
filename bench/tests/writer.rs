//! The writing guest, run on bare KVM: which pages it writes, and when it says that it runs.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::fs::File;

use forkd_bench::writer::{FIRST, PAGE, Writer};
use forkd_vmm::boot::{cpuid, registers};
use forkd_vmm::layout::{GENERATION_ID, KVM_TSS, MMIO_HOLE_END, READY_PORT};
use forkd_vmm::{GuestMemory, asm_guest, memory, vm};
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{VcpuExit, VcpuFd, VmFd};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// The first bytes of an ELF file of one segment, before the code.
const HEADERS: usize = 64 + 56;

struct Guest {
    vcpu: VcpuFd,
    _vm: VmFd,
    /// Last, as fields are dropped in this order: the VM uses it.
    memory: GuestMemory,
}

impl Guest {
    /// The guest before its first instruction; none where there is no KVM.
    fn new(writer: &Writer) -> Option<Guest> {
        let device = File::options().read(true).write(true).open("/dev/kvm").ok()?;
        let kvm = vm::open_kvm(device).unwrap();
        let memory = memory::allocate(writer.mem_mib).unwrap();
        registers::write_boot_tables(&memory).unwrap();
        memory.write_slice(&writer.kernel().unwrap()[HEADERS..], GuestAddress(asm_guest::CODE)).unwrap();
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
        vcpu.set_cpuid2(&cpuid::for_vcpu(&cpuid::supported(&kvm).unwrap(), 0, 1).unwrap()).unwrap();
        registers::set_common_state(&vcpu).unwrap();
        registers::set_boot_state(&vcpu, asm_guest::CODE).unwrap();
        Some(Guest { vcpu, _vm: vm, memory })
    }

    /// Runs until it says that it is ready.
    fn run(&mut self) {
        loop {
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(READY_PORT, _)) => return,
                Ok(VcpuExit::Intr) => {}
                Err(error) if matches!(error.errno(), libc::EINTR | libc::EAGAIN) => {}
                other => panic!("{other:?}"),
            }
        }
    }

    fn fork(&mut self, generation: u64) {
        self.memory.write_obj(generation, GuestAddress(GENERATION_ID)).unwrap();
        self.run();
    }

    fn at(&self, address: u64) -> u64 {
        self.memory.read_obj(GuestAddress(address)).unwrap()
    }
}

const MIB: u64 = 1 << 20;

#[test]
fn it_writes_what_it_is_told_to_and_says_when_it_is_forked() {
    // Two MiB above the hole for devices.
    let writer = Writer { mem_mib: 3074, booted: 64 * MIB, value: 7, dirty: 128 * MIB, each: 256 * MIB };
    let Some(mut guest) = Guest::new(&writer) else {
        println!("NOT RUN: the writing guest (no /dev/kvm here)");
        return;
    };
    guest.run();
    for page in [FIRST, FIRST + 64 * MIB, FIRST + 128 * MIB, FIRST + 47 * 64 * MIB, MMIO_HOLE_END] {
        assert_eq!(guest.at(page), 7, "{page:#x}");
    }
    assert_eq!(guest.at(FIRST + PAGE), 0);

    // The sandbox: says it after its pages are dirty, and before the pages of its generation.
    guest.fork(1);
    for page in [FIRST, FIRST + 128 * MIB, FIRST + 23 * 128 * MIB, MMIO_HOLE_END] {
        assert_eq!(guest.at(page), 1, "{page:#x}");
    }
    assert_eq!(guest.at(FIRST + 64 * MIB), 7);
    assert_eq!(guest.at(FIRST + PAGE), 0);

    // A child of its branch: says it at once, having written its generation's pages before.
    guest.fork(2);
    assert_eq!((guest.at(FIRST + PAGE), guest.at(MMIO_HOLE_END + PAGE)), (1, 1));
    assert_eq!(guest.at(FIRST + 2 * PAGE), 0);
    let dirty = guest.at(FIRST);
    guest.fork(3);
    assert_eq!((guest.at(FIRST + 2 * PAGE), guest.at(FIRST + PAGE + 2 * 256 * MIB)), (2, 1));
    assert_eq!(guest.at(FIRST), dirty, "only the sandbox keeps writing");
}

#[test]
fn how_many_pages_a_generation_writes_is_known() {
    let writer = Writer { mem_mib: 512, booted: 0, value: 0, dirty: 0, each: 2 * MIB };
    assert_eq!(writer.pages_of_each(1), 255);
    assert_eq!(Writer { each: 0, ..writer }.pages_of_each(1), 0);
    assert_eq!(Writer { mem_mib: 4096, ..writer }.pages_of_each(5), 2047);
}

#[test]
fn memory_it_has_no_page_tables_for_is_refused() {
    let writer = Writer { mem_mib: 4097, booted: 0, value: 0, dirty: 0, each: 0 };
    assert!(writer.kernel().is_err());
    assert!(Writer { mem_mib: 512, dirty: 1, ..writer }.kernel().is_err());
}
