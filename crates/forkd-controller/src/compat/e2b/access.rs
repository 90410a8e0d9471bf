//! Access to a sandbox's ports: the tokens that a request must show, and the responses to requests that are refused.

use axum::extract::Request;
use axum::http::header::{self, HeaderMap, HeaderValue};
use axum::http::{Method, StatusCode};
use axum::response::{IntoResponse, Response};
use forkd_protocol::agent::{CODE_PORT, TOKEN_HEADER};
use serde_json::json;
use subtle::ConstantTimeEq;

use crate::auth::tokens::{TokenError, Tokens};
use crate::compat::e2b::signature::Signed;
use crate::compat::e2b::target::{Named, TRAFFIC_TOKEN, Target};
use crate::compat::e2b::traffic::Answered;
use crate::compat::e2b::{ENVD_PORT, key};
use crate::error::Error;
use crate::sandbox::e2b::E2bState;
use crate::util::time::now_unix;

/// Marks the response to a request that showed a wrong token, or none where the agent needs one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Guessed;

/// A response that clients of E2B's proxy parse.
pub(super) fn refuse(status: StatusCode, id: &str, message: impl Into<String>) -> Response {
    let body = json!({ "sandboxId": id, "message": message.into(), "code": status.as_u16() });
    (status, axum::Json(body)).into_response()
}

pub(super) fn not_running(id: &str) -> Response {
    refuse(StatusCode::BAD_GATEWAY, id, "The sandbox was not found")
}

