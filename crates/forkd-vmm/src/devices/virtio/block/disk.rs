//! A disk: a read-only base and, over it, layers with the written blocks.
//!
//! Which file holds a block is written down in a map, one byte per block, and never inferred from
//! holes in files: a block of zeros that the guest wrote is not a block it never wrote. All files
//! use the same offsets, and layers are sparse.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use thiserror::Error;

use crate::devices::virtio::buffers::Buffers;
use crate::state::BlockState;

/// The unit in which drivers address a disk.
pub(super) const SECTOR: u64 = 512;
/// The unit in which the map distinguishes base and layers.
pub(super) const BLOCK: u64 = 4096;
/// The largest disk: its map takes 512 MiB of address space, of which only what is written to is
/// ever touched.
const MAX_SIZE: u64 = 2 << 40;

/// The most files one disk is made of. A byte of the map names one, and each is a descriptor in every
/// child.
pub(crate) const MAX_FILES: usize = 24;

/// Why a file cannot be a disk.
#[derive(Debug, Error)]
pub enum DiskError {
    /// Its size is impossible.
    #[error(
        "the disk image is {0} bytes long, but a disk has a multiple of 512 bytes, at least 512 and at \
         most 2 TiB; a truncated image has to be built or copied again"
    )]
    Size(u64),
    /// Its files do not match its state.
    #[error("{0}")]
    Mismatch(String),
    /// It cannot be looked at.
    #[error("the disk image cannot be read; check that the descriptor is a file open for reading")]
    Io(#[from] io::Error),
}

/// No child could write to it.
fn full() -> DiskError {
    DiskError::Mismatch(format!("it has {MAX_FILES} files already; none can be added before some are merged"))
}

/// A disk. The default has no files and no size: the placeholder for a disk that was taken.
#[derive(Debug, Default)]
pub struct Disk {
    /// The base, then its layers from the oldest to the newest.
    pub(super) files: Vec<File>,
    /// How many of them are never written again; there is at most one more, which takes what the guest
    /// writes.
    pub(super) frozen: usize,
    /// For each block the index in `files` of the file that holds it. A byte is enough: a disk
    /// never has more than a few layers open.
    pub(super) map: Vec<u8>,
    pub(super) size: u64,
    /// Whether the guest may write, once there is a layer that takes it.
    writable: bool,
}

impl Disk {
    /// A disk that reads from `base` and, if there is a `layer`, an empty file open for reading and
    /// writing, can be written to.
    pub fn new(base: File, layer: Option<File>) -> Result<Disk, DiskError> {
        let size = base.metadata()?.len();
        if size == 0 || !size.is_multiple_of(SECTOR) || size > MAX_SIZE {
            return Err(DiskError::Size(size));
        }
        let map = vec![0; size.div_ceil(BLOCK) as usize];
        let writable = layer.is_some();
        let files = std::iter::once(base).chain(layer).collect();
        Ok(Disk { files, frozen: 1, map, size, writable })
    }

    /// A disk as it was when its VM was stopped, from its files and an untrusted state. It cannot be written
    /// to before it is given a layer.
    pub fn frozen(base: File, layers: Vec<File>, state: &BlockState) -> Result<Disk, DiskError> {
        let mut disk = Disk::new(base, None)?;
        if disk.size != state.size {
            let (found, expected) = (disk.size, state.size);
            return Err(DiskError::Mismatch(format!(
                "its base has {found} bytes, but had {expected} when the snapshot was made"
            )));
        }
        disk.files.extend(layers);
        disk.freeze();
        disk.writable = state.writable;
        let count = disk.files.len();
        if count != usize::from(state.files) || count > MAX_FILES {
            return Err(DiskError::Mismatch(format!(
                "it has {count} files, but the snapshot has {} (of at most {MAX_FILES})",
                state.files
            )));
        }
        if disk.writable && count == MAX_FILES {
            return Err(full());
        }
        disk.fill_map(&state.runs)?;
        Ok(disk)
    }

    fn fill_map(&mut self, runs: &[(u64, u8)]) -> Result<(), DiskError> {
        let broken = || DiskError::Mismatch("the snapshot's map of it does not fit it".into());
        // How long each file must be at least.
        let mut ends = [0; MAX_FILES];
        let mut start = 0usize;
        for (blocks, holder) in runs {
            let end = usize::try_from(*blocks).ok().and_then(|blocks| start.checked_add(blocks));
            let end = end.filter(|_| usize::from(*holder) < self.files.len()).ok_or_else(broken)?;
            let run = self.map.get_mut(start..end).ok_or_else(broken)?;
            // Untouched where it is the base: a map takes memory only for what was written.
            if *holder != 0 {
                run.fill(*holder);
            }
            if end > start {
                ends[usize::from(*holder)] = (end as u64 * BLOCK).min(self.size);
            }
            start = end;
        }
        if start != self.map.len() {
            return Err(broken());
        }
        for (index, (file, end)) in self.files.iter().zip(ends).enumerate() {
            let len = file.metadata()?.len();
            if len < end {
                return Err(DiskError::Mismatch(format!(
                    "its file {index} is truncated: it has {len} bytes of {end}"
                )));
            }
        }
        Ok(())
    }

