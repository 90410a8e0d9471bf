//! A client of the daemon: REST calls and the WebSocket of `run`, over its unix socket or TCP.

pub(crate) mod discover;
mod tls;
pub(crate) mod types;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use forkd_api::{Code, ErrorBody};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as _, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;

use crate::client::tls::Trust;

/// The limit of a REST reply's body.
const MAX_ANSWER: usize = 64 << 20;
/// The time limit of connecting.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time in which the daemon must accept a WebSocket: an emulated daemon is slow.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The address of a daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Address {
    /// A unix socket. Every user who can open it has full access.
    Unix(PathBuf),
    /// Host and port, such as `127.0.0.1:8889`.
    Tcp(String),
    /// Host and port, and the certificates to trust.
    Tls(String, Trust),
}

/// A daemon's address and token.
#[derive(Debug, Clone)]
pub(crate) struct Daemon {
    pub(crate) address: Address,
    pub(crate) token: Option<String>,
}

/// A byte stream of any kind of address.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// A WebSocket to the daemon.
pub(crate) type Socket = WebSocketStream<Box<dyn Stream>>;

impl Daemon {
    /// The daemon behind a unix socket.
    pub(crate) fn unix(path: PathBuf) -> Self {
        Daemon { address: Address::Unix(path), token: None }
    }

    /// The daemon on a loopback port.
    pub(crate) fn loopback(port: u16, token: String) -> Self {
        Daemon { address: Address::Tcp(format!("127.0.0.1:{port}")), token: Some(token) }
    }

    /// The daemon at a URL: `http://host:port`, `https://host:port` or `unix:/path`.
    pub(crate) fn from_url(url: &str, token: Option<String>, trust: Trust) -> Result<Self> {
        let url = url.trim_end_matches('/');
        if let Some(path) = url.strip_prefix("unix://").or_else(|| url.strip_prefix("unix:")) {
            return Ok(Daemon { address: Address::Unix(path.into()), token });
        }
        let (authority, is_tls) = match (url.strip_prefix("http://"), url.strip_prefix("https://")) {
            (Some(authority), _) => (authority, false),
            (_, Some(authority)) => (authority, true),
            _ => bail!(
                "the daemon's address `{url}` must be http://HOST:PORT, https://HOST:PORT or unix:/PATH"
            ),
        };
        if authority.is_empty() || authority.contains(['/', '?', '#', '@']) {
            bail!("the daemon's address `{url}` must be http://HOST:PORT, with nothing after it");
        }
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let port = if is_tls { 443 } else { 80 };
        let authority = if has_port { authority.to_owned() } else { format!("{authority}:{port}") };
        let address = if is_tls { Address::Tls(authority, trust) } else { Address::Tcp(authority) };
        Ok(Daemon { address, token })
    }

    /// The address as a URL, for messages and for other clients.
    pub(crate) fn url(&self) -> String {
        match &self.address {
            Address::Unix(path) => format!("unix:{}", path.display()),
            Address::Tcp(authority) => format!("http://{authority}"),
            Address::Tls(authority, _) => format!("https://{authority}"),
        }
    }

    /// Whether the daemon is on this host. The token of a local daemon is sent to no other host.
    pub(crate) fn is_local(&self) -> bool {
        match &self.address {
            Address::Unix(_) => true,
            Address::Tcp(authority) | Address::Tls(authority, _) => {
                matches!(host_of(authority), "localhost" | "127.0.0.1" | "[::1]")
            }
        }
    }

    /// The TCP port, unless the address is a unix socket.
    pub(crate) fn port(&self) -> Option<u16> {
        match &self.address {
            Address::Unix(_) => None,
            Address::Tcp(authority) | Address::Tls(authority, _) => {
                authority.rsplit_once(':')?.1.parse().ok()
            }
        }
    }

    /// The URL for TCP clients. A daemon behind a unix socket reports it.
    pub(crate) async fn http_url(&self) -> Result<String> {
        if !matches!(self.address, Address::Unix(_)) {
            return Ok(self.url());
        }
        let (_, version) = self.call(Method::GET, "/version", None).await?;
        let address = version.get("address").and_then(Value::as_str);
        let scheme = if version.get("tls").and_then(Value::as_bool) == Some(true) { "https" } else { "http" };
        Ok(format!("{scheme}://{}", address.context("the daemon has another version: restart it")?))
    }

