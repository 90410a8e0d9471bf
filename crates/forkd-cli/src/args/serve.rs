//! The options of the daemon: `forkd serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

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
