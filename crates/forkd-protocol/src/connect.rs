//! The Connect protocol's JSON encoding: envelopes for streams, codes for errors.
//!
//! An envelope is one flag byte, a big-endian `u32` length and that many bytes of JSON. A stream
//! ends with an envelope whose flags have [`END_STREAM`] set, holding `{}` or `{"error": …}`.

use serde::{Deserialize, Serialize};

/// Content type of a unary call, both ways.
pub const UNARY_TYPE: &str = "application/json";
/// Content type of a stream, both ways. Clients compare it exactly: no charset suffix.
pub const STREAM_TYPE: &str = "application/connect+json";
/// Header with the time a call may take, in milliseconds.
pub const TIMEOUT_HEADER: &str = "connect-timeout-ms";
/// Flag of the last envelope of a stream.
pub const END_STREAM: u8 = 0x02;
/// Bytes before an envelope's payload.
pub const HEADER_LEN: usize = 5;
/// The longest payload accepted in one envelope. Output is sent in far smaller pieces; input this
/// long is a mistake or an attack.
pub const MAX_PAYLOAD: usize = 4 << 20;

/// Why a call failed, as Connect names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The caller gave up.
    Canceled,
    /// Anything without a better name.
    Unknown,
    /// The request itself is wrong.
    InvalidArgument,
    /// The time allowed ran out.
    DeadlineExceeded,
    /// No such process, file or method.
    NotFound,
    /// Already there.
    AlreadyExists,
    /// Not allowed.
    PermissionDenied,
    /// A limit was reached.
    ResourceExhausted,
    /// Not in a state in which this can be done.
    FailedPrecondition,
    /// Interrupted by something concurrent.
    Aborted,
    /// Past the end.
    OutOfRange,
    /// The server does not know the method.
    Unimplemented,
    /// The server is at fault.
    Internal,
    /// Try again later.
    Unavailable,
    /// Data is gone.
    DataLoss,
    /// The caller is not authenticated.
    Unauthenticated,
}

impl Code {
    /// The HTTP status a unary call fails with.
    pub fn http_status(self) -> u16 {
        match self {
            Code::Canceled => 499,
            Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => 400,
            Code::DeadlineExceeded => 504,
            Code::NotFound => 404,
            Code::AlreadyExists | Code::Aborted => 409,
            Code::PermissionDenied => 403,
            Code::ResourceExhausted => 429,
            Code::Unimplemented => 501,
            Code::Unavailable => 503,
            Code::Unauthenticated => 401,
            Code::Unknown | Code::Internal | Code::DataLoss => 500,
        }
    }
}

/// A failed call: the body of a unary error, and the `error` of an end-of-stream envelope.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure.
    pub code: Code,
    /// What happened and what to do about it.
    #[serde(default)]
    pub message: String,
    /// Of a command that did not start: the exit status a shell gives for that. See [`exit_code`].
    #[serde(default, rename = "exitCode", skip_serializing_if = "Option::is_none")]
    pub exit_code: Option<i32>,
}

impl Error {
    /// An error with `code` and `message`.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Error { code, message: message.into(), exit_code: None }
    }

    /// The same error, of a command that did not start.
    #[must_use]
    pub fn with_exit_code(self, exit_code: i32) -> Self {
        Error { exit_code: Some(exit_code), ..self }
    }
}

/// Exit statuses of commands that did not start, as shells have them.
pub mod exit_code {
    /// The program is there and cannot be executed, or the request for it cannot be fulfilled.
    pub const CANNOT_EXECUTE: i32 = 126;
    /// There is no such program.
    pub const NOT_FOUND: i32 = 127;
}

/// The payload of an end-of-stream envelope.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct EndStream {
    /// Why the stream failed, if it did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<Error>,
}

/// One envelope of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Envelope {
    /// [`END_STREAM`] or 0.
    pub flags: u8,
    /// JSON.
    pub payload: Vec<u8>,
}

/// Puts `message` into an envelope with `flags`.
pub fn encode<T: Serialize>(flags: u8, message: &T) -> Vec<u8> {
    // Our message types hold only strings, numbers, lists and maps with string keys, which always
    // serialise; an empty object keeps the stream well-formed should that ever change.
    let payload = serde_json::to_vec(message).unwrap_or_else(|_| b"{}".to_vec());
    let mut out = Vec::with_capacity(HEADER_LEN + payload.len());
    out.push(flags);
    out.extend_from_slice(&(payload.len() as u32).to_be_bytes());
    out.extend_from_slice(&payload);
    out
}

/// Cuts a byte stream into envelopes, however the bytes arrive.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    /// Bytes of `buffer` that were given out. They go with the next `push`, all at once: moving the
    /// rest for every envelope would let a peer that sends small ones cost us far more than itself.
    taken: usize,
}

