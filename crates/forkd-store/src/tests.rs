//! Whole lives of snapshots, crashes, damage and hostile manifests.

use std::fs::{self, File};
use std::io::Read;
use std::io::Write;
use std::os::unix::fs::{FileExt, PermissionsExt, symlink};
use std::path::Path;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::digest::digest;
use crate::*;

fn facts() -> Facts {
    Facts {
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

fn draft(store: &Store, tag: &str) -> Draft {
    let mut draft = store.begin(tag).unwrap();
    draft.create(STATE).unwrap().write_all_at(b"the state", 0).unwrap();
    let memory = draft.create(MEMORY).unwrap();
    memory.set_len(8 << 20).unwrap();
    memory.write_all_at(&[1; 5000], 3 << 20).unwrap();
    draft.create(&disk_name(0)).unwrap().write_all_at(b"written", 4096).unwrap();
    draft
}

fn made(store: &Store, tag: &str) -> Snapshot {
    draft(store, tag).publish(facts()).unwrap()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// The message of the error that `damage` leads to, found by `get` or, at the latest, by `open`.
fn damaged(damage: impl FnOnce(&Path)) -> String {
    let (_folder, store) = store();
    let path = made(&store, "warm").folder().to_owned();
    damage(&path);
    let error = store.get("warm").and_then(|snapshot| snapshot.open()).unwrap_err();
    assert!(matches!(error, Error::Unusable(_)), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("forkd rmi warm"), "no way out: {message}");
    message
}

/// As [`damaged`], with an edited manifest.
fn with_manifest(edit: impl FnOnce(&mut Value)) -> String {
    let message = damaged(|folder| {
        let path = folder.join(MANIFEST);
        let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut manifest);
        fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    });
    assert!(message.contains(MANIFEST), "{message}");
    message
}

#[test]
fn what_was_published_is_found_again_by_another_process() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm");
    assert_eq!(names(store.folder()), ["warm"]);
    assert_eq!(names(snapshot.folder()), ["disk.0", "manifest.json", "memory", "state"]);

    let again = Store::open(store.folder()).unwrap().get("warm").unwrap();
    assert_eq!(again.manifest(), snapshot.manifest());
    assert_eq!(again.manifest().facts, facts());
    assert_eq!(again.manifest().tag, "warm");
    assert!(again.manifest().created_at_unix > 1_700_000_000);

    let mut files = again.open().unwrap();
    let mut state = String::new();
    files.state.read_to_string(&mut state).unwrap();
    assert_eq!(state, "the state");
    assert_eq!(files.memory.metadata().unwrap().len(), 8 << 20);
    assert_eq!((files.disks.len(), files.disks[0].layers.len()), (1, 1));
    let mut byte = [0];
    files.memory.read_exact_at(&mut byte, 3 << 20).unwrap();
    assert_eq!(byte, [1]);
    assert!(files.memory.write_all_at(b"x", 0).is_err(), "opened for writing");
}

#[test]
fn a_bare_guest_has_no_disk() {
    let (_folder, store) = store();
    let mut draft = store.begin("bare").unwrap();
    draft.create(STATE).unwrap();
    draft.create(MEMORY).unwrap();
    let facts = Facts { image: None, kernel: Some("/boot/tiny".into()), python: None, ..facts() };
    let snapshot = draft.publish(facts).unwrap();
    assert_eq!(snapshot.manifest().disks(), 0);
    assert!(snapshot.open().unwrap().disks.is_empty());
}

#[test]
fn holes_take_no_room() {
    let (_folder, store) = store();
    let sizes = made(&store, "warm").sizes();
    assert!((4096..1 << 20).contains(&sizes.memory), "{sizes:?}");
    assert!(sizes.state > 0 && sizes.disks > 0);
}

#[test]
fn nobody_else_can_read_a_snapshot() {
    let (_folder, store) = store();
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let snapshot = made(&store, "warm");
    assert_eq!(mode(store.folder()), 0o700);
    assert_eq!(mode(snapshot.folder()), 0o700);
    for name in names(snapshot.folder()) {
        assert_eq!(mode(&snapshot.folder().join(&name)), 0o600, "{name}");
    }
}

#[test]
fn bad_tags_and_taken_tags_are_refused() {
    let (_folder, store) = store();
    made(&store, "warm");
    for bad in ["", ".", "..", "a/b", "../warm", ".new-1", "-x", "a b", &"a".repeat(65)] {
        assert!(matches!(store.begin(bad), Err(Error::Invalid(_))), "{bad}");
        assert!(matches!(store.get(bad), Err(Error::Invalid(_))), "{bad}");
        assert!(matches!(store.remove(bad), Err(Error::Invalid(_))), "{bad}");
    }
    assert!(matches!(store.begin("warm"), Err(Error::Exists(_))));
    assert!(matches!(store.get("cold"), Err(Error::NotFound(_))));
    assert!(matches!(store.remove("cold"), Err(Error::NotFound(_))));
}

#[test]
fn of_two_drafts_with_one_tag_the_first_one_wins() {
    let (_folder, store) = store();
    let (first, second) = (draft(&store, "warm"), draft(&store, "warm"));
    let created = first.publish(facts()).unwrap();
    assert!(matches!(second.publish(facts()), Err(Error::Exists(_))));
    assert_eq!(names(store.folder()), ["warm"]);
    store.get("warm").unwrap().open().unwrap();
    assert_eq!(store.get("warm").unwrap().manifest(), created.manifest());
}

#[test]
fn a_dropped_draft_leaves_nothing() {
    let (_folder, store) = store();
    drop(draft(&store, "warm"));
    assert!(names(store.folder()).is_empty());
    let mut incomplete = store.begin("warm").unwrap();
    incomplete.create(STATE).unwrap();
    assert!(matches!(incomplete.publish(facts()), Err(Error::Invalid(_))));
    assert!(names(store.folder()).is_empty());
}

#[test]
fn a_draft_takes_only_the_files_a_snapshot_has_and_each_once() {
    let (folder, store) = store();
    let mut draft = store.begin("warm").unwrap();
    for bad in ["", "manifest.json", "../state", "disk.", "disk.00", "disk.99", "/etc/passwd"] {
        assert!(matches!(draft.create(bad), Err(Error::Invalid(_))), "{bad}");
    }
    draft.create(STATE).unwrap();
    assert!(matches!(draft.create(STATE), Err(Error::Invalid(_))));
    let file = nameless(folder.path());
    assert!(matches!(draft.adopt("../state", &file), Err(Error::Invalid(_))));
    assert!(matches!(draft.adopt(STATE, &file), Err(Error::Invalid(_))));
}

/// A file in `folder` without a name, which holds something.
fn nameless(folder: &std::path::Path) -> File {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let mut file = File::from(rustix::fs::open(folder, flags, Mode::from_raw_mode(0o600)).unwrap());
    file.write_all(b"blocks").unwrap();
    file
}

#[test]
fn an_adopted_file_stays_the_file_that_others_have_open() {
    let (folder, store) = store();
    let open = nameless(folder.path());
    let mut draft = store.begin("warm").unwrap();
    draft.create(STATE).unwrap();
    draft.create(MEMORY).unwrap();
    draft.adopt(&disk_name(0), &open).unwrap();
    let files = draft.publish(facts()).unwrap().open().unwrap();
    let inode = |file: &File| std::os::unix::fs::MetadataExt::ino(&file.metadata().unwrap());
    assert_eq!(inode(&files.disks[0].layers[0]), inode(&open));
}

#[test]
fn a_file_of_another_file_system_is_adopted_too() {
    let Ok(elsewhere) = tempfile::tempdir_in("/dev/shm") else {
        eprintln!("NOT RUN: no /dev/shm to adopt a file from");
        return;
    };
    let (_folder, store) = store();
    let layer = nameless(elsewhere.path());
    let mut draft = store.begin("warm").unwrap();
    draft.create(STATE).unwrap();
    draft.create(MEMORY).unwrap();
    draft.adopt(&disk_name(0), &layer).unwrap();
    draft.publish(facts()).unwrap().open().unwrap();
    assert_eq!(fs::read(store.folder().join("warm/disk.0")).unwrap(), b"blocks");
}

#[test]
fn a_crash_before_the_rename_leaves_the_old_state() {
    let (_folder, store) = store();
    made(&store, "old");
    // As far as a process can come before it is killed: everything but the rename.
    let begun = draft(&store, "new");
    fs::copy(store.folder().join("old").join(MANIFEST), begun.folder().join(MANIFEST)).unwrap();
    std::mem::forget(begun);
    fs::write(store.folder().join("a user's file"), "").unwrap();
    assert!(names(store.folder()).iter().any(|name| name.starts_with(".new-")));

    let store = Store::open(store.folder()).unwrap();
    assert_eq!(names(store.folder()), ["a user's file", "old"]);
    assert!(matches!(store.get("new"), Err(Error::NotFound(_))));
    store.get("old").unwrap().open().unwrap();
    made(&store, "new").open().unwrap();
}

#[test]
fn a_crash_after_the_rename_leaves_the_whole_snapshot() {
    let (_folder, store) = store();
    let begun = draft(&store, "new");
    let folder = begun.folder().to_owned();
    let snapshot = begun.publish(facts()).unwrap();
    // The draft's own name is gone: nothing that removes left-overs can hit what was published.
    assert!(!folder.exists());
    let again = Store::open(store.folder()).unwrap();
    assert_eq!(again.get("new").unwrap().manifest(), snapshot.manifest());
    again.get("new").unwrap().open().unwrap();
}

#[test]
fn a_crash_while_removing_is_finished_at_the_next_start() {
    let (_folder, store) = store();
    made(&store, "warm");
    let gone = store.folder().join(".gone-1-1");
    fs::rename(store.folder().join("warm"), &gone).unwrap();
    fs::remove_file(gone.join(MEMORY)).unwrap();
    assert!(matches!(store.get("warm"), Err(Error::NotFound(_))));
    assert!(store.list().unwrap().is_empty());
    Store::open(store.folder()).unwrap();
    assert!(names(store.folder()).is_empty());
}

#[test]
fn left_overs_that_are_links_are_not_followed() {
    let (folder, store) = store();
    let precious = folder.path().join("precious");
    fs::create_dir(&precious).unwrap();
    fs::write(precious.join("file"), "").unwrap();
    symlink(&precious, store.folder().join(".gone-link")).unwrap();
    symlink(&precious, store.folder().join("tag")).unwrap();
    Store::open(store.folder()).unwrap();
    assert!(matches!(store.get("tag"), Err(Error::Unusable(_))), "{:?}", store.get("tag"));
    store.remove("tag").unwrap();
    assert!(names(store.folder()).is_empty());
    assert!(precious.join("file").exists());
}

#[test]
fn who_has_a_snapshot_open_goes_on_when_it_is_removed() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm");
    let files = snapshot.open().unwrap();
    store.remove("warm").unwrap();
    assert!(names(store.folder()).is_empty());
    let mut byte = [0];
    files.memory.read_exact_at(&mut byte, 3 << 20).unwrap();
    assert_eq!(byte, [1]);
    // Another one under the same tag is not taken for it.
    made(&store, "warm");
    assert!(matches!(snapshot.open(), Err(Error::Unusable(_))));
}

