//! Time-outs, labels, pages, idempotency keys and the archive, with a real daemon and guests of a few instructions.
//! They run wherever `/dev/kvm` opens.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant, SystemTime};

use crate::daemon::{Daemon, eventually, pid, runs, within};
use crate::support::{id, route};
use forkd_store::{Change, Database, MadeSandbox};
use forkd_vmm::guest_code;
use serde_json::{Value, json};

guest_code! {
    /// Is never ready.
    pub(crate) fn hangs,
    "3: hlt",
    "jmp 3b",
}

/// The time limit for saving a guest's memory to disk on a busy computer.
const SAVING: Duration = Duration::from_secs(300);

/// A response with its headers.
#[derive(Debug)]
struct Answer {
    status: u16,
    headers: BTreeMap<String, String>,
    body: Value,
}

/// Sends a request with additional headers; `None` if there was no response.
fn try_ask(
    daemon: &Daemon,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Option<Answer> {
    let mut stream = UnixStream::connect(daemon.path().join("forkd.sock")).ok()?;
    let length = body.len();
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n");
    head += &format!("Content-Type: application/json\r\nContent-Length: {length}\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    write!(stream, "{head}\r\n{body}").ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let mut lines = head.lines();
    let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
    let headers = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_lowercase(), value.into()));
    Some(Answer {
        status,
        headers: headers.collect(),
        body: serde_json::from_str(body).unwrap_or(Value::Null),
    })
}

fn post(daemon: &Daemon, path: &str, key: &str, body: &Value) -> Answer {
    let answer = try_ask(daemon, "POST", path, &[("Idempotency-Key", key)], &body.to_string());
    answer.unwrap_or_else(|| panic!("{path}\n{}", daemon.log()))
}

fn make(daemon: &Daemon, body: Value) -> Value {
    daemon.done(201, "POST", "/v1/sandboxes", Some(body))[0].clone()
}

fn ids(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(id).collect()
}

/// The reason of an archived sandbox's end; `None` while it is listed.
fn gone(daemon: &Daemon, sandbox: &Value) -> Option<String> {
    let (status, answer) = daemon.request("GET", &format!("/v1/sandboxes/{}", id(sandbox)), None);
    (status == 404).then(|| answer["error"].as_str().unwrap().to_owned())
}

/// The deadline of a sandbox, in seconds since 1970.
fn expires(sandbox: &Value) -> u64 {
    sandbox["expires_at_unix"].as_u64().unwrap()
}

/// Waits until one second after `unix`, in seconds since 1970.
fn wait_beyond(unix: u64) {
    let until = SystemTime::UNIX_EPOCH + Duration::from_secs(unix + 1);
    std::thread::sleep(until.duration_since(SystemTime::now()).unwrap_or_default());
}

