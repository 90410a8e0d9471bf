//! The E2B API: programs written for E2B run on this daemon, unmodified.
//!
//! Their clients know one address for the control API and one for all sandboxes, and both can be this daemon's port:
//!
//! - *Control requests* carry an API key, which is a token of this daemon ([`key`]), and pass the same middleware as
//!   the daemon's own API. `sandboxes`, `deadline`, `snapshots` and `metrics` have their handlers, `types` their bodies, and
//!   `error` the bodies of errors. `missing` lists the functions that are not here, and `fields` refuses fields.
//! - *Sandbox requests* carry the sandbox's id and a port, in headers or in the host name, and the sandbox's own
//!   tokens, which `access` checks. [`traffic`] sends them into the guest: the port of E2B's agent to the guest's
//!   agent, which speaks the same protocol, and any other port to that TCP port of the guest.
//!
//! A sandbox of this API is a sandbox of this daemon with an [`E2bState`](crate::sandbox::e2b::E2bState). A paused one
//! is a suspended workspace that is called like the sandbox (`workspace::e2b`). docs/E2B.md is for users.

pub(crate) mod access;
mod deadline;
pub(crate) mod error;
mod extract;
mod fields;
mod fork;
pub(crate) mod key;
mod metrics;
pub(crate) mod missing;
mod names;
mod sandboxes;
mod signature;
mod snapshots;
pub(crate) mod target;
pub(crate) mod traffic;
mod types;

use std::sync::Arc;

use axum::Router;
use axum::routing::{MethodRouter, delete, get, post};
use tokio_util::sync::CancellationToken;

use crate::auth::principal::{Principal, Scope};
use crate::auth::tokens::Tokens;
use crate::error::{Code, Error, Result};
use crate::sandbox::e2b::E2bState;
use crate::sandbox::registry::Registry;
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::registry::SnapshotRegistry;
use crate::util::task::{self, Task};
use crate::workspace::{WorkspaceRecord, Workspaces};

/// The version of E2B's agent whose protocol the guest's agent speaks.
const ENVD_VERSION: &str = "0.6.13";
/// The port of E2B's agent.
const ENVD_PORT: u16 = 49983;

/// The parts of the daemon that this API uses.
#[derive(Debug, Clone)]
pub(crate) struct E2bContext {
    pub(crate) registry: Arc<Registry>,
    pub(crate) snapshots: Arc<SnapshotRegistry>,
    pub(crate) workspaces: Arc<Workspaces>,
    pub(crate) tokens: Arc<Tokens>,
    /// Cancelled when the daemon is asked to stop.
    pub(crate) stopping: CancellationToken,
}

/// The first parts of all paths of the control API.
const PREFIXES: [&str; 15] = [
    "/sandboxes",
    "/v2/sandboxes",
    "/snapshots",
    "/templates",
    "/v2/templates",
    "/v3/templates",
    "/default-templates",
    "/volumes",
    "/volumecontent",
    "/secrets",
    "/teams",
    "/api-keys",
    "/access-tokens",
    "/nodes",
    "/events/sandboxes",
];

/// Whether errors of requests with this path have the bodies of the E2B API.
pub(crate) fn has_errors(path: &str) -> bool {
    has_path(path) || traffic::is_envd(path)
}

