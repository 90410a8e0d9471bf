//! The REST API: routes, middleware, and the OpenAPI document.

pub(crate) mod error;
mod error_codes;
mod events;
pub(crate) mod extract;
mod metrics;
pub(crate) mod middleware;
mod openapi_document;
#[cfg(test)]
pub(crate) mod openapi_markdown;
pub(crate) mod pagination;
pub(crate) mod response;
pub(crate) mod sandboxes;
pub(crate) mod snapshots;
mod tokens;
mod tree;
mod workspaces;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::extract::{DefaultBodyLimit, State};
use axum::http::Uri;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use forkd_api::stream::{ClientMessage, ExecStreamRequest, RunRequest, ServerEvent};
use forkd_api::{ArchivedSandbox, ErrorBody, Health, SpawnReply, VersionInfo};
use forkd_mcp::HttpServer;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::api::middleware::authenticate::{self, Authenticator};
use crate::api::middleware::idempotency::{self, IdempotencyStore};
use crate::api::middleware::{authorize, request_log};
use crate::api::sandboxes::update;
use crate::auth::tokens::Tokens;
use crate::compat::e2b::{self, E2bContext};
use crate::compat::json_lines::ports::Ports;
use crate::compat::mcp;
use crate::config::Config;
use crate::error::{Code, Error};
use crate::sandbox::registry::Registry;
use crate::snapshot::registry::SnapshotRegistry;
use crate::workspace::Workspaces;

/// State and settings that all handlers use.
#[derive(Debug, Clone)]
pub(crate) struct ApiContext {
    pub(crate) registry: Arc<Registry>,
    pub(crate) snapshots: Arc<SnapshotRegistry>,
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) lines: Arc<Ports>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) config: Arc<Config>,
    /// Cancelled when the daemon is asked to stop.
    pub(crate) stopping: CancellationToken,
    /// Where TCP clients are served.
    pub(crate) address: SocketAddr,
    /// Stored replies to requests with an idempotency key.
    pub(crate) answers: IdempotencyStore,
    /// `forkd run`s under way.
    pub(crate) sessions: TaskTracker,
    /// Sessions of the Model Context Protocol.
    pub(crate) mcp: HttpServer,
}

impl ApiContext {
    /// The parts for the E2B API.
    pub(crate) fn e2b(&self) -> E2bContext {
        E2bContext {
            registry: self.registry.clone(),
            snapshots: self.snapshots.clone(),
            workspaces: self.workspaces.clone(),
            tokens: self.tokens.clone(),
            stopping: self.stopping.clone(),
        }
    }
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "forkd",
        description = "Sandboxes that are KVM virtual machines. Every error's body is an `ErrorBody`: a \
                       sentence (`error`), a `code` for programs and the `request_id`. Over TCP every request but `/healthz` carries `Authorization: Bearer \
                       TOKEN`; over the unix socket none is needed. Every POST may carry an \
                       `Idempotency-Key` of 1 to 255 visible characters: the same request with the same key is \
                       done once, and gets the first reply again (`Idempotent-Replayed: true`).",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    components(schemas(
        ErrorBody,
        Code,
        SpawnReply,
        RunRequest,
        ExecStreamRequest,
        ServerEvent,
        ClientMessage,
        ArchivedSandbox
    ))
)]
struct Document;

fn routes() -> OpenApiRouter<ApiContext> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health))
        .routes(routes!(version))
        .routes(routes!(metrics::metrics))
        .routes(routes!(events::events))
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::get, sandboxes::update, sandboxes::delete))
        .routes(routes!(crate::api::sandboxes::console::console))
        .routes(routes!(sandboxes::stats))
        .routes(routes!(sandboxes::ping))
        .routes(routes!(crate::api::sandboxes::pause::pause))
        .routes(routes!(crate::api::sandboxes::pause::resume))
        .routes(routes!(crate::api::sandboxes::pause::rollback))
        .routes(routes!(crate::api::sandboxes::fork::fork))
        .routes(routes!(crate::api::sandboxes::exec::exec))
        .routes(routes!(crate::api::sandboxes::exec::eval))
        .routes(routes!(crate::api::sandboxes::exec_stream::exec_stream))
        .routes(routes!(
            crate::api::sandboxes::files::download,
            crate::api::sandboxes::files::upload,
            crate::api::sandboxes::files::remove
        ))
        .routes(routes!(crate::api::sandboxes::files::list))
        .routes(routes!(crate::api::sandboxes::files::stat))
        .routes(routes!(crate::api::sandboxes::files::tree::tree))
        .routes(routes!(crate::api::sandboxes::files::mkdir))
        .routes(routes!(crate::api::sandboxes::files::rename))
        .routes(routes!(crate::api::sandboxes::agent_port::json_lines))
        .routes(routes!(
            crate::api::sandboxes::agent_port::open_port,
            crate::api::sandboxes::agent_port::close_port
        ))
        .routes(routes!(snapshots::list, snapshots::create))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(snapshots::unload))
        .routes(routes!(snapshots::detail))
        .routes(routes!(snapshots::compact))
        .routes(routes!(crate::api::sandboxes::branch::branch))
        .routes(routes!(workspaces::list, workspaces::create))
        .routes(routes!(workspaces::get, workspaces::delete))
        .routes(routes!(workspaces::suspend))
        .routes(routes!(workspaces::resume))
        .routes(routes!(tree::tree))
        .routes(routes!(snapshots::give))
        .routes(routes!(tokens::list, tokens::add))
        .routes(routes!(tokens::remove))
        .routes(routes!(tokens::rotate))
        .routes(routes!(crate::api::sandboxes::exec_stream::run))
}

