//! Sessions of clients over HTTP (the protocol's streamable transport).
//!
//! A session belongs to the client that opened it, by the name that the daemon gives; to any other client it does not
//! exist. It ends when its client deletes it, when the client has sent nothing for a while and reads no stream, and when
//! the daemon stops.
//!
//! Since its version of July 2026 the protocol has no sessions: each request stands alone. All such requests of one
//! client share one session here, which ends when the client has sent nothing for a while.

use std::collections::HashMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::BodyExt;
use http_body_util::combinators::UnsyncBoxBody;
use parking_lot::Mutex;
use rmcp::transport::streamable_http_server::session::SessionManager;
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, SessionConfig};
use rmcp::transport::streamable_http_server::{StreamableHttpServerConfig, StreamableHttpService};
use tokio_util::sync::CancellationToken;

use crate::api::Api;
use crate::limit::{DEFAULT_OUTPUT_LIMIT, MIN_OUTPUT_LIMIT};
use crate::server::{MAX_MESSAGE, Server};
use crate::session::Session;
use crate::tools::Caller;

/// The header with the id of a session.
const SESSION_ID: &str = "mcp-session-id";

/// Settings of the sessions.
#[derive(Debug, Clone)]
pub struct HttpOptions {
    /// The longest text of a result in bytes.
    pub output_limit: usize,
    /// The time without a request or an open stream after which a session ends.
    pub idle: Duration,
    /// The most sessions at a time.
    pub max_sessions: usize,
    /// The most sessions of one client at a time, without the one of requests that stand alone.
    pub max_sessions_of_client: usize,
}

impl Default for HttpOptions {
    fn default() -> Self {
        HttpOptions {
            output_limit: DEFAULT_OUTPUT_LIMIT,
            idle: Duration::from_secs(30 * 60),
            max_sessions: 1000,
            max_sessions_of_client: 100,
        }
    }
}

/// The body of a request.
type AnyBody = UnsyncBoxBody<Bytes, Box<dyn std::error::Error + Send + Sync>>;
/// The body of a reply.
type Reply = Response<Tracked>;

/// Serves many clients over HTTP. The caller has authenticated them, and has checked `Host` and `Origin`.
#[derive(Clone)]
pub struct HttpServer {
    inner: StreamableHttpService<Server, LocalSessionManager>,
    manager: Arc<LocalSessionManager>,
    sessions: Arc<Mutex<HashMap<Key, Arc<Entry>>>>,
    options: HttpOptions,
}

impl std::fmt::Debug for HttpServer {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_struct("HttpServer").field("options", &self.options).finish_non_exhaustive()
    }
}

/// What a session is found by.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Key {
    /// The id in the header.
    Id(String),
    /// The client: for requests that stand alone.
    Client(String),
}

/// A session and its use.
#[derive(Debug)]
struct Entry {
    client: String,
    session: Arc<Session>,
    usage: Mutex<Usage>,
}

#[derive(Debug)]
struct Usage {
    /// Requests without a whole reply yet, streams among them.
    open: usize,
    last: Instant,
}

impl HttpServer {
    /// A server without sessions. When `stopping` is cancelled, open streams end.
    pub fn new(options: HttpOptions, stopping: CancellationToken) -> Self {
        let options = HttpOptions { output_limit: options.output_limit.max(MIN_OUTPUT_LIMIT), ..options };
        let mut config = SessionConfig::default();
        // The time without use is this module's: a request may take longer than any time-out there.
        config.keep_alive = None;
        config.sse_retry = None;
        let mut manager = LocalSessionManager::default();
        manager.session_config = config;
        let manager = Arc::new(manager);
        let config = StreamableHttpServerConfig::default()
            .disable_allowed_hosts()
            .with_sse_retry(None)
            .with_json_response(true)
            .with_max_request_body_bytes(MAX_MESSAGE)
            .with_cancellation_token(stopping);
        let inner = StreamableHttpService::new(|| Ok(Server::of_requests()), manager.clone(), config);
        HttpServer { inner, manager, sessions: Arc::default(), options }
    }

