//! Groups of options that more than one command takes, and parsers of their values.

use std::path::PathBuf;

use clap::Args;
use forkd_api::MAX_TIMEOUT_SECS;
use forkd_protocol::names;

/// The daemon to use.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DaemonArgs {
    /// Use this daemon instead of finding or starting one.
    #[arg(long, env = "FORKD_URL", value_name = "URL")]
    pub(crate) daemon_url: Option<String>,

    /// Token of that daemon.
    #[arg(long, env = "FORKD_TOKEN", value_name = "TOKEN", hide_env_values = true)]
    pub(crate) daemon_token: Option<String>,

    /// Trust the certificates in this PEM file, and those they signed, for https:// addresses. The
    /// authorities of this system are trusted as well.
    #[arg(long, env = "FORKD_CACERT", value_name = "FILE")]
    pub(crate) cacert: Option<PathBuf>,
}

/// Options of a command that prints the daemon's reply.
#[derive(Debug, Args)]
pub(crate) struct AnswerArgs {
    /// Print the daemon's whole reply as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The only option of a command that prints data of this host.
#[derive(Debug, Args)]
pub(crate) struct JsonArgs {
    /// Print JSON.
    #[arg(long)]
    pub(crate) json: bool,
}

/// The virtual hardware of a guest.
#[derive(Debug, Args)]
pub(crate) struct GuestArgs {
    /// Virtual CPUs.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32), value_name = "N")]
    pub(crate) vcpus: u8,

    /// Memory in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..), value_name = "MIB")]
    pub(crate) mem_size_mib: u64,

    /// Give the guest no network device.
    #[arg(long)]
    pub(crate) no_network: bool,
}

/// The environment of a command in a guest.
#[derive(Debug, Args)]
pub(crate) struct ProcessArgs {
    /// Environment variable for the command. Repeatable.
    #[arg(long, short, value_parser = parse_variable, value_name = "NAME=VALUE")]
    pub(crate) env: Vec<(String, String)>,

    /// Working directory in the guest [default: the user's home].
    #[arg(long, value_name = "DIR")]
    pub(crate) cwd: Option<String>,

    /// User in the guest [default: root].
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,
}

/// The time limit of a command in a sandbox.
#[derive(Debug, Args)]
pub(crate) struct LimitArgs {
    /// Kill the command after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "timeout", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS),
          value_name = "SECS")]
    pub(crate) timeout: u64,
}

/// The sandbox of a command.
#[derive(Debug, Args)]
pub(crate) struct SandboxArgs {
    /// Id of the sandbox (`forkd ls`).
    #[arg(value_parser = parse_id, value_name = "ID")]
    pub(crate) id: String,
}

/// The agent port to use instead of the daemon.
#[derive(Debug, Args)]
pub(crate) struct AgentTargetArgs {
    /// Use the agent port at this address instead of an ID.
    #[arg(long, env = "FORKD_TARGET", value_name = "HOST:PORT")]
    pub(crate) target: Option<String>,

    /// Accepted for compatibility, without effect: give the ID of a sandbox instead.
    #[arg(long, value_name = "NETNS", hide = true)]
    pub(crate) child: Option<String>,
}

/// The sandbox of a command, or its agent port.
#[derive(Debug, Args)]
pub(crate) struct TargetArgs {
    /// Id of the sandbox (`forkd ls`).
    #[arg(required_unless_present = "target", value_parser = parse_id, value_name = "ID")]
    pub(crate) id: Option<String>,

    #[command(flatten)]
    pub(crate) target: AgentTargetArgs,
}

/// The sandboxes of a command.
#[derive(Debug, Args)]
pub(crate) struct SandboxesArgs {
    /// Ids of sandboxes (`forkd ls`).
    #[arg(required = true, value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    /// Print the result of each as JSON.
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// Limits of a sandbox on this host.
#[derive(Debug, Args)]
pub(crate) struct MemoryLimitArgs {
    /// Limit each child to this much memory of the host, in MiB.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..), value_name = "MIB")]
    pub(crate) memory_limit_mib: Option<u64>,
}

pub(super) fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

pub(super) fn parse_name(text: &str) -> Result<String, String> {
    if names::is_valid_name(text) {
        Ok(text.to_owned())
    } else {
        Err(format!("a name is {}", names::NAME_RULE))
    }
}

pub(super) fn parse_id(text: &str) -> Result<String, String> {
    if names::is_valid_sandbox_id(text) {
        Ok(text.to_owned())
    } else {
        Err("an id is `sb` followed by lower-case letters and digits; `forkd ls` lists them".to_owned())
    }
}
