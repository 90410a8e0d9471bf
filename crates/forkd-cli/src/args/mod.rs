//! The grammar of the command line: commands, options and help texts. This module only declares;
//! `commands` implements each command.

mod branches;
mod common;
pub(crate) mod compat_flags;
mod lifetime;
mod local;
mod mcp;
mod observe;
mod sandboxes;
mod serve;
mod snapshots;
#[cfg(test)]
mod tests;
mod tokens;
#[cfg(test)]
mod vocabulary;
mod workspaces;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use forkd_api::MAX_TIMEOUT_SECS;

pub(crate) use branches::{BranchArgs, BranchMode, RollbackArgs, SnapshotDiffArgs, TreeArgs};
pub(crate) use common::{
    AgentTargetArgs, AnswerArgs, DaemonArgs, GuestArgs, JsonArgs, LimitArgs, MemoryLimitArgs, ProcessArgs,
    SandboxArgs, SandboxesArgs, TargetArgs,
};
use common::{parse_id, parse_name, parse_variable};
pub(crate) use lifetime::{FilterArgs, LifetimeArgs, UpdateArgs};
pub(crate) use local::{
    CleanupArgs, CompletionsArgs, ConfigArgs, ConfigCheckArgs, ConfigCommand, DocsCommand, ExtraArgs,
    FromImageArgs, ManArgs, ParentBuildArgs, ParentCommand, PathsArgs, QuickBenchArgs, QuickstartArgs, Shell,
    TemplateCommand, TemplatePrepareArgs,
};
pub(crate) use mcp::{McpArgs, McpClient, McpCommand, McpConfigArgs};
pub(crate) use observe::{EventsArgs, LogsArgs, TopArgs};
pub(crate) use sandboxes::{
    AgentPortArgs, ChildrenArgs, CpArgs, DiffArgs, EvalArgs, ExecArgs, ForkArgs, InspectArgs, KillArgs,
    LsArgs, PingArgs, ShellArgs, SpawnArgs, StreamArgs,
};
pub(crate) use serve::{LogFormat, ServeArgs};
pub(crate) use snapshots::{
    ImagesArgs, RmiArgs, SnapshotArgs, SnapshotCompactArgs, SnapshotInfoArgs, TagsArgs,
};
pub(crate) use tokens::{TokenAddArgs, TokenCommand, TokenPrintArgs, TokenRmArgs, TokenRotateArgs};
pub(crate) use workspaces::{
    WorkspaceArgs, WorkspaceCommand, WorkspaceCreateArgs, WorkspaceRmArgs, WorkspaceSuspendArgs,
};

/// Fork for virtual machines: warm a microVM once, then fork children from it.
///
/// Works with and without KVM: where /dev/kvm cannot run Linux, forkd runs sandboxes in one emulated machine
/// (QEMU). It starts the machine on demand and prints a note.
#[derive(Debug, Parser)]
#[command(
    name = "forkd",
    version,
    after_help = "Examples:
  forkd run --image python -- python3 -c 'print(6 * 7)'
  forkd snapshot --tag numpy --image python --warm-python 'import numpy'
  forkd fork --tag numpy -n 10
  forkd eval $(forkd spawn --tag numpy) -- 'numpy.random.rand()'
  forkd branch sb4k2n --tag before-deploy
  forkd tree
  forkd doctor

New here? `forkd quickstart` prepares this host and forks the first children.

