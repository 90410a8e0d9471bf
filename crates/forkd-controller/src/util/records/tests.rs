//! Golden files: one example of every record on disk, in every version that this daemon reads. They prove that a
//! code change keeps the format. A new field gets a line in the newest example. A new version gets a new example
//! beside the old one.

use std::os::fd::AsFd;
use std::path::PathBuf;

use super::*;
use crate::host::process::{self, ProcessId};
use crate::sandbox::{End, SandboxRecord};
use crate::snapshot::template;
use crate::workspace;

fn golden(name: &str, version: u32) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let path = folder.join(format!("{name}.v{version}.json"));
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn value(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap()
}

/// The newest example is written back as it was read, and the older ones are read as the same record.
fn is_golden<T: VersionedRecord>(name: &str) {
    let newest = value(&golden(name, T::VERSION));
    for version in 0..=T::VERSION {
        let record: T = parse(&golden(name, version)).unwrap_or_else(|why| panic!("{name} {version}: {why}"));
        let written = value(&to_vec(&record).unwrap());
        assert_eq!(written, newest, "{name} version {version}: add the line, or mend the format");
    }
}

#[test]
fn every_record_is_written_as_in_its_golden_file_and_every_version_is_read() {
    is_golden::<SandboxRecord>("sandbox");
    // With a field that most sandboxes do not have.
    let e2b = golden("sandbox-e2b", SandboxRecord::VERSION);
    assert_eq!(value(&to_vec(&parse::<SandboxRecord>(&e2b).unwrap()).unwrap()), value(&e2b));
    is_golden::<template::TemplateRecord>("template-saved");
    is_golden::<template::TemplateRecord>("template-unsaved");
    is_golden::<template::TemplateRecord>("template-forgotten");
    is_golden::<ProcessId>("process");
    is_golden::<End>("end");
    // A monitor writes it itself, without the code above.
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join(ProcessId::FILE);
    let file = std::fs::File::create(&path).unwrap();
    process::record_self("0f8fad5b-d9cb-469f-a165-70867728950e", file.as_fd()).unwrap();
    let own = value(&std::fs::read(path).unwrap());
    let names = |record: &Value| record.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(&own), names(&value(&golden("process", ProcessId::VERSION))));
    assert_eq!(own["version"], ProcessId::VERSION);
    let workspace = golden("workspace", workspace::VERSION);
    assert_eq!(value(&workspace::read_and_write(&workspace, "box")), value(&workspace));
}

#[test]
fn a_record_is_missing_or_unreadable_or_read_and_never_half_written() {
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(read::<End>(folder.path()), Found::Missing);
    let end = End::new("panicked", "so it was", String::new());
    write(&end, folder.path()).unwrap();
    assert_eq!(read(folder.path()), Found::Read(end.clone()));
    let path = folder.path().join(End::FILE);
    let whole = std::fs::read(&path).unwrap();
    for length in 0..whole.len() {
        // An interrupted write leaves its file under another name.
        std::fs::write(folder.path().join("end.json.new"), &whole[..length]).unwrap();
        assert_eq!(read(folder.path()), Found::Read(end.clone()));
        assert!(parse::<End>(&whole[..length]).is_err(), "{length}");
    }
    let unreadable =
        || matches!(read::<End>(folder.path()), Found::Unreadable(why) if why.contains("end.json"));
    for text in ["", "null", "[]", "7", "\0", r#"{"version":1}"#, r#"{"version":"1"}"#, r#"{"version":-1}"#] {
        std::fs::write(&path, text).unwrap();
        assert!(unreadable(), "{text}");
    }
    let newer = |version: u64| {
        let mut record = value(&whole);
        record["version"] = version.into();
        record.to_string()
    };
    std::fs::write(&path, newer(u64::from(End::VERSION) + 1)).unwrap();
    assert!(unreadable());
    std::fs::write(&path, newer(u64::MAX)).unwrap();
    assert!(unreadable());
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(unreadable(), "a folder");
}
