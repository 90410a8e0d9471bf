//! Making, showing and deleting sandboxes.

use std::time::{Duration, UNIX_EPOCH};

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use super::extract::{Body, Id};
use super::types::{CreateRequest, SandboxInfo, SandboxState};
use super::{App, exec};
use crate::console;
use crate::error::{Error, ErrorBody, Result};
use crate::sandbox::{Phase, Sandbox, Spec};

/// Boots a sandbox and answers when it runs.
#[utoipa::path(
    post, path = "/v1/sandboxes", request_body = CreateRequest,
    responses(
        (status = 201, body = Vec<SandboxInfo>, description = "A list with the one sandbox, running"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody, description = "No such image"),
        (status = 502, body = ErrorBody, description = "The guest did not boot; the end of its console is told"),
        (status = 503, body = ErrorBody, description = "The limit of sandboxes is reached"),
    ),
)]
pub(super) async fn create(State(app): State<App>, Body(request): Body<CreateRequest>) -> Result<Response> {
    let lifetime = request.timeout_secs.map(exec::check_timeout).transpose()?;
    let spec = Spec {
        image: request.image,
        vcpus: request.vcpus.unwrap_or(1),
        mem_mib: request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib),
        warm: request.warm,
    };
    // Bound to this request while it boots: a client that goes away leaves nothing behind.
    let bound = app.registry.create(spec).await?;
    bound.sandbox().started().await?;
    let sandbox = bound.release();
    if let Some(lifetime) = lifetime {
        let (registry, sandbox) = (app.registry.clone(), sandbox.clone());
        tokio::spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(lifetime) => {
                    tracing::info!(sandbox = sandbox.id, "its time is up");
                    let _ = registry.delete(&sandbox.id);
                }
                () = sandbox.stopped() => {}
            }
        });
    }
    Ok((StatusCode::CREATED, Json(vec![info(&sandbox)])).into_response())
}

/// All sandboxes, oldest first.
#[utoipa::path(get, path = "/v1/sandboxes", responses((status = 200, body = Vec<SandboxInfo>)))]
pub(super) async fn list(State(app): State<App>) -> Json<Vec<SandboxInfo>> {
    Json(app.registry.list().iter().map(|sandbox| info(sandbox)).collect())
}

/// One sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}", params(("id" = String, Path)),
    responses((status = 200, body = SandboxInfo), (status = 404, body = ErrorBody)),
)]
pub(super) async fn get(State(app): State<App>, Id(id): Id) -> Result<Json<SandboxInfo>> {
    Ok(Json(info(app.registry.get(&id)?.as_ref())))
}

/// Ends a sandbox, as if its plug was pulled, and forgets it.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)),
)]
pub(super) async fn delete(State(app): State<App>, Id(id): Id) -> Result<StatusCode> {
    app.registry.delete(&id)?;
    Ok(StatusCode::NO_CONTENT)
}

/// What the guest wrote to its console: the newest, if it was a lot.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/console", params(("id" = String, Path)),
    responses(
        (status = 200, body = String, content_type = "text/plain; charset=utf-8"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn console(State(app): State<App>, Id(id): Id) -> Result<Response> {
    let path = app.registry.get(&id)?.console_path();
    let limit = app.config.limits.console_limit;
    let text = tokio::task::spawn_blocking(move || console::tail(&path, limit)).await;
    let text = text.map_err(|error| Error::host("reading the console", error))?;
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response())
}

fn info(sandbox: &Sandbox) -> SandboxInfo {
    let (state, end) = match sandbox.phase() {
        Phase::Starting => (SandboxState::Starting, None),
        Phase::Running => (SandboxState::Running, None),
        Phase::Unresponsive => (SandboxState::Unresponsive, None),
        Phase::Ended(end) => (SandboxState::Ended, Some(end)),
    };
    let facts = sandbox.facts();
    SandboxInfo {
        id: sandbox.id.clone(),
        image: sandbox.spec.image.clone(),
        state,
        reason: end.as_ref().map(|end| end.reason.to_owned()),
        detail: end.as_ref().map(|end| end.detail.clone()),
        console_tail: end.map(|end| end.console_tail.clone()),
        vcpus: sandbox.spec.vcpus,
        mem_size_mib: sandbox.spec.mem_mib,
        pid: facts.pid,
        boot_ms: facts.boot_ms,
        python: facts.python,
        created_at_unix: sandbox.created.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs(),
    }
}
