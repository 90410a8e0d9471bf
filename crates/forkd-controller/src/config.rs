//! What a daemon is told before it starts: where things are, how much is allowed, how long to wait.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

/// Where the daemon keeps its data when nobody says otherwise.
pub const DEFAULT_DATA_DIR: &str = "/var/lib/forkd";
/// Where the daemon listens for clients on the same machine.
pub const DEFAULT_SOCKET: &str = "/run/forkd/forkd.sock";
/// The TCP port of the REST API.
pub const DEFAULT_PORT: u16 = 8889;

/// Everything a daemon needs to know.
#[derive(Debug, Clone)]
pub struct Config {
    /// Sandboxes, token and lock live here. One daemon at a time.
    pub data_dir: PathBuf,
    /// What lives no longer than the host: the folders of sandboxes and templates, with their sockets
    /// and consoles. A daemon that serves chooses a place in memory.
    pub run_dir: PathBuf,
    /// Images and kernels are looked up here; never written to by the daemon. The data directory,
    /// unless they come from elsewhere (the emulated machine has a read-only share).
    pub library_dir: PathBuf,
    /// The unix socket. Who may open it may do everything: mode 0660, group `forkd`.
    pub socket: PathBuf,
    /// The TCP address. One that other hosts can reach needs [`Config::tls`].
    pub bind: SocketAddr,
    /// What TCP is encrypted with.
    pub tls: Option<TlsFiles>,
    /// Whoever reaches the TCP address owns the host, without a token; on loopback only.
    pub insecure_loopback: bool,
    /// Folders beside the data directory from which requests may name files.
    pub allow_paths: Vec<PathBuf>,
    /// The file that holds the token TCP clients show. Made at first start.
    pub token_file: PathBuf,
    /// The audit log; `audit.log` in the data directory when absent.
    pub audit_log: Option<PathBuf>,
    /// The OpenTelemetry collector that traces go to, such as `http://127.0.0.1:4318`; none when absent.
    pub otlp_endpoint: Option<String>,
    /// The `forkd-vmm` binary.
    pub vmm: PathBuf,
    /// The `forkd-guest` binary: init and agent of every guest.
    pub guest: PathBuf,
    /// A kernel to use instead of the library's.
    pub kernel: Option<PathBuf>,
    /// When the daemon is root, each booted sandbox and each template, with all it forks, runs as a
    /// user of its own: this number and the ones that follow it.
    pub jail_uid_base: u32,
    /// How many network slots are kept ready, once the first was used.
    pub network_pool: usize,
    /// What guests may reach although it is private, or the host is attached to it. Tokens cannot say this.
    pub egress_private: Vec<forkd_net::Opening>,
    /// How many flows each network slot may have.
    pub slot_flows: forkd_net::FlowLimits,
    /// Whether every sandbox has a port of loopback for the line protocol; else those have one for which it is
    /// asked for. Whoever may use the unix socket may use such a port.
    pub line_ports: bool,
    /// How much is allowed.
    pub limits: Limits,
    /// How long to wait.
    pub timing: Timing,
    /// For tests: called with the name of each step of a suspend, so that a daemon can be killed there.
    #[doc(hidden)]
    pub at_step: Option<fn(&'static str)>,
}

impl Config {
    /// The usual configuration for a data directory. The other binaries are expected next to the
    /// running one.
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
            line_ports: false,
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
    /// The certificate, and those that lead to its authority.
    pub cert: PathBuf,
    /// The certificate's private key.
    pub key: PathBuf,
}

/// How much is allowed.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Sandboxes at a time, the ended ones that nobody deleted included.
    pub max_sandboxes: usize,
    /// vCPUs of one sandbox.
    pub max_vcpus: u8,
    /// Memory of one sandbox in MiB.
    pub max_mem_mib: u64,
    /// Memory of a sandbox whose creator named no size, in MiB.
    pub default_mem_mib: u64,
    /// Bytes of a request's body.
    pub max_body: usize,
    /// Bytes kept of a command's standard output, and as many of its standard error.
    pub max_output: usize,
    /// Bytes kept of a guest's console.
    pub console_limit: u64,
    /// Connections at a time, on each listener.
    pub max_connections: usize,
    /// Branches that are being taken at a time; those that are being written do not count.
    pub max_branches: usize,
    /// After this long a branch is removed, if nothing needs it.
    pub branch_max_age: Option<Duration>,
    /// If an owner has more branches, the oldest are removed, if nothing needs them.
    pub branch_max_count: Option<usize>,
    /// After this long without a new child a branch on disk is let go of in memory.
    pub branch_unload_after: Option<Duration>,
    /// No `live` branch is taken while the disk of the data directory has less than this free, in MiB.
    pub min_free_mib: u64,
    /// Requests a second of one token that is no admin's, and twice as many at once; 0 is no limit.
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

/// How long to wait. The defaults suit hardware; emulation takes others: [`Timing::new`].
#[derive(Debug, Clone)]
pub struct Timing {
    /// From a monitor's start to the agent's first answer.
    pub boot: Duration,
    /// From the start of a warm-up to its end.
    pub warm: Duration,
    /// For one answer of a monitor or an agent that has nothing to do but answer.
    pub call: Duration,
    /// Between two pings of an agent.
    pub ping_every: Duration,
    /// Without an answer for this long a sandbox counts as unresponsive.
    pub unresponsive_after: Duration,
    /// For a guest's processes to stand still before it is branched; one that takes longer is branched
    /// all the same.
    pub freeze: Duration,
    /// For a client to send or take the next piece of a file. Less than a guest's agent waits, so that the
    /// reason is the true one.
    pub stall: Duration,
    /// For requests under way when the daemon is asked to stop.
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
    /// The defaults, with how many seconds a guest may take to boot, and after how many of silence it
    /// counts as hung. The other times grow with the second.
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
