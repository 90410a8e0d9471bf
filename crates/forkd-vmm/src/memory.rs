//! Guest memory: where it is, and how it is mapped here.
//!
//! Guest memory is always private to the process. The kernel's own copy-on-write is what shares it
//! between a template and its children, and a shared mapping would not be a snapshot.

mod mapping;

use std::fs::File;

use rustix::fs::SeekFrom;
use rustix::mm::{Advice, MapFlags, ProtFlags};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap};

use crate::layout::{MAX_MEM_MIB, MMIO_HOLE_END, MMIO_HOLE_START};
use crate::{Error, GuestMemory, Result};
pub use mapping::{HUGE_PAGE, Mapping};

/// The ranges of `mib` MiB of guest memory, as (start, length): one below the MMIO hole and, when
/// it does not fit there, one above.
pub fn ranges(mib: u64) -> Vec<(u64, u64)> {
    let bytes = mib << 20;
    let low = bytes.min(MMIO_HOLE_START);
    let mut ranges = vec![(0, low)];
    if bytes > low {
        ranges.push((MMIO_HOLE_END, bytes - low));
    }
    ranges
}

/// Maps `mib` MiB of guest memory, all zero.
pub fn allocate(mib: u64) -> Result<GuestMemory> {
    if mib == 0 || mib > MAX_MEM_MIB {
        return Err(Error::Config(format!("{mib} MiB of memory: it must be between 1 and {MAX_MEM_MIB}")));
    }
    let memory = map(mib, |_| Ok(None))?;
    use_huge_pages(&memory);
    Ok(memory)
}

/// Memory touched from now on gets huge pages, where they fit. For a VM that was booted: the cost of a fork
/// is copying page tables, and huge pages have hardly any.
pub fn use_huge_pages(memory: &GuestMemory) {
    advise(memory, Advice::LinuxHugepage);
}

/// Memory touched from now on gets small pages. For a VM that is to be forked: a child would pay for a huge
/// page, and count for one, wherever it touches memory its template has not. Huge pages that are there stay.
pub fn use_small_pages(memory: &GuestMemory) {
    advise(memory, Advice::LinuxNoHugepage);
}

/// Advises the kernel on the use of memory. A kernel that does not know the advice ignores it.
fn advise(memory: &GuestMemory, advice: Advice) {
    for region in memory.iter() {
        // SAFETY: the range is the region, which is mapped. The advice changes none of its bytes.
        let _ = unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.len() as usize, advice) };
    }
}

/// Maps `mib` MiB of guest memory from `file`, which holds its ranges one after the other and is never
/// written.
pub fn map_file(mib: u64, file: &File) -> Result<GuestMemory> {
    map(mib, |offset| {
        let file = file.try_clone().map_err(Error::system("copy a descriptor"))?;
        Ok(Some(FileOffset::new(file, offset)))
    })
}

/// Bytes in a row that guest memory has in common with a file. Guest memory is counted from its first
/// byte, all ranges one after the other.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Piece<'f> {
    /// The first byte of guest memory.
    pub(crate) start: u64,
    /// How many.
    pub(crate) length: u64,
    /// The file.
    pub(crate) file: &'f File,
    /// Where in it.
    pub(crate) offset: u64,
}

/// Maps `piece`, a number of whole pages, privately in the place of the present mapping.
pub(crate) fn cover(memory: &GuestMemory, piece: Piece<'_>) -> Result<()> {
    for (address, piece) in parts(memory, piece) {
        // SAFETY: the range lies in a region, which is mapped and which nothing else is in. Nothing refers to
        // its bytes but through the region's address, which stays.
        let mapped = unsafe {
            rustix::mm::mmap(
                address.cast(),
                piece.length as usize,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED,
                piece.file,
                piece.offset,
            )
        };
        mapped.map_err(Error::system("map a memory layer"))?;
    }
    Ok(())
}

/// Maps in, for reading, what is not a hole of the file in `piece`, which is mapped from there. A page a
/// child reads later is then in memory already, and is a page it shares with its template: costs nothing
/// and counts for nothing. Forks do not become dearer, as no page tables are copied before a page is
/// written. What cannot be mapped now is when it is read.
pub(crate) fn hold_data(memory: &GuestMemory, piece: Piece<'_>) {
    for (address, piece) in parts(memory, piece) {
        let end = piece.offset + piece.length;
        let mut at = piece.offset;
        while let Ok(data) = rustix::fs::seek(piece.file, SeekFrom::Data(at))
            && data < end
        {
            // Never before `data`, so this goes on; and what follows the last hole ends with the file.
            at = rustix::fs::seek(piece.file, SeekFrom::Hole(data)).unwrap_or(end).clamp(data + 1, end);
            let (start, length) = ((data - piece.offset) as usize, (at - data) as usize);
            // SAFETY: the range lies in the region, which is mapped. The advice changes none of its bytes.
            let _ =
                unsafe { rustix::mm::madvise(address.add(start).cast(), length, Advice::LinuxPopulateRead) };
        }
    }
}

