//! The daemon's REST API with real sandboxes behind it.

use forkd_tests::daemon::{Daemon, is_monitor};
use forkd_tests::eventually;
use serde_json::json;

use crate::limits::oom_score;
use crate::parent;

#[test]
fn a_sandbox_is_made_used_and_deleted() {
    let daemon = Daemon::start();
    let id = daemon.create(json!({"image": "python"}));
    assert!(forkd_protocol::names::is_valid_sandbox_id(&id), "{id}");
    assert_eq!(daemon.sandboxes(), std::slice::from_ref(&id));
    let info = daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).json();
    assert_eq!(info["state"], "running", "{info}");

    let answer = daemon.exec(&id, json!({"args": ["sh", "-c", "echo out; echo err >&2; exit 3"]}));
    assert_eq!(
        (&answer["stdout"], &answer["stderr"], &answer["exit_code"]),
        (&json!("out\n"), &json!("err\n"), &json!(3))
    );

    // What one command leaves, the next one finds.
    daemon.exec(&id, json!({"args": ["sh", "-c", "echo kept > /root/note"]}));
    assert_eq!(daemon.exec(&id, json!({"args": ["cat", "/root/note"]}))["stdout"], "kept\n");

    let monitors = daemon.monitors();
    assert_eq!(monitors.len(), 1);
    assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{id}"), None).status, 204);
    assert_eq!(daemon.request("GET", &format!("/v1/sandboxes/{id}"), None).status, 404);
    eventually("the monitor to go", || (!is_monitor(monitors[0]) && daemon.folders() == 0).then_some(()));
}

#[test]
fn a_warmed_python_has_its_imports_and_keeps_its_names() {
    let daemon = Daemon::start();
    let id = daemon.create(json!({"image": "python", "warm": true}));
    let eval = |code: &str| {
        let response =
            daemon.request("POST", &format!("/v1/sandboxes/{id}/eval"), Some(json!({"code": code})));
        assert_eq!(response.status, 200, "{response:?}");
        response.json()
    };
    // The image's own warm-up is over when the sandbox is there.
    assert_eq!(eval("'numpy' in __import__('sys').modules")["result"], "True");
    assert_eq!(eval("x = 41\ndef up(n):\n    return n + 1")["error"], json!(null));
    assert_eq!(eval("up(x)")["result"], "42");
    let printed = eval("print('seen'); x * 2");
    assert_eq!((&printed["stdout"], &printed["result"]), (&json!("seen\n"), &json!("82")));
    let failed = eval("up(y)");
    assert!(failed["error"].as_str().unwrap().contains("NameError"), "{failed}");
    assert!(failed["traceback"].as_str().unwrap().contains("line 1"), "{failed}");
}

#[test]
fn a_command_out_of_time_is_ended_and_what_it_printed_is_not_lost() {
    let daemon = parent::daemon();
    let id = parent::fork(1).remove(0);
    let script = "echo before; (sleep 555 &) ; sleep 556";
    let answer = daemon.exec(&id, json!({"args": ["sh", "-c", script], "timeout_secs": 15}));
    assert_eq!(answer["stdout"], "before\n", "{answer}");
    assert!(answer["error"].as_str().unwrap().contains("15 s"), "{answer}");
    let names = daemon.exec(&id, json!({"args": ["sh", "-c", "cat /proc/[0-9]*/comm | grep -c ^sleep$"]}));
    assert_eq!(names["stdout"], "0\n", "{names}");
    daemon.delete(&[id]);
}

#[test]
fn two_sandboxes_share_an_image_and_nothing_else() {
    let daemon = Daemon::start();
    let a = daemon.create(json!({"image": "python"}));
    daemon.sh(&a, "echo secret > /root/mine; sync");
    // One that is made after another has written starts from the image as it was; and while both run
    // neither sees what the other does.
    let b = daemon.create(json!({"image": "python"}));
    daemon.sh(&a, "echo secret > /root/later; rm /etc/hostname; sync");
    let seen = daemon.exec(&b, json!({"args": ["sh", "-c", "ls /root/mine /root/later /etc/hostname"]}));
    assert_eq!(seen["stdout"], "/etc/hostname\n", "{seen}");
}

