//! Names, folders and facts.

use std::{fs, os::unix::fs::symlink};

use serde_json::{Value, json};

use super::*;
use crate::agent::tests::{TestAgent, basic};

fn call(agent: &TestAgent, method: &str, message: Value) -> Result<Value, Error> {
    agent.call(&format!("/filesystem.Filesystem/{method}"), message)
}

#[test]
fn a_file_is_described_as_ls_would() {
    let agent = TestAgent::new();
    let path = agent.path("file");
    fs::write(&path, "12345").unwrap();
    fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o4750)).unwrap();
    let entry = call(&agent, "Stat", json!({"path": path})).unwrap()["entry"].clone();
    assert_eq!(entry["name"], "file");
    assert_eq!(entry["type"], "FILE_TYPE_FILE");
    assert_eq!(entry["path"], json!(path));
    assert_eq!(entry["size"], 5);
    assert_eq!(entry["mode"], 0o4750);
    assert_eq!(entry["permissions"], "-rwsr-x---");
    assert_eq!((&entry["owner"], &entry["group"]), (&json!("root"), &json!("root")));
    assert!(entry["modifiedTime"].as_str().unwrap().ends_with('Z'));
    assert_eq!(call(&agent, "Stat", json!({"path": agent.path("none")})).unwrap_err().code, Code::NotFound);
}

#[test]
fn links_have_the_type_of_what_they_lead_to() {
    let agent = TestAgent::new();
    symlink("/etc", agent.path("folder")).unwrap();
    symlink("nowhere", agent.path("broken")).unwrap();
    let entry = |name| call(&agent, "Stat", json!({"path": agent.path(name)})).unwrap()["entry"].clone();
    assert_eq!(entry("folder")["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(entry("folder")["symlinkTarget"], "/etc");
    assert_eq!(entry("broken")["type"], "FILE_TYPE_SYMLINK");
    assert_eq!(
        (&entry("broken")["symlinkTarget"], &entry("broken")["isSymlink"]),
        (&json!("nowhere"), &json!(true))
    );

    // Clients of E2B compare with absolute paths.
    fs::write(agent.path("file"), "").unwrap();
    fs::set_permissions(agent.path("file"), std::os::unix::fs::PermissionsExt::from_mode(0o640)).unwrap();
    symlink("file", agent.path("first")).unwrap();
    symlink("first", agent.path("second")).unwrap();
    let headers = [(DEFAULT_USER_HEADER, "root")];
    let resolved = |name: &str| {
        let request = json!({"path": agent.path(name)});
        agent.call_with("/filesystem.Filesystem/Stat", &headers, request).unwrap()["entry"].clone()
    };
    let second = resolved("second");
    let file = fs::canonicalize(agent.path("file")).unwrap();
    assert_eq!((&second["symlinkTarget"], &second["isSymlink"]), (&json!(file), &json!(true)));
    assert_eq!((&second["type"], &second["mode"]), (&json!("FILE_TYPE_FILE"), &json!(0o640)));
    assert_eq!(resolved("broken")["symlinkTarget"], json!(agent.path("broken")));
    assert_eq!(resolved("file")["isSymlink"], Value::Null);
}

#[test]
fn folders_are_made_with_their_parents_once() {
    let agent = TestAgent::new();
    let path = agent.path("a/b/c");
    let entry = call(&agent, "MakeDir", json!({"path": path})).unwrap()["entry"].clone();
    assert_eq!(entry["type"], "FILE_TYPE_DIRECTORY");
    assert_eq!(call(&agent, "MakeDir", json!({"path": path})).unwrap_err().code, Code::AlreadyExists);
    fs::write(agent.path("file"), "").unwrap();
    let onto_file = call(&agent, "MakeDir", json!({"path": agent.path("file")}));
    assert_eq!(onto_file.unwrap_err().code, Code::InvalidArgument);
    let below_file = call(&agent, "MakeDir", json!({"path": agent.path("file/x")}));
    assert_eq!(below_file.unwrap_err().code, Code::InvalidArgument);
}

#[test]
fn a_listing_goes_as_deep_as_it_is_asked_to() {
    let agent = TestAgent::new();
    let top = agent.path("top");
    fs::create_dir_all(top.join("a/b/c")).unwrap();
    fs::write(top.join("a/file"), "").unwrap();
    symlink(&top, top.join("again")).unwrap();
    let names = |depth: u32| -> Vec<String> {
        let list = call(&agent, "ListDir", json!({"path": top, "depth": depth})).unwrap();
        let prefix = format!("{}/", top.display());
        list["entries"]
            .as_array()
            .unwrap()
            .iter()
            .map(|entry| entry["path"].as_str().unwrap().trim_start_matches(&prefix).to_string())
            .collect()
    };
    assert_eq!(names(0), ["a", "again"]);
    assert_eq!(names(1), ["a", "again"]);
    assert_eq!(names(2), ["a", "a/b", "a/file", "again"]);
    assert_eq!(names(u32::MAX), ["a", "a/b", "a/b/c", "a/file", "again"]);
    let of = |path| call(&agent, "ListDir", json!({"path": path})).unwrap_err().code;
    assert_eq!(of(top.join("none")), Code::NotFound);
    assert_eq!(of(top.join("a/file")), Code::InvalidArgument);
}

#[test]
fn a_folder_with_too_many_entries_is_refused_and_not_swallowed() {
    let agent = TestAgent::new();
    for n in 0..=MAX_ENTRIES {
        fs::write(agent.path(&n.to_string()), "").unwrap();
    }
    let error = call(&agent, "ListDir", json!({"path": agent.folder.path()})).unwrap_err();
    assert_eq!(error.code, Code::OutOfRange);
}

#[test]
fn moving_renames_and_makes_room() {
    let agent = TestAgent::new();
    fs::write(agent.path("from"), "x").unwrap();
    let request = json!({"source": agent.path("from"), "destination": agent.path("new/place")});
    assert_eq!(call(&agent, "Move", request.clone()).unwrap()["entry"]["name"], "place");
    assert_eq!(fs::read(agent.path("new/place")).unwrap(), b"x");
    assert_eq!(call(&agent, "Move", request).unwrap_err().code, Code::NotFound);
}

#[test]
fn removing_takes_all_below_and_nothing_beside() {
    let agent = TestAgent::new();
    let (top, kept) = (agent.path("top"), agent.path("kept"));
    fs::create_dir_all(top.join("a/b")).unwrap();
    fs::create_dir(&kept).unwrap();
    fs::write(kept.join("file"), "").unwrap();
    fs::write(top.join("a/file"), "").unwrap();
    symlink(&kept, top.join("a/b/link")).unwrap();
    assert_eq!(call(&agent, "Remove", json!({"path": top})).unwrap(), json!({}));
    assert!(!top.exists());
    assert!(kept.join("file").exists(), "links are removed, not followed");
    assert_eq!(call(&agent, "Remove", json!({"path": top})).unwrap(), json!({}), "what is gone is gone");
    for path in ["/", "/.."] {
        assert_eq!(call(&agent, "Remove", json!({"path": path})).unwrap_err().code, Code::InvalidArgument);
    }
}

#[test]
fn a_folder_nested_without_end_is_refused_before_the_stack_is() {
    let agent = TestAgent::new();
    let top = agent.path("top");
    // Longer than any path: only step by step.
    fs::create_dir(&top).unwrap();
    let mut folder = open_folder(None, &top).unwrap();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&folder, "x", Mode::from_raw_mode(0o755)).unwrap();
        folder = open_folder(Some(folder.as_fd()), "x").unwrap();
    }
    let error = call(&agent, "Remove", json!({"path": top})).unwrap_err();
    assert_eq!(error.code, Code::FailedPrecondition);
    assert!(error.message.contains("rm -rf"), "{}", error.message);
    call(&agent, "ListDir", json!({"path": top, "depth": 10_000})).unwrap();
    assert_eq!(agent.sh(&format!("rm -rf {}", top.display())).code(), 0);
}

