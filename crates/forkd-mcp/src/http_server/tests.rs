use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt, Full};
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::http_server::{HttpOptions, HttpServer, SESSION_ID};
use crate::testing::FakeApi;

/// A server and its fake daemon.
struct Served {
    server: HttpServer,
    api: Arc<FakeApi>,
}

fn served(options: HttpOptions) -> Served {
    Served { server: HttpServer::new(options, CancellationToken::new()), api: FakeApi::new() }
}

impl Served {
    async fn send(
        &self,
        client: &str,
        method: &str,
        headers: &[(&str, &str)],
        body: Value,
    ) -> (StatusCode, Option<String>, Value) {
        let mut request = Request::builder().method(method).uri("/mcp").header("host", "localhost");
        let text = if body.is_null() { String::new() } else { body.to_string() };
        request = request.header("content-type", "application/json");
        request = request.header("accept", "application/json, text/event-stream");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::from(text))).unwrap();
        let reply = self.server.handle(request, client, self.api.clone()).await;
        let (status, id) =
            (reply.status(), reply.headers().get(SESSION_ID).map(|id| id.to_str().unwrap().to_owned()));
        let bytes = reply.into_body().collect().await.unwrap().to_bytes();
        let text = String::from_utf8(bytes.to_vec()).unwrap();
        // One message, as it is or as an event.
        let message =
            text.lines().filter_map(|line| line.strip_prefix("data: ")).next_back().unwrap_or(&text);
        (status, id, serde_json::from_str(message).unwrap_or(json!(text)))
    }

    async fn open(&self, client: &str) -> String {
        let (status, id, reply) = self.send(client, "POST", &[], initialize()).await;
        assert_eq!(status, 200, "{reply}");
        assert_eq!(reply["result"]["serverInfo"]["name"], "forkd");
        let id = id.unwrap();
        let (status, ..) = self
            .send(
                client,
                "POST",
                &[(SESSION_ID, &id)],
                json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }),
            )
            .await;
        assert_eq!(status, 202);
        id
    }

    async fn spawn(&self, client: &str, id: &str) -> (StatusCode, Value) {
        let (status, _, reply) = self.send(client, "POST", &[(SESSION_ID, id)], spawn()).await;
        (status, reply)
    }
}

fn initialize() -> Value {
    json!({ "jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
        "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": { "name": "test", "version": "1" } } })
}

fn spawn() -> Value {
    json!({ "jsonrpc": "2.0", "id": 2, "method": "tools/call",
        "params": { "name": "spawn_sandboxes", "arguments": { "snapshot_tag": "t" } } })
}

async fn eventually(what: &str, done: impl Fn() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}");
}

#[tokio::test]
async fn a_session_that_its_client_deletes_ends_what_it_made() {
    let served = served(HttpOptions::default());
    let (first, second) = (served.open("ann").await, served.open("ann").await);
    let (status, reply) = served.spawn("ann", &first).await;
    assert_eq!((status.as_u16(), &reply["result"]["isError"]), (200, &json!(false)), "{reply}");
    served.spawn("ann", &second).await;
    assert_eq!(served.api.sandboxes(), ["sb1", "sb2"]);
    let (status, ..) = served.send("ann", "DELETE", &[(SESSION_ID, &first)], Value::Null).await;
    assert_eq!(status, 200);
    assert_eq!(served.api.sandboxes(), ["sb2"]);
    assert_eq!(served.spawn("ann", &first).await.0, 404);
}

#[tokio::test]
async fn a_session_of_another_client_does_not_exist() {
    let served = served(HttpOptions::default());
    let id = served.open("ann").await;
    served.spawn("ann", &id).await;
    for method in ["POST", "GET", "DELETE"] {
        let (status, ..) = served.send("bob", method, &[(SESSION_ID, &id)], spawn()).await;
        assert_eq!(status, 404, "{method}");
    }
    assert_eq!(served.api.sandboxes(), ["sb1"]);
    for strange in ["", "x", "\u{e4}", &"x".repeat(5000)] {
        let (status, ..) = served.send("ann", "POST", &[(SESSION_ID, strange)], spawn()).await;
        assert_eq!(status, 404, "{strange}");
    }
    assert_eq!(served.spawn("ann", &id).await.0, 200);
}

