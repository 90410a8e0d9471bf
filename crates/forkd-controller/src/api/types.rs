//! What the REST API's bodies hold.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `GET /healthz`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// True.
    pub ok: bool,
}

/// `GET /version`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct VersionInfo {
    /// The daemon's version.
    pub version: String,
    /// The API's version: the first part of its paths.
    pub api: String,
    /// Where the daemon itself listens for TCP clients, such as `127.0.0.1:8889`.
    pub address: String,
}

/// A sandbox to make.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CreateRequest {
    /// Name of an image (`forkd image ls`).
    pub image: String,
    /// Number of vCPUs; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default, 512, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Run the image's warm-up before answering.
    #[serde(default)]
    pub warm: bool,
    /// Delete it this many seconds after it has started; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
}

/// Where a sandbox stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// It boots.
    Starting,
    /// Its agent answers.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// It is over; only its description is left, until it is deleted.
    Ended,
}

/// What is known of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SandboxInfo {
    /// `sb` and lower-case letters and digits.
    pub id: String,
    /// The image it was booted from.
    pub image: String,
    /// Where it stands.
    pub state: SandboxState,
    /// How it ended, in one word: `powered_off`, `reset`, `panicked`, `failed`, `monitor_died`,
    /// `boot_failed` or `deleted`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// How it ended, in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The end of its console, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_tail: Option<String>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory in MiB.
    pub mem_size_mib: u64,
    /// Its process on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How long it took from the start of its process until it was ready, its warm-up included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// Whether its image has a Python to evaluate code with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<bool>,
    /// When it was created, in seconds since 1970.
    pub created_at_unix: u64,
}

/// A command to run to its end.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExecRequest {
    /// Program and arguments; no shell is involved.
    pub args: Vec<String>,
    /// Seconds after which it is killed; 30 when absent.
    #[serde(default = "default_timeout")]
    pub timeout_secs: u64,
    /// Variables added to the user's basic environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User it runs as; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Its standard input; empty when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

/// How a command ended. One that was killed because its time ran out also gets this answer, with
/// what it had written until then.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExecReply {
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are replaced.
    pub stderr: String,
    /// What a shell would say: the exit status; 128 and the signal's number; 124 when its time ran
    /// out; 126 or 127 when it could not be started.
    pub exit_code: i32,
    /// The signal that ended it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Why it did not run, or not to its own end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether it was killed because its time ran out.
    #[serde(default)]
    pub timed_out: bool,
    /// Whether there was more standard output than is kept.
    #[serde(default)]
    pub stdout_truncated: bool,
    /// Whether there was more standard error than is kept.
    #[serde(default)]
    pub stderr_truncated: bool,
}

/// Python to evaluate.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct EvalRequest {
    /// An expression, or statements; a last expression's value is the result. The namespace lasts
    /// as long as the sandbox.
    pub code: String,
    /// Seconds after which it is interrupted; 30 when absent.
    #[serde(default = "default_timeout")]
    pub timeout_secs: u64,
}

/// What an evaluation gave.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct EvalReply {
    /// `repr` of the value; null for statements and for `None`.
    pub result: Option<String>,
    /// `NameError: name 'x' is not defined`, or that its time ran out; null if all went well.
    pub error: Option<String>,
    /// 0, 1 if there is an error, 124 when its time ran out.
    pub exit_code: i32,
    /// What it printed.
    pub stdout: String,
    /// What it printed to standard error.
    pub stderr: String,
    /// The traceback that goes with `error`.
    pub traceback: Option<String>,
    /// The value as JSON, when it is made of JSON's own types.
    #[schema(value_type = Option<Object>)]
    pub result_json: Option<serde_json::Value>,
}

fn default_timeout() -> u64 {
    30
}
