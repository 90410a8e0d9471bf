//! How long sandboxes with Linux in them live.

use forkd_tests::eventually;
use serde_json::json;

use crate::parent::{TAG, daemon};

#[test]
fn an_idle_sandbox_stands_still_and_the_next_command_finds_it_as_it_was() {
    let daemon = daemon();
    let body = json!({"snapshot_tag": TAG, "idle_timeout_secs": 3, "on_timeout": "pause"});
    let sandbox = daemon.spawn(body)[0]["id"].as_str().unwrap().to_owned();
    // One that runs for longer is not idle.
    assert_eq!(daemon.sh(&sandbox, "echo kept > /run/it; sleep 6; cat /run/it"), "kept\n");
    eventually("it stands still", || (daemon.sandbox(&sandbox)["state"] == "paused").then_some(()));
    assert_eq!(daemon.sh(&sandbox, "cat /run/it"), "kept\n");
    daemon.delete(&[sandbox]);
}