#[tokio::test]
async fn a_session_without_use_ends_and_the_daemons_stop_ends_all() {
    let options = HttpOptions { idle: Duration::from_millis(300), ..HttpOptions::default() };
    let served = served(options);
    let stop = CancellationToken::new();
    let ending = tokio::spawn({
        let (server, stop) = (served.server.clone(), stop.clone());
        async move { server.end_unused(stop).await }
    });
    let id = served.open("ann").await;
    served.spawn("ann", &id).await;
    eventually("an unused session ends", || served.api.sandboxes().is_empty()).await;
    assert_eq!(served.spawn("ann", &id).await.0, 404);
    let id = served.open("ann").await;
    served.spawn("ann", &id).await;
    stop.cancel();
    ending.await.unwrap();
    assert!(served.api.sandboxes().is_empty());
}

#[tokio::test]
async fn requests_that_stand_alone_share_the_session_of_their_client() {
    let options = HttpOptions { idle: Duration::from_millis(300), ..HttpOptions::default() };
    let served = served(options);
    let version = "2026-07-28";
    let meta = json!({
        "io.modelcontextprotocol/protocolVersion": version,
        "io.modelcontextprotocol/clientInfo": { "name": "test", "version": "1" },
        "io.modelcontextprotocol/clientCapabilities": {},
    });
    let mut call = spawn();
    call["params"]["_meta"] = meta;
    let headers =
        [("mcp-protocol-version", version), ("mcp-method", "tools/call"), ("mcp-name", "spawn_sandboxes")];
    let (status, id, reply) = served.send("ann", "POST", &headers, call.clone()).await;
    assert_eq!((status.as_u16(), id, &reply["result"]["isError"]), (200, None, &json!(false)), "{reply}");
    served.send("bob", "POST", &headers, call).await;
    // The next request finds it: it did not end with the first one.
    assert_eq!(served.api.sandboxes(), ["sb1", "sb2"]);
    let stop = CancellationToken::new();
    let ending = tokio::spawn({
        let (server, stop) = (served.server.clone(), stop.clone());
        async move { server.end_unused(stop).await }
    });
    eventually("unused sessions end", || served.api.sandboxes().is_empty()).await;
    stop.cancel();
    ending.await.unwrap();
}

#[tokio::test]
async fn too_many_sessions_and_too_long_messages_are_refused() {
    let served = served(HttpOptions { max_sessions: 3, ..HttpOptions::default() });
    // One entry is for requests that stand alone.
    let id = served.open("ann").await;
    served.open("ann").await;
    let (status, ..) = served.send("ann", "POST", &[], initialize()).await;
    assert_eq!(status, 503);
    let mut long = spawn();
    long["params"]["arguments"]["snapshot_tag"] = json!("x".repeat(10 << 20));
    let (status, ..) = served.send("ann", "POST", &[(SESSION_ID, &id)], long).await;
    assert_eq!(status, 413);
    for (body, allowed) in
        [(json!([1, 2]), 400..=422), (json!("x"), 400..=422), (json!({ "jsonrpc": "1.0" }), 400..=422)]
    {
        let (status, _, reply) = served.send("ann", "POST", &[(SESSION_ID, &id)], body).await;
        assert!(allowed.contains(&status.as_u16()), "{status}: {reply}");
    }
    assert_eq!(served.spawn("ann", &id).await.0, 200);
}

#[tokio::test]
async fn a_client_at_its_limit_of_sessions_does_not_block_another_client() {
    let served = served(HttpOptions { max_sessions_of_client: 2, ..HttpOptions::default() });
    let first = served.open("ann").await;
    served.open("ann").await;
    let (status, id, reply) = served.send("ann", "POST", &[], initialize()).await;
    assert_eq!((status.as_u16(), id), (429, None));
    let text = reply["error"]["message"].as_str().unwrap();
    assert!(text.starts_with("this client has 2 MCP sessions, the limit; close some"), "{text}");
    let id = served.open("bob").await;
    assert_eq!(served.spawn("bob", &id).await.0, 200);
    served.send("ann", "DELETE", &[(SESSION_ID, &first)], Value::Null).await;
    served.open("ann").await;
}
