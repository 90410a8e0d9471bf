//! Folders and files.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

/// Creates a folder that only the daemon's user can use, and its parents.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// The [`Stamp`] of a file.
pub(crate) fn stamp(metadata: &Metadata) -> Stamp {
    let changed = ((metadata.mtime(), metadata.mtime_nsec()), (metadata.ctime(), metadata.ctime_nsec()));
    (metadata.dev(), metadata.ino(), metadata.len(), changed.0, changed.1)
}

/// The identity and the version of a file: device, inode, length, times.
pub(crate) type Stamp = (u64, u64, u64, (i64, i64), (i64, i64));

/// Creates or empties a file that only the daemon's user can use.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}
