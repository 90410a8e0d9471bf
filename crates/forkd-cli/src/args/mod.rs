//! What can be typed: the commands, their options and their help texts. Nothing here does
//! anything; `commands` gives each of these structs its meaning.

mod branches;
mod common;
pub(crate) mod compat_flags;
mod lifetime;
mod local;
mod observe;
mod sandboxes;
mod snapshots;
mod tokens;
#[cfg(test)]
mod vocabulary;
mod workspaces;

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

pub(crate) use branches::{BranchArgs, BranchMode, RollbackArgs, SnapshotDiffArgs, TreeArgs};
pub(crate) use common::{
    AgentTargetArgs, AnswerArgs, DaemonArgs, GuestArgs, JsonArgs, LimitArgs, MemoryLimitArgs, ProcessArgs,
    SandboxArgs, SandboxesArgs, TargetArgs,
};
use common::{MAX_SECS, parse_id, parse_name, parse_variable};
pub(crate) use lifetime::{FilterArgs, LifetimeArgs, UpdateArgs};
pub(crate) use local::{
    CleanupArgs, CompletionsArgs, ConfigArgs, ConfigCheckArgs, ConfigCommand, DocsCommand, ExtraArgs,
    FromImageArgs, ManArgs, ParentBuildArgs, ParentCommand, PathsArgs, QuickBenchArgs, QuickstartArgs, Shell,
};
pub(crate) use observe::{EventsArgs, LogsArgs, TopArgs};
pub(crate) use sandboxes::{
    AgentPortArgs, ChildrenArgs, CpArgs, EvalArgs, ExecArgs, ForkArgs, InspectArgs, KillArgs, LsArgs,
    PingArgs, ShellArgs, SpawnArgs, StreamArgs,
};
pub(crate) use snapshots::{
    ImagesArgs, RmiArgs, SnapshotArgs, SnapshotCompactArgs, SnapshotInfoArgs, TagsArgs,
};
pub(crate) use tokens::{
    TokenAddArgs, TokenCommand, TokenPrintArgs, TokenRmArgs, TokenRotateArgs, TokenScope,
};
pub(crate) use workspaces::{
    WorkspaceArgs, WorkspaceCommand, WorkspaceCreateArgs, WorkspaceRmArgs, WorkspaceSuspendArgs,
};

/// Fork for virtual machines: warm a microVM once, then fork children from it.
///
/// Works the same with and without KVM: where /dev/kvm cannot run Linux, forkd keeps one emulated
/// machine (QEMU) in which it can, starts it when it is needed, and says so.
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

New here? `forkd quickstart` goes from nothing to the first children.

Exit status: 0 done, 1 failed, 2 wrong usage. `forkd run` and `forkd exec` exit with the command's own
status."
)]
pub(crate) struct Cli {
    /// Where images, kernels, snapshots and the machine live [default: /var/lib/forkd as root,
    /// otherwise ~/.local/share/forkd].
    #[arg(long, global = true, env = "FORKD_DATA_DIR", value_name = "DIR")]
    pub(crate) data_dir: Option<PathBuf>,

    /// Read settings from this file [default: /etc/forkd/config.toml, if it is there].
    #[arg(long, global = true, env = "FORKD_CONFIG", value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,

