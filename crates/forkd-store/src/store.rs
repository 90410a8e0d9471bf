//! The folder of all snapshots: finding, beginning, removing, collecting garbage.
//!
//! Beside the snapshots it has entries with a leading dot: `.layers`, the files that snapshots share; `.new-…`, drafts;
//! and `.gone-…`, snapshots that are being removed. When a process opens the store, it removes the last two kinds, and
//! layers that no snapshot names.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forkd_protocol::names::{NAME_RULE, is_valid_name};
use rustix::fs::{CWD, RenameFlags};
use rustix::io::Errno;

use crate::crash_points::{Step, did};
use crate::dir::{Dir, delete};
use crate::draft::Draft;
use crate::error::{Error, Result};
use crate::layers::{Collected, Hold, Layers};
use crate::manifest::{MANIFEST, Manifest, Unfit};
use crate::snapshot::{Found, Snapshot, read_manifest};
use crate::waits::waits;

const LAYERS: &str = ".layers";
const NEW: &str = ".new-";
const GONE: &str = ".gone-";

/// The folder of all snapshots.
#[derive(Debug, Clone)]
pub struct Store {
    folder: PathBuf,
    layers: Arc<Layers>,
}

impl Store {
    /// Opens the store in `folder`. Creates a missing folder, for this user alone. Removes files that interrupted work
    /// left, and nothing else.
    pub fn open(folder: &Path) -> Result<Store> {
        let layers = folder.join(LAYERS);
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o700).create(&layers).map_err(Error::io("create", &layers))?;
        did(Step::Changed);
        let store = Store { folder: folder.to_owned(), layers: Arc::new(Layers::open(&layers)?) };
        // The folder's own name, too: it may be new.
        if let Some(above) = folder.canonicalize().ok().as_deref().and_then(Path::parent) {
            Dir::open(above).and_then(|above| above.sync()).map_err(Error::io("write", above))?;
        }
        for name in store.names()? {
            let text = name.to_string_lossy();
            if text.starts_with(NEW) || text.starts_with(GONE) {
                delete(&folder.join(&name))?;
            }
        }
        store.collect()?;
        Ok(store)
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Begins a snapshot.
    pub fn begin(&self, tag: &str) -> Result<Draft> {
        check_tag(tag)?;
        waits("begin a draft");
        let target = self.folder.join(tag);
        if is_there(&target) {
            return Err(exists(tag));
        }
        let path = self.own_name(NEW);
        DirBuilder::new().mode(0o700).create(&path).map_err(Error::io("create", &path))?;
        did(Step::Changed);
        let folder = Dir::open(&path).map_err(Error::io("open", &path))?;
        Ok(Draft::new(self.clone(), tag, folder, Hold::new(self.layers.clone())))
    }

