//! Snapshots and templates of the E2B API: a snapshot of a running sandbox, and whether a template is there.

use std::sync::Arc;

use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_protocol::names::is_valid_name;
use forkd_store::TemplateName;
use serde::{Deserialize, Serialize};

use crate::auth::principal::{Principal, SHARED};
use crate::branch::BranchSpec;
use crate::compat::e2b::extract::Body;
use crate::compat::e2b::fields::NoOthers;
use crate::compat::e2b::names::{MAX_NAME, missing, without_default};
use crate::compat::e2b::sandboxes::to_its_end;
use crate::compat::e2b::{E2bContext, Found, not_found};
use crate::error::{Code, Error, Result};
use crate::snapshot::branch_job::Mode;
use crate::snapshot::registry::{Removal, SnapshotState};
use crate::telemetry::audit::AuditTarget;
use crate::util::random::new_id;
use crate::util::task::{self, Task, blocking};
use crate::util::time::now_unix;

/// The entries of a page when the client gives no limit, and the most that it can ask for.
const PAGE: usize = 100;
/// The longest part of a tag that is taken from a name: the rest makes it unique.
const MAX_STEM: usize = 40;

/// `POST /sandboxes/{id}/snapshots`.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct NewSnapshot {
    name: Option<String>,
    /// `false`: the disks alone, so that a sandbox of it boots.
    memory: Option<bool>,
    #[serde(flatten)]
    _others: NoOthers,
}

/// A snapshot, for its maker.
#[derive(Debug, Serialize)]
pub(super) struct SnapshotShown {
    #[serde(rename = "snapshotID")]
    snapshot_id: String,
    names: Vec<String>,
}

impl SnapshotShown {
    fn of(named: &TemplateName, who: &Principal) -> Self {
        // A name means something to its owner only: admins find a snapshot of another owner by its tag.
        let name = if named.owner == who.owner { &named.name } else { &named.tag };
        let name = match name.contains(':') {
            true => name.clone(),
            false => format!("{name}:default"),
        };
        SnapshotShown { snapshot_id: name.clone(), names: vec![name] }
    }
}

/// Takes a snapshot of a running sandbox, which goes on.
pub(super) async fn create(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<NewSnapshot>,
) -> Result<Response> {
    let Found::Running(sandbox, _) = e2b.find_for(&id, &who)? else { return Err(not_found(&id)) };
    let name = request.name.as_deref().map(without_default).filter(|name| !name.is_empty());
    let tag = tag_for(name)?;
    let mode = match request.memory {
        Some(false) => Mode::Disk,
        _ => Mode::Full,
    };
    let named = TemplateName {
        owner: sandbox.spec.owner.clone(),
        name: name.unwrap_or(&tag).to_owned(),
        tag: tag.clone(),
        sandbox: id.clone(),
        created_at_unix: now_unix(),
    };
    let shown = SnapshotShown::of(&named, &who);
    let work = async move {
        let _in_use = sandbox.in_use();
        let database = e2b.registry.host.database.clone();
        let name = async |named: TemplateName| {
            let database = database.clone();
            blocking("naming a snapshot", move || Ok(database.name_template(&named)?)).await
        };
        // Before the branch: a snapshot without a name could not be found. The client's name may be that of an earlier
        // snapshot, which keeps it until this one is there.
        name(TemplateName { name: tag.clone(), ..named.clone() }).await?;
        let order =
            BranchSpec { tag: Some(tag.clone()), mode, wait: true, parent_tag: None, quota: who.quota };
        let branched = async { e2b.snapshots.branch(&sandbox, order)?.wait_done().await };
        if let Err(error) = branched.await {
            let database = database.clone();
            let forget = move || Ok(database.forget_templates(&tag)?);
            if let Err(error) = blocking("removing the name of a snapshot", forget).await {
                tracing::warn!(%error, "name of a failed snapshot not removed");
            }
            return Err(error);
        }
        name(named).await
    };
    // It goes on if the client goes away.
    let done = task::spawn(Task::Branch, work).await;
    done.unwrap_or_else(|error| Err(Error::host("taking a snapshot", error)))?;
    let target = Extension(AuditTarget(id));
    Ok((StatusCode::CREATED, target, Json(shown)).into_response())
}

/// A tag that no other snapshot has, which begins like the name.
fn tag_for(name: Option<&str>) -> Result<String> {
    let unique = new_id("")?;
    let Some(name) = name else { return Ok(format!("snapshot-{unique}")) };
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    if name.len() > MAX_NAME || !name.chars().all(plain) {
        let text = format!(
            "a snapshot's name must have 1 to {MAX_NAME} letters, digits, `.`, `_`, `-`, `/` and `:`, and it is {name:?}"
        );
        return Err(Error::invalid(text));
    }
    let stem: String = name.chars().map(|c| if "/:".contains(c) { '-' } else { c }).take(MAX_STEM).collect();
    let tag = format!("{stem}-{}", &unique[..8]);
    Ok(if is_valid_name(&tag) { tag } else { format!("snapshot-{unique}") })
}