    /// Print no progress and no notes; only results, warnings and errors.
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
    /// Free the memory snapshots hold. They stay on disk, and children that run go on.
    #[command(after_help = "Example:
  forkd unload numpy

Exit status: 0 all unloaded, 1 one or more could not be, 2 wrong usage.")]
    Unload(TagsArgs),
    Fork(ForkArgs),
    Spawn(SpawnArgs),
    Branch(BranchArgs),
    Rollback(RollbackArgs),
    /// Make sandboxes stand still. They keep their memory and take no CPU.
    #[command(after_help = "Example:
  forkd pause sb4k2n sb7x1q

Exit status: 0 all stand still, 1 one or more could not be paused, 2 wrong usage.")]
    Pause(SandboxesArgs),
    /// Let paused sandboxes go on.
    #[command(after_help = "Example:
  forkd resume sb4k2n sb7x1q

Exit status: 0 all go on, 1 one or more could not be resumed, 2 wrong usage.")]
    Resume(SandboxesArgs),
    Tree(TreeArgs),
    /// Sandboxes with a name that can be put away and taken up again.
    #[command(subcommand)]
    Workspace(WorkspaceCommand),
    Ls(LsArgs),
    Inspect(InspectArgs),
    Exec(ExecArgs),
    Shell(ShellArgs),
    Cp(CpArgs),
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
    Serve(ServeArgs),
    Doctor(DoctorArgs),
    /// Tokens: who may talk to the daemon over TCP, and what they may do.
    #[command(subcommand)]
    Token(TokenCommand),
    /// Root disks: build, list and remove them.
    #[command(subcommand)]
    Image(ImageCommand),
    /// The emulated machine used where KVM cannot run Linux.
    #[command(
        subcommand,
        after_help = "Environment, read by `start`:
  FORKD_MACHINE_MIB            memory of the machine in MiB [default: 4096]
  FORKD_MACHINE_WATCHDOG_SECS  silence after which it is replaced by a fresh one [default: 120]
  FORKD_QEMU                   the QEMU program [default: qemu-system-x86_64]"
    )]
    Machine(MachineCommand),
    Bench(crate::commands::bench::BenchArgs),
    Quickstart(QuickstartArgs),
    FromImage(FromImageArgs),
    /// Root disks, under the name older scripts know.
    #[command(subcommand)]
    Parent(ParentCommand),
    Cleanup(CleanupArgs),
    // The reference calls it `where`.
    #[command(visible_alias = "where")]
    Paths(PathsArgs),
    Config(ConfigArgs),
    Completions(CompletionsArgs),
    Man(ManArgs),
    /// What the documentation is made of.
    #[command(subcommand, hide = true)]
    Docs(DocsCommand),
}

/// Everything that can be typed: what help shows, and flags that have lost their meaning.
pub(crate) fn grammar() -> clap::Command {
    compat_flags::add(<Cli as clap::CommandFactory>::command())
}

/// Run one command in a fresh microVM and exit with its status.
///
/// Standard input, output and error are the command's. The microVM ends with the command, and with
/// this process, however that ends. An image called `python` is built on first use.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd run --image python -- python3 -c 'import numpy; print(numpy.zeros(5).tolist())'
  echo hello | forkd run --image python -- tr a-z A-Z
  forkd run -it --image python -- bash
  forkd run --image python --vcpus 2 --mem-size-mib 1024 --env LANG=C.UTF-8 --timeout-secs 60 -- sh -c 'nproc'

Exit status: the command's own, or
  124    its --timeout-secs were over
  125    forkd itself failed
  126    the command was found but could not be run
  127    the command was not found in the image
  128+N  signal N ended it; 141 also when nobody reads its output any more
  2      wrong usage; nothing was run")]
pub(crate) struct RunArgs {
    /// Image to run the command in (`forkd image ls`).
    #[arg(long, value_parser = parse_name, value_name = "NAME")]
    pub(crate) image: String,

    #[command(flatten)]
    pub(crate) guest: GuestArgs,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    /// End the command after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "timeout", value_parser = clap::value_parser!(u64).range(1..=MAX_SECS),
          value_name = "SECS")]
    pub(crate) timeout: Option<u64>,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,

    /// Standard input is the command's, with and without this.
    #[arg(long, short)]
    pub(crate) interactive: bool,

    /// Give the command a terminal: this one, if it is one.
    #[arg(long, short)]
    pub(crate) tty: bool,

    /// The command and its arguments; no shell is involved.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// Run the daemon, in the foreground.
///
/// It listens on a unix socket and on a loopback TCP address. `forkd run` starts it by itself when
/// KVM works here; run it by hand, or as a service, to keep it.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd serve
  sudo forkd serve --data-dir /srv/forkd --bind 127.0.0.1:9000
  sudo forkd serve --bind 0.0.0.0:8889 --tls-cert forkd.pem --tls-key forkd.key

Every option can be in the configuration file (`forkd config`), with `_` for `-`.

Environment:
  RUST_LOG  how much is logged, such as debug [default: info]

