//! `manifest.json`: a snapshot's description and the files it needs.
//!
//! It is written once and never again: its hash is the snapshot's id ([`crate::Snapshot::id`]), which children and
//! branches refer to. So a newer forkd must not rewrite an old manifest. A reader trusts nothing in it: the file is
//! bounded and versioned, and each name in it can be the name of a layer only.
//!
//! Built in `draft.rs`; measured in the controller's `snapshot/save.rs`; shown by its `api/snapshots`.
//!
//! A new field raises the version of each kind that has the field (`FULL`, `DISK`), to a number that no kind had: an older
//! forkd refuses unknown fields, and its gc then keeps all layers. `Manifest::parse` takes one version of each kind. So the
//! same change must let it take the kind's earlier versions, too. Keep the old example in `tests/golden`.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;

use forkd_protocol::control::MAX_VCPUS;
use forkd_protocol::names::is_valid_name;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// The manifest's file.
pub const MANIFEST: &str = "manifest.json";
/// The file with the state of vCPUs and devices.
pub const STATE: &str = "state";
/// The oldest version of manifests that this crate reads. Version 1 had no layers.
pub(crate) const OLDEST: u32 = 2;
/// The version of snapshots of [`SnapshotKind::Full`].
pub(crate) const FULL: u32 = 2;
/// The version of snapshots of [`SnapshotKind::Disk`].
pub(crate) const DISK: u32 = 3;
/// The newest version that this crate writes and reads: the larger of the two.
pub const VERSION: u32 = DISK;
/// The longest chain of memory layers, not counting its base.
pub const MAX_DEPTH: usize = 31;

const FORMAT: &str = "forkd-snapshot";
/// The largest manifest that is written or read. A real one has a few KiB.
const MAX_MANIFEST: usize = 256 << 10;
/// The most disks of a snapshot.
const MAX_DISKS: usize = 16;
/// The most layers of a disk. A monitor takes fewer.
const MAX_DISK_LAYERS: usize = 64;
/// How many ancestors a manifest lists; the farthest are dropped first. More than [`MAX_DEPTH`], so those
/// whose layers are used are always among them.
const MAX_ANCESTORS: usize = 128;
/// The largest file a manifest may name: lengths on a file system fit into an `i64`.
const MAX_FILE: u64 = i64::MAX as u64;
/// How a branch can be taken.
const MODES: [&str; 5] = ["full", "diff", "live", "suspend", "disk"];
/// The longest `branched_from`.
const MAX_SOURCE: usize = 128;

/// Which parts of a guest a snapshot has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Memory, disks, and the state of vCPUs and devices: children are forked from it.
    #[default]
    Full,
    /// Disks alone, with their block maps as state: a guest boots on them.
    Disk,
}

impl SnapshotKind {
    fn is_full(&self) -> bool {
        *self == SnapshotKind::Full
    }

    /// The version of manifests of this kind.
    fn version(self) -> u32 {
        match self {
            SnapshotKind::Full => FULL,
            SnapshotKind::Disk => DISK,
        }
    }
}

/// Everything about a snapshot but its contents.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `forkd-snapshot`.
    pub(crate) format: String,
    /// That of its kind when it was made.
    pub(crate) version: u32,
    /// Which parts of the guest it has.
    #[serde(default, skip_serializing_if = "SnapshotKind::is_full")]
    pub kind: SnapshotKind,
    /// The snapshot's tag, and its folder's name.
    pub tag: String,
    /// When it was made, in seconds since 1970; of a branch when it was taken, not when it was on disk.
    pub created_at_unix: u64,
    /// The version of the forkd that made it, for people.
    #[serde(rename = "forkd")]
    pub made_by_version: String,
    /// The guest's properties, from the maker of the snapshot.
    #[serde(rename = "facts")]
    pub guest: GuestSpec,
    /// The snapshot whose memory layers come before its own one; none if it has all of its memory
    /// itself.
    pub parent: Option<Parent>,
    /// The snapshots it came from, the farthest first, its parent last. One that has all of its
    /// memory itself can have ancestors too.
    pub ancestors: Vec<Parent>,
    /// Its source: a sandbox's id, or `compact:` and a tag. None if it was booted.
    pub branched_from: Option<String>,
    /// The state of vCPUs and devices; of disks alone if it has nothing else.
    pub state: FileEntry,
    /// Memory layers, oldest first: the last one is its own, the others are its parent's. None in a snapshot of
    /// disks alone.
    pub memory: Vec<FileEntry>,
    /// Each disk's layers, oldest first.
    pub disks: Vec<Vec<FileEntry>>,
    /// How many of each disk's layers, from the newest, the snapshot it came from did not have.
    pub own_disk_layers: Vec<usize>,
    /// Figures measured while it was made.
    pub measured: Measured,
}

