//! Idempotency keys: a repeated request is done once, and gets the first reply again.
//!
//! A POST may carry `Idempotency-Key`. The daemon stores the request before it runs it, and runs it also when the
//! client disconnects; it stores the reply before it sends it. So repeated requests of one owner with one key run
//! once and get one reply, also from the next daemon. Only replies that a repetition would get as well are stored:
//! successes, and errors of the request itself.
//!
//! A daemon that is killed during a request leaves a key without a reply. Children carry the key of their request. So
//! a repeated request for children returns the existing children, or runs if there are none. For all other requests
//! the outcome is unknown, and the reply is an error with that code.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use forkd_api::ErrorBody;
use forkd_store::{Answer, Begun, Database};
use parking_lot::Mutex;
use tracing::Instrument;

use crate::agent::{self, ResponseBudget};
use crate::api::extract::in_time;
use crate::api::response;
use crate::auth::principal::Principal;
use crate::error::{Code, Error, Result};
pub(crate) use crate::sandbox::idempotency::IdempotencyMark;
use crate::util::task::{self, Task, blocking};
use crate::util::time::now_unix;

/// The header with the key.
const KEY: &str = "idempotency-key";
/// The longest key.
const MAX_KEY: usize = 255;
/// How long a reply is stored.
const MAX_AGE_SECS: u64 = 24 * 3600;
/// The most stored replies of each owner.
const MAX_COUNT: u64 = 10_000;
/// The longest body that is stored: enough for 1000 children.
const MAX_BODY: usize = 4 << 20;
/// The most bytes of all stored bodies of each owner.
const MAX_BYTES: u64 = 256 << 20;
/// After this many new bytes the store is pruned at once, before the next regular time.
const LOOK_AFTER: usize = 64 << 20;

/// Whether the handler of a route finds the sandboxes that an earlier daemon made for the request.
fn finds_earlier(path: &str) -> bool {
    let forks = |rest: &str| rest.split_once('/').is_some_and(|(_, action)| action == "fork");
    matches!(path, "/v1/sandboxes" | "/sandboxes" | "/v2/sandboxes")
        || path.strip_prefix("/v1/sandboxes/").is_some_and(forks)
}

/// All stored replies, and the requests that are running.
#[derive(Debug, Clone)]
pub(crate) struct IdempotencyStore {
    database: Arc<Database>,
    running: Arc<Mutex<HashMap<Key, Question>>>,
    /// Bytes stored since the store was last pruned.
    grown: Arc<AtomicUsize>,
    max_request: usize,
}

/// A key and its owner.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Key {
    owner: String,
    key: String,
}

/// A request: a key may repeat only with the same request.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Question {
    method: Method,
    uri: String,
    body: Bytes,
}

/// A running request. Dropping it ends the entry.
struct Running {
    answers: IdempotencyStore,
    key: Key,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.answers.running.lock().remove(&self.key);
    }
}

impl IdempotencyStore {
    pub(crate) fn new(database: Arc<Database>, max_request: usize) -> Self {
        IdempotencyStore { database, running: Arc::default(), grown: Arc::default(), max_request }
    }

    /// Removes old replies.
    pub(crate) async fn prune(&self) -> Result<()> {
        self.grown.store(0, Ordering::Relaxed);
        let database = self.database.clone();
        let since = now_unix().saturating_sub(MAX_AGE_SECS);
        let prune = move || Ok(database.prune_answers(since, MAX_COUNT, MAX_BYTES)?);
        blocking("pruning stored replies", prune).await?;
        Ok(())
    }

    /// Enters a running request; an error if one with that key is running already.
    fn enter(&self, key: &Key, question: &Question) -> Result<Running> {
        let mut running = self.running.lock();
        match running.get(key) {
            None => {}
            Some(other) if other != question => return Err(another_question()),
            Some(_) => {
                let text = "a request with this Idempotency-Key is under way; send it again in a moment";
                return Err(Error::new(Code::IdempotencyInProgress, text));
            }
        }
        running.insert(key.clone(), question.clone());
        Ok(Running { answers: self.clone(), key: key.clone() })
    }

    async fn begin(&self, key: &Key, question: &Question) -> Result<Begun> {
        let (database, key, question) = (self.database.clone(), key.clone(), question.clone());
        blocking("storing a request", move || {
            let Question { method, uri, body } = &question;
            let parts = [method.as_str().as_bytes(), uri.as_bytes(), body];
            let now = now_unix();
            let since = now.saturating_sub(MAX_AGE_SECS);
            Ok(database.begin_answer(&key.owner, &key.key, &parts, now, since)?)
        })
        .await
    }

