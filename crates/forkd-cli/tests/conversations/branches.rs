//! Conversations about branches: taking them, layers on layers, going back, and the tree.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;
use crate::{child, interrupt_after, snapshot};

/// A branch, as the daemon describes it.
fn branch(status: &str) -> Value {
    let mut branch = snapshot(status, None);
    let more = json!({ "parent_tag": "numpy", "chain_depth": 1, "branched_from": "sb1", "mode": "live",
                       "pause_ms": 2.5, "frozen_ms": 6.0, "quiesced": true });
    branch.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    if status == "ready" {
        branch["bytes_written"] = json!(3 << 20);
        branch["diff_ms"] = json!(40.0);
    }
    branch
}

const BRANCH: &str = "POST /v1/sandboxes/sb1/branch";
const POLL: &str = "GET /v1/snapshots/t";

#[test]
fn a_branch_is_taken_without_waiting_and_then_followed_until_it_is_on_disk() {
    let polls = AtomicUsize::new(0);
    let daemon = FakeDaemon::start(move |line| match line {
        BRANCH => (202, branch("writing")),
        POLL if polls.fetch_add(1, Ordering::Relaxed) == 0 => (200, branch("writing")),
        POLL => (200, branch("ready")),
        _ => (404, Value::Null),
    });
    let said = daemon.run(&["branch", "sb1", "--tag", "t"]);
    assert_eq!((said.status, said.stderr.as_str()), (Some(0), ""), "{said:?}");
    let expected = "\
tag      t
stored   over numpy, depth 1
pause    2.5 ms
frozen   6.0 ms
written  3.0 MiB in 40.0 ms\n";
    assert_eq!(said.stdout, expected);
    assert_eq!(daemon.lines(), [BRANCH, POLL, POLL]);
    assert_eq!(daemon.asked()[0].1, json!({ "mode": "live", "tag": "t", "wait": false }));
    assert_eq!(daemon.run(&["branch", "sb1", "--json"]).json(), branch("ready"));
    assert_eq!(daemon.asked()[3].1, json!({ "mode": "live", "wait": false }));
}

#[test]
fn who_does_not_wait_gets_the_first_answer() {
    let daemon = FakeDaemon::start(|_| (202, branch("writing")));
    let said = daemon.run(&["branch", "sb1", "--no-wait"]);
    assert_eq!(said.status, Some(0));
    assert!(said.stdout.starts_with("tag      t\n") && said.stdout.contains("written  not yet"), "{said:?}");
    assert_eq!(daemon.lines(), [BRANCH]);
    for mode in ["full", "diff"] {
        let said = daemon.run(&["branch", "sb1", "--no-wait", "--mode", mode]);
        assert_eq!(said.status, Some(2), "{said:?}");
        assert!(said.stderr.contains("--no-wait needs --mode live"), "{said:?}");
    }
    assert_eq!(daemon.lines(), [BRANCH]);
}

#[test]
fn the_other_modes_are_answered_when_they_are_on_disk() {
    let daemon = FakeDaemon::start(|_| (201, branch("ready")));
    for mode in ["full", "diff"] {
        let said = daemon.run(&["branch", "sb1", "--mode", mode]);
        assert_eq!(said.status, Some(0), "{said:?}");
        assert_eq!(daemon.asked().last().unwrap().1, json!({ "mode": mode }));
    }
    assert_eq!(daemon.lines(), [BRANCH; 2]);
}

#[test]
fn a_branch_that_is_refused_or_cannot_be_saved_says_why_and_fails() {
    let refusing = FakeDaemon::start(|_| (409, json!({ "error": "t is there: forkd rmi t" })));
    let failing = FakeDaemon::start(|line| {
        let mut failed = branch("failed");
        failed["error"] = json!("no space left");
        if line == BRANCH { (202, branch("writing")) } else { (200, failed) }
    });
    let vanishing =
        FakeDaemon::start(|line| if line == BRANCH { (202, branch("writing")) } else { (404, Value::Null) });
    for (daemon, why) in [
        (refusing, "t is there: forkd rmi t"),
        (failing, "branch t could not be saved: no space left. Remove it with `forkd rmi t`"),
        (vanishing, "branch t was removed while it was saved"),
    ] {
        let said = daemon.run(&["branch", "sb1", "--tag", "t"]);
        assert_eq!((said.status, said.stdout.as_str()), (Some(1), ""), "{said:?}");
        assert!(said.stderr.contains(why), "{said:?}");
        assert!(!daemon.lines().iter().any(|line| line.starts_with("DELETE")), "{:?}", daemon.lines());
    }
}

#[test]
fn an_interrupt_ends_the_waiting_and_leaves_the_branch() {
    let daemon = FakeDaemon::start(|_| (202, branch("writing")));
    let command = daemon.forkd(&["branch", "sb1", "--tag", "t"]).spawn().unwrap();
    let said = interrupt_after(&daemon, command, POLL);
    assert_eq!(said.status, Some(130), "{said:?}");
    assert!(said.stderr.contains("forkd images"), "{said:?}");
    assert!(!daemon.lines().iter().any(|line| line.starts_with("DELETE")), "{:?}", daemon.lines());
}