#[test]
fn a_damaged_snapshot_is_listed_with_the_reason_and_hides_no_other() {
    let (_folder, store) = store();
    for tag in ["a", "b", "c"] {
        made(&store, tag);
    }
    fs::remove_file(store.folder().join("b").join(MEMORY)).unwrap();
    fs::write(store.folder().join("file"), "").unwrap();
    let list = store.list().unwrap();
    let tags: Vec<&str> = list.iter().map(|(tag, _)| tag.as_str()).collect();
    assert_eq!(tags, ["a", "b", "c", "file"]);
    assert!(list[0].1.is_ok() && list[2].1.is_ok());
    assert!(list[1].1.as_ref().unwrap_err().to_string().contains("memory is missing"));
    assert!(list[3].1.as_ref().unwrap_err().to_string().contains("not a folder"));
    store.remove("b").unwrap();
    store.remove("file").unwrap();
    assert_eq!(store.list().unwrap().len(), 2);
}

#[test]
fn every_kind_of_damage_is_told_with_the_name_of_the_file() {
    for name in [STATE, MEMORY, "disk.0"] {
        let message = damaged(|folder| fs::remove_file(folder.join(name)).unwrap());
        assert!(message.contains(&format!("{name} is missing")), "{message}");

        let resize = |folder: &Path, by: i64| {
            let file = File::options().write(true).open(folder.join(name)).unwrap();
            file.set_len(file.metadata().unwrap().len().checked_add_signed(by).unwrap()).unwrap();
        };
        let message = damaged(|folder| resize(folder, -1));
        assert!(message.contains(&format!("{name} is truncated")), "{message}");
        let message = damaged(|folder| resize(folder, 1));
        assert!(message.contains(&format!("{name} has grown")), "{message}");

        let message = damaged(|folder| {
            let file = File::options().read(true).write(true).open(folder.join(name)).unwrap();
            // One bit, in the last byte: in the memory's case in what was a hole.
            let last = file.metadata().unwrap().len() - 1;
            let mut byte = [0];
            file.read_exact_at(&mut byte, last).unwrap();
            file.write_all_at(&[byte[0] ^ 1], last).unwrap();
        });
        assert!(message.contains(&format!("{name} was edited or damaged")), "{message}");

        let message = damaged(|folder| {
            fs::rename(folder.join(name), folder.join("elsewhere")).unwrap();
            symlink("elsewhere", folder.join(name)).unwrap();
        });
        assert!(message.contains(&format!("{name} is a symbolic link")), "{message}");

        let message = damaged(|folder| {
            fs::remove_file(folder.join(name)).unwrap();
            fs::create_dir(folder.join(name)).unwrap();
        });
        assert!(message.contains(&format!("{name} is not a regular file")), "{message}");

        // A pipe nobody writes to: waiting for it would hang the daemon.
        let message = damaged(|folder| {
            fs::remove_file(folder.join(name)).unwrap();
            let mode = rustix::fs::Mode::RUSR;
            rustix::fs::mknodat(
                rustix::fs::CWD,
                folder.join(name),
                rustix::fs::FileType::Fifo,
                mode,
                rustix::fs::makedev(0, 0),
            )
            .unwrap();
        });
        assert!(message.contains(&format!("{name} is not a regular file")), "{message}");
    }
}

