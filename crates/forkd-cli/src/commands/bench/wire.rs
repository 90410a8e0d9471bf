//! Plain HTTP/1.1 over unix sockets: to the daemon over one kept connection, as E2B's clients do, and to the agent over
//! a new connection for each request, as the daemon does.

use std::path::Path;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use forkd_protocol::agent::{AGENT_PORT, FORWARD_PORT};
use http_body_util::{BodyExt, Full};
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{Request, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

/// The longest line before HTTP begins.
const MAX_LINE: usize = 256;

/// A connection. It closes on drop.
pub(super) struct Peer {
    sender: SendRequest<Full<Bytes>>,
    driver: JoinHandle<()>,
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Peer {
    /// The daemon behind `socket`.
    pub(super) async fn daemon(socket: &Path) -> Result<Peer> {
        Peer::over(connect(socket).await?).await
    }

    /// The agent of the guest whose vsock is behind `socket`.
    pub(super) async fn agent(socket: &Path) -> Result<Peer> {
        let mut stream = connect(socket).await?;
        dial(&mut stream, AGENT_PORT).await?;
        Peer::over(stream).await
    }

    /// The server at a TCP port of that guest, through its agent.
    pub(super) async fn guest_port(socket: &Path, port: u16) -> Result<Peer> {
        let mut stream = connect(socket).await?;
        dial(&mut stream, FORWARD_PORT).await?;
        stream.write_all(format!("{port}\n").as_bytes()).await?;
        match read_line(&mut stream).await?.as_str() {
            "OK" => Peer::over(stream).await,
            refused => bail!("port {port} of the guest: {}", refused.trim_start_matches("NO ")),
        }
    }

    async fn over(stream: UnixStream) -> Result<Peer> {
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
        let driver = tokio::spawn(async {
            // The pending request reports its errors.
            let _ = connection.await;
        });
        Ok(Peer { sender, driver })
    }

    /// Sends a request that has to succeed; returns the whole body of the response.
    pub(super) async fn send(&mut self, request: Request<Full<Bytes>>) -> Result<Bytes> {
        let what = format!("{} {}", request.method(), request.uri().path());
        let failed = || format!("{what}: the connection broke");
        self.sender.ready().await.with_context(failed)?;
        let response = self.sender.send_request(request).await.with_context(failed)?;
        let status = response.status();
        let body = response.into_body().collect().await.with_context(failed)?.to_bytes();
        if !status.is_success() {
            bail!("{what}: {}", reason(status, &body));
        }
        Ok(body)
    }
}

/// The error's text in a response.
fn reason(status: StatusCode, body: &[u8]) -> String {
    let parsed: serde_json::Value = serde_json::from_slice(body).unwrap_or_default();
    let message = parsed.get("message").or_else(|| parsed.get("error")).and_then(|text| text.as_str());
    message.map_or_else(|| format!("status {status}"), |text| format!("{text} (status {status})"))
}

async fn connect(socket: &Path) -> Result<UnixStream> {
    UnixStream::connect(socket).await.with_context(|| format!("cannot connect to {}", socket.display()))
}

/// Asks the monitor for a vsock port of the guest.
async fn dial(stream: &mut UnixStream, port: u32) -> Result<()> {
    stream.write_all(format!("CONNECT {port}\n").as_bytes()).await?;
    let line =
        read_line(stream).await.with_context(|| format!("nothing listens on port {port} in the guest"))?;
    if !line.starts_with("OK ") {
        bail!("the monitor answers CONNECT with `{line}` instead of `OK`");
    }
    Ok(())
}

async fn read_line(stream: &mut UnixStream) -> Result<String> {
    let mut line = Vec::new();
    loop {
        // One byte at a time: what follows the line belongs to HTTP.
        match stream.read_u8().await? {
            b'\n' => return Ok(String::from_utf8_lossy(&line).into_owned()),
            _ if line.len() >= MAX_LINE => bail!("a line of more than {MAX_LINE} bytes"),
            byte => line.push(byte),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A monitor and a guest that accept what the daemon sends, and answer `answer`.
    fn guest(socket: &Path, lines: &'static [(&'static str, &'static str)], answer: &'static str) {
        let listener = UnixListener::bind(socket).unwrap();
        std::thread::spawn(move || {
            let mut stream = listener.accept().unwrap().0;
            for (expected, reply) in lines {
                let mut line = vec![0; expected.len()];
                stream.read_exact(&mut line).unwrap();
                assert_eq!(line, expected.as_bytes());
                stream.write_all(reply.as_bytes()).unwrap();
            }
            let mut request = [0; 4096];
            if stream.read(&mut request).unwrap() > 0 {
                stream.write_all(answer.as_bytes()).unwrap();
            }
        });
    }

    fn get(path: &str) -> Request<Full<Bytes>> {
        Request::get(path).header("host", "x").body(Full::default()).unwrap()
    }

    #[tokio::test]
    async fn the_agent_and_a_port_of_the_guest_are_behind_one_socket() {
        let folder = tempfile::tempdir().unwrap();
        let (agent, port) = (folder.path().join("a"), folder.path().join("p"));
        let ok = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";
        guest(&agent, &[("CONNECT 1024\n", "OK 1\n")], ok);
        assert_eq!(Peer::agent(&agent).await.unwrap().send(get("/a")).await.unwrap(), "hi");
        guest(&port, &[("CONNECT 1025\n", "OK 1\n"), ("49999\n", "OK\n")], ok);
        assert_eq!(Peer::guest_port(&port, 49999).await.unwrap().send(get("/a")).await.unwrap(), "hi");
    }

    #[tokio::test]
    async fn a_closed_port_and_an_error_status_are_errors_with_their_reason() {
        let folder = tempfile::tempdir().unwrap();
        let (closed, refuses) = (folder.path().join("c"), folder.path().join("r"));
        guest(&closed, &[("CONNECT 1025\n", "OK 1\n"), ("80\n", "NO connection refused\n")], "");
        let error = Peer::guest_port(&closed, 80).await.err().unwrap();
        assert_eq!(error.to_string(), "port 80 of the guest: connection refused");
        let answer = "HTTP/1.1 404 x\r\ncontent-length: 25\r\n\r\n{\"message\": \"no sandbox\"}";
        guest(&refuses, &[("CONNECT 1024\n", "OK 1\n")], answer);
        let error = Peer::agent(&refuses).await.unwrap().send(get("/files")).await.unwrap_err();
        assert_eq!(error.to_string(), "GET /files: no sandbox (status 404 Not Found)");
    }
}
