//! Pausing sandboxes, letting them go on, and taking them back.

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

/// Has a sandbox stand still: its vCPUs and its devices. Time goes on in it when it is resumed.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/pause", params(("id" = String, Path)),
    responses(
        (status = 200, body = SandboxInfo, description = "It is paused, or was already"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is starting, being put away, or has ended"),
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
    // Whoever pauses it means it: it does not go on by itself.
    sandbox.forget_pause();
    Ok(Json(info(&sandbox)))
}

/// Lets a paused sandbox go on.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/resume", params(("id" = String, Path)),
    responses(
        (status = 200, body = SandboxInfo, description = "It runs, or did already"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is starting, being put away, or has ended"),
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
    // One that does not answer may have been paused too late for anybody to hear of it.
    if matches!(awake(&sandbox)?, Phase::Paused | Phase::Unresponsive) {
        sandbox.go_on().await?;
    }
    Ok(Json(info(&sandbox)))
}

/// Where it stands, if it has a process that can be paused.
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

/// Takes a sandbox back: it goes on from a snapshot, under the same id. What it did since is lost; one that
/// has ended runs again.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/rollback", params(("id" = String, Path)), request_body = RollbackRequest,
    responses(
        (status = 200, body = SandboxInfo, description = "It runs"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The snapshot cannot be used, or the sandbox is starting"),
        (status = 429, body = ErrorBody, description = "It would have more memory than its owner may have"),
        (status = 502, body = ErrorBody, description = "It did not go on, and has ended"),
    ),
)]
pub(crate) async fn rollback(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    OptionalBody(request): OptionalBody<RollbackRequest>,
) -> Result<Json<SandboxInfo>> {
    // In a task of its own: half-way there is no stopping, whether or not the client waits.
    let (registry, snapshots) = (app.registry.clone(), app.snapshots.clone());
    let work = async move { roll_back(&registry, &snapshots, &id, request.to.as_deref(), &who).await };
    let taken = task::spawn(Task::Rollback, work);
    let sandbox = taken.await.unwrap_or_else(|error| Err(Error::host("rolling back", error)))?;
    Ok(Json(info(&sandbox)))
}
