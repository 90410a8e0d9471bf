//! Sandbox requests: the daemon sends them into the guest and passes the response on.
//!
//! `target` finds the sandbox and the port of a request. The agent's port needs the sandbox's
//! access token, the code interpreter's port that or the traffic token, and any other port the traffic token if the
//! sandbox's ports are not public (`access`). A request to a paused sandbox resumes it, if its client wanted that.

use std::sync::Arc;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{self, HeaderMap, HeaderName, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::response::Response;
use forkd_protocol::agent::{CODE_PORT, DEFAULT_USER_HEADER, TOKEN_HEADER};
use forkd_protocol::connect;
use futures_util::StreamExt;
use http_body_util::BodyExt;
use hyper_util::rt::TokioIo;
use subtle::ConstantTimeEq;
use tokio_util::sync::CancellationToken;

use crate::agent;
use crate::auth::principal::{Principal, Scope};
use crate::compat::e2b::access::{
    Guessed, check_token, has_access, is_health, not_running, refuse, remove_tokens, unauthenticated,
    unsigned,
};
use crate::compat::e2b::signature::Signed;
use crate::compat::e2b::target::{Named, TRAFFIC_TOKEN, Target};
use crate::compat::e2b::{E2bContext, ENVD_PORT, Found, go_on, is_held};
use crate::error::{Code, Error};
use crate::sandbox::Sandbox;
use crate::sandbox::e2b::E2bState;
use crate::sandbox::forwards::MAX_FORWARDS;
use crate::telemetry::audit::AuditTarget;
use crate::util::task::{self, Task};

/// The user that a request acts as when it names none.
const USER: &str = "user";
/// Headers about one connection only (RFC 9110, 7.6.1), and secrets that the guest need not see.
const NOT_FORWARDED: [&str; 9] = [
    "connection",
    "keep-alive",
    "proxy-connection",
    "transfer-encoding",
    "upgrade",
    "te",
    "x-api-key",
    TRAFFIC_TOKEN,
    TOKEN_HEADER,
];

/// Marks a response of this module: its body is complete, also if its status is an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Answered;

impl E2bContext {
    /// Answers a sandbox request. The second value is whether it had a wrong token.
    pub(crate) async fn forward(&self, target: Target, request: Request) -> (Response, bool) {
        let mut response = self.attempt(&target, request).await.unwrap_or_else(|refused| refused);
        response.extensions_mut().insert(Answered);
        let guessed = response.extensions().get::<Guessed>().is_some();
        (response, guessed)
    }

    #[allow(clippy::result_large_err)]
    async fn attempt(&self, target: &Target, mut request: Request) -> Result<Response, Response> {
        let signed = match &target.sandbox {
            Named::Signature(signed) => Some(signed.clone()),
            Named::Token(_) => None,
            Named::Id(_) => {
                Signed::of(request.uri().query().unwrap_or_default(), request.method() == Method::POST)
                    .filter(|_| request.uri().path() == "/files")
            }
        };
        let found = match &target.sandbox {
            Named::Id(id) => self.find(id).map_err(|_| not_running(id))?,
            Named::Token(token) => {
                let is_its = |state: &E2bState| state.access_token.as_bytes().ct_eq(token.as_bytes()).into();
                // Clients ask so whether their sandbox runs.
                self.with_state(is_its).ok_or_else(|| match is_health(target.port, &request) {
                    true => not_running(""),
                    false => unauthenticated(
                        request.uri().path(),
                        "",
                        "the access token is of no sandbox that runs here",
                    ),
                })?
            }
            Named::Signature(signed) => {
                let is_by = signed.by_token();
                let signer = self.with_state(|state| is_by(&state.access_token));
                signer.ok_or_else(|| unsigned("", "the signature is of no sandbox that runs here"))?
            }
        };
        let (id, owner, state) = match &found {
            Found::Running(sandbox, state) => (sandbox.id.clone(), sandbox.spec.owner.clone(), state),
            Found::Paused(record, state) => (record.name.clone(), record.owner.clone(), state),
        };
        check_token(target.port, &request, signed.as_ref(), &id, state)?;
        if let Some(signed) = &signed
            && !has_access(request.headers(), state)
            && let Ok(uri) = format!("/files?{}", signed.query()).parse()
        {
            *request.uri_mut() = uri;
        }
        // Any client that knows the id may ask for a sandbox's health. That alone must not start it.
        let wakes = !is_health(target.port, &request) || has_access(request.headers(), state);
        remove_tokens(request.headers_mut(), &self.tokens);
        let who = Principal { name: format!("e2b:{id}"), owner, scope: Scope::Write, ..Principal::local() };
        let forwarded = async {
            let sandbox = self.awake(found, wakes).await?;
            forward_to(&sandbox, target.port, request, &self.stopping).await
        };
        let answered = forwarded.await;
        let note = |response: &mut Response| {
            // For the audit log; the client does not see extensions.
            response.extensions_mut().insert(who.clone());
            response.extensions_mut().insert(AuditTarget(id.clone()));
        };
        answered
            .map(|mut response| {
                note(&mut response);
                response
            })
            .map_err(|mut response| {
                note(&mut response);
                response
            })
    }

    /// The sandbox whose state fits.
    fn with_state(&self, fits: impl Fn(&E2bState) -> bool) -> Option<Found> {
        let running = self.registry.list().into_iter().find(|sandbox| {
            sandbox.read_runtime(|runtime| runtime.saved.e2b.as_ref().is_some_and(|state| fits(state)))
        });
        if let Some(sandbox) = running {
            return self.find(&sandbox.id).ok();
        }
        self.workspaces.find_paused(fits).map(|(record, state)| Found::Paused(Box::new(record), state))
    }

    /// The sandbox of a request, resumed if it is paused, its client wanted that, and the request is one that `wakes`.
    #[allow(clippy::result_large_err)]
    async fn awake(&self, found: Found, wakes: bool) -> Result<Arc<Sandbox>, Response> {
        let sandbox = match found {
            // It is being paused: then a request resumes it, if its client wanted that.
            Found::Running(sandbox, state)
                if state.auto_resume && wakes && sandbox.check_not_suspending().is_err() =>
            {
                let id = sandbox.id.clone();
                self.wake(&id, None, &self.owner(&sandbox.spec.owner))
                    .await
                    .map_err(|error| unavailable(&id, &error))?
                    .1
            }
            Found::Running(sandbox, state) if is_held(&sandbox) => {
                if !wakes || !(state.auto_resume || sandbox.is_auto_paused()) {
                    return Err(not_running(&sandbox.id));
                }
                go_on(&sandbox).await.map_err(|error| unavailable(&sandbox.id, &error))?;
                sandbox
            }
            Found::Running(sandbox, _) => sandbox,
            Found::Paused(record, state) if !(state.auto_resume && wakes) => {
                return Err(not_running(&record.name));
            }
            Found::Paused(record, _) => {
                let woken = self.wake(&record.name, None, &self.owner(&record.owner)).await;
                woken
                    .map_err(|error| {
                        tracing::warn!(sandbox = record.name, %error, "paused sandbox not resumed by a request");
                        unavailable(&record.name, &error)
                    })?
                    .1
            }
        };
        if let Err(error) = sandbox.started().await {
            tracing::debug!(sandbox = sandbox.id, %error, "request to a sandbox that did not start");
            return Err(not_running(&sandbox.id));
        }
        sandbox.ready().await.map_err(|error| unavailable(&sandbox.id, &error))?;
        Ok(sandbox)
    }
}

/// The response for a sandbox that cannot be used now.
fn unavailable(id: &str, error: &Error) -> Response {
    match error.code() {
        Code::SandboxEnded
        | Code::SandboxLost
        | Code::SandboxReplaced
        | Code::SandboxPaused
        | Code::SandboxSuspending => not_running(id),
        Code::QuotaExceeded | Code::LimitReached | Code::DaemonBusy => {
            refuse(StatusCode::SERVICE_UNAVAILABLE, id, error.public())
        }
        _ => refuse(StatusCode::BAD_GATEWAY, id, error.public()),
    }
}

/// Whether E2B's agent has the path. The guest's agent has more: calls that only the daemon may send.
pub(super) fn is_envd(path: &str) -> bool {
    matches!(path, "/health" | "/files")
        || path.starts_with("/process.Process/")
        || path.starts_with("/filesystem.Filesystem/")
}

/// Sends a request into the guest. A stream of the agent, which may never end, ends when the daemon stops; its process
/// goes on.
#[allow(clippy::result_large_err)]
async fn forward_to(
    sandbox: &Arc<Sandbox>,
    port: u16,
    mut request: Request,
    stopping: &CancellationToken,
) -> Result<Response, Response> {
    let is_agent = port == ENVD_PORT;
    let is_stream = is_agent
        && request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| kind == connect::STREAM_TYPE);
    if is_agent && !is_envd(request.uri().path()) {
        let text = format!("E2B's agent has no {}", request.uri().path());
        return Err(refuse(StatusCode::NOT_FOUND, &sandbox.id, text));
    }
    let Some(place) = sandbox.forwards.enter(matches!(port, ENVD_PORT | CODE_PORT)) else {
        let text =
            format!("{MAX_FORWARDS} requests to the sandbox are under way; try again when some are done");
        return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &sandbox.id, text));
    };
    let in_use = (sandbox.in_use(), place);
    let upgrade = request.headers().get(header::UPGRADE).cloned();
    let client = upgrade.as_ref().map(|_| hyper::upgrade::on(&mut request));
    let (mut parts, body) = request.into_parts();
    parts.extensions.clear();
    strip(&mut parts.headers);
    let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
    parts.uri = path.parse().unwrap_or_default();
    parts.version = axum::http::Version::HTTP_11;
    if let Some(upgrade) = upgrade {
        parts.headers.insert(header::UPGRADE, upgrade);
        parts.headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    if is_agent {
        parts.headers.insert(header::HOST, HeaderValue::from_static("agent"));
        parts.headers.insert(DEFAULT_USER_HEADER, HeaderValue::from_static(USER));
    }
    let request = axum::http::Request::from_parts(parts, body.map_err(std::io::Error::other).boxed_unsync());
    let sent = async {
        match is_agent {
            true => sandbox.agent.forward(request).await,
            false => sandbox.agent.forward_to_port(port, request).await,
        }
    };
    let sent = tokio::select! {
        sent = sent => sent,
        error = sandbox.trouble() => return Err(unavailable(&sandbox.id, &error)),
        () = stopping.cancelled(), if is_stream => {
            let text = "the daemon is stopping; try again when it runs";
            return Err(refuse(StatusCode::SERVICE_UNAVAILABLE, &sandbox.id, text));
        }
    };
    let mut response = match sent {
        Ok(response) => response,
        Err(error) => return Err(closed(sandbox, port, &error).await),
    };
    // A pause may have stored the sandbox before this request, whose effects are lost then: the client must not get a
    // response as if they were kept.
    sandbox.check_not_suspending().map_err(|error| unavailable(&sandbox.id, &error))?;
    let switches = response.status() == StatusCode::SWITCHING_PROTOCOLS;
    if let (true, Some(client)) = (switches, client) {
        let guest = hyper::upgrade::on(&mut response);
        let sandbox = sandbox.clone();
        let (parts, connection) = response.into_parts();
        task::spawn(Task::Connection, async move {
            let _held = (in_use, connection);
            let (Ok(client), Ok(guest)) = (client.await, guest.await) else { return };
            let (mut client, mut guest) = (TokioIo::new(client), TokioIo::new(guest));
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut guest) => {}
                _ = sandbox.trouble() => {}
            }
        });
        return Ok(Response::from_parts(parts, Body::empty()));
    }
    if switches {
        // It would end HTTP on the client's connection, which another client may use next.
        let text =
            format!("port {port} of the sandbox switched protocols, which the request does not ask for");
        return Err(refuse(StatusCode::BAD_GATEWAY, &sandbox.id, text));
    }
    let (mut parts, body) = response.into_parts();
    strip(&mut parts.headers);
    // The use ends with the body.
    let body = body.map_frame(move |frame| {
        let _ = &in_use;
        frame
    });
    let body = match is_stream {
        true => Body::from_stream(body.into_data_stream().take_until(stopping.clone().cancelled_owned())),
        false => Body::new(body),
    };
    Ok(Response::from_parts(parts, body))
}

