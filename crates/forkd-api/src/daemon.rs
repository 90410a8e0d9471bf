//! The daemon itself.

use serde::{Deserialize, Serialize};

/// `GET /healthz`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// True.
    pub ok: bool,
}

/// `GET /version`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VersionInfo {
    /// The daemon's version.
    pub version: String,
    /// The API's version: the first part of its paths.
    pub api: String,
    /// Where the daemon itself listens for TCP clients, such as `127.0.0.1:8889`.
    pub address: String,
    /// Whether that is with TLS.
    #[serde(default)]
    pub tls: bool,
}
