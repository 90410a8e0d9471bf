//! Interrupted suspends: a real daemon is killed at each step, with guests of a few instructions.
//!
//! The rules are in the front page of `branch/suspend.rs`: a suspend that is not committed is undone.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::daemon::{Daemon, eventually, launch, pid, runs};
use crate::support::id;

/// The steps of a suspend, in their order.
const STEPS: [&str; 7] = ["noted", "branched", "pausing", "paused", "stored", "committed", "ended"];

fn tags(daemon: &Daemon) -> BTreeSet<String> {
    let list = daemon.done(200, "GET", "/v1/snapshots", None);
    list.as_array().unwrap().iter().map(|it| it["tag"].as_str().unwrap().to_owned()).collect()
}

fn set<const N: usize>(tags: [&str; N]) -> BTreeSet<String> {
    tags.map(str::to_owned).into()
}

/// Writes the settings of the next daemon.
fn want(daemon: &Daemon, wants: Value) {
    std::fs::write(daemon.path().join("limits.json"), wants.to_string()).unwrap();
}

/// Restarts the daemon so that it kills itself at `step`.
fn arm(daemon: &mut Daemon, step: &str) {
    want(daemon, json!({"kill_at": step}));
    daemon.restart();
}

/// Waits until the daemon has killed itself; the next one will not.
fn killed(daemon: &mut Daemon) {
    assert!(!daemon.child.wait().unwrap().success());
    std::fs::remove_file(daemon.path().join("limits.json")).unwrap();
}

fn start(daemon: &mut Daemon) {
    daemon.child = launch(daemon.path());
    daemon.up();
}

fn record(daemon: &Daemon, sandbox: &str) -> std::path::PathBuf {
    daemon.place("sandboxes").join(sandbox).join("sandbox.json")
}

/// Removes the time-outs from a sandbox's record, so that the next daemon does not suspend it again.
fn without_time_outs(daemon: &Daemon, sandbox: &str) {
    let path = record(daemon, sandbox);
    let Ok(bytes) = std::fs::read(&path) else { return };
    let mut record: Value = serde_json::from_slice(&bytes).unwrap();
    record["deadline_unix"] = Value::Null;
    record["life"]["idle_timeout_secs"] = Value::Null;
    std::fs::write(path, record.to_string()).unwrap();
}

/// Checks that the sandbox runs on as if it was never suspended, without any leftovers.
fn goes_on(daemon: &Daemon, sandbox: &str, step: &str) {
    eventually(&format!("{step}: it runs"), || daemon.sandbox(sandbox)["state"] == "running");
    let before = daemon.printed(sandbox).len();
    eventually(&format!("{step}: it goes on"), || daemon.printed(sandbox).len() > before);
    eventually(&format!("{step}: no snapshot"), || tags(daemon) == set(["tiny"]));
    eventually(&format!("{step}: no template"), || daemon.left("templates") == 1);
    eventually(&format!("{step}: no note"), || {
        let bytes = std::fs::read(record(daemon, sandbox)).unwrap();
        let life = serde_json::from_slice::<Value>(&bytes).unwrap()["life"].clone();
        life["suspending"].is_null() && life["dozing"] == false
    });
}

/// Checks that the sandbox has ended, and that one snapshot of it can be forked.
fn is_stored(daemon: &Daemon, sandbox: &Value, tag: &str, step: &str) {
    eventually(&format!("{step}: its process's end"), || !runs(pid(sandbox)));
    assert!(daemon.list().iter().all(|it| it["id"] != sandbox["id"]), "{step}");
    eventually(&format!("{step}: one snapshot"), || tags(daemon) == set(["tiny", tag]));
    eventually(&format!("{step}: it is on disk"), || {
        daemon.done(200, "GET", &format!("/v1/snapshots/{tag}"), None)["status"] == "ready"
    });
}

#[test]
fn a_time_out_whose_daemon_is_killed_at_any_step_leaves_the_sandbox_or_one_snapshot() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    // Both kinds of time-outs: only sandboxes with an idle time-out resume on use.
    let idle = STEPS.map(|step| (step, "idle_timeout_secs"));
    let expired = ["paused", "stored"].map(|step| (step, "timeout_secs"));
    for (step, time_out) in idle.into_iter().chain(expired) {
        arm(&mut daemon, step);
        let body = json!({"snapshot_tag": "tiny", time_out: 1, "on_timeout": "suspend"});
        let made = daemon.try_request("POST", "/v1/sandboxes", Some(body)).unwrap();
        assert_eq!(made.0, 201, "{}", made.1);
        let sandbox = made.1[0].clone();
        killed(&mut daemon);
        without_time_outs(&daemon, &id(&sandbox));
        start(&mut daemon);
        if step == "ended" {
            let tag = format!("idle-{}", id(&sandbox));
            is_stored(&daemon, &sandbox, &tag, step);
            assert_eq!(daemon.spawn(&tag, 1)[0]["state"], "running");
            daemon.delete_all();
            daemon.done(204, "DELETE", &format!("/v1/snapshots/{tag}"), None);
        } else {
            goes_on(&daemon, &id(&sandbox), step);
            daemon.delete_all();
        }
    }
}

