//! Life cycles of snapshots and their layers; crashes, damage and hostile manifests.

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use serde_json::Value;
use tempfile::TempDir;

use crate::*;

mod chains;
mod collecting;
mod crashes;
mod damage;
mod digests;
mod disks;
mod lifecycle;
mod manifests;
mod open_writers;

fn guest() -> GuestSpec {
    GuestSpec {
        image: Some(BaseImage {
            name: "python".into(),
            digest: "d".into(),
            size: 5,
            modified_ns: 1_700_000_000_123_456_789,
        }),
        kernel: None,
        vcpus: 2,
        mem_size_mib: 8,
        network: true,
        python: Some(true),
        guest_ports: vec![7],
    }
}

fn store() -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(&folder.path().join("snapshots")).unwrap();
    (folder, store)
}

/// As [`store`], in memory where there is such a place: for tests that make very many.
fn quick_store() -> (TempDir, Store) {
    let folder = quick_folder();
    let store = Store::open(&folder.path().join("snapshots")).unwrap();
    (folder, store)
}

fn quick_folder() -> TempDir {
    tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap()
}

/// A draft of which everything depends on `seed`.
fn draft(store: &Store, tag: &str, seed: u8) -> Draft {
    let mut draft = store.begin(tag).unwrap();
    draft.create_state().unwrap().write_all_at(&[b's', seed], 0).unwrap();
    let memory = draft.create_memory().unwrap();
    memory.set_len(8 << 20).unwrap();
    memory.write_all_at(&[seed; 5000], 3 << 20).unwrap();
    draft
}

/// A layer without a name, as a sandbox has one for its disk, in the data directory around `store`.
fn disk(store: &Store, seed: u8) -> File {
    nameless(store.folder().parent().unwrap(), &[b'd', seed])
}

fn nameless(folder: &Path, contents: &[u8]) -> File {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(0o600)).unwrap());
    file.write_all(contents).unwrap();
    file
}

/// What `draft` is to be published with: one disk with one layer, which depends on `seed`.
fn contents(store: &Store, seed: u8) -> Contents {
    Contents { disks: vec![vec![disk(store, seed)]], ..Contents::new(guest()) }
}

fn made(store: &Store, tag: &str, seed: u8) -> Snapshot {
    draft(store, tag, seed).publish(contents(store, seed)).unwrap()
}

/// A snapshot over `parent`: its memory a difference, its disk the parent's layers and one more.
fn over(store: &Store, parent: &Snapshot, tag: &str, seed: u8) -> Snapshot {
    let mut disks: Vec<Vec<File>> =
        parent.open().unwrap().disks.into_iter().map(|files| files.layers).collect();
    disks[0].push(disk(store, seed));
    let contents = Contents {
        parent: Some(parent.clone()),
        branched_from: Some("sb1".into()),
        disks,
        ..Contents::new(guest())
    };
    draft(store, tag, seed).publish(contents).unwrap()
}

/// The names in a folder, but for the layers' own.
fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name != ".layers")
        .collect();
    names.sort();
    names
}

fn layers(store: &Store) -> Vec<String> {
    names(&store.folder().join(".layers"))
}

fn memory_path(snapshot: &Snapshot) -> PathBuf {
    layer_path(snapshot, &snapshot.manifest().memory.last().unwrap().blake3)
}

fn layer_path(snapshot: &Snapshot, digest: &str) -> PathBuf {
    snapshot.folder().with_file_name(".layers").join(digest)
}

fn inode(file: &File) -> u64 {
    file.metadata().unwrap().ino()
}

/// Changes the manifest of `snapshot`.
fn edit_manifest(snapshot: &Snapshot, edit: impl FnOnce(&mut Value)) {
    let path = snapshot.folder().join(MANIFEST);
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut manifest);
    fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
}

/// Makes the file at `path` another one of the same length.
fn flip(path: &Path) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    // One bit, in the last byte: in a memory's case in what was a hole.
    let last = file.metadata().unwrap().len() - 1;
    let mut byte = [0];
    file.read_exact_at(&mut byte, last).unwrap();
    file.write_all_at(&[byte[0] ^ 1], last).unwrap();
}

/// Whether everything `store` has is whole, and nothing is left over.
fn assert_tidy(store: &Store) {
    let mut used = std::collections::BTreeSet::new();
    for (tag, snapshot) in store.list().unwrap() {
        let snapshot = snapshot.unwrap_or_else(|error| panic!("{tag}: {error}"));
        snapshot.open().unwrap_or_else(|error| panic!("{tag}: {error}"));
        used.extend(snapshot.layers().iter().map(|layer| layer.digest.clone()));
    }
    assert_eq!(layers(store), used.into_iter().collect::<Vec<_>>());
    assert_eq!(names(store.folder()).iter().filter(|name| name.starts_with('.')).count(), 0);
}
