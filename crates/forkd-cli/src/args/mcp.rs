//! Arguments of `mcp`.

use clap::{Args, Subcommand, ValueEnum};

use super::DaemonArgs;

/// Serve the Model Context Protocol, so that an agent's model works with sandboxes.
///
/// A client starts this command and talks to it over standard input and output; `forkd mcp config` prints the settings
/// of common clients. What the client makes ends with the session, unless the client keeps it. The daemon serves the
/// same at /mcp of its TCP address.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  forkd mcp config claude-desktop
  forkd mcp config claude-code
  npx @modelcontextprotocol/inspector --cli forkd mcp --method tools/list

Exit status: 0 the client closed the session, 1 failed, 2 wrong usage, 128+N signal N ended the session."
)]
pub(crate) struct McpArgs {
    #[command(subcommand)]
    pub(crate) command: Option<McpCommand>,

    /// Cut each text of a result to this many KiB, with a sentence that says how to get the rest.
    #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(2..=16384), value_name = "KIB")]
    pub(crate) output_limit_kib: u32,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum McpCommand {
    Config(McpConfigArgs),
}

/// Print what a client needs to start `forkd mcp`: settings as JSON, or a command.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd mcp config claude-desktop
  forkd mcp config claude-code | sh
  forkd mcp config cursor > .cursor/mcp.json
  forkd mcp config vscode --http > .vscode/mcp.json

Exit status: 0 printed, 1 failed, 2 wrong usage.")]
pub(crate) struct McpConfigArgs {
    /// Client to configure.
    #[arg(value_enum, value_name = "CLIENT")]
    pub(crate) client: McpClient,

    /// Use the daemon's /mcp with its token, instead of starting `forkd mcp`.
    #[arg(long)]
    pub(crate) http: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// A client of the Model Context Protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum McpClient {
    ClaudeDesktop,
    ClaudeCode,
    Cursor,
    Cline,
    Vscode,
}