SIGTERM and SIGINT stop the daemon. Requests under way have 30 seconds to end, then its sandboxes have 30
seconds to go away; a second signal ends it at once.

Exit status: 0 asked to stop, 1 failed, 128+N ended by a second signal N, 2 wrong usage.")]
pub(crate) struct ServeArgs {
    /// Read images and kernels from here [default: the data directory].
    #[arg(long, value_name = "DIR")]
    pub(crate) library: Option<PathBuf>,

    /// Unix socket to listen on [default: /run/forkd/forkd.sock for /var/lib/forkd, otherwise
    /// forkd.sock in the data directory].
    #[arg(long, env = "FORKD_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// TCP address to listen on.
    #[arg(long, env = "FORKD_BIND", default_value = "127.0.0.1:8889", value_name = "ADDRESS:PORT")]
    pub(crate) bind: SocketAddr,

    /// Certificate for TCP clients, a PEM file; read again when it changes. An address that other computers
    /// can reach is served with one only.
    #[arg(long, env = "FORKD_TLS_CERT", requires = "tls_key", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// Private key of the certificate, a PEM file.
    #[arg(long, env = "FORKD_TLS_KEY", requires = "tls_cert", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Serve the loopback address without a token: every user of this computer owns all sandboxes.
    #[arg(long, env = "FORKD_INSECURE_LOOPBACK", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) insecure_loopback: bool,

    /// Folder from which requests may name kernels and disks, beside the daemon's own; may be given several
    /// times.
    #[arg(long = "allow-path", env = "FORKD_ALLOW_PATHS", value_delimiter = ':', value_name = "DIR")]
    pub(crate) allow_paths: Vec<PathBuf>,

    /// Requests a second of one token that is not an admin's, and twice as many at once; 0 is no limit.
    #[arg(long, env = "FORKD_RATE_LIMIT", default_value_t = 200, value_name = "PER_SEC")]
    pub(crate) rate_limit: u32,

    /// File with the token TCP clients must show; made at first start [default: token in the data
    /// directory].
    #[arg(long, env = "FORKD_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// Open a loopback port with the JSON-lines protocol for every sandbox [default: on request]. Access: root,
    /// the daemon's user, group forkd.
    #[arg(long, alias = "line-ports", env = "FORKD_AGENT_PORTS",
          value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) agent_ports: bool,

    /// File that every request is written to, a line each [default: audit.log in the data directory].
    #[arg(long, env = "FORKD_AUDIT_LOG", value_name = "FILE")]
    pub(crate) audit_log: Option<PathBuf>,

    /// How the daemon's own log, on standard error, is written.
    #[arg(long, env = "FORKD_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub(crate) log_format: LogFormat,

    /// OpenTelemetry collector to send traces to, over HTTP, such as http://127.0.0.1:4318 [default: none].
    #[arg(long, env = "FORKD_OTLP_ENDPOINT", value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,

    /// Guest kernel, an ELF vmlinux or a bzImage [default: the library's]. Its modules are looked for in
    /// `modules` beside it and in /lib/modules.
    #[arg(long, env = "FORKD_KERNEL", value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// Network slots made ahead, once one was needed.
    #[arg(long, env = "FORKD_NETWORK_POOL", default_value_t = 4, value_name = "N",
          value_parser = clap::value_parser!(u64).range(0..=1000))]
    pub(crate) network_pool: u64,

    /// Private network that guests may reach, such as 10.20.0.0/16, or one port of it, TCP and UDP, such as
    /// 10.20.0.5/32:5432; may be given several times. This host itself stays out of reach [default: none].
    #[arg(long, env = "FORKD_EGRESS_PRIVATE", value_delimiter = ',', value_name = "CIDR[:PORT]")]
    pub(crate) egress_private: Vec<forkd_net::Opening>,

    /// Network flows of one guest at the same time; more are dropped.
    #[arg(long, env = "FORKD_SLOT_MAX_FLOWS", default_value_t = 4096, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_max_flows: u32,

    /// New network flows of one guest in a second.
    #[arg(long, env = "FORKD_SLOT_NEW_FLOWS_PER_SEC", default_value_t = 500, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_new_flows_per_sec: u32,

    /// New network flows of one guest at once, after a rest.
    #[arg(long, env = "FORKD_SLOT_NEW_FLOWS_BURST", default_value_t = 2000, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_new_flows_burst: u32,

    /// Remove branches of sandboxes after this many seconds, if nothing needs them [default: never].
    #[arg(long, env = "FORKD_BRANCH_MAX_AGE", value_name = "SECS")]
    pub(crate) branch_max_age: Option<u64>,

    /// Keep at most this many branches that nothing needs, the youngest [default: all].
    #[arg(long, env = "FORKD_BRANCH_MAX_COUNT", value_name = "N")]
    pub(crate) branch_max_count: Option<usize>,

    /// Free the memory of branches after this many seconds without a new child; 0 never. Those that could not be
    /// saved are lost then.
    #[arg(long, env = "FORKD_BRANCH_UNLOAD_SECS", default_value_t = 600, value_name = "SECS")]
    pub(crate) branch_unload_secs: u64,

    /// Take no live branch while the disk of the data directory has less than this free.
    #[arg(long, env = "FORKD_MIN_FREE_MIB", default_value_t = 256, value_name = "MIB",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    pub(crate) min_free_mib: u64,

    /// Branches taken at the same time; more are refused [default: 8].
    #[arg(long, env = "FORKD_BRANCH_CONCURRENCY", value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) branch_concurrency: Option<u64>,

    /// How many seconds a guest may take to boot [default: 120].
    #[arg(long, env = "FORKD_BOOT_TIMEOUT_SECS", value_name = "SECS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) boot_timeout_secs: Option<u64>,

    /// Seconds of silence after which a guest counts as hung [default: 60].
    #[arg(long, env = "FORKD_UNRESPONSIVE_SECS", value_name = "SECS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) unresponsive_secs: Option<u64>,

    /// In the emulated machine: also serve what QEMU forwards.
    #[arg(long, hide = true)]
    pub(crate) in_machine: bool,
}

