//! What travels over the WebSockets of `GET /v1/run` and `GET /v1/sandboxes/{id}/exec/stream`: used by the
//! daemon and by the `forkd` command.
//!
//! 1. The client's first message is text: a [`RunRequest`] or an [`ExecStreamRequest`].
//! 2. The server answers with text, one [`ServerEvent`] each (`progress` …, `started`), and with
//!    binary frames: one [`Channel`] byte, then output as it comes.
//! 3. The client sends binary frames (channel byte 0, then input) and text, one [`ClientMessage`]
//!    each.
//! 4. The last event is `exit` or `error`; then the server closes.
//!
//! **Input has a window.** A client has at most [`STDIN_WINDOW`] bytes of input under way; the
//! server gives room back with [`ServerEvent::StdinAck`] as the command takes them. So a command
//! that never reads its input does not keep a signal or a hang-up from being seen behind it, and
//! the daemon never holds more than the window. Output needs no window: the server reads no more
//! from the guest than the client takes.
//!
//! The sandbox of a `run` lives as long as the connection, whichever way that ends; so does the command of an
//! `exec/stream`, unless it is to be kept.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// How many bytes of input a client may have sent that were not acknowledged yet.
pub const STDIN_WINDOW: usize = 256 << 10;
/// The most bytes in one binary frame, the channel byte not counted.
pub const MAX_CHUNK: usize = 64 << 10;
/// The longest text message of a client.
pub const MAX_TEXT: usize = 1 << 20;

/// The first byte of a binary frame: what the rest of it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Channel {
    /// Standard input, or the terminal's input. Client to server.
    Stdin = 0,
    /// Standard output, or the terminal's output. Server to client.
    Stdout = 1,
    /// Standard error. Server to client.
    Stderr = 2,
}

/// A binary frame of `data` on `channel`.
pub fn pack(channel: Channel, data: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(1 + data.len());
    frame.put_u8(channel as u8);
    frame.put_slice(data);
    frame.freeze()
}

/// Takes a binary frame apart; `None` if its first byte names no channel.
pub fn unpack(mut frame: Bytes) -> Option<(Channel, Bytes)> {
    let channel = match frame.first()? {
        0 => Channel::Stdin,
        1 => Channel::Stdout,
        2 => Channel::Stderr,
        _ => return None,
    };
    Some((channel, frame.split_off(1)))
}

/// What to run, and in what.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RunRequest {
    /// Name of an image (`forkd image ls`).
    pub image: String,
    /// Program and arguments; no shell is involved.
    pub args: Vec<String>,
    /// Variables added to the user's basic environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User the command runs as; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Number of vCPUs; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Seconds after which the command is killed; no limit when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Run it on a terminal of this size. Everything it writes then comes on [`Channel::Stdout`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<TtySize>,
    /// Whether the sandbox has a network; it has when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
}

/// What to run in a sandbox that is there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ExecStreamRequest {
    /// Program and arguments; no shell is involved.
    pub args: Vec<String>,
    /// Variables added to the user's basic environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User the command runs as; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Seconds after which the command is killed; no limit when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Run it on a terminal of this size. Everything it writes then comes on [`Channel::Stdout`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TtySize>,
    /// Let the command run on when the connection ends; what it writes after that is lost.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep: bool,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TtySize {
    /// Columns.
    pub cols: u16,
    /// Rows.
    pub rows: u16,
}

/// A text message of the server.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum ServerEvent {
    /// For people who wait.
    Progress {
        /// What is being done.
        message: String,
    },
    /// The command runs.
    Started {
        /// The sandbox it runs in.
        sandbox: String,
        /// Its pid in there.
        pid: u32,
    },
    /// The command took input: as many bytes may be sent again.
    StdinAck {
        /// How many.
        bytes: usize,
    },
    /// The command ended. The last event.
    Exit {
        /// What a shell would say: the exit status, 128 and the signal's number, or 124 when its
        /// time ran out.
        exit_code: i32,
        /// The signal that ended it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// Whether it was killed because its time ran out.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        timed_out: bool,
    },
    /// It could not be run, or not to its end. The last event.
    Error {
        /// What happened and what to do.
        message: String,
        /// The HTTP status that goes with it: 404 for an image that is not there.
        status: u16,
        /// Why, for programs.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
        code: String,
        /// The id of the request that began the conversation: the daemon's log has the cause under it.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(required = true))]
        request_id: String,
    },
}

/// A text message of the client, after the first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClientMessage {
    /// No more input.
    StdinEof,
    /// Send the command a signal.
    Signal {
        /// Such as `SIGINT`.
        signal: String,
    },
    /// The terminal has a new size.
    Resize {
        /// Columns.
        cols: u16,
        /// Rows.
        rows: u16,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_apart_as_it_was_put_together() {
        let frame = pack(Channel::Stderr, b"oops");
        assert_eq!(&frame[..], b"\x02oops");
        assert_eq!(unpack(frame), Some((Channel::Stderr, Bytes::from_static(b"oops"))));
        assert_eq!(unpack(pack(Channel::Stdin, b"")), Some((Channel::Stdin, Bytes::new())));
        assert_eq!(unpack(Bytes::new()), None);
        assert_eq!(unpack(Bytes::from_static(&[9, 1])), None);
    }

    #[test]
    fn messages_have_the_shape_clients_rely_on() {
        let text = |event: &ServerEvent| serde_json::to_string(event).unwrap();
        let exit = ServerEvent::Exit { exit_code: 130, signal: Some(2), timed_out: false };
        assert_eq!(text(&exit), r#"{"event":"exit","exit_code":130,"signal":2}"#);
        let started = ServerEvent::Started { sandbox: "sb1".into(), pid: 7 };
        assert_eq!(text(&started), r#"{"event":"started","sandbox":"sb1","pid":7}"#);
        assert_eq!(text(&ServerEvent::StdinAck { bytes: 9 }), r#"{"event":"stdin_ack","bytes":9}"#);
        let eof: ClientMessage = serde_json::from_str(r#"{"type":"stdin_eof"}"#).unwrap();
        assert_eq!(eof, ClientMessage::StdinEof);
        let signal: ClientMessage = serde_json::from_str(r#"{"type":"signal","signal":"SIGINT"}"#).unwrap();
        assert_eq!(signal, ClientMessage::Signal { signal: "SIGINT".into() });
    }
}
