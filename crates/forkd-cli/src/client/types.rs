//! The parts of the daemon's replies that commands read, and calls that several commands make.
//!
//! Only fields that a command prints or decides on are here, and optional ones have a default. So a newer
//! daemon with more fields is understood. `--json` prints the whole reply.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use hyper::Method;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::Daemon;

/// The number of concurrent calls in [`for_each`].
const AT_ONCE: usize = 16;

/// A snapshot.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) tag: String,
    pub(crate) status: SnapshotStatus,
    /// The stage of its creation: booting, warming, freezing, saving.
    #[serde(default)]
    pub(crate) phase: Option<String>,
    /// The reason why its creation failed.
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// A problem with a snapshot that is usable.
    #[serde(default)]
    pub(crate) warning: Option<String>,
    /// Seconds since 1970.
    pub(crate) created_at_unix: u64,
    #[serde(default)]
    pub(crate) image: Option<String>,
    /// The kernel of a guest without an image.
    #[serde(default)]
    pub(crate) kernel: Option<String>,
    pub(crate) mem_size_mib: u64,
    /// Physical bytes on disk, as in the next two fields.
    #[serde(default)]
    pub(crate) memory_bytes: u64,
    #[serde(default)]
    pub(crate) disk_bytes: u64,
    #[serde(default)]
    pub(crate) state_bytes: u64,
    /// The process that forks its children, if it runs.
    #[serde(default)]
    pub(crate) template: Option<Template>,
    /// The snapshot under it in its chain.
    #[serde(default)]
    pub(crate) parent_tag: Option<String>,
    /// The number of snapshots under it in its chain.
    #[serde(default)]
    pub(crate) chain_depth: u32,
    /// Milliseconds for which the source's vCPUs were paused.
    #[serde(default)]
    pub(crate) pause_ms: Option<f64>,
    /// Milliseconds for which the source's user processes were frozen.
    #[serde(default)]
    pub(crate) frozen_ms: Option<f64>,
    /// Whether the source's user processes were frozen.
    #[serde(default)]
    pub(crate) quiesced: Option<bool>,
    /// Milliseconds that the save took.
    #[serde(default)]
    pub(crate) diff_ms: Option<f64>,
    /// Bytes that the save wrote.
    #[serde(default)]
    pub(crate) bytes_written: Option<u64>,
    /// The progress of its save.
    #[serde(default)]
    pub(crate) progress: Option<SaveProgress>,
}

/// The progress of a save, in bytes.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct SaveProgress {
    pub(crate) looked_at: u64,
    pub(crate) total: u64,
    pub(crate) written: u64,
}

impl SaveProgress {
    /// Bytes of memory that were scanned.
    pub(crate) fn percent(&self) -> u64 {
        let percent = (u128::from(self.looked_at) * 100).checked_div(u128::from(self.total)).unwrap_or(0);
        u64::try_from(percent).unwrap_or(100).min(100)
    }
}

/// A snapshot's chain and sizes.
#[derive(Debug, Deserialize)]
pub(crate) struct SnapshotDetail {
    pub(crate) tag: String,
    pub(crate) dir: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub(crate) created_at_unix: Option<u64>,
    /// The number of snapshots under it in its chain.
    pub(crate) chain_depth: u32,
    /// The snapshots under it, root first.
    #[serde(default)]
    pub(crate) ancestors: Vec<String>,
    /// The snapshots built on it.
    #[serde(default)]
    pub(crate) dependents: Vec<String>,
    /// Bytes of its memory, the bytes of its chain on disk for it, and the part of these that no ancestor has;
    /// then the same of its disks.
    pub(crate) memory_logical_bytes: u64,
    pub(crate) memory_physical_bytes: u64,
    #[serde(default)]
    pub(crate) own_memory_bytes: u64,
    #[serde(default)]
    pub(crate) disk_logical_bytes: u64,
    #[serde(default)]
    pub(crate) disk_physical_bytes: u64,
    #[serde(default)]
    pub(crate) own_disk_bytes: u64,
    pub(crate) vmstate_bytes: u64,
    #[serde(default)]
    pub(crate) layers: Vec<SnapshotLayer>,
}

/// A file that snapshots share.
#[derive(Debug, Deserialize)]
pub(crate) struct SnapshotLayer {
    /// `memory` or `disk`.
    pub(crate) kind: String,
    pub(crate) digest: String,
    pub(crate) logical_bytes: u64,
    pub(crate) physical_bytes: u64,
    /// The number of snapshots that use it.
    pub(crate) shared_by: u64,
}

