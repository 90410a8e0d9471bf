//! The route that forks a running sandbox.

use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use forkd_api::{CreateRequest, ErrorBody, ForkRequest, SandboxInfo};

use crate::api::ApiContext;
use crate::api::extract::{Id, OptionalBody, Params};
use crate::api::middleware::idempotency::IdempotencyMark;
use crate::api::sandboxes::{ReplyForm, Results, earlier, lifetime_of, reply, spawn_spec};
use crate::auth::principal::Principal;
use crate::error::{Reader, Result};
use crate::sandbox::spawn::{SpawnSpec, Spawned, spawn_from};

/// Forks children from a running sandbox, which continues. All children have the memory and the disk of the same
/// instant. Nothing of the fork is a snapshot: it is in no list and never on disk. Its template lives as long as the
/// children, and counts as a snapshot of the sandbox's owner. Replies when the children run.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/fork", request_body = ForkRequest,
    params(
        ("id" = String, Path),
        ("results" = Option<String>, Query, description = "`each`: reply with a `SpawnReply`"),
        ("wait" = Option<bool>, Query, description = "`false`: reply as soon as the sandbox is forked"),
        ("Idempotency-Key" = Option<String>, Header, description = "Requests with the same key are done once"),
    ),
    responses(
        (status = 201, body = Vec<SandboxInfo>, description = "The children that run"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The sandbox cannot be forked: `sandbox_starting`, \
            `sandbox_ended`, `sandbox_replaced`, `sandbox_busy`, `sandbox_unfit`, `state_unknown`, `monitor_refused`; \
            with an idempotency key: `idempotency_in_progress`, `idempotency_outcome_unknown`, \
            `idempotency_answer_lost`"),
        (status = 429, body = ErrorBody, description = "The owner's quota of snapshots, sandboxes or memory is used up"),
        (status = 502, body = ErrorBody, description = "No child started; the error has the end of its console"),
        (status = 503, body = ErrorBody, description = "A limit is reached, or too many branches are being taken"),
    ),
)]
pub(crate) async fn fork(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    reader: Reader,
    Id(id): Id,
    Params(params): Params<Results>,
    idempotency: Option<Extension<IdempotencyMark>>,
    OptionalBody(request): OptionalBody<ForkRequest>,
) -> Result<Response> {
    let arrived = Instant::now();
    let request = CreateRequest { wait: params.wait.or(request.wait), ..create_request(request) };
    let form = ReplyForm { each: params.each()?, agent_port: request.agent_port };
    let lifetime = lifetime_of(&request, idempotency.as_ref())?;
    let spec = spawn_spec(&who, request, lifetime, arrived)?;
    let earlier = earlier(&app, idempotency);
    if !earlier.is_empty() {
        return reply(&app, &reader, form, earlier, Spawned::default());
    }
    let sandbox = app.registry.known(&id)?;
    let _in_use = sandbox.in_use();
    // The children have what the sandbox's owner had in memory, also if an admin forks it.
    let spec = SpawnSpec { owner: sandbox.spec.owner.clone(), ..spec };
    // The sandbox is not paused for children that there is no room for.
    app.registry.check_room(spec.n, &sandbox.spec.claim(), &who.quota)?;
    let template = app.snapshots.capture_for_fork(&sandbox, &who.quota).await?;
    let spawned = spawn_from(&app.registry, template, spec).await?;
    reply(&app, &reader, form, Vec::new(), spawned)
}

/// The same children, as a request for children of a snapshot.
fn create_request(request: ForkRequest) -> CreateRequest {
    let ForkRequest {
        n,
        network,
        memory_limit_mib,
        envs,
        timeout_secs,
        idle_timeout_secs,
        on_timeout,
        suspend_as,
        labels,
        wait,
        agent_port,
    } = request;
    CreateRequest {
        n,
        network,
        memory_limit_mib,
        envs,
        timeout_secs,
        idle_timeout_secs,
        on_timeout,
        suspend_as,
        labels,
        wait,
        agent_port,
        ..CreateRequest::default()
    }
}
