//! The E2B API over real routes, with a fake guest.

mod access;

use std::sync::Arc;

use axum::http::Method;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::auth::principal::{LOCAL, Principal, Scope};
use crate::auth::tokens::Tokens;
use crate::compat::e2b::{E2bContext, table};
use crate::error::Code;
use crate::sandbox::e2b::E2bState;
use crate::sandbox::{End, Phase};
use crate::testing::fake_guest::{FakeDaemon, ID, eventually};
use crate::testing::fake_host::{Daemon, FakeHost};
use crate::workspace::{WorkspaceSpec, Workspaces};

/// A daemon whose sandbox is of the E2B API.
async fn daemon() -> FakeDaemon {
    let daemon = FakeDaemon::start().await;
    let state = E2bState {
        template: "base".into(),
        metadata: [("team".to_owned(), "a".to_owned())].into(),
        access_token: "access".into(),
        traffic_token: "traffic".into(),
        public_traffic: true,
        timeout_secs: 300,
        started_at_unix_ms: 1_700_000_000_000,
        ..E2bState::default()
    };
    daemon.sandbox.update_runtime(|runtime| runtime.saved.e2b = Some(Box::new(state)));
    daemon
}

/// What the handlers use of a daemon without listeners.
async fn context(host: &FakeHost, daemon: &Daemon) -> E2bContext {
    let (registry, snapshots) = (daemon.registry.clone(), daemon.snapshots.clone());
    let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
    let tokens = Arc::new(Tokens::open(host.database.clone(), host.config.token_file.clone()).unwrap());
    let stopping = tokio_util::sync::CancellationToken::new();
    E2bContext { registry, snapshots, workspaces, tokens, stopping }
}

fn headers(token: &str) -> String {
    format!("E2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 49983\r\nX-Access-Token: {token}\r\n")
}

fn parsed(body: &[u8]) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[tokio::test]
async fn a_request_into_a_sandbox_needs_its_token_and_reaches_its_agent() {
    let daemon = daemon().await;
    let call = "POST /process.Process/List";
    let (status, _, body) = daemon.ask(call, &headers("wrong"), b"{}").await;
    assert_eq!((status, &parsed(&body)["code"]), (401, &json!("unauthenticated")));
    let read = "GET /files?path=/folder";
    assert_eq!(daemon.ask(read, &headers("wrong"), b"").await.0, 401);
    let (status, _, body) = daemon.ask(read, &headers("access"), b"").await;
    assert_eq!(
        (status, &parsed(&body)["message"]),
        (400, &json!("/folder: is a directory")),
        "the guest's answer"
    );
    // The daemon's own calls to the agent are no part of the API.
    let (status, _, body) = daemon.ask("POST /forkd.Agent/Freeze", &headers("access"), b"{}").await;
    assert_eq!((status, &parsed(&body)["code"]), (404, &json!(404)));
    assert!(daemon.guest.calls_of("Freeze").is_empty());
    let gone = headers("access").replace(ID, "sb0123456789abcdef");
    let (status, _, body) = daemon.ask("GET /health", &gone, b"").await;
    assert!(status == 502 && parsed(&body)["message"].as_str().unwrap().contains("was not found"));
    daemon.sandbox.phase.send_replace(Phase::Ended(Arc::new(End::deleted())));
    let (status, _, body) = daemon.ask("GET /health", &headers("access"), b"").await;
    assert!(status == 502 && parsed(&body)["message"].as_str().unwrap().contains("was not found"));
}

#[tokio::test]
async fn a_request_that_ends_while_the_sandbox_is_paused_does_not_succeed() {
    let daemon = daemon().await;
    let mut client = daemon.connect().await;
    let head = format!(
        "POST /files?path=/a HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 4\r\n{}\r\nab",
        headers("access")
    );
    client.write_all(head.as_bytes()).await.unwrap();
    eventually("the upload", || *daemon.guest.begun.lock().unwrap() == 1).await;
    // The pause has stored the sandbox without what follows.
    daemon.sandbox.update_runtime(|runtime| runtime.is_suspending = true);
    client.write_all(b"cd").await.unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 502"), "{answer}");
    assert!(daemon.guest.files.lock().unwrap().contains_key("/a"), "the guest took it");
}

