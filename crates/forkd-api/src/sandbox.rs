//! Sandboxes.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::ErrorBody;

/// The longest time-out of a sandbox or a command: 30 days.
pub const MAX_TIMEOUT_SECS: u64 = 30 * 24 * 3600;

/// Sandboxes to create: one booted from an image, or children forked from a snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateRequest {
    /// The image to boot (`forkd image ls`). Give either this or `snapshot_tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The snapshot to fork from (`forkd images`). Give either this or `image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// Number of children, 1 to 1000; 1 when absent. For a snapshot only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Number of vCPUs; 1 when absent. For an image only: children have as many as their snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default, 512, when absent. For an image only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Run the image's warm-up before the reply. For an image only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// Whether the sandboxes have a network. When absent, they have one if their snapshot has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Memory each sandbox may use on the host, in MiB. When absent, the sum of: the guest's memory, a 128th of it for
    /// page tables, 64 MiB for the monitor, and a 16th of it for the page cache, at least 64 MiB. It has an effect on
    /// hosts with cgroups only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Variables for every process started in the children: the place for secrets. Names and values take at most 64
    /// KiB together. For a snapshot only.
    #[serde(default, rename = "env", alias = "envs", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    /// Seconds after the fork or the boot at which the sandbox times out; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Seconds without use after which the sandbox times out; never when absent. Commands, evaluations, pings, files
    /// and ports are use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_secs: Option<u64>,
    /// The action at a timeout; `kill` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// With `suspend`: the tag of the snapshot that a timeout stores. When absent or taken: `idle-` and the sandbox's
    /// id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend_as: Option<String>,
    /// Labels for each sandbox, to find them by; at most 32.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When true or absent, the reply comes when every child's agent has answered. When false, it comes at once, and
    /// the children are `starting`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
    /// Open an agent port, a loopback port with the JSON-lines protocol; `guest_addr` is then its address. Users of the
    /// daemon's host with access to its unix socket may use the port. The older name of the field is `line_port`.
    #[serde(default, alias = "line_port", skip_serializing_if = "std::ops::Not::not")]
    pub agent_port: bool,
    /// Accepted and ignored: every child has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_child_netns: Option<bool>,
    /// Accepted and ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prewarm: Option<bool>,
    /// Accepted and ignored: every child can be forked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_fork: Option<bool>,
    /// Accepted and ignored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<bool>,
}

/// Children to fork from a running sandbox.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct ForkRequest {
    /// Number of children, 1 to 1000; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Whether the children have a network. When absent, they have one if the sandbox has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Memory each child may use on the host, in MiB; see `CreateRequest`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Variables for every process started in the children: the place for secrets. Names and values take at most 64
    /// KiB together.
    #[serde(default, rename = "env", alias = "envs", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    /// Seconds after the fork at which each child times out; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Seconds without use after which a child times out; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_secs: Option<u64>,
    /// The action at a timeout; `kill` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// With `suspend`: the tag of the snapshot that a timeout stores. When absent or taken: `idle-` and the child's id.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend_as: Option<String>,
    /// Labels for each child, to find them by; at most 32. The children do not get the sandbox's labels.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// When true or absent, the reply comes when every child's agent has answered. When false, it comes as soon as the
    /// sandbox is forked, and the children are `starting`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
    /// Open an agent port for each child; see `CreateRequest`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub agent_port: bool,
}

/// The reply to a request for several children with `?results=each`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpawnReply<C = SandboxInfo> {
    /// The children that run.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<SandboxInfo>))]
    pub children: Vec<C>,
    /// One error for each child that does not run.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub errors: Vec<SpawnError>,
}

/// The reason why one child does not run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpawnError {
    /// The child's index among the `n`, from 0.
    pub index: usize,
    /// What happened and what to do.
    pub error: String,
    /// The reason, for programs.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
    pub code: String,
    /// The request's id. The daemon's log has the cause under this id.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub request_id: String,
}

