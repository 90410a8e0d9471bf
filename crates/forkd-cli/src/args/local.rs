//! What can be typed about this computer: settings, files for shells and readers, leftovers, and the
//! way from nothing to the first children.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{AnswerArgs, DaemonArgs, JsonArgs, parse_name};

/// Show every setting, its value and where that came from.
///
/// Settings come from a file, the environment and flags; each of these goes before the ones named
/// before it. Keys in the file are called like the flags of `forkd serve`, like those that stand before
/// every command and like those that say which daemon to talk to.
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

Exit status: 0 shown, 1 the file is wrong (what and where is said), 2 wrong usage."
)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ConfigCommand>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConfigCommand {
    /// Say whether a configuration file is right, without using it.
    #[command(after_help = "Example:
  forkd config check new.toml && sudo mv new.toml /etc/forkd/config.toml

Exit status: 0 right, 1 wrong (each problem with its line), 2 wrong usage.")]
    Check(ConfigCheckArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ConfigCheckArgs {
    /// The file.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// Print what a shell needs to complete forkd's commands and options.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd completions bash | sudo tee /usr/share/bash-completion/completions/forkd > /dev/null
  forkd completions zsh > ~/.zfunc/_forkd
  forkd completions fish > ~/.config/fish/completions/forkd.fish

Exit status: 0 printed, 2 wrong usage.")]
pub(crate) struct CompletionsArgs {
    /// The shell.
    #[arg(value_enum, value_name = "SHELL")]
    pub(crate) shell: Shell,
}

/// A shell that completes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Bash,
    Zsh,
    Fish,
}

/// Print the manual page of forkd, or write those of all its commands.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd man | man -l -
  sudo forkd man --dir /usr/local/share/man/man1

Exit status: 0 written, 1 failed, 2 wrong usage.")]
pub(crate) struct ManArgs {
    /// Write a page for each command into this folder.
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// What the documentation is made of.
#[derive(Debug, Subcommand)]
pub(crate) enum DocsCommand {
    /// Print docs/CLI.md.
    Cli,
}

/// Print where forkd keeps things on this computer.
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

/// Find what daemons and benches that died left behind, and remove it.
///
/// Processes of guests, folders, network namespaces, links and cgroups without an owner. The folder of a
/// `forkd bench` that was killed is one of them. Shows
/// what would be done unless --yes is given. What belongs to a daemon that runs is never touched: such a
/// daemon cleans up after itself.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd cleanup
  sudo forkd cleanup --yes
  sudo forkd cleanup --json | jq -r '.leftovers[] | select(.action == \"delete\") | .path'

Exit status: 0 shown or removed, 1 something could not be removed, 2 wrong usage.")]
pub(crate) struct CleanupArgs {
    /// Remove what nobody owns.
    #[arg(long, short)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) output: JsonArgs,
}

/// From nothing to the first children: checks this computer, makes an image, warms it and forks it.
///
/// What was made before is used again. Where KVM cannot run Linux everything happens in the emulated
/// machine, many times slower.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd quickstart
  forkd quickstart -n 3 --yes

Exit status: 0 all children answer, 1 something failed or was not wanted, 2 wrong usage.")]
pub(crate) struct QuickstartArgs {
    /// How many children, 1 to 1000.
    #[arg(short = 'n', long = "n", alias = "count", default_value_t = 10,
          value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    pub(crate) count: u16,

    /// Image to warm.
    #[arg(long, default_value = "python", value_parser = parse_name, value_name = "NAME")]
    pub(crate) image: String,

    /// Do not ask.
    #[arg(long, short)]
    pub(crate) yes: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Warm an image and keep it as a snapshot: `forkd image build` and `forkd snapshot` in one.
///
/// The image is one of the library's or one that forkd knows how to build (`python`); with --extra, a
/// new one with these packages as well. Images of registries are not fetched: export them to a tar first.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd from-image python --tag numpy
  forkd from-image python --tag dev --extra git --extra jq --mem-size-mib 1024

An image of a registry, here node:22:
  docker export $(docker create node:22) > node.tar
  forkd image build node --tar node.tar
  forkd from-image node --tag node

Exit status: 0 made, 1 failed, 130 cancelled by ^C, 2 wrong usage.")]
pub(crate) struct FromImageArgs {
    /// Name of the image.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,

    /// Name for the snapshot.
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

/// What an image gets beyond what it is made from.
#[derive(Debug, Args)]
pub(crate) struct ExtraArgs {
    /// Debian package to add; may be given several times.
    #[arg(long, value_delimiter = ',', value_name = "PKG")]
    pub(crate) extra: Vec<String>,

    /// Size of the disk in MiB [default: what it holds and room to write].
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..), value_name = "MIB")]
    pub(crate) size_mib: Option<u64>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ParentCommand {
    Build(ParentBuildArgs),
}

/// Build the root disk of a parent: `forkd image build` under the name older scripts know.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd parent build python
  forkd parent build python --extra git --output tools

Exit status: 0 built or there already, 1 failed, 2 wrong usage.")]
pub(crate) struct ParentBuildArgs {
    /// Name of the image to start from.
    #[arg(value_name = "IMAGE")]
    pub(crate) image: String,

    /// Name for the new one [default: made of the image and the packages].
    #[arg(long, short, value_parser = parse_name, value_name = "NAME")]
    pub(crate) output: Option<String>,

    #[command(flatten)]
    pub(crate) extras: ExtraArgs,

    #[command(flatten)]
    pub(crate) json: JsonArgs,
}

/// Measure this daemon: spawn, command, branch, fan-out and cleanup, with the time each takes.
#[derive(Debug, Args)]
pub(crate) struct QuickBenchArgs {
    /// Snapshot to fork [default: the first that is ready].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Children of the fan-out, 1 to 1000.
    #[arg(long = "n", short = 'n', alias = "count", default_value_t = 5,
          value_parser = clap::value_parser!(u16).range(1..=1000), value_name = "N")]
    pub(crate) count: u16,

    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
