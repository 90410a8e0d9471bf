//! What can be typed about children and other sandboxes: fork them, talk to them, end them.

use clap::Args;

use super::{
    AgentTargetArgs, AnswerArgs, DaemonArgs, FilterArgs, LifetimeArgs, LimitArgs, MAX_SECS, MemoryLimitArgs,
    ProcessArgs, SandboxArgs, TargetArgs, parse_id, parse_name, parse_variable,
};

/// How many children one call may ask for.
const MAX_CHILDREN: i64 = 1000;

/// The children to make.
#[derive(Debug, Args)]
pub(crate) struct ChildrenArgs {
    /// Snapshot to fork (`forkd images`).
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: String,

    /// How many children, 1 to 1000.
    #[arg(short = 'n', long = "n", alias = "count", default_value_t = 1,
          value_parser = clap::value_parser!(u16).range(1..=MAX_CHILDREN), value_name = "N")]
    pub(crate) count: u16,

    /// No network for these children.
    #[arg(long)]
    pub(crate) no_network: bool,

    #[command(flatten)]
    pub(crate) limit: MemoryLimitArgs,

    /// Variable for everything started in the children: the place for secrets. May be given several
    /// times.
    #[arg(long, short, value_parser = parse_variable, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,

    #[command(flatten)]
    pub(crate) life: LifetimeArgs,
}

/// Fork children from a snapshot and say how long it took.
///
/// Each child is a microVM of its own: memory and disk copy-on-write, own identity, own network. The
/// times are the daemon's: from the arrival of the request to the first answer of a child's agent.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd fork --tag numpy -n 100
  forkd fork --tag numpy -n 10 --json | jq -r '.children[].id'
  forkd fork --tag numpy -n 1000 --no-network --settle-secs 5

Exit status: 0 all children answer, 1 some or all failed (those that answer are printed and go on
running), 130 ended by ^C, 2 wrong usage.")]
pub(crate) struct ForkArgs {
    #[command(flatten)]
    pub(crate) children: ChildrenArgs,

    /// Stay for this many seconds, then end the children; they also end when this command does. Until then
    /// this command serves the ports of the children, the first on FORKD_TARGET if that is set.
    #[arg(long, conflicts_with = "ttl", value_parser = clap::value_parser!(u64).range(0..=MAX_SECS),
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

Exit status: 0 all children started, 1 some or all failed (those that started are printed and go on
running), 2 wrong usage.")]
pub(crate) struct SpawnArgs {
    #[command(flatten)]
    pub(crate) children: ChildrenArgs,

    /// Do not wait until they answer; `forkd ls` tells how far they are.
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

    /// In this state.
    #[arg(long, value_parser = ["starting", "running", "unresponsive", "paused", "ended", "unknown"], value_name = "STATE")]
    pub(crate) state: Option<String>,

    /// List sandboxes that ended, for one day, with the reason.
    #[arg(long, alias = "gone", conflicts_with = "state")]
    pub(crate) archived: bool,

    /// All columns, and names as long as they are. Without it a terminal's width is kept to.
    #[arg(long, conflicts_with = "json")]
    pub(crate) wide: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Show all there is to know of one sandbox.
///
/// What it is and where it came from, its limits, its network, when it ends, what it uses and the branches
/// taken of it.
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

/// Run a command in a sandbox, to its end.
///
/// Its standard input is empty; its output is shown when it has ended. ^C stops the waiting, the
/// command goes on until its time is over. With -i or -t it is as if the command ran here: output comes as
/// it is written, signals are passed on, and the command ends with this process.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd exec sb4k2n -- uname -a
  forkd exec sb4k2n --env LANG=C.UTF-8 --cwd /tmp --user nobody --timeout-secs 10 -- sh -c 'pwd; id'
  forkd exec sb4k2n --json -- hostname | jq -r .stdout
  tar c src | forkd exec -i sb4k2n --cwd /root -- tar x
  forkd exec -it sb4k2n -- python3
  forkd exec --target 127.0.0.1:40123 -- hostname

Exit status: the command's own, with --json too, or
  124    its --timeout-secs were over
  125    forkd itself failed
  126    the command was found but could not be run
  127    the command was not found in the sandbox
  128+N  signal N ended it
  2      wrong usage; nothing was run")]
pub(crate) struct ExecArgs {
    #[command(flatten)]
    pub(crate) sandbox: TargetArgs,

