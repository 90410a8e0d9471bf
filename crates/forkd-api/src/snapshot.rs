//! What the REST API's bodies hold of snapshots and branches.

use serde::{Deserialize, Serialize};

/// A snapshot to make: a guest is booted, warmed up, frozen and saved.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// Its name.
    pub tag: String,
    /// The image to boot. Either this or `kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The absolute path of a kernel on the daemon's host: to boot `rootfs` with or, alone, a bare guest,
    /// without agent, disk or network, that says it is ready by writing to port 0x602.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The absolute path of a root disk on the daemon's host, an ext4 image that must stay as it is: in
    /// place of `image`. Booted with `kernel`, or with the daemon's own when that is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<String>,
    /// Accepted, without meaning: every guest can write to its disk, and none changes `rootfs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rw: Option<bool>,
    /// Accepted, without meaning: every guest has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Accepted, at most 60, without meaning: the guest itself says when it is up and warm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_wait_secs: Option<u64>,
    /// A command to warm up with, in place of the image's own: done when it exits with 0 or creates the
    /// file named by `FORKD_READY_FILE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warm_command: Vec<String>,
    /// Python to warm up with, after the image's own, such as `import numpy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_python: Option<String>,
    /// Number of vCPUs; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default, 512, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Whether it, and so its children, have a network; they have when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
}

/// Where a snapshot stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotStatus {
    /// It is being made.
    Writing,
    /// Children can be forked from it.
    Ready,
    /// It was not finished, or is damaged.
    Failed,
    /// It is a template whose record the daemon cannot read: damaged, or written by a newer daemon. `error` says why.
    /// The process goes on; it can be looked at and deleted, and nothing else. It has the template's id as its tag
    /// if the tag cannot be read, or belongs to a snapshot on disk.
    #[serde(other)]
    Unknown,
}

/// How far the making of a snapshot is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// The guest boots.
    Booting,
    /// It warms up.
    Warming,
    /// It is made to stand still.
    Freezing,
    /// It is written to disk.
    Saving,
}

/// What is known of a snapshot.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotInfo<P = SnapshotPhase> {
    /// Whose it is; `*` for one that all may use.
    #[serde(default)]
    pub owner: String,
    /// Its name.
    pub tag: String,
    /// Where it stands.
    pub status: SnapshotStatus,
    /// How far it is, while it is being made.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<SnapshotPhase>))]
    pub phase: Option<P>,
    /// Why it failed, or why it cannot be written yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The same for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<crate::Code>))]
    pub error_code: Option<String>,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// Its image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Its kernel, if that is all it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// Number of vCPUs.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub vcpus: u8,
    /// Memory in MiB.
    pub mem_size_mib: u64,
    /// Whether it has a network interface.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub network: bool,
    /// Whether its image has a Python.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<bool>,
    /// Room its memory takes on disk, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub memory_bytes: u64,
    /// Room its disks take, without the image, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_bytes: u64,
    /// Room the state of its devices takes, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub state_bytes: u64,
    /// Whether children can be forked from it, as far as can be seen without reading all of it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub bootable: bool,
    /// Why they cannot, or could not once it has no template any more: its image is gone, or another one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// What it was branched from: a sandbox's id, or `compact:` and a tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branched_from: Option<String>,
    /// The snapshot its memory is stored as a difference to; absent if that is not to be seen by whoever asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// How many snapshots its memory is built on.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub chain_depth: usize,
    /// How it was branched: `full`, `diff` or `live`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// How long the vCPUs of its source stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// How long the processes in its source stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_ms: Option<f64>,
    /// Whether they stood still when it was taken: if not, its children go on in the middle of what they
    /// did, before they know who they are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// How long writing it took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_ms: Option<f64>,
    /// Room its own memory layer takes on disk, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_physical_bytes: Option<u64>,
    /// The length of its own memory layer, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_logical_bytes: Option<u64>,
    /// How many bytes were written to store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_written: Option<u64>,
    /// How far writing it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// Where its files are.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub dir: String,
    /// The process its next children are forked from, if it has one now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<TemplateInfo>,
}

