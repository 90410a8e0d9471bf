//! Manifests: damaged, hostile, and of each version.

use super::*;
use crate::manifest::{DISK, FULL, OLDEST};
use serde_json::json;

/// The error text after `damage` to the manifest of a snapshot over another one.
fn damaged(damage: impl FnOnce(&Snapshot)) -> String {
    let (_folder, store) = quick_store();
    let parent = made(&store, "parent", 1);
    let snapshot = over(&store, &parent, "warm", 2);
    damage(&snapshot);
    let before = layers(&store);
    let error = store.get("warm").and_then(|snapshot| snapshot.open()).unwrap_err();
    assert!(matches!(error, Error::Unusable { .. }), "{error:?}");
    let message = error.to_string();
    assert!(message.contains("forkd rmi warm"), "no way out: {message}");
    assert!(message.contains(MANIFEST), "which file? {message}");
    store.get("parent").unwrap().open().unwrap();
    // Nothing it may have used is lost, whatever is collected.
    let store = Store::open(store.folder()).unwrap();
    store.collect().unwrap();
    if !message.contains("older forkd") {
        assert_eq!(layers(&store), before);
    }
    store.remove("warm").unwrap();
    assert_tidy(&store);
    message
}

fn with_manifest(edit: impl FnOnce(&mut Value)) -> String {
    damaged(|snapshot| edit_manifest(snapshot, edit))
}

fn with_bytes(bytes: &[u8]) -> String {
    damaged(|snapshot| fs::write(snapshot.folder().join(MANIFEST), bytes).unwrap())
}

#[test]
fn a_damaged_manifest_is_told() {
    let missing = damaged(|snapshot| fs::remove_file(snapshot.folder().join(MANIFEST)).unwrap());
    assert!(missing.contains("manifest.json is missing"), "{missing}");
    for bytes in [&b""[..], b"{", b"null", b"[]", b"\xff\xfe", &b"[".repeat(60_000)] {
        let message = with_bytes(bytes);
        assert!(message.contains("manifest.json cannot be understood"), "{message}");
    }
    let huge = damaged(|snapshot| {
        let file = File::create(snapshot.folder().join(MANIFEST)).unwrap();
        file.set_len(1 << 40).unwrap();
    });
    assert!(huge.contains("more than 256 KiB"), "{huge}");
    let truncated = damaged(|snapshot| {
        let path = snapshot.folder().join(MANIFEST);
        let bytes = fs::read(&path).unwrap();
        fs::write(path, &bytes[..bytes.len() / 2]).unwrap();
    });
    assert!(truncated.contains("cannot be understood"), "{truncated}");
}

#[test]
fn the_version_is_looked_at_before_anything_else() {
    let message = with_manifest(|manifest| {
        *manifest = json!({"format": "forkd-snapshot", "version": 7, "parts": []});
    });
    assert!(message.contains("made by a newer forkd: version 7"), "{message}");
    assert!(with_manifest(|manifest| manifest["version"] = json!(0)).contains("version 0"));
    assert!(with_manifest(|manifest| manifest["format"] = json!("other")).contains("format"));
}

#[test]
fn a_snapshot_of_the_former_layout_is_to_be_made_again() {
    let old = json!({"format": "forkd-snapshot", "version": 1, "tag": "warm", "files": {}});
    let message = with_manifest(|manifest| *manifest = old);
    assert!(message.contains("the layout has changed") && message.contains("make it again"), "{message}");
}

#[test]
fn hostile_manifests_name_no_file_outside() {
    let upper = "A".repeat(64);
    for name in ["../../etc/passwd", "/etc/passwd", "", ".", &"a".repeat(63), &upper, &"../".repeat(22)[..64]]
    {
        type Place = fn(&mut Value) -> &mut Value;
        let places: [Place; 3] = [
            |m| &mut m["memory"][0]["blake3"],
            |m| &mut m["disks"][0][1]["blake3"],
            |m| &mut m["state"]["blake3"],
        ];
        for place in places {
            let message = with_manifest(|manifest| *place(manifest) = json!(name));
            assert!(message.contains("is no digest"), "{message}");
        }
    }
}

