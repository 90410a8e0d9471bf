//! Telemetry: metrics, the audit log, events, statistics, request ids. A real daemon, with guests of a few
//! instructions. They run wherever `/dev/kvm` opens.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use crate::daemon::{Daemon, eventually};
use crate::support::{id, route};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

/// Sends a request and returns the head and body of the response. HTTP/1.0, so that it is not chunked.
pub(crate) fn exchange(
    mut stream: impl Read + Write,
    method_and_path: &str,
    headers: &str,
    body: &str,
) -> (String, String) {
    let length = body.len();
    let head =
        format!("{method_and_path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {length}\r\n{headers}\r\n");
    stream.write_all((head + body).as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    (head.to_owned(), body.to_owned())
}

impl Daemon {
    pub(crate) fn unix(&self) -> UnixStream {
        let stream = UnixStream::connect(self.path().join("forkd.sock")).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }

    fn tcp(&self) -> TcpStream {
        let address = self.done(200, "GET", "/version", None)["address"].as_str().unwrap().to_owned();
        TcpStream::connect(address).unwrap()
    }

    fn text(&self, path: &str) -> String {
        let (head, body) = exchange(self.unix(), &format!("GET {path}"), "", "");
        assert!(head.contains(" 200 "), "{head}\n{body}");
        body
    }

    fn audited(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.path().join("audit.log")).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
    }

    /// The line of the request with that id; waits until it is written.
    fn audit_of(&self, request: &str) -> Value {
        let find = || self.audited().into_iter().find(|line| line["request_id"] == request);
        eventually("a line in the audit log", || find().is_some());
        find().unwrap()
    }

    fn events(&self, query: &str) -> Vec<(Option<String>, String, Value)> {
        events(&self.text(&format!("/v1/events?follow=false{query}")))
    }
}

/// The id, kind and data of each event in a stream.
fn events(stream: &str) -> Vec<(Option<String>, String, Value)> {
    let mut events = Vec::new();
    for block in stream.split("\n\n").filter(|block| !block.is_empty()) {
        let field = |name: &str| block.lines().find_map(|line| line.strip_prefix(name)).map(str::to_owned);
        let Some(kind) = field("event: ") else { continue };
        let data = serde_json::from_str(&field("data: ").unwrap()).unwrap();
        events.push((field("id: "), kind, data));
    }
    events
}

/// A sample: name, labels and value.
type Sample = (String, BTreeMap<String, String>, f64);

/// Parses the exposition format by its definition, and panics on anything else.
fn parse(text: &str) -> Vec<Sample> {
    assert!(text.ends_with('\n'));
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    let (mut samples, mut types, mut helped) = (Vec::new(), BTreeMap::new(), BTreeSet::new());
    let mut family = String::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').expect(line);
            assert!(is_name(name) && !help.is_empty() && helped.insert(name.to_owned()), "{line}");
            continue;
        }
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').expect(line);
            assert!(helped.contains(name) && ["counter", "gauge", "histogram"].contains(&kind), "{line}");
            assert!(types.insert(name.to_owned(), kind.to_owned()).is_none(), "twice: {line}");
            family = name.to_owned();
            continue;
        }
        assert!(!line.starts_with('#') && !line.is_empty(), "{line:?}");
        let end = line.find(['{', ' ']).expect(line);
        let (name, mut rest) = line.split_at(end);
        assert!(is_name(name), "{line}");
        let suffix = name.strip_prefix(family.as_str()).expect("samples follow their type");
        let allowed: &[&str] = match types[&family].as_str() {
            "histogram" => &["_bucket", "_sum", "_count"],
            _ => &[""],
        };
        assert!(allowed.contains(&suffix), "{line}");
        let mut labels = BTreeMap::new();
        if let Some(inside) = rest.strip_prefix('{') {
            rest = inside;
            loop {
                let (label, after) = rest.split_once("=\"").expect(line);
                assert!(is_name(label), "{line}");
                let (mut value, mut chars) = (String::new(), after.char_indices());
                rest = loop {
                    match chars.next().expect(line) {
                        (at, '"') => break &after[at + 1..],
                        (_, '\\') => value.push(match chars.next().expect(line).1 {
                            'n' => '\n',
                            c @ ('"' | '\\') => c,
                            c => panic!("\\{c} in {line}"),
                        }),
                        (_, c) => value.push(c),
                    }
                };
                assert!(labels.insert(label.to_owned(), value).is_none(), "{line}");
                match rest.strip_prefix(',') {
                    Some(more) => rest = more,
                    None => break,
                }
            }
            rest = rest.strip_prefix('}').expect(line);
        }
        let value: f64 = rest.strip_prefix(' ').expect(line).parse().expect(line);
        let same = |(n, l, _): &Sample| n == name && *l == labels;
        assert!(!samples.iter().any(same), "twice: {line}");
        samples.push((name.to_owned(), labels, value));
    }
    check_histograms(&samples, &types);
    samples
}

