//! The folder that holds images and kernels: finding them, removing them, and the rules by which
//! new ones appear.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use forkd_protocol::names::{NAME_RULE, is_valid_name};
use rustix::fs::{CWD, RenameFlags};
use serde::de::DeserializeOwned;

use crate::build::{self, ImageSpec};
use crate::error::{Error, Result};
use crate::image::Image;
use crate::kernel::{self, Kernel};
use crate::kernel_fetch;
use crate::progress::Progress;
use crate::recipes::PREDEFINED;

/// The largest manifest that is read.
const MAX_MANIFEST: u64 = 1 << 20;

/// The age of this file is the time since fetching a kernel last failed.
const TRIED: &str = ".tried";
/// How long after that it is not tried once more.
const RETRY: Duration = Duration::from_secs(24 * 60 * 60);

/// A folder of images and kernels.
#[derive(Debug, Clone)]
pub struct Library {
    root: PathBuf,
}

impl Library {
    /// The library in folder `root`. The folder is made when something is put into it.
    pub fn open(root: &Path) -> Library {
        // Programs we run work in other folders; only an empty path has no absolute form.
        Library { root: std::path::absolute(root).unwrap_or_else(|_| root.to_owned()) }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn images_folder(&self) -> PathBuf {
        self.root.join("images")
    }

    pub(crate) fn kernels_folder(&self) -> PathBuf {
        self.root.join("kernels")
    }

    /// The image called `name`, checked to be whole.
    pub fn image(&self, name: &str) -> Result<Image> {
        check_name(name)?;
        let folder = self.images_folder().join(name);
        if !exists(&folder)? {
            return Err(self.no_such_image(name));
        }
        Image::read(&folder, name)
    }

    /// All images, by name. One that is damaged does not hide the others.
    pub fn images(&self) -> Result<Vec<(String, Result<Image>)>> {
        let names = entries(&self.images_folder(), is_valid_name)?;
        Ok(names.into_iter().map(|name| (name.clone(), self.image(&name))).collect())
    }

    /// The image called `name`. One of [`PREDEFINED`] is built if it is not there yet; when another
    /// process is already building it, this waits for it.
    pub fn ensure_image(&self, name: &str, progress: &dyn Progress) -> Result<Image> {
        check_name(name)?;
        let folder = self.images_folder().join(name);
        let Some(spec) = ImageSpec::predefined(name) else { return self.image(name) };
        if !exists(&folder)? {
            let lock = Lock::take(&self.images_folder(), name, &format!("image {name}"), progress)?;
            if !exists(&folder)? {
                return build::build(self, &spec, &lock, progress);
            }
        }
        self.image(name)
    }

    /// Builds an image. An existing one is replaced only with `spec.force`.
    pub fn build_image(&self, spec: &ImageSpec, progress: &dyn Progress) -> Result<Image> {
        let name = &spec.name;
        check_name(name)?;
        let lock = Lock::take(&self.images_folder(), name, &format!("image {name}"), progress)?;
        if !spec.force && exists(&self.images_folder().join(name))? {
            return Err(Error::Invalid(format!(
                "image {name} exists; replace it with `forkd image build {name} --force`, or choose \
                 another name"
            )));
        }
        build::build(self, spec, &lock, progress)
    }

    /// Removes the image called `name`, whole or damaged. VMs that run from it are not disturbed.
    pub fn remove_image(&self, name: &str, progress: &dyn Progress) -> Result<()> {
        check_name(name)?;
        let folder = self.images_folder().join(name);
        if !exists(&folder)? {
            return Err(self.no_such_image(name));
        }
        let _lock = Lock::take(&self.images_folder(), name, &format!("image {name}"), progress)?;
        // Gone in one step; the contents follow.
        let unfinished = unfinished(&self.images_folder(), name)?;
        fs::rename(&folder, &unfinished).map_err(Error::io("remove", &folder))?;
        remove(&unfinished)
    }

    /// A kernel: the newest of the library, the one of a version, or, when `wanted` has a `/`, the
    /// vmlinux or bzImage at that path (see [`Kernel::from_path`]).
    pub fn kernel(&self, wanted: Option<&str>) -> Result<Kernel> {
        match wanted {
            Some(path) if path.contains('/') => Kernel::from_path(Path::new(path), None),
            Some(version) => {
                if !is_version(version) {
                    return Err(Error::Invalid(format!("{version:?} is no version of a kernel")));
                }
                let folder = self.kernels_folder().join(version);
                if !exists(&folder)? {
                    let known = entries(&self.kernels_folder(), is_version)?.join(", ");
                    return Err(Error::NotFound(format!(
                        "there is no kernel {version} in {} (it has: {}); to use a file, give its path",
                        self.root.display(),
                        if known.is_empty() { "none" } else { &known }
                    )));
                }
                Kernel::read(&folder)
            }
            None => {
                let mut versions = entries(&self.kernels_folder(), is_version)?;
                versions.sort_by_key(|version| kernel::version_key(version));
                let newest = versions.pop().ok_or_else(|| {
                    Error::NotFound(format!(
                        "there is no kernel in {}; `forkd run` fetches one",
                        self.root.display()
                    ))
                })?;
                Kernel::read(&self.kernels_folder().join(newest))
            }
        }
    }

    /// The newest kernel of the library, fetched from the distribution if there is none. One that lacks
    /// modules is fetched again; if that fails, it has to do, and the next try comes a day later.
    pub fn ensure_kernel(&self, progress: &dyn Progress) -> Result<Kernel> {
        self.ensure_kernel_with(kernel_fetch::fetch, progress)
    }

    pub(crate) fn ensure_kernel_with(
        &self,
        fetch: fn(&Library, &dyn Progress) -> Result<Kernel>,
        progress: &dyn Progress,
    ) -> Result<Kernel> {
        match self.kernel(None) {
            Err(Error::NotFound(_)) => {}
            Ok(kernel) if !kernel.is_complete() && !self.tried_lately() => {}
            other => return other,
        }
        let lock = Lock::take(&self.kernels_folder(), "kernel", "a kernel", progress);
        match self.kernel(None) {
            Err(Error::NotFound(_)) => lock.and_then(|_lock| fetch(self, progress)),
            Ok(kernel) if !kernel.is_complete() && !self.tried_lately() => {
                let again = lock.and_then(|_lock| {
                    let mark = self.kernels_folder().join(TRIED);
                    fs::write(&mark, b"").map_err(Error::io("write", &mark))?;
                    let kernel = fetch(self, progress)?;
                    // The next version of forkd may look for more.
                    let _ = fs::remove_file(&mark);
                    Ok(kernel)
                });
                again.or_else(|error| {
                    let version = &kernel.version;
                    progress
                        .log(&format!("kernel {version} lacks modules and was not fetched again: {error}"));
                    Ok(kernel)
                })
            }
            other => other,
        }
    }

    /// Whether fetching a kernel again failed less than a day ago.
    fn tried_lately(&self) -> bool {
        let tried = fs::metadata(self.kernels_folder().join(TRIED)).and_then(|known| known.modified());
        tried.is_ok_and(|tried| tried.elapsed().is_ok_and(|age| age < RETRY))
    }

    fn no_such_image(&self, name: &str) -> Error {
        let known = entries(&self.images_folder(), is_valid_name).unwrap_or_default().join(", ");
        let fix = if PREDEFINED.contains(&name) {
            format!("build it with `forkd image build {name}`")
        } else {
            format!("build it with `forkd image build {name} --packages …`, `--tar FILE` or `--folder PATH`")
        };
        Error::NotFound(format!(
            "there is no image {name} in {} (it has: {}); {fix}",
            self.root.display(),
            if known.is_empty() { "none" } else { &known }
        ))
    }
}

fn check_name(name: &str) -> Result<()> {
    if is_valid_name(name) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{name:?} is no name for an image: use {NAME_RULE}")))
}

/// Whether `version` is one a kernel's folder can have: like a name, and Debian's have a `+`.
fn is_version(version: &str) -> bool {
    is_valid_name(&version.replace(['+', '~'], "_"))
}

pub(crate) fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(Error::io("read", path))
}

