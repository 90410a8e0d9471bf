//! Sandboxes of the E2B API: create, connect, list, show, pause, end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use crate::auth::principal::{Principal, Scope};
use crate::compat::e2b::extract::Body;
use crate::compat::e2b::types::{
    Connect, Connected, Detail, Lifecycle, Listed, NewSandbox, Pause, Size, check_timeout,
};
use crate::compat::e2b::{E2bContext, Found, go_on, is_held, names, not_found};
use crate::error::{Code, Error, Result};
use crate::sandbox::Sandbox;
use crate::sandbox::cold_boot::start_children;
use crate::sandbox::e2b::E2bState;
use crate::sandbox::envs::check_envs;
use crate::sandbox::idempotency::IdempotencyMark;
use crate::sandbox::lifetime::Lifetime;
use crate::sandbox::spawn::SpawnSpec;
use crate::telemetry::audit::AuditTarget;
use crate::util::random::new_id;
use crate::util::task::{self, Task};
use crate::workspace::{PauseSpec, WorkspaceRecord};

/// The entries of a page when the client gives no limit, and the most that it can ask for.
const PAGE: usize = 100;

/// A state with tokens of its own.
pub(super) fn with_new_tokens(state: E2bState) -> Result<E2bState> {
    Ok(E2bState { access_token: new_id("at")?, traffic_token: new_id("tt")?, ..state })
}

pub(super) fn now_unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64
}

/// Forks a sandbox from a template.
pub(super) async fn create(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    idempotency: Option<Extension<IdempotencyMark>>,
    Body(request): Body<NewSandbox>,
) -> Result<Response> {
    let arrived = Instant::now();
    let created = |id: &str, state: &E2bState| {
        let target = Extension(AuditTarget(id.to_owned()));
        (StatusCode::CREATED, target, Json(Connected::new(id, state))).into_response()
    };
    let earlier = idempotency.as_ref().map(|mark| mark.earlier(&e2b.registry)).unwrap_or_default();
    let is_there = |sandbox: &Arc<Sandbox>| e2b.find_for(&sandbox.id, &who).ok();
    if let Some(Found::Running(sandbox, state)) = earlier.iter().find_map(is_there) {
        return Ok(created(&sandbox.id, &state));
    }
    // Its time may have paused it meanwhile, and a client that creates a sandbox wants one that runs.
    if let Some(Extension(mark)) = idempotency.as_ref().filter(|mark| mark.before)
        && let Some(id) = e2b.workspaces.made_by(&mark.mark)
        && let Ok(found) = e2b.find_for(&id, &who)
    {
        let state = match found {
            Found::Running(_, state) => state,
            Found::Paused(_, state) => {
                e2b.wake(&id, None, &who).await?;
                state
            }
        };
        return Ok(created(&id, &state));
    }
    request.check()?;
    let timeout_secs = request.timeout()?;
    let envs = request.env_vars.clone().unwrap_or_default();
    let template = e2b.template(&request.template_id, &who).await?;
    let id = new_id("sb")?;
    let state = with_new_tokens(E2bState {
        template: request.template_id.clone(),
        metadata: request.metadata.clone().unwrap_or_default(),
        envs,
        public_traffic: request.public_traffic(),
        auto_pause: request.auto_pause.unwrap_or(false),
        keeps_memory: request.auto_pause_memory.unwrap_or(true),
        auto_resume: request.auto_resume.is_some_and(|resume| resume.enabled),
        timeout_secs,
        started_at_unix_ms: now_unix_ms(),
        ..E2bState::default()
    })?;
    let variables = state.variables(&id);
    check_envs(&variables)?;
    let spawn = SpawnSpec {
        tag: template.tag.clone(),
        who: who.clone(),
        owner: who.owner.clone(),
        n: 1,
        wait: true,
        network: request.allow_internet_access.unwrap_or(true),
        memory_limit_mib: None,
        envs: variables,
        workspace: None,
        time_to_live: Some(Duration::from_secs(timeout_secs)),
        lifetime: Lifetime { request: idempotency.map(|Extension(mark)| mark.mark), ..state.lifetime() },
        arrived,
        id: Some(id.clone()),
        e2b: Some(Box::new(state.clone())),
    };
    let mut spawned =
        start_children(&e2b.registry, &e2b.snapshots, spawn).await.map_err(|error| match error.code() {
            // The snapshot was removed since it was looked up.
            Code::SnapshotNotFound => names::missing(&request.template_id),
            _ => error,
        })?;
    let error = spawned.errors.pop().map(|(_, error)| error);
    let bound = spawned.children.pop();
    let bound = bound
        .ok_or_else(|| error.unwrap_or_else(|| Error::host("cannot fork", "the spawn returned no child")))?;
    bound.release();
    Ok(created(&id, &state))
}

