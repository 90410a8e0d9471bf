//! Folders and files.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Makes a folder for us alone, and those above it.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// See [`Stamp`].
pub(crate) fn stamp(metadata: &Metadata) -> Stamp {
    let changed = ((metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec()));
    (metadata.dev(), metadata.ino(), metadata.len(), changed.0, changed.1)
}

/// Which file it is, and which contents: device, inode, length, times.
pub(crate) type Stamp = (u64, u64, u64, (i64, i64), (i64, i64));

/// An empty file for us alone.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}
