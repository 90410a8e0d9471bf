//! Commands and evaluations whose reply comes after they end.

use axum::extract::State;
use axum::response::Response;
use forkd_api::{ErrorBody, EvalReply, EvalRequest, ExecReply, ExecRequest};

use crate::api::extract::{Body, Id};
use crate::api::{ApiContext, response};
use crate::error::Result;
use crate::exec::eval::evaluate;
use crate::exec::run::{check_args, check_timeout, run_to_end};

/// Runs a command to its end.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/exec", params(("id" = String, Path)), request_body = ExecRequest,
    responses(
        (status = 200, body = ExecReply, description = "It ended, or was killed at its timeout"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(crate) async fn exec(
    State(app): State<ApiContext>,
    Id(id): Id,
    Body(request): Body<ExecRequest>,
) -> Result<Response> {
    let limit = check_timeout(request.timeout_secs)?;
    check_args(&request.args)?;
    let sandbox = app.registry.known(&id)?;
    let (reply, room) = run_to_end(&sandbox, &app.config, request, limit).await?;
    response::json(&reply, room)
}

/// Evaluates Python in the sandbox's warmed interpreter.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/eval", params(("id" = String, Path)), request_body = EvalRequest,
    responses(
        (status = 200, body = EvalReply, description = "Also for code that raised an exception, or timed out"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running, or has no Python"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 503, body = ErrorBody, description = "It was evaluated, but the result does not fit into the budget: \
          clients have too much unread output"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(crate) async fn eval(
    State(app): State<ApiContext>,
    Id(id): Id,
    Body(request): Body<EvalRequest>,
) -> Result<Response> {
    let limit = check_timeout(request.timeout_secs)?;
    let sandbox = app.registry.known(&id)?;
    let (reply, room) = evaluate(&sandbox, request, limit).await?;
    response::json(&reply, room)
}
