//! Making, finding, listing and removing.

use super::*;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};

#[test]
fn what_was_published_is_found_again_by_another_process() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm", 1);
    assert_eq!(names(store.folder()), ["warm"]);
    assert_eq!(names(snapshot.folder()), ["manifest.json", "state"]);
    assert_eq!(layers(&store).len(), 2);

    let again = Store::open(store.folder()).unwrap().get("warm").unwrap();
    assert_eq!(again.manifest(), snapshot.manifest());
    assert_eq!((again.id(), again.tag(), again.depth()), (snapshot.id(), "warm", 0));
    assert_eq!(again.manifest().guest, guest());
    assert!(again.manifest().created_at_unix > 1_700_000_000);

    let mut files = again.open().unwrap();
    let mut state = Vec::new();
    files.state.read_to_end(&mut state).unwrap();
    assert_eq!(state, [b's', 1]);
    assert_eq!((files.memory.len(), files.disks.len(), files.disks[0].layers.len()), (1, 1, 1));
    let memory = &files.memory[0];
    assert_eq!(memory.metadata().unwrap().len(), 8 << 20);
    let mut byte = [0];
    memory.read_exact_at(&mut byte, 3 << 20).unwrap();
    assert_eq!(byte, [1]);
    assert!(memory.write_all_at(b"x", 0).is_err(), "opened for writing");
}

#[test]
fn a_bare_guest_has_no_disk() {
    let (_folder, store) = store();
    let guest = GuestSpec { image: None, kernel: Some("/boot/tiny".into()), python: None, ..guest() };
    let snapshot = draft(&store, "bare", 1).publish(Contents::new(guest)).unwrap();
    assert!(snapshot.open().unwrap().disks.is_empty());
}

#[test]
fn what_was_measured_is_remembered() {
    let (_folder, store) = store();
    let measured = Measured {
        mode: Some("live".into()),
        pause_ms: Some(1.25),
        frozen_ms: Some(3.5),
        quiesced: Some(false),
        save_ms: Some(20.0),
        written_bytes: Some(4096),
    };
    let contents = Contents { measured: measured.clone(), ..contents(&store, 1) };
    draft(&store, "warm", 1).publish(contents).unwrap();
    assert_eq!(store.get("warm").unwrap().manifest().measured, measured);
}

#[test]
fn a_branch_is_as_old_as_its_instant_however_long_it_took_to_store() {
    let (_folder, store) = store();
    let contents = Contents { created_at_unix: Some(1_234_567_890), ..contents(&store, 1) };
    draft(&store, "warm", 1).publish(contents).unwrap();
    assert_eq!(store.get("warm").unwrap().manifest().created_at_unix, 1_234_567_890);
}

#[test]
fn nobody_else_can_read_a_snapshot_and_nobody_can_write_to_a_layer() {
    let (_folder, store) = store();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let snapshot = made(&store, "warm", 1);
    assert_eq!(mode(store.folder()), 0o700);
    assert_eq!(mode(snapshot.folder()), 0o700);
    for name in names(snapshot.folder()) {
        assert_eq!(mode(&snapshot.folder().join(&name)), 0o600, "{name}");
    }
    assert_eq!(mode(&store.folder().join(".layers")), 0o700);
    for layer in layers(&store) {
        assert_eq!(mode(&layer_path(&snapshot, &layer)), 0o400, "{layer}");
    }
}

#[test]
fn bad_tags_and_taken_tags_are_refused() {
    let (_folder, store) = store();
    made(&store, "warm", 1);
    for bad in ["", ".", "..", "a/b", "../warm", ".new-1", ".layers", "-x", "a b", &"a".repeat(65)] {
        assert!(matches!(store.begin(bad), Err(Error::Invalid(_))), "{bad}");
        assert!(matches!(store.get(bad), Err(Error::Invalid(_))), "{bad}");
        assert!(matches!(store.remove(bad), Err(Error::Invalid(_))), "{bad}");
        assert!(matches!(store.dependents(bad), Err(Error::Invalid(_))), "{bad}");
    }
    assert!(matches!(store.begin("warm"), Err(Error::Exists(_))));
    assert!(matches!(store.get("cold"), Err(Error::NotFound(_))));
    assert!(matches!(store.remove("cold"), Err(Error::NotFound(_))));
    assert!(matches!(store.dependents("cold"), Err(Error::NotFound(_))));
}

#[test]
fn of_two_drafts_with_one_tag_the_first_one_wins_and_the_other_leaves_nothing() {
    let (_folder, store) = store();
    let (first, second) = (draft(&store, "warm", 1), draft(&store, "warm", 2));
    let created = first.publish(contents(&store, 1)).unwrap();
    assert!(matches!(second.publish(contents(&store, 2)), Err(Error::Exists(_))));
    assert_eq!(names(store.folder()), ["warm"]);
    assert_eq!(store.get("warm").unwrap().manifest(), created.manifest());
    assert_tidy(&store);
}

#[test]
fn a_dropped_draft_leaves_nothing() {
    let (_folder, store) = store();
    let mut whole = draft(&store, "warm", 1);
    whole.create_disk(0).unwrap();
    drop(whole);
    assert!(names(store.folder()).is_empty());
    // Incomplete ones, the last of which has put all its layers in place before that is found.
    let mut no_memory = store.begin("warm").unwrap();
    no_memory.create_state().unwrap();
    assert!(matches!(no_memory.publish(contents(&store, 1)), Err(Error::Invalid(_))));
    let mut no_state = store.begin("warm").unwrap();
    no_state.create_memory().unwrap();
    assert!(matches!(no_state.publish(contents(&store, 1)), Err(Error::Invalid(_))));
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
}

