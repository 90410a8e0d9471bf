"""Every route of the daemon, once: what to send, and what comes back. Both clients have a method for each of them.

A parameter has the name of the OpenAPI document. `docs/API.md` describes bodies, replies and errors.
"""

from __future__ import annotations

import uuid
from typing import Any, Iterable, Literal, Optional, Union

from . import requests as bodies
from .calls import Call, Page, anything, content, many, nothing, one, page, text
from .models import (
    AgentPort,
    ArchivedSandbox,
    EvalReply,
    ExecReply,
    FileInfo,
    FileList,
    FileTree,
    FileWritten,
    Health,
    NewToken,
    PingReply,
    SandboxInfo,
    SandboxState,
    SnapshotInfo,
    SnapshotInfoDetail,
    SpawnReply,
    Stats,
    TokenInfo,
    Tree,
    VersionInfo,
    WorkspaceInfo,
)

# How many times the client's timeout a boot, a fork, a save or a rollback may take.
LONG = 5.0


def new_key() -> str:
    """An idempotency key: with it the daemon does a request once, however often it is sent."""
    return "python-" + uuid.uuid4().hex


def _key(key: Optional[str]) -> dict[str, str]:
    return {"idempotency-key": key or new_key()}


# The daemon.


def health() -> Call[Health]:
    """Whether the daemon is up. Needs no token."""
    return Call("GET", "/healthz", one(Health), repeatable=True)


def version() -> Call[VersionInfo]:
    """Version of the daemon and of its API."""
    return Call("GET", "/version", one(VersionInfo), repeatable=True)


def metrics() -> Call[str]:
    """Metrics in Prometheus' text format."""
    return Call("GET", "/metrics", text, repeatable=True)


def get_tree() -> Call[Tree]:
    """The ancestry of the caller's snapshots and sandboxes."""
    return Call("GET", "/v1/tree", one(Tree), repeatable=True)


# Sandboxes.


def list_sandboxes(
    *,
    label: Optional[list[str]] = None,
    snapshot_tag: Optional[str] = None,
    owner: Optional[str] = None,
    state: Optional[SandboxState] = None,
    limit: Optional[int] = None,
    cursor: Optional[str] = None,
) -> Call[Page[SandboxInfo]]:
    """One page of the caller's sandboxes, oldest first; all of them without `limit`."""
    query = dict(label=label, snapshot_tag=snapshot_tag, owner=owner, state=state, limit=limit, cursor=cursor)
    return Call("GET", "/v1/sandboxes", page(SandboxInfo), query=query, repeatable=True)


def list_archived_sandboxes(
    *,
    label: Optional[list[str]] = None,
    snapshot_tag: Optional[str] = None,
    limit: Optional[int] = None,
    cursor: Optional[str] = None,
) -> Call[Page[ArchivedSandbox]]:
    """Sandboxes that ended during the last day, with the reason."""
    query = dict(archived=True, label=label, snapshot_tag=snapshot_tag, limit=limit, cursor=cursor)
    return Call("GET", "/v1/sandboxes", page(ArchivedSandbox), query=query, repeatable=True)


