//! Traces: how long requests took, and the spawns and branches in them, handed to an OpenTelemetry collector
//! as OTLP over HTTP, in JSON. Off unless a collector is named.
//!
//! A request's `traceparent` (W3C Trace Context) is taken over: its spans belong to the client's trace. Which
//! span work belongs to goes with the task it is done in ([`carry`], [`current`]). Spans wait in a queue of
//! limited length for a task that posts them; what cannot be handed over is counted and forgotten.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::http::{HeaderMap, Uri};
use bytes::Bytes;
use http_body_util::Full;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Result};
use crate::telemetry::metrics::Metrics;
use crate::util::random::fill_random;
use crate::util::task::{self, Task};

/// The header that names a trace and a span in it.
pub(crate) const TRACEPARENT: &str = "traceparent";
/// Where a collector takes spans.
const PATH: &str = "/v1/traces";
/// Spans that wait to be posted.
const QUEUE: usize = 2048;
/// Spans posted at once.
const BATCH: usize = 512;
/// How long spans are collected before they are posted.
const DELAY: Duration = Duration::from_millis(500);
/// How long a collector may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long stopping waits for it.
const CLOSE_WAIT: Duration = Duration::from_secs(3);

/// The kinds of span there are, as the protocol numbers them.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;

/// A span of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context {
    trace: [u8; 16],
    span: [u8; 8],
    parent: Option<[u8; 8]>,
    /// Whether whoever began the trace wants it recorded.
    sampled: bool,
}

tokio::task_local! {
    static CURRENT: Context;
}

/// The span of the work that is being done.
pub(crate) fn current() -> Option<Context> {
    CURRENT.try_with(|context| *context).ok()
}

/// Does `work` as part of a span, if there is one.
pub(crate) async fn carry<T>(context: Option<Context>, work: impl Future<Output = T>) -> T {
    match context {
        Some(context) => CURRENT.scope(context, work).await,
        None => work.await,
    }
}

/// The same on a thread.
pub(crate) fn carry_blocking<T>(context: Option<Context>, work: impl FnOnce() -> T) -> T {
    match context {
        Some(context) => CURRENT.sync_scope(context, work),
        None => work(),
    }
}

impl Context {
    /// The span a request's header names, and a new one in it; a new trace without one.
    fn of(headers: &HeaderMap) -> Option<Self> {
        let mut span = [0; 8];
        fill_random(&mut span).ok()?;
        let header = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok());
        if let Some((trace, parent, sampled)) = header.and_then(parse) {
            return Some(Context { trace, span, parent: Some(parent), sampled });
        }
        let mut trace = [0; 16];
        fill_random(&mut trace).ok()?;
        Some(Context { trace, span, parent: None, sampled: true })
    }

    fn child(&self) -> Option<Self> {
        let mut span = [0; 8];
        fill_random(&mut span).ok()?;
        Some(Context { span, parent: Some(self.span), ..*self })
    }

    /// The header that names it.
    pub(crate) fn header(&self) -> String {
        format!("00-{}-{}-{:02x}", hex(&self.trace), hex(&self.span), u8::from(self.sampled))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// `00-<trace>-<span>-<flags>`, in lower-case hexadecimal digits; zeros are nobody's.
fn parse(header: &str) -> Option<([u8; 16], [u8; 8], bool)> {
    let mut parts = header.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    // A later version may have more parts.
    let version = bytes::<1>(version)?[0];
    if version == 0xff || (version == 0 && parts.next().is_some()) {
        return None;
    }
    let (trace, span) = (bytes::<16>(trace)?, bytes::<8>(span)?);
    let sampled = bytes::<1>(flags)?[0] & 1 == 1;
    (trace != [0; 16] && span != [0; 8]).then_some((trace, span, sampled))
}

fn bytes<const N: usize>(text: &str) -> Option<[u8; N]> {
    let digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
    if text.len() != 2 * N || !text.bytes().all(digit) {
        return None;
    }
    let mut bytes = [0; N];
    for (index, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).ok()?;
    }
    Some(bytes)
}

enum ExportJob {
    Span(Value),
    Flush(oneshot::Sender<()>),
}

