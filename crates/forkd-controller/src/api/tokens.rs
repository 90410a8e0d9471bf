//! Tokens: who may come in over TCP. For admins only.

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use forkd_store::{Quota, Scope, Token};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::App;
use super::extract::{Body, Id, Ignored};
use crate::api::error::ErrorBody;
use crate::auth::tokens::Order;
use crate::error::Result;
use crate::util::task::blocking;

/// How much somebody may do. Each includes the ones before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum TokenScope {
    /// Look.
    Read,
    /// Make, use and end sandboxes and snapshots of their own.
    #[default]
    Use,
    /// Everything, with everybody's.
    Admin,
}

/// A token to make.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// What it is called: like a tag.
    pub name: String,
    /// What whoever shows it may do; `use` when absent.
    #[serde(default)]
    pub scope: TokenScope,
    /// Whose what they make is; as the token is called, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// How many sandboxes the owner may have; no limit when absent, as in the next two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u64>,
    /// How much memory their sandboxes may have together, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u64>,
    /// How many snapshots the owner may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u64>,
    /// After as many seconds it is refused; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_secs: Option<u64>,
}

/// What is known of a token.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TokenInfo {
    /// What it is called. `default` is the one in the daemon's token file.
    pub name: String,
    /// What whoever shows it may do.
    pub scope: TokenScope,
    /// Whose what they make is.
    pub owner: String,
    /// How many sandboxes the owner may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u64>,
    /// How much memory their sandboxes may have together, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u64>,
    /// How many snapshots the owner may have.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u64>,
    /// When it was made, in seconds since 1970.
    pub created_at_unix: u64,
    /// From when on it is refused, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
}

/// A token that was just made, or made anew.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NewToken {
    /// The token itself. Nobody is ever told again.
    pub token: String,
    /// What is known of it.
    #[serde(flatten)]
    pub info: TokenInfo,
}

/// All tokens, `default` first, then by name; not themselves.
#[utoipa::path(
    get, path = "/v1/tokens",
    responses(
        (status = 200, body = Vec<TokenInfo>),
        (status = 403, body = ErrorBody, description = "Only an admin may"),
    ),
)]
pub(super) async fn list(State(app): State<App>) -> Json<Vec<TokenInfo>> {
    Json(app.tokens.list().into_iter().map(info).collect())
}

/// Makes a token.
#[utoipa::path(
    post, path = "/v1/tokens", request_body = TokenRequest,
    responses(
        (status = 201, body = NewToken), (status = 400, body = ErrorBody),
        (status = 403, body = ErrorBody, description = "Only an admin may"),
        (status = 409, body = ErrorBody, description = "The name is taken"),
    ),
)]
pub(super) async fn add(
    State(app): State<App>,
    Body(request): Body<TokenRequest>,
) -> Result<(StatusCode, Json<NewToken>)> {
    let order = Order {
        name: request.name,
        scope: match request.scope {
            TokenScope::Read => Scope::Read,
            TokenScope::Use => Scope::Use,
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

/// Removes a token: it is refused from here on. What its owner has stays.
#[utoipa::path(
    delete, path = "/v1/tokens/{name}", params(("name" = String, Path)),
    responses(
        (status = 204), (status = 403, body = ErrorBody, description = "Only an admin may"),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "`default` can only be rotated"),
    ),
)]
pub(super) async fn remove(State(app): State<App>, Id(name): Id) -> Result<StatusCode> {
    blocking("removing a token", move || app.tokens.remove(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a token anew: the old one is refused from here on.
#[utoipa::path(
    post, path = "/v1/tokens/{name}/rotate", params(("name" = String, Path)),
    responses(
        (status = 200, body = NewToken), (status = 403, body = ErrorBody, description = "Only an admin may"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(super) async fn rotate(State(app): State<App>, Id(name): Id, _: Ignored) -> Result<Json<NewToken>> {
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
            Scope::Use => TokenScope::Use,
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
