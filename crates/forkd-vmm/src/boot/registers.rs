//! The state a vCPU starts in.
//!
//! The first vCPU stands at the kernel's entry as the 64-bit boot protocol wants it: long mode, flat
//! segments, the first GiB mapped to itself, `rsi` at the boot parameters. The others wait for it to
//! wake them.

use kvm_bindings::{Msrs, kvm_fpu, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;

use super::params::write_bytes;
use crate::layout::{BOOT_GDT, BOOT_IDT, BOOT_PAGE_TABLES, BOOT_STACK, PAGE, ZERO_PAGE};
use crate::{Error, GuestMemory, Result};

/// Selectors the boot protocol names: `__BOOT_CS`, `__BOOT_DS`; the task segment is ours.
const CODE: u16 = 0x10;
const DATA: u16 = 0x18;
const TASK: u16 = 0x20;
/// The descriptors behind them.
const GDT: [u64; 5] = [0, 0, 0x00af_9b00_0000_ffff, 0x00cf_9300_0000_ffff, 0x008f_8b00_0000_ffff];

const CR0_PROTECTED: u64 = 1;
const CR0_PAGING: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LONG_MODE: u64 = 1 << 8 | 1 << 10;
const PRESENT_WRITABLE: u64 = 3;
const LARGE_PAGE: u64 = 1 << 7;

/// Writes descriptor and page tables for the first vCPU.
pub fn write_boot_tables(memory: &GuestMemory) -> Result<()> {
    let bytes = |entries: &[u64]| entries.iter().flat_map(|entry| entry.to_le_bytes()).collect::<Vec<u8>>();
    let (top, middle, bottom) = (BOOT_PAGE_TABLES, BOOT_PAGE_TABLES + PAGE, BOOT_PAGE_TABLES + 2 * PAGE);
    let large_pages: Vec<u64> = (0..512).map(|page| page << 21 | PRESENT_WRITABLE | LARGE_PAGE).collect();
    write_bytes(memory, BOOT_GDT, &bytes(&GDT))?;
    write_bytes(memory, BOOT_IDT, &[0; 8])?;
    write_bytes(memory, top, &bytes(&[middle | PRESENT_WRITABLE]))?;
    write_bytes(memory, middle, &bytes(&[bottom | PRESENT_WRITABLE]))?;
    write_bytes(memory, bottom, &bytes(&large_pages))
}

/// Puts the first vCPU at `entry`.
pub fn set_boot_state(vcpu: &VcpuFd, entry: u64) -> Result<()> {
    let mut special = vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
    special.cs = segment(CODE, 11, true);
    let data = segment(DATA, 3, false);
    (special.ds, special.es, special.fs, special.gs, special.ss) = (data, data, data, data, data);
    // Intel will not enter a guest in long mode without a busy task segment.
    special.tr = kvm_segment { s: 0, db: 0, ..segment(TASK, 11, false) };
    (special.gdt.base, special.gdt.limit) = (BOOT_GDT, (GDT.len() * 8 - 1) as u16);
    (special.idt.base, special.idt.limit) = (BOOT_IDT, 7);
    special.cr3 = BOOT_PAGE_TABLES;
    special.cr4 |= CR4_PAE;
    special.cr0 |= CR0_PROTECTED | CR0_PAGING;
    special.efer |= EFER_LONG_MODE;
    vcpu.set_sregs(&special).map_err(Error::kvm("KVM_SET_SREGS"))?;

    let general = kvm_regs {
        rip: entry,
        rsi: ZERO_PAGE,
        rsp: BOOT_STACK,
        rbp: BOOT_STACK,
        rflags: 2,
        ..Default::default()
    };
    vcpu.set_regs(&general).map_err(Error::kvm("KVM_SET_REGS"))
}

/// The registers that every vCPU starts with, the first and the others.
pub fn set_common_state(vcpu: &VcpuFd) -> Result<()> {
    let fpu = kvm_fpu { fcw: 0x37f, mxcsr: 0x1f80, ..Default::default() };
    vcpu.set_fpu(&fpu).map_err(Error::kvm("KVM_SET_FPU"))?;
    set_msrs(vcpu)?;
    set_local_interrupts(vcpu)
}

/// The firmware's settings: fast string operations on, and memory cached by default.
fn set_msrs(vcpu: &VcpuFd) -> Result<()> {
    const IA32_MISC_ENABLE: u32 = 0x1a0;
    const IA32_MTRR_DEF_TYPE: u32 = 0x2ff;
    let entry = |index, data| kvm_msr_entry { index, data, ..Default::default() };
    let entries = [entry(IA32_MISC_ENABLE, 1), entry(IA32_MTRR_DEF_TYPE, 1 << 11 | 6)];
    let msrs =
        Msrs::from_entries(&entries).map_err(|_| Error::Config("too many MSRs for one call".into()))?;
    let written = vcpu.set_msrs(&msrs).map_err(Error::kvm("KVM_SET_MSRS"))?;
    if written == entries.len() { Ok(()) } else { Err(Error::kvm("KVM_SET_MSRS")(errno_einval())) }
}

fn errno_einval() -> kvm_ioctls::Error {
    kvm_ioctls::Error::new(libc::EINVAL)
}

/// The two local interrupt lines. There is no legacy interrupt controller in this machine (ACPI says
/// hardware-reduced), so its line stays masked: KVM opens it by default, and our devices' interrupts
/// would arrive a second time with vectors of its own. The other line is the NMI.
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<()> {
    const LVT_LINT0: usize = 0x350;
    const LVT_LINT1: usize = 0x360;
    const MASKED_EXTINT: u32 = 1 << 16 | 7 << 8;
    const NMI: u32 = 4 << 8;
    let mut lapic = vcpu.get_lapic().map_err(Error::kvm("KVM_GET_LAPIC"))?;
    for (register, value) in [(LVT_LINT0, MASKED_EXTINT), (LVT_LINT1, NMI)] {
        for (byte, value) in lapic.regs[register..].iter_mut().zip(value.to_le_bytes()) {
            *byte = value as i8;
        }
    }
    vcpu.set_lapic(&lapic).map_err(Error::kvm("KVM_SET_LAPIC"))
}

/// A flat segment over all memory: 64-bit code or 32-bit data.
fn segment(selector: u16, kind: u8, long: bool) -> kvm_segment {
    kvm_segment {
        base: 0,
        limit: 0xffff_ffff,
        selector,
        type_: kind,
        present: 1,
        dpl: 0,
        db: u8::from(!long),
        s: 1,
        l: u8::from(long),
        g: 1,
        avl: 0,
        unusable: 0,
        padding: 0,
    }
}
