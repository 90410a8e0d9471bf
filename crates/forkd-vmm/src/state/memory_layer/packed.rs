//! A packed layer: the pages that differ, then which ones they are.
//!
//! ```text
//! pages, one after the other, from offset 0
//! index   for each run of pages: first page (4)  number of pages (4); ascending
//! footer  magic (8)  format version (4)  layers below (4)  pages of memory (8)  pages here (8)
//!         runs (8)  id of the layer below (32)  BLAKE3 of the pages (32)
//!         BLAKE3 of index and footer up to here (32), which is this layer's id
//! ```
//!
//! All numbers are little-endian. Pages come first so that they can be mapped. Where a page is in the file
//! follows from the order. The id identifies a layer, so that those of a chain are not taken in another
//! order; the plain layer at the bottom has none, which is all zeros. Reading an index does not read the
//! pages.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::{PAGE_BYTES, PIECE, damaged};
use crate::layout::PAGE;
use crate::{Error, Result};

const MAGIC: [u8; 8] = *b"forkdmem";
const FORMAT_VERSION: u32 = 1;
const ENTRY: usize = 8;
const ID: usize = 32;
/// Without the id at its end.
const FIELDS: usize = 8 + 4 + 4 + 8 + 8 + 8 + ID + ID;
const FOOTER: usize = FIELDS + ID;

/// Identifies a layer.
pub(super) type Id = [u8; ID];

/// The layer below.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Below {
    /// How many layers.
    pub(super) layers: u32,
    /// The id of the topmost of them.
    pub(super) id: Id,
    /// Pages of memory, in every layer of a chain the same.
    pub(super) pages: u32,
}

/// Pages in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Run {
    /// The first of them.
    pub(super) first: u32,
    /// How many; at least one.
    pub(super) count: u32,
}

/// The index of a layer.
#[derive(Debug)]
pub(super) struct Index {
    /// Ascending, not overlapping, all of them in memory.
    pub(super) runs: Vec<Run>,
    pub(super) id: Id,
}

/// Writes a layer.
pub(super) struct Writer<'f> {
    file: &'f File,
    runs: Vec<Run>,
    /// Bytes written so far.
    length: u64,
    buffer: Vec<u8>,
    hasher: blake3::Hasher,
}

