//! A small HTTP/1.1 server over any byte stream. It knows requests and responses, no service.
//!
//! [`Connection`] reads one request head after the other; each becomes an [`Exchange`]: the head, the body as
//! it arrives ([`Read`]), and the one response. Everything is bounded: heads by [`MAX_HEAD`] and
//! [`MAX_HEADERS`], bodies by their reader, waiting by timeouts.

mod body;
mod head;
mod server;

use std::{
    io::{self, Read, Write},
    time::{Duration, Instant},
};

use body::Framing;
pub(crate) use head::Head;
pub(crate) use server::serve;

/// The longest request head.
pub const MAX_HEAD: usize = 64 << 10;
/// The most header lines in a request.
pub const MAX_HEADERS: usize = 100;
/// How long a connection may sit between requests.
const IDLE: Duration = Duration::from_secs(600);
/// How long a request head may take once it has begun.
const HEAD_TIME: Duration = Duration::from_secs(15);
/// How long one read of a body, or one write of an ordinary response, may take.
const IO_TIME: Duration = Duration::from_secs(60);
/// How long an unused body is read on, so that the peer sees the answer and not a reset.
const DISCARD_TIME: Duration = Duration::from_secs(3);
/// Bytes taken from a peer at once, when fewer are wanted.
const READ_AHEAD: usize = 8 << 10;

/// The byte stream under a connection.
pub(crate) trait Transport: Read + Write {
    /// Limits each read and write; `None` waits for ever.
    fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()>;
    /// Whether the peer is gone for good.
    fn is_gone(&self) -> bool;
    /// Whether it has left: not if the connection was cut.
    fn has_left(&self) -> bool;
    /// Waits until a read returns at once; `false` if it would still block after `wait`.
    fn wait_readable(&self, wait: Duration) -> io::Result<bool>;
    /// Shuts down the sending direction.
    fn shutdown_write(&self);
}

/// Why there is no further request.
enum NoRequest {
    /// The peer left, or sent nothing for too long: no response.
    Gone,
    /// It sent something that is not a request: respond with the error and close.
    Bad(u16, String),
}

/// One connection and the bytes read from it but not used yet.
pub(crate) struct Connection<'t> {
    transport: &'t mut dyn Transport,
    input: Vec<u8>,
    /// How much of `input` is used already.
    used: usize,
}

impl<'t> Connection<'t> {
    pub(crate) fn new(transport: &'t mut dyn Transport) -> Self {
        Connection { transport, input: Vec::new(), used: 0 }
    }

    /// Answers requests with `handle` until the peer leaves or the connection cannot go on.
    pub(crate) fn run(mut self, handle: &dyn Fn(&mut Exchange) -> io::Result<()>) {
        loop {
            let head = match self.read_head() {
                Ok(head) => head,
                Err(NoRequest::Gone) => return,
                Err(NoRequest::Bad(status, message)) => {
                    let _ = self.refuse(status, &message);
                    return;
                }
            };
            let framing = match Framing::of(&head) {
                Ok(framing) => framing,
                Err((status, message)) => {
                    let _ = self.refuse(status, message);
                    return;
                }
            };
            if self.transport.set_timeouts(Some(IO_TIME), Some(IO_TIME)).is_err() {
                return;
            }
            let mut exchange = Exchange::new(&mut self, head, framing);
            let handled = handle(&mut exchange);
            if handled.is_err() || !exchange.complete() {
                return;
            }
        }
    }

