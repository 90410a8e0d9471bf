//! The settings of a daemon: paths, addresses, limits and timing.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// The default data directory.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/forkd";
/// The default unix socket, for clients on the same machine.
pub const DEFAULT_SOCKET: &str = "/run/forkd/forkd.sock";
/// The default TCP port of the REST API.
pub const DEFAULT_PORT: u16 = 8889;

/// All settings of a daemon.
#[derive(Debug, Clone)]
pub struct Config {
    /// The folder with sandboxes, token and lock. One daemon at a time uses it.
    pub data_dir: PathBuf,
    /// The folder for files that need not outlive the host's boot: the folders of sandboxes and templates, with their
    /// sockets and consoles. [`serve`](crate::serve) replaces it with a folder in memory.
    pub run_dir: PathBuf,
    /// The folder with images and kernels; the daemon only reads it. It is the data directory, unless images come
    /// from elsewhere (the emulated machine has a read-only share).
    pub library_dir: PathBuf,
    /// The unix socket, with mode 0660 and group `forkd`. A process that can open it has full access.
    pub socket: PathBuf,
    /// The TCP address. An address that other hosts can reach needs [`Config::tls`].
    pub bind: SocketAddr,
    /// The certificate and key for TCP; no TLS when absent.
    pub tls: Option<TlsFiles>,
    /// Whether TCP clients need no token, and so have full access to the host; on loopback only.
    pub insecure_loopback: bool,
    /// Folders other than the data directory from which requests may name files.
    pub allow_paths: Vec<PathBuf>,
    /// The file with the token of TCP clients. The daemon creates it at its first start.
    pub token_file: PathBuf,
    /// The audit log; `audit.log` in the data directory when absent.
    pub audit_log: Option<PathBuf>,
    /// The OpenTelemetry collector for traces, such as `http://127.0.0.1:4318`; none when absent.
    pub otlp_endpoint: Option<String>,
    /// The `forkd-vmm` binary.
    pub vmm: PathBuf,
    /// The `forkd-guest` binary: init and agent of every guest.
    pub guest: PathBuf,
    /// A kernel to use instead of the library's.
    pub kernel: Option<PathBuf>,
    /// The first user id for jails. When the daemon is root, each booted sandbox, and each template with its
    /// children, runs as a user of its own: this id or one above it.
    pub jail_uid_base: u32,
    /// How many spare network slots the daemon keeps ready, after the first was used.
    pub network_pool: usize,
    /// Private addresses, and addresses of the host's networks, that guests may reach. Tokens cannot change this.
    pub egress_private: Vec<forkd_net::Opening>,
    /// The most flows of each network slot.
    pub slot_flows: forkd_net::FlowLimits,
    /// Whether every sandbox has a loopback port for the JSON-lines protocol. Otherwise only sandboxes whose client
    /// asks for a port have one. Users that may open the unix socket may use these ports.
    pub agent_ports: bool,
    /// Limits on sizes and counts.
    pub limits: Limits,
    /// Intervals and timeouts.
    pub timing: Timing,
    /// For tests: called with the name of each step of a suspend, so that a test can kill the daemon there.
    #[doc(hidden)]
    pub at_step: Option<fn(&'static str)>,
}

impl Config {
    /// The usual configuration for a data directory. It expects the other binaries in the folder of the running one.
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        let data_dir = data_dir.into();
        let beside = |name: &str| match std::env::current_exe() {
            Ok(exe) => exe.with_file_name(name),
            Err(_) => PathBuf::from(name),
        };
        let usual = data_dir.as_os_str() == DEFAULT_DATA_DIR;
        Config {
            library_dir: data_dir.clone(),
            socket: if usual { DEFAULT_SOCKET.into() } else { data_dir.join("forkd.sock") },
            bind: SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_PORT)),
            tls: None,
            insecure_loopback: false,
            allow_paths: Vec::new(),
            token_file: data_dir.join("token"),
            audit_log: None,
            otlp_endpoint: None,
            vmm: beside("forkd-vmm"),
            guest: beside("forkd-guest"),
            kernel: None,
            jail_uid_base: 1_000_000,
            network_pool: 4,
            egress_private: Vec::new(),
            slot_flows: forkd_net::FlowLimits::default(),
            agent_ports: false,
            limits: Limits::default(),
            timing: Timing::default(),
            at_step: None,
            run_dir: data_dir.clone(),
            data_dir,
        }
    }
}