/// Another snapshot, as it was.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Parent {
    /// Its tag then.
    pub tag: String,
    /// Its [`crate::Snapshot::id`], which differs from that of another snapshot with the same tag.
    pub id: String,
}

/// Figures measured while a snapshot was made.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Measured {
    /// How the branch was asked for: `full`, `diff`, `live`, `suspend` or `disk`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// How long the source's vCPUs stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// How long the source's user processes were frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_ms: Option<f64>,
    /// Whether user processes were frozen at that instant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// How long writing it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub save_ms: Option<f64>,
    /// How much was written.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub written_bytes: Option<u64>,
}

/// Properties of a snapshot's guest, as its maker gave them.
///
/// The controller's records of sandboxes and templates hold it, too. An older daemon refuses unknown fields there as well:
/// a new field has `serde(default)`, and raises the versions of these records (`VersionedRecord::VERSION`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GuestSpec {
    /// The image under its first disk; none for a bare guest.
    pub image: Option<BaseImage>,
    /// The kernel it booted: a path, or a version of the library. For people; of bare guests it is the only
    /// description.
    pub kernel: Option<String>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Guest memory in MiB.
    pub mem_size_mib: u64,
    /// Whether the guest has a network interface.
    pub network: bool,
    /// Whether it holds a warmed Python; not known for a bare guest.
    pub python: Option<bool>,
    /// Ports of the host the guest may call.
    #[serde(default)]
    pub guest_ports: Vec<u32>,
}

/// As long as a path can be.
const MAX_PATH: usize = 4096;

/// Which file was under a snapshot's disk. The layers are worth nothing over any other one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseImage {
    /// The image's name, or the absolute path of a disk that is in no library.
    pub name: String,
    /// The identity of its contents, from its own manifest.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    /// When it was last modified, in nanoseconds since 1970: shows that it was written to in place.
    pub modified_ns: i128,
}

impl BaseImage {
    /// Whether its name can be an image's, or a disk's path.
    fn has_a_name(&self) -> bool {
        let is_path = self.name.starts_with('/')
            && self.name.len() <= MAX_PATH
            && !self.name.contains(|c: char| c.is_control())
            && self.name.split('/').all(|part| part != "..");
        is_path || is_valid_name(&self.name)
    }

    /// The image `name` as it is now: `disk` is its file, `digest` comes from its manifest.
    pub fn of(name: &str, digest: &str, disk: &File) -> std::io::Result<BaseImage> {
        let meta = disk.metadata()?;
        Ok(BaseImage {
            name: name.into(),
            digest: digest.into(),
            size: meta.len(),
            modified_ns: i128::from(meta.mtime()) * 1_000_000_000 + i128::from(meta.mtime_nsec()),
        })
    }
}

/// The required size and contents of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length in bytes, holes included.
    pub size: u64,
    /// Identity of its contents, in hexadecimal: BLAKE3 of its non-zero pages and where they are (defined on
    /// the front page of `digest.rs`).
    pub blake3: String,
}

/// Whether `text` can be the digest of something, and so the name of a layer.
pub(crate) fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Why a manifest cannot be used.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Unfit {
    /// Its version had no layers, so it refers to none.
    Old(String),
    Other(String),
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (Unfit::Old(why) | Unfit::Other(why)) = self;
        f.write_str(why)
    }
}

impl From<String> for Unfit {
    fn from(why: String) -> Self {
        Unfit::Other(why)
    }
}

impl Manifest {
    /// Sets format, versions and the number of ancestors, before the first write.
    pub(crate) fn stamp(&mut self) {
        self.format = FORMAT.into();
        self.version = self.kind.version();
        self.made_by_version = env!("CARGO_PKG_VERSION").into();
        let too_many = self.ancestors.len().saturating_sub(MAX_ANCESTORS);
        self.ancestors.drain(..too_many);
    }

    /// The bytes to write. An error if they could not be read again.
    pub(crate) fn bytes(&self) -> Result<Vec<u8>> {
        let unfit = |why| Error::Invalid(format!("snapshot {} cannot be published: {why}", self.tag));
        self.check(&self.tag).map_err(unfit)?;
        let mut bytes = serde_json::to_vec_pretty(self).map_err(|error| unfit(error.to_string()))?;
        bytes.push(b'\n');
        Manifest::parse(&bytes, &self.tag).map_err(|why| unfit(why.to_string()))?;
        Ok(bytes)
    }

    /// Its layers, memory first.
    pub(crate) fn layers(&self) -> impl Iterator<Item = &FileEntry> {
        self.memory.iter().chain(self.disks.iter().flatten())
    }

    /// Reads a manifest's bytes.
    pub(crate) fn read(file: &File) -> std::result::Result<Vec<u8>, Unfit> {
        let mut bytes = Vec::new();
        let limit = MAX_MANIFEST as u64 + 1;
        file.take(limit).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        Ok(bytes)
    }

