//! Disk layers: where they come from, and what becomes of their files.

use super::*;
use std::os::unix::fs::PermissionsExt;

fn with_disk(store: &Store, tag: &str, layers: Vec<File>) -> Result<Snapshot> {
    let contents = Contents { disks: vec![layers], ..Contents::new(guest()) };
    draft(store, tag, 1).publish(contents)
}

#[test]
fn a_nameless_file_stays_the_file_that_others_have_open() {
    let (folder, store) = store();
    let open = nameless(folder.path(), b"blocks");
    // As after sealing: only a descriptor to read from is left.
    let sealed = crate::dir::reopen(&open).unwrap();
    drop(open);
    let files = with_disk(&store, "warm", vec![sealed.try_clone().unwrap()]).unwrap().open().unwrap();
    assert_eq!(inode(&files.disks[0].layers[0]), inode(&sealed));
}

#[test]
fn the_place_others_read_from_is_not_moved() {
    use std::io::Read;
    let (folder, store) = store();
    let mut open = nameless(folder.path(), b"blocks");
    with_disk(&store, "warm", vec![open.try_clone().unwrap()]).unwrap();
    let mut rest = Vec::new();
    open.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty(), "it was at its end before");
}

#[test]
fn a_layer_of_the_store_stays_the_file_it_is() {
    let (_folder, store) = store();
    let first = with_disk(&store, "one", vec![disk(&store, 1)]).unwrap();
    let opened = first.open().unwrap().disks.remove(0).layers;
    let number = inode(&opened[0]);
    let second = with_disk(&store, "two", opened).unwrap();
    assert_eq!(inode(&second.open().unwrap().disks[0].layers[0]), number);
    assert_eq!(layers(&store).len(), 2);
}

#[test]
fn a_file_of_another_file_system_is_copied_and_left_as_it_is() {
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("NOT RUN: no /dev/shm to take a file from");
        return;
    };
    let (folder, store) = store();
    let device = |path: &Path| fs::metadata(path).unwrap().dev();
    if device(elsewhere.path()) == device(folder.path()) {
        eprintln!("NOT RUN: /dev/shm is where temporary files are");
        return;
    }
    let layer = nameless(elsewhere.path(), b"blocks");
    let snapshot = with_disk(&store, "warm", vec![layer.try_clone().unwrap()]).unwrap();
    let mut found = Vec::new();
    std::io::Read::read_to_end(&mut snapshot.open().unwrap().disks[0].layers[0], &mut found).unwrap();
    assert_eq!(found, b"blocks");
    assert_eq!(layer.metadata().unwrap().permissions().mode() & 0o777, 0o600);
    assert_tidy(&store);
}

#[test]
fn a_file_that_has_a_name_elsewhere_is_copied() {
    let (folder, store) = store();
    let path = folder.path().join("somebody's");
    fs::write(&path, b"blocks").unwrap();
    let snapshot = with_disk(&store, "warm", vec![File::open(&path).unwrap()]).unwrap();
    fs::write(&path, b"BLOCKS").unwrap();
    snapshot.open().unwrap();
    assert_tidy(&store);
}

#[test]
fn a_layer_that_was_collected_while_somebody_has_it_open_is_stored_again() {
    let (_folder, store) = store();
    let first = with_disk(&store, "one", vec![disk(&store, 1)]).unwrap();
    let opened = first.open().unwrap().disks.remove(0).layers;
    store.remove("one").unwrap();
    assert!(layers(&store).is_empty());
    with_disk(&store, "two", opened).unwrap();
    assert_tidy(&store);
}

#[test]
fn a_merged_layer_is_one_of_the_draft() {
    let (_folder, store) = store();
    let mut draft = draft(&store, "flat", 1);
    let merged = draft.create_disk(0).unwrap();
    merged.write_all_at(b"merged", 0).unwrap();
    let number = inode(&merged);
    let contents = Contents { disks: vec![vec![merged]], ..Contents::new(guest()) };
    let snapshot = draft.publish(contents).unwrap();
    assert_eq!(inode(&snapshot.open().unwrap().disks[0].layers[0]), number);
    assert_eq!(names(snapshot.folder()), ["manifest.json", "state"]);
    assert_tidy(&store);
}

#[test]
fn a_merged_layer_that_is_not_named_leaves_nothing() {
    let (_folder, store) = store();
    let mut draft = draft(&store, "flat", 1);
    draft.create_disk(0).unwrap().write_all_at(b"merged", 0).unwrap();
    let snapshot = draft.publish(Contents::new(guest())).unwrap();
    assert_eq!(names(snapshot.folder()), ["manifest.json", "state"]);
    assert_tidy(&store);
}