/// Runs `work` to its end, also if the client disconnects.
pub(super) async fn to_its_end<T: Send + 'static>(
    work: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let done = task::spawn(Task::Suspend, work).await;
    done.unwrap_or_else(|error| Err(Error::host("pausing or resuming a sandbox", error)))
}

impl E2bContext {
    /// The running sandbox, resumed if it is paused; and whether it was.
    async fn running(&self, id: &str, timeout: Option<u64>, who: &Principal) -> Result<(bool, Arc<Sandbox>)> {
        let sandbox = match self.find_for(id, who)? {
            Found::Running(sandbox, _) => sandbox,
            Found::Paused(record, _) => return self.wake(&record.name, timeout, who).await,
        };
        match self.lengthen(&sandbox, timeout).await {
            // It is being paused.
            Err(error) if error.code() == Code::SandboxSuspending => {
                let (resumed, sandbox) = self.wake(id, timeout, who).await?;
                if !resumed {
                    // The pause failed.
                    self.lengthen(&sandbox, timeout).await?;
                }
                Ok((resumed, sandbox))
            }
            lengthened => {
                lengthened?;
                let held = is_held(&sandbox);
                if held {
                    go_on(&sandbox).await?;
                }
                Ok((held, sandbox))
            }
        }
    }
}

/// Connects to a sandbox: resumes it if it is paused, and lengthens its life.
pub(super) async fn connect(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Connect>,
) -> Result<Response> {
    let timeout = check_timeout(request.timeout)?;
    if request.memory == Some(false)
        && let Found::Paused(record, _) = e2b.find_for(&id, &who)?
        && !e2b.snapshots.get(record.tag())?.is_disk_only()
    {
        let text = "`memory: false`: forkd boots a sandbox only if it was paused without memory; resume it with memory";
        return Err(Error::new(Code::NotImplemented, text));
    }
    let (resumed, sandbox) = e2b.running(&id, timeout, &who).await?;
    let state = sandbox.read_runtime(|runtime| runtime.saved.e2b.clone()).ok_or_else(|| not_found(&id))?;
    let status = if resumed { StatusCode::CREATED } else { StatusCode::OK };
    Ok((status, Json(Connected::new(&id, &state))).into_response())
}

/// Resumes a paused sandbox, for clients of earlier versions.
pub(super) async fn resume(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Connect>,
) -> Result<Response> {
    if let Found::Running(sandbox, _) = e2b.find_for(&id, &who)?
        && !is_held(&sandbox)
    {
        return Err(Error::new(Code::SandboxBusy, format!("sandbox {id} is running already")));
    }
    connect(State(e2b), Extension(who), Path(id), Body(request)).await
}