    /// The snapshot `tag`. Checks that its files exist and have their lengths; [`Snapshot::open`] checks their contents.
    pub fn get(&self, tag: &str) -> Result<Snapshot> {
        check_tag(tag)?;
        let path = self.folder.join(tag);
        match Dir::open(&path) {
            Ok(folder) => match Snapshot::read(folder, tag, &self.layers) {
                // Removed while we looked.
                Err(_) if !is_there(&path) => Err(self.no_such(tag)),
                other => other,
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(self.no_such(tag)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotADirectory) => {
                Err(Error::unusable(tag, format_args!("{} is not a folder", path.display())))
            }
            Err(error) => Err(Error::io("open", &path)(error)),
        }
    }

    /// All snapshots by tag. A snapshot that cannot be used is in the list with the reason.
    pub fn list(&self) -> Result<Vec<(String, Result<Snapshot>)>> {
        let names = self.names()?;
        let mut tags: Vec<String> = names.into_iter().filter_map(|name| name.into_string().ok()).collect();
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

    /// The snapshots whose memory is built on that of `tag`, by their tags.
    pub fn dependents(&self, tag: &str) -> Result<Vec<String>> {
        check_tag(tag)?;
        let all = self.manifests()?;
        let Some((_, wanted)) = all.iter().find(|(name, _)| name == tag) else {
            return Err(self.no_such(tag));
        };
        let depends = |manifest: &Manifest| match wanted {
            Ok((wanted, id)) => {
                manifest.ancestors.iter().any(|it| it.tag == tag && it.id == *id)
                    && wanted.memory.last().is_some_and(|top| manifest.memory.contains(top))
            }
            // Its contents are unknown: a snapshot that names it may need it.
            Err(_) => manifest.parent.is_some() && manifest.ancestors.iter().any(|it| it.tag == tag),
        };
        let dependents = all.iter().filter_map(|(name, found)| match found {
            Ok((manifest, _)) if name != tag && depends(manifest) => Some(name.clone()),
            _ => None,
        });
        Ok(dependents.collect())
    }

    /// How many snapshots use each layer.
    pub fn layer_users(&self) -> Result<BTreeMap<String, usize>> {
        let mut users = BTreeMap::new();
        for (manifest, _) in self.manifests()?.into_iter().filter_map(|(_, found)| found.ok()) {
            let layers: HashSet<&str> = manifest.layers().map(|layer| layer.blake3.as_str()).collect();
            layers.into_iter().for_each(|digest| *users.entry(digest.to_owned()).or_default() += 1);
        }
        Ok(users)
    }

    /// Removes the snapshot `tag`, complete or not, and the layers only it used. Processes that have its
    /// files open keep them, and no other snapshot is touched.
    pub fn remove(&self, tag: &str) -> Result<Collected> {
        check_tag(tag)?;
        waits("remove a snapshot");
        let path = self.folder.join(tag);
        let gone = self.own_name(GONE);
        // The rename removes the snapshot in one step. The contents follow; after a crash, the next open deletes them.
        match fs::rename(&path, &gone) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(self.no_such(tag)),
            other => other.map_err(Error::io("remove", &path))?,
        }
        did(Step::Changed);
        let mut collected = self.collect()?;
        if let Err(error) = delete(&gone) {
            collected.held_back = Some(error.full());
        }
        Ok(collected)
    }

    /// Removes the layers that no snapshot and no draft uses. Removes nothing while a manifest cannot be read, because
    /// its layers are unknown.
    pub fn collect(&self) -> Result<Collected> {
        waits("collect garbage");
        let held = self.layers.stop();
        let manifests = self.manifests()?;
        // A removed name must be off the disk before its layers: a snapshot with a name is complete. Another thread, or a
        // daemon that was killed, may have removed the name just now.
        self.sync()?;
        let mut used = HashSet::new();
        for (name, found) in manifests {
            match found {
                Ok((manifest, _)) => used.extend(manifest.layers().map(|layer| layer.blake3.clone())),
                Err(Unfit::Old(_)) => {}
                Err(Unfit::Other(why)) => {
                    let why = format!(
                        "layers that may be garbage are kept, because it is not known what snapshot {name} \
                         uses: {why}; mend it, remove it with `forkd rmi`, or move it elsewhere"
                    );
                    return Ok(Collected { held_back: Some(why), ..Collected::default() });
                }
            }
        }
        self.layers.sweep(&used, &held)
    }

    pub(crate) fn layers(&self) -> &Arc<Layers> {
        &self.layers
    }

    /// The complete folder `draft` as the snapshot `tag` that it is about to be.
    pub(crate) fn read_draft(&self, draft: &Dir, tag: &str) -> Result<Snapshot> {
        let path = self.folder.join(tag);
        Snapshot::read(draft.known_as(&path).map_err(Error::io("open", &path))?, tag, &self.layers)
    }

    /// Makes the complete folder `draft` the snapshot `tag`, unless another draft was faster.
    pub(crate) fn publish(&self, draft: &Path, tag: &str) -> Result<()> {
        let target = self.folder.join(tag);
        match rustix::fs::renameat_with(CWD, draft, CWD, &target, RenameFlags::NOREPLACE) {
            Ok(()) => did(Step::Changed),
            Err(Errno::EXIST) => return Err(exists(tag)),
            Err(error) => return Err(Error::io("create", &target)(error)),
        }
        let synced = self.sync();
        if synced.is_err() {
            // No caller knows that it exists, and a crash may still undo it.
            let _ = self.remove(tag);
        }
        synced
    }

    /// The manifests of all snapshots by tag, even if other files of them are damaged. Includes folders whose name is no
    /// valid tag, such as renamed snapshots: a second rename makes them snapshots again.
    fn manifests(&self) -> Result<Vec<(String, Found)>> {
        let mut manifests = Vec::new();
        for name in self.names()? {
            let (tag, path) = (name.to_string_lossy(), self.folder.join(&name));
            if tag.starts_with('.') {
                continue;
            }
            let found = match Dir::open(&path) {
                Ok(folder) => read_manifest(&folder, &tag),
                Err(error) => Err(Unfit::Other(format!("{} cannot be opened ({error})", path.display()))),
            };
            let meta = fs::symlink_metadata(&path);
            // No snapshot: a file, or a folder with another name and without a manifest.
            let is_other = |meta: &fs::Metadata| {
                meta.is_file() || (!is_valid_name(&tag) && meta.is_dir() && !is_there(&path.join(MANIFEST)))
            };
            match (&found, meta) {
                // Removed while we looked.
                (Err(_), Err(error)) if error.kind() == io::ErrorKind::NotFound => {}
                (Err(_), Ok(meta)) if is_other(&meta) => {}
                _ => manifests.push((tag.into_owned(), found)),
            }
        }
        manifests.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(manifests)
    }

    fn sync(&self) -> Result<()> {
        Dir::open(&self.folder).and_then(|folder| folder.sync()).map_err(Error::io("write", &self.folder))
    }

    /// Everything in the folder.
    fn names(&self) -> Result<Vec<OsString>> {
        let entries = fs::read_dir(&self.folder).map_err(Error::io("read", &self.folder))?;
        entries.map(|entry| Ok(entry.map_err(Error::io("read", &self.folder))?.file_name())).collect()
    }

    /// An unused name: the store has one process, and `open` removes the leftovers of earlier ones.
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

fn is_there(path: &Path) -> bool {
    !matches!(fs::symlink_metadata(path), Err(error) if error.kind() == io::ErrorKind::NotFound)
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