    /// Stores a reply, or removes the request's entry.
    async fn finish(&self, key: Key, answer: Option<Answer>) -> Result<()> {
        let database = self.database.clone();
        blocking("storing a reply", move || {
            match answer {
                Some(answer) => database.keep_answer(&key.owner, &key.key, &answer)?,
                None => database.forget_answer(&key.owner, &key.key)?,
            }
            Ok(())
        })
        .await
    }
}

/// Middleware: repeats stored replies, and stores new ones.
pub(crate) async fn once(State(answers): State<IdempotencyStore>, request: Request, next: Next) -> Response {
    let has_key = request.method() == Method::POST && request.headers().contains_key(KEY);
    // A reply with a token is not stored: the daemon stores only hashes of tokens.
    let secret = request.uri().path().starts_with("/v1/tokens");
    // Open routes have no principal, and so no owner of the key.
    let owner = request.extensions().get::<Principal>().map(|who| who.owner.clone());
    let Some(owner) = owner.filter(|_| has_key && !secret) else { return next.run(request).await };
    match answer(answers, owner, request, next).await {
        Ok(response) => response,
        Err(error) => error.into_response(),
    }
}

async fn answer(answers: IdempotencyStore, owner: String, request: Request, next: Next) -> Result<Response> {
    let (parts, body) = request.into_parts();
    let key = Key { owner, key: read_key(parts.headers.get_all(KEY).iter())? };
    let body = in_time(to_bytes(body, answers.max_request)).await?.map_err(|_| {
        let text = format!(
            "the body is larger than the limit of {} bytes, or ended early; send a smaller one",
            answers.max_request
        );
        Error::new(Code::BodyTooLarge, text)
    })?;
    // In a task of its own: the request finishes, and its reply is stored, also when the client disconnects.
    let work = answer_once(answers, key, parts, body, next);
    let answered = task::spawn(Task::Answer, work.in_current_span()).await;
    answered.unwrap_or_else(|error| Err(Error::host("running a request with an idempotency key", error)))
}

async fn answer_once(
    answers: IdempotencyStore,
    key: Key,
    mut parts: Parts,
    body: Bytes,
    next: Next,
) -> Result<Response> {
    let question = Question { method: parts.method.clone(), uri: parts.uri.to_string(), body: body.clone() };
    let _running = answers.enter(&key, &question)?;
    let before = match answers.begin(&key, &question).await? {
        Begun::Other => return Err(another_question()),
        Begun::Answered(answer) => return replay(answer),
        Begun::New => false,
        Begun::Unanswered => true,
    };
    if before && !finds_earlier(parts.uri.path()) {
        let text = "the daemon was stopped while a request with this Idempotency-Key was under way, and its \
                    outcome is not known: look for its result (GET /v1/sandboxes, /v1/snapshots, /v1/workspaces), \
                    then send it again with a new key if it was not done";
        return Err(Error::new(Code::IdempotencyOutcomeUnknown, text));
    }
    parts.extensions.insert(IdempotencyMark { mark: format!("{} {}", key.owner, key.key), before });
    let response = next.run(Request::from_parts(parts, Body::from(body))).await;
    keep(&answers, &key, response).await
}

fn another_question() -> Error {
    let text =
        "an earlier request with this Idempotency-Key was a different one; use a new key for each request";
    Error::new(Code::IdempotencyKeyReused, text)
}

/// Reads the only key of a request.
fn read_key<'v>(mut values: impl Iterator<Item = &'v HeaderValue>) -> Result<String> {
    let refused =
        || Error::invalid(format!("give one Idempotency-Key, of 1 to {MAX_KEY} visible characters"));
    let value = values.next().and_then(|value| value.to_str().ok()).ok_or_else(refused)?;
    let visible = (1..=MAX_KEY).contains(&value.len()) && value.bytes().all(|byte| byte.is_ascii_graphic());
    if !visible || values.next().is_some() {
        return Err(refused());
    }
    Ok(value.to_owned())
}

/// Stores a reply before it is sent, if a repeated request would get the same.
async fn keep(answers: &IdempotencyStore, key: &Key, response: Response) -> Result<Response> {
    let status = response.status();
    let json = response.headers().get(header::CONTENT_TYPE).is_none_or(|it| it == "application/json");
    if !json || !is_kept(status) {
        answers.finish(key.clone(), None).await?;
        return Ok(response);
    }
    let (parts, body) = response.into_parts();
    // A reply with guest data still counts against its budget.
    let room = parts.extensions.get::<Arc<ResponseBudget>>().cloned();
    // The whole body is in memory already.
    let body = to_bytes(body, usize::MAX).await.map_err(|error| Error::host("reading a reply", error))?;
    let kept = (body.len() <= MAX_BODY).then(|| body.to_vec());
    let length = kept.as_ref().map_or(0, Vec::len);
    answers.finish(key.clone(), Some(Answer { status: status.as_u16(), body: kept })).await?;
    if answers.grown.fetch_add(length, Ordering::Relaxed) + length > LOOK_AFTER {
        answers.prune().await?;
    }
    let body = match room {
        Some(room) => response::in_pieces(body, room),
        None => Body::from(body),
    };
    Ok(Response::from_parts(parts, body))
}

