"""Bodies of requests, named as in `docs/openapi.json`; `docs/API.md` describes each field."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

if TYPE_CHECKING:
    from typing_extensions import NotRequired

    from .models import OnTimeout, TokenScope


class BranchRequest(TypedDict):
    """A branch to take. The daemon ignores unknown fields."""

    diff: NotRequired[bool | None]
    live: NotRequired[bool | None]
    live_fork: NotRequired[bool | None]
    measure_diff: NotRequired[bool | None]
    mode: NotRequired[str | None]
    parent_tag: NotRequired[str | None]
    tag: NotRequired[str | None]
    wait: NotRequired[bool | None]


class CompactRequest(TypedDict):
    """A snapshot to create by compacting another one."""

    to: str


class CreateRequest(TypedDict):
    """Sandboxes to create: one booted from an image, or children forked from a snapshot."""

    agent_port: NotRequired[bool]
    env: NotRequired[dict[str, str]]
    hugepages: NotRequired[bool | None]
    idle_timeout_secs: NotRequired[int | None]
    image: NotRequired[str | None]
    labels: NotRequired[dict[str, str]]
    live_fork: NotRequired[bool | None]
    mem_size_mib: NotRequired[int | None]
    memory_limit_mib: NotRequired[int | None]
    n: NotRequired[int | None]
    network: NotRequired[bool | None]
    on_timeout: NotRequired[OnTimeout | None]
    per_child_netns: NotRequired[bool | None]
    prewarm: NotRequired[bool | None]
    snapshot_tag: NotRequired[str | None]
    suspend_as: NotRequired[str | None]
    timeout_secs: NotRequired[int | None]
    vcpus: NotRequired[int | None]
    wait: NotRequired[bool | None]
    warm: NotRequired[bool]


class EvalRequest(TypedDict):
    """Python code to evaluate."""

    code: str
    timeout_secs: NotRequired[int]


class ExecRequest(TypedDict):
    """A command to run to its end."""

    args: list[str]
    cwd: NotRequired[str | None]
    env: NotRequired[dict[str, str]]
    stdin: NotRequired[str | None]
    timeout_secs: NotRequired[int]
    user: NotRequired[str | None]


class ExecStreamRequest(TypedDict):
    """A command to run in an existing sandbox."""

    args: list[str]
    cwd: NotRequired[str | None]
    env: NotRequired[dict[str, str]]
    keep: NotRequired[bool]
    pty: NotRequired[TtySize | None]
    timeout_secs: NotRequired[int | None]
    user: NotRequired[str | None]


class ForkRequest(TypedDict):
    """Children to fork from a running sandbox."""

    agent_port: NotRequired[bool]
    env: NotRequired[dict[str, str]]
    idle_timeout_secs: NotRequired[int | None]
    labels: NotRequired[dict[str, str]]
    memory_limit_mib: NotRequired[int | None]
    n: NotRequired[int | None]
    network: NotRequired[bool | None]
    on_timeout: NotRequired[OnTimeout | None]
    suspend_as: NotRequired[str | None]
    timeout_secs: NotRequired[int | None]
    wait: NotRequired[bool | None]


class MkdirRequest(TypedDict):
    """A folder to create."""

    path: str
    user: NotRequired[str | None]


# `from` is a keyword of Python, so this one is not written as a class.
_MoveNeeds = TypedDict("_MoveNeeds", {"from": str, "to": str})


class MoveRequest(_MoveNeeds, total=False):
    """A file or a folder to move."""

    user: str | None


class OwnerRequest(TypedDict):
    """A new owner of a snapshot."""

    owner: str


class RollbackRequest(TypedDict):
    """The target of a rollback."""

    to: NotRequired[str | None]


class RunRequest(TypedDict):
    """A command, and the sandbox to create for it."""

    args: list[str]
    image: str
    cwd: NotRequired[str | None]
    env: NotRequired[dict[str, str]]
    mem_size_mib: NotRequired[int | None]
    network: NotRequired[bool | None]
    timeout_secs: NotRequired[int | None]
    tty: NotRequired[TtySize | None]
    user: NotRequired[str | None]
    vcpus: NotRequired[int | None]


class SnapshotRequest(TypedDict):
    """A snapshot to create: the daemon boots a guest, warms it up, freezes it and saves it."""

    tag: str
    boot_wait_secs: NotRequired[int | None]
    image: NotRequired[str | None]
    kernel: NotRequired[str | None]
    mem_size_mib: NotRequired[int | None]
    network: NotRequired[bool | None]
    rootfs: NotRequired[str | None]
    rw: NotRequired[bool | None]
    tap: NotRequired[str | None]
    vcpus: NotRequired[int | None]
    warm_command: NotRequired[list[str]]
    warm_python: NotRequired[str | None]


class SuspendRequest(TypedDict):
    """How to suspend a workspace."""

    diff: NotRequired[bool]


class TokenRequest(TypedDict):
    """A token to create."""

    name: str
    expires_in_secs: NotRequired[int | None]
    max_memory_mib: NotRequired[int | None]
    max_sandboxes: NotRequired[int | None]
    max_snapshots: NotRequired[int | None]
    owner: NotRequired[str | None]
    scope: NotRequired[TokenScope]


class TtySize(TypedDict):
    """Size of a terminal in characters."""

    cols: int
    rows: int


class UpdateRequest(TypedDict):
    """Changes to a sandbox. Absent fields keep their values."""

    idle_timeout_secs: NotRequired[int | None]
    labels: NotRequired[dict[str, str] | None]
    on_timeout: NotRequired[OnTimeout | None]
    suspend_as: NotRequired[str | None]
    timeout_secs: NotRequired[int | None]


class WorkspaceRequest(TypedDict):
    """A workspace to create."""

    name: str
    snapshot_tag: str
    memory_limit_mib: NotRequired[int | None]
    network: NotRequired[bool | None]
    per_child_netns: NotRequired[bool | None]
