//! Events: what happens to sandboxes, snapshots and workspaces.

use serde::{Deserialize, Serialize};

/// What can happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EventKind {
    /// A sandbox is being made.
    #[serde(rename = "sandbox.created")]
    SandboxCreated,
    /// It runs: for the first time, again after it did not answer, or still, after the daemon was restarted.
    #[serde(rename = "sandbox.running")]
    SandboxRunning,
    /// Its vCPUs stand still.
    #[serde(rename = "sandbox.paused")]
    SandboxPaused,
    /// They go on.
    #[serde(rename = "sandbox.resumed")]
    SandboxResumed,
    /// A branch was taken of it: `snapshot`.
    #[serde(rename = "sandbox.branched")]
    SandboxBranched,
    /// It goes on from `snapshot`.
    #[serde(rename = "sandbox.rolled_back")]
    SandboxRolledBack,
    /// Its agent does not answer any more.
    #[serde(rename = "sandbox.unresponsive")]
    SandboxUnresponsive,
    /// It is over.
    #[serde(rename = "sandbox.ended")]
    SandboxEnded,
    /// A snapshot is being made.
    #[serde(rename = "snapshot.writing")]
    SnapshotWriting,
    /// It is on disk.
    #[serde(rename = "snapshot.ready")]
    SnapshotReady,
    /// It could not be made.
    #[serde(rename = "snapshot.failed")]
    SnapshotFailed,
    /// It is gone.
    #[serde(rename = "snapshot.removed")]
    SnapshotRemoved,
    /// A workspace was made and runs in `sandbox`.
    #[serde(rename = "workspace.created")]
    WorkspaceCreated,
    /// It was put away: its state is `snapshot`.
    #[serde(rename = "workspace.suspended")]
    WorkspaceSuspended,
    /// It runs again, in `sandbox`.
    #[serde(rename = "workspace.resumed")]
    WorkspaceResumed,
    /// It is gone.
    #[serde(rename = "workspace.removed")]
    WorkspaceRemoved,
}

impl EventKind {
    /// Every one of them.
    pub const ALL: [EventKind; 16] = [
        EventKind::SandboxCreated,
        EventKind::SandboxRunning,
        EventKind::SandboxPaused,
        EventKind::SandboxResumed,
        EventKind::SandboxBranched,
        EventKind::SandboxRolledBack,
        EventKind::SandboxUnresponsive,
        EventKind::SandboxEnded,
        EventKind::SnapshotWriting,
        EventKind::SnapshotReady,
        EventKind::SnapshotFailed,
        EventKind::SnapshotRemoved,
        EventKind::WorkspaceCreated,
        EventKind::WorkspaceSuspended,
        EventKind::WorkspaceResumed,
        EventKind::WorkspaceRemoved,
    ];

    /// Its name, such as `sandbox.created`.
    pub fn name(self) -> &'static str {
        match self {
            EventKind::SandboxCreated => "sandbox.created",
            EventKind::SandboxRunning => "sandbox.running",
            EventKind::SandboxPaused => "sandbox.paused",
            EventKind::SandboxResumed => "sandbox.resumed",
            EventKind::SandboxBranched => "sandbox.branched",
            EventKind::SandboxRolledBack => "sandbox.rolled_back",
            EventKind::SandboxUnresponsive => "sandbox.unresponsive",
            EventKind::SandboxEnded => "sandbox.ended",
            EventKind::SnapshotWriting => "snapshot.writing",
            EventKind::SnapshotReady => "snapshot.ready",
            EventKind::SnapshotFailed => "snapshot.failed",
            EventKind::SnapshotRemoved => "snapshot.removed",
            EventKind::WorkspaceCreated => "workspace.created",
            EventKind::WorkspaceSuspended => "workspace.suspended",
            EventKind::WorkspaceResumed => "workspace.resumed",
            EventKind::WorkspaceRemoved => "workspace.removed",
        }
    }
}

/// What it happened to, and what else is known.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventSubject {
    /// The sandbox it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The snapshot it is about, or that the sandbox came from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Its owner; only admins see an event without one. Not sent.
    #[serde(skip)]
    pub owner: Option<String>,
    /// The workspace it is about.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// Why, in one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why, in one sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// Of a forked sandbox that runs: milliseconds from the request to its first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
}

/// Something that happened: the data of an event of `GET /v1/events`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event<K = EventKind> {
    /// The daemon's run and a number, such as `k3v0q1-17`: what `since` takes.
    pub id: String,
    /// Its number in that run. Not sent: it is part of `id`.
    #[serde(skip)]
    pub number: u64,
    /// When, in UTC.
    pub ts: String,
    /// What.
    #[cfg_attr(feature = "openapi", schema(value_type = EventKind))]
    pub kind: K,
    /// What of.
    #[serde(flatten)]
    pub about: EventSubject,
}