fn tags(daemon: &Daemon) -> BTreeSet<String> {
    let list = daemon.done(200, "GET", "/v1/snapshots", None);
    list.as_array().unwrap().iter().map(|it| it["tag"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_sandbox_whose_time_is_up_is_gone_and_whoever_asks_is_told_why() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let begun = Instant::now();
    let short = make(&daemon, json!({"snapshot_tag": "tiny", "timeout_secs": 4, "labels": {"job": "7"}}));
    assert_eq!((&short["on_timeout"], &short["labels"]["job"]), (&json!("kill"), &json!("7")));
    // The deadline counts from a moment after the creation, and is rounded up; the creation is rounded down.
    let lives = expires(&short) - short["created_at_unix"].as_u64().unwrap();
    assert!((4..=6 + begun.elapsed().as_secs()).contains(&lives), "{short}");
    let spared = make(&daemon, json!({"snapshot_tag": "tiny", "timeout_secs": 8}));
    let path = format!("/v1/sandboxes/{}", id(&spared));
    let changed = daemon.done(200, "PATCH", &path, Some(json!({"timeout_secs": null, "labels": {"a": "b"}})));
    assert!(changed["expires_at_unix"].is_null() && changed["labels"] == json!({"a": "b"}), "{changed}");

    eventually("its end", || gone(&daemon, &short).is_some());
    let told = gone(&daemon, &short).unwrap();
    assert!(told.contains("timed_out") && told.contains("its time was up") && told.contains("Z ("), "{told}");
    daemon.refused(404, "sandbox_not_found", "POST", &route(&short, "exec"), Some(json!({"args": ["true"]})));
    eventually("its process's end", || !runs(pid(&short)));

    // Other ends: a crash, and a deletion. A crashed sandbox stays listed until it is deleted.
    let deleted = daemon.spawn("tiny", 1).remove(0);
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&deleted)), None);
    assert!(gone(&daemon, &deleted).unwrap().contains("(deleted)"));
    let killed = daemon.spawn("tiny", 1).remove(0);
    let process = rustix::process::Pid::from_raw(pid(&killed)).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("its end", || daemon.sandbox(&id(&killed))["state"] == "ended");
    let listed = daemon.done(200, "GET", "/v1/sandboxes?archived=true", None);
    assert_eq!(ids(&listed), [id(&short), id(&deleted)].as_slice(), "{listed}");
    assert_eq!((&listed[0]["state"], &listed[0]["reason"]), (&json!("archived"), &json!("timed_out")));
    // The older name lists the same, and shows the older state; with both names, the newer one counts.
    let mut older = listed.clone();
    older.as_array_mut().unwrap().iter_mut().for_each(|it| it["state"] = json!("gone"));
    assert_eq!(daemon.done(200, "GET", "/v1/sandboxes?gone=true", None), older);
    assert_eq!(daemon.done(200, "GET", "/v1/sandboxes?archived=true&gone=true", None), listed);
    let living = daemon.done(200, "GET", "/v1/sandboxes?archived=false&gone=false", None);
    assert_eq!(ids(&living), [id(&spared), id(&killed)]);
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&killed)), None);
    assert!(gone(&daemon, &killed).unwrap().contains("monitor_died"), "its first end counts");
    let labelled = daemon.done(200, "GET", "/v1/sandboxes?archived=true&label=job=7", None);
    assert_eq!(ids(&labelled), [id(&short)]);

    // A deadline that passes while no daemon runs is enforced by the next one, unless it was removed.
    let late = make(&daemon, json!({"snapshot_tag": "tiny", "timeout_secs": 6}));
    daemon.kill();
    wait_beyond(expires(&spared).max(expires(&late)));
    assert!(runs(pid(&late)));
    daemon.child = crate::daemon::launch(daemon.path());
    daemon.up();
    eventually("its end", || gone(&daemon, &late).is_some_and(|why| why.contains("timed_out")));
    eventually("its process's end", || !runs(pid(&late)));
    assert_eq!(daemon.list().len(), 1);
    assert_eq!(daemon.sandbox(&id(&spared))["labels"], json!({"a": "b"}), "kept across the restart");
    for sandbox in [&short, &deleted, &killed] {
        assert!(gone(&daemon, sandbox).unwrap().contains("it ended at"));
    }
}

#[test]
fn an_idle_sandbox_is_paused_and_goes_on_when_somebody_uses_it() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = make(&daemon, json!({"snapshot_tag": "tiny", "idle_timeout_secs": 1, "on_timeout": "pause"}));
    assert_eq!((&child["idle_timeout_secs"], &child["on_timeout"]), (&json!(1), &json!("pause")));
    let name = id(&child);
    let state = |daemon: &Daemon, wanted: &str| daemon.sandbox(&name)["state"] == wanted;
    eventually("its pause", || state(&daemon, "paused"));
    daemon.restart();
    assert!(state(&daemon, "paused"));
    // A bare guest has no agent, but the request resumed the sandbox.
    daemon.refused(409, "sandbox_unfit", "POST", &route(&child, "ping"), None);
    let woken = daemon.sandbox(&name);
    assert!(
        woken["state"] == "running"
            || woken["last_active_unix"].as_u64() > child["last_active_unix"].as_u64()
    );
    eventually("its next pause", || state(&daemon, "paused"));

    // Reading a sandbox is no use of it. A sandbox that a client paused is resumed only by a client.
    daemon.done(200, "PATCH", &format!("/v1/sandboxes/{name}"), Some(json!({"idle_timeout_secs": null})));
    daemon.done(200, "POST", &route(&child, "resume"), None);
    daemon.done(200, "POST", &route(&child, "pause"), None);
    daemon.refused(409, "sandbox_paused", "POST", &route(&child, "ping"), None);
    assert!(state(&daemon, "paused"));

    // At its deadline a sandbox is paused once, and does not resume by itself.
    daemon.done(200, "POST", &route(&child, "resume"), None);
    daemon.done(200, "PATCH", &format!("/v1/sandboxes/{name}"), Some(json!({"timeout_secs": 1})));
    eventually("its pause", || state(&daemon, "paused"));
    daemon.refused(409, "sandbox_paused", "POST", &route(&child, "ping"), None);
    eventually("no deadline", || daemon.sandbox(&name)["expires_at_unix"].is_null());
    daemon.done(200, "POST", &route(&child, "resume"), None);
    assert!(state(&daemon, "running"));

    // With `on_timeout` `kill` an idle sandbox ends.
    daemon.done(
        200,
        "PATCH",
        &format!("/v1/sandboxes/{name}"),
        Some(json!({"idle_timeout_secs": 1, "on_timeout": "kill"})),
    );
    eventually("its end", || gone(&daemon, &child).is_some());
    assert!(gone(&daemon, &child).unwrap().contains("idle_timed_out"));
}

