//! Conversations about chains of snapshots and about workspaces.

use std::collections::BTreeSet;
use std::sync::Mutex;

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;
use crate::snapshot;

#[test]
fn a_snapshot_is_told_with_its_chain_and_in_the_daemons_own_words() {
    let detail = json!({ "tag": "t", "dir": "/d", "created_at_unix": 1, "chain_depth": 2, "vmstate_bytes": 1,
        "memory_logical_bytes": 512 << 20, "memory_physical_bytes": 90 << 20, "ancestors": ["root", "mid"],
        "dependents": [], "layers": [] });
    let told = detail.clone();
    let daemon = FakeDaemon::start(move |line| match line {
        "GET /v1/snapshots/t/info" => (200, told.clone()),
        _ => (404, json!({ "error": "there is no snapshot u" })),
    });
    let said = daemon.run(&["snapshot-info", "t"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    for line in ["depth      2\n", "built on   root, mid\n", "needed by  no other\n", "90.0 MiB on disk"] {
        assert!(said.stdout.contains(line), "{line}: {said:?}");
    }
    assert_eq!(daemon.run(&["snapshot-info", "t", "--json"]).json(), detail);
    let gone = daemon.run(&["snapshot-info", "u"]);
    assert_eq!((gone.status, gone.stderr.as_str()), (Some(1), "forkd: there is no snapshot u\n"));
}

#[test]
fn a_chain_is_copied_into_one_snapshot() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/snapshots/a/compact" => (200, snapshot("ready", None)),
        _ => (409, json!({ "error": "t is there" })),
    });
    for args in
        [&["snapshot-compact", "a", "--to", "t"][..], &["snapshot-compact", "--from", "a", "--to", "t"]]
    {
        let said = daemon.run(args);
        assert_eq!(said.stdout, "t: ready, 1.0 MiB on disk, depends on no other\n", "{said:?}");
        assert_eq!(daemon.asked().last().unwrap().1, json!({ "to": "t" }));
    }
    assert_eq!(daemon.run(&["snapshot-compact", "a", "--to", "t", "--json"]).json()["dir"], "/d");
    let said = daemon.run(&["snapshot-compact", "b", "--to", "t"]);
    assert_eq!((said.status, said.stderr.as_str()), (Some(1), "forkd: t is there\n"));
}

/// A daemon with a chain: `b` is built on `a`, `c` on `b`; each can be removed when nothing needs it.
fn chained() -> FakeDaemon {
    let there = Mutex::new(BTreeSet::from(["a", "b", "c"]));
    FakeDaemon::start(move |line| {
        let mut there = there.lock().unwrap();
        if line == "GET /v1/snapshots" {
            let info = |tag: &&str| {
                let mut info = snapshot("ready", None);
                info["tag"] = json!(tag);
                info
            };
            return (200, there.iter().map(info).collect());
        }
        let rest = line.strip_prefix("DELETE /v1/snapshots/").unwrap();
        let (tag, query) = rest.split_once('?').unwrap_or((rest, ""));
        if !there.contains(tag) {
            return (404, json!({ "error": format!("there is no snapshot {tag}") }));
        }
        let needed = there.iter().any(|other| *other > tag);
        match query {
            "" if needed => return (409, json!({ "error": format!("others are built on {tag}") })),
            "cascade=true" => there.retain(|other| *other < tag),
            _ => there.retain(|other| *other != tag),
        }
        (204, Value::Null)
    })
}

#[test]
fn snapshots_built_on_each_other_are_removed_in_any_order() {
    let daemon = chained();
    let said = daemon.run(&["rmi", "a", "b", "c"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert_eq!(said.stderr, "forkd: removed c\nforkd: removed b\nforkd: removed a\n");
    let daemon = chained();
    let said = daemon.run(&["rmi", "a", "c"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(
        said.stderr.contains("removed c") && said.stderr.contains("a: others are built on a"),
        "{said:?}"
    );
}

#[test]
fn dependents_go_with_it_or_keep_what_they_need() {
    let daemon = chained();
    let said = daemon.run(&["rmi", "--cascade", "b", "c", "nobody"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.stderr.contains("removed b\nforkd: removed c\n"), "{said:?}");
    assert!(said.stderr.contains("nobody: there is no snapshot nobody"), "{said:?}");
    assert!(daemon.lines().contains(&"DELETE /v1/snapshots/b?cascade=true".to_owned()));
    let daemon = chained();
    let said = daemon.run(&["rmi", "--force", "a"]);
    assert_eq!((said.status, said.stderr.as_str()), (Some(0), "forkd: removed a\n"));
    assert_eq!(daemon.lines(), ["DELETE /v1/snapshots/a?force=true"]);
}

fn workspace(status: &str) -> Value {
    let running = status == "running";
    json!({ "id": "ws-1", "name": "w", "source_snapshot_tag": "numpy", "status": status, "created_at_unix": 1,
            "last_active_unix": 2, "live_sandbox_id": running.then_some("sb1"),
            "current_state_tag": (!running).then_some("ws-w-1") })
}

#[test]
fn a_workspace_is_made_put_away_taken_up_listed_and_removed() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/workspaces" => (201, workspace("running")),
        "GET /v1/workspaces" => (200, json!([workspace("running")])),
        "POST /v1/workspaces/w/suspend" => (200, workspace("suspended")),
        "POST /v1/workspaces/w/resume" => (200, workspace("running")),
        "DELETE /v1/workspaces/w" => (204, Value::Null),
        _ => (404, json!({ "error": "there is no workspace x" })),
    });
    let limited = ["workspace", "create", "w", "--snapshot", "numpy", "--memory-limit-mib", "64"];
    for (args, stdout, body) in [
        (&limited[..5], "w: running in sb1 (from numpy)\n", json!({ "name": "w", "snapshot_tag": "numpy" })),
        (
            &limited,
            "w: running in sb1 (from numpy)\n",
            json!({ "name": "w", "snapshot_tag": "numpy", "memory_limit_mib": 64 }),
        ),
        (
            &["workspace", "suspend", "w"],
            "w: suspended, kept as ws-w-1 (from numpy)\n",
            json!({ "diff": false }),
        ),
        (
            &["workspace", "suspend", "w", "--diff"],
            "w: suspended, kept as ws-w-1 (from numpy)\n",
            json!({ "diff": true }),
        ),
        (&["workspace", "resume", "w"], "w: running in sb1 (from numpy)\n", json!({})),
    ] {
        let said = daemon.run(args);
        assert_eq!(
            (said.status, said.stdout.as_str(), said.stderr.as_str()),
            (Some(0), stdout, ""),
            "{args:?}"
        );
        assert_eq!(daemon.asked().last().unwrap().1, body, "{args:?}");
    }
    assert_eq!(daemon.run(&["workspace", "resume", "w", "--json"]).json()["live_sandbox_id"], "sb1");
    for list in ["ls", "list"] {
        assert!(daemon.run(&["workspace", list]).stdout.contains("w     running  sb1"));
        assert_eq!(daemon.run(&["workspace", list, "--json"]).json(), json!([workspace("running")]));
    }
    let said = daemon.run(&["workspace", "rm", "x", "w"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(
        said.stderr.contains("removed w") && said.stderr.contains("x: there is no workspace"),
        "{said:?}"
    );
    assert_eq!(daemon.run(&["workspace", "delete", "w"]).status, Some(0));
}
