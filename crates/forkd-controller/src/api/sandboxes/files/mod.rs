//! Routes of a sandbox's files. The daemon streams their content and never holds a whole file.
//!
//! Either peer can stall. The agent's client has a timeout for the guest. For the HTTP client this module has one: it
//! ends the connection or replies 408.

pub(crate) mod tree;

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body as HttpBody, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_api::{ErrorBody, FileInfo, FileKind, FileList, FileWritten, MkdirRequest, MoveRequest};
use forkd_protocol::agent::EntryInfo;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::sync::mpsc;
use utoipa::IntoParams;

use crate::agent::{Download, Upload};
use crate::api::extract::{Body, Id, Params};
use crate::api::{ApiContext, response};
use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
use crate::sandbox::Sandbox;
use crate::sandbox::agent_call::AgentCall;
use crate::util::task::{self, Task};

/// How long the daemon reads on after it rejects an upload, so that the client sees the reply and not a reset
/// connection.
const DISCARD: Duration = Duration::from_secs(2);
/// Pieces of a download that are queued for the client.
const QUEUE: usize = 2;
/// The largest depth of a listing.
const MAX_DEPTH: u32 = 64;

/// A file, and the user that accesses it.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct Target {
    /// Absolute path in the guest.
    path: String,
    /// User whose permissions apply; the image's default when absent.
    user: Option<String>,
}

/// The destination of an upload.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct UploadTarget {
    /// Absolute path in the guest.
    path: String,
    /// User whose permissions apply, and who owns a new file; the image's default when absent.
    user: Option<String>,
    /// Permission bits in octal, such as 644. When absent: those of the replaced file, or the usual ones.
    mode: Option<String>,
}

/// A file or a folder to remove.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct RemoveTarget {
    /// Absolute path in the guest.
    path: String,
    /// User whose permissions apply; the image's default when absent.
    user: Option<String>,
    /// Remove a folder with its content.
    #[serde(default)]
    recursive: bool,
}

/// A folder to list.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListTarget {
    /// Absolute path in the guest.
    path: String,
    /// User whose permissions apply; the image's default when absent.
    user: Option<String>,
    /// Number of levels, 1 to 64; 1 when absent.
    depth: Option<u32>,
}

/// Reads a file.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files", params(("id" = String, Path), Target),
    responses(
        (status = 200, content_type = "application/octet-stream", description = "Its bytes, as they come from \
          the guest. If the file shrinks or the sandbox ends meanwhile, the connection breaks"),
        (status = 400, body = ErrorBody, description = "Not an absolute path, or no regular file"),
        (status = 403, body = ErrorBody, description = "The user may not read it"),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody, description = "The sandbox is not running"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(crate) async fn download(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    Params(target): Params<Target>,
) -> Result<Response> {
    let path = absolute(&target.path)?;
    let sandbox = app.registry.known(&id)?;
    let call = AgentCall::begin(&sandbox, &who).await?;
    let opened = sandbox.agent.download(path, target.user.as_deref());
    let download = call.run(&sandbox, opened).await?;
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, header::HeaderValue::from_static("application/octet-stream"));
    if let Some(length) = download.length {
        headers.insert(header::CONTENT_LENGTH, length.into());
    }
    let (pieces, queued) = mpsc::channel(QUEUE);
    task::spawn(Task::Download, relay(sandbox, call, download, pieces));
    let queued = futures_util::stream::unfold(queued, |mut queued| async {
        queued.recv().await.map(|piece| (piece, queued))
    });
    Ok((headers, HttpBody::from_stream(queued.boxed())).into_response())
}

/// Copies a file from the guest to a client, at the pace of the slower one.
async fn relay(
    sandbox: Arc<Sandbox>,
    call: AgentCall,
    mut download: Download,
    pieces: mpsc::Sender<std::io::Result<Bytes>>,
) {
    loop {
        let piece = match call.run(&sandbox, download.next()).await {
            Ok(None) => return,
            Ok(Some(piece)) => Ok(piece),
            // The status has been sent already. The only way left to report an error is to break the body off.
            Err(error) => {
                tracing::info!(sandbox = sandbox.id, %error, "download failed");
                Err(std::io::Error::other(error))
            }
        };
        let last = piece.is_err();
        // The connection of a client that stops reading has ended.
        if pieces.send(piece).await.is_err() || last {
            return;
        }
    }
}

