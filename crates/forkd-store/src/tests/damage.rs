//! Damaged files.

use super::*;
use crate::crash_points::{Step, listen};
use std::cell::Cell;
use std::os::unix::fs::symlink;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Finds a file of a snapshot: the one that is damaged.
type Which = fn(&Snapshot) -> PathBuf;

const FILES: [Which; 4] = [
    |snapshot| snapshot.folder().join(STATE),
    // Its own, and its parent's.
    |snapshot| memory_path(snapshot),
    |snapshot| layer_path(snapshot, &snapshot.manifest().memory[0].blake3),
    |snapshot| layer_path(snapshot, &snapshot.manifest().disks[0][1].blake3),
];

/// The error text after `damage` to that file of a snapshot over another one.
fn damaged(which: Which, damage: impl FnOnce(&Path)) -> String {
    let (_folder, store) = quick_store();
    let parent = made(&store, "parent", 1);
    let snapshot = over(&store, &parent, "warm", 2);
    made(&store, "other", 3);
    let path = which(&snapshot);
    damage(&path);
    let error = store.get("warm").and_then(|snapshot| snapshot.open()).unwrap_err();
    assert!(matches!(error, Error::Unusable { .. }), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("forkd rmi warm"), "no way out: {message}");
    assert!(message.contains(&path.display().to_string()), "which file? {message}");
    // Other snapshots are not affected, unless they share the file.
    store.get("other").unwrap().open().unwrap();
    let shared = parent.layers().iter().any(|layer| path.ends_with(&layer.digest));
    assert_eq!(store.get("parent").and_then(|parent| parent.open()).is_err(), shared);
    // And the way out is one.
    store.remove("warm").unwrap();
    if shared {
        store.remove("parent").unwrap();
    }
    assert_tidy(&store);
    message
}

#[test]
fn every_kind_of_damage_is_told_with_the_name_of_the_file() {
    for which in FILES {
        let message = damaged(which, |path| fs::remove_file(path).unwrap());
        assert!(message.contains("is missing"), "{message}");

        let resize = |path: &Path, by: i64| {
            let file = File::options().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len().checked_add_signed(by).unwrap()).unwrap();
        };
        let message = damaged(which, |path| resize(path, -1));
        assert!(message.contains("is truncated"), "{message}");
        let message = damaged(which, |path| resize(path, 1));
        assert!(message.contains("has grown"), "{message}");

        let message = damaged(which, flip);
        assert!(message.contains("was edited or damaged"), "{message}");

        let message = damaged(which, |path| {
            let elsewhere = path.with_file_name("elsewhere");
            fs::rename(path, &elsewhere).unwrap();
            symlink("elsewhere", path).unwrap();
            // Not what the store would tidy away.
            fs::rename(&elsewhere, path.parent().unwrap().with_file_name("file of somebody")).unwrap();
        });
        assert!(message.contains("is a symbolic link"), "{message}");

        let message = damaged(which, |path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        });
        assert!(message.contains("is not a regular file"), "{message}");

        // A pipe without a writer: waiting for it would hang the daemon.
        let message = damaged(which, |path| {
            fs::remove_file(path).unwrap();
            let (fifo, device) = (rustix::fs::FileType::Fifo, rustix::fs::makedev(0, 0));
            rustix::fs::mknodat(rustix::fs::CWD, path, fifo, Mode::RUSR, device).unwrap();
        });
        assert!(message.contains("is not a regular file"), "{message}");
    }
}

#[test]
fn a_damaged_snapshot_is_listed_with_the_reason_and_hides_no_other() {
    let (_folder, store) = store();
    for (tag, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        made(&store, tag, seed);
    }
    fs::remove_file(memory_path(&store.get("b").unwrap())).unwrap();
    fs::write(store.folder().join("file"), "").unwrap();
    let list = store.list().unwrap();
    let tags: Vec<&str> = list.iter().map(|(tag, _)| tag.as_str()).collect();
    assert_eq!(tags, ["a", "b", "c", "file"]);
    assert!(list[0].1.is_ok() && list[2].1.is_ok());
    assert!(list[1].1.as_ref().unwrap_err().to_string().contains("is missing"));
    assert!(list[3].1.as_ref().unwrap_err().to_string().contains("not a folder"));
    store.remove("b").unwrap();
    store.remove("file").unwrap();
    assert_eq!(store.list().unwrap().len(), 2);
}