/// The way to the task that posts spans.
#[derive(Debug)]
pub(crate) struct Traces {
    jobs: Option<mpsc::Sender<ExportJob>>,
    metrics: Arc<Metrics>,
}

/// What is known of a span that is over.
#[derive(Debug)]
pub(crate) struct Over<'a> {
    pub(crate) name: &'a str,
    pub(crate) begun: Instant,
    pub(crate) failed: bool,
    pub(crate) attributes: &'a [(&'a str, Option<&'a str>)],
}

impl Traces {
    /// Must be called in a runtime. Without an endpoint nothing is traced.
    pub(crate) fn open(endpoint: Option<&str>, metrics: Arc<Metrics>) -> Result<Self> {
        let Some(endpoint) = endpoint else { return Ok(Traces { jobs: None, metrics }) };
        let collector = Collector::new(endpoint)?;
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (collector, queue) = (Arc::new(collector), Arc::new(tokio::sync::Mutex::new(queue)));
        let lost = metrics.clone();
        task::keep_running(Task::Traces, move || post(collector.clone(), queue.clone(), lost.clone()));
        Ok(Traces { jobs: Some(jobs), metrics })
    }

    /// The span of a request that has come in.
    pub(crate) fn begin(&self, headers: &HeaderMap) -> Option<Context> {
        self.jobs.as_ref().and_then(|_| Context::of(headers))
    }

    /// A request is over.
    pub(crate) fn request(&self, context: Context, over: Over<'_>) {
        self.hand_over(context, over, SERVER);
    }

    /// Work that was part of `parent` is over.
    pub(crate) fn work(&self, parent: Option<Context>, over: Over<'_>) {
        if let Some(context) = parent.and_then(|parent| parent.child()) {
            self.hand_over(context, over, INTERNAL);
        }
    }

    fn hand_over(&self, context: Context, over: Over<'_>, kind: u8) {
        let Some(jobs) = self.jobs.as_ref().filter(|_| context.sampled) else { return };
        let end = SystemTime::now();
        let nanos = |at: SystemTime| at.duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos().to_string();
        let begun = end.checked_sub(over.begun.elapsed()).unwrap_or(end);
        let attributes = over.attributes.iter().filter_map(|(key, value)| Some(attribute(key, (*value)?)));
        let mut span = json!({
            "traceId": hex(&context.trace),
            "spanId": hex(&context.span),
            "name": over.name,
            "kind": kind,
            "startTimeUnixNano": nanos(begun),
            "endTimeUnixNano": nanos(end),
            "attributes": attributes.collect::<Vec<_>>(),
            // Unset, or error.
            "status": {"code": if over.failed { 2 } else { 0 }},
        });
        if let Some(parent) = context.parent {
            span["parentSpanId"] = hex(&parent).into();
        }
        if jobs.try_send(ExportJob::Span(span)).is_err() {
            self.metrics.spans_lost.inc();
        }
    }

    /// Returns when everything so far is handed over, or cannot be.
    pub(crate) async fn close(&self) {
        let Some(jobs) = &self.jobs else { return };
        let flushed = async {
            let (tell, told) = oneshot::channel();
            if jobs.send(ExportJob::Flush(tell)).await.is_ok() {
                let _ = told.await;
            }
        };
        let _ = tokio::time::timeout(CLOSE_WAIT, flushed).await;
    }
}

fn attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// Where spans are posted.
#[derive(Debug)]
struct Collector {
    authority: String,
    path: String,
}

impl Collector {
    fn new(endpoint: &str) -> Result<Self> {
        let bad = || {
            let text = format!(
                "the OTLP endpoint `{endpoint}` must be http://HOST:PORT, such as http://127.0.0.1:4318; run a \
                 collector on this host if the traces go elsewhere"
            );
            Error::invalid(text)
        };
        let uri: Uri = endpoint.parse().map_err(|_| bad())?;
        let authority = uri.authority().filter(|_| uri.scheme_str() == Some("http")).ok_or_else(bad)?;
        if authority.as_str().contains('@') || uri.query().is_some() {
            return Err(bad());
        }
        let port = authority.port_u16().unwrap_or(80);
        let base = uri.path().trim_end_matches('/').trim_end_matches(PATH);
        Ok(Collector { authority: format!("{}:{port}", authority.host()), path: format!("{base}{PATH}") })
    }