/// The parts of `piece` that are in one region each, and where that is here.
fn parts<'f>(memory: &GuestMemory, piece: Piece<'f>) -> Vec<(*mut u8, Piece<'f>)> {
    let mut parts = Vec::new();
    let mut region_start = 0;
    for region in memory.iter() {
        let region_end = region_start + region.len();
        let start = piece.start.max(region_start);
        let end = piece.start.saturating_add(piece.length).min(region_end);
        if start < end {
            let address = region.as_ptr().wrapping_add((start - region_start) as usize);
            let offset = piece.offset + (start - piece.start);
            parts.push((address, Piece { start, length: end - start, offset, ..piece }));
        }
        region_start = region_end;
    }
    parts
}

/// Maps the ranges of `mib` MiB; `source` gives file and offset of each.
fn map(mib: u64, source: impl Fn(u64) -> Result<Option<FileOffset>>) -> Result<GuestMemory> {
    let (protection, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_NORESERVE);
    let mut offset = 0;
    let regions = ranges(mib).into_iter().map(|(start, length)| {
        let source = source(offset)?;
        offset += length;
        let file = source.as_ref().map(|source| (source.file(), source.start()));
        let (mapping, address) = Mapping::new(length as usize, start, file)
            .map_err(Error::system("map guest memory (is there address space for it?)"))?;
        let mut region = MmapRegionBuilder::new_with_bitmap(length as usize, mapping)
            .with_mmap_prot(protection)
            .with_mmap_flags(flags);
        if let Some(source) = source {
            region = region.with_file_offset(source);
        }
        // SAFETY: the address is that of the mapping, which has the length of the region and goes with it.
        let region = unsafe { region.with_raw_mmap_pointer(address) }
            .build()
            .map_err(|error| Error::Config(format!("{mib} MiB of memory cannot be mapped: {error}")))?;
        GuestRegionMmap::new(region, GuestAddress(start))
            .ok_or_else(|| Error::Config(format!("{mib} MiB of memory do not fit the address space")))
    });
    let regions = regions.collect::<Result<Vec<_>>>()?;
    GuestMemory::from_regions(regions)
        .map_err(|error| Error::Config(format!("{mib} MiB of memory cannot be laid out: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_does_not_fit_below_the_hole_goes_on_above_it() {
        assert_eq!(ranges(512), [(0, 512 << 20)]);
        assert_eq!(ranges(3072), [(0, 3 << 30)]);
        assert_eq!(ranges(3073), [(0, 3 << 30), (4 << 30, 1 << 20)]);
        let memory = allocate(4096).unwrap();
        assert_eq!(memory.num_regions(), 2);
        assert_eq!(memory.last_addr(), GuestAddress((5 << 30) - 1));
        assert!(!memory.address_in_range(GuestAddress(MMIO_HOLE_START)));
    }

    #[test]
    fn absurd_sizes_are_refused_without_mapping_anything() {
        assert!(allocate(0).is_err());
        assert!(allocate(u64::MAX).is_err());
    }

    #[test]
    fn memory_lies_in_the_host_as_in_the_guest_and_goes_when_it_is_dropped() {
        let aligned = |memory: &GuestMemory| {
            for region in memory.iter() {
                let (guest, host) = (region.start_addr().0, region.as_ptr() as u64);
                assert_eq!(guest % HUGE_PAGE as u64, host % HUGE_PAGE as u64, "{guest:#x} at {host:#x}");
            }
        };
        // Some sizes that are none of huge pages, kept so that the next one is not aligned by accident.
        let kept = [7, 3, 4096, 1, 3073].map(|mib| allocate(mib).unwrap());
        kept.iter().for_each(aligned);
        let file = rustix::fs::memfd_create("is-it-mapped", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        let file = File::from(file);
        file.set_len(3075 << 20).unwrap();
        let mapped = map_file(3075, &file).unwrap();
        aligned(&mapped);
        assert!(is_mapped());
        drop(mapped);
        assert!(!is_mapped());
    }

    fn is_mapped() -> bool {
        std::fs::read_to_string("/proc/self/maps").unwrap().contains("memfd:is-it-mapped")
    }
}
