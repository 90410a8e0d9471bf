//! A snapshot that is there: what it is, how large, and its files, checked.

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use crate::digest::digest;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::manifest::{BaseImage, MANIFEST, MEMORY, Manifest, STATE, disk_name};

/// A snapshot. It stays what it is when its tag is removed or given to another one.
#[derive(Debug, Clone)]
pub struct Snapshot {
    folder: Arc<Folder>,
    manifest: Manifest,
    sizes: Sizes,
}

/// How much room a snapshot takes, in bytes: holes take none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The state.
    pub state: u64,
    /// The memory.
    pub memory: u64,
    /// All disks.
    pub disks: u64,
}

/// A snapshot's files, opened for reading, found to be what was written.
#[derive(Debug)]
pub struct Files {
    /// State of vCPUs and devices.
    pub state: File,
    /// Guest memory.
    pub memory: File,
    /// Each disk's, in the order of `/dev/vda`, `/dev/vdb`, …
    pub disks: Vec<DiskFiles>,
}

/// What is over the base image of one disk.
#[derive(Debug)]
pub struct DiskFiles {
    /// Frozen layers, oldest first.
    pub layers: Vec<File>,
}

impl Snapshot {
    /// Reads the snapshot `tag` in `folder`: its manifest, and that its files are there in their
    /// size. Their contents are looked at by [`Snapshot::open`].
    pub(crate) fn read(folder: Folder, tag: &str) -> Result<Snapshot> {
        let path = folder.path().join(MANIFEST);
        let file = folder
            .read(MANIFEST)
            .map_err(|why| Error::unusable(tag, format_args!("{} {why}", path.display())))?;
        let manifest = Manifest::read(&file, tag).map_err(|why| {
            Error::unusable(tag, format_args!("{} cannot be understood ({why})", path.display()))
        })?;
        let mut snapshot = Snapshot { folder: Arc::new(folder), manifest, sizes: Sizes::default() };
        snapshot.sizes = snapshot.measure()?;
        Ok(snapshot)
    }

    /// Its tag.
    pub fn tag(&self) -> &str {
        &self.manifest.tag
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// What is known about it.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// How much room it takes.
    pub fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Opens its files, read-only, and reads all of them to see that they are what was written. For
    /// as long as somebody has them open they can be used, whatever happens to the snapshot.
    pub fn open(&self) -> Result<Files> {
        let disks = (0..self.manifest.disks())
            .map(|index| Ok(DiskFiles { layers: vec![self.verified(&disk_name(index))?] }))
            .collect::<Result<_>>()?;
        Ok(Files { state: self.verified(STATE)?, memory: self.verified(MEMORY)?, disks })
    }

    /// Checks that `now` is the image this snapshot was made over.
    pub fn check_image(&self, now: &BaseImage) -> Result<()> {
        match &self.manifest.facts.image {
            Some(then) if then == now => Ok(()),
            Some(then) => {
                let name = &then.name;
                let why = if then.name != now.name {
                    format!("it was made over image {name}, not {}", now.name)
                } else {
                    format!("image {name} was built again or edited since it was made")
                };
                Err(Error::unusable(self.tag(), why))
            }
            None => Err(Error::unusable(self.tag(), "it has no image")),
        }
    }

    fn measure(&self) -> Result<Sizes> {
        let mut sizes = Sizes::default();
        for name in self.manifest.files.keys() {
            let meta = self.whole(name)?.metadata().map_err(Error::io("read", &self.folder().join(name)))?;
            let sum = match name.as_str() {
                STATE => &mut sizes.state,
                MEMORY => &mut sizes.memory,
                _ => &mut sizes.disks,
            };
            *sum = sum.saturating_add(meta.blocks().saturating_mul(512));
        }
        Ok(sizes)
    }

    /// The file `name`, open, as long as it should be.
    fn whole(&self, name: &str) -> Result<File> {
        let path = self.folder().join(name);
        let file = self
            .folder
            .read(name)
            .map_err(|why| Error::unusable(self.tag(), format_args!("{} {why}", path.display())))?;
        let len = file.metadata().map_err(Error::io("read", &path))?.len();
        let wanted = self.manifest.files.get(name).map_or(0, |entry| entry.size);
        if len == wanted {
            return Ok(file);
        }
        let what = if len < wanted { "is truncated" } else { "has grown" };
        let why = format_args!("{} {what}: it has {len} bytes and should have {wanted}", path.display());
        Err(Error::unusable(self.tag(), why))
    }

    /// The file `name`, open, with the contents it was written with.
    fn verified(&self, name: &str) -> Result<File> {
        let file = self.whole(name)?;
        let path = self.folder().join(name);
        let entry = self.manifest.files.get(name);
        let (size, wanted) = entry.map_or((0, ""), |entry| (entry.size, &entry.blake3));
        if digest(&file, size).map_err(Error::io("read", &path))? != wanted {
            let why = format_args!(
                "{} was edited or damaged: its contents are not those that were written",
                path.display()
            );
            return Err(Error::unusable(self.tag(), why));
        }
        Ok(file)
    }
}
