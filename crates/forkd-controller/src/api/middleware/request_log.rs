//! The outermost middleware. Every request gets an id, which is in its reply and in every log line of the request.
//! The duration is counted under the matched route. Every request is written to the audit log, also when
//! authentication failed, no route matched, or the client disconnected.
//!
//! `authenticate` finds the principal further in. [`note`], after it, stores the principal for this module. A
//! principal that was found and then rejected is in the extensions of the response.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{FromRequestParts, MatchedPath, Request, State};
use axum::http::header::USER_AGENT;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode};
use axum::middleware::{self, Next};
use axum::response::Response;
use tracing::Instrument;

use crate::api::error;
use crate::auth::peer::Peer;
use crate::auth::principal::Principal;
use crate::compat::e2b::access::Guessed;
use crate::compat::e2b::traffic::Answered;
use crate::error::Reader;
use crate::telemetry::Telemetry;
use crate::telemetry::audit::{AuditRecord, AuditTarget, MAX_TEXT};
use crate::telemetry::otlp::{self, Context, Over};
use crate::util::random::request_id;

/// The header with a request's id, in both directions.
const REQUEST_ID: &str = "x-request-id";
/// The longest id that is accepted from a client.
const MAX_ID: usize = 64;
/// The label of the route for requests that matched none.
const NO_ROUTE: &str = "none";

/// The label of the route for requests that go into a guest.
const SANDBOX_ROUTE: &str = "e2b-sandbox";

/// Adds the request log to `router`.
pub(crate) fn watched(router: Router, telemetry: Arc<Telemetry>) -> Router {
    router.layer(middleware::from_fn_with_state(telemetry, watch))
}

/// The facts of a request for log, metrics and traces.
#[derive(Debug)]
struct RequestRecord {
    telemetry: Arc<Telemetry>,
    id: String,
    peer: Option<Peer>,
    method: Method,
    path: String,
    route: Option<MatchedPath>,
    user_agent: Option<String>,
    begun: Instant,
    trace: Option<Context>,
    identity: OnceLock<Principal>,
    target: OnceLock<String>,
    /// Whether the request got a response.
    answered: AtomicBool,
    /// Whether the request has become a WebSocket session.
    begun_talking: AtomicBool,
}