#[test]
fn a_damaged_manifest_is_told() {
    assert!(
        damaged(|folder| fs::remove_file(folder.join(MANIFEST)).unwrap())
            .contains("manifest.json is missing")
    );
    for bytes in [&b""[..], b"{", b"null", b"[]", b"\xff\xfe", &b"[".repeat(60_000)] {
        let message = damaged(|folder| fs::write(folder.join(MANIFEST), bytes).unwrap());
        assert!(message.contains("manifest.json cannot be understood"), "{message}");
    }
    let huge = damaged(|folder| {
        let file = File::create(folder.join(MANIFEST)).unwrap();
        file.set_len(1 << 40).unwrap();
    });
    assert!(huge.contains("more than 64 KiB"), "{huge}");
    let truncated = damaged(|folder| {
        let bytes = fs::read(folder.join(MANIFEST)).unwrap();
        fs::write(folder.join(MANIFEST), &bytes[..bytes.len() / 2]).unwrap();
    });
    assert!(truncated.contains("cannot be understood"), "{truncated}");
}

#[test]
fn the_version_is_looked_at_before_anything_else() {
    let message = with_manifest(|manifest| {
        *manifest = json!({"format": "forkd-snapshot", "version": 7, "layers": []});
    });
    assert!(message.contains("made by a newer forkd: version 7"), "{message}");
    assert!(with_manifest(|manifest| manifest["version"] = json!(0)).contains("version 0"));
    assert!(with_manifest(|manifest| manifest["format"] = json!("other")).contains("format"));
}