#[test]
fn an_idle_sandbox_is_put_away_as_a_snapshot_that_can_be_forked() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let body = |suspend_as: &str| json!({"snapshot_tag": "tiny", "idle_timeout_secs": 1, "on_timeout": "suspend", "suspend_as": suspend_as});
    let first = make(&daemon, body("night"));
    within(SAVING, "its end", || gone(&daemon, &first).is_some());
    let told = gone(&daemon, &first).unwrap();
    assert!(told.contains("(suspended)") && told.contains("snapshot night"), "{told}");
    eventually("its process's end", || !runs(pid(&first)));
    let stored = daemon.done(200, "GET", "/v1/snapshots/night", None);
    assert_eq!((&stored["status"], &stored["branched_from"]), (&json!("ready"), &json!(id(&first))));
    assert!(stored["template"].is_null(), "nothing of it stays in memory: {stored}");
    assert_eq!(daemon.spawn("night", 1)[0]["ready"], true);

    // The tag is taken: the daemon chooses another one and reports it.
    let second = make(&daemon, body("night"));
    within(SAVING, "its end", || gone(&daemon, &second).is_some());
    let own = format!("idle-{}", id(&second));
    assert!(gone(&daemon, &second).unwrap().contains(&own));
    assert_eq!(tags(&daemon), BTreeSet::from(["tiny".into(), "night".into(), own]));

    // A workspace's sandbox is suspended as the workspace.
    let made = json!({"name": "box", "snapshot_tag": "tiny"});
    let made = daemon.done(201, "POST", "/v1/workspaces", Some(made));
    let path = format!("/v1/sandboxes/{}", made["live_sandbox_id"].as_str().unwrap());
    daemon.done(200, "PATCH", &path, Some(json!({"idle_timeout_secs": 1, "on_timeout": "suspend"})));
    within(SAVING, "the workspace's suspension", || {
        daemon.done(200, "GET", "/v1/workspaces/box", None)["status"] == "suspended"
    });
    daemon.refused(404, "sandbox_not_found", "GET", &path, None);
}

#[test]
fn a_daemon_killed_while_it_puts_a_sandbox_away_leaves_it_whole_or_stored_once() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let body = json!({"snapshot_tag": "tiny", "timeout_secs": 1, "on_timeout": "suspend"});
    for round in 0..5u32 {
        let child = make(&daemon, body.clone());
        let tag = format!("idle-{}", id(&child));
        // From the begin of the suspend to a little after its end.
        eventually("its beginning", || tags(&daemon).contains(&tag));
        std::thread::sleep(Duration::from_millis(u64::from(round) * 15));
        daemon.restart();
        within(SAVING, "its end", || gone(&daemon, &child).is_some());
        eventually("its process's end", || !runs(pid(&child)));
        assert_eq!(tags(&daemon), BTreeSet::from(["tiny".into(), tag.clone()]), "round {round}");
        let stored = daemon.done(200, "GET", &format!("/v1/snapshots/{tag}"), None);
        assert_eq!(stored["status"], "ready", "{stored}");
        assert_eq!(daemon.spawn(&tag, 1)[0]["state"], "running");
        daemon.delete_all();
        daemon.done(204, "DELETE", &format!("/v1/snapshots/{tag}"), None);
    }
    assert!(daemon.list().is_empty());
}