impl Decoder {
    /// An empty decoder.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes as they came from the peer.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.taken);
        self.taken = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole envelope, `None` if more bytes are needed. After an error the stream cannot
    /// be read on: the peer does not speak Connect.
    pub fn next_envelope(&mut self) -> Result<Option<Envelope>, Error> {
        let left = &self.buffer[self.taken..];
        let Some((header, rest)) = left.split_first_chunk::<HEADER_LEN>() else { return Ok(None) };
        let flags = header[0];
        if flags & !END_STREAM != 0 {
            let message = format!("unknown envelope flags {flags:#04x}: compression is not supported");
            return Err(Error::new(Code::Unimplemented, message));
        }
        let len = u32::from_be_bytes([header[1], header[2], header[3], header[4]]) as usize;
        if len > MAX_PAYLOAD {
            let message = format!("a message of {len} bytes is over the limit of {MAX_PAYLOAD}");
            return Err(Error::new(Code::ResourceExhausted, message));
        }
        let Some(payload) = rest.get(..len) else { return Ok(None) };
        let payload = payload.to_vec();
        self.taken += HEADER_LEN + len;
        Ok(Some(Envelope { flags, payload }))
    }

    /// Whether no bytes are left.
    pub fn is_empty(&self) -> bool {
        self.buffer.len() == self.taken
    }
}

/// Fuzz body: whatever the bytes and however they are cut, decoding ends, and what was decoded
/// encodes back to the same bytes.
pub fn fuzz_decoder(data: &[u8]) {
    let Some((&cut, bytes)) = data.split_first() else { return };
    let mut decoder = Decoder::new();
    let mut seen = 0;
    for piece in bytes.chunks(usize::from(cut).max(1)) {
        decoder.push(piece);
        loop {
            match decoder.next_envelope() {
                Ok(Some(envelope)) => {
                    assert_eq!(bytes[seen + HEADER_LEN..][..envelope.payload.len()], envelope.payload[..]);
                    seen += HEADER_LEN + envelope.payload.len();
                }
                Ok(None) => break,
                Err(_) => return,
            }
        }
    }
    assert!(seen <= bytes.len());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn envelopes_survive_being_cut_anywhere() {
        let mut bytes = encode(0, &serde_json::json!({"a": 1}));
        bytes.extend(encode(END_STREAM, &EndStream::default()));
        for cut in 1..bytes.len() {
            let mut decoder = Decoder::new();
            let mut seen = Vec::new();
            for piece in bytes.chunks(cut) {
                decoder.push(piece);
                while let Some(envelope) = decoder.next_envelope().unwrap() {
                    seen.push(envelope);
                }
            }
            assert_eq!(seen.len(), 2);
            assert_eq!(seen[0].payload, br#"{"a":1}"#);
            assert_eq!(seen[1], Envelope { flags: END_STREAM, payload: b"{}".to_vec() });
            assert!(decoder.is_empty());
        }
    }

    #[test]
    fn an_error_carries_the_exit_status_of_a_command_that_did_not_start() {
        let plain = Error::new(Code::InvalidArgument, "no");
        assert_eq!(serde_json::to_string(&plain).unwrap(), r#"{"code":"invalid_argument","message":"no"}"#);
        let refused = plain.with_exit_code(exit_code::NOT_FOUND);
        let text = serde_json::to_string(&refused).unwrap();
        assert_eq!(text, r#"{"code":"invalid_argument","message":"no","exitCode":127}"#);
        assert_eq!(serde_json::from_str::<Error>(&text).unwrap(), refused);
        // An agent of an earlier version does not send it.
        let old: Error = serde_json::from_str(r#"{"code":"invalid_argument","message":"no"}"#).unwrap();
        assert_eq!(old.exit_code, None);
    }

    #[test]
    fn many_small_envelopes_cost_no_more_than_their_bytes() {
        let mut decoder = Decoder::new();
        decoder.push(&[0; HEADER_LEN].repeat(1 << 20));
        let mut count = 0;
        while decoder.next_envelope().unwrap().is_some() {
            count += 1;
        }
        assert_eq!(count, 1 << 20);
        assert!(decoder.is_empty());
    }

    #[test]
    fn a_length_no_honest_peer_sends_is_refused_before_memory_is_spent() {
        let mut decoder = Decoder::new();
        decoder.push(&[0, 0xff, 0xff, 0xff, 0xff]);
        assert_eq!(decoder.next_envelope().unwrap_err().code, Code::ResourceExhausted);
    }

    #[test]
    fn what_fuzzing_found_stays_harmless() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/connect_decoder");
        let inputs: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!inputs.is_empty(), "{folder} is empty");
        inputs.iter().for_each(|path| fuzz_decoder(&std::fs::read(path).unwrap()));
    }
}