/// Ends a sandbox, running or paused, for good.
pub(super) async fn kill(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<StatusCode> {
    match e2b.find_for(&id, &who)? {
        Found::Running(..) if !e2b.workspaces.has(&id) => e2b.registry.delete(&id)?,
        _ => {
            let workspaces = e2b.workspaces.clone();
            to_its_end(async move { workspaces.delete_patiently(&id).await }).await?;
        }
    }
    Ok(StatusCode::NO_CONTENT)
}

/// Pauses a running sandbox: it is on disk then, without process and memory.
pub(super) async fn pause(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
    Body(request): Body<Pause>,
) -> Result<StatusCode> {
    let sandbox = match e2b.find_for(&id, &who)? {
        Found::Running(sandbox, _) => sandbox,
        Found::Paused(..) => {
            return Err(Error::new(Code::SandboxPaused, format!("sandbox {id} is paused already")));
        }
    };
    let pause = PauseSpec {
        keeps_memory: request.memory.unwrap_or(true),
        requires_healthy_guest: request.require_healthy_guest.unwrap_or(false),
    };
    let workspaces = e2b.workspaces.clone();
    let paused =
        to_its_end(async move { workspaces.pause_to_disk(&sandbox, pause, &who, |_| true).await }).await;
    paused.map_err(|error| match error.code() {
        // Another request paused it first: clients know that as a conflict.
        Code::WorkspaceNotRunning => error.with_code(Code::SandboxPaused),
        _ => error,
    })?;
    Ok(StatusCode::NO_CONTENT)
}

/// Shows a sandbox.
pub(super) async fn detail(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    Path(id): Path<String>,
) -> Result<Json<Detail>> {
    let found = e2b.find_for(&id, &who)?;
    let (state, network) = match &found {
        Found::Running(sandbox, state) => (state, sandbox.spec.network),
        Found::Paused(record, state) => (state, record.network),
    };
    Ok(Json(Detail {
        envd_access_token: (who.scope >= Scope::Write).then(|| state.access_token.clone()),
        domain: None,
        allow_internet_access: network,
        lifecycle: Lifecycle::of(state),
        listed: listed(&e2b, &found),
    }))
}

/// The size of the guest in a snapshot.
fn size_of(e2b: &E2bContext, record: &WorkspaceRecord) -> Size {
    let snapshot = e2b.snapshots.get(record.tag()).and_then(|entry| entry.snapshot());
    let guest = snapshot.map(|snapshot| snapshot.manifest().guest.clone());
    guest.map_or(Size { vcpus: 1, mem_mib: 0, disk_mib: 0 }, |guest| size(&guest))
}

fn size(guest: &forkd_store::GuestSpec) -> Size {
    let disk_mib = guest.image.as_ref().map_or(0, |image| image.size >> 20);
    Size { vcpus: guest.vcpus, mem_mib: guest.mem_size_mib, disk_mib }
}

fn listed(e2b: &E2bContext, found: &Found) -> Listed {
    match found {
        Found::Running(sandbox, state) => {
            let spec = &sandbox.spec;
            let plain = Size { vcpus: spec.vcpus, mem_mib: spec.mem_mib, disk_mib: 0 };
            let size = spec.guest.as_ref().map_or(plain, size);
            let end_at = sandbox.read_runtime(|runtime| runtime.saved.deadline_unix);
            Listed::new(&sandbox.id, state, size, end_at, is_held(sandbox))
        }
        Found::Paused(record, state) => {
            Listed::new(&record.name, state, size_of(e2b, record), record.kill_at_unix, true)
        }
    }
}

/// The query of a list.
#[derive(Debug, Default)]
struct Filter {
    metadata: BTreeMap<String, String>,
    running: bool,
    paused: bool,
    ascending: bool,
    started_after_ms: u64,
    template: Option<String>,
    limit: usize,
    after: Option<(u64, String)>,
}

impl Filter {
    fn of(query: &str) -> Result<Self> {
        let mut filter = Filter { running: true, paused: true, limit: PAGE, ..Filter::default() };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            match name.as_ref() {
                // A query inside the query, whose keys and values are encoded once more.
                "metadata" => filter.metadata = metadata(&value),
                "state" => {
                    let has = |state: &str| value.split(',').any(|given| given == state);
                    if value.split(',').any(|given| !matches!(given, "running" | "paused")) {
                        return Err(Error::invalid(
                            "state must be `running`, `paused`, or both with a comma",
                        ));
                    }
                    (filter.running, filter.paused) = (has("running"), has("paused"));
                }
                "order" => match value.as_ref() {
                    "asc" => filter.ascending = true,
                    "desc" => filter.ascending = false,
                    _ => return Err(Error::invalid("order must be `asc` or `desc`")),
                },
                "startedAfter" => {
                    filter.started_after_ms = parse_time(&value).ok_or_else(|| {
                        Error::invalid("startedAfter must be a time such as 2026-01-31T12:00:00Z")
                    })?;
                }
                "template" | "templateID" => filter.template = Some(value.into_owned()),
                "limit" => {
                    let limit = value.parse().ok().filter(|limit| (1..=PAGE).contains(limit));
                    filter.limit =
                        limit.ok_or_else(|| Error::invalid(format!("limit must be 1 to {PAGE}")))?;
                }
                "nextToken" if value.is_empty() => {}
                "nextToken" => {
                    let parsed =
                        value.split_once('.').and_then(|(ms, id)| Some((ms.parse().ok()?, id.to_owned())));
                    let parsed = parsed.ok_or_else(|| {
                        Error::invalid("nextToken must be the X-Next-Token of the previous page")
                    })?;
                    filter.after = Some(parsed);
                }
                _ => {}
            }
        }
        Ok(filter)
    }

    fn takes(&self, state: &E2bState) -> bool {
        let same = |(key, value): (&String, &String)| state.metadata.get(key) == Some(value);
        self.metadata.iter().all(same)
            && state.started_at_unix_ms >= self.started_after_ms
            && self.template.as_ref().is_none_or(|template| {
                names::without_default(template) == names::without_default(&state.template)
            })
    }
}

