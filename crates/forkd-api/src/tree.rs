//! The fork tree: which snapshot and which sandbox came from which.

use serde::{Deserialize, Serialize};

/// The kind of a node in the fork tree.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TreeKind {
    /// A snapshot.
    Snapshot,
    /// A sandbox.
    Sandbox,
}

/// How a node came from its parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum TreeHow {
    /// A sandbox forked from a snapshot.
    Spawn,
    /// A snapshot of a running sandbox.
    Branch,
    /// A snapshot stored as a layer on its parent.
    Diff,
    /// A snapshot made by compacting another one.
    Compact,
    /// A sandbox that was rolled back to a snapshot.
    Rollback,
}

/// A snapshot or a sandbox in the fork tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TreeNode {
    /// `snapshot:TAG` or `sandbox:ID`. For a removed snapshot whose tag another snapshot has now: `snapshot:TAG@` and
    /// the first digits of its content's id.
    pub id: String,
    /// The node's kind.
    pub kind: TreeKind,
    /// The tag or the id; `?` for a snapshot that the caller may not see.
    pub name: String,
    /// The node it came from; none for a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The status of a snapshot, the state of a sandbox, or `gone`.
    pub state: String,
    /// Whether the object no longer exists. Such a node is listed because others came from it.
    pub gone: bool,
    /// Creation time, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at_unix: Option<u64>,
    /// How the node came from its parent, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub how: Option<TreeHow>,
    /// For a sandbox that was rolled back: the node it continued from. That is also the parent, unless the node came
    /// from the sandbox itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back_to: Option<String>,
}

/// The reply of `GET /v1/tree`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Tree {
    /// All nodes, oldest first.
    pub nodes: Vec<TreeNode>,
}
