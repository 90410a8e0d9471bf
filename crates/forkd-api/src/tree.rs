//! The fork tree: the parents of snapshots and sandboxes.

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
    /// A sandbox forked from a running sandbox, without a snapshot.
    Fork,
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
pub struct TreeNode<K = TreeKind, H = TreeHow> {
    /// `snapshot:TAG` or `sandbox:ID`. If another snapshot has the tag of a removed one, the removed one is
    /// `snapshot:TAG@` and the beginning of its content's id.
    pub id: String,
    /// The kind of the node.
    #[cfg_attr(feature = "openapi", schema(value_type = TreeKind))]
    pub kind: K,
    /// The tag or the id; `?` for a snapshot that the client may not see.
    pub name: String,
    /// The node it came from; none for a root.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<String>,
    /// The status of a snapshot, the state of a sandbox, or `gone`.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub state: String,
    /// Whether it no longer exists. The tree has it because other nodes came from it.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub gone: bool,
    /// Creation time, in seconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created_at_unix: Option<u64>,
    /// How it came from its parent, if the daemon knows that.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<TreeHow>))]
    pub how: Option<H>,
    /// For a sandbox that was rolled back: the node that it continued from. This node is also the parent, unless it
    /// came from the sandbox itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rolled_back_to: Option<String>,
}

/// The reply of `GET /v1/tree`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Tree<N = TreeNode> {
    /// All nodes, oldest first.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<TreeNode>))]
    pub nodes: Vec<N>,
}
