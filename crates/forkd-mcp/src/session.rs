//! A session: what one client made, and the end of it.
//!
//! When a session ends, the sandboxes and branches that it made end, unless the client keeps them. A request that makes
//! something runs in a task of its own: when the client gives up in the middle, the session still learns the name.
//! What a killed server leaves behind ends by itself: sandboxes that are not kept have an idle timeout.

use std::mem::take;
use std::sync::Arc;
use std::time::Duration;

use forkd_api::Code;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;

use crate::api::{Api, ApiBody, ApiReply, ApiRequest, UNREACHABLE, ask, encoded};
use crate::tool_error::ToolError;

/// The idle timeout of sandboxes that are not kept, in seconds. It matters only if the server ends without ending its
/// sessions.
pub(crate) const IDLE_TIMEOUT_SECS: u64 = 24 * 3600;
/// How long the end of a session waits for requests that make something. What they make then ends at once.
const END_WAIT: Duration = Duration::from_secs(60);
/// The pauses before a request is sent again that got no reply. A daemon that starts anew is back after some of them.
const RETRY_PAUSES: [Duration; 4] =
    [Duration::ZERO, Duration::from_millis(250), Duration::from_secs(1), Duration::from_secs(3)];
/// The pause before a request is sent again that the daemon still works on.
const IN_PROGRESS_PAUSE: Duration = Duration::from_millis(250);
/// How many objects end at the same time.
const AT_ONCE: usize = 8;

/// What a request makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Makes {
    Sandboxes,
    Snapshot,
}

/// What one client made.
pub(crate) struct Session {
    /// Ends what the session made. All else uses the API of the request, with the rights that the client has then.
    api: Arc<dyn Api>,
    made: Mutex<Made>,
    work: TaskTracker,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.made.lock().fmt(formatter)
    }
}

/// Names, oldest first.
#[derive(Debug, Default)]
struct Made {
    sandboxes: Vec<String>,
    snapshots: Vec<String>,
    failed: Vec<FailedSnapshot>,
    has_ended: bool,
}

/// A snapshot that the daemon could not create. It stays in the list until a client removes it, and has no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FailedSnapshot {
    tag: String,
    code: String,
    begun_at_unix: u64,
}

impl FailedSnapshot {
    /// The failed snapshot with this tag.
    async fn find(api: &dyn Api, tag: &str) -> Option<Self> {
        let found = ask(api, ApiRequest::get(format!("/v1/snapshots/{}", encoded(tag)))).await;
        let info: Value = found.ok()?.json().ok()?;
        // A branch can fail and still have its memory. A damaged snapshot on disk has no time.
        let is_create = info["status"] == "failed" && info["branched_from"].is_null();
        let begun_at_unix = info["created_at_unix"].as_u64().filter(|at| is_create && *at > 0)?;
        Some(FailedSnapshot { tag: tag.into(), code: info["error_code"].as_str()?.into(), begun_at_unix })
    }
}

/// What the end of a session did.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    /// Sandboxes that it ended.
    pub sandboxes: usize,
    /// Branches and snapshots that it removed.
    pub snapshots: usize,
    /// Objects that it could not end. Sandboxes among them end by their idle timeout.
    pub failed: usize,
}

impl Session {
    pub(crate) fn new(api: Arc<dyn Api>) -> Arc<Self> {
        Arc::new(Session { api, made: Mutex::default(), work: TaskTracker::new() })
    }

