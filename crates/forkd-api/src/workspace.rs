//! Workspaces: sandboxes with a name that outlive a reboot.

use serde::{Deserialize, Serialize};

/// A workspace to make.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WorkspaceRequest {
    /// Its name: like a tag, of at most 48 characters.
    pub name: String,
    /// The snapshot its first sandbox is forked from.
    pub snapshot_tag: String,
    /// Whether it has a network; it has when absent, if its snapshot has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Memory its sandbox may use on the host, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Accepted, without meaning: every sandbox has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_child_netns: Option<bool>,
}

/// How to put a workspace away.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SuspendRequest {
    /// Store what differs from the snapshot its sandbox was forked from; else all of it.
    #[serde(default)]
    pub diff: bool,
}

/// Where a workspace stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceStatus {
    /// It has a sandbox.
    Running,
    /// It is on disk.
    Suspended,
    /// Its sandbox is gone, and it was not suspended: what it did since its last state is lost. It can be
    /// resumed from there.
    Stale,
}

/// What is known of a workspace.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct WorkspaceInfo<S = WorkspaceStatus> {
    /// Whose it is.
    #[serde(default)]
    pub owner: String,
    /// `ws` and letters and digits.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub id: String,
    /// Its name.
    pub name: String,
    /// The snapshot its first sandbox was forked from.
    pub source_snapshot_tag: String,
    /// The snapshot its next sandbox is forked from, once it was suspended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub current_state_tag: Option<String>,
    /// Where it stands.
    #[cfg_attr(feature = "openapi", schema(value_type = WorkspaceStatus))]
    pub status: S,
    /// Its sandbox, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_sandbox_id: Option<String>,
    /// When it was made, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// When it was last made, suspended or resumed.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub last_active_unix: u64,
}
