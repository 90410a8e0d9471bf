//! Arguments of the commands that fork, list, use and end sandboxes.

use clap::Args;
use forkd_api::MAX_TIMEOUT_SECS;

use super::{
    AgentTargetArgs, AnswerArgs, DaemonArgs, FilterArgs, LifetimeArgs, LimitArgs, MemoryLimitArgs,
    ProcessArgs, SandboxArgs, TargetArgs, parse_id, parse_name, parse_variable,
};

/// The most children of one request.
const MAX_CHILDREN: i64 = 1000;

/// The children to fork.
#[derive(Debug, Args)]
pub(crate) struct ChildrenArgs {
    /// Number of children, 1 to 1000.
    #[arg(short = 'n', long = "n", alias = "count", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=MAX_CHILDREN), value_name = "N")]
    pub(crate) count: u16,

    /// Give the children no network.
    #[arg(long)]
    pub(crate) no_network: bool,

    #[command(flatten)]
    pub(crate) limit: MemoryLimitArgs,

    /// Environment variable for every command in the children; use it for secrets. Repeatable.
    #[arg(long, short, value_parser = parse_variable, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,

    #[command(flatten)]
    pub(crate) lifetime: LifetimeArgs,
}

/// Parses the id of a sandbox to fork.
fn parse_source(text: &str) -> Result<String, String> {
    parse_id(text).map_err(|error| format!("{error}; a snapshot is given with --tag"))
}

/// Fork children from a snapshot or a running sandbox, and print how long it took.
///
/// Each child is a separate microVM with its own identity and network, and with memory and disk shared
/// copy-on-write. The daemon measures the times: from the arrival of the request to the first answer of a
/// child's agent.
///
/// A running sandbox is paused for some milliseconds and continues; all children continue from that instant.
/// No snapshot is made. `forkd branch` makes one, which can be forked again later.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd fork --tag numpy -n 100
  forkd fork sb4k2n -n 3
  forkd fork --tag numpy -n 10 --json | jq -r '.children[].id'
  forkd fork --tag numpy -n 1000 --no-network --settle-secs 5

Exit status: 0 all children answer, 1 some or all failed (children that answer are printed and keep
running), 130 interrupted by ^C, 2 wrong usage.")]
pub(crate) struct ForkArgs {
    /// Running sandbox to fork (`forkd ls`). Give either this or --tag.
    #[arg(value_parser = parse_source, value_name = "ID")]
    pub(crate) sandbox: Option<String>,

    /// Snapshot to fork (`forkd images`).
    #[arg(long, value_parser = parse_name, required_unless_present = "sandbox", conflicts_with = "sandbox",
          value_name = "TAG")]
    pub(crate) tag: Option<String>,

    #[command(flatten)]
    pub(crate) children: ChildrenArgs,

    /// Stay for this many seconds, then end the children; they also end when this command ends. Until then
    /// this command serves their agent ports, the first one on FORKD_TARGET if that is set.
    #[arg(long, conflicts_with = "ttl", value_parser = clap::value_parser!(u64).range(0..=MAX_TIMEOUT_SECS),
          value_name = "SECS")]
    pub(crate) settle_secs: Option<u64>,

    /// Open no agent ports. By default, if the daemon is on this computer, each child gets a loopback port with
    /// the JSON-lines protocol, printed as FORKD_TARGET. Access: users of the daemon's socket; if the daemon is
    /// reached over TCP, this user.
    #[arg(long, alias = "no-line-port", conflicts_with = "settle_secs")]
    pub(crate) no_agent_port: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Fork children from a snapshot and print their ids, one per line.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  ID=$(forkd spawn --tag numpy)
  forkd spawn --tag numpy -n 20 --env API_KEY=secret > ids
  forkd spawn --tag numpy -n 500 --no-wait
  forkd spawn --tag numpy --label job=7 --idle-timeout-secs 600 --on-timeout suspend

Exit status: 0 all children started, 1 some or all failed (children that started are printed and keep
running), 2 wrong usage.")]
pub(crate) struct SpawnArgs {
    /// Snapshot to fork (`forkd images`).
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    #[command(flatten)]
    pub(crate) children: ChildrenArgs,

    /// Do not wait until the children answer; `forkd ls` shows their state.
    #[arg(long)]
    pub(crate) no_wait: bool,

