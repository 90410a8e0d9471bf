//! The sandbox and the port that a request names.
//!
//! Headers name both, or the first label of the host does (`49983-ID.example.com`). A signed address of a file names
//! neither, and so do requests of early clients: the signature, or the access token, finds the sandbox.

use axum::http::header::{self, HeaderMap};
use axum::http::{Method, Uri};
use forkd_protocol::agent::TOKEN_HEADER;
use forkd_protocol::names::is_valid_sandbox_id;

use crate::compat::e2b::signature::Signed;
use crate::compat::e2b::{ENVD_PORT, has_path, key};

/// The header with the sandbox's id.
const SANDBOX: &str = "e2b-sandbox-id";
/// The header with the port.
const PORT: &str = "e2b-sandbox-port";
/// The header with the token for other ports than the agent's.
pub(super) const TRAFFIC_TOKEN: &str = "e2b-traffic-access-token";

/// The sandbox and the port of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub(super) sandbox: Named,
    pub(super) port: u16,
    /// Whether the host's name carries both, so that it is none of the daemon's own names.
    pub(crate) is_in_host: bool,
}

/// How a request names its sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    Id(String),
    /// By the token that a signature was made with.
    Signature(Signed),
    /// By its access token.
    Token(String),
}

impl Target {
    /// The target of a sandbox request; none for other requests.
    pub(crate) fn of(method: &Method, uri: &Uri, headers: &HeaderMap) -> Option<Self> {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        // Early clients name a sandbox in control requests, too. A server in the guest may have the same paths and keys.
        let to_agent = text(PORT).is_none_or(|port| port == "49983");
        if has_path(uri.path())
            && headers.contains_key(key::HEADER)
            && to_agent
            && host_target(uri, headers).is_none()
        {
            return None;
        }
        if let Some(id) = text(SANDBOX) {
            let port = text(PORT).map_or(Some(ENVD_PORT), |port| port.parse().ok()).unwrap_or(0);
            return Some(Target { sandbox: Named::Id(id.to_owned()), port, is_in_host: false });
        }
        if let Some(target) = host_target(uri, headers) {
            return Some(target);
        }
        let path = uri.path();
        let is_call = path.starts_with("/process.Process/") || path.starts_with("/filesystem.Filesystem/");
        let sandbox = match text(TOKEN_HEADER) {
            Some(token) if is_call || matches!(path, "/files" | "/health") => Named::Token(token.to_owned()),
            _ if path == "/files" => {
                Named::Signature(Signed::of(uri.query().unwrap_or_default(), method == Method::POST)?)
            }
            _ => return None,
        };
        Some(Target { sandbox, port: ENVD_PORT, is_in_host: false })
    }
}

/// The target that the first label of the host names.
fn host_target(uri: &Uri, headers: &HeaderMap) -> Option<Target> {
    let header = || headers.get(header::HOST).and_then(|value| value.to_str().ok());
    let label = uri.host().or_else(header)?.split(['.', ':']).next()?;
    let (port, id) = label.split_once('-')?;
    let (port, id) = (port.parse().ok()?, Some(id).filter(|id| is_valid_sandbox_id(id))?);
    Some(Target { sandbox: Named::Id(id.to_owned()), port, is_in_host: true })
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    fn target(line: &str, headers: &[(&'static str, &'static str)]) -> Option<Target> {
        let (method, uri) = line.split_once(' ').unwrap();
        let mut map = HeaderMap::new();
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_static(value));
        }
        Target::of(&method.parse().unwrap(), &uri.parse().unwrap(), &map)
    }

    fn id(id: &str, port: u16, is_in_host: bool) -> Option<Target> {
        Some(Target { sandbox: Named::Id(id.into()), port, is_in_host })
    }

    #[test]
    fn a_request_names_its_sandbox_in_headers_or_in_its_host() {
        let call = "POST /process.Process/Start";
        assert_eq!(target(call, &[(SANDBOX, "sb1")]), id("sb1", ENVD_PORT, false));
        assert_eq!(target("GET /", &[(SANDBOX, "sb1"), (PORT, "8000")]), id("sb1", 8000, false));
        assert_eq!(target("GET /", &[(SANDBOX, "sb1"), (PORT, "x")]), id("sb1", 0, false));
        assert_eq!(target("GET /", &[("host", "8000-sb1.e2b.localhost:4443")]), id("sb1", 8000, true));
        let plain = [
            "127.0.0.1:8889",
            "e2b.localhost",
            "8000-sb1-x.localhost",
            "x-sb1.localhost",
            "8000-xy.localhost",
        ];
        for host in plain {
            assert_eq!(target("GET /", &[("host", host)]), None, "{host}");
        }
    }

    #[test]
    fn early_clients_name_a_sandbox_by_its_token_and_name_one_in_control_requests() {
        let token = Named::Token("at1".into());
        let by_token = Some(Target { sandbox: token, port: ENVD_PORT, is_in_host: false });
        assert_eq!(target("POST /process.Process/Start", &[(TOKEN_HEADER, "at1")]), by_token);
        assert_eq!(target("GET /files?path=/a", &[(TOKEN_HEADER, "at1")]), by_token);
        assert_eq!(target("GET /health", &[(TOKEN_HEADER, "at1")]), by_token);
        assert_eq!(target("GET /health", &[]), None);
        assert_eq!(target("GET /v1/sandboxes", &[(TOKEN_HEADER, "at1")]), None);
        assert_eq!(target("DELETE /sandboxes/sb1", &[(SANDBOX, "sb1"), ("x-api-key", "fk_a")]), None);
        // A server in the guest may have the same path.
        let port = [(SANDBOX, "sb1"), (PORT, "8000")];
        assert_eq!(target("GET /sandboxes", &port), id("sb1", 8000, false));
        let with_key = [port[0], port[1], ("x-api-key", "of the guest")];
        assert_eq!(target("GET /sandboxes", &with_key), id("sb1", 8000, false));
        let in_host = [("host", "8000-sb1.e2b.localhost"), ("x-api-key", "of the guest")];
        assert_eq!(target("GET /sandboxes", &in_host), id("sb1", 8000, true));
    }

    #[test]
    fn a_signed_address_needs_no_header() {
        let target = |line| target(line, &[]);
        let signed = target("GET /files?path=/a&signature=v1_x").unwrap();
        assert!(matches!(signed.sandbox, Named::Signature(signed) if signed.path == "/a" && !signed.writes));
        assert_eq!(target("GET /files?path=/a"), None);
    }
}
