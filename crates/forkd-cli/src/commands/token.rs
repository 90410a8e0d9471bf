//! `forkd token`: the daemon's own token, and named tokens.

use anyhow::{Context as _, Result};
use forkd_api::TokenRequest;
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, report, runtime, with_daemon};
use crate::args::{AnswerArgs, TokenAddArgs, TokenCommand, TokenPrintArgs, TokenRmArgs, TokenRotateArgs};
use crate::client::discover;
use crate::client::types::{self, Token};
use crate::host::clock;
use crate::machine::Machine;
use crate::ui;

/// The path of all tokens.
const PATH: &str = "/v1/tokens";

/// Runs the subcommand.
pub(crate) fn token(context: &Context, command: &TokenCommand) -> Result<u8> {
    match command {
        TokenCommand::Print(args) => print(context, args).map(|()| 0),
        TokenCommand::Add(args) => add(context, args),
        TokenCommand::Ls(args) => list(context, args),
        TokenCommand::Rm(args) => remove(context, args),
        TokenCommand::Rotate(args) => rotate(context, args),
    }
}

fn add(context: &Context, args: &TokenAddArgs) -> Result<u8> {
    show_new(context, &args.answer, PATH, &json!(request(args)))
}

fn request(args: &TokenAddArgs) -> TokenRequest {
    TokenRequest {
        name: args.name.clone(),
        scope: args.scope.into(),
        owner: args.owner.clone(),
        max_sandboxes: args.max_sandboxes,
        max_memory_mib: args.max_memory_mib,
        max_snapshots: args.max_snapshots,
        expires_in_secs: args.expires_in,
    }
}

fn rotate(context: &Context, args: &TokenRotateArgs) -> Result<u8> {
    show_new(context, &args.answer, &format!("{PATH}/{}/rotate", args.name), &json!({}))
}

/// Requests a token and prints only it, for scripts.
fn show_new(context: &Context, answer: &AnswerArgs, path: &str, body: &Value) -> Result<u8> {
    with_daemon(context, &answer.daemon, async |daemon| {
        let made = daemon.ask(Method::POST, path, Some(body)).await?;
        if answer.json {
            ui::print_json(&made)?;
            return Ok(0);
        }
        let secret = made.get("token").and_then(Value::as_str);
        ui::print(
            secret
                .context("the daemon's reply has no token; restart the daemon if it has another version")?,
        )?;
        context.ui.note("this token is not printed again");
        Ok(0)
    })
}

fn list(context: &Context, args: &AnswerArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let answer = daemon.ask(Method::GET, PATH, None).await?;
        if args.json {
            ui::print_json(&answer)?;
        } else {
            ui::print(&render(&types::read::<Vec<Token>>(&answer)?, clock::now()))?;
        }
        Ok(0)
    })
}

/// Removes tokens; a failure does not stop the others.
fn remove(context: &Context, args: &TokenRmArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let remove = async |name: &str| daemon.ask(Method::DELETE, &format!("{PATH}/{name}"), None).await;
        report(context.ui, args.answer.json, types::for_each(&args.names, remove).await, "removed")
    })
}

fn render(tokens: &[Token], now: u64) -> String {
    let limit = |max: Option<u64>| max.map_or_else(|| "-".to_owned(), |max| max.to_string());
    let row = |token: &Token| {
        vec![
            token.name.clone(),
            // A daemon of version 0.2 uses the older name.
            if token.scope == "use" { "write".to_owned() } else { token.scope.clone() },
            token.owner.clone(),
            limit(token.max_sandboxes),
            limit(token.max_memory_mib),
            limit(token.max_snapshots),
            match token.expires_at_unix {
                None => "never".to_owned(),
                Some(at) if at <= now => "expired".to_owned(),
                Some(at) => format!("in {}", ui::age(at - now)),
            },
        ]
    };
    let header = ["NAME", "SCOPE", "OWNER", "SANDBOXES", "MEMORY MIB", "SNAPSHOTS", "EXPIRES"];
    ui::table(&header, &tokens.iter().map(row).collect::<Vec<_>>())
}

/// Prints the token of the daemon that the other commands use.
fn print(context: &Context, args: &TokenPrintArgs) -> Result<()> {
    let Context { data, ui } = context;
    let runtime = runtime()?;
    let found = match runtime.block_on(discover::find(data, &args.answer.daemon, *ui))? {
        Some(daemon) => daemon,
        None => {
            let machine = Machine::new(data, *ui);
            let running = machine.running()?.context(
                "no daemon runs: start one with `sudo forkd serve`, or the emulated machine with `forkd machine start`",
            )?;
            machine.daemon(&running.state)?
        }
    };
    let token = discover::token(data, &found)?;
    if args.answer.json {
        let url = runtime.block_on(found.http_url())?;
        return ui::print_json(&serde_json::json!({ "token": token, "url": url }));
    }
    ui::print(&token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_listed_with_their_limits_and_when_they_expire() {
        let tokens: Vec<Token> = types::read(&json!([
            { "name": "default", "scope": "admin", "owner": "local", "created_at_unix": 1 },
            { "name": "ci", "scope": "use", "owner": "ann", "created_at_unix": 1, "max_sandboxes": 3,
              "max_memory_mib": 512, "max_snapshots": 0, "expires_at_unix": 160 },
            { "name": "cd", "scope": "write", "owner": "ann", "created_at_unix": 1 },
            { "name": "old", "scope": "read", "owner": "ann", "created_at_unix": 1, "expires_at_unix": 100 },
        ]))
        .unwrap();
        let expected = "\
NAME     SCOPE  OWNER  SANDBOXES  MEMORY MIB  SNAPSHOTS  EXPIRES
default  admin  local  -          -           -          never
ci       write  ann    3          512         0          in 1 min
cd       write  ann    -          -           -          never
old      read   ann    -          -           -          expired";
        assert_eq!(render(&tokens, 100), expected);
    }
}
