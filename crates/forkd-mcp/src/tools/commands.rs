//! Tools that run commands and code in a sandbox.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forkd_api::{EvalReply, ExecReply, MAX_TIMEOUT_SECS};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Caller, Effect, Entry, Outcome, entry, sandbox_path, without_nulls};
use crate::api::ApiRequest;
use crate::limit;
use crate::tool_error::ToolError;

/// How long the daemon may take beside the command's own timeout.
const BESIDE: Duration = Duration::from_secs(90);
/// How to get output that was cut.
const HOW: &str = "to get all of it, run it again with the output in a file (`CMD > /tmp/out 2>&1`), and read that \
                   with read_file and its offset";

pub(super) fn tools() -> Vec<Entry> {
    vec![
        entry(
            "exec_command",
            "Run a command",
            Effect::Runs,
            "Run a command in a sandbox to its end, and return stdout, stderr and the exit code. No shell is \
             involved: for pipes and globs, use [\"sh\", \"-c\", \"…\"]. Start a server in the background: \
             [\"sh\", \"-c\", \"nohup server > /tmp/server.log 2>&1 &\"].",
            exec_command,
        ),
        entry(
            "run_code",
            "Run code",
            Effect::Runs,
            "Run a program in a sandbox and return what it prints, the value of its last expression and its error. \
             Python runs in the sandbox's warmed interpreter: variables and imports stay for the next call, and for \
             children of a fork. `shell` runs with sh, `javascript` with node.",
            run_code,
        ),
        entry(
            "eval_code",
            "Evaluate Python",
            Effect::Runs,
            "Evaluate Python in the sandbox's warmed interpreter, and return the value of the last expression: its \
             repr as `result`, and as JSON in `result_json`. Variables stay for the next call.",
            eval_code,
        ),
        entry(
            "wait_for_text",
            "Wait for a text in a file",
            Effect::Reads,
            "Wait until the end of a file in a sandbox contains a text, such as the line of a log that says that a \
             server is ready. Returns whether it was found, the milliseconds, and the end of the file.",
            wait_for_text,
        ),
    ]
}

fn thirty() -> u64 {
    30
}

/// A command to run.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ExecCommand {
    /// Id of the sandbox; list_sandboxes shows the ids.
    #[serde(skip_serializing)]
    sandbox_id: String,
    /// Program and arguments, such as ["python3", "-c", "print(6 * 7)"].
    args: Vec<String>,
    /// Seconds after which the command is killed.
    #[serde(default = "thirty")]
    timeout_secs: u64,
    /// Working directory; the user's home when absent.
    cwd: Option<String>,
    /// Variables for the command.
    env: Option<BTreeMap<String, String>>,
    /// Standard input; empty when absent.
    stdin: Option<String>,
    /// User the command runs as; the image's default when absent.
    user: Option<String>,
}

async fn exec_command(caller: Caller, args: ExecCommand) -> Result<Outcome, ToolError> {
    let path = format!("{}/exec", sandbox_path(&args.sandbox_id)?);
    let body = without_nulls(json!(args));
    let reply = caller.json(ApiRequest::post(path, body).within(patience(args.timeout_secs))).await?;
    Ok(Outcome::object(&caller, reply, HOW))
}

fn patience(timeout_secs: u64) -> Duration {
    Duration::from_secs(timeout_secs.min(MAX_TIMEOUT_SECS)) + BESIDE
}

/// Python to evaluate.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct EvalCode {
    /// Id of the sandbox; list_sandboxes shows the ids.
    #[serde(skip_serializing)]
    sandbox_id: String,
    /// An expression, or statements whose last may be an expression.
    code: String,
    /// Seconds after which the evaluation is interrupted.
    #[serde(default = "thirty")]
    timeout_secs: u64,
}

async fn eval_code(caller: Caller, args: EvalCode) -> Result<Outcome, ToolError> {
    let mut reply = evaluate(&caller, &args).await?;
    // A long list as JSON has no middle that could be cut.
    if reply["result_json"].to_string().len() > caller.output_limit / 2 {
        reply["result_json"] = Value::Null;
    }
    Ok(Outcome::object(&caller, reply, "print a part of the value, or write it to a file and use read_file"))
}

async fn evaluate(caller: &Caller, args: &EvalCode) -> Result<Value, ToolError> {
    let path = format!("{}/eval", sandbox_path(&args.sandbox_id)?);
    caller.json(ApiRequest::post(path, json!(args)).within(patience(args.timeout_secs))).await
}

/// A language that a sandbox may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Language {
    /// In the warmed interpreter.
    #[default]
    Python,
    /// With sh.
    Shell,
    /// With node, if the image has it.
    Javascript,
}

/// A program to run.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RunCode {
    /// Id of the sandbox; list_sandboxes shows the ids.
    sandbox_id: String,
    /// The program.
    code: String,
    /// Language of the program: `python`, `shell` or `javascript`.
    #[serde(default)]
    language: Language,
    /// Seconds after which the program is stopped.
    #[serde(default = "thirty")]
    timeout_secs: u64,
}

/// What a program did.
#[derive(Debug, Default, Serialize)]
struct Execution {
    stdout: String,
    stderr: String,
    /// The value of the last expression.
    value: Option<String>,
    error: Option<String>,
    exit_code: i32,
}

