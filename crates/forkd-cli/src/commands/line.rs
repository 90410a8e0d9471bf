//! `forkd line`, and `exec`, `eval` and `ping` with `--target`: the line protocol.

use std::io;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::exec::status;
use super::{Context, with_daemon};
use crate::args::{LineArgs, LineTargetArgs};
use crate::line::{self, Question, Relay};
use crate::signals::Forwarded;
use crate::ui;

/// Serves a port until a signal comes.
pub(crate) fn line(context: &Context, args: &LineArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let mut signals = Forwarded::listen()?;
        // Whether there is such a sandbox is said now, not to whoever connects.
        let path = crate::api::sandbox_path(&args.sandbox.id);
        daemon.ask(hyper::Method::GET, &path, None).await?;
        let relay = Relay::serve(Relay::bind(args.listen).await?, daemon, &args.sandbox.id)?;
        match args.answer.json {
            true => ui::print_json(&json!({ "id": args.sandbox.id, "target": relay.target().to_string() }))?,
            false => ui::print(&format!("FORKD_TARGET={}", relay.target()))?,
        }
        tokio::select! {
            caught = signals.next() => Ok(caught.status()),
            () = relay.ended() => Ok(1),
        }
    })
}

/// Runs a command and returns its status.
pub(super) fn exec(
    context: &Context,
    target: &LineTargetArgs,
    question: &Question,
    as_json: bool,
) -> Result<u8> {
    let answer = ask(context, target, question)?;
    if as_json {
        ui::print_json(&answer)?;
    } else {
        ui::write_raw(&mut io::stdout().lock(), text(&answer, "stdout").as_bytes())?;
        ui::write_raw(&mut io::stderr().lock(), text(&answer, "stderr").as_bytes())?;
        if let Some(error) = answer.get("error").and_then(Value::as_str) {
            context.ui.warn(error);
        }
    }
    Ok(exit_code(&answer))
}

/// Evaluates code and returns 0, or 1 if it raised.
pub(super) fn eval(
    context: &Context,
    target: &LineTargetArgs,
    question: &Question,
    as_json: bool,
) -> Result<u8> {
    let answer = ask(context, target, question)?;
    if as_json {
        ui::print_json(&answer)?;
        return Ok(exit_code(&answer));
    }
    ui::write_raw(&mut io::stdout().lock(), text(&answer, "stdout").as_bytes())?;
    ui::write_raw(&mut io::stderr().lock(), text(&answer, "stderr").as_bytes())?;
    // The value as another language's agent has it comes first.
    let value = answer.get("result_json").or_else(|| answer.get("result"));
    if let Some(value) = value.filter(|value| !value.is_null()) {
        ui::print(value.as_str().unwrap_or(&value.to_string()))?;
    }
    let why = ["traceback", "stack", "error"].iter().find_map(|key| answer.get(key)?.as_str());
    if let Some(why) = why {
        context.ui.warn(why);
    }
    Ok(exit_code(&answer))
}

/// Prints what the agent says.
pub(super) fn ping(context: &Context, target: &LineTargetArgs) -> Result<u8> {
    let answer = ask(context, target, &line::ping_request())?;
    ui::print_json(&answer)?;
    Ok(u8::from(answer.get("pong") != Some(&json!(true))))
}

fn ask(context: &Context, target: &LineTargetArgs, question: &Question) -> Result<Value> {
    if target.child.is_some() {
        context.ui.note("--child has no meaning here: every sandbox has a network of its own; give its ID");
    }
    let target = target.target.as_deref().context("give the ID of a sandbox, or --target HOST:PORT")?;
    line::ask(target, question)
}

fn text<'a>(answer: &'a Value, key: &str) -> &'a str {
    answer.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The status of what was asked for: with an error and without one of its own it is a failure.
fn exit_code(answer: &Value) -> u8 {
    let code = answer.get("exit_code").and_then(Value::as_i64);
    let code = code.unwrap_or_else(|| i64::from(answer.get("error").is_some()));
    status(i32::try_from(code).unwrap_or(-1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_without_a_status_is_a_failure_only_if_it_says_so() {
        let code = |answer: Value| exit_code(&answer);
        assert_eq!(code(json!({ "result": "42" })), 0);
        assert_eq!(code(json!({ "error": "no" })), 1);
        assert_eq!(code(json!({ "error": "no", "exit_code": 127 })), 127);
        assert_eq!(code(json!({ "exit_code": 1i64 << 40 })), 255);
    }
}
