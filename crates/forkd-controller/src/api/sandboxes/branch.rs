//! The route that branches a sandbox.

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use forkd_api::{BranchRequest, ErrorBody, SnapshotInfo};
use forkd_store::Quota;

use crate::api::ApiContext;
use crate::api::extract::{Id, OptionalBody};
use crate::api::snapshots::view;
use crate::auth::principal::Principal;
use crate::branch::BranchSpec;
use crate::error::{Error, Result};
use crate::snapshot::branch_job::Mode;

/// Branches a sandbox, running, paused or unresponsive (mode `disk` needs a running one): the sandbox continues, and
/// children can be forked from the branch at once. Replies when the branch is on disk, or, with `live` and
/// `wait: false`, as soon as the sandbox runs again. The work continues when the client disconnects.
#[utoipa::path(
    post, path = "/v1/sandboxes/{id}/branch", params(("id" = String, Path)), request_body = BranchRequest,
    responses(
        (status = 201, body = SnapshotInfo, description = "It is on disk"),
        (status = 202, body = SnapshotInfo, description = "It can be used, and is being written"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "`tag_taken`; the sandbox cannot be branched: \
            `sandbox_starting`, `sandbox_ended`, `sandbox_replaced`, `sandbox_busy`, `sandbox_unfit`, `state_unknown`, \
            `monitor_refused`, in mode `disk` also `sandbox_paused`; the branch was removed before it was done: `cancelled`; the snapshot that the sandbox \
            came from is damaged: `snapshot_unusable`; with an idempotency key: `idempotency_in_progress`, \
            `idempotency_outcome_unknown`, `idempotency_answer_lost`"),
        (status = 429, body = ErrorBody, description = "The owner's quota of snapshots is used up"),
        (status = 500, body = ErrorBody, description = "It could not be stored, and was removed; `template_ended`: \
            its process ended first, branch again"),
        (status = 503, body = ErrorBody, description = "Too many branches are being taken"),
        (status = 504, body = ErrorBody, description = "`guest_timeout`: mode `disk`, and the agent did not freeze \
            the file systems in time"),
        (status = 507, body = ErrorBody, description = "The host's disk is full"),
    ),
)]
pub(crate) async fn branch(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    OptionalBody(request): OptionalBody<BranchRequest>,
) -> Result<Response> {
    let sandbox = app.registry.known(&id)?;
    let _in_use = sandbox.in_use();
    let order = BranchSpec { quota: who.quota, ..order(request)? };
    let wait = order.wait;
    let entry = app.snapshots.branch(&sandbox, order)?;
    match wait {
        true => entry.wait_done().await?,
        false => entry.wait_forkable().await?,
    }
    let status = if wait { StatusCode::CREATED } else { StatusCode::ACCEPTED };
    Ok((status, view::info(&app, &who, entry).await?).into_response())
}

/// Converts the request, including its older forms.
fn order(request: BranchRequest) -> Result<BranchSpec> {
    let legacy = match (request.diff.unwrap_or(false), request.live.unwrap_or(false)) {
        (true, true) => return Err(Error::invalid("a branch is either `diff` or `live`; give one of them")),
        (true, false) => Some(Mode::Diff),
        (false, true) => Some(Mode::Live),
        (false, false) => None,
    };
    let mode = match (request.mode.as_deref(), legacy) {
        (Some(_), Some(_)) => return Err(Error::invalid("give either `mode`, or `diff`, or `live`")),
        (Some("full"), None) | (None, None) => Mode::Full,
        (Some("diff"), None) => Mode::Diff,
        (Some("live"), None) => Mode::Live,
        (Some("disk"), None) => Mode::Disk,
        (Some(_), None) => return Err(Error::invalid("mode must be `full`, `diff`, `live` or `disk`")),
        (None, Some(mode)) => mode,
    };
    let wait = request.wait.unwrap_or(true);
    if !wait && mode != Mode::Live {
        return Err(Error::invalid("`wait: false` needs a `live` branch"));
    }
    if request.parent_tag.is_some() && mode != Mode::Diff {
        return Err(Error::invalid("parent_tag is for `diff` only"));
    }
    Ok(BranchSpec { tag: request.tag, mode, wait, parent_tag: request.parent_tag, quota: Quota::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_the_request_means_one_mode_or_is_refused() {
        let ask = |json: serde_json::Value| {
            order(serde_json::from_value(json).unwrap()).map(|order| (order.mode, order.wait))
        };
        use serde_json::json;
        for (body, meant) in [
            (json!({}), (Mode::Full, true)),
            (json!({"diff": false, "live": false, "live_fork": true}), (Mode::Full, true)),
            (json!({"mode": "full", "measure_diff": true, "unheard_of": 1}), (Mode::Full, true)),
            (json!({"mode": "diff", "parent_tag": "x"}), (Mode::Diff, true)),
            (json!({"diff": true}), (Mode::Diff, true)),
            (json!({"live": true}), (Mode::Live, true)),
            (json!({"mode": "live", "wait": false}), (Mode::Live, false)),
            (json!({"mode": "disk"}), (Mode::Disk, true)),
        ] {
            assert_eq!(ask(body.clone()).unwrap(), meant, "{body}");
        }
        for body in [
            json!({"mode": "diff", "diff": true}),
            json!({"diff": true, "live": true}),
            json!({"mode": "fast"}),
            json!({"wait": false}),
            json!({"mode": "diff", "wait": false}),
            json!({"mode": "disk", "wait": false}),
            json!({"mode": "disk", "parent_tag": "x"}),
            json!({"mode": "live", "parent_tag": "x"}),
            json!({"parent_tag": "x"}),
        ] {
            assert_eq!(ask(body.clone()).unwrap_err().code(), crate::error::Code::InvalidRequest, "{body}");
        }
    }
}
