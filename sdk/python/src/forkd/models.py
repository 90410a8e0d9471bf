"""Replies of the daemon, named as in `docs/openapi.json`; `docs/API.md` describes each field."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

EventKind = Literal[
    "sandbox.created",
    "sandbox.running",
    "sandbox.paused",
    "sandbox.resumed",
    "sandbox.branched",
    "sandbox.rolled_back",
    "sandbox.unresponsive",
    "sandbox.ended",
    "snapshot.writing",
    "snapshot.ready",
    "snapshot.failed",
    "snapshot.removed",
    "workspace.created",
    "workspace.suspended",
    "workspace.resumed",
    "workspace.removed",
]
FileKind = Literal["file", "directory", "symlink", "other"]
Incomplete = Literal["unreadable", "changing", "file_system"]
OnTimeout = Literal["kill", "pause", "suspend"]
SandboxState = Literal["starting", "running", "unresponsive", "paused", "ended", "unknown"]
SnapshotKind = Literal["full", "disk", "unknown"]
SnapshotPhase = Literal["booting", "warming", "freezing", "saving"]
SnapshotStatus = Literal["writing", "ready", "failed", "unknown"]
TokenScope = Literal["read", "write", "admin"]
TreeHow = Literal["spawn", "fork", "branch", "diff", "compact", "rollback"]
TreeKind = Literal["snapshot", "sandbox"]
WorkspaceStatus = Literal["running", "suspended", "stale"]


@dataclass(frozen=True)
class Health:
    """The reply of `GET /healthz`."""

    ok: bool


@dataclass(frozen=True)
class VersionInfo:
    """The reply of `GET /version`."""

    address: str
    api: str
    version: str
    tls: bool = False


@dataclass(frozen=True)
class AgentPort:
    """A sandbox's agent port: a loopback port with the JSON-lines protocol."""

    target: str


@dataclass(frozen=True)
class SandboxInfo:
    """A sandbox and its state."""

    created_at_unix: int
    guest_addr: str
    id: str
    mem_size_mib: int
    network: bool
    owner: str
    state: SandboxState
    vcpus: int
    boot_ms: Optional[int] = None
    branch_count: int = 0
    console_tail: Optional[str] = None
    detail: Optional[str] = None
    egress: Optional[list[str]] = None
    expires_at_unix: Optional[int] = None
    forked_from: Optional[str] = None
    has_branched: bool = False
    idle_timeout_secs: Optional[int] = None
    image: Optional[str] = None
    labels: dict[str, str] = field(default_factory=dict[str, str])
    last_active_unix: int = 0
    last_branch_memory_path: Optional[str] = None
    last_branch_tag: Optional[str] = None
    memory_limit_mib: Optional[int] = None
    netns: Optional[str] = None
    on_timeout: OnTimeout = "kill"
    pid: Optional[int] = None
    python: Optional[bool] = None
    ready: bool = False
    ready_ms: Optional[float] = None
    reason: Optional[str] = None
    rolled_back_to: Optional[str] = None
    snapshot_tag: Optional[str] = None
    suspend_as: Optional[str] = None
    workspace: Optional[str] = None


@dataclass(frozen=True)
class ArchivedSandbox:
    """A sandbox that ended and was removed."""

    created_at_unix: int
    detail: str
    ended_at_unix: int
    id: str
    reason: str
    state: str
    labels: dict[str, str] = field(default_factory=dict[str, str])
    snapshot_tag: Optional[str] = None


@dataclass(frozen=True)
class SpawnError:
    """The reason why one child does not run."""

    code: str
    error: str
    index: int
    request_id: str


@dataclass(frozen=True)
class SpawnReply:
    """The reply to a request for several children with `?results=each`."""

    children: list[SandboxInfo]
    errors: list[SpawnError]


@dataclass(frozen=True)
class PauseInfo:
    """A pause of a sandbox."""

    at_unix_ms: int
    why: str
    frozen_ms: Optional[float] = None
    pause_ms: Optional[float] = None


@dataclass(frozen=True)
class Stats:
    """Resources that a sandbox's process uses on the host."""

    private_kib: int
    pss_kib: int
    rss_kib: int
    agent_answered_at_unix_ms: Optional[int] = None
    cpu_ms: Optional[int] = None
    disk_bytes: int = 0
    memory_current_kib: Optional[int] = None
    net_rx_bytes: Optional[int] = None
    net_tx_bytes: Optional[int] = None
    pauses: list[PauseInfo] = field(default_factory=list[PauseInfo])
    shared_kib: int = 0
    uptime_ms: int = 0


@dataclass(frozen=True)
class PingReply:
    """The reply of an agent to a ping."""

    agent_lang: str
    pid: int
    pong: bool
    python: bool
    uptime_ms: int
    version: str
    warm: str
    warmup_ready: bool
    numpy_version: Optional[str] = None

    def __getitem__(self, name: str) -> Any:
        """A field as clients of the reference read it: `ping()["pong"]`."""
        return getattr(self, name)


@dataclass(frozen=True)
class ExecReply:
    """How a command ended, or its output until it was killed at its timeout."""

    exit_code: int
    stderr: str
    stdout: str
    error: Optional[str] = None
    signal: Optional[int] = None
    stderr_truncated: bool = False
    stdout_truncated: bool = False
    timed_out: bool = False


@dataclass(frozen=True)
class EvalReply:
    """The result of an evaluation."""

    exit_code: int
    stderr: str
    stdout: str
    error: Optional[str] = None
    result: Optional[str] = None
    result_json: Optional[Any] = None
    traceback: Optional[str] = None


