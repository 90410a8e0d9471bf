//! Changes of a sandbox's lifetime and labels, the filters of the list, and records of removed sandboxes.

use std::collections::BTreeMap;

use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forkd_api::{ArchivedSandbox, SandboxState, UpdateRequest};
use forkd_protocol::names::{NAME_RULE, is_valid_name, is_valid_sandbox_id};
use forkd_store::ArchiveEntry;

use crate::api::ApiContext;
use crate::api::pagination::Page;
use crate::auth::principal::{Principal, Scope};
use crate::error::{Code, Error, Result};
use crate::sandbox::Sandbox;
use crate::sandbox::lifetime::{check_labels, check_secs, deadline};
use crate::util::time::timestamp;

/// Checks that a snapshot could have this tag.
pub(crate) fn check_tag(name: &str, tag: Option<&str>) -> Result<()> {
    match tag {
        Some(tag) if !is_valid_name(tag) => Err(Error::invalid(format!("{name} must be {NAME_RULE}"))),
        _ => Ok(()),
    }
}

/// Applies a request's changes to a sandbox; all or none.
pub(crate) fn update(sandbox: &Sandbox, request: UpdateRequest) -> Result<()> {
    let time_to_live =
        request.timeout_secs.flatten().map(|secs| check_secs("timeout_secs", secs)).transpose()?;
    let idle = request.idle_timeout_secs.flatten();
    idle.map(|secs| check_secs("idle_timeout_secs", secs)).transpose()?;
    check_tag("suspend_as", request.suspend_as.as_ref().and_then(|tag| tag.as_deref()))?;
    request.labels.as_ref().map(check_labels).transpose()?;
    let changes_time =
        request.timeout_secs.is_some() || request.idle_timeout_secs.is_some() || request.on_timeout.is_some();
    sandbox.try_update_persisted(|runtime| {
        if changes_time {
            sandbox.check_time_is_open(runtime)?;
        }
        if request.timeout_secs.is_some() {
            runtime.saved.deadline_unix = time_to_live.map(deadline);
            // Also of one that still boots.
            runtime.time_to_live = None;
        }
        let lifetime = &mut runtime.saved.lifetime;
        if request.idle_timeout_secs.is_some() {
            lifetime.idle_timeout_secs = idle;
        }
        lifetime.on_timeout = request.on_timeout.unwrap_or(lifetime.on_timeout);
        if let Some(tag) = request.suspend_as {
            lifetime.suspend_as = tag;
        }
        if let Some(labels) = request.labels {
            lifetime.labels = labels;
        }
        Ok(())
    })?;
    sandbox.activity.touch();
    Ok(())
}

/// The filters of a list of sandboxes.
#[derive(Debug)]
pub(crate) struct SandboxFilter {
    /// Names of labels, each with the value it must have, if any.
    labels: Vec<(String, Option<String>)>,
    snapshot_tag: Option<String>,
    owner: Option<String>,
    state: Option<SandboxState>,
    /// To list sandboxes that ended and were removed: the state to show, which is the name that the client used.
    pub(crate) archived: Option<&'static str>,
}

impl SandboxFilter {
    pub(crate) fn of(page: &Page) -> Result<Self> {
        let labels = page.all("label").map(|text| match text.split_once('=') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (text.to_owned(), None),
        });
        let state = page.one("state")?.map(|text| {
            let known = serde_json::from_value(serde_json::Value::String(text.to_owned()));
            known.map_err(|_| {
                let all = "starting, running, unresponsive, paused, ended or unknown";
                Error::invalid(format!("state must be {all}"))
            })
        });
        let wants = |name: &'static str| match page.one(name)? {
            None | Some("false") => Ok(None),
            Some("true") => Ok(Some(name)),
            Some(_) => Err(Error::invalid(format!("{name} must be true or false"))),
        };
        // `gone` is the older name. A client may give both, to ask an older daemon too.
        let (archived, gone) = (wants("archived")?, wants("gone")?);
        let archived = archived.or(gone);
        let state = state.transpose()?;
        if let Some(name) = archived.filter(|_| state.is_some()) {
            return Err(Error::invalid(format!("give either `state` or `{name}`")));
        }
        let snapshot_tag = page.one("snapshot_tag")?.map(str::to_owned);
        let owner = page.one("owner")?.map(str::to_owned);
        Ok(SandboxFilter { labels: labels.collect(), snapshot_tag, owner, state, archived })
    }

    pub(crate) fn takes(&self, sandbox: &Sandbox, state: SandboxState) -> bool {
        self.state.is_none_or(|wanted| wanted == state)
            && self.takes_tag(sandbox.spec.snapshot_tag.as_deref())
            && self.takes_owner(&sandbox.spec.owner)
            && sandbox.read_runtime(|runtime| self.takes_labels(&runtime.saved.lifetime.labels))
    }

    fn takes_tag(&self, tag: Option<&str>) -> bool {
        self.snapshot_tag.is_none() || self.snapshot_tag.as_deref() == tag
    }

    fn takes_owner(&self, owner: &str) -> bool {
        self.owner.as_ref().is_none_or(|wanted| wanted == owner)
    }

    fn takes_labels(&self, labels: &BTreeMap<String, String>) -> bool {
        self.labels.iter().all(|(name, wanted)| match (labels.get(name), wanted) {
            (Some(value), Some(wanted)) => value == wanted,
            (found, None) => found.is_some(),
            (None, Some(_)) => false,
        })
    }
}