#[test]
fn a_draft_has_each_file_once() {
    let (_folder, store) = store();
    let mut draft = draft(&store, "warm", 1);
    assert!(matches!(draft.create_state(), Err(Error::Invalid(_))));
    assert!(matches!(draft.create_memory(), Err(Error::Invalid(_))));
    draft.create_disk(0).unwrap();
    draft.create_disk(1).unwrap();
    assert!(matches!(draft.create_disk(0), Err(Error::Invalid(_))));
}

#[test]
fn contents_that_no_manifest_could_hold_are_refused_before_anything_is_published() {
    let (_folder, store) = store();
    let refused = |change: fn(&mut Contents)| {
        let mut contents = contents(&store, 1);
        change(&mut contents);
        assert!(matches!(draft(&store, "warm", 1).publish(contents), Err(Error::Invalid(_))));
    };
    refused(|contents| contents.guest.vcpus = 0);
    refused(|contents| contents.branched_from = Some("x".repeat(1000)));
    refused(|contents| contents.measured.mode = Some("half".into()));
    refused(|contents| contents.guest.kernel = Some("x".repeat(1 << 20)));
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
}

#[test]
fn who_has_a_snapshot_open_goes_on_when_it_is_removed() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm", 1);
    let files = snapshot.open().unwrap();
    store.remove("warm").unwrap();
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
    let mut byte = [0];
    files.memory[0].read_exact_at(&mut byte, 3 << 20).unwrap();
    assert_eq!(byte, [1]);
    // Another one under the same tag is not taken for it.
    made(&store, "warm", 1);
    assert!(matches!(snapshot.open(), Err(Error::Unusable { .. })));
}

#[test]
fn a_snapshot_that_is_known_keeps_no_file_open() {
    let (_folder, store) = quick_store();
    let mut known = vec![made(&store, "first", 1)];
    known.push(over(&store, &known[0], "child", 2));
    known.extend((3..30).map(|seed| made(&store, &format!("s{seed}"), seed)));
    known.extend(store.list().unwrap().into_iter().map(|(_, snapshot)| snapshot.unwrap()));
    let again = Store::open(store.folder()).unwrap();
    known.extend(again.list().unwrap().into_iter().map(|(_, snapshot)| snapshot.unwrap()));
    let open = || {
        let files = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let paths = files.filter_map(|file| fs::read_link(file.path()).ok());
        paths.filter(|path| path.starts_with(store.folder())).count()
    };
    assert_eq!(open(), 2, "each store's folder of layers");
    for snapshot in &known {
        snapshot.open().unwrap();
    }
    assert_eq!(open(), 2);
}

#[test]
fn a_folder_that_was_replaced_is_not_taken_for_the_snapshot() {
    let (_folder, store) = store();
    let (snapshot, other) = (made(&store, "warm", 1), made(&store, "other", 2));
    let aside = store.folder().join(".aside");
    fs::rename(snapshot.folder(), &aside).unwrap();
    assert!(matches!(snapshot.open(), Err(Error::Unusable { .. })), "it is gone");
    fs::rename(other.folder(), snapshot.folder()).unwrap();
    assert!(matches!(snapshot.open(), Err(Error::Unusable { .. })), "its manifest is another one's");
    fs::rename(snapshot.folder(), other.folder()).unwrap();
    symlink(&aside, snapshot.folder()).unwrap();
    assert!(matches!(snapshot.open(), Err(Error::Unusable { .. })), "no link is followed");
    fs::remove_file(snapshot.folder()).unwrap();
    fs::rename(&aside, snapshot.folder()).unwrap();
    snapshot.open().unwrap();
    other.open().unwrap();
}

#[test]
fn left_overs_that_are_links_are_not_followed() {
    let (folder, store) = store();
    let precious = folder.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), "").unwrap();
    symlink(&precious, store.folder().join(".gone-link")).unwrap();
    symlink(&precious, store.folder().join("tag")).unwrap();
    symlink(&precious, store.folder().join(".layers").join("a".repeat(64))).unwrap();
    Store::open(store.folder()).unwrap();
    assert!(matches!(store.get("tag"), Err(Error::Unusable { .. })), "{:?}", store.get("tag"));
    store.remove("tag").unwrap();
    assert!(names(store.folder()).is_empty() && layers(&store).is_empty());
    assert!(precious.join("file").exists());
}

#[test]
fn an_image_that_was_built_again_is_noticed() {
    let (folder, store) = store();
    let disk = folder.path().join("disk.ext4");
    fs::write(&disk, b"image").unwrap();
    let image = |digest| BaseImage::of("python", digest, &File::open(&disk).unwrap()).unwrap();
    let then = image("d1");
    let known = GuestSpec { image: Some(then.clone()), ..guest() };
    let snapshot = draft(&store, "warm", 1).publish(Contents::new(known)).unwrap();
    snapshot.check_image(&then).unwrap();
    store.get("warm").unwrap().check_image(&image("d1")).unwrap();
    let error = snapshot.check_image(&image("d2")).unwrap_err().to_string();
    assert!(error.contains("image python was built again"), "{error}");
    let touched = BaseImage { modified_ns: then.modified_ns + 1, ..then.clone() };
    assert!(snapshot.check_image(&touched).is_err());
    let other = BaseImage { name: "node".into(), ..then };
    assert!(snapshot.check_image(&other).unwrap_err().to_string().contains("over image python, not node"));
}
