//! `manifest.json`: what is known about a snapshot, and which files it must have.
//!
//! Written once, read with suspicion: bounded, versioned, and with no name in it that is not one of
//! the few names a snapshot's files can have.

use std::collections::BTreeMap;
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
/// The file with guest memory, all ranges one after the other, holes where it is zero.
pub const MEMORY: &str = "memory";
/// The version of manifests this crate writes and reads.
pub const VERSION: u32 = 1;

const FORMAT: &str = "forkd-snapshot";
/// The largest manifest that is read. An honest one has about one KiB.
const MAX_MANIFEST: u64 = 64 << 10;
/// The most disks of a snapshot.
const MAX_DISKS: usize = 16;
/// The largest file a manifest may claim. What a file system can hold fits into an `i64`.
const MAX_FILE: u64 = i64::MAX as u64;

/// The file with what the guest wrote to disk `index`.
pub fn disk_name(index: usize) -> String {
    format!("disk.{index}")
}

/// Whether a snapshot can have a file of this name, beside its manifest.
pub(crate) fn is_file_name(name: &str) -> bool {
    name == STATE || name == MEMORY || (0..MAX_DISKS).any(|index| name == disk_name(index))
}

/// Everything about a snapshot but its contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// Always `forkd-snapshot`.
    format: String,
    /// [`VERSION`] when it was made.
    version: u32,
    /// The snapshot's tag, and its folder's name.
    pub tag: String,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// The version of the forkd that made it, for people.
    pub forkd: String,
    /// What its maker said about it.
    pub facts: Facts,
    /// Its files by name.
    pub files: BTreeMap<String, FileEntry>,
}

/// What the maker of a snapshot knows about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Facts {
    /// The image under its first disk; none for a bare guest.
    pub image: Option<BaseImage>,
    /// The kernel it booted: a path, or a version of the library. For people, and for bare guests
    /// the only thing that says what they are.
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

/// Which file was under a snapshot's disk. The layers are worth nothing over any other one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BaseImage {
    /// The image's name.
    pub name: String,
    /// The identity of its contents, as its own manifest says.
    pub digest: String,
    /// Its size in bytes.
    pub size: u64,
    /// When it was last modified, in nanoseconds since 1970: shows that it was written to in place.
    pub modified_ns: i128,
}

impl BaseImage {
    /// The image `name` as it is now: `disk` is its file, `digest` what its manifest says of it.
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

/// What a file must be like.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Its length in bytes, holes included.
    pub size: u64,
    /// Identity of its contents, in hexadecimal: BLAKE3 of its non-zero pages and where they are
    /// (the front page of `digest.rs` says exactly).
    pub blake3: String,
}

impl Manifest {
    pub(crate) fn new(
        tag: &str,
        created_at_unix: u64,
        facts: Facts,
        files: BTreeMap<String, FileEntry>,
    ) -> Result<Manifest> {
        let manifest = Manifest {
            format: FORMAT.into(),
            version: VERSION,
            tag: tag.into(),
            created_at_unix,
            forkd: env!("CARGO_PKG_VERSION").into(),
            facts,
            files,
        };
        manifest
            .check(tag)
            .map_err(|why| Error::Invalid(format!("snapshot {tag} cannot be published: {why}")))?;
        Ok(manifest)
    }

    /// The number of disks.
    pub fn disks(&self) -> usize {
        (0..MAX_DISKS).take_while(|index| self.files.contains_key(&disk_name(*index))).count()
    }

    /// Reads a manifest and checks that it is one of `tag`. The error is why it cannot be used.
    pub(crate) fn read(file: &File, tag: &str) -> std::result::Result<Manifest, String> {
        let mut bytes = Vec::new();
        file.take(MAX_MANIFEST + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        if bytes.len() as u64 > MAX_MANIFEST {
            return Err(format!("it has more than {} KiB, no manifest does", MAX_MANIFEST >> 10));
        }
        Manifest::parse(&bytes, tag)
    }

    pub(crate) fn parse(bytes: &[u8], tag: &str) -> std::result::Result<Manifest, String> {
        /// What every version has.
        #[derive(Deserialize)]
        struct Header {
            format: String,
            version: u64,
        }
        let header: Header = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        if header.format != FORMAT {
            return Err(format!("its format is not {FORMAT:?}"));
        }
        // First of all: what another version wrote may have fields we would call unknown.
        if header.version > u64::from(VERSION) {
            let version = header.version;
            return Err(format!("made by a newer forkd: version {version}, this one reads {VERSION}"));
        }
        if header.version < u64::from(VERSION) {
            return Err(format!("version {} is none this forkd reads ({VERSION})", header.version));
        }
        let manifest: Manifest = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        manifest.check(tag)?;
        Ok(manifest)
    }

    fn check(&self, tag: &str) -> std::result::Result<(), String> {
        if self.tag != tag {
            return Err(format!("it belongs to another tag, {:?}", self.tag));
        }
        let facts = &self.facts;
        if facts.vcpus == 0 || facts.vcpus > MAX_VCPUS {
            return Err(format!("{} vCPUs are not possible", facts.vcpus));
        }
        if facts.mem_size_mib == 0 || facts.mem_size_mib > MAX_FILE >> 20 {
            return Err(format!("{} MiB of memory are not possible", facts.mem_size_mib));
        }
        if let Some(image) = facts.image.as_ref().filter(|image| !is_valid_name(&image.name)) {
            return Err(format!("{:?} is no name of an image", image.name));
        }
        for needed in [STATE, MEMORY] {
            if !self.files.contains_key(needed) {
                return Err(format!("it lists no file {needed:?}"));
            }
        }
        for (name, entry) in &self.files {
            if !is_file_name(name) {
                return Err(format!("it lists {name:?}, which no snapshot has"));
            }
            if entry.size > MAX_FILE {
                return Err(format!("it says that {name} has {} bytes", entry.size));
            }
        }
        if self.files.len() != self.disks() + 2 {
            return Err("the numbers of its disks have a gap".into());
        }
        Ok(())
    }
}
