//! Authentication and authorization: a real daemon on TCP, with guests of a few instructions.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Duration;

use crate::daemon::{Daemon, eventually};
use serde_json::{Value, json};

/// A daemon with its settings in `wants`.
fn start(wants: Value) -> Option<Daemon> {
    let mut daemon = Daemon::spelling()?;
    if wants != json!({}) {
        std::fs::write(daemon.path().join("limits.json"), wants.to_string()).unwrap();
        daemon.restart();
    }
    Some(daemon)
}

pub(crate) fn address(daemon: &Daemon) -> String {
    daemon.done(200, "GET", "/version", None)["address"].as_str().unwrap().to_owned()
}

/// Sends raw bytes and returns the whole response.
pub(crate) fn raw(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

fn status(answer: &str) -> u16 {
    answer.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("{answer:?}"))
}

/// A client with a token.
pub(crate) struct Client {
    pub(crate) address: String,
    pub(crate) token: String,
}

impl Client {
    pub(crate) fn ask(&self, method: &str, path: &str, body: Option<Value>) -> (u16, Value) {
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        let request = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        );
        let answer = raw(&self.address, request.as_bytes());
        let (_, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
        (status(&answer), serde_json::from_str(body).unwrap_or(Value::Null))
    }

    pub(crate) fn done(&self, status: u16, method: &str, path: &str, body: Option<Value>) -> Value {
        let (got, answer) = self.ask(method, path, body);
        assert_eq!(got, status, "{method} {path}: {answer}");
        answer
    }

