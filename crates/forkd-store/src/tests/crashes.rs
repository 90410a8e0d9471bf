//! Power cuts at every step, with every possible picture of the disk: only acknowledged snapshots and the one
//! under way may exist, complete, and nothing else.
//!
//! After a power cut a file has at least what was in it when it was last synced, and a folder at least
//! the names it had then; newer ones may be there or not. Four such things can have newer contents or
//! not, each for itself: the names of snapshots, the names of layers, the names in a snapshot's folder,
//! and the contents of files. All sixteen pictures are looked at for every step.

use super::*;
use crate::crash_points::{Step, listen};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsString;
use std::rc::Rc;

/// Everything in a folder by its path: contents, or `None` for a folder.
type Picture = BTreeMap<PathBuf, Option<Vec<u8>>>;
/// Names with their inodes, and whether these are folders.
type Names = Vec<(OsString, u64, bool)>;

#[derive(Default)]
struct Tree {
    files: HashMap<u64, Vec<u8>>,
    folders: HashMap<u64, Names>,
}

/// The data directory as it is and as it would certainly be after a power cut.
struct Disk {
    root: PathBuf,
    now: Tree,
    synced: Tree,
    /// Every file and folder ever seen, open: so no inode is used twice.
    open: HashMap<u64, File>,
}

/// Which of the four things have their newest contents.
#[derive(Debug, Clone, Copy)]
struct Newest {
    snapshots: bool,
    layers: bool,
    snapshot: bool,
    contents: bool,
}

impl Newest {
    fn all() -> impl Iterator<Item = Newest> {
        (0..16).map(|bits| Newest {
            snapshots: bits & 1 != 0,
            layers: bits & 2 != 0,
            snapshot: bits & 4 != 0,
            contents: bits & 8 != 0,
        })
    }

    fn of_folder(self, path: &Path) -> bool {
        match path.file_name().and_then(|name| name.to_str()) {
            None | Some("snapshots") => self.snapshots,
            Some(".layers") => self.layers,
            Some(_) => self.snapshot,
        }
    }
}

impl Disk {
    fn new(root: &Path) -> Disk {
        let mut disk = Disk {
            root: root.to_owned(),
            now: Tree::default(),
            synced: Tree::default(),
            open: HashMap::new(),
        };
        disk.look(root);
        disk.synced.folders = disk.now.folders.clone();
        disk
    }

    fn step(&mut self, step: Step) {
        self.look(&self.root.clone());
        match step {
            Step::SyncedFile(file) => {
                let contents = self.read(file);
                self.synced.files.insert(inode(file), contents);
            }
            Step::SyncedFolder(path) => {
                let number = fs::metadata(path).unwrap().ino();
                if let Some(names) = self.now.folders.get(&number) {
                    self.synced.folders.insert(number, names.clone());
                }
            }
            Step::Changed | Step::Verified => {}
        }
    }

    /// Remembers a file's contents.
    fn read(&mut self, file: &File) -> Vec<u8> {
        let mut contents = vec![0; file.metadata().unwrap().len() as usize];
        file.read_exact_at(&mut contents, 0).unwrap();
        self.open.entry(inode(file)).or_insert_with(|| file.try_clone().unwrap());
        self.now.files.insert(inode(file), contents.clone());
        contents
    }

    fn look(&mut self, folder: &Path) {
        let handle = File::open(folder).unwrap();
        let mut found = Names::new();
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let meta = entry.metadata().unwrap();
            found.push((entry.file_name(), meta.ino(), meta.is_dir()));
            if meta.is_dir() {
                self.look(&entry.path());
            } else {
                self.read(&File::open(entry.path()).unwrap());
            }
        }
        self.now.folders.insert(inode(&handle), found);
        self.open.entry(inode(&handle)).or_insert(handle);
    }

    fn picture(&self, newest: Newest) -> Picture {
        let mut picture = Picture::new();
        let root = fs::metadata(&self.root).unwrap().ino();
        self.draw(Path::new(""), root, newest, &mut picture);
        picture
    }

    fn draw(&self, at: &Path, folder: u64, newest: Newest, picture: &mut Picture) {
        let folders = if newest.of_folder(at) { &self.now.folders } else { &self.synced.folders };
        let files = if newest.contents { &self.now.files } else { &self.synced.files };
        for (name, number, is_folder) in folders.get(&folder).into_iter().flatten() {
            let path = at.join(name);
            if *is_folder {
                picture.insert(path.clone(), None);
                self.draw(&path, *number, newest, picture);
            } else {
                picture.insert(path, Some(files.get(number).cloned().unwrap_or_default()));
            }
        }
    }
}

