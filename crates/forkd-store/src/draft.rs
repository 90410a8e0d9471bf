//! A snapshot that is being made: a draft collects files in its own folder, moves its layers to the folder of layers, and
//! becomes a snapshot by one rename.
//!
//! The order in [`Draft::publish`] makes it safe against a crash: every file that a manifest names is on disk before the
//! rename, so a tag either leads to a whole snapshot or does not exist. A crash leaves
//! unnamed layers and an unused folder; opening the store removes both.

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::MetadataExt;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::crash_points::{Step, did};
use crate::digest::digest;
use crate::dir::{Dir, delete, reopen, sync_file};
use crate::error::{Error, Result};
use crate::layers::{Hold, WrittenBy, copy_sparse, is_given_back};
use crate::manifest::{
    FileEntry, GuestSpec, MANIFEST, MAX_DEPTH, Manifest, Measured, Parent, STATE, SnapshotKind,
};
use crate::snapshot::Snapshot;
use crate::store::Store;
use crate::waits::waits;

const MEMORY: &str = "memory";
/// The state's copy, until it has the state's name.
const STATE_COPY: &str = "state.copy";

/// A snapshot that is being made. A drop before [`Draft::publish`] removes its files, and waits for the disk.
#[derive(Debug)]
pub struct Draft {
    store: Store,
    tag: String,
    folder: Dir,
    state: Option<File>,
    memory: Option<File>,
    /// The files in the folder that are layers or become layers: name and inode.
    layers: Vec<(String, u64)>,
    /// Layers that gc must not remove before this draft is published or dropped.
    hold: Hold,
    published: bool,
}

/// The parts of a snapshot beside the files of its draft.
#[derive(Debug)]
pub struct Contents {
    /// Which parts of the guest it has. One of disks alone has no memory, and so no parent.
    pub kind: SnapshotKind,
    /// The guest's properties.
    pub guest: GuestSpec,
    /// The snapshot its memory is a difference to: that one's memory layers come before its own.
    /// None if its memory is complete.
    pub parent: Option<Snapshot>,
    /// The snapshot it came from, if its memory is complete all the same. A parent is one anyway.
    pub origin: Option<Snapshot>,
    /// A sandbox's id, or `compact:` and a tag.
    pub branched_from: Option<String>,
    /// The instant it holds, in seconds since 1970: a branch is used before it is on disk. None if it was made
    /// just now.
    pub created_at_unix: Option<u64>,
    /// Each disk's layers, oldest first. A file that is a layer already stays it; a nameless one
    /// (`O_TMPFILE`) and one of [`Draft::create_disk`] become one; any other one is copied, and so is one that
    /// a process can still write to.
    pub disks: Vec<Vec<File>>,
    /// Figures measured while it was made.
    pub measured: Measured,
}

impl Contents {
    /// Those of a snapshot that came from nowhere and has no disk.
    pub fn new(guest: GuestSpec) -> Contents {
        Contents {
            kind: SnapshotKind::Full,
            guest,
            parent: None,
            origin: None,
            branched_from: None,
            created_at_unix: None,
            disks: Vec::new(),
            measured: Measured::default(),
        }
    }
}

impl Draft {
    pub(crate) fn new(store: Store, tag: &str, folder: Dir, hold: Hold) -> Draft {
        Draft {
            store,
            tag: tag.to_owned(),
            folder,
            state: None,
            memory: None,
            layers: Vec::new(),
            hold,
            published: false,
        }
    }

    /// The tag it will have.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// Makes the empty file for the state of vCPUs and devices, or of disks alone.
    pub fn create_state(&mut self) -> Result<File> {
        let file = self.create(STATE)?;
        self.state = Some(self.second(&file, STATE)?);
        Ok(file)
    }

    /// Makes the empty file for memory: all of it, or what differs from a parent's.
    pub fn create_memory(&mut self) -> Result<File> {
        let file = self.create_layer(MEMORY)?;
        self.memory = Some(self.second(&file, MEMORY)?);
        Ok(file)
    }

    /// Makes an empty file for a layer of disk `index`. It is to be named in [`Contents::disks`].
    pub fn create_disk(&mut self, index: usize) -> Result<File> {
        self.create_layer(&format!("disk.{index}"))
    }

    /// Keeps the layers of `snapshot`, the future parent, even if its tag is removed. An error if a layer is missing.
    pub fn keep(&mut self, snapshot: &Snapshot) -> Result<()> {
        let layers: Vec<&FileEntry> = snapshot.manifest().layers().collect();
        let held = self.store.layers().hold(&layers, &mut self.hold);
        held.map_err(|why| Error::unusable(snapshot.tag(), why))
    }

