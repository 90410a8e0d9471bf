//! Guest memory: where it is, and how it is mapped here.
//!
//! Guest memory is always private to the process. The kernel's own copy-on-write is what will
//! share it between a template and its children, and a shared mapping would not be a snapshot.

use vm_memory::{GuestAddress, GuestRegionMmap, MmapRegion};

use crate::layout::{MAX_MEM_MIB, MMIO_HOLE_END, MMIO_HOLE_START};
use crate::{Error, GuestMemory, Result};

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
    let regions = ranges(mib).into_iter().map(|(start, length)| {
        // Not reserved: a guest is given more than it touches, and what it touches is limited by
        // its cgroup, not by the host's swap accounting.
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        let mapping = MmapRegion::build(None, length as usize, libc::PROT_READ | libc::PROT_WRITE, flags)
            .map_err(|error| Error::Config(format!("{mib} MiB of memory cannot be mapped: {error}")))?;
        GuestRegionMmap::new(mapping, GuestAddress(start))
            .ok_or_else(|| Error::Config(format!("{mib} MiB of memory do not fit the address space")))
    });
    let regions = regions.collect::<Result<Vec<_>>>()?;
    GuestMemory::from_regions(regions)
        .map_err(|error| Error::Config(format!("{mib} MiB of memory cannot be laid out: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::GuestMemoryBackend;

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
}
