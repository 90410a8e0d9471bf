//! Routes of sandboxes: create, show, list, change and delete.

pub(crate) mod agent_port;
pub(crate) mod branch;
pub(crate) mod console;
pub(crate) mod exec;
pub(crate) mod exec_stream;
pub(crate) mod files;
pub(crate) mod fork;
pub(crate) mod pause;
pub(crate) mod update;

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_api::{
    CreateRequest, ErrorBody, PingReply, SandboxInfo, SandboxState, SpawnError, SpawnReply, Stats,
    UpdateRequest,
};
use forkd_protocol::agent::WarmState;
use forkd_protocol::json_lines::LINE_PORT;
use serde::Deserialize;

use super::ApiContext;
use super::extract::{Body, Id, Params};
use super::pagination::Page;
use crate::api::middleware::idempotency::IdempotencyMark;
use crate::api::sandboxes::update::{SandboxFilter, check_tag, list_archived, place};
use crate::auth::principal::Principal;
use crate::compat::json_lines;
use crate::error::{Code, Error, Reader, Result};
use crate::host::{cgroup, process_stats};
use crate::monitor::console::printable;
use crate::sandbox::agent_call::AgentCall;
use crate::sandbox::cold_boot::start_children;
use crate::sandbox::disk_full::{DISK_FULL, DISK_FULL_DETAIL};
use crate::sandbox::envs::check_envs;
use crate::sandbox::lifetime::{Lifetime, check_labels, check_secs};
use crate::sandbox::registry::Bound;
use crate::sandbox::spawn::{SpawnSpec, Spawned};
use crate::sandbox::{Phase, Sandbox, Spec};
use crate::snapshot::unknown::{UNREAD, UNREADABLE, advice};
use crate::telemetry::audit::AuditTarget;
use crate::util::task::{self, Task, blocking};

/// The most children of one request.
const MAX_CHILDREN: u32 = 1000;

/// Query parameters: the form and the time of the reply.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Results {
    results: Option<String>,
    wait: Option<bool>,
}

/// Boots a sandbox from an image, or forks children from a snapshot. On a snapshot without memory (`kind: disk`)
/// the children boot. Replies when they run.
#[utoipa::path(
    post, path = "/v1/sandboxes", request_body = CreateRequest,
    params(
        ("results" = Option<String>, Query, description = "`each`: reply with a `SpawnReply`"),
        ("wait" = Option<bool>, Query, description = "`false`: reply at once, while they are `starting`"),
        ("Idempotency-Key" = Option<String>, Header, description = "Requests with the same key are done once"),
    ),
    responses(
        (status = 201, body = Vec<SandboxInfo>, description = "The sandboxes that run"),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody, description = "No such image or snapshot"),
        (status = 409, body = ErrorBody, description = "The snapshot is not ready, damaged, or not for this host"),
        (status = 429, body = ErrorBody, description = "The owner's quota of sandboxes or memory is used up"),
        (status = 502, body = ErrorBody, description = "The guest did not start; the error has the end of its console"),
        (status = 503, body = ErrorBody, description = "A limit is reached"),
    ),
)]
pub(super) async fn create(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    reader: Reader,
    Params(params): Params<Results>,
    idempotency: Option<Extension<IdempotencyMark>>,
    Body(mut request): Body<CreateRequest>,
) -> Result<Response> {
    let arrived = Instant::now();
    request.wait = params.wait.or(request.wait);
    let form = ReplyForm { each: params.each()?, agent_port: request.agent_port };
    let lifetime = lifetime_of(&request, idempotency.as_ref())?;
    let earlier = earlier(&app, idempotency);
    // Bound to this request until the reply: if the client disconnects, the sandboxes end.
    let only = |children| Spawned { children, errors: Vec::new() };
    let spawned = match (&request.image, &request.snapshot_tag) {
        _ if !earlier.is_empty() => Spawned::default(),
        (Some(_), None) => only(vec![boot(&app, &who, request, lifetime).await?]),
        (None, Some(_)) => {
            let spec = spawn_spec(&who, request, lifetime, arrived)?;
            start_children(&app.registry, &app.snapshots, spec).await?
        }
        _ => return Err(Error::invalid("give either `image` or `snapshot_tag`")),
    };
    reply(&app, &reader, form, earlier, spawned)
}

/// The form of the reply to a request for sandboxes.
struct ReplyForm {
    /// Whether it also has the errors of children that failed.
    each: bool,
    /// Whether each sandbox gets a JSON-lines port.
    agent_port: bool,
}

