//! Tests: a client reads the replies of an older and of a newer daemon, and requests refuse unknown fields.

use std::fmt::Debug;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::stream::{ClientMessage, ExecStreamRequest, RunRequest, ServerEvent, TtySize};
use crate::*;

type Sandbox = SandboxInfo<String, String>;
type Node = TreeNode<String, String>;

fn read<T: DeserializeOwned>(reply: Value) -> T {
    serde_json::from_value(reply.clone()).unwrap_or_else(|error| panic!("{error}: {reply}"))
}

/// The shortest description of a sandbox.
fn sandbox(state: &str) -> Value {
    json!({ "id": "sb1", "state": state, "vcpus": 1, "mem_size_mib": 512, "created_at_unix": 1 })
}

/// The shortest description of a snapshot.
fn snapshot(status: &str) -> Value {
    json!({ "tag": "numpy", "status": status, "created_at_unix": 1, "mem_size_mib": 512 })
}

fn with(mut reply: Value, more: Value) -> Value {
    reply.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    reply
}

#[test]
fn a_sandbox_of_an_older_or_newer_daemon_is_read() {
    let older: SandboxInfo = read(sandbox("running"));
    assert_eq!((older.state, older.on_timeout), (SandboxState::Running, OnTimeout::Kill));
    assert_eq!((older.owner.as_str(), older.guest_addr.as_str(), older.network), ("", "", false));
    let newer = with(sandbox("migrating"), json!({ "on_timeout": "archive", "planet": { "name": "mars" } }));
    let newer: Sandbox = read(newer);
    assert_eq!((newer.state.as_str(), newer.on_timeout.as_str()), ("migrating", "archive"));
    let archived = json!({ "id": "sb1", "ended_at_unix": 2, "reason": "vanished", "detail": "It vanished.", "planet": 1 });
    assert_eq!(read::<ArchivedSandbox>(archived).created_at_unix, 0);
}

#[test]
fn a_spawn_reply_of_an_older_or_newer_daemon_is_read() {
    let older: SpawnReply = read(json!({ "children": [sandbox("running")] }));
    assert_eq!((older.children.len(), older.errors.len()), (1, 0));
    let newer: SpawnReply<Sandbox> = read(json!({
        "children": [sandbox("migrating")], "planet": 1,
        "errors": [{ "index": 1, "error": "no memory", "code": "no_such_code", "planet": 1 }],
    }));
    assert_eq!(newer.children[0].state, "migrating");
    assert_eq!((newer.errors[0].index, newer.errors[0].code.as_str()), (1, "no_such_code"));
    let error: SpawnError = read(json!({ "index": 0, "error": "no memory" }));
    assert_eq!((error.code.as_str(), error.request_id.as_str()), ("", ""));
}

#[test]
fn a_snapshot_of_an_older_or_newer_daemon_is_read() {
    let older: SnapshotInfo = read(snapshot("ready"));
    assert_eq!((older.status, older.size(), older.chain_depth), (SnapshotStatus::Ready, 0, 0));
    assert_eq!(older.kind, SnapshotKind::Full);
    let newer = json!({ "kind": "memory", "phase": "compressing", "planet": 1, "template": { "pid": 7, "planet": 1 } });
    let newer: SnapshotInfo<String> = read(with(snapshot("archived"), newer));
    assert_eq!((newer.status, newer.phase.as_deref()), (SnapshotStatus::Unknown, Some("compressing")));
    assert_eq!((newer.kind, newer.template.unwrap().children), (SnapshotKind::Unknown, 0));
    let detail: SnapshotInfoDetail = read(json!({
        "tag": "numpy", "dir": "/d", "chain_depth": 0, "memory_logical_bytes": 2, "memory_physical_bytes": 1,
        "vmstate_bytes": 1, "planet": 1,
    }));
    assert!(detail.layers.is_empty() && detail.ancestors.is_empty() && detail.dependents.is_empty());
}

#[test]
fn a_workspace_of_an_older_or_newer_daemon_is_read() {
    let least = |status: &str| json!({ "name": "alice", "source_snapshot_tag": "numpy", "status": status });
    let older: WorkspaceInfo = read(least("stale"));
    assert_eq!((older.status, older.last_active_unix), (WorkspaceStatus::Stale, 0));
    let newer: WorkspaceInfo<String> = read(with(least("archived"), json!({ "planet": 1 })));
    assert_eq!(newer.status, "archived");
}

#[test]
fn a_token_of_an_older_or_newer_daemon_is_read() {
    let least = |scope: &str| json!({ "name": "ci", "owner": "ann", "scope": scope });
    let older: TokenInfo = read(least("use"));
    assert_eq!((older.scope, older.max_sandboxes), (TokenScope::Write, None));
    assert_eq!(read::<TokenInfo>(least("write")).scope, TokenScope::Write);
    let newer: TokenInfo<String> = read(with(least("audit"), json!({ "planet": 1 })));
    assert_eq!(newer.scope, "audit");
}

#[test]
fn a_tree_of_an_older_or_newer_daemon_is_read() {
    let least = |kind: &str| json!({ "id": "x:1", "kind": kind, "name": "1" });
    let older: Tree = read(json!({ "nodes": [least("snapshot")] }));
    assert_eq!((older.nodes[0].kind, older.nodes[0].gone), (TreeKind::Snapshot, false));
    let newer = with(least("volume"), json!({ "how": "cloned", "planet": 1 }));
    let newer: Tree<Node> = read(json!({ "nodes": [newer], "planet": 1 }));
    assert_eq!((newer.nodes[0].kind.as_str(), newer.nodes[0].how.as_deref()), ("volume", Some("cloned")));
}

