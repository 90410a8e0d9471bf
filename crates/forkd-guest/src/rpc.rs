//! Connect calls over HTTP: reading requests, answering, and streams of messages.

use std::{
    io::{self, Read},
    time::{Duration, Instant},
};

use forkd_protocol::connect::{
    Code, Decoder, END_STREAM, EndStream, Error, HEADER_LEN, MAX_PAYLOAD, STREAM_TYPE, TIMEOUT_HEADER,
    UNARY_TYPE, encode,
};
use serde::{Serialize, de::DeserializeOwned};

use crate::http::{Exchange, Head};

/// Bytes of a client stream that are read at once.
const PIECE: usize = 16 << 10;
/// How often a silent stream looks whether its peer is still there.
pub(crate) const PEER_TICK: Duration = Duration::from_secs(2);
/// Default interval of keepalive messages on a silent stream.
const KEEPALIVE: Duration = Duration::from_secs(90);

/// Answers a unary call.
pub(crate) fn unary<Q: DeserializeOwned, A: Serialize>(
    exchange: &mut Exchange,
    call: impl FnOnce(Q, &Head) -> Result<A, Error>,
) -> io::Result<()> {
    watched(exchange, |request, exchange| call(request, exchange.head()))
}

/// Answers a unary call that checks whether its caller still waits.
pub(crate) fn watched<Q: DeserializeOwned, A: Serialize>(
    exchange: &mut Exchange,
    call: impl FnOnce(Q, &Exchange) -> Result<A, Error>,
) -> io::Result<()> {
    let answer = read_body(exchange, MAX_PAYLOAD)?
        .and_then(|body| parse(&body))
        .and_then(|request| call(request, exchange));
    match answer {
        Ok(answer) => {
            let body = serde_json::to_vec(&answer).map_err(io::Error::other)?;
            exchange.respond(200, &[("content-type", UNARY_TYPE)], &body)
        }
        Err(error) => fail(exchange, &error),
    }
}

/// Answers a unary call with an error.
pub(crate) fn fail(exchange: &mut Exchange, error: &Error) -> io::Result<()> {
    refuse(exchange, error.code.http_status(), &[], error)
}

/// Answers a call with an error, under a status that is not the one of the error's code.
pub(crate) fn refuse(
    exchange: &mut Exchange,
    status: u16,
    headers: &[(&str, &str)],
    error: &Error,
) -> io::Result<()> {
    let body = serde_json::to_vec(error).map_err(io::Error::other)?;
    exchange.respond(status, &[&[("content-type", UNARY_TYPE)], headers].concat(), &body)
}

/// Reads the one message with which a server stream begins.
pub(crate) fn stream_request<Q: DeserializeOwned>(exchange: &mut Exchange) -> io::Result<Result<Q, Error>> {
    if let Err(error) = check_stream(exchange.head()) {
        return Ok(Err(error));
    }
    Ok(read_body(exchange, HEADER_LEN + MAX_PAYLOAD)?.and_then(|body| {
        let mut decoder = Decoder::new();
        decoder.push(&body);
        match decoder.next_envelope()? {
            Some(envelope) => parse(&envelope.payload),
            None => Err(Error::new(Code::InvalidArgument, "the request has no message")),
        }
    }))
}

/// The time the caller gives this call; `None` if it sets no limit.
pub(crate) fn timeout(head: &Head) -> Result<Option<Duration>, Error> {
    let Some(value) = head.header(TIMEOUT_HEADER) else { return Ok(None) };
    match value.parse() {
        // Clients that mean "no limit" send 0 or leave the header out.
        Ok(0) => Ok(None),
        Ok(ms) => Ok(Some(Duration::from_millis(ms))),
        Err(_) => {
            let message = format!("{TIMEOUT_HEADER}: {value:?} is not a number of milliseconds");
            Err(Error::new(Code::InvalidArgument, message))
        }
    }
}

/// How long a stream may be silent before it sends a keepalive.
pub(crate) fn keepalive(head: &Head) -> Duration {
    let seconds = head.header("keepalive-ping-interval").and_then(|value| value.parse().ok());
    seconds.filter(|seconds| *seconds > 0).map_or(KEEPALIVE, Duration::from_secs)
}

/// Clients compress only for servers that offer it.
fn check_uncompressed(head: &Head) -> Result<(), Error> {
    for header in ["content-encoding", "connect-content-encoding"] {
        if head.header(header).is_some_and(|value| !value.is_empty() && value != "identity") {
            return Err(Error::new(Code::Unimplemented, "compressed requests are not supported"));
        }
    }
    Ok(())
}

