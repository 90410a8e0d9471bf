//! The command's conversations with a daemon, from its arguments to its exit status. The daemon is a
//! fake, so that it can be slow, refuse and fail at will.
#![allow(clippy::unwrap_used)]

mod branches;
mod chains;
mod copies;
mod endings;
mod fake_daemon;
mod lines;
mod local;
mod templates;

use std::process::Child;
use std::time::{Duration, Instant};

use fake_daemon::{FakeDaemon, Said};
use serde_json::{Value, json};

fn snapshot(status: &str, phase: Option<&str>) -> Value {
    json!({ "tag": "t", "status": status, "phase": phase, "created_at_unix": 1, "image": "python", "vcpus": 1,
            "mem_size_mib": 512, "memory_bytes": 1 << 20, "dir": "/d" })
}

fn child(id: &str) -> Value {
    json!({ "id": id, "snapshot_tag": "t", "state": "running", "pid": 7, "vcpus": 1, "mem_size_mib": 512,
            "created_at_unix": 1, "ready_ms": 4.5 })
}

/// Sends ^C once the daemon was asked for `line`, and waits for the end.
fn interrupt_after(daemon: &FakeDaemon, command: Child, line: &str) -> Said {
    let begun = Instant::now();
    while !daemon.lines().iter().any(|asked| asked == line) {
        assert!(begun.elapsed() < Duration::from_secs(30), "never asked for {line}: {:?}", daemon.lines());
        std::thread::sleep(Duration::from_millis(10));
    }
    let pid = rustix::process::Pid::from_child(&command);
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    Said::from(command.wait_with_output().unwrap())
}

const ASK: &str = "POST /v1/snapshots?wait=false";
const SNAPSHOT: &[&str] = &["snapshot", "--tag", "t", "--image", "python"];
const FORK: &str = "POST /v1/sandboxes?results=each";

#[test]
fn a_snapshot_is_asked_for_once_and_followed_phase_by_phase_until_it_is_ready() {
    let polls = std::sync::atomic::AtomicUsize::new(0);
    let daemon = FakeDaemon::start(move |line| match line {
        ASK => (202, snapshot("writing", Some("booting"))),
        "GET /v1/snapshots/t" => match polls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) {
            0 => (200, snapshot("writing", Some("warming"))),
            _ => (200, snapshot("ready", None)),
        },
        _ => (404, Value::Null),
    });
    let said = daemon.run(&[SNAPSHOT, &["--warm", "a && b", "--json"]].concat());
    assert_eq!(said.status, Some(0), "{said:?}");
    assert_eq!(said.json()["dir"], "/d");
    assert!(said.stderr.contains("snapshot t: booting\n"), "{said:?}");
    assert!(said.stderr.contains("snapshot t: warming (booting took 0."), "{said:?}");
    assert_eq!(daemon.lines(), [ASK, "GET /v1/snapshots/t", "GET /v1/snapshots/t"]);
    assert_eq!(daemon.asked()[0].1["warm_command"], json!(["sh", "-c", "a && b"]));
}

#[test]
fn a_refused_failed_or_removed_snapshot_says_why_and_fails() {
    let refusing = FakeDaemon::start(|_| (409, json!({ "error": "t is there: forkd rmi t" })));
    let failing = FakeDaemon::start(|line| {
        let mut failed = snapshot("failed", None);
        failed["error"] = json!("the warm-up exited with 3:\n\u{1b}[2Jno such file");
        if line == ASK { (202, snapshot("writing", None)) } else { (200, failed) }
    });
    let vanishing =
        FakeDaemon::start(
            |line| if line == ASK { (202, snapshot("writing", None)) } else { (404, Value::Null) },
        );
    for (daemon, why) in [
        (refusing, "t is there: forkd rmi t"),
        (failing, "exited with 3:\n[2Jno such file"),
        (vanishing, "was removed"),
    ] {
        let said = daemon.run(SNAPSHOT);
        assert_eq!((said.status, said.stdout.as_str()), (Some(1), ""), "{said:?}");
        assert!(said.stderr.contains(why), "{said:?}");
        assert!(!daemon.lines().iter().any(|line| line.starts_with("DELETE")), "{:?}", daemon.lines());
    }
}

