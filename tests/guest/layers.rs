//! Layers on layers: built with a command, looked at, made one, deleted; memory and disk alike.

use std::process::Output;

use forkd_tests::daemon::Daemon;
use serde_json::{Value, json};

use crate::parent::{self, daemon};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(output: Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// Everything the two layers and their parent have put into memory and onto the disk.
fn check(daemon: &Daemon, tag: &str, value: &str) {
    let child = daemon.fork(tag, 1).remove(0);
    let script = "cat /run/first /run/second /root/parent.txt; ls /root/gone 2>/dev/null | wc -l";
    assert_eq!(daemon.sh(&child, script), "in memory\nand more\nof the parent0\n", "{tag}");
    assert_eq!(daemon.eval(&child, "import ours; ours.value"), value, "{tag}");
    assert_eq!(daemon.eval(&child, "len(pattern)"), "8388608", "{tag}");
    daemon.delete(&[child]);
}

fn node<'a>(tree: &'a Value, id: &str) -> &'a Value {
    let nodes = tree["nodes"].as_array().unwrap();
    let found: Vec<_> = nodes.iter().filter(|node| node["id"] == id).collect();
    assert_eq!(found.len(), 1, "{id}: {tree}");
    found[0]
}

#[test]
fn a_layer_on_a_layer_has_memory_and_disk_of_both_and_outlives_the_names_below_it() {
    let daemon = daemon();
    let forkd = |args: &[&str]| daemon.forkd_output(args, b"");
    let first = "mkdir /usr/lib/python3/dist-packages/ours && \
                 echo value = 1 > /usr/lib/python3/dist-packages/ours/__init__.py && \
                 echo in memory > /run/first && touch /root/gone";
    let second = "echo value = 2 > /usr/lib/python3/dist-packages/ours/__init__.py && \
                  echo and more > /run/second && rm /root/gone";
    for (from, tag, script) in [(parent::TAG, "lib", first), ("lib", "lib-2", second)] {
        let command = format!("sh -c '{script}'");
        ok(forkd(&["snapshot-diff", "--from", from, "--tag", tag, "--exec", &command]));
    }
    let failed =
        forkd(&["snapshot-diff", "--from", "lib", "--tag", "no", "--exec", "sh -c 'echo why; exit 3'"]);
    assert!(!failed.status.success());
    assert!(text(&failed.stderr).contains("why") || text(&failed.stdout).contains("why"), "{failed:?}");
    assert_eq!(daemon.request("GET", "/v1/snapshots/no", None).status, 404);
    check(daemon, "lib-2", "2");
    daemon.unload("lib-2");
    check(daemon, "lib-2", "2");

    // The tree of snapshots, and the room they take.
    let info: Value = serde_json::from_str(&ok(forkd(&["snapshot-info", "lib-2", "--json"]))).unwrap();
    assert_eq!((&info["chain_depth"], &info["parent_tag"]), (&json!(2), &json!("lib")), "{info}");
    assert_eq!(info["ancestors"], json!([parent::TAG, "lib"]), "{info}");
    assert!(info["own_memory_bytes"].as_u64().unwrap() < info["memory_physical_bytes"].as_u64().unwrap());
    assert_eq!(daemon.snapshot_info("lib")["dependents"], json!(["lib-2"]));
    assert!(ok(forkd(&["snapshot-info", "lib-2"])).contains("lib"));
    let tree: Value = serde_json::from_str(&ok(forkd(&["tree", "--json"]))).unwrap();
    let shown = tree.to_string();
    assert!(shown.contains("lib-2"), "{shown}");
    assert!(ok(forkd(&["tree"])).contains("lib-2"));

    // As one, it is what it was.
    ok(forkd(&["snapshot-compact", "lib-2", "--to", "flat"]));
    let flat = daemon.snapshot_info("flat");
    assert_eq!((&flat["chain_depth"], &flat["parent_tag"]), (&json!(0), &Value::Null), "{flat}");
    assert_eq!(daemon.snapshot_info("lib-2")["dependents"], json!([]), "it needs nobody");
    let layers = flat["layers"].as_array().unwrap();
    assert_eq!(layers.iter().filter(|layer| layer["kind"] == "memory").count(), 1, "{flat}");
    assert!(layers.iter().filter(|layer| layer["kind"] == "disk").count() <= 1, "{flat}");
    assert_eq!(daemon.when_ready("flat")["branched_from"], "compact:lib-2");
    check(daemon, "flat", "2");

    // A name is removed only if no snapshot needs it, or by force; then the needed layers stay.
    let refused = forkd(&["rmi", "lib"]);
    assert!(!refused.status.success() && text(&refused.stderr).contains("lib-2"), "{refused:?}");
    assert_eq!(daemon.delete_snapshot("lib", "?cascade=true&force=true").status, 400);
    ok(forkd(&["rmi", "--force", "lib"]));
    assert_eq!(daemon.request("GET", "/v1/snapshots/lib", None).status, 404);
    let tree = daemon.request("GET", "/v1/tree", None).json();
    assert_eq!(node(&tree, "snapshot:lib")["gone"], true, "{tree}");
    assert_eq!(node(&tree, "snapshot:flat")["how"], "compact", "{tree}");
    daemon.unload("lib-2");
    check(daemon, "lib-2", "2");
    ok(forkd(&["rmi", "lib-2"]));
    daemon.unload("flat");
    check(daemon, "flat", "2");
    ok(forkd(&["rmi", "flat"]));
}
