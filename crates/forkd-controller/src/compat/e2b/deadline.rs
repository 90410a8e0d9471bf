//! The deadline of a running sandbox of the E2B API: clients set and lengthen it.
//!
//! Once the daemon acts on the deadline, a change comes too late and fails. A change that succeeds is on disk.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;

use crate::auth::principal::Principal;
use crate::compat::e2b::extract::Body;
use crate::compat::e2b::types::{Refresh, SetTimeout, check_timeout};
use crate::compat::e2b::{E2bContext, Found, not_found};
use crate::error::{Code, Result};
use crate::sandbox::Sandbox;
use crate::sandbox::lifetime::deadline;

impl E2bContext {
    /// Gives a running sandbox at least that much time from now.
    pub(super) async fn lengthen(&self, sandbox: &Arc<Sandbox>, timeout: Option<u64>) -> Result<()> {
        let Some(secs) = timeout else { return sandbox.check_not_suspending() };
        extend(sandbox, secs)?;
        self.workspaces.keep_deadline(sandbox).await
    }
}

/// Moves the deadline to `secs` from now, unless it is later already.
fn extend(sandbox: &Sandbox, secs: u64) -> Result<()> {
    let at = deadline(Duration::from_secs(secs));
    set_deadline(sandbox, secs, |current| current.is_none_or(|current| current < at))
}

/// Moves the deadline to `secs` from now if `moves` says so of the current one.
fn set_deadline(sandbox: &Sandbox, secs: u64, moves: impl FnOnce(Option<u64>) -> bool) -> Result<()> {
    sandbox.try_update_persisted(|runtime| {
        sandbox.check_time_is_open(runtime).map_err(|error| match error.code() {
            Code::SandboxNotFound => not_found(&sandbox.id),
            _ => error,
        })?;
        if moves(runtime.saved.deadline_unix) {
            runtime.saved.deadline_unix = Some(deadline(Duration::from_secs(secs)));
            if let Some(state) = &mut runtime.saved.e2b {
                state.timeout_secs = secs;
            }
        }
        Ok(())
    })
}

/// Sets the time that a running sandbox has from now.
pub(super) async fn set_timeout(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<SetTimeout>,
) -> Result<StatusCode> {
    let secs = check_timeout(Some(request.timeout))?.unwrap_or_default();
    match e2b.find_for(&id, &who)? {
        Found::Running(sandbox, _) => {
            set_deadline(&sandbox, secs, |_| true)?;
            e2b.workspaces.keep_deadline(&sandbox).await?;
        }
        Found::Paused(..) => return Err(not_found(&id)),
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Lengthens the life of a running sandbox, for clients of earlier versions.
pub(super) async fn refresh(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Refresh>,
) -> Result<StatusCode> {
    match e2b.find_for(&id, &who)? {
        Found::Running(sandbox, _) => {
            let secs = check_timeout(request.duration)?.unwrap_or_default();
            e2b.lengthen(&sandbox, Some(secs)).await?;
        }
        Found::Paused(..) => return Err(not_found(&id)),
    }
    Ok(StatusCode::NO_CONTENT)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn of_two_clients_that_connect_at_once_the_one_that_wants_more_time_gets_it() {
        let sandbox = Sandbox::bare("sb1");
        let later = deadline(Duration::from_secs(5000));
        std::thread::scope(|scope| {
            let held = sandbox.write_if_not_deleted(|_| {
                scope.spawn(|| extend(&sandbox, 300).unwrap());
                // Until it waits for the record.
                std::thread::sleep(Duration::from_millis(100));
                sandbox.update_runtime(|runtime| runtime.saved.deadline_unix = Some(later));
                Ok(())
            });
            held.unwrap();
        });
        assert_eq!(sandbox.read_runtime(|runtime| runtime.saved.deadline_unix), Some(later));
    }
}
