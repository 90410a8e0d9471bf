//! The OpenAPI document. The routes' macros describe most of it; this module adds what all routes have in common, and
//! what macros cannot know: scopes, error codes, and the frames of WebSockets.

use axum::http::Method;
use forkd_api::Code;
use forkd_api::stream::{Channel, MAX_CHUNK, MAX_TEXT, STDIN_WINDOW};
use serde_json::{Value, json};
use utoipa::openapi::extensions::{Extensions, ExtensionsBuilder};
use utoipa::openapi::path::Operation;
use utoipa::openapi::security::{HttpAuthScheme, HttpBuilder, SecurityRequirement, SecurityScheme};
use utoipa::openapi::{Content, Deprecated, OpenApi, Paths, Ref, RefOr, ResponseBuilder};

use super::{RENAMED_ROUTES, error_codes};
use crate::auth::policy;
use crate::auth::principal::Scope;

/// The name of the security scheme.
const BEARER: &str = "bearer";
/// The extension with the error codes of a response.
const CODES: &str = "x-error-codes";
/// The extension with the frames of a WebSocket.
const WEBSOCKET: &str = "x-websocket";

/// Completes the document that the routes' macros make.
pub(super) fn complete(document: &mut OpenApi) {
    describe_renamed_routes(&mut document.paths);
    let text = "A token of `forkd token add`. Clients of the unix socket need none: its file permissions admit them. \
                The list at each operation has the token's scope: `read`, `write` or `admin`.";
    let scheme = HttpBuilder::new().scheme(HttpAuthScheme::Bearer).description(Some(text)).build();
    let components = document.components.get_or_insert_default();
    components.add_security_scheme(BEARER, SecurityScheme::Http(scheme));
    for (path, item) in &mut document.paths.paths {
        let methods = [
            (Method::GET, &mut item.get),
            (Method::PUT, &mut item.put),
            (Method::POST, &mut item.post),
            (Method::DELETE, &mut item.delete),
            (Method::PATCH, &mut item.patch),
        ];
        for (method, operation) in methods {
            if let Some(operation) = operation {
                complete_operation(&method, path, operation);
            }
        }
    }
}

/// Describes the routes with older paths like the newer ones, as deprecated.
fn describe_renamed_routes(paths: &mut Paths) {
    for (older, newer) in RENAMED_ROUTES {
        let Some(mut item) = paths.paths.get(newer).cloned() else { continue };
        for operation in [&mut item.put, &mut item.post, &mut item.delete].into_iter().flatten() {
            operation.deprecated = Some(Deprecated::True);
            operation.summary = Some(format!("Deprecated: the older path of `{newer}`."));
            operation.description = None;
        }
        paths.paths.insert(older.into(), item);
    }
}

fn complete_operation(method: &Method, path: &str, operation: &mut Operation) {
    operation.operation_id = Some(operation_id(method, path));
    operation.security = Some(match policy::is_open(path) {
        true => Vec::new(),
        false => vec![SecurityRequirement::new(BEARER, [scope(policy::needed(method, path))])],
    });
    add_error_codes(method, path, operation);
    let request = match path {
        "/v1/run" => "RunRequest",
        "/v1/sandboxes/{id}/exec/stream" => "ExecStreamRequest",
        _ => return,
    };
    operation.extensions = Some(extension(WEBSOCKET, websocket(request)));
}

fn scope(scope: Scope) -> &'static str {
    match scope {
        Scope::Read => "read",
        Scope::Write => "write",
        Scope::Admin => "admin",
    }
}

/// Adds the codes to every response with a status of an error, and a `default` response with the other codes.
fn add_error_codes(method: &Method, path: &str, operation: &mut Operation) {
    let mut left: Vec<Code> = error_codes::ANY.to_vec();
    left.extend(error_codes::of_route(method, path).unwrap_or_default());
    let responses = &mut operation.responses.responses;
    for (status, response) in responses.iter_mut() {
        let Ok(status) = status.parse::<u16>() else { continue };
        if let (400.., RefOr::T(response)) = (status, response) {
            response.extensions = Some(codes(left.extract_if(.., |code| code.status() == status).collect()));
        }
    }
    let content = Content::new(Some(Ref::from_schema_name("ErrorBody")));
    let default = ResponseBuilder::new()
        .description("Any other status is an error; the body has the reason")
        .content("application/json", content)
        .extensions(Some(codes(left)))
        .build();
    responses.insert("default".into(), default.into());
}