/// Routes by their older paths, which answer like the newer ones.
const RENAMED_ROUTES: [(&str, &str); 2] = [
    ("/v1/sandboxes/{id}/line", "/v1/sandboxes/{id}/json-lines"),
    ("/v1/sandboxes/{id}/line-port", "/v1/sandboxes/{id}/agent-port"),
];

/// The router of [`RENAMED_ROUTES`].
fn renamed_routes() -> Router<ApiContext> {
    use sandboxes::agent_port;
    let port = axum::routing::put(agent_port::open_port).delete(agent_port::close_port);
    let [(json_lines, _), (agent_port, _)] = RENAMED_ROUTES;
    Router::new().route(json_lines, axum::routing::post(agent_port::json_lines)).route(agent_port, port)
}

/// The routes and their OpenAPI document.
fn documented() -> (Router<ApiContext>, utoipa::openapi::OpenApi) {
    let (router, mut document) = routes().split_for_parts();
    openapi_document::complete(&mut document);
    (router.merge(renamed_routes()), document)
}

/// The OpenAPI document of this version, as committed in `docs/openapi.json`.
pub fn openapi() -> String {
    let (_, document) = documented();
    // Plain data: it always serialises.
    document.to_pretty_json().unwrap_or_default() + "\n"
}

/// The API for TCP clients that `authenticator` admits.
pub(crate) fn for_tcp(app: ApiContext, authenticator: Authenticator) -> Router {
    let telemetry = app.registry.host.telemetry.clone();
    let e2b = app.e2b();
    let checked = served(app).layer(from_fn_with_state(authenticator.clone(), authenticate::check));
    request_log::watched(
        checked.layer(from_fn_with_state((authenticator, e2b), authenticate::forward)),
        telemetry,
    )
}

/// The API for clients of the unix socket, which its file permissions admit.
pub(crate) fn for_unix(app: ApiContext) -> Router {
    let telemetry = app.registry.host.telemetry.clone();
    let e2b = app.e2b();
    let trusted = served(app).layer(from_fn(authenticate::trust_unix_peer));
    request_log::watched(trusted.layer(from_fn_with_state(e2b, authenticate::forward_unix)), telemetry)
}

/// The API for clients with a principal, and the Model Context Protocol beside it, whose tools use the same API.
fn served(app: ApiContext) -> Router {
    let telemetry = app.registry.host.telemetry.clone();
    let for_tools = request_log::watched(with_middleware(app.clone(), Router::new()), telemetry);
    let protocol = mcp::routes(app.mcp.clone(), for_tools);
    with_middleware(app, protocol)
}

fn with_middleware(app: ApiContext, more: Router) -> Router {
    let (router, document) = documented();
    let document = Arc::new(document);
    let max_body = app.config.limits.max_body;
    router
        // Some clients of the reference ask for this path with a slash at its end.
        .route("/healthz/", axum::routing::get(health))
        .route("/openapi.json", axum::routing::get(move || async move { Json(document.as_ref().clone()) }))
        .merge(e2b::routes().with_state(app.e2b()))
        .merge(more.with_state(()))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(from_fn_with_state(app.clone(), update::explain))
        .layer(from_fn_with_state(app.answers.clone(), idempotency::once))
        .layer(DefaultBodyLimit::max(max_body))
        .layer(from_fn_with_state(app.clone(), authorize::check))
        .layer(from_fn(request_log::note))
        .with_state(app)
}

async fn no_route(uri: Uri) -> Response {
    if e2b::has_path(uri.path()) {
        return e2b::missing::unknown().into_response();
    }
    Error::new(Code::RouteNotFound, "there is no such route; /openapi.json lists all routes").into_response()
}

async fn no_method() -> Response {
    let text = "this route has no such method; /openapi.json lists its methods";
    Error::new(Code::MethodNotAllowed, text).into_response()
}

/// Whether the daemon is up. Needs no token.
#[utoipa::path(get, path = "/healthz", responses((status = 200, body = Health)))]
async fn health() -> Json<Health> {
    Json(Health { ok: true })
}

/// Version of the daemon and of its API.
#[utoipa::path(get, path = "/version", responses((status = 200, body = VersionInfo)))]
async fn version(State(app): State<ApiContext>) -> Json<VersionInfo> {
    let address = app.address.to_string();
    let tls = app.config.tls.is_some();
    Json(VersionInfo { version: crate::VERSION.into(), api: "v1".into(), address, tls })
}

#[cfg(test)]
mod tests;
