//! Arguments of `forkd workspace`.

use clap::{Args, Subcommand};

use super::{AnswerArgs, DaemonArgs, MemoryLimitArgs, parse_name};

#[derive(Debug, Subcommand)]
pub(crate) enum WorkspaceCommand {
    Create(WorkspaceCreateArgs),
    /// List workspaces.
    #[command(
        visible_alias = "list",
        after_help = "Examples:
  forkd workspace ls
  forkd workspace ls --json | jq -r '.[] | select(.status == \"running\") | .live_sandbox_id'

Exit status: 0 listed, 1 failed, 2 wrong usage."
    )]
    Ls(AnswerArgs),
    Suspend(WorkspaceSuspendArgs),
    /// Resume a suspended workspace in a new sandbox.
    #[command(after_help = "Example:
  forkd exec $(forkd workspace resume alice --json | jq -r .live_sandbox_id) -- uptime

Exit status: 0 running, 1 failed, 2 wrong usage.")]
    Resume(WorkspaceArgs),
    /// Remove workspaces, their sandboxes and their stored state.
    #[command(
        visible_alias = "delete",
        after_help = "Example:
  forkd workspace rm alice bob

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage."
    )]
    Rm(WorkspaceRmArgs),
}

/// Create a workspace: a sandbox with a name.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd workspace create alice --tag numpy
  forkd workspace create bob --tag numpy --memory-limit-mib 1024

Exit status: 0 running, 1 failed, 2 wrong usage.")]
pub(crate) struct WorkspaceCreateArgs {
    #[command(flatten)]
    pub(crate) workspace: WorkspaceArgs,

    /// Snapshot to fork (`forkd images`).
    #[arg(long = "tag", alias = "snapshot", value_parser = parse_name, value_name = "TAG")]
    pub(crate) snapshot: String,

    #[command(flatten)]
    pub(crate) limit: MemoryLimitArgs,
}

/// Suspend a workspace: store its state on disk and end its sandbox.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd workspace suspend alice
  forkd workspace suspend alice --diff

Exit status: 0 stored, 1 failed, 2 wrong usage.")]
pub(crate) struct WorkspaceSuspendArgs {
    #[command(flatten)]
    pub(crate) workspace: WorkspaceArgs,

    /// Store only the difference to the previous state.
    #[arg(long)]
    pub(crate) diff: bool,
}

/// The workspace of a command.
#[derive(Debug, Args)]
pub(crate) struct WorkspaceArgs {
    /// Name of the workspace (`forkd workspace ls`).
    #[arg(value_parser = parse_name, value_name = "NAME")]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// The workspaces to remove.
#[derive(Debug, Args)]
pub(crate) struct WorkspaceRmArgs {
    /// Names of workspaces (`forkd workspace ls`).
    #[arg(required = true, value_parser = parse_name, value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// Print the result of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
