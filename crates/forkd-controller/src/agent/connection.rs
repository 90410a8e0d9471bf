//! One HTTP/1.1 connection to an agent, with a limit on everything it buffers.

use std::io;

use bytes::{Bytes, BytesMut};
use forkd_protocol::agent::TOKEN_HEADER;
use forkd_protocol::connect::{self, STREAM_TYPE, UNARY_TYPE};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::http::request;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::task::JoinHandle;

use crate::agent::{Endpoint, Error, ResponseBudget, Result};
use crate::util::task::{self, Task};

/// The size of hyper's buffer. It limits the head of a response and the pieces of its body.
pub(super) const BUFFER: usize = 64 << 10;
/// The longest body of an error.
const MAX_ERROR: usize = 64 << 10;
/// The longest valid response to `CONNECT` is `OK 4294967295\n`.
const MAX_OK_LINE: usize = 32;

/// The body of a request: bytes in memory, or a stream.
pub(crate) type Outbound = UnsyncBoxBody<Bytes, io::Error>;

/// A request to an agent.
#[derive(Debug)]
pub(crate) struct Call {
    builder: request::Builder,
    body: Outbound,
}

fn there(bytes: Bytes) -> Outbound {
    Full::new(bytes).map_err(|never| match never {}).boxed_unsync()
}

impl Call {
    pub(crate) fn get(uri: &str) -> Self {
        Call { builder: Request::builder().method(Method::GET).uri(uri), body: there(Bytes::new()) }
    }

    pub(crate) fn post(uri: &str, content_type: &str, body: Bytes) -> Self {
        Call::send_body(uri, content_type, there(body))
    }

    /// A request whose body is sent while it is produced.
    pub(crate) fn send_body(uri: &str, content_type: &str, body: Outbound) -> Self {
        let builder = Request::builder().method(Method::POST).uri(uri).header(CONTENT_TYPE, content_type);
        Call { builder, body }
    }

    pub(crate) fn unary(path: &str, message: &impl Serialize) -> Result<Self> {
        let body = serde_json::to_vec(message).map_err(|error| Error::Protocol(error.to_string()))?;
        Ok(Call::post(path, UNARY_TYPE, body.into()))
    }

    pub(crate) fn stream(path: &str, message: &impl Serialize) -> Self {
        Call::post(path, STREAM_TYPE, connect::encode(0, message).into())
    }

    pub(crate) fn header(mut self, name: &str, value: String) -> Self {
        self.builder = self.builder.header(name, value);
        self
    }
}