#[test]
fn an_event_of_an_older_or_newer_daemon_is_read() {
    let least = |kind: &str| json!({ "id": "k-1", "ts": "2026-01-31T12:34:56.789Z", "kind": kind });
    let older: Event = read(least("sandbox.ended"));
    assert_eq!((older.kind, older.about.sandbox), (EventKind::SandboxEnded, None));
    let newer: Event<String> =
        read(with(least("volume.mounted"), json!({ "sandbox": "sb1", "volume": "v1" })));
    assert_eq!((newer.kind.as_str(), newer.about.sandbox.as_deref()), ("volume.mounted", Some("sb1")));
    let stream: ServerEvent = read(json!({ "event": "started", "sandbox": "sb1", "pid": 7, "planet": 1 }));
    assert_eq!(stream, ServerEvent::Started { sandbox: "sb1".into(), pid: 7 });
}

/// What an older client reads is in the reply, and a reply with either name is read.
#[test]
fn a_renamed_field_of_a_reply_is_sent_under_both_names_and_read_under_either() {
    let sent = serde_json::to_value(Progress::new(7, 9, 3)).unwrap();
    assert_eq!(sent, json!({ "scanned_bytes": 7, "looked_at": 7, "total": 9, "written": 3 }));
    assert_eq!(read::<Progress>(sent).scanned_bytes, 7);
    for name in ["scanned_bytes", "looked_at"] {
        let one: Progress = read(json!({ name: 7, "total": 9, "written": 3, "planet": 1 }));
        assert_eq!((one.scanned_bytes, one.looked_at), (7, 7), "{name}");
    }
    let sent = serde_json::to_value(FileWritten::new("/a".into(), 1, true)).unwrap();
    assert_eq!(sent, json!({ "path": "/a", "size": 1, "atomic": true, "whole": true }));
    assert!(read::<FileWritten>(sent).atomic);
    for name in ["atomic", "whole"] {
        let one: FileWritten = read(json!({ "path": "/a", "size": 1, name: true, "planet": 1 }));
        assert!(one.atomic && one.whole, "{name}");
    }
}

#[test]
fn a_request_is_read_with_the_older_names() {
    for name in ["agent_port", "line_port"] {
        assert!(read::<CreateRequest>(json!({ name: true })).agent_port, "{name}");
    }
    for name in ["write", "use"] {
        assert_eq!(
            read::<TokenRequest>(json!({ "name": "ci", "scope": name })).scope,
            TokenScope::Write,
            "{name}"
        );
    }
    // An older daemon does not know `write`, but has it as its default.
    let sent = serde_json::to_value(TokenRequest { name: "ci".into(), ..Default::default() }).unwrap();
    assert_eq!(sent, json!({ "name": "ci" }));
    let sent = serde_json::to_value(TokenRequest { scope: TokenScope::Read, ..Default::default() }).unwrap();
    assert_eq!(sent["scope"], "read");
    let twice = serde_json::from_value::<CreateRequest>(json!({ "agent_port": true, "line_port": true }));
    assert!(twice.unwrap_err().to_string().contains("duplicate field"));
}

/// Checks that a request is read as it is, and refused with one more field.
fn refuses_unknown<T: Serialize + DeserializeOwned + Debug>(request: &T) {
    let plain = serde_json::to_value(request).unwrap();
    read::<T>(plain.clone());
    let error = serde_json::from_value::<T>(with(plain, json!({ "planet": 1 }))).unwrap_err();
    assert!(error.to_string().contains("unknown field `planet`"), "{error}");
}

#[test]
fn a_request_with_an_unknown_field_is_refused() {
    refuses_unknown(&CreateRequest::default());
    refuses_unknown(&UpdateRequest::default());
    refuses_unknown(&RollbackRequest::default());
    refuses_unknown(&SnapshotRequest::default());
    refuses_unknown(&OwnerRequest::default());
    refuses_unknown(&WorkspaceRequest::default());
    refuses_unknown(&SuspendRequest::default());
    refuses_unknown(&TokenRequest::default());
    refuses_unknown(&ExecRequest::default());
    refuses_unknown(&EvalRequest::default());
    refuses_unknown(&RunRequest::default());
    refuses_unknown(&ExecStreamRequest::default());
    refuses_unknown(&TtySize { cols: 80, rows: 24 });
    refuses_unknown(&ClientMessage::Signal { signal: "SIGINT".into() });
}

#[test]
fn a_request_with_an_unknown_word_is_refused() {
    let refused = |error: serde_json::Error| error.to_string().contains("unknown variant");
    let create = json!({ "on_timeout": "explode" });
    assert!(refused(serde_json::from_value::<CreateRequest>(create).unwrap_err()));
    let token = json!({ "name": "ci", "scope": "audit" });
    assert!(refused(serde_json::from_value::<TokenRequest>(token).unwrap_err()));
}

#[test]
fn progress_is_a_part_of_a_hundred_whatever_the_numbers() {
    let percent = |scanned, total| Progress::new(scanned, total, 0).percent();
    assert_eq!([percent(1, 2), percent(u64::MAX, 1), percent(7, 0)], [50, 100, 0]);
}
