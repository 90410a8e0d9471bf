//! The folder of all layers: immutable files, each named by the digest of its contents.
//!
//! A layer stays as long as a manifest names it or a draft *holds* it, because the draft is about to name it.
//! Both are checked under one lock, so a layer is never removed between being found and being named.
//!
//! This module handles files and digests. It uses no tags and no manifests.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use rustix::io::Errno;

use crate::crash_points::{Step, did};
use crate::digest::{digest, next_data};
use crate::dir::{Dir, delete, sync_file};
use crate::error::{Error, Result};
use crate::lease::{Writers, writers};
use crate::manifest::{FileEntry, is_digest};

/// The permissions of a layer's file: this user reads it.
const MODE: u32 = 0o400;
/// How many times the store tries to take a name from a damaged file.
const ATTEMPTS: usize = 3;
/// How much of a file is copied at once.
const COPY: usize = 1 << 20;
/// How long a file must be unchanged before the store records it as verified. The clock of the file system is coarse: a
/// change right after the check may leave the time stamp as it was.
const SETTLED: Duration = Duration::from_secs(2);
/// The most files that are recorded as verified. One daemon has fewer.
const MAX_REMEMBERED: usize = 1 << 16;

/// The folder of all layers.
#[derive(Debug)]
pub(crate) struct Layers {
    folder: Dir,
    /// The layers that are held, and how often.
    held: Mutex<Held>,
    /// Verified files, identified by everything that would show a change.
    good: Mutex<HashSet<Seen>>,
}

pub(crate) type Held = HashMap<String, usize>;

/// The writer of a file before it became a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WrittenBy {
    /// Only this process, which has closed it.
    Us,
    /// A monitor or a saver, too: it may have kept a descriptor.
    Others,
}

/// What garbage collection did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Collected {
    /// Number of layers removed.
    pub layers: usize,
    /// How much room they took, in bytes.
    pub bytes: u64,
    /// Why layers that may be garbage were left, if any were. For people, and worth a warning.
    pub held_back: Option<String>,
}

/// A file as it was when it was read.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Seen {
    digest: String,
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

impl Seen {
    fn new(digest: &str, meta: &Metadata) -> Seen {
        Seen {
            digest: digest.to_owned(),
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
            changed: (meta.ctime(), meta.ctime_nsec()),
        }
    }

