//! Building an image: from its source to a finished folder in the library.

use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use forkd_protocol::agent::WarmRequest;

use sha2::{Digest, Sha256};

use crate::additions::{self, Additions};
use crate::compress;
use crate::disk;
use crate::error::{Error, Result};
use crate::image::{DISK, FORMAT, Image, MANIFEST, Manifest};
use crate::library::{Library, Lock, publish, unfinished};
use crate::packages;
use crate::progress::Progress;
use crate::recipes;
use crate::tree::Tree;
use crate::unpack;

/// Default size of a disk. Only used blocks take room on the host.
pub const DEFAULT_SIZE_MIB: u64 = 4096;
const MIN_SIZE_MIB: u64 = 64;
const MAX_SIZE_MIB: u64 = 4 << 20;
/// Free space that building an image from packages needs on the host.
const PACKAGES_NEED: u64 = 1500 << 20;

/// What an image is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ImageSource {
    /// Packages of the host's distribution, installed into an otherwise minimal system.
    Packages {
        /// Release by code name; the host's own when absent.
        suite: Option<String>,
        /// Packages besides the essential ones.
        packages: Vec<String>,
    },
    /// A tar of a root file system, plain or compressed with gzip, xz or zstd.
    Tar(PathBuf),
    /// A folder that holds a root file system.
    Folder(PathBuf),
}

/// An image to build.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageSpec {
    /// Its name.
    pub name: String,
    /// The source of its files.
    pub source: ImageSource,
    /// What it has besides those.
    pub additions: Additions,
    /// Size of its disk.
    pub size_mib: u64,
    /// What to do in a fresh VM so that its children start warm.
    pub warm: WarmRequest,
    /// Replace an image of the same name.
    pub force: bool,
}

impl ImageSpec {
    /// An image from `source` with a disk of the default size and nothing to warm up.
    pub fn new(name: &str, source: ImageSource) -> ImageSpec {
        ImageSpec {
            name: name.into(),
            source,
            additions: Additions::default(),
            size_mib: DEFAULT_SIZE_MIB,
            warm: WarmRequest::default(),
            force: false,
        }
    }

    /// The image forkd builds by itself under this name, if there is one.
    pub fn predefined(name: &str) -> Option<ImageSpec> {
        recipes::find(name)
    }

