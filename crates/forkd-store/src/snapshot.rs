//! An existing snapshot: its description, its size, and its verified files.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::dir::Dir;
use crate::error::{Error, Result};
use crate::layers::{Layers, verify, whole};
use crate::manifest::{BaseImage, FileEntry, MANIFEST, Manifest, STATE, SnapshotKind, Unfit};

/// A snapshot. If its tag is removed or given to another snapshot, this value still means the first one: an open then
/// fails, and never opens files of the other. Keeps no file open.
#[derive(Debug, Clone)]
pub struct Snapshot(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Where its folder is, or was.
    path: PathBuf,
    /// The inode of its state.
    inode: u64,
    layers: Arc<Layers>,
    manifest: Manifest,
    id: String,
    state: Size,
    saved_at: SystemTime,
    parts: Vec<Layer>,
}

/// How large something is, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Size {
    /// Its length, holes included.
    pub logical: u64,
    /// Its space on disk: holes take none.
    pub physical: u64,
}

impl Size {
    fn add(&mut self, other: Size) {
        self.logical = self.logical.saturating_add(other.logical);
        self.physical = self.physical.saturating_add(other.physical);
    }
}

/// How large a snapshot is. A layer that occurs twice counts once.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Sizes {
    /// The state.
    pub state: Size,
    /// All memory layers, those of its parents included.
    pub memory: Size,
    /// All layers of all disks.
    pub disks: Size,
    /// The memory layer it added.
    pub own_memory: Size,
    /// The disk layers it added to those of the snapshot it came from.
    pub own_disks: Size,
}

/// The contents of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Guest memory.
    Memory,
    /// Blocks that the guest wrote to a disk.
    Disk,
}

/// One layer of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layer {
    /// Memory, or a disk.
    pub kind: Kind,
    /// The digest of its contents, and its name.
    pub digest: String,
    /// How large it is.
    pub size: Size,
    /// Whether the snapshot that this one came from does not have it.
    pub own: bool,
}

/// A snapshot's files, opened for reading and verified.
#[derive(Debug)]
pub struct Files {
    /// State of vCPUs and devices, or of disks alone.
    pub state: File,
    /// Memory layers, oldest first; none of a snapshot of disks alone.
    pub memory: Vec<File>,
    /// Each disk's, in the order of `/dev/vda`, `/dev/vdb`, …
    pub disks: Vec<DiskFiles>,
}

/// The layers over the base image of one disk.
#[derive(Debug)]
pub struct DiskFiles {
    /// Frozen layers, oldest first.
    pub layers: Vec<File>,
}

impl Snapshot {
    /// Reads the snapshot `tag` in `folder`: its manifest. Checks that its files exist with their sizes;
    /// [`Snapshot::open`] checks their contents.
    pub(crate) fn read(folder: Dir, tag: &str, layers: &Arc<Layers>) -> Result<Snapshot> {
        let (manifest, id) = read_manifest(&folder, tag).map_err(|why| Error::unusable(tag, why))?;
        let unusable = |why| Error::unusable(tag, why);
        let (_, meta) = whole(&folder, STATE, manifest.state.size).map_err(unusable)?;
        let (state, saved_at) = (size_of(&meta), meta.modified().unwrap_or(UNIX_EPOCH));
        let parts = measure(&manifest, layers).map_err(unusable)?;
        let (path, inode, layers) = (folder.path().to_owned(), meta.ino(), layers.clone());
        Ok(Snapshot(Arc::new(Inner { path, inode, layers, manifest, id, state, saved_at, parts })))
    }

    /// Its tag.
    pub fn tag(&self) -> &str {
        &self.0.manifest.tag
    }

    /// Its identity: BLAKE3 of its manifest, in hexadecimal.
    pub fn id(&self) -> &str {
        &self.0.id
    }

    /// When it was saved, with the precision of the file system. Orders snapshots that were made within a second.
    pub fn saved_at(&self) -> SystemTime {
        self.0.saved_at
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.0.path
    }