#[tokio::test]
async fn a_name_whose_snapshot_is_gone_removes_no_snapshot_with_that_tag() {
    use crate::error::Error;
    use crate::snapshot::registry::SnapshotState;

    let daemon = daemon().await;
    let state = SnapshotState::Failed { error: Error::invalid("of a test"), job: None };
    daemon.app.snapshots.reserve("mine", state, LOCAL, &forkd_store::Quota::default()).unwrap();
    let database = daemon.app.registry.host.database.clone();
    let gone = forkd_store::TemplateName {
        owner: LOCAL.into(),
        name: "mine".into(),
        tag: "mine-1".into(),
        sandbox: ID.into(),
        created_at_unix: 1,
    };
    database.name_template(&gone).unwrap();
    assert_eq!(daemon.json("DELETE /templates/mine", None).await.0, 404);
    assert!(daemon.app.snapshots.get("mine").is_ok());
    assert_eq!(database.templates().unwrap(), [], "the name is gone, too");
    assert_eq!(daemon.json("DELETE /templates/mine", None).await.0, 204);
}

#[tokio::test]
async fn an_admin_finds_snapshots_of_other_owners_by_their_tags() {
    use crate::error::Error;
    use crate::snapshot::registry::SnapshotState;

    let daemon = daemon().await;
    for (tag, owner) in [("mine", LOCAL), ("mine-1", "bob")] {
        let state = SnapshotState::Failed { error: Error::invalid("of a test"), job: None };
        daemon.app.snapshots.reserve(tag, state, owner, &forkd_store::Quota::default()).unwrap();
    }
    let database = daemon.app.registry.host.database.clone();
    let of_bob = forkd_store::TemplateName {
        owner: "bob".into(),
        name: "mine".into(),
        tag: "mine-1".into(),
        sandbox: ID.into(),
        created_at_unix: 1,
    };
    database.name_template(&of_bob).unwrap();
    let (_, listed) = daemon.json("GET /snapshots", None).await;
    assert_eq!(listed, json!([{ "snapshotID": "mine-1:default", "names": ["mine-1:default"] }]));
    // A snapshot that is not ready is no template yet.
    assert_eq!(daemon.json("GET /templates/aliases/mine-1", None).await.0, 404);
    assert_eq!(daemon.json("DELETE /templates/mine-1%3Adefault", None).await.0, 204);
    assert!(daemon.app.snapshots.get("mine").is_ok() && daemon.app.snapshots.get("mine-1").is_err());
    assert_eq!(database.templates().unwrap(), []);
}

#[tokio::test]
async fn a_create_that_an_earlier_daemon_began_returns_the_sandbox_that_is_there() {
    let daemon = daemon().await;
    let database = daemon.app.registry.host.database.clone();
    let body = json!({ "templateID": "none" }).to_string();
    let ask = async |key: &str| {
        let parts = ["POST".as_bytes(), b"/v2/sandboxes", body.as_bytes()];
        database.begin_answer(LOCAL, key, &parts, crate::util::time::now_unix(), 0).unwrap();
        let headers = format!("Idempotency-Key: {key}\r\n");
        let (status, _, reply) = daemon.ask("POST /v2/sandboxes", &headers, body.as_bytes()).await;
        (status, parsed(&reply))
    };
    daemon.sandbox.update_runtime(|runtime| runtime.saved.lifetime.request = Some(format!("{LOCAL} made")));
    let (status, made) = ask("made").await;
    assert_eq!((status, &made["sandboxID"], &made["envdAccessToken"]), (201, &json!(ID), &json!("access")));
    // If it made none, it is done now.
    let (status, error) = ask("other").await;
    assert_eq!((status, &error["error_code"]), (404, &json!("snapshot_not_found")), "{error}");
}