impl Results {
    fn each(&self) -> Result<bool> {
        match self.results.as_deref() {
            None => Ok(false),
            Some("each") => Ok(true),
            Some(_) => Err(Error::invalid("results can only be `each`")),
        }
    }
}

/// Releases the new sandboxes, and replies with them and with `earlier` ones of the same request. An error if there is
/// none.
fn reply(
    app: &ApiContext,
    reader: &Reader,
    form: ReplyForm,
    earlier: Vec<Arc<Sandbox>>,
    spawned: Spawned,
) -> Result<Response> {
    let Spawned { children: bound, mut errors } = spawned;
    if bound.is_empty() && !errors.is_empty() {
        return Err(errors.swap_remove(0).1);
    }
    if form.agent_port || app.config.agent_ports {
        for sandbox in earlier.iter().chain(bound.iter().map(Bound::sandbox)) {
            // `guest_addr` shows which sandboxes have a port.
            if let Err(error) = app.lines.open(sandbox) {
                tracing::warn!(sandbox = sandbox.id, %error, "JSON-lines port not opened");
            }
        }
    }
    let children: Vec<_> = earlier.into_iter().chain(bound.into_iter().map(Bound::release)).collect();
    let children: Vec<SandboxInfo> = children.iter().map(|sandbox| info(sandbox)).collect();
    let target = Extension(AuditTarget::all(children.iter().map(|child| child.id.as_str())));
    if !form.each {
        return Ok((StatusCode::CREATED, target, Json(children)).into_response());
    }
    let errors =
        errors.into_iter().map(|(index, error)| SpawnError::new(index, reader.logged(&error))).collect();
    Ok((StatusCode::CREATED, target, Json(SpawnReply { children, errors })).into_response())
}

/// The lifetime settings of the requested sandboxes.
fn lifetime_of(
    request: &CreateRequest,
    idempotency: Option<&Extension<IdempotencyMark>>,
) -> Result<Lifetime> {
    check_labels(&request.labels)?;
    check_tag("suspend_as", request.suspend_as.as_deref())?;
    request.idle_timeout_secs.map(|secs| check_secs("idle_timeout_secs", secs)).transpose()?;
    Ok(Lifetime {
        labels: request.labels.clone(),
        idle_timeout_secs: request.idle_timeout_secs,
        on_timeout: request.on_timeout.unwrap_or_default(),
        suspend_as: request.suspend_as.clone(),
        request: idempotency.map(|it| it.mark.clone()),
        ..Lifetime::default()
    })
}

/// Sandboxes of the request, if an earlier daemon began it and did not reply.
fn earlier(app: &ApiContext, idempotency: Option<Extension<IdempotencyMark>>) -> Vec<Arc<Sandbox>> {
    idempotency.map(|Extension(mark)| mark.earlier(&app.registry)).unwrap_or_default()
}

async fn boot(
    app: &ApiContext,
    who: &Principal,
    request: CreateRequest,
    lifetime: Lifetime,
) -> Result<Bound> {
    if request.n.is_some_and(|n| n != 1) || !request.envs.is_empty() {
        return Err(Error::invalid("n and env are for children of a snapshot; leave them out with `image`"));
    }
    let time_to_live = request.timeout_secs.map(|secs| check_secs("timeout_secs", secs)).transpose()?;
    let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
    let spec = Spec {
        owner: who.owner.clone(),
        image: request.image,
        snapshot_tag: None,
        forked_from: None,
        vcpus: request.vcpus.unwrap_or(1),
        mem_mib,
        network: request.network.unwrap_or(true),
        memory_limit_mib: memory_limit(request.memory_limit_mib)?
            .unwrap_or_else(|| cgroup::memory_mib(mem_mib)),
        guest: None,
    };
    // Bound to this request while it boots: if the client disconnects, the sandbox ends.
    let bound = app.registry.boot(spec, request.warm, true, &who.quota).await?;
    bound.sandbox().update_runtime(|runtime| {
        runtime.saved.lifetime = lifetime;
        runtime.time_to_live = time_to_live;
    });
    // The archive gets the labels, which are set only now.
    app.registry.archive.made(bound.sandbox());
    if request.wait.unwrap_or(true) {
        bound.sandbox().started().await?;
    }
    Ok(bound)
}

