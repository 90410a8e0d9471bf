//! `forkd cp` out of a sandbox that lies.

use std::path::Path;

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;

fn entry(name: &str, kind: &str) -> Value {
    json!({ "name": name, "path": format!("/elsewhere/{name}"), "type": kind, "size": 1, "mode": 0o644,
            "permissions": "", "owner": "root", "group": "root", "modified_time": "" })
}

fn list(entries: &[Value]) -> (u16, Value) {
    (200, json!({ "entries": entries }))
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn a_guest_that_lies_about_names_writes_nothing_outside_of_the_destination() {
    let files = "GET /v1/sandboxes/sb1/files";
    let daemon = FakeDaemon::start(move |line| match line.strip_prefix(files).unwrap_or_default() {
        "/stat?path=/d" => (200, entry("d", "directory")),
        "/list?path=/d" => list(&[
            entry("..", "directory"),
            entry(".", "directory"),
            entry("", "file"),
            entry("../escaped", "file"),
            entry("/escaped", "file"),
            entry("good", "file"),
            entry("in", "directory"),
            entry("link", "symlink"),
            entry("pipe", "other"),
            entry("planted", "directory"),
        ]),
        "/list?path=/d/in" => list(&[entry("../../escaped", "file"), entry("also good", "file")]),
        "?path=/d/good" | "?path=/d/in/also%20good" => (200, json!("text")),
        _ => (404, json!({ "error": "no such file" })),
    });
    let here = tempfile::tempdir().unwrap();
    let out = here.path().join("out");
    std::fs::create_dir_all(out.join("d")).unwrap();
    std::fs::create_dir(here.path().join("beside")).unwrap();
    // A link that an earlier copy or another user left there is not followed either.
    std::os::unix::fs::symlink(here.path().join("beside"), out.join("d/planted")).unwrap();
    let said = daemon.run(&["cp", "-r", "--json", "sb1:/d", out.to_str().unwrap()]);
    assert_eq!(said.status, Some(1), "{said:?}");
    let told = said.json();
    assert_eq!(
        (&told["files"], &told["folders"], &told["bytes"]),
        (&json!(2), &json!(2), &json!(12)),
        "{told}"
    );
    assert_eq!(told["skipped"].as_array().unwrap().len(), 9, "{told}");
    assert_eq!(names(here.path()), ["beside", "out"]);
    assert_eq!(names(&out), ["d"]);
    assert_eq!(names(&out.join("d")), ["good", "in", "planted"]);
    assert_eq!(names(&out.join("d/in")), ["also good"]);
    assert!(names(&here.path().join("beside")).is_empty());
    assert!(!daemon.lines().iter().any(|line| line.contains("escaped")), "{:?}", daemon.lines());
}

#[test]
fn a_copy_that_cannot_be_says_why_and_leaves_nothing() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /v1/sandboxes/sb1/files/stat?path=/f&user=me" => (200, entry("f", "file")),
        "GET /v1/sandboxes/sb1/files/stat?path=/d" => (200, entry("d", "directory")),
        "GET /v1/sandboxes/sb1/files?path=/f&user=me" => (403, json!({ "error": "permission denied" })),
        _ => (404, json!({ "error": "no such file" })),
    });
    let here = tempfile::tempdir().unwrap();
    let out = here.path().join("out").to_str().unwrap().to_owned();
    for (args, status, why) in [
        (&["cp", "sb1:/f", &out, "--user", "me"][..], 1, "permission denied"),
        (&["cp", "sb1:/none", &out], 1, "there is no /none"),
        (&["cp", "sb1:/d", &out], 2, "-r"),
        (&["cp", "a", "b"], 2, "SANDBOX:/PATH"),
        (&["cp", "sb1:/a", "sb2:/b"], 2, "SANDBOX:/PATH"),
    ] {
        let said = daemon.run(args);
        assert_eq!(said.status, Some(status), "{said:?}");
        assert!(said.stderr.contains(why), "{said:?}");
    }
    assert!(names(here.path()).is_empty());
}
