//! A daemon with one sandbox whose guest is a fake behind a real socket. The fake speaks the agent's protocol, and
//! can be slow, silent, full or gone at will.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use forkd_protocol::agent::{End, Event, FORWARD_PORT, Output, ProcessEvent};
use forkd_protocol::connect::{self, Code, END_STREAM, EndStream, STREAM_TYPE};
use forkd_store::Database;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::api::middleware::idempotency::IdempotencyStore;
use crate::api::{self, ApiContext};
use crate::auth::peer::Peer;
use crate::auth::principal::LOCAL;
use crate::auth::tokens::Tokens;
use crate::compat::json_lines::ports::Ports;
use crate::config::{Config, Timing};
use crate::daemon::stall_timeout::ClientStream;
use crate::host::Host;
use crate::sandbox::registry::Registry;
use crate::sandbox::resources::Resources;
use crate::sandbox::{Phase, Sandbox, Spec};
use crate::snapshot::registry::SnapshotRegistry;
use crate::telemetry::Telemetry;
use crate::util::task;
use crate::workspace::Workspaces;

/// The id of the sandbox.
pub(crate) const ID: &str = "sbfake";
/// The time limit for answers that come, on a busy computer too.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The time limit for answers that a test knows will not come.
const SHORT_TIMEOUT: Duration = Duration::from_secs(1);

/// A daemon with its own socket.
pub(crate) struct FakeDaemon {
    folder: tempfile::TempDir,
    pub(crate) app: ApiContext,
    pub(crate) sandbox: Arc<Sandbox>,
    pub(crate) guest: Arc<FakeGuest>,
    _stop: DropGuard,
}

/// The guest's behaviour, and a record of its requests.
#[derive(Default)]
pub(crate) struct FakeGuest {
    /// Files of complete uploads, with the uploads' queries.
    pub(crate) files: Mutex<BTreeMap<String, (Vec<u8>, String)>>,
    /// Uploads that have begun.
    pub(crate) begun: Mutex<usize>,
    /// Uploads that broke off.
    pub(crate) broken: Mutex<usize>,
    /// Every call to a service: method and message.
    pub(crate) calls: Mutex<Vec<(String, Value)>>,
    /// Makes the body of `/breaks` break off.
    pub(crate) break_now: tokio::sync::Notify,
    /// How many bodies of `/endless` are being sent.
    pub(crate) sending: Mutex<usize>,
    /// The method of the agent that the guest does not answer.
    pub(crate) ignores: Mutex<Option<String>>,
    /// Whether it cannot freeze its file systems.
    pub(crate) dirty: Mutex<bool>,
    /// What the server on any of its TCP ports answers, head included.
    pub(crate) server: Mutex<String>,
    /// The head of the last request to that server.
    pub(crate) server_request: Mutex<String>,
    /// Makes it answer that call after all.
    pub(crate) answers: tokio::sync::Notify,
    /// The running process.
    process: Mutex<Option<mpsc::Sender<Event>>>,
}

impl FakeDaemon {
    /// The number of commands by outcome, from `/metrics`, without zeros.
    pub(crate) async fn execs(&self) -> BTreeMap<String, u64> {
        let (status, _, page) = self.ask("GET /metrics", "", b"").await;
        assert_eq!(status, 200);
        let page = String::from_utf8(page).unwrap();
        let outcome = |line: &str| {
            let (outcome, count) = line.strip_prefix("forkd_execs_total{outcome=\"")?.split_once("\"} ")?;
            Some((outcome.to_owned(), count.parse::<u64>().ok().filter(|count| *count > 0)?))
        };
        let mut execs: BTreeMap<String, u64> = page.lines().filter_map(outcome).collect();
        let seconds = page.lines().find_map(|line| line.strip_prefix("forkd_exec_seconds_count "));
        execs.insert("all".into(), seconds.unwrap().parse().unwrap());
        execs
    }

    pub(crate) async fn start() -> Self {
        FakeDaemon::start_with(|_| {}).await
    }

    /// A daemon with a short time limit for guests that do not answer.
    pub(crate) async fn impatient_with_guests() -> Self {
        FakeDaemon::start_with(|timing| {
            (timing.call, timing.freeze) = (SHORT_TIMEOUT, SHORT_TIMEOUT);
        })
        .await
    }

    /// A daemon with a short time limit for clients that neither send nor receive.
    pub(crate) async fn impatient_with_clients() -> Self {
        FakeDaemon::start_with(|timing| timing.stall = SHORT_TIMEOUT).await
    }

