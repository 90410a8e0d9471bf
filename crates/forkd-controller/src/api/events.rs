//! `GET /v1/events`: events as they happen, as server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::sse::{self, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use forkd_api::{ErrorBody, Event, EventKind};
use forkd_protocol::names::is_valid_sandbox_id;
use futures_util::stream;
use serde::Deserialize;
use serde_json::json;

use super::ApiContext;
use super::extract::Params;
use crate::auth::principal::{Principal, Scope};
use crate::auth::tokens::Tokens;
use crate::error::{Error, Result};
use crate::telemetry::events::{News, Since, Subscription};
use crate::util::stopping::Stopping;

/// Interval of the comments that keep an idle connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// The query parameters: which events, and whether to follow.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Wanted {
    since: Option<String>,
    sandbox: Option<String>,
    kind: Option<String>,
    follow: Option<bool>,
}

/// Streams events of sandboxes, snapshots and workspaces, as server-sent events.
///
/// Each has an `id`, an `event` (its kind) and `data`, a JSON object. The daemon keeps the last 1000 events: with
/// `since` or `Last-Event-ID`, the stream starts with the events after that one. A client that was too slow, or away
/// for too long, gets an event `lagged`. Its data has the number of events it `missed`, or null if the daemon
/// restarted.
#[utoipa::path(
    get, path = "/v1/events",
    params(
        ("since" = Option<String>, Query, description = "The id of an event, or its number; 0 for all events that the daemon keeps"),
        ("sandbox" = Option<String>, Query, description = "Only events of this sandbox"),
        ("kind" = Option<String>, Query, description = "Only these kinds; also `sandbox`, `snapshot` or `workspace`, \
                                                         with commas between them"),
        ("follow" = Option<bool>, Query, description = "False: only past events; all that the daemon keeps \
                                                        without `since`"),
        ("Last-Event-ID" = Option<String>, Header, description = "Like `since`, which has priority"),
    ),
    responses(
        (status = 200, body = Event, content_type = "text/event-stream"),
        (status = 400, body = ErrorBody),
    ),
)]
pub(super) async fn events(
    State(app): State<ApiContext>,
    Extension(identity): Extension<Principal>,
    headers: HeaderMap,
    Params(wanted): Params<Wanted>,
) -> Result<Response> {
    let follow = wanted.follow.unwrap_or(true);
    let events = &app.registry.host.telemetry.events;
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok());
    let since = match wanted.since.as_deref().or(last) {
        Some(id) => events.since(id)?,
        None if follow => Since::Now,
        None => Since::Number(0),
    };
    let filter = EventFilter::new(identity, wanted.sandbox, wanted.kind.as_deref())?;
    let place = Place {
        subscription: events.subscribe(since),
        filter,
        follow,
        stopping: app.stopping.clone(),
        tokens: app.tokens.clone(),
    };
    let stream = stream::unfold(place, |mut place| async move {
        let event = place.next().await?;
        Some((Ok::<_, Infallible>(event), place))
    });
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response())
}

/// The events that a client asks for and may see.
#[derive(Debug)]
struct EventFilter {
    identity: Principal,
    sandbox: Option<String>,
    kinds: Option<Vec<EventKind>>,
}

impl EventFilter {
    fn new(identity: Principal, sandbox: Option<String>, kinds: Option<&str>) -> Result<Self> {
        if sandbox.as_deref().is_some_and(|id| !is_valid_sandbox_id(id)) {
            return Err(Error::invalid("sandbox must be the id of a sandbox"));
        }
        let kinds = kinds.map(|kinds| {
            let mut wanted = Vec::new();
            for word in kinds.split(',') {
                let meant =
                    |kind: &EventKind| kind.name() == word || kind.name().split('.').next() == Some(word);
                let before = wanted.len();
                wanted.extend(EventKind::ALL.into_iter().filter(meant));
                if wanted.len() == before {
                    let known = EventKind::ALL.map(EventKind::name).join(", ");
                    return Err(Error::invalid(format!(
                        "kind must be one of {known}, or the part before a dot"
                    )));
                }
            }
            Ok(wanted)
        });
        Ok(EventFilter { identity, sandbox, kinds: kinds.transpose()? })
    }

    fn passes(&self, event: &Event) -> bool {
        let theirs = self.identity.scope == Scope::Admin
            || event.about.owner.as_ref().is_some_and(|owner| *owner == self.identity.owner);
        theirs
            && self.sandbox.as_ref().is_none_or(|id| event.about.sandbox.as_ref() == Some(id))
            && self.kinds.as_ref().is_none_or(|kinds| kinds.contains(&event.kind))
    }
}

/// A client's position in the stream.
struct Place {
    subscription: Subscription,
    filter: EventFilter,
    follow: bool,
    stopping: Stopping,
    tokens: Arc<Tokens>,
}

impl Place {
    async fn next(&mut self) -> Option<sse::Event> {
        loop {
            let news = match self.follow {
                false => self.subscription.past()?,
                true => tokio::select! {
                    // Pending events are sent first, also when the daemon stops.
                    biased;
                    news = self.subscription.next() => news?,
                    () = self.stopping.asked() => return None,
                    () = self.tokens.revoked(&self.filter.identity) => return None,
                },
            };
            match news {
                News::Event(event) if self.filter.passes(&event) => {
                    let shown = sse::Event::default().id(&event.id).event(event.kind.name());
                    // Plain data: it always serialises.
                    return shown.json_data(event.as_ref()).ok();
                }
                News::Event(_) => {}
                News::Lagged(missed) => {
                    return sse::Event::default().event("lagged").json_data(json!({"missed": missed})).ok();
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::events::Events;
    use crate::telemetry::metrics::Metrics;
    use forkd_api::EventSubject;

    fn event(kind: EventKind, about: EventSubject) -> Event {
        let events = Events::new(std::sync::Arc::new(Metrics::new())).unwrap();
        events.emit(kind, about);
        match events.subscribe(Since::Number(0)).past() {
            Some(News::Event(event)) => event.as_ref().clone(),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_filter_lets_through_what_it_names_and_only_what_is_the_clients_own() {
        let about = EventSubject {
            sandbox: Some("sb1".into()),
            owner: Some("anna".into()),
            ..EventSubject::default()
        };
        let ended = event(EventKind::SandboxEnded, about);
        let nobodys = event(EventKind::SnapshotReady, EventSubject::default());
        let passes = |identity: &Principal, sandbox: Option<&str>, kinds: Option<&str>, event: &Event| {
            EventFilter::new(identity.clone(), sandbox.map(Into::into), kinds).unwrap().passes(event)
        };
        let admin = Principal::local();
        assert!(passes(&admin, None, None, &ended) && passes(&admin, None, None, &nobodys));
        assert!(passes(&admin, Some("sb1"), Some("sandbox.ended,snapshot"), &ended));
        assert!(passes(&admin, None, Some("sandbox"), &ended));
        assert!(!passes(&admin, Some("sb2"), None, &ended));
        assert!(!passes(&admin, None, Some("snapshot,sandbox.paused"), &ended));
        let other = |owner: &str| Principal { owner: owner.into(), scope: Scope::Read, ..Principal::local() };
        assert!(passes(&other("anna"), None, None, &ended));
        assert!(!passes(&other("bert"), None, None, &ended) && !passes(&other("anna"), None, None, &nobodys));
        for (sandbox, kinds) in [(Some("../x"), None), (None, Some("nonsense")), (None, Some(""))] {
            assert!(EventFilter::new(admin.clone(), sandbox.map(Into::into), kinds).is_err());
        }
    }
}