/// How a log is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines for people.
    Text,
    /// One object per line.
    Json,
}

/// Check what this computer can do, and say how to fix what it cannot.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd doctor
  forkd doctor --json | jq '.checks[] | select(.status != \"pass\")'

Exit status: 0 when nothing failed, perhaps with warnings; 1 when something did; 2 wrong usage.")]
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
    /// Remove images. Sandboxes that run from them go on.
    #[command(after_help = "Example:
  forkd image rm tools mine

Exit status: 0 all removed, 1 one or more could not be, 2 wrong usage.")]
    Rm(ImageRmArgs),
}

/// Build a root disk.
///
/// From Debian packages (the default), from a tar of a root file system or from a folder. Without a
/// source, `python` and other images forkd knows are built as it knows them.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd image build python
  forkd image build tools --extra git,curl,jq
  forkd image build mine --tar rootfs.tar --size-mib 4096

Exit status: 0 built, 1 failed, 2 wrong usage.")]
pub(crate) struct ImageBuildArgs {
    /// Its name.
    #[arg(value_parser = parse_name)]
    pub(crate) name: String,

    /// Debian packages, in addition to the essential ones.
    #[arg(long = "extra", alias = "packages", value_delimiter = ',', group = "source", value_name = "PKG,…")]
    pub(crate) packages: Vec<String>,

    /// A tar of a root file system, compressed or not.
    #[arg(long, group = "source", value_name = "FILE")]
    pub(crate) tar: Option<PathBuf>,

    /// A folder that holds a root file system.
    #[arg(long, group = "source", value_name = "DIR")]
    pub(crate) folder: Option<PathBuf>,

    /// Debian suite for packages.
    #[arg(long, conflicts_with_all = ["tar", "folder"], value_name = "SUITE")]
    pub(crate) suite: Option<String>,

    /// Size of the disk in MiB [default: what it holds and room to write].
    #[arg(long, value_parser = clap::value_parser!(u64).range(16..), value_name = "MIB")]
    pub(crate) size_mib: Option<u64>,

    /// Replace an image of that name.
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

