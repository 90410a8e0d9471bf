//! Forks of running sandboxes by a real daemon, with guests of a few instructions.

use std::collections::BTreeSet;

use crate::auth::{Client, add, raw};
use crate::branches::{Branching, start};
use crate::daemon::{Daemon, eventually, launch, parent, pid, runs};
use crate::support::{id, route};
use serde_json::{Value, json};

trait Forking {
    fn fork(&self, sandbox: &Value, body: Value) -> Vec<Value>;
    fn template_ends(&self, template: i32);
}

impl Forking for Daemon {
    /// Forks a running sandbox.
    fn fork(&self, sandbox: &Value, body: Value) -> Vec<Value> {
        let children = self.done(201, "POST", &route(sandbox, "fork"), Some(body));
        children.as_array().unwrap().clone()
    }

    fn template_ends(&self, template: i32) {
        eventually("the end of the template", || !runs(template));
    }
}

fn tags(daemon: &Daemon) -> Vec<String> {
    let list = daemon.done(200, "GET", "/v1/snapshots", None);
    list.as_array().unwrap().iter().map(|it| it["tag"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn children_of_a_fork_begin_at_one_instant_and_go_on_by_themselves() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let source = daemon.spawn("tiny", 1).remove(0);
    eventually("some letters", || daemon.printed(&id(&source)).lines().count() > 3);
    let children = daemon.fork(&source, json!({"n": 6, "labels": {"job": "7"}, "timeout_secs": 3000}));
    assert_eq!(children.len(), 6);
    let letters: BTreeSet<char> = children.iter().map(|child| daemon.first_letter(&id(child))).collect();
    assert_eq!(letters.len(), 1, "one capture has one instant: {letters:?}");
    for child in &children {
        assert_eq!((&child["state"], &child["forked_from"]), (&json!("running"), &source["id"]), "{child}");
        assert_eq!((&child["snapshot_tag"], &child["labels"]["job"]), (&Value::Null, &json!("7")));
        assert!(child["ready_ms"].as_f64().unwrap() > 0.0 && child["expires_at_unix"].is_u64(), "{child}");
        eventually("more letters", || daemon.printed(&id(child)).lines().count() > 3);
    }
    let before = daemon.printed(&id(&source)).lines().count();
    eventually("the source to go on", || daemon.printed(&id(&source)).lines().count() > before);
    let stats = daemon.done(200, "GET", &route(&source, "stats"), None);
    let pauses = stats["pauses"].as_array().unwrap();
    assert_eq!((pauses.len(), &pauses[0]["why"]), (1, &json!("fork")), "{stats}");
    let templates: BTreeSet<i32> = children.iter().map(|child| parent(pid(child))).collect();
    assert_eq!(templates.len(), 1, "they share a template");

    let tree = daemon.done(200, "GET", "/v1/tree", None);
    let nodes = tree["nodes"].as_array().unwrap();
    let forked = nodes.iter().filter(|node| node["how"] == "fork");
    let parent_node = json!(format!("sandbox:{}", id(&source)));
    assert_eq!(forked.filter(|node| node["parent"] == parent_node).count(), 6, "{tree}");
    let each = format!("{}?results=each&wait=false", route(&source, "fork"));
    let each = daemon.done(201, "POST", &each, None);
    assert_eq!((each["children"].as_array().unwrap().len(), &each["errors"]), (1, &json!([])), "{each}");
}

#[test]
fn a_fork_leaves_no_trace_in_lists_on_disk_or_in_the_database() {
    let Some(daemon) = start() else { return };
    daemon.done(200, "POST", "/v1/snapshots/root/owner", Some(json!({"owner": "*"})));
    let ann = add(&daemon, json!({"name": "ann"}));
    let source = ann.done(201, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "root"})))[0].clone();
    let before = (daemon.left("snapshots"), daemon.left("templates"));
    let children = ann.done(201, "POST", &route(&source, "fork"), Some(json!({"n": 2})));
    assert_eq!(daemon.console(&children[0]), "2");
    assert_eq!(children[1]["owner"], "ann");
    let again = daemon.fork(&children[1], json!({})).remove(0);
    assert_eq!((daemon.console(&again), &again["owner"]), ("3".into(), &json!("ann")));
    assert_eq!((&again["forked_from"], daemon.console(&source)), (&children[1]["id"], "1".into()));
    assert_eq!(tags(&daemon), ["root"]);
    assert_eq!((daemon.left("snapshots"), daemon.left("templates")), (before.0, before.1 + 2));
    let database = rusqlite::Connection::open(daemon.path().join("forkd.db")).unwrap();
    let owners: u64 =
        database.query_row("SELECT count(*) FROM snapshot_owners", (), |row| row.get(0)).unwrap();
    assert_eq!(owners, 1, "that of root");
    let events = daemon.log();
    assert!(!events.contains("branch is on disk"), "{events}");
    let info = daemon.sandbox(&id(&source));
    assert_eq!((&info["branch_count"], &info["has_branched"]), (&json!(0), &json!(false)), "{info}");
    daemon.gone();
}

