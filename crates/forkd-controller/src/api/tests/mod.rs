//! The API as clients see it: a real daemon on real sockets, without guests.

mod hostile;
mod mcp;

use std::path::{Path, PathBuf};
use std::time::Duration;

use futures_util::{SinkExt, StreamExt};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio_tungstenite::tungstenite::Message;

use forkd_api::Code;

use crate::{Config, Ready, Result, serve_until};

struct Daemon {
    folder: tempfile::TempDir,
    ready: Ready,
    token: String,
    stop: Option<oneshot::Sender<()>>,
    served: JoinHandle<Result<()>>,
}

fn config(data_dir: &Path) -> Config {
    let mut config = Config::new(data_dir);
    config.bind.set_port(0);
    config
}

impl Daemon {
    async fn start() -> Self {
        Daemon::start_in(tempfile::tempdir().unwrap()).await
    }

    async fn start_in(folder: tempfile::TempDir) -> Self {
        let (stop, asked) = oneshot::channel();
        let (started, ready) = oneshot::channel();
        let config = config(folder.path());
        let served = tokio::spawn(serve_until(config, |ready| started.send(ready.clone()).unwrap(), async {
            let _ = asked.await;
        }));
        let ready = ready.await.expect("the daemon starts");
        let token = std::fs::read_to_string(&ready.token_file).unwrap().trim().to_owned();
        Daemon { folder, ready, token, stop: Some(stop), served }
    }

    async fn stop(mut self) {
        self.stop.take();
        (&mut self.served).await.unwrap().unwrap();
    }

    /// Sends `request` as it is, over TCP.
    async fn raw(&self, request: String) -> (u16, String) {
        exchange(TcpStream::connect(self.ready.address).await.unwrap(), request).await
    }

    async fn tcp(&self, method_and_path: &str, headers: &str, body: &str) -> (u16, String) {
        let length = body.len();
        let headers =
            format!("Host: localhost\r\nContent-Length: {length}\r\nConnection: close\r\n{headers}");
        self.raw(format!("{method_and_path} HTTP/1.1\r\n{headers}\r\n{body}")).await
    }

    async fn authorized(&self, method_and_path: &str, headers: &str, body: &str) -> (u16, String) {
        let headers = format!("Authorization: Bearer {}\r\n{headers}", self.token);
        self.tcp(method_and_path, &headers, body).await
    }

    async fn json(&self, method_and_path: &str, body: &str) -> (u16, String) {
        self.authorized(method_and_path, "Content-Type: application/json\r\n", body).await
    }
}

/// One request on a connection of its own: status and body.
async fn exchange(mut stream: impl AsyncRead + AsyncWrite + Unpin, request: String) -> (u16, String) {
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer).await;
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").expect(&answer);
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, body.to_owned())
}

/// An error's body: an object with a sentence, a code that is known, a request id, and nothing else.
fn refused(status: u16, body: &str) -> forkd_api::ErrorBody {
    let fields: serde_json::Map<String, Value> = serde_json::from_str(body).expect(body);
    assert_eq!(fields.len(), 3, "{fields:?}");
    let refused: forkd_api::ErrorBody = serde_json::from_str(body).expect(body);
    assert!(!refused.error.is_empty() && !refused.request_id.is_empty(), "{refused:?}");
    let code = Code::named(&refused.code).unwrap_or_else(|| panic!("{refused:?}"));
    assert_eq!(code.status(), status, "{refused:?}");
    refused
}

