//! Making, showing and deleting sandboxes.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};

use forkd_protocol::agent::WarmState;
use serde::Deserialize;

use super::extract::{Body, Id, Params};
use super::types::{CreateRequest, PingReply, SandboxInfo, SandboxState, SpawnError, SpawnReply, Stats};
use super::{App, exec};
use crate::console::{self, printable};
use crate::error::{Error, ErrorBody, Kind, Result};
use crate::host::{Host, blocking};
use crate::sandbox::{Phase, Sandbox, Spec};
use crate::spawn::{Order, spawn};
use crate::stats;

/// The most children of one request.
const MAX_CHILDREN: u32 = 1000;

/// How a request for several wants its answer.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Results {
    results: Option<String>,
}

/// Boots a sandbox from an image, or forks children from a snapshot, and answers when they run.
#[utoipa::path(
    post, path = "/v1/sandboxes", request_body = CreateRequest,
    params(("results" = Option<String>, Query, description = "`each`: answer with a `SpawnReply`")),
    responses(
        (status = 201, body = Vec<SandboxInfo>, description = "A list of the sandboxes that run"),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody, description = "No such image or snapshot"),
        (status = 409, body = ErrorBody, description = "The snapshot is not ready, damaged, or not for this host"),
        (status = 502, body = ErrorBody, description = "The guest did not start; the end of its console is told"),
        (status = 503, body = ErrorBody, description = "A limit is reached"),
    ),
)]
pub(super) async fn create(
    State(app): State<App>,
    Params(params): Params<Results>,
    Body(request): Body<CreateRequest>,
) -> Result<Response> {
    let arrived = Instant::now();
    let each = match params.results.as_deref() {
        None => false,
        Some("each") => true,
        Some(_) => return Err(Error::invalid("results can only be `each`")),
    };
    let (children, mut errors) = match (&request.image, &request.snapshot_tag) {
        (Some(_), None) => (vec![boot(&app, request).await?], Vec::new()),
        (None, Some(_)) => fork(&app, request, arrived).await?,
        _ => return Err(Error::invalid("give either `image` or `snapshot_tag`")),
    };
    if children.is_empty() && !errors.is_empty() {
        return Err(errors.swap_remove(0).1);
    }
    let children: Vec<SandboxInfo> = children.iter().map(|sandbox| info(sandbox)).collect();
    if !each {
        return Ok((StatusCode::CREATED, Json(children)).into_response());
    }
    let errors =
        errors.into_iter().map(|(index, error)| SpawnError { index, error: error.message }).collect();
    Ok((StatusCode::CREATED, Json(SpawnReply { children, errors })).into_response())
}

async fn boot(app: &App, request: CreateRequest) -> Result<Arc<Sandbox>> {
    if request.n.is_some_and(|n| n != 1) || !request.envs.is_empty() || request.wait == Some(false) {
        return Err(Error::invalid("n, envs and wait are for children of a snapshot"));
    }
    let lifetime = request.timeout_secs.map(exec::check_timeout).transpose()?;
    let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
    let spec = Spec {
        image: request.image,
        snapshot_tag: None,
        vcpus: request.vcpus.unwrap_or(1),
        mem_mib,
        network: request.network.unwrap_or(true),
        memory_limit_mib: memory_limit(request.memory_limit_mib)?
            .unwrap_or_else(|| Host::memory_limit_mib(mem_mib)),
        guest: None,
    };
    // Bound to this request while it boots: a client that goes away leaves nothing behind.
    let bound = app.registry.boot(spec, request.warm).await?;
    bound.sandbox().started().await?;
    let sandbox = bound.release();
    if let Some(lifetime) = lifetime {
        app.registry.expire(sandbox.clone(), lifetime);
    }
    Ok(sandbox)
}

/// The children that run, and why the others do not.
async fn fork(
    app: &App,
    request: CreateRequest,
    arrived: Instant,
) -> Result<(Vec<Arc<Sandbox>>, Vec<(usize, Error)>)> {
    let n = request.n.unwrap_or(1);
    if !(1..=MAX_CHILDREN).contains(&n) {
        return Err(Error::invalid(format!("n is {n}; it must be 1 to {MAX_CHILDREN}")));
    }
    if request.vcpus.is_some() || request.mem_size_mib.is_some() || request.warm {
        return Err(Error::invalid(
            "vcpus, mem_size_mib and warm are the snapshot's, its children cannot choose",
        ));
    }
    check_envs(&request.envs)?;
    let lifetime = request.timeout_secs.map(exec::check_timeout).transpose()?;
    let memory_limit_mib = memory_limit(request.memory_limit_mib)?;
    let template = app.snapshots.template(request.snapshot_tag.as_deref().unwrap_or_default()).await?;
    let network = request.network.unwrap_or(true);
    let order = Order {
        template,
        n: n as usize,
        network,
        memory_limit_mib,
        envs: request.envs,
        workspace: None,
        lifetime,
        arrived,
    };
    let mut given = spawn(&app.registry, order)?;
    // Bound to this request until they run: a client that goes away leaves nothing behind.
    let mut asked = Vec::with_capacity(n as usize);
    while let Some(bound) = given.recv().await {
        asked.push(bound);
    }
    let (mut children, mut errors) = (Vec::with_capacity(asked.len()), Vec::new());
    for (index, bound) in asked.into_iter().enumerate() {
        let started = async {
            let bound = bound?;
            if request.wait.unwrap_or(true) {
                bound.sandbox().started().await?;
            }
            Ok(bound)
        };
        match started.await {
            Ok(bound) => children.push(bound),
            Err(error) => errors.push((index, error)),
        }
    }
    let children = children.into_iter().map(|bound| {
        let sandbox = bound.release();
        if let Some(lifetime) = lifetime {
            app.registry.expire(sandbox.clone(), lifetime);
        }
        sandbox
    });
    Ok((children.collect(), errors))
}

