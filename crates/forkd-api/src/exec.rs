//! Commands and evaluations that answer when they are over. Streams are in `stream`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

/// A command to run to its end.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub result_json: Option<Box<RawValue>>,
}

fn default_timeout() -> u64 {
    30
}