    /// Sends a request that makes something to the client's API. Unless it is kept, the end of the session ends it.
    pub(crate) async fn make(
        self: &Arc<Self>,
        api: Arc<dyn Api>,
        mut request: ApiRequest,
        makes: Makes,
        keep: bool,
    ) -> Result<Value, ToolError> {
        if self.made.lock().has_ended {
            return Err(ToolError::new("session_ended", "this session has ended; open a new one"));
        }
        if makes == Makes::Sandboxes
            && !keep
            && let ApiBody::Json(Value::Object(fields)) = &mut request.body
        {
            fields.insert("idle_timeout_secs".into(), json!(IDLE_TIMEOUT_SECS));
        }
        let new_tag = if keep { None } else { created_tag(&request) };
        request.idempotency_key = Some(unique());
        let session = self.clone();
        let work = async move {
            let reply = ask_to_the_end(&*api, request).await;
            if let (Err(error), Some(tag)) = (&reply, &new_tag) {
                session.add_failed(&*api, tag, error).await;
            }
            let value: Value = reply?.json()?;
            if !keep {
                session.add(makes, &value).await;
            }
            Ok(value)
        };
        let task = if keep { tokio::spawn(work) } else { self.work.spawn(work) };
        let failed = |_| ToolError::new("internal", "the server failed; this is a bug of forkd");
        task.await.map_err(failed)?
    }

    async fn add(&self, makes: Makes, reply: &Value) {
        let late = {
            let mut made = self.made.lock();
            let all = match makes {
                Makes::Sandboxes => &mut made.sandboxes,
                Makes::Snapshot => &mut made.snapshots,
            };
            all.extend(names(makes, reply));
            made.has_ended
        };
        // The session ended in the meantime.
        if late {
            self.end_made().await;
        }
    }

    /// Adds the snapshot of a request that failed with `error`, if the daemon has it in its list.
    async fn add_failed(&self, api: &dyn Api, tag: &str, error: &ToolError) {
        // With another error the snapshot is an older one with this tag, which the request did not change.
        let failed = FailedSnapshot::find(api, tag).await.filter(|failed| failed.code == error.code);
        let Some(failed) = failed else { return };
        let late = {
            let mut made = self.made.lock();
            if !made.failed.contains(&failed) {
                made.failed.push(failed);
            }
            made.has_ended
        };
        if late {
            self.end_made().await;
        }
    }

    /// The client ended or removed this itself.
    pub(crate) fn forget(&self, name: &str) {
        let mut made = self.made.lock();
        made.sandboxes.retain(|id| id != name);
        made.snapshots.retain(|tag| tag != name);
    }

    /// Keeps a sandbox beyond the end of the session; returns whether the session made it.
    pub(crate) async fn keep_sandbox(&self, api: &dyn Api, id: &str) -> Result<bool, ToolError> {
        let body = json!({ "idle_timeout_secs": null });
        let patch = ApiRequest {
            body: ApiBody::Json(body),
            ..ApiRequest::new(http::Method::PATCH, format!("/v1/sandboxes/{}", encoded(id)))
        };
        let is_ours = self.made.lock().sandboxes.iter().any(|ours| ours == id);
        if is_ours {
            ask(api, patch).await?;
            self.forget(id);
        }
        Ok(is_ours)
    }

    /// Keeps a snapshot beyond the end of the session; returns whether the session made it.
    pub(crate) fn keep_snapshot(&self, tag: &str) -> bool {
        let mut made = self.made.lock();
        let before = made.snapshots.len() + made.failed.len();
        made.snapshots.retain(|ours| ours != tag);
        made.failed.retain(|ours| ours.tag != tag);
        made.snapshots.len() + made.failed.len() < before
    }

    /// Ends everything that the session made and the client did not keep.
    pub(crate) async fn end(&self) -> Ended {
        self.made.lock().has_ended = true;
        self.work.close();
        // At once: a client that closes a pipe kills the server soon.
        let ended = self.end_made().await;
        if tokio::time::timeout(END_WAIT, self.work.wait()).await.is_err() {
            tracing::warn!("a request of an MCP session that ended is still under way");
        }
        ended
    }