/// What an agent would refuse: found before a child is made.
fn check_envs(envs: &BTreeMap<String, String>) -> Result<()> {
    for (name, value) in envs {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let text = format!("envs: {name:?} cannot be a variable: no `=` in its name and no NUL at all");
            return Err(Error::invalid(text));
        }
    }
    Ok(())
}

pub(super) fn memory_limit(mib: Option<u64>) -> Result<Option<u64>> {
    match mib {
        Some(mib) if !(1..=MAX_LIMIT_MIB).contains(&mib) => {
            Err(Error::invalid(format!("memory_limit_mib is {mib}; it must be 1 to {MAX_LIMIT_MIB}")))
        }
        mib => Ok(mib),
    }
}

/// As many bytes as a number of the kernel's can say.
const MAX_LIMIT_MIB: u64 = 1 << 40;

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

/// What its process uses on the host.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/stats", params(("id" = String, Path)),
    responses(
        (status = 200, body = Stats), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It has no process"),
    ),
)]
pub(super) async fn stats(State(app): State<App>, Id(id): Id) -> Result<Json<Stats>> {
    let sandbox = app.registry.get(&id)?;
    let stats = blocking("reading what a sandbox uses", move || {
        let pid = sandbox.facts().pid;
        let read = pid.and_then(|pid| stats::read(pid).ok());
        let Some(mut stats) = read else {
            return Err(Error::new(Kind::Conflict, format!("sandbox {} has no process", sandbox.id)));
        };
        if let Some(leaf) = &sandbox.belongings().leaf {
            stats.memory_current_kib = leaf.memory_current().map(|bytes| bytes >> 10);
            stats.cpu_ms = leaf.cpu_usec().map(|usec| usec / 1000).or(stats.cpu_ms);
        }
        Ok(stats)
    });
    Ok(Json(stats.await?))
}

/// Whether the agent inside answers.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/ping", params(("id" = String, Path)),
    responses(
        (status = 200, body = PingReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running, or has no agent"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(super) async fn ping(State(app): State<App>, Id(id): Id) -> Result<Json<PingReply>> {
    let sandbox = app.registry.get(&id)?;
    sandbox.ready().await?;
    let pong = sandbox.with_agent(sandbox.agent.ping()).await?;
    let warm = match pong.warm.state {
        WarmState::Cold => "cold",
        WarmState::Warming => "warming",
        WarmState::Ready => "ready",
        WarmState::Failed => "failed",
    };
    let (version, uptime_ms, python) = (printable(pong.version.as_bytes()), pong.uptime_ms, pong.python);
    Ok(Json(PingReply { pong: true, version, uptime_ms, python, warm: warm.into() }))
}

pub(super) fn info(sandbox: &Sandbox) -> SandboxInfo {
    let (state, end) = match sandbox.phase() {
        Phase::Starting => (SandboxState::Starting, None),
        Phase::Running => (SandboxState::Running, None),
        Phase::Unresponsive => (SandboxState::Unresponsive, None),
        Phase::Paused => (SandboxState::Paused, None),
        Phase::Ended(end) => (SandboxState::Ended, Some(end)),
    };
    let (facts, spec) = (sandbox.facts(), &sandbox.spec);
    SandboxInfo {
        id: sandbox.id.clone(),
        image: spec.image.clone(),
        snapshot_tag: spec.snapshot_tag.clone(),
        state,
        reason: end.as_ref().map(|end| end.reason.clone()),
        detail: end.as_ref().map(|end| end.detail.clone()),
        console_tail: end.map(|end| end.console_tail.clone()),
        vcpus: spec.vcpus,
        mem_size_mib: spec.mem_mib,
        pid: facts.pid,
        boot_ms: facts.boot_ms,
        ready_ms: facts.ready_ms,
        network: spec.network,
        netns: facts.netns,
        guest_addr: format!("{}:{PORT}", forkd_net::GUEST_ADDRESS),
        memory_limit_mib: Some(spec.memory_limit_mib),
        python: facts.python,
        created_at_unix: sandbox.created_at_unix(),
        has_branched: facts.history.branch_count > 0,
        branch_count: facts.history.branch_count,
        last_branch_tag: facts.history.last_branch_tag,
        rolled_back_to: facts.history.rolled_back_to,
        workspace: facts.workspace,
    }
}

/// The port that goes with a guest's address where clients of the reference expect one.
const PORT: u16 = 8888;
