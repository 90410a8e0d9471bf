//! Host ⇄ agent: the messages of the services the agent serves over HTTP.
//!
//! | path | kind | request → response |
//! |---|---|---|
//! | `GET /health` | HTTP | 204 |
//! | `GET /files?path=&username=` | HTTP | 200 with the bytes; 404, 400 for a directory |
//! | `POST /files?path=&username=&whole=&mode=` | HTTP, body `application/octet-stream` or a form | [`WrittenFile`] list |
//! | `/process.Process/Start` | server stream | [`StartRequest`] → [`ProcessEvent`]s |
//! | `/process.Process/Connect` | server stream | [`ProcessRef`] → [`ProcessEvent`]s |
//! | `/process.Process/List` | unary | `{}` → [`ProcessList`] |
//! | `/process.Process/SendInput` | unary | [`SendInputRequest`] → `{}` |
//! | `/process.Process/StreamInput` | client stream | [`StreamInputRequest`]s → `{}` |
//! | `/process.Process/CloseStdin` | unary | [`ProcessRef`] → `{}` |
//! | `/process.Process/SendSignal` | unary | [`SendSignalRequest`] → `{}` |
//! | `/process.Process/Update` | unary | [`UpdateRequest`] → `{}` |
//! | `/filesystem.Filesystem/Stat` … `Remove`, `RemoveOne` | unary | [`PathRequest`] and friends |
//! | `/filesystem.Filesystem/WatchDir` | server stream | [`WatchDirRequest`] → [`WatchDirResponse`]s |
//! | `/filesystem.Filesystem/CreateWatcher` | unary | [`WatchDirRequest`] → [`WatcherRef`] |
//! | `/filesystem.Filesystem/GetWatcherEvents` | unary | [`WatcherRef`] → [`WatcherEvents`] |
//! | `/filesystem.Filesystem/RemoveWatcher` | unary | [`WatcherRef`] → `{}` |
//! | `/forkd.Agent/Ping` | unary | `{}` → [`Pong`] |
//! | `/forkd.Agent/Warm` | unary | [`WarmRequest`] → [`WarmStatus`] |
//! | `/forkd.Agent/Usage` | unary | `{}` → [`Usage`] |
//! | `/forkd.Agent/Tree` | server stream | [`TreeRequest`] → [`TreeEntries`]; agents of earlier versions lack it |
//! | `/forkd.Agent/Eval` | unary | [`EvalRequest`] → [`EvalResponse`] |
//! | `/forkd.Agent/Freeze` | unary | [`FreezeRequest`] → [`FreezeResponse`] |
//! | `/forkd.Agent/Thaw` | unary | `{}` → `{}` |
//! | `/forkd.Agent/Name` | unary | [`NameRequest`] → `{}` |
//! | `/forkd.Agent/Become` | unary | [`BecomeRequest`] → [`BecomeResponse`] |
//! | `/forkd.Agent/Shutdown` | unary | `{}` → `{}`, then a clean power-off |
//!
//! Field names are proto3-JSON's (camelCase), absent means default, bytes are base64. The user a
//! call acts as comes as `Authorization: Basic base64("user:")` on process and filesystem calls and
//! as `username` in the query of `/files`; absent means the user that [`DEFAULT_USER_HEADER`] names, if the image
//! has that user, else the agent's default user. The time a
//! command may run comes in `Connect-Timeout-Ms`; when it is over the process is killed and the
//! stream ends with `deadline_exceeded`. A command that cannot start ends it with `invalid_argument` and
//! `exitCode`: 127 if there is no such program, else 126. Agents of earlier versions send no `exitCode`. A client
//! that disconnects does not end its process.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

mod files;
mod proto_json;
mod tree;

pub use files::{
    EntryInfo, EntryList, EntryResponse, FilesystemEvent, ListDirRequest, MAX_ENTRIES, METADATA_HEADER,
    MoveRequest, PathRequest, WatchDirRequest, WatchDirResponse, WatcherEvents, WatcherRef, WrittenFile,
};
use proto_json::{base64_option, decimal, enum_value, nullable, number, some_number};
pub use tree::{MAX_TREE_BATCH, MAX_TREE_ENTRIES, TreeEntries, TreeEntry, TreeRequest, incomplete};

