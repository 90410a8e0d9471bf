//! Guest memory written as a layer.
//!
//! A page can differ from the parent only if it was written since the template's memory was mapped from
//! it, and then it is the process's own: anonymous. If the template is the very guest the parent was saved
//! from, or came from that by forks, all of it is anonymous. So of the pages that are not anonymous none
//! is looked at, and of the others those are written whose bytes are other ones than in the parent.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use forkd_protocol::control::SaveProgress;
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion, GuestRegionMmap, MemoryRegionAddress};

use super::chain::LayerChain;
use super::packed::Writer;
use super::{CHUNK, PAGE_BYTES, write_data};
use crate::layout::PAGE;
use crate::memory::Mapping;
use crate::{Error, GuestMemory, Result};

/// How many bytes are looked at or written before the next report.
const REPORT: u64 = 16 << 20;

/// Writes `memory`, in which nothing changes any more, into the empty `file`: all of it, or what differs
/// from `parent`. `pagemap` is that of a process that has this memory at the same addresses.
pub(crate) fn save(
    memory: &GuestMemory,
    file: &File,
    parent: Option<&LayerChain>,
    pagemap: Option<&File>,
    progress: &mut Progress,
) -> Result<()> {
    match parent {
        Some(parent) => save_packed(memory, file, parent, pagemap.map(Pagemap::new), progress),
        None => save_plain(memory, file, progress),
    }
}

/// Whether `pagemap` can be the one of this process, or of the one it was forked from: both have written to
/// what `witness` points to. With another one, pages that differ would be missed.
pub(crate) fn check_pagemap(pagemap: &File, witness: *const u8) -> Result<()> {
    match Pagemap::new(pagemap).are_anonymous(witness as u64, 1)?.first() {
        Some(true) => Ok(()),
        _ => Err(Error::Config("pagemap: it is not that of the template's process".into())),
    }
}

fn save_plain(memory: &GuestMemory, file: &File, progress: &mut Progress) -> Result<()> {
    let failed = Error::system::<io::Error>;
    let mut now = vec![0; CHUNK as usize * PAGE_BYTES];
    let mut start = 0;
    for chunk in chunks(memory) {
        let now = &mut now[..chunk.count * PAGE_BYTES];
        chunk.copy_out(0..chunk.count, now)?;
        let written = write_data(file, start, now).map_err(failed("write the memory layer"))?;
        start += now.len() as u64;
        progress.add(now.len() as u64, written).map_err(failed("report progress"))?;
    }
    file.set_len(start).map_err(failed("write the memory layer"))
}

fn save_packed(
    memory: &GuestMemory,
    file: &File,
    parent: &LayerChain,
    mut pagemap: Option<Pagemap<'_>>,
    progress: &mut Progress,
) -> Result<()> {
    let failed = Error::system::<io::Error>;
    let mut writer = Writer::new(file);
    let [mut now, mut before] = [(); 2].map(|()| vec![0; CHUNK as usize * PAGE_BYTES]);
    let mut first = 0;
    for chunk in chunks(memory) {
        let mut differs = match &mut pagemap {
            Some(pagemap) => pagemap.are_anonymous(chunk.address(), chunk.count)?,
            None => vec![true; chunk.count],
        };
        let mut written = 0;
        if differs.contains(&true) {
            for run in runs(&differs) {
                chunk.copy_out(run.clone(), &mut now[run.start * PAGE_BYTES..run.end * PAGE_BYTES])?;
            }
            parent.read(first, &differs, &mut before)?;
            let pages = now.chunks_exact(PAGE_BYTES).zip(before.chunks_exact(PAGE_BYTES));
            for (differs, (now, before)) in differs.iter_mut().zip(pages) {
                *differs = *differs && now != before;
            }
            for run in runs(&differs) {
                let bytes = &now[run.start * PAGE_BYTES..run.end * PAGE_BYTES];
                writer.push(first + run.start as u32, bytes).map_err(failed("write the memory layer"))?;
                written += bytes.len() as u64;
            }
        }
        first += chunk.count as u32;
        progress.add((chunk.count * PAGE_BYTES) as u64, written).map_err(failed("report progress"))?;
    }
    writer.finish(parent.top()).map_err(failed("write the memory layer"))
}

