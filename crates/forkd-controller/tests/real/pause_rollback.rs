//! Pause, resume and rollback with a real daemon and guests of a few instructions. They run wherever `/dev/kvm`
//! opens.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use crate::auth::add;
use crate::daemon::{Daemon, eventually, pid, runs};
use crate::support::{children_of, id, route};
use serde_json::{Value, json};

#[test]
fn a_paused_sandbox_stands_still_until_it_is_resumed_also_across_a_restart() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let name = id(&child);
    let still = |daemon: &Daemon| {
        let before = daemon.printed(&name).len();
        std::thread::sleep(Duration::from_millis(300));
        before == daemon.printed(&name).len()
    };
    // On a busy computer the next letter may take longer than that.
    let spells = |daemon: &Daemon| {
        let before = daemon.printed(&name).len();
        eventually("the next letter", || daemon.printed(&name).len() > before);
    };
    spells(&daemon);
    for _ in 0..2 {
        let paused = daemon.done(200, "POST", &route(&child, "pause"), None);
        assert_eq!((&paused["state"], &paused["pid"]), (&json!("paused"), &child["pid"]));
    }
    assert!(still(&daemon));
    daemon.refused(409, "sandbox_paused", "POST", &route(&child, "ping"), None);
    daemon.refused(409, "sandbox_paused", "POST", &route(&child, "exec"), Some(json!({"args": ["true"]})));

    daemon.restart();
    assert_eq!(daemon.sandbox(&name)["state"], "paused");
    assert!(still(&daemon));
    for _ in 0..2 {
        let resumed = daemon.done(200, "POST", &route(&child, "resume"), None);
        assert_eq!((&resumed["state"], &resumed["pid"]), (&json!("running"), &child["pid"]));
    }
    spells(&daemon);

    // A paused sandbox can be deleted; one that has ended cannot be paused.
    daemon.done(200, "POST", &route(&child, "pause"), None);
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{name}"), None);
    eventually("its end", || !runs(pid(&child)));
    daemon.refused(404, "sandbox_not_found", "POST", &route(&child, "pause"), None);
    let other = daemon.spawn("tiny", 1).remove(0);
    let process = rustix::process::Pid::from_raw(pid(&other)).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("its end", || daemon.sandbox(&id(&other))["state"] == "ended");
    daemon.refused(409, "sandbox_ended", "POST", &route(&other, "pause"), None);
    daemon.refused(409, "sandbox_ended", "POST", &route(&other, "resume"), None);
}

#[test]
fn a_sandbox_taken_back_goes_on_from_the_snapshot_under_its_id() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("one", "kernel");
    std::thread::sleep(Duration::from_millis(37));
    daemon.snapshot("two", "kernel");
    let body = json!({"snapshot_tag": "one", "memory_limit_mib": 333, "timeout_secs": 3000});
    let child = daemon.done(201, "POST", "/v1/sandboxes", Some(body))[0].clone();
    let name = id(&child);
    let letter = daemon.first_letter(&name);

    // To its own snapshot: another process, and the same sandbox.
    let mut last = child.clone();
    for _ in 0..3 {
        let back = daemon.done(200, "POST", &route(&child, "rollback"), None);
        for same in ["id", "snapshot_tag", "memory_limit_mib", "created_at_unix", "netns", "vcpus"] {
            assert_eq!(back[same], child[same], "{same}");
        }
        assert_eq!((&back["state"], &back["rolled_back_to"]), (&json!("running"), &json!("one")));
        assert!(!runs(pid(&last)) && runs(pid(&back)), "{last} {back}");
        assert_eq!(daemon.first_letter(&name), letter);
        assert_eq!(children_of(daemon.template_of("one")), 1);
        last = back;
    }

    // To another snapshot, of another lineage; the next daemon keeps that.
    let reference = daemon.spawn("two", 1).remove(0);
    let back = daemon.done(200, "POST", &route(&child, "rollback"), Some(json!({"to": "two"})));
    assert_eq!((&back["rolled_back_to"], &back["snapshot_tag"]), (&json!("two"), &json!("one")));
    assert_eq!(daemon.first_letter(&name), daemon.first_letter(&id(&reference)));
    assert_eq!(children_of(daemon.template_of("one")), 0);
    assert_eq!(children_of(daemon.template_of("two")), 2);
    daemon.restart();
    let after = daemon.sandbox(&name);
    for same in ["state", "pid", "rolled_back_to", "snapshot_tag", "created_at_unix"] {
        assert_eq!(after[same], back[same], "{same}: {after}");
    }

    // A paused sandbox runs again, and so does one that has ended.
    daemon.done(200, "POST", &route(&child, "pause"), None);
    let back = daemon.done(200, "POST", &route(&child, "rollback"), Some(json!({"to": "one"})));
    assert_eq!(back["state"], "running");
    assert_eq!(daemon.first_letter(&name), letter);
    let process = rustix::process::Pid::from_raw(pid(&back)).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("its end", || daemon.sandbox(&name)["state"] == "ended");
    let back = daemon.done(200, "POST", &route(&child, "rollback"), None);
    assert_eq!(back["state"], "running");

    daemon.delete_all();
    for tag in ["one", "two"] {
        daemon.done(204, "DELETE", &format!("/v1/snapshots/{tag}"), None);
    }
    eventually("empty folders", || ["sandboxes", "templates"].iter().all(|it| daemon.left(it) == 0));
    assert!(daemon.monitors().is_empty());
}

