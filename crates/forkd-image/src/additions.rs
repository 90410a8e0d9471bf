//! What an image has besides the files of its source: a user with sudo, packages of PyPI and npm, and files that
//! forkd brings.
//!
//! Everything is fetched on the host, by the host's pip and npm, and no program of the image runs. All of it is
//! collected in a tar and unpacked over the tree as any other: a hostile image cannot lead a file out of it.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use serde::Serialize;
use tar::{Builder, EntryType, Header};

use crate::accounts;
use crate::error::{Error, Result};
use crate::library::Lock;
use crate::progress::Progress;
use crate::tree::Tree;
use crate::unpack;
use crate::{npm, pip};

/// The user and group id of the user `user`.
pub(crate) const USER_ID: u64 = 1000;

/// What an image has besides the files of its source.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Additions {
    /// The user `user` (uid 1000, /home/user, bash), with sudo for everything and without a password.
    pub sudo: bool,
    /// Packages of PyPI, such as `requests` or `requests==2.32.3`.
    pub pip: Vec<String>,
    /// Packages of npm, such as `typescript` or `typescript@5.4.5`.
    pub npm: Vec<String>,
    /// The packages of PyPI are installed without those they depend on, which the source has.
    pub(crate) pip_without_dependencies: bool,
    /// Files and folders that forkd brings.
    pub(crate) files: Vec<PlacedFile>,
    /// Paths, with `*`, that packages of the distribution do not unpack.
    pub(crate) left_out: Vec<String>,
}

/// A file or a folder that forkd brings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct PlacedFile {
    /// Its path in the image without the leading `/`; `{python}` is the name of the image's Python.
    pub(crate) path: &'static str,
    mode: u32,
    owner: u64,
    /// `None`: a folder.
    text: Option<&'static str>,
}

impl PlacedFile {
    /// A file of root's.
    pub(crate) fn text(path: &'static str, mode: u32, text: &'static str) -> PlacedFile {
        PlacedFile { path, mode, owner: 0, text: Some(text) }
    }

    /// A folder; those on the way that do not exist have the same owner.
    pub(crate) fn folder(path: &'static str, owner: u64) -> PlacedFile {
        PlacedFile { path, mode: 0o755, owner, text: None }
    }
}

impl Additions {
    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        !self.sudo && self.pip.is_empty() && self.npm.is_empty() && self.files.is_empty()
    }

    /// Refuses names that are none, and missing programs, before minutes of downloading.
    pub(crate) fn check(&self) -> Result<()> {
        pip::check(&self.pip)?;
        npm::check(&self.npm)
    }

    /// For people: ends the description of the source.
    pub(crate) fn describe(&self) -> String {
        let mut text = String::new();
        for (name, packages) in [("pip", &self.pip), ("npm", &self.npm)] {
            if !packages.is_empty() {
                text.push_str(&format!("; {name}: {}", packages.join(" ")));
            }
        }
        if self.sudo {
            text.push_str("; sudo");
        }
        text
    }
}

/// Puts `additions` into `tree`; `work` is a folder for everything on the way.
pub(crate) fn apply(
    additions: &Additions,
    tree: &mut Tree,
    size: u64,
    work: &Path,
    lock: &Lock,
    progress: &dyn Progress,
) -> Result<()> {
    if additions.is_empty() {
        return Ok(());
    }
    let archive = work.join("additions.tar");
    let file = File::create(&archive).map_err(Error::io("create", &archive))?;
    let mut layer = Layer { tar: Builder::new(std::io::BufWriter::new(file)) };
    if additions.sudo {
        accounts::add_user(tree, &mut layer)?;
    }
    if !additions.pip.is_empty() {
        let job =
            pip::Job { packages: &additions.pip, alone: additions.pip_without_dependencies, work, lock };
        pip::install(&job, tree, &mut layer, progress)?;
    }
    if !additions.npm.is_empty() {
        npm::install(&additions.npm, work, lock, &mut layer, progress)?;
    }
    for file in &additions.files {
        place(file, tree, &mut layer)?;
    }
    let mut writer = layer.tar.into_inner().map_err(Error::io("write", &archive))?;
    writer.flush().map_err(Error::io("write", &archive))?;
    progress.step("adding files");
    let file = File::open(&archive).map_err(Error::io("open", &archive))?;
    unpack::unpack(file, tree, size, &|line| progress.log(line))
}

