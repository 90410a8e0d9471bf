//! Arguments of `forkd token`.

use clap::{Args, Subcommand, ValueEnum};

use super::common::{AnswerArgs, parse_name};

#[derive(Debug, Subcommand)]
pub(crate) enum TokenCommand {
    /// Print the token of the daemon that the other commands use.
    #[command(after_help = "Example:
  curl -H \"Authorization: Bearer $(forkd token print)\" http://127.0.0.1:8889/version

Exit status: 0 printed, 1 there is no daemon or no token, 2 wrong usage.")]
    Print(TokenPrintArgs),
    Add(TokenAddArgs),
    /// List tokens: names, scopes, owners and limits, but not the secrets.
    #[command(after_help = "Examples:
  forkd token ls
  forkd token ls --json | jq -r '.[].name'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
    Ls(AnswerArgs),
    /// Remove tokens. The daemon refuses them at once; sandboxes and snapshots of their owners stay.
    #[command(after_help = "Example:
  forkd token rm ci

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
    Rm(TokenRmArgs),
    /// Replace the secret of a token and print the new one. The daemon refuses the old one at once.
    #[command(after_help = "Examples:
  forkd token rotate ci
  forkd token rotate default

Exit status: 0 replaced, 1 failed, 2 wrong usage.")]
    Rotate(TokenRotateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct TokenPrintArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Create a token and print it. It is printed once: the daemon keeps only its hash.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd token add ci --max-sandboxes 20 --max-memory-mib 16384
  forkd token add dashboard --scope read --owner ci --expires-in-secs 86400

Exit status: 0 created, 1 failed, 2 wrong usage.")]
pub(crate) struct TokenAddArgs {
    /// Name of the token.
    #[arg(value_parser = parse_name, value_name = "NAME")]
    pub(crate) name: String,

    /// Permissions of the token.
    #[arg(long, value_enum, default_value_t = TokenScope::Write, value_name = "SCOPE")]
    pub(crate) scope: TokenScope,

    /// Owner whose sandboxes and snapshots the token gives access to [default: the token's name].
    #[arg(long, value_parser = parse_name, value_name = "OWNER")]
    pub(crate) owner: Option<String>,

    /// Limit of the owner's sandboxes [default: none].
    #[arg(long, value_name = "N")]
    pub(crate) max_sandboxes: Option<u64>,

    /// Limit of the memory of all the owner's sandboxes together [default: none].
    #[arg(long, value_name = "MIB")]
    pub(crate) max_memory_mib: Option<u64>,

    /// Limit of the owner's snapshots [default: none].
    #[arg(long, value_name = "N")]
    pub(crate) max_snapshots: Option<u64>,

    /// Expire after this many seconds [default: never].
    #[arg(long = "expires-in-secs", alias = "expires-in",
          value_parser = clap::value_parser!(u64).range(1..), value_name = "SECS")]
    pub(crate) expires_in: Option<u64>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// The permissions of a token. Each scope includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum TokenScope {
    /// Read the owner's sandboxes and snapshots.
    Read,
    /// Create, use and end sandboxes and snapshots of the owner.
    #[value(alias = "use")]
    Write,
    /// Everything, for all owners.
    Admin,
}

impl From<TokenScope> for forkd_api::TokenScope {
    fn from(scope: TokenScope) -> Self {
        match scope {
            TokenScope::Read => forkd_api::TokenScope::Read,
            TokenScope::Write => forkd_api::TokenScope::Write,
            TokenScope::Admin => forkd_api::TokenScope::Admin,
        }
    }
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
    /// Name of the token (`forkd token ls`); `default` is the token that `forkd token print` prints.
    #[arg(value_parser = parse_name, value_name = "NAME")]
    pub(crate) name: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}