/// One extension with codes, in the order of their statuses.
fn codes(mut codes: Vec<Code>) -> Extensions {
    codes.sort_by_key(|code| Code::ALL.iter().position(|other| other == code));
    extension(CODES, codes.iter().map(|code| code.name()).collect())
}

/// The only extension of an object: several would come in any order, and the document is compared.
fn extension(name: &str, value: Value) -> Extensions {
    ExtensionsBuilder::new().add(name, value).build()
}

/// `get_sandboxes_by_id_files` for `GET /v1/sandboxes/{id}/files`.
fn operation_id(method: &Method, path: &str) -> String {
    let words = path.split('/').filter(|word| !word.is_empty() && *word != "v1");
    let words = words.map(|word| match word.strip_prefix('{') {
        Some(parameter) => format!("by_{}", parameter.trim_end_matches('}')),
        None => word.replace('-', "_"),
    });
    std::iter::once(method.as_str().to_lowercase()).chain(words).collect::<Vec<_>>().join("_")
}

/// The frames of a WebSocket, in their order. `count` is `one` or `any`; `phase` says when a frame may come. The keys
/// of each object are in alphabetical order, so that the document does not depend on how a map is kept.
fn websocket(request: &str) -> Value {
    let schema = |name: &str| json!({ "$ref": format!("#/components/schemas/{name}") });
    let text = |from: &str, count: &str, phase: &str, name: &str, value: Option<&str>, what: &str| {
        let mut frame =
            json!({ "count": count, "description": what, "frame": "text", "from": from, "phase": phase });
        if let Some(value) = value {
            frame["property"] = json!(value);
        }
        frame["schema"] = schema(name);
        frame
    };
    let binary = |from: &str, phase: &str, channel: Channel, what: &str| {
        json!({ "channel": channel as u8, "count": "any", "description": what, "frame": "binary", "from": from,
            "phase": phase })
    };
    let event = |count, phase, event, what| text("server", count, phase, "ServerEvent", Some(event), what);
    let control = |kind, what| text("client", "any", "after the request", "ClientMessage", Some(kind), what);
    let mut frames = vec![text("client", "one", "first", request, None, "The request.")];
    if request == "RunRequest" {
        frames.push(event("any", "before started", "progress", "A step of the daemon, for people."));
    }
    let output = "between started and the end";
    frames.extend([
        event("one", "after the request", "started", "The command runs. Absent if it cannot start."),
        binary("client", "after the request", Channel::Stdin, "Input, within the window."),
        event("any", output, "stdin_ack", "The command took so much input: the window is so much larger."),
        control("stdin_eof", "The input ends."),
        control("signal", "A signal for the command."),
        control("resize", "The terminal's new size."),
        binary("server", output, Channel::Stdout, "Standard output, or the terminal's output."),
        binary("server", output, Channel::Stderr, "Standard error. None with a terminal."),
        event("one", "last", "exit", "The command ended, after all its output. The server closes."),
        event("one", "last, instead of exit", "error", "The command could not run, or not to its end."),
    ]);
    json!({
        "binary": "The first byte of a binary frame is its channel; the rest is data.",
        "close": "A client that closes ends the command, and the sandbox of a run, unless the request has `keep`.",
        "frames": frames,
        "max_client_frame_bytes": MAX_TEXT,
        "max_server_data_bytes": MAX_CHUNK,
        "stdin_window_bytes": STDIN_WINDOW,
        "text": "A text frame is one JSON object of the schema; `property` is the value of its tag.",
    })
}

#[cfg(test)]
mod tests;
