//! The identity of a sparse file's contents.
//!
//! Guest memory and disk layers are mostly holes. The digest reads only the data, and does not depend on
//! where the file system put holes: a 4 KiB page of zeros and a hole are the same, so a file copied by any
//! tool keeps its digest.
//!
//! Exactly: with `pages` = BLAKE3 of all pages that are not all zero, one after the other, and
//! `places` = BLAKE3 of each longest run of such pages as first page's number and count of pages
//! (both `u64`, little-endian), the digest is BLAKE3 of [`CONTEXT`], the file's length (`u64`,
//! little-endian), `places`, `pages`. A page that the file's end cuts short is as long as it is.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;

use rustix::fs::SeekFrom;
use rustix::io::Errno;

/// Keeps this encoding apart from every other use of BLAKE3.
const CONTEXT: &[u8] = b"forkd sparse file 1";
/// What counts as one hole or none.
const PAGE: usize = 4096;
/// How much is read at once: enough for the hash to run at full width, little enough for the cache.
const CHUNK: usize = 256 * PAGE;

/// The digest of the first `len` bytes of `file`, which must be that long.
pub(crate) fn digest(file: &File, len: u64) -> io::Result<String> {
    let mut sums = Sums::default();
    let mut buffer = vec![0; CHUNK];
    let mut at = 0;
    while let Some(data) = next_data(file, at, len)? {
        // It counts pages, not the file system's blocks.
        at = (data.start / PAGE as u64 * PAGE as u64).max(at);
        while at < data.end {
            let want = (CHUNK as u64).min(len - at) as usize;
            let chunk = &mut buffer[..want];
            file.read_exact_at(chunk, at)?;
            sums.add(at / PAGE as u64, chunk);
            at += want as u64;
        }
    }
    // Looking for holes moved the place at which a plain reader would begin.
    rustix::fs::seek(file, SeekFrom::Start(0))?;
    Ok(sums.finish(len))
}

/// The first range of data in `file` that ends after `at`, cut at `len`; `None` if only a hole
/// follows. A file system that knows no holes has one range.
pub(crate) fn next_data(file: &File, at: u64, len: u64) -> io::Result<Option<Range<u64>>> {
    if at >= len {
        return Ok(None);
    }
    let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(start) if start < len => start,
        Ok(_) | Err(Errno::NXIO) => return Ok(None),
        Err(error) => return Err(error.into()),
    };
    let end = rustix::fs::seek(file, SeekFrom::Hole(start))?;
    // Progress even if another process changes the file meanwhile.
    Ok(Some(start..end.clamp(start + 1, len)))
}

#[derive(Default)]
struct Sums {
    pages: blake3::Hasher,
    places: blake3::Hasher,
    /// The run that is not over yet: first page, count.
    run: Option<(u64, u64)>,
}

impl Sums {
    /// Adds `chunk`, which follows the previous chunk. `first` is the number of its first page.
    fn add(&mut self, first: u64, chunk: &[u8]) {
        // Bytes of `chunk` from here to the current page are not zero and not hashed yet.
        let mut from = 0;
        for (index, page) in chunk.chunks(PAGE).enumerate() {
            let at = index * PAGE;
            if page == &ZEROS[..page.len()] {
                self.pages.update(&chunk[from..at]);
                from = at + page.len();
            } else {
                self.count(first + index as u64);
            }
        }
        self.pages.update(&chunk[from..]);
    }

    fn count(&mut self, page: u64) {
        match &mut self.run {
            Some((first, count)) if *first + *count == page => *count += 1,
            _ => {
                self.end_run();
                self.run = Some((page, 1));
            }
        }
    }

    fn end_run(&mut self) {
        if let Some((first, count)) = self.run.take() {
            self.places.update(&first.to_le_bytes());
            self.places.update(&count.to_le_bytes());
        }
    }

    fn finish(mut self, len: u64) -> String {
        self.end_run();
        let mut whole = blake3::Hasher::new();
        whole.update(CONTEXT).update(&len.to_le_bytes());
        whole.update(self.places.finalize().as_bytes()).update(self.pages.finalize().as_bytes());
        whole.finalize().to_hex().to_string()
    }
}

static ZEROS: [u8; PAGE] = [0; PAGE];