    /// Makes it a snapshot. When this returns, the snapshot is on disk and survives a crash. Copies a file that a process
    /// still has open for writing, because a published file must not change.
    pub fn publish(mut self, contents: Contents) -> Result<Snapshot> {
        let Contents { kind, guest, parent, origin, branched_from, created_at_unix, disks, measured } =
            contents;
        let disks = self.for_reading(disks)?;
        if let Some(parent) = &parent {
            self.check_parent(parent, &guest)?;
            self.keep(parent)?;
        }
        let mut memory = parent.as_ref().map_or_else(Vec::new, |parent| parent.manifest().memory.clone());
        let origin = parent.as_ref().or(origin.as_ref());
        match (kind, self.memory.take()) {
            (SnapshotKind::Full, Some(own)) => memory.push(self.layer(&own, origin)?),
            (SnapshotKind::Full, None) => return Err(self.lacks("memory")),
            (SnapshotKind::Disk, None) => {}
            (SnapshotKind::Disk, Some(_)) => {
                let text = format!(
                    "snapshot {} cannot be published: it is of disks alone, and has memory",
                    self.tag
                );
                return Err(Error::Invalid(text));
            }
        }
        let mut entries = Vec::with_capacity(disks.len());
        for disk in &disks {
            entries.push(disk.iter().map(|file| self.layer(file, origin)).collect::<Result<Vec<_>>>()?);
        }
        let mut manifest = Manifest {
            format: String::new(),
            version: 0,
            kind,
            tag: self.tag.clone(),
            created_at_unix: created_at_unix.unwrap_or_else(now_unix),
            made_by_version: String::new(),
            guest,
            parent: parent.as_ref().map(named),
            ancestors: origin.map_or_else(Vec::new, |origin| {
                origin.manifest().ancestors.iter().cloned().chain([named(origin)]).collect()
            }),
            branched_from,
            state: self.seal_state()?,
            memory,
            own_disk_layers: own_layers(&entries, origin),
            disks: entries,
            measured,
        };
        manifest.stamp();
        let bytes = manifest.bytes()?;
        // The layers' names, then the manifest that names them, then the folder's own name.
        self.store.layers().sync()?;
        let write = || {
            for (name, _) in &self.layers {
                self.folder.unlink(name)?;
            }
            let mut file = self.folder.create(MANIFEST)?;
            file.write_all(&bytes)?;
            did(Step::Changed);
            sync_file(&file)?;
            self.folder.sync()
        };
        write().map_err(Error::io::<io::Error>("write", &self.folder.path().join(MANIFEST)))?;
        // Before the rename: after it the snapshot exists, and the call must not fail.
        let snapshot = self.store.read_draft(&self.folder, &self.tag)?;
        self.store.publish(self.folder.path(), &self.tag)?;
        self.published = true;
        Ok(snapshot)
    }

