//! Branches natively: a guest that writes through all its memory is branched, and every child of every branch
//! finds its memory to be of one instant before it reports ready (`pattern`).

use std::collections::BTreeSet;
use std::time::Duration;

use forkd_tests::{eventually, test_name};
use serde_json::{Value, json};

use crate::fanout::{can_run, census, descriptors};
use crate::pattern::{self, check, child, daemon_with_pattern, delete_all, error, find, store_is_tidy};

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|item| item.as_str().unwrap().to_owned()).collect()
}

#[test]
fn every_way_to_branch_gives_children_of_one_instant_and_leaves_nothing_behind() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_pattern(&[]);
    // Once through everything, so that what is made once and kept is there.
    let source = child(&daemon, pattern::TAG);
    daemon.branch(&source, json!({"tag": "first", "mode": "live"}));
    daemon.delete(&[source]);
    assert_eq!(daemon.delete_snapshot("first", "").status, 204);
    eventually("the first to be gone", || (daemon.templates().len() == 1).then_some(()));
    let (before, fds) = (census(&daemon), descriptors(&daemon));

    let source = child(&daemon, pattern::TAG);
    let mut tags = Vec::new();
    for (body, status, mode, depth) in [
        (json!({}), 201, "full", 0),
        (json!({"mode": "full", "live_fork": true}), 201, "full", 0),
        (json!({"mode": "diff"}), 201, "diff", 1),
        (json!({"diff": true, "parent_tag": pattern::TAG}), 201, "diff", 1),
        (json!({"mode": "live"}), 201, "live", 1),
        (json!({"mode": "live", "wait": false}), 202, "live", 1),
        (json!({"live": true, "wait": false}), 202, "live", 1),
    ] {
        let response = daemon.try_branch(&source, body.clone());
        assert_eq!(response.status, status, "{body}: {response:?}\n{}", daemon.log());
        let info = response.json();
        let tag = info["tag"].as_str().unwrap().to_owned();
        assert!(tag.starts_with(&format!("branch-{source}-")), "{info}");
        assert_eq!((&info["mode"], &info["quiesced"]), (&json!(mode), &json!(false)), "{info}");
        assert_eq!(info["branched_from"], json!(source), "{info}");
        assert!(info["pause_ms"].is_number() && info["frozen_ms"].is_null(), "{info}");
        let known = info["status"].as_str().unwrap();
        assert!(known == "ready" || (known == "writing" && status == 202), "{info}");
        // At once, whether or not a byte of it is on the disk; then from the disk.
        check(&daemon, &tag);
        let info = daemon.when_ready(&tag);
        assert_eq!(info["chain_depth"], depth, "{info}");
        assert!(info["bytes_written"].as_u64().unwrap() > 0 && info["diff_ms"].is_number(), "{info}");
        daemon.unload(&tag);
        check(&daemon, &tag);
        tags.push(tag);
    }
    assert_eq!(tags.iter().collect::<BTreeSet<_>>().len(), tags.len());
    assert_eq!(daemon.sandbox(&source)["branch_count"], tags.len());

    for (id, body, status, code) in [
        (source.as_str(), json!({"mode": "diff", "live": true}), 400, "invalid_request"),
        (&source, json!({"diff": true, "live": true}), 400, "invalid_request"),
        (&source, json!({"mode": "sideways"}), 400, "invalid_request"),
        (&source, json!({"mode": "diff", "wait": false}), 400, "invalid_request"),
        (&source, json!({"wait": false}), 400, "invalid_request"),
        (&source, json!({"mode": "diff", "parent_tag": "somebody"}), 400, "invalid_request"),
        (&source, json!({"mode": "live", "tag": "../x"}), 400, "invalid_request"),
        (&source, json!({"mode": "live", "tag": pattern::TAG}), 409, "tag_taken"),
        ("sbnobody", json!({"mode": "live"}), 404, "sandbox_not_found"),
    ] {
        let response = daemon.try_branch(id, body.clone());
        assert_eq!(
            (response.status, &response.json()["code"]),
            (status, &json!(code)),
            "{body}: {response:?}"
        );
    }
    daemon.delete(&[source]);
    delete_all(&daemon, &tags);
    eventually("everything to go", || {
        let left: Vec<_> = census(&daemon).difference(&before).cloned().collect();
        (left.is_empty() && daemon.templates().len() == 1 && descriptors(&daemon) <= fds).then_some(())
    });
    store_is_tidy(&daemon);
}