    /// Whether the daemon answers within `limit`.
    pub(crate) async fn is_healthy(&self, limit: Duration) -> bool {
        let call = self.call(Method::GET, "/healthz", None);
        matches!(tokio::time::timeout(limit, call).await, Ok(Ok((status, _))) if status.is_success())
    }

    /// Sends one request. The reply's body is returned as JSON, or as a string if it is not JSON.
    pub(crate) async fn call(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<(StatusCode, Value)> {
        let json = body.map(serde_json::to_vec).transpose()?;
        let (body, kind) = match json {
            Some(json) => (Full::from(json), Some("application/json")),
            None => (Full::default(), None),
        };
        let (status, answer) =
            self.send(method, path, body.map_err(|never| match never {}).boxed_unsync(), kind, None).await?;
        let bytes = answer.collect().await?;
        let text = || Value::String(String::from_utf8_lossy(&bytes).into_owned());
        Ok((status, serde_json::from_slice(&bytes).unwrap_or_else(|_| text())))
    }

    /// Requests a stream, which may have no end.
    pub(crate) async fn follow(&self, path: &str) -> Result<Streaming> {
        let nothing = Full::default().map_err(|never| match never {}).boxed_unsync();
        self.stream(Method::GET, path, nothing).await
    }

    /// Sends one request, of any status. `kind` is the body's type, `key` the request's `Idempotency-Key`.
    pub(crate) async fn send(
        &self,
        method: Method,
        path: &str,
        body: Streamed,
        kind: Option<&'static str>,
        key: Option<&str>,
    ) -> Result<(StatusCode, Streaming)> {
        let stream = self.connect().await?;
        let failed = || format!("the connection to the daemon at {} broke", self.url());
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.with_context(failed)?;
        let driver = tokio::spawn(async {
            let _ = connection.await;
        });
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.host());
        if let Some(token) = &self.token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        if let Some(kind) = kind {
            request = request.header(CONTENT_TYPE, kind);
        }
        if let Some(key) = key {
            request = request.header("idempotency-key", key);
        }
        let request = request.body(body).context("the request cannot be written as HTTP")?;
        let response = sender.send_request(request).await.with_context(failed)?;
        Ok((response.status(), Streaming { body: response.into_body(), driver }))
    }

    /// Sends one request that must succeed; an error status is [`Refused`].
    pub(crate) async fn ask(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let (status, answer) = self.call(method, path, body).await?;
        if status.is_success() {
            return Ok(answer);
        }
        Err(Refused::new(status, Some(&answer)).into())
    }

    /// Sends one request whose body or reply is too long to hold; an error status is [`Refused`].
    /// Dropping the returned stream cancels the request.
    pub(crate) async fn stream(&self, method: Method, path: &str, body: Streamed) -> Result<Streaming> {
        let (status, streaming) = self.send(method, path, body, None, None).await?;
        if status.is_success() {
            return Ok(streaming);
        }
        let bytes = streaming.collect().await?;
        let answer: Option<Value> = serde_json::from_slice(&bytes).ok();
        Err(Refused::new(status, answer.as_ref()).into())
    }

    /// Opens a WebSocket.
    pub(crate) async fn websocket(&self, path: &str) -> Result<Socket> {
        let stream = self.connect().await?;
        let mut request = format!("ws://{}{path}", self.host()).into_client_request()?;
        if let Some(token) = &self.token {
            let value = format!("Bearer {token}")
                .parse()
                .context("the token has characters that an HTTP header cannot hold")?;
            request.headers_mut().insert(AUTHORIZATION, value);
        }
        use tokio_tungstenite::tungstenite::Error;
        let shaken = tokio_tungstenite::client_async(request, stream);
        let Ok(shaken) = tokio::time::timeout(ANSWER_TIMEOUT, shaken).await else {
            let (url, secs) = (self.url(), ANSWER_TIMEOUT.as_secs());
            bail!(
                "the daemon at {url} does not answer for {secs} s; stop it, and the next command starts a new one"
            );
        };
        match shaken {
            Ok((socket, _)) => Ok(socket),
            Err(Error::Http(response)) => {
                let body = serde_json::from_slice(response.body().as_deref().unwrap_or_default()).ok();
                Err(Refused::new(response.status(), body.as_ref())).context("the daemon refused")
            }
            Err(error) => {
                Err(error).with_context(|| format!("cannot open a WebSocket to the daemon at {}", self.url()))
            }
        }
    }

