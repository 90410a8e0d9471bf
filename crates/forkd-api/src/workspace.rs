//! Workspaces: sandboxes with a name that outlive a reboot.

use serde::{Deserialize, Serialize};

/// A workspace to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct WorkspaceRequest {
    /// The workspace's name, with the characters of a tag; at most 48.
    pub name: String,
    /// The snapshot that the workspace's first sandbox is forked from.
    pub snapshot_tag: String,
    /// Whether the workspace has a network. When absent, it has one if its snapshot has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<bool>,
    /// Memory the sandbox may use on the host, in MiB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_limit_mib: Option<u64>,
    /// Accepted and ignored: every sandbox has a network of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub per_child_netns: Option<bool>,
}

/// How to suspend a workspace.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct SuspendRequest {
    /// Store only what differs from the snapshot the sandbox was forked from. Otherwise everything is stored.
    #[serde(default)]
    pub diff: bool,
}

/// The status of a workspace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum WorkspaceStatus {
    /// It has a running sandbox.
    Running,
    /// It is stored on disk and has no sandbox.
    Suspended,
    /// Its sandbox ended without a suspend. The work since the last stored state is lost; a resume starts from that
    /// state.
    Stale,
}

/// A workspace and its status.
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
    /// The workspace's name.
    pub name: String,
    /// The snapshot that the first sandbox was forked from.
    pub source_snapshot_tag: String,
    /// The snapshot that a resume forks from; absent before the first suspend.
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