#[test]
fn a_chain_is_whole_at_every_depth_and_no_name_can_go_that_another_needs() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_pattern(&[]);
    // Each one is branched while the ones below it may still be written.
    let mut tags = vec![pattern::TAG.to_owned()];
    for depth in 1..=8 {
        let source = child(&daemon, tags.last().unwrap());
        let tag = format!("depth-{depth}");
        daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
        daemon.delete(&[source]);
        tags.push(tag);
    }
    for (depth, tag) in tags.iter().enumerate() {
        let info = daemon.when_ready(tag);
        assert_eq!(info["chain_depth"], depth, "{info}");
    }
    tags.iter().for_each(|tag| daemon.unload(tag));
    for tag in [&tags[8], &tags[4], &tags[1]] {
        check(&daemon, tag);
    }
    let info = daemon.snapshot_info(&tags[8]);
    assert_eq!(strings(&info["ancestors"]), tags[..8], "{info}");
    assert_eq!(info["parent_tag"], json!(tags[7]), "{info}");
    assert_eq!(info["dependents"], json!([]), "{info}");
    let memory = info["layers"].as_array().unwrap().iter().filter(|layer| layer["kind"] == "memory").count();
    assert_eq!(memory, 9, "{info}");
    assert_eq!(info["memory_logical_bytes"], pattern::MEM_MIB << 20, "{info}");
    let dependents: BTreeSet<String> =
        strings(&daemon.snapshot_info(&tags[4])["dependents"]).into_iter().collect();
    assert_eq!(dependents, tags[5..].iter().cloned().collect());

    // As one.
    let compact = |from: &str, to: &str| {
        daemon.request("POST", &format!("/v1/snapshots/{from}/compact"), Some(json!({"to": to})))
    };
    assert_eq!(compact(&tags[8], &tags[8]).status, 400);
    assert_eq!(compact(&tags[8], &tags[1]).status, 409);
    assert_eq!(compact("nobody", "flat").status, 404);
    let response = compact(&tags[8], "flat");
    assert_eq!(response.status, 200, "{response:?}\n{}", daemon.log());
    assert_eq!(response.json()["branched_from"], format!("compact:{}", tags[8]));
    assert_eq!(daemon.snapshot_info("flat")["chain_depth"], 0);

    // Named by those that need it; by force the name alone goes; with cascade all that need it.
    let response = daemon.delete_snapshot(&tags[7], "");
    assert_eq!(response.status, 409, "{response:?}");
    assert_eq!(response.json()["code"], "snapshot_in_use", "{response:?}");
    assert!(error(&response).contains(&tags[8]), "it names those that need it: {response:?}");
    assert_eq!(daemon.delete_snapshot(&tags[7], "?cascade=true&force=true").status, 400);
    assert_eq!(daemon.delete_snapshot(&tags[7], "?force=true").status, 204);
    assert!(find(&daemon, &tags[7]).is_none());
    daemon.unload(&tags[8]);
    check(&daemon, &tags[8]);
    // A new snapshot under the old name has no children.
    let source = child(&daemon, pattern::TAG);
    daemon.branch(&source, json!({"tag": tags[7], "mode": "full"}));
    daemon.delete(&[source]);
    assert_eq!(daemon.snapshot_info(&tags[7])["dependents"], json!([]));
    assert_eq!(daemon.delete_snapshot(&tags[7], "").status, 204);
    store_is_tidy(&daemon);
    let running = child(&daemon, &tags[8]);
    assert_eq!(daemon.delete_snapshot(&tags[3], "?cascade=true").status, 204);
    let left: Vec<String> = tags[..3].iter().cloned().chain(["flat".into()]).collect();
    assert_eq!(pattern::tags(&daemon), left.into_iter().collect());
    // Children always go on, and a compacted snapshot has no parent.
    assert_eq!(daemon.sandbox(&running)["state"], "running");
    daemon.delete(&[running]);
    store_is_tidy(&daemon);
    daemon.unload("flat");
    check(&daemon, "flat");
    check(&daemon, &tags[2]);
}

