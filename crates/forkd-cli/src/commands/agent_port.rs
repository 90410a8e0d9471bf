//! `forkd agent-port`, and `exec`, `eval` and `ping` with `--target`: the JSON-lines protocol.

use std::io;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

use super::events::Parser;
use super::exec::status;
use super::{Context, with_daemon};
use crate::args::{AgentPortArgs, AgentTargetArgs};
use crate::client::Streaming;
use crate::compat::json_lines::{self, LineRequest};
use crate::compat::relay::{AgentPort, PREFIX, Relay, VerifiedDaemon};
use crate::host::process;
use crate::stream::signals::Forwarded;
use crate::ui;

/// The interval of checks whether the sandboxes still run, if the daemon sends no event.
const POLL_WITH_EVENTS: Duration = Duration::from_secs(60);
/// The same interval without a stream of events.
const POLL_WITHOUT_EVENTS: Duration = Duration::from_secs(2);
/// How long the daemon may be unreachable, as during a restart.
const AWAY_TIMEOUT: Duration = Duration::from_secs(30);

/// Serves ports until their sandboxes have ended, or a signal comes.
pub(crate) fn serve(context: &Context, args: &AgentPortArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let mut signals = Forwarded::listen()?;
        let known = VerifiedDaemon::new(context, daemon);
        let work = async {
            let relays = open(context, &known, args).await?;
            close_with(&known, relays).await
        };
        tokio::select! {
            caught = signals.next() => Ok(caught.status()),
            ended = work => ended.map(|()| 0),
        }
    })
}

/// Opens a port for each sandbox and prints the addresses. Unknown sandboxes are reported now, not to the
/// clients that connect.
async fn open(context: &Context, known: &VerifiedDaemon, args: &AgentPortArgs) -> Result<Vec<Relay>> {
    let list = known.daemon()?.ask(Method::GET, "/v1/sandboxes", None).await?;
    let (alive, gone): (Vec<&String>, Vec<&String>) = args.ids.iter().partition(|id| is_alive(&list, id));
    if alive.is_empty() {
        bail!("there is no sandbox {}; `forkd ls` lists running ones", gone[0]);
    }
    for id in gone {
        context.ui.warn(format!("there is no sandbox {id}: it gets no port"));
    }
    process::raise_file_limit();
    let mut wanted = args.listen;
    let mut relays = Vec::new();
    for id in alive {
        relays.push(Relay::serve(Relay::bind(wanted.take()).await?, known.clone(), id)?);
    }
    if args.answer.json {
        let target = |relay: &Relay| AgentPort { id: relay.id.clone(), target: relay.target.to_string() };
        ui::print(&serde_json::to_string(&relays.iter().map(target).collect::<Vec<_>>())?)?;
    } else {
        for relay in &relays {
            ui::print(&format!("{PREFIX}{}  # {}", relay.target, relay.id))?;
        }
    }
    Ok(relays)
}

/// Closes each port when its sandbox has ended; returns when all have.
async fn close_with(known: &VerifiedDaemon, mut relays: Vec<Relay>) -> Result<()> {
    let mut seen = Instant::now();
    loop {
        // Subscribe first: then an event reports each sandbox that ends after the list.
        let events = async { known.daemon()?.follow("/v1/events?follow=true&kind=sandbox.ended").await };
        let events = events.await;
        let listed = async { known.daemon()?.call(Method::GET, "/v1/sandboxes", None).await };
        match listed.await {
            Ok((StatusCode::OK, list)) => {
                relays.extract_if(.., |relay| !is_alive(&list, &relay.id)).for_each(Relay::close);
                seen = Instant::now();
            }
            // A token that may not list sandboxes any more cannot forward requests either.
            Ok((status @ (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN), why)) => {
                bail!(
                    "the daemon does not accept requests of these ports any more ({status}): {}",
                    why["error"]
                );
            }
            Ok((status, why)) if seen.elapsed() > AWAY_TIMEOUT => bail!("the daemon answers {status}: {why}"),
            Err(error) if seen.elapsed() > AWAY_TIMEOUT => return Err(error),
            _ => {}
        }
        if relays.is_empty() {
            return Ok(());
        }
        if let Ok(events) = events {
            let _ = tokio::time::timeout(POLL_WITH_EVENTS, one_ended(events, &relays)).await;
        }
        // Never poll more often, whatever happens.
        tokio::time::sleep(POLL_WITHOUT_EVENTS).await;
    }
}

/// Returns when an event reports that one of these sandboxes has ended, or when the stream ends.
async fn one_ended(mut stream: Streaming, relays: &[Relay]) -> Result<()> {
    let mut parser = Parser::default();
    while let Some(bytes) = stream.next().await? {
        let events = parser.feed(&bytes)?;
        let is_ours = |data: &Value| relays.iter().any(|relay| data["sandbox"] == relay.id.as_str());
        if events.iter().any(|(kind, data)| kind == "lagged" || is_ours(data)) {
            break;
        }
    }
    Ok(())
}

/// Whether a sandbox is in the list, and has not ended.
fn is_alive(list: &Value, id: &str) -> bool {
    let sandboxes = list.as_array().into_iter().flatten();
    sandboxes.filter(|sandbox| sandbox["id"] == id).any(|sandbox| sandbox["state"] != "ended")
}

/// Runs a command and returns its status.
pub(super) fn exec(
    context: &Context,
    target: &AgentTargetArgs,
    question: &LineRequest,
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
    target: &AgentTargetArgs,
    question: &LineRequest,
    as_json: bool,
) -> Result<u8> {
    let answer = ask(context, target, question)?;
    if as_json {
        ui::print_json(&answer)?;
        return Ok(exit_code(&answer));
    }
    ui::write_raw(&mut io::stdout().lock(), text(&answer, "stdout").as_bytes())?;
    ui::write_raw(&mut io::stderr().lock(), text(&answer, "stderr").as_bytes())?;
    // Prefer the JSON value, which agents of other languages send.
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

/// Prints the agent's reply.
pub(super) fn ping(context: &Context, target: &AgentTargetArgs) -> Result<u8> {
    let answer = ask(context, target, &json_lines::ping_request())?;
    ui::print_json(&answer)?;
    Ok(u8::from(answer.get("pong") != Some(&json!(true))))
}

fn ask(context: &Context, target: &AgentTargetArgs, question: &LineRequest) -> Result<Value> {
    if target.child.is_some() {
        context.ui.note("--child has no effect: every sandbox has its own network; give its ID");
    }
    let target = target.target.as_deref().context("give the ID of a sandbox, or --target HOST:PORT")?;
    json_lines::ask(target, question)
}

fn text<'a>(answer: &'a Value, key: &str) -> &'a str {
    answer.get(key).and_then(Value::as_str).unwrap_or_default()
}

/// The exit status of a reply: an error without a status counts as a failure.
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