#[test]
fn a_daemon_that_is_killed_right_after_a_fork_leaves_the_children_and_their_template() {
    let Some(mut daemon) = start() else { return };
    let source = daemon.spawn("root", 1).remove(0);
    let children = daemon.fork(&source, json!({"n": 3}));
    daemon.kill();
    let template = parent(pid(&children[0]));
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    assert!(runs(template));
    assert_eq!(tags(&daemon), ["root"]);
    for child in &children {
        let now = daemon.sandbox(&id(child));
        assert_eq!((&now["state"], &now["pid"]), (&json!("running"), &child["pid"]), "{now}");
        assert_eq!(now["forked_from"], source["id"]);
    }
    // The source ends, and so do all children but one.
    for ended in [&source, &children[0], &children[1]] {
        daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(ended)), None);
    }
    eventually("their ends", || [&source, &children[0], &children[1]].iter().all(|it| !runs(pid(it))));
    assert!(runs(template) && runs(pid(&children[2])));
    assert_eq!(daemon.sandbox(&id(&children[2]))["state"], "running");
    // A fork of an adopted child.
    let again = daemon.fork(&children[2], json!({})).remove(0);
    assert_eq!(daemon.console(&again), "3");
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&children[2])), None);
    daemon.template_ends(template);
    daemon.gone();
}

#[test]
fn children_outlive_their_source_and_their_branches_are_complete() {
    let Some(daemon) = start() else { return };
    let source = daemon.spawn("root", 1).remove(0);
    let children = daemon.fork(&source, json!({"n": 4}));
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&source)), None);
    eventually("the end of the source", || !runs(pid(&source)));
    let child = &children[0];
    daemon.refused(409, "no_rollback_target", "POST", &route(child, "rollback"), None);
    let diff = daemon.branch(child, json!({"tag": "diff", "mode": "diff"}));
    assert_eq!((&diff["parent_tag"], &diff["chain_depth"]), (&Value::Null, &json!(0)), "{diff}");
    daemon.branch(child, json!({"tag": "live", "mode": "live", "wait": false}));
    daemon.branch(child, json!({"tag": "full"}));
    daemon.becomes_ready("live");
    let bad = json!({"tag": "x", "mode": "diff", "parent_tag": "root"});
    daemon.refused(400, "invalid_request", "POST", &route(child, "branch"), Some(bad));
    // Pause and resume, and a fork of a paused sandbox.
    daemon.done(200, "POST", &route(child, "pause"), None);
    let of_paused = daemon.fork(child, json!({})).remove(0);
    assert_eq!((daemon.console(&of_paused), &of_paused["state"]), ("3".into(), &json!("running")));
    assert_eq!(daemon.sandbox(&id(child))["state"], "paused");
    daemon.done(200, "POST", &route(child, "resume"), None);
    // Now it has a branch to go back to.
    daemon.done(200, "POST", &route(child, "rollback"), None);
    assert_eq!(daemon.console(child), "3");
    let suspend = json!({"timeout_secs": 1, "on_timeout": "suspend", "suspend_as": "kept"});
    daemon.done(200, "PATCH", &format!("/v1/sandboxes/{}", id(&children[1])), Some(suspend));
    eventually("the end of the suspended one", || !runs(pid(&children[1])));
    daemon.becomes_ready("kept");

    // Nothing but the branches is left, and each is all there is to know.
    let template = parent(pid(&children[2]));
    daemon.delete_all();
    daemon.template_ends(template);
    daemon.done(204, "DELETE", "/v1/snapshots/root", None);
    for tag in ["diff", "live", "full", "kept"] {
        daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None);
        assert_eq!(daemon.console(&daemon.one(tag)), "3", "{tag}");
    }
    daemon.gone();
}