/// Names of the finished entries in `folder`, sorted. A folder that does not exist has none.
fn entries(folder: &Path, is_name: fn(&str) -> bool) -> Result<Vec<String>> {
    let list = match fs::read_dir(folder) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::io("read", folder))?,
    };
    let mut names = Vec::new();
    for entry in list {
        let entry = entry.map_err(Error::io("read", folder))?;
        names.extend(entry.file_name().to_str().filter(|name| is_name(name)).map(str::to_owned));
    }
    names.sort();
    Ok(names)
}

/// Reads the manifest at `path`, which must be of the given `format`; `fix` is what to do if not.
pub(crate) fn read_manifest<T: DeserializeOwned>(path: &Path, format: u32, fix: &str) -> Result<T> {
    #[derive(serde::Deserialize)]
    struct Format {
        format: u32,
    }
    let broken = |why: &dyn std::fmt::Display| {
        Error::Invalid(format!("{} cannot be understood ({why}); {fix}", path.display()))
    };
    let file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            return Err(Error::Invalid(format!("{} is missing; {fix}", path.display())));
        }
        other => other.map_err(Error::io("open", path))?,
    };
    let text = crate::compress::read_all(file, MAX_MANIFEST).map_err(Error::io("read", path))?;
    let found: Format = serde_json::from_slice(&text).map_err(|error| broken(&error))?;
    if found.format != format {
        return Err(broken(&format!("its format is {}, this forkd reads {format}", found.format)));
    }
    serde_json::from_slice(&text).map_err(|error| broken(&error))
}

