//! Forks with a real daemon and guests of a few instructions. They run wherever `/dev/kvm` opens.

use std::time::{Duration, Instant};

use crate::daemon::{Daemon, eventually, launch, pid, runs};
use forkd_vmm::guest_code;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

guest_code! {
    /// Reports that it is ready, waits until the VM generation id changes, as it does in every child, reports
    /// again and sleeps.
    fn ready_again_in_every_child,
    "mov edx, 0x602",
    "mov rbx, qword ptr [0xe8000]",
    "out dx, al",
    "2: pause",
    "cmp rbx, qword ptr [0xe8000]",
    "je 2b",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

guest_code! {
    /// Reports that it is ready once, and never in a child.
    fn ready_only_once,
    "mov edx, 0x602",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

fn start() -> Option<Daemon> {
    Daemon::start(&[("kernel", ready_again_in_every_child()), ("mute", ready_only_once())])
}

#[test]
fn children_are_forked_from_memory_and_from_disk_and_leave_nothing() {
    let Some(daemon) = start() else { return };
    let snapshot = daemon.snapshot("tiny", "kernel");
    assert_eq!(snapshot["status"], "ready");
    assert_eq!(snapshot["template"]["source"], "memory", "{snapshot}");
    let mut children = daemon.spawn("tiny", 1);
    children.extend(daemon.spawn("tiny", 20));
    for child in &children {
        assert_eq!(child["state"], "running", "{child}");
        assert_eq!(child["snapshot_tag"], "tiny");
        assert!(child["ready_ms"].as_f64().unwrap() > 0.0 && runs(pid(child)), "{child}");
    }
    let id = children[0]["id"].as_str().unwrap();
    let (status, stats) = daemon.request("GET", &format!("/v1/sandboxes/{id}/stats"), None);
    assert!(status == 200 && stats["private_kib"].as_u64().unwrap() > 0, "{stats}");
    let (status, error) = daemon.request("POST", &format!("/v1/sandboxes/{id}/ping"), None);
    assert_eq!((status, &error["code"]), (409, &json!("sandbox_unfit")), "{error}");

    // From here on the snapshot is forked from disk: the old template ends with its last child.
    let old = snapshot["template"]["pid"].as_i64().unwrap() as i32;
    assert_eq!(daemon.request("POST", "/v1/snapshots/tiny/unload", None).0, 204);
    refuses_a_manifest_that_its_state_does_not_fit(&daemon);
    let from_disk = daemon.spawn("tiny", 5);
    assert_eq!(from_disk.len(), 5);
    let (_, info) = daemon.request("GET", "/v1/snapshots/tiny", None);
    assert_eq!(info["template"]["source"], "disk", "{info}");
    assert_eq!(info["template"]["children"], 5);
    assert!(runs(old));
    let new = info["template"]["pid"].as_i64().unwrap() as i32;

    daemon.delete_all();
    eventually("the old template's end", || !runs(old));
    assert!(runs(new), "the current one stays");
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/tiny", None).0, 204);
    eventually("the new template's end", || !runs(new));
    eventually("empty folders", || {
        ["sandboxes", "templates", "snapshots"].iter().all(|it| daemon.left(it) == 0)
    });
    assert!(children.iter().chain(&from_disk).all(|child| !runs(pid(child))));
}

/// Limits and quotas use the manifest, so the guest's state must match it.
fn refuses_a_manifest_that_its_state_does_not_fit(daemon: &Daemon) {
    let path = daemon.path().join("snapshots/tiny/manifest.json");
    let whole = std::fs::read(&path).unwrap();
    let elsewhere = json!({"name": "/etc/hostname", "digest": "0", "size": 1, "modified_ns": 1});
    for (fact, value, code) in [
        ("vcpus", json!(2), "snapshot_unusable"),
        ("mem_size_mib", json!(65), "snapshot_unusable"),
        ("guest_ports", json!([7]), "snapshot_unusable"),
        // A disk by path must be in an allowed folder, as in a request.
        ("image", elsewhere, "snapshot_unusable"),
    ] {
        let mut manifest: Value = serde_json::from_slice(&whole).unwrap();
        manifest["facts"][fact] = value;
        std::fs::write(&path, manifest.to_string()).unwrap();
        let body = json!({"snapshot_tag": "tiny", "n": 1});
        let (status, error) = daemon.request("POST", "/v1/sandboxes", Some(body));
        assert_eq!(status, 409, "{fact}: {error}");
        assert_eq!(error["code"], code, "{fact}: {error}");
    }
    std::fs::write(&path, whole).unwrap();
}

#[test]
fn whoever_asked_a_template_that_is_killed_gets_children_of_the_next() {
    let Some(daemon) = start() else { return };
    let snapshot = daemon.snapshot("tiny", "kernel");
    let template = Pid::from_raw(snapshot["template"]["pid"].as_i64().unwrap() as i32).unwrap();
    // The template is stopped, so it has forked no child when it is killed.
    kill_process(template, Signal::STOP).unwrap();
    let children = std::thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.spawn("tiny", 5));
        eventually("five that start", || {
            daemon.request("GET", "/v1/sandboxes", None).1.as_array().unwrap().len() == 5
        });
        kill_process(template, Signal::KILL).unwrap();
        asked.join().unwrap()
    });
    assert_eq!(children.len(), 5);
    assert!(children.iter().all(|child| child["state"] == "running" && runs(pid(child))), "{children:?}");
    let (_, all) = daemon.request("GET", "/v1/sandboxes", None);
    assert_eq!(all.as_array().unwrap().len(), 5, "nothing is left of those that were not: {all}");
}

