//! The route of a folder with all below it. The daemon collects the reply within the budget of all replies, so that
//! an error has its status, also one that comes late.

use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use forkd_api::{ErrorBody, FileTree, FileTreeEntry, Incomplete};
use forkd_protocol::agent::{TreeEntry, incomplete};
use forkd_protocol::connect;
use serde::{Deserialize, Serialize};
use utoipa::IntoParams;

use super::{absolute, kind};
use crate::agent::{self, Agent, ResponseBudget};
use crate::api::extract::{Id, Params};
use crate::api::{ApiContext, response};
use crate::auth::principal::Principal;
use crate::error::Result;
use crate::sandbox::agent_call::AgentCall;

/// The time limit of one listing.
const LIMIT: Duration = Duration::from_secs(300);
/// The most bytes of a reply.
const MAX_REPLY: usize = 40 << 20;

/// A folder to list with all below it.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct TreeTarget {
    /// Absolute path in the guest. If it is a link, the agent follows it.
    path: String,
    /// User whose permissions apply; the image's default when absent.
    user: Option<String>,
    /// Read all regular files and add their SHA-256. That takes the longer the larger the files are.
    #[serde(default)]
    hash: bool,
}

/// Lists a folder with all below it, to compare two sandboxes.
///
/// The agent does not enter pseudo file systems such as `/proc`, `/sys` and `/dev`, and no file systems of other
/// machines or processes. It follows no link below the folder, and opens regular files only. After 300 seconds, or
/// when the client disconnects, it stops. A sandbox with an agent of an older version answers `sandbox_unfit`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/tree", params(("id" = String, Path), TreeTarget),
    responses(
        (status = 200, body = FileTree),
        (status = 400, body = ErrorBody, description = "Not a folder, or more than 100000 entries, or more than \
          40 MiB of reply: choose a smaller folder"),
        (status = 403, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running, or its agent is of an older \
          version"),
        (status = 502, body = ErrorBody),
        (status = 503, body = ErrorBody, description = "The agent lists four folders already, or clients have too \
          much unread output"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer, or the folder takes too long: \
          choose a smaller folder"),
    ),
)]
pub(crate) async fn tree(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    Params(target): Params<TreeTarget>,
) -> Result<Response> {
    let path = absolute(&target.path)?;
    let sandbox = app.registry.known(&id)?;
    let call = AgentCall::begin(&sandbox, &who).await?;
    let (body, room) = call.run(&sandbox, collect(&sandbox.agent, path, &target)).await?;
    Ok(response::response(body, room))
}

/// The whole reply, as JSON.
async fn collect(agent: &Agent, path: &str, target: &TreeTarget) -> agent::Result<(Vec<u8>, ResponseBudget)> {
    let mut stream = agent.tree(path, target.hash, LIMIT, target.user.as_deref()).await?;
    let mut reply = Reply { bytes: Vec::new(), room: ResponseBudget::default() };
    reply.add(b"{\"path\":", Some(&path), b",\"entries\":[")?;
    let mut comma: &[u8] = b"";
    while let Some(entries) = stream.next().await? {
        for entry in entries {
            reply.add(comma, Some(&described(entry)), b"")?;
            comma = b",";
        }
    }
    reply.add(b"]}", None::<&str>, b"")?;
    Ok((reply.bytes, reply.room))
}

/// JSON that becomes a reply. Entries of the guest take many times its room.
struct Reply {
    bytes: Vec<u8>,
    room: ResponseBudget,
}

impl Reply {
    fn add(
        &mut self,
        before: &[u8],
        value: Option<&(impl Serialize + ?Sized)>,
        after: &[u8],
    ) -> agent::Result<()> {
        let length = self.bytes.len();
        self.bytes.extend_from_slice(before);
        if let Some(value) = value {
            let written = serde_json::to_writer(&mut self.bytes, value);
            written.map_err(|error| agent::Error::Protocol(error.to_string()))?;
        }
        self.bytes.extend_from_slice(after);
        if self.bytes.len() > MAX_REPLY {
            let text = format!("the list is longer than {} MiB: choose a smaller folder", MAX_REPLY >> 20);
            return Err(connect::Error::new(connect::Code::OutOfRange, text).into());
        }
        match self.room.take(self.bytes.len() - length) {
            true => Ok(()),
            false => Err(agent::Error::NoRoom),
        }
    }
}

fn described(entry: TreeEntry) -> FileTreeEntry {
    let base64 = |bytes: Option<Vec<u8>>| bytes.map(|bytes| BASE64_STANDARD.encode(bytes));
    FileTreeEntry {
        path: entry.path,
        path_base64: base64(entry.path_bytes),
        kind: kind(&entry.r#type),
        size: entry.size,
        modified_unix_ms: entry.modified_ms,
        mode: entry.mode,
        sha256: entry.sha256,
        target: entry.target,
        target_base64: base64(entry.target_bytes),
        incomplete: entry.incomplete.map(|why| match why.as_str() {
            incomplete::CHANGING => Incomplete::Changing,
            incomplete::FILE_SYSTEM => Incomplete::FileSystem,
            _ => Incomplete::Unreadable,
        }),
    }
}

#[cfg(test)]
mod tests;
