//! What this command reads of the daemon's answers about snapshots and sandboxes, and the calls that
//! more than one command makes.
//!
//! Only what is shown or decided upon is here, and what may be absent is; `--json` prints what the
//! daemon said, whole. So a daemon that says more is understood.

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
    /// The image it was booted from.
    #[serde(default)]
    pub(crate) image: Option<String>,
    pub(crate) state: String,
    /// How it ended, in one word.
    #[serde(default)]
    pub(crate) reason: Option<String>,
    #[serde(default)]
    pub(crate) pid: Option<u32>,
    pub(crate) vcpus: u8,
    pub(crate) mem_size_mib: u64,
    /// Milliseconds from the arrival of the request to its first answer.
    #[serde(default)]
    pub(crate) ready_ms: Option<f64>,
    /// Seconds since 1970.
    pub(crate) created_at_unix: u64,
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
