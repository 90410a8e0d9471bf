//! Linux's boot parameters: command line, initramfs and memory map in the "zero page".

use std::fs::File;

use linux_loader::loader::bootparam::{boot_e820_entry, boot_params};
use vm_memory::{ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use super::copy_from_file;
use super::kernel::Kernel;
use crate::layout::{
    ACPI_START, CMDLINE, CMDLINE_MAX, HIGH_RAM, INITRAMFS_MAX, LOW_RAM_END, MMIO_HOLE_START, PAGE, ZERO_PAGE,
};
use crate::{Error, GuestMemory, Result};

/// The start of every guest's command line.
///
/// - `console=ttyS0`: the serial console is all there is;
/// - `reboot=k panic=-1`: reset at once, through the keyboard controller, which the monitor emulates;
/// - `quiet`: every character on the console is a trip out of the guest;
/// - `pci=off`: there is none, and looking for it costs time;
/// - `clocksource=kvm-clock`: the one clock that stays right in a fork or an old snapshot.
pub const BASE_CMDLINE: &str = "console=ttyS0 reboot=k panic=-1 quiet pci=off clocksource=kvm-clock";

const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;

/// Writes command line, initramfs and zero page for `kernel`.
pub fn write(memory: &GuestMemory, kernel: &Kernel, initramfs: Option<&File>, cmdline: &str) -> Result<()> {
    let mut params = boot_params::default();
    if let Some(header) = kernel.setup_header {
        params.hdr = header;
    }
    params.hdr.boot_flag = 0xaa55;
    params.hdr.header = 0x5372_6448;
    // "Unknown boot loader": there is no number for this one.
    params.hdr.type_of_loader = 0xff;
    params.acpi_rsdp_addr = ACPI_START;

    let length = write_cmdline(memory, cmdline)?;
    params.hdr.cmd_line_ptr = CMDLINE as u32;
    params.hdr.cmdline_size = length;

    let low_end = memory.iter().next().map_or(0, |region| region.len()).min(MMIO_HOLE_START);
    let mut free_end = low_end;
    if let Some(file) = initramfs {
        let (address, size) = load_initramfs(memory, file, low_end)?;
        params.hdr.ramdisk_image = address as u32;
        params.hdr.ramdisk_size = size as u32;
        free_end = address;
    }
    if kernel.end > free_end {
        return Err(Error::Config(format!(
            "the VM has too little memory: the kernel needs the first {} MiB and {} MiB are free; \
             give it more",
            kernel.end.div_ceil(1 << 20),
            free_end >> 20
        )));
    }

    for (index, entry) in memory_map(memory).into_iter().enumerate() {
        params.e820_table[index] = entry;
        params.e820_entries = index as u8 + 1;
    }
    write_bytes(memory, ZERO_PAGE, params.as_slice())
}

/// The memory map: low memory, the reserved rest of the first MiB (our ACPI tables are there), and
/// everything else.
fn memory_map(memory: &GuestMemory) -> Vec<boot_e820_entry> {
    let ram = |addr, end| boot_e820_entry { addr, size: end - addr, r#type: E820_RAM };
    let reserved = boot_e820_entry { addr: LOW_RAM_END, size: HIGH_RAM - LOW_RAM_END, r#type: E820_RESERVED };
    let mut map = vec![ram(0, LOW_RAM_END), reserved];
    for region in memory.iter() {
        let start = region.start_addr().0;
        let end = start + region.len();
        map.push(ram(start.max(HIGH_RAM), end.max(HIGH_RAM)));
    }
    map
}

/// Writes the whole command line and returns its length.
fn write_cmdline(memory: &GuestMemory, added: &str) -> Result<u32> {
    if let Some(odd) = added.chars().find(|c| !c.is_ascii() || c.is_ascii_control()) {
        return Err(Error::Config(format!(
            "the kernel command line holds {odd:?}: only printable ASCII works"
        )));
    }
    let line = format!("{BASE_CMDLINE} {added}");
    let line = line.trim_end();
    if line.len() >= CMDLINE_MAX {
        let most = CMDLINE_MAX - 1;
        return Err(Error::Config(format!(
            "the kernel command line has {} bytes of at most {most}",
            line.len()
        )));
    }
    write_bytes(memory, CMDLINE, line.as_bytes())?;
    write_bytes(memory, CMDLINE + line.len() as u64, &[0])?;
    Ok(line.len() as u32)
}

/// Puts the initramfs as high as kernels accept it, away from where they unpack themselves.
/// Returns its address and size.
fn load_initramfs(memory: &GuestMemory, file: &File, low_end: u64) -> Result<(u64, u64)> {
    let size = file.metadata().map_err(Error::system("measure the initramfs"))?.len();
    let too_large = || {
        let message = format!("an initramfs of {} MiB does not fit; give the VM more memory", size >> 20);
        Error::Config(message)
    };
    let top = low_end.min(INITRAMFS_MAX);
    let address =
        top.checked_sub(size).map(|a| a - a % PAGE).filter(|&a| a >= HIGH_RAM).ok_or_else(too_large)?;
    copy_from_file(memory, "initramfs", file, (0, size), address)?;
    Ok((address, size))
}

/// Writes `bytes` at `address`, which is below the end of even the smallest guest's memory.
pub(super) fn write_bytes(memory: &GuestMemory, address: u64, bytes: &[u8]) -> Result<()> {
    memory
        .write_slice(bytes, GuestAddress(address))
        .map_err(|_| Error::Config("the VM has too little memory to boot anything; give it more".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::allocate;

    const KERNEL: Kernel = Kernel { entry: HIGH_RAM, end: 8 << 20, setup_header: None };

    fn initramfs(mib: u64) -> File {
        let file = tempfile::tempfile().unwrap();
        file.set_len(mib << 20).unwrap();
        file
    }

    #[test]
    fn the_memory_map_leaves_out_the_reserved_part_and_the_hole() {
        let memory = allocate(4096).unwrap();
        write(&memory, &KERNEL, None, "").unwrap();
        let params: boot_params = memory.read_obj(GuestAddress(ZERO_PAGE)).unwrap();
        let map = params.e820_table;
        let map: Vec<_> =
            map.iter().take(params.e820_entries.into()).map(|e| (e.addr, e.size, e.r#type)).collect();
        let expected = [
            (0, LOW_RAM_END, E820_RAM),
            (LOW_RAM_END, HIGH_RAM - LOW_RAM_END, E820_RESERVED),
            (HIGH_RAM, MMIO_HOLE_START - HIGH_RAM, E820_RAM),
            (4 << 30, 1 << 30, E820_RAM),
        ];
        assert_eq!(map, expected);
    }

    #[test]
    fn an_initramfs_lies_at_the_top_of_what_kernels_accept() {
        for (mib, end) in [(64, 64 << 20), (4096, INITRAMFS_MAX)] {
            let memory = allocate(mib).unwrap();
            write(&memory, &KERNEL, Some(&initramfs(2)), "").unwrap();
            let params: boot_params = memory.read_obj(GuestAddress(ZERO_PAGE)).unwrap();
            let (address, size) = (params.hdr.ramdisk_image, params.hdr.ramdisk_size);
            assert_eq!((u64::from(address), size), (end - (2 << 20), 2 << 20));
        }
    }

    #[test]
    fn kernel_and_initramfs_that_do_not_fit_together_are_refused() {
        let memory = allocate(16).unwrap();
        for too_much in [9, 17, 1 << 20] {
            let message = write(&memory, &KERNEL, Some(&initramfs(too_much)), "").unwrap_err().to_string();
            assert!(message.contains("more"), "{message}");
        }
        write(&memory, &KERNEL, Some(&initramfs(8)), "").unwrap();
    }

    #[test]
    fn the_command_line_ends_with_what_was_added() {
        let memory = allocate(16).unwrap();
        write(&memory, &KERNEL, None, "forkd=1 x=\"a b\"").unwrap();
        let mut bytes = vec![0; CMDLINE_MAX];
        memory.read_slice(&mut bytes, GuestAddress(CMDLINE)).unwrap();
        let line = std::ffi::CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap();
        assert_eq!(line, format!("{BASE_CMDLINE} forkd=1 x=\"a b\""));
        assert!(write(&memory, &KERNEL, None, "a\nb").is_err());
        assert!(write(&memory, &KERNEL, None, &"x".repeat(CMDLINE_MAX)).is_err());
    }
}
