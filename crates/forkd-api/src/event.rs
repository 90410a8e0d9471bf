//! Events: changes of sandboxes, snapshots and workspaces.

use serde::{Deserialize, Serialize};

/// The kinds of events.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EventKind {
    /// A sandbox is being created.
    #[serde(rename = "sandbox.created")]
    SandboxCreated,
    /// The sandbox runs: for the first time, again after its agent had not answered, or still after a restart of the
    /// daemon.
    #[serde(rename = "sandbox.running")]
    SandboxRunning,
    /// The sandbox is paused: its vCPUs stand still.
    #[serde(rename = "sandbox.paused")]
    SandboxPaused,
    /// The sandbox was resumed.
    #[serde(rename = "sandbox.resumed")]
    SandboxResumed,
    /// A branch of the sandbox was taken: `snapshot`.
    #[serde(rename = "sandbox.branched")]
    SandboxBranched,
    /// The sandbox was rolled back to `snapshot`.
    #[serde(rename = "sandbox.rolled_back")]
    SandboxRolledBack,
    /// The sandbox's agent no longer answers.
    #[serde(rename = "sandbox.unresponsive")]
    SandboxUnresponsive,
    /// The sandbox ended.
    #[serde(rename = "sandbox.ended")]
    SandboxEnded,
    /// A snapshot is being created.
    #[serde(rename = "snapshot.writing")]
    SnapshotWriting,
    /// The snapshot is on disk.
    #[serde(rename = "snapshot.ready")]
    SnapshotReady,
    /// The snapshot could not be created.
    #[serde(rename = "snapshot.failed")]
    SnapshotFailed,
    /// The snapshot was removed.
    #[serde(rename = "snapshot.removed")]
    SnapshotRemoved,
    /// A workspace was created and runs in `sandbox`.
    #[serde(rename = "workspace.created")]
    WorkspaceCreated,
    /// The workspace was suspended: its state is `snapshot`.
    #[serde(rename = "workspace.suspended")]
    WorkspaceSuspended,
    /// The workspace was resumed and runs in `sandbox`.
    #[serde(rename = "workspace.resumed")]
    WorkspaceResumed,
    /// The workspace was removed.
    #[serde(rename = "workspace.removed")]
    WorkspaceRemoved,
}

impl EventKind {
    /// All kinds.
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

    /// The kind's name, such as `sandbox.created`.
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

/// The object of an event, and details.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct EventSubject {
    /// The sandbox of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sandbox: Option<String>,
    /// The snapshot of the event, or the snapshot that the sandbox was forked from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The owner of the object. Only admins see an event without an owner. Not serialized.
    #[serde(skip)]
    pub owner: Option<String>,
    /// The workspace of the event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workspace: Option<String>,
    /// The reason, as one identifier.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The reason, as one sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<String>,
    /// For a forked sandbox that runs: milliseconds from the request to the agent's first answer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ready_ms: Option<f64>,
}

/// An event: the data of a server-sent event of `GET /v1/events`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Event<K = EventKind> {
    /// The daemon's run and a number, such as `k3v0q1-17`. The parameter `since` takes it.
    pub id: String,
    /// The event's number in that run. Not serialized: it is part of `id`.
    #[serde(skip)]
    pub number: u64,
    /// The time of the event, in UTC.
    pub ts: String,
    /// The kind of the event.
    #[cfg_attr(feature = "openapi", schema(value_type = EventKind))]
    pub kind: K,
    /// The object of the event, and details.
    #[serde(flatten)]
    pub about: EventSubject,
}
