//! Routes that pause, resume and roll back a sandbox.

use axum::extract::State;
use axum::{Extension, Json};
use forkd_api::{ErrorBody, RollbackRequest, SandboxInfo};

use crate::api::ApiContext;
use crate::api::extract::{Id, Ignored, OptionalBody};
use crate::api::sandboxes::info;
use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
use crate::sandbox::rollback::roll_back;
use crate::sandbox::{Phase, Sandbox};
use crate::util::task::{self, Task};

/// Pauses a sandbox: its vCPUs and its devices stand still. The guest's clock continues at the resume.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/pause", params(("id" = String, Path)),
    responses(
        (status = 200, body = SandboxInfo, description = "It is paused now, or was before"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is starting, being suspended, or has ended"),
    ),
)]
pub(crate) async fn pause(
    State(app): State<ApiContext>,
    Id(id): Id,
    _: Ignored,
) -> Result<Json<SandboxInfo>> {
    let sandbox = app.registry.known(&id)?;
    let _turn = sandbox.lock_exclusive().await?;
    sandbox.check_not_suspending()?;
    if !matches!(awake(&sandbox)?, Phase::Paused) || sandbox.waits_for_room() {
        sandbox.pause().await?;
    }
    // From now on no use resumes it: that is for automatic pauses. Its time-outs go on.
    sandbox.forget_pause();
    Ok(Json(info(&sandbox)))
}

/// Resumes a paused sandbox.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/resume", params(("id" = String, Path)),
    responses(
        (status = 200, body = SandboxInfo, description = "It runs now, or did before"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is starting, being suspended, or has ended"),
    ),
)]
pub(crate) async fn resume(
    State(app): State<ApiContext>,
    Id(id): Id,
    _: Ignored,
) -> Result<Json<SandboxInfo>> {
    let sandbox = app.registry.known(&id)?;
    let _turn = sandbox.lock_exclusive().await?;
    sandbox.check_not_suspending()?;
    // An unresponsive sandbox may be paused: its monitor may have paused it after the call timed out.
    if matches!(awake(&sandbox)?, Phase::Paused | Phase::Unresponsive) {
        sandbox.go_on().await?;
    }
    Ok(Json(info(&sandbox)))
}

/// The phase, if the sandbox has a process that can be paused.
fn awake(sandbox: &Sandbox) -> Result<Phase> {
    match sandbox.phase() {
        Phase::Starting => {
            let text =
                format!("sandbox {} is still starting; wait for its state to be `running`", sandbox.id);
            Err(Error::new(Code::SandboxStarting, text))
        }
        Phase::Ended(end) => Err(sandbox.ended(Code::SandboxEnded, &end)),
        phase @ Phase::Unknown(_) => sandbox.known().map(|()| phase),
        phase => Ok(phase),
    }
}

/// Rolls a sandbox back: it continues from a snapshot, under the same id. Its work since the snapshot is lost. A
/// sandbox that has ended runs again.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/rollback", params(("id" = String, Path)), request_body = RollbackRequest,
    responses(
        (status = 200, body = SandboxInfo, description = "It runs"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The snapshot cannot be used, or the sandbox is starting"),
        (status = 429, body = ErrorBody, description = "It would exceed the owner's quota of memory"),
        (status = 502, body = ErrorBody, description = "It could not continue, and has ended"),
    ),
)]
pub(crate) async fn rollback(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    OptionalBody(request): OptionalBody<RollbackRequest>,
) -> Result<Json<SandboxInfo>> {
    // In a task of its own: a rollback must not stop half-way when the client disconnects.
    let (registry, snapshots) = (app.registry.clone(), app.snapshots.clone());
    let work = async move { roll_back(&registry, &snapshots, &id, request.to.as_deref(), &who).await };
    let taken = task::spawn(Task::Rollback, work);
    let sandbox = taken.await.unwrap_or_else(|error| Err(Error::host("rolling back", error)))?;
    Ok(Json(info(&sandbox)))
}
