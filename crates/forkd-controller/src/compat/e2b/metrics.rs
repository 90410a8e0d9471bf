//! Metrics of one sandbox: what its guest uses now.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::extract::{Path, RawQuery, State};
use axum::{Extension, Json};
use serde::Serialize;

use crate::auth::principal::Principal;
use crate::compat::e2b::types::time;
use crate::compat::e2b::{E2bContext, Found};
use crate::error::{Error, Result};
use crate::sandbox::agent_call::AgentCall;

/// One measurement.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Metric {
    timestamp: String,
    timestamp_unix: u64,
    cpu_count: u32,
    cpu_used_pct: f64,
    mem_used: u64,
    mem_total: u64,
    mem_cache: u64,
    disk_used: u64,
    disk_total: u64,
}

/// Measures a running sandbox. There is no history: the list has one entry, or none if the client asks for another
/// time than now, or if the sandbox is paused.
pub(super) async fn show(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Json<Vec<Metric>>> {
    let now_ms = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
    let now = now_ms / 1000;
    for (name, value) in form_urlencoded::parse(query.as_deref().unwrap_or_default().as_bytes()) {
        let bound = || {
            let secs = value.parse::<u64>();
            secs.map_err(|_| Error::invalid(format!("{name} must be a time in seconds since 1970")))
        };
        let outside = match name.as_ref() {
            "start" => bound()? > now,
            "end" => bound()? < now,
            _ => false,
        };
        if outside {
            return Ok(Json(Vec::new()));
        }
    }
    let Found::Running(sandbox, _) = e2b.find_for(&id, &who)? else { return Ok(Json(Vec::new())) };
    let call = AgentCall::begin(&sandbox, &who).await?;
    let usage = call.run(&sandbox, sandbox.agent.usage()).await?;
    Ok(Json(vec![Metric {
        timestamp: time(now_ms),
        timestamp_unix: now,
        cpu_count: usage.cpu_count,
        cpu_used_pct: usage.cpu_used_percent,
        mem_used: usage.memory_used,
        mem_total: usage.memory_total,
        mem_cache: usage.memory_cache,
        disk_used: usage.disk_used,
        disk_total: usage.disk_total,
    }]))
}