#[test]
fn a_rollback_that_cannot_be_leaves_the_sandbox_alone_and_one_that_fails_ends_it() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.snapshot("mute", "mute");
    let child = daemon.spawn("tiny", 1).remove(0);
    let back = |body: Value| (route(&child, "rollback"), Some(body));
    for (status, code, body) in [
        (404, "snapshot_not_found", json!({"to": "nope"})),
        (400, "invalid_request", json!({"to": "../x"})),
        (400, "invalid_request", json!({"surprise": 1})),
    ] {
        let (path, body) = back(body);
        daemon.refused(status, code, "POST", &path, body);
        assert!(runs(pid(&child)));
    }
    daemon.refused(404, "sandbox_not_found", "POST", "/v1/sandboxes/sb1/rollback", None);
    assert_eq!(daemon.sandbox(&id(&child))["pid"], child["pid"]);
    let left = std::fs::read_dir(daemon.place("sandboxes").join(id(&child))).unwrap();
    let left: Vec<_> = left.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!left.iter().any(|name| name == "next" || name == "end.json"), "{left:?}");

    // The guest of `mute` never gets ready: the sandbox has ended, with the reason, and can be rolled back again.
    let (path, body) = back(json!({"to": "mute"}));
    daemon.refused(502, "guest_failed", "POST", &path, body);
    let ended = daemon.sandbox(&id(&child));
    assert_eq!((&ended["state"], &ended["reason"]), (&json!("ended"), &json!("rollback_failed")));
    eventually("no process", || children_of(daemon.template_of("mute")) == 0);
    assert!(!runs(pid(&child)));
    let again = daemon.done(200, "POST", &path, Some(json!({"to": "tiny"})));
    assert_eq!(again["state"], "running");
    daemon.delete_all();
    eventually("empty folders", || daemon.left("sandboxes") == 0);
}

#[test]
fn many_rollbacks_at_once_and_a_delete_leave_at_most_one_process() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let template = daemon.template_of("tiny");
    let child = daemon.spawn("tiny", 1).remove(0);
    let (done, refused) = std::thread::scope(|scope| {
        let tries: Vec<_> = (0..6)
            .map(|_| scope.spawn(|| daemon.request("POST", &route(&child, "rollback"), None)))
            .collect();
        let answers: Vec<_> = tries.into_iter().map(|it| it.join().unwrap()).collect();
        answers.into_iter().partition::<Vec<_>, _>(|(status, _)| *status == 200)
    });
    assert!(!done.is_empty());
    assert!(refused.iter().all(|(status, _)| *status == 409), "{refused:?}");
    assert_eq!(daemon.sandbox(&id(&child))["state"], "running");
    assert_eq!(children_of(template), 1);
    std::thread::scope(|scope| {
        let back = scope.spawn(|| daemon.request("POST", &route(&child, "rollback"), None));
        std::thread::sleep(Duration::from_millis(2));
        daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&child)), None);
        let (status, answer) = back.join().unwrap();
        assert!([200, 404, 409, 502].contains(&status), "{status} {answer}");
    });
    eventually("no process", || children_of(template) == 0);
    eventually("empty folders", || daemon.left("sandboxes") == 0);
}

#[test]
fn a_daemon_killed_in_a_rollback_leaves_the_old_the_new_or_an_ended_sandbox() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let template = daemon.template_of("tiny");
    let child = daemon.spawn("tiny", 1).remove(0);
    let path = route(&child, "rollback");
    let mut seen = std::collections::BTreeMap::<String, u32>::new();
    let begun = Instant::now();
    daemon.done(200, "POST", &path, None);
    let whole = begun.elapsed();
    for round in 0..12 {
        let before = daemon.sandbox(&id(&child));
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| daemon.try_request("POST", &path, None));
            // From the begin of the rollback to a little after its end.
            std::thread::sleep(whole * round / 9);
            daemon.pull_the_plug();
            let _ = asked.join();
        });
        daemon.restart();
        let after = daemon.sandbox(&id(&child));
        let what = match after["state"].as_str().unwrap() {
            "running" if after["pid"] == before["pid"] => "old",
            "running" => "new",
            "ended" => {
                let detail = after["detail"].as_str().unwrap();
                assert!(after["reason"] == "rollback_failed", "{after}");
                assert!(detail.contains("the daemon was stopped"), "{after}");
                "ended"
            }
            other => panic!("{other}: {after}"),
        };
        *seen.entry(what.into()).or_default() += 1;
        let processes = usize::from(what != "ended");
        eventually("one process or none", || children_of(template) == processes);
        if what == "ended" {
            daemon.done(200, "POST", &path, None);
        }
    }
    eprintln!("{seen:?}");
    assert_eq!(daemon.list().len(), 1);
    daemon.delete_all();
    eventually("empty folders", || daemon.left("sandboxes") == 0);
}