    /// Print what became of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum MachineCommand {
    /// Start the machine and the daemon in it; nothing happens if it runs.
    #[command(after_help = "Example:
  FORKD_MACHINE_MIB=8192 forkd machine start

Exit status: 0 it runs, 1 failed, 2 wrong usage.")]
    Start,
    /// Shut the machine down cleanly. What was written to its disk stays.
    #[command(after_help = "Example:
  forkd machine stop

Exit status: 0 it does not run, 1 failed, 2 wrong usage.")]
    Stop,
    /// Say how the machine is.
    #[command(after_help = "Examples:
  forkd machine status
  forkd machine status --json | jq -r .state

Exit status: 0 told, 1 failed, 2 wrong usage.")]
    Status(JsonArgs),
    Shell(MachineShellArgs),
    /// Parent of QEMU; started by `start`.
    #[command(hide = true)]
    Supervise,
}

/// Open a shell in the machine, or run a command there.
///
/// You are root there, on this computer's own files, read-only under a layer that is forgotten
/// when the machine stops.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd machine shell
  forkd machine shell -- dmesg

Exit status: the command's; 128 + N when signal N ended it; 125 when forkd itself failed.")]
pub(crate) struct MachineShellArgs {
    /// Command to run instead of a shell.
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_commands_are_consistent() {
        Cli::command().debug_assert();
    }