/// Checks that each histogram is cumulative, ends with `+Inf`, and has a matching count.
fn check_histograms(samples: &[Sample], types: &BTreeMap<String, String>) {
    for name in types.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
        let mut counted: BTreeMap<BTreeMap<String, String>, f64> = BTreeMap::new();
        let mut bound: BTreeMap<BTreeMap<String, String>, f64> = BTreeMap::new();
        for (sample, labels, value) in samples {
            if *sample == format!("{name}_bucket") {
                let mut labels = labels.clone();
                let le: f64 = labels.remove("le").unwrap().replace("+Inf", "inf").parse().unwrap();
                let last = counted.insert(labels.clone(), *value).unwrap_or(0.0);
                assert!(*value >= last && le > bound.insert(labels, le).unwrap_or(-1.0), "{name}");
            } else if *sample == format!("{name}_count") {
                assert_eq!(counted[labels], *value, "{name} {labels:?}");
                assert!(bound[labels].is_infinite(), "{name}");
            }
        }
    }
}

fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> Option<f64> {
    let labels: BTreeMap<_, _> = labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    samples.iter().find(|(n, l, _)| n == name && *l == labels).map(|(_, _, value)| *value)
}

#[test]
fn the_metrics_are_what_prometheus_reads_and_count_what_was_done() {
    let Some(daemon) = Daemon::spelling() else { return };
    // Before any request: a count of zero is shown.
    let nothing = parse(&daemon.text("/metrics"));
    for name in ["spawns", "branches", "execs", "saves", "boots"] {
        assert_eq!(
            value(&nothing, &format!("forkd_{name}_total"), &[("outcome", "ok")]),
            Some(0.0),
            "{name}"
        );
    }
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", 3);
    daemon.done(201, "POST", &route(&children[0], "branch"), Some(json!({"tag": "branched"})));
    daemon.refused(
        409,
        "tag_taken",
        "POST",
        &route(&children[0], "branch"),
        Some(json!({"tag": "branched"})),
    );
    daemon.done(200, "POST", &route(&children[1], "pause"), None);
    for name in ["sbone", "sbtwo", "sb%22three"] {
        daemon.refused(404, "sandbox_not_found", "GET", &format!("/v1/sandboxes/{name}"), None);
    }
    exchange(daemon.unix(), "BREW /some/where", "", "");
    exchange(daemon.tcp(), "GET /v1/sandboxes", "Authorization: Bearer wrong\r\n", "");

    let (head, text) = exchange(daemon.unix(), "GET /metrics", "", "");
    assert!(head.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{head}");
    let samples = parse(&text);
    let get = |name: &str, labels: &[(&str, &str)]| {
        value(&samples, name, labels).unwrap_or_else(|| panic!("{name} {labels:?}\n{text}"))
    };
    for (name, expected) in [
        ("forkd_snapshots_total", 2.0),
        ("forkd_sandboxes_active", 3.0),
        ("forkd_branches_in_flight", 0.0),
        ("forkd_branch_concurrency_cap", 8.0),
        ("forkd_spawn_fork_seconds_count", 3.0),
        ("forkd_spawn_ready_seconds_count", 3.0),
        ("forkd_branch_pause_seconds_count", 1.0),
        ("forkd_exec_seconds_count", 0.0),
        ("forkd_auth_failures_total", 1.0),
        ("forkd_events_dropped_total", 0.0),
        ("forkd_audit_dropped_total", 0.0),
    ] {
        assert_eq!(get(name, &[]), expected, "{name}\n{text}");
    }
    assert_eq!(get("forkd_build_info", &[("version", forkd_controller::VERSION)]), 1.0);
    assert_eq!(get("forkd_sandboxes", &[("state", "paused")]), 1.0);
    for (name, outcome, expected) in [
        ("forkd_spawns_total", "ok", 3.0),
        ("forkd_spawns_total", "failed", 0.0),
        ("forkd_branches_total", "ok", 1.0),
        ("forkd_branches_total", "refused", 1.0),
        ("forkd_saves_total", "ok", 2.0),
    ] {
        assert_eq!(get(name, &[("outcome", outcome)]), expected, "{name} {outcome}\n{text}");
    }
    // These are read at intervals, not for every request.
    for name in ["forkd_sandbox_memory_private_bytes", "forkd_sandbox_memory_shared_bytes"] {
        eventually(name, || {
            let (_, text) = exchange(daemon.unix(), "GET /metrics", "", "");
            value(&parse(&text), name, &[]).is_some_and(|bytes| bytes > 0.0)
        });
    }
    for name in ["process_resident_memory_bytes", "process_open_fds", "process_start_time_seconds"] {
        assert!(get(name, &[]) > 0.0, "{name}\n{text}");
    }
    // All unknown paths share one label, and so do all unknown methods.
    let requests = "forkd_http_request_duration_seconds_count";
    let labels = |method, route, status| [("method", method), ("route", route), ("status", status)];
    assert_eq!(get(requests, &labels("GET", "/v1/sandboxes/{id}", "404")), 3.0);
    assert_eq!(get(requests, &labels("other", "none", "404")), 1.0);
    assert_eq!(get(requests, &labels("GET", "/v1/sandboxes", "401")), 1.0);
    assert!(!text.contains("sbone") && !text.contains("BREW"), "{text}");
}

#[test]
fn every_request_is_in_the_audit_log_with_who_and_what_and_nothing_secret() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let token = std::fs::read_to_string(daemon.path().join("token")).unwrap().trim().to_owned();
    let authorized = format!("Authorization: Bearer {token}\r\n");
    let kind = "Content-Type: application/json\r\n";
    let secret = "hunter2hunter2";
    let body = json!({"args": [secret], "env": {"PASSWORD": secret}}).to_string();
    let exec = format!("POST {}?token={secret}", route(&child, "exec"));
    let unix = |name: &str, request: &str, headers: &str, body: &str| {
        exchange(daemon.unix(), request, &format!("X-Request-Id: {name}\r\n{headers}"), body);
        daemon.audit_of(name)
    };
    let tcp = |name: &str, request: &str, headers: &str| {
        exchange(daemon.tcp(), request, &format!("X-Request-Id: {name}\r\n{headers}"), "");
        daemon.audit_of(name)
    };

    let uid = rustix::process::getuid().as_raw();
    let line = unix("exec", &exec, &format!("{kind}User-Agent: curl/1 {}\r\n", "x".repeat(1000)), &body);
    let expected = json!({
        "identity": "local", "owner": "local", "peer": format!("unix:uid={uid}"), "method": "POST",
        "path": route(&child, "exec"), "route": "/v1/sandboxes/{id}/exec", "target": id(&child), "status": 409,
        "outcome": "refused", "request_id": "exec",
    });
    for (field, expected) in expected.as_object().unwrap() {
        assert_eq!(line[field], *expected, "{field}: {line}");
    }
    assert!(line["latency_us"].as_u64().is_some_and(|us| us > 0), "{line}");
    let agent = line["ua"].as_str().unwrap();
    assert!(agent.starts_with("curl/1 x") && agent.len() == 256, "{line}");
    // `2026-01-31T12:34:56.789Z`.
    let ts = line["ts"].as_str().unwrap();
    assert!(ts.len() == 24 && &ts[10..11] == "T" && &ts[19..20] == "." && ts.ends_with('Z'), "{ts}");

    for (name, request, headers, status, outcome) in [
        ("badjson", "POST /v1/sandboxes", kind, 400, "refused"),
        ("media", "POST /v1/sandboxes", "Content-Type: text/plain\r\n", 415, "refused"),
        ("nothing", "GET /nothing", "", 404, "refused"),
        ("method", "PUT /v1/sandboxes", "", 405, "refused"),
        ("upgrade", "GET /v1/run", "", 400, "refused"),
        ("list", "GET /v1/sandboxes", "", 200, "ok"),
    ] {
        let line = unix(name, request, headers, "{");
        assert_eq!((&line["status"], &line["outcome"]), (&json!(status), &json!(outcome)), "{line}");
    }
    let made = unix("spawn", "POST /v1/sandboxes", kind, r#"{"snapshot_tag":"tiny","n":2}"#);
    let ids: Vec<String> = made["target"].as_str().unwrap().split(',').map(str::to_owned).collect();
    assert!(ids.len() == 2 && daemon.list().iter().filter(|it| ids.contains(&id(it))).count() == 2, "{made}");

    // An unauthenticated request has no identity; one with a token has the token's name.
    let line = tcp("stranger", "GET /v1/sandboxes", &format!("Authorization: Bearer {secret}\r\n"));
    assert_eq!((&line["status"], &line["identity"]), (&json!(401), &Value::Null), "{line}");
    assert!(line["peer"].as_str().unwrap().starts_with("127.0.0.1:"), "{line}");
    let line = tcp("page", "GET /v1/sandboxes", &format!("{authorized}Origin: https://evil.example\r\n"));
    assert_eq!(line["status"], 403, "{line}");
    let line = tcp("friend", "GET /v1/sandboxes", &authorized);
    assert_eq!((&line["status"], &line["identity"]), (&json!(200), &json!("default")), "{line}");

    // A stream has a line for its begin and its end; frequent requests of machines have none.
    let mut stream = daemon.unix();
    write!(
        stream,
        "GET /v1/run HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nX-Request-Id: talk\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    .unwrap();
    let outcomes = |daemon: &Daemon| -> Vec<Value> {
        let lines = daemon.audited().into_iter().filter(|line| line["request_id"] == "talk");
        lines.map(|mut line| line["outcome"].take()).collect()
    };
    eventually("its beginning", || outcomes(&daemon) == ["begun"]);
    drop(stream);
    eventually("its end", || outcomes(&daemon) == ["begun", "ended"]);
    exchange(daemon.unix(), "GET /healthz", "X-Request-Id: routine\r\n", "");
    exchange(daemon.unix(), "GET /metrics", "X-Request-Id: routine\r\n", "");

    // After a move, as by logrotate, new lines are in a new file, and the old ones are kept.
    let before = daemon.audited().len();
    let (log, moved) = (daemon.path().join("audit.log"), daemon.path().join("audit.log.1"));
    std::fs::rename(&log, &moved).unwrap();
    let daemon_pid = Pid::from_raw(daemon.child.id() as i32).unwrap();
    kill_process(daemon_pid, Signal::HUP).unwrap();
    eventually("a new file", || log.exists());
    exchange(daemon.unix(), "GET /version", "X-Request-Id: last\r\n", "");
    daemon.terminate();
    assert_eq!(daemon.audited().last().unwrap()["request_id"], "last");
    let old = std::fs::read_to_string(&moved).unwrap();
    assert_eq!(old.lines().count(), before);
    let new = std::fs::read_to_string(&log).unwrap();
    for text in [&old, &new] {
        assert!(!text.contains(secret) && !text.contains(&token) && !text.contains("routine"), "{text}");
    }
    use std::os::unix::fs::PermissionsExt;
    assert_eq!(std::fs::metadata(&log).unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn whoever_goes_away_before_the_answer_is_in_the_audit_log() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("mute", "mute");
    let mut stream = daemon.unix();
    // A child that never gets ready.
    let body = r#"{"snapshot_tag":"mute"}"#;
    let length = body.len();
    write!(
        stream,
        "POST /v1/sandboxes HTTP/1.1\r\nHost: x\r\nX-Request-Id: hasty\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    eventually("a child", || !daemon.list().is_empty());
    drop(stream);
    let line = daemon.audit_of("hasty");
    assert_eq!((&line["outcome"], &line["status"]), (&json!("abandoned"), &Value::Null), "{line}");
    eventually("its end", || daemon.list().is_empty());
    let ended = || parse(&daemon.text("/metrics"));
    eventually("its count", || {
        value(&ended(), "forkd_spawns_total", &[("outcome", "cancelled")]) == Some(1.0)
    });
}

#[test]
fn events_tell_what_happens_in_order_and_go_on_where_a_client_left_off() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    // A subscriber from the beginning.
    let mut live = daemon.unix();
    write!(live, "GET /v1/events?since=0&kind=sandbox HTTP/1.0\r\n\r\n").unwrap();
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let name = id(&child);
    for verb in ["pause", "resume"] {
        daemon.done(200, "POST", &route(&child, verb), None);
    }
    daemon.done(201, "POST", &route(&child, "branch"), Some(json!({"tag": "twig"})));
    daemon.done(200, "POST", &route(&child, "rollback"), None);
    let body = json!({"name": "desk", "snapshot_tag": "tiny"});
    let desk = daemon.done(201, "POST", "/v1/workspaces", Some(body));
    daemon.done(200, "POST", "/v1/workspaces/desk/suspend", None);
    daemon.done(204, "DELETE", "/v1/workspaces/desk", None);
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{name}"), None);
    daemon.done(204, "DELETE", "/v1/snapshots/twig", None);
    let kinds =
        |query: &str| -> Vec<String> { daemon.events(query).into_iter().map(|(_, kind, _)| kind).collect() };
    // Sandboxes end after the response, and the comparison below needs all events.
    for gone in [name.as_str(), desk["live_sandbox_id"].as_str().unwrap()] {
        eventually("its end", || kinds(&format!("&sandbox={gone}&kind=sandbox.ended")).len() == 1);
    }
    let life = ["created", "running", "paused", "resumed", "branched", "rolled_back", "ended"];
    let life = life.map(|what| format!("sandbox.{what}"));
    assert_eq!(kinds(&format!("&sandbox={name}&kind=sandbox")), life);
    let of_snapshots: Vec<String> = daemon
        .events("&kind=snapshot")
        .into_iter()
        .map(|(_, kind, data)| format!("{} {}", kind, data["snapshot"].as_str().unwrap()))
        .filter(|line| line.ends_with(" tiny") || line.ends_with(" twig"))
        .collect();
    let expected = ["writing tiny", "ready tiny", "writing twig", "ready twig", "removed twig"]
        .map(|it| format!("snapshot.{it}"));
    assert_eq!(of_snapshots, expected);
    let of_workspaces = daemon.events("&kind=workspace");
    let named: Vec<&str> = of_workspaces.iter().map(|(_, kind, _)| kind.as_str()).collect();
    assert_eq!(named, ["workspace.created", "workspace.suspended", "workspace.removed"]);
    assert_eq!(of_workspaces[0].2["sandbox"], desk["live_sandbox_id"]);

    // Event numbers have no gap, and each event has its time and object.
    let all = daemon.events("");
    let (run, _) = all[0].0.as_deref().unwrap().split_once('-').unwrap();
    for (index, (id, kind, data)) in all.iter().enumerate() {
        assert_eq!(id.as_deref(), Some(format!("{run}-{}", index + 1).as_str()));
        assert_eq!((&data["id"], &data["kind"]), (&json!(id), &json!(kind)));
        assert!(data["ts"].as_str().unwrap().ends_with('Z'), "{data}");
    }
    let find = |kind: &str| &all.iter().find(|(_, it, _)| it == kind).unwrap().2;
    assert_eq!(find("sandbox.branched")["snapshot"], "twig");
    assert_eq!(find("sandbox.rolled_back")["snapshot"], "twig");
    let ends: Vec<_> = all.iter().filter(|(_, it, _)| it == "sandbox.ended").collect();
    assert!(ends.iter().any(|(_, _, data)| data["reason"] == "deleted"), "{ends:?}");
    assert!(find("sandbox.running")["ready_ms"].as_f64().is_some_and(|ms| ms > 0.0));

    // From the middle, by an event's id in the query, or in the header that browsers send.
    let middle = all[3].0.clone().unwrap();
    assert_eq!(daemon.events(&format!("&since={middle}")), all[4..]);
    let header = format!("Last-Event-ID: {middle}\r\n");
    let (_, body) = exchange(daemon.unix(), "GET /v1/events?follow=false", &header, "");
    assert_eq!(events(&body), all[4..]);
    for bad in ["since=x", "kind=nonsense", "sandbox=..", "follow=maybe", "surprise=1"] {
        daemon.refused(400, "invalid_request", "GET", &format!("/v1/events?{bad}"), None);
    }

    // The subscriber got the same events live, and does not keep the daemon from stopping.
    let mut followed = String::new();
    let mut lines = BufReader::new(live);
    let over = |followed: &str| followed.lines().any(|it| it.contains(&name) && it.contains("sandbox.ended"));
    while !over(&followed) {
        assert!(lines.read_line(&mut followed).unwrap() > 0, "{followed}");
    }
    let of_child = |(_, _, data): &(Option<String>, String, Value)| data["sandbox"] == name.as_str();
    daemon.terminate();
    lines.read_to_string(&mut followed).unwrap();
    let followed: Vec<_> =
        events(followed.split_once("\r\n\r\n").unwrap().1).into_iter().filter(of_child).collect();
    assert_eq!(followed.into_iter().map(|(_, kind, _)| kind).collect::<Vec<_>>(), life);

    // In another run an old id gives a note that events were missed.
    daemon.child = crate::daemon::launch(daemon.path());
    daemon.up();
    let since = daemon.events(&format!("&since={middle}"));
    assert_eq!((since[0].1.as_str(), &since[0].2), ("lagged", &json!({"missed": null})));
}

#[test]
fn a_sandbox_that_ends_by_itself_says_why_and_adopted_ones_are_told_of() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    daemon.restart();
    let running = daemon.events("&kind=sandbox");
    assert_eq!(running.len(), 1, "{running:?}");
    assert_eq!((running[0].1.as_str(), &running[0].2["sandbox"]), ("sandbox.running", &child["id"]));
    kill_process(Pid::from_raw(crate::daemon::pid(&child)).unwrap(), Signal::KILL).unwrap();
    eventually("its end", || daemon.events("&kind=sandbox.ended").len() == 1);
    let (_, _, ended) = daemon.events("&kind=sandbox.ended").remove(0);
    assert_eq!(ended["reason"], "monitor_died", "{ended}");
    assert!(ended["detail"].as_str().is_some_and(|detail| !detail.is_empty()), "{ended}");
}

#[test]
fn statistics_tell_what_a_sandbox_uses_and_when_it_stood_still() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let stats = || daemon.done(200, "GET", &route(&child, "stats"), None);
    let first = stats();
    assert_eq!(first["pauses"], json!([]));
    assert!(
        first["shared_kib"].as_u64().unwrap() > 0 && first["private_kib"].as_u64().unwrap() > 0,
        "{first}"
    );
    // A bare kernel has no disk, no network and no agent.
    assert_eq!((&first["disk_bytes"], &first["net_rx_bytes"]), (&json!(0), &Value::Null), "{first}");
    assert_eq!(first["agent_answered_at_unix_ms"], Value::Null, "{first}");
    daemon.done(200, "POST", &route(&child, "pause"), None);
    let paused = stats()["pauses"][0].clone();
    assert_eq!((&paused["why"], &paused["pause_ms"]), (&json!("pause"), &Value::Null));
    daemon.done(200, "POST", &route(&child, "resume"), None);
    let info = daemon.done(201, "POST", &route(&child, "branch"), Some(json!({"tag": "twig"})));
    let last = stats();
    let pauses = last["pauses"].as_array().unwrap();
    assert_eq!(pauses.len(), 2, "{last}");
    assert!(pauses[0]["pause_ms"].as_f64().unwrap() > 0.0 && pauses[0]["why"] == "pause", "{last}");
    assert_eq!((&pauses[1]["why"], &pauses[1]["pause_ms"]), (&json!("branch"), &info["pause_ms"]), "{last}");
    assert!(last["uptime_ms"].as_u64() >= first["uptime_ms"].as_u64(), "{first} {last}");
    assert!(last["cpu_ms"].as_u64() >= first["cpu_ms"].as_u64(), "{first} {last}");
}

#[test]
fn a_console_can_be_followed_to_the_end_of_its_guest() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let console = route(&child, "console");
    eventually("some lines", || daemon.printed(&id(&child)).lines().count() > 5);
    assert_eq!(daemon.text(&format!("{console}?tail=3")).lines().count(), 3);
    let mut stream = daemon.unix();
    write!(stream, "GET {console}?follow=true&tail=2 HTTP/1.0\r\n\r\n").unwrap();
    let (mut lines, mut line) = (BufReader::new(stream), String::new());
    while line != "\r\n" {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
    }
    // The guest prints the alphabet, one letter a line.
    let mut letters = String::new();
    while letters.len() < 40 {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0);
        letters.push_str(line.trim());
    }
    let next = |letter: u8| if letter == b'Z' { b'A' } else { letter + 1 };
    assert!(letters.as_bytes().windows(2).all(|pair| pair[1] == next(pair[0])), "{letters}");
    daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&child)), None);
    let mut rest = String::new();
    lines.read_to_string(&mut rest).expect("it ends with the guest");
}

