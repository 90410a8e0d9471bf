//! Rejects requests that a principal may not make: by the token's scope, and by the owner of the object in the path.
//!
//! Handlers check the objects in a body (such as a snapshot to fork from), and filter lists.

use axum::extract::{MatchedPath, RawPathParams, Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::api::ApiContext;
use crate::auth::policy::{is_open, needed};
use crate::auth::principal::{Principal, SHARED};
use crate::error::{Code, Error, Result};

/// Middleware after `authenticate`: passes allowed requests on.
pub(crate) async fn check(
    State(app): State<ApiContext>,
    path: Option<MatchedPath>,
    params: std::result::Result<RawPathParams, axum::extract::rejection::RawPathParamsRejection>,
    request: Request,
    next: Next,
) -> Response {
    // Without a route there is no object to protect.
    let Some(path) = path else { return next.run(request).await };
    let who = request.extensions().get::<Principal>();
    let allowed = match who {
        Some(who) if who.is_admin() => Ok(()),
        Some(who) => allow(&app, who, request.method(), path.as_str(), params.ok().as_ref()),
        None if is_open(path.as_str()) => Ok(()),
        None => Err(Error::new(Code::Unauthorized, "the request has no principal; send a token")),
    };
    match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn allow(
    app: &ApiContext,
    who: &Principal,
    method: &Method,
    path: &str,
    params: Option<&RawPathParams>,
) -> Result<()> {
    let needed = needed(method, path);
    if who.scope < needed {
        let text = format!(
            "token {} has the scope {}, and this request needs {}; get a token with that scope (`forkd token add \
             --scope {2}`)",
            who.name,
            who.scope.name(),
            needed.name()
        );
        return Err(Error::new(Code::Forbidden, text));
    }
    let Some(params) = params else {
        return Err(Error::invalid("the path is not UTF-8; encode it as UTF-8"));
    };
    let Some((_, name)) = params.iter().next() else { return Ok(()) };
    if path.starts_with("/v1/sandboxes/") {
        match app.registry.get(name) {
            Ok(sandbox) => app.registry.check_owner(&sandbox, who),
            // A paused sandbox may come back under its id before the handler looks for it. No other id is used again.
            Err(_) => app.e2b().check_owner(name, who),
        }
    } else if path.starts_with("/v1/snapshots/") {
        let Ok(entry) = app.snapshots.get(name) else { return Ok(()) };
        app.snapshots.check_use(&entry, who)?;
        let looks = [Method::GET, Method::HEAD].contains(method);
        if entry.owner() == SHARED && !looks {
            let text = format!("snapshot {name} is shared by all owners; ask an admin to change it");
            return Err(Error::new(Code::Forbidden, text));
        }
        Ok(())
    } else if path.starts_with("/sandboxes/") || path.starts_with("/v2/sandboxes/") {
        app.e2b().check_owner(name, who)
    } else if path.starts_with("/v1/workspaces/") {
        app.workspaces.check_owner(name, who)
    } else {
        Ok(())
    }
}