/// Puts one file of forkd's into the layer. A folder is left out where the image lacks the Python in its name.
fn place(file: &PlacedFile, tree: &Tree, layer: &mut Layer) -> Result<()> {
    let mut path = file.path.to_owned();
    if path.contains("{python}") {
        let Some(python) = pip::Python::find(tree) else { return Ok(()) };
        path = path.replace("{python}", &python.name());
    }
    match file.text {
        Some(text) => layer.file(&path, file.mode, file.owner, text.as_bytes()),
        None => {
            let ends = path.match_indices('/').map(|(at, _)| at).chain([path.len()]).collect::<Vec<_>>();
            let missing = ends.into_iter().map(|end| &path[..end]).filter(|path| tree.node(path).is_none());
            missing.into_iter().try_for_each(|path| layer.folder(path, file.mode, file.owner))
        }
    }
}

/// Files on their way into the tree.
pub(crate) struct Layer {
    tar: Builder<std::io::BufWriter<File>>,
}

impl Layer {
    fn append(&mut self, path: &str, mode: u32, owner: u64, kind: EntryType, data: &[u8]) -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(owner);
        header.set_gid(owner);
        header.set_size(data.len() as u64);
        self.tar.append_data(&mut header, path, data).map_err(Error::io("add", Path::new(path)))
    }

    /// Adds a file.
    pub(crate) fn file(&mut self, path: &str, mode: u32, owner: u64, data: &[u8]) -> Result<()> {
        self.append(path, mode, owner, EntryType::Regular, data)
    }

    /// Adds a folder.
    pub(crate) fn folder(&mut self, path: &str, mode: u32, owner: u64) -> Result<()> {
        self.append(path, mode, owner, EntryType::Directory, &[])
    }

    /// Adds what is in the host's folder `from` to folder `to` of the image, as root's. Files for which `wanted`
    /// is false are left out; it gets the path below `from`.
    pub(crate) fn copy(&mut self, from: &Path, to: &str, wanted: &dyn Fn(&Path) -> bool) -> Result<()> {
        let mut pending = vec![from.to_owned()];
        while let Some(folder) = pending.pop() {
            let entries = fs::read_dir(&folder).map_err(Error::io("read", &folder))?;
            let mut paths = entries
                .map(|entry| entry.map(|entry| entry.path()))
                .collect::<std::io::Result<Vec<_>>>()
                .map_err(Error::io("read", &folder))?;
            paths.sort();
            for path in paths {
                let below = path.strip_prefix(from).unwrap_or(&path);
                if !wanted(below) {
                    continue;
                }
                let target = format!("{to}/{}", text_of(below)?);
                let meta = fs::symlink_metadata(&path).map_err(Error::io("read", &path))?;
                if meta.is_dir() {
                    pending.push(path);
                } else if meta.is_symlink() {
                    let link = fs::read_link(&path).map_err(Error::io("read", &path))?;
                    self.link(&target, &link)?;
                } else if meta.is_file() {
                    // Not the build's umask: other users of the guest read and run these, too.
                    let mode = if meta.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
                    let mut header = Header::new_gnu();
                    header.set_mode(mode);
                    header.set_uid(0);
                    header.set_gid(0);
                    header.set_size(meta.len());
                    let file = File::open(&path).map_err(Error::io("open", &path))?;
                    self.tar.append_data(&mut header, &target, file).map_err(Error::io("add", &path))?;
                }
            }
        }
        Ok(())
    }

    /// Adds a symbolic link.
    pub(crate) fn link(&mut self, path: &str, target: &Path) -> Result<()> {
        let mut header = Header::new_gnu();
        header.set_entry_type(EntryType::Symlink);
        header.set_mode(0o777);
        header.set_uid(0);
        header.set_gid(0);
        header.set_size(0);
        self.tar.append_link(&mut header, path, target).map_err(Error::io("add", Path::new(path)))
    }
}

fn text_of(path: &Path) -> Result<&str> {
    std::str::from_utf8(path.as_os_str().as_bytes())
        .map_err(|_| Error::Invalid(format!("{} has a name that is not UTF-8", path.display())))
}

#[cfg(test)]
#[path = "additions_tests.rs"]
mod tests;