#[tokio::test]
async fn tcp_needs_the_token_except_for_health() {
    let daemon = Daemon::start().await;
    for path in ["/healthz", "/healthz/"] {
        let health = daemon.tcp(&format!("GET {path}"), "", "").await;
        assert_eq!(health, (200, r#"{"ok":true}"#.into()));
    }
    for headers in
        ["", "Authorization: Bearer wrong\r\n", "Authorization: Bearer \r\n", "Authorization: Basic abc\r\n"]
    {
        for route in
            ["GET /version", "GET /v1/sandboxes", "GET /openapi.json", "GET /nothing", "DELETE /version"]
        {
            let (status, body) = daemon.tcp(route, headers, "").await;
            assert_eq!(status, 401, "{route}");
            assert_eq!(refused(status, &body).code, "unauthorized", "{body}");
        }
    }
    let (status, body) = daemon.authorized("GET /version", "", "").await;
    assert_eq!(status, 200);
    let version: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(version["api"], "v1");
    assert_eq!(daemon.authorized("GET /v1/sandboxes", "", "").await, (200, "[]".into()));
    daemon.stop().await;
}

#[tokio::test]
async fn the_unix_socket_needs_no_token() {
    let daemon = Daemon::start().await;
    let stream = UnixStream::connect(&daemon.ready.socket).await.unwrap();
    let request = "GET /v1/sandboxes HTTP/1.1\r\nHost: anything\r\nConnection: close\r\n\r\n".to_owned();
    assert_eq!(exchange(stream, request).await, (200, "[]".into()));
    let socket = daemon.ready.socket.clone();
    daemon.stop().await;
    assert!(!socket.exists());
}

#[tokio::test]
async fn a_web_page_cannot_reach_the_daemon() {
    let daemon = Daemon::start().await;
    let send = async |head: &str| {
        let token = &daemon.token;
        daemon.raw(format!("{head}Authorization: Bearer {token}\r\nConnection: close\r\n\r\n")).await
    };
    for good in [
        "GET /version HTTP/1.1\r\nHost: localhost:8889\r\n",
        "GET /version HTTP/1.1\r\nHost: 127.0.0.1\r\n",
        "GET /version HTTP/1.1\r\nHost: [::1]:1\r\nOrigin: http://localhost:3000\r\n",
    ] {
        assert_eq!(send(good).await.0, 200, "{good}");
    }
    for bad in [
        "GET /version HTTP/1.1\r\nHost: evil.example\r\n",
        "GET /version HTTP/1.1\r\nHost: localhost.evil.example:8889\r\n",
        "GET /version HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n",
        "GET /version HTTP/1.0\r\n",
        "GET http://evil.example/version HTTP/1.1\r\nHost: localhost\r\n",
        "GET /version HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example\r\n",
        "GET /version HTTP/1.1\r\nHost: localhost\r\nOrigin: null\r\n",
        "GET /healthz HTTP/1.1\r\nHost: evil.example\r\n",
    ] {
        let (status, body) = send(bad).await;
        assert_eq!(status, 403, "{bad}: {body}");
        assert_eq!(refused(status, &body).code, "origin_forbidden", "{bad}");
    }
    daemon.stop().await;
}

#[tokio::test]
async fn every_error_has_the_same_shape() {
    let daemon = Daemon::start().await;
    let create = "POST /v1/sandboxes";
    let big = format!(r#"{{"image":"{}"}}"#, "x".repeat(2 << 20));
    for (status, route, body, code) in [
        (404, "GET /v1/nothing", "", "route_not_found"),
        (404, "GET /v1/sandboxes/sb1", "", "sandbox_not_found"),
        (404, "GET /v1/sandboxes/%2e%2e", "", "sandbox_not_found"),
        (404, "DELETE /v1/sandboxes/sb1", "", "sandbox_not_found"),
        (404, "GET /v1/sandboxes/sb1/console", "", "sandbox_not_found"),
        (404, "POST /v1/sandboxes/sb1/exec", r#"{"args":["true"]}"#, "sandbox_not_found"),
        (404, "POST /v1/sandboxes/sb1/eval", r#"{"code":"1"}"#, "sandbox_not_found"),
        (404, "POST /v1/sandboxes/sb1/pause", "", "sandbox_not_found"),
        (404, "POST /v1/sandboxes/sb1/resume", "{}", "sandbox_not_found"),
        (404, "POST /v1/sandboxes/sb1/rollback", "", "sandbox_not_found"),
        (400, "POST /v1/sandboxes/sb1/rollback", r#"{"where":"x"}"#, "invalid_request"),
        (404, "GET /v1/workspaces/x", "", "workspace_not_found"),
        (404, "DELETE /v1/workspaces/x", "", "workspace_not_found"),
        (404, "POST /v1/workspaces/x/suspend", r#"{"diff":true}"#, "workspace_not_found"),
        (404, "POST /v1/workspaces/x/resume", "{}", "workspace_not_found"),
        (400, "GET /v1/workspaces/%2e%2e", "", "invalid_request"),
        (404, "POST /v1/workspaces", r#"{"name":"x","snapshot_tag":"none"}"#, "snapshot_not_found"),
        (405, "PUT /v1/sandboxes", "", "method_not_allowed"),
        (405, "POST /healthz", "", "method_not_allowed"),
        (400, create, "{", "invalid_request"),
        (400, create, "{}", "invalid_request"),
        (400, create, r#"{"image":7}"#, "invalid_request"),
        (400, create, r#"{"image":"x","surprise":1}"#, "invalid_request"),
        (400, create, r#"{"image":"../x"}"#, "invalid_request"),
        (400, create, r#"{"image":"x","vcpus":0}"#, "invalid_request"),
        (400, create, r#"{"image":"x","vcpus":200}"#, "invalid_request"),
        (400, create, r#"{"image":"x","mem_size_mib":1}"#, "invalid_request"),
        (400, create, r#"{"image":"x","mem_size_mib":1000000000}"#, "invalid_request"),
        (400, create, r#"{"image":"x","timeout_secs":0}"#, "invalid_request"),
        (404, create, r#"{"image":"python"}"#, "image_not_found"),
        (413, create, big.as_str(), "body_too_large"),
        (400, "POST /v1/sandboxes/sb1/exec", r#"{"args":[]}"#, "invalid_request"),
        (400, "POST /v1/sandboxes/sb1/exec", r#"{"args":["x"],"timeout_secs":0}"#, "invalid_request"),
        (400, "GET /v1/run", "", "invalid_request"),
    ] {
        let (got, body) = daemon.json(route, body).await;
        assert_eq!(got, status, "{route}: {body}");
        assert_eq!(refused(status, &body).code, code, "{route}: {body}");
    }
    let (status, body) = daemon.authorized(create, "Content-Type: text/plain\r\n", r#"{"image":"x"}"#).await;
    assert_eq!((status, refused(415, &body).code.as_str()), (415, "unsupported_media_type"));
    let (status, body) =
        daemon.authorized("GET /version", &format!("X: {}\r\n", "x".repeat(1 << 20)), "").await;
    assert_eq!((status, refused(431, &body).code.as_str()), (431, "headers_too_large"));
    daemon.stop().await;
}

async fn websocket(socket: &PathBuf) -> tokio_tungstenite::WebSocketStream<UnixStream> {
    let stream = UnixStream::connect(socket).await.unwrap();
    tokio_tungstenite::client_async("ws://localhost/v1/run", stream).await.unwrap().0
}

#[tokio::test]
async fn a_run_that_fails_sends_the_reason_and_closes() {
    let daemon = Daemon::start().await;
    for (first, status, code) in [
        (Message::text(r#"{"image":"python","args":["true"]}"#), 404, "image_not_found"),
        (Message::text(r#"{"image":"python","args":[]}"#), 400, "invalid_request"),
        (Message::text(r#"{"image":"python","args":["x"],"timeout_secs":0}"#), 400, "invalid_request"),
        (Message::text("nonsense"), 400, "invalid_request"),
        (Message::binary(vec![0, 1, 2]), 400, "invalid_request"),
    ] {
        let mut socket = websocket(&daemon.ready.socket).await;
        socket.send(first).await.unwrap();
        let event = loop {
            match socket.next().await.unwrap().unwrap() {
                Message::Text(text) => break serde_json::from_str::<Value>(&text).unwrap(),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(event["event"], "error", "{event}");
        assert_eq!(event["status"], status, "{event}");
        assert_eq!(event["code"], code, "{event}");
        assert!(event["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{event}");
        while let Some(Ok(message)) = socket.next().await {
            assert!(matches!(message, Message::Ping(_) | Message::Close(_)), "{message:?}");
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn a_second_daemon_on_the_same_data_is_refused() {
    let daemon = Daemon::start().await;
    let error = serve_until(config(daemon.folder.path()), |_| panic!("it must not start"), async {}).await;
    let error = error.unwrap_err();
    assert_eq!(error.code(), Code::AddressInUse);
    assert!(error.public().contains(&format!("pid {}", std::process::id())), "{error}");
    assert_eq!(daemon.tcp("GET /healthz", "", "").await.0, 200, "the first one does not notice");
    daemon.stop().await;
}

#[tokio::test]
async fn an_address_others_can_reach_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path());
    config.bind = "0.0.0.0:0".parse().unwrap();
    let error = serve_until(config, |_| panic!("it must not start"), async {}).await.unwrap_err();
    assert!(error.public().contains("--tls-cert"), "{error}");
    let mut config = self::config(folder.path());
    config.bind = "0.0.0.0:0".parse().unwrap();
    config.insecure_loopback = true;
    let error = serve_until(config, |_| panic!("it must not start"), async {}).await.unwrap_err();
    assert!(error.public().contains("--insecure-loopback"), "{error}");
}

#[tokio::test]
async fn what_a_killed_daemon_left_is_ended_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let sandboxes = crate::host::run_dir::open(folder.path()).unwrap().join("sandboxes");
    let [left, empty, foreign] = ["sbleft", "sbempty", "not-ours"].map(|name| sandboxes.join(name));
    for path in [&left, &empty, &foreign] {
        std::fs::create_dir_all(path).unwrap();
    }
    let mut process = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.id())).unwrap();
    let start_time = stat.rsplit_once(") ").unwrap().1.split(' ').nth(19).unwrap().parse().unwrap();
    let boot = crate::host::process::boot_id();
    let identity = crate::host::process::ProcessId { boot, pid: process.id() as i32, start_time };
    std::fs::write(left.join("process.json"), serde_json::to_vec(&identity).unwrap()).unwrap();

    let daemon = Daemon::start_in(folder).await;
    use std::os::unix::process::ExitStatusExt;
    assert_eq!(process.try_wait().unwrap().and_then(|status| status.signal()), Some(9));
    assert!(!left.exists() && !empty.exists());
    assert!(foreign.exists(), "what is not a sandbox's is left alone");
    std::fs::remove_dir(foreign).unwrap();
    daemon.stop().await;
}

#[tokio::test]
async fn stopping_does_not_wait_for_idle_clients() {
    let daemon = Daemon::start().await;
    let _idle = TcpStream::connect(daemon.ready.address).await.unwrap();
    let _waiting = websocket(&daemon.ready.socket).await;
    // Half of the drain timeout.
    tokio::time::timeout(Duration::from_secs(15), daemon.stop()).await.expect("it stops");
}

#[test]
fn the_committed_openapi_document_is_the_codes() {
    is_committed("docs/openapi.json", &super::openapi());
}

/// Whether a document made from the code is the committed one. `FORKD_WRITE_OPENAPI=1 cargo test` writes it after an
/// intended change.
pub(super) fn is_committed(name: &str, made: &str) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(name);
    if std::env::var_os("FORKD_WRITE_OPENAPI").is_some() {
        std::fs::write(&path, made).unwrap();
    }
    assert!(
        std::fs::read_to_string(&path).unwrap_or_default() == made,
        "{name} is not what the code says; run the tests with FORKD_WRITE_OPENAPI=1 and look at the diff"
    );
}

/// Every body here is sent by a published client of the reference, or is nearly one.
#[tokio::test]
async fn bodies_of_the_references_clients_are_understood() {
    let daemon = Daemon::start().await;
    let spawn = |extra: &str| format!(r#"{{"snapshot_tag":"none","n":1,"per_child_netns":true{extra}}}"#);
    for (body, status, why) in [
        (spawn(r#","memory_limit_mib":256,"prewarm":true,"live_fork":true,"hugepages":true"#), 404, "none"),
        (spawn(r#","memory_limit_mib":null"#), 404, "none"),
        (spawn(r#","agent_port":true"#), 404, "none"),
        // The field's older name, and both.
        (spawn(r#","line_port":true"#), 404, "none"),
        (spawn(r#","agent_port":true,"line_port":true"#), 400, "duplicate field"),
        (spawn(r#","memory_limit_mib":-1"#), 400, "memory_limit_mib"),
        (spawn(r#","prewarm":"yes""#), 400, "prewarm"),
        (r#"{"snapshot_tag":"none","n":0}"#.into(), 400, "n "),
        (r#"{"snapshot_tag":"none","n":1001}"#.into(), 400, "1000"),
        (r#"{"snapshot_tag":"../x"}"#.into(), 400, "tag"),
        (spawn(&format!(r#","env":{{"A":"{}"}}"#, "x".repeat(60 << 10))), 404, "none"),
        (spawn(&format!(r#","env":{{"A":"{}"}}"#, "x".repeat(64 << 10))), 400, "65536 is the limit"),
        // The field's older name.
        (spawn(&format!(r#","envs":{{"A":"{}"}}"#, "x".repeat(60 << 10))), 404, "none"),
        (spawn(&format!(r#","envs":{{"A":"{}"}}"#, "x".repeat(64 << 10))), 400, "65536"),
    ] {
        let (got, answer) = daemon.json("POST /v1/sandboxes", &body).await;
        assert_eq!(got, status, "{body}: {answer}");
        // Names of fields and tags do not change with the wording.
        assert!(refused(status, &answer).error.contains(why), "{body}: {answer}");
    }
    let snapshot = |extra: &str| format!(r#"{{"tag":"t","rw":false,"boot_wait_secs":10{extra}}}"#);
    for (extra, code) in [
        (r#","kernel":"/no/kernel","rootfs":"/no/disk","tap":null"#, "path_not_allowed"),
        (r#","rootfs":"/no/disk.ext4","tap":"forkd-tap0""#, "path_not_allowed"),
        (r#","kernel":"kernel","rootfs":"/no/disk""#, "invalid_request"),
        (r#","kernel":"/a/../kernel","rootfs":"/no/disk""#, "invalid_request"),
        (r#","image":"python","rootfs":"/no/disk""#, "invalid_request"),
        (r#","boot_wait_secs":61,"kernel":"/k","rootfs":"/no/disk""#, "invalid_request"),
    ] {
        let (got, answer) = daemon.json("POST /v1/snapshots", &snapshot(extra)).await;
        assert_eq!(refused(got, &answer).code, code, "{extra}: {answer}");
    }
    let long = r#"{"tag":"t","kernel":"/k","rootfs":"/r","boot_wait_secs":61}"#;
    let (got, answer) = daemon.json("POST /v1/snapshots", long).await;
    assert!(refused(got, &answer).error.contains("boot_wait_secs"), "{answer}");
    daemon.stop().await;
}