/// The parameters of children of a snapshot, or of a running sandbox.
fn spawn_spec(
    who: &Principal,
    request: CreateRequest,
    lifetime: Lifetime,
    arrived: Instant,
) -> Result<SpawnSpec> {
    let n = request.n.unwrap_or(1);
    if !(1..=MAX_CHILDREN).contains(&n) {
        return Err(Error::invalid(format!("n is {n}; it must be 1 to {MAX_CHILDREN}")));
    }
    if request.vcpus.is_some() || request.mem_size_mib.is_some() || request.warm {
        return Err(Error::invalid(
            "vcpus, mem_size_mib and warm come from the snapshot; leave them out with `snapshot_tag`",
        ));
    }
    check_envs(&request.envs)?;
    let time_to_live = request.timeout_secs.map(|secs| check_secs("timeout_secs", secs)).transpose()?;
    let memory_limit_mib = memory_limit(request.memory_limit_mib)?;
    Ok(SpawnSpec {
        tag: request.snapshot_tag.unwrap_or_default(),
        who: who.clone(),
        owner: who.owner.clone(),
        n: n as usize,
        wait: request.wait.unwrap_or(true),
        network: request.network.unwrap_or(true),
        memory_limit_mib,
        envs: request.envs,
        workspace: None,
        time_to_live,
        lifetime,
        arrived,
        id: None,
        e2b: None,
    })
}

pub(super) fn memory_limit(mib: Option<u64>) -> Result<Option<u64>> {
    match mib {
        Some(mib) if !(1..=MAX_LIMIT_MIB).contains(&mib) => {
            Err(Error::invalid(format!("memory_limit_mib is {mib}; it must be 1 to {MAX_LIMIT_MIB}")))
        }
        mib => Ok(mib),
    }
}

/// The most MiB whose number of bytes the kernel can represent.
const MAX_LIMIT_MIB: u64 = 1 << 40;

/// Lists the caller's sandboxes, oldest first, with optional filters.
#[utoipa::path(
    get, path = "/v1/sandboxes",
    params(
        ("label" = Option<Vec<String>>, Query, description = "`NAME=VALUE`, or `NAME` for any value; a sandbox must match all"),
        ("snapshot_tag" = Option<String>, Query, description = "Only sandboxes forked from this snapshot"),
        ("owner" = Option<String>, Query, description = "Only sandboxes of this owner; only admins see other owners' sandboxes"),
        ("state" = Option<SandboxState>, Query, description = "Only sandboxes in this state"),
        ("archived" = Option<bool>, Query, description = "`true`: only sandboxes that ended and were removed, as `ArchivedSandbox`es"),
        ("gone" = Option<bool>, Query, deprecated, description = "The older name of `archived`"),
        ("limit" = Option<u64>, Query, description = "The most entries, 1 to 1000; all when absent"),
        ("cursor" = Option<String>, Query, description = "`X-Next-Cursor` of the previous page"),
    ),
    responses((status = 200, body = Vec<SandboxInfo>), (status = 400, body = ErrorBody)),
)]
pub(super) async fn list(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    page: Page,
) -> Result<Response> {
    let filter = SandboxFilter::of(&page)?;
    if filter.archived.is_some() {
        return list_archived(&app, &who, &page, &filter).await;
    }
    let mut sandboxes = app.registry.list();
    sandboxes
        .retain(|sandbox| who.owns(&sandbox.spec.owner) && filter.takes(sandbox, state(&sandbox.phase())));
    let place = |it: &Arc<Sandbox>| place(it.created_at_unix(), it.created_nanos(), &it.id);
    Ok(page.answer(sandboxes, place, |sandbox| info_for(sandbox, who.is_admin())))
}

/// Query parameters: whether and how long to wait for a sandbox.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Waiting {
    wait: Option<String>,
    timeout_secs: Option<u64>,
}

/// The default of `timeout_secs`.
const WAIT_SECS: u64 = 30;
/// The largest `timeout_secs`.
const MAX_WAIT_SECS: u64 = 600;

/// Shows one sandbox.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}",
    params(
        ("id" = String, Path),
        ("wait" = Option<String>, Query, description = "`ready`: reply when it is no longer `starting`"),
        ("timeout_secs" = Option<u64>, Query, description = "The longest wait in seconds, 1 to 600; 30 when absent"),
    ),
    responses(
        (status = 200, body = SandboxInfo, description = "Its current state, also if it is not ready yet"),
        (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody, description = "For a day, the error has the time and reason of its end"),
    ),
)]
pub(super) async fn get(
    State(app): State<ApiContext>,
    Id(id): Id,
    reader: Reader,
    Params(waiting): Params<Waiting>,
) -> Result<Json<SandboxInfo>> {
    let secs = waiting.timeout_secs.unwrap_or(WAIT_SECS);
    if !(1..=MAX_WAIT_SECS).contains(&secs) {
        return Err(Error::invalid(format!("timeout_secs is {secs}; it must be 1 to {MAX_WAIT_SECS}")));
    }
    let sandbox = app.registry.get(&id)?;
    match waiting.wait.as_deref() {
        None => {}
        Some("ready") => {
            // How it went is in what is told of it.
            tokio::select! {
                _ = tokio::time::timeout(Duration::from_secs(secs), sandbox.started()) => {}
                () = app.stopping.cancelled() => {}
            }
        }
        Some(_) => return Err(Error::invalid("wait can only be `ready`")),
    }
    let egress = || app.config.egress_private.iter().map(ToString::to_string).collect();
    let info = info_for(&sandbox, reader.reads_causes);
    Ok(Json(SandboxInfo { egress: info.network.then(egress), ..info }))
}

