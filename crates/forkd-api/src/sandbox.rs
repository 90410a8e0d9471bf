//! What the REST API's bodies hold.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer, Serialize};

use crate::ErrorBody;

/// Sandboxes to make: one booted from an image, or children forked from a snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct CreateRequest {
    /// Boot this image (`forkd image ls`). Either this or `snapshot_tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Fork from this snapshot (`forkd images`). Either this or `image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// How many children, 1 to 1000; 1 when absent. Of a snapshot only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub n: Option<u32>,
    /// Number of vCPUs; 1 when absent. Of an image only: children have what their snapshot has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default, 512, when absent. Of an image only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Run the image's warm-up before answering. Of an image only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub warm: bool,
    /// Whether it has a network; it has when absent, if its snapshot has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Memory each may use on the host, in MiB. When absent: the guest's, a 128th of it for page tables, 64 for
    /// the monitor, and for the page cache a 16th of it, but at least 64. Has an effect where the host has
    /// cgroups.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Variables for every process started in the children: the place for secrets. Names and values take at most
    /// 64 KiB together. Of a snapshot only.
    #[serde(default, rename = "env", alias = "envs", skip_serializing_if = "BTreeMap::is_empty")]
    pub envs: BTreeMap<String, String>,
    /// Its time is over this many seconds after it was forked, or has booted; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout_secs: Option<u64>,
    /// Its time is over when nobody used it for this many seconds: no command, evaluation, ping, file or port;
    /// never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_secs: Option<u64>,
    /// What is done when its time is over; `kill` when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// The snapshot it is stored as when its time is over, with `suspend`; `idle-` and its id when absent, or
    /// if there is such a snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend_as: Option<String>,
    /// What to write on each: at most 32, to find them by.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub labels: BTreeMap<String, String>,
    /// Answer when every child has; else at once, while they are `starting`. True when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
    /// Open a port of loopback that speaks the line protocol (`guest_addr` is that then). It is for users of
    /// the daemon's host who may use its unix socket.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub line_port: bool,
    /// Accepted, without meaning: every child has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_child_netns: Option<bool>,
    /// Accepted, without meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prewarm: Option<bool>,
    /// Accepted, without meaning: every child can be forked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_fork: Option<bool>,
    /// Accepted, without meaning.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hugepages: Option<bool>,
}

/// What came of a request for several children, with `?results=each`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpawnReply<C = SandboxInfo> {
    /// The children that run.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<SandboxInfo>))]
    pub children: Vec<C>,
    /// Why the others do not.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub errors: Vec<SpawnError>,
}

/// Why one child does not run.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SpawnError {
    /// Which of the `n`, counted from 0.
    pub index: usize,
    /// What happened and what to do.
    pub error: String,
    /// Why, for programs.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
    pub code: String,
    /// The id of the request: the daemon's log has the cause under it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub request_id: String,
}

impl SpawnError {
    /// The child with this index failed for the reason in `body`.
    pub fn new(index: usize, body: ErrorBody) -> Self {
        let ErrorBody { error, code, request_id } = body;
        SpawnError { index, error, code, request_id }
    }
}

/// What a sandbox's process uses on the host.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Stats {
    /// Memory that only it has.
    pub private_kib: u64,
    /// Its memory, with what it shares divided by how many share it.
    pub pss_kib: u64,
    /// Its memory, with all it shares.
    pub rss_kib: u64,
    /// CPU time it has used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_ms: Option<u64>,
    /// What its cgroup counts, where there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_current_kib: Option<u64>,
    /// Memory that other processes have, too: its template, its siblings, the page cache's files.
    #[serde(default)]
    pub shared_kib: u64,
    /// Bytes on disk that its disks' own layers hold.
    #[serde(default)]
    pub disk_bytes: u64,
    /// Bytes its network interface has sent; null without a network.
    #[serde(default)]
    pub net_tx_bytes: Option<u64>,
    /// Bytes its network interface has received; null without a network.
    #[serde(default)]
    pub net_rx_bytes: Option<u64>,
    /// Milliseconds since its process started.
    #[serde(default)]
    pub uptime_ms: u64,
    /// When its agent last answered, in milliseconds since 1970; null if it has none.
    #[serde(default)]
    pub agent_answered_at_unix_ms: Option<u64>,
    /// The last times it stood still, at most 32, oldest first.
    #[serde(default)]
    pub pauses: Vec<PauseInfo>,
}

/// A time a sandbox stood still.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PauseInfo {
    /// When it went on, in milliseconds since 1970; of one that still stands still, when that began.
    pub at_unix_ms: u64,
    /// Milliseconds its vCPUs stood still; null if they still do.
    pub pause_ms: Option<f64>,
    /// Milliseconds its user processes did, if they were asked to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_ms: Option<f64>,
    /// `branch` or `pause`.
    pub why: String,
}

/// An agent's sign of life.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PingReply {
    /// True.
    pub pong: bool,
    /// The agent's version.
    pub version: String,
    /// Milliseconds since the guest's kernel started.
    pub uptime_ms: u64,
    /// Whether the image has a Python.
    pub python: bool,
    /// How far its warm-up is: `cold`, `warming`, `ready` or `failed`.
    pub warm: String,
    /// Whether it is `ready`.
    pub warmup_ready: bool,
    /// The version of the numpy that the warm-up imported; null if it did not.
    pub numpy_version: Option<String>,
    /// The agent's process in the guest: always 1.
    pub pid: u32,
    /// What `eval` evaluates: `python`, or `none` in an image without.
    pub agent_lang: String,
}