    /// Calls `check` for each command that does something by itself and that help shows.
    fn for_each_command(command: &clap::Command, above: &str, check: &mut dyn FnMut(&str, &clap::Command)) {
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            let path = format!("{above}{}", inner.get_name());
            if !inner.has_subcommands() || !inner.is_subcommand_required_set() {
                check(&path, inner);
            }
            for_each_command(inner, &format!("{path} "), check);
        }
    }

    #[test]
    fn every_command_shows_an_example_and_what_it_exits_with() {
        for_each_command(&grammar(), "", &mut |path, command| {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Example"), "{path} has no example in its help");
            assert!(help.contains("Exit status"), "{path} does not say what it exits with");
        });
    }

    /// What these print is a command's, a file's or nothing.
    const NO_DATA: &[&str] = &[
        "run",
        "shell",
        "cp",
        "logs",
        "serve",
        "machine start",
        "machine stop",
        "machine shell",
        "bench report",
        "config check",
        "completions",
        "man",
    ];

    #[test]
    fn every_command_that_prints_data_prints_json() {
        for_each_command(&grammar(), "", &mut |path, command| {
            let json = command.get_arguments().any(|arg| arg.get_long() == Some("json"));
            assert!(json || NO_DATA.contains(&path), "{path} has no --json");
        });
    }

    #[test]
    fn every_command_that_talks_to_a_daemon_can_be_told_to_which() {
        const LOCAL: &[&str] = &["image ls", "image rm", "image build", "machine status", "paths", "cleanup"];
        const OWN: &[&str] = &["bench spawn", "bench branch", "parent build"];
        for_each_command(&grammar(), "", &mut |path, command| {
            let url = command.get_arguments().any(|arg| arg.get_long() == Some("daemon-url"));
            let known = [NO_DATA, LOCAL, OWN].iter().any(|list| list.contains(&path));
            assert!(url || known, "{path} has no --daemon-url");
        });
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_command() {
        let cli = Cli::try_parse_from([
            "forkd", "run", "--image", "python", "-e", "A=b=c", "--", "sh", "-c", "exit 7", "--json",
        ])
        .unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        assert_eq!(run.command, ["sh", "-c", "exit 7", "--json"]);
        assert_eq!(run.process.env, [("A".to_owned(), "b=c".to_owned())]);
    }

    #[test]
    fn options_stand_before_the_dashes_and_ids_before_or_after_them() {
        let parse = |line: &[&str]| Cli::try_parse_from([&["forkd"], line].concat()).unwrap().command;
        let Command::Exec(exec) = parse(&["exec", "--json", "sb1", "--", "ls", "--all"]) else { panic!() };
        assert!(exec.answer.json && exec.sandbox.id.as_deref() == Some("sb1"));
        assert_eq!(exec.command, ["ls", "--all"]);
        let Command::Eval(eval) = parse(&["eval", "sb1", "--", "-1", "+", "2"]) else { panic!() };
        assert_eq!(eval.code, ["-1", "+", "2"]);
        let Command::Fork(fork) = parse(&["fork", "--tag", "t", "-n", "1000"]) else { panic!() };
        assert_eq!((fork.children.count, fork.settle_secs), (1000, None));
        let Command::Kill(kill) = parse(&["kill", "--tag", "t"]) else { panic!() };
        assert!(kill.ids.is_empty() && !kill.all && kill.filter.tag.as_deref() == Some("t"));
    }

    #[test]
    fn what_makes_no_sense_is_wrong_usage() {
        for line in [
            &["forkd", "run", "--image", "python"][..],
            &["forkd", "run", "--", "sh"],
            &["forkd", "run", "--image", "p", "--vcpus", "0", "--", "sh"],
            &["forkd", "run", "--image", "p", "--env", "nothing", "--", "sh"],
            &["forkd", "run", "--image", "../p", "--", "sh"],
            &["forkd", "image", "build", "../x"],
            &["forkd", "image", "build", "x", "--tar", "a", "--folder", "b"],
            &["forkd", "image", "rm"],
            &["forkd", "snapshot", "--tag", "t"],
            &["forkd", "snapshot", "--tag", "../t", "--image", "python"],
            &["forkd", "snapshot", "--tag", "t", "--image", "python", "--vcpus", "0"],
            &["forkd", "fork", "-n", "3"],
            &["forkd", "fork", "--tag", "t", "-n", "0"],
            &["forkd", "fork", "--tag", "t", "-n", "1001"],
            &["forkd", "spawn", "--tag", ".", "-n", "1"],
            &["forkd", "spawn", "--tag", "t", "--env", "=x"],
            &["forkd", "rmi"],
            &["forkd", "unload", "a/b"],
            &["forkd", "exec", "sb1"],
            &["forkd", "exec", "no-id", "--", "true"],
            &["forkd", "exec", "sb1", "--timeout", "0", "--", "true"],
            &["forkd", "exec", "sb1", "-i", "--json", "--", "true"],
            &["forkd", "shell"],
            &["forkd", "cp", "a"],
            &["forkd", "eval", "sb1"],
            &["forkd", "eval", "SB1", "--", "1"],
            &["forkd", "ping"],
            &["forkd", "kill"],
            &["forkd", "kill", "sb1", "--all"],
            &["forkd", "kill", "--all", "--tag", "t"],
            &["forkd", "kill", "../sb1"],
            &["forkd", "branch"],
            &["forkd", "branch", "numpy"],
            &["forkd", "branch", "sb1", "--tag", "a/b"],
            &["forkd", "branch", "sb1", "--mode", "fast"],
            &["forkd", "snapshot-diff", "--from", "a", "--tag", "b"],
            &[
                "forkd",
                "snapshot-diff",
                "--from",
                "a",
                "--tag",
                "b",
                "--exec",
                "x",
                "--exec-timeout-secs",
                "0",
            ],
            &["forkd", "snapshot-info"],
            &["forkd", "snapshot-compact", "a"],
            &["forkd", "snapshot-compact", "--to", "b"],
            &["forkd", "snapshot-compact", "a", "--from", "a", "--to", "b"],
            &["forkd", "rmi", "a", "--cascade", "--force"],
            &["forkd", "rollback", "sb1", "--to", ".."],
            &["forkd", "pause"],
            &["forkd", "resume", "numpy"],
            &["forkd", "tree", "--json", "--dot"],
            &["forkd", "tree", "--dot", "--svg", "x"],
            &["forkd", "workspace", "create", "w"],
            &["forkd", "workspace", "create", "../w", "--snapshot", "t"],
            &["forkd", "workspace", "suspend"],
            &["forkd", "workspace", "rm"],
            &["forkd", "token", "add"],
            &["forkd", "token", "add", "../x"],
            &["forkd", "token", "add", "x", "--scope", "root"],
            &["forkd", "token", "add", "x", "--expires-in", "0"],
            &["forkd", "token", "rm"],
            &["forkd", "serve", "--tls-cert", "x"],
            &["forkd", "serve", "--tls-key", "x"],
        ] {
            assert_eq!(Cli::try_parse_from(line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }
}
