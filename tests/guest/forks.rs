//! Snapshots, templates and children of real Linux guests, through the daemon and the `forkd` command.

use std::collections::BTreeSet;
use std::process::Output;

use forkd_tests::daemon::{Daemon, is_monitor};
use forkd_tests::eventually;
use serde_json::{Value, json};

use crate::parent::{self, SMALL, alone, daemon, fork};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn ok(output: Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn the_commands_make_a_snapshot_fork_it_use_the_children_and_clean_up() {
    let daemon = daemon();
    let forkd = |args: &[&str]| daemon.forkd_output(args, b"");
    let made = forkd(&[
        "snapshot",
        "--tag",
        "cli",
        "--image",
        "python",
        "--warm",
        "echo warm > /root/warm",
        "--warm-python",
        "answer = 42",
        "--mem-size-mib",
        "384",
    ]);
    assert!(text(&made.stderr).contains("warm"), "no progress: {}", text(&made.stderr));
    assert!(ok(made).contains("cli"));
    let images: Value = serde_json::from_str(&ok(forkd(&["images", "--json"]))).unwrap();
    let cli = images.as_array().unwrap().iter().find(|image| image["tag"] == "cli").unwrap();
    assert_eq!((&cli["status"], &cli["mem_size_mib"]), (&json!("ready"), &json!(384)));
    assert!(ok(forkd(&["images"])).contains("cli"));

    let forked: Value =
        serde_json::from_str(&ok(forkd(&["fork", "--tag", "cli", "-n", "3", "--json"]))).unwrap();
    let ids: Vec<&str> =
        forked["children"].as_array().unwrap().iter().map(|child| child["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), 3, "{forked}");
    let listed = ok(forkd(&["ls"]));
    assert!(ids.iter().all(|id| listed.contains(id)), "{listed}");
    let listed: Value = serde_json::from_str(&ok(forkd(&["ls", "--json"]))).unwrap();
    assert!(listed.as_array().unwrap().iter().any(|sandbox| sandbox["snapshot_tag"] == "cli"), "{listed}");

    for id in &ids {
        assert_eq!(ok(forkd(&["eval", id, "--", "answer + 1"])).trim(), "43");
        assert_eq!(ok(forkd(&["exec", id, "--", "cat", "/root/warm"])), "warm\n");
    }
    assert_eq!(forkd(&["exec", ids[0], "--", "sh", "-c", "exit 7"]).status.code(), Some(7));
    let failed = forkd(&["eval", ids[0], "--", "1 / 0"]);
    assert_eq!(failed.status.code(), Some(1));
    assert!(text(&failed.stderr).contains("ZeroDivisionError"), "{}", text(&failed.stderr));
    ok(forkd(&["ping", ids[0], ids[1]]));
    assert!(!forkd(&["ping", "sbnobody"]).status.success());

    ok(forkd(&["exec", ids[0], "--timeout-secs", "60", "--", "sh", "-c", "echo said so > /dev/console"]));
    eventually("it to be in the log", || ok(forkd(&["logs", ids[0]])).contains("said so").then_some(()));
    ok(forkd(&["set", ids[0], "--ttl", "3600", "--label", "job=7"]));
    assert!(ok(forkd(&["ls", "--label", "job=7"])).contains(ids[0]));

    ok(forkd(&["kill", ids[0]]));
    let plain = ok(forkd(&["fork", "--tag", "cli", "-n", "1"]));
    assert!(plain.contains("first answer") && plain.contains("all answers"), "no times: {plain}");
    let target = plain.lines().find_map(|line| line.strip_prefix("FORKD_TARGET=")?.split("  # ").next());
    assert_eq!(ok(forkd(&["eval", "--target", target.unwrap(), "--", "answer"])).trim(), "42");
    // A tag can go while children of it run.
    ok(forkd(&["rmi", "cli"]));
    assert_eq!(ok(forkd(&["eval", ids[1], "--", "answer"])).trim(), "42");
    assert!(!forkd(&["fork", "--tag", "cli", "-n", "1"]).status.success());
    ok(forkd(&["kill", "--tag", "cli"]));
    eventually("the children to go", || {
        let listed = ok(forkd(&["ls"]));
        (!ids.iter().any(|id| listed.contains(id))).then_some(())
    });
}

#[test]
fn children_come_from_disk_as_they_come_from_memory() {
    let daemon = daemon();
    let source = || {
        let info = daemon.request("GET", &format!("/v1/snapshots/{}", parent::TAG), None).json();
        info["template"]["source"].clone()
    };
    let before = fork(1);
    assert_eq!(daemon.request("POST", &format!("/v1/snapshots/{}/unload", parent::TAG), None).status, 204);
    let after = fork(2);
    assert_eq!(source(), "disk");
    for id in before.iter().chain(&after) {
        assert_eq!(daemon.sh(id, "cat /root/parent.txt"), "of the parent");
        assert_eq!(daemon.eval(id, "len(pattern)"), "8388608");
    }
    daemon.delete(&[before, after].concat());
}

#[test]
fn a_child_that_dies_tells_how_and_its_siblings_do_not_care() {
    let daemon = daemon();
    let children = fork(3);
    let pid = |id: &str| daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).json()["pid"].as_i64();
    let victim = rustix::process::Pid::from_raw(pid(&children[0]).unwrap() as i32).unwrap();
    rustix::process::kill_process(victim, rustix::process::Signal::KILL).unwrap();
    let crash = json!({"args": ["sh", "-c", "echo c > /proc/sysrq-trigger; sleep 100"], "timeout_secs": 100});
    daemon.request("POST", &format!("/v1/sandboxes/{}/exec", children[1]), Some(crash));
    let end = |id: &str| {
        eventually("an end", || {
            let info = daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).json();
            (info["state"] == "ended").then_some(info)
        })
    };
    let killed = end(&children[0]);
    assert_eq!(killed["reason"], "monitor_died", "{killed}");
    assert!(killed["detail"].as_str().unwrap().contains("signal 9"), "{killed}");
    let panicked = end(&children[1]);
    assert_eq!(panicked["reason"], "panicked", "{panicked}");
    assert_eq!(daemon.eval(&children[2], "1 + 1"), "2");
    daemon.delete(&children);
}

/// The answer of the guest's own port to a client at the host's end of its network.
fn in_network(daemon: &Daemon, id: &str, line: &Value) -> Value {
    let talk = "import socket, sys\n\
                s = socket.create_connection(('10.42.0.2', 8888), timeout=60)\n\
                s.sendall(sys.argv[1].encode() + b'\\n')\n\
                sys.stdout.write(s.makefile().read())\n";
    let netns = daemon.run_dir().join("netns").join(daemon.sandbox(id)["netns"].as_str().unwrap());
    let mut command = std::process::Command::new("nsenter");
    command.arg(format!("--net={}", netns.display())).args(["python3", "-c", talk, &line.to_string()]);
    let said = command.output().unwrap();
    serde_json::from_slice(&said.stdout).unwrap_or_else(|error| panic!("{error}: {said:?}"))
}

#[test]
fn templates_and_children_outlive_a_daemon_killed_with_nine() {
    let mut daemon = alone();
    let children = daemon.fork(SMALL, 2);
    daemon.sh(&children[0], "echo kept > /root/kept");
    let (monitors, templates) = eventually("two children and a template, and no others", || {
        let found = (daemon.monitors(), daemon.templates());
        ((found.0.len(), found.1.len()) == (2, 1)).then_some(found)
    });
    daemon.restart();
    assert_eq!(daemon.monitors(), monitors);
    assert_eq!(daemon.templates(), templates);
    let found: BTreeSet<_> = daemon.sandboxes().into_iter().collect();
    assert_eq!(found, children.iter().cloned().collect(), "{}", daemon.log());
    assert_eq!(daemon.sh(&children[0], "cat /root/kept"), "kept\n");
    // Their networks are theirs, and lead to them; what goes through is counted.
    let traffic = |id: &str, key: &str| -> u64 {
        let stats = daemon.request("GET", &format!("/v1/sandboxes/{id}/stats"), None).json();
        stats[key].as_u64().unwrap_or_else(|| panic!("{key}: {stats}"))
    };
    let keys = ["net_rx_bytes", "net_tx_bytes"];
    let before = keys.map(|key| traffic(&children[1], key));
    let long = "x".repeat(20_000);
    let exec = json!({"action": "exec", "args": ["echo", "heard", long]});
    let heard = in_network(&daemon, &children[1], &exec);
    assert!(heard["stdout"].as_str().is_some_and(|said| said.starts_with("heard xxx")), "{heard}");
    let pong = in_network(&daemon, &children[0], &json!({"action": "ping"}));
    assert_eq!(pong["pong"], true, "{pong}");
    let after = keys.map(|key| traffic(&children[1], key));
    assert!(after[0] > before[0] + 20_000 && after[1] > before[1] + 20_000, "{before:?} {after:?}");
    // The same template forks on, and what ends now is noticed by the new daemon.
    let more = daemon.fork(SMALL, 1);
    assert_eq!(daemon.templates(), templates);
    daemon.delete(&[children, more].concat());
    daemon.unload(SMALL);
    eventually("everything to go", || {
        let left = [monitors.clone(), templates.clone()].concat();
        (!left.into_iter().any(is_monitor)).then_some(())
    });
}

#[test]
fn what_was_asked_wrongly_forks_nothing_and_says_why() {
    let daemon = daemon();
    let before = daemon.sandboxes();
    for (body, status, code) in [
        (json!({"snapshot_tag": "nobody"}), 404, "snapshot_not_found"),
        (json!({"snapshot_tag": "../etc"}), 400, "invalid_request"),
        (json!({"snapshot_tag": parent::TAG, "n": 0}), 400, "invalid_request"),
        (json!({"snapshot_tag": parent::TAG, "n": 1001}), 400, "invalid_request"),
        (json!({"snapshot_tag": parent::TAG, "n": -1}), 400, "invalid_request"),
        (json!({"snapshot_tag": parent::TAG, "image": "python"}), 400, "invalid_request"),
        (json!({"snapshot_tag": parent::TAG, "envs": {"A=B": "c"}}), 400, "invalid_request"),
    ] {
        let response = daemon.request("POST", "/v1/sandboxes", Some(body.clone()));
        assert_eq!(
            (response.status, &response.json()["code"]),
            (status, &json!(code)),
            "{body}: {response:?}"
        );
    }
    for (body, status, code) in [
        (json!({"tag": "a/b", "image": "python"}), 400, "invalid_request"),
        (json!({"tag": "x", "image": "no-such-image"}), 404, "image_not_found"),
        (json!({"tag": parent::TAG, "image": "python"}), 409, "tag_taken"),
        (json!({"tag": "x"}), 400, "invalid_request"),
        (json!({"tag": "x", "image": "python", "vcpus": 99}), 400, "invalid_request"),
    ] {
        let response = daemon.request("POST", "/v1/snapshots", Some(body.clone()));
        assert_eq!(
            (response.status, &response.json()["code"]),
            (status, &json!(code)),
            "{body}: {response:?}"
        );
    }
    assert_eq!(daemon.sandboxes(), before);
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/nobody", None).status, 404);
}

#[test]
fn a_warm_up_that_fails_makes_no_snapshot_and_says_why() {
    let daemon = daemon();
    let body = json!({"tag": "bad", "image": "python", "warm_command": ["sh", "-c", "echo no luck; exit 3"]});
    let response = daemon.request("POST", "/v1/snapshots", Some(body));
    assert_eq!(response.status, 502, "{response:?}");
    assert!(text(&response.body).contains("no luck"), "{}", text(&response.body));
    let info = daemon.request("GET", "/v1/snapshots/bad", None).json();
    assert_eq!(info["status"], "failed", "{info}");
    let fork = daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "bad"})));
    assert_eq!(fork.status, 409, "{fork:?}");
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/bad", None).status, 204);
    assert!(!daemon.data_dir().join("snapshots/bad").exists());
}
