//! Descriptors that monitors and savers keep open for writing.

use super::*;
use std::io::Read;

/// What a snapshot consists of, byte by byte: state, memory, disks.
fn bytes(snapshot: &Snapshot) -> Vec<Vec<u8>> {
    let Files { state, memory, disks } = snapshot.open().unwrap();
    let disks = disks.into_iter().flat_map(|disk| disk.layers);
    let files = [state].into_iter().chain(memory).chain(disks);
    files
        .map(|mut file| {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes).unwrap();
            bytes
        })
        .collect()
}

/// Writes to everything in `kept`.
fn overwrite(kept: &[File]) {
    for file in kept {
        file.write_all_at(b"another", 0).unwrap();
        file.set_len(1 << 16).unwrap();
    }
}

/// Whether the file system of `store` reports files that are open for writing.
fn has_leases(store: &Store) -> bool {
    let file = crate::dir::reopen(&disk(store, 0)).unwrap();
    match writers(&file).unwrap() {
        Writers::Unknown(why) => {
            eprintln!("NOT RUN: the file system of the tests has no leases ({why})");
            false
        }
        _ => true,
    }
}

#[test]
fn a_kept_write_descriptor_cannot_change_a_published_snapshot() {
    let (_folder, store) = store();
    let mut draft = store.begin("warm").unwrap();
    let (state, memory) = (draft.create_state().unwrap(), draft.create_memory().unwrap());
    let (merged, frozen) = (draft.create_disk(0).unwrap(), disk(&store, 1));
    state.write_all_at(b"state", 0).unwrap();
    memory.write_all_at(b"memory", 0).unwrap();
    merged.write_all_at(b"merged", 0).unwrap();
    // The monitor sends what it can write through, and keeps it.
    let disks = vec![vec![merged.try_clone().unwrap()], vec![frozen.try_clone().unwrap()]];
    let snapshot = draft.publish(Contents { disks, ..Contents::new(guest()) }).unwrap();
    let then = bytes(&snapshot);
    assert_eq!(then, [&b"state"[..], b"memory", b"merged", b"d\x01"]);
    overwrite(&[state, memory, merged, frozen]);
    assert_eq!(bytes(&snapshot), then);
    assert_eq!(names(snapshot.folder()), ["manifest.json", "state"]);
    assert_tidy(&store);
}

#[test]
fn what_has_been_given_back_becomes_a_layer_without_a_copy() {
    let (_folder, store) = store();
    if !has_leases(&store) {
        return;
    }
    let (draft, disk) = (draft(&store, "warm", 1), disk(&store, 1));
    let numbers = [fs::metadata(draft_path(&store).join("memory")).unwrap().ino(), inode(&disk)];
    let snapshot = draft.publish(Contents { disks: vec![vec![disk]], ..Contents::new(guest()) }).unwrap();
    let files = snapshot.open().unwrap();
    assert_eq!([inode(&files.memory[0]), inode(&files.disks[0].layers[0])], numbers);
}

/// The folder of the only draft.
fn draft_path(store: &Store) -> PathBuf {
    let names = names(store.folder());
    store.folder().join(names.iter().find(|name| name.starts_with('.')).unwrap())
}

#[test]
fn a_layer_that_is_open_for_writing_is_not_handed_out() {
    let (_folder, store) = store();
    if !has_leases(&store) {
        return;
    }
    let snapshot = made(&store, "warm", 1);
    let path = memory_path(&snapshot);
    let kept = open_for_writing(&path);
    let error = snapshot.open().unwrap_err().full();
    assert!(error.contains(&path.display().to_string()) && error.contains("open for writing"), "{error}");
    drop(kept);
    snapshot.open().unwrap();
}

#[test]
fn equal_contents_that_a_process_can_write_to_are_not_shared() {
    let (_folder, store) = store();
    if !has_leases(&store) {
        return;
    }
    let path = memory_path(&made(&store, "one", 1));
    let kept = open_for_writing(&path);
    let number = inode(&kept);
    let two = made(&store, "two", 1);
    assert_eq!(memory_path(&two), path);
    let then = bytes(&two);
    overwrite(&[kept]);
    assert_eq!(bytes(&two), then);
    assert_ne!(inode(&two.open().unwrap().memory[0]), number);
    assert_tidy(&store);
}

fn open_for_writing(layer: &Path) -> File {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(layer, fs::Permissions::from_mode(0o600)).unwrap();
    File::options().write(true).open(layer).unwrap()
}