/// The response for a connection that the guest did not accept, or that broke before its response.
async fn closed(sandbox: &Arc<Sandbox>, port: u16, error: &agent::Error) -> Response {
    if let agent::Error::Refused(refused) = error
        && refused.code == connect::Code::ResourceExhausted
    {
        return refuse(StatusCode::SERVICE_UNAVAILABLE, &sandbox.id, refused.message.clone());
    }
    // A connection often breaks before the daemon knows why the sandbox ends. An answer of the agent is no break.
    let answered = matches!(error, agent::Error::Refused(_));
    let wait = std::time::Duration::from_secs(if answered { 0 } else { 1 });
    if let Ok(trouble) = tokio::time::timeout(wait, sandbox.trouble()).await {
        return unavailable(&sandbox.id, &trouble);
    }
    tracing::debug!(sandbox = sandbox.id, port, %error, "request not forwarded");
    let text = format!("The sandbox is running but port is not open (port {port})");
    refuse(StatusCode::BAD_GATEWAY, &sandbox.id, text)
}

fn strip(headers: &mut HeaderMap) {
    // Chunks have lengths of their own: a length beside them is wrong, or meant to mislead the next reader.
    if headers.contains_key(header::TRANSFER_ENCODING) {
        headers.remove(header::CONTENT_LENGTH);
    }
    // `Connection` names further headers of this connection only.
    let named: Vec<HeaderName> = headers
        .get_all(header::CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    for name in NOT_FORWARDED {
        headers.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_of_one_connection_and_tokens_stay_here() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("connection", "close, x-mine"),
            ("x-mine", "1"),
            ("x-access-token", "secret"),
            ("e2b-traffic-access-token", "secret"),
            ("x-api-key", "secret"),
            ("transfer-encoding", "chunked"),
            ("content-length", "5"),
            ("authorization", "Basic cm9vdDo="),
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        strip(&mut headers);
        assert_eq!(headers.keys().map(HeaderName::as_str).collect::<Vec<_>>(), ["authorization"]);
    }
}
