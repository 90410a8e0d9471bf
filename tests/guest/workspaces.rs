//! Sandboxes with a name, put to sleep on the disk and woken up; branches on their way to the disk when the
//! daemon is killed.

use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use serde_json::{Value, json};

use crate::parent::{SMALL, alone};

fn workspace(daemon: &Daemon, verb: &str, body: Value) -> Value {
    let response = daemon.request("POST", &format!("/v1/workspaces/dev/{verb}"), Some(body));
    assert_eq!(response.status, 200, "{verb}: {response:?}\n{}", daemon.log());
    response.json()
}

fn seen(daemon: &Daemon) -> Value {
    let response = daemon.request("GET", "/v1/workspaces/dev", None);
    assert_eq!(response.status, 200, "{response:?}");
    response.json()
}

fn live(info: &Value) -> String {
    assert_eq!(info["status"], "running", "{info}");
    info["live_sandbox_id"].as_str().unwrap().to_owned()
}

/// What is in memory, on the disk, and running.
const STATE: &str = "cat /run/memory /root/disk; cat /proc/[0-9]*/comm | grep -c ^sleep$";

/// What `work` gives, and how often something was done in a sandbox until it could not be any more.
fn while_busy<T>(daemon: &Daemon, id: &str, work: impl FnOnce() -> T) -> (T, u32) {
    std::thread::scope(|scope| {
        let (first, begun) = std::sync::mpsc::channel();
        let busy = scope.spawn(move || {
            let body = json!({"args": ["sh", "-c", "echo x >> /root/busy"]});
            let more = || daemon.request("POST", &format!("/v1/sandboxes/{id}/exec"), Some(body.clone()));
            let mut done = 0;
            while matches!(more(), answer if answer.status == 200 && answer.json()["exit_code"] == 0) {
                done += 1;
                let _ = first.send(());
            }
            done
        });
        begun.recv().unwrap();
        let given = work();
        (given, busy.join().unwrap())
    })
}

#[test]
fn a_workspace_sleeps_on_the_disk_and_wakes_up_after_its_daemon_was_killed() {
    let mut daemon = alone();
    let body = json!({"name": "dev", "snapshot_tag": SMALL});
    let made = daemon.request("POST", "/v1/workspaces", Some(body.clone()));
    assert_eq!(made.status, 201, "{made:?}");
    assert_eq!(daemon.request("POST", "/v1/workspaces", Some(body)).status, 409);
    let first = live(&made.json());
    daemon.sh(
        &first,
        "echo memory > /run/memory; echo disk > /root/disk; setsid sleep 10000 >/dev/null 2>&1 &",
    );
    let refused = daemon.request("POST", "/v1/workspaces/dev/resume", Some(json!({})));
    assert_eq!(refused.status, 400, "{refused:?}");

    // A branch of a plain sandbox, on its way to the disk when the daemon dies.
    let sandbox = daemon.fork(SMALL, 1).remove(0);
    daemon.sh(&sandbox, "echo branched > /run/memory; echo branched > /root/disk");
    let asleep = workspace(&daemon, "suspend", json!({"diff": true}));
    assert_eq!(
        (&asleep["status"], &asleep["live_sandbox_id"]),
        (&json!("suspended"), &Value::Null),
        "{asleep}"
    );
    let state = asleep["current_state_tag"].as_str().unwrap().to_owned();
    assert_eq!(daemon.request("GET", &format!("/v1/sandboxes/{first}"), None).status, 404);
    daemon.branch(&sandbox, json!({"tag": "late", "mode": "live", "wait": false}));
    daemon.restart();
    daemon.when_ready("late");
    daemon.unload("late");
    let child = daemon.fork("late", 1).remove(0);
    assert_eq!(daemon.sh(&child, "cat /run/memory /root/disk"), "branched\nbranched\n");
    daemon.delete(&[sandbox, child]);
    assert_eq!(daemon.delete_snapshot("late", "").status, 204);

    assert_eq!(seen(&daemon)["status"], "suspended");
    assert_eq!(daemon.snapshot_info(&state)["template"], Value::Null, "it takes no memory");
    let second = live(&workspace(&daemon, "resume", json!({})));
    assert_eq!(daemon.sh(&second, STATE), "memory\ndisk\n1\n");

    // A workspace that is suspended again has one state, the new one, and it is complete.
    daemon.sh(&second, "echo memory 2 > /run/memory; echo disk 2 > /root/disk");
    let (asleep, done) = while_busy(&daemon, &second, || workspace(&daemon, "suspend", json!({})));
    let newer = asleep["current_state_tag"].as_str().unwrap().to_owned();
    assert_ne!(newer, state);
    assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{state}"), None).status, 404);
    let third = live(&workspace(&daemon, "resume", json!({})));
    assert_eq!(daemon.sh(&third, STATE), "memory 2\ndisk 2\n1\n");
    // Commands acknowledged during the suspend were done before it.
    let kept = daemon.sh(&third, "wc -l < /root/busy").trim().parse::<u32>().unwrap();
    assert!(done > 0 && kept >= done, "{done} were done, {kept} are there");

    // A workspace whose sandbox is gone reports that, and resumes from its last suspend.
    daemon.delete(std::slice::from_ref(&third));
    eventually("the workspace to be stale", || (seen(&daemon)["status"] == "stale").then_some(()));
    let fourth = live(&workspace(&daemon, "resume", json!({})));
    assert_eq!(daemon.sh(&fourth, STATE), "memory 2\ndisk 2\n1\n");
    assert_eq!(daemon.request("DELETE", "/v1/workspaces/dev", None).status, 204);
    assert_eq!(daemon.request("GET", "/v1/workspaces/dev", None).status, 404);
    eventually("its state and its sandbox to go", || {
        let tags = daemon.request("GET", "/v1/snapshots", None).json();
        let tags = tags.as_array().unwrap().iter().filter(|info| info["tag"] != SMALL).count();
        (tags == 0 && daemon.sandboxes().is_empty()).then_some(())
    });
}
