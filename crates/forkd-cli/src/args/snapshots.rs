//! Arguments of the commands that create, list, remove and unload snapshots.

use std::path::PathBuf;

use clap::Args;

use super::{AnswerArgs, BranchMode, DaemonArgs, GuestArgs, parse_id, parse_name};

/// Warm a guest once and save it as a snapshot, to fork children from.
///
/// Boots the image, runs the warm-up in the guest, waits until the guest reports that it is warm, and saves
/// it under the tag. An image called `python` is built on first use. ^C cancels.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot --tag numpy --image python --warm-python 'import numpy'
  forkd snapshot --tag app --image tools --warm-command 'cd /srv && ./prepare.sh' --vcpus 2 --mem-size-mib 1024
  forkd snapshot --tag numpy --image python --warm-python 'import numpy' --json | jq -r .dir
  forkd snapshot --tag before-deploy --from-sandbox sb4k2n
  forkd snapshot --tag mine --kernel /srv/vmlinux --rootfs /srv/root.ext4

With --from-sandbox this command is `forkd branch`. A warm-up that keeps running, such as a server, reports
that it is warm by creating the file named in its environment variable FORKD_READY_FILE.

Exit status: 0 created, 1 failed (only the reason is kept, in `forkd images`), 130 cancelled by ^C, 2 wrong
usage.")]
pub(crate) struct SnapshotArgs {
    /// Tag of the snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// Image to boot (`forkd image ls`).
    #[arg(long, value_parser = parse_name, required_unless_present_any = ["from_sandbox", "rootfs", "kernel"],
          value_name = "NAME")]
    pub(crate) image: Option<String>,

    /// Boot this disk instead: an ext4 file in a folder that the daemon allows (`forkd serve --allow-path`).
    /// Do not change the file afterwards.
    #[arg(long, conflicts_with_all = ["image", "from_sandbox"], value_name = "FILE")]
    pub(crate) rootfs: Option<PathBuf>,

    /// Boot this kernel, from an allowed folder as well; without --rootfs the guest has no disk.
    #[arg(long, conflicts_with_all = ["image", "from_sandbox"], value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// Branch this running sandbox instead of booting an image.
    #[arg(long, value_parser = parse_id, conflicts_with_all = ["image", "warm", "warm_python"],
          value_name = "ID")]
    pub(crate) from_sandbox: Option<String>,

    /// With --from-sandbox: the branch mode [default: full].
    #[arg(long, value_enum, requires = "from_sandbox", conflicts_with_all = ["diff", "live", "image"],
          value_name = "MODE")]
    pub(crate) mode: Option<BranchMode>,

    /// The same as --mode diff.
    #[arg(long, requires = "from_sandbox", conflicts_with_all = ["live", "image"], hide = true)]
    pub(crate) diff: bool,

    /// The same as --mode live.
    #[arg(long, requires = "from_sandbox", conflicts_with = "image", hide = true)]
    pub(crate) live: bool,

    /// With --mode live: do not wait until the branch is on disk.
    #[arg(long, requires = "from_sandbox")]
    pub(crate) no_wait: bool,

    /// Shell command line that warms the guest.
    #[arg(long = "warm-command", alias = "warm", value_name = "CMD")]
    pub(crate) warm: Option<String>,

    /// Python statements to run in the interpreter of `forkd eval`.
    #[arg(long, value_name = "CODE")]
    pub(crate) warm_python: Option<String>,

    #[command(flatten)]
    pub(crate) guest: GuestArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// List snapshots: the warmed guests that children are forked from.
///
/// `forkd image ls` lists root disks.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd images
  forkd images --json | jq -r '.[] | select(.status == \"ready\") | .tag'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
pub(crate) struct ImagesArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// The snapshots of a command.
#[derive(Debug, Args)]
pub(crate) struct TagsArgs {
    /// Tags of snapshots (`forkd images`).
    #[arg(required = true, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tags: Vec<String>,

    /// Print the result of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Remove snapshots. Their children keep running; a snapshot under construction is cancelled.
///
/// The daemon refuses to remove a snapshot that others are built on, unless --cascade or --force is given.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd rmi numpy app
  forkd rmi numpy --cascade

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
pub(crate) struct RmiArgs {
    #[command(flatten)]
    pub(crate) snapshots: TagsArgs,

    /// Also remove the snapshots built on them.
    #[arg(long, conflicts_with = "force")]
    pub(crate) cascade: bool,

    /// Remove only the names: snapshots built on them stay complete and keep the layers they need.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Show a snapshot in detail: its chain, the snapshots built on it, and its size on disk.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-info pandas
  forkd snapshot-info pandas --json | jq -r '.dependents[]'

Exit status: 0 shown, 1 failed, 2 wrong usage.")]
pub(crate) struct SnapshotInfoArgs {
    /// Tag of the snapshot (`forkd images`).
    #[arg(value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Copy a snapshot and its chain into a snapshot that depends on no other.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-compact pandas --to pandas-alone
  forkd rmi pandas

Exit status: 0 created, 1 failed, 2 wrong usage.")]
pub(crate) struct SnapshotCompactArgs {
    /// Tag of the snapshot (`forkd images`).
    #[arg(value_parser = parse_name, required_unless_present = "from", value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Tag of the snapshot, as the reference spells it.
    #[arg(long, value_parser = parse_name, conflicts_with = "tag", hide = true, value_name = "TAG")]
    pub(crate) from: Option<String>,

    /// Tag of the new snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) to: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}