    async fn start_with(change: impl FnOnce(&mut Timing)) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new(folder.path());
        (config.timing.call, config.timing.stall, config.timing.freeze) = (TIMEOUT, TIMEOUT, TIMEOUT);
        change(&mut config.timing);
        let config = Arc::new(config);
        let database = Arc::new(Database::open(&folder.path().join("forkd.db")).unwrap());
        let telemetry = Telemetry::open(&config).unwrap();
        let host = Host::new(config.clone(), database.clone(), telemetry);
        let (snapshots, _) = SnapshotRegistry::open(host.clone()).await.unwrap();
        let registry = Registry::new(host.clone()).unwrap();
        let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await.unwrap();
        let stopping = CancellationToken::new();
        let stop = stopping.clone().drop_guard();
        let sessions = task::tracker();
        let address = config.bind;
        let tokens = Arc::new(Tokens::open(database.clone(), config.token_file.clone()).unwrap());
        let answers = IdempotencyStore::new(database, config.limits.max_body);
        let lines = Ports::new(registry.clone());
        let app = ApiContext {
            registry,
            snapshots,
            workspaces,
            config,
            stopping,
            address,
            sessions,
            answers,
            lines,
            tokens,
            mcp: forkd_mcp::HttpServer::new(forkd_mcp::HttpOptions::default(), CancellationToken::new()),
        };

        let inside = folder.path().join(ID);
        std::fs::create_dir(&inside).unwrap();
        let guest = Arc::new(FakeGuest::default());
        let listener = UnixListener::bind(inside.join(crate::monitor::boot_files::VSOCK)).unwrap();
        tokio::spawn(serve_guest(listener, guest.clone()));
        let spec = Spec {
            owner: LOCAL.into(),
            image: Some("fake".into()),
            snapshot_tag: None,
            forked_from: None,
            vcpus: 1,
            mem_mib: 64,
            network: false,
            memory_limit_mib: 64,
            guest: None,
        };
        let sandbox = Sandbox::new(ID.into(), spec, inside, Resources::default(), &host);
        sandbox.phase.send_replace(Phase::Running);
        app.registry.add_ended(app.registry.reserve_existing(&sandbox.spec), sandbox);
        let sandbox = app.registry.get(ID).unwrap();

        let listener = UnixListener::bind(folder.path().join("api.sock")).unwrap();
        tokio::spawn(serve_api(listener, app.clone()));
        FakeDaemon { folder, app, sandbox, guest, _stop: stop }
    }

    pub(crate) async fn connect(&self) -> UnixStream {
        UnixStream::connect(self.folder.path().join("api.sock")).await.unwrap()
    }

    /// Sends a request and returns the status, head and body of the response.
    pub(crate) async fn ask(&self, line: &str, headers: &str, body: &[u8]) -> (u16, String, Vec<u8>) {
        let mut stream = self.connect().await;
        let length = body.len();
        let head = format!(
            "{line} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}\r\n{headers}\r\n"
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        // A daemon that refuses the request need not read all of it.
        let (mut read, mut write) = stream.split();
        let mut answer = Vec::new();
        let (_, _) = tokio::join!(write.write_all(body), read.read_to_end(&mut answer));
        parse(&answer)
    }

    /// Sends a request with a JSON body and returns the JSON response.
    pub(crate) async fn json(&self, line: &str, body: Option<Value>) -> (u16, Value) {
        let text = body.map(|body| body.to_string()).unwrap_or_default();
        let (status, _, body) = self.ask(line, "Content-Type: application/json\r\n", text.as_bytes()).await;
        (status, serde_json::from_slice(&body).unwrap_or(Value::Null))
    }
}

fn parse(answer: &[u8]) -> (u16, String, Vec<u8>) {
    let end = answer.windows(4).position(|at| at == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head, answer[end + 4..].to_vec())
}

async fn serve_api(listener: UnixListener, app: ApiContext) {
    let stopping: CancellationToken = app.stopping.clone();
    while let Ok((stream, _)) = listener.accept().await {
        let stream = ClientStream::new(stream, app.config.timing.stall, None);
        let stall_timeout = stream.stall_timeout();
        tokio::spawn(crate::daemon::connection(
            stream,
            stall_timeout,
            Peer::Unix { uid: 0 },
            api::for_unix(app.clone()),
            stopping.clone(),
        ));
    }
}

