//! Health and version of the daemon.

use serde::{Deserialize, Serialize};

/// The reply of `GET /healthz`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Health {
    /// Always true.
    pub ok: bool,
}

/// The reply of `GET /version`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VersionInfo {
    /// The daemon's version.
    pub version: String,
    /// The API's version: the first part of its paths.
    pub api: String,
    /// The address on which the daemon listens for TCP clients, such as `127.0.0.1:8889`.
    pub address: String,
    /// Whether TCP connections use TLS.
    #[serde(default)]
    pub tls: bool,
}
