//! From a kernel's file to a vCPU at its first instruction.
//!
//! - [`kernel`]: an ELF vmlinux or a bzImage into guest memory;
//! - [`params`]: command line, initramfs, memory map: the "zero page" of Linux's boot protocol;
//! - [`acpi`]: the tables by which a stock kernel finds its CPUs, devices and the off switch;
//! - [`cpuid`]: the CPUID of each vCPU;
//! - [`registers`]: the state of the first vCPU in the 64-bit boot protocol.
//!
//! Nothing here knows about threads or devices beyond their addresses. The files come from the
//! controller, but their contents come from users: every number in them is checked.

pub mod acpi;
pub mod cpuid;
pub mod kernel;
pub mod params;
pub mod registers;

use std::fs::File;
use std::os::unix::fs::FileExt;

use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend};

use crate::{Error, GuestMemory, Result};

/// The contents of guest memory before the first instruction.
#[derive(Debug)]
pub struct BootSource {
    /// ELF vmlinux or bzImage.
    pub kernel: File,
    /// Initial RAM file system.
    pub initramfs: Option<File>,
    /// Added to [`params::BASE_CMDLINE`].
    pub cmdline: String,
}

/// Puts everything a kernel needs into `memory` and returns the address of its first instruction.
pub fn load(memory: &GuestMemory, source: &BootSource, vcpus: u8, virtio_devices: usize) -> Result<u64> {
    // The kernel first: a strange kernel may overwrite our tables, so they are written after it.
    let kernel = kernel::load(memory, &source.kernel)?;
    params::write(memory, &kernel, source.initramfs.as_ref(), &source.cmdline)?;
    acpi::write(memory, vcpus, virtio_devices)?;
    registers::write_boot_tables(memory)?;
    Ok(kernel.entry)
}

/// Copies `length` bytes at `offset` of `file`, which holds the `what`, to `address`.
///
/// It reads by position and never moves the file's own: the descriptor may be shared with monitors
/// that load the same file at the same time.
fn copy_from_file(
    memory: &GuestMemory,
    what: &str,
    file: &File,
    (offset, length): (u64, u64),
    address: u64,
) -> Result<()> {
    const CHUNK: u64 = 1 << 20;
    if !usize::try_from(length).is_ok_and(|length| memory.check_range(GuestAddress(address), length)) {
        return Err(Error::Config(format!(
            "the {what} does not fit: it wants {length:#x} bytes at {address:#x}; give the VM more memory"
        )));
    }
    let failed = |error: &dyn std::fmt::Display| Error::Config(format!("the {what} cannot be read: {error}"));
    let mut chunk = vec![0; length.min(CHUNK) as usize];
    let mut done = 0;
    while done < length {
        let part = &mut chunk[..(length - done).min(CHUNK) as usize];
        file.read_exact_at(part, offset + done).map_err(|error| failed(&error))?;
        memory.write_slice(part, GuestAddress(address + done)).map_err(|error| failed(&error))?;
        done += part.len() as u64;
    }
    Ok(())
}