/// Waits until `done`; the limit is long, for slow computers.
pub(crate) async fn eventually(what: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..3000 {
        if done() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited for {what} in vain");
}

pub(crate) async fn serve_guest(listener: UnixListener, guest: Arc<FakeGuest>) {
    let router = Router::new()
        .route("/files", get(read).post(write))
        .route("/forkd.Agent/Tree", post(tree))
        .route("/forkd.Agent/{method}", post(agent))
        .route("/process.Process/Start", post(start))
        .route("/process.Process/{method}", post(process))
        .route("/filesystem.Filesystem/{method}", post(filesystem))
        .layer(axum::extract::DefaultBodyLimit::disable())
        .with_state(guest.clone());
    while let Ok((mut stream, _)) = listener.accept().await {
        let (router, guest) = (router.clone(), guest.clone());
        tokio::spawn(async move {
            let mut line = Vec::new();
            while line.last() != Some(&b'\n') {
                line.push(stream.read_u8().await?);
            }
            stream.write_all(b"OK 1\n").await?;
            if line == format!("CONNECT {FORWARD_PORT}\n").as_bytes() {
                return serve_port(stream, &guest).await;
            }
            let served = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(stream), TowerToHyperService::new(router));
            served.await.map_err(std::io::Error::other)
        });
    }
}

/// Answers one request to a TCP port.
async fn serve_port(mut stream: UnixStream, guest: &FakeGuest) -> std::io::Result<()> {
    while stream.read_u8().await? != b'\n' {}
    stream.write_all(b"OK\n").await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    *guest.server_request.lock().unwrap() = String::from_utf8(head).unwrap();
    let answer = guest.server.lock().unwrap().clone();
    stream.write_all(answer.as_bytes()).await
}

type GuestRequest = Query<BTreeMap<String, String>>;

fn refused(status: u16, message: &str) -> Response {
    let body = json!({ "code": status, "message": message }).to_string();
    (StatusCode::from_u16(status).unwrap(), body).into_response()
}

/// Counts a body that the guest sends, until this is dropped.
struct Sending(Arc<FakeGuest>);

impl Drop for Sending {
    fn drop(&mut self) {
        *self.0.sending.lock().unwrap() -= 1;
    }
}

async fn read(State(guest): State<Arc<FakeGuest>>, Query(asked): GuestRequest) -> Response {
    let path = asked.get("path").cloned().unwrap_or_default();
    match path.as_str() {
        "/missing" => refused(404, "/missing: no such file"),
        "/folder" => refused(400, "/folder: is a directory"),
        "/secret" => refused(403, "/secret: permission denied"),
        "/silent" => std::future::pending().await,
        "/garbage" => (StatusCode::BAD_REQUEST, "not what an agent says").into_response(),
        "/endless" => {
            *guest.sending.lock().unwrap() += 1;
            let pieces = futures_util::stream::unfold(Sending(guest), |sending| async {
                Some((Ok::<_, std::io::Error>(Bytes::from(vec![0u8; 64 << 10])), sending))
            });
            Body::from_stream(pieces.boxed()).into_response()
        }
        "/breaks" => {
            let half = futures_util::stream::iter([Ok(Bytes::from_static(b"half"))]);
            let rest = futures_util::stream::once(async move {
                guest.break_now.notified().await;
                Err(std::io::Error::other("gone"))
            });
            Body::from_stream(half.chain(rest).boxed()).into_response()
        }
        path => match guest.files.lock().unwrap().get(path) {
            Some((bytes, _)) => bytes.clone().into_response(),
            None => refused(404, "no such file"),
        },
    }
}

/// Counts an incomplete upload, also when its connection ends.
struct Receiving(Arc<FakeGuest>, bool);

impl Drop for Receiving {
    fn drop(&mut self) {
        *self.0.broken.lock().unwrap() += usize::from(self.1);
    }
}

async fn write(State(guest): State<Arc<FakeGuest>>, Query(asked): GuestRequest, mut body: Body) -> Response {
    let path = asked.get("path").cloned().unwrap_or_default();
    let mut bytes = Vec::new();
    *guest.begun.lock().unwrap() += 1;
    let mut receiving = Receiving(guest.clone(), true);
    loop {
        match body.frame().await {
            None => break,
            Some(Ok(frame)) => bytes.extend_from_slice(&frame.into_data().unwrap_or_default()),
            Some(Err(_)) => return refused(500, "broke off"),
        }
        if path == "/full" && bytes.len() > 100_000 {
            return refused(507, "/full: no space left on device");
        }
        if path == "/stuck" {
            std::future::pending::<()>().await;
        }
    }
    receiving.1 = false;
    guest.files.lock().unwrap().insert(path.clone(), (bytes, format!("{asked:?}")));
    json!([{ "path": path, "name": "x", "type": "file", "whole": true }]).to_string().into_response()
}

/// The size of a large response of the guest.
pub(crate) const MUCH: usize = 8 << 20;

