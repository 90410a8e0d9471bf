//! The functions of the E2B API that are not here: each answers 501 with its name, which docs/E2B.md lists.
//!
//! A 404 would tell clients that the sandbox or the template is not there.

use axum::routing::{MethodRouter, any};

use crate::compat::e2b::E2bContext;
use crate::error::{Code, Error};

/// Paths that have no handler, or not for all methods, and the function that each belongs to.
pub(super) const ROUTES: [(&str, &str); 33] = [
    ("/sandboxes/metrics", "metrics of several sandboxes"),
    ("/sandboxes/{id}/network", "`update_network`"),
    ("/sandboxes/{id}/logs", "logs"),
    ("/v2/sandboxes/{id}/logs", "logs"),
    ("/volumes", "volumes"),
    ("/volumes/{*rest}", "volumes"),
    ("/volumecontent/{*rest}", "volumes"),
    ("/secrets", "secrets"),
    ("/secrets/{*rest}", "secrets"),
    ("/templates", "template builds"),
    ("/templates/{id}", "details of templates"),
    ("/templates/tags", "tags of templates"),
    ("/templates/{id}/tags", "tags of templates"),
    ("/templates/{id}/tags/{*rest}", "tags of templates"),
    ("/templates/{id}/files/{hash}", "template builds"),
    ("/templates/{id}/builds/{build}", "template builds"),
    ("/templates/{id}/builds/{build}/status", "template builds"),
    ("/templates/{id}/builds/{build}/logs", "template builds"),
    ("/v2/templates", "details of templates"),
    ("/v2/templates/{*rest}", "template builds"),
    ("/v3/templates", "template builds"),
    ("/v3/templates/{*rest}", "template builds"),
    ("/default-templates", "details of templates"),
    ("/teams", "teams"),
    ("/teams/{*rest}", "teams"),
    ("/api-keys", "API keys"),
    ("/api-keys/{*rest}", "API keys"),
    ("/access-tokens", "API keys"),
    ("/access-tokens/{*rest}", "API keys"),
    ("/nodes", "nodes"),
    ("/nodes/{*rest}", "nodes"),
    ("/events/sandboxes", "events"),
    ("/events/sandboxes/{*rest}", "events"),
];

/// The handler of a path that belongs to the function `name`.
pub(super) fn handler(name: &'static str) -> MethodRouter<E2bContext> {
    any(async move || error(name))
}

/// The error for any other path of the API.
pub(crate) fn unknown() -> Error {
    error("this route")
}

fn error(name: &str) -> Error {
    let text = format!("{name}: forkd does not have this part of the E2B API; see docs/E2B.md");
    Error::new(Code::NotImplemented, text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_lists_every_function_that_is_not_here() {
        let page = include_str!("../../../../../docs/E2B.md");
        let (_, list) = page.split_once("## What is not there").unwrap();
        for (path, name) in ROUTES {
            assert!(list.contains(name), "{path}: {name}");
        }
    }
}