/// Lists the snapshots that clients of this API took, oldest first, in pages.
pub(super) async fn list(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    RawQuery(query): RawQuery,
) -> Result<Response> {
    let (mut sandbox, mut name, mut limit) = (None, None, PAGE);
    let mut after: Option<(u64, String)> = None;
    for (key, value) in form_urlencoded::parse(query.as_deref().unwrap_or_default().as_bytes()) {
        match key.as_ref() {
            "sandboxID" => sandbox = Some(value.into_owned()),
            "name" => name = Some(without_default(&value).to_owned()),
            "limit" => {
                let given = value.parse().ok().filter(|limit| (1..=PAGE).contains(limit));
                limit = given.ok_or_else(|| Error::invalid(format!("limit must be 1 to {PAGE}")))?;
            }
            "nextToken" if !value.is_empty() => {
                let place =
                    value.split_once('.').and_then(|(at, tag)| Some((at.parse().ok()?, tag.to_owned())));
                after = Some(place.ok_or_else(|| {
                    Error::invalid("nextToken must be the X-Next-Token of the previous page")
                })?);
            }
            _ => {}
        }
    }
    let database = e2b.registry.host.database.clone();
    let all = blocking("listing snapshots", move || Ok(database.templates()?)).await?;
    // By tag within a second: a snapshot's name may change between two pages.
    let place = |named: &TemplateName| (named.created_at_unix, named.tag.clone());
    let mut page: Vec<_> = all
        .into_iter()
        .filter(|named| {
            after.as_ref().is_none_or(|after| place(named) > *after)
                && who.owns(&named.owner)
                && sandbox.as_ref().is_none_or(|sandbox| named.sandbox == *sandbox)
                && name.as_ref().is_none_or(|name| named.name == *name)
                && e2b.snapshots.usable(&named.tag, &who).is_ok()
        })
        .collect();
    page.sort_by_key(place);
    let more = page.len() > limit;
    page.truncate(limit);
    let next = page.last().filter(|_| more).map(place);
    let mut response =
        Json(page.iter().map(|named| SnapshotShown::of(named, &who)).collect::<Vec<_>>()).into_response();
    let next = next.and_then(|(at, tag)| HeaderValue::from_str(&format!("{at}.{tag}")).ok());
    if let Some(next) = next {
        response.headers_mut().insert(HeaderName::from_static("x-next-token"), next);
    }
    Ok(response)
}

/// Removes a snapshot, and all its names.
pub(super) async fn remove(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(name): Path<String>,
) -> Result<StatusCode> {
    // Also if the client disconnects: a name of a removed snapshot would be left.
    to_its_end(async move { remove_named(&e2b, &who, &name).await }).await?;
    Ok(StatusCode::NO_CONTENT)
}

async fn remove_named(e2b: &E2bContext, who: &Principal, name: &str) -> Result<()> {
    let database = e2b.registry.host.database.clone();
    let forget = async |tag: String| {
        let database = database.clone();
        let forget = move || Ok(database.forget_templates(&tag)?);
        blocking("removing the names of a snapshot", forget).await
    };
    // The client means the snapshot that it named. If that is gone, another one may have the name as its tag.
    if let Some(tag) = e2b.named_tag(name, who).await?
        && e2b.snapshots.get(&tag).is_err()
    {
        forget(tag).await?;
        return Err(missing(name));
    }
    let entry = e2b.template(name, who).await?;
    if !who.owns(&entry.owner()) {
        let text = format!("template {name} is shared by all owners; ask an admin to remove it");
        return Err(Error::new(Code::Forbidden, text));
    }
    let tag = entry.tag.clone();
    e2b.workspaces.remove_snapshot_for(&tag, Removal::Plain, who).await?;
    forget(tag).await
}

/// Whether a template is there.
#[derive(Debug, Serialize)]
pub(super) struct Alias {
    #[serde(rename = "templateID")]
    template_id: String,
    public: bool,
}

/// Finds a template by its name. One that is not ready is not there yet.
pub(super) async fn alias(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(name): Path<String>,
) -> Result<Json<Alias>> {
    let entry: Arc<_> = e2b.template(&name, &who).await?;
    match entry.state() {
        SnapshotState::Ready(_) => {
            Ok(Json(Alias { template_id: entry.tag.clone(), public: entry.owner() == SHARED }))
        }
        _ => Err(missing(&name)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_gets_a_tag_of_its_own() {
        for name in ["a", "a/b:c", "team/base", &"x".repeat(MAX_NAME), "-x", ".x"] {
            let (one, other) = (tag_for(Some(name)).unwrap(), tag_for(Some(name)).unwrap());
            assert!(is_valid_name(&one), "{one}");
            assert_ne!(one, other);
        }
        assert!(tag_for(Some("a/b")).unwrap().starts_with("a-b-"));
        assert!(is_valid_name(&tag_for(None).unwrap()));
        for bad in ["a b", "ä", &"x".repeat(MAX_NAME + 1)] {
            assert_eq!(tag_for(Some(bad)).unwrap_err().code(), Code::InvalidRequest);
        }
    }
}
