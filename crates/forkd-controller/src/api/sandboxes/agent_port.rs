//! The JSON-lines protocol over HTTP, and the loopback ports for it.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use forkd_api::{ErrorBody, LinePort};
use forkd_protocol::json_lines::{Reply, Request};

use crate::agent::ResponseBudget;
use crate::api::extract::{Id, Ignored, Raw};
use crate::api::{ApiContext, response};
use crate::compat::json_lines;
use crate::error::Result;

/// Sends one request of the JSON-lines protocol: `{"action": "ping"}`, `{"action": "exec", "args": […], "timeout":
/// 30}` or `{"action": "eval", "code": "…"}`. The reply is the same as from the guest's port 8888; `error` has
/// failures.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/line", params(("id" = String, Path)),
    request_body(content = Object, content_type = "application/json"),
    responses((status = 200, body = Object), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn line(State(app): State<ApiContext>, Id(id): Id, Raw(body): Raw) -> Result<Response> {
    let sandbox = app.registry.known(&id)?;
    let (reply, room) = match Request::parse(&body) {
        Ok(request) => json_lines::answer(&sandbox, &app.config, request).await,
        Err(failure) => (Reply::Failed(failure), ResponseBudget::default()),
    };
    Ok(response::response(reply.to_line(), room))
}

/// Opens a loopback port for the JSON-lines protocol, or returns the port that is open.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/line-port", params(("id" = String, Path)),
    responses((status = 200, body = LinePort), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn open_port(
    State(app): State<ApiContext>,
    Id(id): Id,
    _: Ignored,
) -> Result<Json<LinePort>> {
    let sandbox = app.registry.known(&id)?;
    Ok(Json(LinePort { target: app.lines.open(&sandbox)?.to_string() }))
}

/// Closes the loopback port for the JSON-lines protocol.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/line-port", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn close_port(State(app): State<ApiContext>, Id(id): Id) -> Result<StatusCode> {
    let sandbox = app.registry.known(&id)?;
    app.lines.close(&sandbox);
    Ok(StatusCode::NO_CONTENT)
}