#[tokio::test]
async fn a_create_keeps_its_idempotency_key_and_counts_against_the_quota() {
    use axum::Extension;
    use axum::extract::State;

    use crate::compat::e2b::extract::Body;
    use crate::compat::e2b::sandboxes;
    use crate::sandbox::idempotency::IdempotencyMark;

    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let _live = daemon.live("t").await;
    let e2b = context(&host, &daemon).await;
    let create = async || {
        let mark = Extension(IdempotencyMark { mark: "local k".into(), before: false });
        let quota = forkd_store::Quota { max_sandboxes: Some(1), ..forkd_store::Quota::default() };
        let who = Extension(Principal { quota, ..Principal::local() });
        let body = Body(serde_json::from_str(r#"{"templateID":"t"}"#).unwrap());
        sandboxes::create(State(e2b.clone()), who, Some(mark), body).await
    };
    assert_eq!(create().await.unwrap().status(), 201);
    let made = daemon.registry.list();
    let request = made[0].read_runtime(|runtime| runtime.saved.lifetime.request.clone());
    assert_eq!((made.len(), request.as_deref()), (1, Some("local k")));
    assert_eq!(create().await.unwrap_err().code(), Code::QuotaExceeded);
}

#[tokio::test]
async fn a_create_that_an_earlier_daemon_began_resumes_the_sandbox_that_its_time_paused() {
    use axum::Extension;
    use axum::extract::State;

    use crate::compat::e2b::extract::Body;
    use crate::compat::e2b::sandboxes;
    use crate::sandbox::idempotency::IdempotencyMark;

    let host = FakeHost::new();
    let daemon = host.daemon().await;
    let (_template, _state) = (daemon.live("t").await, daemon.live("kept").await);
    let e2b = context(&host, &daemon).await;
    let state = E2bState { timeout_secs: 600, access_token: "access".into(), ..E2bState::default() };
    e2b.workspaces.enter_paused(ID, "kept", state, Some("local k"));
    let create = async |mark: &str| {
        let mark = Extension(IdempotencyMark { mark: mark.into(), before: true });
        let body = Body(serde_json::from_str(r#"{"templateID":"t"}"#).unwrap());
        let made = sandboxes::create(State(e2b.clone()), Extension(Principal::local()), Some(mark), body);
        let body = axum::body::to_bytes(made.await.unwrap().into_body(), 1 << 20).await.unwrap();
        parsed(&body)["sandboxID"].as_str().unwrap().to_owned()
    };
    for _ in 0..2 {
        assert_eq!(create("local k").await, ID);
        let made = daemon.registry.list();
        let request = made[0].read_runtime(|runtime| runtime.saved.lifetime.request.clone());
        assert_eq!((made.len(), request.as_deref()), (1, Some("local k")), "a later retry finds it, too");
    }
    // Its record has the deadline that it was resumed with, for a daemon that finds it lost.
    let deadline = daemon.registry.get(ID).unwrap().read_runtime(|runtime| runtime.saved.deadline_unix);
    assert!(deadline.is_some() && e2b.workspaces.show(ID).unwrap().0.kill_at_unix == deadline);
    assert_ne!(create("local other").await, ID);
}

#[tokio::test]
async fn a_change_of_the_time_is_in_the_record_for_the_next_daemon_and_a_late_one_is_refused() {
    let daemon = daemon().await;
    let state = daemon.sandbox.read_runtime(|runtime| runtime.saved.e2b.clone()).unwrap();
    daemon.app.workspaces.enter_running(ID, "paused", *state);
    let (timeout, connect) =
        (format!("POST /sandboxes/{ID}/timeout"), format!("POST /v2/sandboxes/{ID}/connect"));
    let refresh = format!("POST /sandboxes/{ID}/refreshes");
    let written = || daemon.app.workspaces.show(ID).unwrap().0.kill_at_unix;
    let deadline = || daemon.sandbox.read_runtime(|runtime| runtime.saved.deadline_unix);
    for (line, body) in [
        (&timeout, json!({"timeout": 100})),
        (&connect, json!({"timeout": 1000})),
        (&refresh, json!({"duration": 2000})),
    ] {
        let before = written();
        assert!(daemon.json(line, Some(body)).await.0 < 300, "{line}");
        assert!(written() > before && written() == deadline(), "{line}");
    }
    let before = deadline();
    daemon.sandbox.update_runtime(|runtime| runtime.is_suspending = true);
    assert_eq!(daemon.json(&timeout, Some(json!({"timeout": 9000}))).await.0, 409);
    daemon.sandbox.update_runtime(|runtime| (runtime.is_suspending, runtime.has_expired) = (false, true));
    for (line, body) in [
        (&timeout, json!({"timeout": 9000})),
        (&connect, json!({"timeout": 9000})),
        (&refresh, json!({"duration": 3000})),
    ] {
        let (status, error) = daemon.json(line, Some(body)).await;
        assert_eq!((status, &error["code"]), (404, &json!(404)), "{line}: {error}");
    }
    let update = format!("PATCH /v1/sandboxes/{ID}");
    assert_eq!(daemon.json(&update, Some(json!({"timeout_secs": 9000}))).await.0, 404);
    assert_eq!(deadline(), before);
}

#[tokio::test]
async fn a_page_of_snapshots_begins_after_the_last_one_although_earlier_ones_are_gone() {
    use crate::error::Error;
    use crate::snapshot::registry::SnapshotState;

    let daemon = daemon().await;
    let database = daemon.app.registry.host.database.clone();
    // The last two have the same second.
    for (tag, created_at_unix) in [("s1", 1), ("s2", 2), ("s3", 3), ("s4", 4), ("s5", 4)] {
        let state = SnapshotState::Failed { error: Error::invalid("of a test"), job: None };
        daemon.app.snapshots.reserve(tag, state, LOCAL, &forkd_store::Quota::default()).unwrap();
        let (owner, name) = (LOCAL.to_owned(), format!("name-{tag}"));
        let (tag, sandbox) = (tag.into(), ID.into());
        let named = forkd_store::TemplateName { owner, name, tag, sandbox, created_at_unix };
        database.name_template(&named).unwrap();
    }
    let page = async |token: &str| {
        let (status, head, body) =
            daemon.ask(&format!("GET /snapshots?limit=2&nextToken={token}"), "", b"").await;
        let next = head.lines().find_map(|line| line.strip_prefix("x-next-token: ")).map(str::to_owned);
        let names: Option<Vec<Value>> =
            parsed(&body).as_array().map(|all| all.iter().map(|it| it["snapshotID"].clone()).collect());
        (status, names.unwrap_or_default(), next)
    };
    let shown = |names: [&str; 2]| names.map(|name| json!(format!("name-{name}:default"))).to_vec();
    let (_, first, next) = page("").await;
    assert_eq!(first, shown(["s1", "s2"]));
    assert_eq!(daemon.json("DELETE /templates/name-s1", None).await.0, 204);
    assert_eq!(daemon.json("DELETE /templates/name-s2", None).await.0, 204);
    let (_, second, next) = page(&next.unwrap()).await;
    assert_eq!(second, shown(["s3", "s4"]));
    let (_, last, next) = page(&next.unwrap()).await;
    assert_eq!((last, next), (vec![json!("name-s5:default")], None));
    assert_eq!(page("7").await.0, 400);
}

#[tokio::test]
async fn a_client_that_disconnects_while_a_snapshot_is_removed_leaves_no_name() {
    use axum::Extension;
    use axum::extract::{Path, State};
    use futures_util::future::poll_immediate;

    use crate::compat::e2b::snapshots;

    let host = FakeHost::new();
    host.store("mine-1", |_| {});
    let daemon = host.daemon().await;
    let e2b = context(&host, &daemon).await;
    let (owner, name) = (LOCAL.into(), "mine".into());
    let (tag, sandbox) = ("mine-1".into(), ID.into());
    let named = forkd_store::TemplateName { owner, name, tag, sandbox, created_at_unix: 1 };
    host.database.name_template(&named).unwrap();
    let removal = snapshots::remove(State(e2b), Extension(Principal::local()), Path("mine".into()));
    assert!(poll_immediate(removal).await.is_none(), "the client is gone before the answer");
    eventually("the end of the removal", || {
        daemon.snapshots.get("mine-1").is_err() && host.database.templates().unwrap().is_empty()
    })
    .await;
}

#[tokio::test]
async fn a_stream_without_an_end_does_not_hold_up_a_daemon_that_stops() {
    let daemon = daemon().await;
    let mut client = daemon.connect().await;
    let message = forkd_protocol::connect::encode(0, &json!({"process": {"cmd": "cat"}}));
    let head = format!(
        "POST /process.Process/Start HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/connect+json\r\n\
         Content-Length: {}\r\n{}\r\n",
        message.len(),
        headers("access")
    );
    client.write_all(&[head.as_bytes(), &message].concat()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = client.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 200"), "{:?}", String::from_utf8_lossy(&answer[..read]));
    daemon.app.stopping.cancel();
    let rest = client.read_to_end(&mut answer);
    tokio::time::timeout(std::time::Duration::from_secs(20), rest).await.expect("the stream ends").unwrap();
}

#[tokio::test]
async fn a_server_in_the_guest_switches_protocols_only_if_the_client_wants_that() {
    let daemon = daemon().await;
    let to_port = format!("E2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: 8000\r\n");
    *daemon.guest.server.lock().unwrap() = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi".into();
    let (status, _, body) = daemon.ask("GET /", &to_port, b"").await;
    assert_eq!((status, body.as_slice()), (200, b"hi".as_slice()));
    *daemon.guest.server.lock().unwrap() =
        "HTTP/1.1 200 OK\r\ncontent-length: 9\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n"
            .into();
    let (status, head, _) = daemon.ask("GET /", &to_port, b"").await;
    assert!(status == 200 && !head.contains("content-length"), "{head}");
    *daemon.guest.server.lock().unwrap() =
        "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n".into();
    let (status, _, body) = daemon.ask("GET /", &to_port, b"").await;
    assert_eq!((status, &parsed(&body)["code"]), (502, &json!(502)));
}

#[tokio::test]
async fn a_snapshot_that_fails_takes_no_name_from_an_earlier_one() {
    let daemon = daemon().await;
    let database = daemon.app.registry.host.database.clone();
    let earlier = forkd_store::TemplateName {
        owner: LOCAL.into(),
        name: "mine".into(),
        tag: "mine-1".into(),
        sandbox: ID.into(),
        created_at_unix: 1,
    };
    database.name_template(&earlier).unwrap();
    // No monitor runs the sandbox.
    let (status, _) =
        daemon.json(&format!("POST /sandboxes/{ID}/snapshots"), Some(json!({"name": "mine"}))).await;
    assert!(status >= 400, "{status}");
    assert_eq!(database.templates().unwrap(), [earlier]);
}

#[tokio::test]
async fn control_requests_show_and_lengthen_a_life_and_errors_have_the_clients_shape() {
    let daemon = daemon().await;
    let (status, shown) = daemon.json(&format!("GET /sandboxes/{ID}"), None).await;
    assert_eq!((status, &shown["state"], &shown["metadata"]["team"]), (200, &json!("running"), &json!("a")));
    let (_, listed) = daemon.json("GET /v2/sandboxes?metadata=team%3Da", None).await;
    assert_eq!(listed.as_array().unwrap().len(), 1);
    assert_eq!(daemon.json("GET /v2/sandboxes?metadata=team%3Db", None).await.1, json!([]));

    let deadline = || daemon.sandbox.read_runtime(|runtime| runtime.saved.deadline_unix).unwrap();
    let timeout = format!("POST /sandboxes/{ID}/timeout");
    assert_eq!(daemon.json(&timeout, Some(json!({"timeout": 1000}))).await.0, 204);
    let before = deadline();
    let connect = format!("POST /v2/sandboxes/{ID}/connect");
    let (status, connected) = daemon.json(&connect, Some(json!({"timeout": 5}))).await;
    assert_eq!((status, &connected["envdAccessToken"]), (200, &json!("access")));
    assert_eq!(deadline(), before, "a connect never shortens a life");
    daemon.json(&connect, Some(json!({"timeout": 5000}))).await;
    assert!(deadline() > before);

    for (line, body, status) in [
        ("GET /sandboxes/sb0123456789abcdef", None, 404),
        ("POST /v2/sandboxes", Some(json!({"templateID": "none"})), 404),
        ("POST /v2/sandboxes", Some(json!({"templateID": "base", "mcp": {"x": {"y": "z"}}})), 501),
        ("GET /volumes", None, 501),
        ("GET /templates/base", None, 501),
        ("PATCH /templates/base", Some(json!({"public": true})), 501),
        ("GET /v2/templates", None, 501),
        ("GET /sandboxes/metrics?sandbox_ids=a", None, 501),
        ("GET /sandboxes/none/none/none", None, 501),
        ("POST /v2/sandboxes", Some(json!({"templateID": "base", "allowInternetAccess": false})), 400),
    ] {
        let (got, error) = daemon.json(line, body).await;
        assert_eq!((got, &error["code"]), (status, &json!(status)), "{line}: {error}");
        assert!(!error["message"].as_str().unwrap().is_empty(), "{error}");
    }
    for (path, name) in super::missing::ROUTES {
        let path = path.replace("{*rest}", "a/b").replace(['{', '}'], "");
        let (got, error) = daemon.json(&format!("PUT {path}"), None).await;
        assert_eq!((got, &error["code"]), (501, &json!(501)), "{path}: {error}");
        assert!(error["message"].as_str().unwrap().starts_with(name), "{path}: {error}");
    }
}

#[tokio::test]
async fn a_pause_that_requires_a_healthy_guest_refuses_one_that_does_not_answer() {
    let daemon = daemon().await;
    daemon.sandbox.phase.send_replace(Phase::Unresponsive);
    let pause = format!("POST /sandboxes/{ID}/pause");
    let (status, error) = daemon.json(&pause, Some(json!({"requireHealthyGuest": true}))).await;
    let code = json!("sandbox_snapshot_guest_agent_unresponsive");
    assert_eq!((status, &error["code"], &error["error_code"]), (504, &json!(504), &code), "{error}");
    // Without the requirement it is another error: no monitor runs the sandbox.
    let (_, error) = daemon.json(&pause, Some(json!({}))).await;
    assert_ne!(error["error_code"], code);
}

#[tokio::test]
async fn a_sandbox_that_is_being_resumed_is_listed_once_as_running() {
    let daemon = daemon().await;
    let state = daemon.sandbox.read_runtime(|runtime| runtime.saved.e2b.clone()).unwrap();
    let other = "sb0123456789abcdef";
    for id in [ID, other] {
        daemon.app.workspaces.enter_paused(id, "paused", (*state).clone(), None);
    }
    let listed = async |query: &str| {
        let (_, page) = daemon.json(&format!("GET /v2/sandboxes{query}"), None).await;
        let shown = |it: &Value| (it["sandboxID"].clone(), it["state"].clone());
        page.as_array().unwrap().iter().map(shown).collect::<Vec<_>>()
    };
    let (running, paused) = ((json!(ID), json!("running")), (json!(other), json!("paused")));
    assert_eq!(listed("").await, [running.clone(), paused.clone()]);
    assert_eq!(listed("?state=paused").await, [paused]);
    assert_eq!(listed("?state=running").await, [running]);
}

#[tokio::test]
async fn a_workspace_cannot_have_the_name_of_a_sandbox() {
    let daemon = daemon().await;
    let who =
        Principal { name: "bob".into(), owner: "bob".into(), scope: Scope::Write, ..Principal::local() };
    let order = WorkspaceSpec {
        name: "sb0123456789abcdef".into(),
        snapshot_tag: "base".into(),
        network: true,
        memory_limit_mib: None,
        who,
    };
    let error = daemon.app.workspaces.create(order).await.unwrap_err();
    assert_eq!(error.code(), Code::InvalidRequest, "{error}");
}

#[tokio::test]
async fn objects_of_other_owners_are_not_found() {
    let daemon = daemon().await;
    let e2b = daemon.app.e2b();
    let bob =
        Principal { name: "bob".into(), owner: "bob".into(), scope: Scope::Write, ..Principal::local() };
    assert_eq!(e2b.check_owner(ID, &bob).unwrap_err().code(), Code::SandboxNotFound);
    e2b.check_owner(ID, &Principal::local()).unwrap();
    e2b.check_owner("sb0123456789abcdef", &bob).unwrap();
}

#[tokio::test]
async fn a_token_that_may_only_read_gets_no_token_that_runs_commands() {
    let daemon = daemon().await;
    let shown = async |scope: Scope| {
        let (state, id) = (axum::extract::State(daemon.app.e2b()), axum::extract::Path(ID.to_owned()));
        let who = axum::Extension(Principal { name: "ann".into(), scope, ..Principal::local() });
        let shown = crate::compat::e2b::sandboxes::detail(state, who, id).await.unwrap();
        serde_json::to_value(shown.0).unwrap()
    };
    assert_eq!(shown(Scope::Read).await.get("envdAccessToken"), None);
    assert_eq!(shown(Scope::Write).await["envdAccessToken"], json!("access"));
}

#[tokio::test]
async fn a_handler_checks_the_owner_of_a_sandbox_that_came_back_since_the_request_was_admitted() {
    use axum::Extension;
    use axum::extract::{Path, RawQuery, State};

    use crate::compat::e2b::extract::Body;
    use crate::compat::e2b::{deadline, fork, metrics, sandboxes, snapshots};

    let daemon = daemon().await;
    let (e2b, id) = (|| State(daemon.app.e2b()), || Path(ID.to_owned()));
    let bob = || {
        let bob = Principal { name: "bob".into(), owner: "bob".into(), ..Principal::local() };
        Extension(Principal { scope: Scope::Write, ..bob })
    };
    let refused = [
        sandboxes::detail(e2b(), bob(), id()).await.map(drop).unwrap_err(),
        sandboxes::kill(e2b(), bob(), id()).await.map(drop).unwrap_err(),
        sandboxes::connect(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
        sandboxes::resume(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
        deadline::refresh(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
        deadline::set_timeout(e2b(), bob(), id(), Body(serde_json::from_str("{\"timeout\":0}").unwrap()))
            .await
            .map(drop)
            .unwrap_err(),
        sandboxes::pause(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
        fork::fork(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
        metrics::show(e2b(), bob(), id(), RawQuery(None)).await.map(drop).unwrap_err(),
        snapshots::create(e2b(), bob(), id(), Body(Default::default())).await.map(drop).unwrap_err(),
    ];
    assert!(refused.iter().all(|error| error.code() == Code::SandboxNotFound), "{refused:?}");
    assert!(daemon.app.registry.get(ID).is_ok());
}

#[test]
fn every_path_of_the_control_api_has_the_errors_of_that_api() {
    for (method, path, _) in table() {
        assert!(super::has_path(path), "{path}");
        assert!(method == "any" || method.parse::<Method>().is_ok());
    }
    for path in ["/v1/sandboxes", "/healthz", "/sandboxesx", "/", "/metrics"] {
        assert!(!super::has_path(path), "{path}");
    }
}