    /// Replies to a request of `client`, whose rights `api` has. Clients with different owners or scopes need different
    /// names: the session of a name ends what it made with the rights of the first request.
    pub async fn handle<B>(&self, request: Request<B>, client: &str, api: Arc<dyn Api>) -> Reply
    where
        B: Body<Data = Bytes> + Send + 'static,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        // One type of body: the protocol's code is compiled here, and only once.
        self.handle_boxed(request.map(|body| body.map_err(Into::into).boxed_unsync()), client, api).await
    }

    async fn handle_boxed(&self, mut request: Request<AnyBody>, client: &str, api: Arc<dyn Api>) -> Reply {
        let id = match request.headers().get(SESSION_ID).map(HeaderValue::to_str) {
            None => None,
            Some(Ok(id)) => Some(id.to_owned()),
            Some(Err(_)) => return refused(StatusCode::NOT_FOUND, NO_SESSION),
        };
        let Some(open) = self.open(id.as_deref(), client, &api) else {
            return refused(StatusCode::NOT_FOUND, NO_SESSION);
        };
        let session = open.0.session.clone();
        let output_limit = self.options.output_limit;
        request.extensions_mut().insert(Caller { api: api.clone(), session, output_limit });
        let is_delete = request.method() == Method::DELETE;
        let mut reply = self.inner.handle(request).await;
        match id {
            Some(id) => {
                let is_over = is_delete && reply.status().is_success();
                if is_over {
                    // What the session made has ended when the client gets this; "accepted" would promise less.
                    *reply.status_mut() = StatusCode::OK;
                }
                if is_over || reply.status() == StatusCode::NOT_FOUND {
                    self.end(&Key::Id(id), |_| true).await;
                }
            }
            None => {
                if let Some(id) = reply.headers().get(SESSION_ID).and_then(|id| id.to_str().ok())
                    && let Err((status, text)) = self.add(id, client, api)
                {
                    let _ = self.manager.close_session(&id.to_owned().into()).await;
                    return refused(status, &text);
                }
            }
        }
        let (parts, body) = reply.into_parts();
        Response::from_parts(parts, Tracked { body: Box::pin(body), _open: Some(open) })
    }

    /// Uses the session with this id, if it is the client's; without an id, the session of requests that stand alone.
    fn open(&self, id: Option<&str>, client: &str, api: &Arc<dyn Api>) -> Option<Open> {
        let mut sessions = self.sessions.lock();
        let entry = match id {
            Some(id) => sessions.get(&Key::Id(id.into())).filter(|entry| entry.client == client)?.clone(),
            None => {
                let new = || Entry::new(client, api.clone());
                sessions.entry(Key::Client(client.into())).or_insert_with(new).clone()
            }
        };
        // Under the lock: a session that is in use does not end.
        Some(Open::new(entry))
    }

    /// Adds a session that was just opened. If there are too many: the status and the text of the refusal.
    fn add(&self, id: &str, client: &str, api: Arc<dyn Api>) -> Result<(), (StatusCode, String)> {
        let HttpOptions { max_sessions, max_sessions_of_client, .. } = self.options;
        let mut sessions = self.sessions.lock();
        let is_theirs =
            |(key, entry): &(&Key, &Arc<Entry>)| matches!(key, Key::Id(_)) && entry.client == client;
        // First: a client at its limit is not told to wait for others.
        if sessions.iter().filter(is_theirs).count() >= max_sessions_of_client {
            let text = format!(
                "this client has {max_sessions_of_client} MCP sessions, the limit; close some, or wait until unused \
                 ones end"
            );
            return Err((StatusCode::TOO_MANY_REQUESTS, text));
        }
        if sessions.len() >= max_sessions {
            return Err((StatusCode::SERVICE_UNAVAILABLE, TOO_MANY.into()));
        }
        sessions.insert(Key::Id(id.into()), Entry::new(client, api));
        Ok(())
    }

    async fn end(&self, key: &Key, is_over: impl Fn(&Entry) -> bool) {
        let entry = {
            let mut sessions = self.sessions.lock();
            match sessions.get(key) {
                Some(entry) if is_over(entry) => sessions.remove(key),
                _ => None,
            }
        };
        let Some(entry) = entry else { return };
        if let Key::Id(id) = key {
            let _ = self.manager.close_session(&id.clone().into()).await;
        }
        // In a task: a client that deletes its session and leaves must not stop this half way.
        let ending = tokio::spawn(async move {
            let ended = entry.session.end().await;
            tracing::info!(client = entry.client, ?ended, "MCP session ended");
        });
        let _ = ending.await;
    }

    /// Ends sessions that are not used, until `stopping` is cancelled; then ends all sessions.
    pub async fn end_unused(&self, stopping: CancellationToken) {
        let pause = (self.options.idle / 4).clamp(Duration::from_millis(20), Duration::from_secs(30));
        while tokio::time::timeout(pause, stopping.cancelled()).await.is_err() {
            self.end_all(|entry| entry.is_unused(self.options.idle)).await;
        }
        self.end_all(|_| true).await;
    }

    async fn end_all(&self, is_over: impl Fn(&Entry) -> bool) {
        let keys: Vec<Key> = self.sessions.lock().keys().cloned().collect();
        join_all(keys.iter().map(|key| self.end(key, &is_over))).await;
    }
}

const NO_SESSION: &str = "there is no such MCP session; open a new one";
const TOO_MANY: &str = "the daemon has too many MCP sessions; close some, or wait until unused ones end";

/// A reply of this module. The daemon's middleware writes the same fields.
fn refused(status: StatusCode, text: &str) -> Reply {
    let body =
        serde_json::json!({ "jsonrpc": "2.0", "id": null, "error": { "code": -32000, "message": text } });
    let body = http_body_util::Full::from(body.to_string());
    let mut reply = Response::new(Tracked { body: Box::pin(body), _open: None });
    *reply.status_mut() = status;
    reply.headers_mut().insert(http::header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

impl Entry {
    fn new(client: &str, api: Arc<dyn Api>) -> Arc<Self> {
        let usage = Mutex::new(Usage { open: 0, last: Instant::now() });
        Arc::new(Entry { client: client.into(), session: Session::new(api), usage })
    }

    fn is_unused(&self, idle: Duration) -> bool {
        let usage = self.usage.lock();
        usage.open == 0 && usage.last.elapsed() >= idle
    }
}

/// A request that uses a session, until its reply has been sent.
#[derive(Debug)]
struct Open(Arc<Entry>);

impl Open {
    fn new(entry: Arc<Entry>) -> Self {
        entry.usage.lock().open += 1;
        Open(entry)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        let mut usage = self.0.usage.lock();
        usage.open -= 1;
        usage.last = Instant::now();
    }
}

/// A body; the session is in use as long as it exists.
pub struct Tracked {
    body: Pin<Box<dyn Body<Data = Bytes, Error = Infallible> + Send>>,
    _open: Option<Open>,
}

impl std::fmt::Debug for Tracked {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("a body")
    }
}

impl Body for Tracked {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.body.as_mut().poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }
}

#[cfg(test)]
mod tests;
