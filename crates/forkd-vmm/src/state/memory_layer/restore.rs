//! A chain mapped as guest memory.
//!
//! The oldest layer is mapped as a whole, and over it what newer layers hold. Two things make every later
//! `fork` dearer, so a template is spared both:
//!
//! - mappings: each costs a fork about a microsecond. Only the longest extents are mapped from their layers,
//!   and there are well under two hundred mappings in all, whatever the chain;
//! - pages of its own: one page that is written, or read in, in a private mapping makes a fork copy the
//!   page tables of all of that mapping. Two thousand scattered pages read into 512 MiB that are held in
//!   memory made a fork 60 times dearer, and still 10 times if nothing else is held.
//!
//! So what is scattered is assembled, together with what lies in between, in a file in memory, which is
//! mapped privately like any layer. A template pays for that once with memory, at most as much as its
//! guest uses, which all its children share.

use std::fs::File;
use std::ops::Range;

use rustix::fs::{MemfdFlags, memfd_create};

use super::chain::{Extent, LayerChain};
use super::{CHUNK, PAGE_BYTES, write_data};
use crate::layout::PAGE;
use crate::memory::{self, Piece};
use crate::{Error, GuestMemory, Result};

/// The most extents that are mapped from their layers.
const MAX_MAPPED: usize = 24;
/// Extents of fewer pages are assembled with their neighbours, once there are many.
const LONG: u32 = 64;
/// The most places where an assembled file is split to leave out unneeded pages in between.
const MAX_CUTS: usize = 16;
/// The most mappings over the oldest layer: each that is mapped may cut what is assembled in two.
#[cfg(test)]
pub(super) const MAX_MAPPINGS: usize = MAX_MAPPED + (MAX_MAPPED + 1) + MAX_CUTS;

/// A mapping over the oldest layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Cover {
    /// An extent, from its layer.
    Mapped(Extent),
    /// Pages from everywhere.
    Assembled(Range<u32>),
}

/// Maps `chain` as guest memory.
pub(crate) fn map(chain: &LayerChain) -> Result<GuestMemory> {
    let base = chain.file(0);
    let memory = memory::map_file(chain.bytes() >> 20, base)?;
    let covers = plan(chain.extents());
    let assembled = assemble(chain, &covers)?;
    let mut at = 0;
    for cover in &covers {
        let (range, file, place) = match cover {
            Cover::Mapped(extent) => (extent.first..extent.end(), chain.file(extent.layer), extent.place),
            Cover::Assembled(range) => (range.clone(), &assembled, range.start),
        };
        let piece = piece(&range, file, place);
        memory::cover(&memory, piece)?;
        memory::hold_data(&memory, self::piece(&(at..range.start), base, at));
        // The assembled file is in memory already.
        if matches!(cover, Cover::Mapped(_)) {
            memory::hold_data(&memory, piece);
        }
        at = range.end;
    }
    let end = (chain.bytes() / PAGE) as u32;
    memory::hold_data(&memory, piece(&(at..end), base, at));
    Ok(memory)
}

fn piece<'f>(range: &Range<u32>, file: &'f File, place: u32) -> Piece<'f> {
    let bytes = |pages: u32| u64::from(pages) * PAGE;
    Piece { start: bytes(range.start), length: bytes(range.end - range.start), file, offset: bytes(place) }
}

/// The mappings, in order and not overlapping: all of `extents`, and as little else as few mappings allow.
pub(super) fn plan(extents: &[Extent]) -> Vec<Cover> {
    if extents.len() <= MAX_MAPPED {
        return extents.iter().copied().map(Cover::Mapped).collect();
    }
    let mut mapped: Vec<usize> = (0..extents.len()).filter(|index| extents[*index].count >= LONG).collect();
    mapped.sort_by_key(|index| std::cmp::Reverse(extents[*index].count));
    mapped.truncate(MAX_MAPPED);
    mapped.sort_unstable();
    let is_mapped = |index: usize| mapped.binary_search(&index).is_ok();

    // Cut where the most is left out.
    let gap = |index: usize| extents[index + 1].first - extents[index].end();
    let mut cuts: Vec<usize> = (0..extents.len() - 1)
        .filter(|index| gap(*index) > 0 && !is_mapped(*index) && !is_mapped(index + 1))
        .collect();
    cuts.sort_by_key(|index| std::cmp::Reverse(gap(*index)));
    cuts.truncate(MAX_CUTS);
    cuts.sort_unstable();

    let mut covers = Vec::new();
    let mut group: Option<Range<usize>> = None;
    for index in 0..extents.len() {
        if is_mapped(index) {
            covers.extend(group.take().map(|group| assembled(&extents[group])));
            covers.push(Cover::Mapped(extents[index]));
            continue;
        }
        group = Some(group.map_or(index, |group| group.start)..index + 1);
        if cuts.binary_search(&index).is_ok() {
            covers.extend(group.take().map(|group| assembled(&extents[group])));
        }
    }
    covers.extend(group.map(|group| assembled(&extents[group])));
    covers
}

/// A group of extents, which has at least one.
fn assembled(group: &[Extent]) -> Cover {
    match group {
        [first, .., last] => Cover::Assembled(first.first..last.end()),
        [single] => Cover::Mapped(*single),
        [] => Cover::Assembled(0..0),
    }
}

/// A file with what is to be assembled, each page where it is in memory, with holes where it is zero.
fn assemble(chain: &LayerChain, covers: &[Cover]) -> Result<File> {
    let failed = Error::system::<std::io::Error>;
    let file = memfd_create("memory", MemfdFlags::CLOEXEC).map_err(Error::system("make a file in memory"))?;
    let file = File::from(file);
    let mut bytes = vec![0; CHUNK as usize * PAGE_BYTES];
    let all = [true; CHUNK as usize];
    let mut end = 0;
    for cover in covers {
        let Cover::Assembled(range) = cover else { continue };
        for first in range.clone().step_by(CHUNK as usize) {
            let count = (range.end - first).min(CHUNK) as usize;
            let bytes = &mut bytes[..count * PAGE_BYTES];
            chain.read(first, &all[..count], bytes)?;
            write_data(&file, u64::from(first) * PAGE, bytes).map_err(failed("assemble memory layers"))?;
        }
        end = u64::from(range.end) * PAGE;
    }
    // Zeros at the end were not written, and there is no mapping beyond the end of a file.
    let length = file.metadata().map_err(failed("assemble memory layers"))?.len();
    if length < end {
        file.set_len(end).map_err(failed("assemble memory layers"))?;
    }
    Ok(file)
}
