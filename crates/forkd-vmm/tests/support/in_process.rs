//! VMs in the test's own process.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    reason = "each test binary uses a part of this"
)]

use std::fs::File;
use std::sync::Arc;

use forkd_vmm::boot::BootSource;
use forkd_vmm::devices::serial::ConsoleLog;
use forkd_vmm::vm::{Running, Vm, VmParts};
use forkd_vmm::{GuestMemory, asm_guest, seccomp};
use vm_memory::{Bytes, GuestAddress};

/// A VM that is about to run `code`.
pub fn parts(kvm: File, code: &[u8]) -> VmParts {
    let kernel = crate::support::file_with(&asm_guest::elf_kernel(code));
    VmParts {
        kvm,
        vcpus: 1,
        mem_mib: 16,
        source: BootSource { kernel, initramfs: None, cmdline: String::new() },
        console: console(),
        devices: Vec::new(),
    }
}

pub fn console() -> Arc<ConsoleLog> {
    Arc::new(ConsoleLog::new(tempfile::tempfile().unwrap(), 4096).unwrap())
}

/// Builds a VM and starts it.
pub fn boot(parts: VmParts) -> Running {
    start(Vm::build(parts).unwrap())
}

/// Starts `vm`. The process of a test has threads and heaps of its own, so its calls are not the monitor's: the
/// filters are tested on the real process.
pub fn start(vm: Vm) -> Running {
    vm.start(seccomp::Mode::Log).unwrap()
}

pub fn read(memory: &GuestMemory, address: u64) -> u64 {
    memory.read_obj(GuestAddress(address)).unwrap()
}