/// The vsock port the agent listens on in a guest.
pub const AGENT_PORT: u32 = 1024;
/// The vsock port on which the agent forwards connections of the host to TCP ports of the guest. The host sends the
/// port as a line (`49999\n`); the agent answers `OK\n`, or `NO ` and the reason as a line, and then passes bytes
/// both ways. Agents of earlier versions do not listen here.
pub const FORWARD_PORT: u32 = 1025;
/// The longest TCP port in such a line, without its end.
pub const FORWARD_LINE: usize = 5;
/// The TCP port of E2B's code interpreter. Connections to it have places that those to other ports do not get.
pub const CODE_PORT: u16 = 49999;
/// Header with the token an agent that listens on TCP asks for.
pub const TOKEN_HEADER: &str = "x-access-token";
/// Header with the user that a call acts as if it names none: a daemon sets it on what E2B clients send, whose
/// default user is `user`. An image without that user is no error. Agents of earlier versions ignore it.
pub const DEFAULT_USER_HEADER: &str = "x-forkd-default-user";

/// A command to run. Arguments go to the program as they are; no shell is involved.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ProcessConfig {
    /// Program: a path, or a name looked up in `PATH`.
    #[serde(deserialize_with = "nullable")]
    pub cmd: String,
    /// Arguments, without the program's own name.
    #[serde(skip_serializing_if = "Vec::is_empty", deserialize_with = "nullable")]
    pub args: Vec<String>,
    /// Variables added to the user's basic environment.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", deserialize_with = "nullable")]
    pub envs: BTreeMap<String, String>,
    /// Working directory; the user's home when absent.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
}

/// Size of a terminal in characters.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PtySize {
    /// Columns.
    #[serde(deserialize_with = "number")]
    pub cols: u32,
    /// Rows.
    #[serde(deserialize_with = "number")]
    pub rows: u32,
}

/// Wish for a terminal.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pty {
    /// Its size.
    #[serde(deserialize_with = "nullable")]
    pub size: PtySize,
}

/// `Process/Start`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StartRequest {
    /// What to run.
    #[serde(deserialize_with = "nullable")]
    pub process: ProcessConfig,
    /// Run it on a terminal of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
    /// A name to find it by later.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `false`: standard input is empty. `true` or absent: a pipe fed by `SendInput`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stdin: Option<bool>,
}

/// Which process: by pid or by tag.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessSelector {
    /// Process id in the guest.
    #[serde(skip_serializing_if = "Option::is_none", deserialize_with = "some_number")]
    pub pid: Option<u32>,
    /// Tag given at start.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// A request that names a process and nothing else.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessRef {
    /// The process.
    #[serde(deserialize_with = "nullable")]
    pub process: ProcessSelector,
}

/// Bytes for, or from, a process: one of the fields is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInput {
    /// For standard input.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub stdin: Option<Vec<u8>>,
    /// For the terminal.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub pty: Option<Vec<u8>>,
}

/// `Process/SendInput`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SendInputRequest {
    /// The process.
    #[serde(deserialize_with = "nullable")]
    pub process: ProcessSelector,
    /// What to write.
    #[serde(deserialize_with = "nullable")]
    pub input: ProcessInput,
}

/// One message of `Process/StreamInput`: one of the fields is set, `start` in the first message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StreamInputRequest {
    /// The process.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<ProcessRef>,
    /// What to write.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub data: Option<InputData>,
    /// Nothing to write for a while; the connection is alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<EmptyMessage>,
}

/// Input, in a message of `Process/StreamInput`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct InputData {
    /// What to write.
    #[serde(deserialize_with = "nullable")]
    pub input: ProcessInput,
}

/// A message without fields.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptyMessage {}

/// `Process/SendSignal`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct SendSignalRequest {
    /// The process.
    #[serde(deserialize_with = "nullable")]
    pub process: ProcessSelector,
    /// `SIGNAL_SIGTERM`, `SIGNAL_SIGKILL`, `SIGNAL_SIGINT`, …: `SIGNAL_` and the signal's name; or its number.
    #[serde(deserialize_with = "enum_value")]
    pub signal: String,
}

/// `Process/Update`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpdateRequest {
    /// The process.
    #[serde(deserialize_with = "nullable")]
    pub process: ProcessSelector,
    /// Its terminal's new size.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pty: Option<Pty>,
}

/// A process the agent started.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessInfo {
    /// Program, arguments and environment.
    pub config: ProcessConfig,
    /// Its pid.
    pub pid: u32,
    /// Its tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
}

/// `Process/List`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ProcessList {
    /// Running processes the agent started.
    pub processes: Vec<ProcessInfo>,
}

/// One message of a `Start` or `Connect` stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEvent {
    /// What happened.
    pub event: Event,
}