#[test]
fn a_request_has_an_id_that_is_in_its_answer_and_in_the_log() {
    let Some(daemon) = Daemon::spelling() else { return };
    let of = |headers: &str| {
        let (head, _) = exchange(daemon.unix(), "GET /version", headers, "");
        let line = head.lines().find_map(|line| line.strip_prefix("x-request-id: "));
        line.unwrap_or_else(|| panic!("{head}")).to_owned()
    };
    assert_eq!(of("X-Request-Id: mine-1.2_3\r\n"), "mine-1.2_3");
    let (one, two) = (of(""), of("X-Request-Id: not\"mine\r\n"));
    assert!(one != two && !two.contains('"'), "{one} {two}");
    // The log line of a failure has the request's id, even if another thread logs it.
    let kernel = daemon.path().join("none");
    std::fs::write(&kernel, "nothing that boots").unwrap();
    let body = json!({"tag": "x", "kernel": kernel}).to_string();
    let headers = "X-Request-Id: unlucky\r\nContent-Type: application/json\r\n";
    let (head, _) = exchange(daemon.unix(), "POST /v1/snapshots", headers, &body);
    assert!(!head.contains(" 201 "), "{head}");
    let told =
        || daemon.log().lines().any(|line| line.contains("unlucky") && line.contains("snapshot not made"));
    eventually("a line with its id", told);
}

