//! What can be typed about snapshots: make, list, remove and unload them.

use std::path::PathBuf;

use clap::Args;

use super::{AnswerArgs, BranchMode, DaemonArgs, GuestArgs, parse_id, parse_name};

/// Warm a guest once and keep it as a snapshot, to fork children from.
///
/// Boots the image, runs the warm-up in it, waits until the guest says that it is warm, freezes it
/// and saves it under the tag. An image called `python` is built on first use. ^C cancels.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot --tag numpy --image python --warm-python 'import numpy'
  forkd snapshot --tag app --image tools --warm-command 'cd /srv && ./prepare.sh' --vcpus 2 --mem-size-mib 1024
  forkd snapshot --tag numpy --image python --warm-python 'import numpy' --json | jq -r .dir
  forkd snapshot --tag before-deploy --from-sandbox sb4k2n
  forkd snapshot --tag mine --kernel /srv/vmlinux --rootfs /srv/root.ext4

With --from-sandbox it is `forkd branch`. A warm-up that goes on running, such as a server, is warm once it has created the file named by
FORKD_READY_FILE in its environment.

Exit status: 0 made, 1 failed (nothing is kept but the reason, in `forkd images`), 130 cancelled by ^C,
2 wrong usage.")]
pub(crate) struct SnapshotArgs {
    /// Name for the snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// Image to boot (`forkd image ls`).
    #[arg(long, value_parser = parse_name, required_unless_present_any = ["from_sandbox", "rootfs", "kernel"],
          value_name = "NAME")]
    pub(crate) image: Option<String>,

    /// Boot this disk instead, an ext4 file in a folder that the daemon allows (`forkd serve --allow-path`). It
    /// must stay as it is.
    #[arg(long, conflicts_with_all = ["image", "from_sandbox"], value_name = "FILE")]
    pub(crate) rootfs: Option<PathBuf>,

    /// Boot it with this kernel, from such a folder, too; alone, a guest without a disk.
    #[arg(long, conflicts_with_all = ["image", "from_sandbox"], value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// Keep this moment of a running sandbox instead.
    #[arg(long, value_parser = parse_id, conflicts_with_all = ["image", "warm", "warm_python"],
          value_name = "ID")]
    pub(crate) from_sandbox: Option<String>,

    /// With --from-sandbox: what is stored [default: full].
    #[arg(long, value_enum, requires = "from_sandbox", conflicts_with_all = ["diff", "live", "image"],
          value_name = "MODE")]
    pub(crate) mode: Option<BranchMode>,

    /// The same as --mode diff.
    #[arg(long, requires = "from_sandbox", conflicts_with_all = ["live", "image"], hide = true)]
    pub(crate) diff: bool,

    /// The same as --mode live.
    #[arg(long, requires = "from_sandbox", conflicts_with = "image", hide = true)]
    pub(crate) live: bool,

    /// With --mode live: do not wait until it is on disk.
    #[arg(long, requires = "from_sandbox")]
    pub(crate) no_wait: bool,

    /// Shell command line that warms the guest.
    #[arg(long = "warm-command", alias = "warm", value_name = "CMD")]
    pub(crate) warm: Option<String>,

    /// Python statements for the interpreter that `forkd eval` talks to.
    #[arg(long, value_name = "CODE")]
    pub(crate) warm_python: Option<String>,

    #[command(flatten)]
    pub(crate) guest: GuestArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// List snapshots: the warmed parents that children are forked from.
///
/// Root disks are listed by `forkd image ls`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd images
  forkd images --json | jq -r '.[] | select(.status == \"ready\") | .tag'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
pub(crate) struct ImagesArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Which snapshots something is done to.
#[derive(Debug, Args)]
pub(crate) struct TagsArgs {
    /// Tags of snapshots (`forkd images`).
    #[arg(required = true, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tags: Vec<String>,

    /// Print what became of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Remove snapshots. Children that run go on; a snapshot that is being made is cancelled.
///
/// One that others are built on is refused, unless they are removed, too.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd rmi numpy app
  forkd rmi numpy --cascade

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
pub(crate) struct RmiArgs {
    #[command(flatten)]
    pub(crate) snapshots: TagsArgs,

    /// Also remove the snapshots that are built on them.
    #[arg(long, conflicts_with = "force")]
    pub(crate) cascade: bool,

    /// Remove the names alone: what is built on them stays whole, and keeps the layers it needs.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Say what a snapshot consists of: its chain, who is built on it, and what all takes on disk.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-info pandas
  forkd snapshot-info pandas --json | jq -r '.dependents[]'

Exit status: 0 told, 1 failed, 2 wrong usage.")]
pub(crate) struct SnapshotInfoArgs {
    /// Tag of the snapshot (`forkd images`).
    #[arg(value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Copy a snapshot with its whole chain into one that depends on no other.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot-compact pandas --to pandas-alone
  forkd rmi pandas

Exit status: 0 made, 1 failed, 2 wrong usage.")]
pub(crate) struct SnapshotCompactArgs {
    /// Tag of the snapshot (`forkd images`).
    #[arg(value_parser = parse_name, required_unless_present = "from", value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// The same.
    #[arg(long, value_parser = parse_name, conflicts_with = "tag", hide = true, value_name = "TAG")]
    pub(crate) from: Option<String>,

    /// Name for the new snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) to: String,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}
