//! Tokens and what they may do.

use serde::{Deserialize, Serialize};

/// How much somebody may do. Each includes the ones before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
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
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenInfo<S = TokenScope> {
    /// What it is called. `default` is the one in the daemon's token file.
    pub name: String,
    /// What whoever shows it may do.
    #[cfg_attr(feature = "openapi", schema(value_type = TokenScope))]
    pub scope: S,
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
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// From when on it is refused, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at_unix: Option<u64>,
}

/// A token that was just made, or made anew.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct NewToken {
    /// The token itself. Nobody is ever told again.
    pub token: String,
    /// What is known of it.
    #[serde(flatten)]
    pub info: TokenInfo,
}
