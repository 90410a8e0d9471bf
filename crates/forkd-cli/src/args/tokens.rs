//! What can be typed about tokens.

use clap::{Args, Subcommand, ValueEnum};

use super::common::{AnswerArgs, parse_name};

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print the token of the daemon the other commands would talk to.
    #[command(after_help = "Example:
  curl -H \"Authorization: Bearer $(forkd token print)\" http://127.0.0.1:8889/version

Exit status: 0 printed, 1 there is no daemon or no token, 2 wrong usage.")]
    Print(TokenPrintArgs),
    Add(TokenAddArgs),
    /// List tokens: names, scopes, owners and limits, not the tokens themselves.
    #[command(after_help = "Examples:
  forkd token ls
  forkd token ls --json | jq -r '.[].name'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
    Ls(AnswerArgs),
    /// Remove tokens. They are refused at once; what their owners have stays.
    #[command(after_help = "Example:
  forkd token rm ci

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
    Rm(TokenRmArgs),
    /// Make a token anew and print it. The old one is refused at once.
    #[command(after_help = "Examples:
  forkd token rotate ci
  forkd token rotate default

Exit status: 0 made, 1 failed, 2 wrong usage.")]
    Rotate(TokenRotateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TokenPrintArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Make a token and print it. It is shown once: only its hash is kept.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd token add ci --max-sandboxes 20 --max-memory-mib 16384
  forkd token add dashboard --scope read --owner ci --expires-in-secs 86400

Exit status: 0 made, 1 failed, 2 wrong usage.")]
pub(crate) struct TokenAddArgs {
    /// What it is called.
    #[arg(value_parser = parse_name, value_name = "NAME")]
    pub(crate) name: String,

    /// What whoever shows it may do.
    #[arg(long, value_enum, default_value_t = TokenScope::Write, value_name = "SCOPE")]
    pub(crate) scope: TokenScope,

    /// Whose sandboxes and snapshots it makes and sees [default: the token's name].
    #[arg(long, value_parser = parse_name, value_name = "OWNER")]
    pub(crate) owner: Option<String>,

    /// Sandboxes its owner may have [default: no limit].
    #[arg(long, value_name = "N")]
    pub(crate) max_sandboxes: Option<u64>,

    /// Memory all sandboxes of its owner may have together [default: no limit].
    #[arg(long, value_name = "MIB")]
    pub(crate) max_memory_mib: Option<u64>,

    /// Snapshots its owner may have [default: no limit].
    #[arg(long, value_name = "N")]
    pub(crate) max_snapshots: Option<u64>,

    /// Refuse it after this many seconds [default: never].
    #[arg(long = "expires-in-secs", alias = "expires-in",
          value_parser = clap::value_parser!(u64).range(1..), value_name = "SECS")]
    pub(crate) expires_in: Option<u64>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// What whoever shows a token may do. Each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TokenScope {
    /// Look at what its owner has.
    Read,
    /// Make, use and end sandboxes and snapshots of its owner.
    #[value(alias = "use")]
    Write,
    /// Everything, with everybody's.
    Admin,
}

#[derive(Debug, Args)]
pub(crate) struct TokenRmArgs {
    /// Names of tokens (`forkd token ls`).
    #[arg(required = true, value_parser = parse_name, value_name = "NAME")]
    pub(crate) names: Vec<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

#[derive(Debug, Args)]
pub(crate) struct TokenRotateArgs {
    /// Name of the token (`forkd token ls`); `default` is the one `forkd token print` shows.
    #[arg(value_parser = parse_name, value_name = "NAME")]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}
