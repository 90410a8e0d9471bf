//! Watchers, over HTTP and for real.

use std::{fs, os::unix::fs::symlink, thread, time::Duration};

use serde_json::{Value, json};

use super::*;
use crate::agent::tests::{Messages, TestAgent, basic, eventually};

fn call(agent: &TestAgent, method: &str, message: Value) -> Result<Value, Error> {
    agent.call(&format!("/filesystem.Filesystem/{method}"), message)
}

fn create(agent: &TestAgent, message: Value) -> String {
    call(agent, "CreateWatcher", message).unwrap()["watcherId"].as_str().unwrap().to_owned()
}

/// Fetches events as `name:TYPE` until `last` came.
fn fetch_until(agent: &TestAgent, id: &str, last: &str) -> Vec<String> {
    let mut all = Vec::new();
    for _ in 0..3000 {
        let events = call(agent, "GetWatcherEvents", json!({"watcherId": id})).unwrap();
        all.extend(events["events"].as_array().unwrap().iter().map(short));
        if all.iter().any(|event| event == last) {
            return all;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("no {last} among {all:?}");
}

fn short(event: &Value) -> String {
    let kind = event["type"].as_str().unwrap().strip_prefix("EVENT_TYPE_").unwrap();
    format!("{}:{kind}", event["name"].as_str().unwrap())
}

fn stream(agent: &TestAgent, headers: &[(&str, &str)], message: Value) -> Messages {
    agent.messages("/filesystem.Filesystem/WatchDir", headers, message)
}

#[test]
fn a_stream_begins_with_its_start_and_reports_what_happens_in_order() {
    let agent = TestAgent::new();
    let top = agent.path("top");
    fs::create_dir_all(top.join("below")).unwrap();
    let mut messages = stream(&agent, &[], json!({"path": top}));
    assert_eq!(messages.next(), Ok(json!({"start": {}})));
    fs::write(top.join("below/not watched"), "").unwrap();
    fs::write(top.join("a"), "").unwrap();
    fs::write(top.join("a"), "x").unwrap();
    fs::rename(top.join("a"), top.join("b")).unwrap();
    fs::set_permissions(top.join("b"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    fs::remove_file(top.join("b")).unwrap();
    let mut seen: Vec<String> = Vec::new();
    while seen.last().is_none_or(|last| last != "b:REMOVE") {
        seen.push(short(&messages.next().unwrap()["filesystem"]));
    }
    // The kernel joins writes that follow each other, or not.
    seen.dedup();
    assert_eq!(seen, ["a:CREATE", "a:WRITE", "a:RENAME", "b:CREATE", "b:CHMOD", "b:REMOVE"]);
    fs::remove_dir_all(&top).unwrap();
    loop {
        let event = short(&messages.next().unwrap()["filesystem"]);
        if event == ".:REMOVE" {
            break;
        }
    }
}

#[test]
fn an_idle_stream_is_kept_alive_and_ends_when_its_time_is_over() {
    let agent = TestAgent::new();
    let headers = [("keepalive-ping-interval", "1"), ("connect-timeout-ms", "2500")];
    let mut messages = stream(&agent, &headers, json!({"path": agent.folder.path()}));
    assert_eq!(messages.next(), Ok(json!({"start": {}})));
    assert_eq!(messages.next(), Ok(json!({"keepalive": {}})));
    loop {
        match messages.next() {
            Ok(message) => assert_eq!(message, json!({"keepalive": {}})),
            Err(error) => break assert_eq!(error.unwrap().code, Code::DeadlineExceeded),
        }
    }
}

#[test]
fn a_recursive_watcher_follows_what_is_made_and_moved() {
    let agent = TestAgent::new();
    let (top, outside) = (agent.path("top"), agent.path("outside"));
    fs::create_dir_all(top.join("a/b")).unwrap();
    fs::create_dir_all(outside.join("in")).unwrap();
    symlink(&outside, top.join("link")).unwrap();
    let id = create(&agent, json!({"path": top, "recursive": true}));
    fs::write(top.join("a/b/file"), "").unwrap();
    fs::write(outside.join("unseen"), "").unwrap();
    fetch_until(&agent, &id, "a/b/file:CREATE");

    // Made one after the other, faster than the watcher can follow.
    fs::create_dir_all(top.join("x/y/z")).unwrap();
    fs::write(top.join("x/y/z/file"), "").unwrap();
    let seen = fetch_until(&agent, &id, "x/y/z/file:CREATE");
    for wanted in ["x:CREATE", "x/y:CREATE", "x/y/z:CREATE", "x/y/z/file:CREATE"] {
        assert_eq!(seen.iter().filter(|event| *event == wanted).count(), 1, "{wanted} in {seen:?}");
    }

    fs::rename(top.join("x"), top.join("moved")).unwrap();
    fetch_until(&agent, &id, "moved:CREATE");
    fs::write(top.join("moved/y/z/again"), "").unwrap();
    fetch_until(&agent, &id, "moved/y/z/again:CREATE");
    fs::rename(top.join("moved"), outside.join("away")).unwrap();
    fetch_until(&agent, &id, "moved:RENAME");
    fs::rename(outside.join("in"), top.join("in")).unwrap();
    fetch_until(&agent, &id, "in:CREATE");
    fs::write(outside.join("away/y/z/unseen"), "").unwrap();
    fs::write(top.join("in/seen"), "").unwrap();
    let seen = fetch_until(&agent, &id, "in/seen:CREATE");
    assert!(!seen.iter().any(|event| event.contains("unseen")), "{seen:?}");
}

#[test]
fn an_upload_is_seen_as_a_write_and_its_draft_is_not() {
    let agent = TestAgent::new();
    let id = create(&agent, json!({"path": agent.folder.path(), "includeEntry": true}));
    let url = format!("/files?path={}", agent.path("file").display());
    let upload = |content: &[u8]| assert_eq!(agent.send("POST", &url, &[], content).status, 200);
    upload(b"1");
    upload(b"12");
    fs::write(agent.path("end"), "123").unwrap();
    let seen = fetch_until(&agent, &id, "end:WRITE");
    assert_eq!(seen, ["file:CREATE", "file:WRITE", "file:WRITE", "end:CREATE", "end:WRITE"]);
}

#[test]
fn events_have_the_entry_of_a_file_that_is_there() {
    let agent = TestAgent::new();
    let mut messages = stream(&agent, &[], json!({"path": agent.folder.path(), "includeEntry": true}));
    messages.next().unwrap();
    fs::create_dir(agent.path("new")).unwrap();
    let made = messages.next().unwrap()["filesystem"].clone();
    assert_eq!(made["entry"]["path"], json!(agent.path("new")));
    assert_eq!(made["entry"]["type"], "FILE_TYPE_DIRECTORY");
    fs::remove_dir(agent.path("new")).unwrap();
    let removed = messages.next().unwrap()["filesystem"].clone();
    assert_eq!((short(&removed).as_str(), &removed["entry"]), ("new:REMOVE", &Value::Null));
}

#[test]
fn what_cannot_be_watched_is_refused_for_the_right_reason() {
    let agent = TestAgent::new();
    fs::write(agent.path("file"), "").unwrap();
    fs::create_dir(agent.path("closed")).unwrap();
    fs::set_permissions(agent.path("closed"), std::os::unix::fs::PermissionsExt::from_mode(0o700)).unwrap();
    let as_nobody = [("authorization", &*basic("nobody"))];
    for (path, headers, code) in [
        (agent.path("none"), &[][..], Code::NotFound),
        (agent.path("file"), &[], Code::InvalidArgument),
        (agent.path("closed"), &as_nobody, Code::PermissionDenied),
    ] {
        let message = json!({"path": path});
        let created = agent.call_with("/filesystem.Filesystem/CreateWatcher", headers, message.clone());
        assert_eq!(created.unwrap_err().code, code);
        assert_eq!(stream(&agent, headers, message).next().unwrap_err().unwrap().code, code);
    }
    for method in ["GetWatcherEvents", "RemoveWatcher"] {
        assert_eq!(call(&agent, method, json!({"watcherId": "w9"})).unwrap_err().code, Code::NotFound);
    }
}

#[test]
fn there_are_so_many_watchers_and_a_removed_one_makes_place() {
    let agent = TestAgent::new();
    let message = json!({"path": agent.folder.path()});
    let mut messages = stream(&agent, &[], message.clone());
    messages.next().unwrap();
    let ids: Vec<String> = (1..MAX_WATCHERS).map(|_| create(&agent, message.clone())).collect();
    let code = |result: Result<Value, Error>| result.unwrap_err().code;
    assert_eq!(code(call(&agent, "CreateWatcher", message.clone())), Code::ResourceExhausted);
    let refused = stream(&agent, &[], message.clone()).next().unwrap_err().unwrap();
    assert_eq!(refused.code, Code::ResourceExhausted);
    assert_eq!(call(&agent, "RemoveWatcher", json!({"watcherId": ids[0]})).unwrap(), json!({}));
    assert_eq!(code(call(&agent, "RemoveWatcher", json!({"watcherId": ids[0]}))), Code::NotFound);
    create(&agent, message.clone());
    // A peer that left is noticed, over TCP at the second event, and its place is free.
    drop(messages);
    eventually("the end of a stream", || {
        fs::write(agent.path("file"), "x").unwrap();
        call(&agent, "CreateWatcher", message.clone()).is_ok()
    });
}

#[test]
fn a_client_that_does_not_fetch_costs_little_and_learns_of_its_loss() {
    let mut queue = EventQueue::default();
    let event = FilesystemEvent { name: "x".repeat(4096), ..FilesystemEvent::default() };
    for _ in 0..10_000 {
        queue.push(event.clone());
    }
    assert!(queue.size <= MAX_QUEUE && queue.events.is_empty());
    assert_eq!(queue.error.unwrap().code, Code::DataLoss);
}

#[test]
fn all_watchers_together_have_so_many_folders() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("top/a/b")).unwrap();
    let all = Arc::new(AtomicUsize::new(folders::MAX_FOLDERS - 2));
    let watch = |recursive| {
        Folders::watch(agent.path("top"), recursive, User::find("root").unwrap(), all.clone()).map(drop)
    };
    assert_eq!(watch(true).unwrap_err().code, Code::ResourceExhausted);
    watch(false).unwrap();
    let count = all.load(std::sync::atomic::Ordering::Relaxed);
    assert_eq!(count, folders::MAX_FOLDERS - 2, "what ended watches nothing");
}
