//! `forkd workspace`: named sandboxes that can be suspended and resumed.

use anyhow::Result;
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, report, with_daemon};
use crate::args::{
    AnswerArgs, WorkspaceArgs, WorkspaceCommand, WorkspaceCreateArgs, WorkspaceRmArgs, WorkspaceSuspendArgs,
};
use crate::client::types::{self, Workspace};
use crate::host::clock;
use crate::ui;

/// The path of all workspaces.
const PATH: &str = "/v1/workspaces";

/// Runs the subcommand.
pub(crate) fn workspace(context: &Context, command: &WorkspaceCommand) -> Result<u8> {
    match command {
        WorkspaceCommand::Create(args) => create(context, args),
        WorkspaceCommand::Ls(args) => list(context, args),
        WorkspaceCommand::Suspend(args) => suspend(context, args),
        WorkspaceCommand::Resume(args) => resume(context, args),
        WorkspaceCommand::Rm(args) => remove(context, args),
    }
}

fn create(context: &Context, args: &WorkspaceCreateArgs) -> Result<u8> {
    let mut body = json!({ "name": args.workspace.name, "snapshot_tag": args.snapshot });
    if let Some(limit) = args.limit.memory_limit_mib {
        body["memory_limit_mib"] = json!(limit);
    }
    ask(context, &args.workspace, PATH, &body, "starting")
}

fn suspend(context: &Context, args: &WorkspaceSuspendArgs) -> Result<u8> {
    let path = format!("{PATH}/{}/suspend", args.workspace.name);
    ask(context, &args.workspace, &path, &json!({ "diff": args.diff }), "storing")
}

fn resume(context: &Context, args: &WorkspaceArgs) -> Result<u8> {
    ask(context, args, &format!("{PATH}/{}/resume", args.name), &json!({}), "starting")
}

/// Sends a request about a workspace, and prints its new state.
fn ask(context: &Context, args: &WorkspaceArgs, path: &str, body: &Value, doing: &str) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let progress = context.ui.spinner(format!("{doing} workspace {}", args.name));
        let answer = daemon.ask(Method::POST, path, Some(body)).await?;
        drop(progress);
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            ui::print(&describe(&types::read(&answer)?))?;
        }
        Ok(0)
    })
}

fn list(context: &Context, args: &AnswerArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let answer = daemon.ask(Method::GET, PATH, None).await?;
        if args.json {
            ui::print_json(&answer)?;
        } else {
            ui::print(&render(&types::read::<Vec<Workspace>>(&answer)?, clock::now()))?;
        }
        Ok(0)
    })
}

/// Removes workspaces; a failure does not stop the others.
fn remove(context: &Context, args: &WorkspaceRmArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let remove = async |name: &str| daemon.ask(Method::DELETE, &format!("{PATH}/{name}"), None).await;
        report(context.ui, args.json, types::for_each(&args.names, remove).await, "removed")
    })
}

fn describe(workspace: &Workspace) -> String {
    let Workspace { name, status, source_snapshot_tag, .. } = workspace;
    let place = match (&workspace.live_sandbox_id, &workspace.current_state_tag) {
        (Some(id), _) => format!(" in {id}"),
        (None, Some(tag)) => format!(", kept as {tag}"),
        (None, None) => String::new(),
    };
    ui::without_control_chars(&format!("{name}: {status}{place} (from {source_snapshot_tag})"))
}

fn render(workspaces: &[Workspace], now: u64) -> String {
    let or_dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
    let row = |workspace: &Workspace| {
        vec![
            workspace.name.clone(),
            workspace.status.clone(),
            or_dash(&workspace.live_sandbox_id),
            workspace.source_snapshot_tag.clone(),
            or_dash(&workspace.current_state_tag),
            format!("{} ago", ui::age(now.saturating_sub(workspace.last_active_unix))),
        ]
    };
    let header = ["NAME", "STATUS", "SANDBOX", "FROM", "STATE", "ACTIVE"];
    ui::table(&header, &workspaces.iter().map(row).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workspaces_are_listed_with_where_they_run_or_are_kept() {
        let workspaces: Vec<Workspace> = types::read(&json!([
            { "id": "ws-1", "name": "alice", "source_snapshot_tag": "numpy", "status": "running",
              "live_sandbox_id": "sb1", "created_at_unix": 1, "last_active_unix": 100 },
            { "id": "ws-2", "name": "bob", "source_snapshot_tag": "numpy", "status": "suspended",
              "current_state_tag": "ws-bob-2", "created_at_unix": 1, "last_active_unix": 40 },
        ]))
        .unwrap();
        let expected = "\
NAME   STATUS     SANDBOX  FROM   STATE     ACTIVE
alice  running    sb1      numpy  -         0 s ago
bob    suspended  -        numpy  ws-bob-2  1 min ago";
        assert_eq!(render(&workspaces, 100), expected);
        assert_eq!(describe(&workspaces[0]), "alice: running in sb1 (from numpy)");
        assert_eq!(describe(&workspaces[1]), "bob: suspended, kept as ws-bob-2 (from numpy)");
    }
}