/// Where `flags` are set.
fn runs(flags: &[bool]) -> impl Iterator<Item = std::ops::Range<usize>> {
    let mut start = 0;
    flags.chunk_by(|one, next| one == next).filter_map(move |run| {
        let range = start..start + run.len();
        start = range.end;
        run[0].then_some(range)
    })
}

/// Pages of one region, at most [`CHUNK`] of them.
struct Chunk<'m> {
    region: &'m GuestRegionMmap<Mapping>,
    /// Where in the region it is.
    offset: u64,
    /// How many pages it has.
    count: usize,
}

/// All of memory, in order.
fn chunks(memory: &GuestMemory) -> impl Iterator<Item = Chunk<'_>> {
    memory.iter().flat_map(|region| {
        (0..region.len()).step_by(CHUNK as usize * PAGE_BYTES).map(move |offset| {
            let count = ((region.len() - offset) / PAGE).min(u64::from(CHUNK)) as usize;
            Chunk { region, offset, count }
        })
    })
}

impl Chunk<'_> {
    /// Copies the pages of `range` into `bytes`.
    fn copy_out(&self, range: std::ops::Range<usize>, bytes: &mut [u8]) -> Result<()> {
        let start = MemoryRegionAddress(self.offset + (range.start * PAGE_BYTES) as u64);
        let slice = self.region.get_slice(start, bytes.len());
        let slice = slice.map_err(|error| Error::system("read guest memory")(io::Error::other(error)))?;
        slice.copy_to(bytes);
        Ok(())
    }

    /// Where its first page is in this process, and in the one it was forked from.
    fn address(&self) -> u64 {
        self.region.as_ptr() as u64 + self.offset
    }
}

/// Shows for every page of a process whether it is anonymous.
struct Pagemap<'f> {
    file: &'f File,
    /// Whether the process is still there.
    alive: bool,
}

impl<'f> Pagemap<'f> {
    const ENTRY: usize = 8;
    /// The bits of an entry, as in the kernel's documentation of `/proc/pid/pagemap`.
    const PRESENT: u64 = 1 << 63;
    const SWAPPED: u64 = 1 << 62;
    const FILE: u64 = 1 << 61;

    fn new(file: &'f File) -> Pagemap<'f> {
        Pagemap { file, alive: true }
    }

    /// Whether each of the `count` pages from `address` on may be anonymous. Once the process has ended
    /// all may be: there is nothing to read any more.
    fn are_anonymous(&mut self, address: u64, count: usize) -> Result<Vec<bool>> {
        let mut bytes = vec![0; count * Self::ENTRY];
        if self.alive {
            match self.file.read_exact_at(&mut bytes, address / PAGE * Self::ENTRY as u64) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.alive = false,
                Err(error) => return Err(Error::system("read the pagemap")(error)),
            }
        }
        if !self.alive {
            return Ok(vec![true; count]);
        }
        let is_anonymous = |entry: &[u8]| {
            let entry = entry.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
            entry & (Self::PRESENT | Self::SWAPPED) != 0 && entry & Self::FILE == 0
        };
        Ok(bytes.chunks_exact(Self::ENTRY).map(is_anonymous).collect())
    }
}

/// Reports the progress of a saver.
#[derive(Debug)]
pub(crate) struct Progress {
    file: Option<File>,
    now: SaveProgress,
    reported: SaveProgress,
}

impl Progress {
    /// At the beginning of saving `total` bytes of memory; reported to `file`.
    pub(crate) fn new(file: Option<File>, total: u64) -> Progress {
        let now = SaveProgress { total, ..Default::default() };
        Progress { file, now, reported: now }
    }

    /// So many more bytes were looked at and written.
    pub(crate) fn add(&mut self, scanned_bytes: u64, written: u64) -> io::Result<()> {
        self.now.scanned_bytes += scanned_bytes;
        self.now.written += written;
        let progress = (self.now.scanned_bytes - self.reported.scanned_bytes)
            + (self.now.written - self.reported.written);
        if progress >= REPORT { self.report() } else { Ok(()) }
    }

    /// Reports progress since the last report.
    pub(crate) fn report(&mut self) -> io::Result<()> {
        self.reported = self.now;
        match &self.file {
            Some(file) => file.write_all_at(&self.now.to_bytes(), 0),
            None => Ok(()),
        }
    }
}