impl SpawnError {
    /// An error for the child with this index, with the reason in `body`.
    pub fn new(index: usize, body: ErrorBody) -> Self {
        let ErrorBody { error, code, request_id } = body;
        SpawnError { index, error, code, request_id }
    }
}

/// Resources that a sandbox's process uses on the host.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stats {
    /// Memory that no other process has, in KiB.
    pub private_kib: u64,
    /// Proportional set size: private memory, plus each shared page divided by the number of processes that share it.
    pub pss_kib: u64,
    /// Resident set size: private memory and all shared memory.
    pub rss_kib: u64,
    /// CPU time in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// Memory that the cgroup accounts for; absent without a cgroup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_current_kib: Option<u64>,
    /// Memory shared with other processes: the template, its other children, the page cache's files.
    #[serde(default)]
    pub shared_kib: u64,
    /// Disk space of the disks' own layers, in bytes.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes that the network interface has sent; null without a network.
    #[serde(default)]
    pub net_tx_bytes: Option<u64>,
    /// Bytes that the network interface has received; null without a network.
    #[serde(default)]
    pub net_rx_bytes: Option<u64>,
    /// Milliseconds since the process started.
    #[serde(default)]
    pub uptime_ms: u64,
    /// Time of the agent's last answer, in milliseconds since 1970; null without an agent.
    #[serde(default)]
    pub agent_answered_at_unix_ms: Option<u64>,
    /// The last pauses, at most 32, oldest first.
    #[serde(default)]
    pub pauses: Vec<PauseInfo>,
}

/// A pause of a sandbox.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PauseInfo {
    /// The end of the pause, in milliseconds since 1970; the start, if the sandbox is still paused.
    pub at_unix_ms: u64,
    /// Milliseconds that the vCPUs stood still; null if the sandbox is still paused.
    pub pause_ms: Option<f64>,
    /// Milliseconds that the user processes were frozen; absent if they were not.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_ms: Option<f64>,
    /// `branch`, `fork` or `pause`.
    pub why: String,
}

/// The reply of an agent to a ping.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PingReply {
    /// Always true.
    pub pong: bool,
    /// The agent's version.
    pub version: String,
    /// Milliseconds since the guest's kernel started.
    pub uptime_ms: u64,
    /// Whether the image has Python.
    pub python: bool,
    /// State of the warm-up: `cold`, `warming`, `ready` or `failed`.
    pub warm: String,
    /// Whether `warm` is `ready`.
    pub warmup_ready: bool,
    /// The version of numpy that the warm-up imported; null if it imported none.
    pub numpy_version: Option<String>,
    /// The process id of the agent in the guest: always 1.
    pub pid: u32,
    /// The language of `eval`: `python`, or `none` in an image without Python.
    pub agent_lang: String,
}

/// The state of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// It boots, or its agent has not answered yet.
    Starting,
    /// Its agent answers.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// Its vCPUs stand still until a client resumes it.
    Paused,
    /// It ended. The daemon keeps its description until a client deletes it.
    Ended,
    /// The daemon cannot read its record: the record is damaged, or a newer daemon wrote it. `detail` has the reason.
    /// The process continues and counts towards limits; clients can only read and delete the sandbox.
    Unknown,
}