#[test]
fn a_user_can_do_what_it_may_and_no_more() {
    let agent = TestAgent::new();
    fs::create_dir(agent.path("closed")).unwrap();
    fs::set_permissions(agent.path("closed"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    fs::write(agent.path("closed/file"), "").unwrap();
    let as_nobody = |method: &str, message: Value| {
        let headers = [("authorization", &*basic("nobody"))];
        agent.call_with(&format!("/filesystem.Filesystem/{method}"), &headers, message).unwrap_err().code
    };
    let path = agent.path("closed/file");
    assert_eq!(as_nobody("Stat", json!({"path": path})), Code::PermissionDenied);
    assert_eq!(as_nobody("Remove", json!({"path": path})), Code::PermissionDenied);
    assert_eq!(as_nobody("ListDir", json!({"path": agent.path("closed")})), Code::PermissionDenied);
    assert_eq!(as_nobody("MakeDir", json!({"path": agent.path("new")})), Code::PermissionDenied);
    assert!(path.exists());
}

#[test]
fn times_are_written_as_the_calendar_has_them() {
    assert_eq!(rfc3339(0, 0), "1970-01-01T00:00:00.000000000Z");
    assert_eq!(rfc3339(951_782_399, 5), "2000-02-28T23:59:59.000000005Z");
    assert_eq!(rfc3339(951_782_400, 0), "2000-02-29T00:00:00.000000000Z");
    assert_eq!(rfc3339(1_794_723_318, 0), "2026-11-15T06:15:18.000000000Z");
    assert_eq!(rfc3339(-1, 0), "1969-12-31T23:59:59.000000000Z");
    assert!(rfc3339(i64::MAX, i64::MAX).starts_with("9999-12-31"));
    assert!(rfc3339(i64::MIN, i64::MIN).starts_with("0001-01-01"));
}

#[test]
fn removing_one_takes_a_file_a_link_or_an_empty_folder_and_nothing_below() {
    let agent = TestAgent::new();
    fs::create_dir(agent.path("full")).unwrap();
    fs::write(agent.path("full/file"), "").unwrap();
    symlink("full", agent.path("link")).unwrap();
    let remove = |name: &str| call(&agent, "RemoveOne", json!({"path": agent.path(name)}));
    assert_eq!(remove("full").unwrap_err().code, Code::FailedPrecondition);
    remove("link").unwrap();
    assert!(agent.path("full/file").exists());
    remove("full/file").unwrap();
    remove("full").unwrap();
    assert_eq!(remove("full").unwrap_err().code, Code::NotFound);
}
