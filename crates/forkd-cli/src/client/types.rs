//! The daemon's replies as commands read them, and calls that several commands make.
//!
//! States and kinds are read as text: commands print them, also those of a newer daemon. `--json` prints the
//! whole reply.

use anyhow::{Context, Result};
use futures_util::{StreamExt, stream};
use hyper::Method;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::client::Daemon;

/// The number of concurrent calls in [`for_each`].
const AT_ONCE: usize = 16;

/// A snapshot.
pub(crate) type Snapshot = forkd_api::SnapshotInfo<String>;
/// A sandbox.
pub(crate) type Sandbox = forkd_api::SandboxInfo<String, String>;
/// The reply to a request for children.
pub(crate) type Spawned = forkd_api::SpawnReply<Sandbox>;
/// A workspace: a named sandbox.
pub(crate) type Workspace = forkd_api::WorkspaceInfo<String>;
/// A token.
pub(crate) type Token = forkd_api::TokenInfo<String>;
/// The fork tree.
pub(crate) type Tree = forkd_api::Tree<forkd_tree::Node>;

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

/// The field of a request for children that opens an agent port for each. Daemons of version 0.2 refuse its newer
/// name, `agent_port`; newer daemons accept both.
pub(crate) const AGENT_PORT: &str = "line_port";

/// The path that takes requests of the JSON-lines protocol. Daemons of version 0.2 lack its newer name, `json-lines`;
/// newer daemons serve both.
pub(crate) fn json_lines_path(id: &str) -> String {
    format!("{}/line", sandbox_path(id))
}

/// The parameters that select archived sandboxes. Daemons of version 0.2 know only the second one, and ignore the
/// first; with both, a newer daemon uses the first.
pub(crate) const ARCHIVED: [(&str, &str); 2] = [("archived", "true"), ("gone", "true")];

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
