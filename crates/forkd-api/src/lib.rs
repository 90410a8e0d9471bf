//! The bodies of requests and replies: one definition for the daemon, the `forkd` command and tests that check a
//! reply.
//!
//! Requests reject unknown fields, so that a misspelt field is an error. Replies accept them, and most fields of a
//! reply are optional: a client understands an older and a newer daemon. The feature `openapi` describes every type
//! for the OpenAPI document. This crate depends on no HTTP library and not on the daemon.

mod code;
mod daemon;
mod error;
mod event;
mod exec;
mod file;
mod sandbox;
mod snapshot;
pub mod stream;
mod token;
mod tree;
mod workspace;

pub use code::{Code, Retry};
pub use daemon::{Health, VersionInfo};
pub use error::ErrorBody;
pub use event::{Event, EventKind, EventSubject};
pub use exec::{EvalReply, EvalRequest, ExecReply, ExecRequest};
pub use file::{FileInfo, FileKind, FileList, FileWritten};
pub use sandbox::{
    CreateRequest, GoneInfo, LinePort, OnTimeout, PauseInfo, PingReply, RollbackRequest, SandboxInfo,
    SandboxState, SpawnError, SpawnReply, Stats, UpdateRequest,
};
pub use snapshot::{
    BranchRequest, CompactRequest, LayerInfo, OwnerRequest, Progress, SnapshotInfo, SnapshotInfoDetail,
    SnapshotPhase, SnapshotRequest, SnapshotStatus, TemplateInfo,
};
pub use token::{NewToken, TokenInfo, TokenRequest, TokenScope};
pub use tree::{Tree, TreeHow, TreeKind, TreeNode};
pub use workspace::{SuspendRequest, WorkspaceInfo, WorkspaceRequest, WorkspaceStatus};
