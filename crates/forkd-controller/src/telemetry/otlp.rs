//! Traces: the durations of requests and of their spawns and branches, exported to an OpenTelemetry collector as OTLP
//! over HTTP, in JSON. Off unless a collector is configured.
//!
//! The daemon continues the trace in a request's `traceparent` (W3C Trace Context): its spans belong to the
//! client's trace. The current span is local to the task that does the work ([`carry`], [`current`]). Spans wait in a bounded
//! queue for a task that posts them. Spans that cannot be exported are counted and dropped.

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
/// The collector's path for spans.
const PATH: &str = "/v1/traces";
/// How many spans wait for export.
const QUEUE: usize = 2048;
/// How many spans one request exports.
const BATCH: usize = 512;
/// How long spans are collected before they are posted.
const DELAY: Duration = Duration::from_millis(500);
/// The time limit of a request to the collector.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the daemon's stop waits for the export.
const CLOSE_WAIT: Duration = Duration::from_secs(3);

/// The kinds of spans, with the protocol's numbers.
const INTERNAL: u8 = 1;
const SERVER: u8 = 2;

/// A span of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context {
    trace: [u8; 16],
    span: [u8; 8],
    parent: Option<[u8; 8]>,
    /// Whether the origin of the trace wants it recorded.
    sampled: bool,
}

tokio::task_local! {
    static CURRENT: Context;
}

/// The span of the current work.
pub(crate) fn current() -> Option<Context> {
    CURRENT.try_with(|context| *context).ok()
}

/// Runs `work` as part of a span, if there is one.
pub(crate) async fn carry<T>(context: Option<Context>, work: impl Future<Output = T>) -> T {
    match context {
        Some(context) => CURRENT.scope(context, work).await,
        None => work.await,
    }
}

/// The same for blocking work on a thread.
pub(crate) fn carry_blocking<T>(context: Option<Context>, work: impl FnOnce() -> T) -> T {
    match context {
        Some(context) => CURRENT.sync_scope(context, work),
        None => work(),
    }
}

impl Context {
    /// A new span in the one that a request's header names, or in a new trace.
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

    /// The value of the `traceparent` header.
    pub(crate) fn header(&self) -> String {
        format!("00-{}-{}-{:02x}", hex(&self.trace), hex(&self.span), u8::from(self.sampled))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses `00-<trace>-<span>-<flags>`, in lower-case hexadecimal digits. All zeros are invalid.
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

/// The queue of the task that posts spans.
#[derive(Debug)]
pub(crate) struct Traces {
    jobs: Option<mpsc::Sender<ExportJob>>,
    metrics: Arc<Metrics>,
}

/// A span that has ended.
#[derive(Debug)]
pub(crate) struct Over<'a> {
    pub(crate) name: &'a str,
    pub(crate) begun: Instant,
    pub(crate) failed: bool,
    pub(crate) attributes: &'a [(&'a str, Option<&'a str>)],
}

impl Traces {
    /// Must be called in a runtime. Without an endpoint there are no traces.
    pub(crate) fn open(endpoint: Option<&str>, metrics: Arc<Metrics>) -> Result<Self> {
        let Some(endpoint) = endpoint else { return Ok(Traces { jobs: None, metrics }) };
        let collector = Collector::new(endpoint)?;
        let (jobs, queue) = mpsc::channel(QUEUE);
        let (collector, queue) = (Arc::new(collector), Arc::new(tokio::sync::Mutex::new(queue)));
        let lost = metrics.clone();
        task::keep_running(Task::Traces, move || post(collector.clone(), queue.clone(), lost.clone()));
        Ok(Traces { jobs: Some(jobs), metrics })
    }

    /// Begins the span of a request.
    pub(crate) fn begin(&self, headers: &HeaderMap) -> Option<Context> {
        self.jobs.as_ref().and_then(|_| Context::of(headers))
    }

    /// Ends the span of a request.
    pub(crate) fn request(&self, context: Context, over: Over<'_>) {
        self.hand_over(context, over, SERVER);
    }

    /// Reports work that has ended as a child span of `parent`.
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
            // Codes of the protocol: unset, or error.
            "status": {"code": if over.failed { 2 } else { 0 }},
        });
        if let Some(parent) = context.parent {
            span["parentSpanId"] = hex(&parent).into();
        }
        if jobs.try_send(ExportJob::Span(span)).is_err() {
            self.metrics.spans_dropped.inc();
        }
    }

    /// Returns when all pending spans are exported, or have failed.
    pub(crate) async fn close(&self) {
        let Some(jobs) = &self.jobs else { return };
        let flushed = async {
            let (notify, notified) = oneshot::channel();
            if jobs.send(ExportJob::Flush(notify)).await.is_ok() {
                let _ = notified.await;
            }
        };
        let _ = tokio::time::timeout(CLOSE_WAIT, flushed).await;
    }
}

fn attribute(key: &str, value: &str) -> Value {
    json!({"key": key, "value": {"stringValue": value}})
}

/// The collector that spans are posted to.
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
                _ = connection => return Err("the connection broke".to_owned()),
            };
            match answer.status() {
                status if status.is_success() => Ok(()),
                status => Err(format!("it answers {status}")),
            }
        };
        let Ok(posted) = tokio::time::timeout(EXPORT_TIMEOUT, posted).await else {
            return Err(format!("it did not answer within {EXPORT_TIMEOUT:?}"));
        };
        posted
    }
}

async fn post(
    collector: Arc<Collector>,
    queue: Arc<tokio::sync::Mutex<mpsc::Receiver<ExportJob>>>,
    metrics: Arc<Metrics>,
) {
    // The lock is free except after a panic, while the previous task ends.
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
                ExportJob::Flush(notify) => waiting.push(notify),
            }
        }
        let count = spans.len() as u64;
        let posted = if spans.is_empty() { Ok(()) } else { collector.post(spans).await };
        if let Err(why) = &posted {
            metrics.spans_dropped.inc_by(count);
            if !failing {
                tracing::warn!(why, collector = collector.authority, "traces not exported");
            }
        }
        failing = posted.is_err();
        for notify in waiting {
            let _ = notify.send(());
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
