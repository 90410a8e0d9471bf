//! Arguments of `events`, `top` and `logs`.

use clap::Args;

use super::{AnswerArgs, DaemonArgs, SandboxArgs, parse_id};

/// Show events of sandboxes, snapshots and workspaces as they happen.
///
/// The daemon keeps the last 1000 events. Event numbers start again when the daemon restarts.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd events
  forkd events --since 0 --no-follow
  forkd events --sandbox sb4k2n --kind sandbox.ended
  forkd events --json --kind sandbox | jq -r 'select(.reason == \"out_of_memory\") | .sandbox'

Exit status: 0 all requested events shown, 1 the daemon ended or refused, 2 wrong usage.")]
pub(crate) struct EventsArgs {
    /// Begin after this event: an id as printed, or a number; 0 shows all events the daemon keeps.
    #[arg(long, value_name = "ID")]
    pub(crate) since: Option<String>,

    /// Only events of this sandbox.
    #[arg(long, value_parser = parse_id, value_name = "ID")]
    pub(crate) sandbox: Option<String>,

    /// Only events of these kinds, such as `sandbox.ended`, or `snapshot` for all events of snapshots.
    #[arg(long, value_delimiter = ',', value_name = "KIND,…")]
    pub(crate) kind: Vec<String>,

    /// Continue with new events; the default.
    #[arg(long, overrides_with = "no_follow")]
    pub(crate) follow: bool,

    /// Only events that have already happened.
    #[arg(long)]
    pub(crate) no_follow: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show the CPU and memory use of sandboxes, every two seconds.
///
/// CPU is in percent of one CPU. Private memory belongs to one sandbox; shared memory belongs to all
/// children of its snapshot.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd top
  forkd top --once
  forkd top --once --json | jq 'map(.private_kib) | add'

Exit status: 0 with --once, 1 the daemon ended, 2 wrong usage.")]
pub(crate) struct TopArgs {
    /// Show it once; takes one second, to measure the CPU use.
    #[arg(long)]
    pub(crate) once: bool,

    /// Print all columns and whole names. The default fits the width of the terminal.
    #[arg(long, conflicts_with = "json")]
    pub(crate) wide: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show the console output of a sandbox.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd logs sb4k2n
  forkd logs sb4k2n --tail 20 -f

Exit status: 0 shown, 1 there is no such sandbox, 2 wrong usage.")]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Continue with new output until the sandbox ends.
    #[arg(long, short)]
    pub(crate) follow: bool,

    /// Only the last N lines.
    #[arg(long, value_name = "N")]
    pub(crate) tail: Option<usize>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