async fn run_code(caller: Caller, args: RunCode) -> Result<Outcome, ToolError> {
    let mut done = match args.language {
        Language::Python => {
            let code =
                EvalCode { sandbox_id: args.sandbox_id, code: args.code, timeout_secs: args.timeout_secs };
            let reply: EvalReply = parsed(evaluate(&caller, &code).await?)?;
            let EvalReply { result, error, exit_code, stdout, stderr, traceback, .. } = reply;
            Execution { stdout, stderr, value: result, error: traceback.or(error), exit_code }
        }
        Language::Shell | Language::Javascript => {
            let program: &[&str] =
                if args.language == Language::Shell { &["sh", "-s"] } else { &["node", "-"] };
            let path = format!("{}/exec", sandbox_path(&args.sandbox_id)?);
            let body = json!({ "args": program, "stdin": args.code, "timeout_secs": args.timeout_secs });
            let reply = caller.json(ApiRequest::post(path, body).within(patience(args.timeout_secs))).await?;
            let ExecReply { stdout, stderr, exit_code, error, .. } = parsed(reply)?;
            Execution { stdout, stderr, value: None, error, exit_code }
        }
    };
    // A quarter of the limit for each part: together they fit.
    let part = caller.output_limit / 5;
    let texts = [Some(&mut done.stdout), Some(&mut done.stderr), done.value.as_mut(), done.error.as_mut()];
    for text in texts.into_iter().flatten() {
        *text = limit::cut_middle(text, part, HOW);
    }
    let mut structured = json!(done);
    limit::fit(&mut structured, caller.output_limit, HOW);
    Ok(Outcome::text(transcript(&done), structured))
}

fn parsed<T: serde::de::DeserializeOwned>(reply: Value) -> Result<T, ToolError> {
    serde_json::from_value(reply)
        .map_err(|_| ToolError::new("reply_unreadable", "the daemon has another version than this server"))
}

/// What a person would see in a terminal.
fn transcript(done: &Execution) -> String {
    let mut parts = Vec::new();
    for (title, text) in [
        ("stdout", Some(&done.stdout)),
        ("stderr", Some(&done.stderr)),
        ("value", done.value.as_ref()),
        ("error", done.error.as_ref()),
    ] {
        if let Some(text) = text.filter(|text| !text.is_empty()) {
            parts.push(format!("{title}:\n{}", text.trim_end_matches('\n')));
        }
    }
    if done.exit_code != 0 {
        parts.push(format!("exit code: {}", done.exit_code));
    }
    if parts.is_empty() { "done, without output".into() } else { parts.join("\n\n") }
}

/// A text to wait for.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WaitForText {
    /// Id of the sandbox; list_sandboxes shows the ids.
    sandbox_id: String,
    /// Absolute path of the file. It need not exist yet.
    path: String,
    /// The text.
    marker: String,
    /// The longest wait in seconds, at most 3600.
    #[serde(default = "sixty")]
    timeout_secs: f64,
    /// Milliseconds between two looks, at least 50.
    #[serde(default = "two_hundred")]
    poll_interval_ms: u64,
}

fn sixty() -> f64 {
    60.0
}

fn two_hundred() -> u64 {
    200
}

/// How much of the end of the file is searched. It contains every text that was written between two looks, usually.
const TAIL: usize = 64 << 10;
/// How much of the end of the file is returned, in characters.
const EXCERPT: usize = 256;

async fn wait_for_text(caller: Caller, args: WaitForText) -> Result<Outcome, ToolError> {
    let url = format!("{}/exec", sandbox_path(&args.sandbox_id)?);
    if args.marker.is_empty() || args.marker.len() > TAIL {
        return Err(ToolError::invalid(format!("the marker must have 1 to {TAIL} bytes")));
    }
    if !args.path.starts_with('/') || args.path.contains('\0') {
        return Err(ToolError::invalid("the path is not absolute; begin it with /"));
    }
    // The path is an argument, and no part of a shell's program. A file that is not there yet is empty.
    let script = format!("test -r \"$1\" && exec tail -c {TAIL} -- \"$1\"; exit 0");
    let body = json!({ "args": ["sh", "-c", script, "sh", args.path], "timeout_secs": 10 });
    let limit = Duration::from_secs_f64(args.timeout_secs.clamp(0.0, 3600.0));
    let interval = Duration::from_millis(args.poll_interval_ms.clamp(50, 60_000));
    let begun = Instant::now();
    loop {
        let reply = caller.json(ApiRequest::post(url.as_str(), body.clone())).await?;
        let ExecReply { stdout, stderr, exit_code, .. } = parsed(reply)?;
        if exit_code != 0 {
            let text = format!("the file cannot be read (exit code {exit_code}): {}", stderr.trim());
            return Err(ToolError::new("guest_failed", text));
        }
        let found = stdout.contains(&args.marker);
        if found || begun.elapsed() + interval > limit {
            let skipped = stdout.chars().count().saturating_sub(EXCERPT);
            let excerpt: String = stdout.chars().skip(skipped).collect();
            let elapsed = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
            let result = json!({ "found": found, "elapsed_ms": elapsed, "last_excerpt": excerpt });
            return Ok(Outcome::object(&caller, result, "read_file reads the whole file"));
        }
        tokio::time::sleep(interval).await;
    }
}