    /// Its manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.0.manifest
    }

    /// Whether it has disks alone: a guest can boot on it, and no child can be forked from it.
    pub fn is_disk_only(&self) -> bool {
        self.0.manifest.kind == SnapshotKind::Disk
    }

    /// How many memory layers are under its own one.
    pub fn depth(&self) -> usize {
        self.0.manifest.memory.len().saturating_sub(1)
    }

    /// Its layers: memory, oldest first, then each disk's, oldest first.
    pub fn layers(&self) -> &[Layer] {
        &self.0.parts
    }

    /// How large it is.
    pub fn sizes(&self) -> Sizes {
        let mut sizes = Sizes { state: self.0.state, ..Sizes::default() };
        let mut counted = HashSet::new();
        // The newest first: what it added counts as its own, even if an older layer is the same.
        for layer in self.0.parts.iter().rev().filter(|layer| counted.insert(&layer.digest)) {
            let (all, own) = match layer.kind {
                Kind::Memory => (&mut sizes.memory, &mut sizes.own_memory),
                Kind::Disk => (&mut sizes.disks, &mut sizes.own_disks),
            };
            all.add(layer.size);
            if layer.own {
                own.add(layer.size);
            }
        }
        sizes
    }

    /// Opens its files, read-only, and compares them with their digests. A file that was verified before and has not
    /// changed since is not read again. Open files stay usable after the snapshot is removed.
    pub fn open(&self) -> Result<Files> {
        let Inner { layers, manifest, .. } = &*self.0;
        let unusable = |why| Error::unusable(self.tag(), why);
        let open = |entries: &[FileEntry]| {
            entries.iter().map(|entry| layers.verified(entry)).collect::<std::result::Result<Vec<_>, _>>()
        };
        let (folder, state) = self.own_files().map_err(unusable)?;
        verify(&state, &manifest.state, &folder.path().join(STATE)).map_err(unusable)?;
        let memory = open(&manifest.memory).map_err(unusable)?;
        let disks = manifest.disks.iter().map(|disk| Ok(DiskFiles { layers: open(disk).map_err(unusable)? }));
        Ok(Files { state, memory, disks: disks.collect::<Result<_>>()? })
    }

    /// Its folder and its state, open. An error if the folder is gone, or holds another snapshot by now.
    fn own_files(&self) -> std::result::Result<(Dir, File), String> {
        let Inner { path, inode, manifest, id, saved_at, .. } = &*self.0;
        let folder = match Dir::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err("it was removed".into()),
            other => other.map_err(|error| format!("{} cannot be opened ({error})", path.display()))?,
        };
        // From here on the open folder counts, also if another folder gets its name.
        let (_, found) = read_manifest(&folder, self.tag()).map_err(|why| why.to_string())?;
        let (state, meta) = whole(&folder, STATE, manifest.state.size)?;
        // An equal snapshot has the same manifest; its state file differs.
        if found != *id || meta.ino() != *inode || meta.modified().ok() != Some(*saved_at) {
            return Err("it was removed, and another snapshot has its tag".into());
        }
        Ok((folder, state))
    }

    /// Checks that `now` is the image this snapshot was made over.
    pub fn check_image(&self, now: &BaseImage) -> Result<()> {
        match &self.manifest().guest.image {
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
}

/// A manifest and its snapshot's id, or why there is none.
pub(crate) type Found = std::result::Result<(Manifest, String), Unfit>;

/// The manifest in `folder` and its id. The error names the file.
pub(crate) fn read_manifest(folder: &Dir, tag: &str) -> Found {
    let path = folder.path().join(MANIFEST);
    let file = folder.read(MANIFEST).map_err(|why| Unfit::Other(format!("{} {why}", path.display())))?;
    let read = Manifest::read(&file).and_then(|bytes| {
        let manifest = Manifest::parse(&bytes, tag)?;
        Ok((manifest, blake3::hash(&bytes).to_hex().to_string()))
    });
    read.map_err(|why| {
        let text = format!("{} cannot be understood ({why})", path.display());
        match why {
            Unfit::Old(_) => Unfit::Old(text),
            Unfit::Other(_) => Unfit::Other(text),
        }
    })
}

/// Checks that all layers exist, and measures them.
fn measure(manifest: &Manifest, layers: &Layers) -> std::result::Result<Vec<Layer>, String> {
    let own_from = manifest.memory.len().saturating_sub(1);
    let memory =
        manifest.memory.iter().enumerate().map(|(index, entry)| (Kind::Memory, entry, index >= own_from));
    let disks = manifest.disks.iter().zip(&manifest.own_disk_layers).flat_map(|(disk, own)| {
        let own_from = disk.len().saturating_sub(*own);
        disk.iter().enumerate().map(move |(index, entry)| (Kind::Disk, entry, index >= own_from))
    });
    memory
        .chain(disks)
        .map(|(kind, entry, own)| {
            let (_, meta) = layers.whole(entry)?;
            Ok(Layer { kind, digest: entry.blake3.clone(), size: size_of(&meta), own })
        })
        .collect()
}

fn size_of(meta: &std::fs::Metadata) -> Size {
    Size { logical: meta.len(), physical: meta.blocks().saturating_mul(512) }
}