/// A sandbox and its state.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxInfo<S = SandboxState, A = OnTimeout> {
    /// The sandbox's owner.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub owner: String,
    /// `sb`, then lower-case letters and digits.
    pub id: String,
    /// The sandbox's image; null for a bare kernel.
    pub image: Option<String>,
    /// The snapshot that the sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// The running sandbox that the sandbox was forked from, without a snapshot. That sandbox may have ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub forked_from: Option<String>,
    /// The sandbox's state.
    #[cfg_attr(feature = "openapi", schema(value_type = SandboxState))]
    pub state: S,
    /// Why it ended, as one identifier. On request: `deleted`, `timed_out`, `idle_timed_out`, `suspended`. By itself:
    /// `powered_off`, `reset`, `panicked`, `failed`, `out_of_memory`, `monitor_died`. It did not start:
    /// `boot_failed`, `fork_failed`, `rollback_failed`. In an unknown way: `unknown`. A paused sandbox that
    /// continues when the host's disk has space has the reason `host_disk_full`; one in state `unknown` has
    /// `record_unreadable`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same reason, as one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The end of the console, once the sandbox has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_tail: Option<String>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory in MiB.
    pub mem_size_mib: u64,
    /// The process id on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Milliseconds from the start of the process until the guest was ready, warm-up included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// Whether the sandbox accepts commands now.
    #[serde(default)]
    pub ready: bool,
    /// Milliseconds from the arrival of the request to the agent's first answer; for a booted sandbox, from the start
    /// of its process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
    /// Whether it has a network.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub network: bool,
    /// The name of the network slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Private networks that the sandbox may reach, beside all public addresses. Absent in lists and without a
    /// network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<String>>,
    /// The address of the JSON-lines protocol: the loopback port if there is one, otherwise the address in the
    /// network slot.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub guest_addr: String,
    /// Memory the sandbox may use on the host, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Whether the image has Python to evaluate code with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<bool>,
    /// Creation time, in seconds since 1970.
    pub created_at_unix: u64,
    /// The time at which the sandbox times out, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
    /// Seconds without use after which the sandbox times out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_secs: Option<u64>,
    /// The action at a timeout.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = OnTimeout))]
    pub on_timeout: A,
    /// With `suspend`: the tag of the snapshot that a timeout stores, if a client set one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend_as: Option<String>,
    /// Time of the last use, of the creation, or of the daemon's start, in seconds since 1970.
    #[serde(default)]
    pub last_active_unix: u64,
    /// The sandbox's labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether a branch was taken of the sandbox.
    #[serde(default)]
    pub has_branched: bool,
    /// How many branches were taken of the sandbox.
    #[serde(default)]
    pub branch_count: u64,
    /// Always null: a branch consists of layers, and `last_branch_tag` names it.
    #[serde(default)]
    pub last_branch_memory_path: Option<String>,
    /// The tag of the last branch of the sandbox.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_branch_tag: Option<String>,
    /// The snapshot of the last rollback.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back_to: Option<String>,
    /// The workspace that the sandbox belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
}

/// Changes to a sandbox. Absent fields keep their values.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateRequest {
    /// Seconds from now at which the sandbox times out; never if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub timeout_secs: Option<Option<u64>>,
    /// Seconds without use, counted from now, after which the sandbox times out; never if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_timeout_secs: Option<Option<u64>>,
    /// The action at a timeout.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// With `suspend`: the tag of the snapshot that a timeout stores; `idle-` and the sandbox's id if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub suspend_as: Option<Option<String>>,
    /// All labels; they replace the previous ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

/// A sandbox that ended and was removed.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ArchivedSandbox {
    /// The sandbox's id.
    pub id: String,
    /// `archived`; `gone` if the request asked with the older name.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub state: String,
    /// The snapshot that the sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// The sandbox's labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// When it was created, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// Time of the end, in seconds since 1970.
    pub ended_at_unix: u64,
    /// How the sandbox ended: a reason of a sandbox, or `host_rebooted`.
    pub reason: String,
    /// The same reason, as one sentence.
    pub detail: String,
}

/// The target of a rollback.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    /// The snapshot to continue from. When absent: the sandbox's latest branch, or, if that is missing or unusable,
    /// the snapshot that the sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// A sandbox's agent port: a loopback port with the JSON-lines protocol.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AgentPort {
    /// The address, such as `127.0.0.1:40123`. Clients of the reference get it as `FORKD_TARGET`. Users of the
    /// daemon's host who may open its unix socket may use the port.
    pub target: String,
}

/// The action of the daemon at a sandbox's timeout.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// The sandbox is deleted.
    #[default]
    Kill,
    /// The sandbox is paused. After an idle timeout the next use resumes it.
    Pause,
    /// The sandbox is stored as a snapshot, then deleted. For a workspace's sandbox, the workspace is suspended.
    Suspend,
}

/// Distinguishes a null field from an absent one.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}
