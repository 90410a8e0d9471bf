//! A kernel's file into guest memory.
//!
//! Two formats, which differ in their first bytes: an ELF vmlinux is entered at its entry address, a bzImage
//! at its 64-bit entry, where it unpacks itself.

use std::fs::File;
use std::os::unix::fs::FileExt;

use linux_loader::loader::bootparam::setup_header;
use vm_memory::ByteValued;

use super::copy_from_file;
use crate::layout::HIGH_RAM;
use crate::{Error, GuestMemory, Result};

/// A kernel in guest memory.
#[derive(Debug)]
pub struct Kernel {
    /// Address of its first instruction, to be reached in 64-bit mode.
    pub entry: u64,
    /// End of the memory it needs before it has read the memory map.
    pub end: u64,
    /// A bzImage's own part of the boot parameters.
    pub setup_header: Option<setup_header>,
}

/// Loads the kernel in `file` into `memory`.
pub fn load(memory: &GuestMemory, file: &File) -> Result<Kernel> {
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, 0).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => not_a_kernel("the file is shorter than any kernel"),
        _ => Error::System { what: "read the kernel", source: error },
    })?;
    if &magic == b"\x7fELF" { load_elf(memory, file) } else { load_bzimage(memory, file) }
}

fn not_a_kernel(why: impl Into<String>) -> Error {
    Error::NotAKernel(why.into())
}

/// Copies `length` bytes at `offset` of `file` to `address`.
fn copy(memory: &GuestMemory, file: &File, offset: u64, length: u64, address: u64) -> Result<()> {
    if offset.checked_add(length).is_none_or(|end| end > file_length(file).unwrap_or(0)) {
        return Err(not_a_kernel("the file is cut short"));
    }
    copy_from_file(memory, "kernel", file, (offset, length), address)
}

fn file_length(file: &File) -> Result<u64> {
    Ok(file.metadata().map_err(Error::system("measure the kernel"))?.len())
}

const ELF_HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// Kernels have about five segments.
const MAX_SEGMENTS: u16 = 64;
const PT_LOAD: u32 = 1;
const PT_INTERP: u32 = 3;

fn load_elf(memory: &GuestMemory, file: &File) -> Result<Kernel> {
    let mut header = [0; ELF_HEADER];
    file.read_exact_at(&mut header, 0).map_err(|_| not_a_kernel("the ELF header is cut short"))?;
    let (class, order) = (header[4], header[5]);
    let (kind, machine) = (u16_at(&header, 16), u16_at(&header, 18));
    if (class, order, machine) != (2, 1, 62) {
        return Err(not_a_kernel("an ELF file, but not for x86-64"));
    }
    let segments = u16_at(&header, 56);
    if kind != 2 || u16_at(&header, 54) as usize != PROGRAM_HEADER || segments > MAX_SEGMENTS {
        return Err(not_a_kernel("an ELF file, but a library, a module or a position-independent program"));
    }

    let (entry, table) = (u64_at(&header, 24), u64_at(&header, 32));
    let length = file_length(file)?;
    let (mut end, mut entry_is_loaded, mut copied) = (0, false, 0u64);
    for index in 0..u64::from(segments) {
        let mut segment = [0; PROGRAM_HEADER];
        let at = table.checked_add(index * PROGRAM_HEADER as u64);
        at.and_then(|at| file.read_exact_at(&mut segment, at).ok())
            .ok_or_else(|| not_a_kernel("the ELF program headers are cut short"))?;
        match u32_at(&segment, 0) {
            PT_LOAD => {}
            PT_INTERP => return Err(not_a_kernel("an ELF program for user space")),
            _ => continue,
        }
        let (offset, virt, phys) = (u64_at(&segment, 8), u64_at(&segment, 16), u64_at(&segment, 24));
        let (file_size, memory_size) = (u64_at(&segment, 32), u64_at(&segment, 40));
        let segment_end = phys
            .checked_add(memory_size.max(file_size))
            .ok_or_else(|| not_a_kernel("a segment ends beyond all memory"))?;
        if phys < HIGH_RAM {
            return Err(not_a_kernel("an ELF file that wants to be in the first MiB of memory"));
        }
        // Else a small file could keep us busy for long.
        copied = copied.saturating_add(file_size);
        if copied > length {
            return Err(not_a_kernel("the file is cut short, or its segments overlap"));
        }
        if file_size > 0 {
            copy(memory, file, offset, file_size, phys)?;
        }
        // Linux is linked into the upper half of the address space; a static program is not.
        entry_is_loaded |= (phys..segment_end).contains(&entry) && virt >> 63 == 1;
        end = end.max(segment_end);
    }
    if !entry_is_loaded {
        return Err(not_a_kernel("an ELF file whose entry is not at a kernel's address"));
    }
    Ok(Kernel { entry, end, setup_header: None })
}

