//! Forking a running sandbox: one capture for all children, each with tokens of its own.

use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use futures_util::future::join_all;
use serde::{Deserialize, Serialize};

use crate::auth::principal::Principal;
use crate::compat::e2b::extract::Body;
use crate::compat::e2b::fields::NoOthers;
use crate::compat::e2b::sandboxes::{now_unix_ms, to_its_end, with_new_tokens};
use crate::compat::e2b::types::{Connected, check_timeout};
use crate::compat::e2b::{E2bContext, Found, not_found};
use crate::error::{Error, Result};
use crate::sandbox::e2b::E2bState;
use crate::sandbox::envs::check_envs;
use crate::sandbox::spawn::{SpawnSpec, spawn_from};
use crate::telemetry::audit::AuditTarget;
use crate::util::random::new_id;

/// The most children of one fork.
const MAX_CHILDREN: usize = 1000;

/// `POST /sandboxes/{id}/fork`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct Fork {
    count: Option<usize>,
    timeout: Option<u64>,
    #[serde(flatten)]
    _others: NoOthers,
}

/// A child, or why there is none.
#[derive(Debug, Serialize)]
#[serde(rename_all = "snake_case")]
enum ForkResult {
    Sandbox(Connected),
    Error { code: u16, message: String },
}

/// Forks a running sandbox. It goes on; each child succeeds or fails by itself.
pub(super) async fn fork(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Fork>,
) -> Result<Response> {
    let arrived = Instant::now();
    let count = request.count.unwrap_or(1);
    if !(1..=MAX_CHILDREN).contains(&count) {
        return Err(Error::invalid(format!("count is {count}; it must be 1 to {MAX_CHILDREN}")));
    }
    let timeout = check_timeout(request.timeout)?;
    let Found::Running(sandbox, state) = e2b.find_for(&id, &who)? else { return Err(not_found(&id)) };
    let work = async move {
        let _in_use = sandbox.in_use();
        sandbox.ready().await?;
        // The sandbox is not paused for children that there is no room for.
        e2b.registry.check_room(count, &sandbox.spec.claim(), &who.quota)?;
        let template = e2b.snapshots.capture_for_fork(&sandbox, &who.quota).await?;
        let state = E2bState { timeout_secs: timeout.unwrap_or(state.timeout_secs), ..*state };
        let spec = &sandbox.spec;
        let child = async || {
            let id = new_id("sb")?;
            let state = with_new_tokens(E2bState { started_at_unix_ms: now_unix_ms(), ..state.clone() })?;
            let envs = state.variables(&id);
            check_envs(&envs)?;
            let spawn = SpawnSpec {
                tag: String::new(),
                who: who.clone(),
                owner: spec.owner.clone(),
                n: 1,
                wait: true,
                network: spec.network,
                memory_limit_mib: Some(spec.memory_limit_mib),
                envs,
                workspace: None,
                time_to_live: Some(Duration::from_secs(state.timeout_secs)),
                lifetime: state.lifetime(),
                arrived,
                id: Some(id.clone()),
                e2b: Some(Box::new(state.clone())),
            };
            let mut spawned = spawn_from(&e2b.registry, template.clone(), spawn).await?;
            if let Some((_, error)) = spawned.errors.pop() {
                return Err(error);
            }
            let bound = spawned
                .children
                .pop()
                .ok_or_else(|| Error::host("cannot fork", "the spawn returned no child"))?;
            bound.release();
            Ok((id.clone(), Connected::new(&id, &state)))
        };
        Ok(join_all((0..count).map(|_| child())).await)
    };
    let children: Vec<Result<(String, Connected)>> = to_its_end(work).await?;
    let ids: Vec<_> = children.iter().flatten().map(|(id, _)| id.clone()).collect();
    let target = Extension(AuditTarget::all(ids.iter().map(String::as_str)));
    let results = children.into_iter().map(|child| match child {
        Ok((_, connected)) => ForkResult::Sandbox(connected),
        Err(error) => {
            tracing::warn!(sandbox = id, %error, "child of a fork not started");
            ForkResult::Error { code: error.code().status(), message: error.public().into_owned() }
        }
    });
    let results: Vec<ForkResult> = results.collect();
    Ok((StatusCode::CREATED, target, Json(results)).into_response())
}