#[test]
fn a_damaged_layer_is_mended_by_whoever_has_the_same_contents() {
    for damage in [
        flip,
        |path: &Path| fs::remove_file(path).unwrap(),
        |path: &Path| {
            fs::remove_file(path).unwrap();
            fs::create_dir(path).unwrap();
        },
    ] {
        let (_folder, store) = store();
        let one = made(&store, "one", 1);
        damage(&memory_path(&one));
        assert!(one.open().is_err());
        made(&store, "two", 1).open().unwrap();
        one.open().unwrap();
        assert_tidy(&store);
    }
}

#[test]
fn a_snapshot_is_not_published_over_a_damaged_disk() {
    let (_folder, store) = store();
    let one = made(&store, "one", 1);
    let disks: Vec<Vec<File>> = one.open().unwrap().disks.into_iter().map(|it| it.layers).collect();
    let path = layer_path(&one, &one.manifest().disks[0][0].blake3);
    flip(&path);
    let contents = Contents { disks, ..Contents::new(guest()) };
    let error = draft(&store, "two", 2).publish(contents).unwrap_err().to_string();
    assert!(error.contains("edited") && error.contains(&path.display().to_string()), "{error}");
    assert_eq!(names(store.folder()), ["one"]);
}

#[test]
fn a_layer_is_read_once_and_again_when_somebody_touched_it() {
    let (_folder, store) = store();
    let parent = made(&store, "parent", 1);
    let child = over(&store, &parent, "child", 2);
    let read = Rc::new(Cell::new(0));
    let count = read.clone();
    listen(Some(Box::new(move |step| {
        if matches!(step, Step::Verified) {
            count.set(count.get() + 1);
        }
    })));
    // What was changed a moment ago is not trusted to show another change. Again, if it took more than that.
    loop {
        let begun = Instant::now();
        for layer in parent.layers() {
            let path = layer_path(&parent, &layer.digest);
            fs::set_permissions(&path, fs::metadata(&path).unwrap().permissions()).unwrap();
        }
        parent.open().unwrap();
        parent.open().unwrap();
        let times = read.take();
        if begun.elapsed() < Duration::from_secs(2) {
            assert_eq!(times, 4);
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(3100));
    parent.open().unwrap();
    assert_eq!(read.take(), 2);
    parent.open().unwrap();
    store.get("parent").unwrap().open().unwrap();
    assert_eq!(read.take(), 0, "remembered");
    child.open().unwrap();
    assert_eq!(read.take(), 2, "only the child's own");

    let path = memory_path(&parent);
    let before = fs::metadata(&path).unwrap();
    flip(&path);
    // Even if a process sets the file's times back.
    let file = File::options().write(true).open(&path).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    drop(file);
    assert!(parent.open().is_err() && child.open().is_err());
    flip(&path);
    child.open().unwrap();
    listen(None);
}

#[test]
fn a_draft_over_a_damaged_snapshot_names_that_snapshot() {
    let (_folder, store) = store();
    let parent = made(&store, "numpy", 1);
    let disk = parent.open().unwrap().disks.remove(0).layers;
    let draft = draft(&store, "branch", 2);
    let layer = parent.layers().iter().find(|layer| layer.kind == Kind::Disk).unwrap();
    flip(&layer_path(&parent, &layer.digest));
    let contents = Contents { origin: Some(parent), disks: vec![disk], ..Contents::new(guest()) };
    match draft.publish(contents) {
        Err(Error::Unusable { tag, .. }) => assert_eq!(tag, "numpy"),
        other => panic!("{other:?}"),
    }
}
