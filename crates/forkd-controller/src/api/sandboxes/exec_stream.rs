//! Commands over a WebSocket: `/v1/run` and `/v1/sandboxes/{id}/exec/stream`. `exec::stream` has the session.

use axum::Extension;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::response::Response;
use forkd_api::ErrorBody;
use forkd_api::stream::MAX_TEXT;
use tracing::Instrument;

use crate::api::ApiContext;
use crate::api::extract::Id;
use crate::api::middleware::request_log::Session;
use crate::auth::principal::Principal;
use crate::error::{Code, Error, Reader, Result};
use crate::exec::stream::exec::Exec;
use crate::exec::stream::run::Run;
use crate::exec::stream::{Conversation, StreamContext, session};

/// The WebSocket upgrade, or why the request is none.
type Upgrade = std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>;

/// Runs a command in a new sandbox, over a WebSocket. The sandbox ends with the connection.
///
/// The first message is text, a `RunRequest`, within 30 seconds. Then the server sends `ServerEvent`s as text and
/// output as binary frames, whose first byte is 1 for standard output and 2 for standard error. The client sends
/// `ClientMessage`s as text and input as binary frames, whose first byte is 0. At most 262144 bytes of input may be
/// unacknowledged; a `stdin_ack` acknowledges input. The last event is `exit` or `error`; then the server closes. The
/// server sends a ping every 20 seconds, and gives up a client that sends nothing for 90 seconds.
#[utoipa::path(
    get, path = "/v1/run",
    responses(
        (status = 101, description = "The connection becomes a WebSocket"),
        (status = 400, body = ErrorBody, description = "Not a WebSocket upgrade"),
    ),
)]
pub(crate) async fn run(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    talk: Session,
    reader: Reader,
    upgrade: Upgrade,
) -> Result<Response> {
    begin(upgrade, app, who.clone(), (talk, reader), Run { who })
}

/// Runs a command in a sandbox, over a WebSocket: with input, streamed output, signals, and optionally a terminal.
///
/// The first message is text, an `ExecStreamRequest`; the rest is as in `/v1/run`. When the connection ends, the
/// daemon kills the command, unless the request has `keep`. If the sandbox ends, is paused or is rolled back
/// meanwhile, the last event is `error`.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/exec/stream", params(("id" = String, Path)),
    responses(
        (status = 101, description = "The connection becomes a WebSocket"),
        (status = 400, body = ErrorBody, description = "Not a WebSocket upgrade"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(crate) async fn exec_stream(
    State(app): State<ApiContext>,
    Id(id): Id,
    Extension(who): Extension<Principal>,
    talk: Session,
    reader: Reader,
    upgrade: Upgrade,
) -> Result<Response> {
    let sandbox = app.registry.known(&id)?;
    sandbox.ready().await?;
    begin(upgrade, app, who, (talk, reader), Exec { sandbox })
}

/// Accepts the WebSocket upgrade and runs the session.
fn begin(
    upgrade: Upgrade,
    app: ApiContext,
    who: Principal,
    (talk, reader): (Session, Reader),
    work: impl Conversation,
) -> Result<Response> {
    let upgrade = upgrade.map_err(|rejection| {
        Error::new(Code::of_status(rejection.status().as_u16()), rejection.body_text())
    })?;
    let upgrade = upgrade.max_message_size(MAX_TEXT).max_frame_size(MAX_TEXT);
    let context = StreamContext {
        registry: app.registry,
        tokens: app.tokens,
        config: app.config,
        stopping: app.stopping,
        sessions: app.sessions,
    };
    // The span stays open until the session ends, for the audit log.
    let span = tracing::Span::current();
    Ok(upgrade.on_upgrade(move |socket| {
        let held = async move {
            session(socket, context, who, &reader, work).await;
            drop(talk);
        };
        held.instrument(span)
    }))
}
