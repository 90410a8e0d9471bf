//! The REST API: routes, middleware, and the document that describes them.

mod branch;
mod control;
pub(crate) mod exec;
mod extract;
mod sandboxes;
mod snapshot_types;
mod snapshots;
mod tree;
mod types;
mod workspaces;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router};
use tracing::Instrument;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::auth::{self, Token};
use crate::config::Config;
use crate::count::Count;
use crate::error::{Error, ErrorBody, Kind};
use crate::frames::{ClientMessage, RunRequest, ServerEvent};
use crate::registry::Registry;
use crate::run;
use crate::snapshots::Snapshots;
use crate::stopping::Stopping;
use crate::workspaces::Workspaces;

pub use crate::tree::{Tree, TreeHow, TreeKind, TreeNode};
pub use control::RollbackRequest;
pub use snapshot_types::{
    BranchRequest, CompactRequest, LayerInfo, Progress, SnapshotInfo, SnapshotInfoDetail, SnapshotPhase,
    SnapshotRequest, SnapshotStatus, TemplateInfo,
};
pub use types::{
    CreateRequest, EvalReply, EvalRequest, ExecReply, ExecRequest, Health, PingReply, SandboxInfo,
    SandboxState, SpawnError, SpawnReply, Stats, VersionInfo,
};
pub use workspaces::{SuspendRequest, WorkspaceInfo, WorkspaceRequest, WorkspaceStatus};

/// What handlers work with.
#[derive(Debug, Clone)]
pub(crate) struct App {
    pub(crate) registry: Arc<Registry>,
    pub(crate) snapshots: Arc<Snapshots>,
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) config: Arc<Config>,
    /// Becomes true when the daemon is asked to stop.
    pub(crate) stopping: Stopping,
    /// Where TCP clients are served.
    pub(crate) address: SocketAddr,
    /// `forkd run`s under way.
    pub(crate) sessions: Count,
}

#[derive(OpenApi)]
#[openapi(
    info(
        title = "forkd",
        description = "Sandboxes that are KVM virtual machines. Every error's body is an object with one \
                       string, `error`. Over TCP every request but `/healthz` carries `Authorization: Bearer \
                       TOKEN`; over the unix socket none is needed.",
        license(name = "Apache-2.0", identifier = "Apache-2.0"),
    ),
    components(schemas(ErrorBody, SpawnReply, RunRequest, ServerEvent, ClientMessage))
)]
struct Document;

fn routes() -> OpenApiRouter<App> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health))
        .routes(routes!(version))
        .routes(routes!(sandboxes::list, sandboxes::create))
        .routes(routes!(sandboxes::get, sandboxes::delete))
        .routes(routes!(sandboxes::console))
        .routes(routes!(sandboxes::stats))
        .routes(routes!(sandboxes::ping))
        .routes(routes!(control::pause))
        .routes(routes!(control::resume))
        .routes(routes!(control::rollback))
        .routes(routes!(exec::exec))
        .routes(routes!(exec::eval))
        .routes(routes!(snapshots::list, snapshots::create))
        .routes(routes!(snapshots::get, snapshots::delete))
        .routes(routes!(snapshots::unload))
        .routes(routes!(snapshots::detail))
        .routes(routes!(snapshots::compact))
        .routes(routes!(branch::branch))
        .routes(routes!(workspaces::list, workspaces::create))
        .routes(routes!(workspaces::get, workspaces::delete))
        .routes(routes!(workspaces::suspend))
        .routes(routes!(workspaces::resume))
        .routes(routes!(tree::tree))
        .routes(routes!(run::run))
}

/// The OpenAPI document of this version, as committed in `docs/openapi.json`.
pub fn openapi() -> String {
    let (_, document) = routes().split_for_parts();
    // Plain data: it always serialises.
    document.to_pretty_json().unwrap_or_default() + "\n"
}

/// The API for clients that must show `token`.
pub(crate) fn for_tcp(app: App, token: Token) -> Router {
    identified(served(app).layer(middleware::from_fn_with_state(token, auth::check)))
}

/// The API for clients that the socket's permissions let in.
pub(crate) fn for_unix(app: App) -> Router {
    identified(served(app))
}

fn served(app: App) -> Router {
    let (router, document) = routes().split_for_parts();
    let document = Arc::new(document);
    let max_body = app.config.limits.max_body;
    router
        .route("/openapi.json", axum::routing::get(move || async move { Json(document.as_ref().clone()) }))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(max_body))
        .with_state(app)
}

/// Gives every request an id that is in its answer and in the log.
fn identified(router: Router) -> Router {
    router.layer(middleware::from_fn(identify))
}

async fn identify(request: Request, next: Next) -> Response {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let id = format!("{:x}-{:x}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let begun = Instant::now();
    let span = tracing::info_span!("request", id, method = %request.method(), path = request.uri().path());
    let answered = async {
        let response = next.run(request).await;
        tracing::debug!(
            status = response.status().as_u16(),
            ms = begun.elapsed().as_millis() as u64,
            "answered"
        );
        response
    };
    let mut response = answered.instrument(span).await;
    if let Ok(id) = HeaderValue::from_str(&id) {
        response.headers_mut().insert("x-request-id", id);
    }
    response
}

async fn no_route() -> Response {
    Error::new(Kind::NotFound, "there is no such route; /openapi.json lists them").into_response()
}

async fn no_method() -> Response {
    let kind = Kind::Http(StatusCode::METHOD_NOT_ALLOWED);
    Error::new(kind, "this route does not know that method; /openapi.json lists them").into_response()
}

/// Whether the daemon is up. Needs no token.
#[utoipa::path(get, path = "/healthz", responses((status = 200, body = Health)))]
async fn health() -> Json<Health> {
    Json(Health { ok: true })
}

/// Version of the daemon and of its API.
#[utoipa::path(get, path = "/version", responses((status = 200, body = VersionInfo)))]
async fn version(State(app): State<App>) -> Json<VersionInfo> {
    let address = app.address.to_string();
    Json(VersionInfo { version: crate::VERSION.into(), api: "v1".into(), address })
}

#[cfg(test)]
mod tests;
