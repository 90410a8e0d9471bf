//! The Model Context Protocol over HTTP: `/mcp`.
//!
//! `forkd-mcp` has the protocol, the tools and the sessions. This module is its way into the daemon: each call of a tool
//! becomes requests of the REST API, with the principal of the MCP request. They pass the same checks, and they are in
//! the audit log. docs/MCP.md is for users.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, HOST, USER_AGENT};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use forkd_mcp::{Api, ApiBody, ApiReply, ApiRequest, HttpServer, Window};
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use http_body_util::BodyExt;
use tower::ServiceExt;

use crate::auth::peer::Peer;
use crate::auth::principal::Principal;
use crate::error::{Code, Error};

/// Marks a response whose body is a message of the protocol, also if the status is an error.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ProtocolBody;

/// The endpoint's state.
#[derive(Debug, Clone)]
struct Endpoint {
    server: HttpServer,
    /// The REST API behind authentication.
    api: Router,
}

/// The route `/mcp`. Its tools send their requests to `api`.
pub(crate) fn routes(server: HttpServer, api: Router) -> Router {
    let methods = get(serve).post(serve).delete(serve);
    Router::new().route("/mcp", methods).with_state(Endpoint { server, api })
}

async fn serve(State(endpoint): State<Endpoint>, request: Request) -> Response {
    let extensions = request.extensions();
    let Some(who) = extensions.get::<Principal>().cloned() else {
        return Error::new(Code::Unauthorized, "the request has no principal; send a token").into_response();
    };
    let client = client(&who);
    let api = Arc::new(InProcess { api: endpoint.api, who, peer: extensions.get().copied() });
    let (mut parts, body) = endpoint.server.handle(request, &client, api).await.into_parts();
    let kind = parts.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    // The protocol's library refuses a request that is none with a line of text.
    if !kind.starts_with("text/plain") && !kind.is_empty() {
        parts.extensions.insert(ProtocolBody);
    }
    Response::from_parts(parts, Body::new(body))
}

/// The client whose sessions the principal may use.
fn client(who: &Principal) -> String {
    let Principal { name, owner, scope, proof, .. } = who;
    match proof {
        // A token that is made after one of its name was removed may have another owner or scope.
        Some(_) => format!("token {name} of {owner} with scope {}", scope.name()),
        // A token may have any name: it must not be taken for the unix socket.
        None => format!("local {name}"),
    }
}

/// The REST API of this process, with the rights of one principal.
struct InProcess {
    api: Router,
    who: Principal,
    peer: Option<Peer>,
}

impl Api for InProcess {
    fn call(&self, request: ApiRequest) -> BoxFuture<'_, Result<ApiReply, String>> {
        self.send(request).boxed()
    }
}

impl InProcess {
    async fn send(&self, request: ApiRequest) -> Result<ApiReply, String> {
        let mut http = Request::builder().method(request.method.clone()).uri(request.path.as_str());
        http = http.header(HOST, "localhost").header(USER_AGENT, "forkd-mcp");
        if let Some(key) = &request.idempotency_key {
            http = http.header("idempotency-key", key);
        }
        let body = match &request.body {
            ApiBody::Empty => Body::empty(),
            ApiBody::Json(json) => {
                http = http.header(CONTENT_TYPE, "application/json");
                Body::from(json.to_string())
            }
            ApiBody::Bytes(bytes) => {
                http = http.header(CONTENT_TYPE, "application/octet-stream");
                Body::from(bytes.clone())
            }
        };
        let mut http = http.body(body).map_err(|_| "an argument has characters that a path cannot hold")?;
        http.extensions_mut().insert(self.who.clone());
        if let Some(peer) = self.peer {
            http.extensions_mut().insert(peer);
        }
        let Ok(response) = self.api.clone().oneshot(http).await;
        let status = response.status().as_u16();
        let length =
            response.headers().get(CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
        let mut window = Window::new(&request, status);
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|_| "the reply broke off; the sandbox may have ended")?;
            if let Ok(piece) = frame.into_data()
                && !window.push(&piece)
            {
                break;
            }
        }
        Ok(window.reply(status, length))
    }
}