/// Changes a sandbox's timeouts, the action at a timeout, and its labels. Timeouts count from now.
#[utoipa::path(
    patch, path = "/v1/sandboxes/{id}", params(("id" = String, Path)), request_body = UpdateRequest,
    responses(
        (status = 200, body = SandboxInfo), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn update(
    State(app): State<ApiContext>,
    Id(id): Id,
    Body(request): Body<UpdateRequest>,
) -> Result<Json<SandboxInfo>> {
    // A rollback replaces the sandbox; the lock makes clear which one is changed.
    let (sandbox, _turn) = app.registry.exclusive_lock_of(&id).await?;
    update::update(&sandbox, request)?;
    app.workspaces.keep_deadline(&sandbox).await?;
    if !matches!(sandbox.phase(), Phase::Ended(_)) {
        app.registry.archive.made(&sandbox);
    }
    Ok(Json(info(&sandbox)))
}

/// Ends a sandbox at once, like a power cut, and removes it.
#[utoipa::path(
    delete, path = "/v1/sandboxes/{id}", params(("id" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)),
)]
pub(super) async fn delete(State(app): State<ApiContext>, Id(id): Id) -> Result<StatusCode> {
    let sandbox = app.registry.get(&id)?;
    // A sandbox of the E2B API that was paused earlier has states on disk, which would come back as a paused sandbox.
    let is_e2b = sandbox.read_runtime(|runtime| runtime.saved.e2b.is_some());
    if is_e2b && app.workspaces.has(&id) {
        // To its end, also if the client disconnects: half of it would leave snapshots that nothing needs.
        let workspaces = app.workspaces.clone();
        let deleted = task::spawn(Task::Suspend, async move { workspaces.delete(&id).await }).await;
        deleted.unwrap_or_else(|error| Err(Error::host("deleting a sandbox", error)))?;
    } else {
        app.registry.delete(&id)?;
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Shows the resources that a sandbox's process uses on the host.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/stats", params(("id" = String, Path)),
    responses(
        (status = 200, body = Stats), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It has no process"),
    ),
)]
pub(super) async fn stats(State(app): State<ApiContext>, Id(id): Id) -> Result<Json<Stats>> {
    let sandbox = app.registry.known(&id)?;
    let data = app.config.data_dir.clone();
    let stats = blocking("reading what a sandbox uses", move || {
        let pid = sandbox.runtime().pid;
        let read = pid.and_then(|pid| Some((pid, process_stats::read(pid).ok()?)));
        let Some((pid, mut stats)) = read else {
            return Err(Error::new(Code::SandboxUnfit, format!("sandbox {} has no process", sandbox.id)));
        };
        stats.disk_bytes = process_stats::disk_bytes(pid, &data).unwrap_or(0);
        let namespace = {
            let resources = sandbox.resources();
            if let Some(leaf) = &resources.leaf {
                stats.memory_current_kib = leaf.memory_current().map(|bytes| bytes >> 10);
                stats.cpu_ms = leaf.cpu_usec().map(|usec| usec / 1000).or(stats.cpu_ms);
            }
            resources.slot.as_ref().map(|slot| slot.namespace())
        };
        // These are the counters of the host's end of the link: the host receives what the guest sends.
        let traffic = namespace.and_then(|namespace| forkd_net::traffic(&namespace).ok());
        stats.net_tx_bytes = traffic.map(|traffic| traffic.received);
        stats.net_rx_bytes = traffic.map(|traffic| traffic.sent);
        stats.agent_answered_at_unix_ms = sandbox.last_heard();
        stats.pauses = sandbox.pauses.list();
        Ok(stats)
    });
    Ok(Json(stats.await?))
}