#[test]
fn hostile_manifests_name_no_file_outside() {
    for name in ["../../etc/passwd", "/etc/passwd", "disk.0/../../x", "manifest.json", "disk.1x", ""] {
        let message = with_manifest(|manifest| {
            let entry = manifest["files"]["state"].clone();
            manifest["files"][name] = entry;
        });
        assert!(message.contains("which no snapshot has"), "{message}");
    }
}

#[test]
fn hostile_manifests_are_refused_whatever_is_wrong() {
    type Edit = fn(&mut Value);
    let edits: &[(&str, Edit)] = &[
        ("unknown field", |m| m["surprise"] = json!(1)),
        ("unknown field", |m| m["facts"]["surprise"] = json!(1)),
        ("unknown field", |m| m["files"]["state"]["path"] = json!("/etc/passwd")),
        ("another tag", |m| m["tag"] = json!("../other")),
        ("invalid type", |m| m["files"] = json!([])),
        ("invalid type", |m| m["files"]["memory"]["size"] = json!("1")),
        ("invalid value", |m| m["files"]["memory"]["size"] = json!(-1)),
        ("bytes", |m| m["files"]["memory"]["size"] = json!(u64::MAX)),
        ("vCPUs", |m| m["facts"]["vcpus"] = json!(0)),
        ("vCPUs", |m| m["facts"]["vcpus"] = json!(255)),
        ("invalid value", |m| m["facts"]["vcpus"] = json!(256)),
        ("MiB", |m| m["facts"]["mem_size_mib"] = json!(0)),
        ("MiB", |m| m["facts"]["mem_size_mib"] = json!(u64::MAX)),
        ("no name of an image", |m| m["facts"]["image"]["name"] = json!("../../x")),
        ("no file \"state\"", |m| drop(m["files"].as_object_mut().unwrap().remove("state"))),
        ("gap", |m| {
            let entry = m["files"]["disk.0"].clone();
            m["files"]["disk.2"] = entry;
        }),
    ];
    for (expected, edit) in edits {
        let message = with_manifest(edit);
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn a_digest_that_was_edited_does_not_fit_either() {
    let message = damaged(|folder| {
        let path = folder.join(MANIFEST);
        let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        manifest["files"]["state"]["blake3"] = json!("");
        fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
    });
    assert!(message.contains("state was edited"), "{message}");
}

#[test]
fn an_image_that_was_built_again_is_noticed() {
    let (folder, store) = store();
    let disk = folder.path().join("disk.ext4");
    fs::write(&disk, b"image").unwrap();
    let image = |digest| BaseImage::of("python", digest, &File::open(&disk).unwrap()).unwrap();
    let then = image("d1");
    let snapshot = draft(&store, "warm").publish(Facts { image: Some(then.clone()), ..facts() }).unwrap();
    snapshot.check_image(&then).unwrap();
    store.get("warm").unwrap().check_image(&image("d1")).unwrap();
    let error = snapshot.check_image(&image("d2")).unwrap_err().to_string();
    assert!(error.contains("image python was built again"), "{error}");
    let touched = BaseImage { modified_ns: then.modified_ns + 1, ..then.clone() };
    assert!(snapshot.check_image(&touched).is_err());
    let other = BaseImage { name: "node".into(), ..then };
    assert!(snapshot.check_image(&other).unwrap_err().to_string().contains("over image python, not node"));
}

mod digests {
    use super::*;

    /// What is where in a file.
    type Data<'d> = &'d [(u64, &'d [u8])];

    fn file(folder: &TempDir, name: &str, len: u64, data: Data) -> File {
        let options = File::options().read(true).write(true).create(true).truncate(true).to_owned();
        let file = options.open(folder.path().join(name)).unwrap();
        file.set_len(len).unwrap();
        data.iter().for_each(|(at, bytes)| file.write_all_at(bytes, *at).unwrap());
        file
    }

    /// As the front page of `digest.rs` says it, slowly.
    fn by_the_book(bytes: &[u8]) -> String {
        let pages: Vec<(u64, &[u8])> =
            (0..).zip(bytes.chunks(4096)).filter(|(_, page)| page.iter().any(|byte| *byte != 0)).collect();
        let mut places = Vec::new();
        for run in pages.chunk_by(|a, b| a.0 + 1 == b.0) {
            places.extend(run[0].0.to_le_bytes());
            places.extend((run.len() as u64).to_le_bytes());
        }
        let contents: Vec<u8> = pages.iter().flat_map(|(_, page)| page.iter().copied()).collect();
        let mut whole = b"forkd sparse file 1".to_vec();
        whole.extend((bytes.len() as u64).to_le_bytes());
        whole.extend(blake3::hash(&places).as_bytes());
        whole.extend(blake3::hash(&contents).as_bytes());
        blake3::hash(&whole).to_hex().to_string()
    }

    #[test]
    fn are_what_the_format_says_wherever_the_holes_are() {
        let folder = tempfile::tempdir().unwrap();
        let long = vec![9; 3 << 20];
        let cases: &[(u64, Data)] = &[
            (0, &[]),
            (1, &[]),
            (1, &[(0, b"x")]),
            (4096, &[(4095, b"x")]),
            (4097, &[(4096, b"x")]),
            (10 << 20, &[(0, b"x"), (5 << 20, &long)]),
            (10 << 20, &[((1 << 20) - 1, b"xy"), ((10 << 20) - 1, b"z")]),
            ((10 << 20) + 5, &[(4096 * 3, &[1; 8192]), (4096 * 6, &[2; 10]), (10 << 20, b"end")]),
        ];
        for (len, data) in cases {
            let sparse = file(&folder, "sparse", *len, data);
            let bytes = fs::read(folder.path().join("sparse")).unwrap();
            let full = file(&folder, "full", 0, &[(0, &bytes)]);
            let expected = by_the_book(&bytes);
            assert_eq!(digest(&sparse, *len).unwrap(), expected, "{len}");
            assert_eq!(digest(&full, *len).unwrap(), expected, "{len}");
        }
    }

    #[test]
    fn differ_by_length_place_and_contents() {
        let folder = tempfile::tempdir().unwrap();
        let page = [1u8; 4096];
        let files: &[(u64, Data)] = &[
            (0, &[]),
            (4096, &[]),
            (8192, &[]),
            (8192, &[(0, &page)]),
            (8192, &[(4096, &page)]),
            (8192, &[(0, &page), (4096, &page)]),
            (12288, &[(0, &page), (8192, &page)]),
        ];
        let digests: std::collections::HashSet<String> =
            files.iter().map(|(len, data)| digest(&file(&folder, "f", *len, data), *len).unwrap()).collect();
        assert_eq!(digests.len(), files.len());
    }

    #[test]
    fn of_a_terabyte_of_nothing_take_no_time() {
        let folder = tempfile::tempdir().unwrap();
        let len = 1 << 40;
        let huge = file(&folder, "huge", len, &[(len - 1, b"x")]);
        let start = std::time::Instant::now();
        digest(&huge, len).unwrap();
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
    }

    #[test]
    fn of_a_file_that_shrinks_are_an_error_not_a_crash() {
        let folder = tempfile::tempdir().unwrap();
        let short = file(&folder, "short", 0, &[(0, b"short")]);
        assert!(digest(&short, 4096).is_err());
    }
}