@dataclass(frozen=True)
class FileInfo:
    """The attributes of a file."""

    group: str
    mode: int
    modified_time: str
    name: str
    owner: str
    path: str
    permissions: str
    size: int
    type: FileKind
    symlink_target: Optional[str] = None
    target_type: Optional[FileKind] = None


@dataclass(frozen=True)
class FileList:
    """The content of a folder."""

    entries: list[FileInfo]


@dataclass(frozen=True)
class FileWritten:
    """A file that was written."""

    atomic: bool
    path: str
    size: int
    whole: bool


@dataclass(frozen=True)
class SnapshotInfo:
    """A snapshot and its status."""

    bootable: bool
    chain_depth: int
    created_at_unix: int
    dir: str
    disk_bytes: int
    kind: SnapshotKind
    mem_size_mib: int
    memory_bytes: int
    network: bool
    state_bytes: int
    status: SnapshotStatus
    tag: str
    vcpus: int
    branched_from: Optional[str] = None
    bytes_written: Optional[int] = None
    diff_logical_bytes: Optional[int] = None
    diff_ms: Optional[float] = None
    diff_physical_bytes: Optional[int] = None
    error: Optional[str] = None
    error_code: Optional[str] = None
    frozen_ms: Optional[float] = None
    image: Optional[str] = None
    kernel: Optional[str] = None
    mode: Optional[str] = None
    owner: str = ""
    parent_tag: Optional[str] = None
    pause_ms: Optional[float] = None
    phase: Optional[SnapshotPhase] = None
    progress: Optional[Progress] = None
    python: Optional[bool] = None
    quiesced: Optional[bool] = None
    template: Optional[TemplateInfo] = None
    warning: Optional[str] = None


@dataclass(frozen=True)
class Progress:
    """Progress of a saver, in bytes."""

    looked_at: int
    scanned_bytes: int
    total: int
    written: int


@dataclass(frozen=True)
class TemplateInfo:
    """A template: the process that forks children."""

    children: int
    pid: int
    source: str


@dataclass(frozen=True)
class SnapshotInfoDetail:
    """A snapshot on disk, in detail."""

    ancestors: list[str]
    chain_depth: int
    created_at_unix: int
    dependents: list[str]
    dir: str
    disk_logical_bytes: int
    disk_physical_bytes: int
    kind: SnapshotKind
    layers: list[LayerInfo]
    made_by_version: str
    memory_logical_bytes: int
    memory_physical_bytes: int
    own_disk_bytes: int
    own_memory_bytes: int
    tag: str
    vmstate_bytes: int
    parent_content_hash: Optional[str] = None
    parent_tag: Optional[str] = None


@dataclass(frozen=True)
class LayerInfo:
    """A layer: a file that snapshots share."""

    digest: str
    kind: str
    logical_bytes: int
    physical_bytes: int
    shared_by: int


@dataclass(frozen=True)
class TreeNode:
    """A snapshot or a sandbox in the fork tree."""

    gone: bool
    id: str
    kind: TreeKind
    name: str
    state: str
    created_at_unix: Optional[int] = None
    how: Optional[TreeHow] = None
    parent: Optional[str] = None
    rolled_back_to: Optional[str] = None


@dataclass(frozen=True)
class Tree:
    """The reply of `GET /v1/tree`."""

    nodes: list[TreeNode]


@dataclass(frozen=True)
class WorkspaceInfo:
    """A workspace and its status."""

    created_at_unix: int
    id: str
    last_active_unix: int
    name: str
    source_snapshot_tag: str
    status: WorkspaceStatus
    current_state_tag: Optional[str] = None
    live_sandbox_id: Optional[str] = None
    owner: str = ""


@dataclass(frozen=True)
class TokenInfo:
    """A token without its secret."""

    created_at_unix: int
    name: str
    owner: str
    scope: TokenScope
    expires_at_unix: Optional[int] = None
    max_memory_mib: Optional[int] = None
    max_sandboxes: Optional[int] = None
    max_snapshots: Optional[int] = None


@dataclass(frozen=True)
class EventSubject:
    """The object of an event, and details."""

    detail: Optional[str] = None
    ready_ms: Optional[float] = None
    reason: Optional[str] = None
    sandbox: Optional[str] = None
    snapshot: Optional[str] = None
    workspace: Optional[str] = None


@dataclass(frozen=True)
class _EventNeeds:
    id: str
    kind: EventKind
    ts: str


@dataclass(frozen=True)
class Event(EventSubject, _EventNeeds):
    """An event of `GET /v1/events`."""


@dataclass(frozen=True)
class _Secret:
    token: str


@dataclass(frozen=True)
class NewToken(TokenInfo, _Secret):
    """A token that was just created or rotated. The daemon sends the secret in this reply only."""


@dataclass(frozen=True)
class FileTreeEntry:
    """A file, a folder or a link below the folder of a `FileTree`; `path` is relative to that folder."""

    path: str
    kind: FileKind
    size: int
    modified_unix_ms: int
    mode: int
    sha256: Optional[str] = None
    target: Optional[str] = None
    incomplete: Optional[Incomplete] = None
    path_base64: Optional[str] = None
    target_base64: Optional[str] = None


@dataclass(frozen=True)
class FileTree:
    """A folder of a guest with all below it, to compare two of them."""

    path: str
    entries: list[FileTreeEntry]