impl<'f> Writer<'f> {
    /// Into the empty `file`.
    pub(super) fn new(file: &'f File) -> Writer<'f> {
        let buffer = Vec::with_capacity(PIECE);
        Writer { file, runs: Vec::new(), length: 0, buffer, hasher: blake3::Hasher::new() }
    }

    /// Takes the pages in `bytes`, the first of which is `first`: after all that were taken so far.
    pub(super) fn push(&mut self, first: u32, bytes: &[u8]) -> io::Result<()> {
        let count = (bytes.len() / PAGE_BYTES) as u32;
        match self.runs.last_mut() {
            Some(run) if run.first + run.count == first => run.count += count,
            _ => self.runs.push(Run { first, count }),
        }
        for page in bytes.chunks_exact(PAGE_BYTES) {
            self.buffer.extend_from_slice(page);
            if self.buffer.len() >= PIECE {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.hasher.update(&self.buffer);
        self.file.write_all_at(&self.buffer, self.length)?;
        self.length += self.buffer.len() as u64;
        self.buffer.clear();
        Ok(())
    }

    /// Writes the index. The layer lies on `below`.
    pub(super) fn finish(mut self, below: Below) -> io::Result<()> {
        self.flush()?;
        let pages = self.length / PAGE;
        let tail = tail(&self.runs, below, pages, self.hasher.finalize().as_bytes());
        self.file.write_all_at(&tail, self.length)?;
        self.file.set_len(self.length + tail.len() as u64)
    }
}

/// Index and footer.
fn tail(runs: &[Run], below: Below, pages: u64, contents: &Id) -> Vec<u8> {
    let mut tail = Vec::with_capacity(runs.len() * ENTRY + FOOTER);
    for run in runs {
        tail.extend(run.first.to_le_bytes());
        tail.extend(run.count.to_le_bytes());
    }
    tail.extend(MAGIC);
    tail.extend(FORMAT_VERSION.to_le_bytes());
    tail.extend(below.layers.to_le_bytes());
    for number in [below.pages.into(), pages, runs.len() as u64] {
        tail.extend(number.to_le_bytes());
    }
    tail.extend(below.id);
    tail.extend(contents);
    let id = blake3::hash(&tail);
    tail.extend(id.as_bytes());
    tail
}

/// Reads the index of `file`, which must be a layer made to lie on `below`.
pub(super) fn read(file: &File, below: Below) -> Result<Index> {
    let layer = below.layers as usize;
    let failed = |error: io::Error| match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged(layer, "it became shorter while it was read"),
        _ => Error::system("read a memory layer")(error),
    };
    let length = file.metadata().map_err(Error::system("look at a memory layer"))?.len();
    let Some(footer_at) = length.checked_sub(FOOTER as u64) else {
        return Err(damaged(layer, &format!("it is truncated: {length} bytes are no layer")));
    };
    let mut bytes = [0; FOOTER];
    file.read_exact_at(&mut bytes, footer_at).map_err(failed)?;
    let footer = Footer::parse(&bytes).map_err(|what| damaged(layer, what))?;
    let index_length = footer.check(length, below).map_err(|what| damaged(layer, &what))?;

    // Bounded: the footer was found to list no more runs than there are pages of memory.
    let mut index = vec![0; index_length];
    file.read_exact_at(&mut index, footer_at - index_length as u64).map_err(failed)?;
    let id = blake3::Hasher::new().update(&index).update(&bytes[..FIELDS]).finalize();
    if *id.as_bytes() != footer.id {
        return Err(damaged(layer, "its index was changed: its checksum does not fit it"));
    }
    let runs = runs(&index, footer.pages, below.pages).map_err(|what| damaged(layer, what))?;
    Ok(Index { runs, id: footer.id })
}

struct Footer {
    below: u32,
    memory: u64,
    pages: u64,
    runs: u64,
    below_id: Id,
    id: Id,
}

impl Footer {
    fn parse(bytes: &[u8; FOOTER]) -> std::result::Result<Footer, &'static str> {
        let mut rest = &bytes[..];
        if take::<8>(&mut rest) != MAGIC {
            return Err("it does not end like a layer: it is truncated, or something else");
        }
        if u32::from_le_bytes(take(&mut rest)) != FORMAT_VERSION {
            return Err("it was made by another version of forkd");
        }
        let below = u32::from_le_bytes(take(&mut rest));
        let [memory, pages, runs] = std::array::from_fn(|_| u64::from_le_bytes(take(&mut rest)));
        let below_id = take(&mut rest);
        let _contents: Id = take(&mut rest);
        Ok(Footer { below, memory, pages, runs, below_id, id: take(&mut rest) })
    }

    /// Whether it fits a file of `length` bytes on `below`; returns how long the index is.
    fn check(&self, length: u64, below: Below) -> std::result::Result<usize, String> {
        if self.memory != u64::from(below.pages) {
            let (found, expected) = (self.memory, below.pages);
            return Err(format!("it is of a memory of {found} pages, and this one has {expected}"));
        }
        if self.below != below.layers || self.below_id != below.id {
            return Err("it was made to lie on another layer than the one below it".into());
        }
        if self.pages > self.memory || self.runs > self.pages {
            return Err(format!("it cannot hold {} pages in {} runs", self.pages, self.runs));
        }
        // None of these overflows: all numbers are those of pages of memory, which are 32 bits.
        let index = self.runs * ENTRY as u64;
        let expected = self.pages * PAGE + index + FOOTER as u64;
        if length != expected {
            return Err(format!("it has {length} bytes instead of {expected}"));
        }
        usize::try_from(index).map_err(|_| "its index does not fit into memory".to_owned())
    }
}

/// The first bytes of `rest`, which has enough.
fn take<const N: usize>(rest: &mut &[u8]) -> [u8; N] {
    let mut taken = [0; N];
    if let Some((front, back)) = rest.split_at_checked(N) {
        taken.copy_from_slice(front);
        *rest = back;
    }
    taken
}

/// The runs of an index of `pages` pages, in a memory of `memory`.
fn runs(index: &[u8], pages: u64, memory: u32) -> std::result::Result<Vec<Run>, &'static str> {
    let mut runs = Vec::with_capacity(index.len() / ENTRY);
    let (mut end, mut held) = (0, 0);
    for mut entry in index.chunks_exact(ENTRY) {
        let [first, count] = std::array::from_fn(|_| u32::from_le_bytes(take(&mut entry)));
        if first < end {
            return Err("its runs overlap, or are out of order");
        }
        end = first.checked_add(count).filter(|end| *end <= memory).ok_or("a run ends beyond memory")?;
        if count == 0 {
            return Err("a run is empty");
        }
        held += u64::from(count);
        runs.push(Run { first, count });
    }
    if held != pages {
        return Err("its runs are not the pages it holds");
    }
    Ok(runs)
}

