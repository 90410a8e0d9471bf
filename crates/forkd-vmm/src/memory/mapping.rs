//! A piece of address space for guest memory, aligned as the guest sees it.
//!
//! KVM gives a guest huge pages only if guest and host agree on where they begin: both addresses must be
//! the same modulo 2 MiB. Linux aligns large mappings by itself since 6.7, and only some.

use std::fs::File;
use std::io;

use rustix::mm::{MapFlags, ProtFlags};
use vm_memory::bitmap::{Bitmap, NewBitmap, WithBitmapSlice};

/// Bytes of a huge page.
pub const HUGE_PAGE: usize = 2 << 20;

/// A mapping that goes with the region it belongs to.
///
/// A region that was not mapped by its own library is not unmapped by it, either; but what it has for a
/// bitmap is dropped with it. Nothing here is a bitmap.
#[derive(Debug, Default)]
pub struct Mapping {
    /// Its address and its length; none for a region that looks after itself.
    range: Option<(usize, usize)>,
}

impl Mapping {
    /// Maps `length` bytes privately: of the file from the offset in `source`, or zeros. The address is that of
    /// `guest_start` modulo [`HUGE_PAGE`].
    pub(super) fn new(
        length: usize,
        guest_start: u64,
        source: Option<(&File, u64)>,
    ) -> io::Result<(Mapping, *mut u8)> {
        let reserved = length.checked_add(HUGE_PAGE).ok_or(io::ErrorKind::OutOfMemory)?;
        // Not reserved in memory: a guest is given more than it touches, and what it touches is limited by its
        // cgroup, not by the host's swap accounting.
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel picks an address where nothing is mapped.
        let base =
            unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), reserved, ProtFlags::empty(), flags)? };
        let before = (guest_start as usize).wrapping_sub(base as usize) % HUGE_PAGE;
        let start = base.wrapping_byte_add(before);
        // Unmaps the excess on both sides. Less than a huge page is before, so some is behind.
        for (at, count) in [(base, before), (start.wrapping_byte_add(length), HUGE_PAGE - before)] {
            if count > 0 {
                // SAFETY: the range is a part of what was just mapped, which nothing refers to.
                unsafe { rustix::mm::munmap(at, count)? };
            }
        }
        // From here on, a failure unmaps it.
        let mapping = Mapping { range: Some((start as usize, length)) };
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, flags | MapFlags::FIXED);
        let mapped = match source {
            // SAFETY: the range was just mapped, and nothing refers to it.
            Some((file, offset)) => unsafe {
                rustix::mm::mmap(start, length, protection, flags, file, offset)
            },
            // SAFETY: as above.
            None => unsafe { rustix::mm::mmap_anonymous(start, length, protection, flags) },
        };
        Ok((mapping, mapped?.cast()))
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if let Some((start, length)) = self.range {
            // SAFETY: the range was mapped by this object, and the region that it belongs to is being dropped.
            let _ = unsafe { rustix::mm::munmap(start as *mut _, length) };
        }
    }
}

impl WithBitmapSlice<'_> for Mapping {
    type S = ();
}

impl Bitmap for Mapping {
    fn mark_dirty(&self, _offset: usize, _len: usize) {}

    fn dirty_at(&self, _offset: usize) -> bool {
        false
    }

    fn slice_at(&self, _offset: usize) {}
}

impl NewBitmap for Mapping {
    fn with_len(_len: usize) -> Mapping {
        Mapping::default()
    }
}