/// What a caller knows: snapshots that exist, by tag, and the one that an operation is changing.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
struct Told {
    there: BTreeMap<String, String>,
    pending: Option<String>,
}

/// Looks on while snapshots come and go, and keeps a picture of every step.
struct Witness {
    told: Rc<RefCell<Told>>,
    pictures: Rc<RefCell<HashSet<(Told, Picture)>>>,
}

impl Witness {
    fn new(root: &Path) -> Witness {
        let witness = Witness { told: Rc::default(), pictures: Rc::default() };
        let (told, pictures) = (witness.told.clone(), witness.pictures.clone());
        let mut disk = Disk::new(root);
        listen(Some(Box::new(move |step| {
            disk.step(step);
            let now = |newest| (told.borrow().clone(), disk.picture(newest));
            pictures.borrow_mut().extend(Newest::all().map(now));
        })));
        witness
    }

    /// Does something to `tag`, after which it is the snapshot that `work` returns.
    fn during<T>(&self, tag: &str, work: impl FnOnce() -> (T, Option<Snapshot>)) -> T {
        self.told.borrow_mut().pending = Some(tag.to_owned());
        let (result, snapshot) = work();
        let mut told = self.told.borrow_mut();
        told.pending = None;
        match snapshot {
            Some(snapshot) => told.there.insert(tag.to_owned(), snapshot.id().to_owned()),
            None => told.there.remove(tag),
        };
        result
    }

    fn publish(&self, tag: &str, publish: impl FnOnce() -> Snapshot) -> Snapshot {
        self.during(tag, || {
            let snapshot = publish();
            (snapshot.clone(), Some(snapshot))
        })
    }

    fn remove(&self, store: &Store, tag: &str) {
        self.during(tag, || (assert_eq!(store.remove(tag).unwrap().held_back, None), None));
    }

    /// Starts a daemon after each power cut. Returns how many there were.
    fn judge(self) -> usize {
        listen(None);
        let pictures = self.pictures.take();
        for (told, picture) in &pictures {
            let folder = quick_folder();
            for (path, contents) in picture {
                let path = folder.path().join(path);
                match contents {
                    Some(contents) => fs::write(path, contents).unwrap(),
                    None => fs::create_dir(path).unwrap(),
                }
            }
            let store = Store::open(&folder.path().join("snapshots")).unwrap();
            let pending = told.pending.as_deref();
            for (tag, id) in told.there.iter().filter(|(tag, _)| Some(tag.as_str()) != pending) {
                let snapshot = store.get(tag).unwrap_or_else(|error| panic!("{error}\n{told:?}"));
                assert_eq!(snapshot.id(), id);
            }
            for (tag, snapshot) in store.list().unwrap() {
                assert!(told.there.contains_key(&tag) || Some(tag.as_str()) == pending, "{tag}: {told:?}");
                assert!(snapshot.is_ok(), "{snapshot:?}\n{told:?}");
            }
            assert_tidy(&store);
        }
        pictures.len()
    }
}

/// As elsewhere, but small: every step copies everything.
fn small_draft(store: &Store, tag: &str, seed: u8) -> Draft {
    let mut draft = store.begin(tag).unwrap();
    draft.create_state().unwrap().write_all_at(&[b's', seed], 0).unwrap();
    draft.create_memory().unwrap().write_all_at(&[b'm', seed], 0).unwrap();
    draft
}

fn small(store: &Store, tag: &str, seed: u8, parent: Option<&Snapshot>) -> Snapshot {
    let mut layers = parent.map_or_else(Vec::new, |it| it.open().unwrap().disks.remove(0).layers);
    layers.push(disk(store, seed));
    let contents = Contents { parent: parent.cloned(), disks: vec![layers], ..Contents::new(guest()) };
    small_draft(store, tag, seed).publish(contents).unwrap()
}