/// Whether the path is one of the control API.
pub(crate) fn has_path(path: &str) -> bool {
    let under = |prefix: &&str| {
        path.strip_prefix(*prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    PREFIXES.iter().any(under)
}

/// The routes of the control API: method, path and handler. `any` stands for all methods.
fn table() -> Vec<(&'static str, &'static str, MethodRouter<E2bContext>)> {
    let mut table: Vec<(_, _, MethodRouter<E2bContext>)> = vec![
        ("POST", "/sandboxes", post(sandboxes::create)),
        ("POST", "/v2/sandboxes", post(sandboxes::create)),
        ("GET", "/sandboxes", get(sandboxes::list_running)),
        ("GET", "/v2/sandboxes", get(sandboxes::list)),
        ("GET", "/sandboxes/{id}", get(sandboxes::detail)),
        ("DELETE", "/sandboxes/{id}", delete(sandboxes::kill)),
        ("POST", "/sandboxes/{id}/connect", post(sandboxes::connect)),
        ("POST", "/v2/sandboxes/{id}/connect", post(sandboxes::connect)),
        ("POST", "/sandboxes/{id}/resume", post(sandboxes::resume)),
        ("POST", "/sandboxes/{id}/timeout", post(deadline::set_timeout)),
        ("POST", "/sandboxes/{id}/refreshes", post(deadline::refresh)),
        ("POST", "/sandboxes/{id}/pause", post(sandboxes::pause)),
        ("POST", "/sandboxes/{id}/fork", post(fork::fork)),
        ("GET", "/sandboxes/{id}/metrics", get(metrics::show)),
        ("POST", "/sandboxes/{id}/snapshots", post(snapshots::create)),
        ("GET", "/snapshots", get(snapshots::list)),
        ("DELETE", "/templates/{id}", delete(snapshots::remove)),
        ("GET", "/templates/aliases/{alias}", get(snapshots::alias)),
    ];
    let missing = missing::ROUTES.iter();
    table.extend(missing.map(|(path, name)| ("any", *path, missing::handler(name))));
    table
}

/// The router of the control API.
pub(crate) fn routes() -> Router<E2bContext> {
    table().into_iter().fold(Router::new(), |router, (_, path, handler)| router.route(path, handler))
}

/// Method and path of every route.
#[cfg(test)]
pub(crate) fn routes_for_policy() -> Vec<(&'static str, &'static str)> {
    table().into_iter().map(|(method, path, _)| (method, path)).collect()
}

/// A sandbox of this API.
#[derive(Debug)]
enum Found {
    Running(Arc<Sandbox>, Box<E2bState>),
    Paused(Box<WorkspaceRecord>, Box<E2bState>),
}

impl Found {
    fn owner(&self) -> &str {
        match self {
            Found::Running(sandbox, _) => &sandbox.spec.owner,
            Found::Paused(record, _) => &record.owner,
        }
    }
}

impl E2bContext {
    /// Finds a sandbox of this API that has not ended.
    fn find(&self, id: &str) -> Result<Found> {
        if let Ok(sandbox) = self.registry.get(id) {
            let state = sandbox.read_runtime(|runtime| runtime.saved.e2b.clone());
            let ended = matches!(sandbox.phase(), Phase::Ended(_));
            if let (Some(state), false) = (state, ended) {
                return Ok(Found::Running(sandbox, state));
            }
        }
        let paused = self.workspaces.paused(id);
        paused.map(|(record, state)| Found::Paused(Box::new(record), state)).ok_or_else(|| not_found(id))
    }

    /// Finds a sandbox that `who` owns. Handlers use this: since `authorize` looked, which was before the body came, the
    /// sandbox may have come back under its id.
    fn find_for(&self, id: &str, who: &Principal) -> Result<Found> {
        let found = self.find(id)?;
        if who.owns(found.owner()) { Ok(found) } else { Err(not_found(id)) }
    }

    /// Fails as for a missing sandbox unless `who` owns the sandbox `id`. A missing one is no failure: its handler
    /// reports that.
    pub(crate) fn check_owner(&self, id: &str, who: &Principal) -> Result<()> {
        match self.find(id) {
            Ok(found) if !who.owns(found.owner()) => Err(not_found(id)),
            _ => Ok(()),
        }
    }

    /// Resumes a paused sandbox, or one that is being paused; see `Workspaces::wake`. It goes on if the client goes away.
    async fn wake(&self, id: &str, timeout: Option<u64>, who: &Principal) -> Result<(bool, Arc<Sandbox>)> {
        let (workspaces, id, who) = (self.workspaces.clone(), id.to_owned(), who.clone());
        let woken =
            task::spawn(Task::Suspend, async move { workspaces.wake(&id, timeout, &who).await }).await;
        woken.unwrap_or_else(|error| Err(Error::host("resuming a sandbox", error)))
    }

    /// The owner as the principal of actions that no request with a key asks for.
    fn owner(&self, owner: &str) -> Principal {
        let quota = self.tokens.quota_of(owner);
        Principal { owner: owner.to_owned(), quota, scope: Scope::Write, ..Principal::local() }
    }
}

/// Whether a client of the daemon's own API, or an idle time-out, paused the sandbox: it is in memory, and stands still.
fn is_held(sandbox: &Sandbox) -> bool {
    matches!(sandbox.phase(), Phase::Paused)
        && !sandbox.waits_for_room()
        && sandbox.check_not_suspending().is_ok()
}

/// Resumes a sandbox that is held.
async fn go_on(sandbox: &Sandbox) -> Result<()> {
    let _turn = sandbox.lock_exclusive().await?;
    sandbox.check_not_suspending()?;
    if is_held(sandbox) { sandbox.go_on().await } else { Ok(()) }
}

fn not_found(id: &str) -> Error {
    let shown = if forkd_protocol::names::is_valid_sandbox_id(id) { id } else { "with that id" };
    Error::new(
        Code::SandboxNotFound,
        format!("sandbox {shown} was not found: it was killed, or its time was over"),
    )
}

#[cfg(test)]
mod tests;
