//! Guest memory as a file: all ranges one after the other, with holes where they are zero.

use std::fs::File;
use std::os::unix::fs::FileExt;

use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, MemoryRegionAddress};

use crate::layout::PAGE;
use crate::{Error, GuestMemory, Result};

/// How much is looked at in one go.
const CHUNK: usize = 1 << 20;
const ZERO_PAGE: [u8; PAGE as usize] = [0; PAGE as usize];

/// Writes `memory`, in which nothing changes any more, into the empty `file`.
pub(super) fn write(memory: &GuestMemory, file: &File) -> Result<()> {
    let failed = Error::system::<std::io::Error>;
    let mut chunk = vec![0; CHUNK];
    let mut start = 0;
    for region in memory.iter() {
        let mut done = 0;
        while done < region.len() {
            let count = (region.len() - done).min(CHUNK as u64) as usize;
            let bytes = &mut chunk[..count];
            copy_out(region, done, bytes)?;
            write_pages(file, start + done, bytes).map_err(failed("write the memory file"))?;
            done += count as u64;
        }
        start += region.len();
    }
    file.set_len(start).map_err(failed("write the memory file"))
}

fn copy_out(region: &impl GuestMemoryRegion, offset: u64, bytes: &mut [u8]) -> Result<()> {
    let slice = region.get_slice(MemoryRegionAddress(offset), bytes.len());
    let slice = slice.map_err(|error| Error::system("read guest memory")(std::io::Error::other(error)))?;
    slice.copy_to(bytes);
    Ok(())
}

/// Writes the pages of `bytes` that are not zero, those in a row with one call.
fn write_pages(file: &File, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
    let pages: Vec<bool> = bytes.chunks(PAGE as usize).map(|page| page != &ZERO_PAGE[..page.len()]).collect();
    let mut start = 0;
    for run in pages.chunk_by(|one, next| one == next) {
        let end = (start + run.len() * PAGE as usize).min(bytes.len());
        if run[0] {
            file.write_all_at(&bytes[start..end], offset + start as u64)?;
        }
        start = end;
    }
    Ok(())
}