    fn read_head(&mut self) -> Result<Head, NoRequest> {
        self.input.drain(..self.used);
        self.used = 0;
        let mut begun = (!self.input.is_empty()).then(Instant::now);
        loop {
            if let Some(begun) = begun {
                match Head::parse(&self.input, begun) {
                    Ok(Some((head, len))) => {
                        self.used = len;
                        return Ok(head);
                    }
                    Ok(None) if self.input.len() >= MAX_HEAD => {
                        return Err(NoRequest::Bad(
                            431,
                            format!("the request head is over {MAX_HEAD} bytes"),
                        ));
                    }
                    Ok(None) => {}
                    Err((status, message)) => return Err(NoRequest::Bad(status, message)),
                }
            }
            // A peer that sends a byte now and then still has to finish in time.
            let wait = match begun {
                None => IDLE,
                Some(begun) => HEAD_TIME.saturating_sub(begun.elapsed()),
            };
            if wait.is_zero() {
                return Err(NoRequest::Bad(408, "the request head took too long".into()));
            }
            self.transport.set_timeouts(Some(wait), Some(IO_TIME)).map_err(|_| NoRequest::Gone)?;
            match self.fill(MAX_HEAD - self.input.len().min(MAX_HEAD)) {
                Ok(0) => return Err(NoRequest::Gone),
                Ok(_) => _ = begun.get_or_insert_with(Instant::now),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && begun.is_some() => {}
                Err(_) => return Err(NoRequest::Gone),
            }
        }
    }

    /// Reads some more bytes, `most` at most, into `input`.
    fn fill(&mut self, most: usize) -> io::Result<usize> {
        let mut piece = [0; READ_AHEAD];
        let most = most.min(piece.len());
        let n = self.transport.read(&mut piece[..most])?;
        self.input.extend_from_slice(&piece[..n]);
        Ok(n)
    }

    /// Reads unused bytes first, then from the peer.
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        if self.used == self.input.len() {
            if buf.len() >= READ_AHEAD {
                return self.transport.read(buf);
            }
            self.input.clear();
            self.used = 0;
            self.fill(READ_AHEAD)?;
        }
        let unused = &self.input[self.used..];
        let n = buf.len().min(unused.len());
        buf[..n].copy_from_slice(&unused[..n]);
        self.used += n;
        Ok(n)
    }

    /// The last answer on a connection that cannot go on. Clients of the E2B API parse its body.
    fn refuse(&mut self, status: u16, message: &str) -> io::Result<()> {
        let body = serde_json::json!({ "code": status, "message": message }).to_string();
        let head = format!(
            "HTTP/1.1 {status} {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            reason(status),
            body.len()
        );
        // One write: what the peer sent and nobody reads may reset the connection after the first.
        self.transport.write_all((head + &body).as_bytes())
    }
}

/// How far the response is.
#[derive(Clone, Copy, PartialEq)]
enum Sent {
    Nothing,
    /// The head; the body goes out as chunks, as this many more bytes, or until the connection ends.
    Chunks,
    Bytes(u64),
    UntilClose,
    All,
}

/// One request and its response. Reading it reads the body.
pub(crate) struct Exchange<'e> {
    head: Head,
    /// Without its own lifetime, which would show in every service's signature.
    connection: &'e mut dyn ExchangeIo,
    framing: Framing,
    continue_due: bool,
    sent: Sent,
}

/// The parts of a connection that an exchange uses.
trait ExchangeIo {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize>;
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()>;
    fn has_unused(&self) -> bool;
    fn transport(&self) -> &dyn Transport;
}

impl ExchangeIo for Connection<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        Connection::read(self, buf)
    }

    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.transport.write_all(bytes)
    }

    fn has_unused(&self) -> bool {
        self.used < self.input.len()
    }

    fn transport(&self) -> &dyn Transport {
        self.transport
    }
}

impl<'e> Exchange<'e> {
    fn new(connection: &'e mut dyn ExchangeIo, head: Head, framing: Framing) -> Self {
        let continue_due = head.expects_continue() && framing != Framing::Empty;
        Exchange { head, connection, framing, continue_due, sent: Sent::Nothing }
    }

    /// The request's head.
    pub(crate) fn head(&self) -> &Head {
        &self.head
    }

    /// Whether the response has begun, so that no other can be given.
    pub(crate) fn has_responded(&self) -> bool {
        self.sent != Sent::Nothing
    }

