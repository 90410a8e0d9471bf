//! What can be typed about branches: take them, go back to them, show where everything came from.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::{AnswerArgs, DaemonArgs, MAX_SECS, SandboxArgs, parse_name};

/// Branch a running sandbox: keep this moment of it under a tag, to fork children from.
///
/// The sandbox stands still for some milliseconds and goes on without noticing; memory, disk and
/// devices of the branch belong to one instant. Children can be forked as soon as the sandbox runs
/// again; by default this command waits until the branch is on disk as well. ^C ends the waiting only.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd branch sb4k2n --tag before-deploy
  forkd fork --tag before-deploy -n 3
  forkd branch sb4k2n --no-wait --json | jq -r .tag

Modes:
  live  stores what differs from the snapshot the sandbox came from, while everything runs
  diff  the same; for scripts that know this name
  full  stores all of it, so that it depends on no other snapshot

Exit status: 0 branched, 1 failed, 130 left by ^C, 2 wrong usage.")]
pub(crate) struct BranchArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Name for the branch [default: one is made].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// What is stored.
    #[arg(long, value_enum, default_value_t = BranchMode::Live, value_name = "MODE")]
    pub(crate) mode: BranchMode,

    /// Do not wait until it is on disk; `forkd images` tells how far it is. Of mode live.
    #[arg(long)]
    pub(crate) no_wait: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// What is stored of a branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BranchMode {
    Live,
    Diff,
    Full,
}

impl BranchMode {
    /// Its name in the daemon's API.
    pub(crate) fn name(self) -> &'static str {
        match self {
            BranchMode::Live => "live",
            BranchMode::Diff => "diff",
            BranchMode::Full => "full",
        }
    }
}

/// Build a snapshot on a snapshot: run a command in a child and keep what it changed.
///
/// Memory and disk are kept as a layer over the other snapshot. The child is gone afterwards, however
/// this command ends.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-diff --from numpy --tag pandas --exec 'pip install pandas'
  forkd snapshot-diff --from pandas --tag data --exec 'cd /srv && ./fetch.sh' --timeout-secs 3600

Exit status: 0 made, 1 failed, also if the command did (its status is told and no snapshot is made), 130
ended by ^C, 2 wrong usage.")]
pub(crate) struct SnapshotDiffArgs {
    /// Snapshot to build on (`forkd images`).
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) from: String,

    /// Name for the new snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// Shell command line to run in the child. Its output is shown when it has ended.
    #[arg(long, value_name = "CMD")]
    pub(crate) exec: String,

    /// End the command after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "exec-timeout-secs", default_value_t = 600,
          value_parser = clap::value_parser!(u64).range(1..=MAX_SECS), value_name = "SECS")]
    pub(crate) exec_timeout_secs: u64,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Take a sandbox back to a branch of it, under its own id.
///
/// It goes on from there with the memory and the disk it had; what it did since is gone. Its network
/// and its limits stay; its open connections are reset.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd rollback sb4k2n
  forkd rollback sb4k2n --to before-deploy

Exit status: 0 done, 1 failed, 2 wrong usage.")]
pub(crate) struct RollbackArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Where to [default: its latest branch, or else the snapshot it was forked from].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) to: Option<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show who came from whom: snapshots, their children, branches of those, and so on.
///
/// What is gone but has descendants is shown, too, and marked.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd tree
  forkd tree --svg tree.svg
  forkd tree --dot | dot -Tpdf > tree.pdf
  forkd tree --json | jq -r '.nodes[] | select(.gone | not) | .name'

Exit status: 0 shown, 1 failed, 2 wrong usage.")]
pub(crate) struct TreeArgs {
    /// Print JSON: all that is known.
    #[arg(long, group = "format")]
    pub(crate) json: bool,

    /// Print it in the language of Graphviz.
    #[arg(long, group = "format")]
    pub(crate) dot: bool,

    /// Draw it into this file; `-` is standard output.
    #[arg(long, group = "format", value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
