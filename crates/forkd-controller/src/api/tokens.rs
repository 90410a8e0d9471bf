//! Routes of tokens, which TCP clients authenticate with. For admins only.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forkd_api::{ErrorBody, NewToken, TokenInfo, TokenRequest, TokenScope};
use forkd_store::{Quota, Scope, Token};

use super::ApiContext;
use super::extract::{Body, Id, Ignored};
use crate::auth::tokens::TokenSpec;
use crate::error::Result;
use crate::util::task::blocking;

/// Lists all tokens without their secrets: `default` first, then by name.
#[utoipa::path(
    get, path = "/v1/tokens",
    responses(
        (status = 200, body = Vec<TokenInfo>),
        (status = 403, body = ErrorBody, description = "Needs an admin"),
    ),
)]
pub(super) async fn list(State(app): State<ApiContext>) -> Json<Vec<TokenInfo>> {
    Json(app.tokens.list().into_iter().map(info).collect())
}

/// Creates a token.
#[utoipa::path(
    post, path = "/v1/tokens", request_body = TokenRequest,
    responses(
        (status = 201, body = NewToken), (status = 400, body = ErrorBody),
        (status = 403, body = ErrorBody, description = "Needs an admin"),
        (status = 409, body = ErrorBody, description = "The name is taken"),
    ),
)]
pub(super) async fn add(
    State(app): State<ApiContext>,
    Body(request): Body<TokenRequest>,
) -> Result<(StatusCode, Json<NewToken>)> {
    let order = TokenSpec {
        name: request.name,
        scope: match request.scope {
            TokenScope::Read => Scope::Read,
            TokenScope::Write => Scope::Write,
            TokenScope::Admin => Scope::Admin,
        },
        owner: request.owner,
        quota: Quota {
            max_sandboxes: request.max_sandboxes,
            max_memory_mib: request.max_memory_mib,
            max_snapshots: request.max_snapshots,
        },
        expires_in_secs: request.expires_in_secs,
    };
    let now = crate::util::time::now_unix();
    let made = blocking("making a token", move || app.tokens.add(order, now)).await?;
    Ok((StatusCode::CREATED, Json(new(made))))
}

/// Removes a token: the daemon rejects it from now on. The owner's objects stay.
#[utoipa::path(
    delete, path = "/v1/tokens/{name}", params(("name" = String, Path)),
    responses(
        (status = 204), (status = 403, body = ErrorBody, description = "Needs an admin"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "`default` can only be rotated"),
    ),
)]
pub(super) async fn remove(State(app): State<ApiContext>, Id(name): Id) -> Result<StatusCode> {
    blocking("removing a token", move || app.tokens.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Rotates a token: creates a new secret, and rejects the old one from now on.
#[utoipa::path(
    post, path = "/v1/tokens/{name}/rotate", params(("name" = String, Path)),
    responses(
        (status = 200, body = NewToken), (status = 403, body = ErrorBody, description = "Needs an admin"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn rotate(
    State(app): State<ApiContext>,
    Id(name): Id,
    _: Ignored,
) -> Result<Json<NewToken>> {
    let made = blocking("rotating a token", move || app.tokens.rotate(&name)).await?;
    Ok(Json(new(made)))
}

fn new((token, secret): (Token, String)) -> NewToken {
    NewToken { token: secret, info: info(token) }
}

fn info(token: Token) -> TokenInfo {
    TokenInfo {
        name: token.name,
        scope: match token.scope {
            Scope::Read => TokenScope::Read,
            Scope::Write => TokenScope::Write,
            Scope::Admin => TokenScope::Admin,
        },
        owner: token.owner,
        max_sandboxes: token.quota.max_sandboxes,
        max_memory_mib: token.quota.max_memory_mib,
        max_snapshots: token.quota.max_snapshots,
        created_at_unix: token.created_at_unix,
        expires_at_unix: token.expires_at_unix,
    }
}
