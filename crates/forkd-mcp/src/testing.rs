//! A fake API for unit tests: it keeps names of sandboxes and snapshots, and remembers requests.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use parking_lot::Mutex;
use serde_json::{Value, json};

use crate::api::{Api, ApiBody, ApiReply, ApiRequest, Window};
use crate::session::Session;
use crate::tools::Caller;

/// A fake daemon.
#[derive(Debug, Default)]
pub(crate) struct FakeApi {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    number: usize,
    sandboxes: BTreeSet<String>,
    snapshots: BTreeSet<String>,
    /// Snapshots that could not be created, with the number of the request.
    failed: BTreeMap<String, usize>,
    files: BTreeMap<String, Vec<u8>>,
    answers: BTreeMap<String, Value>,
    requests: Vec<(String, Value)>,
    by_key: BTreeMap<String, (u16, Value)>,
    breaks: usize,
    /// How many repetitions of a request find it still in progress.
    in_progress: usize,
    delay: Duration,
}

impl FakeApi {
    pub(crate) fn new() -> Arc<Self> {
        Arc::default()
    }

    /// A caller with a session of its own.
    pub(crate) fn caller(self: &Arc<Self>, output_limit: usize) -> Caller {
        Caller { api: self.clone(), session: Session::new(self.clone()), output_limit }
    }

    /// The reply to requests of this method and path.
    pub(crate) fn answer(&self, request: &str, reply: Value) {
        self.state.lock().answers.insert(request.into(), reply);
    }

    pub(crate) fn put_file(&self, path: &str, bytes: &[u8]) {
        self.state.lock().files.insert(path.into(), bytes.into());
    }

    pub(crate) fn file(&self, path: &str) -> Option<Vec<u8>> {
        self.state.lock().files.get(path).cloned()
    }

    /// The next replies get lost.
    pub(crate) fn lose_replies(&self, n: usize) {
        self.state.lock().breaks = n;
    }

    /// The next repetitions of a request find it still in progress.
    pub(crate) fn stay_in_progress(&self, n: usize) {
        self.state.lock().in_progress = n;
    }

    /// Requests that make something take this long.
    pub(crate) fn delay(&self, delay: Duration) {
        self.state.lock().delay = delay;
    }

    pub(crate) fn sandboxes(&self) -> Vec<String> {
        self.state.lock().sandboxes.iter().cloned().collect()
    }

    pub(crate) fn snapshots(&self) -> Vec<String> {
        self.state.lock().snapshots.iter().cloned().collect()
    }

    /// Tags of snapshots that could not be created.
    pub(crate) fn failed(&self) -> Vec<String> {
        self.state.lock().failed.keys().cloned().collect()
    }

    /// The bodies of requests of this method and path.
    pub(crate) fn bodies(&self, request: &str) -> Vec<Value> {
        let state = self.state.lock();
        let of = state.requests.iter().filter(|(line, _)| line == request);
        of.map(|(_, body)| body.clone()).collect()
    }

    /// All requests, as method and path.
    pub(crate) fn lines(&self) -> Vec<String> {
        self.state.lock().requests.iter().map(|(line, _)| line.clone()).collect()
    }
}

impl Api for FakeApi {
    fn call(&self, request: ApiRequest) -> BoxFuture<'_, Result<ApiReply, String>> {
        async move {
            let makes = request.idempotency_key.is_some();
            let delay = self.state.lock().delay;
            if makes && !delay.is_zero() {
                tokio::time::sleep(delay).await;
            }
            let mut state = self.state.lock();
            let reply = state.reply(&request);
            if state.breaks > 0 {
                state.breaks -= 1;
                return Err("the connection broke; start a daemon: forkd serve".into());
            }
            Ok(reply)
        }
        .boxed()
    }
}

impl State {
    fn reply(&mut self, request: &ApiRequest) -> ApiReply {
        let line = format!("{} {}", request.method, request.path);
        let body = match &request.body {
            ApiBody::Json(body) => body.clone(),
            ApiBody::Bytes(bytes) => json!(String::from_utf8_lossy(bytes)),
            ApiBody::Empty => Value::Null,
        };
        self.requests.push((line.clone(), body.clone()));
        if let Some((status, reply)) = request.idempotency_key.as_ref().and_then(|key| self.by_key.get(key)) {
            if self.in_progress > 0 {
                self.in_progress -= 1;
                let error =
                    json!({ "error": "under way", "code": "idempotency_in_progress", "request_id": "r-4" });
                return windowed(request, 409, error.to_string().as_bytes());
            }
            return windowed(request, *status, reply.to_string().as_bytes());
        }
        if request.path.contains("/files?") {
            return self.file_reply(request);
        }
        let (status, reply) = match self.answers.get(&line) {
            Some(reply) => (200, reply.clone()),
            None => self.made_up(&line, &body),
        };
        if let Some(key) = &request.idempotency_key {
            self.by_key.insert(key.clone(), (status, reply.clone()));
        }
        windowed(request, status, reply.to_string().as_bytes())
    }