#[test]
fn a_workspace_whose_daemon_is_killed_at_any_step_of_its_suspend_runs_or_is_suspended() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    for step in STEPS {
        arm(&mut daemon, step);
        let body = json!({"name": "box", "snapshot_tag": "tiny"});
        let made = daemon.done(201, "POST", "/v1/workspaces", Some(body));
        let sandbox = daemon.sandbox(made["live_sandbox_id"].as_str().unwrap());
        assert!(daemon.try_request("POST", "/v1/workspaces/box/suspend", Some(json!({}))).is_none());
        killed(&mut daemon);
        start(&mut daemon);
        let workspace = daemon.done(200, "GET", "/v1/workspaces/box", None);
        if ["committed", "ended"].contains(&step) {
            assert_eq!(workspace["status"], "suspended", "{step}");
            is_stored(&daemon, &sandbox, "ws-box-1", step);
        } else {
            assert_eq!(workspace["status"], "running", "{step}");
            goes_on(&daemon, &id(&sandbox), step);
        }
        daemon.done(204, "DELETE", "/v1/workspaces/box", None);
        eventually("nothing of it", || daemon.list().is_empty() && tags(&daemon) == set(["tiny"]));
    }
}

#[test]
fn a_daemon_killed_while_it_undoes_a_suspend_leaves_that_to_the_next() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    arm(&mut daemon, "stored");
    let body = json!({"name": "box", "snapshot_tag": "tiny"});
    let made = daemon.done(201, "POST", "/v1/workspaces", Some(body));
    let sandbox = made["live_sandbox_id"].as_str().unwrap();
    assert!(daemon.try_request("POST", "/v1/workspaces/box/suspend", Some(json!({}))).is_none());
    daemon.child.wait().unwrap();
    for step in ["resumed", "removed"] {
        want(&daemon, json!({"kill_at": step}));
        daemon.child = launch(daemon.path());
        assert!(!daemon.child.wait().unwrap().success());
    }
    std::fs::remove_file(daemon.path().join("limits.json")).unwrap();
    start(&mut daemon);
    goes_on(&daemon, sandbox, "undone");
    // The sandbox can be suspended again.
    let away = daemon.done(200, "POST", "/v1/workspaces/box/suspend", Some(json!({})));
    assert_eq!(away["status"], "suspended");
}

#[test]
fn a_sandbox_that_was_paused_before_its_suspend_stays_paused() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    arm(&mut daemon, "stored");
    let body = json!({"name": "box", "snapshot_tag": "tiny"});
    let made = daemon.done(201, "POST", "/v1/workspaces", Some(body));
    let sandbox = made["live_sandbox_id"].as_str().unwrap();
    daemon.done(200, "POST", &format!("/v1/sandboxes/{sandbox}/pause"), None);
    assert!(daemon.try_request("POST", "/v1/workspaces/box/suspend", Some(json!({}))).is_none());
    killed(&mut daemon);
    start(&mut daemon);
    eventually("no snapshot", || tags(&daemon) == set(["tiny"]));
    assert_eq!(daemon.sandbox(sandbox)["state"], "paused");
    daemon.done(200, "POST", &format!("/v1/sandboxes/{sandbox}/resume"), None);
    goes_on(&daemon, sandbox, "resumed");
}

#[test]
fn a_client_that_uses_an_idle_sandbox_cancels_its_suspend_and_one_of_a_workspace_is_refused() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    want(&daemon, json!({"hold_at": "stored"}));
    daemon.restart();
    let held = daemon.path().join("held");
    let body = json!({"snapshot_tag": "tiny", "idle_timeout_secs": 1, "on_timeout": "suspend"});
    let sandbox = id(&daemon.done(201, "POST", "/v1/sandboxes", Some(body))[0]);
    let ping = |sandbox: &str| daemon.request("POST", &format!("/v1/sandboxes/{sandbox}/ping"), None).0;
    eventually("it is on disk", || held.exists());
    assert_eq!(daemon.sandbox(&sandbox)["state"], "paused");
    // A bare guest has no agent, but the request resumes the sandbox.
    assert_eq!(ping(&sandbox), 409);
    assert_eq!(daemon.sandbox(&sandbox)["state"], "running");
    let no_time_out = json!({"idle_timeout_secs": null});
    daemon.done(200, "PATCH", &format!("/v1/sandboxes/{sandbox}"), Some(no_time_out));
    std::fs::remove_file(&held).unwrap();
    goes_on(&daemon, &sandbox, "cancelled");
    daemon.delete_all();

    let body = json!({"name": "box", "snapshot_tag": "tiny"});
    let made = daemon.done(201, "POST", "/v1/workspaces", Some(body));
    let sandbox = daemon.sandbox(made["live_sandbox_id"].as_str().unwrap());
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.done(200, "POST", "/v1/workspaces/box/suspend", Some(json!({}))));
        eventually("it is on disk", || held.exists());
        assert_eq!(ping(&id(&sandbox)), 409);
        assert_eq!(daemon.sandbox(&id(&sandbox))["state"], "paused", "it does not go on");
        std::fs::remove_file(&held).unwrap();
        assert_eq!(asked.join().unwrap()["status"], "suspended");
    });
    is_stored(&daemon, &sandbox, "ws-box-1", "refused");
}
