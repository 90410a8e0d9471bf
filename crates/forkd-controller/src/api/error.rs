//! Bodies of error responses.
//!
//! An [`Error`] that becomes a response travels in the response's extensions. The outermost middleware
//! (`request_log`) knows the request's id and its principal. It writes the body, in one place ([`finish`]): whichever
//! part of the daemon rejected a request, the body has the same three fields.

use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use forkd_api::Code;

use crate::compat::e2b;
use crate::compat::e2b::traffic::Answered;
use crate::compat::mcp::ProtocolBody;
use crate::error::{Error, Reader};

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.code().status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        // A body for any reader; `finish` replaces it once the reader is known.
        let mut response = (status, Json(Reader::default().body(&self))).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        response.extensions_mut().insert(self);
        response
    }
}

/// Writes the body of an error response.
///
/// A path of the E2B API gets the body that its clients parse. A response from a guest stays as it
/// is, and so does a message of the Model Context Protocol.
pub(super) fn finish(mut response: Response, path: &str, reader: &Reader) -> Response {
    let status = response.status();
    let is_error = status.is_client_error() || status.is_server_error();
    let extensions = response.extensions();
    let is_foreign = extensions.get::<Answered>().is_some() || extensions.get::<ProtocolBody>().is_some();
    if !is_error || is_foreign {
        return response;
    }
    // Rejections by the HTTP library itself carry no [`Error`].
    let error = response.extensions_mut().remove::<Error>().unwrap_or_else(|| {
        let reason = status.canonical_reason().unwrap_or("refused").to_lowercase();
        Error::new(Code::of_status(status.as_u16()), reason)
    });
    let (mut parts, _) = response.into_parts();
    parts.headers.remove(header::CONTENT_LENGTH);
    parts.headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    let body = match e2b::has_errors(path) {
        true => Json(e2b::error::body(status.as_u16(), path, &error, reader)).into_response(),
        false => Json(reader.logged(&error)).into_response(),
    };
    let body = body.into_body();
    Response::from_parts(parts, body)
}

/// Checks that the OpenAPI document lists the code of an error reply.
#[cfg(test)]
pub(super) fn check_code(method: &axum::http::Method, route: &str, response: &Response) {
    if let Some(error) = response.extensions().get::<Error>() {
        super::error_codes::check(method, route, error);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::sandbox::{End, Phase};
    use crate::testing::fake_guest::{FakeDaemon, ID};
    use forkd_api::ErrorBody;
    use serde_json::Value;

    fn reader(reads_causes: bool) -> Reader {
        Reader { request_id: "r-1".into(), reads_causes }
    }

    #[test]
    fn only_principals_that_may_read_causes_get_them() {
        let error = Error::host("cannot open /srv/forkd/x", std::io::Error::from_raw_os_error(13));
        let body = reader(false).body(&error);
        assert_eq!((body.code.as_str(), body.request_id.as_str()), ("internal", "r-1"));
        assert!(body.error.contains("r-1"), "{body:?}");
        assert!(!body.error.contains("/srv") && !body.error.contains("os error"), "{body:?}");
        let body = reader(true).body(&error);
        assert!(body.error.contains("/srv/forkd/x") && body.error.contains("os error 13"), "{body:?}");
    }

    #[tokio::test]
    async fn a_refusal_without_an_error_gets_a_body_too() {
        let bare = StatusCode::PAYLOAD_TOO_LARGE.into_response();
        let finished = finish(bare, "/v1/run", &reader(false));
        assert_eq!(finished.status(), 413);
        assert_eq!(finished.headers()[header::CONTENT_TYPE], "application/json");
        let bytes = axum::body::to_bytes(finished.into_body(), 1 << 16).await.unwrap();
        let body: ErrorBody = serde_json::from_slice(&bytes).unwrap();
        assert_eq!((body.code.as_str(), body.request_id.as_str()), ("body_too_large", "r-1"));
        let fine = finish((StatusCode::CREATED, "made").into_response(), "/v1/run", &reader(false));
        assert_eq!(axum::body::to_bytes(fine.into_body(), 1 << 16).await.unwrap(), "made");
    }

    #[tokio::test]
    async fn each_state_a_sandbox_cannot_be_used_in_has_a_code() {
        let daemon = FakeDaemon::start().await;
        let line = format!("POST /v1/sandboxes/{ID}/exec");
        let ask = async || {
            let headers = "Content-Type: application/json\r\n";
            let (status, _, body) = daemon.ask(&line, headers, br#"{"args":["true"]}"#).await;
            let body: ErrorBody = serde_json::from_slice(&body).unwrap();
            assert_eq!(Code::named(&body.code).unwrap().status(), status, "{body:?}");
            body.code
        };
        for (phase, code) in [
            (Phase::Starting, "sandbox_starting"),
            (Phase::Paused, "sandbox_paused"),
            (Phase::Unresponsive, "sandbox_unresponsive"),
            (Phase::Ended(Arc::new(End::deleted())), "sandbox_ended"),
            (Phase::Ended(Arc::new(End::rolled_back())), "sandbox_replaced"),
        ] {
            daemon.sandbox.phase.send_replace(phase);
            assert_eq!(ask().await, code);
        }
        daemon.sandbox.phase.send_replace(Phase::Running);
        daemon.sandbox.update_runtime(|runtime| runtime.is_suspending = true);
        assert_eq!(ask().await, "sandbox_suspending");
    }

    #[test]
    fn every_code_is_in_the_document_with_its_meaning() {
        let document: Value = serde_json::from_str(&crate::api::openapi()).unwrap();
        let schema = &document["components"]["schemas"]["ErrorCode"];
        let names: Vec<_> = Code::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(schema["enum"], serde_json::json!(names));
        let described = schema["x-error-codes"].as_array().unwrap();
        assert!(described.iter().map(|one| &one["code"]).eq(&names), "{described:?}");
        let table = schema["description"].as_str().unwrap();
        for code in Code::ALL {
            let row = format!("| `{code}` | {} | {} |", code.status(), code.retry().name());
            assert!(table.contains(&row), "{row}");
        }
        let body = &document["components"]["schemas"]["ErrorBody"];
        assert_eq!(body["required"], serde_json::json!(["error", "code", "request_id"]));
        assert_eq!(body["properties"]["code"]["$ref"], "#/components/schemas/ErrorCode");
        let event = document["components"]["schemas"]["ServerEvent"].to_string();
        assert!(event.contains("#/components/schemas/ErrorCode"), "{event}");
    }
}
