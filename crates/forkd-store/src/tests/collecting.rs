//! Removing snapshots and collecting unused layers: never more, also at the same time.

use super::*;
use crate::crash_points::listen;
use std::cell::Cell;
use std::os::unix::fs::symlink;
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, Ordering};

#[test]
fn removing_a_parent_leaves_its_children_whole() {
    let (_folder, store) = store();
    let parent = made(&store, "parent", 1);
    let child = over(&store, &parent, "child", 2);
    let grandchild = over(&store, &child, "grandchild", 3);
    assert_eq!(store.remove("parent").unwrap(), Collected::default());
    assert_eq!(store.remove("child").unwrap(), Collected::default());
    assert_eq!(grandchild.open().unwrap().memory.len(), 3);
    assert_tidy(&store);
    let collected = store.remove("grandchild").unwrap();
    assert_eq!(collected.layers, 6);
    assert!(collected.bytes >= 6 * 4096 && collected.held_back.is_none(), "{collected:?}");
    assert!(layers(&store).is_empty());
}

#[test]
fn removing_a_child_removes_its_own_layers_only() {
    let (_folder, store) = store();
    let parent = made(&store, "parent", 1);
    over(&store, &parent, "child", 2);
    over(&store, &parent, "sibling", 3);
    assert_eq!(store.remove("child").unwrap().layers, 2);
    assert_eq!(store.list().unwrap().len(), 2);
    assert_tidy(&store);
}

#[test]
fn what_is_not_a_layer_is_not_garbage() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm", 1);
    let readme = layer_path(&snapshot, "README");
    fs::write(&readme, "").unwrap();
    let garbage = layer_path(&snapshot, &"0".repeat(64));
    fs::write(&garbage, "x").unwrap();
    assert_eq!(store.collect().unwrap().layers, 1);
    assert!(readme.exists() && !garbage.exists());
    snapshot.open().unwrap();
}

#[test]
fn as_long_as_one_manifest_cannot_be_read_nothing_is_collected() {
    type Hide = fn(&Path);
    // What people and programs do to folders, and can undo.
    let hidden: [Hide; 5] = [
        |warm| fs::write(warm.join(MANIFEST), "{").unwrap(),
        |warm| fs::rename(warm.join(MANIFEST), warm.join("manifest.json.bak")).unwrap(),
        |warm| fs::rename(warm, warm.with_file_name("cold")).unwrap(),
        |warm| fs::rename(warm, warm.with_file_name("warm (copy)")).unwrap(),
        |warm| {
            let elsewhere = warm.parent().unwrap().with_file_name("elsewhere");
            fs::rename(warm, &elsewhere).unwrap();
            symlink(&elsewhere, warm).unwrap();
        },
    ];
    for hide in hidden {
        let (_folder, store) = store();
        let snapshot = made(&store, "warm", 1);
        made(&store, "other", 2);
        hide(snapshot.folder());
        let before = layers(&store);
        let store = Store::open(store.folder()).unwrap();
        let collected = store.remove("other").unwrap();
        let why = collected.held_back.unwrap();
        assert!(why.contains("garbage") && why.contains("forkd rmi"), "{why}");
        assert_eq!(collected.layers, 0);
        assert!(matches!(store.get("other"), Err(Error::NotFound(_))));
        assert_eq!(layers(&store), before);
    }
}

#[test]
fn folders_and_files_of_others_do_not_hinder() {
    let (_folder, store) = store();
    fs::create_dir(store.folder().join("lost+found")).unwrap();
    fs::write(store.folder().join("notes"), "").unwrap();
    fs::create_dir(store.folder().join(".trash")).unwrap();
    made(&store, "warm", 1);
    let collected = store.remove("warm").unwrap();
    assert_eq!((collected.layers, collected.held_back), (2, None));
    assert_eq!(names(store.folder()), [".trash", "lost+found", "notes"]);
}

