//! Requests of clients that the daemon sends into a guest unchanged: to its agent, or to a TCP port of the guest.
//!
//! Unlike a call, a forwarded request has no time limit and no size limit, and the daemon buffers none of it: the
//! client, the guest and the sandbox's end limit it. Every request has its own connection.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use forkd_protocol::agent::{FORWARD_PORT, TOKEN_HEADER};
use forkd_protocol::connect::Code;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::http1;
use hyper::header::HeaderValue;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::task::AbortOnDropHandle;

use super::connection::{BUFFER, Outbound, dial, unreachable};
use super::{Agent, Endpoint, Error, Result};
use crate::util::task::{self, Task};

/// The longest answer of the agent to a request for a port.
const MAX_LINE: usize = 256;

/// The body of a forwarded response. Its connection closes when this is dropped.
#[derive(Debug)]
pub(crate) struct Forwarded {
    body: Incoming,
    _driver: AbortOnDropHandle<()>,
}

impl Body for Forwarded {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Agent {
    /// Sends a request to the agent, and returns its response, whatever its status.
    pub(crate) async fn forward(&self, mut request: Request<Outbound>) -> Result<Response<Forwarded>> {
        match &*self.endpoint {
            Endpoint::Vsock { socket, port } => {
                let mut stream = UnixStream::connect(socket).await.map_err(unreachable)?;
                dial(&mut stream, *port).await?;
                send(stream, request).await
            }
            Endpoint::Tcp { address, token } => {
                let token = HeaderValue::from_str(token).map_err(unreachable)?;
                request.headers_mut().insert(TOKEN_HEADER, token);
                let stream = TcpStream::connect(address.as_str()).await.map_err(unreachable)?;
                send(stream, request).await
            }
        }
    }

    /// Sends a request to the server at a TCP port of the guest.
    pub(crate) async fn forward_to_port(
        &self,
        port: u16,
        request: Request<Outbound>,
    ) -> Result<Response<Forwarded>> {
        let Endpoint::Vsock { socket, .. } = &*self.endpoint else {
            return Err(Error::Unreachable("this agent has no vsock".into()));
        };
        let mut stream = UnixStream::connect(socket).await.map_err(unreachable)?;
        dial(&mut stream, FORWARD_PORT).await?;
        stream.write_all(format!("{port}\n").as_bytes()).await.map_err(unreachable)?;
        match read_line(&mut stream).await?.as_str() {
            "OK" => send(stream, request).await,
            refused => {
                let code = match refused.contains("too many connections") {
                    true => Code::ResourceExhausted,
                    false => Code::Unavailable,
                };
                let text = format!("port {port} of the guest: {}", refused.trim_start_matches("NO "));
                Err(forkd_protocol::connect::Error::new(code, text).into())
            }
        }
    }
}

async fn read_line(stream: &mut UnixStream) -> Result<String> {
    let mut line = Vec::new();
    loop {
        // One byte at a time: what follows the line belongs to HTTP.
        match stream.read_u8().await.map_err(unreachable)? {
            b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
            _ if line.len() >= MAX_LINE => {
                return Err(Error::Protocol("the answer to a request for a port is too long".into()));
            }
            byte => line.push(byte),
        }
    }
}

async fn send<S>(stream: S, request: Request<Outbound>) -> Result<Response<Forwarded>>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Send + Unpin + 'static,
{
    let handshake = http1::Builder::new().max_buf_size(BUFFER).handshake(TokioIo::new(stream)).await;
    let (mut sender, connection) = handshake.map_err(unreachable)?;
    // The response reports the connection's errors, too. The connection carries upgrades, such as WebSockets.
    let driver = AbortOnDropHandle::new(task::spawn(Task::AgentConnection, async {
        let _ = connection.with_upgrades().await;
    }));
    let response = sender.send_request(request).await.map_err(unreachable)?;
    Ok(response.map(|body| Forwarded { body, _driver: driver }))
}