#[test]
fn what_has_booted_outlives_its_daemon_and_what_had_not_is_ended() {
    let mut daemon = Daemon::start();
    let id = daemon.create(json!({"image": "python", "labels": {"keep": "me"}, "timeout_secs": 3600}));
    daemon.sh(&id, "echo kept > /root/kept; echo memory > /dev/shm/kept");
    let monitors = daemon.monitors();
    assert_eq!(monitors.len(), 1);
    // Acknowledged as one that starts; its boot is undone.
    daemon.create(json!({"image": "python", "wait": false}));
    let both = eventually("its monitor", || (daemon.monitors().len() == 2).then(|| daemon.monitors()));
    daemon.restart();
    assert_eq!(daemon.sandboxes(), std::slice::from_ref(&id), "{}", daemon.log());
    eventually("the half-made one to go", || {
        (daemon.folders() == 1 && both.iter().filter(|pid| is_monitor(**pid)).count() == 1).then_some(())
    });
    let check = |daemon: &Daemon| {
        assert_eq!(daemon.monitors(), monitors, "{}", daemon.log());
        assert_eq!(oom_score(monitors[0]), 300);
        let info = daemon.sandbox(&id);
        assert_eq!((&info["state"], &info["labels"]["keep"]), (&json!("running"), &json!("me")), "{info}");
        assert!(info["expires_at_unix"].as_u64().is_some(), "{info}");
        assert_eq!(daemon.sh(&id, "cat /root/kept /dev/shm/kept"), "kept\nmemory\n");
    };
    check(&daemon);
    // Stopped and not killed it leaves it, too.
    daemon.stop();
    daemon.restart();
    check(&daemon);
    // It can be branched as before, and ends like any other.
    daemon.branch(&id, json!({"tag": "later", "mode": "live", "wait": false}));
    let child = daemon.fork("later", 1).remove(0);
    assert_eq!(daemon.sh(&child, "cat /dev/shm/kept"), "memory\n");
    // Rolled back it is the same sandbox, in the same boot; its child is not.
    let boot_id = |id: &str| daemon.sh(id, "cat /proc/sys/kernel/random/boot_id");
    let own = boot_id(&id);
    assert_eq!(daemon.sh(&id, "cat /run/forkd/sandbox-id; echo -$FORKD_SANDBOX_ID"), format!("{id}-{id}\n"));
    daemon.tell(&id, "rollback", json!({}));
    assert_eq!(boot_id(&id), own);
    assert_ne!(boot_id(&child), own);
    let monitors = daemon.monitors();
    daemon.when_ready("later");
    // Each inherited the score of another role.
    assert_eq!(daemon.templates().into_iter().map(oom_score).collect::<Vec<_>>(), [-500], "the branch");
    eventually("the score of a sandbox", || {
        daemon.monitors().into_iter().all(|pid| oom_score(pid) == 300).then_some(())
    });
    daemon.delete(&[child, id.clone()]);
    daemon.restart();
    assert!(daemon.sandboxes().is_empty(), "{}", daemon.log());
    eventually("the monitors to go", || {
        (!monitors.iter().any(|pid| is_monitor(*pid)) && daemon.folders() == 0).then_some(())
    });
}

#[test]
fn a_second_daemon_on_the_same_data_is_refused() {
    let daemon = Daemon::start();
    let output = daemon.forkd(&["serve", "--bind", "127.0.0.1:0"]).output().unwrap();
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains(&daemon.pid().to_string()), "{stderr}");
}

#[test]
fn what_was_asked_wrongly_gets_a_sentence_and_starts_nothing() {
    let daemon = Daemon::start();
    for (body, status, code) in [
        (json!({"image": "no-such-image"}), 404, "image_not_found"),
        (json!({"image": "../../etc"}), 400, "invalid_request"),
        (json!({"image": "python", "vcpus": 0}), 400, "invalid_request"),
        (json!({"image": "python", "vcpus": 1000}), 400, "invalid_request"),
        (json!({"image": "python", "mem_size_mib": 1}), 400, "invalid_request"),
        (json!({"image": "python", "mem_size_mib": 1u64 << 40}), 400, "invalid_request"),
        (json!({"image": 7}), 400, "invalid_request"),
        (json!({}), 400, "invalid_request"),
        (json!([]), 400, "invalid_request"),
    ] {
        let response = daemon.request("POST", "/v1/sandboxes", Some(body.clone()));
        assert_eq!(
            (response.status, &response.json()["code"]),
            (status, &json!(code)),
            "{body}: {response:?}"
        );
    }
    assert_eq!(daemon.folders(), 0);
    for path in ["/v1/sandboxes/sbnone", "/v1/sandboxes/..%2f..%2fetc"] {
        assert_eq!(daemon.request("DELETE", path, None).status, 404, "{path}");
    }
}

#[test]
fn only_who_shows_the_token_gets_in_over_tcp() {
    let daemon = Daemon::start();
    let token = std::fs::read_to_string(daemon.data_dir().join("token")).unwrap();
    let bearer = format!("Bearer {}", token.trim());
    let host = format!("127.0.0.1:{}", daemon.port());
    let get = |headers: &[(&str, &str)]| daemon.tcp_request("GET", "/v1/sandboxes", headers, b"").status;
    assert_eq!(get(&[("authorization", &bearer)]), 200);
    assert_eq!(get(&[("authorization", &bearer), ("host", &host), ("origin", "http://localhost:3000")]), 200);
    assert_eq!(get(&[]), 401);
    assert_eq!(get(&[("authorization", "Bearer wrong")]), 401);
    assert_eq!(get(&[("authorization", &bearer), ("host", "evil.example")]), 403);
    assert_eq!(get(&[("authorization", &bearer), ("origin", "https://evil.example")]), 403);
    assert_eq!(daemon.tcp_request("GET", "/healthz", &[], b"").status, 200);
    let printed = daemon.forkd(&["token", "print"]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&printed.stdout).trim(), token.trim());
}