/// The right to change one entry of a library. It ends with the process that holds it.
pub(crate) struct Lock {
    file: File,
    path: PathBuf,
}

impl Lock {
    /// Takes the lock for `name` in `folder`, saying so when another process has to finish first.
    pub(crate) fn take(folder: &Path, name: &str, what: &str, progress: &dyn Progress) -> Result<Lock> {
        fs::create_dir_all(folder).map_err(Error::io("create", folder))?;
        let path = folder.join(format!(".lock-{name}"));
        let file = File::options().create(true).truncate(false).read(true).write(true).open(&path);
        let file = file.map_err(Error::io("create", &path))?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                progress.step(&format!("waiting for another process that is working on {what}"));
                file.lock().map_err(Error::io("lock", &path))?;
            }
            Err(TryLockError::Error(error)) => return Err(Error::io("lock", &path)(error)),
        }
        Ok(Lock { file, path })
    }

    /// The lock as the standard input of a program, which finds an empty file there. The lock is then
    /// held until the program and all it started have ended too: mmdebstrap survives our death for
    /// a while, and must not meet the next build in its folder.
    pub(crate) fn as_stdin(&self) -> Result<Stdio> {
        let file = self.file.try_clone().map_err(Error::io("open", &self.path))?;
        Ok(Stdio::from(file))
    }
}

/// Path of the unfinished entry `name` in `folder`; leftovers of a killed process are removed. The caller
/// holds the lock for `name`, so no other process works on it.
pub(crate) fn unfinished(folder: &Path, name: &str) -> Result<PathBuf> {
    let path = folder.join(format!(".unfinished-{name}"));
    remove(&path)?;
    Ok(path)
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}

/// Makes the complete folder `unfinished` the entry `target`, replacing the one that is there. After
/// a crash at any moment there is the old entry or the new one, whole.
pub(crate) fn publish(unfinished: &Path, target: &Path) -> Result<()> {
    sync_all(unfinished)?;
    let swapped = rustix::fs::renameat_with(CWD, unfinished, CWD, target, RenameFlags::EXCHANGE);
    match swapped {
        Ok(()) => sync_parent(target)?,
        Err(_) => {
            // Nothing there yet, or a file system that cannot exchange.
            remove(target)?;
            fs::rename(unfinished, target).map_err(Error::io("create", target))?;
            sync_parent(target)?;
        }
    }
    remove(unfinished)
}

fn sync_all(folder: &Path) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        if path.is_dir() {
            sync_all(&path)?;
        } else {
            File::open(&path).and_then(|file| file.sync_all()).map_err(Error::io("write", &path))?;
        }
    }
    sync_folder(folder)
}

fn sync_parent(path: &Path) -> Result<()> {
    path.parent().map_or(Ok(()), sync_folder)
}

fn sync_folder(folder: &Path) -> Result<()> {
    let file = File::open(folder).map_err(Error::io("open", folder))?;
    rustix::fs::fsync(file.as_fd()).map_err(Error::io("write", folder))
}
