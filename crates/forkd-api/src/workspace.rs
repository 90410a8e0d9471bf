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
    /// If true, the daemon stores only the difference to the snapshot that the sandbox was forked from.
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
    /// The workspace's owner.
    #[serde(default)]
    pub owner: String,
    /// `ws`, then lower-case letters and digits.
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
    /// The workspace's status.
    #[cfg_attr(feature = "openapi", schema(value_type = WorkspaceStatus))]
    pub status: S,
    /// Its sandbox, while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub live_sandbox_id: Option<String>,
    /// Creation time, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub created_at_unix: u64,
    /// Time of the last create, suspend or resume, in seconds since 1970.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub last_active_unix: u64,
}