#[test]
fn a_new_daemon_takes_over_templates_and_children() {
    let Some(mut daemon) = start() else { return };
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", 4);
    let template = daemon.request("GET", "/v1/snapshots/tiny", None).1["template"]["pid"].clone();
    // One child ends while no daemon runs, another while one watches.
    daemon.kill();
    let kill = |child: &Value| {
        let pid = rustix::process::Pid::from_raw(pid(child)).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    };
    kill(&children[0]);
    eventually("its end", || !runs(pid(&children[0])));
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    kill(&children[1]);
    let state = |child: &Value| {
        let id = child["id"].as_str().unwrap();
        daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).1
    };
    eventually("the end of the second", || state(&children[1])["state"] == "ended");
    for ended in &children[..2] {
        let ended = state(ended);
        assert_eq!(ended["state"], "ended");
        assert!(ended["detail"].as_str().unwrap().contains("signal 9"), "{ended}");
    }
    for alive in &children[2..] {
        assert_eq!(state(alive)["state"], "running");
        assert_eq!(state(alive)["pid"], alive["pid"]);
    }
    let info = daemon.request("GET", "/v1/snapshots/tiny", None).1;
    assert_eq!(info["template"]["pid"], template, "{info}");
    assert_eq!(daemon.spawn("tiny", 2).len(), 2, "and it forks on");

    // A daemon that stops leaves them alone, too.
    daemon.terminate();
    assert!(runs(pid(&children[2])) && runs(template.as_i64().unwrap() as i32));
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    assert_eq!(daemon.list().len(), 6);
    assert_eq!(daemon.list().iter().filter(|it| it["state"] == "running").count(), 4);

    // A template that died: its children run on, and their exit status is not guessed.
    let pid_of_template = rustix::process::Pid::from_raw(template.as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(pid_of_template, rustix::process::Signal::KILL).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    daemon.restart();
    assert_eq!(daemon.list().iter().filter(|it| it["state"] == "running").count(), 4, "{}", daemon.log());
    kill(&children[2]);
    let end = |child: &Value| {
        let id = child["id"].as_str().unwrap();
        daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).1
    };
    eventually("its end", || end(&children[2])["state"] == "ended");
    assert_eq!(end(&children[2])["reason"], "unknown", "{}", end(&children[2]));
    daemon.delete_all();
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/tiny", None).0, 204);
    eventually("empty folders", || {
        ["sandboxes", "templates", "snapshots"].iter().all(|it| daemon.left(it) == 0)
    });
    assert!(daemon.monitors().is_empty());
}