#[test]
fn an_interrupted_snapshot_is_cancelled_and_says_so() {
    let daemon = FakeDaemon::start(|line| match line {
        "DELETE /v1/snapshots/t" => (204, Value::Null),
        _ => (202, snapshot("writing", Some("warming"))),
    });
    let said = interrupt_after(&daemon, daemon.forkd(SNAPSHOT).spawn().unwrap(), "GET /v1/snapshots/t");
    assert_eq!(said.status, Some(130), "{said:?}");
    assert!(said.stderr.contains("cancelled"), "{said:?}");
    assert_eq!(daemon.lines().last().unwrap(), "DELETE /v1/snapshots/t");
}

#[test]
fn children_that_run_are_printed_with_their_times_and_those_that_do_not_make_it_fail() {
    let daemon = FakeDaemon::start(|_| {
        let errors = json!([{ "index": 2, "error": "no memory left" }]);
        (201, json!({ "children": [child("sb1"), child("sb2")], "errors": errors }))
    });
    let said = daemon.run(&["fork", "--tag", "t", "-n", "3"]);
    assert_eq!(said.status, Some(1), "{said:?}");
    assert!(said.stdout.contains("2 of 3 children answer"), "{said:?}");
    assert!(said.stdout.contains("first answer  4.5 ms"), "{said:?}");
    assert!(said.stderr.contains("child 2 did not start: no memory left"), "{said:?}");
    let told = daemon.run(&["fork", "--tag", "t", "-n", "3", "--json"]).json();
    assert_eq!(told["children"][1]["id"], "sb2");
    assert_eq!(told["errors"][0]["index"], 2);
    assert_eq!(told["times"]["all_ms"], 4.5);
    assert!(told["times"]["asked_unix_ms"].as_u64() > Some(1_700_000_000_000));
    let spawned = daemon.run(&["spawn", "--tag", "t", "-n", "3", "--no-wait"]);
    assert_eq!((spawned.status, spawned.stdout.as_str()), (Some(1), "sb1\nsb2\n"));
    assert_eq!(daemon.lines(), [FORK; 3]);
    // A user at a terminal may want to use the ports; a script requests what it needs. An older daemon knows only
    // this name of the field.
    assert_eq!(daemon.asked()[0].1, json!({ "snapshot_tag": "t", "n": 3, "line_port": true }));
    assert_eq!(daemon.asked()[2].1, json!({ "snapshot_tag": "t", "n": 3, "wait": false }));
    daemon.run(&["fork", "--tag", "t", "-n", "3", "--no-line-port"]);
    assert_eq!(daemon.asked()[3].1, json!({ "snapshot_tag": "t", "n": 3 }));
}

/// Requests that a daemon of version 0.2 understands, as well as this one; and replies of both.
#[test]
fn renamed_words_reach_older_and_newer_daemons() {
    const BOTH: &str = "GET /v1/sandboxes?archived=true&gone=true";
    let daemon = FakeDaemon::start(|line| match line {
        BOTH => {
            let end = |id: &str, state: &str| json!({ "id": id, "state": state, "ended_at_unix": 2, "reason": "deleted", "detail": "Deleted." });
            (200, json!([end("sb1", "gone"), end("sb2", "archived")]))
        }
        "POST /v1/tokens" => (
            201,
            json!({ "token": "secret", "name": "ci", "scope": "use", "owner": "ci", "created_at_unix": 1 }),
        ),
        _ => (404, json!({ "error": "there is no such route" })),
    });
    for flag in ["--archived", "--gone"] {
        let said = daemon.run(&["ls", flag]);
        assert!(
            said.status == Some(0) && said.stdout.contains("sb1") && said.stdout.contains("sb2"),
            "{said:?}"
        );
    }
    assert_eq!(daemon.lines(), [BOTH; 2]);
    // The scope is the default of both, which have different names for it.
    for scope in ["write", "use"] {
        let said = daemon.run(&["token", "add", "ci", "--scope", scope]);
        assert_eq!(said.status, Some(0), "{said:?}");
    }
    daemon.run(&["token", "add", "ci", "--scope", "read"]);
    let bodies: Vec<_> = daemon.asked()[2..].iter().map(|(_, body)| body.clone()).collect();
    let read = json!({ "name": "ci", "scope": "read" });
    assert_eq!(bodies, [json!({ "name": "ci" }), json!({ "name": "ci" }), read]);
}

