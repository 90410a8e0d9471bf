//! Routes of workspaces.

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use axum::{Extension, Json};
use forkd_api::{ErrorBody, SuspendRequest, WorkspaceInfo, WorkspaceRequest, WorkspaceStatus};

use super::ApiContext;
use super::extract::{Body, Id, Ignored, OptionalBody};
use super::pagination::Page;
use super::sandboxes::memory_limit;
use crate::auth::principal::Principal;
use crate::error::{Error, Result};
use crate::snapshot::branch_job::Mode;
use crate::telemetry::audit::AuditTarget;
use crate::util::task::{self, Task};
use crate::workspace::{Status, WorkspaceRecord, WorkspaceSpec};

fn info((record, status): (WorkspaceRecord, Status)) -> Json<WorkspaceInfo> {
    Json(plain((record, status)))
}

fn plain((record, status): (WorkspaceRecord, Status)) -> WorkspaceInfo {
    let (status, live) = match status {
        Status::Running => (WorkspaceStatus::Running, record.live_sandbox_id),
        Status::Suspended => (WorkspaceStatus::Suspended, None),
        Status::Stale => (WorkspaceStatus::Stale, None),
    };
    WorkspaceInfo {
        owner: record.owner,
        id: record.id,
        name: record.name,
        source_snapshot_tag: record.source_snapshot_tag,
        current_state_tag: record.current_state_tag,
        status,
        live_sandbox_id: live,
        created_at_unix: record.created_at_unix,
        last_active_unix: record.last_active_unix,
    }
}

/// Lists the caller's workspaces, by name.
#[utoipa::path(
    get, path = "/v1/workspaces",
    params(
        ("limit" = Option<u64>, Query, description = "The most entries, 1 to 1000; all when absent"),
        ("cursor" = Option<String>, Query, description = "`X-Next-Cursor` of the previous page"),
    ),
    responses((status = 200, body = Vec<WorkspaceInfo>), (status = 400, body = ErrorBody)),
)]
pub(super) async fn list(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    page: Page,
) -> Response {
    let all = app.workspaces.list().into_iter().filter(|(record, _)| who.owns(&record.owner));
    let all: Vec<WorkspaceInfo> = all.map(plain).collect();
    page.answer(all, |workspace| workspace.name.clone(), WorkspaceInfo::clone)
}

/// Creates a workspace: a sandbox with a name that can be suspended and resumed.
#[utoipa::path(
    post, path = "/v1/workspaces", request_body = WorkspaceRequest,
    responses(
        (status = 201, body = WorkspaceInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody, description = "No such snapshot"),
        (status = 409, body = ErrorBody, description = "The name is taken, or the snapshot cannot be used"),
        (status = 429, body = ErrorBody, description = "The owner's quota is used up"),
        (status = 503, body = ErrorBody, description = "A limit is reached"),
    ),
)]
pub(super) async fn create(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Body(request): Body<WorkspaceRequest>,
) -> Result<(StatusCode, Extension<AuditTarget>, Json<WorkspaceInfo>)> {
    let order = WorkspaceSpec {
        name: request.name,
        snapshot_tag: request.snapshot_tag,
        network: request.network.unwrap_or(true),
        memory_limit_mib: memory_limit(request.memory_limit_mib)?,
        who,
    };
    let workspaces = app.workspaces.clone();
    let made = to_its_end(async move { workspaces.create(order).await }).await?;
    Ok((StatusCode::CREATED, Extension(AuditTarget(made.0.name.clone())), info(made)))
}

/// Shows one workspace.
#[utoipa::path(
    get, path = "/v1/workspaces/{name}", params(("name" = String, Path)),
    responses(
        (status = 200, body = WorkspaceInfo), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "Its record cannot be used"),
    ),
)]
pub(super) async fn get(State(app): State<ApiContext>, Id(name): Id) -> Result<Json<WorkspaceInfo>> {
    app.workspaces.show(&name).map(info)
}

/// Deletes a workspace: its sandbox and its stored states.
#[utoipa::path(
    delete, path = "/v1/workspaces/{name}", params(("name" = String, Path)),
    responses(
        (status = 204), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "Another request changes it"),
    ),
)]
pub(super) async fn delete(State(app): State<ApiContext>, Id(name): Id) -> Result<StatusCode> {
    let workspaces = app.workspaces.clone();
    to_its_end(async move { workspaces.delete(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Suspends a workspace: stores its sandbox on disk, then ends it.
#[utoipa::path(
    post, path = "/v1/workspaces/{name}/suspend", params(("name" = String, Path)),
    request_body = SuspendRequest,
    responses(
        (status = 200, body = WorkspaceInfo),
        (status = 400, body = ErrorBody, description = "It is not running"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "Another request changes it"),
        (status = 429, body = ErrorBody, description = "The owner's quota is used up"),
        (status = 503, body = ErrorBody, description = "Too many branches are being taken"),
    ),
)]
pub(super) async fn suspend(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(name): Id,
    OptionalBody(request): OptionalBody<SuspendRequest>,
) -> Result<Json<WorkspaceInfo>> {
    let workspaces = app.workspaces.clone();
    let mode = if request.diff { Mode::Diff } else { Mode::Full };
    to_its_end(async move { workspaces.suspend(&name, mode, &who, None).await }).await.map(info)
}

/// Resumes a workspace: forks a sandbox from its last state.
#[utoipa::path(
    post, path = "/v1/workspaces/{name}/resume", params(("name" = String, Path)),
    responses(
        (status = 200, body = WorkspaceInfo),
        (status = 400, body = ErrorBody, description = "It is running already"),
        (status = 404, body = ErrorBody, description = "No such workspace, or its state is missing"),
        (status = 409, body = ErrorBody, description = "Another request changes it, or its state cannot be used"),
        (status = 429, body = ErrorBody, description = "The owner's quota is used up"),
    ),
)]
pub(super) async fn resume(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(name): Id,
    _: Ignored,
) -> Result<Json<WorkspaceInfo>> {
    let workspaces = app.workspaces.clone();
    to_its_end(async move { workspaces.resume(&name, &who).await }).await.map(info)
}

/// Runs `work` in a task of its own, so that it finishes also when the client disconnects.
async fn to_its_end<T: Send + 'static>(work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    let done = task::spawn(Task::Workspace, work).await;
    done.unwrap_or_else(|error| Err(Error::host("changing a workspace", error)))
}