#[test]
fn bad_requests_and_damaged_snapshots_are_refused_before_anything_starts() {
    let Some(daemon) = start() else { return };
    let post = |path: &str, body: Value| daemon.request("POST", path, Some(body));
    for (status, body, code) in [
        (400, json!({"snapshot_tag": "tiny", "n": 0}), "invalid_request"),
        (400, json!({"snapshot_tag": "tiny", "n": 1001}), "invalid_request"),
        (400, json!({"snapshot_tag": "../x"}), "invalid_request"),
        (400, json!({"snapshot_tag": "tiny", "image": "x"}), "invalid_request"),
        (400, json!({}), "invalid_request"),
        (404, json!({"snapshot_tag": "nope"}), "snapshot_not_found"),
    ] {
        let (got, error) = post("/v1/sandboxes", body);
        assert_eq!(got, status, "{error}");
        assert_eq!(error["code"], code, "{error}");
    }
    let kernel = daemon.path().join("kernel");
    for (status, body, code) in [
        (400, json!({"tag": "-x", "kernel": kernel}), "invalid_request"),
        (400, json!({"tag": "x", "kernel": "relative"}), "invalid_request"),
        (400, json!({"tag": "x"}), "invalid_request"),
        (400, json!({"tag": "x", "kernel": "/nonexistent/kernel"}), "path_not_allowed"),
        (404, json!({"tag": "x", "image": "nope"}), "image_not_found"),
    ] {
        let (got, error) = post("/v1/snapshots", body);
        assert_eq!(got, status, "{error}");
        assert_eq!(error["code"], code, "{error}");
    }
    // A failed snapshot is listed with the reason, and can be created again.
    let failed = daemon.request("GET", "/v1/snapshots/x", None).1;
    assert_eq!(failed["status"], "failed", "{failed}");
    daemon.snapshot("x", "kernel");
    assert_eq!(post("/v1/snapshots", json!({"tag": "x", "kernel": kernel})).0, 409);

    // The error names an edited file, and no sandbox starts.
    assert_eq!(daemon.request("POST", "/v1/snapshots/x/unload", None).0, 204);
    let digest = daemon.request("GET", "/v1/snapshots/x/info", None).1["layers"][0]["digest"].clone();
    let memory = daemon.path().join("snapshots/.layers").join(digest.as_str().unwrap());
    let file = std::fs::File::options().write(true).open(&memory).unwrap();
    std::os::unix::fs::FileExt::write_at(&file, b"edited", 1 << 20).unwrap();
    let (status, error) = post("/v1/sandboxes", json!({"snapshot_tag": "x"}));
    assert_eq!(status, 409, "{error}");
    assert_eq!(error["code"], "snapshot_unusable", "{error}");
    assert!(
        error["error"].as_str().unwrap().contains(digest.as_str().unwrap()),
        "the operator reads which: {error}"
    );
    eventually("no template", || daemon.left("templates") == 0);
    assert!(daemon.list().is_empty());
}

#[test]
fn a_child_that_never_answers_is_an_error_and_goes() {
    let Some(daemon) = start() else { return };
    daemon.snapshot("mute", "mute");
    let (status, at_once) =
        daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "mute", "n": 2, "wait": false})));
    assert_eq!(status, 201, "{at_once}");
    assert_eq!(at_once[0]["state"], "starting");
    let (status, error) =
        daemon.request("POST", "/v1/sandboxes?results=each", Some(json!({"snapshot_tag": "mute"})));
    assert_eq!(status, 502, "{error}");
    assert_eq!(error["code"], "guest_failed", "{error}");
    eventually("the two that were not waited for", || daemon.list().iter().all(|it| it["state"] == "ended"));
    assert_eq!(daemon.list().len(), 2, "they are listed with the reason");
    daemon.delete_all();
    eventually("empty folders", || daemon.left("sandboxes") == 0);
}

/// `FORKD_TIMES=1` prints how long 1, 100 and 1000 children take.
#[test]
fn a_hundred_children_come_and_go_at_once() {
    let Some(daemon) = start() else { return };
    daemon.snapshot("tiny", "kernel");
    let times = std::env::var_os("FORKD_TIMES").is_some();
    for n in if times { vec![1, 1, 1, 10, 100, 100, 1000, 1000] } else { vec![100] } {
        let begun = Instant::now();
        let children = daemon.spawn("tiny", n);
        let all = begun.elapsed();
        assert_eq!(children.len(), n);
        let mut ready: Vec<f64> = children.iter().map(|child| child["ready_ms"].as_f64().unwrap()).collect();
        ready.sort_by(f64::total_cmp);
        if times {
            eprintln!(
                "n={n}: all {all:?}, first {:.2} ms, median {:.2} ms, last {:.2} ms",
                ready[0],
                ready[n / 2],
                ready[n - 1]
            );
        }
        daemon.delete_all();
        eventually("empty folders", || daemon.left("sandboxes") == 0);
        assert!(children.iter().all(|child| !runs(pid(child))));
    }
}
