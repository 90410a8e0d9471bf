//! Snapshots and branches.

use serde::{Deserialize, Serialize};

/// A snapshot to create: the daemon boots a guest, warms it up, freezes it and saves it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SnapshotRequest {
    /// The snapshot's tag.
    pub tag: String,
    /// The image to boot. Give either this or `kernel`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The absolute path of a kernel on the daemon's host. With `rootfs`, the kernel boots that disk. Alone, it is a
    /// bare guest without agent, disk or network, which signals that it is ready by a write to port 0x602.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<String>,
    /// The absolute path of a root disk on the daemon's host, in place of `image`: an ext4 image that must not
    /// change. It boots with `kernel`, or with the daemon's own kernel when that is absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rootfs: Option<String>,
    /// Accepted and ignored: every guest can write to its disk, and none changes `rootfs`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rw: Option<bool>,
    /// Accepted and ignored: every guest has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tap: Option<String>,
    /// Accepted up to 60 and ignored: the guest reports when it is up and warm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot_wait_secs: Option<u64>,
    /// The warm-up command, in place of the image's own. The warm-up is done when the command exits with 0 or creates
    /// the file named by `FORKD_READY_FILE`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warm_command: Vec<String>,
    /// Python code to run after the image's own warm-up, such as `import numpy`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warm_python: Option<String>,
    /// Number of vCPUs; 1 when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vcpus: Option<u8>,
    /// Memory in MiB; the daemon's default, 512, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_size_mib: Option<u64>,
    /// Whether the snapshot and its children have a network; true when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
}

/// The status of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotStatus {
    /// The snapshot is being created.
    Writing,
    /// Children can be forked from the snapshot.
    Ready,
    /// The snapshot was not finished, or is damaged.
    Failed,
    /// A template whose record the daemon cannot read: the record is damaged, or a newer daemon wrote it. `error` has the
    /// reason. The process continues; clients can only read and delete it. Its tag is the template's id if the tag cannot
    /// be read, or belongs to a snapshot on disk.
    #[serde(other)]
    Unknown,
}

/// The parts of a guest that a snapshot has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotKind {
    /// Memory, disk and devices: children are forked from it.
    #[default]
    Full,
    /// The disk alone: sandboxes boot on it, and nothing can be forked from it.
    Disk,
    /// Other parts, which only a newer daemon knows.
    #[serde(other)]
    Unknown,
}

/// The phases of a snapshot's creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum SnapshotPhase {
    /// The guest boots.
    Booting,
    /// The guest warms up.
    Warming,
    /// The daemon freezes the guest.
    Freezing,
    /// The daemon writes the snapshot to disk.
    Saving,
}

/// A snapshot and its status.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotInfo<P = SnapshotPhase> {
    /// The snapshot's owner; `*` if every client may use it.
    #[serde(default)]
    pub owner: String,
    /// The snapshot's tag.
    pub tag: String,
    /// The snapshot's status.
    pub status: SnapshotStatus,
    /// The parts of a guest that it has.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: SnapshotKind,
    /// The phase of its creation.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<SnapshotPhase>))]
    pub phase: Option<P>,
    /// The reason why it failed, or why the daemon cannot write it yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// The same reason, for programs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<crate::Code>))]
    pub error_code: Option<String>,
    /// Creation time, in seconds since 1970.
    pub created_at_unix: u64,
    /// The image it was booted from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// The kernel, for a snapshot without an image.
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
    /// Whether the image has Python.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python: Option<bool>,
    /// Disk space of its memory, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub memory_bytes: u64,
    /// Disk space of its disks without the image, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_bytes: u64,
    /// Disk space of the state of its devices, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub state_bytes: u64,
    /// Whether children can be forked from it, or boot on it. The daemon checks that its files exist, not their contents.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub bootable: bool,
    /// The reason why no children can be forked, or only while its template runs: the image is missing or was replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// The source of a branch: a sandbox's id, or `compact:` and a tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub branched_from: Option<String>,
    /// The snapshot that the memory is stored as a difference to; absent if the client may not see that snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// How many snapshots its memory is built on.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub chain_depth: usize,
    /// The mode of the branch: `full`, `diff`, `live` or `disk`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Milliseconds that the vCPUs of the source stood still.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<f64>,
    /// Milliseconds that the user processes of the source were frozen.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub frozen_ms: Option<f64>,
    /// Whether the user processes were frozen when the branch was taken. If not, children continue in the middle of
    /// an operation, before they have an identity of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quiesced: Option<bool>,
    /// Milliseconds that the write took.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_ms: Option<f64>,
    /// Disk space of the snapshot's own memory layer, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_physical_bytes: Option<u64>,
    /// Length of the snapshot's own memory layer, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff_logical_bytes: Option<u64>,
    /// Bytes written to store the snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_written: Option<u64>,
    /// Progress of the write.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Progress>,
    /// The folder with its files.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub dir: String,
    /// The template process that forks the snapshot's children, if one is running.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<TemplateInfo>,
}