#[test]
fn the_tree_tells_who_came_from_whom_and_from_those_that_are_gone() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_pattern(&[]);
    let source = child(&daemon, pattern::TAG);
    daemon.branch(&source, json!({"tag": "b", "mode": "live"}));
    let kid = child(&daemon, "b");
    daemon.branch(&kid, json!({"tag": "c", "mode": "diff"}));
    daemon.delete(std::slice::from_ref(&kid));
    assert_eq!(daemon.delete_snapshot("b", "?force=true").status, 204);
    let expected = [
        (format!("snapshot:{}", pattern::TAG), None, false),
        (format!("sandbox:{source}"), Some(format!("snapshot:{}", pattern::TAG)), false),
        // Of what is gone only that is known which others remember.
        ("snapshot:b".into(), Some(format!("snapshot:{}", pattern::TAG)), true),
        (format!("sandbox:{kid}"), Some("snapshot:b".into()), true),
        ("snapshot:c".into(), Some(format!("sandbox:{kid}")), false),
    ];
    for round in ["before", "after"] {
        let tree = daemon.request("GET", "/v1/tree", None).json();
        for (id, parent, gone) in &expected {
            let nodes = tree["nodes"].as_array().unwrap().iter().filter(|node| node["id"] == **id);
            let nodes: Vec<_> = nodes.collect();
            assert_eq!(nodes.len(), 1, "{id} {round} the restart: {tree}");
            assert_eq!(nodes[0]["gone"], *gone, "{id} {round} the restart: {tree}");
            assert_eq!(nodes[0]["parent"].as_str(), parent.as_deref(), "{id} {round} the restart: {tree}");
        }
        daemon.restart();
    }
    for (args, word) in [(&["tree"][..], "c"), (&["tree", "--dot"], "digraph")] {
        let output = daemon.forkd_output(args, b"");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains(word), "{args:?}: {output:?}");
    }
    let drawing = daemon.data_dir().join("tree.svg");
    let output = daemon.forkd_output(&["tree", "--svg", drawing.to_str().unwrap()], b"");
    assert!(output.status.success(), "{output:?}");
    assert!(std::fs::read_to_string(drawing).unwrap().contains("<svg"));
}

#[test]
fn old_branches_go_when_there_are_more_than_may_be_kept_and_none_that_is_needed() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_pattern(&["--branch-max-count", "2"]);
    let source = child(&daemon, pattern::TAG);
    // The oldest has a child that runs, the next one a branch that needs it.
    let branch = |id: &str, tag: &str| daemon.branch(id, json!({"tag": tag, "mode": "live"}));
    branch(&source, "used");
    let user = child(&daemon, "used");
    branch(&source, "needed");
    let kid = child(&daemon, "needed");
    branch(&kid, "needs");
    daemon.delete(&[kid]);
    for index in 0..3 {
        branch(&source, &format!("b{index}"));
    }
    branch(&source, "b3");
    eventually("the oldest to go", || {
        let tags = pattern::tags(&daemon);
        (!tags.contains("b0") && !tags.contains("b1")).then_some(())
    });
    // What else may go does at about the same time.
    let mut tags = pattern::tags(&daemon);
    eventually("no more to go", || {
        std::thread::sleep(Duration::from_secs(1));
        let before = std::mem::replace(&mut tags, pattern::tags(&daemon));
        (before == tags).then_some(())
    });
    for tag in [pattern::TAG, "used", "b3"] {
        assert!(tags.contains(tag), "{tag} is not among {tags:?}");
    }
    assert!(!tags.contains("needs") || tags.contains("needed"), "{tags:?}");
    assert_eq!(daemon.sandbox(&user)["state"], "running");
    store_is_tidy(&daemon);
    check(&daemon, "used");
    check(&daemon, "b3");
    daemon.delete(&[source, user]);
}

#[test]
fn a_guest_without_an_agent_is_paused_rolled_back_and_put_to_sleep_like_any_other() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_pattern(&[]);
    let source = child(&daemon, pattern::TAG);
    assert_eq!(daemon.tell(&source, "pause", json!({}))["state"], "paused");
    daemon.branch(&source, json!({"tag": "b", "mode": "live"}));
    check(&daemon, "b");
    daemon.restart();
    assert_eq!(daemon.sandbox(&source)["state"], "paused", "a new daemon does not know");
    assert_eq!(daemon.tell(&source, "resume", json!({}))["state"], "running");
    for to in [json!({}), json!({"to": pattern::TAG}), json!({"to": "b"})] {
        let rolled = daemon.tell(&source, "rollback", to);
        assert_eq!((&rolled["id"], &rolled["state"]), (&json!(source), &json!("running")), "{rolled}");
    }
    daemon.branch(&source, json!({"tag": "b2", "mode": "live"}));
    check(&daemon, "b2");
    assert_eq!(daemon.snapshot_info("b2")["ancestors"], json!([pattern::TAG, "b"]));
    daemon.restart();
    assert_eq!(daemon.sandbox(&source)["rolled_back_to"], "b");
    daemon.delete(&[source]);
}