#[test]
fn a_draft_keeps_the_layers_it_is_built_on() {
    let (_folder, store) = store();
    let parent = made(&store, "parent", 1);
    let mut child = draft(&store, "child", 2);
    child.keep(&parent).unwrap();
    assert_eq!(store.remove("parent").unwrap(), Collected::default());
    store.collect().unwrap();
    let contents = Contents { parent: Some(parent.clone()), ..Contents::new(guest()) };
    let child = child.publish(contents).unwrap();
    assert_eq!(child.open().unwrap().memory.len(), 2);
    // The parent's disk was not used after all.
    assert_eq!(store.collect().unwrap().layers, 1);
    assert_tidy(&store);

    // Dropped, a draft leaves its layers to the collector.
    let mut other = draft(&store, "other", 3);
    other.keep(&child).unwrap();
    store.remove("child").unwrap();
    assert_eq!(layers(&store).len(), 2);
    drop(other);
    assert!(layers(&store).is_empty());
}

#[test]
fn nothing_is_built_on_layers_that_are_gone() {
    let (_folder, store) = store();
    let parent = made(&store, "parent", 1);
    store.remove("parent").unwrap();
    let mut draft = draft(&store, "child", 2);
    let error = draft.keep(&parent).unwrap_err();
    assert!(matches!(&error, Error::Unusable { message, .. } if message.contains("is missing")), "{error}");
    let contents = Contents { parent: Some(parent), ..Contents::new(guest()) };
    assert!(matches!(draft.publish(contents), Err(Error::Unusable { .. })));
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
}

#[test]
fn what_a_draft_found_is_not_removed_under_its_hands() {
    // The other one, all of whose layers the draft has too, goes at one step of publishing after
    // another, until there are no more.
    for at in 0usize.. {
        let (_folder, store) = quick_store();
        let twin = made(&store, "twin", 1);
        let disks = vec![twin.open().unwrap().disks.remove(0).layers];
        let draft = draft(&store, "warm", 1);
        let mut left = at;
        let (remover, removed) = (store.clone(), Rc::new(Cell::new(false)));
        let told = removed.clone();
        listen(Some(Box::new(move |_| {
            if left == 0 && !told.replace(true) {
                remover.remove("twin").unwrap();
            }
            left = left.saturating_sub(1);
        })));
        let published = draft.publish(Contents { disks, ..Contents::new(guest()) });
        listen(None);
        published.unwrap().open().unwrap();
        assert_tidy(&store);
        if !removed.get() {
            assert!(at > 5, "only {at} steps");
            break;
        }
    }
}

#[test]
fn publishing_removing_and_collecting_at_the_same_time_harm_nobody() {
    const ROUNDS: usize = 60;
    let (_folder, store) = store();
    let base = made(&store, "base", 200);
    let done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (store, base, done) = (&store, &base, &done);
        let makers: Vec<_> = (0..3u8)
            .map(|maker| {
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        // Few contents, so that everybody makes and removes the same layers.
                        let (tag, seed) = (format!("m{maker}-{round}"), (round % 3) as u8);
                        let made = if round % 2 == 0 {
                            made(store, &tag, seed)
                        } else {
                            over(store, base, &tag, seed)
                        };
                        made.open().unwrap();
                        store.get(&tag).unwrap().open().unwrap();
                        if round % 5 != 0 {
                            let removed = store.remove(&tag).unwrap();
                            assert_eq!(removed.held_back, None);
                        }
                    }
                })
            })
            .collect();
        scope.spawn(move || {
            while !done.load(Ordering::Relaxed) {
                assert_eq!(store.collect().unwrap().held_back, None);
                for (tag, snapshot) in store.list().unwrap() {
                    snapshot.unwrap_or_else(|error| panic!("{tag}: {error}"));
                }
            }
        });
        let results: Vec<_> = makers.into_iter().map(|maker| maker.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(results.iter().all(|result| result.is_ok()));
    });
    assert_eq!(store.list().unwrap().len(), 1 + 3 * ROUNDS.div_ceil(5));
    store.collect().unwrap();
    assert_tidy(&store);
}