#[test]
fn sandboxes_are_found_by_what_is_written_on_them_and_listed_in_pages() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.snapshot("other", "kernel");
    let labelled = |tag: &str, n: usize, labels: Value| {
        let body = json!({"snapshot_tag": tag, "n": n, "labels": labels});
        ids(&daemon.done(201, "POST", "/v1/sandboxes", Some(body)))
    };
    let red = labelled("tiny", 3, json!({"colour": "red", "team/x": "a b&c"}));
    let blue = labelled("other", 2, json!({"colour": "blue"}));
    let plain = labelled("tiny", 2, json!({}));
    let found = |query: &str| -> BTreeSet<String> {
        ids(&daemon.done(200, "GET", &format!("/v1/sandboxes{query}"), None)).into_iter().collect()
    };
    let set = |lists: &[&[String]]| -> BTreeSet<String> { lists.concat().into_iter().collect() };
    assert_eq!(found("?label=colour=red"), set(&[&red]));
    assert_eq!(found("?label=colour"), set(&[&red, &blue]));
    assert_eq!(found("?label=colour&label=team/x=a%20b%26c"), set(&[&red]));
    assert_eq!(found("?label=colour=red&label=colour=blue"), set(&[]));
    assert_eq!(found("?snapshot_tag=tiny"), set(&[&red, &plain]));
    assert_eq!(found("?snapshot_tag=tiny&state=running&label=colour"), set(&[&red]));
    assert_eq!(found("?state=paused"), set(&[]));
    let archived =
        ["?gone=maybe", "?gone=true&state=running", "?archived=maybe", "?archived=true&state=ended"];
    for bad in ["?state=lost", "?limit=0", "?cursor=%20"].into_iter().chain(archived) {
        daemon.refused(400, "invalid_request", "GET", &format!("/v1/sandboxes{bad}"), None);
    }
    for bad in [json!({"a b": "x"}), json!({"a": "x\n"}), json!({"a": 7})] {
        let body = json!({"snapshot_tag": "tiny", "labels": bad});
        assert_eq!(daemon.request("POST", "/v1/sandboxes", Some(body.clone())).0, 400, "{body}");
        let path = format!("/v1/sandboxes/{}", plain[0]);
        assert_eq!(daemon.request("PATCH", &path, Some(json!({"labels": bad}))).0, 400, "{body}");
    }

    // The pages together are the whole list, also across a restart of the daemon.
    let whole = ids(&daemon.done(200, "GET", "/v1/sandboxes", None));
    assert_eq!(whole.len(), 7);
    let mut seen = Vec::new();
    let mut path = "/v1/sandboxes?limit=3".to_owned();
    loop {
        let answer = try_ask(&daemon, "GET", &path, &[], "").unwrap();
        assert_eq!(answer.status, 200, "{answer:?}");
        seen.extend(ids(&answer.body));
        let Some(cursor) = answer.headers.get("x-next-cursor") else { break };
        let link = format!("</v1/sandboxes?limit=3&cursor={cursor}>; rel=\"next\"");
        assert_eq!(answer.headers["link"], link);
        path = format!("/v1/sandboxes?limit=3&cursor={cursor}");
        daemon.restart();
    }
    assert_eq!(seen, whole);
    for (list, count) in [("/v1/snapshots", 2), ("/v1/workspaces", 0)] {
        let answer = try_ask(&daemon, "GET", &format!("{list}?limit=1"), &[], "").unwrap();
        assert_eq!(answer.body.as_array().unwrap().len(), count.min(1), "{answer:?}");
        assert_eq!(answer.headers.contains_key("x-next-cursor"), count > 1);
        daemon.refused(400, "invalid_request", "GET", &format!("{list}?limit=1001"), None);
    }
}