    /// Whether the peer is gone for good.
    pub(crate) fn peer_is_gone(&self) -> bool {
        self.connection.transport().is_gone()
    }

    /// Whether the caller has left and takes no answer. In a copy of the guest, whose connections were all
    /// cut, this is `false`.
    pub(crate) fn peer_has_left(&self) -> bool {
        self.connection.transport().has_left()
    }

    /// Lets writes wait for ever: the peer of a stream may read as slowly as it likes.
    pub(crate) fn wait_for_slow_reader(&self) -> io::Result<()> {
        self.connection.transport().set_timeouts(Some(IO_TIME), None)
    }

    /// Waits until more of the body can be read, or its end; `false` if neither is there after `wait`. A read
    /// that times out may lose its place in the body, so a reader that waits for long asks here first.
    pub(crate) fn wait_readable(&mut self, wait: Duration) -> io::Result<bool> {
        self.send_continue()?;
        if self.framing.is_done() || self.connection.has_unused() {
            return Ok(true);
        }
        self.connection.transport().wait_readable(wait)
    }

    fn send_continue(&mut self) -> io::Result<()> {
        if std::mem::take(&mut self.continue_due) {
            self.connection.write_all(b"HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        Ok(())
    }

    /// The whole body, if it has no more than `limit` bytes.
    pub(crate) fn read_to_limit(&mut self, limit: usize) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::new();
        let most = u64::try_from(limit).unwrap_or(u64::MAX).saturating_add(1);
        Read::by_ref(self).take(most).read_to_end(&mut bytes)?;
        Ok((bytes.len() <= limit).then_some(bytes))
    }

    /// A response with a body that is already there.
    pub(crate) fn respond(&mut self, status: u16, headers: &[(&str, &str)], body: &[u8]) -> io::Result<()> {
        let mut message = self.response_head(status, headers, Some(body.len() as u64));
        // One write for head and body: one packet, one wake-up of the peer.
        if self.sends_body() {
            message.extend_from_slice(body);
        }
        self.sent = Sent::All;
        self.connection.write_all(&message)
    }

    /// The head of a response whose body follows through [`send`](Self::send): `length` bytes, or as
    /// much as comes until [`finish`](Self::finish).
    pub(crate) fn begin(
        &mut self,
        status: u16,
        headers: &[(&str, &str)],
        length: Option<u64>,
    ) -> io::Result<()> {
        let message = self.response_head(status, headers, length);
        self.sent = match length {
            _ if !self.sends_body() => Sent::All,
            Some(length) => Sent::Bytes(length),
            None if self.head.http_1_0 => Sent::UntilClose,
            None => Sent::Chunks,
        };
        self.connection.write_all(&message)
    }

    /// Sends a piece of the body.
    pub(crate) fn send(&mut self, piece: &[u8]) -> io::Result<()> {
        match self.sent {
            _ if piece.is_empty() => Ok(()),
            Sent::Chunks => {
                let mut message = format!("{:x}\r\n", piece.len()).into_bytes();
                message.extend_from_slice(piece);
                message.extend_from_slice(b"\r\n");
                self.connection.write_all(&message)
            }
            Sent::Bytes(left) => {
                let Some(left) = left.checked_sub(piece.len() as u64) else {
                    return Err(io::Error::other("more body than was announced"));
                };
                self.sent = Sent::Bytes(left);
                self.connection.write_all(piece)
            }
            Sent::UntilClose => self.connection.write_all(piece),
            // The peer asked with HEAD.
            Sent::All => Ok(()),
            Sent::Nothing => Err(io::Error::other("a body before its head")),
        }
    }

    /// Ends the body.
    pub(crate) fn finish(&mut self) -> io::Result<()> {
        match self.sent {
            Sent::Chunks => {
                self.sent = Sent::All;
                self.connection.write_all(b"0\r\n\r\n")
            }
            Sent::Bytes(0) => {
                self.sent = Sent::All;
                Ok(())
            }
            Sent::Bytes(_) => Err(io::Error::other("less body than was announced")),
            Sent::UntilClose | Sent::All => Ok(()),
            Sent::Nothing => Err(io::Error::other("a response without a head")),
        }
    }

    fn sends_body(&self) -> bool {
        self.head.method != "HEAD"
    }

    fn response_head(&self, status: u16, headers: &[(&str, &str)], length: Option<u64>) -> Vec<u8> {
        let mut head = format!("HTTP/1.1 {status} {}\r\n", reason(status));
        for (name, value) in headers {
            // Values are ours, but some carry text of the guest: no line break may get through.
            let value: String = value.chars().filter(|c| !c.is_control()).collect();
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        match length {
            // These never have a body, and must not announce one.
            _ if status == 204 || status == 304 => {}
            Some(length) => head.push_str(&format!("content-length: {length}\r\n")),
            None if self.head.http_1_0 => {}
            None => head.push_str("transfer-encoding: chunked\r\n"),
        }
        if !self.head.keep_alive {
            head.push_str("connection: close\r\n");
        }
        head.push_str("\r\n");
        head.into_bytes()
    }

    /// After the response: whether the connection can carry another request.
    fn complete(mut self) -> bool {
        if self.sent != Sent::All {
            return false;
        }
        // A peer that waits for "continue" may send its body or, having the answer, another request. The two
        // cannot be told apart, so the connection ends.
        let reusable = self.head.keep_alive && !self.continue_due;
        if reusable && self.framing.is_done() {
            return true;
        }
        self.continue_due = false;
        if !reusable {
            self.connection.transport().shutdown_write();
        }
        self.discard_body() && reusable
    }

    /// Reads what is left of the body; `false` if that takes too long.
    fn discard_body(&mut self) -> bool {
        let until = Instant::now() + DISCARD_TIME;
        if self.connection.transport().set_timeouts(Some(DISCARD_TIME), Some(IO_TIME)).is_err() {
            return false;
        }
        let mut piece = [0; READ_AHEAD];
        while !self.framing.is_done() && Instant::now() < until {
            if self.read(&mut piece).is_err() {
                return false;
            }
        }
        self.framing.is_done()
    }
}

impl Read for Exchange<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        self.send_continue()?;
        self.framing.read(&mut |buf| self.connection.read(buf), buf)
    }
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        204 => "No Content",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        409 => "Conflict",
        413 => "Content Too Large",
        415 => "Unsupported Media Type",
        429 => "Too Many Requests",
        431 => "Request Header Fields Too Large",
        500 => "Internal Server Error",
        501 => "Not Implemented",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        505 => "HTTP Version Not Supported",
        507 => "Insufficient Storage",
        _ => "Other",
    }
}

/// Fuzz body: for any input the connection ends, nothing panics, and no body is longer than the input.
pub fn fuzz_request(data: &[u8]) {
    struct Memory<'d>(&'d [u8]);
    impl Read for Memory<'_> {
        fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
            self.0.read(buf)
        }
    }
    impl Write for Memory<'_> {
        fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
            Ok(buf.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    impl Transport for Memory<'_> {
        fn set_timeouts(&self, _: Option<Duration>, _: Option<Duration>) -> io::Result<()> {
            Ok(())
        }
        fn is_gone(&self) -> bool {
            false
        }
        fn has_left(&self) -> bool {
            false
        }
        fn wait_readable(&self, _: Duration) -> io::Result<bool> {
            Ok(true)
        }
        fn shutdown_write(&self) {}
    }
    let mut memory = Memory(data);
    Connection::new(&mut memory).run(&|exchange| {
        let _ = exchange.head().query("path");
        let _ = exchange.head().basic_user();
        let body = exchange.read_to_limit(data.len())?;
        assert!(body.is_some(), "a body is longer than everything that was sent");
        exchange.respond(200, &[], &body.unwrap_or_default())
    });
}

#[cfg(test)]
mod tests;
