//! The fork tree of a real daemon, with guests of a few instructions. They run wherever `/dev/kvm` opens.

use crate::daemon::{Daemon, eventually};
use crate::support::{id, route};
use serde_json::{Value, json};

/// Each node as `id [gone] [kind of edge and parent]`.
fn tree(daemon: &Daemon) -> Vec<String> {
    let tree = daemon.done(200, "GET", "/v1/tree", None);
    let line = |node: &Value| {
        let text = |key: &str| node[key].as_str().unwrap_or_default().to_owned();
        let gone = if node["gone"] == true { " gone" } else { "" };
        format!("{}{gone} {} {}", text("id"), text("how"), text("parent")).trim_end().to_owned()
    };
    let mut lines: Vec<String> = tree["nodes"].as_array().unwrap().iter().map(line).collect();
    lines.sort();
    lines
}

#[test]
fn the_tree_shows_who_came_from_whom_also_when_some_are_gone_and_after_a_restart() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("base", "kernel");
    let child = daemon.spawn("base", 1).remove(0);
    let a = id(&child);
    daemon.done(201, "POST", &route(&child, "branch"), Some(json!({"tag": "b1"})));
    let body = json!({"tag": "b2", "mode": "diff"});
    daemon.done(201, "POST", &route(&child, "branch"), Some(body));
    let grandchild = daemon.spawn("b2", 1).remove(0);
    let b = id(&grandchild);
    let body = json!({"tag": "b3", "mode": "live"});
    daemon.done(201, "POST", &route(&grandchild, "branch"), Some(body));
    let info = daemon.sandbox(&a);
    assert_eq!((&info["has_branched"], &info["branch_count"]), (&json!(true), &json!(2)));
    assert_eq!(info["last_branch_tag"], "b2");

    let mut expected = vec![
        format!("sandbox:{a} spawn snapshot:base"),
        format!("sandbox:{b} spawn snapshot:b2"),
        format!("snapshot:b1 branch sandbox:{a}"),
        format!("snapshot:b2 diff sandbox:{a}"),
        format!("snapshot:b3 branch sandbox:{b}"),
        "snapshot:base".to_owned(),
    ];
    expected.sort();
    assert_eq!(tree(&daemon), expected);
    daemon.restart();
    assert_eq!(tree(&daemon), expected);
    assert_eq!(daemon.sandbox(&a)["branch_count"], 2);

    // A rollback to its latest branch, taken from itself: it keeps its place in the tree.
    let back = daemon.done(200, "POST", &route(&child, "rollback"), None);
    assert_eq!(back["rolled_back_to"], "b2");
    assert_eq!(daemon.first_letter(&a), daemon.first_letter(&b), "both from b2's instant");
    assert_eq!(tree(&daemon), expected);
    let back = daemon.done(200, "POST", &route(&child, "rollback"), Some(json!({"to": "b3"})));
    assert_eq!(back["state"], "running");
    let nodes = daemon.done(200, "GET", "/v1/tree", None);
    let node = nodes["nodes"].as_array().unwrap().iter().find(|it| it["name"] == *a).unwrap().clone();
    assert_eq!(node["rolled_back_to"], "snapshot:b3", "{node}");

    // Deleted objects keep their place.
    daemon.delete_all();
    eventually("no sandbox", || daemon.left("sandboxes") == 0);
    daemon.done(204, "DELETE", "/v1/snapshots/b2?force=true", None);
    let mut expected = vec![
        format!("sandbox:{a} gone spawn snapshot:base"),
        format!("sandbox:{b} gone spawn snapshot:b2"),
        format!("snapshot:b1 branch sandbox:{a}"),
        "snapshot:b2 gone  snapshot:base".to_owned(),
        format!("snapshot:b3 branch sandbox:{b}"),
        "snapshot:base".to_owned(),
    ];
    expected.sort();
    assert_eq!(tree(&daemon), expected);
    daemon.restart();
    assert_eq!(tree(&daemon), expected);
}
