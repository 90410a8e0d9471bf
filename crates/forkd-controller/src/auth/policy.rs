//! The policy: one table with the scope that each route needs.
//!
//! The authentication layer also checks the owner of the object in a path, so that no handler can forget it. Handlers
//! check objects in a body (a snapshot to fork from, say) and filter lists. Objects of other owners return 404 and
//! are not listed.

use axum::http::Method;

use crate::auth::principal::Scope;

/// The scope that a route needs. Routes that are not in the table are for admins.
pub(crate) fn needed(method: &Method, path: &str) -> Scope {
    decided(method, path).unwrap_or(Scope::Admin)
}

fn decided(method: &Method, path: &str) -> Option<Scope> {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    Some(match (method.as_str(), path) {
        ("GET", "/healthz" | "/healthz/" | "/version" | "/openapi.json") => Scope::Read,
        ("GET", "/v1/sandboxes" | "/v1/sandboxes/{id}") => Scope::Read,
        ("GET", "/v1/sandboxes/{id}/console" | "/v1/sandboxes/{id}/stats") => Scope::Read,
        ("POST", "/v1/sandboxes/{id}/ping") => Scope::Read,
        ("GET", "/v1/snapshots" | "/v1/snapshots/{tag}" | "/v1/snapshots/{tag}/info") => Scope::Read,
        ("GET", "/v1/workspaces" | "/v1/workspaces/{name}") => Scope::Read,
        ("GET", "/v1/tree" | "/v1/events") => Scope::Read,
        ("GET", "/v1/sandboxes/{id}/files" | "/v1/sandboxes/{id}/files/list") => Scope::Read,
        ("GET", "/v1/sandboxes/{id}/files/stat" | "/v1/sandboxes/{id}/files/tree") => Scope::Read,
        ("POST", "/v1/sandboxes") | ("DELETE", "/v1/sandboxes/{id}") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/pause" | "/v1/sandboxes/{id}/resume") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/rollback" | "/v1/sandboxes/{id}/branch") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/fork") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/exec" | "/v1/sandboxes/{id}/eval") => Scope::Write,
        ("POST", "/v1/snapshots") | ("DELETE", "/v1/snapshots/{tag}") => Scope::Write,
        ("POST", "/v1/snapshots/{tag}/unload" | "/v1/snapshots/{tag}/compact") => Scope::Write,
        ("POST", "/v1/workspaces") | ("DELETE", "/v1/workspaces/{name}") => Scope::Write,
        ("POST", "/v1/workspaces/{name}/suspend" | "/v1/workspaces/{name}/resume") => Scope::Write,
        // These start a command.
        ("GET", "/v1/run" | "/v1/sandboxes/{id}/exec/stream") => Scope::Write,
        ("PATCH", "/v1/sandboxes/{id}") => Scope::Write,
        ("PUT" | "DELETE", "/v1/sandboxes/{id}/files") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/files/mkdir" | "/v1/sandboxes/{id}/files/move") => Scope::Write,
        ("POST", "/v1/sandboxes/{id}/json-lines" | "/v1/sandboxes/{id}/line") => Scope::Write,
        ("PUT" | "DELETE", "/v1/sandboxes/{id}/agent-port" | "/v1/sandboxes/{id}/line-port") => Scope::Write,
        // The E2B API.
        ("GET", "/sandboxes" | "/v2/sandboxes" | "/sandboxes/{id}") => Scope::Read,
        ("POST", "/sandboxes" | "/v2/sandboxes") | ("DELETE", "/sandboxes/{id}") => Scope::Write,
        ("POST", "/sandboxes/{id}/connect" | "/v2/sandboxes/{id}/connect") => Scope::Write,
        ("POST", "/sandboxes/{id}/resume" | "/sandboxes/{id}/pause") => Scope::Write,
        ("POST", "/sandboxes/{id}/timeout" | "/sandboxes/{id}/refreshes") => Scope::Write,
        ("GET", "/sandboxes/{id}/metrics" | "/snapshots" | "/templates/aliases/{alias}") => Scope::Read,
        ("POST", "/sandboxes/{id}/fork" | "/sandboxes/{id}/snapshots") | ("DELETE", "/templates/{id}") => {
            Scope::Write
        }
        // Functions of the E2B API that are not there: the error says so.
        (_, "/sandboxes/metrics" | "/sandboxes/{id}/network") => Scope::Read,
        (_, "/sandboxes/{id}/logs" | "/v2/sandboxes/{id}/logs") => Scope::Read,
        (_, "/volumes" | "/volumes/{*rest}" | "/volumecontent/{*rest}") => Scope::Read,
        (_, "/secrets" | "/secrets/{*rest}") => Scope::Read,
        (_, "/templates" | "/templates/{id}" | "/templates/tags") => Scope::Read,
        (_, "/templates/{id}/tags" | "/templates/{id}/tags/{*rest}") => Scope::Read,
        (_, "/templates/{id}/files/{hash}" | "/templates/{id}/builds/{build}") => Scope::Read,
        (_, "/templates/{id}/builds/{build}/status" | "/templates/{id}/builds/{build}/logs") => Scope::Read,
        (_, "/v2/templates" | "/v2/templates/{*rest}" | "/default-templates") => Scope::Read,
        (_, "/v3/templates" | "/v3/templates/{*rest}") => Scope::Read,
        (_, "/teams" | "/teams/{*rest}" | "/nodes" | "/nodes/{*rest}") => Scope::Read,
        (_, "/api-keys" | "/api-keys/{*rest}") => Scope::Read,
        (_, "/access-tokens" | "/access-tokens/{*rest}") => Scope::Read,
        (_, "/events/sandboxes" | "/events/sandboxes/{*rest}") => Scope::Read,
        // Each call of a tool is a request of its own, with its own scope.
        ("GET" | "POST" | "DELETE", "/mcp") => Scope::Read,
        // Sums of the whole host, without names: a monitoring system needs no more than this scope.
        ("GET", "/metrics") => Scope::Read,
        ("POST", "/v1/snapshots/{tag}/owner") => Scope::Admin,
        ("GET" | "POST", "/v1/tokens") | ("DELETE", "/v1/tokens/{name}") => Scope::Admin,
        ("POST", "/v1/tokens/{name}/rotate") => Scope::Admin,
        _ => return None,
    })
}

/// Whether the path needs no authentication.
pub(crate) fn is_open(path: &str) -> bool {
    path.strip_suffix('/').unwrap_or(path) == "/healthz"
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    #[test]
    fn every_route_has_a_decision_and_one_without_is_for_admins() {
        let document: Value = serde_json::from_str(&crate::api::openapi()).unwrap();
        let mut routes = 0;
        for (path, methods) in document["paths"].as_object().unwrap() {
            for method in methods.as_object().unwrap().keys() {
                let method: Method = method.to_uppercase().parse().unwrap();
                assert!(
                    decided(&method, path).is_some(),
                    "decide who may {method} {path}, in auth/policy.rs"
                );
                routes += 1;
            }
        }
        assert!(routes > 25, "{routes}");
        for (method, path) in crate::compat::e2b::routes_for_policy() {
            let method = if method == "any" { Method::PUT } else { method.parse().unwrap() };
            assert!(decided(&method, path).is_some(), "decide who may {method} {path}, in auth/policy.rs");
        }
        assert_eq!(needed(&Method::GET, "/v1/brand-new"), Scope::Admin);
        assert_eq!(needed(&Method::PUT, "/v1/sandboxes/{id}"), Scope::Admin);
        assert_eq!(needed(&Method::HEAD, "/v1/sandboxes"), Scope::Read);
    }
}