#[test]
fn when_no_child_starts_the_reason_is_all_that_is_said() {
    let daemon = FakeDaemon::start(|_| (404, json!({ "error": "there is no snapshot t" })));
    for command in ["fork", "spawn"] {
        let said = daemon.run(&[command, "--tag", "t"]);
        assert_eq!((said.status, said.stdout.as_str()), (Some(1), ""));
        assert_eq!(said.stderr, "forkd: there is no snapshot t\n");
    }
}

#[test]
fn a_refusal_is_a_sentence_for_people_and_an_object_for_programs() {
    let refusal =
        json!({ "error": "there is no snapshot t", "code": "snapshot_not_found", "request_id": "r-1" });
    let failure = json!({ "error": "cannot open x", "code": "internal", "request_id": "r-2" });
    let (refused, failed) = (refusal.clone(), failure.clone());
    let daemon = FakeDaemon::start(move |line| match line {
        FORK => (404, refused.clone()),
        _ => (500, failed.clone()),
    });
    let said = daemon.run(&["fork", "--tag", "t"]);
    assert_eq!((said.status, said.stderr.as_str()), (Some(1), "forkd: there is no snapshot t\n"));
    let said = daemon.run(&["images"]);
    assert_eq!((said.status, said.stderr.as_str()), (Some(1), "forkd: cannot open x (request id r-2)\n"));
    for (args, body) in [(&["fork", "--tag", "t", "--json"][..], refusal), (&["images", "--json"], failure)] {
        let said = daemon.run(args);
        assert_eq!((said.status, said.stdout.as_str()), (Some(1), ""), "{said:?}");
        assert_eq!(serde_json::from_str::<Value>(&said.stderr).unwrap(), body, "{said:?}");
    }
}

#[test]
fn children_that_settle_end_with_the_command_however_it_ends() {
    let answer = |line: &str| match line {
        FORK => (201, json!({ "children": [child("sb1"), child("sb2")], "errors": [] })),
        _ => (204, Value::Null),
    };
    let ended = |daemon: &FakeDaemon| {
        let mut lines = daemon.lines();
        lines.sort();
        assert_eq!(lines, ["DELETE /v1/sandboxes/sb1", "DELETE /v1/sandboxes/sb2", FORK]);
        let limit =
            daemon.asked().into_iter().find(|(line, _)| line == FORK).unwrap().1["timeout_secs"].clone();
        assert!(limit.as_u64() > Some(0), "the daemon would keep them: {limit}");
    };
    let daemon = FakeDaemon::start(answer);
    assert_eq!(daemon.run(&["fork", "--tag", "t", "-n", "2", "--settle-secs", "0"]).status, Some(0));
    ended(&daemon);
    let daemon = FakeDaemon::start(answer);
    let command = daemon.forkd(&["fork", "--tag", "t", "-n", "2", "--settle-secs", "600"]).spawn().unwrap();
    let said = interrupt_after(&daemon, command, FORK);
    assert_eq!(said.status, Some(130), "{said:?}");
    assert!(said.stdout.contains("sb1"), "{said:?}");
    ended(&daemon);
}

