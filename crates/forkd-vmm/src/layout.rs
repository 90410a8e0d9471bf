//! Where everything is in the guest's physical address space, and which interrupt belongs to what.
//!
//! A guest keeps the addresses with which it was booted, also in a snapshot. So a change of a number here raises
//! `FORMAT_VERSION` of the state file (`state/file.rs`), not the version of a section or of a manifest. A new number does
//! not, unless a guest that uses it cannot run on an older forkd.
//!
//! ```text
//! 0            1 MiB            3 GiB            4 GiB
//! │ boot data, │ guest memory … │ devices, APICs │ … guest memory goes on
//! │ ACPI       │                │ (the MMIO hole)│
//! ```

/// A page.
pub const PAGE: u64 = 0x1000;

/// Descriptor table the boot vCPU starts with.
pub const BOOT_GDT: u64 = 0x500;
/// Interrupt table the boot vCPU starts with; empty.
pub const BOOT_IDT: u64 = 0x520;
/// The kernel's boot parameters.
pub const ZERO_PAGE: u64 = 0x7000;
/// Top of the stack the boot vCPU starts with.
pub const BOOT_STACK: u64 = 0x8ff0;
/// First of the page tables the boot vCPU starts with: one page of each of the three levels.
pub const BOOT_PAGE_TABLES: u64 = 0x9000;
/// The kernel's command line.
pub const CMDLINE: u64 = 0x2_0000;
/// Longest command line that x86 kernels keep, with its final zero.
pub const CMDLINE_MAX: usize = 2048;
/// End of the memory below 1 MiB that the kernel may use. From here to [`HIGH_RAM`] is reserved,
/// so that the kernel leaves alone what we put there.
pub const LOW_RAM_END: u64 = 0x9_fc00;
/// First of the ACPI tables, the RSDP.
pub const ACPI_START: u64 = 0xe_0000;
/// End of the room for ACPI tables.
pub const ACPI_END: u64 = 0xe_8000;
/// The 16 bytes of the VM generation id. In reserved memory, as its specification asks.
pub const GENERATION_ID: u64 = 0xe_8000;
/// Where memory above the first MiB begins, and the lowest address a kernel is loaded to.
pub const HIGH_RAM: u64 = 0x10_0000;
/// An initramfs ends below this: the most that every 64-bit kernel accepts.
pub const INITRAMFS_MAX: u64 = 0x8000_0000;

/// Begin of the hole in memory that device registers live in.
pub const MMIO_HOLE_START: u64 = 3 << 30;
/// End of the hole; memory that did not fit below it goes on here.
pub const MMIO_HOLE_END: u64 = 4 << 30;
/// Registers of the first virtio device.
pub const VIRTIO_BASE: u64 = 0xd000_0000;
/// Distance from one virtio device's registers to the next one's.
pub const VIRTIO_SIZE: u64 = 0x1000;
/// Registers of the I/O APIC; fixed by KVM.
pub const IOAPIC: u32 = 0xfec0_0000;
/// Registers of the local APICs; fixed by the architecture.
pub const LAPIC: u32 = 0xfee0_0000;
/// Three pages Intel's KVM wants for itself to run real-mode code; away from everything else.
pub const KVM_TSS: usize = 0xfffb_d000;

/// First I/O port of the serial console, eight of them.
pub const SERIAL_PORT: u16 = 0x3f8;
/// Command port of the keyboard controller, by which `reboot=k` resets.
pub const RESET_PORT: u16 = 0x64;
/// ACPI's sleep control register, by which a guest powers off.
pub const SLEEP_CONTROL_PORT: u16 = 0x600;
/// ACPI's sleep status register.
pub const SLEEP_STATUS_PORT: u16 = 0x601;

/// A guest without an agent writes any byte here to signal that it runs.
pub const READY_PORT: u16 = 0x602;

/// Interrupt of the serial console.
pub const SERIAL_GSI: u32 = 4;
/// Interrupt for a change of the VM generation id.
pub const GENERATION_GSI: u32 = 5;
/// Interrupt of the first virtio device.
pub const VIRTIO_GSI: u32 = 6;
/// How many virtio devices fit: KVM's I/O APIC has 24 inputs.
pub const MAX_VIRTIO: usize = 18;

/// The most guest memory, in MiB: every 64-bit CPU can address it, with room to spare.
pub const MAX_MEM_MIB: u64 = 256 << 10;

/// Base address of the registers of virtio device `index`.
pub fn virtio_base(index: usize) -> u64 {
    VIRTIO_BASE + index as u64 * VIRTIO_SIZE
}

/// Interrupt of virtio device `index`.
pub fn virtio_gsi(index: usize) -> u32 {
    VIRTIO_GSI + index as u32
}

/// Which virtio device the register address belongs to, and the offset in its registers.
pub fn virtio_register(address: u64) -> Option<(usize, u64)> {
    let offset = address.checked_sub(VIRTIO_BASE)?;
    let index = offset / VIRTIO_SIZE;
    (index < MAX_VIRTIO as u64).then_some((index as usize, offset % VIRTIO_SIZE))
}
