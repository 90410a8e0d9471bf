//! The folder of all snapshots: finding, beginning, removing.
//!
//! Beside the snapshots it holds only what has a leading dot: `.new-…`, drafts, and `.gone-…`, what
//! is being removed. Both are left-overs when a process starts, and removed then.

use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_protocol::names::{NAME_RULE, is_valid_name};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::draft::Draft;
use crate::error::{Error, Result};
use crate::folder::Folder;
use crate::snapshot::Snapshot;

const NEW: &str = ".new-";
const GONE: &str = ".gone-";

/// The folder of all snapshots.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
}

impl Store {
    /// The store in `folder`, which is made, for us alone, if it is not there. Removes what
    /// interrupted work left, and nothing else.
    pub fn open(folder: &Path) -> Result<Store> {
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(folder).map_err(Error::io("create", folder))?;
        let store = Store { folder: folder.to_owned() };
        for name in store.names()? {
            if name.starts_with(NEW) || name.starts_with(GONE) {
                delete(&folder.join(name))?;
            }
        }
        Ok(store)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Begins a snapshot.
    pub fn begin(&self, tag: &str) -> Result<Draft> {
        check_tag(tag)?;
        let target = self.folder.join(tag);
        if fs::symlink_metadata(&target).is_ok() {
            return Err(exists(tag));
        }
        let path = self.own_name(NEW);
        DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("create", &path))?;
        let folder = Folder::open(&path).map_err(Error::io("open", &path))?;
        Ok(Draft::new(self.clone(), tag, folder))
    }

    /// The snapshot `tag`, with its files there and as long as they should be. That their contents
    /// are right is found out by [`Snapshot::open`].
    pub fn get(&self, tag: &str) -> Result<Snapshot> {
        check_tag(tag)?;
        let path = self.folder.join(tag);
        match Folder::open(&path) {
            Ok(folder) => Snapshot::read(folder, tag),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.no_such(tag)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotADirectory) => {
                Err(Error::unusable(tag, format_args!("{} is not a folder", path.display())))
            }
            Err(error) => Err(Error::io("open", &path)(error)),
        }
    }

    /// All snapshots by tag. One that cannot be used is there with the reason, and does not hide the
    /// others.
    pub fn list(&self) -> Result<Vec<(String, Result<Snapshot>)>> {
        let mut tags = self.names()?;
        tags.retain(|name| is_valid_name(name));
        tags.sort();
        Ok(tags
            .into_iter()
            .map(|tag| {
                let snapshot = self.get(&tag);
                (tag, snapshot)
            })
            // Removed while we looked.
            .filter(|(_, snapshot)| !matches!(snapshot, Err(Error::NotFound(_))))
            .collect())
    }

    /// Removes the snapshot `tag`, whole or not. Who has its files open goes on with them.
    pub fn remove(&self, tag: &str) -> Result<()> {
        check_tag(tag)?;
        let path = self.folder.join(tag);
        let gone = self.own_name(GONE);
        // Gone in one step; the contents follow, if need be when the store is opened again.
        match fs::rename(&path, &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.no_such(tag)),
            other => other.map_err(Error::io("remove", &path))?,
        }
        self.sync()?;
        delete(&gone)
    }

    /// Makes the complete folder `draft` the snapshot `tag`, unless somebody else was faster.
    pub(crate) fn publish(&self, draft: &Path, tag: &str) -> Result<()> {
        let target = self.folder.join(tag);
        match rustix::fs::renameat_with(CWD, draft, CWD, &target, RenameFlags::NOREPLACE) {
            Ok(()) => self.sync(),
            Err(Errno::EXIST) => Err(exists(tag)),
            Err(error) => Err(Error::io("create", &target)(error)),
        }
    }

    fn sync(&self) -> Result<()> {
        Folder::open(&self.folder).and_then(|folder| folder.sync()).map_err(Error::io("write", &self.folder))
    }

    /// Everything in the folder that has a name we could have given.
    fn names(&self) -> Result<Vec<String>> {
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(Error::io("read", &self.folder))? {
            let entry = entry.map_err(Error::io("read", &self.folder))?;
            names.extend(entry.file_name().into_string());
        }
        Ok(names)
    }

    /// A name nobody else uses: the store has one process, and `open` removes what others left.
    fn own_name(&self, prefix: &str) -> PathBuf {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        self.folder.join(format!("{prefix}{}-{number}", std::process::id()))
    }

    fn no_such(&self, tag: &str) -> Error {
        Error::NotFound(format!(
            "there is no snapshot {tag}; `forkd images` lists them, `forkd snapshot --tag {tag} …` makes it"
        ))
    }
}

fn exists(tag: &str) -> Error {
    Error::Exists(format!("snapshot {tag} exists; choose another tag, or remove it with `forkd rmi {tag}`"))
}

fn check_tag(tag: &str) -> Result<()> {
    if is_valid_name(tag) {
        return Ok(());
    }
    Err(Error::Invalid(format!("{tag:?} is no tag: use {NAME_RULE}")))
}

/// Removes what is at `path`, whatever it is. Links are removed, not followed.
fn delete(path: &Path) -> Result<()> {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => Ok(()),
    }
}
