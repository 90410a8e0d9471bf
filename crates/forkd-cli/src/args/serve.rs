//! The options of the daemon: `forkd serve`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Run the daemon, in the foreground.
///
/// The daemon listens on a unix socket and on a loopback TCP address. As root and with KVM, commands such
/// as `forkd run` start it if none runs; run it as a service to control it yourself.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd serve
  sudo forkd serve --data-dir /srv/forkd --bind 127.0.0.1:9000
  sudo forkd serve --bind 0.0.0.0:8889 --tls-cert forkd.pem --tls-key forkd.key

Every option can be in the configuration file (`forkd config`), with `_` for `-`.

Environment:
  RUST_LOG  log level, such as debug [default: info]

SIGTERM and SIGINT stop the daemon. Open requests have 30 seconds to end, then its sandboxes have 30
seconds to end; a second signal ends the daemon at once.

Exit status: 0 stopped by a signal, 1 failed, 128+N ended by a second signal N, 2 wrong usage.")]
pub(crate) struct ServeArgs {
    /// Read images and kernels from this folder [default: the data directory].
    #[arg(long, value_name = "DIR")]
    pub(crate) library: Option<PathBuf>,

    /// Unix socket to listen on [default: /run/forkd/forkd.sock for /var/lib/forkd, otherwise
    /// forkd.sock in the data directory].
    #[arg(long, env = "FORKD_SOCKET", value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,

    /// TCP address to listen on.
    #[arg(long, env = "FORKD_BIND", default_value = "127.0.0.1:8889", value_name = "ADDRESS:PORT")]
    pub(crate) bind: SocketAddr,

    /// Certificate for TCP clients, a PEM file; read again when it changes. Required for an address that
    /// other hosts can reach.
    #[arg(long, env = "FORKD_TLS_CERT", requires = "tls_key", value_name = "FILE")]
    pub(crate) tls_cert: Option<PathBuf>,

    /// Private key of the certificate, a PEM file.
    #[arg(long, env = "FORKD_TLS_KEY", requires = "tls_cert", value_name = "FILE")]
    pub(crate) tls_key: Option<PathBuf>,

    /// Require no token on the loopback address: every user of this host controls all sandboxes.
    #[arg(long, env = "FORKD_INSECURE_LOOPBACK", value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) insecure_loopback: bool,

    /// Folder from which requests may use kernels and disks, besides the daemon's own. Repeatable.
    #[arg(long = "allow-path", env = "FORKD_ALLOW_PATHS", value_delimiter = ':', value_name = "DIR")]
    pub(crate) allow_paths: Vec<PathBuf>,

    /// Limit each token without scope admin to this many requests per second, and to twice as many in a
    /// burst; 0 is no limit.
    #[arg(long, env = "FORKD_RATE_LIMIT", default_value_t = 200, value_name = "PER_SEC")]
    pub(crate) rate_limit: u32,

    /// File with the token for TCP clients; the daemon creates it at its first start [default: token in the
    /// data directory].
    #[arg(long, env = "FORKD_TOKEN_FILE", value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,