    fn host(&self) -> &str {
        match &self.address {
            Address::Unix(_) => "localhost",
            Address::Tcp(authority) | Address::Tls(authority, _) => authority,
        }
    }

    async fn connect(&self) -> Result<Box<dyn Stream>> {
        let connecting = async {
            Ok::<Box<dyn Stream>, anyhow::Error>(match &self.address {
                Address::Unix(path) => Box::new(UnixStream::connect(path).await?),
                Address::Tcp(authority) => Box::new(dial(authority).await?),
                Address::Tls(authority, trust) => {
                    Box::new(trust.shake(host_of(authority), dial(authority).await?).await?)
                }
            })
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(stream) => stream.with_context(|| format!("no daemon answers at {}", self.url())),
            Err(_) => bail!("no daemon answers at {} within {} s", self.url(), CONNECT_TIMEOUT.as_secs()),
        }
    }
}

async fn dial(authority: &str) -> std::io::Result<TcpStream> {
    let stream = TcpStream::connect(authority).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The host in `host:port`.
fn host_of(authority: &str) -> &str {
    authority.rsplit_once(':').map_or(authority, |(host, _)| host)
}

/// A request body that is produced while it is sent.
pub(crate) type Streamed = UnsyncBoxBody<Bytes, std::io::Error>;

/// A reply that is read as it arrives.
#[derive(Debug)]
pub(crate) struct Streaming {
    body: Incoming,
    driver: tokio::task::JoinHandle<()>,
}

impl Streaming {
    /// The length of the rest of the body, if the daemon announced it.
    pub(crate) fn length(&self) -> Option<u64> {
        self.body.size_hint().exact()
    }

    /// The next piece; `None` at the end, an error if the connection breaks earlier.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            match self.body.frame().await {
                None => return Ok(None),
                Some(frame) => {
                    if let Ok(data) = frame
                        .context("the connection to the daemon broke in the middle of a reply")?
                        .into_data()
                    {
                        return Ok(Some(data));
                    }
                }
            }
        }
    }

    /// The whole body, up to [`MAX_ANSWER`].
    pub(crate) async fn collect(mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(piece) = self.next().await? {
            if bytes.len() + piece.len() > MAX_ANSWER {
                bail!("the daemon's reply is too long");
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(bytes)
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

/// The daemon refused or failed a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Refused {
    status: u16,
    /// The daemon's error text: what happened and what to do.
    reason: String,
    /// The error code for programs; empty if the daemon has an older version.
    code: String,
    /// The id of the request in the daemon's log.
    request_id: String,
}

impl Refused {
    /// Reads an error's body, or uses the status alone.
    fn new(status: StatusCode, body: Option<&Value>) -> Self {
        let text = |name| body.and_then(|body| body.get(name)).and_then(Value::as_str).map(str::to_owned);
        Refused {
            status: status.as_u16(),
            reason: text("error").unwrap_or_else(|| bare(status)),
            code: text("code").unwrap_or_default(),
            request_id: text("request_id").unwrap_or_default(),
        }
    }

    /// Reads the error in the last event of a stream.
    pub(crate) fn in_conversation(status: u16, body: ErrorBody) -> Self {
        let ErrorBody { error: reason, code, request_id } = body;
        Refused { status, reason, code, request_id }
    }

    /// Whether `error` is a refusal with this code. An older daemon sends only a status.
    pub(crate) fn is(error: &anyhow::Error, code: Code) -> bool {
        error.downcast_ref::<Refused>().is_some_and(|refused| match refused.code.as_str() {
            "" => refused.status == code.status(),
            name => name == code.name(),
        })
    }

    /// The body as the daemon sends it.
    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: self.reason.clone(), code: self.code.clone(), request_id: self.request_id.clone() }
    }
}

