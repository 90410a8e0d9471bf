//! `/mcp` over TCP: the checks of every request hold for it, and for the requests of its tools.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::http::Request;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tower::ServiceExt;

use super::{Daemon, refused};
use crate::api;
use crate::api::middleware::authenticate::Authenticator;
use crate::auth::principal::LOCAL;
use crate::auth::rate_limit::Rates;
use crate::sandbox::Phase;
use crate::testing::fake_guest::{FakeDaemon, ID};

const INITIALIZE: &str = r#"{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-06-18",
    "capabilities":{},"clientInfo":{"name":"test","version":"1"}}}"#;
const INITIALIZED: &str = r#"{"jsonrpc":"2.0","method":"notifications/initialized"}"#;
const TYPES: &str = "Content-Type: application/json\r\nAccept: application/json, text/event-stream\r\n";

/// A session of a client with this token: its id, from a reply with its head.
async fn open(daemon: &Daemon, token: &str) -> String {
    let head = format!("Host: localhost\r\nAuthorization: Bearer {token}\r\nConnection: close\r\n{TYPES}");
    let length = INITIALIZE.len();
    let request = format!("POST /mcp HTTP/1.1\r\n{head}Content-Length: {length}\r\n\r\n{INITIALIZE}");
    let stream = tokio::net::TcpStream::connect(daemon.ready.address).await.unwrap();
    let whole = whole(stream, request).await;
    let id = whole.lines().find_map(|line| line.strip_prefix("mcp-session-id: ")).expect(&whole);
    let id = id.trim().to_owned();
    let head = format!("Authorization: Bearer {token}\r\nMcp-Session-Id: {id}\r\n{TYPES}");
    let (status, body) = daemon.tcp("POST /mcp", &head, INITIALIZED).await;
    assert_eq!(status, 202, "{body}");
    id
}

async fn whole(mut stream: tokio::net::TcpStream, request: String) -> String {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer).await;
    answer
}

/// The result of a tool.
async fn call(daemon: &Daemon, token: &str, session: &str, tool: &str, arguments: Value) -> (u16, Value) {
    let params = json!({ "name": tool, "arguments": arguments });
    let body = json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": params }).to_string();
    let head = format!("Authorization: Bearer {token}\r\nMcp-Session-Id: {session}\r\n{TYPES}");
    let (status, answer) = daemon.tcp("POST /mcp", &head, &body).await;
    let message = answer.lines().find_map(|line| line.strip_prefix("data: "));
    let message = message.map_or(Value::Null, |message| serde_json::from_str(message).unwrap());
    (status, message["result"].clone())
}

