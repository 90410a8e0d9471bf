//! `forkd snapshot-diff`: builds a snapshot on another one, by a command in a child.

use std::collections::BTreeMap;
use std::io;

use anyhow::{Context as _, Result, bail};
use forkd_api::{Code, ExecReply, ExecRequest};
use hyper::Method;
use serde_json::{Value, json};

use super::branch::{self, WantedBranch};
use super::{Context, exec, fork, sandboxes, with_daemon};
use crate::args::{BranchMode, SnapshotDiffArgs};
use crate::client::types::{self, Spawned};
use crate::client::{Daemon, Refused};
use crate::stream::signals::Forwarded;
use crate::ui::{self, Ui};

/// How much longer than its command the child may live: the time to store it.
const STORING_SECS: u64 = 3600;

/// Creates the snapshot and returns the exit status.
pub(crate) fn snapshot_diff(context: &Context, args: &SnapshotDiffArgs) -> Result<u8> {
    let ui = context.ui;
    with_daemon(context, &args.answer.daemon, async |daemon| {
        refuse_taken(&daemon, &args.tag).await?;
        // Before the spawn, so that ^C leaves no child behind.
        let mut signals = Forwarded::listen()?;
        let (spawned, mut caught) = match signals.finish(spawn(&daemon, args, ui)).await {
            Ok((spawned, caught)) => (spawned?, caught),
            Err(caught) => return Ok(caught.status()),
        };
        let mut made = None;
        if caught.is_none() {
            tokio::select! {
                done = change_and_keep(&daemon, &spawned, args, ui) => made = Some(done),
                signal = signals.next() => caught = Some(signal),
            }
        }
        for error in sandboxes::kill_all(&daemon, &[spawned]).await {
            ui.warn(error);
        }
        match (made, caught) {
            (Some(answer), _) => show(&answer?, args.answer.json).map(|()| 0),
            (None, caught) => {
                ui.warn(format!(
                    "interrupted; if the daemon was storing the snapshot, `forkd rmi {}` removes it",
                    args.tag
                ));
                Ok(caught.map_or(1, |caught| caught.status()))
            }
        }
    })
}

/// Refuses a used tag before any work is done.
async fn refuse_taken(daemon: &Daemon, tag: &str) -> Result<()> {
    match daemon.ask(Method::GET, &types::snapshot_path(tag), None).await {
        Err(error) if Refused::is(&error, Code::SnapshotNotFound) => Ok(()),
        Err(error) => Err(error),
        Ok(_) => bail!("snapshot {tag} exists: choose another tag, or remove it with `forkd rmi {tag}`"),
    }
}

/// Spawns a child, which the daemon ends if this process cannot.
async fn spawn(daemon: &Daemon, args: &SnapshotDiffArgs, ui: Ui) -> Result<String> {
    let lifetime = args.exec_timeout_secs.saturating_add(STORING_SECS).min(forkd_api::MAX_TIMEOUT_SECS);
    let body = json!({ "snapshot_tag": args.from, "n": 1, "timeout_secs": lifetime });
    let spawned: Spawned = types::read(&fork::spawn_children(daemon, &body, ui).await?)?;
    let child = spawned.children.into_iter().next();
    Ok(child.context("the daemon started no child and gives no reason; see its log")?.id)
}

/// Runs the command in the child; keeps what it changed if it succeeded.
async fn change_and_keep(daemon: &Daemon, id: &str, args: &SnapshotDiffArgs, ui: Ui) -> Result<Value> {
    let request = ExecRequest {
        args: ["sh", "-c", &args.exec].map(str::to_owned).into(),
        timeout_secs: args.exec_timeout_secs,
        env: BTreeMap::new(),
        cwd: None,
        user: None,
        stdin: None,
    };
    let running = ui.spinner(format!("running the command in {id}"));
    let path = format!("{}/exec", types::sandbox_path(id));
    let reply: ExecReply =
        types::read(&daemon.ask(Method::POST, &path, Some(&serde_json::to_value(&request)?)).await?)?;
    drop(running);
    if args.answer.json {
        // Standard output is only for the JSON.
        exec::show_exec(&reply, &mut io::stderr().lock(), "--timeout-secs", ui)?;
    } else {
        exec::show_exec(&reply, &mut io::stdout().lock(), "--timeout-secs", ui)?;
    }
    if reply.exit_code != 0 {
        bail!("the command ended with status {}: snapshot {} was not created", reply.exit_code, args.tag);
    }
    branch::take(daemon, &WantedBranch { id, tag: Some(&args.tag), mode: BranchMode::Diff, wait: true }, ui)
        .await
}

fn show(answer: &Value, json: bool) -> Result<()> {
    if json { ui::print_json(answer) } else { ui::print(&branch::describe(&types::read(answer)?)) }
}