#[test]
fn a_request_with_a_key_is_done_once_and_answered_the_same_also_by_another_daemon() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let body = json!({"snapshot_tag": "tiny", "n": 3});
    let first = post(&daemon, "/v1/sandboxes", "k1", &body);
    assert_eq!(first.status, 201, "{first:?}");
    assert!(!first.headers.contains_key("idempotent-replayed"));
    for round in 0..2 {
        let again = post(&daemon, "/v1/sandboxes", "k1", &body);
        assert_eq!((again.status, &again.body), (201, &first.body));
        assert_eq!(again.headers["idempotent-replayed"], "true");
        assert_eq!(again.headers["content-type"], "application/json");
        assert_eq!(daemon.list().len(), 3, "round {round}");
        daemon.restart();
    }
    let other = post(&daemon, "/v1/sandboxes", "k1", &json!({"snapshot_tag": "tiny", "n": 2}));
    assert_eq!(other.status, 422, "{other:?}");
    assert_eq!(post(&daemon, "/v1/sandboxes?wait=false", "k1", &body).status, 422);
    assert_eq!(post(&daemon, "/v1/sandboxes", "k2", &body).status, 201);
    assert_eq!(daemon.list().len(), 6);

    // An invalid request stays invalid; one that failed for another reason may be repeated.
    let wrong = json!({"snapshot_tag": "tiny", "n": 0});
    assert_eq!(post(&daemon, "/v1/sandboxes", "k3", &wrong).status, 400);
    let again = post(&daemon, "/v1/sandboxes", "k3", &wrong);
    assert_eq!((again.status, again.headers["idempotent-replayed"].as_str()), (400, "true"));
    let early = json!({"snapshot_tag": "later"});
    assert_eq!(post(&daemon, "/v1/sandboxes", "k4", &early).status, 404);
    daemon.snapshot("later", "kernel");
    assert_eq!(post(&daemon, "/v1/sandboxes", "k4", &early).status, 201);
    for bad in ["", "a b", "\u{e4}", &"k".repeat(256)] {
        assert_eq!(post(&daemon, "/v1/sandboxes", bad, &body).status, 400, "{bad:?}");
    }
    // Keys work for other objects, too.
    let source = daemon.list().remove(0);
    let branch = |daemon: &Daemon| post(daemon, &route(&source, "branch"), "k5", &json!({}));
    let tag = branch(&daemon).body["tag"].clone();
    assert!(tag.is_string());
    assert_eq!(branch(&daemon).body["tag"], tag);
    // Several clients may use the same key to read: it has no effect there.
    let headers = [("Idempotency-Key", "k1")];
    assert_eq!(try_ask(&daemon, "GET", "/v1/sandboxes", &headers, "").unwrap().status, 200);
}

