//! Workspaces of a real daemon, with guests of a few instructions. They run wherever `/dev/kvm` opens.

use std::time::Instant;

use crate::daemon::{Daemon, eventually, pid, runs};
use crate::support::{children_of, id};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

fn workspace(daemon: &Daemon, name: &str) -> Value {
    daemon.done(200, "GET", &format!("/v1/workspaces/{name}"), None)
}

fn create(daemon: &Daemon, name: &str) -> Value {
    let body = json!({"name": name, "snapshot_tag": "tiny", "per_child_netns": true});
    daemon.done(201, "POST", "/v1/workspaces", Some(body))
}

fn change(daemon: &Daemon, name: &str, verb: &str, body: Value) -> Value {
    daemon.done(200, "POST", &format!("/v1/workspaces/{name}/{verb}"), Some(body))
}

fn tags(daemon: &Daemon) -> Vec<String> {
    let list = daemon.done(200, "GET", "/v1/snapshots", None);
    list.as_array().unwrap().iter().map(|it| it["tag"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_workspace_is_put_away_and_taken_out_again_also_by_another_daemon() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    assert_eq!(daemon.done(200, "GET", "/v1/workspaces", None), json!([]));
    let made = create(&daemon, "box");
    assert_eq!((&made["status"], &made["source_snapshot_tag"]), (&json!("running"), &json!("tiny")));
    assert!(made["current_state_tag"].is_null() && made["id"].as_str().unwrap().starts_with("ws"), "{made}");
    let first = daemon.sandbox(made["live_sandbox_id"].as_str().unwrap());
    assert_eq!((&first["state"], &first["workspace"]), (&json!("running"), &json!("box")));
    daemon.refused(400, "workspace_running", "POST", "/v1/workspaces/box/resume", Some(json!({})));

    // First a full state, then two differences; older states are removed.
    let mut last = first;
    for (round, diff) in [(1, false), (2, true), (3, true)] {
        let away = change(&daemon, "box", "suspend", json!({"diff": diff}));
        let tag = format!("ws-box-{round}");
        assert_eq!((&away["status"], &away["current_state_tag"]), (&json!("suspended"), &json!(tag)));
        assert!(away["live_sandbox_id"].is_null(), "{away}");
        eventually("its sandbox's end", || !runs(pid(&last)));
        assert!(daemon.list().is_empty());
        eventually("the older state's end", || tags(&daemon) == ["tiny", &tag]);
        daemon.refused(400, "workspace_not_running", "POST", "/v1/workspaces/box/suspend", None);
        daemon.refused(409, "snapshot_in_use", "DELETE", &format!("/v1/snapshots/{tag}?force=true"), None);

        daemon.restart();
        // From disk: no template is needed.
        daemon.done(204, "POST", &format!("/v1/snapshots/{tag}/unload"), None);
        assert_eq!(workspace(&daemon, "box"), away);
        let out = change(&daemon, "box", "resume", json!({}));
        assert_eq!((&out["status"], &out["current_state_tag"]), (&json!("running"), &json!(tag)));
        last = daemon.sandbox(out["live_sandbox_id"].as_str().unwrap());
        assert_eq!((&last["state"], &last["snapshot_tag"]), (&json!("running"), &json!(tag)));
        assert!(!daemon.printed(&id(&last)).is_empty() || last["ready_ms"].as_f64().unwrap() > 0.0);
    }

    // After its sandbox is lost, it can be resumed from its last state.
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&last)), None);
    assert_eq!(workspace(&daemon, "box")["status"], "stale");
    daemon.refused(400, "workspace_not_running", "POST", "/v1/workspaces/box/suspend", None);
    daemon.restart();
    assert_eq!(workspace(&daemon, "box")["status"], "stale");
    let out = change(&daemon, "box", "resume", json!({}));
    assert_eq!(out["status"], "running");

    let live = daemon.sandbox(out["live_sandbox_id"].as_str().unwrap());
    daemon.done(204, "DELETE", "/v1/workspaces/box", None);
    daemon.refused(404, "workspace_not_found", "GET", "/v1/workspaces/box", None);
    eventually("its sandbox's end", || !runs(pid(&live)));
    assert_eq!(tags(&daemon), ["tiny"]);
    assert_eq!(std::fs::read_dir(daemon.path().join("workspaces")).unwrap().count(), 0);
}

#[test]
fn a_workspace_is_resumed_also_if_its_template_is_killed_meanwhile() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    create(&daemon, "box");
    change(&daemon, "box", "suspend", json!({}));
    // The template of its state is stopped: it forks no child before it is killed.
    daemon.spawn("ws-box-1", 1);
    let template = Pid::from_raw(daemon.template_of("ws-box-1")).unwrap();
    kill_process(template, Signal::STOP).unwrap();
    let resumed = std::thread::scope(|scope| {
        let asked = scope.spawn(|| change(&daemon, "box", "resume", json!({})));
        eventually("one that starts", || daemon.list().iter().any(|it| it["state"] == "starting"));
        kill_process(template, Signal::KILL).unwrap();
        asked.join().unwrap()
    });
    assert_eq!(resumed["status"], "running", "{resumed}");
    let sandbox = daemon.sandbox(resumed["live_sandbox_id"].as_str().unwrap());
    assert_eq!((&sandbox["state"], &sandbox["workspace"]), (&json!("running"), &json!("box")));
    assert!(runs(pid(&sandbox)));
    let of_it = daemon.list().into_iter().filter(|it| it["workspace"] == "box").count();
    assert_eq!(of_it, 1, "nothing is left of the one that was not forked");
}

