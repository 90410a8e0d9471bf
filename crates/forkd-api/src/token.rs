//! Tokens and their scopes.

use serde::{Deserialize, Serialize};

/// The requests that a token permits. Each scope includes the ones before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TokenScope {
    /// Read requests only.
    Read,
    /// Create, use and delete the owner's own sandboxes and snapshots. Requests may also use the older name `use`.
    #[default]
    #[serde(alias = "use")]
    Write,
    /// Everything, with the objects of all owners.
    Admin,
}

/// A token to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// The token's name, with the characters of a tag.
    pub name: String,
    /// The token's scope; `write` when absent.
    #[serde(default, skip_serializing_if = "is_default")]
    pub scope: TokenScope,
    /// The owner of the objects that the token creates; the token's name when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// The most sandboxes of the owner. This limit and the next two do not apply when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u64>,
    /// The most memory of all the owner's sandboxes together, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u64>,
    /// The most snapshots of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u64>,
    /// Seconds after which the token expires; never when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_in_secs: Option<u64>,
}

/// The default is not sent: an older daemon has the same default, under the name `use`.
fn is_default(scope: &TokenScope) -> bool {
    *scope == TokenScope::default()
}

/// A token without its secret.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenInfo<S = TokenScope> {
    /// The token's name. The token in the daemon's token file has the name `default`.
    pub name: String,
    /// The token's scope.
    #[cfg_attr(feature = "openapi", schema(value_type = TokenScope))]
    pub scope: S,
    /// The owner of the objects that the token creates.
    pub owner: String,
    /// The most sandboxes of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sandboxes: Option<u64>,
    /// The most memory of all the owner's sandboxes together, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_mib: Option<u64>,
    /// The most snapshots of the owner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_snapshots: Option<u64>,
    /// Creation time, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// The time at which the token expires, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
}

/// A token that was just created or rotated.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewToken {
    /// The secret. The daemon sends it in this reply only.
    pub token: String,
    /// The token without its secret.
    #[serde(flatten)]
    pub info: TokenInfo,
}