    pub(crate) fn refused(
        &self,
        status: u16,
        code: &str,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Value {
        let answer = self.done(status, method, path, body);
        assert_eq!(answer["code"], code, "{method} {path}: {answer}");
        assert!(answer["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{answer}");
        answer
    }

    fn spawn(&self, tag: &str) -> String {
        let made = self.done(201, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": tag})));
        made[0]["id"].as_str().unwrap().to_owned()
    }
}

pub(crate) fn add(daemon: &Daemon, order: Value) -> Client {
    let made = daemon.done(201, "POST", "/v1/tokens", Some(order));
    Client { address: address(daemon), token: made["token"].as_str().unwrap().to_owned() }
}

pub(crate) fn first(daemon: &Daemon) -> Client {
    let token = std::fs::read_to_string(daemon.path().join("token")).unwrap().trim().to_owned();
    Client { address: address(daemon), token }
}

fn names(list: &Value, key: &str) -> Vec<String> {
    list.as_array().unwrap().iter().map(|it| it[key].as_str().unwrap().to_owned()).collect()
}

#[test]
fn what_goes_on_with_a_token_ends_with_it() {
    let Some(daemon) = start(json!({})) else { return };
    let ann = add(&daemon, json!({"name": "ann"}));
    let mut stream = TcpStream::connect(&ann.address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!("Host: localhost\r\nAuthorization: Bearer {}\r\n", ann.token);
    write!(stream, "GET /v1/events HTTP/1.0\r\n{head}\r\n").unwrap();
    let mut status = [0; 12];
    stream.read_exact(&mut status).unwrap();
    assert!(status.ends_with(b" 200"), "{status:?}");
    daemon.done(204, "DELETE", "/v1/tokens/ann", None);
    stream.read_to_string(&mut String::new()).expect("it ends");
}

#[test]
fn the_scope_write_has_an_older_name_that_requests_accept() {
    let Some(mut daemon) = start(json!({})) else { return };
    let scopes = |daemon: &Daemon| {
        let list = daemon.done(200, "GET", "/v1/tokens", None);
        list.as_array()
            .unwrap()
            .iter()
            .map(|it| (it["name"].clone(), it["scope"].clone()))
            .collect::<Vec<_>>()
    };
    let newer = add(&daemon, json!({"name": "newer", "scope": "write"}));
    let older = add(&daemon, json!({"name": "older", "scope": "use"}));
    let unsaid = add(&daemon, json!({"name": "unsaid"}));
    let expected = [("default", "admin"), ("newer", "write"), ("older", "write"), ("unsaid", "write")];
    let expected = expected.map(|(name, scope)| (json!(name), json!(scope)));
    assert_eq!(scopes(&daemon), expected);
    for client in [&newer, &older, &unsaid] {
        client.refused(404, "snapshot_not_found", "DELETE", "/v1/snapshots/none", None);
        let refused = client.refused(403, "forbidden", "GET", "/v1/tokens", None);
        assert!(refused["error"].as_str().unwrap().contains("has the scope write"), "{refused}");
    }
    // The database has one name for it, which an older daemon reads, too.
    daemon.restart();
    assert_eq!(scopes(&daemon), expected);
}

#[test]
fn a_token_of_another_owner_sees_nothing_and_touches_nothing() {
    let Some(mut daemon) = start(json!({})) else { return };
    daemon.snapshot("tiny", "kernel");
    let (ann, bob) = (add(&daemon, json!({"name": "ann"})), add(&daemon, json!({"name": "bob"})));
    // No other owner sees a snapshot of the host's owner, until that one shares it with all.
    ann.refused(404, "snapshot_not_found", "GET", "/v1/snapshots/tiny", None);
    ann.refused(404, "snapshot_not_found", "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny"})));
    assert_eq!(ann.done(200, "GET", "/v1/snapshots", None), json!([]));
    let shared = daemon.done(200, "POST", "/v1/snapshots/tiny/owner", Some(json!({"owner": "*"})));
    assert_eq!(shared["owner"], "*");
    ann.done(200, "GET", "/v1/snapshots/tiny/info", None);
    for (method, path) in [("DELETE", "/v1/snapshots/tiny"), ("POST", "/v1/snapshots/tiny/unload")] {
        ann.refused(403, "forbidden", method, path, None);
    }

    let id = ann.spawn("tiny");
    let sandbox = format!("/v1/sandboxes/{id}");
    assert_eq!(ann.done(200, "GET", &sandbox, None)["owner"], "ann");
    for (owner, theirs) in [("ann", vec![id.clone()]), ("bob", vec![])] {
        let path = format!("/v1/sandboxes?owner={owner}");
        assert_eq!(names(&ann.done(200, "GET", &path, None), "id"), theirs);
        assert_eq!(names(&daemon.done(200, "GET", &path, None), "id"), theirs);
    }
    let branch = json!({"tag": "mine"});
    let branch = ann.done(201, "POST", &format!("{sandbox}/branch"), Some(branch));
    assert_eq!(branch["owner"], "ann");
    let work = json!({"name": "desk", "snapshot_tag": "mine"});
    let work = ann.done(201, "POST", "/v1/workspaces", Some(work));
    assert_eq!(work["owner"], "ann");
    let second = work["live_sandbox_id"].as_str().unwrap().to_owned();

    // Twice: the next daemon still knows the owners.
    for _ in 0..2 {
        let bob = Client { address: address(&daemon), ..bob.same() };
        let ann = Client { address: address(&daemon), ..ann.same() };
        for (method, path, body) in [
            ("GET", "", None),
            ("DELETE", "", None),
            ("GET", "/console", None),
            ("GET", "/stats", None),
            ("POST", "/ping", None),
            ("POST", "/pause", None),
            ("POST", "/resume", None),
            ("POST", "/branch", Some(json!({"tag": "stolen"}))),
            ("POST", "/rollback", Some(json!({}))),
            ("POST", "/exec", Some(json!({"args": ["true"]}))),
            ("POST", "/eval", Some(json!({"code": "1"}))),
        ] {
            bob.refused(404, "sandbox_not_found", method, &format!("{sandbox}{path}"), body);
        }
        for (method, path, body) in [
            ("GET", "", None),
            ("DELETE", "?force=true", None),
            ("GET", "/info", None),
            ("POST", "/unload", None),
            ("POST", "/compact", Some(json!({"to": "stolen"}))),
        ] {
            bob.refused(404, "snapshot_not_found", method, &format!("/v1/snapshots/mine{path}"), body);
        }
        for (method, path) in [("GET", ""), ("DELETE", ""), ("POST", "/suspend"), ("POST", "/resume")] {
            let path = format!("/v1/workspaces/desk{path}");
            bob.refused(404, "workspace_not_found", method, &path, None);
        }
        bob.refused(
            404,
            "snapshot_not_found",
            "POST",
            "/v1/sandboxes",
            Some(json!({"snapshot_tag": "mine"})),
        );
        let body = json!({"name": "other", "snapshot_tag": "mine"});
        bob.refused(404, "snapshot_not_found", "POST", "/v1/workspaces", Some(body));
        assert_eq!(bob.done(200, "GET", "/v1/sandboxes", None), json!([]));
        assert_eq!(bob.done(200, "GET", "/v1/workspaces", None), json!([]));
        assert_eq!(names(&bob.done(200, "GET", "/v1/snapshots", None), "tag"), ["tiny"]);
        let tree = bob.done(200, "GET", "/v1/tree", None).to_string();
        assert!(!tree.contains(&id) && !tree.contains("mine"), "{tree}");

        // The host's owner sees all objects; ann sees her own.
        assert_eq!(daemon.list().len(), 2);
        assert_eq!(names(&ann.done(200, "GET", "/v1/sandboxes", None), "id").len(), 2);
        assert_eq!(names(&ann.done(200, "GET", "/v1/snapshots", None), "tag"), ["mine", "tiny"]);
        assert!(ann.done(200, "GET", "/v1/tree", None).to_string().contains(&second));
        daemon.restart();
    }

    // Tags are unique across owners: bob learns that the tag is taken, and nothing else.
    let bob = Client { address: address(&daemon), ..bob.same() };
    let own = bob.spawn("tiny");
    let body = json!({"tag": "mine"});
    bob.refused(409, "tag_taken", "POST", &format!("/v1/sandboxes/{own}/branch"), Some(body));
    let rollback = format!("/v1/sandboxes/{own}/rollback");
    bob.refused(404, "snapshot_not_found", "POST", &rollback, Some(json!({"to": "mine"})));
    bob.done(200, "POST", &rollback, Some(json!({"to": "tiny"})));
    bob.refused(403, "forbidden", "POST", "/v1/snapshots/mine/owner", Some(json!({"owner": "bob"})));
    daemon.done(200, "POST", "/v1/snapshots/mine/owner", Some(json!({"owner": "bob"})));
    daemon.refused(
        400,
        "invalid_request",
        "POST",
        "/v1/snapshots/mine/owner",
        Some(json!({"owner": "../x"})),
    );
    bob.done(200, "GET", "/v1/snapshots/mine", None);
    let ann = Client { address: address(&daemon), ..ann.same() };
    ann.refused(404, "snapshot_not_found", "GET", "/v1/snapshots/mine", None);
    // Ann's workspace resumes from it: bob learns that it is in use, and nothing else.
    bob.refused(409, "snapshot_in_use", "DELETE", "/v1/snapshots/mine", None);
    ann.done(204, "DELETE", "/v1/workspaces/desk", None);
    bob.done(204, "DELETE", "/v1/snapshots/mine", None);
}

#[test]
fn what_a_snapshot_was_made_of_is_named_to_those_only_who_may_see_that() {
    let Some(daemon) = start(json!({})) else { return };
    daemon.snapshot("secret", "kernel");
    let source = daemon.spawn("secret", 1).remove(0);
    let branch = format!("/v1/sandboxes/{}/branch", source["id"].as_str().unwrap());
    daemon.done(201, "POST", &branch, Some(json!({"tag": "layer", "mode": "diff"})));
    daemon.done(200, "POST", "/v1/snapshots/secret/compact", Some(json!({"to": "flat"})));
    let ann = add(&daemon, json!({"name": "ann"}));
    daemon.done(200, "POST", "/v1/snapshots/layer/owner", Some(json!({"owner": "*"})));
    daemon.done(200, "POST", "/v1/snapshots/flat/owner", Some(json!({"owner": "ann"})));
    let id = ann.spawn("layer");
    let own = json!({"tag": "own", "mode": "diff"});
    ann.done(201, "POST", &format!("/v1/sandboxes/{id}/branch"), Some(own));

    let everything = |ask: &dyn Fn(&str) -> Value| -> Vec<Value> {
        let of = |tag: &str| [format!("/v1/snapshots/{tag}"), format!("/v1/snapshots/{tag}/info")];
        let paths = ["layer", "flat", "own"].into_iter().flat_map(of);
        paths.chain(["/v1/snapshots".into(), "/v1/tree".into()]).map(|path| ask(&path)).collect()
    };
    // Also after its removal, when the daemon no longer knows its owner.
    for there in [true, false] {
        let hers = everything(&|path| ann.done(200, "GET", path, None));
        for answer in &hers {
            assert!(!answer.to_string().contains("secret"), "{answer}");
        }
        let [layer, detail, flat, _, own, own_detail, ..] = &hers[..] else { panic!("{hers:?}") };
        assert_eq!((&layer["parent_tag"], &layer["chain_depth"]), (&Value::Null, &json!(1)));
        assert_eq!((&detail["parent_tag"], &detail["ancestors"]), (&Value::Null, &json!([])));
        assert_eq!(flat["branched_from"], Value::Null);
        // Ann sees the names of objects that she may read, and placeholders for the others.
        assert_eq!((&own["parent_tag"], &own_detail["ancestors"]), (&json!("layer"), &json!(["layer"])));
        let tree = hers.last().unwrap()["nodes"].as_array().unwrap();
        let flat = tree.iter().find(|node| node["name"] == "flat").unwrap();
        let nameless = tree.iter().find(|node| node["id"] == flat["parent"]).unwrap();
        assert_eq!((&nameless["name"], &nameless["gone"]), (&json!("?"), &json!(true)));

        let all = everything(&|path| daemon.done(200, "GET", path, None));
        assert_eq!(
            (&all[0]["parent_tag"], &all[2]["branched_from"]),
            (&json!("secret"), &json!("compact:secret"))
        );
        assert_eq!(all[1]["ancestors"], json!(["secret"]));
        if there {
            daemon.done(204, "DELETE", "/v1/snapshots/secret?force=true", None);
        }
    }
}

impl Client {
    fn same(&self) -> Client {
        Client { address: self.address.clone(), token: self.token.clone() }
    }
}

#[test]
fn a_scope_is_no_larger_than_it_says() {
    let Some(daemon) = start(json!({})) else { return };
    daemon.snapshot("tiny", "kernel");
    let reader = add(&daemon, json!({"name": "reader", "scope": "read", "owner": "local"}));
    let user = add(&daemon, json!({"name": "user", "owner": "local"}));
    let admin = add(&daemon, json!({"name": "boss", "scope": "admin"}));
    for path in ["/version", "/v1/sandboxes", "/v1/snapshots/tiny", "/v1/tree", "/openapi.json"] {
        reader.done(200, "GET", path, None);
        assert_eq!(status(&raw(
            &reader.address,
            format!(
                "HEAD {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\r\n",
                reader.token
            )
            .as_bytes()
        )), 200);
    }
    let spawn = Some(json!({"snapshot_tag": "tiny"}));
    reader.refused(403, "forbidden", "POST", "/v1/sandboxes", spawn);
    reader.refused(403, "forbidden", "DELETE", "/v1/snapshots/tiny", None);
    reader.refused(403, "forbidden", "GET", "/v1/run", None);
    let id = user.spawn("tiny");
    reader.refused(409, "sandbox_unfit", "POST", &format!("/v1/sandboxes/{id}/ping"), None);
    reader.refused(403, "forbidden", "POST", &format!("/v1/sandboxes/{id}/pause"), None);
    for who in [&reader, &user] {
        who.refused(403, "forbidden", "GET", "/v1/tokens", None);
        who.refused(403, "forbidden", "POST", "/v1/tokens", Some(json!({"name": "x"})));
        who.refused(403, "forbidden", "POST", "/v1/tokens/boss/rotate", None);
        who.refused(403, "forbidden", "DELETE", "/v1/tokens/boss", None);
        // A route without a rule.
        who.refused(403, "forbidden", "PUT", "/v1/sandboxes", None);
    }
    user.done(204, "DELETE", &format!("/v1/sandboxes/{id}"), None);
    let listed = admin.done(200, "GET", "/v1/tokens", None);
    assert_eq!(names(&listed, "name"), ["default", "boss", "reader", "user"]);
    assert!(!listed.to_string().contains(&user.token), "{listed}");
}

#[test]
fn a_rotated_removed_or_expired_token_is_refused_at_once_and_no_restart_is_needed() {
    let Some(mut daemon) = start(json!({})) else { return };
    let ci = add(&daemon, json!({"name": "ci"}));
    ci.done(200, "GET", "/v1/sandboxes", None);
    let rotated = first(&daemon).done(200, "POST", "/v1/tokens/ci/rotate", None);
    ci.refused(401, "unauthorized", "GET", "/v1/sandboxes", None);
    let ci = Client { token: rotated["token"].as_str().unwrap().into(), ..ci };
    ci.done(200, "GET", "/v1/sandboxes", None);
    daemon.restart();
    let ci = Client { address: address(&daemon), ..ci };
    ci.done(200, "GET", "/v1/sandboxes", None);
    daemon.done(204, "DELETE", "/v1/tokens/ci", None);
    ci.refused(401, "unauthorized", "GET", "/v1/sandboxes", None);
    let brief = add(&daemon, json!({"name": "brief", "expires_in_secs": 1}));
    eventually("its end", || brief.ask("GET", "/v1/sandboxes", None).0 == 401);
    brief.refused(401, "token_expired", "GET", "/v1/sandboxes", None);

    // The daemon's own token: replaced through the API, and by hand.
    let old = first(&daemon);
    old.done(200, "POST", "/v1/tokens/default/rotate", None);
    old.refused(401, "unauthorized", "GET", "/v1/sandboxes", None);
    let old = first(&daemon);
    old.done(200, "GET", "/v1/sandboxes", None);
    let (new, path) = ("by-hand-0123456789abcdef", daemon.path().join("token"));
    std::fs::write(path.with_extension("mine"), new).unwrap();
    std::fs::set_permissions(path.with_extension("mine"), std::fs::Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(path.with_extension("mine"), &path).unwrap();
    let new = Client { token: new.into(), address: address(&daemon) };
    // Requests use the old token, which is valid until then: failures are counted.
    eventually("the end of the old token", || old.ask("GET", "/v1/sandboxes", None).0 == 401);
    new.done(200, "GET", "/v1/sandboxes", None);
    daemon.refused(409, "name_reserved", "DELETE", "/v1/tokens/default", None);
}

#[test]
fn quotas_hold_however_many_ask_at_once() {
    let Some(daemon) = start(json!({})) else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.done(200, "POST", "/v1/snapshots/tiny/owner", Some(json!({"owner": "*"})));
    let ann = add(&daemon, json!({"name": "ann", "max_sandboxes": 3, "max_snapshots": 1}));
    let spawn = |client: &Client, n: u64| {
        client.ask("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny", "n": n})))
    };
    let (status, answer) = spawn(&ann, 4);
    assert_eq!((status, &answer["code"]), (429, &json!("quota_exceeded")), "{answer}");
    let made: usize = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..12).map(|_| scope.spawn(|| spawn(&ann, 1).0)).collect();
        let answers: Vec<u16> = asked.into_iter().map(|it| it.join().unwrap()).collect();
        assert!(answers.iter().all(|status| [201, 429].contains(status)), "{answers:?}");
        answers.iter().filter(|status| **status == 201).count()
    });
    assert_eq!(made, 3);
    let ids = names(&ann.done(200, "GET", "/v1/sandboxes", None), "id");
    assert_eq!(ids.len(), 3);
    // A client that gets the response to a deletion has room for another sandbox.
    for _ in 0..3 {
        let id = &names(&ann.done(200, "GET", "/v1/sandboxes", None), "id")[0];
        ann.done(204, "DELETE", &format!("/v1/sandboxes/{id}"), None);
        ann.spawn("tiny");
    }
    let id = names(&ann.done(200, "GET", "/v1/sandboxes", None), "id")[0].clone();
    let branch =
        |tag: &str| ann.ask("POST", &format!("/v1/sandboxes/{id}/branch"), Some(json!({"tag": tag}))).0;
    assert_eq!((branch("one"), branch("two")), (201, 429));
    ann.done(204, "DELETE", "/v1/snapshots/one", None);
    assert_eq!(branch("two"), 201);

    // Guests of 64 MiB each; also a rollback to a larger snapshot.
    let bob = add(&daemon, json!({"name": "bob", "max_memory_mib": 130}));
    assert_eq!((spawn(&bob, 2).0, spawn(&bob, 1).0), (201, 429));
    let large = json!({"tag": "large", "kernel": daemon.path().join("kernel"), "mem_size_mib": 128});
    daemon.done(201, "POST", "/v1/snapshots", Some(large));
    daemon.done(200, "POST", "/v1/snapshots/large/owner", Some(json!({"owner": "*"})));
    let id = names(&bob.done(200, "GET", "/v1/sandboxes", None), "id")[0].clone();
    let rollback = format!("/v1/sandboxes/{id}/rollback");
    bob.refused(429, "quota_exceeded", "POST", &rollback, Some(json!({"to": "large"})));
    bob.done(200, "POST", &rollback, Some(json!({"to": "tiny"})));
    let body = json!({"tag": "huge", "kernel": daemon.path().join("kernel"), "mem_size_mib": 256});
    bob.refused(429, "quota_exceeded", "POST", "/v1/snapshots", Some(body));
    // The guest from which a snapshot is made counts while it runs.
    let body = json!({"tag": "small", "kernel": daemon.path().join("kernel"), "mem_size_mib": 64});
    bob.refused(429, "quota_exceeded", "POST", "/v1/snapshots", Some(body.clone()));
    bob.done(204, "DELETE", &format!("/v1/sandboxes/{id}"), None);
    bob.done(201, "POST", "/v1/snapshots", Some(body));
    assert_eq!((spawn(&bob, 1).0, spawn(&bob, 1).0), (201, 429), "its room is given back, and no more");
}