/// What happened to a process: `start` first, `end` last, unless the stream ends with an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Event {
    /// It runs.
    Start {
        /// Its pid in the guest.
        pid: u32,
    },
    /// It wrote something.
    Data(Output),
    /// Nothing happened for a while; the connection is alive.
    Keepalive {},
    /// It ended.
    End(End),
}

/// Output of a process: one of the fields is set.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Output {
    /// From standard output.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub stdout: Option<Vec<u8>>,
    /// From standard error.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub stderr: Option<Vec<u8>>,
    /// From the terminal.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub pty: Option<Vec<u8>>,
}

/// How a process ended.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct End {
    /// Exit code; -1 when a signal ended it.
    pub exit_code: i32,
    /// Whether it exited by itself.
    pub exited: bool,
    /// `exit status 7` or `signal: killed`.
    pub status: String,
    /// The same as `status` for anything but success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The signal's number when one ended it (an addition of forkd's: clients ignore it).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
}

/// `Agent/Ping`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Pong {
    /// Version of the agent.
    pub version: String,
    /// Milliseconds since the guest's kernel started.
    pub uptime_ms: u64,
    /// Whether the image has a Python 3.
    pub python: bool,
    /// How far the warm-up is.
    pub warm: WarmStatus,
    /// The version of the numpy that the warm-up imported.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub numpy_version: Option<String>,
}

/// `Agent/Usage`: what the guest uses. Agents of earlier versions do not know it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Usage {
    /// CPUs.
    pub cpu_count: u32,
    /// The share of the last moment in which they were not idle, in percent of all of them.
    pub cpu_used_percent: f64,
    /// Bytes of memory.
    pub memory_total: u64,
    /// Bytes of it that programs cannot have.
    pub memory_used: u64,
    /// Bytes of it that hold files.
    pub memory_cache: u64,
    /// Bytes of the root disk.
    pub disk_total: u64,
    /// Bytes of it in use.
    pub disk_used: u64,
}

/// `Agent/Warm`: start the image's warm-up. A repeated request only returns the progress.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WarmRequest {
    /// A command. It is warm when it has exited with 0, or, if it goes on running, once it has
    /// created the file named by `FORKD_READY_FILE` in its environment.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub command: Vec<String>,
    /// Statements for the warmed Python interpreter, such as `import numpy`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub python: Option<String>,
    /// Whether the command counts as warm once clients can use it: a guest that is in use does not wait for what only
    /// its forks would gain from. The command finds `FORKD_READY_WHEN=usable` in its environment, and the agent starts
    /// no interpreter.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub until_usable: bool,
}

/// How far a warm-up is.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WarmStatus {
    /// Where it stands.
    pub state: WarmState,
    /// Why it failed, if it did, with the tail of its output.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// Where a warm-up stands.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WarmState {
    /// No warm-up was requested.
    #[default]
    Cold,
    /// Under way.
    Warming,
    /// Done: ready to be forked.
    Ready,
    /// It failed.
    Failed,
}

/// `Agent/Freeze`: get ready to be forked. User processes are frozen; only the agent itself runs on, until
/// `Thaw` (in the source) or `Become` (in a child). A freeze whose time is over before it begins is an error,
/// `deadline_exceeded`, and then nothing is frozen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FreezeRequest {
    /// How long all of it may take; 0 means 5 seconds.
    pub timeout_ms: u64,
    /// How much of that time may go to writing dirty file pages to the disk.
    pub sync: FreezeSync,
    /// Whether to freeze the file systems of disks, too, so that a guest that boots on a copy of the disks finds
    /// them clean. They thaw with the processes. Agents of earlier versions do not know it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub file_systems: bool,
}

/// Whether `Freeze` also syncs the file systems. A branch is consistent without a sync, because it has memory with all
/// dirty file pages, and the disk, of one instant. A sync saves its children the writes. So a freeze never fails because
/// of a sync.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FreezeSync {
    /// As much as a part of the time allows: for a guest that goes on at once.
    #[default]
    Quick,
    /// As much as the whole time allows: for a guest with many children.
    Full,
    /// Not at all: for a guest that may have no copies.
    Skip,
}

/// The result of a `Freeze`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct FreezeResponse {
    /// Whether every user process stands still. If not, nothing is frozen.
    pub frozen: bool,
    /// Whether the file systems of all disks are frozen, and everything is on the disks.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub file_systems: bool,
}