impl std::fmt::Display for Refused {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.reason)?;
        // With this id, the operator finds the cause in the log.
        if self.status == Code::Internal.status()
            && !self.request_id.is_empty()
            && !self.reason.contains(&self.request_id)
        {
            write!(formatter, " (request id {})", self.request_id)?;
        }
        Ok(())
    }
}

impl std::error::Error for Refused {}

/// The error text for a reply that has only a status.
fn bare(status: StatusCode) -> String {
    match status {
        StatusCode::UNAUTHORIZED => {
            "the daemon's token is missing or wrong: give it with FORKD_TOKEN".to_owned()
        }
        _ => format!("the daemon answers with status {status}; `forkd doctor` shows its state"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_socket_or_a_host_and_port() {
        let address = |url: &str| Daemon::from_url(url, None, Trust::default()).map(|daemon| daemon.address);
        assert_eq!(address("http://127.0.0.1:8889/").unwrap(), Address::Tcp("127.0.0.1:8889".into()));
        assert_eq!(address("http://example").unwrap(), Address::Tcp("example:80".into()));
        assert_eq!(address("http://[::1]:5").unwrap(), Address::Tcp("[::1]:5".into()));
        assert_eq!(address("unix:/run/x.sock").unwrap(), Address::Unix("/run/x.sock".into()));
        let tls = |authority: &str| Address::Tls(authority.into(), Trust::default());
        assert_eq!(address("https://example/").unwrap(), tls("example:443"));
        assert_eq!(address("https://example:8889").unwrap(), tls("example:8889"));
        for bad in ["ftp://x:1", "https://x:1/y", "127.0.0.1:8889", "http://", "http://x/y", ""] {
            assert!(address(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_host_that_only_looks_local_is_not() {
        let local = |url: &str| Daemon::from_url(url, None, Trust::default()).unwrap().is_local();
        assert!(
            ["http://localhost:1", "http://127.0.0.1", "http://[::1]:5", "unix:/x"].into_iter().all(local)
        );
        assert!(
            !["http://localhost.example:1", "http://127.0.0.1.example", "http://h:1"].into_iter().any(local)
        );
    }

    #[test]
    fn a_refusal_gives_the_daemons_reason() {
        let refused =
            |status: StatusCode, body: Value| anyhow::Error::from(Refused::new(status, Some(&body)));
        let body = serde_json::json!({ "error": "no image", "code": "image_not_found", "request_id": "r1" });
        let error = refused(StatusCode::NOT_FOUND, body);
        assert_eq!(error.to_string(), "no image");
        assert!(Refused::is(&error, Code::ImageNotFound) && !Refused::is(&error, Code::SandboxNotFound));
        let older = refused(StatusCode::NOT_FOUND, serde_json::json!({ "error": "no image" }));
        assert!(Refused::is(&older, Code::ImageNotFound) && !Refused::is(&older, Code::TagTaken));
        let bare = refused(StatusCode::BAD_GATEWAY, Value::Null);
        assert!(Refused::is(&bare, Code::GuestFailed) && bare.to_string().contains("502"));
    }

    #[test]
    fn an_internal_error_is_shown_with_its_request_id_once() {
        let shown = |text: &str| {
            let body = serde_json::json!({ "error": text, "code": "internal", "request_id": "r-17" });
            Refused::new(StatusCode::INTERNAL_SERVER_ERROR, Some(&body)).to_string()
        };
        assert_eq!(shown("cannot open x").matches("r-17").count(), 1);
        assert_eq!(shown("internal error; give r-17").matches("r-17").count(), 1);
    }

    #[tokio::test]
    async fn a_daemon_that_is_not_there_is_not_healthy_and_says_where_it_was_looked_for() {
        let daemon = Daemon::unix("/nonexistent/forkd.sock".into());
        assert!(!daemon.is_healthy(Duration::from_secs(1)).await);
        let error = daemon.call(Method::GET, "/version", None).await.unwrap_err();
        assert!(error.to_string().contains("/nonexistent/forkd.sock"));
    }
}