fn check_stream(head: &Head) -> Result<(), Error> {
    if head.content_type() != Some(STREAM_TYPE) {
        let message = format!("this call is a stream: its content type is {STREAM_TYPE}");
        return Err(Error::new(Code::InvalidArgument, message));
    }
    check_uncompressed(head)
}

fn read_body(exchange: &mut Exchange, limit: usize) -> io::Result<Result<Vec<u8>, Error>> {
    if let Err(error) = check_uncompressed(exchange.head()) {
        return Ok(Err(error));
    }
    match exchange.read_to_limit(limit) {
        Ok(Some(body)) => Ok(Ok(body)),
        Ok(None) => {
            let message = format!("the request is over the limit of {limit} bytes");
            Ok(Err(Error::new(Code::ResourceExhausted, message)))
        }
        Err(error) if error.kind() == io::ErrorKind::InvalidData => {
            Ok(Err(Error::new(Code::InvalidArgument, error.to_string())))
        }
        Err(error) => Err(error),
    }
}

fn parse<Q: DeserializeOwned>(body: &[u8]) -> Result<Q, Error> {
    // No body is a message with nothing in it.
    let body = if body.trim_ascii().is_empty() { b"{}" } else { body };
    serde_json::from_slice(body).map_err(|error| {
        Error::new(Code::InvalidArgument, format!("the request is not the JSON this call takes: {error}"))
    })
}

/// The messages of a client stream, as they come.
pub(crate) struct ClientStream<'x, 'e> {
    exchange: &'x mut Exchange<'e>,
    decoder: Decoder,
    until: Option<Instant>,
}

/// What a client stream gives next.
pub(crate) enum NextMessage<Q> {
    Message(Q),
    End,
    /// Nothing came in the time given.
    Idle,
}

impl<'x, 'e> ClientStream<'x, 'e> {
    pub(crate) fn begin(exchange: &'x mut Exchange<'e>) -> Result<Self, Error> {
        check_stream(exchange.head())?;
        let until = timeout(exchange.head())?.and_then(|limit| Instant::now().checked_add(limit));
        Ok(ClientStream { exchange, decoder: Decoder::new(), until })
    }

    /// The next message. The outer error is that of a connection that cannot go on.
    pub(crate) fn next<Q: DeserializeOwned>(
        &mut self,
        wait: Duration,
    ) -> io::Result<Result<NextMessage<Q>, Error>> {
        loop {
            match self.decoder.next_envelope() {
                Ok(Some(envelope)) if envelope.flags == END_STREAM => return Ok(Ok(NextMessage::End)),
                Ok(Some(envelope)) => return Ok(parse(&envelope.payload).map(NextMessage::Message)),
                Ok(None) => {}
                Err(error) => return Ok(Err(error)),
            }
            let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(Err(Error::new(Code::DeadlineExceeded, "the time of this call is over")));
            }
            if !self.exchange.wait_readable(wait.min(left.unwrap_or(wait)))? {
                return Ok(Ok(NextMessage::Idle));
            }
            let mut piece = [0; PIECE];
            match self.exchange.read(&mut piece) {
                Ok(0) if self.decoder.is_empty() => return Ok(Ok(NextMessage::End)),
                Ok(0) => {
                    return Ok(Err(Error::new(Code::InvalidArgument, "the last message is not complete")));
                }
                Ok(n) => self.decoder.push(&piece[..n]),
                Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                    return Ok(Err(Error::new(Code::InvalidArgument, error.to_string())));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Whether the client takes no answer any more.
    pub(crate) fn peer_is_gone(&self) -> bool {
        self.exchange.peer_is_gone()
    }
}

/// The response side of a server stream. Errors ride in its last message, under status 200: that is
/// where clients look.
pub(crate) struct Outgoing<'x, 'e> {
    exchange: &'x mut Exchange<'e>,
}

impl<'x, 'e> Outgoing<'x, 'e> {
    pub(crate) fn begin(exchange: &'x mut Exchange<'e>) -> io::Result<Self> {
        exchange.wait_for_slow_reader()?;
        exchange.begin(200, &[("content-type", STREAM_TYPE)], None)?;
        Ok(Outgoing { exchange })
    }

    pub(crate) fn send<M: Serialize>(&mut self, message: &M) -> io::Result<()> {
        self.exchange.send(&encode(0, message))
    }

    pub(crate) fn peer_is_gone(&self) -> bool {
        self.exchange.peer_is_gone()
    }

    pub(crate) fn end(self, error: Option<Error>) -> io::Result<()> {
        self.exchange.send(&encode(END_STREAM, &EndStream { error }))?;
        self.exchange.finish()
    }
}