    fn create(&mut self, name: &str) -> Result<File> {
        match self.folder.create(name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                Err(Error::Invalid(format!("snapshot {} has its {name} already", self.tag)))
            }
            other => other.map_err(Error::io("create", &self.folder.path().join(name))),
        }
    }

    fn create_layer(&mut self, name: &str) -> Result<File> {
        let file = self.create(name)?;
        let inode = file.metadata().map_err(Error::io("read", &self.folder.path().join(name)))?.ino();
        self.layers.push((name.to_owned(), inode));
        Ok(file)
    }

    /// `file`, opened for reading: this process must not hold a descriptor that can write.
    fn second(&self, file: &File, name: &str) -> Result<File> {
        reopen(file).map_err(Error::io("open", &self.folder.path().join(name)))
    }

    /// The same files, opened for reading. The given descriptors may be open for writing.
    fn for_reading(&self, disks: Vec<Vec<File>>) -> Result<Vec<Vec<File>>> {
        let failed = |error| Error::io::<io::Error>("read a layer for", self.folder.path())(error);
        let reopen = |file: File| {
            // Only regular files: a second open of a pipe or a device may block or have effects.
            if !file.metadata().map_err(failed)?.is_file() {
                return Err(Error::Invalid("a layer must be a regular file".into()));
            }
            reopen(&file).map_err(failed)
        };
        disks.into_iter().map(|disk| disk.into_iter().map(reopen).collect()).collect()
    }

    fn lacks(&self, what: &str) -> Error {
        Error::Invalid(format!("snapshot {} cannot be published: it has no {what}", self.tag))
    }

    fn check_parent(&self, parent: &Snapshot, guest: &GuestSpec) -> Result<()> {
        let (theirs, ours) = (parent.manifest().guest.mem_size_mib, guest.mem_size_mib);
        let why = if parent.depth() >= MAX_DEPTH {
            format!("the chain of {} is as long as one can be ({MAX_DEPTH}); store all of it", parent.tag())
        } else if theirs != ours {
            format!("it has {ours} MiB of memory and {}, over which it is, {theirs}", parent.tag())
        } else {
            return Ok(());
        };
        Err(Error::Invalid(format!("snapshot {} cannot be published: {why}", self.tag)))
    }

    /// Makes `file`, opened for reading, a layer, if it is none yet. `origin` is the snapshot that may have the layer.
    fn layer(&mut self, file: &File, origin: Option<&Snapshot>) -> Result<FileEntry> {
        let layers = self.store.layers().clone();
        let failed = |error| Error::io::<io::Error>("read a layer for", self.folder.path())(error);
        let meta = file.metadata().map_err(failed)?;
        if let Some(entry) = layers.known(file, &mut self.hold)? {
            layers.verified(&entry).map_err(|why| Error::Unusable {
                tag: owner_of(&entry, origin).unwrap_or(&self.tag).to_owned(),
                message: format!("snapshot {} cannot be published: {why}", self.tag),
            })?;
            return Ok(entry);
        }
        // The file has no name through which a process could open it later and write.
        let ours = meta.nlink() == 0 || self.layers.iter().any(|(_, inode)| *inode == meta.ino());
        if ours && let Some(entry) = layers.put(file, WrittenBy::Others, &mut self.hold)? {
            return Ok(entry);
        }
        let name = format!("copy.{}", self.layers.len());
        let copy = self.create_layer(&name)?;
        copy_sparse(file, &copy).map_err(Error::io("copy a layer to", self.folder.path()))?;
        let copy = self.second(&copy, &name)?;
        let put = layers.put(&copy, WrittenBy::Us, &mut self.hold)?;
        put.ok_or_else(|| Error::Invalid(format!("{} is on two file systems", self.store.folder().display())))
    }

    /// Syncs the state to disk and returns its entry.
    fn seal_state(&self) -> Result<FileEntry> {
        let file = self.state.as_ref().ok_or_else(|| self.lacks("state"))?;
        let copied = || {
            let copy = self.folder.create(STATE_COPY)?;
            copy_sparse(file, &copy)?;
            self.folder.rename(STATE_COPY, STATE)?;
            reopen(&copy)
        };
        let seal = || {
            let file = match is_given_back(file, STATE)? {
                true => reopen(file)?,
                false => copied()?,
            };
            sync_file(&file)?;
            let size = file.metadata()?.len();
            Ok(FileEntry { size, blake3: digest(&file, size)? })
        };
        seal().map_err(Error::io::<io::Error>("write", &self.folder.path().join(STATE)))
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.published {
            return;
        }
        waits("remove a draft");
        // What cannot be removed now is removed by `Store::open`.
        let _ = delete(self.folder.path());
        if !self.hold.is_empty() {
            self.hold.release();
            let _ = self.store.collect();
        }
    }
}

fn now_unix() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |age| age.as_secs())
}

fn named(snapshot: &Snapshot) -> Parent {
    Parent { tag: snapshot.tag().to_owned(), id: snapshot.id().to_owned() }
}

/// The tag of `origin` if it has the layer.
fn owner_of<'o>(layer: &FileEntry, origin: Option<&'o Snapshot>) -> Option<&'o str> {
    origin.filter(|origin| origin.manifest().layers().any(|its| its == layer)).map(Snapshot::tag)
}

/// How many of each disk's layers `origin` does not have: it has a beginning of them, or nothing.
fn own_layers(disks: &[Vec<FileEntry>], origin: Option<&Snapshot>) -> Vec<usize> {
    let theirs = origin.map_or(&[][..], |origin| &origin.manifest().disks);
    let inherited = |index: usize, disk: &[FileEntry]| {
        let theirs = theirs.get(index).map_or(&[][..], Vec::as_slice);
        disk.iter().zip(theirs).take_while(|(ours, theirs)| ours == theirs).count()
    };
    disks.iter().enumerate().map(|(index, disk)| disk.len() - inherited(index, disk)).collect()
}
