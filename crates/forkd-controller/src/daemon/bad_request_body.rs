//! Adds a body to the HTTP library's own rejections of malformed requests. They come without a body, and every error
//! of this daemon has one.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::error::{Code, Error, Reader};
use crate::util::random::request_id;

/// A connection that adds a body to a bare rejection. It does so only before the first valid request: later output
/// can be anything, such as the content of a file.
#[derive(Debug)]
pub(crate) struct RejectionBodyStream<S> {
    stream: S,
    seen: RequestSeen,
    /// The bytes that replace a rejection.
    replaced: Option<ReplacedRejection>,
}

/// Whether the connection has carried a valid request.
#[derive(Debug, Clone, Default)]
pub(crate) struct RequestSeen(Arc<AtomicBool>);

impl RequestSeen {
    pub(crate) fn note(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    fn get(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
struct ReplacedRejection {
    bytes: Vec<u8>,
    written: usize,
    /// Length of the rejection that `bytes` replaces.
    length: usize,
}

impl<S> RejectionBodyStream<S> {
    pub(crate) fn new(stream: S, seen: RequestSeen) -> Self {
        RejectionBodyStream { stream, seen, replaced: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for RejectionBodyStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for RejectionBodyStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        if this.replaced.is_none() && !this.seen.get() {
            let bytes = with_body(buf);
            this.replaced = bytes.map(|bytes| ReplacedRejection { bytes, written: 0, length: buf.len() });
        }
        let Some(replaced) = &mut this.replaced else {
            return Pin::new(&mut this.stream).poll_write(cx, buf);
        };
        while let Some(rest) = replaced.bytes.get(replaced.written..).filter(|rest| !rest.is_empty()) {
            match ready!(Pin::new(&mut this.stream).poll_write(cx, rest))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => replaced.written += count,
            }
        }
        let length = replaced.length;
        this.replaced = None;
        Poll::Ready(Ok(length))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.seen.get() && self.replaced.is_none() {
            return Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        }
        let first = bufs.iter().find(|buf| !buf.is_empty());
        self.poll_write(cx, first.map_or(&[], |buf| buf))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The rejection with a body, if `head` is one without; otherwise `None`.
fn with_body(head: &[u8]) -> Option<Vec<u8>> {
    const NO_BODY: &str = "content-length: 0\r\n";
    let head = std::str::from_utf8(head).ok().filter(|head| head.ends_with("\r\n\r\n"))?;
    let status = head.strip_prefix("HTTP/1.1 ").or_else(|| head.strip_prefix("HTTP/1.0 "))?.get(..3)?;
    let code = Code::of_status(status.parse().ok().filter(|status| (400..500).contains(status))?);
    let why = match code {
        Code::HeadersTooLarge => {
            "the headers of this request are too many or too long; send fewer and shorter ones"
        }
        Code::UriTooLong => "the URI of this request is too long; send a shorter one",
        _ => "this is not a valid HTTP/1.1 request; check its first line and its headers",
    };
    // The rejected bytes had no request id, so the reply gets a new one.
    let request_id = request_id();
    tracing::debug!(request_id, code = code.name(), "malformed request rejected");
    let body = Reader { request_id, reads_causes: false }.body(&Error::new(code, why));
    let id = body.request_id.clone();
    let body = serde_json::to_string(&body).ok()?;
    let about =
        format!("content-type: application/json\r\nx-request-id: {id}\r\ncontent-length: {}\r\n", body.len());
    let (before, after) = head.split_once(NO_BODY)?;
    Some([before, &about, after, &body].concat().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    const BARE: &str =
        "HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    /// What a client receives of `said`, on a connection that takes a few bytes at a time.
    async fn heard(said: &str, seen: bool) -> String {
        let (mut client, server) = tokio::io::duplex(7);
        let heard = tokio::spawn(async move {
            let mut text = String::new();
            client.read_to_string(&mut text).await.unwrap();
            text
        });
        let flag = RequestSeen::default();
        if seen {
            flag.note();
        }
        let mut server = RejectionBodyStream::new(server, flag);
        server.write_all(said.as_bytes()).await.unwrap();
        server.shutdown().await.unwrap();
        drop(server);
        heard.await.unwrap()
    }

    #[tokio::test]
    async fn a_bare_refusal_gets_a_body_and_nothing_else_is_touched() {
        let text = heard(BARE, false).await;
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 431 ") && head.contains("connection: close"), "{head}");
        assert!(head.contains(&format!("content-length: {}", body.len())), "{text}");
        let body: forkd_api::ErrorBody = serde_json::from_str(body).unwrap();
        assert_eq!(body.code, "headers_too_large");
        assert!(head.contains(&format!("x-request-id: {}", body.request_id)), "{head}");

        assert_eq!(heard(BARE, true).await, BARE, "it may be what somebody's file holds");
        for other in [
            "HTTP/1.1 204 No Content\r\ncontent-length: 0\r\n\r\n",
            "HTTP/1.1 400 x\r\ncontent-length: 1\r\n\r\n!",
        ] {
            assert_eq!(heard(other, false).await, other);
        }
    }
}