/// The response to a sandbox request that the daemon refuses before it looks for the sandbox.
pub(crate) fn turn_away(target: &Target, error: &Error) -> Response {
    let id = match &target.sandbox {
        Named::Id(id) => id,
        Named::Signature(_) | Named::Token(_) => "",
    };
    let status = StatusCode::from_u16(error.code().status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = refuse(status, id, error.public());
    response.extensions_mut().insert(Answered);
    response
}

fn guessed(mut response: Response) -> Response {
    response.extensions_mut().insert(Guessed);
    response
}

/// A request without a good token, in the shape of the protocol that the path belongs to.
pub(super) fn unauthenticated(path: &str, id: &str, message: &str) -> Response {
    guessed(match path.contains(".") {
        true => {
            let body = json!({ "code": "unauthenticated", "message": message });
            (StatusCode::UNAUTHORIZED, axum::Json(body)).into_response()
        }
        false => refuse(StatusCode::UNAUTHORIZED, id, message),
    })
}

/// A request with a signature that is not good.
pub(super) fn unsigned(id: &str, message: &str) -> Response {
    guessed(refuse(StatusCode::UNAUTHORIZED, id, message))
}

fn equal(given: Option<&HeaderValue>, secret: &str) -> bool {
    given.is_some_and(|given| given.as_bytes().ct_eq(secret.as_bytes()).into())
}

/// Whether the request shows the sandbox's access token.
pub(super) fn has_access(headers: &HeaderMap, state: &E2bState) -> bool {
    equal(headers.get(TOKEN_HEADER), &state.access_token)
}

/// Whether the request asks E2B's agent for the sandbox's health, which needs no token.
pub(super) fn is_health(port: u16, request: &Request) -> bool {
    port == ENVD_PORT && request.uri().path() == "/health" && request.method() == Method::GET
}

#[allow(clippy::result_large_err)]
pub(super) fn check_token(
    port: u16,
    request: &Request,
    signed: Option<&Signed>,
    id: &str,
    state: &E2bState,
) -> Result<(), Response> {
    let (headers, path) = (request.headers(), request.uri().path());
    let has_traffic = || equal(headers.get(TRAFFIC_TOKEN), &state.traffic_token);
    let forbidden = |text: &str, shows_one: bool| {
        let response = refuse(StatusCode::FORBIDDEN, id, text);
        Err(if shows_one { guessed(response) } else { response })
    };
    match port {
        0 => Err(refuse(StatusCode::BAD_REQUEST, id, "E2b-Sandbox-Port must be a port, 1 to 65535")),
        ENVD_PORT if is_health(port, request) => Ok(()),
        ENVD_PORT => match signed {
            _ if has_access(headers, state) => Ok(()),
            Some(signed) if signed.has_expired(now_unix()) => {
                Err(unsigned(id, "the signature has expired; sign the address again"))
            }
            Some(signed) if signed.is_by(&state.access_token) => Ok(()),
            Some(_) => Err(unsigned(id, "the signature is wrong")),
            None => {
                let text =
                    "the access token is missing or wrong; connect to the sandbox with the API key to get it";
                Err(unauthenticated(path, id, text))
            }
        },
        // It runs code: never public.
        CODE_PORT if !has_access(headers, state) && !has_traffic() => {
            let shows_one = headers.contains_key(TOKEN_HEADER) || headers.contains_key(TRAFFIC_TOKEN);
            forbidden("the token for the code interpreter is missing or wrong", shows_one)
        }
        CODE_PORT => Ok(()),
        _ if state.public_traffic || has_traffic() => Ok(()),
        _ => forbidden("the traffic access token is missing or wrong", headers.contains_key(TRAFFIC_TOKEN)),
    }
}

/// Removes `Authorization` headers with a token of this daemon. A client sent it by mistake, and code in the guest could
/// use it.
pub(super) fn remove_tokens(headers: &mut HeaderMap, tokens: &Tokens) {
    let is_token = |value: &HeaderValue| {
        let words = value.to_str().unwrap_or_default().split_ascii_whitespace();
        words.last().is_some_and(|secret| {
            tokens.find(key::without_prefix(secret), now_unix()) != Err(TokenError::Unknown)
        })
    };
    if headers.get_all(header::AUTHORIZATION).iter().any(is_token) {
        headers.remove(header::AUTHORIZATION);
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    #[test]
    fn each_port_needs_its_token_and_a_wrong_one_is_a_guess() {
        let state = E2bState {
            access_token: "access".into(),
            traffic_token: "traffic".into(),
            public_traffic: true,
            ..E2bState::default()
        };
        let closed = E2bState { public_traffic: false, ..state.clone() };
        let ask = |state: &E2bState, port: u16, path: &str, headers: &[(&'static str, &'static str)]| {
            let mut request = axum::http::Request::builder().uri(path);
            for (name, value) in headers {
                request = request.header(*name, *value);
            }
            let request = request.body(Body::empty()).unwrap();
            match check_token(port, &request, None, "sb1", state) {
                Ok(()) => (200, false),
                Err(response) => {
                    (response.status().as_u16(), response.extensions().get::<Guessed>().is_some())
                }
            }
        };
        let (good, refused, guess) = ((200, false), |status| (status, false), |status| (status, true));
        let (access, traffic) = ([("x-access-token", "access")], [("e2b-traffic-access-token", "traffic")]);
        let wrong = [("x-access-token", "accesses")];
        assert_eq!(ask(&state, ENVD_PORT, "/health", &[]), good);
        for path in ["/files?path=a", "/process.Process/List"] {
            assert_eq!(ask(&state, ENVD_PORT, path, &[]), guess(401));
            assert_eq!(ask(&state, ENVD_PORT, path, &traffic), guess(401));
            assert_eq!(ask(&state, ENVD_PORT, path, &wrong), guess(401));
            assert_eq!(ask(&state, ENVD_PORT, path, &access), good);
        }
        assert_eq!(ask(&state, CODE_PORT, "/execute", &[]), refused(403));
        assert_eq!(ask(&state, CODE_PORT, "/execute", &wrong), guess(403));
        assert_eq!(ask(&state, CODE_PORT, "/execute", &traffic), good);
        assert_eq!(ask(&state, CODE_PORT, "/execute", &access), good);
        assert_eq!(ask(&state, 8000, "/", &[]), good);
        assert_eq!(ask(&closed, 8000, "/", &[]), refused(403));
        // A server in the guest may have a header of that name.
        assert_eq!(ask(&closed, 8000, "/", &access), refused(403));
        assert_eq!(ask(&closed, 8000, "/", &[("e2b-traffic-access-token", "no")]), guess(403));
        assert_eq!(ask(&closed, 8000, "/", &traffic), good);
        assert_eq!(ask(&state, 0, "/", &access), refused(400));
    }
}