/// For fuzzing: reading any bytes as a layer ends with an error or with a consistent index; also when the
/// checksum fits.
pub(crate) fn check_any_bytes(data: &[u8]) {
    use rustix::fs::{MemfdFlags, memfd_create};
    let Ok(file) = memfd_create("layer", MemfdFlags::CLOEXEC).map(File::from) else { return };
    let (head, rest) = data.split_at(data.len().min(4));
    let mut numbers = [0; 4];
    numbers[..head.len()].copy_from_slice(head);
    let below =
        Below { layers: 1 + u32::from(numbers[0] % 4), id: [0; ID], pages: 1 + u32::from(numbers[1]) };
    let check = |bytes: &[u8], pages: u64| {
        let length = pages * PAGE;
        if file.set_len(length).and_then(|()| file.write_all_at(bytes, length)).is_err() {
            return;
        }
        let Ok(index) = read(&file, below) else { return };
        let mut end = 0;
        for run in &index.runs {
            assert!(run.first >= end && run.count > 0, "{run:?} comes before {end}");
            end = run.first + run.count;
        }
        assert!(end <= below.pages, "{end} of {} pages", below.pages);
        let held = index.runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
        assert!(held * PAGE <= length + bytes.len() as u64, "{held} pages are not in the file");
    };
    check(rest, 0);
    // The bytes as an index, in a frame that fits it or nearly does.
    let runs: Vec<Run> = rest
        .chunks_exact(4)
        .map(|entry| {
            let number = |at: usize| u32::from(u16::from_le_bytes([entry[at], entry[at + 1]]));
            Run { first: number(0), count: number(2) }
        })
        .collect();
    let held = runs.iter().map(|run| u64::from(run.count)).sum::<u64>();
    let pages = if numbers[2] % 2 == 0 { held } else { numbers[3].into() };
    let mut tail = tail(&runs, below, pages, &[0; ID]);
    check(&tail, pages.min(1 << 16));
    // And with one of its bytes changed.
    let at = usize::from(numbers[3]) % tail.len();
    tail[at] ^= numbers[2];
    check(&tail, pages.min(1 << 16));
}

#[cfg(test)]
mod tests {
    use super::*;

    const BELOW: Below = Below { layers: 1, id: [0; ID], pages: 100 };

    /// A layer whose checksum fits, with any contents.
    fn layer(runs: &[(u32, u32)], pages: u64, below: Below) -> File {
        let runs: Vec<Run> = runs.iter().map(|(first, count)| Run { first: *first, count: *count }).collect();
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(&tail(&runs, below, pages, &[0; ID]), pages * PAGE).unwrap();
        file
    }

    #[test]
    fn an_index_that_makes_no_sense_is_refused_though_its_checksum_fits() {
        let good = read(&layer(&[(0, 1), (1, 2), (97, 3)], 6, BELOW), BELOW).unwrap();
        assert_eq!(good.runs.len(), 3);
        for (runs, pages, text) in [
            (&[(5, 1), (4, 1)][..], 2, "out of order"),
            (&[(5, 2), (6, 1)], 3, "overlap"),
            (&[(5, 1), (5, 1)], 2, "overlap"),
            (&[(99, 2)], 2, "beyond memory"),
            (&[(100, 1)], 1, "beyond memory"),
            (&[(u32::MAX, 1)], 1, "beyond memory"),
            (&[(1, u32::MAX)], 1, "beyond memory"),
            (&[(5, 0), (6, 1)], 2, "empty"),
            (&[(5, 1)], 2, "not the pages it holds"),
            (&[(5, 2), (9, 1)], 2, "not the pages it holds"),
            (&[(5, 1), (7, 1)], 1, "cannot hold 1 pages in 2 runs"),
            (&[], 101, "cannot hold 101 pages"),
        ] {
            let error = read(&layer(runs, pages, BELOW), BELOW).unwrap_err().to_string();
            assert!(error.contains("memory layer 1 cannot be used") && error.contains(text), "{error}");
        }
        let other = Below { pages: 101, ..BELOW };
        let error = read(&layer(&[(0, 1)], 1, other), BELOW).unwrap_err().to_string();
        assert!(error.contains("a memory of 101 pages, and this one has 100"), "{error}");
        let huge = File::options().read(true).write(true).open("/dev/null").unwrap();
        assert!(read(&huge, BELOW).is_err());
    }
}
