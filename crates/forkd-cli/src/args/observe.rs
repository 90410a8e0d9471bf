//! What can be typed about what the daemon tells: events, what sandboxes use, consoles.

use clap::Args;

use super::{AnswerArgs, DaemonArgs, SandboxArgs, parse_id};

/// Show what happens to sandboxes, snapshots and workspaces, as it happens.
///
/// The daemon keeps the last 1000 events. After a restart of the daemon they are counted anew.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd events
  forkd events --since 0 --no-follow
  forkd events --sandbox sb4k2n --kind sandbox.ended
  forkd events --json --kind sandbox | jq -r 'select(.reason == \"out_of_memory\") | .sandbox'

Exit status: 0 all that was asked for was shown, 1 the daemon went away or refused, 2 wrong usage.")]
pub(crate) struct EventsArgs {
    /// Begin after this event: an id as shown, or a number; 0 for all that are kept.
    #[arg(long, value_name = "ID")]
    pub(crate) since: Option<String>,

    /// Only what is about this sandbox.
    #[arg(long, value_parser = parse_id, value_name = "ID")]
    pub(crate) sandbox: Option<String>,

    /// Only these kinds, such as `sandbox.ended`, or `snapshot` for all about snapshots.
    #[arg(long, value_delimiter = ',', value_name = "KIND,…")]
    pub(crate) kind: Vec<String>,

    /// Go on with what happens from now on; the default.
    #[arg(long, overrides_with = "no_follow")]
    pub(crate) follow: bool,

    /// Only what has happened already.
    #[arg(long)]
    pub(crate) no_follow: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show what sandboxes use, every two seconds.
///
/// CPU is in percent of one CPU. Private memory is a sandbox's alone; shared memory it has together with
/// its snapshot's other children.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd top
  forkd top --once
  forkd top --once --json | jq 'map(.private_kib) | add'

Exit status: 0 with --once, 1 the daemon went away, 2 wrong usage.")]
pub(crate) struct TopArgs {
    /// Show it once; takes a second, to see who uses the CPU.
    #[arg(long)]
    pub(crate) once: bool,

    /// All columns, and names as long as they are. Without it a terminal's width is kept to.
    #[arg(long, conflicts_with = "json")]
    pub(crate) wide: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show what a sandbox wrote to its console.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd logs sb4k2n
  forkd logs sb4k2n --tail 20 -f

Exit status: 0 all was shown, 1 there is no such sandbox, 2 wrong usage.")]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Go on with what it writes, until it ends.
    #[arg(long, short)]
    pub(crate) follow: bool,

    /// Only this many of the last lines.
    #[arg(long, value_name = "N")]
    pub(crate) tail: Option<usize>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