/// A collector that passes on the body of each request. It ends with the test.
fn collector() -> (String, std::sync::mpsc::Receiver<Value>) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (give, given) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = BufReader::new(stream.unwrap());
            let (mut head, mut line) = (String::new(), String::new());
            while line != "\r\n" {
                line.clear();
                stream.read_line(&mut line).unwrap();
                head.push_str(&line.to_lowercase());
            }
            assert!(head.starts_with("post /v1/traces http/1.1"), "{head}");
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: ")).unwrap();
            let mut body = vec![0; length.parse().unwrap()];
            stream.read_exact(&mut body).unwrap();
            // Before the response: after it the daemon may assume that the spans are here.
            if give.send(serde_json::from_slice(&body).unwrap()).is_err() {
                return;
            }
            stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}").unwrap();
        }
    });
    (address, given)
}

#[test]
fn requests_spawns_and_branches_are_traced_as_part_of_the_clients_trace() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    let (endpoint, posted) = collector();
    std::fs::write(daemon.path().join("limits.json"), json!({"otlp_endpoint": endpoint}).to_string())
        .unwrap();
    daemon.restart();
    daemon.snapshot("tiny", "kernel");
    let (trace, parent) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
    let headers = format!("Content-Type: application/json\r\ntraceparent: 00-{trace}-{parent}-01\r\n");
    let (head, body) = exchange(daemon.unix(), "POST /v1/sandboxes", &headers, r#"{"snapshot_tag":"tiny"}"#);
    // The daemon passes on the same trace, with the span of its request.
    let own = head.lines().find_map(|line| line.strip_prefix("traceparent: ")).unwrap();
    let own: Vec<&str> = own.split('-').collect();
    assert!(own[1] == trace && own[2] != parent, "{own:?}");
    let child = serde_json::from_str::<Value>(&body).unwrap()[0].clone();
    exchange(daemon.unix(), &format!("POST {}", route(&child, "branch")), &headers, r#"{"tag":"twig"}"#);
    // A trace whose origin does not want a record has none.
    exchange(daemon.unix(), "GET /version", &format!("traceparent: 00-{trace}-{parent}-00\r\n"), "");
    daemon.terminate();

    let mut spans = Vec::new();
    for body in posted.try_iter() {
        let resource = body["resourceSpans"][0].clone();
        assert_eq!(resource["resource"]["attributes"][0]["value"]["stringValue"], "forkd");
        spans.extend(resource["scopeSpans"][0]["spans"].as_array().unwrap().clone());
    }
    let ours: Vec<&Value> = spans.iter().filter(|span| span["traceId"] == trace).collect();
    let find = |name: &str| -> &Value {
        ours.iter().find(|span| span["name"] == name).unwrap_or_else(|| panic!("{name}: {spans:#?}"))
    };
    assert_eq!(ours.len(), 4, "{ours:#?}");
    let (request, spawn) = (find("POST /v1/sandboxes"), find("spawn"));
    assert_eq!((&request["spanId"], &request["parentSpanId"]), (&json!(own[2]), &json!(parent)));
    assert_eq!(spawn["parentSpanId"], request["spanId"]);
    assert_eq!(find("branch")["parentSpanId"], find("POST /v1/sandboxes/{id}/branch")["spanId"]);
    let nanos = |span: &Value, key: &str| span[key].as_str().unwrap().parse::<u128>().unwrap();
    for span in &ours {
        assert!(nanos(span, "startTimeUnixNano") <= nanos(span, "endTimeUnixNano"), "{span}");
    }
    let value = json!({"key": "forkd.sandbox", "value": {"stringValue": child["id"]}});
    assert!(spawn["attributes"].as_array().unwrap().contains(&value), "{spawn}");
    assert!(!spans.iter().any(|span| span["name"] == "GET /version" && span["traceId"] == trace));
}

/// The shape that scrapers rely on: names, kinds, help and labels of all metrics. `FORKD_WRITE_GOLDEN=1` writes the
/// file anew.
#[test]
fn metrics_are_called_as_they_were() {
    let Some(daemon) = Daemon::start(&[]) else { return };
    // So that there is a request in the metrics.
    daemon.done(200, "GET", "/v1/sandboxes", None);
    let mut shape = Vec::new();
    for line in daemon.text("/metrics").lines() {
        let line = match line.starts_with('#') {
            true => line.to_owned(),
            false => masked(line.rsplit_once(' ').unwrap().0),
        };
        // Samples of all requests have one shape.
        if !shape.contains(&line) {
            shape.push(line);
        }
    }
    let shape = shape.join("\n") + "\n";
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/metrics.txt");
    if std::env::var_os("FORKD_WRITE_GOLDEN").is_some() {
        std::fs::write(file, &shape).unwrap();
    }
    let golden = std::fs::read_to_string(file).unwrap_or_default();
    assert_eq!(shape, golden, "docs/metrics.txt: FORKD_WRITE_GOLDEN=1 writes what is there now");
}

/// A sample without the values of labels that depend on earlier requests or on the daemon's version.
fn masked(sample: &str) -> String {
    let Some((name, labels)) = sample.split_once('{') else { return sample.to_owned() };
    let labels = labels.trim_end_matches('}').split(',').map(|label| {
        let (name, _) = label.split_once('=').unwrap();
        match ["version", "method", "route", "status"].contains(&name) {
            true => format!("{name}=\"…\""),
            false => label.to_owned(),
        }
    });
    format!("{name}{{{}}}", labels.collect::<Vec<_>>().join(","))
}