#[test]
fn a_power_cut_at_any_step_leaves_whole_snapshots_and_nothing_else() {
    let folder = tempfile::tempdir().unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    let witness = Witness::new(folder.path());
    let store = Store::open(&folder.path().join("snapshots")).unwrap();

    let base = witness.publish("base", || small(&store, "base", 1, None));
    let child = witness.publish("child", || small(&store, "child", 2, Some(&base)));
    // The same contents again: all layers are there already.
    witness.publish("twin", || small(&store, "twin", 2, Some(&base)));
    // With a merged disk, and one that has to be copied.
    witness.publish("flat", || {
        let mut draft = small_draft(&store, "flat", 3);
        let merged = draft.create_disk(0).unwrap();
        merged.write_all_at(b"merged", 0).unwrap();
        let path = elsewhere.path().join("layer");
        fs::write(&path, "blocks").unwrap();
        let disks = vec![vec![merged], vec![File::open(path).unwrap()]];
        draft.publish(Contents { origin: Some(child.clone()), disks, ..Contents::new(guest()) }).unwrap()
    });
    // Disks alone: the state and the layers, one of which another snapshot has, too.
    witness.publish("disks", || {
        let mut draft = store.begin("disks").unwrap();
        draft.create_state().unwrap().write_all_at(b"map", 0).unwrap();
        let mut layers = base.open().unwrap().disks.remove(0).layers;
        layers.push(disk(&store, 9));
        let contents = Contents {
            kind: SnapshotKind::Disk,
            origin: Some(base.clone()),
            disks: vec![layers],
            ..Contents::new(guest())
        };
        draft.publish(contents).unwrap()
    });
    // The tag is taken: everything is put in place, and taken back.
    let late = small_draft(&store, "late", 4);
    witness.publish("late", || small(&store, "late", 5, None));
    assert!(late.publish(contents(&store, 4)).is_err());
    // Given up.
    let mut given_up = small_draft(&store, "given-up", 6);
    given_up.keep(&child).unwrap();
    witness.remove(&store, "base");
    drop(given_up);
    witness.remove(&store, "child");
    // A draft builds on the snapshot that is removed meanwhile.
    let twin = store.get("twin").unwrap();
    let mut late_child = small_draft(&store, "late-child", 7);
    late_child.keep(&twin).unwrap();
    witness.remove(&store, "twin");
    witness.publish("late-child", || {
        late_child.publish(Contents { parent: Some(twin), ..Contents::new(guest()) }).unwrap()
    });
    witness.remove(&store, "late");
    witness.publish("late", || small(&store, "late", 5, None));
    // A daemon is killed in the middle of removing; the power goes while the next one starts.
    let store = witness.during("late", || {
        fs::rename(store.folder().join("late"), store.folder().join(".gone-1-1")).unwrap();
        (Store::open(store.folder()).unwrap(), None)
    });
    witness.publish("late", || small(&store, "late", 5, None));
    for tag in ["late-child", "flat", "disks", "late"] {
        witness.remove(&store, tag);
    }
    let pictures = witness.judge();
    assert!(pictures > 200, "only {pictures}");
}

#[test]
fn left_overs_of_a_killed_daemon_go_and_files_of_others_stay() {
    let (_folder, store) = store();
    made(&store, "old", 1);
    let mut begun = draft(&store, "new", 2);
    begun.create_disk(0).unwrap();
    std::mem::forget(begun);
    fs::rename(made(&store, "removed", 3).folder(), store.folder().join(".gone-1-1")).unwrap();
    fs::write(store.folder().join("a user's file"), "").unwrap();
    assert!(names(store.folder()).iter().any(|name| name.starts_with(".new-")));

    let store = Store::open(store.folder()).unwrap();
    assert_eq!(names(store.folder()), ["a user's file", "old"]);
    assert!(matches!(store.get("new"), Err(Error::NotFound(_))));
    assert_tidy(&store);
    made(&store, "new", 2).open().unwrap();
}