/// Pings the agent in the guest.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/ping", params(("id" = String, Path)),
    responses(
        (status = 200, body = PingReply), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox is not running, or has no agent"),
        (status = 502, body = ErrorBody, description = "The sandbox ended, or its agent is broken"),
        (status = 504, body = ErrorBody, description = "The sandbox does not answer"),
    ),
)]
pub(super) async fn ping(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
) -> Result<Json<PingReply>> {
    let sandbox = app.registry.known(&id)?;
    let pong = AgentCall::begin(&sandbox, &who).await?.run(&sandbox, sandbox.agent.ping()).await?;
    let warm = match pong.warm.state {
        WarmState::Cold => "cold",
        WarmState::Warming => "warming",
        WarmState::Ready => "ready",
        WarmState::Failed => "failed",
    };
    Ok(Json(PingReply {
        pong: true,
        version: printable(pong.version.as_bytes()),
        uptime_ms: pong.uptime_ms,
        python: pong.python,
        warm: warm.into(),
        warmup_ready: pong.warm.state == WarmState::Ready,
        numpy_version: pong.numpy_version.map(|version| printable(version.as_bytes())),
        pid: json_lines::AGENT_PID,
        agent_lang: json_lines::language(pong.python).into(),
    }))
}

fn state(phase: &Phase) -> SandboxState {
    match phase {
        Phase::Starting => SandboxState::Starting,
        Phase::Running => SandboxState::Running,
        Phase::Unresponsive => SandboxState::Unresponsive,
        Phase::Paused => SandboxState::Paused,
        Phase::Ended(_) => SandboxState::Ended,
        Phase::Unknown(_) => SandboxState::Unknown,
    }
}

/// Like [`info`], with the cause of the end for clients that may read causes.
fn info_for(sandbox: &Sandbox, reads_causes: bool) -> SandboxInfo {
    let mut shown = info(sandbox);
    let cause = match sandbox.phase() {
        Phase::Ended(end) => end.cause.clone(),
        Phase::Unknown(why) => Some(why.to_string()),
        _ => None,
    };
    if let (true, Some(detail), Some(cause)) = (reads_causes, &mut shown.detail, cause) {
        detail.push_str(&format!(": {cause}"));
    }
    shown
}

pub(super) fn info(sandbox: &Sandbox) -> SandboxInfo {
    let phase = sandbox.phase();
    let state = state(&phase);
    let disk_full = sandbox.waits_for_room();
    let mut console_tail = None;
    let (reason, detail) = match phase {
        Phase::Ended(end) => {
            console_tail = Some(end.console_tail.clone());
            (Some(end.reason.clone()), Some(end.detail.clone()))
        }
        Phase::Unknown(_) => (Some(UNREADABLE.into()), Some(advice(UNREAD, &sandbox.kill_command()))),
        _ => (disk_full.then(|| DISK_FULL.into()), disk_full.then(|| DISK_FULL_DETAIL.into())),
    };
    let (runtime, spec) = (sandbox.runtime(), &sandbox.spec);
    SandboxInfo {
        id: sandbox.id.clone(),
        owner: spec.owner.clone(),
        image: spec.image.clone(),
        snapshot_tag: spec.snapshot_tag.clone(),
        forked_from: spec.forked_from.clone(),
        state,
        reason,
        detail,
        console_tail,
        vcpus: spec.vcpus,
        mem_size_mib: spec.mem_mib,
        pid: runtime.pid,
        boot_ms: runtime.boot_ms,
        ready: state == SandboxState::Running,
        ready_ms: runtime.ready_ms.or(runtime.boot_ms.map(|ms| ms as f64)),
        network: spec.network,
        netns: runtime.netns,
        egress: None,
        guest_addr: match runtime.saved.history.line_port {
            Some(port) => format!("{}:{port}", Ipv4Addr::LOCALHOST),
            None => format!("{}:{LINE_PORT}", forkd_net::GUEST_ADDRESS),
        },
        memory_limit_mib: Some(spec.memory_limit_mib),
        python: runtime.saved.python,
        created_at_unix: sandbox.created_at_unix(),
        expires_at_unix: runtime.saved.deadline_unix,
        idle_timeout_secs: runtime.saved.lifetime.idle_timeout_secs,
        on_timeout: runtime.saved.lifetime.on_timeout,
        suspend_as: runtime.saved.lifetime.suspend_as,
        last_active_unix: sandbox.activity.last_unix(),
        labels: runtime.saved.lifetime.labels,
        has_branched: runtime.saved.history.branch_count > 0,
        branch_count: runtime.saved.history.branch_count,
        last_branch_memory_path: None,
        last_branch_tag: runtime.saved.history.last_branch_tag,
        rolled_back_to: runtime.saved.history.rolled_back_to,
        workspace: runtime.saved.workspace,
    }
}
