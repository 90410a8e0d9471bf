//! An image: a root disk and its manifest.

use std::fs;
use std::path::{Path, PathBuf};

use forkd_protocol::agent::WarmRequest;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::library::read_manifest;

/// Version of the folder format of images.
pub const FORMAT: u32 = 1;
/// File in an image's folder with its manifest.
pub(crate) const MANIFEST: &str = "image.json";
/// File in an image's folder with its disk.
pub(crate) const DISK: &str = "disk.ext4";

/// An image's manifest; `image.json` in its folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`FORMAT`] when it was built.
    pub format: u32,
    /// Its name, and its folder's.
    pub name: String,
    /// When it was built, in seconds since 1970.
    pub created: u64,
    /// Its source, for people.
    pub source: String,
    /// What its programs run on: `x86_64`.
    pub architecture: String,
    /// Size of the disk in bytes, holes included.
    pub disk_bytes: u64,
    /// Identity of the disk's contents: SHA-256 over its non-zero blocks with their numbers.
    pub disk_digest: String,
    /// Whether it has a `python3`.
    pub python: bool,
    /// What to do in a fresh VM so that its children start warm.
    #[serde(default)]
    pub warm: WarmRequest,
    /// The identity of what was to be built ([`crate::ImageSpec::definition`]); absent in older images and in
    /// those of a tar or a folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub definition: Option<String>,
}

/// An image in a library.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Image {
    /// Its manifest.
    pub manifest: Manifest,
    /// Its disk: ext4, never written after it was built.
    pub disk: PathBuf,
}

impl Image {
    /// Reads the image in `folder`, which must be called `name`, and checks that its disk is whole.
    pub(crate) fn read(folder: &Path, name: &str) -> Result<Image> {
        let fix = format!("build it again with `forkd image build {name} --force`");
        let manifest: Manifest = read_manifest(&folder.join(MANIFEST), FORMAT, &fix)?;
        let disk = folder.join(DISK);
        let found = match fs::metadata(&disk) {
            Ok(meta) => meta.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(Error::Invalid(format!("{} is missing; {fix}", disk.display())));
            }
            Err(error) => return Err(Error::io("read", &disk)(error)),
        };
        if found != manifest.disk_bytes {
            return Err(Error::Invalid(format!(
                "{} has {found} bytes and should have {}; {fix}",
                disk.display(),
                manifest.disk_bytes
            )));
        }
        Ok(Image { manifest, disk })
    }

    /// The image's name.
    pub fn name(&self) -> &str {
        &self.manifest.name
    }

    /// How much room its disk really takes, in bytes: holes take none.
    pub fn used_bytes(&self) -> u64 {
        fs::metadata(&self.disk).map(|meta| std::os::unix::fs::MetadataExt::blocks(&meta) * 512).unwrap_or(0)
    }
}