const LOOK: &str = "GET /v1/snapshots/b";
const SPAWN: &str = "POST /v1/sandboxes?results=each";
const EXEC: &str = "POST /v1/sandboxes/sb1/exec";
const END: &str = "DELETE /v1/sandboxes/sb1";
const LAYER: &[&str] = &["snapshot-diff", "--from", "a", "--tag", "b", "--exec", "pip install x && true"];

/// A daemon with a snapshot `a`, in whose children commands end with `status`.
fn layering(status: i32) -> FakeDaemon {
    FakeDaemon::start(move |line| match line {
        SPAWN => (201, json!({ "children": [child("sb1")], "errors": [] })),
        EXEC => {
            (200, json!({ "stdout": "out\n", "stderr": "err\n", "exit_code": status, "timed_out": false }))
        }
        BRANCH => (201, branch("ready")),
        END => (204, Value::Null),
        _ => (404, json!({ "error": "no such thing" })),
    })
}

#[test]
fn a_layer_is_what_a_command_changed_in_a_child_that_ends_afterwards() {
    let daemon = layering(0);
    let said = daemon.run(LAYER);
    assert_eq!((said.status, said.stderr.as_str()), (Some(0), "err\n"), "{said:?}");
    assert!(said.stdout.starts_with("out\ntag      t\nstored   over numpy"), "{said:?}");
    assert_eq!(daemon.lines(), [LOOK, SPAWN, EXEC, BRANCH, END]);
    let asked = daemon.asked();
    assert_eq!((&asked[1].1["snapshot_tag"], &asked[1].1["n"]), (&json!("a"), &json!(1)));
    assert!(asked[1].1["timeout_secs"].as_u64() > Some(600), "it would outlive a killed command: {asked:?}");
    assert_eq!(asked[2].1["args"], json!(["sh", "-c", "pip install x && true"]));
    assert_eq!(asked[2].1["timeout_secs"], 600);
    assert_eq!(asked[3].1, json!({ "mode": "diff", "tag": "b" }));
    let told = daemon.run(&[LAYER, &["--json", "--exec-timeout-secs", "5"]].concat());
    assert_eq!((told.json(), told.stderr.as_str()), (branch("ready"), "out\nerr\n"));
    assert_eq!(daemon.asked()[7].1["timeout_secs"], 5);
}

#[test]
fn a_command_that_fails_makes_no_layer_and_leaves_no_child() {
    let daemon = layering(3);
    let said = daemon.run(LAYER);
    assert_eq!((said.status, said.stdout.as_str()), (Some(1), "out\n"), "{said:?}");
    assert!(said.stderr.contains("the command ended with status 3: snapshot b was not created"), "{said:?}");
    assert_eq!(daemon.lines(), [LOOK, SPAWN, EXEC, END]);
}

#[test]
fn a_layer_that_cannot_be_stored_leaves_no_child_either() {
    let daemon = FakeDaemon::start(|line| match line {
        SPAWN => (201, json!({ "children": [child("sb1")], "errors": [] })),
        EXEC => (200, json!({ "stdout": "", "stderr": "", "exit_code": 0, "timed_out": false })),
        BRANCH => (503, json!({ "error": "too many branches at once" })),
        END => (204, Value::Null),
        _ => (404, Value::Null),
    });
    let said = daemon.run(LAYER);
    assert_eq!((said.status, said.stderr.as_str()), (Some(1), "forkd: too many branches at once\n"));
    assert_eq!(daemon.lines().last().unwrap(), END);
}

#[test]
fn a_tag_that_is_taken_is_refused_before_anything_is_done() {
    let daemon = FakeDaemon::start(|_| (200, snapshot("ready", None)));
    let said = daemon.run(LAYER);
    assert_eq!(said.status, Some(1));
    assert!(said.stderr.contains("snapshot b exists") && said.stderr.contains("forkd rmi b"), "{said:?}");
    assert_eq!(daemon.lines(), [LOOK]);
}

#[test]
fn an_interrupted_layer_ends_its_child() {
    let daemon = FakeDaemon::start(|line| match line {
        SPAWN => (201, json!({ "children": [child("sb1")], "errors": [] })),
        EXEC => {
            std::thread::sleep(std::time::Duration::from_secs(60));
            (500, Value::Null)
        }
        END => (204, Value::Null),
        _ => (404, Value::Null),
    });
    let command = daemon.forkd(LAYER).spawn().unwrap();
    let said = interrupt_after(&daemon, command, EXEC);
    assert_eq!(said.status, Some(130), "{said:?}");
    assert_eq!(daemon.lines(), [LOOK, SPAWN, EXEC, END]);
}