/// The position of a sandbox in a list: by age, then by id.
pub(crate) fn place(secs: u64, nanos: u32, id: &str) -> String {
    format!("{secs:010x}.{nanos:08x}-{id}")
}

/// Whether a principal may read the record of a removed sandbox.
fn may_know(identity: &Principal, gone: &ArchiveEntry) -> bool {
    identity.scope == Scope::Admin || identity.owner == gone.made.owner
}

/// Lists sandboxes that ended and were removed.
pub(crate) async fn list_archived(
    app: &ApiContext,
    identity: &Principal,
    page: &Page,
    filter: &SandboxFilter,
) -> Result<Response> {
    let mut archived = app.registry.archive.archived().await?;
    archived.retain(|it| {
        may_know(identity, it)
            && filter.takes_tag(it.made.snapshot_tag.as_deref())
            && filter.takes_owner(&it.made.owner)
            && filter.takes_labels(&it.made.labels)
            // A sandbox that ended but is not deleted is still in the registry.
            && app.registry.get(&it.made.id).is_err()
    });
    let show = |it: &ArchiveEntry| ArchivedSandbox {
        id: it.made.id.clone(),
        state: filter.archived.unwrap_or("archived").into(),
        snapshot_tag: it.made.snapshot_tag.clone(),
        labels: it.made.labels.clone(),
        created_at_unix: it.made.created_at_unix,
        ended_at_unix: it.ended_at_unix.unwrap_or_default(),
        reason: it.reason.clone(),
        detail: it.detail.clone(),
    };
    Ok(page.answer(archived, |it| place(it.made.created_at_unix, 0, &it.made.id), show))
}

/// Middleware: adds the time and reason of a removed sandbox's end to a 404.
pub(crate) async fn explain(State(app): State<ApiContext>, request: Request, next: Next) -> Response {
    let id = request.uri().path().strip_prefix("/v1/sandboxes/").and_then(|rest| rest.split('/').next());
    let asked = id.filter(|id| is_valid_sandbox_id(id)).map(str::to_owned);
    let identity = request.extensions().get::<Principal>().cloned();
    let response = next.run(request).await;
    let (Some(id), Some(identity)) = (asked, identity) else { return response };
    if response.status() != StatusCode::NOT_FOUND || app.registry.get(&id).is_ok() {
        return response;
    }
    let found = app.registry.archive.find(&id).await.ok().flatten();
    let Some(gone) = found.filter(|gone| may_know(&identity, gone)) else { return response };
    let text = match gone.ended_at_unix {
        Some(at) => {
            let (reason, detail) = (gone.reason, gone.detail);
            format!("there is no sandbox {id} any more: it ended at {} ({reason}): {detail}", timestamp(at))
        }
        None => format!("there is no sandbox {id} any more: it is just ending"),
    };
    Error::new(Code::SandboxNotFound, text).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_everybody_writes_them() {
        for (unix, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_767_225_599, "2025-12-31T23:59:59Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(timestamp(unix), text);
        }
    }

    #[test]
    fn null_differs_from_an_absent_field() {
        let read = |text: &str| serde_json::from_str::<UpdateRequest>(text).unwrap();
        assert_eq!(read("{}").timeout_secs, None);
        assert_eq!(read(r#"{"timeout_secs":null}"#).timeout_secs, Some(None));
        assert_eq!(read(r#"{"timeout_secs":7}"#).timeout_secs, Some(Some(7)));
    }

    #[test]
    fn places_sort_as_ages_do() {
        let places =
            [place(1, 999_999_999, "sbz"), place(2, 0, "sba"), place(2, 0, "sbb"), place(1 << 33, 1, "sba")];
        assert!(places.is_sorted());
    }
}
