//! The JSON-lines protocol over HTTP, and agent ports, which are loopback ports with that protocol.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use forkd_api::{AgentPort, ErrorBody};
use forkd_protocol::json_lines::{Reply, Request};

use crate::agent::ResponseBudget;
use crate::api::extract::{Id, Ignored, Raw};
use crate::api::{ApiContext, response};
use crate::compat;
use crate::error::Result;

/// Sends one request of the JSON-lines protocol: `{"action": "ping"}`, `{"action": "exec", "args": […], "timeout":
/// 30}` or `{"action": "eval", "code": "…"}`. The reply is the same as from the guest's port 8888; `error` has
/// failures.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/json-lines", params(("id" = String, Path)),
    request_body(content = Object, content_type = "application/json"),
    responses((status = 200, body = Object), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn json_lines(
    State(app): State<ApiContext>,
    Id(id): Id,
    Raw(body): Raw,
) -> Result<Response> {
    let sandbox = app.registry.known(&id)?;
    let (reply, room) = match Request::parse(&body) {
        Ok(request) => compat::json_lines::answer(&sandbox, &app.config, request).await,
        Err(failure) => (Reply::Failed(failure), ResponseBudget::default()),
    };
    Ok(response::response(reply.to_line(), room))
}

/// Opens the agent port, a loopback port with the JSON-lines protocol, or returns the port that is open.
#[utoipa::path(
    put, path = "/v1/sandboxes/{id}/agent-port", params(("id" = String, Path)),
    responses((status = 200, body = AgentPort), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn open_port(
    State(app): State<ApiContext>,
    Id(id): Id,
    _: Ignored,
) -> Result<Json<AgentPort>> {
    let sandbox = app.registry.known(&id)?;
    Ok(Json(AgentPort { target: app.lines.open(&sandbox)?.to_string() }))
}

/// Closes the agent port.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}/agent-port", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn close_port(State(app): State<ApiContext>, Id(id): Id) -> Result<StatusCode> {
    let sandbox = app.registry.known(&id)?;
    app.lines.close(&sandbox);
    Ok(StatusCode::NO_CONTENT)
}
