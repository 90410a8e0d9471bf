//! The bodies of requests and replies: one definition for the daemon, the `forkd` command and tests that check a
//! reply.
//!
//! Requests refuse unknown fields, so that a misspelt one is an error. Replies accept them, and most of their fields
//! may be absent: a client understands an older and a newer daemon. The feature `openapi` describes every type for
//! the OpenAPI document. This crate knows no HTTP library and no daemon.
//!
//! A newer daemon may reply with a state that has no name here. So the type of such a field is a parameter, by
//! default the enum. A client that only prints the word reads it as text: `SandboxInfo<String, String>`.

mod code;
mod daemon;
mod error;
mod event;
mod exec;
mod file;
mod file_tree;
mod sandbox;
mod snapshot;
pub mod stream;
mod token;
mod tree;
#[cfg(test)]
mod version_tests;
mod workspace;

pub use code::{Code, Retry};
pub use daemon::{Health, VersionInfo};
pub use error::ErrorBody;
pub use event::{Event, EventKind, EventSubject};
pub use exec::{EvalReply, EvalRequest, ExecReply, ExecRequest};
pub use file::{FileInfo, FileKind, FileList, FileWritten, MkdirRequest, MoveRequest};
pub use file_tree::{FileTree, FileTreeEntry, Incomplete};
pub use sandbox::{
    AgentPort, ArchivedSandbox, CreateRequest, ForkRequest, MAX_TIMEOUT_SECS, OnTimeout, PauseInfo,
    PingReply, RollbackRequest, SandboxInfo, SandboxState, SpawnError, SpawnReply, Stats, UpdateRequest,
};
pub use snapshot::{
    BranchRequest, CompactRequest, LayerInfo, OwnerRequest, Progress, SnapshotInfo, SnapshotInfoDetail,
    SnapshotKind, SnapshotPhase, SnapshotRequest, SnapshotStatus, TemplateInfo,
};
pub use token::{NewToken, TokenInfo, TokenRequest, TokenScope};
pub use tree::{Tree, TreeHow, TreeKind, TreeNode};
pub use workspace::{SuspendRequest, WorkspaceInfo, WorkspaceRequest, WorkspaceStatus};