def create_sandboxes(
    body: bodies.CreateRequest, *, wait: Optional[bool] = None, idempotency_key: Optional[str] = None
) -> Call[list[SandboxInfo]]:
    """Forks children from a snapshot, or boots a sandbox from an image."""
    return Call(
        "POST",
        "/v1/sandboxes",
        many(SandboxInfo),
        query=dict(wait=wait),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def create_each_sandbox(
    body: bodies.CreateRequest, *, wait: Optional[bool] = None, idempotency_key: Optional[str] = None
) -> Call[SpawnReply]:
    """Like `create_sandboxes`, and the reply also has an error for each child that does not run."""
    return Call(
        "POST",
        "/v1/sandboxes",
        one(SpawnReply),
        query=dict(results="each", wait=wait),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def get_sandbox(
    id: str, *, wait: Optional[Literal["ready"]] = None, timeout_secs: Optional[int] = None
) -> Call[SandboxInfo]:
    """Shows one sandbox; with `wait="ready"`, when it is no longer `starting`."""
    patience = float(timeout_secs or 30) if wait else 0.0
    query = dict(wait=wait, timeout_secs=timeout_secs)
    route = "/v1/sandboxes/{id}"
    return Call("GET", route, one(SandboxInfo), ids=(id,), query=query, repeatable=True, patience=patience)


def update_sandbox(id: str, body: bodies.UpdateRequest) -> Call[SandboxInfo]:
    """Changes timeouts and labels. Timeouts count from now; an absent field keeps its value."""
    return Call("PATCH", "/v1/sandboxes/{id}", one(SandboxInfo), ids=(id,), body=body)


def delete_sandbox(id: str) -> Call[None]:
    """Ends a sandbox at once, like a power cut, and removes it."""
    return Call("DELETE", "/v1/sandboxes/{id}", nothing, ids=(id,))


def fork_sandbox(
    id: str, body: bodies.ForkRequest, *, wait: Optional[bool] = None, idempotency_key: Optional[str] = None
) -> Call[SpawnReply]:
    """Forks children from a running sandbox, all from one instant, and returns an error for each that does not run."""
    return Call(
        "POST",
        "/v1/sandboxes/{id}/fork",
        one(SpawnReply),
        ids=(id,),
        query=dict(results="each", wait=wait),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def ping_sandbox(id: str) -> Call[PingReply]:
    """Pings the agent in the guest."""
    return Call("POST", "/v1/sandboxes/{id}/ping", one(PingReply), ids=(id,))


def get_stats(id: str) -> Call[Stats]:
    """The resources that a sandbox uses on the host."""
    return Call("GET", "/v1/sandboxes/{id}/stats", one(Stats), ids=(id,), repeatable=True)


def get_console(id: str, *, tail: Optional[int] = None) -> Call[str]:
    """The output of the guest's console."""
    return Call("GET", "/v1/sandboxes/{id}/console", text, ids=(id,), query=dict(tail=tail), repeatable=True)


def follow_console(id: str, *, tail: Optional[int] = None) -> Call[str]:
    """The output of the guest's console as it comes, until the sandbox ends."""
    return Call("GET", "/v1/sandboxes/{id}/console", text, ids=(id,), query=dict(tail=tail, follow=True))


def exec_command(id: str, body: bodies.ExecRequest) -> Call[ExecReply]:
    """Runs a command to its end."""
    patience = float(body.get("timeout_secs", 30))
    return Call("POST", "/v1/sandboxes/{id}/exec", one(ExecReply), ids=(id,), body=body, patience=patience)


def eval_code(id: str, body: bodies.EvalRequest) -> Call[EvalReply]:
    """Evaluates Python in the sandbox's warmed interpreter."""
    patience = float(body.get("timeout_secs", 30))
    return Call("POST", "/v1/sandboxes/{id}/eval", one(EvalReply), ids=(id,), body=body, patience=patience)


def exec_stream(id: str) -> Call[None]:
    """Runs a command over a WebSocket: only the address."""
    return Call("GET", "/v1/sandboxes/{id}/exec/stream", nothing, ids=(id,))


def run_stream() -> Call[None]:
    """Runs a command in a new sandbox over a WebSocket: only the address."""
    return Call("GET", "/v1/run", nothing)


def send_json_line(id: str, body: dict[str, Any]) -> Call[Any]:
    """Sends one request of the JSON-lines protocol to the agent."""
    limit = body.get("timeout") or 30
    patience = float(limit) if body.get("action") in ("exec", "eval") and isinstance(limit, (int, float)) else 0.0
    return Call("POST", "/v1/sandboxes/{id}/json-lines", anything, ids=(id,), body=body, patience=patience)


def open_agent_port(id: str) -> Call[AgentPort]:
    """Opens the agent port on loopback, or returns the one that is open."""
    return Call("PUT", "/v1/sandboxes/{id}/agent-port", one(AgentPort), ids=(id,), repeatable=True)


def close_agent_port(id: str) -> Call[None]:
    """Closes the agent port."""
    return Call("DELETE", "/v1/sandboxes/{id}/agent-port", nothing, ids=(id,), repeatable=True)


# Files.


def read_file(id: str, path: str, *, user: Optional[str] = None) -> Call[bytes]:
    """Reads a file."""
    query = dict(path=path, user=user)
    return Call("GET", "/v1/sandboxes/{id}/files", content, ids=(id,), query=query, repeatable=True)


def write_file(
    id: str,
    path: str,
    content: Union[bytes, Iterable[bytes]],
    *,
    user: Optional[str] = None,
    mode: Optional[str] = None,
) -> Call[FileWritten]:
    """Writes a file completely or not at all. `mode` is octal, such as `"644"`."""
    return Call(
        "PUT",
        "/v1/sandboxes/{id}/files",
        one(FileWritten),
        ids=(id,),
        query=dict(path=path, user=user, mode=mode),
        content=content,
        headers={"content-type": "application/octet-stream"},
        repeatable=isinstance(content, bytes),
    )


def delete_file(id: str, path: str, *, user: Optional[str] = None, recursive: Optional[bool] = None) -> Call[None]:
    """Removes a file, a link or an empty folder; with `recursive`, a folder with its content."""
    query = dict(path=path, user=user, recursive=recursive)
    return Call("DELETE", "/v1/sandboxes/{id}/files", nothing, ids=(id,), query=query)


def list_files(id: str, path: str, *, user: Optional[str] = None, depth: Optional[int] = None) -> Call[FileList]:
    """Lists a folder, `depth` levels of it."""
    query = dict(path=path, user=user, depth=depth)
    return Call("GET", "/v1/sandboxes/{id}/files/list", one(FileList), ids=(id,), query=query, repeatable=True)


def stat_file(id: str, path: str, *, user: Optional[str] = None) -> Call[FileInfo]:
    """The attributes of a file. A link is not followed."""
    query = dict(path=path, user=user)
    return Call("GET", "/v1/sandboxes/{id}/files/stat", one(FileInfo), ids=(id,), query=query, repeatable=True)


def file_tree(
    id: str, path: str, *, user: Optional[str] = None, hash: Optional[bool] = None
) -> Call[FileTree]:
    """A folder with all below it; with `hash`, the hashes of the files' contents."""
    query = dict(path=path, user=user, hash=hash)
    route = "/v1/sandboxes/{id}/files/tree"
    return Call("GET", route, one(FileTree), ids=(id,), query=query, repeatable=True, times=LONG)


def make_folder(id: str, body: bodies.MkdirRequest) -> Call[FileInfo]:
    """Creates a folder and its missing parent folders."""
    return Call("POST", "/v1/sandboxes/{id}/files/mkdir", one(FileInfo), ids=(id,), body=body)


def move_file(id: str, body: bodies.MoveRequest) -> Call[FileInfo]:
    """Moves a file or a folder within one file system of the guest."""
    return Call("POST", "/v1/sandboxes/{id}/files/move", one(FileInfo), ids=(id,), body=body)


# Branches and time.


def branch_sandbox(
    id: str, body: bodies.BranchRequest, *, idempotency_key: Optional[str] = None
) -> Call[SnapshotInfo]:
    """Branches a sandbox, which continues."""
    return Call(
        "POST",
        "/v1/sandboxes/{id}/branch",
        one(SnapshotInfo),
        ids=(id,),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def rollback_sandbox(
    id: str, body: bodies.RollbackRequest, *, idempotency_key: Optional[str] = None
) -> Call[SandboxInfo]:
    """Rolls a sandbox back to a snapshot, under the same id."""
    return Call(
        "POST",
        "/v1/sandboxes/{id}/rollback",
        one(SandboxInfo),
        ids=(id,),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def pause_sandbox(id: str) -> Call[SandboxInfo]:
    """Pauses a sandbox: its vCPUs and its devices stand still."""
    return Call("POST", "/v1/sandboxes/{id}/pause", one(SandboxInfo), ids=(id,))


def resume_sandbox(id: str) -> Call[SandboxInfo]:
    """Resumes a paused sandbox."""
    return Call("POST", "/v1/sandboxes/{id}/resume", one(SandboxInfo), ids=(id,))


# Snapshots.


def list_snapshots(*, limit: Optional[int] = None, cursor: Optional[str] = None) -> Call[Page[SnapshotInfo]]:
    """One page of the snapshots that the caller may use, by tag; all of them without `limit`."""
    return Call("GET", "/v1/snapshots", page(SnapshotInfo), query=dict(limit=limit, cursor=cursor), repeatable=True)


def create_snapshot(
    body: bodies.SnapshotRequest, *, wait: Optional[bool] = None, idempotency_key: Optional[str] = None
) -> Call[SnapshotInfo]:
    """Boots a guest, warms it up and saves it."""
    return Call(
        "POST",
        "/v1/snapshots",
        one(SnapshotInfo),
        query=dict(wait=wait),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def get_snapshot(tag: str) -> Call[SnapshotInfo]:
    """Shows one snapshot."""
    return Call("GET", "/v1/snapshots/{tag}", one(SnapshotInfo), ids=(tag,), repeatable=True)


def get_snapshot_info(tag: str) -> Call[SnapshotInfoDetail]:
    """Shows a snapshot on disk in detail: its ancestors, its dependents and its layers."""
    return Call("GET", "/v1/snapshots/{tag}/info", one(SnapshotInfoDetail), ids=(tag,), repeatable=True)


def delete_snapshot(tag: str, *, cascade: Optional[bool] = None, force: Optional[bool] = None) -> Call[None]:
    """Deletes a snapshot, or cancels its creation. Its children keep running."""
    query = dict(cascade=cascade, force=force)
    return Call("DELETE", "/v1/snapshots/{tag}", nothing, ids=(tag,), query=query)


def compact_snapshot(
    tag: str, body: bodies.CompactRequest, *, idempotency_key: Optional[str] = None
) -> Call[SnapshotInfo]:
    """Compacts a snapshot into a new one without ancestors."""
    return Call(
        "POST",
        "/v1/snapshots/{tag}/compact",
        one(SnapshotInfo),
        ids=(tag,),
        body=body,
        headers=_key(idempotency_key),
        repeatable=True,
        times=LONG,
    )


def unload_snapshot(tag: str) -> Call[None]:
    """Frees the memory of a snapshot once its children have ended; it stays on disk."""
    return Call("POST", "/v1/snapshots/{tag}/unload", nothing, ids=(tag,))


def set_snapshot_owner(tag: str, body: bodies.OwnerRequest) -> Call[SnapshotInfo]:
    """Changes a snapshot's owner. Needs an admin's token."""
    return Call("POST", "/v1/snapshots/{tag}/owner", one(SnapshotInfo), ids=(tag,), body=body)


# Workspaces.


def list_workspaces(*, limit: Optional[int] = None, cursor: Optional[str] = None) -> Call[Page[WorkspaceInfo]]:
    """One page of the caller's workspaces, by name; all of them without `limit`."""
    return Call("GET", "/v1/workspaces", page(WorkspaceInfo), query=dict(limit=limit, cursor=cursor), repeatable=True)


def create_workspace(body: bodies.WorkspaceRequest, *, idempotency_key: Optional[str] = None) -> Call[WorkspaceInfo]:
    """Creates a workspace: a sandbox with a name that can be suspended and resumed."""
    headers = _key(idempotency_key)
    route = "/v1/workspaces"
    return Call("POST", route, one(WorkspaceInfo), body=body, headers=headers, repeatable=True, times=LONG)


def get_workspace(name: str) -> Call[WorkspaceInfo]:
    """Shows one workspace."""
    return Call("GET", "/v1/workspaces/{name}", one(WorkspaceInfo), ids=(name,), repeatable=True)


def delete_workspace(name: str) -> Call[None]:
    """Deletes a workspace: its sandbox and its stored states."""
    return Call("DELETE", "/v1/workspaces/{name}", nothing, ids=(name,))


def suspend_workspace(name: str, body: Optional[bodies.SuspendRequest] = None) -> Call[WorkspaceInfo]:
    """Suspends a workspace: stores its sandbox on disk, then ends it."""
    route = "/v1/workspaces/{name}/suspend"
    return Call("POST", route, one(WorkspaceInfo), ids=(name,), body=body or {}, times=LONG)


def resume_workspace(name: str) -> Call[WorkspaceInfo]:
    """Resumes a workspace: forks a sandbox from its last state."""
    return Call("POST", "/v1/workspaces/{name}/resume", one(WorkspaceInfo), ids=(name,), times=LONG)


# Tokens. All of them need an admin's token.


def list_tokens() -> Call[list[TokenInfo]]:
    """All tokens without their secrets."""
    return Call("GET", "/v1/tokens", many(TokenInfo), repeatable=True)


def create_token(body: bodies.TokenRequest) -> Call[NewToken]:
    """Creates a token; the reply has its secret. The daemon does not keep that, so a lost reply cannot be had again."""
    return Call("POST", "/v1/tokens", one(NewToken), body=body)


def delete_token(name: str) -> Call[None]:
    """Removes a token: the daemon rejects it from now on."""
    return Call("DELETE", "/v1/tokens/{name}", nothing, ids=(name,))


def rotate_token(name: str) -> Call[NewToken]:
    """Creates a new secret for a token, and rejects the old one from now on."""
    return Call("POST", "/v1/tokens/{name}/rotate", one(NewToken), ids=(name,))
