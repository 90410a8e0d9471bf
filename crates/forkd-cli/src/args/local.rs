//! Arguments of the commands about this host: settings, documentation, cleanup, and the first children.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{AnswerArgs, DaemonArgs, JsonArgs, parse_name};

/// Show every setting, its value and the source of the value.
///
/// Precedence: flags, environment, file. Keys in the file are named after the flags of `forkd serve`, the
/// flags before every command, and the flags that select the daemon.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  forkd config
  forkd config --json | jq -r '.settings[] | select(.source == \"file\") | .key'
  forkd config check /etc/forkd/config.toml

A file:
  data_dir = \"/srv/forkd\"
  bind = \"127.0.0.1:9000\"
  branch_max_count = 100

Exit status: 0 shown, 1 the file is wrong (each problem with its line), 2 wrong usage."
)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ConfigCommand>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Check a configuration file without using it.
    #[command(after_help = "Example:
  forkd config check new.toml && sudo mv new.toml /etc/forkd/config.toml

Exit status: 0 valid, 1 wrong (each problem with its line), 2 wrong usage.")]
    Check(ConfigCheckArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    /// File to check.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// Print the script with which a shell completes forkd's commands and options.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd completions bash | sudo tee /usr/share/bash-completion/completions/forkd > /dev/null
  forkd completions zsh > ~/.zfunc/_forkd
  forkd completions fish > ~/.config/fish/completions/forkd.fish

Exit status: 0 printed, 2 wrong usage.")]
pub(crate) struct CompletionsArgs {
    /// Shell to print the script for.
    #[arg(value_enum, value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// A shell with completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Print the manual page of forkd, or write the pages of all its commands.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd man | man -l -
  sudo forkd man --dir /usr/local/share/man/man1

Exit status: 0 written, 1 failed, 2 wrong usage.")]
pub(crate) struct ManArgs {
    /// Write one page per command into this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// Print generated documentation.
#[derive(Debug, Subcommand)]
pub(crate) enum DocsCommand {
    /// Print docs/CLI.md.
    Cli,
}

/// Print the paths that forkd uses on this host.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd paths
  du -sh \"$(forkd paths)\"
  forkd paths --json | jq -r .socket

Exit status: 0 printed, 2 wrong usage.")]
pub(crate) struct PathsArgs {
    #[command(flatten)]
    pub(crate) output: JsonArgs,
}

/// Find leftovers of dead daemons and benchmarks, and remove them.
///
/// Leftovers are guest processes, folders, network namespaces, links and cgroups without an owner, and the
/// folder of a killed `forkd bench`. Without --yes this command only lists them. It never touches objects of
/// a running daemon: such a daemon cleans up after itself.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd cleanup
  sudo forkd cleanup --yes
  sudo forkd cleanup --json | jq -r '.leftovers[] | select(.action == \"delete\") | .path'

Exit status: 0 shown or removed, 1 something could not be removed, 2 wrong usage.")]
pub(crate) struct CleanupArgs {
    /// Remove the leftovers.
    #[arg(long, short)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) output: JsonArgs,
}

/// Fork the first children: check this host, build an image, warm it and fork it.
///
/// Reuses an image and a snapshot that exist. Where KVM cannot run Linux, the emulated machine is used,
/// many times slower.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd quickstart
  forkd quickstart -n 3 --yes

Exit status: 0 all children answer, 1 failed or declined, 2 wrong usage.")]
pub(crate) struct QuickstartArgs {
    /// Number of children, 1 to 1000.
    #[arg(short = 'n', long = "n", alias = "count", default_value_t = 10,
          value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    pub(crate) count: u16,

    /// Image to warm.
    #[arg(long, default_value = "python", value_parser = parse_name, value_name = "NAME")]
    pub(crate) image: String,

    /// Do not ask for confirmation.
    #[arg(long, short)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Warm an image and save it as a snapshot: `forkd image build` and `forkd snapshot` in one.
///
/// The image is in the library, or one that forkd can build (`python`). With --extra, forkd builds a new
/// image with these packages. Images of registries are not fetched: export them to a tar first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd from-image python --tag numpy
  forkd from-image python --tag dev --extra git --extra jq --mem-size-mib 1024

An image of a registry, here node:22:
  docker export $(docker create node:22) > node.tar
  forkd image build node --tar node.tar
  forkd from-image node --tag node

Exit status: 0 created, 1 failed, 130 cancelled by ^C, 2 wrong usage.")]
pub(crate) struct FromImageArgs {
    /// Name of the image.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,

    /// Tag of the snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    #[command(flatten)]
    pub(crate) extras: ExtraArgs,

    /// Memory in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..), value_name = "MIB")]
    pub(crate) mem_size_mib: u64,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Additions to an image.
#[derive(Debug, Args)]
pub(crate) struct ExtraArgs {
    /// Debian package to add. Repeatable.
    #[arg(long, value_delimiter = ',', value_name = "PKG")]
    pub(crate) extra: Vec<String>,

    /// Size of the disk in MiB [default: its content and free space].
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..), value_name = "MIB")]
    pub(crate) size_mib: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ParentCommand {
    Build(ParentBuildArgs),
}

/// Build a root disk: `forkd image build` under the name older scripts use.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd parent build python
  forkd parent build python --extra git --output tools

Exit status: 0 built, or it exists; 1 failed; 2 wrong usage.")]
pub(crate) struct ParentBuildArgs {
    /// Name of the image to start from.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,

    /// Name of the new image [default: derived from the image and the packages].
    #[arg(long, short, value_parser = parse_name, value_name = "NAME")]
    pub(crate) output: Option<String>,

    #[command(flatten)]
    pub(crate) extras: ExtraArgs,

    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// Measure this daemon: the time of a spawn, a command, a branch, a fan-out and the cleanup.
#[derive(Debug, Args)]
pub(crate) struct QuickBenchArgs {
    /// Snapshot to fork [default: the first that is ready].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Number of children of the fan-out, 1 to 1000.
    #[arg(long = "n", short = 'n', alias = "count", default_value_t = 5,
          value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    pub(crate) count: u16,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TemplateCommand {
    Prepare(TemplatePrepareArgs),
}

/// Make templates ready: build their images and warm their snapshots.
///
/// Programs that use the E2B API create sandboxes from a template by its name. A template is a snapshot of the
/// image with that name. forkd builds the images `base` and `code-interpreter-v1` itself; other names are those
/// of images in the library. An existing snapshot is kept.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd template prepare base code-interpreter-v1
  forkd template prepare base --json | jq -r '.[] | select(.created) | .name'
  forkd image build mine --extra python3,sudo --sudo && forkd template prepare mine

Exit status: 0 all ready, 1 failed, 130 cancelled by ^C, 2 wrong usage.")]
pub(crate) struct TemplatePrepareArgs {
    /// Names of templates.
    #[arg(required = true, value_parser = parse_name, value_name = "NAME")]
    pub(crate) names: Vec<String>,

    /// Make the snapshots again, and the images that another version of forkd built.
    #[arg(long)]
    pub(crate) force: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}