#[test]
fn a_command_in_a_sandbox_keeps_its_streams_and_its_status() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/sandboxes/sb1/exec" => {
            (200, json!({ "stdout": "out", "stderr": "err\n", "exit_code": 7, "timed_out": false }))
        }
        "POST /v1/sandboxes/sb2/exec" => {
            (200, json!({ "stdout": "", "stderr": "", "exit_code": 124, "timed_out": true }))
        }
        _ => (404, json!({ "error": "there is no sandbox sb3" })),
    });
    let said = daemon.run(&["exec", "sb1", "--env", "A=b", "--cwd", "/", "--user", "u", "--", "ls", "-a"]);
    assert_eq!((said.status, said.stdout.as_str(), said.stderr.as_str()), (Some(7), "out", "err\n"));
    let body = &daemon.asked()[0].1;
    assert_eq!((&body["args"], &body["env"]), (&json!(["ls", "-a"]), &json!({ "A": "b" })));
    assert_eq!((&body["cwd"], &body["user"]), (&json!("/"), &json!("u")));
    let told = daemon.run(&["exec", "sb1", "--json", "--", "ls"]);
    assert_eq!((told.status, &told.json()["stderr"]), (Some(7), &json!("err\n")));
    let late = daemon.run(&["exec", "sb2", "--timeout", "1", "--", "sleep", "9"]);
    assert_eq!(late.status, Some(124), "{late:?}");
    assert!(late.stderr.contains("--timeout"), "{late:?}");
    let gone = daemon.run(&["exec", "sb3", "--", "true"]);
    assert_eq!((gone.status, gone.stderr.as_str()), (Some(125), "forkd: there is no sandbox sb3\n"));
}

#[test]
fn an_evaluation_prints_its_value_and_a_traceback_makes_it_fail() {
    let reply = |result: Option<&str>, traceback: Option<&str>| {
        json!({ "result": result, "error": traceback.map(|_| "NameError"), "stdout": "said\n", "stderr": "",
                "exit_code": i32::from(traceback.is_some()), "traceback": traceback, "result_json": 42 })
    };
    let daemon = FakeDaemon::start(move |line| match line {
        "POST /v1/sandboxes/sb1/eval" => (200, reply(Some("42"), None)),
        _ => (200, reply(None, Some("Traceback: x\n"))),
    });
    let said = daemon.run(&["eval", "sb1", "--", "6", "*", "7"]);
    assert_eq!((said.status, said.stdout.as_str(), said.stderr.as_str()), (Some(0), "said\n42\n", ""));
    assert_eq!(daemon.asked()[0].1["code"], "6 * 7");
    let raised = daemon.run(&["eval", "sb2", "--", "x"]);
    assert_eq!((raised.status, raised.stderr.as_str()), (Some(1), "Traceback: x\n"));
    assert_eq!(daemon.run(&["eval", "sb1", "--json", "--", "1"]).json()["result_json"], 42);
}

#[test]
fn what_can_be_removed_killed_or_reached_is_and_the_rest_is_named() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /v1/sandboxes?snapshot_tag=t" => {
            let mut other = child("sb3");
            other["snapshot_tag"] = json!("other");
            (200, json!([child("sb1"), child("sb2"), other]))
        }
        "DELETE /v1/sandboxes/sb2" => (404, json!({ "error": "there is no sandbox sb2" })),
        "POST /v1/sandboxes/sb1/ping" => (200, json!({ "pong": true, "uptimeMs": 1000 })),
        line if line.contains("bad") || line.contains("sb9") => (404, json!({ "error": "no such thing" })),
        _ => (204, Value::Null),
    });
    for (args, done, failed) in [
        (&["rmi", "good", "bad", "fine"][..], "removed fine", "bad: no such thing"),
        (&["unload", "bad", "good"], "unloaded good", "bad: no such thing"),
        (&["kill", "sb9", "sb1"], "killed sb1", "sb9: no such thing"),
    ] {
        let said = daemon.run(args);
        assert_eq!(said.status, Some(1), "{said:?}");
        assert!(said.stderr.contains(done) && said.stderr.contains(failed), "{said:?}");
    }
    let pinged = daemon.run(&["ping", "sb1", "sb9", "--json"]);
    assert_eq!((pinged.status, &pinged.json()[1]["pong"]), (Some(1), &json!(false)));
    assert!(daemon.run(&["ping", "sb1"]).stdout.starts_with("sb1: answers after "));
    // Of the children of a snapshot, one that ended by itself meanwhile is what was wanted.
    let before = daemon.lines().len();
    let killed = daemon.run(&["kill", "--tag", "t"]);
    assert_eq!((killed.status, killed.stderr.as_str()), (Some(0), "forkd: killed 2 sandboxes\n"));
    let mut asked = daemon.lines().split_off(before);
    asked.sort();
    assert_eq!(
        asked,
        ["DELETE /v1/sandboxes/sb1", "DELETE /v1/sandboxes/sb2", "GET /v1/sandboxes?snapshot_tag=t"]
    );
}