/// Whether a repeated request would get the same reply.
fn is_kept(status: StatusCode) -> bool {
    let wrong = [
        StatusCode::BAD_REQUEST,
        StatusCode::PAYLOAD_TOO_LARGE,
        StatusCode::UNSUPPORTED_MEDIA_TYPE,
        StatusCode::UNPROCESSABLE_ENTITY,
    ];
    status.is_success() || wrong.contains(&status)
}

fn replay(answer: Answer) -> Result<Response> {
    let status =
        StatusCode::from_u16(answer.status).map_err(|error| Error::host("reading a stored reply", error))?;
    let Some(body) = answer.body else {
        let text = format!(
            "this request was done, with status {status}, and its reply was too large to keep; read its result with GET"
        );
        return Err(Error::new(Code::IdempotencyAnswerLost, text));
    };
    // The reply may contain guest data, so it counts against that budget.
    let mut room = ResponseBudget::default();
    if !room.take(body.len()) {
        return Err(Error::new(Code::DaemonBusy, agent::Error::NoRoom.to_string()));
    }
    let mut response = match body.is_empty() {
        _ if status.is_client_error() => refused_before(status, &body).into_response(),
        true => StatusCode::OK.into_response(),
        false => response::response(body, room),
    };
    *response.status_mut() = status;
    response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    Ok(response)
}

/// The error of a stored reply. Its body gets the id of the current request.
fn refused_before(status: StatusCode, body: &[u8]) -> Error {
    let body = serde_json::from_slice(body);
    // An older daemon stored only a text.
    let body = body.unwrap_or_else(|_| ErrorBody {
        error: "the request was refused before".into(),
        code: String::new(),
        request_id: String::new(),
    });
    let code = Code::named(&body.code).filter(|code| code.status() == status.as_u16());
    Error::new(code.unwrap_or(Code::of_status(status.as_u16())), body.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_was_kept_is_one_again() {
        let kept = |status: u16, body: &str| {
            let error = refused_before(StatusCode::from_u16(status).unwrap(), body.as_bytes());
            (error.code(), error.public().into_owned())
        };
        let body = r#"{"error":"too long","code":"body_too_large"}"#;
        assert_eq!(kept(413, body), (Code::BodyTooLarge, "too long".into()));
        assert_eq!(kept(400, r#"{"error":"bad"}"#), (Code::InvalidRequest, "bad".into()));
        assert_eq!(kept(422, r#"{"error":"x","code":"later_version"}"#).0, Code::IdempotencyKeyReused);
        assert_eq!(kept(400, "not json").0, Code::InvalidRequest);
    }

    #[test]
    fn handlers_that_make_children_find_those_of_an_earlier_daemon() {
        for path in ["/v1/sandboxes", "/v2/sandboxes", "/v1/sandboxes/sb1/fork"] {
            assert!(finds_earlier(path), "{path}");
        }
        for path in ["/v1/sandboxes/sb1/branch", "/v1/sandboxes/fork", "/sandboxes/sb1/fork", "/v1/snapshots"]
        {
            assert!(!finds_earlier(path), "{path}");
        }
    }

    #[test]
    fn a_key_is_one_and_visible() {
        let read = |keys: &[&str]| {
            let values: Vec<_> =
                keys.iter().map(|key| HeaderValue::from_bytes(key.as_bytes()).unwrap()).collect();
            read_key(values.iter())
        };
        assert_eq!(read(&["a-b:c"]).unwrap(), "a-b:c");
        read(&[&"k".repeat(255)]).unwrap();
        for bad in [&[""][..], &["a b"], &["ä"], &["a", "a"], &[&"k".repeat(256)]] {
            assert!(read(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn only_repeatable_answers_are_kept() {
        for (status, kept) in [(200, true), (201, true), (202, true), (204, true), (400, true), (422, true)] {
            assert_eq!(is_kept(StatusCode::from_u16(status).unwrap()), kept, "{status}");
        }
        for status in [401, 403, 404, 409, 429, 500, 502, 503, 504] {
            assert!(!is_kept(StatusCode::from_u16(status).unwrap()), "{status}");
        }
    }
}