impl<P> SnapshotInfo<P> {
    /// Disk space of all its parts, in bytes.
    pub fn size(&self) -> u64 {
        self.memory_bytes.saturating_add(self.disk_bytes).saturating_add(self.state_bytes)
    }
}

/// A template: the process that forks children.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TemplateInfo {
    /// The process id on the host.
    pub pid: i32,
    /// The source of its memory: `disk`; `memory` if it is the guest that the snapshot was made of; `unknown` if its
    /// record cannot be read.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub source: String,
    /// Number of its children that are still in the list of sandboxes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub children: usize,
}

/// Progress of a saver, in bytes.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(from = "ReadProgress")]
pub struct Progress {
    /// Guest memory that the saver has scanned.
    pub scanned_bytes: u64,
    /// The older name of `scanned_bytes`, with the same value.
    #[cfg_attr(feature = "openapi", schema(deprecated))]
    pub looked_at: u64,
    /// All guest memory.
    pub total: u64,
    /// Bytes that the saver has written.
    pub written: u64,
}

impl Progress {
    /// Progress of a saver, with `scanned_bytes` under both names.
    pub fn new(scanned_bytes: u64, total: u64, written: u64) -> Self {
        Progress { scanned_bytes, looked_at: scanned_bytes, total, written }
    }

    /// The percentage of guest memory that was scanned.
    pub fn percent(&self) -> u64 {
        let percent = (u128::from(self.scanned_bytes) * 100).checked_div(u128::from(self.total)).unwrap_or(0);
        u64::try_from(percent).unwrap_or(100).min(100)
    }
}

/// [`Progress`] of an older daemon, which sends `looked_at` only, or of a newer one.
#[derive(Deserialize)]
struct ReadProgress {
    scanned_bytes: Option<u64>,
    #[serde(default)]
    looked_at: u64,
    total: u64,
    written: u64,
}

impl From<ReadProgress> for Progress {
    fn from(read: ReadProgress) -> Self {
        Progress::new(read.scanned_bytes.unwrap_or(read.looked_at), read.total, read.written)
    }
}

/// A branch to take. The daemon ignores unknown fields.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct BranchRequest {
    /// The branch's tag. When absent: `branch-`, the sandbox's id, the time and four digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// `full` (the default) stores everything; `diff` and `live` store the difference to the snapshot that the
    /// sandbox was forked from. `disk` stores the disk alone, with clean file systems: sandboxes boot on it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Older form of `mode: diff`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub diff: Option<bool>,
    /// Older form of `mode: live`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live: Option<bool>,
    /// When true or absent, the reply comes when the branch is on disk. When false, which needs `live`, it comes as
    /// soon as the sandbox runs again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wait: Option<bool>,
    /// With `diff` only: the snapshot to which the difference is stored. It must be the default: the snapshot that the
    /// sandbox was forked from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// Accepted and ignored: the bytes written are always measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub measure_diff: Option<bool>,
    /// Accepted and ignored: every sandbox can be branched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_fork: Option<bool>,
}

/// A snapshot to create by compacting another one.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompactRequest {
    /// The new snapshot's tag.
    pub to: String,
}

/// A new owner of a snapshot.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct OwnerRequest {
    /// The owner of a token, `local`, or `*` for every owner.
    pub owner: String,
}

/// A snapshot on disk, in detail.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SnapshotInfoDetail {
    /// The snapshot's tag.
    pub tag: String,
    /// The folder with the snapshot's files.
    pub dir: String,
    /// The parts of a guest that it has.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub kind: SnapshotKind,
    /// Creation time, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// The version of forkd that made it. Older daemons do not return it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub made_by_version: String,
    /// Length of all memory layers, in bytes.
    pub memory_logical_bytes: u64,
    /// Disk space of all memory layers, in bytes.
    pub memory_physical_bytes: u64,
    /// Length of the state of vCPUs and devices, or of the disk's block map, in bytes.
    pub vmstate_bytes: u64,
    /// Length of all disk layers, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_logical_bytes: u64,
    /// Disk space of all disk layers, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub disk_physical_bytes: u64,
    /// Disk space of its own memory layer, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub own_memory_bytes: u64,
    /// Disk space of its own disk layers, in bytes.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub own_disk_bytes: u64,
    /// The snapshot that the memory is stored as a difference to; absent if the client may not see that snapshot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_tag: Option<String>,
    /// The content's id of that snapshot. It stays the same if another snapshot gets the tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent_content_hash: Option<String>,
    /// How many snapshots the memory is built on.
    pub chain_depth: usize,
    /// The snapshots built on it, if the client may see them.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub dependents: Vec<String>,
    /// The snapshots it came from, the farthest first, if the client may see them.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub ancestors: Vec<String>,
    /// All its layers.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub layers: Vec<LayerInfo>,
}

/// A layer: a file that snapshots share.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LayerInfo {
    /// `memory` or `disk`.
    pub kind: String,
    /// The layer's BLAKE3 digest, which is also its file name.
    pub digest: String,
    /// Length in bytes.
    pub logical_bytes: u64,
    /// Disk space in bytes.
    pub physical_bytes: u64,
    /// How many snapshots use the layer.
    pub shared_by: usize,
}