/// A request of the protocol's version without sessions: its headers and its body.
fn alone(method: &str, name: &str, mut params: Value) -> (String, String) {
    const VERSION: &str = "2026-07-28";
    params["_meta"] = json!({
        "io.modelcontextprotocol/protocolVersion": VERSION,
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let body = json!({ "jsonrpc": "2.0", "id": 3, "method": method, "params": params }).to_string();
    let head =
        format!("Mcp-Protocol-Version: {VERSION}\r\nMcp-Method: {method}\r\nMcp-Name: {name}\r\n{TYPES}");
    (head, body)
}

async fn token(daemon: &Daemon, name: &str, scope: &str) -> String {
    token_of(daemon, name, name, scope).await
}

async fn token_of(daemon: &Daemon, owner: &str, name: &str, scope: &str) -> String {
    let order = json!({ "name": name, "owner": owner, "scope": scope }).to_string();
    let (status, body) = daemon.json("POST /v1/tokens", &order).await;
    assert_eq!(status, 201, "{body}");
    serde_json::from_str::<Value>(&body).unwrap()["token"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn the_checks_of_every_request_hold_for_mcp() {
    let daemon = Daemon::start().await;
    for headers in ["", "Authorization: Bearer wrong\r\n"] {
        let (status, body) = daemon.tcp("POST /mcp", &format!("{headers}{TYPES}"), INITIALIZE).await;
        assert_eq!(status, 401);
        assert_eq!(refused(status, &body).code, "unauthorized");
    }
    let authorization = format!("Authorization: Bearer {}\r\n", daemon.token);
    for (host, origin) in [("localhost", "Origin: https://evil.example\r\n"), ("evil.example", "")] {
        let length = INITIALIZE.len();
        let head = format!("Host: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n{origin}");
        let request = format!("POST /mcp HTTP/1.1\r\n{head}{authorization}{TYPES}\r\n{INITIALIZE}");
        let (status, body) = daemon.raw(request).await;
        assert_eq!((status, refused(status, &body).code.as_str()), (403, "origin_forbidden"));
    }
    for body in ["", "{", "x"] {
        let (status, body) = daemon.authorized("POST /mcp", TYPES, body).await;
        assert!((400..500).contains(&status));
        refused(status, &body);
    }
    let (status, body) = daemon.authorized("PUT /mcp", TYPES, INITIALIZE).await;
    assert_eq!((status, refused(status, &body).code.as_str()), (405, "method_not_allowed"));
    daemon.stop().await;
}

#[tokio::test]
async fn a_tool_may_do_what_its_token_may_do_and_is_in_the_audit_log() {
    let daemon = Daemon::start().await;
    let reader = token(&daemon, "reader", "read").await;
    let session = open(&daemon, &reader).await;
    let (status, listed) = call(&daemon, &reader, &session, "list_sandboxes", json!({})).await;
    assert_eq!((status, &listed["structuredContent"]["result"]), (200, &json!([])), "{listed}");
    let spawn = json!({ "snapshot_tag": "none" });
    let (_, spawned) = call(&daemon, &reader, &session, "spawn_sandboxes", spawn.clone()).await;
    let text = spawned["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("forbidden: ") && text.contains("write"), "{text}");
    // The session belongs to its token.
    let (status, _) = call(&daemon, &daemon.token, &session, "list_sandboxes", json!({})).await;
    assert_eq!(status, 404);
    let writer = token(&daemon, "writer", "write").await;
    let session = open(&daemon, &writer).await;
    let (_, spawned) = call(&daemon, &writer, &session, "spawn_sandboxes", spawn).await;
    assert_eq!(spawned["structuredContent"]["error"]["code"], "snapshot_not_found", "{spawned}");

    let Daemon { folder, stop, served, .. } = daemon;
    drop(stop);
    served.await.unwrap().unwrap();
    let log = std::fs::read_to_string(folder.path().join("audit.log")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let count = |name: &str, path: &str, status: u16| {
        lines
            .iter()
            .filter(|line| line["identity"] == name && line["path"] == path && line["status"] == status)
            .count()
    };
    assert_eq!((count("reader", "/mcp", 200), count("reader", "/v1/sandboxes", 200)), (3, 1), "{log}");
    assert_eq!(
        (count("reader", "/v1/sandboxes", 403), count("writer", "/v1/sandboxes", 404)),
        (1, 1),
        "{log}"
    );
}

#[tokio::test]
async fn a_token_with_the_name_of_a_removed_one_gets_neither_its_sessions_nor_its_rights() {
    let daemon = Daemon::start().await;
    let spawn = json!({ "name": "spawn_sandboxes", "arguments": { "snapshot_tag": "none" } });
    let (head, body) = alone("tools/call", "spawn_sandboxes", spawn);
    let spawned = async |token: &str| {
        let head = format!("Authorization: Bearer {token}\r\n{head}");
        let (status, answer) = daemon.tcp("POST /mcp", &head, &body).await;
        assert_eq!(status, 200, "{answer}");
        // Between the lengths of its chunks.
        let message = answer.lines().find(|line| line.starts_with('{')).expect(&answer);
        let message: Value = serde_json::from_str(message).unwrap();
        message["result"]["structuredContent"]["error"]["code"].clone()
    };
    let first = token_of(&daemon, "ann", "ci", "write").await;
    let session = open(&daemon, &first).await;
    assert_eq!(spawned(&first).await, "snapshot_not_found");
    let (status, body) = daemon.json("DELETE /v1/tokens/ci", "").await;
    assert_eq!(status, 204, "{body}");
    let second = token_of(&daemon, "bob", "ci", "read").await;
    assert_eq!(spawned(&second).await, "forbidden");
    let (status, _) = call(&daemon, &second, &session, "list_sandboxes", json!({})).await;
    assert_eq!(status, 404);
    daemon.stop().await;
}

/// A client of a daemon with a sandbox.
struct Client {
    api: Router,
    token: String,
}

impl Client {
    /// A client with a new token of `owner`.
    async fn of(daemon: &FakeDaemon, name: &str, owner: &str) -> Self {
        let order = json!({ "name": name, "owner": owner, "scope": "write" });
        let (status, made) = daemon.json("POST /v1/tokens", Some(order)).await;
        assert_eq!(status, 201, "{made}");
        let gate = Authenticator {
            tokens: daemon.app.tokens.clone(),
            rates: Arc::new(Rates::new(0)),
            failures: Arc::default(),
            remote: false,
            insecure: false,
        };
        let token = made["token"].as_str().unwrap().to_owned();
        Client { api: api::for_tcp(daemon.app.clone(), gate), token }
    }

    /// The message that answers a request.
    async fn ask(&self, method: &str, name: &str, params: Value) -> Value {
        let (head, body) = alone(method, name, params);
        let bearer = format!("Bearer {}", self.token);
        let mut request = Request::post("/mcp").header("host", "localhost").header("authorization", bearer);
        for (name, value) in head.lines().map(|line| line.split_once(": ").unwrap()) {
            request = request.header(name, value);
        }
        let reply = self.api.clone().oneshot(request.body(Body::from(body)).unwrap()).await.unwrap();
        let bytes = reply.into_body().collect().await.unwrap().to_bytes();
        serde_json::from_slice(&bytes).unwrap_or_else(|_| panic!("{bytes:?}"))
    }

    /// The structured content of a tool's result.
    async fn tool(&self, name: &str, arguments: Value) -> Value {
        let answer = self.ask("tools/call", name, json!({ "name": name, "arguments": arguments })).await;
        answer["result"]["structuredContent"].clone()
    }

    /// The code and the sentence of a tool's error; none if it has no error.
    async fn refusal(&self, name: &str, arguments: Value) -> Option<(String, String)> {
        let error = self.tool(name, arguments).await["error"].clone();
        Some((error["code"].as_str()?.to_owned(), error["message"].as_str()?.to_owned()))
    }

    async fn read(&self, uri: &str) -> Value {
        self.ask("resources/read", uri, json!({ "uri": uri })).await
    }
}

#[tokio::test]
async fn over_mcp_a_sandbox_of_another_owner_does_not_exist() {
    let daemon = FakeDaemon::start().await;
    daemon.guest.files.lock().unwrap().insert("/note".into(), (b"hello".to_vec(), String::new()));
    let (ann, bob) = (Client::of(&daemon, "ann", LOCAL).await, Client::of(&daemon, "bob", "bob").await);
    const NONE: &str = "sbnone";
    for (tool, arguments) in [
        ("get_sandbox", json!({})),
        ("ping_sandbox", json!({})),
        ("kill_sandbox", json!({})),
        ("rollback_sandbox", json!({})),
        ("branch_sandbox", json!({})),
        ("fork_sandbox", json!({})),
        ("exec_command", json!({ "args": ["true"] })),
        ("run_code", json!({ "code": "1" })),
        ("eval_code", json!({ "code": "1" })),
        ("wait_for_text", json!({ "path": "/note", "marker": "hello" })),
        ("read_file", json!({ "path": "/note" })),
        ("write_file", json!({ "path": "/note", "content": "bye" })),
        ("list_files", json!({ "path": "/" })),
        ("keep", json!({})),
    ] {
        let with = |id: &str| {
            let mut arguments = arguments.clone();
            match tool {
                "keep" => arguments["sandbox_ids"] = json!([id]),
                _ => arguments["sandbox_id"] = json!(id),
            }
            arguments
        };
        let (code, text) = bob.refusal(tool, with(ID)).await.unwrap_or_else(|| panic!("{tool}"));
        assert_eq!(code, "sandbox_not_found", "{tool}: {text}");
        let missing = bob.refusal(tool, with(NONE)).await.unwrap();
        assert_eq!((code, text.replace(ID, NONE)), missing, "{tool}");
    }
    for part in ["console", "files/note", "files"] {
        let of = |id: &str| format!("forkd://sandboxes/{id}/{part}");
        let (theirs, missing) = (bob.read(&of(ID)).await, bob.read(&of(NONE)).await);
        assert_eq!(theirs["error"]["data"]["error"]["code"], "sandbox_not_found", "{theirs}");
        assert_eq!(theirs["error"]["code"], missing["error"]["code"], "{part}");
    }
    assert_eq!(bob.tool("list_sandboxes", json!({})).await["result"], json!([]));
    assert_eq!(bob.tool("tree", json!({})).await["nodes"], json!([]));
    let listed = bob.ask("resources/list", "", json!({})).await;
    assert_eq!(listed["result"]["resources"].as_array().unwrap().len(), 1, "{listed}");

    // Nothing reached the guest, and its owner finds it as it was.
    assert!(daemon.guest.calls.lock().unwrap().is_empty());
    assert!(matches!(*daemon.sandbox.phase.borrow(), Phase::Running));
    assert_eq!(ann.tool("get_sandbox", json!({ "sandbox_id": ID })).await["id"], ID);
    assert_eq!(ann.tool("list_sandboxes", json!({})).await["result"][0]["id"], ID);
    let note = ann.read(&format!("forkd://sandboxes/{ID}/files/note")).await;
    assert_eq!(note["result"]["contents"][0]["text"], "hello", "{note}");
}