async fn agent(State(guest): State<Arc<FakeGuest>>, Path(method): Path<String>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).unwrap();
    let file_systems = message["fileSystems"] == true && !*guest.dirty.lock().unwrap();
    guest.calls.lock().unwrap().push((method.clone(), message));
    let ignored = guest.ignores.lock().unwrap().as_ref() == Some(&method);
    if ignored {
        guest.answers.notified().await;
    }
    let answer = match method.as_str() {
        "Warm" => json!({ "state": "ready" }),
        "Freeze" => json!({ "frozen": true, "fileSystems": file_systems }),
        "Eval" => json!({ "stdout": "x".repeat(MUCH), "resultJson": { "b": 1, "a": [1e2] } }),
        _ => json!({ "version": "fake" }),
    };
    answer.to_string().into_response()
}

/// Lists a folder, as its name asks for.
async fn tree(State(guest): State<Arc<FakeGuest>>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body[connect::HEADER_LEN..]).unwrap();
    let path = message["path"].as_str().unwrap_or_default().to_owned();
    guest.calls.lock().unwrap().push(("Tree".into(), message));
    let entries = |entries: Value| Bytes::from(connect::encode(0, &json!({ "entries": entries })));
    let long = |range: std::ops::Range<u32>, length: usize| {
        let name = |n| json!({ "path": format!("{n:08}{}", "x".repeat(length)) });
        entries(range.map(name).collect())
    };
    let end = |error| Bytes::from(connect::encode(END_STREAM, &EndStream { error }));
    let error = |code| end(Some(connect::Error::new(code, "choose a smaller folder")));
    let hash = "0123456789abcdef".repeat(4);
    let some = entries(json!([
        { "path": "a", "type": "FILE_TYPE_DIRECTORY", "mode": 493, "modifiedMs": 1, "incomplete": "unreadable" },
        { "path": "b/c", "type": "FILE_TYPE_FILE", "size": 5, "mode": 420, "modifiedMs": -1500, "sha256": hash },
    ]));
    let pieces = match path.as_str() {
        // An agent of an earlier version.
        "/old" => {
            let body = json!({ "code": "unimplemented", "message": "this agent has no /forkd.Agent/Tree" });
            return (StatusCode::NOT_IMPLEMENTED, body.to_string()).into_response();
        }
        "/silent" => std::future::pending().await,
        "/waits" => {
            *guest.sending.lock().unwrap() += 1;
            let pieces = futures_util::stream::unfold(Sending(guest), |sending| async {
                tokio::time::sleep(Duration::from_millis(10)).await;
                let piece = Bytes::from(connect::encode(0, &json!({ "entries": [] })));
                Some((Ok::<_, std::io::Error>(piece), sending))
            });
            return ([("content-type", STREAM_TYPE)], Body::from_stream(pieces.boxed())).into_response();
        }
        "/empty" => vec![entries(json!([])), end(None)],
        "/crowded" => vec![some, error(Code::OutOfRange)],
        "/late" => vec![some, error(Code::DeadlineExceeded)],
        "/many" => vec![error(Code::Unavailable)],
        "/breaks" => vec![some],
        "/above" => vec![entries(json!([{ "path": "a/../../b" }])), end(None)],
        "/unsorted" => vec![some.clone(), some, end(None)],
        "/unlike" => vec![entries(json!([{ "path": "a", "pathBytes": "/w==" }])), end(None)],
        "/nohash" => vec![entries(json!([{ "path": "a", "sha256": "zz" }])), end(None)],
        "/long" => (0..50).map(|n| long(n * 1000..(n + 1) * 1000, 1000)).chain([end(None)]).collect(),
        "/much" => (0..10).map(|n| long(n * 1000..(n + 1) * 1000, 10)).chain([end(None)]).collect(),
        _ => {
            let link = json!([{ "path": "\u{fffd}", "pathBytes": "/w==", "type": "FILE_TYPE_SYMLINK", "size": 1,
                "mode": 511, "target": "\u{fffd}", "targetBytes": "/g==" }]);
            vec![some, entries(link), end(None)]
        }
    };
    let pieces = futures_util::stream::iter(pieces.into_iter().map(Ok::<_, std::io::Error>));
    ([("content-type", STREAM_TYPE)], Body::from_stream(pieces.boxed())).into_response()
}