/// A workspace: a named sandbox.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    pub(crate) name: String,
    /// running, suspended or stale.
    pub(crate) status: String,
    /// The snapshot that it was forked from.
    pub(crate) source_snapshot_tag: String,
    /// The snapshot with its stored state.
    #[serde(default)]
    pub(crate) current_state_tag: Option<String>,
    /// The sandbox that it runs in.
    #[serde(default)]
    pub(crate) live_sandbox_id: Option<String>,
    /// Seconds since 1970.
    #[serde(default)]
    pub(crate) last_active_unix: u64,
}

impl Snapshot {
    /// Its bytes on disk.
    pub(crate) fn size(&self) -> u64 {
        self.memory_bytes.saturating_add(self.disk_bytes).saturating_add(self.state_bytes)
    }
}

/// The state of a snapshot.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum SnapshotStatus {
    Writing,
    Ready,
    Failed,
    /// The daemon cannot read the record of its template.
    Unknown,
}

/// The process that forks the children of a snapshot.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Template {
    pub(crate) pid: u32,
    /// The number of its running children.
    #[serde(default)]
    pub(crate) children: u64,
}

/// A sandbox.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    /// The snapshot it was forked from.
    #[serde(default)]
    pub(crate) snapshot_tag: Option<String>,
    /// The owner.
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// The image that it booted from.
    #[serde(default)]
    pub(crate) image: Option<String>,
    pub(crate) state: String,
    /// The reason of its end, as a code.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// The reason of its end or of the state `unknown`, as a sentence.
    #[serde(default)]
    pub(crate) detail: Option<String>,
    #[serde(default)]
    pub(crate) pid: Option<u32>,
    pub(crate) vcpus: u8,
    pub(crate) mem_size_mib: u64,
    /// Milliseconds from the arrival of the request to the agent's first answer.
    #[serde(default)]
    pub(crate) ready_ms: Option<f64>,
    /// Seconds since 1970.
    pub(crate) created_at_unix: u64,
    /// The number of its branches.
    #[serde(default)]
    pub(crate) branch_count: u64,
    /// The snapshot of its last rollback.
    #[serde(default)]
    pub(crate) rolled_back_to: Option<String>,
    /// The address of its agent port.
    #[serde(default)]
    pub(crate) guest_addr: String,
    /// Its labels.
    #[serde(default)]
    pub(crate) labels: BTreeMap<String, String>,
}

/// A sandbox that ended and was removed; the daemon lists it for one day.
#[derive(Debug, Deserialize)]
pub(crate) struct ArchivedSandbox {
    pub(crate) id: String,
    /// The snapshot it was forked from.
    #[serde(default)]
    pub(crate) snapshot_tag: Option<String>,
    /// Seconds since 1970.
    pub(crate) ended_at_unix: u64,
    /// The reason of its end, as a code and as a sentence.
    pub(crate) reason: String,
    pub(crate) detail: String,
}

/// The reply to a request for children.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Spawned {
    pub(crate) children: Vec<Sandbox>,
    #[serde(default)]
    pub(crate) errors: Vec<ChildError>,
}

/// A child that did not start.
#[derive(Debug, Deserialize)]
pub(crate) struct ChildError {
    /// Its index in the request, from 0.
    pub(crate) index: usize,
    pub(crate) error: String,
}

/// The path of a snapshot. Tags need no escaping: the arguments are checked.
pub(crate) fn snapshot_path(tag: &str) -> String {
    format!("/v1/snapshots/{tag}")
}

/// The path of a workspace.
pub(crate) fn workspace_path(name: &str) -> String {
    format!("/v1/workspaces/{name}")
}

/// The path of a sandbox.
pub(crate) fn sandbox_path(id: &str) -> String {
    format!("/v1/sandboxes/{id}")
}

/// Parses a reply.
pub(crate) fn read<T: DeserializeOwned>(answer: &Value) -> Result<T> {
    T::deserialize(answer)
        .context("forkd cannot parse the daemon's reply; restart the daemon if it has another version")
}

/// Gets a path and parses the reply.
pub(crate) async fn get<T: DeserializeOwned>(daemon: &Daemon, path: &str) -> Result<T> {
    read(&daemon.ask(Method::GET, path, None).await?)
}

/// Calls `call` for each name, several at once, and returns the results in order. A failure does not
/// stop the other calls.
pub(crate) async fn for_each<'a, T, F: Future<Output = Result<T>>>(
    names: &'a [String],
    call: impl Fn(&'a str) -> F,
) -> Vec<(&'a str, Result<T>)> {
    let calls = stream::iter(names).map(|name| {
        let called = call(name);
        async move { (name.as_str(), called.await) }
    });
    calls.buffered(AT_ONCE).collect().await
}
