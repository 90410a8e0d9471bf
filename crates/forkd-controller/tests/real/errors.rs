//! Errors as clients read them: codes, request ids, and causes for the operator only. A real daemon, with guests of
//! a few instructions. They run wherever `/dev/kvm` opens.

use std::collections::BTreeSet;

use crate::auth::{add, first, raw};
use crate::daemon::{Daemon, eventually};
use crate::support::{id, route};
use crate::telemetry::exchange;
use serde_json::{Value, json};

fn body_of(answer: &str) -> Value {
    let body = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}")).1;
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

#[test]
fn a_program_tells_the_conflicts_apart() {
    let kernels = [("kernel", crate::support::spells()), ("hangs", crate::lifetimes::hangs())];
    let Some(daemon) = Daemon::start(&kernels) else { return };
    daemon.snapshot("tiny", "kernel");
    let [source, paused, ended] = daemon.spawn("tiny", 3).try_into().unwrap();
    daemon.done(201, "POST", &route(&source, "branch"), Some(json!({"tag": "child", "mode": "diff"})));
    daemon.done(200, "POST", &route(&paused, "pause"), None);
    let process = rustix::process::Pid::from_raw(ended["pid"].as_i64().unwrap() as i32).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("its end", || daemon.sandbox(&id(&ended))["state"] == "ended");
    daemon.done(201, "POST", "/v1/workspaces", Some(json!({"name": "desk", "snapshot_tag": "tiny"})));

    let never = json!({"tag": "never", "kernel": daemon.path().join("hangs"), "mem_size_mib": 64});
    std::thread::scope(|scope| {
        let making = scope.spawn(|| daemon.request("POST", "/v1/snapshots", Some(never)));
        eventually("its beginning", || daemon.request("GET", "/v1/snapshots/never", None).0 == 200);
        let conflicts = [
            ("tag_taken", "POST", route(&source, "branch"), Some(json!({"tag": "tiny"}))),
            ("sandbox_paused", "POST", route(&paused, "ping"), None),
            ("sandbox_ended", "POST", route(&ended, "ping"), None),
            ("sandbox_unfit", "POST", route(&source, "ping"), None),
            ("snapshot_not_ready", "POST", "/v1/sandboxes".into(), Some(json!({"snapshot_tag": "never"}))),
            ("snapshot_in_use", "DELETE", "/v1/snapshots/tiny".into(), None),
            (
                "name_taken",
                "POST",
                "/v1/workspaces".into(),
                Some(json!({"name": "desk", "snapshot_tag": "tiny"})),
            ),
            ("name_reserved", "DELETE", "/v1/tokens/default".into(), None),
        ];
        let mut ids = BTreeSet::new();
        for (code, method, path, body) in &conflicts {
            let answer = daemon.refused(409, code, method, path, body.clone());
            ids.insert(answer["request_id"].as_str().unwrap().to_owned());
        }
        assert_eq!(ids.len(), conflicts.len(), "each request has an id of its own");
        daemon.done(204, "DELETE", "/v1/snapshots/never", None);
        let (status, answer) = making.join().unwrap();
        assert_eq!((status, &answer["code"]), (409, &json!("cancelled")), "{answer}");
    });
}