    fn end_made(&self) -> BoxFuture<'_, Ended> {
        async move {
            let (sandboxes, mut snapshots, failed) = {
                let mut made = self.made.lock();
                let made = &mut *made;
                (take(&mut made.sandboxes), take(&mut made.snapshots), take(&mut made.failed))
            };
            let mut ended = Ended::default();
            let ends: Vec<BoxFuture<'_, bool>> = sandboxes
                .iter()
                .map(|id| self.remove(format!("/v1/sandboxes/{}", encoded(id))).boxed())
                .collect();
            let ends = stream::iter(ends).buffer_unordered(AT_ONCE);
            for removed in ends.collect::<Vec<_>>().await {
                *if removed { &mut ended.sandboxes } else { &mut ended.failed } += 1;
            }
            for failed in failed {
                // Another request may have made a snapshot with this tag since.
                if FailedSnapshot::find(&*self.api, &failed.tag).await.as_ref() == Some(&failed) {
                    snapshots.push(failed.tag);
                }
            }
            // The youngest first: it may be stored as a difference to an older one. A kept branch that needs layers of one
            // that is removed keeps them.
            for tag in snapshots.into_iter().rev() {
                let removed = self.remove(format!("/v1/snapshots/{}?force=true", encoded(&tag))).await;
                *if removed { &mut ended.snapshots } else { &mut ended.failed } += 1;
            }
            ended
        }
        .boxed()
    }

    async fn remove(&self, path: String) -> bool {
        match ask_to_the_end(&*self.api, ApiRequest::delete(path.as_str())).await {
            Ok(_) => true,
            Err(error) if error.is_not_found() => true,
            Err(error) => {
                tracing::warn!(path, error = error.text(), "an MCP session could not end what it made");
                false
            }
        }
    }
}

/// Sends a request that may be repeated, until the daemon replies with its outcome. A lost reply does not say whether
/// the daemon does the request; the key, or a second removal, gets the outcome of the first.
async fn ask_to_the_end(api: &dyn Api, request: ApiRequest) -> Result<ApiReply, ToolError> {
    let end = Instant::now() + request.patience;
    let mut pauses = RETRY_PAUSES.iter();
    loop {
        let reply = ask(api, request.clone()).await;
        let code = reply.as_ref().err().map(|error| error.code.clone());
        let pause = match code.as_deref() {
            Some(UNREACHABLE) => pauses.next().copied(),
            Some(code) if code == Code::IdempotencyInProgress.name() => {
                Some(IN_PROGRESS_PAUSE).filter(|pause| Instant::now() + *pause < end)
            }
            _ => None,
        };
        let Some(pause) = pause else { return reply };
        tokio::time::sleep(pause).await;
    }
}

/// The names in a reply to a request that makes something.
fn names(makes: Makes, reply: &Value) -> Vec<String> {
    let name = |object: &Value, field| object.get(field).and_then(Value::as_str).map(str::to_owned);
    match makes {
        Makes::Sandboxes => {
            let children = reply.get("children").unwrap_or(reply).as_array();
            children.into_iter().flatten().filter_map(|child| name(child, "id")).collect()
        }
        Makes::Snapshot => name(reply, "tag").into_iter().collect(),
    }
}

/// The tag in a request that creates a snapshot.
fn created_tag(request: &ApiRequest) -> Option<String> {
    match &request.body {
        ApiBody::Json(body) if request.path == "/v1/snapshots" => Some(body.get("tag")?.as_str()?.to_owned()),
        _ => None,
    }
}

/// A key that no other request has.
fn unique() -> String {
    use std::hash::{BuildHasher, Hasher, RandomState};
    use std::sync::atomic::{AtomicU64, Ordering};

    static NUMBER: AtomicU64 = AtomicU64::new(0);
    static PROCESS: std::sync::LazyLock<(RandomState, RandomState)> =
        std::sync::LazyLock::new(Default::default);

    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let hash = |state: &RandomState| {
        let mut hasher = state.build_hasher();
        hasher.write_u64(number);
        hasher.finish()
    };
    format!("mcp-{:016x}{:016x}", hash(&PROCESS.0), hash(&PROCESS.1))
}

#[cfg(test)]
mod tests;