    /// Open an agent port for each child: a port with the JSON-lines protocol on the daemon's loopback, printed
    /// as FORKD_TARGET. Access: root, the daemon's user, group forkd.
    #[arg(long, alias = "line-port")]
    pub(crate) agent_port: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// List sandboxes: forked children, and those booted from an image.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd ls
  forkd ls --label job=7 --state running
  forkd ls --archived
  forkd ls --json | jq -r '.[] | select(.state == \"running\") | .id'

Exit status: 0 listed, 1 failed, 2 wrong usage.")]
pub(crate) struct LsArgs {
    #[command(flatten)]
    pub(crate) filter: FilterArgs,

    /// Only sandboxes in this state.
    #[arg(long, value_parser = ["starting", "running", "unresponsive", "paused", "ended", "unknown"], value_name = "STATE")]
    pub(crate) state: Option<String>,

    /// List sandboxes that ended, for one day, with the reason.
    #[arg(long, alias = "gone", conflicts_with = "state")]
    pub(crate) archived: bool,

    /// Print all columns and whole names. The default fits the width of the terminal.
    #[arg(long, conflicts_with = "json")]
    pub(crate) wide: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show one sandbox in detail.
///
/// Prints its snapshot, limits, network, time-outs, CPU and memory use, and its branches.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd inspect sb4k2n
  forkd inspect sb4k2n --json | jq -r '.branches[].tag'

Exit status: 0 shown, 1 failed, 2 wrong usage.")]
pub(crate) struct InspectArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Run a command in a sandbox and wait for its end.
///
/// Its standard input is empty; its output is printed when it has ended. ^C ends the waiting; the command
/// runs on until its time limit. With -i or -t, output is printed as the command writes it, signals are
/// forwarded, and the command ends with this process.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd exec sb4k2n -- uname -a
  forkd exec sb4k2n --env LANG=C.UTF-8 --cwd /tmp --user nobody --timeout-secs 10 -- sh -c 'pwd; id'
  forkd exec sb4k2n --json -- hostname | jq -r .stdout
  tar c src | forkd exec -i sb4k2n --cwd /root -- tar x
  forkd exec -it sb4k2n -- python3
  forkd exec --target 127.0.0.1:40123 -- hostname

Exit status: the command's own, with --json too, or
  124    the command reached its --timeout-secs
  125    forkd itself failed
  126    the command was found but could not be run
  127    the command was not found in the sandbox
  128+N  signal N ended the command
  2      wrong usage; nothing was run")]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) sandbox: TargetArgs,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    #[command(flatten)]
    pub(crate) streams: StreamArgs,

    /// Kill the command after this many seconds, at most 30 days [default: 600; with -i or -t none].
    #[arg(long = "timeout-secs", alias = "timeout", value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS),
          value_name = "SECS")]
    pub(crate) timeout: Option<u64>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,

    /// The command and its arguments, run without a shell.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// The standard streams of this process that a command uses.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// Forward standard input, and print output as the command writes it.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) interactive: bool,

    /// Give the command a terminal, connected to this one if there is one.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) tty: bool,
}

/// Open a shell in a sandbox, or run a command there on this terminal.
///
/// The command receives keys and the size of the window. If standard input is not a terminal, the command
/// gets none, and reads standard input as it is.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd shell sb4k2n
  forkd shell sb4k2n --user nobody -- top
  echo 'cd /etc; ls' | forkd shell sb4k2n

Exit status: the command's own; 128+N if signal N ended it; 125 if forkd itself failed.")]
pub(crate) struct ShellArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,

    /// Command to run instead of a shell.
    #[arg(last = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// Copy files and folders into a sandbox or out of it.
///
/// One side is SANDBOX:/PATH. A file is written whole or not at all. Links, special files and names that
/// lead out of DST are skipped with a warning.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd cp model.bin sb4k2n:/root/
  forkd cp -r sb4k2n:/root/results .
  generate | forkd cp - sb4k2n:/root/input.csv
  forkd cp sb4k2n:/var/log/dpkg.log - | tail

Exit status: 0 everything copied, 1 failed or something was skipped, 2 wrong usage.")]
pub(crate) struct CpArgs {
    /// Source: a path on this host, SANDBOX:/PATH, or - for standard input.
    #[arg(value_name = "SRC")]
    pub(crate) source: String,