#[test]
fn only_the_operator_reads_why_the_host_failed() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.done(200, "POST", "/v1/snapshots/tiny/owner", Some(json!({"owner": "*"})));
    let user = add(&daemon, json!({"name": "ann", "scope": "use"}));
    let admin = add(&daemon, json!({"name": "boss", "scope": "admin"}));
    // No sandbox can be created while a file has the name of their folder.
    let folder = daemon.place("sandboxes");
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "in the way").unwrap();
    let spawn = || Some(json!({"snapshot_tag": "tiny"}));
    let each = "/v1/sandboxes?results=each";

    let secrets = ["os error", "sandboxes", &*daemon.path().display().to_string()];
    let hidden = |answer: &Value| secrets.iter().all(|secret| !answer.to_string().contains(secret));
    for path in ["/v1/sandboxes", each] {
        let answer = user.refused(500, "internal", "POST", path, spawn());
        assert!(hidden(&answer), "{answer}");
        let request = answer["request_id"].as_str().unwrap();
        assert!(answer["error"].as_str().unwrap().contains(request), "{answer}");
        let cause = |line: &str| line.contains(request) && line.contains("os error");
        assert!(daemon.log().lines().any(cause), "{answer}\n{}", daemon.log());
    }
    for operator in [&admin, &first(&daemon)] {
        let answer = operator.refused(500, "internal", "POST", each, spawn());
        assert!(!hidden(&answer) && answer["error"].as_str().unwrap().contains("os error"), "{answer}");
    }
    let answer = daemon.refused(500, "internal", "POST", "/v1/sandboxes", spawn());
    assert!(answer["error"].as_str().unwrap().contains("os error"), "{answer}");
    std::fs::remove_file(&folder).unwrap();
    std::fs::create_dir(&folder).unwrap();
}

#[test]
fn whatever_refuses_a_request_gives_a_code_and_the_id_the_client_chose() {
    let Some(daemon) = Daemon::spelling() else { return };
    let user = add(&daemon, json!({"name": "ann", "scope": "read"}));
    let token = format!("Authorization: Bearer {}\r\n", user.token);
    for (status, code, line, headers, body) in [
        (401, "unauthorized", "GET /v1/sandboxes", "", ""),
        (403, "forbidden", "POST /v1/sandboxes", &*token, "{}"),
        (404, "route_not_found", "GET /v1/nothing", &token, ""),
        (405, "method_not_allowed", "PATCH /healthz", &token, ""),
        (400, "invalid_request", "GET /v1/events?kind=nothing", &token, ""),
    ] {
        let request = format!(
            "{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nX-Request-Id: mine-{status}\r\n\
             Content-Length: {}\r\n{headers}\r\n{body}",
            body.len()
        );
        let answer = raw(&user.address, request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status} ")), "{answer}");
        let body = body_of(&answer);
        assert_eq!((&body["code"], &body["request_id"]), (&json!(code), &json!(format!("mine-{status}"))));
    }
    let (head, body) = exchange(daemon.unix(), "POST /v1/sandboxes", "Content-Type: text/plain\r\n", "{}");
    assert!(head.contains(" 415 "), "{head}");
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body["code"], "unsupported_media_type", "{body}");
    let id = body["request_id"].as_str().unwrap();
    assert!(head.to_lowercase().contains(&format!("x-request-id: {id}")), "{head}");
    // A request with a rejected head gets an id, too.
    let long = format!("GET /version HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    let body = body_of(&raw(&user.address, long.as_bytes()));
    assert_eq!(body["code"], "headers_too_large", "{body}");
    assert!(body["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{body}");
}

#[test]
fn an_error_that_is_answered_again_has_the_id_of_the_request_that_asks() {
    let Some(daemon) = Daemon::spelling() else { return };
    let ask = |request: &str| {
        let headers =
            format!("Content-Type: application/json\r\nIdempotency-Key: k\r\nX-Request-Id: {request}\r\n");
        let (head, body) = exchange(daemon.unix(), "POST /v1/sandboxes", &headers, r#"{"surprise":1}"#);
        assert!(head.contains(" 400 "), "{head}");
        (head.to_lowercase().contains("idempotent-replayed"), serde_json::from_str::<Value>(&body).unwrap())
    };
    let (replayed, one) = ask("one");
    assert!(!replayed && one["request_id"] == "one", "{one}");
    let (replayed, two) = ask("two");
    assert!(replayed && two["request_id"] == "two", "{two}");
    assert_eq!((&one["code"], &one["error"]), (&two["code"], &two["error"]));
    assert_eq!(one["code"], "invalid_request");
}