Exit status: 0 done, 1 failed, 2 wrong usage. `forkd run` and `forkd exec` exit with the command's own
status."
)]
pub(crate) struct Cli {
    /// Folder with images, kernels, snapshots and the machine [default: /var/lib/forkd as root, otherwise
    /// ~/.local/share/forkd].
    #[arg(long, global = true, env = "FORKD_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Read settings from this file [default: /etc/forkd/config.toml, if it exists].
    #[arg(long, global = true, env = "FORKD_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print only results, warnings and errors; no progress and no notes.
    #[arg(long, short, global = true)]
    pub(crate) quiet: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(RunArgs),
    Snapshot(SnapshotArgs),
    SnapshotDiff(SnapshotDiffArgs),
    SnapshotInfo(SnapshotInfoArgs),
    SnapshotCompact(SnapshotCompactArgs),
    Images(ImagesArgs),
    Rmi(RmiArgs),
    /// Free the memory of snapshots. They stay on disk, and their children keep running.
    #[command(after_help = "Example:
  forkd unload numpy

Exit status: 0 all unloaded, 1 one or more could not be, 2 wrong usage.")]
    Unload(TagsArgs),
    Fork(ForkArgs),
    Spawn(SpawnArgs),
    Branch(BranchArgs),
    Rollback(RollbackArgs),
    /// Pause sandboxes. They keep their memory and use no CPU.
    ///
    /// Their time-outs go on.
    #[command(after_help = "Example:
  forkd pause sb4k2n sb7x1q

Exit status: 0 all paused, 1 one or more could not be paused, 2 wrong usage.")]
    Pause(SandboxesArgs),
    /// Resume paused sandboxes.
    #[command(after_help = "Example:
  forkd resume sb4k2n sb7x1q

Exit status: 0 all resumed, 1 one or more could not be resumed, 2 wrong usage.")]
    Resume(SandboxesArgs),
    Tree(TreeArgs),
    /// Workspaces: named sandboxes that can be suspended and resumed.
    #[command(subcommand)]
    Workspace(WorkspaceCommand),
    Ls(LsArgs),
    Inspect(InspectArgs),
    Exec(ExecArgs),
    Shell(ShellArgs),
    Cp(CpArgs),
    Diff(DiffArgs),
    Eval(EvalArgs),
    Ping(PingArgs),
    #[command(alias = "line")]
    AgentPort(AgentPortArgs),
    #[command(alias = "set")]
    Update(UpdateArgs),
    Kill(KillArgs),
    Events(EventsArgs),
    Top(TopArgs),
    Logs(LogsArgs),
    Mcp(McpArgs),
    Serve(ServeArgs),
    Doctor(DoctorArgs),
    /// Tokens for access to the daemon over TCP.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Images: build, list and remove root disks.
    #[command(subcommand)]
    Image(ImageCommand),
    /// Templates: the snapshots that programs create sandboxes from over the E2B API.
    #[command(subcommand)]
    Template(TemplateCommand),
    /// The emulated machine used where KVM cannot run Linux.
    #[command(
        subcommand,
        after_help = "Environment, read by `start`:
  FORKD_MACHINE_MIB            memory of the machine in MiB [default: 4096]
  FORKD_MACHINE_WATCHDOG_SECS  seconds without an answer until it is restarted [default: 120]
  FORKD_QEMU                   the QEMU program [default: qemu-system-x86_64]"
    )]
    Machine(MachineCommand),
    Bench(crate::commands::bench::BenchArgs),
    Quickstart(QuickstartArgs),
    FromImage(FromImageArgs),
    /// Root disks, under the name older scripts use.
    #[command(subcommand)]
    Parent(ParentCommand),
    Cleanup(CleanupArgs),
    // The reference calls it `where`.
    #[command(visible_alias = "where")]
    Paths(PathsArgs),
    Config(ConfigArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    /// Print generated documentation.
    #[command(subcommand, hide = true)]
    Docs(DocsCommand),
}

/// The whole grammar: what help shows, and flags that are accepted for compatibility.
pub(crate) fn grammar() -> clap::Command {
    compat_flags::add(<Cli as clap::CommandFactory>::command())
}

/// Run one command in a fresh microVM and exit with its status.
///
/// The command uses this process's standard input, output and error. The microVM ends with the command, and
/// with this process, however that ends. An image called `python` is built on first use.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd run --image python -- python3 -c 'import numpy; print(numpy.zeros(5).tolist())'
  echo hello | forkd run --image python -- tr a-z A-Z
  forkd run -it --image python -- bash
  forkd run --image python --vcpus 2 --mem-size-mib 1024 --env LANG=C.UTF-8 --timeout-secs 60 -- sh -c 'nproc'

Exit status: the command's own, or
  124    the command reached its --timeout-secs
  125    forkd itself failed
  126    the command was found but could not be run
  127    the command was not found in the image
  128+N  signal N ended the command; 141 also when the reader of its output is gone
  2      wrong usage; nothing was run")]
pub(crate) struct RunArgs {
    /// Image to run the command in (`forkd image ls`).
    #[arg(long, value_parser = parse_name, value_name = "NAME")]
    pub(crate) image: String,

    #[command(flatten)]
    pub(crate) guest: GuestArgs,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    /// Kill the command after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "timeout", value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS),
          value_name = "SECS")]
    pub(crate) timeout: Option<u64>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,

    /// Accepted for compatibility; standard input is always forwarded.
    #[arg(long, short)]
    pub(crate) interactive: bool,

    /// Give the command a terminal, connected to this one if there is one.
    #[arg(long, short)]
    pub(crate) tty: bool,

    /// The command and its arguments, run without a shell.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// Check this host, and print how to fix each problem.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd doctor
  forkd doctor --json | jq '.checks[] | select(.status != \"pass\")'