fn metadata(query: &str) -> BTreeMap<String, String> {
    let decoded = |text: &str| {
        // A `+` is a plus here: only percent signs are decoded once more.
        let text = text.replace('+', "%2B");
        form_urlencoded::parse(text.as_bytes()).next().map_or_else(String::new, |(name, _)| name.into_owned())
    };
    let pairs = form_urlencoded::parse(query.as_bytes());
    pairs.map(|(key, value)| (decoded(&key), decoded(&value))).collect()
}

/// A time in RFC 3339, in milliseconds since 1970.
fn parse_time(text: &str) -> Option<u64> {
    // In a query a plus may have become a space.
    let text = text.replace(' ', "+");
    let (time, minutes) = match text.strip_suffix('Z') {
        Some(time) => (time, 0),
        None => {
            let at = text.len().checked_sub("+00:00".len())?;
            let (time, offset) = (text.get(..at)?, text.get(at..)?);
            let (hours, minutes) = offset.get(1..)?.split_once(':')?;
            let minutes = hours.parse::<i64>().ok()? * 60 + minutes.parse::<i64>().ok()?;
            match offset.as_bytes().first()? {
                b'+' => (time, -minutes),
                b'-' => (time, minutes),
                _ => return None,
            }
        }
    };
    let at = humantime::parse_rfc3339(&format!("{time}Z")).ok()?;
    let ms = i64::try_from(at.duration_since(UNIX_EPOCH).ok()?.as_millis()).ok()?;
    u64::try_from(ms + minutes * 60_000).ok()
}

/// Lists sandboxes, newest first, in pages.
pub(super) async fn list(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    RawQuery(query): RawQuery,
) -> Result<Response> {
    let filter = Filter::of(query.as_deref().unwrap_or_default())?;
    let (page, next) = page(&e2b, &who, &filter);
    let mut response = Json(page).into_response();
    if let Some(next) = next.and_then(|next| HeaderValue::from_str(&next).ok()) {
        response.headers_mut().insert(HeaderName::from_static("x-next-token"), next);
    }
    Ok(response)
}