#[test]
fn a_key_whose_request_is_under_way_or_was_cut_off_is_not_done_twice() {
    let Some(mut daemon) = Daemon::start(&[("kernel", crate::support::spells()), ("hangs", hangs())]) else {
        return;
    };
    daemon.snapshot("tiny", "kernel");
    // This request lasts as long as the daemon waits, or until it is cancelled.
    let body = json!({"tag": "never", "kernel": daemon.path().join("hangs"), "mem_size_mib": 64});
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| post(&daemon, "/v1/snapshots", "slow", &body));
        eventually("its beginning", || tags(&daemon).contains("never"));
        let meanwhile = post(&daemon, "/v1/snapshots", "slow", &body);
        assert_eq!(meanwhile.status, 409, "{meanwhile:?}");
        assert_eq!(meanwhile.body["code"], "idempotency_in_progress", "{meanwhile:?}");
        assert_eq!(post(&daemon, "/v1/snapshots", "slow", &json!({"tag": "x"})).status, 422);
        daemon.done(204, "DELETE", "/v1/snapshots/never", None);
        assert!(asked.join().unwrap().status >= 400);
    });
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| {
            try_ask(&daemon, "POST", "/v1/snapshots", &[("Idempotency-Key", "slow")], &body.to_string())
        });
        eventually("its beginning", || tags(&daemon).contains("never"));
        daemon.pull_the_plug();
        assert!(asked.join().unwrap().is_none());
    });
    daemon.restart();
    let unknown = post(&daemon, "/v1/snapshots", "slow", &body);
    assert_eq!(unknown.status, 409, "{unknown:?}");
    assert_eq!(unknown.body["code"], "idempotency_outcome_unknown", "{unknown:?}");

    // Children have a record of their request's key: existing children are the answer.
    let body = json!({"snapshot_tag": "tiny", "n": 20});
    let begun = Instant::now();
    assert_eq!(post(&daemon, "/v1/sandboxes", "whole", &body).status, 201);
    let whole = begun.elapsed();
    daemon.delete_all();
    let mut found = Vec::new();
    for round in 0..6u32 {
        let key = format!("cut-{round}");
        std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                try_ask(&daemon, "POST", "/v1/sandboxes", &[("Idempotency-Key", &key)], &body.to_string())
            });
            std::thread::sleep(whole * round / 5);
            daemon.pull_the_plug();
            let _ = asked.join();
        });
        daemon.restart();
        let there = daemon.list().len();
        let answer = post(&daemon, "/v1/sandboxes", &key, &body);
        assert_eq!(answer.status, 201, "{answer:?}");
        let answered: BTreeSet<String> = ids(&answer.body).into_iter().collect();
        let listed: BTreeSet<String> = daemon.list().iter().map(id).collect();
        assert_eq!(answered, listed, "nothing is there beside what was answered");
        assert_eq!(listed.len(), if there == 0 { 20 } else { there });
        let again = post(&daemon, "/v1/sandboxes", &key, &body);
        assert_eq!((again.status, &again.body), (201, &answer.body));
        found.push(there);
        daemon.delete_all();
    }
    eprintln!("children found after the plug was pulled: {found:?}");
}

#[test]
fn a_fork_that_was_cut_off_returns_its_children_when_it_is_repeated() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let source = daemon.spawn("tiny", 1).remove(0);
    let (path, body) = (route(&source, "fork"), json!({"n": 20}));
    let others = |daemon: &Daemon| -> BTreeSet<String> {
        daemon.list().iter().map(id).filter(|other| *other != id(&source)).collect()
    };
    let begun = Instant::now();
    assert_eq!(post(&daemon, &path, "whole", &body).status, 201);
    let whole = begun.elapsed();
    let mut found = Vec::new();
    for round in 0..6u32 {
        for child in others(&daemon) {
            daemon.done(204, "DELETE", &format!("/v1/sandboxes/{child}"), None);
        }
        let key = format!("cut-{round}");
        std::thread::scope(|scope| {
            let asked = scope
                .spawn(|| try_ask(&daemon, "POST", &path, &[("Idempotency-Key", &key)], &body.to_string()));
            std::thread::sleep(whole * round / 5);
            daemon.pull_the_plug();
            let _ = asked.join();
        });
        daemon.restart();
        let there = others(&daemon).len();
        let answer = post(&daemon, &path, &key, &body);
        assert_eq!(answer.status, 201, "{answer:?}");
        let answered: BTreeSet<String> = ids(&answer.body).into_iter().collect();
        assert_eq!(answered, others(&daemon), "nothing is there beside what was answered");
        assert_eq!(answered.len(), if there == 0 { 20 } else { there });
        found.push(there);
    }
    eprintln!("children found after the plug was pulled: {found:?}");
}

#[test]
fn a_sandbox_that_was_deleted_does_not_come_back_with_the_next_daemon() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    for round in 0..3 {
        let children = daemon.spawn("tiny", 10);
        let process = rustix::process::Pid::from_raw(pid(&children[0])).unwrap();
        rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
        eventually("an end", || daemon.sandbox(&id(&children[0]))["state"] == "ended");
        // This request makes the daemon write the archive first.
        daemon.done(200, "GET", "/v1/sandboxes?archived=true", None);
        // At once: none of their processes has ended yet.
        daemon.delete_all();
        daemon.restart();
        assert!(daemon.list().is_empty(), "round {round}");
        eventually("their ends", || !children.iter().any(|child| runs(pid(child))));
        eventually("empty folders", || daemon.left("sandboxes") == 0);
        eventually("a word on it", || {
            gone(&daemon, &children[1]).is_some_and(|why| why.contains("it ended at"))
        });
    }
}