Exit status: 0 no check failed (there may be warnings), 1 a check failed, 2 wrong usage.")]
pub(crate) struct DoctorArgs {
    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ImageCommand {
    Build(ImageBuildArgs),
    /// List images.
    #[command(after_help = "Examples:
  forkd image ls
  forkd image ls --json | jq -r '.[].name'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
    Ls(JsonArgs),
    /// Remove images. Sandboxes that use them keep running.
    #[command(after_help = "Example:
  forkd image rm tools mine

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
    Rm(ImageRmArgs),
}

/// Build a root disk.
///
/// The source is a list of Debian packages (the default), a tar of a root file system, or a folder. Without
/// a source, forkd builds `python`, `base` and `code-interpreter-v1` from its own recipes. Packages of PyPI and
/// npm are fetched on this host, by its pip3 and npm; packages that need a compiler are not installed.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd image build python
  forkd image build tools --extra git,curl,jq
  forkd image build mine --tar rootfs.tar --size-mib 4096
  forkd image build agents --extra python3,sudo --sudo --pip requests==2.32.3
  forkd image build web --extra nodejs --npm typescript,@types/node

Exit status: 0 built, 1 failed, 2 wrong usage.")]
pub(crate) struct ImageBuildArgs {
    /// Name of the image.
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,

    /// Debian packages to install besides the essential ones.
    #[arg(long = "extra", alias = "packages", value_delimiter = ',', group = "source", value_name = "PKG,…")]
    pub(crate) packages: Vec<String>,

    /// Tar of a root file system, compressed or not.
    #[arg(long, group = "source", value_name = "FILE")]
    pub(crate) tar: Option<PathBuf>,

    /// Folder with a root file system.
    #[arg(long, group = "source", value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,

    /// Debian suite for packages.
    #[arg(long, conflicts_with_all = ["tar", "folder"], value_name = "SUITE")]
    pub(crate) suite: Option<String>,

    /// Packages of PyPI to install for the image's Python.
    #[arg(long, value_delimiter = ',', conflicts_with = "folder", value_name = "PKG,…")]
    pub(crate) pip: Vec<String>,

    /// Packages of npm to install for all users. Their scripts do not run.
    #[arg(long, value_delimiter = ',', conflicts_with = "folder", value_name = "PKG,…")]
    pub(crate) npm: Vec<String>,

    /// Let the user `user` (uid 1000) do everything with sudo, without a password; add it if it is missing.
    #[arg(long, conflicts_with = "folder")]
    pub(crate) sudo: bool,

    /// Size of the disk in MiB [default: its content and free space].
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..), value_name = "MIB")]
    pub(crate) size_mib: Option<u64>,

    /// Replace an existing image of that name.
    #[arg(long)]
    pub(crate) force: bool,

    /// Print the image as one JSON object.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ImageRmArgs {
    /// Names of images.
    #[arg(required = true, value_parser = parse_name)]
    pub(crate) names: Vec<String>,

    /// Print the result of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MachineCommand {
    /// Start the machine and the daemon in it, unless it runs already.
    #[command(after_help = "Example:
  FORKD_MACHINE_MIB=8192 forkd machine start

Exit status: 0 running, 1 failed, 2 wrong usage.")]
    Start,
    /// Shut the machine down cleanly. Its disk keeps its content.
    #[command(after_help = "Example:
  forkd machine stop

Exit status: 0 not running, 1 failed, 2 wrong usage.")]
    Stop,
    /// Show the state of the machine.
    #[command(after_help = "Examples:
  forkd machine status
  forkd machine status --json | jq -r .state

Exit status: 0 shown, 1 failed, 2 wrong usage.")]
    Status(JsonArgs),
    Shell(MachineShellArgs),
    /// Supervise QEMU; `start` runs this.
    #[command(hide = true)]
    Supervise,
}

/// Open a shell in the machine, or run a command there.
///
/// You are root there and see this host's files, read-only. Your changes to them are lost when the machine
/// stops.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd machine shell
  forkd machine shell -- dmesg

Exit status: the command's; 128 + N if signal N ended it; 125 if forkd itself failed.")]
pub(crate) struct MachineShellArgs {
    /// Command to run instead of a shell.
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}
