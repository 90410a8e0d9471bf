//! Arguments of `branch`, `snapshot-diff`, `rollback` and `tree`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use forkd_api::MAX_TIMEOUT_SECS;

use super::{AnswerArgs, DaemonArgs, SandboxArgs, parse_name};

/// Branch a running sandbox: keep its present state under a tag, to fork children from.
///
/// The daemon pauses the sandbox for some milliseconds. Memory, disk and devices of the branch belong to
/// one instant. Children can be forked as soon as the sandbox runs again; by default this command also
/// waits until the branch is on disk. ^C ends the waiting, not the branch.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd branch sb4k2n --tag before-deploy
  forkd fork --tag before-deploy -n 3
  forkd branch sb4k2n --no-wait --json | jq -r .tag

Modes:
  live  stores the difference to the sandbox's snapshot, while the sandbox runs
  diff  the same as live, under the name older scripts use
  full  stores everything, so that the branch depends on no other snapshot
  disk  stores the disk alone: sandboxes boot on it, with the files and without the processes

Exit status: 0 branched, 1 failed, 130 interrupted by ^C, 2 wrong usage.")]
pub(crate) struct BranchArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Tag of the branch [default: generated].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Amount of state to store; see Modes below.
    #[arg(long, value_enum, default_value_t = BranchMode::Live, value_name = "MODE")]
    pub(crate) mode: BranchMode,

    /// Do not wait until the branch is on disk; `forkd images` shows the progress. Only for mode live.
    #[arg(long)]
    pub(crate) no_wait: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// The amount of state that a branch stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BranchMode {
    Live,
    Diff,
    Full,
    Disk,
}

impl BranchMode {
    /// Its name in the daemon's API.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BranchMode::Live => "live",
            BranchMode::Diff => "diff",
            BranchMode::Full => "full",
            BranchMode::Disk => "disk",
        }
    }
}

/// Build a snapshot on another one: run a command in a child and keep its changes.
///
/// The new snapshot stores changed memory and disk as a layer over the other snapshot. The child is
/// removed, however this command ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-diff --from numpy --tag pandas --exec 'pip install pandas'
  forkd snapshot-diff --from pandas --tag data --exec 'cd /srv && ./fetch.sh' --timeout-secs 3600

Exit status: 0 created, 1 failed (also if the command failed: its status is printed, no snapshot is
created), 130 interrupted by ^C, 2 wrong usage.")]
pub(crate) struct SnapshotDiffArgs {
    /// Snapshot to build on (`forkd images`).
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) from: String,

    /// Tag of the new snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// Shell command line to run in the child. Its output is printed when it has ended.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec: String,

    /// End the command after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "exec-timeout-secs", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS), value_name = "SECS")]
    pub(crate) exec_timeout_secs: u64,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Roll a sandbox back to one of its branches. It keeps its id.
///
/// The sandbox continues with the memory and disk of the branch; later changes are lost. Its network and
/// its limits stay; its open connections are reset.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd rollback sb4k2n
  forkd rollback sb4k2n --to before-deploy

Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Branch to roll back to [default: the latest branch, or else the sandbox's snapshot].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) to: Option<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show the fork tree: snapshots, their children, branches of those, and so on.
///
/// Removed snapshots and sandboxes that have descendants are shown and marked as gone.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd tree
  forkd tree --svg tree.svg
  forkd tree --dot | dot -Tpdf > tree.pdf
  forkd tree --json | jq -r '.nodes[] | select(.gone | not) | .name'

Exit status: 0 shown, 1 failed, 2 wrong usage.")]
pub(crate) struct TreeArgs {
    /// Print the daemon's whole reply as JSON.
    #[arg(long, group = "format")]
    pub(crate) json: bool,

    /// Print the tree in the language of Graphviz.
    #[arg(long, group = "format")]
    pub(crate) dot: bool,

    /// Draw the tree as SVG into this file; `-` is standard output.
    #[arg(long, group = "format", value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