    /// Nothing is written to any of its files from now on.
    pub fn freeze(&mut self) {
        self.frozen = self.files.len();
    }

    /// Whether [`Disk::add_layer`] takes `layer`.
    pub fn check_layer(&self, layer: Option<&File>) -> Result<(), DiskError> {
        match layer {
            Some(_) if !self.writable => {
                Err(DiskError::Mismatch("it is read-only and takes no layer".into()))
            }
            Some(_) if self.files.len() >= MAX_FILES => Err(full()),
            None if self.writable => Err(DiskError::Mismatch("it is writable and needs a layer".into())),
            _ => Ok(()),
        }
    }

    /// Freezes the disk as it is. Later writes go to the given layer.
    pub fn add_layer(&mut self, layer: Option<File>) -> Result<(), DiskError> {
        self.check_layer(layer.as_ref())?;
        if let Some(layer) = layer {
            self.freeze();
            self.files.push(layer);
        }
        Ok(())
    }

    /// The base and its layers, from the oldest to the newest.
    pub fn files(&self) -> &[File] {
        &self.files
    }

    /// The map, as numbers of blocks in a row and the index of the file that holds them.
    pub fn runs(&self) -> Vec<(u64, u8)> {
        self.map.chunk_by(|one, next| one == next).map(|run| (run.len() as u64, run[0])).collect()
    }

    /// Bytes in all, a multiple of [`SECTOR`].
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Whether nothing can be written.
    pub fn is_read_only(&self) -> bool {
        !self.writable
    }

    /// Fills `data` with the contents at `offset`.
    pub fn read(&self, offset: u64, mut data: Buffers<'_>) -> io::Result<()> {
        let end = self.check(offset, data.len())?;
        let mut offset = offset;
        while offset < end {
            let (holder, run_end) = self.run(offset, end);
            let part = data.split_to((run_end - offset) as usize).ok_or(io::ErrorKind::InvalidInput)?;
            part.fill_from(&self.files[holder], offset)?;
            offset = run_end;
        }
        Ok(())
    }

    /// Writes `data` at `offset`. After an error, blocks may hold old or new bytes, as on any disk,
    /// but never anything else.
    pub fn write(&mut self, offset: u64, data: Buffers<'_>) -> io::Result<()> {
        let end = self.check(offset, data.len())?;
        if self.frozen == self.files.len() {
            return Err(io::ErrorKind::ReadOnlyFilesystem.into());
        }
        if data.is_empty() {
            return Ok(());
        }
        // Blocks that are overwritten in part need the rest of their bytes in the layer first.
        for edge in [offset, end] {
            if !edge.is_multiple_of(BLOCK) && edge != self.size {
                self.lift(edge / BLOCK)?;
            }
        }
        let top = self.files.len() - 1;
        data.store_to(&self.files[top], offset)?;
        // Only now: a block whose write failed is still where it was.
        let blocks = (offset / BLOCK) as usize..end.div_ceil(BLOCK) as usize;
        self.map[blocks].fill(top as u8);
        Ok(())
    }

    /// Copies a block into the top layer, unless it is there.
    fn lift(&mut self, block: u64) -> io::Result<()> {
        let top = self.files.len() - 1;
        let holder = usize::from(self.map[block as usize]);
        if holder == top {
            return Ok(());
        }
        let start = block * BLOCK;
        let mut bytes = [0; BLOCK as usize];
        let bytes = &mut bytes[..BLOCK.min(self.size - start) as usize];
        self.files[holder].read_exact_at(bytes, start)?;
        self.files[top].write_all_at(bytes, start)?;
        self.map[block as usize] = top as u8;
        Ok(())
    }

    /// The file that holds the byte at `offset`, and how far, but not over `end`, it holds all.
    fn run(&self, offset: u64, end: u64) -> (usize, u64) {
        let first = offset / BLOCK;
        let last = end.div_ceil(BLOCK);
        let holder = self.map[first as usize];
        let same = self.map[first as usize..last as usize].iter().take_while(|held| **held == holder).count();
        (usize::from(holder), end.min((first + same as u64) * BLOCK))
    }

    /// Refuses what is not entirely on the disk and returns where it ends.
    fn check(&self, offset: u64, len: usize) -> io::Result<u64> {
        match offset.checked_add(len as u64) {
            Some(end) if end <= self.size => Ok(end),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }
}