    fn file_reply(&mut self, request: &ApiRequest) -> ApiReply {
        let path = request.path.split_once("path=").unwrap().1;
        let path = crate::api::decoded(path.split('&').next().unwrap()).unwrap();
        if let ApiBody::Bytes(bytes) = &request.body {
            self.files.insert(path.clone(), bytes.to_vec());
            let written = json!({ "path": path, "size": bytes.len(), "atomic": true });
            return windowed(request, 200, written.to_string().as_bytes());
        }
        match self.files.get(&path) {
            Some(bytes) => windowed(request, 200, bytes),
            None => {
                let error =
                    json!({ "error": "no such file", "code": "guest_not_found", "request_id": "r-2" });
                windowed(request, 404, error.to_string().as_bytes())
            }
        }
    }

    fn made_up(&mut self, line: &str, body: &Value) -> (u16, Value) {
        let (method, path) = line.split_once(' ').unwrap();
        let path = path.split('?').next().unwrap();
        let last = path.rsplit('/').next().unwrap().to_owned();
        let missing =
            |code: &str| (404, json!({ "error": "there is none", "code": code, "request_id": "r-1" }));
        let info = |id: &String| json!({ "id": id, "state": "running" });
        match (method, path) {
            ("GET", "/v1/sandboxes") => (200, self.sandboxes.iter().map(info).collect()),
            ("GET", "/v1/snapshots") => {
                (200, self.snapshots.iter().map(|tag| json!({ "tag": tag })).collect())
            }
            ("GET", "/v1/tree") => (200, json!({ "nodes": [] })),
            ("POST", "/v1/snapshots") => {
                let tag = body["tag"].as_str().unwrap_or("t").to_owned();
                if self.snapshots.contains(&tag) {
                    let error = json!({ "error": "it exists", "code": "tag_taken", "request_id": "r-3" });
                    return (409, error);
                }
                if body["image"] == "no-such" {
                    self.number += 1;
                    self.failed.insert(tag, self.number);
                    return missing("image_not_found");
                }
                self.failed.remove(&tag);
                self.snapshots.insert(tag.clone());
                (201, json!({ "tag": tag, "status": "ready" }))
            }
            ("POST", _) if path == "/v1/sandboxes" || last == "fork" => {
                let n = body["n"].as_u64().unwrap_or(1);
                let new: Vec<Value> = (0..n)
                    .map(|_| {
                        self.number += 1;
                        let id = format!("sb{}", self.number);
                        self.sandboxes.insert(id.clone());
                        info(&id)
                    })
                    .collect();
                (201, json!({ "children": new, "errors": [] }))
            }
            ("POST", _) if last == "branch" => {
                self.number += 1;
                let tag =
                    body["tag"].as_str().map_or_else(|| format!("branch-{}", self.number), str::to_owned);
                self.snapshots.insert(tag.clone());
                (201, json!({ "tag": tag, "status": "ready" }))
            }
            ("GET" | "PATCH", _) if path.starts_with("/v1/sandboxes/") => {
                match self.sandboxes.contains(&last) {
                    true => (200, info(&last)),
                    false => missing("sandbox_not_found"),
                }
            }
            ("GET", _) if path.starts_with("/v1/snapshots/") && self.failed.contains_key(&last) => {
                let begun = self.failed[&last];
                let code = "image_not_found";
                let failed = json!({ "status": "failed", "error_code": code, "created_at_unix": begun });
                (200, failed)
            }
            ("GET", _) if path.starts_with("/v1/snapshots/") => match self.snapshots.contains(&last) {
                true => (200, json!({ "tag": last })),
                false => missing("snapshot_not_found"),
            },
            ("DELETE", _) if path.starts_with("/v1/sandboxes/") => match self.sandboxes.remove(&last) {
                true => (204, Value::Null),
                false => missing("sandbox_not_found"),
            },
            ("DELETE", _) if path.starts_with("/v1/snapshots/") => {
                match self.snapshots.remove(&last) || self.failed.remove(&last).is_some() {
                    true => (204, Value::Null),
                    false => missing("snapshot_not_found"),
                }
            }
            _ => missing("route_not_found"),
        }
    }
}

fn windowed(request: &ApiRequest, status: u16, body: &[u8]) -> ApiReply {
    let mut window = Window::new(request, status);
    window.push(body);
    window.reply(status, Some(body.len() as u64))
}