/// A certificate and its key, in PEM files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificate, and the chain to its authority.
    pub cert: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
}

/// Limits on sizes and counts.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Sandboxes at a time, including ended ones that are not deleted.
    pub max_sandboxes: usize,
    /// vCPUs of one sandbox.
    pub max_vcpus: u8,
    /// Memory of one sandbox in MiB.
    pub max_mem_mib: u64,
    /// Memory of a sandbox whose request has no size, in MiB.
    pub default_mem_mib: u64,
    /// Bytes of a request body.
    pub max_body: usize,
    /// Bytes kept of a command's standard output, and as many of its standard error.
    pub max_output: usize,
    /// Bytes kept of a guest's console.
    pub console_limit: u64,
    /// Connections at a time, on each listener.
    pub max_connections: usize,
    /// Branches that the daemon takes at a time. Branches that are only being written do not count.
    pub max_branches: usize,
    /// Age after which the daemon removes a branch that nothing needs.
    pub branch_max_age: Option<Duration>,
    /// Branches of one owner above which the daemon removes the oldest that nothing needs.
    pub branch_max_count: Option<usize>,
    /// Time without a new child after which the daemon ends the template of a branch on disk.
    pub branch_unload_after: Option<Duration>,
    /// Free space below which the daemon takes no `live` branch, in MiB on the disk of the data directory.
    pub min_free_mib: u64,
    /// Requests per second of one token without admin scope, with bursts of twice as many; 0 means no limit.
    pub rate_limit: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            max_sandboxes: 4000,
            max_vcpus: forkd_protocol::control::MAX_VCPUS,
            max_mem_mib: host_memory_mib().unwrap_or(64 << 10),
            default_mem_mib: 512,
            max_body: 1 << 20,
            max_output: 16 << 20,
            console_limit: 1 << 20,
            max_connections: 4096,
            max_branches: 8,
            branch_max_age: None,
            branch_max_count: None,
            branch_unload_after: Some(Duration::from_secs(600)),
            min_free_mib: 256,
            rate_limit: 200,
        }
    }
}

/// Intervals and timeouts. The defaults suit hardware; emulation uses [`Timing::new`].
#[derive(Debug, Clone)]
pub struct Timing {
    /// From a monitor's start to the agent's first answer.
    pub boot: Duration,
    /// From the start of a warm-up to its end.
    pub warm: Duration,
    /// For a reply of a monitor or an agent that is not busy.
    pub call: Duration,
    /// Between two pings of an agent.
    pub ping_every: Duration,
    /// Time without an answer after which a sandbox counts as unresponsive.
    pub unresponsive_after: Duration,
    /// For the freeze of a guest's processes before a branch. The daemon takes the branch after this time in any
    /// case.
    pub freeze: Duration,
    /// For a client to send or take the next piece of a file. It is shorter than the agent's own timeout, so that the
    /// error names the real cause.
    pub stall: Duration,
    /// For requests under way when the daemon stops.
    pub drain: Duration,
}

impl Default for Timing {
    fn default() -> Self {
        Timing {
            boot: Duration::from_secs(120),
            warm: Duration::from_secs(300),
            call: Duration::from_secs(10),
            ping_every: Duration::from_secs(10),
            unresponsive_after: Duration::from_secs(60),
            freeze: Duration::from_secs(1),
            stall: Duration::from_secs(30),
            drain: Duration::from_secs(30),
        }
    }
}

impl Timing {
    /// The defaults, with the seconds a guest may take to boot, and the seconds without an answer after which a guest
    /// counts as unresponsive. The other intervals grow with the second value.
    pub fn new(boot_secs: Option<u64>, unresponsive_secs: Option<u64>) -> Self {
        let mut timing = Timing::default();
        if let Some(boot) = boot_secs.map(Duration::from_secs) {
            timing.boot = boot;
            timing.warm = timing.warm.max(boot);
        }
        if let Some(silence) = unresponsive_secs.map(Duration::from_secs) {
            timing.unresponsive_after = silence;
            timing.ping_every = (silence / 6).max(Duration::from_secs(1));
            timing.call = (silence / 6).max(timing.call);
            timing.freeze = (silence / 12).max(timing.freeze);
        }
        timing
    }
}

fn host_memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? >> 10)
}