    /// The identity of what is built of packages: a digest of everything but the name. The same definition may
    /// give other contents later, because packages have new versions.
    pub fn definition(&self) -> Option<String> {
        let ImageSource::Packages { suite, packages } = &self.source else { return None };
        let parts = (suite, packages, &self.additions, self.size_mib, &self.warm);
        let digest = Sha256::digest(serde_json::to_vec(&parts).ok()?);
        Some(digest.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Builds `spec` into `library`; `lock` is the image's.
pub(crate) fn build(
    library: &Library,
    spec: &ImageSpec,
    lock: &Lock,
    progress: &dyn Progress,
) -> Result<Image> {
    if !(MIN_SIZE_MIB..=MAX_SIZE_MIB).contains(&spec.size_mib) {
        return Err(Error::Invalid(format!(
            "a disk of {} MiB is not possible: choose {MIN_SIZE_MIB} to {MAX_SIZE_MIB} MiB",
            spec.size_mib
        )));
    }
    if !spec.additions.is_empty() && matches!(spec.source, ImageSource::Folder(_)) {
        return Err(Error::Invalid(
            "an image of a folder gets no more than the folder's files; build it from a tar of the folder"
                .into(),
        ));
    }
    // Found missing now, not after minutes of downloading.
    for (tool, package) in [("mke2fs", "e2fsprogs"), ("fakeroot", "fakeroot")] {
        crate::tools::command(tool, package)?;
    }
    spec.additions.check()?;
    let images = library.images_folder();
    let folder = unfinished(&images, &spec.name)?;
    let built = fill(&folder, spec, lock, progress).and_then(|()| publish(&folder, &images.join(&spec.name)));
    if let Err(error) = built {
        // Best effort: the next build removes what stays.
        let _ = fs::remove_dir_all(&folder);
        return Err(error);
    }
    library.image(&spec.name)
}

/// Makes everything an image's folder holds.
fn fill(folder: &Path, spec: &ImageSpec, lock: &Lock, progress: &dyn Progress) -> Result<()> {
    let work = folder.join("work");
    let root = work.join("root");
    fs::create_dir_all(&root).map_err(Error::io("create", &root))?;
    let size = spec.size_mib << 20;
    let (mut tree, mut source) = match &spec.source {
        ImageSource::Packages { suite, packages } => {
            check_space(folder, PACKAGES_NEED)?;
            let left_out = &spec.additions.left_out;
            let job = packages::Job { packages, left_out, work: &work, size, lock, progress };
            packages::install(suite.as_deref(), &job)?
        }
        ImageSource::Tar(path) => (from_tar(path, &root, size, progress)?, format!("tar {}", path.display())),
        ImageSource::Folder(path) => {
            progress.step(&format!("reading {}", path.display()));
            let path = path.canonicalize().map_err(Error::io("read", path))?;
            if !path.is_dir() {
                return Err(Error::Invalid(format!("{} is not a folder", path.display())));
            }
            (Tree::scan(&path, size)?, format!("folder {}", path.display()))
        }
    };
    additions::apply(&spec.additions, &mut tree, size, &work, lock, progress)?;
    source.push_str(&spec.additions.describe());
    tree.check_shell()?;
    let python = ["usr/bin/python3", "usr/local/bin/python3", "bin/python3"];
    let python = python.iter().any(|path| tree.is_program(path));

    progress.step("writing the disk");
    let disk = folder.join(DISK);
    disk::make(&tree, &disk, size, &work, progress)?;
    progress.step("finishing");
    let created = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let manifest = Manifest {
        format: FORMAT,
        name: spec.name.clone(),
        created,
        source,
        architecture: "x86_64".into(),
        disk_bytes: size,
        disk_digest: disk::digest(&disk)?,
        python,
        warm: spec.warm.clone(),
        definition: spec.definition(),
    };
    let path = folder.join(MANIFEST);
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| Error::Invalid(error.to_string()))?;
    fs::write(&path, text).map_err(Error::io("write", &path))?;
    fs::remove_dir_all(&work).map_err(Error::io("remove", &work))
}

fn from_tar(path: &Path, root: &Path, size: u64, progress: &dyn Progress) -> Result<Tree> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let length = file.metadata().map_err(Error::io("read", path))?.len();
    check_space(root, length.saturating_mul(2))?;
    progress.step(&format!("unpacking {}", path.display()));
    let counted = Counted { inner: file, done: 0, shown: 0, total: length.max(1), progress };
    let mut tree = Tree::empty(root)?;
    compress::reader(counted)
        .and_then(|reader| unpack::unpack(reader, &mut tree, size, &|line| progress.log(line)))
        .map_err(|error| match error {
            Error::Invalid(text) => Error::Invalid(format!("{}: {text}", path.display())),
            other => other,
        })?;
    Ok(tree)
}

/// Refuses a build that the host's disk has no room for.
fn check_space(folder: &Path, needed: u64) -> Result<()> {
    let stat = rustix::fs::statvfs(folder).map_err(Error::io("read", folder))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    if free >= needed {
        return Ok(());
    }
    Err(Error::Host(format!(
        "{} has {} MiB free, and this build needs about {} MiB; free some space, or set FORKD_DATA_DIR to \
         a folder on a larger disk",
        folder.display(),
        free >> 20,
        needed >> 20
    )))
}

/// A reader that reports its progress.
struct Counted<'a, R> {
    inner: R,
    done: u64,
    shown: u64,
    total: u64,
    progress: &'a dyn Progress,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let count = self.inner.read(buffer)?;
        self.done += count as u64;
        if self.done - self.shown > self.total / 100 {
            self.shown = self.done;
            self.progress.fraction((self.done as f64 / self.total as f64).min(1.0));
        }
        Ok(count)
    }
}