#[test]
fn bad_requests_and_hostile_files_are_refused_by_name() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let ask = |status: u16, code: &str, body: Value| {
        daemon.refused(status, code, "POST", "/v1/workspaces", Some(body));
    };
    ask(400, "invalid_request", json!({"name": "../x", "snapshot_tag": "tiny"}));
    ask(400, "invalid_request", json!({"name": "x".repeat(49), "snapshot_tag": "tiny"}));
    ask(400, "invalid_request", json!({"name": "x", "snapshot_tag": "tiny", "memory_limit_mib": 0}));
    ask(400, "invalid_request", json!({"name": "x", "snapshot_tag": "tiny", "surprise": 1}));
    ask(404, "snapshot_not_found", json!({"name": "x", "snapshot_tag": "nope"}));
    // A workspace whose creation failed does not exist.
    daemon.refused(404, "workspace_not_found", "GET", "/v1/workspaces/x", None);
    create(&daemon, "x");
    ask(409, "name_taken", json!({"name": "x", "snapshot_tag": "tiny"}));
    daemon.refused(404, "workspace_not_found", "POST", "/v1/workspaces/y/suspend", None);
    daemon.refused(404, "workspace_not_found", "DELETE", "/v1/workspaces/y", None);

    let file = |name: &str| daemon.path().join("workspaces").join(name);
    let honest = std::fs::read_to_string(file("x.json")).unwrap();
    std::fs::write(file("bad.json"), honest.replace("\"tiny\"", "\"../../tiny\"")).unwrap();
    std::fs::write(file("x.json"), honest.replace("\"x\"", "\"z\"")).unwrap();
    daemon.restart();
    let list = daemon.done(200, "GET", "/v1/workspaces", None);
    assert_eq!(list, json!([]));
    for name in ["bad", "x"] {
        daemon.refused(409, "workspace_unusable", "GET", &format!("/v1/workspaces/{name}"), None);
        let resume = format!("/v1/workspaces/{name}/resume");
        daemon.refused(409, "workspace_unusable", "POST", &resume, None);
    }
    assert_eq!(daemon.list().len(), 1, "whoever mends the file may want its sandbox");
    daemon.done(204, "DELETE", "/v1/workspaces/bad", None);
    std::fs::write(daemon.path().join("workspaces/x.json"), honest).unwrap();
    daemon.restart();
    assert_eq!(workspace(&daemon, "x")["status"], "running");
    daemon.done(204, "DELETE", "/v1/workspaces/x", None);
}

#[test]
fn a_daemon_killed_at_any_time_leaves_a_workspace_that_goes_on_and_no_stranger() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    create(&daemon, "box");
    let mut seen = std::collections::BTreeMap::<String, u32>::new();
    let whole = ["suspend", "resume"].map(|verb| {
        let begun = Instant::now();
        change(&daemon, "box", verb, json!({}));
        begun.elapsed()
    });
    for round in 0..12 {
        let (verb, whole) = if round % 2 == 0 { ("suspend", whole[0]) } else { ("resume", whole[1]) };
        let path = format!("/v1/workspaces/box/{verb}");
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| daemon.try_request("POST", &path, Some(json!({}))));
            // From the begin of the request to a little after its end.
            std::thread::sleep(whole * round / 9);
            daemon.pull_the_plug();
            let _ = asked.join();
        });
        daemon.restart();
        let info = workspace(&daemon, "box");
        let status = info["status"].as_str().unwrap();
        *seen.entry(format!("{verb}: {status}")).or_default() += 1;
        assert!(status != "stale", "{info}\n{}", daemon.log());
        // Its status is true, and nothing else exists.
        eventually("no stranger", || daemon.list().len() == usize::from(status == "running"));
        let mut expected = vec!["tiny".to_owned()];
        expected.extend(info["current_state_tag"].as_str().map(str::to_owned));
        expected.sort();
        eventually("no other state", || {
            let mut tags = tags(&daemon);
            tags.sort();
            tags == expected
        });
        // The next round begins in the right state: running before a suspend, suspended before a resume.
        let (begins, way) = if verb == "suspend" { ("suspended", "suspend") } else { ("running", "resume") };
        if status != begins {
            change(&daemon, "box", way, json!({}));
        }
    }
    eprintln!("{seen:?}");
    daemon.done(204, "DELETE", "/v1/workspaces/box", None);
    assert_eq!(tags(&daemon), ["tiny"]);
    eventually("no process", || children_of(daemon.template_of("tiny")) == 0);
}