    /// Parses a manifest and checks that it belongs to `tag`.
    pub(crate) fn parse(bytes: &[u8], tag: &str) -> std::result::Result<Manifest, Unfit> {
        /// The fields that every version has.
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u64,
        }
        if bytes.len() > MAX_MANIFEST {
            return Err(format!("it has more than {} KiB, no manifest does", MAX_MANIFEST >> 10).into());
        }
        let header: Header = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if header.format != FORMAT {
            return Err(format!("its format is not {FORMAT:?}").into());
        }
        // Before anything else: a file of another version may have fields that this one does not know.
        let version = header.version;
        if version > u64::from(VERSION) {
            return Err(format!("made by a newer forkd: version {version}, this one reads {VERSION}").into());
        }
        if version == 1 {
            let why =
                format!("made by an older forkd: the layout has changed since, from version 1 to {VERSION}");
            return Err(Unfit::Old(why));
        }
        if version < u64::from(OLDEST) {
            return Err(format!("version {version} is none this forkd reads ({OLDEST} to {VERSION})").into());
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if manifest.kind.version() != manifest.version {
            return Err(format!("no snapshot of its kind has version {version}").into());
        }
        manifest.check(tag)?;
        Ok(manifest)
    }

    fn check(&self, tag: &str) -> std::result::Result<(), String> {
        if self.tag != tag {
            return Err(format!("it belongs to another tag, {:?}", self.tag));
        }
        if !is_valid_name(tag) {
            return Err(format!("{tag:?} is no tag"));
        }
        let guest = &self.guest;
        if guest.vcpus == 0 || guest.vcpus > MAX_VCPUS {
            return Err(format!("{} vCPUs are not possible", guest.vcpus));
        }
        if guest.mem_size_mib == 0 || guest.mem_size_mib > MAX_FILE >> 20 {
            return Err(format!("{} MiB of memory are not possible", guest.mem_size_mib));
        }
        if let Some(image) = guest.image.as_ref().filter(|image| !image.has_a_name()) {
            return Err(format!("{:?} is no name of an image", image.name));
        }
        self.check_origin()?;
        self.check_layers()
    }

    fn check_origin(&self) -> std::result::Result<(), String> {
        if self.ancestors.len() > MAX_ANCESTORS {
            return Err(format!("it has {} ancestors", self.ancestors.len()));
        }
        for ancestor in &self.ancestors {
            if !is_valid_name(&ancestor.tag) || !is_digest(&ancestor.id) {
                return Err(format!("{:?} ({:?}) can be no ancestor", ancestor.tag, ancestor.id));
            }
        }
        if self.parent.is_some() && self.parent.as_ref() != self.ancestors.last() {
            return Err("its parent is not the last of its ancestors".into());
        }
        if let Some(source) = &self.branched_from
            && (source.len() > MAX_SOURCE || source.chars().any(char::is_control))
        {
            return Err(format!("it cannot have been branched from {source:?}"));
        }
        match &self.measured.mode {
            Some(mode) if !MODES.contains(&mode.as_str()) => Err(format!("{mode:?} is no mode of branching")),
            _ => Ok(()),
        }
    }

    fn check_layers(&self) -> std::result::Result<(), String> {
        if self.kind == SnapshotKind::Disk {
            if !self.memory.is_empty() || self.parent.is_some() {
                return Err("it is of disks alone, and has memory or a parent".into());
            }
            if self.disks.is_empty() {
                return Err("it is of disks alone, and has none".into());
            }
        }
        match (self.memory.len(), &self.parent) {
            (0, None) if self.kind == SnapshotKind::Disk => {}
            (0, _) => return Err("it has no memory".into()),
            (1, None) => {}
            (2.., Some(_)) if self.memory.len() <= MAX_DEPTH + 1 => {}
            (count, None) => return Err(format!("it has {count} memory layers and no parent")),
            (count, Some(_)) => return Err(format!("it has {count} memory layers and a parent")),
        }
        if self.disks.len() > MAX_DISKS {
            return Err(format!("it has {} disks", self.disks.len()));
        }
        if let Some(disk) = self.disks.iter().find(|disk| disk.len() > MAX_DISK_LAYERS) {
            return Err(format!("it has a disk of {} layers", disk.len()));
        }
        let possible = |(own, disk): (&usize, &Vec<FileEntry>)| *own <= disk.len();
        if self.own_disk_layers.len() != self.disks.len()
            || !self.own_disk_layers.iter().zip(&self.disks).all(possible)
        {
            return Err("it counts more layers as its own than its disks have".into());
        }
        for entry in self.layers().chain([&self.state]) {
            if !is_digest(&entry.blake3) {
                return Err(format!("{:?} is no digest", entry.blake3));
            }
            if entry.size > MAX_FILE {
                return Err(format!("{} cannot have {} bytes", entry.blake3, entry.size));
            }
        }
        Ok(())
    }
}