/// Lists running sandboxes, for clients of earlier versions.
pub(super) async fn list_running(
    State(e2b): State<E2bContext>,
    Extension(who): Extension<Principal>,
    RawQuery(query): RawQuery,
) -> Result<Json<Vec<Listed>>> {
    let filter = Filter::of(query.as_deref().unwrap_or_default())?;
    let all = Filter { paused: false, limit: usize::MAX, ..filter };
    Ok(Json(page(&e2b, &who, &all).0))
}

fn page(e2b: &E2bContext, who: &Principal, filter: &Filter) -> (Vec<Listed>, Option<String>) {
    // One that is being paused or resumed is in both places, and may change places meanwhile: each id is listed once, as
    // what it is when it is looked up.
    let in_registry = || {
        let theirs = e2b.registry.list().into_iter().filter(|sandbox| who.owns(&sandbox.spec.owner));
        theirs.map(|sandbox| sandbox.id.clone())
    };
    let mut ids: BTreeSet<String> = in_registry().collect();
    ids.extend(e2b.workspaces.all_paused(who).into_iter().map(|(record, _)| record.name));
    ids.extend(in_registry());
    let mut found: Vec<(u64, String, Found)> = Vec::new();
    for id in ids {
        let Ok(it) = e2b.find_for(&id, who) else { continue };
        let (wanted, state) = match &it {
            Found::Running(sandbox, state) if is_held(sandbox) => (filter.paused, state),
            Found::Running(_, state) => (filter.running, state),
            Found::Paused(_, state) => (filter.paused, state),
        };
        if wanted && filter.takes(state) {
            found.push((state.started_at_unix_ms, id, it));
        }
    }
    let place = |it: &(u64, String, Found)| (it.0, it.1.clone());
    found.sort_by_key(place);
    if !filter.ascending {
        found.reverse();
    }
    if let Some(after) = &filter.after {
        found.retain(|it| if filter.ascending { place(it) > *after } else { place(it) < *after });
    }
    let more = found.len() > filter.limit;
    found.truncate(filter.limit);
    let next = found.last().filter(|_| more).map(|(ms, id, _)| format!("{ms}.{id}"));
    (found.iter().map(|(_, _, found)| listed(e2b, found)).collect(), next)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_decoded_as_often_as_clients_encode_it() {
        // As captured from the Python client: {"a b": "c&d"}.
        let filter = Filter::of("metadata=a%252520b%3Dc%252526d&state=running%2Cpaused&order=asc").unwrap();
        assert_eq!(filter.metadata, BTreeMap::from([("a b".into(), "c&d".into())]));
        assert!(filter.running && filter.paused && filter.ascending);
        let filter = Filter::of("metadata=k%3Dv&state=paused&limit=5&nextToken=7.sb1").unwrap();
        assert_eq!(filter.metadata, BTreeMap::from([("k".into(), "v".into())]));
        assert!(!filter.running && filter.paused);
        assert_eq!((filter.limit, filter.after), (5, Some((7, "sb1".into()))));
        for bad in ["state=ended", "order=up", "limit=0", "limit=101", "nextToken=x", "startedAfter=soon"] {
            assert_eq!(Filter::of(bad).unwrap_err().code(), Code::InvalidRequest, "{bad}");
        }
    }

    #[test]
    fn times_with_an_offset_are_read() {
        let utc = parse_time("2026-11-15T06:15:18.048202Z").unwrap();
        assert_eq!(parse_time("2026-11-15T06:15:18.048202+00:00"), Some(utc));
        assert_eq!(parse_time("2026-11-15T06:15:18.048202 00:00"), Some(utc));
        assert_eq!(parse_time("2026-11-15T08:15:18.048202+02:00"), Some(utc));
        assert_eq!(parse_time("2026-11-15T05:45:18.048202-00:30"), Some(utc));
        for bad in ["", "now", "2026-11-15", "2026-11-15T06:15:18*00:00"] {
            assert_eq!(parse_time(bad), None, "{bad}");
        }
    }
}
