//! The frozen layers of a disk, as files: sealed, merged, replaced.
//!
//! The contents of a guest's disk are the same before and after each of these.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::OFlags;

use super::disk::{BLOCK, Disk, DiskError};

/// How much is copied in one go: little, as of memory that is saved.
const CHUNK: u64 = 64 << 10;

impl Disk {
    /// The layers that are not written to any more, oldest first. The base is not among them.
    pub fn frozen_layers(&self) -> &[File] {
        self.files.get(1..self.frozen).unwrap_or(&[])
    }

    /// Whether `layer` is the topmost frozen layer of this disk, opened so that it cannot be written. A
    /// disk without frozen layers has none.
    pub fn check_seal(&self, layer: Option<&File>) -> Result<(), DiskError> {
        let (layer, top) = match (layer, self.frozen_layers().last()) {
            (Some(layer), Some(top)) => (layer, top),
            (None, None) => return Ok(()),
            _ => {
                let text = "a disk that was written has a topmost frozen layer, and only such a disk";
                return Err(DiskError::Mismatch(text.into()));
            }
        };
        let (ours, given) = (top.metadata()?, layer.metadata()?);
        if (ours.dev(), ours.ino()) != (given.dev(), given.ino()) {
            return Err(DiskError::Mismatch("it is not the disk's topmost frozen layer".into()));
        }
        check_read_only(layer)
    }

    /// Uses `layer`, which was [checked](Disk::check_seal), from now on.
    pub fn seal(&mut self, layer: Option<File>) {
        if let (Some(layer), [_, .., top]) = (layer, &mut self.files[..self.frozen]) {
            *top = layer;
        }
    }

    /// Copies what this disk has in its oldest `count` layers, all of them frozen, into the empty `target`,
    /// where each block is at the offset it has on the disk. Blocks that newer layers hold are left out: the
    /// result is good for this disk and those that came from it, not for those it came from. `wrote` is
    /// called for each written piece of at most a mebibyte.
    pub fn merge_into(
        &self,
        count: usize,
        target: &File,
        mut wrote: impl FnMut(u64) -> io::Result<()>,
    ) -> Result<(), DiskError> {
        self.check_count(count)?;
        let mut buffer = vec![0; CHUNK as usize];
        let mut start = 0;
        for run in self.map.chunk_by(|one, next| one == next) {
            let end = start + run.len() as u64;
            let holder = usize::from(run[0]);
            if (1..=count).contains(&holder) {
                let (mut at, end) = (start * BLOCK, (end * BLOCK).min(self.size));
                while at < end {
                    let piece = &mut buffer[..CHUNK.min(end - at) as usize];
                    self.files[holder].read_exact_at(piece, at)?;
                    target.write_all_at(piece, at)?;
                    at += piece.len() as u64;
                    wrote(piece.len() as u64)?;
                }
            }
            start = end;
        }
        Ok(())
    }

    /// Whether `layer` can take the place of the oldest `count` layers: a read-only file of the right length.
    /// That it holds the right bytes is guaranteed by its maker alone.
    pub fn check_replace(&self, count: usize, layer: &File) -> Result<(), DiskError> {
        self.check_count(count)?;
        let found = layer.metadata()?;
        if !found.is_file() {
            return Err(DiskError::Mismatch("it is not a regular file".into()));
        }
        check_read_only(layer)?;
        let last = self.map.iter().rposition(|holder| (1..=count).contains(&usize::from(*holder)));
        let end = last.map_or(0, |block| ((block as u64 + 1) * BLOCK).min(self.size));
        if found.len() < end {
            let len = found.len();
            return Err(DiskError::Mismatch(format!("it is truncated: it has {len} bytes of {end}")));
        }
        Ok(())
    }

    /// Uses `layer`, which was [checked](Disk::check_replace), in the place of the oldest `count` layers.
    pub fn replace(&mut self, count: usize, layer: File) {
        let Some(gone) = count.checked_sub(1).filter(|_| count < self.frozen) else { return };
        self.files.splice(1..=count, [layer]);
        self.frozen -= gone;
        // Less than the number of files, which is a byte.
        let gone = gone as u8;
        if gone == 0 {
            return;
        }
        // Blocks of the base are not written to: a map takes memory only for what was written.
        for holder in self.map.iter_mut().filter(|holder| **holder > 1) {
            *holder = holder.saturating_sub(gone).max(1);
        }
    }

    /// Whether there are so many frozen layers.
    pub fn check_count(&self, count: usize) -> Result<(), DiskError> {
        let frozen = self.frozen_layers().len();
        if (1..=frozen).contains(&count) {
            return Ok(());
        }
        Err(DiskError::Mismatch(format!("it has {frozen} frozen layers: {count} of them cannot become one")))
    }
}

fn check_read_only(layer: &File) -> Result<(), DiskError> {
    let mode = rustix::fs::fcntl_getfl(layer).map_err(io::Error::from)? & OFlags::RWMODE;
    if mode == OFlags::RDONLY {
        return Ok(());
    }
    Err(DiskError::Mismatch("it is open for writing".into()))
}
