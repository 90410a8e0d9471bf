//! What a daemon is told before it starts: where things are, how much is allowed, how long to wait.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use crate::error::{Error, Result};

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
    /// The TCP address, loopback only.
    pub bind: SocketAddr,
    /// The file that holds the token TCP clients show. Made at first start.
    pub token_file: PathBuf,
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
    /// How much is allowed.
    pub limits: Limits,
    /// How long to wait.
    pub timing: Timing,
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
            token_file: data_dir.join("token"),
            vmm: beside("forkd-vmm"),
            guest: beside("forkd-guest"),
            kernel: None,
            jail_uid_base: 1_000_000,
            network_pool: 4,
            limits: Limits::default(),
            timing: Timing::default(),
            run_dir: data_dir.clone(),
            data_dir,
        }
    }
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
    /// If there are more branches, the oldest are removed, if nothing needs them.
    pub branch_max_count: Option<usize>,
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
        }
    }
}

/// How long to wait. The defaults suit hardware; emulation takes [`Timing::from_env`].
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
            drain: Duration::from_secs(5),
        }
    }
}

impl Timing {
    /// The defaults, with `FORKD_BOOT_TIMEOUT_SECS` (waiting for a guest to boot) and
    /// `FORKD_UNRESPONSIVE_SECS` (silence after which a guest counts as hung) taken from the
    /// environment. The other times grow with the second.
    pub fn from_env() -> Result<Self> {
        let mut timing = Timing::default();
        if let Some(boot) = env_secs("FORKD_BOOT_TIMEOUT_SECS")? {
            timing.boot = boot;
            timing.warm = timing.warm.max(boot);
        }
        if let Some(silence) = env_secs("FORKD_UNRESPONSIVE_SECS")? {
            timing.unresponsive_after = silence;
            timing.ping_every = (silence / 6).max(Duration::from_secs(1));
            timing.call = (silence / 6).max(timing.call);
            timing.freeze = (silence / 12).max(timing.freeze);
        }
        Ok(timing)
    }
}

fn env_secs(name: &str) -> Result<Option<Duration>> {
    let Ok(text) = std::env::var(name) else { return Ok(None) };
    match text.parse::<u64>() {
        Ok(secs @ 1..=86_400) => Ok(Some(Duration::from_secs(secs))),
        _ => Err(Error::invalid(format!("{name} is `{text}`; give seconds, 1 to 86400"))),
    }
}

fn host_memory_mib() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()? >> 10)
}
