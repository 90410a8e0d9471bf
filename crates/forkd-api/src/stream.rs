//! Messages on the WebSockets of `GET /v1/run` and `GET /v1/sandboxes/{id}/exec/stream`, for the daemon and the
//! `forkd` command.
//!
//! 1. The client's first message is text: a [`RunRequest`] or an [`ExecStreamRequest`].
//! 2. The server answers with text, one [`ServerEvent`] each (`progress` …, `started`), and with
//!    binary frames: one [`Channel`] byte, then output.
//! 3. The client sends binary frames (channel byte 0, then input) and text, one [`ClientMessage`]
//!    each.
//! 4. The last event is `exit` or `error`; then the server closes.
//!
//! **Input has a window.** A client has at most [`STDIN_WINDOW`] bytes of input without an acknowledgement. The
//! server sends [`ServerEvent::StdinAck`] when the command takes input. So signals and the close reach a command that
//! never reads its input, and the daemon holds no more than the window. Output needs no window: the server reads from the
//! guest only as much as the client takes.
//!
//! When the connection ends, the sandbox of a `run` ends, and so does the command of an `exec/stream` without `keep`.

use std::collections::BTreeMap;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// The most input, in bytes, that a client may have sent without an acknowledgement.
pub const STDIN_WINDOW: usize = 256 << 10;
/// The most bytes in one binary frame, without the channel byte.
pub const MAX_CHUNK: usize = 64 << 10;
/// The longest text message of a client, in bytes.
pub const MAX_TEXT: usize = 1 << 20;

/// The first byte of a binary frame: the content of the rest.
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

/// Builds a binary frame with `data` on `channel`.
pub fn pack(channel: Channel, data: &[u8]) -> Bytes {
    let mut frame = BytesMut::with_capacity(1 + data.len());
    frame.put_u8(channel as u8);
    frame.put_slice(data);
    frame.freeze()
}

/// Splits a binary frame; `None` if its first byte is not a channel.
pub fn unpack(mut frame: Bytes) -> Option<(Channel, Bytes)> {
    let channel = match frame.first()? {
        0 => Channel::Stdin,
        1 => Channel::Stdout,
        2 => Channel::Stderr,
        _ => return None,
    };
    Some((channel, frame.split_off(1)))
}

/// A command, and the sandbox to create for it.
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
    /// Run the command on a terminal of this size. All its output then comes on [`Channel::Stdout`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tty: Option<TtySize>,
    /// Whether the sandbox has a network; true when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
}

/// A command to run in an existing sandbox.
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
    /// Run the command on a terminal of this size. All its output then comes on [`Channel::Stdout`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pty: Option<TtySize>,
    /// Let the command run on when the connection ends; its output after that is lost.
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
    /// Progress, as text for people.
    Progress {
        /// The step that the daemon does now.
        message: String,
    },
    /// The command runs.
    Started {
        /// The id of the command's sandbox.
        sandbox: String,
        /// The command's process id in the guest.
        pid: u32,
    },
    /// The command took input: the client may send as many bytes again.
    StdinAck {
        /// Number of bytes.
        bytes: usize,
    },
    /// The command ended. The last event.
    Exit {
        /// The exit status as a shell reports it: the command's own status, 128 plus the signal's number, or 124
        /// after a timeout.
        exit_code: i32,
        /// The signal that ended the command.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        signal: Option<i32>,
        /// Whether the command was killed because of its timeout.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        timed_out: bool,
    },
    /// The command could not run, or not to its end. The last event.
    Error {
        /// What happened and what to do.
        message: String,
        /// The HTTP status of the error, such as 404 for an image that does not exist.
        status: u16,
        /// The reason, for programs.
        #[serde(default)]
        #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
        code: String,
        /// The id of the request that opened the WebSocket. The daemon's log has the cause under this id.
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
    /// The input ends.
    StdinEof,
    /// Send a signal to the command.
    Signal {
        /// The signal's name, such as `SIGINT`.
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