#[test]
fn a_sandbox_goes_back_where_it_is_told_or_where_the_daemon_finds_right() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/sandboxes/sb1/rollback" => {
            let mut back = child("sb1");
            back["rolled_back_to"] = json!("before");
            (200, back)
        }
        _ => (404, json!({ "error": "there is no sandbox sb2" })),
    });
    let said = daemon.run(&["rollback", "sb1", "--to", "before"]);
    assert_eq!((said.status, said.stdout.as_str()), (Some(0), "sb1: back at before, running\n"));
    assert_eq!(daemon.run(&["rollback", "sb1", "--json"]).json()["rolled_back_to"], "before");
    assert_eq!(daemon.asked()[0].1, json!({ "to": "before" }));
    assert_eq!(daemon.asked()[1].1, json!({}));
    let gone = daemon.run(&["rollback", "sb2"]);
    assert_eq!((gone.status, gone.stderr.as_str()), (Some(1), "forkd: there is no sandbox sb2\n"));
}

#[test]
fn sandboxes_stand_still_and_go_on_and_those_that_cannot_are_named() {
    let daemon = FakeDaemon::start(|line| match line.contains("sb9") {
        true => (404, json!({ "error": "there is no sandbox sb9" })),
        false => (200, child("sb1")),
    });
    for (verb, done) in [("pause", "paused sb1"), ("resume", "resumed sb1")] {
        let said = daemon.run(&[verb, "sb9", "sb1"]);
        assert_eq!(said.status, Some(1), "{said:?}");
        assert!(said.stderr.contains(done) && said.stderr.contains("no sandbox sb9"), "{said:?}");
        assert_eq!(daemon.run(&[verb, "sb1"]).status, Some(0));
        assert!(daemon.lines().contains(&format!("POST /v1/sandboxes/sb1/{verb}")));
    }
}

/// A small tree with an untrusted name, and a cycle.
fn tree() -> Value {
    json!({ "nodes": [
        { "id": "snapshot:numpy", "kind": "snapshot", "name": "numpy", "state": "ready", "gone": false,
          "created_at_unix": 1 },
        { "id": "sandbox:sb1", "kind": "sandbox", "name": "sb1", "parent": "snapshot:numpy", "state": "ended",
          "gone": true, "created_at_unix": 2, "how": "spawn" },
        { "id": "snapshot:t", "kind": "snapshot", "name": "t", "parent": "sandbox:sb1", "state": "ready",
          "gone": false, "created_at_unix": 3, "how": "branch" },
        { "id": "a", "kind": "snapshot", "name": "<b>\u{1b}[2J", "parent": "b", "state": "ready", "gone": false,
          "created_at_unix": 4 },
        { "id": "b", "kind": "snapshot", "name": "\"]", "parent": "a", "state": "ready", "gone": false,
          "created_at_unix": 5 },
    ]})
}

#[test]
fn the_tree_is_shown_as_text_in_the_letters_of_the_locale() {
    let daemon = FakeDaemon::start(|_| (200, tree()));
    let run = |locale: &str| daemon.forkd(&["tree"]).env("LC_ALL", locale).output().unwrap().into();
    let said: crate::fake_daemon::Said = run("C.UTF-8");
    let expected = "\
numpy  [snapshot, ready]
└── sb1  [gone]
    └── t  [branch, ready]
<b>[2J  [snapshot, ready]
└── \"]  [snapshot, ready]\n";
    assert_eq!((said.status, said.stdout.as_str()), (Some(0), expected));
    let plain: crate::fake_daemon::Said = run("C");
    assert_eq!(plain.stdout, expected.replace("└──", "`--"));
    assert_eq!(daemon.lines(), ["GET /v1/tree"; 2]);
}

#[test]
fn the_tree_is_drawn_for_programs_and_into_files() {
    let daemon = FakeDaemon::start(|_| (200, tree()));
    assert_eq!(daemon.run(&["tree", "--json"]).json(), tree());
    let dot = daemon.run(&["tree", "--dot"]);
    assert!(dot.stdout.starts_with("digraph forkd {") && dot.stdout.contains(r#"label="\"]\n"#), "{dot:?}");
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("tree.svg");
    let said = daemon.run(&["tree", "--svg", file.to_str().unwrap()]);
    assert_eq!((said.status, said.stdout.as_str()), (Some(0), ""), "{said:?}");
    let drawn = std::fs::read_to_string(&file).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("&lt;b&gt;"), "{drawn}");
    assert_eq!(daemon.run(&["tree", "--svg", "-"]).stdout, drawn);
    let nowhere = daemon.run(&["tree", "--svg", "/nowhere/tree.svg"]);
    assert_eq!(nowhere.status, Some(1));
    assert!(nowhere.stderr.contains("cannot write /nowhere/tree.svg"), "{nowhere:?}");
}

#[test]
fn an_answer_that_is_no_tree_is_an_error_and_an_empty_one_a_hint() {
    let daemon = FakeDaemon::start(|_| (200, json!({ "nodes": "many" })));
    let said = daemon.run(&["tree"]);
    assert_eq!(said.status, Some(1));
    assert!(said.stderr.contains("cannot parse"), "{said:?}");
    let empty = FakeDaemon::start(|_| (200, json!({ "nodes": [] }))).run(&["tree"]);
    assert_eq!((empty.status, empty.stdout.as_str()), (Some(0), ""));
    assert!(empty.stderr.contains("forkd snapshot"), "{empty:?}");
}