impl<P> SnapshotInfo<P> {
    /// All its bytes on disk.
    pub fn size(&self) -> u64 {
        self.memory_bytes.saturating_add(self.disk_bytes).saturating_add(self.state_bytes)
    }
}

/// A process children are forked from.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TemplateInfo {
    /// Its process on the host.
    pub pid: i32,
    /// Where its memory comes from: `disk`, or `memory` if it is the guest the snapshot was made of; `unknown` if its
    /// record cannot be read.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub source: String,
    /// How many sandboxes it has forked that are still listed.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub children: usize,
}

/// How far a saver is, in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Progress {
    /// Guest memory it has looked at.
    pub looked_at: u64,
    /// Guest memory in all.
    pub total: u64,
    /// What it has written.
    pub written: u64,
}

impl Progress {
    /// The percentage of guest memory that was scanned.
    pub fn percent(&self) -> u64 {
        let percent = (u128::from(self.looked_at) * 100).checked_div(u128::from(self.total)).unwrap_or(0);
        u64::try_from(percent).unwrap_or(100).min(100)
    }
}

/// A branch to take. Everything else a client may send is ignored.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BranchRequest {
    /// Its tag; `branch-`, the sandbox's id, the time and four digits when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `full` (the default) stores all of it; `diff` and `live` what differs from the snapshot the sandbox
    /// came from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The older way to say `mode: diff`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<bool>,
    /// The older way to say `mode: live`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
    /// Answer when it is on disk, as is done when absent; else, with `live` only, as soon as the sandbox
    /// runs again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
    /// With `diff` only: the snapshot the difference is stored to. It can only be the one the sandbox came
    /// from, which is used anyway.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Accepted, without meaning: what is written is always measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure_diff: Option<bool>,
    /// Accepted, without meaning: every sandbox can be branched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_fork: Option<bool>,
}

/// A snapshot to make of another one.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompactRequest {
    /// Its tag.
    pub to: String,
}

/// Whose a snapshot is to be.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct OwnerRequest {
    /// The owner of a token, `local`, or `*` for everybody.
    pub owner: String,
}

/// A snapshot on disk, in detail.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotInfoDetail {
    /// Its name.
    pub tag: String,
    /// Where its files are.
    pub dir: String,
    /// When it was made, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// The length of all its memory layers.
    pub memory_logical_bytes: u64,
    /// Room they take on disk.
    pub memory_physical_bytes: u64,
    /// The length of the state of vCPUs and devices.
    pub vmstate_bytes: u64,
    /// The length of all layers of its disks.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_logical_bytes: u64,
    /// Room they take on disk.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_physical_bytes: u64,
    /// Room the memory layer it added takes on disk.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub own_memory_bytes: u64,
    /// Room the disk layers it added take on disk.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub own_disk_bytes: u64,
    /// The snapshot its memory is stored as a difference to; absent if that is not to be seen by whoever asks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// What that is, whatever has its tag now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_content_hash: Option<String>,
    /// How many snapshots its memory is built on.
    pub chain_depth: usize,
    /// The snapshots built on it that whoever asks may see.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub dependents: Vec<String>,
    /// The snapshots it came from that whoever asks may see, the farthest first.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub ancestors: Vec<String>,
    /// All files it is made of but its state.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub layers: Vec<LayerInfo>,
}

/// A file snapshots are made of.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LayerInfo {
    /// `memory` or `disk`.
    pub kind: String,
    /// Its BLAKE3, and its name.
    pub digest: String,
    /// Its length in bytes.
    pub logical_bytes: u64,
    /// Room it takes on disk, in bytes.
    pub physical_bytes: u64,
    /// How many snapshots use it.
    pub shared_by: usize,
}
