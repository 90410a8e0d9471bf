//! A snapshot that is being made: files are collected in a folder of its own, and one rename makes
//! it a snapshot.
//!
//! The order in [`Draft::publish`] is what makes it safe against a crash: everything is on disk
//! before the rename, so a tag either leads to a whole snapshot or does not exist.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::fs::{AtFlags, CWD};
use rustix::io::Errno;

use crate::digest::{digest, next_data};
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::manifest::{Facts, FileEntry, MANIFEST, Manifest, is_file_name};
use crate::snapshot::Snapshot;
use crate::store::Store;

/// How much of a file is copied at once.
const COPY: usize = 1 << 20;

/// A snapshot that is being made. Dropped before it is published, it leaves nothing.
#[derive(Debug)]
pub struct Draft {
    store: Store,
    tag: String,
    folder: Folder,
    /// The files it has so far.
    names: Vec<String>,
}

impl Draft {
    pub(crate) fn new(store: Store, tag: &str, folder: Folder) -> Draft {
        Draft { store, tag: tag.to_owned(), folder, names: Vec::new() }
    }

    /// The tag it will have.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Where its files are until it is published.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Makes the empty file `name`, for reading and writing by us alone. Names are [`crate::STATE`],
    /// [`crate::MEMORY`] and what [`crate::disk_name`] gives.
    pub fn create(&mut self, name: &str) -> Result<File> {
        self.check_name(name)?;
        let file = self.folder.create(name).map_err(Error::io("create", &self.folder().join(name)))?;
        self.names.push(name.to_owned());
        Ok(file)
    }

    /// Takes in an open file that has no name (`O_TMPFILE`): it gets one here, and whoever has it open
    /// has the same file. Where it cannot be given one, because it is of another file system or was
    /// unlinked, it is copied.
    pub fn adopt(&mut self, name: &str, file: &File) -> Result<()> {
        self.check_name(name)?;
        let target = self.folder().join(name);
        let source = format!("/proc/self/fd/{}", file.as_raw_fd());
        match rustix::fs::linkat(CWD, source, CWD, &target, AtFlags::SYMLINK_FOLLOW) {
            Ok(()) => self.names.push(name.to_owned()),
            Err(Errno::EXIST) => return Err(Error::io("make", &target)(Errno::EXIST)),
            Err(_) => {
                let copy = self.create(name)?;
                copy_sparse(file, &copy).map_err(Error::io("copy to", &target))?;
            }
        }
        Ok(())
    }

    /// Makes it a snapshot: when this returns, it is on disk and will survive a crash. Nobody may be
    /// writing to its files any more.
    pub fn publish(self, facts: Facts) -> Result<Snapshot> {
        let mut files = BTreeMap::new();
        for name in &self.names {
            files.insert(name.clone(), self.seal(name)?);
        }
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs());
        let manifest = Manifest::new(&self.tag, created, facts, files)?;
        self.write_manifest(&manifest).map_err(Error::io("write", &self.folder().join(MANIFEST)))?;
        // The names in the folder first, then the folder's own.
        self.folder.sync().map_err(Error::io("write", self.folder()))?;
        self.store.publish(self.folder(), &self.tag)?;
        self.store.get(&self.tag)
    }

    fn check_name(&self, name: &str) -> Result<()> {
        if !is_file_name(name) {
            return Err(Error::Invalid(format!("{name:?} is no file of a snapshot")));
        }
        if self.names.iter().any(|known| known == name) {
            return Err(Error::Invalid(format!("snapshot {} has its {name} already", self.tag)));
        }
        Ok(())
    }

    /// Brings a file to disk and says what it is now.
    fn seal(&self, name: &str) -> Result<FileEntry> {
        let path = self.folder().join(name);
        let file = self
            .folder
            .read(name)
            .map_err(|why| Error::Invalid(format!("{} {why}; make the snapshot again", path.display())))?;
        let seal = || {
            file.sync_all()?;
            let size = file.metadata()?.len();
            Ok(FileEntry { size, blake3: digest(&file, size)? })
        };
        seal().map_err(Error::io::<io::Error>("write", &path))
    }

    fn write_manifest(&self, manifest: &Manifest) -> io::Result<()> {
        let mut file = self.folder.create(MANIFEST)?;
        let mut text = serde_json::to_vec_pretty(manifest)?;
        text.push(b'\n');
        file.write_all(&text)?;
        file.sync_all()
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already if it was published. What cannot be removed now is removed by `Store::open`.
        let _ = fs::remove_dir_all(self.folder.path());
    }
}

/// Copies what is data in `from` to the empty file `to`.
fn copy_sparse(from: &File, to: &File) -> io::Result<()> {
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
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_copy_has_the_same_contents_and_the_same_holes() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name| {
            File::options().read(true).write(true).create_new(true).open(folder.path().join(name)).unwrap()
        };
        let (from, to) = (file("from"), file("to"));
        from.set_len(64 << 20).unwrap();
        from.write_all_at(b"first", 0).unwrap();
        from.write_all_at(&[7; 9000], (40 << 20) + 100).unwrap();
        copy_sparse(&from, &to).unwrap();
        assert_eq!(digest(&from, 64 << 20).unwrap(), digest(&to, 64 << 20).unwrap());
        assert_eq!(to.metadata().unwrap().len(), 64 << 20);
        assert!(to.metadata().unwrap().blocks() * 512 < 1 << 20);
    }
}