/// Writes a file completely or not at all. The body is the file, of any length.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/files", params(("id" = String, Path), UploadTarget),
    request_body(content = Vec<u8>, content_type = "application/octet-stream"),
    responses(
        (status = 200, body = FileWritten),
        (status = 400, body = ErrorBody, description = "Not an absolute path, or a folder"),
        (status = 403, body = ErrorBody, description = "The user may not write it"),
        (status = 404, body = ErrorBody),
        (status = 408, body = ErrorBody, description = "The client stalled"),
        (status = 409, body = ErrorBody, description = "The sandbox is not running"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
        (status = 507, body = ErrorBody, description = "The guest's disk is full"),
    ),
)]
pub(crate) async fn upload(
    State(app): State<ApiContext>,
    Id(id): Id,
    Params(target): Params<UploadTarget>,
    request: Request,
) -> Result<Json<FileWritten>> {
    // A client that sends `Expect` waits for the first read before it sends the body.
    let asked_first = request.headers().contains_key(header::EXPECT);
    let mut source = Source { body: request.into_body(), begun: false, stall: app.config.timing.stall };
    let written = receive(&app, &id, target, &mut source).await;
    if written.is_err() && (source.begun || !asked_first) {
        let discarded = async { while let Some(Ok(_)) = source.body.frame().await {} };
        let _ = tokio::time::timeout(DISCARD, discarded).await;
    }
    written.map(Json)
}

/// The body that a client sends.
struct Source {
    body: HttpBody,
    begun: bool,
    /// The timeout for one piece.
    stall: Duration,
}

impl Source {
    /// The next piece; `None` at the end.
    async fn next(&mut self) -> Result<Option<Bytes>> {
        self.begun = true;
        loop {
            let timeout = |_| {
                let text = format!(
                    "no data arrived for {} s; the file was not written, send it again",
                    self.stall.as_secs()
                );
                Error::new(Code::RequestTimeout, text)
            };
            match tokio::time::timeout(self.stall, self.body.frame()).await.map_err(timeout)? {
                None => return Ok(None),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) if !data.is_empty() => return Ok(Some(data)),
                    _ => {}
                },
                Some(Err(error)) => {
                    return Err(Error::invalid(format!(
                        "the body ended early; the file was not written, send it again: {error}"
                    )));
                }
            }
        }
    }
}

async fn receive(
    app: &ApiContext,
    id: &str,
    target: UploadTarget,
    source: &mut Source,
) -> Result<FileWritten> {
    let path = absolute(&target.path)?;
    let mode = target.mode.as_deref().map(parse_mode).transpose()?;
    let sandbox = ready(app, id).await?;
    let mut upload: Upload =
        AgentCall::STREAM.run(&sandbox, sandbox.agent.upload(path, target.user.as_deref(), mode)).await?;
    let mut size = 0u64;
    while let Some(piece) = source.next().await? {
        size = size.saturating_add(piece.len() as u64);
        AgentCall::STREAM.run(&sandbox, upload.send(piece)).await?;
    }
    let written = AgentCall::STREAM.run(&sandbox, upload.finish()).await?;
    Ok(FileWritten::new(written.path, size, written.whole.unwrap_or(false)))
}

/// Removes a file, a link or an empty folder; with `recursive`, a folder with its content.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/files", params(("id" = String, Path), RemoveTarget),
    responses(
        (status = 204, description = "It was removed"),
        (status = 400, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The folder is not empty, or the sandbox is not running"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
    ),
)]
pub(crate) async fn remove(
    State(app): State<ApiContext>,
    Id(id): Id,
    Params(target): Params<RemoveTarget>,
) -> Result<StatusCode> {
    let path = absolute(&target.path)?;
    let sandbox = ready(&app, &id).await?;
    let user = target.user.as_deref();
    let removed = async {
        match target.recursive {
            false => sandbox.agent.remove_one(path, user).await,
            true => {
                // The agent's recursive removal succeeds for a missing path; `stat` reports it as an error.
                sandbox.agent.stat(path, user).await?;
                sandbox.agent.remove_all(path, user).await
            }
        }
    };
    AgentCall::STREAM.run(&sandbox, removed).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists a folder.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/list", params(("id" = String, Path), ListTarget),
    responses(
        (status = 200, body = FileList),
        (status = 400, body = ErrorBody, description = "Not a folder, or too many entries: list a smaller folder"),
        (status = 403, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running: `sandbox_starting`, \
            `sandbox_paused`, `sandbox_waits_for_disk`, `sandbox_suspending`, `sandbox_ended`, `sandbox_replaced`, \
            `state_unknown`; `sandbox_unfit`: it has no agent"),
        (status = 502, body = ErrorBody),
        (status = 503, body = ErrorBody, description = "The list does not fit into the budget: clients \
          have too much unread output"),
        (status = 504, body = ErrorBody),
    ),
)]
pub(crate) async fn list(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    Params(target): Params<ListTarget>,
) -> Result<Response> {
    let path = absolute(&target.path)?;
    let depth = target.depth.unwrap_or(1);
    if !(1..=MAX_DEPTH).contains(&depth) {
        return Err(Error::invalid(format!("depth is {depth}; it must be 1 to {MAX_DEPTH}")));
    }
    let sandbox = app.registry.known(&id)?;
    let call = AgentCall::begin(&sandbox, &who).await?;
    let listing = sandbox.agent.list_dir(path, depth, target.user.as_deref());
    let (listed, room) = call.run(&sandbox, listing).await?;
    response::json(&FileList { entries: listed.into_iter().map(info).collect() }, room)
}