async fn watch(State(telemetry): State<Arc<Telemetry>>, mut request: Request, next: Next) -> Response {
    let record = Arc::new(RequestRecord::new(telemetry, &request));
    request.extensions_mut().insert(record.clone());
    let span =
        tracing::info_span!("request", id = record.id, method = %record.method, path = request.uri().path());
    // Dropped without a response if the client disconnects.
    let pending = PendingRequest(record);
    let answer = otlp::carry(pending.0.trace, next.run(request));
    let mut response = answer.instrument(span.clone()).await;
    span.in_scope(|| pending.0.answered(&response));
    #[cfg(test)]
    error::check_code(&pending.0.method, pending.0.route(), &response);
    response = span.in_scope(|| error::finish(response, &pending.0.path, &pending.0.reader()));
    if let Ok(id) = HeaderValue::from_str(&pending.0.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    if let Some(Ok(context)) = pending.0.trace.map(|context| HeaderValue::from_str(&context.header())) {
        response.headers_mut().insert(otlp::TRACEPARENT, context);
    }
    response
}

/// Middleware that stores the principal of a request. Goes between `authenticate` and the routes.
pub(crate) async fn note(request: Request, next: Next) -> Response {
    let extensions = request.extensions();
    if let (Some(record), Some(identity)) =
        (extensions.get::<Arc<RequestRecord>>(), extensions.get::<Principal>())
    {
        let _ = record.identity.set(identity.clone());
    }
    next.run(request).await
}

impl RequestRecord {
    fn new(telemetry: Arc<Telemetry>, request: &Request) -> Self {
        let (headers, extensions) = (request.headers(), request.extensions());
        let user_agent =
            headers.get(USER_AGENT).map(|value| bounded(&String::from_utf8_lossy(value.as_bytes())));
        let route: Option<MatchedPath> = extensions.get().cloned();
        let path = request.uri().path();
        let target = route.as_ref().and_then(|route| parameter(route.as_str(), path));
        RequestRecord {
            trace: telemetry.traces.begin(headers),
            telemetry,
            id: taken_over(headers).unwrap_or_else(request_id),
            peer: extensions.get().copied(),
            method: request.method().clone(),
            path: bounded(path),
            route,
            user_agent,
            begun: Instant::now(),
            identity: OnceLock::new(),
            target: target.map(|target| OnceLock::from(bounded(target))).unwrap_or_default(),
            answered: AtomicBool::new(false),
            begun_talking: AtomicBool::new(false),
        }
    }

    /// The reader of the reply, for error bodies.
    fn reader(&self) -> Reader {
        let reads_causes = self.identity.get().is_some_and(Principal::is_admin);
        Reader { request_id: self.id.clone(), reads_causes }
    }

    fn route(&self) -> &str {
        self.route.as_ref().map_or(NO_ROUTE, MatchedPath::as_str)
    }

    fn answered(&self, response: &Response) {
        let (status, took) = (response.status(), self.begun.elapsed());
        self.answered.store(true, Ordering::Relaxed);
        tracing::debug!(status = status.as_u16(), ms = took.as_millis() as u64, "request answered");
        let metrics = &self.telemetry.metrics;
        let route = match response.extensions().get::<Answered>() {
            Some(_) => SANDBOX_ROUTE,
            None => self.route(),
        };
        metrics.request(method_label(&self.method), route, status.as_u16(), took);
        if let Some(identity) = response.extensions().get::<Principal>() {
            let _ = self.identity.set(identity.clone());
        }
        let unknown = status == StatusCode::TOO_MANY_REQUESTS && self.identity.get().is_none();
        // A server in a guest may answer 401 for reasons of its own.
        let refused = match response.extensions().get::<Answered>() {
            Some(_) => response.extensions().get::<Guessed>().is_some(),
            None => status == StatusCode::UNAUTHORIZED,
        };
        if refused || unknown {
            metrics.auth_failures.inc();
        }
        if let Some(context) = self.trace {
            self.traced(context, status);
        }
        if let Some(AuditTarget(target)) = response.extensions().get() {
            let _ = self.target.set(bounded(target));
        }
        let outcome = match status.as_u16() {
            101 => {
                self.begun_talking.store(true, Ordering::Relaxed);
                "begun"
            }
            ..400 => "ok",
            400..500 => "refused",
            _ => "failed",
        };
        // Frequent requests of monitoring systems, which change nothing.
        let routine =
            route != SANDBOX_ROUTE && matches!(route, "/healthz" | "/metrics") && self.method == Method::GET;
        if !(routine && status.is_success()) {
            self.audit(Some(status.as_u16()), outcome, took);
        }
    }

    fn traced(&self, context: Context, status: StatusCode) {
        let method = method_label(&self.method);
        let attributes = [
            ("http.request.method", Some(method)),
            ("http.route", self.route.as_ref().map(MatchedPath::as_str)),
            ("http.response.status_code", Some(status.as_str())),
            ("forkd.request_id", Some(self.id.as_str())),
            ("forkd.target", self.target.get().map(String::as_str)),
        ];
        let name = format!("{method} {}", self.route());
        let failed = status.is_server_error();
        let over = Over { name: &name, begun: self.begun, failed, attributes: &attributes };
        self.telemetry.traces.request(context, over);
    }

    fn audit(&self, status: Option<u16>, outcome: &'static str, took: Duration) {
        let identity = self.identity.get();
        self.telemetry.audit.write(AuditRecord {
            ts: AuditRecord::now(),
            request_id: self.id.clone(),
            identity: identity.map(|identity| identity.name.clone()),
            owner: identity.map(|identity| identity.owner.clone()),
            peer: self.peer.map(|peer| peer.to_string()),
            method: bounded(self.method.as_str()),
            path: self.path.clone(),
            route: self.route.as_ref().map(|route| route.as_str().to_owned()),
            target: self.target.get().cloned(),
            status,
            outcome,
            latency_us: u64::try_from(took.as_micros()).unwrap_or(u64::MAX),
            ua: self.user_agent.clone(),
        });
    }
}

/// A request without a response yet.
struct PendingRequest(Arc<RequestRecord>);

impl Drop for PendingRequest {
    fn drop(&mut self) {
        if !self.0.answered.load(Ordering::Relaxed) {
            self.0.audit(None, "abandoned", self.0.begun.elapsed());
        }
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Reader {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(parts
            .extensions
            .get::<Arc<RequestRecord>>()
            .map_or_else(Reader::default, |record| record.reader()))
    }
}

/// A WebSocket session that a request may become. Its handler holds this until the session ends.
#[derive(Debug)]
pub(crate) struct Session(Option<Arc<RequestRecord>>);

impl<S: Send + Sync> FromRequestParts<S> for Session {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Session(parts.extensions.get().cloned()))
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if let Some(record) = &self.0
            && record.begun_talking.load(Ordering::Relaxed)
        {
            record.audit(Some(StatusCode::SWITCHING_PROTOCOLS.as_u16()), "ended", record.begun.elapsed());
        }
    }
}

/// The client's request id, if its length and characters are fit for a log.
fn taken_over(headers: &HeaderMap) -> Option<String> {
    let id = headers.get(REQUEST_ID)?.to_str().ok()?;
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    ((1..=MAX_ID).contains(&id.len()) && id.bytes().all(fits)).then(|| id.to_owned())
}

/// The first parameter of `route` in `path`.
fn parameter<'a>(route: &str, path: &'a str) -> Option<&'a str> {
    let mut segments = route.split('/').zip(path.split('/'));
    segments.find(|(pattern, _)| pattern.starts_with('{')).map(|(_, value)| value)
}

/// A method as a label. Clients can send any number of other methods.
fn method_label(method: &Method) -> &'static str {
    match method.as_str() {
        "GET" => "GET",
        "HEAD" => "HEAD",
        "POST" => "POST",
        "PUT" => "PUT",
        "PATCH" => "PATCH",
        "DELETE" => "DELETE",
        "OPTIONS" => "OPTIONS",
        _ => "other",
    }
}

fn bounded(text: &str) -> String {
    text.chars().take(MAX_TEXT).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_taken_over_only_if_it_can_go_into_a_log() {
        let of = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(REQUEST_ID, HeaderValue::from_str(value).unwrap());
            taken_over(&headers)
        };
        for good in ["a", "Req_1.2-3", &"x".repeat(64)] {
            assert_eq!(of(good).as_deref(), Some(good));
        }
        for bad in ["", "a b", "a\"b", "a/b", "é", &"x".repeat(65)] {
            assert_eq!(of(bad), None, "{bad}");
        }
    }

    #[test]
    fn what_a_request_is_about_is_found_in_its_path() {
        assert_eq!(parameter("/v1/sandboxes/{id}/exec", "/v1/sandboxes/sb1/exec"), Some("sb1"));
        assert_eq!(parameter("/v1/sandboxes", "/v1/sandboxes"), None);
        let many = ["sb0123456789abcdef"; 100];
        assert!(AuditTarget::all(many).0.len() <= MAX_TEXT + 3);
        assert_eq!(AuditTarget::all(["a", "b"]).0, "a,b");
    }
}