    #[command(flatten)]
    pub(crate) process: ProcessArgs,

    #[command(flatten)]
    pub(crate) streams: StreamArgs,

    /// End it after this many seconds, at most 30 days [default: 600; with -i or -t none].
    #[arg(long = "timeout-secs", alias = "timeout", value_parser = clap::value_parser!(u64).range(1..=MAX_SECS),
          value_name = "SECS")]
    pub(crate) timeout: Option<u64>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,

    /// The command and its arguments; no shell is involved.
    #[arg(last = true, required = true, value_name = "CMD")]
    pub(crate) command: Vec<String>,
}

/// What a command has of this process.
#[derive(Debug, Args)]
pub(crate) struct StreamArgs {
    /// Pass standard input on, and show output as it comes.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) interactive: bool,

    /// Give the command a terminal: this one, if it is one.
    #[arg(long, short, conflicts_with = "json")]
    pub(crate) tty: bool,
}

/// Open a shell in a sandbox, or run a command there on this terminal.
///
/// Keys, colours and the size of the window are the command's. Where standard input is no terminal, there
/// is none in the sandbox, either, and what comes from it is run or read.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd shell sb4k2n
  forkd shell sb4k2n --user nobody -- top
  echo 'cd /etc; ls' | forkd shell sb4k2n

Exit status: the command's own; 128+N when signal N ended it; 125 when forkd itself failed.")]
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
/// One side is SANDBOX:/PATH. A file is written whole or not at all. Links and special files are left out
/// and named, and so is everything whose name would lead out of DST.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd cp model.bin sb4k2n:/root/
  forkd cp -r sb4k2n:/root/results .
  generate | forkd cp - sb4k2n:/root/input.csv
  forkd cp sb4k2n:/var/log/dpkg.log - | tail

Exit status: 0 everything copied, 1 failed or something was left out, 2 wrong usage.")]
pub(crate) struct CpArgs {
    /// What to copy: a path here, SANDBOX:/PATH, or - for standard input.
    #[arg(value_name = "SRC")]
    pub(crate) source: String,

    /// Where to: a path here, SANDBOX:/PATH, or - for standard output. In a folder that is there the copy
    /// gets the name of SRC.
    #[arg(value_name = "DST")]
    pub(crate) destination: String,

    /// Folders, with all that is in them.
    #[arg(long, short)]
    pub(crate) recursive: bool,

    /// User in the sandbox whose permissions count [default: root].
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// Evaluate Python in a sandbox's warmed interpreter.
///
/// What it prints comes first, then the value of a last expression. Names stay for the next `eval`.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd eval sb4k2n -- '6 * 7'
  forkd eval sb4k2n -- 'import numpy; numpy.random.rand(3).tolist()'
  forkd eval sb4k2n --json -- '[1, 2]' | jq .result_json

Exit status: 0 evaluated, 1 the code raised (its traceback is on standard error), 124 its --timeout-secs
were over, 125 forkd itself failed, 2 wrong usage.")]
pub(crate) struct EvalArgs {
    #[command(flatten)]
    pub(crate) sandbox: TargetArgs,

    #[command(flatten)]
    pub(crate) limit: LimitArgs,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,

    /// The code; several arguments are joined by spaces.
    #[arg(last = true, required = true, value_name = "CODE")]
    pub(crate) code: Vec<String>,
}

/// Ask the agents in sandboxes whether they are there.
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

Exit status: 0 the sandboxes have ended, 130 ended by ^C, 1 failed, 2 wrong usage.")]
pub(crate) struct AgentPortArgs {
    /// Ids of sandboxes (`forkd ls`): a port for each.
    #[arg(required = true, value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    /// The port to serve, of the first sandbox [default: any].
    #[arg(long = "bind", alias = "listen", value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<std::net::SocketAddr>,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// End sandboxes. What is only in their memory or on their disks is gone.
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

    /// Print what became of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}