/// The response of a sandbox's agent port.
fn say(target: &str, bytes: &str) -> Value {
    let mut stream = std::net::TcpStream::connect(target).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// The same for a client that runs as another user.
fn say_as_nobody(target: &str, line: &str) -> Value {
    let (host, port) = target.split_once(':').unwrap();
    let talk = format!("exec 3<>/dev/tcp/{host}/{port}; printf '%s\\n' '{line}' >&3; cat <&3");
    let mut command = std::process::Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", &talk]);
    serde_json::from_slice(&command.output().unwrap().stdout).unwrap()
}

#[test]
fn an_agent_port_is_opened_when_asked_for_and_stays_through_rollback_and_restart_until_the_end() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    // By default a sandbox has no agent port, only the address in its own network.
    let plain = daemon.spawn("tiny", 1).remove(0);
    assert_eq!(plain["guest_addr"], "10.42.0.2:8888");
    let body = json!({"snapshot_tag": "tiny", "agent_port": true});
    let child = daemon.done(201, "POST", "/v1/sandboxes", Some(body))[0].clone();
    let target = child["guest_addr"].as_str().unwrap().to_owned();
    assert!(target.starts_with("127.0.0.1:"), "{target}");

    // A bare kernel has no agent: a line gets this error, and an HTTP request is refused.
    let no_agent = |target: &str| {
        let answer = say(target, "{\"action\": \"ping\"}\n");
        assert!(answer["error"].as_str().unwrap().contains("bare kernel"), "{answer}");
        assert_eq!(answer["exit_code"], 1);
    };
    no_agent(&target);
    // Every user of this host can connect, but only root and members of group forkd get an answer.
    let refused = say_as_nobody(&target, "{\"action\": \"ping\"}");
    let why = refused["error"].as_str().unwrap();
    assert!(
        why.contains("user 65534 may not use this port") && why.contains("forkd agent-port"),
        "{refused}"
    );
    let post = say(&target, "POST / HTTP/1.1\r\nContent-Length: 19\r\n\r\n{\"action\": \"ping\"}\n");
    assert!(post["error"].as_str().unwrap().contains("not HTTP"), "{post}");

    // The same over HTTP, on its own route.
    // That route has an older path, too.
    let user = add(&daemon, json!({"name": "ann", "scope": "use"}));
    for path in ["json-lines", "line"] {
        let ping = || Some(json!({"action": "ping"}));
        let over_http = daemon.done(200, "POST", &route(&child, path), ping());
        assert!(over_http["error"].as_str().unwrap().contains("bare kernel"), "{over_http}");
        let unknown = format!("/v1/sandboxes/sb0/{path}");
        daemon.refused(404, "sandbox_not_found", "POST", &unknown, ping());
        // The scope suffices, but the sandbox is another owner's.
        user.refused(404, "sandbox_not_found", "POST", &route(&child, path), ping());
    }

    // Opened later, and more than once.
    let opened = daemon.done(200, "PUT", &route(&plain, "agent-port"), None);
    for path in ["agent-port", "line-port"] {
        assert_eq!(daemon.done(200, "PUT", &route(&plain, path), None), opened);
        user.refused(404, "sandbox_not_found", "PUT", &route(&plain, path), None);
        user.refused(404, "sandbox_not_found", "DELETE", &route(&plain, path), None);
    }
    assert_eq!(daemon.sandbox(&id(&plain))["guest_addr"], opened["target"]);
    no_agent(opened["target"].as_str().unwrap());
    for path in ["agent-port", "line-port"] {
        let opened = daemon.done(200, "PUT", &route(&plain, path), None);
        daemon.done(204, "DELETE", &route(&plain, path), None);
        eventually("its port to close", || {
            std::net::TcpStream::connect(opened["target"].as_str().unwrap()).is_err()
        });
    }
    assert_eq!(daemon.sandbox(&id(&plain))["guest_addr"], "10.42.0.2:8888");

    daemon.done(200, "POST", &route(&child, "rollback"), Some(json!({"to": "tiny"})));
    no_agent(&target);
    daemon.restart();
    assert_eq!(daemon.sandbox(&id(&child))["guest_addr"], target);
    no_agent(&target);
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&child)), None);
    eventually("its port to close", || std::net::TcpStream::connect(&target).is_err());

    let log = std::fs::read_to_string(daemon.path().join("audit.log")).unwrap();
    let lines = log.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let talks: Vec<Value> = lines.filter(|line| line["method"] == "JSON-LINES").collect();
    let by = |identity: Value, outcome: &str| {
        talks.iter().filter(|talk| talk["identity"] == identity && talk["outcome"] == outcome).count()
    };
    assert_eq!((by(Value::Null, "refused"), by(json!("local"), "failed")), (1, talks.len() - 1), "{talks:?}");
    let refused = talks.iter().find(|talk| talk["outcome"] == "refused").unwrap();
    assert!(refused["peer"].as_str().unwrap().ends_with(" uid=65534"), "{refused}");
    assert_eq!(refused["target"], child["id"]);
}