#[test]
fn equal_contents_are_stored_once() {
    let (_folder, store) = store();
    let one = made(&store, "one", 1);
    let two = made(&store, "two", 1);
    assert_eq!(layers(&store).len(), 2);
    assert_eq!(one.manifest().memory, two.manifest().memory);
    // Also within one snapshot: two disks, nothing written to either.
    let empty = || nameless(store.folder().parent().unwrap(), b"");
    let disks = vec![vec![empty()], vec![empty(), empty()]];
    let three = draft(&store, "three", 1).publish(Contents { disks, ..Contents::new(guest()) }).unwrap();
    assert_eq!(layers(&store).len(), 3);
    assert_eq!(three.open().unwrap().disks[1].layers.len(), 2);
    store.remove("one").unwrap();
    two.open().unwrap();
    assert_tidy(&store);
}

#[test]
fn something_that_is_no_file_is_no_layer() {
    let (folder, store) = store();
    let folder = File::open(folder.path()).unwrap();
    assert!(with_disk(&store, "warm", vec![folder]).is_err());
    let (pipe, _writer) = std::io::pipe().unwrap();
    let pipe = File::from(std::os::fd::OwnedFd::from(pipe));
    assert!(with_disk(&store, "warm", vec![pipe]).is_err());
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
}

/// A snapshot of disks alone, with the layers of `origin` and one more.
fn disks_alone(store: &Store, tag: &str, seed: u8, origin: Option<&Snapshot>) -> Result<Snapshot> {
    let mut draft = store.begin(tag).unwrap();
    draft.create_state().unwrap().write_all_at(&[b'm', seed], 0).unwrap();
    let mut layers = origin.map_or_else(Vec::new, |it| it.open().unwrap().disks.remove(0).layers);
    layers.push(disk(store, seed));
    let contents = Contents {
        kind: SnapshotKind::Disk,
        origin: origin.cloned(),
        disks: vec![layers],
        ..Contents::new(guest())
    };
    draft.publish(contents)
}

#[test]
fn a_snapshot_of_disks_alone_has_no_memory_and_needs_no_other_snapshot() {
    let (_folder, store) = store();
    let base = made(&store, "base", 1);
    let snapshot = disks_alone(&store, "disks", 2, Some(&base)).unwrap();
    assert!(snapshot.is_disk_only() && !base.is_disk_only());
    assert_eq!((snapshot.depth(), snapshot.sizes().memory), (0, Size::default()));
    assert_eq!(snapshot.layers().iter().filter(|layer| layer.own).count(), 1);
    assert_eq!(store.dependents("base").unwrap(), Vec::<String>::new());
    assert_eq!(store.dependents("disks").unwrap(), Vec::<String>::new());

    // Another process reads it, also when the snapshot it came from is gone.
    store.remove("base").unwrap();
    let again = Store::open(store.folder()).unwrap().get("disks").unwrap();
    let files = again.open().unwrap();
    assert_eq!((files.memory.len(), files.disks.len(), files.disks[0].layers.len()), (0, 1, 2));
    assert_eq!(again.manifest().ancestors[0].tag, "base");
    assert_tidy(&store);
    store.remove("disks").unwrap();
    assert_eq!(layers(&store), Vec::<String>::new());
}

#[test]
fn a_snapshot_of_disks_alone_with_memory_or_without_disks_is_refused() {
    let (_folder, store) = store();
    let base = made(&store, "base", 1);
    let kind = SnapshotKind::Disk;
    let with_memory = draft(&store, "disks", 2).publish(Contents { kind, ..contents(&store, 2) });
    assert!(with_memory.unwrap_err().to_string().contains("has memory"));
    let with_state = |tag| {
        let mut draft = store.begin(tag).unwrap();
        draft.create_state().unwrap();
        draft
    };
    let without = with_state("disks").publish(Contents { kind, ..Contents::new(guest()) });
    assert!(without.unwrap_err().to_string().contains("has none"));
    let parent = Some(base);
    let built_on = with_state("disks").publish(Contents { kind, parent, ..contents(&store, 3) });
    assert!(built_on.unwrap_err().to_string().contains("a parent"));
    assert_eq!(names(store.folder()), ["base"]);
    assert_tidy(&store);
}