/// Shows the attributes of a file. A link is not followed.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/files/stat", params(("id" = String, Path), Target),
    responses(
        (status = 200, body = FileInfo), (status = 400, body = ErrorBody), (status = 403, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running: `sandbox_starting`, \
            `sandbox_paused`, `sandbox_waits_for_disk`, `sandbox_suspending`, `sandbox_ended`, `sandbox_replaced`, \
            `state_unknown`; `sandbox_unfit`: it has no agent"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody),
    ),
)]
pub(crate) async fn stat(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    Params(target): Params<Target>,
) -> Result<Json<FileInfo>> {
    let path = absolute(&target.path)?;
    let sandbox = app.registry.known(&id)?;
    let call = AgentCall::begin(&sandbox, &who).await?;
    let entry = call.run(&sandbox, sandbox.agent.stat(path, target.user.as_deref())).await?;
    Ok(Json(info(entry)))
}

/// Creates a folder and its missing parent folders.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/mkdir", params(("id" = String, Path)), request_body = MkdirRequest,
    responses(
        (status = 201, body = FileInfo), (status = 400, body = ErrorBody), (status = 403, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It exists already, or the sandbox is not running"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody), (status = 507, body = ErrorBody),
    ),
)]
pub(crate) async fn mkdir(
    State(app): State<ApiContext>,
    Id(id): Id,
    Body(request): Body<MkdirRequest>,
) -> Result<(StatusCode, Json<FileInfo>)> {
    let path = absolute(&request.path)?;
    let sandbox = ready(&app, &id).await?;
    let entry =
        AgentCall::STREAM.run(&sandbox, sandbox.agent.make_dir(path, request.user.as_deref())).await?;
    Ok((StatusCode::CREATED, Json(info(entry))))
}

/// Moves a file or a folder within one file system of the guest.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/files/move", params(("id" = String, Path)), request_body = MoveRequest,
    responses(
        (status = 200, body = FileInfo, description = "Its new attributes"),
        (status = 400, body = ErrorBody), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "A folder that is not empty is in the way, or the file \
          systems differ, or the sandbox is not running"),
        (status = 502, body = ErrorBody), (status = 504, body = ErrorBody), (status = 507, body = ErrorBody),
    ),
)]
pub(crate) async fn rename(
    State(app): State<ApiContext>,
    Id(id): Id,
    Body(request): Body<MoveRequest>,
) -> Result<Json<FileInfo>> {
    let (from, to) = (absolute(&request.from)?, absolute(&request.to)?);
    let sandbox = ready(&app, &id).await?;
    let entry =
        AgentCall::STREAM.run(&sandbox, sandbox.agent.move_file(from, to, request.user.as_deref())).await?;
    Ok(Json(info(entry)))
}

async fn ready(app: &ApiContext, id: &str) -> Result<Arc<Sandbox>> {
    let sandbox = app.registry.known(id)?;
    sandbox.ready().await?;
    Ok(sandbox)
}

/// Checks that a path is absolute: the guest has no folder that a relative path would start at.
fn absolute(path: &str) -> Result<&str> {
    match path {
        _ if path.contains('\0') => Err(Error::invalid("a path cannot contain a NUL byte; remove it")),
        _ if path.starts_with('/') => Ok(path),
        _ => Err(Error::invalid(format!("the path {path:?} is not absolute; begin it with /"))),
    }
}

fn parse_mode(text: &str) -> Result<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let mode = u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o7777);
    mode.ok_or_else(|| Error::invalid(format!("mode is {text:?}; it must be octal, 0 to 7777")))
}

/// Converts the agent's attributes. The agent gives a link the type of its target.
fn info(entry: EntryInfo) -> FileInfo {
    let kind = kind(&entry.r#type);
    let link = entry.symlink_target.is_some();
    FileInfo {
        name: entry.name,
        path: entry.path,
        r#type: if link { FileKind::Symlink } else { kind },
        size: entry.size,
        mode: entry.mode,
        permissions: entry.permissions,
        owner: entry.owner,
        group: entry.group,
        modified_time: entry.modified_time,
        symlink_target: entry.symlink_target,
        target_type: (link && kind != FileKind::Symlink).then_some(kind),
    }
}

fn kind(name: &str) -> FileKind {
    match name {
        "FILE_TYPE_FILE" => FileKind::File,
        "FILE_TYPE_DIRECTORY" => FileKind::Directory,
        "FILE_TYPE_SYMLINK" => FileKind::Symlink,
        _ => FileKind::Other,
    }
}

#[cfg(test)]
mod tests;