#[test]
fn a_client_that_goes_away_finds_the_answer_when_it_comes_back() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let body = json!({"snapshot_tag": "tiny", "n": 10}).to_string();
    let mut stream = UnixStream::connect(daemon.path().join("forkd.sock")).unwrap();
    write!(
        stream,
        "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nIdempotency-Key: gone\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    )
    .unwrap();
    // The client does not wait for the response. Without a key it would lose its children.
    eventually("its beginning", || !daemon.list().is_empty());
    drop(stream);
    let body = serde_json::from_str(&body).unwrap();
    eventually("an answer", || post(&daemon, "/v1/sandboxes", "gone", &body).status == 201);
    let answer = post(&daemon, "/v1/sandboxes", "gone", &body);
    assert_eq!(answer.headers["idempotent-replayed"], "true");
    assert_eq!(ids(&answer.body).len(), 10);
    assert_eq!(daemon.list().len(), 10);
}

#[test]
fn sandboxes_that_went_with_the_host_are_reported_gone() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let kept = daemon.spawn("tiny", 1).remove(0);
    daemon.terminate();
    let before = |id: &str| {
        Change::Made(MadeSandbox {
            id: id.into(),
            owner: "local".into(),
            boot_id: "another".into(),
            snapshot_tag: Some("tiny".into()),
            labels: BTreeMap::from([("job".into(), "old".into())]),
            created_at_unix: 1,
        })
    };
    let database = Database::open(&daemon.path().join("forkd.db")).unwrap();
    database.note_sandboxes(&[before("sbbefore1"), before("sbbefore2")]).unwrap();
    drop(database);
    daemon.child = crate::daemon::launch(daemon.path());
    daemon.up();
    assert!(daemon.log().contains("the host was rebooted"), "{}", daemon.log());
    daemon.refused(404, "sandbox_not_found", "GET", "/v1/sandboxes/sbbefore1", None);
    daemon.refused(404, "sandbox_not_found", "GET", "/v1/sandboxes/sbnever", None);
    let listed = daemon.done(200, "GET", "/v1/sandboxes?archived=true&label=job=old", None);
    assert_eq!(ids(&listed), ["sbbefore1", "sbbefore2"]);
    assert_eq!(listed[0]["reason"], "host_rebooted");
    assert_eq!(daemon.sandbox(&id(&kept))["state"], "running");
}

#[test]
fn every_child_says_whether_it_is_ready_and_one_that_is_not_can_be_waited_for() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.snapshot("mute", "mute");
    for child in daemon.spawn("tiny", 3) {
        assert_eq!(child["ready"], true);
        assert!(child["ready_ms"].as_f64().unwrap() > 0.0, "{child}");
    }
    let body = json!({"snapshot_tag": "tiny", "n": 3});
    let children = daemon.done(201, "POST", "/v1/sandboxes?wait=false", Some(body));
    for child in children.as_array().unwrap() {
        assert_eq!(child["ready"], child["state"] == "running");
        let path = format!("/v1/sandboxes/{}?wait=ready&timeout_secs=60", id(child));
        let ready = daemon.done(200, "GET", &path, None);
        assert_eq!((&ready["ready"], &ready["state"]), (&json!(true), &json!("running")));
        assert!(ready["ready_ms"].as_f64().unwrap() > 0.0, "{ready}");
    }
    // A child that never gets ready is returned as it is after the time limit.
    let mute = make_without_waiting(&daemon, "mute");
    let path = format!("/v1/sandboxes/{}", id(&mute));
    let waited = daemon.done(200, "GET", &format!("{path}?wait=ready&timeout_secs=1"), None);
    assert_eq!(waited["ready"], false, "{waited}");
    daemon.refused(400, "invalid_request", "GET", &format!("{path}?wait=long"), None);
    daemon.refused(400, "invalid_request", "GET", &format!("{path}?timeout_secs=0"), None);
}

fn make_without_waiting(daemon: &Daemon, tag: &str) -> Value {
    daemon.done(201, "POST", "/v1/sandboxes?wait=false", Some(json!({"snapshot_tag": tag})))[0].clone()
}
