//! Several layers as one memory.

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use super::packed::{self, Below, Run};
use super::{PAGE_BYTES, damaged};
use crate::layout::PAGE;
use crate::{Error, Result};

/// Pages in a row that are one after the other in one file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    /// The first of them.
    pub(super) first: u32,
    /// How many; at least one.
    pub(super) count: u32,
    /// The layer that holds them.
    pub(super) layer: u32,
    /// Where in its file, in pages, the first of them is.
    pub(super) place: u32,
}

impl Extent {
    pub(super) fn end(self) -> u32 {
        self.first + self.count
    }

    /// The part of it that is in `range`, which must not be outside of it.
    fn part(self, range: Range<u32>) -> Extent {
        let first = self.first.max(range.start);
        let count = self.end().min(range.end) - first;
        Extent { first, count, place: self.place + (first - self.first), ..self }
    }
}

/// The layers of a memory, looked at and found to fit each other.
#[derive(Debug)]
pub(crate) struct LayerChain {
    /// The oldest first.
    files: Vec<File>,
    pages: u32,
    /// The extents outside the oldest layer: ascending, not overlapping.
    extents: Vec<Extent>,
    /// The base for another layer.
    top: Below,
}

impl LayerChain {
    /// The memory of `bytes` bytes that is in `files`, the oldest first.
    pub(crate) fn open(files: Vec<File>, bytes: u64) -> Result<LayerChain> {
        let pages = u32::try_from(bytes / PAGE).ok().filter(|_| bytes.is_multiple_of(PAGE));
        let pages = pages.ok_or_else(|| Error::Config(format!("{bytes} bytes of memory are too many")))?;
        let Some(base) = files.first() else {
            return Err(Error::Config("there is no memory layer: at least one is needed".into()));
        };
        let found = base.metadata().map_err(Error::system("look at a memory layer"))?.len();
        if found != bytes {
            let what = if found < bytes { "truncated" } else { "too long" };
            return Err(damaged(0, &format!("it is {what}: it has {found} bytes instead of {bytes}")));
        }
        let mut top = Below { layers: 1, id: Default::default(), pages };
        let mut extents = Vec::new();
        for file in &files[1..] {
            let index = packed::read(file, top)?;
            extents = lay_over(&extents, &index.runs, top.layers);
            top = Below { layers: top.layers + 1, id: index.id, pages };
        }
        Ok(LayerChain { files, pages, extents, top })
    }

    /// Bytes of memory.
    pub(crate) fn bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE
    }

    pub(super) fn top(&self) -> Below {
        self.top
    }

    /// The file of a layer.
    pub(super) fn file(&self, layer: u32) -> &File {
        &self.files[layer as usize]
    }

    /// The extents outside the oldest layer: ascending, not overlapping.
    pub(super) fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// Where the pages of `range` are, in order and without gaps.
    pub(super) fn pieces(&self, range: Range<u32>) -> Vec<Extent> {
        let mut pieces = Vec::new();
        let mut at = range.start;
        let base = |first, end| Extent { first, count: end - first, layer: 0, place: first };
        let start = self.extents.partition_point(|extent| extent.end() <= range.start);
        for extent in self.extents[start..].iter().take_while(|extent| extent.first < range.end) {
            let extent = extent.part(range.clone());
            if at < extent.first {
                pieces.push(base(at, extent.first));
            }
            pieces.push(extent);
            at = extent.end();
        }
        if at < range.end {
            pieces.push(base(at, range.end));
        }
        pieces
    }

    /// Fills `bytes` with the pages from `first` on, at least with those that are `wanted`; there is one
    /// entry for each page.
    ///
    /// Pages near each other in memory are near each other in each file: there is one read per file,
    /// however scattered they are.
    pub(super) fn read(&self, first: u32, wanted: &[bool], bytes: &mut [u8]) -> Result<()> {
        let end = first + wanted.len() as u32;
        let is_wanted = |page: u32| wanted[(page - first) as usize];
        // The part of each file that is read: places of pages.
        let mut places: Vec<Range<u32>> = vec![0..0; self.files.len()];
        let mut pieces = self.pieces(first..end);
        for piece in &mut pieces {
            let mut pages = (piece.first..piece.end()).filter(|page| is_wanted(*page));
            let Some(start) = pages.next() else {
                piece.count = 0;
                continue;
            };
            *piece = piece.part(start..pages.next_back().unwrap_or(start) + 1);
            let end = piece.place + piece.count;
            let range = &mut places[piece.layer as usize];
            *range = match range.len() {
                0 => piece.place..end,
                _ => range.start.min(piece.place)..range.end.max(end),
            };
        }
        let mut buffer = Vec::new();
        for (layer, (file, places)) in self.files.iter().zip(places).enumerate() {
            if places.is_empty() {
                continue;
            }
            buffer.resize(places.len() * PAGE_BYTES, 0);
            file.read_exact_at(&mut buffer, u64::from(places.start) * PAGE)
                .map_err(Error::system("read a memory layer"))?;
            for piece in pieces.iter().filter(|piece| piece.layer as usize == layer && piece.count > 0) {
                let length = piece.count as usize * PAGE_BYTES;
                let from = (piece.place - places.start) as usize * PAGE_BYTES;
                let to = (piece.first - first) as usize * PAGE_BYTES;
                bytes[to..to + length].copy_from_slice(&buffer[from..from + length]);
            }
        }
        Ok(())
    }
}

/// The extents when a layer with `runs` lies on `below`.
fn lay_over(below: &[Extent], runs: &[Run], layer: u32) -> Vec<Extent> {
    let mut result: Vec<Extent> = Vec::with_capacity(below.len() + runs.len());
    let mut below = below.iter().copied().peekable();
    // The rest of the last extent.
    let mut rest: Option<Extent> = None;
    let mut place = 0;
    for run in runs {
        let end = run.first + run.count;
        while let Some(extent) = rest.take().or_else(|| below.next_if(|extent| extent.first < end)) {
            if extent.first >= end {
                rest = Some(extent);
                break;
            }
            if extent.first < run.first {
                result.push(extent.part(extent.first..run.first));
            }
            if extent.end() > end {
                rest = Some(extent.part(end..extent.end()));
                break;
            }
        }
        result.push(Extent { first: run.first, count: run.count, layer, place });
        place += run.count;
    }
    result.extend(rest);
    result.extend(below);
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Layers of random runs against one list with the layer that holds each page.
    #[test]
    fn the_newest_layer_that_has_a_page_is_the_one_that_holds_it() {
        const PAGES: u32 = 200;
        let mut state = 7u64;
        let mut random = |below: u32| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) % u64::from(below)) as u32
        };
        for _ in 0..2000 {
            let mut expected = vec![None; PAGES as usize];
            let mut extents = Vec::new();
            for layer in 1..1 + random(6) {
                let (mut runs, mut at, mut place) = (Vec::new(), 0, 0);
                loop {
                    let first = at + random(30);
                    let count = 1 + random(20);
                    if first + count > PAGES {
                        break;
                    }
                    for page in first..first + count {
                        expected[page as usize] = Some((layer, place + page - first));
                    }
                    runs.push(Run { first, count });
                    place += count;
                    at = first + count;
                }
                extents = lay_over(&extents, &runs, layer);
            }
            let mut found = vec![None; PAGES as usize];
            let mut end = 0;
            for extent in &extents {
                assert!(extent.first >= end && extent.count > 0, "{extents:?}");
                end = extent.end();
                for page in extent.first..end {
                    found[page as usize] = Some((extent.layer, extent.place + page - extent.first));
                }
            }
            assert_eq!(found, expected);
        }
    }
}
