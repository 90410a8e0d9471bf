//! What this command reads of the daemon's answers about snapshots and sandboxes, and the calls that
//! more than one command makes.
//!
//! Only what is shown or decided upon is here, and what may be absent is; `--json` prints what the
//! daemon said, whole. So a daemon that says more is understood.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use hyper::Method;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::Daemon;

/// How many calls are made at once where something is done to many.
const AT_ONCE: usize = 16;

/// A snapshot.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Snapshot {
    pub(crate) tag: String,
    pub(crate) status: SnapshotStatus,
    /// What is being done while it is made: booting, warming, freezing, saving.
    #[serde(default)]
    pub(crate) phase: Option<String>,
    /// Why it failed.
    #[serde(default)]
    pub(crate) error: Option<String>,
    /// What about it is not as it should be.
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
    /// Physical bytes on disk, as are the next two.
    #[serde(default)]
    pub(crate) memory_bytes: u64,
    #[serde(default)]
    pub(crate) disk_bytes: u64,
    #[serde(default)]
    pub(crate) state_bytes: u64,
    /// The process that forks its children, if one lives.
    #[serde(default)]
    pub(crate) template: Option<Template>,
    /// The snapshot it is stored over.
    #[serde(default)]
    pub(crate) parent_tag: Option<String>,
    /// How many snapshots it is stored over.
    #[serde(default)]
    pub(crate) chain_depth: u32,
    /// Milliseconds its source's vCPUs stood still.
    #[serde(default)]
    pub(crate) pause_ms: Option<f64>,
    /// Milliseconds its source's user processes did.
    #[serde(default)]
    pub(crate) frozen_ms: Option<f64>,
    /// Whether they did.
    #[serde(default)]
    pub(crate) quiesced: Option<bool>,
    /// Milliseconds it took to save it.
    #[serde(default)]
    pub(crate) diff_ms: Option<f64>,
    /// Bytes written when it was saved.
    #[serde(default)]
    pub(crate) bytes_written: Option<u64>,
    /// How far its saver is.
    #[serde(default)]
    pub(crate) progress: Option<SaveProgress>,
}

/// How far a saver is, in bytes.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct SaveProgress {
    pub(crate) looked_at: u64,
    pub(crate) total: u64,
    pub(crate) written: u64,
}

impl SaveProgress {
    /// How much of the memory was looked at.
    pub(crate) fn percent(&self) -> u64 {
        let percent = (u128::from(self.looked_at) * 100).checked_div(u128::from(self.total)).unwrap_or(0);
        u64::try_from(percent).unwrap_or(100).min(100)
    }
}

/// What a snapshot consists of.
#[derive(Debug, Deserialize)]
pub(crate) struct SnapshotDetail {
    pub(crate) tag: String,
    pub(crate) dir: String,
    /// Seconds since 1970.
    #[serde(default)]
    pub(crate) created_at_unix: Option<u64>,
    /// How many snapshots it is stored over.
    pub(crate) chain_depth: u32,
    /// Those, root first.
    #[serde(default)]
    pub(crate) ancestors: Vec<String>,
    /// The snapshots stored over it.
    #[serde(default)]
    pub(crate) dependents: Vec<String>,
    /// Bytes of its memory, what its chain takes for it on disk, and what of that no ancestor has; then
    /// the same of its disks.
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

/// A file snapshots share.
#[derive(Debug, Deserialize)]
pub(crate) struct SnapshotLayer {
    /// `memory` or `disk`.
    pub(crate) kind: String,
    pub(crate) digest: String,
    pub(crate) logical_bytes: u64,
    pub(crate) physical_bytes: u64,
    /// How many snapshots it belongs to.
    pub(crate) shared_by: u64,
}

/// A sandbox with a name.
#[derive(Debug, Deserialize)]
pub(crate) struct Workspace {
    pub(crate) name: String,
    /// running, suspended or stale.
    pub(crate) status: String,
    /// The snapshot it began with.
    pub(crate) source_snapshot_tag: String,
    /// The snapshot that keeps its state.
    #[serde(default)]
    pub(crate) current_state_tag: Option<String>,
    /// The sandbox it runs in.
    #[serde(default)]
    pub(crate) live_sandbox_id: Option<String>,
    /// Seconds since 1970.
    #[serde(default)]
    pub(crate) last_active_unix: u64,
}

impl Snapshot {
    /// What it takes on disk.
    pub(crate) fn size(&self) -> u64 {
        self.memory_bytes.saturating_add(self.disk_bytes).saturating_add(self.state_bytes)
    }
}

/// Where a snapshot stands.
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
    /// How many of its children live.
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
    /// Whose it is.
    #[serde(default)]
    pub(crate) owner: Option<String>,
    /// The image it was booted from.
    #[serde(default)]
    pub(crate) image: Option<String>,
    pub(crate) state: String,
    /// How it ended, in one word.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    /// The same, or why it is in state `unknown`, in one sentence.
    #[serde(default)]
    pub(crate) detail: Option<String>,
    #[serde(default)]
    pub(crate) pid: Option<u32>,
    pub(crate) vcpus: u8,
    pub(crate) mem_size_mib: u64,
    /// Milliseconds from the arrival of the request to its first answer.
    #[serde(default)]
    pub(crate) ready_ms: Option<f64>,
    /// Seconds since 1970.
    pub(crate) created_at_unix: u64,
    /// How many branches were taken of it.
    #[serde(default)]
    pub(crate) branch_count: u64,
    /// The snapshot it was last taken back to.
    #[serde(default)]
    pub(crate) rolled_back_to: Option<String>,
    /// The address of its agent port.
    #[serde(default)]
    pub(crate) guest_addr: String,
    /// What is written on it.
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
    /// How it ended, in one word and in one sentence.
    pub(crate) reason: String,
    pub(crate) detail: String,
}

/// What came of a request for children.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Spawned {
    pub(crate) children: Vec<Sandbox>,
    #[serde(default)]
    pub(crate) errors: Vec<ChildError>,
}

/// A child that did not start.
#[derive(Debug, Deserialize)]
pub(crate) struct ChildError {
    /// Which of them, counted from 0.
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

/// Reads an answer.
pub(crate) fn read<T: DeserializeOwned>(answer: &Value) -> Result<T> {
    T::deserialize(answer)
        .context("the daemon's answer is not understood: is it of another version? Restart it")
}

/// Asks for an answer and reads it.
pub(crate) async fn get<T: DeserializeOwned>(daemon: &Daemon, path: &str) -> Result<T> {
    read(&daemon.ask(Method::GET, path, None).await?)
}

/// Makes a call for each of `names`, several at once, and gives each its result, in order. One
/// failure does not keep the others from being tried.
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