    /// Open a loopback port with the JSON-lines protocol for every sandbox [default: on request]. Access: root,
    /// the daemon's user, group forkd.
    #[arg(long, alias = "line-ports", env = "FORKD_AGENT_PORTS",
          value_parser = clap::builder::FalseyValueParser::new())]
    pub(crate) agent_ports: bool,

    /// Audit log: a file with one line per request [default: audit.log in the data directory].
    #[arg(long, env = "FORKD_AUDIT_LOG", value_name = "FILE")]
    pub(crate) audit_log: Option<PathBuf>,

    /// Format of the daemon's log on standard error.
    #[arg(long, env = "FORKD_LOG_FORMAT", default_value = "text", value_name = "FORMAT")]
    pub(crate) log_format: LogFormat,

    /// OpenTelemetry collector to send traces to, over HTTP, such as http://127.0.0.1:4318 [default: none].
    #[arg(long, env = "FORKD_OTLP_ENDPOINT", value_name = "URL")]
    pub(crate) otlp_endpoint: Option<String>,

    /// Guest kernel, an ELF vmlinux or a bzImage [default: the library's]. The daemon searches its modules in
    /// `modules` beside it and in /lib/modules.
    #[arg(long, env = "FORKD_KERNEL", value_name = "FILE")]
    pub(crate) kernel: Option<PathBuf>,

    /// Number of network slots to keep ready, after the first was needed.
    #[arg(long, env = "FORKD_NETWORK_POOL", default_value_t = 4, value_name = "N",
          value_parser = clap::value_parser!(u64).range(0..=1000))]
    pub(crate) network_pool: u64,

    /// Private network that guests may reach, such as 10.20.0.0/16, or one port of it (TCP and UDP), such as
    /// 10.20.0.5/32:5432. Repeatable. Guests cannot reach this host [default: none].
    #[arg(long, env = "FORKD_EGRESS_PRIVATE", value_delimiter = ',', value_name = "CIDR[:PORT]")]
    pub(crate) egress_private: Vec<forkd_net::Opening>,

    /// Limit of one guest's concurrent network flows; more are dropped.
    #[arg(long, env = "FORKD_SLOT_MAX_FLOWS", default_value_t = 4096, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_max_flows: u32,

    /// Limit of one guest's new network flows per second.
    #[arg(long, env = "FORKD_SLOT_NEW_FLOWS_PER_SEC", default_value_t = 500, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_new_flows_per_sec: u32,

    /// Limit of one guest's new network flows in a burst.
    #[arg(long, env = "FORKD_SLOT_NEW_FLOWS_BURST", default_value_t = 2000, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(crate) slot_new_flows_burst: u32,

    /// Remove unused branches of sandboxes after this many seconds [default: never].
    #[arg(long, env = "FORKD_BRANCH_MAX_AGE", value_name = "SECS")]
    pub(crate) branch_max_age: Option<u64>,

    /// Keep at most this many unused branches, the newest [default: all].
    #[arg(long, env = "FORKD_BRANCH_MAX_COUNT", value_name = "N")]
    pub(crate) branch_max_count: Option<usize>,

    /// Free the memory of a branch after this many seconds without a new child; 0: never. A branch that could
    /// not be saved is lost then.
    #[arg(long, env = "FORKD_BRANCH_UNLOAD_SECS", default_value_t = 600, value_name = "SECS")]
    pub(crate) branch_unload_secs: u64,

    /// Refuse live branches while the disk of the data directory has less than this many MiB free.
    #[arg(long, env = "FORKD_MIN_FREE_MIB", default_value_t = 256, value_name = "MIB",
          value_parser = clap::value_parser!(u64).range(0..=1_000_000_000))]
    pub(crate) min_free_mib: u64,

    /// Limit of concurrent branches; more are refused [default: 8].
    #[arg(long, env = "FORKD_BRANCH_CONCURRENCY", value_name = "N",
          value_parser = clap::value_parser!(u64).range(1..=1000))]
    pub(crate) branch_concurrency: Option<u64>,

    /// Seconds that a guest may take to boot [default: 120].
    #[arg(long, env = "FORKD_BOOT_TIMEOUT_SECS", value_name = "SECS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) boot_timeout_secs: Option<u64>,

    /// Seconds without an answer after which a guest counts as hung [default: 60].
    #[arg(long, env = "FORKD_UNRESPONSIVE_SECS", value_name = "SECS",
          value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub(crate) unresponsive_secs: Option<u64>,

    /// In the emulated machine: also serve connections that QEMU forwards.
    #[arg(long, hide = true)]
    pub(crate) in_machine: bool,
}

/// The format of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    /// Lines of text.
    Text,
    /// One JSON object per line.
    Json,
}
