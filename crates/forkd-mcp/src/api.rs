//! The REST API as this crate sees it: one call, implemented by the command and by the daemon.

use std::time::Duration;

use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::Method;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::tool_error::ToolError;

/// The longest JSON reply. A command's output is at most 16 MiB on each stream, before escapes.
const MAX_JSON: usize = 96 << 20;
/// The longest body of an error that is read.
pub(crate) const MAX_ERROR: usize = 64 << 10;
/// The time in which the daemon must reply to a request that only looks something up.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The REST API of a daemon, with the rights of one client.
pub trait Api: Send + Sync + 'static {
    /// Sends one request. An error means that there is no reply; its text says why and what to do.
    fn call(&self, request: ApiRequest) -> BoxFuture<'_, Result<ApiReply, String>>;
}

/// A request of the REST API.
#[derive(Debug, Clone)]
pub struct ApiRequest {
    /// The method.
    pub method: Method,
    /// The path, with the query.
    pub path: String,
    /// The body.
    pub body: ApiBody,
    /// The `Idempotency-Key`.
    pub idempotency_key: Option<String>,
    /// How many bytes to leave out at the beginning of a successful reply's body.
    pub skip: u64,
    /// How many bytes of a successful reply's body to read after that.
    pub limit: usize,
    /// How long to wait for the whole reply.
    pub(crate) patience: Duration,
}

/// The body of a request.
#[derive(Debug, Clone)]
pub enum ApiBody {
    /// No body.
    Empty,
    /// JSON, sent as `application/json`.
    Json(Value),
    /// Bytes, sent as `application/octet-stream`.
    Bytes(Bytes),
}

/// A reply of the REST API.
#[derive(Debug, Clone)]
pub struct ApiReply {
    /// The HTTP status.
    pub status: u16,
    /// The part of the body that the request asked for.
    pub body: Bytes,
    /// Whether the body goes on after that part.
    pub more: bool,
    /// The length of the whole body, if the daemon announced it.
    pub length: Option<u64>,
}

impl ApiRequest {
    /// A request without a body.
    pub(crate) fn new(method: Method, path: impl Into<String>) -> Self {
        ApiRequest {
            method,
            path: path.into(),
            body: ApiBody::Empty,
            idempotency_key: None,
            skip: 0,
            limit: MAX_JSON,
            patience: TIMEOUT,
        }
    }

    pub(crate) fn get(path: impl Into<String>) -> Self {
        ApiRequest::new(Method::GET, path)
    }

    pub(crate) fn delete(path: impl Into<String>) -> Self {
        ApiRequest::new(Method::DELETE, path)
    }

    pub(crate) fn post(path: impl Into<String>, body: Value) -> Self {
        ApiRequest { body: ApiBody::Json(body), ..ApiRequest::new(Method::POST, path) }
    }

    pub(crate) fn within(self, patience: Duration) -> Self {
        ApiRequest { patience, ..self }
    }
}

impl ApiReply {
    /// The body as JSON.
    pub(crate) fn json<T: DeserializeOwned>(&self) -> Result<T, ToolError> {
        if self.more {
            return Err(ToolError::new("reply_too_long", "the daemon's reply is too long; ask for less"));
        }
        serde_json::from_slice(&self.body).map_err(|_| {
            let text = "the daemon's reply cannot be read; the daemon and this server need the same version";
            ToolError::new("reply_unreadable", text)
        })
    }
}

/// Sends a request that must succeed.
pub(crate) async fn ask(api: &dyn Api, request: ApiRequest) -> Result<ApiReply, ToolError> {
    let patience = request.patience;
    let reply = match tokio::time::timeout(patience, api.call(request)).await {
        Ok(Ok(reply)) => reply,
        Ok(Err(text)) => return Err(ToolError::new(UNREACHABLE, text)),
        Err(_) => {
            let secs = patience.as_secs();
            let text =
                format!("the daemon did not reply within {secs} s; ask its operator for `forkd doctor`");
            return Err(ToolError::new(UNREACHABLE, text));
        }
    };
    if (200..300).contains(&reply.status) { Ok(reply) } else { Err(ToolError::of_reply(&reply)) }
}

/// The code of an error without a reply of the daemon.
pub(crate) const UNREACHABLE: &str = "daemon_unreachable";

/// Takes the part of a body that a request asked for, piece by piece.
#[derive(Debug)]
pub struct Window {
    skip: u64,
    limit: usize,
    bytes: Vec<u8>,
    more: bool,
}

impl Window {
    /// The part of a reply with this status that `request` asks for: of an error, the beginning.
    pub fn new(request: &ApiRequest, status: u16) -> Self {
        let (skip, limit) =
            if (200..300).contains(&status) { (request.skip, request.limit) } else { (0, MAX_ERROR) };
        Window { skip, limit, bytes: Vec::new(), more: false }
    }

    /// Takes the next piece of the body; returns whether to read on.
    pub fn push(&mut self, piece: &[u8]) -> bool {
        let left_out = usize::try_from(self.skip).unwrap_or(usize::MAX).min(piece.len());
        self.skip -= left_out as u64;
        let piece = &piece[left_out..];
        let room = self.limit - self.bytes.len();
        self.bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        self.more |= piece.len() > room;
        !self.more
    }

    /// The reply with this part as its body.
    pub fn reply(self, status: u16, length: Option<u64>) -> ApiReply {
        ApiReply { status, body: self.bytes.into(), more: self.more, length }
    }
}

/// A part of a path or of a query, with everything escaped that has a meaning there.
pub(crate) fn encoded(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.' | b'~') {
            out.push(byte as char);
        } else {
            out.push_str(&format!("%{byte:02X}"));
        }
    }
    out
}

/// The opposite of [`encoded`]; none if the text is not encoded UTF-8.
pub(crate) fn decoded(text: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        let digit = |byte: Option<u8>| (byte? as char).to_digit(16);
        bytes.push(match byte {
            b'%' => u8::try_from(digit(rest.next())? * 16 + digit(rest.next())?).ok()?,
            byte => byte,
        });
    }
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_the_part_that_was_asked_for_however_the_body_is_cut() {
        let request = ApiRequest { skip: 3, limit: 4, ..ApiRequest::get("/") };
        for size in 1..12 {
            let mut window = Window::new(&request, 200);
            for piece in b"0123456789".chunks(size) {
                if !window.push(piece) {
                    break;
                }
            }
            let reply = window.reply(200, None);
            assert_eq!((&reply.body[..], reply.more), (&b"3456"[..], true), "{size}");
        }
        let mut exact = Window::new(&request, 200);
        assert!(exact.push(b"0123456"));
        assert!(!exact.reply(200, None).more);
        let mut error = Window::new(&request, 404);
        error.push(b"0123456789");
        assert_eq!(&error.reply(404, None).body[..], b"0123456789");
    }

    #[test]
    fn names_do_not_leave_their_part_of_a_path() {
        assert_eq!(encoded("a/../b?c=d&e#f%"), "a%2F..%2Fb%3Fc%3Dd%26e%23f%25");
        for text in ["", "/etc/passwd", "a b", "ä€", "100%", "%2F"] {
            assert_eq!(decoded(&encoded(text)).as_deref(), Some(text));
        }
        for bad in ["%", "%2", "%zz", "%ff"] {
            assert_eq!(decoded(bad), None, "{bad}");
        }
    }
}