#[test]
fn whoever_asks_too_often_or_guesses_is_told_to_wait() {
    let Some(daemon) = start(json!({"rate_limit": 1})) else { return };
    let (ann, admin) = (add(&daemon, json!({"name": "ann"})), first(&daemon));
    assert!((0..2).all(|_| ann.ask("GET", "/version", None).0 == 200), "a burst is served");
    eventually("a refusal", || ann.ask("GET", "/version", None).0 == 429);
    assert!((0..50).all(|_| admin.ask("GET", "/version", None).0 == 200), "those who own the host may");
    eventually("room for another request", || ann.ask("GET", "/version", None).0 == 200);

    let guess =
        "GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\nConnection: close\r\n\r\n";
    let guesses: Vec<String> = (0..25).map(|_| raw(&admin.address, guess.as_bytes())).collect();
    assert!(guesses[..20].iter().all(|answer| status(answer) == 401), "{guesses:?}");
    let last = guesses.last().unwrap();
    assert!(status(last) == 429 && last.to_lowercase().contains("\r\nretry-after: "), "{last}");
    let body: Value = serde_json::from_str(last.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(body["code"], "rate_limited", "{body}");
    // Failed attempts of one client do not lock out another.
    admin.done(200, "GET", "/version", None);
}

#[test]
fn hostile_headers_get_nobody_in_and_nothing_down() {
    let Some(daemon) = start(json!({})) else { return };
    let client = first(&daemon);
    let (address, token) = (client.address.as_str(), client.token.as_str());
    let good = format!("Authorization: Bearer {token}\r\n");
    let huge = format!("Authorization: Bearer {}\r\n", "x".repeat(5000));
    for (headers, expected) in [
        (format!("{good}{good}"), 401),
        (format!("{good}Authorization: Bearer x\r\n"), 401),
        (format!("Authorization: Basic {token}\r\n"), 401),
        (format!("Authorization: Bearer{token}\r\n"), 401),
        (format!("Authorization: {token}\r\n"), 401),
        ("Authorization:\r\n".into(), 401),
        ("Authorization: Bearer \r\n".into(), 401),
        (format!("Authorization: Bearer {token}\u{fc}\r\n"), 401),
        (format!("Authorization: Bearer {token} {token}\r\n"), 401),
        (format!("Authorization: Bearer {}\r\n", &token[1..]), 401),
        (huge, 401),
        (format!("authorization: bearer   {token}  \r\n"), 200),
    ] {
        let request =
            format!("GET /version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n");
        let answer = raw(address, request.as_bytes());
        assert_eq!(status(&answer), expected, "{headers}: {answer}");
    }
    for hostile in [
        &b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer \xff\xfe\r\nConnection: close\r\n\r\n"[..],
        format!("GET /version HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20)).as_bytes(),
        format!("GET /version HTTP/1.1\r\nHost: localhost\r\n{}\r\n", "X: y\r\n".repeat(5000)).as_bytes(),
        b"GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer a\0b\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc",
    ] {
        let answer = raw(address, hostile);
        assert!(answer.is_empty() || (400..500).contains(&status(&answer)), "{answer}");
    }
    client.done(200, "GET", "/version", None);
}

/// Makes a certificate for this host.
fn certificate(folder: &Path, name: &str) {
    let [key, cert] = ["key", "cert"].map(|kind| folder.join(format!("{name}-{kind}.pem")));
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"])
        .args([
            "-days",
            "2",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
        ])
        .arg("-keyout")
        .arg(key)
        .arg("-out")
        .arg(cert)
        .output()
        .unwrap();
    assert!(made.status.success(), "{made:?}");
}

fn install(folder: &Path, name: &str) {
    for kind in ["key", "cert"] {
        let (from, to) = (folder.join(format!("{name}-{kind}.pem")), folder.join(format!("{kind}.pem")));
        std::fs::copy(from, folder.join("new")).unwrap();
        std::fs::rename(folder.join("new"), to).unwrap();
    }
}

fn curl(daemon: &Daemon, port: &str, trusted: &str, more: &[&str]) -> Output {
    Command::new("curl")
        .args(["-sS", "-w", "\n%{http_code}", "--cacert"])
        .arg(daemon.path().join(format!("{trusted}-cert.pem")))
        .args(["-H", &format!("Authorization: Bearer {}", default_token(daemon))])
        .args(more)
        .arg(format!("https://localhost:{port}/version"))
        .output()
        .unwrap()
}

fn default_token(daemon: &Daemon) -> String {
    std::fs::read_to_string(daemon.path().join("token")).unwrap().trim().to_owned()
}

#[test]
fn an_address_others_can_reach_is_served_with_tls_and_certificates_are_replaced_under_way() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    for name in ["old", "new"] {
        certificate(daemon.path(), name);
    }
    install(daemon.path(), "old");
    std::fs::write(daemon.path().join("limits.json"), json!({"abroad": true}).to_string()).unwrap();
    daemon.restart();
    let port = address(&daemon).rsplit_once(':').unwrap().1.to_owned();
    let code = |trusted: &str, more: &[&str]| {
        let output = curl(&daemon, &port, trusted, more);
        String::from_utf8_lossy(&output.stdout).rsplit_once('\n').unwrap().1.to_owned()
    };
    assert_eq!(code("old", &[]), "200");
    assert_eq!(code("old", &["-H", "Host: forkd.example"]), "200", "any name is ours");
    assert_eq!(code("old", &["-H", "Authorization: Bearer wrong"]), "401");
    assert_eq!(code("old", &["-H", "Origin: https://evil.example"]), "403");
    assert_eq!(code("old", &["-H", &format!("Origin: https://localhost:{port}")]), "200");
    assert_eq!(code("new", &[]), "000", "a certificate it does not have");
    // Without TLS there is no response. A client that sends nothing does not block others.
    let plain = raw(&format!("127.0.0.1:{port}"), b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n");
    assert!(!plain.contains("HTTP/1.1 200"), "{plain}");
    let _silent = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();

    std::fs::write(daemon.path().join("cert.pem"), "not a certificate").unwrap();
    eventually("a word about it", || daemon.log().contains("the old one stays"));
    assert_eq!(code("old", &[]), "200");
    install(daemon.path(), "new");
    eventually("the new certificate", || code("new", &[]) == "200");
    assert_eq!(code("old", &[]), "000");
}

#[test]
fn loopback_without_a_token_is_served_when_asked_for_but_not_to_web_pages() {
    let Some(daemon) = start(json!({"insecure_loopback": true})) else { return };
    let address = address(&daemon);
    let ask = |headers: &str| {
        status(&raw(
            &address,
            format!("GET /v1/tokens HTTP/1.1\r\n{headers}Connection: close\r\n\r\n").as_bytes(),
        ))
    };
    assert_eq!(ask("Host: localhost\r\n"), 200);
    assert_eq!(ask("Host: localhost\r\nAuthorization: Bearer wrong\r\n"), 401);
    assert_eq!(ask("Host: evil.example\r\n"), 403);
    assert_eq!(ask("Host: localhost\r\nOrigin: https://evil.example\r\n"), 403);
}

#[test]
fn a_kernel_comes_from_an_allowed_folder_or_not_at_all() {
    let Some(daemon) = Daemon::spelling() else { return };
    let elsewhere = tempfile::tempdir().unwrap();
    let kernel = elsewhere.path().join("kernel");
    std::fs::copy(daemon.path().join("kernel"), &kernel).unwrap();
    std::os::unix::fs::symlink(&kernel, daemon.path().join("link")).unwrap();
    for path in [kernel, daemon.path().join("link"), "/etc/shadow".into()] {
        let body = json!({"tag": "x", "kernel": path, "mem_size_mib": 64});
        daemon.refused(400, "path_not_allowed", "POST", "/v1/snapshots", Some(body));
    }
    let body = json!({"tag": "x", "kernel": daemon.path().join("../x"), "mem_size_mib": 64});
    daemon.refused(400, "invalid_request", "POST", "/v1/snapshots", Some(body));
    daemon.snapshot("x", "kernel");
}

/// Whether the template of the branch `tag` is there, and the next daemon would take it over.
fn is_forked(daemon: &Daemon, tag: &str) -> bool {
    let folders = std::fs::read_dir(daemon.place("templates")).unwrap().flatten();
    let records = folders.filter_map(|folder| std::fs::read(folder.path().join("template.json")).ok());
    let is_it = |record: &Value| record["about"]["tag"] == tag;
    records.filter_map(|record| serde_json::from_slice(&record).ok()).any(|record: Value| is_it(&record))
}

/// A daemon in which ann has a sandbox, and the database is held by another process, so that nothing is written.
fn with_held_database() -> Option<(Daemon, Client, String, rusqlite::Connection)> {
    let daemon = start(json!({}))?;
    daemon.snapshot("tiny", "kernel");
    daemon.done(200, "POST", "/v1/snapshots/tiny/owner", Some(json!({"owner": "*"})));
    let ann = add(&daemon, json!({"name": "ann"}));
    let source = ann.spawn("tiny");
    // This request reads the archive, which first writes all pending entries.
    daemon.done(404, "GET", "/v1/sandboxes/sb0", None);
    let database = rusqlite::Connection::open(daemon.path().join("forkd.db")).unwrap();
    database.busy_timeout(Duration::from_secs(30)).unwrap();
    database.execute_batch("BEGIN IMMEDIATE").unwrap();
    Some((daemon, ann, source, database))
}

#[test]
fn a_branch_is_forked_and_others_are_served_while_the_database_does_not_write() {
    let Some((daemon, ann, source, database)) = with_held_database() else { return };
    let path = format!("/v1/sandboxes/{source}/branch");
    let order = json!({"tag": "b", "mode": "live", "wait": false});
    std::thread::scope(|scope| {
        let branch = scope.spawn(|| ann.ask("POST", &path, Some(order)));
        eventually("the fork", || is_forked(&daemon, "b") || branch.is_finished());
        assert!(!branch.is_finished(), "it is acknowledged only when its owner is on disk");
        assert_eq!(daemon.request("GET", "/healthz", None).0, 200);
        assert_eq!(ann.done(200, "GET", &format!("/v1/sandboxes/{source}"), None)["state"], "running");
        ann.done(409, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "b"})));
        database.execute_batch("ROLLBACK").unwrap();
        let (status, answer) = branch.join().unwrap();
        assert_eq!((status, &answer["owner"]), (202, &json!("ann")), "{answer}");
    });
    ann.spawn("b");
    add(&daemon, json!({"name": "bob"})).done(404, "GET", "/v1/snapshots/b", None);
}

