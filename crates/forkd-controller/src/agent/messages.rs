//! The messages of a server stream.

use forkd_protocol::connect::{Decoder, END_STREAM, EndStream};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use serde::de::DeserializeOwned;

use super::connection::Connection;
use super::{Error, Result, parse};

/// A server stream. Dropping it closes its connection.
#[derive(Debug)]
pub(super) struct Messages {
    /// Kept because dropping it closes the connection.
    connection: Connection,
    body: Incoming,
    decoder: Decoder,
    ended: bool,
}

impl Messages {
    pub(super) fn new(connection: Connection, body: Incoming) -> Self {
        Messages { connection, body, decoder: Decoder::new(), ended: false }
    }

    /// The next message; `None` after the last one. Cancel-safe.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            if self.ended {
                return Ok(None);
            }
            let envelope = self.decoder.next_envelope().map_err(|error| Error::Protocol(error.message))?;
            if let Some(envelope) = envelope {
                if envelope.flags & END_STREAM == 0 {
                    return parse(&envelope.payload).map(Some);
                }
                self.ended = true;
                match parse::<EndStream>(&envelope.payload)?.error {
                    Some(error) => return Err(error.into()),
                    None => continue,
                }
            }
            match self.body.frame().await {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        self.decoder.push(data);
                    }
                }
                Some(Err(error)) => return Err(self.connection.broken(&error)),
                None => {
                    let text = "the connection ended in the middle of a stream";
                    return Err(Error::Unreachable(text.into()));
                }
            }
        }
    }
}