/// Where a sandbox stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SandboxState {
    /// It boots.
    Starting,
    /// Its agent answers.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// Its vCPUs stand still until it is resumed.
    Paused,
    /// It is over; only its description is left, until it is deleted.
    Ended,
    /// The daemon cannot read its record: it is damaged, or a newer daemon wrote it. `detail` says why. Its process
    /// goes on and it counts as before; it can be looked at and deleted, and nothing else.
    Unknown,
}

/// What is known of a sandbox.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SandboxInfo<S = SandboxState, A = OnTimeout> {
    /// Whose it is.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub owner: String,
    /// `sb` and lower-case letters and digits.
    pub id: String,
    /// The image it has; null for a bare kernel.
    pub image: Option<String>,
    /// The snapshot it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// Where it stands.
    #[cfg_attr(feature = "openapi", schema(value_type = SandboxState))]
    pub state: S,
    /// How it ended, in one word: `powered_off`, `reset`, `panicked`, `failed`, `out_of_memory`,
    /// `monitor_died`, `boot_failed`, `fork_failed`, `rollback_failed`, `timed_out`, `idle_timed_out`,
    /// `suspended`, `deleted` or `unknown`. Of a paused one: `host_disk_full` if it waits for room on the host's
    /// disk, and goes on by itself. Of one in state `unknown`: `record_unreadable`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same in one sentence.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// The end of its console, once it has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub console_tail: Option<String>,
    /// Number of vCPUs.
    pub vcpus: u8,
    /// Memory in MiB.
    pub mem_size_mib: u64,
    /// Its process on the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// How long it took from the start of its process until it was ready, its warm-up included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_ms: Option<u64>,
    /// Whether it can be used now.
    #[serde(default)]
    pub ready: bool,
    /// How long it took from the arrival of the request to its first answer; of a booted one, from the start of
    /// its process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
    /// Whether it has a network.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub network: bool,
    /// The name of its network slot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub netns: Option<String>,
    /// Private networks that it may reach beside all public addresses. Told of one sandbox, not in lists; absent
    /// without a network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub egress: Option<Vec<String>>,
    /// Where it speaks the line protocol: its port of loopback if it has one, else its address in its
    /// network slot.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub guest_addr: String,
    /// Memory it may use on the host, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Whether its image has a Python to evaluate code with.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<bool>,
    /// When it was created, in seconds since 1970.
    pub created_at_unix: u64,
    /// When its time is over, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
    /// Its time is over when nobody used it for this many seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub idle_timeout_secs: Option<u64>,
    /// What is done when its time is over.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = OnTimeout))]
    pub on_timeout: A,
    /// The snapshot it is stored as then, if it was given one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub suspend_as: Option<String>,
    /// When it was last used, or made, or found by the daemon, in seconds since 1970.
    #[serde(default)]
    pub last_active_unix: u64,
    /// What is written on it.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Whether a branch was taken of it.
    #[serde(default)]
    pub has_branched: bool,
    /// How many branches were taken of it.
    #[serde(default)]
    pub branch_count: u64,
    /// Always null: a branch is made of layers, and `last_branch_tag` says which.
    #[serde(default)]
    pub last_branch_memory_path: Option<String>,
    /// The last branch taken of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_branch_tag: Option<String>,
    /// The snapshot it was last taken back to, and went on from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back_to: Option<String>,
    /// The workspace it is the sandbox of.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
}

/// What is to be changed about a sandbox. What is absent stays.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct UpdateRequest {
    /// Its time is over this many seconds from now; never if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub timeout_secs: Option<Option<u64>>,
    /// Its time is over when nobody used it for this many seconds, counted from now; never if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
    pub idle_timeout_secs: Option<Option<u64>>,
    /// What is done when its time is over.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub on_timeout: Option<OnTimeout>,
    /// The snapshot it is stored as, with `suspend`; one called `idle-` and its id if null.
    #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub suspend_as: Option<Option<String>>,
    /// All its labels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<BTreeMap<String, String>>,
}

/// A sandbox that is gone.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GoneInfo {
    /// Its id.
    pub id: String,
    /// `gone`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub state: String,
    /// The snapshot it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub snapshot_tag: Option<String>,
    /// Its labels.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// When it was created, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// When it ended, in seconds since 1970.
    pub ended_at_unix: u64,
    /// How it ended, in one word: those of a sandbox, or `host_rebooted`.
    pub reason: String,
    /// How it ended, in one sentence.
    pub detail: String,
}

/// Where to take a sandbox back to.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct RollbackRequest {
    /// The snapshot to go on from. When absent, the latest branch of the sandbox; if that cannot be used,
    /// or there is none, the snapshot it was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
}

/// A sandbox's port of loopback.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LinePort {
    /// Such as `127.0.0.1:40123`: what clients of the reference are given as `FORKD_TARGET`. It is for
    /// users of the daemon's host who may use its unix socket.
    pub target: String,
}

/// What becomes of a sandbox whose time is over.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OnTimeout {
    /// It is deleted.
    #[default]
    Kill,
    /// It is paused. One that nobody used goes on by itself when somebody does.
    Pause,
    /// It is stored as a snapshot, then deleted. The sandbox of a workspace: the workspace is suspended.
    Suspend,
}

/// Tells null from nothing.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Option<T>>, D::Error> {
    Option::deserialize(deserializer).map(Some)
}