/// `Agent/Name`: the first call in a guest that was booted, before any user process runs. Its boot id becomes
/// its own, as `Become` has it: a later `Become` with the same sandbox id, after a rollback, leaves that as it is.
/// Agents of earlier versions do not know it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NameRequest {
    /// As in [`BecomeRequest::sandbox_id`].
    pub sandbox_id: String,
    /// As in [`BecomeRequest::envs`]. Agents of earlier versions do not know it.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
}

/// `Agent/Become`: the first call in a forked child. In this order: the kernel's random numbers are
/// reseeded, the clock is set, host name, machine id, boot id and sandbox id become the child's own,
/// inherited TCP connections are reset, hooks in [`FORK_HOOKS`] run, a warmed interpreter in which functions wait
/// for it learns that it was forked, user processes thaw, hooks in [`FORK_HOOKS_AFTER`] run. The same
/// request again, with another time or not, changes nothing and gets the same warnings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BecomeRequest {
    /// The sandbox's id: in `/run/forkd/sandbox-id`, and in `FORKD_SANDBOX_ID` of every process started from
    /// now on.
    pub sandbox_id: String,
    /// Its host name.
    pub hostname: String,
    /// Its `/etc/machine-id`: 32 lower-case hexadecimal digits.
    pub machine_id: String,
    /// The host's clock when this was sent, in nanoseconds since 1970. As a string, as proto3's
    /// JSON writes 64-bit numbers.
    #[serde(with = "decimal")]
    pub unix_nanos: u64,
    /// Entropy for the kernel, at least 32 bytes.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub entropy: Option<Vec<u8>>,
    /// Variables added to the environment of every process started from now on: the place for
    /// secrets, which are given after the fork.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
}

/// The folder of programs that are run in a child, in the order of their names, once it is its own and
/// while its user processes are still frozen.
pub const FORK_HOOKS: &str = "/etc/forkd/forked.d";

/// The folder of those that run after user processes were thawed.
pub const FORK_HOOKS_AFTER: &str = "/etc/forkd/forked.d/after";

/// A child that is its own.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct BecomeResponse {
    /// The guest's clock when this was sent, in nanoseconds since 1970.
    #[serde(with = "decimal")]
    pub unix_nanos: u64,
    /// Whether the image has a Python 3.
    pub python: bool,
    /// What did not work but does not keep the child from running, such as a hook that failed.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// `Agent/Eval`: Python source for the warmed interpreter. The namespace persists.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EvalRequest {
    /// An expression, or statements; a last expression's value is the result.
    pub code: String,
}

/// What an evaluation gave. `Json` is the type of its value: a caller that does not trust the agent keeps the
/// text, because parsed values take many times its room.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default, bound(deserialize = "Json: Deserialize<'de> + Default"))]
pub struct EvalResponse<Json = serde_json::Value> {
    /// `repr` of the value; absent for statements and for `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result: Option<String>,
    /// The value as JSON, when it is made of JSON's own types.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub result_json: Option<Json>,
    /// Its standard output.
    pub stdout: String,
    /// Its standard error.
    pub stderr: String,
    /// `NameError: name 'x' is not defined`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The traceback that goes with `error`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub traceback: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What an E2B client sends and expects, byte for byte: see their captured requests.
    #[test]
    fn process_messages_have_the_shape_e2b_clients_speak() {
        let request: StartRequest = serde_json::from_str(
            r#"{"process":{"cmd":"/bin/bash","args":["-l","-c","echo hi"]},"stdin":false}"#,
        )
        .unwrap();
        assert_eq!(request.process.args, ["-l", "-c", "echo hi"]);
        assert_eq!(request.stdin, Some(false));

        let start = ProcessEvent { event: Event::Start { pid: 8 } };
        assert_eq!(serde_json::to_string(&start).unwrap(), r#"{"event":{"start":{"pid":8}}}"#);
        let data = Event::Data(Output { stdout: Some(b"hi\n".to_vec()), ..Output::default() });
        assert_eq!(
            serde_json::to_string(&ProcessEvent { event: data }).unwrap(),
            r#"{"event":{"data":{"stdout":"aGkK"}}}"#
        );
        let keepalive = ProcessEvent { event: Event::Keepalive {} };
        assert_eq!(serde_json::to_string(&keepalive).unwrap(), r#"{"event":{"keepalive":{}}}"#);
        let end = End { exit_code: 0, exited: true, status: "exit status 0".into(), ..End::default() };
        assert_eq!(
            serde_json::to_string(&ProcessEvent { event: Event::End(end) }).unwrap(),
            r#"{"event":{"end":{"exitCode":0,"exited":true,"status":"exit status 0"}}}"#
        );
    }
}
