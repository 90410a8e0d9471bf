//! Who gets into a sandbox, and what the others are told.

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{Request, StatusCode};
use axum::{Extension, response::Response};
use http_body_util::BodyExt;
use tower::ServiceExt;

use super::*;
use crate::api;
use crate::api::middleware::authenticate::Authenticator;
use crate::auth::rate_limit::Rates;
use crate::compat::e2b::{E2bContext, extract, sandboxes};
use crate::sandbox::forwards::MAX_FORWARDS;

const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";

fn to_port(port: u16) -> String {
    format!("E2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\n")
}

fn change(daemon: &FakeDaemon, change: impl FnOnce(&mut E2bState)) {
    daemon.sandbox.update_runtime(|runtime| change(runtime.saved.e2b.as_mut().unwrap()));
}

/// The daemon's API for clients over TCP.
fn over_tcp(daemon: &FakeDaemon) -> Router {
    let gate = Authenticator {
        tokens: daemon.app.tokens.clone(),
        rates: Arc::new(Rates::new(0)),
        failures: Arc::default(),
        remote: false,
        insecure: false,
    };
    api::for_tcp(daemon.app.clone(), gate)
}

async fn send(api: &Router, line: &str, headers: &[(&str, &str)]) -> (StatusCode, Value) {
    let (method, uri) = line.split_once(' ').unwrap();
    let mut request = Request::builder().method(method).uri(uri);
    if !headers.iter().any(|(name, _)| *name == "host") {
        request = request.header("host", "localhost");
    }
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let answer = api.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let status = answer.status();
    let body = answer.into_body().collect().await.unwrap().to_bytes();
    (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
}

#[tokio::test]
async fn clients_of_a_public_port_leave_places_for_the_code_interpreter_and_the_agent() {
    let daemon = daemon().await;
    *daemon.guest.server.lock().unwrap() = HELLO.into();
    let held: Vec<_> = (0..MAX_FORWARDS).map(|_| daemon.sandbox.forwards.enter(false).unwrap()).collect();
    let (status, _, body) = daemon.ask("GET /", &to_port(8000), b"").await;
    assert_eq!((status, &parsed(&body)["code"], &parsed(&body)["sandboxId"]), (503, &json!(503), &json!(ID)));
    let code = format!("{}X-Access-Token: access\r\n", to_port(49999));
    assert_eq!(daemon.ask("POST /execute", &code, b"").await.0, 200);
    assert_eq!(daemon.ask("GET /files?path=/missing", &headers("access"), b"").await.0, 404);
    drop(held);
    assert_eq!(daemon.ask("GET /", &to_port(8000), b"").await.0, 200);
    // The request's place is free once its response has been read.
    let all = || (0..MAX_FORWARDS).map(|_| daemon.sandbox.forwards.enter(false)).all(|it| it.is_some());
    eventually("the place of the request", all).await;
}

#[tokio::test]
async fn a_wrong_token_counts_as_a_failed_login_on_every_port_and_a_missing_one_does_not() {
    let daemon = daemon().await;
    change(&daemon, |state| state.public_traffic = false);
    let api = over_tcp(&daemon);
    let counted = || daemon.app.registry.host.telemetry.metrics.auth_failures.get();
    for port in ["49999", "8000"] {
        for _ in 0..30 {
            let named = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", port)];
            assert_eq!(send(&api, "GET /", &named).await.0, 403);
        }
    }
    assert_eq!(counted(), 0);
    let mut statuses = Vec::new();
    for turn in 0..30 {
        let (port, name) = match turn % 2 {
            0 => ("49999", "x-access-token"),
            _ => ("8000", "e2b-traffic-access-token"),
        };
        let shown = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", port), (name, "wrong")];
        let (status, body) = send(&api, "GET /", &shown).await;
        assert_eq!((&body["code"], &body["sandboxId"]), (&json!(status.as_u16()), &json!(ID)), "{body}");
        statuses.push(status.as_u16());
    }
    assert_eq!((statuses[0], statuses[29]), (403, 429), "{statuses:?}");
    assert_eq!(counted(), 30);
}

#[tokio::test]
async fn a_sandbox_request_that_is_refused_at_the_door_gets_a_body_that_its_client_parses() {
    let daemon = daemon().await;
    let api = over_tcp(&daemon);
    let named = [("e2b-sandbox-id", ID), ("e2b-sandbox-port", "8000")];
    for line in ["GET /", "POST /process.Process/List"] {
        let (status, body) = send(&api, line, &[named[0], named[1], ("host", "evil.example")]).await;
        let wanted = (&json!(ID), &json!(403));
        assert_eq!((status.as_u16(), (&body["sandboxId"], &body["code"])), (403, wanted), "{line}: {body}");
        assert!(body["message"].as_str().unwrap().contains("Host header"), "{body}");
    }
    // Of no sandbox that could be named.
    for line in ["GET /files?path=/a", "POST /process.Process/List"] {
        let (status, body) = send(&api, line, &[]).await;
        assert_eq!((status.as_u16(), &body["code"]), (401, &json!(401)), "{line}: {body}");
        assert!(body["message"].is_string(), "{line}: {body}");
    }
}

#[tokio::test]
async fn a_token_of_the_daemon_does_not_reach_the_guest() {
    let daemon = daemon().await;
    *daemon.guest.server.lock().unwrap() = HELLO.into();
    let order = json!({ "name": "ann", "scope": "write" });
    let (_, made) = daemon.json("POST /v1/tokens", Some(order)).await;
    let token = made["token"].as_str().unwrap();
    for (value, stays) in [
        (format!("Bearer {token}"), false),
        (format!("bearer e2b_{token}"), false),
        (token.to_owned(), false),
        ("Bearer of-the-guest".to_owned(), true),
        ("Basic dXNlcjo=".to_owned(), true),
    ] {
        let headers = format!("{}Authorization: {value}\r\n", to_port(8000));
        assert_eq!(daemon.ask("GET /", &headers, b"").await.0, 200);
        let head = daemon.guest.server_request.lock().unwrap().to_lowercase();
        assert_eq!(head.contains("authorization:"), stays, "{value}: {head}");
    }
}

/// A paused sandbox wakes at any request, if its client wanted that. Health needs no token: with none it does not count.
#[tokio::test]
async fn asking_for_the_health_of_a_paused_sandbox_wakes_it_only_with_its_token() {
    let daemon = daemon().await;
    change(&daemon, |state| state.auto_resume = true);
    let paused = "sb0123456789abcdef";
    let state = daemon.sandbox.read_runtime(|runtime| runtime.saved.e2b.clone()).unwrap();
    // No snapshot has that tag, so the wake itself fails.
    daemon.app.workspaces.enter_paused(paused, "paused", *state, None);
    let ask = async |token: &str| {
        let headers = headers(token).replace(ID, paused);
        let (status, _, body) = daemon.ask("GET /health", &headers, b"").await;
        (status, parsed(&body)["message"].as_str().unwrap().to_owned())
    };
    for stranger in ["", "wrong"] {
        assert_eq!(ask(stranger).await, (502, "The sandbox was not found".into()), "{stranger}");
    }
    let (status, message) = ask("access").await;
    assert!(status == 502 && !message.contains("was not found"), "the daemon tried: {message}");
    // Any port without a token does, as with E2B.
    let (_, _, body) = daemon.ask("GET /", &to_port(8000).replace(ID, paused), b"").await;
    assert!(!parsed(&body)["message"].as_str().unwrap().contains("was not found"));
}

#[tokio::test]
async fn a_sandbox_that_the_daemons_own_api_paused_is_listed_as_paused() {
    let daemon = daemon().await;
    daemon.sandbox.phase.send_replace(Phase::Paused);
    let (_, shown) = daemon.json(&format!("GET /sandboxes/{ID}"), None).await;
    assert_eq!(shown["state"], json!("paused"));
    for (query, count) in [("", 1), ("?state=paused", 1), ("?state=running", 0)] {
        let (_, listed) = daemon.json(&format!("GET /v2/sandboxes{query}"), None).await;
        assert_eq!(listed.as_array().unwrap().len(), count, "{query}: {listed}");
    }
    assert_eq!(daemon.json("GET /sandboxes", None).await.1, json!([]), "of running ones");
    let (status, _, body) = daemon.ask("GET /health", &headers("access"), b"").await;
    assert!(status == 502 && parsed(&body)["message"].as_str().unwrap().contains("was not found"));
}

#[tokio::test]
async fn a_connect_resumes_a_sandbox_that_the_daemons_own_api_paused() {
    use crate::auth::tokens::Tokens;
    use crate::testing::fake_host::FakeHost;
    use crate::workspace::Workspaces;

    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (sandbox, _monitor) = daemon.booted().await;
    sandbox.update_persisted(|runtime| runtime.saved.e2b = Some(Box::default())).unwrap();
    let (registry, snapshots) = (daemon.registry.clone(), daemon.snapshots.clone());
    let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
    let tokens = Arc::new(Tokens::open(host.database.clone(), host.config.token_file.clone()).unwrap());
    let stopping = tokio_util::sync::CancellationToken::new();
    let e2b = E2bContext { registry, snapshots, workspaces, tokens, stopping };
    let connect = async || -> Response {
        let (who, id) = (Extension(Principal::local()), Path(sandbox.id.clone()));
        sandboxes::connect(State(e2b.clone()), who, id, extract::Body(Default::default())).await.unwrap()
    };
    sandbox.pause().await.unwrap();
    assert!(matches!(sandbox.phase(), Phase::Paused));
    assert_eq!(connect().await.status(), 201, "it was resumed");
    assert!(matches!(sandbox.phase(), Phase::Running));
    assert_eq!(connect().await.status(), 200);
}