    /// Whether it was last changed long enough before `now`.
    fn is_settled(&self, now: SystemTime) -> bool {
        let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
        let latest = now.saturating_sub(SETTLED).as_secs();
        [self.modified, self.changed]
            .iter()
            .all(|(seconds, _)| u64::try_from(*seconds).is_ok_and(|s| s < latest))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Layers {
    pub(crate) fn open(path: &Path) -> Result<Layers> {
        let folder = Dir::open(path).map_err(Error::io("open", path))?;
        Ok(Layers { folder, held: Mutex::default(), good: Mutex::default() })
    }

    /// Where the layer `digest` is.
    pub(crate) fn path(&self, digest: &str) -> PathBuf {
        self.folder.path().join(digest)
    }

    /// The layer `entry`, open, as long as it should be. The error names the file.
    pub(crate) fn whole(&self, entry: &FileEntry) -> std::result::Result<(File, Metadata), String> {
        whole(&self.folder, &entry.blake3, entry.size)
    }

    /// The layer `entry`, open, with the contents it was written with, which no process can change. The error
    /// names the file.
    pub(crate) fn verified(&self, entry: &FileEntry) -> std::result::Result<File, String> {
        let (file, meta) = self.whole(entry)?;
        // Before its contents are looked at. A file system that cannot answer is trusted: `put` copied the
        // file there.
        match writers(&file) {
            Ok(Writers::None | Writers::Unknown(_)) => {}
            Ok(Writers::Some) => {
                let path = self.path(&entry.blake3);
                let path = path.display();
                return Err(format!(
                    "{path} is open for writing: end the process that `fuser -v {path}` names"
                ));
            }
            Err(error) => {
                return Err(format!("{} cannot be read ({error})", self.path(&entry.blake3).display()));
            }
        }
        let seen = Seen::new(&entry.blake3, &meta);
        if lock(&self.good).contains(&seen) {
            return Ok(file);
        }
        let now = SystemTime::now();
        did(Step::Verified);
        verify(&file, entry, &self.path(&entry.blake3))?;
        let still = file.metadata().is_ok_and(|meta| Seen::new(&entry.blake3, &meta) == seen);
        if still && seen.is_settled(now) {
            let mut good = lock(&self.good);
            if good.len() >= MAX_REMEMBERED {
                good.clear();
            }
            good.insert(seen);
        }
        Ok(file)
    }

    /// Returns when the names of all layers that are here now are on disk.
    pub(crate) fn sync(&self) -> Result<()> {
        self.folder.sync().map_err(Error::io("write", self.folder.path()))
    }

    /// The layer that `file` is already, by its inode; held from here on.
    pub(crate) fn known(&self, file: &File, hold: &mut Hold) -> Result<Option<FileEntry>> {
        let failed = |error| Error::io::<io::Error>("read", self.folder.path())(error);
        let meta = file.metadata().map_err(failed)?;
        if meta.nlink() == 0 {
            return Ok(None);
        }
        // One step with the check of the names: no other thread can remove it in between.
        let mut held = lock(&self.held);
        for found in fs::read_dir(self.folder.path()).map_err(failed)? {
            let found = found.map_err(failed)?;
            let is_it = |it: Metadata| (it.dev(), it.ino()) == (meta.dev(), meta.ino());
            let same = found.metadata().is_ok_and(is_it);
            if let Some(digest) = found.file_name().to_str().filter(|name| same && is_digest(name)) {
                hold.add(&mut held, digest);
                return Ok(Some(FileEntry { size: meta.len(), blake3: digest.to_owned() }));
            }
        }
        Ok(None)
    }

    /// Makes `file`, opened for reading, itself a layer, held from here on; or, if there is one of the same
    /// contents, that one. `None` for a file that cannot get a name here, and for one that a process can still
    /// write to: a copy has to be made of it.
    pub(crate) fn put(&self, file: &File, by: WrittenBy, hold: &mut Hold) -> Result<Option<FileEntry>> {
        let failed = |error| Error::io::<io::Error>("keep a layer in", self.folder.path())(error);
        if file.metadata().map_err(failed)?.dev() != self.folder.device().map_err(failed)? {
            return Ok(None);
        }
        file.set_permissions(Permissions::from_mode(MODE)).map_err(failed)?;
        did(Step::Changed);
        // After the mode, which stops processes that would open it now, and before the digest: so the
        // published bytes are the digested ones.
        if by == WrittenBy::Others && !is_given_back(file, "layer").map_err(failed)? {
            return Ok(None);
        }
        let seal = || {
            // Its contents before its name: a file with a name is complete.
            sync_file(file)?;
            let size = file.metadata()?.len();
            Ok(FileEntry { size, blake3: digest(file, size)? })
        };
        let entry = seal().map_err(failed)?;
        hold.add(&mut lock(&self.held), &entry.blake3);
        for _ in 0..ATTEMPTS {
            match self.folder.link(file, &entry.blake3) {
                Ok(()) => return Ok(Some(entry)),
                Err(Errno::EXIST) if self.verified(&entry).is_ok() => return Ok(Some(entry)),
                // Damaged, or open for writing, and here are the contents it should have.
                Err(Errno::EXIST) => delete(&self.path(&entry.blake3))?,
                // It had a name once, and lost it.
                Err(Errno::NOENT | Errno::XDEV | Errno::PERM) => return Ok(None),
                Err(error) => return Err(failed(error.into())),
            }
        }
        Err(failed(Errno::EXIST.into()))
    }

    /// Holds the layers `entries`, all of which must be here.
    pub(crate) fn hold(&self, entries: &[&FileEntry], hold: &mut Hold) -> std::result::Result<(), String> {
        {
            let mut held = lock(&self.held);
            entries.iter().for_each(|entry| hold.add(&mut held, &entry.blake3));
        }
        entries.iter().try_for_each(|entry| self.whole(entry).map(drop))
    }

    /// While the caller keeps the guard, no hold begins or ends.
    pub(crate) fn stop(&self) -> MutexGuard<'_, Held> {
        lock(&self.held)
    }

    /// Removes every layer that is neither in `used` nor held. Leaves files whose names are no digests.
    pub(crate) fn sweep(&self, used: &HashSet<String>, held: &Held) -> Result<Collected> {
        let mut collected = Collected::default();
        for found in fs::read_dir(self.folder.path()).map_err(Error::io("read", self.folder.path()))? {
            let found = found.map_err(Error::io("read", self.folder.path()))?;
            let name = found.file_name();
            let Some(digest) = name.to_str().filter(|name| is_digest(name)) else { continue };
            if used.contains(digest) || held.contains_key(digest) {
                continue;
            }
            let size = found.metadata().map_or(0, |meta| meta.blocks().saturating_mul(512));
            match delete(&found.path()) {
                Ok(()) => {
                    collected.layers += 1;
                    collected.bytes = collected.bytes.saturating_add(size);
                }
                Err(error) => collected.held_back = Some(error.full()),
            }
        }
        lock(&self.good).retain(|seen| used.contains(&seen.digest) || held.contains_key(&seen.digest));
        Ok(collected)
    }
}

/// Layers that stay as long as this lives.
#[derive(Debug)]
pub(crate) struct Hold {
    layers: Arc<Layers>,
    digests: Vec<String>,
}

impl Hold {
    pub(crate) fn new(layers: Arc<Layers>) -> Hold {
        Hold { layers, digests: Vec::new() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.digests.is_empty()
    }

    fn add(&mut self, held: &mut Held, digest: &str) {
        *held.entry(digest.to_owned()).or_default() += 1;
        self.digests.push(digest.to_owned());
    }

    /// Lets go of all of them.
    pub(crate) fn release(&mut self) {
        let mut held = lock(&self.layers.held);
        for digest in self.digests.drain(..) {
            if let Some(count) = held.get_mut(&digest) {
                *count -= 1;
                if *count == 0 {
                    held.remove(&digest);
                }
            }
        }
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        self.release();
    }
}

/// Whether no process can write to `file` any more. If one can, or the file system cannot answer, the caller
/// copies the file.
pub(crate) fn is_given_back(file: &File, what: &str) -> io::Result<bool> {
    match writers(file)? {
        Writers::None => return Ok(true),
        Writers::Some => {
            tracing::warn!(
                what,
                "a monitor or a saver keeps a file open for writing; publishing a copy of it"
            );
        }
        Writers::Unknown(why) => {
            tracing::info!(what, why, "the file system grants no leases; publishing a copy of a file");
        }
    }
    Ok(false)
}

/// The file `name` in `folder`, open, of length `size`. The error names the file.
pub(crate) fn whole(folder: &Dir, name: &str, size: u64) -> std::result::Result<(File, Metadata), String> {
    let path = folder.path().join(name);
    let file = folder.read(name).map_err(|why| format!("{} {why}", path.display()))?;
    let meta = file.metadata().map_err(|error| format!("{} cannot be read ({error})", path.display()))?;
    let len = meta.len();
    if len == size {
        return Ok((file, meta));
    }
    let what = if len < size { "is truncated" } else { "has grown" };
    Err(format!("{} {what}: it has {len} bytes and should have {size}", path.display()))
}

/// Whether `file`, which is at `path`, has the contents it was written with.
pub(crate) fn verify(file: &File, entry: &FileEntry, path: &Path) -> std::result::Result<(), String> {
    match digest(file, entry.size) {
        Ok(found) if found == entry.blake3 => Ok(()),
        Ok(_) => Err(format!(
            "{} was edited or damaged: its contents are not those that were written",
            path.display()
        )),
        Err(error) => Err(format!("{} cannot be read ({error})", path.display())),
    }
}

/// Copies the data of `from`, without its holes, to the empty file `to`.
pub(crate) fn copy_sparse(from: &File, to: &File) -> io::Result<()> {
    let len = from.metadata()?.len();
    to.set_len(len)?;
    let mut buffer = vec![0; COPY];
    let mut at = 0;
    while let Some(data) = next_data(from, at, len)? {
        at = data.start;
        while at < data.end {
            let part = &mut buffer[..(COPY as u64).min(data.end - at) as usize];
            from.read_exact_at(part, at)?;
            to.write_all_at(part, at)?;
            at += part.len() as u64;
        }
    }
    did(Step::Changed);
    Ok(())
}