#[test]
fn lists_are_tables_for_people_and_the_daemons_own_words_for_programs() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /v1/snapshots" => {
            let mut failed = snapshot("failed", None);
            failed["error"] = json!("the guest panicked");
            (200, json!([snapshot("ready", None), failed]))
        }
        _ => (200, json!([child("sb1")])),
    });
    let images = daemon.run(&["images"]);
    assert_eq!(images.status, Some(0));
    assert!(images.stdout.starts_with("TAG") && images.stdout.contains("2 snapshots, 2.0 MiB"), "{images:?}");
    assert!(images.stderr.contains("snapshot t: the guest panicked"), "{images:?}");
    assert_eq!(daemon.run(&["images", "--json"]).json()[0]["dir"], "/d");
    assert!(daemon.run(&["ls"]).stdout.contains("snapshot t"));
    assert_eq!(daemon.run(&["ls", "--json"]).json(), json!([child("sb1")]));
}

#[test]
fn one_sandbox_is_shown_with_all_that_the_daemon_knows_of_it() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /v1/sandboxes/sb1" => {
            let mut sandbox = child("sb1");
            sandbox["workspace"] = json!("desk");
            sandbox["branch_count"] = json!(2);
            (200, sandbox)
        }
        "GET /v1/sandboxes/sb1/stats" => (200, json!({ "private_kib": 2048 })),
        "GET /v1/snapshots/t" => (200, snapshot("ready", None)),
        "GET /v1/workspaces/desk" => (403, json!({ "error": "not for this token" })),
        "GET /v1/tree" => {
            let nodes = json!([
                { "id": "sandbox:sb1", "kind": "sandbox", "name": "sb1" },
                { "id": "snapshot:b", "kind": "snapshot", "name": "b", "parent": "sandbox:sb1", "gone": false },
            ]);
            (200, json!({ "nodes": nodes }))
        }
        _ => (404, json!({ "error": "there is no sandbox sb2" })),
    });
    let told = daemon.run(&["inspect", "sb1", "--json"]).json();
    assert_eq!((&told["sandbox"]["id"], &told["stats"]["private_kib"]), (&json!("sb1"), &json!(2048)));
    assert_eq!((&told["snapshot"]["tag"], &told["branches"][0]["tag"]), (&json!("t"), &json!("b")));
    assert_eq!(told["workspace"], Value::Null, "what is refused is left out");
    let shown = daemon.run(&["inspect", "sb1"]);
    assert_eq!(shown.status, Some(0), "{shown:?}");
    let says = |name: &str, value: &str| {
        shown.stdout.lines().any(|line| line.starts_with(name) && line.ends_with(value))
    };
    assert!(says("id ", " sb1") && says("private ", " 2.0 MiB") && says("branches ", " b"), "{shown:?}");
    let gone = daemon.run(&["inspect", "sb2"]);
    assert_eq!((gone.status, gone.stdout.as_str()), (Some(1), ""), "{gone:?}");
}

#[test]
fn wrong_usage_asks_the_daemon_nothing() {
    let daemon = FakeDaemon::start(|_| (500, Value::Null));
    for args in [
        &["fork", "--tag", "../t"][..],
        &["fork", "--tag", "t", "-n", "1001"],
        &["kill", "nobody"],
        &["exec", "sb1"],
    ] {
        assert_eq!(daemon.run(args).status, Some(2), "{args:?}");
    }
    assert!(daemon.lines().is_empty());
}