    /// Destination: a path on this host, SANDBOX:/PATH, or - for standard output. In an existing folder the
    /// copy gets the name of SRC.
    #[arg(value_name = "DST")]
    pub(crate) destination: String,

    /// Copy folders with their content.
    #[arg(long, short)]
    pub(crate) recursive: bool,

    /// Read and write files as this user of the sandbox [default: root].
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show the files that differ between two sandboxes.
///
/// Compares content, size, type, permission bits and link targets; not times. Pseudo file systems such as /proc
/// are left out. The command reads all files below PATH.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd diff sb4k2n sb7x1q /root
  forkd diff sb4k2n sb7x1q /root --json | jq -r '.[] | select(.kind == \"added\") | .path'

Exit status: 0 compared, with or without differences, 1 failed, 2 wrong usage.")]
pub(crate) struct DiffArgs {
    #[command(flatten)]
    pub(crate) sandbox: SandboxArgs,

    /// Id of the other sandbox.
    #[arg(value_parser = parse_id, value_name = "OTHER")]
    pub(crate) other: String,

    /// Folder to compare, in both sandboxes.
    #[arg(default_value = "/", value_name = "PATH")]
    pub(crate) path: String,

    /// Read files as this user of the sandboxes [default: root].
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Evaluate Python in a sandbox's warmed interpreter.
///
/// Prints the output of the code, then the value of its last expression. Names stay defined for the next
/// `eval`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd eval sb4k2n -- '6 * 7'
  forkd eval sb4k2n -- 'import numpy; numpy.random.rand(3).tolist()'
  forkd eval sb4k2n --json -- '[1, 2]' | jq .result_json

Exit status: 0 evaluated, 1 the code raised (its traceback is on standard error), 124 it reached its
--timeout-secs, 125 forkd itself failed, 2 wrong usage.")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) sandbox: TargetArgs,

    #[command(flatten)]
    pub(crate) limit: LimitArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,

    /// Python code; arguments are joined by spaces.
    #[arg(last = true, required = true, value_name = "CODE")]
    pub(crate) code: Vec<String>,
}

/// Check that the agents in sandboxes answer.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd ping sb4k2n
  forkd ping $(forkd spawn --tag numpy -n 3) --json

Exit status: 0 all answer, 1 one or more do not, 2 wrong usage.")]
pub(crate) struct PingArgs {
    /// Ids of sandboxes (`forkd ls`).
    #[arg(required_unless_present = "target", value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    #[command(flatten)]
    pub(crate) target: AgentTargetArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Open an agent port for a sandbox: a loopback port with the JSON-lines protocol.
///
/// A client sends one JSON line and receives one. Clients of the reference read the address from FORKD_TARGET.
/// The port closes when the sandbox ends. Access: the user who runs this command, and root.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd agent-port sb4k2n
  forkd agent-port sb4k2n --bind 127.0.0.1:8888
  forkd agent-port sb4k2n sb7x1q --json

Exit status: 0 the sandboxes have ended, 130 interrupted by ^C, 1 failed, 2 wrong usage.")]
pub(crate) struct AgentPortArgs {
    /// Ids of sandboxes (`forkd ls`); each gets a port.
    #[arg(required = true, value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    /// Address of the first sandbox's port [default: a free port of loopback].
    #[arg(long = "bind", alias = "listen", value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<std::net::SocketAddr>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// End sandboxes. The content of their memory and disks is lost.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd kill sb4k2n sb7x1q
  forkd kill --tag numpy
  forkd kill --label job=7
  forkd kill --all

Exit status: 0 all ended, 1 one or more could not be, 2 wrong usage.")]
pub(crate) struct KillArgs {
    /// Ids of sandboxes (`forkd ls`).
    #[arg(required_unless_present_any = ["all", "tag", "label", "owner"], conflicts_with_all = ["tag", "label", "owner"],
          value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    /// All sandboxes of the daemon.
    #[arg(long, conflicts_with_all = ["ids", "tag", "label", "owner"])]
    pub(crate) all: bool,

    #[command(flatten)]
    pub(crate) filter: FilterArgs,

    /// Print the result of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