#[test]
fn a_branch_whose_daemon_was_killed_before_it_wrote_the_owner_has_that_owner() {
    let Some((mut daemon, ann, source, database)) = with_held_database() else { return };
    let path = format!("/v1/sandboxes/{source}/branch");
    std::thread::scope(|scope| {
        let order = json!({"tag": "b", "mode": "live", "wait": false});
        let request = format!(
            "POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{order}",
            ann.token,
            order.to_string().len()
        );
        let address = ann.address.clone();
        let answer = scope.spawn(move || raw(&address, request.as_bytes()));
        eventually("the fork", || is_forked(&daemon, "b") || answer.is_finished());
        assert!(!answer.is_finished(), "it is acknowledged only when its owner is on disk");
        daemon.kill();
        assert_eq!(answer.join().unwrap(), "", "the killed daemon gave no answer");
    });
    // The entry of an earlier snapshot with this tag does not count.
    database.execute_batch("INSERT OR REPLACE INTO snapshot_owners VALUES ('b', 'eve'); COMMIT").unwrap();
    drop(database);
    for round in 0..2 {
        daemon.restart();
        eventually("it is on disk", || ann_sees(&daemon, &ann)["status"] == "ready");
        let info = ann_sees(&daemon, &ann);
        assert_eq!(info["owner"], "ann", "after restart {round}: {info}");
        let eve = add(&daemon, json!({"name": format!("eve{round}"), "owner": "eve"}));
        eve.done(404, "GET", "/v1/snapshots/b", None);
    }
}

/// The branch in ann's view, at the current address of the daemon.
fn ann_sees(daemon: &Daemon, ann: &Client) -> Value {
    let ann = Client { address: address(daemon), token: ann.token.clone() };
    ann.done(200, "GET", "/v1/snapshots/b", None)
}