    async fn post(&self, spans: Vec<Value>) -> std::result::Result<(), String> {
        let resource = [attribute("service.name", "forkd"), attribute("service.version", crate::VERSION)];
        let body = json!({"resourceSpans": [{
            "resource": {"attributes": resource},
            "scopeSpans": [{"scope": {"name": "forkd"}, "spans": spans}],
        }]});
        let failed = |error: &dyn std::error::Error| error.to_string();
        let posted = async {
            let stream = TcpStream::connect(&self.authority).await.map_err(|error| failed(&error))?;
            let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(stream))
                .await
                .map_err(|error| failed(&error))?;
            let request = hyper::Request::post(&self.path)
                .header(HOST, &self.authority)
                .header(CONTENT_TYPE, "application/json")
                .body(Full::new(Bytes::from(body.to_string())))
                .map_err(|error| failed(&error))?;
            let sent = sender.send_request(request);
            let answer = tokio::select! {
                biased;
                answer = sent => answer.map_err(|error| failed(&error))?,
                _ = connection => return Err("it broke off".to_owned()),
            };
            match answer.status() {
                status if status.is_success() => Ok(()),
                status => Err(format!("it answers {status}")),
            }
        };
        let Ok(posted) = tokio::time::timeout(PATIENCE, posted).await else {
            return Err(format!("it did not answer within {PATIENCE:?}"));
        };
        posted
    }
}

async fn post(
    collector: Arc<Collector>,
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<ExportJob>>>,
    metrics: Arc<Metrics>,
) {
    // Only after a panic is there another one to come.
    let mut queue = queue.lock().await;
    let (mut jobs, mut failing) = (Vec::with_capacity(BATCH), false);
    while queue.recv_many(&mut jobs, BATCH).await > 0 {
        if !jobs.iter().any(|job| matches!(job, ExportJob::Flush(_))) {
            // More of the same trace is likely to come in a moment.
            let _ = tokio::time::timeout(DELAY, queue.recv_many(&mut jobs, BATCH)).await;
        }
        let (mut spans, mut waiting) = (Vec::new(), Vec::new());
        for job in jobs.drain(..) {
            match job {
                ExportJob::Span(span) => spans.push(span),
                ExportJob::Flush(tell) => waiting.push(tell),
            }
        }
        let count = spans.len() as u64;
        let posted = if spans.is_empty() { Ok(()) } else { collector.post(spans).await };
        if let Err(why) = &posted {
            metrics.spans_lost.inc_by(count);
            if !failing {
                tracing::warn!(why, collector = collector.authority, "traces cannot be handed over");
            }
        }
        failing = posted.is_err();
        for tell in waiting {
            let _ = tell.send(());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_taken_over_only_if_it_is_one() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let (taken, parent, sampled) = parse(&format!("00-{trace}-{span}-01")).unwrap();
        assert_eq!((hex(&taken), hex(&parent), sampled), (trace.into(), span.into(), true));
        assert!(!parse(&format!("00-{trace}-{span}-00")).unwrap().2);
        assert!(parse(&format!("cc-{trace}-{span}-01-later")).is_some());
        for bad in [
            String::new(),
            "00".into(),
            format!("00-{trace}-{span}"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{trace}-{span}-01-more"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{}-{span}-01", trace.to_uppercase()),
            format!("00-{trace}é-{span}-01"),
        ] {
            assert!(parse(&bad).is_none(), "{bad}");
        }
    }

    #[test]
    fn an_endpoint_that_cannot_be_is_an_error_with_the_fix() {
        for (endpoint, authority, path) in [
            ("http://127.0.0.1:4318", "127.0.0.1:4318", "/v1/traces"),
            ("http://collector/otlp/", "collector:80", "/otlp/v1/traces"),
            ("http://[::1]:4318/v1/traces", "[::1]:4318", "/v1/traces"),
        ] {
            let collector = Collector::new(endpoint).unwrap();
            assert_eq!((collector.authority.as_str(), collector.path.as_str()), (authority, path));
        }
        for bad in ["", "nonsense", "https://x", "http://", "http://u:p@x", "unix:/x"] {
            assert!(Collector::new(bad).unwrap_err().public().contains("127.0.0.1:4318"), "{bad}");
        }
    }
}
