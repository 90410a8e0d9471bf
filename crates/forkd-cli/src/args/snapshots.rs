//! What can be typed about snapshots: make, list, remove and unload them.

use clap::Args;

use super::{DaemonArgs, parse_name};

/// Warm a guest once and keep it as a snapshot, to fork children from.
///
/// Boots the image, runs the warm-up in it, waits until the guest says that it is warm, freezes it
/// and saves it under the tag. An image called `python` is built on first use. ^C cancels.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd snapshot --tag numpy --image python --warm-python 'import numpy'
  forkd snapshot --tag app --image tools --warm 'cd /srv && ./prepare.sh' --vcpus 2 --mem-size-mib 1024
  forkd snapshot --tag numpy --image python --warm-python 'import numpy' --json | jq -r .dir

A warm-up that goes on running, such as a server, is warm once it has created the file named by
FORKD_READY_FILE in its environment.

Exit status: 0 made, 1 failed (nothing is kept but the reason, in `forkd images`), 130 cancelled by ^C,
2 wrong usage.")]
pub(crate) struct SnapshotArgs {
    /// Name for the snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// Image to boot (`forkd image ls`).
    #[arg(long, value_parser = parse_name, value_name = "NAME")]
    pub(crate) image: String,

    /// Shell command line that warms the guest.
    #[arg(long, value_name = "CMD")]
    pub(crate) warm: Option<String>,

    /// Python statements for the interpreter that `forkd eval` talks to.
    #[arg(long, value_name = "CODE")]
    pub(crate) warm_python: Option<String>,

    /// Virtual CPUs.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32), value_name = "N")]
    pub(crate) vcpus: u8,

    /// Memory in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..), value_name = "MIB")]
    pub(crate) mem_size_mib: u64,

    /// No network device, neither in the parent nor in its children.
    #[arg(long)]
    pub(crate) no_network: bool,

    /// Print the snapshot as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
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
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Which snapshots something is done to.
#[derive(Debug, Args)]
pub(crate) struct TagsArgs {
    /// Tags of snapshots (`forkd images`).
    #[arg(required = true, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tags: Vec<String>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