#[test]
fn bad_forks_are_refused_and_change_nothing() {
    let Some(daemon) = start() else { return };
    daemon.done(200, "POST", "/v1/snapshots/root/owner", Some(json!({"owner": "*"})));
    let ann = add(&daemon, json!({"name": "ann", "max_snapshots": 1, "max_sandboxes": 4}));
    let bob = add(&daemon, json!({"name": "bob"}));
    let reader = add(&daemon, json!({"name": "reader", "owner": "ann", "scope": "read"}));
    let source = ann.done(201, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "root"})))[0].clone();
    let fork = route(&source, "fork");
    for body in [
        json!({"n": 0}),
        json!({"n": 1001}),
        json!({"snapshot_tag": "root"}),
        json!({"timeout_secs": 0}),
        json!({"memory_limit_mib": 0}),
        json!({"env": {"A=": "x"}}),
        json!({"labels": {"a b": "x"}}),
    ] {
        ann.refused(400, "invalid_request", "POST", &fork, Some(body));
    }
    ann.refused(400, "invalid_request", "POST", &format!("{fork}?results=some"), None);
    ann.refused(404, "sandbox_not_found", "POST", "/v1/sandboxes/sbnone/fork", None);
    bob.refused(404, "sandbox_not_found", "POST", &fork, None);
    assert_eq!(reader.ask("POST", &fork, None).0, 403);
    ann.refused(429, "quota_exceeded", "POST", &fork, Some(json!({"n": 4})));
    let stats = daemon.done(200, "GET", &route(&source, "stats"), None);
    assert_eq!(stats["pauses"], json!([]), "the source was not paused for any of these");

    let first = with_key(&ann, &fork);
    assert_eq!(first, with_key(&ann, &fork), "a repetition is not done again");
    ann.refused(429, "quota_exceeded", "POST", &fork, None);
    let branch = json!({"tag": "b", "mode": "live", "wait": false});
    ann.refused(429, "quota_exceeded", "POST", &route(&source, "branch"), Some(branch.clone()));
    assert_eq!(ann.done(200, "GET", "/v1/sandboxes", None).as_array().unwrap().len(), 2);
    ann.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&first)), None);
    eventually("room for a branch", || {
        ann.ask("POST", &route(&source, "branch"), Some(branch.clone())).0 == 202
    });
    daemon.becomes_ready("b");
    ann.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&source)), None);
    ann.refused(404, "sandbox_not_found", "POST", &fork, None);
}

/// Forks one child with an idempotency key.
fn with_key(client: &Client, path: &str) -> Value {
    let Client { address, token } = client;
    let request = format!(
        "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n\
         Idempotency-Key: once\r\nContent-Length: 0\r\n\r\n"
    );
    let answer = raw(address, request.as_bytes());
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").unwrap();
    serde_json::from_str::<Value>(body).unwrap()[0].clone()
}