/// A connection. Dropping it closes the socket, whatever the peer does.
#[derive(Debug)]
pub(crate) struct Connection {
    sender: SendRequest<Outbound>,
    driver: JoinHandle<()>,
    token: Option<String>,
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Connection {
    pub(crate) async fn open(endpoint: &Endpoint) -> Result<Self> {
        match endpoint {
            Endpoint::Vsock { socket, port } => {
                let mut stream = UnixStream::connect(socket).await.map_err(unreachable)?;
                dial(&mut stream, *port).await?;
                Connection::over(stream, None).await
            }
            Endpoint::Tcp { address, token } => {
                let stream = TcpStream::connect(address.as_str()).await.map_err(unreachable)?;
                stream.set_nodelay(true).map_err(unreachable)?;
                Connection::over(stream, Some(token.clone())).await
            }
        }
    }

    async fn over<S>(stream: S, token: Option<String>) -> Result<Self>
    where
        S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
    {
        let handshake = http1::Builder::new().max_buf_size(BUFFER).handshake(TokioIo::new(stream)).await;
        let (sender, connection) = handshake.map_err(unreachable)?;
        // The pending request reports the connection's errors, too.
        let driver = task::spawn(Task::AgentConnection, async {
            let _ = connection.await;
        });
        Ok(Connection { sender, driver, token })
    }

    /// Sends one request and reads its whole response, at most `max` bytes.
    pub(crate) async fn call(&mut self, call: Call, max: usize) -> Result<Bytes> {
        let response = self.send(call).await?;
        self.collect(response.into_body(), max, None).await
    }

    /// As [`call`](Connection::call). Takes bytes of `room` as the response arrives.
    pub(crate) async fn call_counted(
        &mut self,
        call: Call,
        max: usize,
        room: &mut ResponseBudget,
    ) -> Result<Bytes> {
        let response = self.send(call).await?;
        self.collect(response.into_body(), max, Some(room)).await
    }

    /// Sends a request whose response is a stream.
    pub(crate) async fn open_stream(&mut self, call: Call) -> Result<Incoming> {
        let response = self.send(call).await?;
        let content_type = response.headers().get(CONTENT_TYPE);
        if content_type.is_none_or(|value| value != STREAM_TYPE) {
            return Err(Error::Protocol(format!("a stream came as {content_type:?}")));
        }
        Ok(response.into_body())
    }

    /// Sends a request and reads the head of its response. An error status is an error.
    pub(crate) async fn send(&mut self, call: Call) -> Result<Response<Incoming>> {
        let mut builder = call.builder.header(HOST, "agent");
        if let Some(token) = &self.token {
            builder = builder.header(TOKEN_HEADER, token);
        }
        let request = builder.body(call.body).map_err(|error| {
            Error::Refused(connect::Error::new(connect::Code::InvalidArgument, error.to_string()))
        })?;
        self.sender.ready().await.map_err(|error| self.broken(&error))?;
        let response = self.sender.send_request(request).await.map_err(|error| self.broken(&error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        let body = self.collect(response.into_body(), MAX_ERROR, None).await?;
        match serde_json::from_slice::<connect::Error>(&body) {
            Ok(error) => Err(error.into()),
            Err(_) => Err(plain_refusal(status, &body)),
        }
    }

    async fn collect(
        &self,
        mut body: Incoming,
        max: usize,
        mut room: Option<&mut ResponseBudget>,
    ) -> Result<Bytes> {
        let mut collected = BytesMut::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|error| self.broken(&error))?;
            // A response's trailers carry nothing.
            let Some(piece) = frame.data_ref() else { continue };
            if piece.len() > max - collected.len() {
                return Err(Error::Protocol(format!("an answer is longer than {max} bytes")));
            }
            if room.as_mut().is_some_and(|room| !room.take(piece.len())) {
                return Err(Error::NoRoom);
            }
            collected.extend_from_slice(piece);
        }
        Ok(collected.freeze())
    }

    /// The error of a failed connection: invalid data and a closed socket are told apart.
    pub(crate) fn broken(&self, error: &hyper::Error) -> Error {
        let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
        match error.is_parse() || error.is_parse_too_large() {
            true => Error::Protocol(format!("{error}{cause}")),
            false => Error::Unreachable(format!("{error}{cause}")),
        }
    }
}

/// The error of a plain HTTP call, which has a status and a message, but no Connect error.
fn plain_refusal(status: StatusCode, body: &[u8]) -> Error {
    #[derive(serde::Deserialize)]
    struct Plain {
        message: String,
    }
    let Ok(Plain { message }) = serde_json::from_slice(body) else {
        return Error::Protocol(format!("status {status} without a reason"));
    };
    let code = match status.as_u16() {
        400 | 415 => connect::Code::InvalidArgument,
        401 => connect::Code::Unauthenticated,
        403 => connect::Code::PermissionDenied,
        404 => connect::Code::NotFound,
        409 => connect::Code::FailedPrecondition,
        507 => return Error::DiskFull(message),
        // Of the connection, and not of the call: another attempt may succeed.
        408 | 503 => return Error::Protocol(format!("status {status}: {message}")),
        _ => connect::Code::Internal,
    };
    connect::Error::new(code, message).into()
}

/// Asks the monitor for a connection to the guest's `port`.
pub(super) async fn dial(stream: &mut UnixStream, port: u32) -> Result<()> {
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await.map_err(unreachable)?;
    let mut line = Vec::with_capacity(MAX_OK_LINE);
    loop {
        // One byte at a time: what follows the line belongs to HTTP.
        let byte = match stream.read_u8().await {
            Ok(byte) => byte,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                return Err(Error::Unreachable(format!("nothing listens on port {port} in the guest")));
            }
            Err(error) => return Err(unreachable(error)),
        };
        match byte {
            b'\n' if line.starts_with(b"OK ") => return Ok(()),
            byte if byte != b'\n' && line.len() < MAX_OK_LINE => line.push(byte),
            _ => return Err(Error::Protocol("the answer to CONNECT is not `OK`".into())),
        }
    }
}

pub(super) fn unreachable(error: impl std::fmt::Display) -> Error {
    Error::Unreachable(error.to_string())
}
