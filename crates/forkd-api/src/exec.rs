//! Commands and evaluations whose reply comes after they end. Streamed commands are in `stream`.

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
    /// Seconds after which the command is killed; 30 when absent.
    #[serde(default = "default_timeout")]
    pub timeout_secs: u64,
    /// Variables added to the user's basic environment.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub env: BTreeMap<String, String>,
    /// Working directory; the user's home when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cwd: Option<String>,
    /// User the command runs as; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The command's standard input; empty when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
}

/// How a command ended. A command killed at its timeout also gets this reply, with its output up to then.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecReply {
    /// Standard output; bytes that are not UTF-8 are replaced.
    pub stdout: String,
    /// Standard error; bytes that are not UTF-8 are replaced.
    pub stderr: String,
    /// The exit status as a shell reports it: the command's own status; 128 plus the signal's number; 124 after a
    /// timeout; 126 or 127 if the command could not be started.
    pub exit_code: i32,
    /// The signal that ended the command.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signal: Option<i32>,
    /// Why the command did not run, or did not run to its end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Whether the command was killed because of its timeout.
    #[serde(default)]
    pub timed_out: bool,
    /// Whether standard output was longer than the limit, and is cut.
    #[serde(default)]
    pub stdout_truncated: bool,
    /// Whether standard error was longer than the limit, and is cut.
    #[serde(default)]
    pub stderr_truncated: bool,
}

/// Python code to evaluate.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct EvalRequest {
    /// An expression, or statements; the result is the value of the last expression. Variables last as long as the
    /// sandbox.
    pub code: String,
    /// Seconds after which the evaluation is interrupted; 30 when absent.
    #[serde(default = "default_timeout")]
    pub timeout_secs: u64,
}

/// The result of an evaluation.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EvalReply {
    /// `repr` of the value; null for statements and for `None`.
    pub result: Option<String>,
    /// The error, such as `NameError: name 'x' is not defined`, or the timeout; null on success.
    pub error: Option<String>,
    /// 0 on success, 1 after an error, 124 after a timeout.
    pub exit_code: i32,
    /// Standard output of the code.
    pub stdout: String,
    /// Standard error of the code.
    pub stderr: String,
    /// The traceback of `error`.
    pub traceback: Option<String>,
    /// The value as JSON, if it consists of types that JSON has.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub result_json: Option<Box<RawValue>>,
}

fn default_timeout() -> u64 {
    30
}