#[test]
fn hostile_manifests_are_refused_whatever_is_wrong() {
    type Edit = fn(&mut Value);
    fn copies(value: &mut Value, count: usize) {
        let first = value[0].clone();
        *value = json!(vec![first; count]);
    }
    let edits: &[(&str, Edit)] = &[
        ("unknown field", |m| m["surprise"] = json!(1)),
        ("unknown field", |m| m["facts"]["surprise"] = json!(1)),
        ("unknown field", |m| m["state"]["path"] = json!("/etc/passwd")),
        ("unknown field", |m| m["measured"]["surprise"] = json!(1)),
        ("another tag", |m| m["tag"] = json!("../other")),
        ("another tag", |m| m["tag"] = json!("parent")),
        ("invalid type", |m| m["memory"] = json!({})),
        ("invalid type", |m| m["memory"][0]["size"] = json!("1")),
        ("invalid value", |m| m["memory"][0]["size"] = json!(-1)),
        ("bytes", |m| m["memory"][0]["size"] = json!(u64::MAX)),
        ("vCPUs", |m| m["facts"]["vcpus"] = json!(0)),
        ("vCPUs", |m| m["facts"]["vcpus"] = json!(255)),
        ("invalid value", |m| m["facts"]["vcpus"] = json!(256)),
        ("MiB", |m| m["facts"]["mem_size_mib"] = json!(0)),
        ("MiB", |m| m["facts"]["mem_size_mib"] = json!(u64::MAX)),
        ("no name of an image", |m| m["facts"]["image"]["name"] = json!("../../x")),
        ("missing field", |m| drop(m.as_object_mut().unwrap().remove("state"))),
        ("no memory", |m| m["memory"] = json!([])),
        ("1 memory layers and a parent", |m| copies(&mut m["memory"], 1)),
        ("33 memory layers", |m| copies(&mut m["memory"], 33)),
        ("no parent", |m| m["parent"] = json!(null)),
        ("not the last", |m| m["ancestors"] = json!([])),
        ("no ancestor", |m| m["ancestors"][0]["tag"] = json!("../x")),
        ("no ancestor", |m| m["ancestors"][0]["id"] = json!("short")),
        ("ancestors", |m| copies(&mut m["ancestors"], 129)),
        ("17 disks", |m| copies(&mut m["disks"], 17)),
        ("65 layers", |m| copies(&mut m["disks"][0], 65)),
        ("its own", |m| m["own_disk_layers"] = json!([])),
        ("its own", |m| m["own_disk_layers"] = json!([3])),
        ("branched from", |m| m["branched_from"] = json!("a\u{1b}[2J")),
        ("no mode", |m| m["measured"]["mode"] = json!("half")),
        ("unknown variant", |m| m["kind"] = json!("half")),
        ("of its kind", |m| m["kind"] = json!("disk")),
        ("of its kind", |m| m["version"] = json!(3)),
        ("disks alone", |m| (m["kind"], m["version"]) = (json!("disk"), json!(3))),
        ("disks alone", |m| {
            (m["kind"], m["version"], m["parent"]) = (json!("disk"), json!(3), json!(null));
            m["memory"] = json!([]);
            (m["disks"], m["own_disk_layers"]) = (json!([]), json!([]));
        }),
    ];
    for (expected, edit) in edits {
        let message = with_manifest(edit);
        assert!(message.contains(expected), "{expected}: {message}");
    }
}

#[test]
fn a_digest_that_was_edited_does_not_fit_either() {
    let (_folder, store) = store();
    let snapshot = made(&store, "warm", 1);
    let state = snapshot.manifest().state.blake3.clone();
    edit_manifest(&snapshot, |manifest| manifest["state"]["blake3"] = json!("0".repeat(64)));
    let error = store.get("warm").unwrap().open().unwrap_err().to_string();
    assert!(error.contains("state was edited"), "{error}");
    // That of a layer which there is, but which is another one's.
    edit_manifest(&snapshot, |manifest| {
        manifest["state"]["blake3"] = json!(state);
        manifest["memory"][0]["blake3"] = manifest["disks"][0][0]["blake3"].clone();
    });
    let error = store.get("warm").unwrap_err().to_string();
    assert!(error.contains("is truncated"), "{error}");
}

#[test]
fn a_manifest_with_any_byte_changed_is_refused_or_harmless() {
    let (_folder, store) = store();
    let snapshot = over(&store, &made(&store, "parent", 1), "warm", 2);
    let path = snapshot.folder().join(MANIFEST);
    let whole = fs::read(&path).unwrap();
    let before = layers(&store);
    for at in 0..whole.len() {
        for bit in [0, 3, 6] {
            let mut bytes = whole.clone();
            bytes[at] ^= 1 << bit;
            fs::write(&path, &bytes).unwrap();
            match store.get("warm") {
                Ok(changed) => assert_ne!(changed.id(), snapshot.id()),
                Err(error) => assert!(matches!(error, Error::Unusable { .. }), "{error:?}"),
            }
        }
    }
    fs::write(&path, &whole).unwrap();
    assert_eq!(layers(&store), before);
    assert_eq!(store.get("warm").unwrap().id(), snapshot.id());
}

#[test]
fn a_manifest_is_written_as_in_its_golden_file() {
    for (version, kind) in [(FULL, SnapshotKind::Full), (DISK, SnapshotKind::Disk)] {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(format!("tests/golden/manifest.v{version}.json"));
        let golden = fs::read(path).unwrap();
        let manifest = Manifest::parse(&golden, "numpy").unwrap();
        assert_eq!(manifest.kind, kind);
        let value = |bytes: &[u8]| serde_json::from_slice::<Value>(bytes).unwrap();
        assert_eq!(value(&manifest.bytes().unwrap()), value(&golden), "add the line, or mend the format");
    }
}

/// Old examples stay in `tests/golden`, and each is read as long as its version is.
#[test]
fn the_manifest_of_every_version_since_the_oldest_is_read() {
    let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let mut versions = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let Some(version) = name.strip_prefix("manifest.v").and_then(|name| name.strip_suffix(".json"))
        else {
            continue;
        };
        let manifest =
            Manifest::parse(&fs::read(&path).unwrap(), "numpy").unwrap_or_else(|why| panic!("{name}: {why}"));
        assert_eq!(manifest.version.to_string(), version, "{name}");
        assert!(!manifest.made_by_version.is_empty(), "{name}");
        versions.push(manifest.version);
    }
    versions.sort_unstable();
    assert_eq!(versions, (OLDEST..=VERSION).collect::<Vec<_>>(), "one example of each version");
}