async fn filesystem(
    State(guest): State<Arc<FakeGuest>>,
    Path(method): Path<String>,
    body: Bytes,
) -> Response {
    let message: Value = serde_json::from_slice(&body).unwrap();
    guest.calls.lock().unwrap().push((method.clone(), message.clone()));
    let path = message["path"].as_str().or(message["source"].as_str()).unwrap_or_default();
    let refuse = |status: u16, code: &str| {
        let body = json!({ "code": code, "message": format!("{path}: {code}") }).to_string();
        (StatusCode::from_u16(status).unwrap(), body).into_response()
    };
    match path {
        "/missing" => return refuse(404, "not_found"),
        "/secret" => return refuse(403, "permission_denied"),
        "/full" => return refuse(429, "resource_exhausted"),
        "/crowded" => return refuse(400, "out_of_range"),
        "/there" => return refuse(409, "already_exists"),
        "/much" => {
            let entry = json!({ "name": "x".repeat(1 << 10), "path": "/much" }).to_string();
            return format!("{{\"entries\":[{}]}}", vec![entry; MUCH >> 10].join(",")).into_response();
        }
        "/nonempty" if method == "RemoveOne" => return refuse(400, "failed_precondition"),
        _ => {}
    }
    let link =
        json!({ "name": "link", "type": "FILE_TYPE_DIRECTORY", "path": "/d/link", "symlinkTarget": "/etc" });
    let file = json!({ "name": "file", "type": "FILE_TYPE_FILE", "path": "/d/file", "size": 5, "mode": 420 });
    let answer = match method.as_str() {
        "ListDir" => json!({ "entries": [file, link] }),
        _ => json!({ "entry": file }),
    };
    answer.to_string().into_response()
}

/// The error of a program of that name that does not start, or is killed at once.
fn refusal(cmd: &str) -> Option<connect::Error> {
    let refused = |message: &str| connect::Error::new(Code::InvalidArgument, message);
    match cmd {
        "missing" => Some(refused("gone").with_exit_code(127)),
        "broken" => Some(refused("not found in this image").with_exit_code(126)),
        // The error of an earlier version's agent.
        "missing-of-old" => Some(refused("missing-of-old: not found in this image")),
        "broken-of-old" => Some(refused("not found: root may not execute it")),
        "late" => Some(connect::Error::new(Code::DeadlineExceeded, "its time is over")),
        "crowded" => Some(connect::Error::new(Code::ResourceExhausted, "too many")),
        _ => None,
    }
}

/// Starts a process that echoes its input until the input ends.
async fn start(State(guest): State<Arc<FakeGuest>>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body[connect::HEADER_LEN..]).unwrap();
    let refused = refusal(message["process"]["cmd"].as_str().unwrap_or_default());
    guest.calls.lock().unwrap().push(("Start".into(), message));
    if refused.is_some() {
        let last = connect::encode(END_STREAM, &EndStream { error: refused });
        return ([("content-type", STREAM_TYPE)], last).into_response();
    }
    let (events, queued) = mpsc::channel(4);
    events.send(Event::Start { pid: 7 }).await.unwrap();
    *guest.process.lock().unwrap() = Some(events);
    let pieces = futures_util::stream::unfold(queued, |mut queued: mpsc::Receiver<Event>| async {
        let event = queued.recv().await?;
        let piece = Bytes::from(connect::encode(0, &ProcessEvent { event }));
        Some((Ok::<_, std::io::Error>(piece), queued))
    });
    ([("content-type", STREAM_TYPE)], Body::from_stream(pieces.boxed())).into_response()
}

async fn process(State(guest): State<Arc<FakeGuest>>, Path(method): Path<String>, body: Bytes) -> Response {
    let message: Value = serde_json::from_slice(&body).unwrap();
    guest.calls.lock().unwrap().push((method.clone(), message.clone()));
    let events = guest.process.lock().unwrap().clone();
    let event = match method.as_str() {
        "SendInput" => {
            let input = &message["input"];
            let text = input["stdin"].as_str().or(input["pty"].as_str()).unwrap();
            let stdout = Some(BASE64_STANDARD.decode(text).unwrap());
            Event::Data(Output { stdout, ..Output::default() })
        }
        "CloseStdin" => Event::End(End { exited: true, ..End::default() }),
        "SendSignal" => Event::End(End { exit_code: -1, signal: Some(15), ..End::default() }),
        _ => Event::Keepalive {},
    };
    if let Some(events) = events {
        let _ = events.send(event).await;
    }
    "{}".into_response()
}

impl FakeGuest {
    /// The messages of all calls to a method.
    pub(crate) fn calls_of(&self, method: &str) -> Vec<Value> {
        let calls = self.calls.lock().unwrap();
        calls.iter().filter(|(called, _)| called == method).map(|(_, message)| message.clone()).collect()
    }
}
