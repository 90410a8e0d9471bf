//! The programs of examples/, with the Python SDK of this tree, against the daemon that everything here uses.

use std::path::Path;

use serde_json::Value;

use crate::cli::{forkd, text};
use crate::pip::must;
use crate::sdk_python::{Sdk, TAG};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples");

/// What the daemon has: the ids of sandboxes and the tags of snapshots.
fn made() -> Vec<String> {
    let list = |command: &str, field: &str| {
        let listed = must(forkd(None, &[command, "--json"]), command);
        let entries: Vec<Value> = serde_json::from_slice(&listed.stdout).unwrap();
        entries.iter().map(|entry| entry[field].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    [list("ls", "id"), list("images", "tag")].concat()
}

/// What an example prints. It must leave nothing behind.
fn output_of(example: &str) -> String {
    // There is a daemon from here on.
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    if !forkd(None, &["snapshot-info", TAG]).status.success() {
        let warm = ["snapshot", "--tag", TAG, "--image", "python", "--warm-python", "import json"];
        must(forkd(None, &warm), "forkd snapshot");
    }
    let before = made();
    let mut run = Sdk::install().python();
    run.arg(Path::new(EXAMPLES).join(example)).arg(TAG);
    run.env("FORKD_URL", found["url"].as_str().unwrap()).env("FORKD_TOKEN", found["token"].as_str().unwrap());
    let printed = text(&must(run.output().unwrap(), example).stdout);
    let left: Vec<String> = made().into_iter().filter(|name| !before.contains(name)).collect();
    assert!(left.is_empty(), "{example} left {left:?}");
    printed
}

#[test]
fn a_tree_search_finds_the_order_that_its_first_step_does_not_show() {
    let printed = output_of("tree_search.py");
    assert!(printed.contains("best: drop times, sort, drop repeats: 700 bytes become 25"), "{printed}");
    assert!(printed.ends_with("disk full\nlogin ok\nretry\n"), "{printed}");
}

#[test]
fn an_agent_with_undo_keeps_the_one_edit_that_passes_its_tests() {
    let printed = output_of("undo.py");
    assert_eq!(printed.matches("undone: ").count(), 2, "{printed}");
    assert!(printed.contains("kept: take the discount off"), "{printed}");
    // Neither the files nor the memory know of the others.
    assert!(printed.contains("return sum(prices) * (100 - discount) / 100\n"), "{printed}");
    assert!(printed.ends_with("remembers: ['take the discount off']\n"), "{printed}");
}

#[test]
fn a_parallel_test_runner_merges_the_results_of_its_forks() {
    let printed = output_of("parallel_tests.py");
    // One of the files deletes what the others read.
    for line in [
        "test_apple.py: 1 ran, 0 failed",
        "test_missing.py: 1 ran, 0 failed",
        "test_pear.py: 2 ran, 1 failed",
    ] {
        assert!(printed.contains(line), "{printed}");
    }
    assert!(printed.contains("FAILED test_wrong"), "{printed}");
    assert!(printed.ends_with("4 tests in 3 sandboxes, 1 failed\n"), "{printed}");
}