/// Offset of the setup header in a bzImage.
const SETUP_HEADER: u64 = 0x1f1;
/// "HdrS"
const SETUP_MAGIC: u32 = 0x5372_6448;
/// First version of the boot protocol with a flag for the 64-bit entry.
const PROTOCOL_2_12: u16 = 0x020c;
/// `loadflags`: the kernel belongs above 1 MiB.
const LOADED_HIGH: u8 = 1;
/// `xloadflags`: there is a 64-bit entry, [`ENTRY_64`] bytes after the 32-bit one.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64: u64 = 0x200;

fn load_bzimage(memory: &GuestMemory, file: &File) -> Result<Kernel> {
    let mut header = setup_header::default();
    file.read_exact_at(header.as_mut_slice(), SETUP_HEADER)
        .map_err(|_| not_a_kernel("neither an ELF file nor long enough for a bzImage"))?;
    let (magic, version, xloadflags) = (header.header, header.version, header.xloadflags);
    if magic != SETUP_MAGIC {
        return Err(not_a_kernel("neither an ELF file nor a bzImage"));
    }
    if version < PROTOCOL_2_12 || header.loadflags & LOADED_HIGH == 0 || xloadflags & XLF_KERNEL_64 == 0 {
        return Err(not_a_kernel("a bzImage without a 64-bit entry"));
    }

    let setup_sectors = if header.setup_sects == 0 { 4 } else { u64::from(header.setup_sects) };
    let offset = (setup_sectors + 1) * 512;
    let length = file_length(file)?
        .checked_sub(offset)
        .filter(|&length| length > ENTRY_64)
        .ok_or_else(|| not_a_kernel("the bzImage is cut short"))?;
    // The header has the image's length, in units of 16 bytes: a truncated image would only hang later.
    let declared = u64::from(header.syssize) * 16;
    if length + 16 <= declared {
        return Err(not_a_kernel("the bzImage is cut short"));
    }
    let load = u64::from(header.code32_start);
    if load < HIGH_RAM {
        return Err(not_a_kernel("a bzImage that wants to be in the first MiB of memory"));
    }
    copy(memory, file, offset, length, load)?;

    // It unpacks itself to where it prefers to be and needs `init_size` bytes there.
    let unpacked = load.max(header.pref_address).checked_add(u64::from(header.init_size));
    let end =
        unpacked.ok_or_else(|| not_a_kernel("a bzImage that ends beyond all memory"))?.max(load + length);
    Ok(Kernel { entry: load + ENTRY_64, end, setup_header: Some(header) })
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16_at(bytes, at)) | u32::from(u16_at(bytes, at + 2)) << 16
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | u64::from(u32_at(bytes, at + 4)) << 32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::asm_guest;
    use std::io::Write;

    fn load_bytes(bytes: &[u8]) -> Result<Kernel> {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        load(&crate::memory::allocate(16).unwrap(), &file)
    }

    #[track_caller]
    fn assert_refused(bytes: &[u8], why: &str) {
        let message = load_bytes(bytes).unwrap_err().to_string();
        assert!(message.starts_with("not a Linux kernel: "), "{message}");
        assert!(message.contains(why), "{message}");
    }

    /// `elf_kernel` with the byte at `at` changed to `value`.
    fn changed(at: usize, value: u8) -> Vec<u8> {
        let mut elf = asm_guest::elf_kernel(&[0xf4; 64]);
        elf[at] = value;
        elf
    }

    #[test]
    fn an_elf_kernel_is_put_where_it_asks_to_be() {
        let kernel = load_bytes(&asm_guest::elf_kernel(&[0xf4; 64])).unwrap();
        assert_eq!((kernel.entry, kernel.end), (asm_guest::CODE, asm_guest::CODE + 64));
        assert!(kernel.setup_header.is_none());
    }

    #[test]
    fn what_is_not_a_kernel_is_refused_with_the_reason() {
        assert_refused(b"", "shorter");
        assert_refused(b"#!/bin/sh\n", "neither an ELF file nor long enough");
        assert_refused(&[0; 4096], "neither an ELF file nor a bzImage");
        assert_refused(&asm_guest::elf_kernel(&[0xf4; 64])[..40], "cut short");
        assert_refused(&asm_guest::elf_kernel(&[0xf4; 64])[..100], "cut short");
        assert_refused(&asm_guest::elf_kernel(&[0xf4; 64])[..150], "cut short");
        assert_refused(&changed(4, 1), "not for x86-64");
        assert_refused(&changed(18, 183), "not for x86-64");
        assert_refused(&changed(16, 3), "position-independent");
        assert_refused(&changed(64, 3), "user space");
        // Linked in the lower half, entered beyond its end, loaded into the first MiB.
        assert_refused(&changed(64 + 23, 0), "entry");
        assert_refused(&changed(25, 0xff), "entry");
        assert_refused(&changed(64 + 26, 0), "first MiB");
    }

    #[test]
    fn the_same_bytes_are_not_loaded_again_and_again() {
        let segment = asm_guest::elf_kernel(&[0xf4; 200])[64..120].to_vec();
        // The code begins with a second program header, the same as the first.
        let mut elf = asm_guest::elf_kernel(&[segment, vec![0xf4; 144]].concat());
        load_bytes(&elf).unwrap();
        elf[56] = 2;
        assert_refused(&elf, "overlap");
    }

    #[test]
    fn a_kernel_larger_than_memory_is_refused_with_the_remedy() {
        let message = load_bytes(&changed(64 + 27, 1)).unwrap_err().to_string();
        assert!(message.contains("more memory"), "{message}");
    }

    /// The first sectors of a bzImage for the 64-bit entry, with `length` bytes of kernel.
    fn bzimage(length: usize) -> Vec<u8> {
        let mut image = vec![0; 1024 + length];
        let header = setup_header {
            setup_sects: 1,
            syssize: 1024 / 16,
            header: SETUP_MAGIC,
            version: 0x020f,
            loadflags: LOADED_HIGH,
            xloadflags: XLF_KERNEL_64,
            code32_start: HIGH_RAM as u32,
            pref_address: 2 << 20,
            init_size: 1 << 20,
            ..Default::default()
        };
        let at = SETUP_HEADER as usize;
        image[at..at + header.as_slice().len()].copy_from_slice(header.as_slice());
        image
    }

    #[test]
    fn a_bzimage_is_entered_in_64_bit_mode_and_keeps_the_room_it_needs() {
        let kernel = load_bytes(&bzimage(1024)).unwrap();
        assert_eq!((kernel.entry, kernel.end), (HIGH_RAM + ENTRY_64, 3 << 20));
        assert!(kernel.setup_header.is_some());
        assert_refused(&bzimage(1000), "cut short");
        assert_refused(&bzimage(0), "cut short");
        let mut old = bzimage(1024);
        old[SETUP_HEADER as usize + 0x45] = 0;
        assert_refused(&old, "64-bit entry");
    }

    #[test]
    fn no_changed_byte_makes_the_loader_panic() {
        for original in [asm_guest::elf_kernel(&[0xf4; 64]), bzimage(1024)] {
            for at in 0..original.len().min(0x280) {
                for value in [0, 1, 0x7f, 0x80, 0xff] {
                    let mut bytes = original.clone();
                    bytes[at] = value;
                    let _ = load_bytes(&bytes);
                }
            }
        }
    }
}
