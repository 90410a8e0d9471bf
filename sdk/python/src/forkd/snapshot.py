"""Snapshots: a moment of a guest, from which sandboxes are forked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Iterator, List, Mapping, Optional, Sequence, Union

from . import requests as bodies
from . import routes, steps
from .client import Client, default_client
from .command import words
from .models import OnTimeout, SnapshotInfo, SnapshotInfoDetail, SnapshotStatus
from .options import create_body
from .steps import OnProgress

if TYPE_CHECKING:
    from .sandbox import Sandbox


class Snapshot:
    """A snapshot, by its tag.

    >>> snapshot = Snapshot.get(tag)
    >>> snapshot.status
    'ready'
    """

    def __init__(self, info: SnapshotInfo, client: Client) -> None:
        self._info = info
        self._client = client

    def __repr__(self) -> str:
        return f"Snapshot({self.tag!r}, {self._info.status})"

    @property
    def tag(self) -> str:
        return self._info.tag

    @property
    def client(self) -> Client:
        """The connection that this object uses."""
        return self._client

    @property
    def status(self) -> SnapshotStatus:
        """`writing`, `ready` or `failed`, as the daemon says now."""
        return self.info().status

    @classmethod
    def warm(
        cls,
        image: str,
        tag: Optional[str] = None,
        warm: Union[str, Sequence[str], None] = None,
        warm_python: Optional[str] = None,
        mem_size_mib: Optional[int] = None,
        vcpus: Optional[int] = None,
        network: Optional[bool] = None,
        timeout: float = 900.0,
        on_progress: Optional[OnProgress] = None,
        client: Optional[Client] = None,
    ) -> Snapshot:
        """Boots an image, warms it up and keeps that moment: a parent for any number of children.

        `warm` is a command and `warm_python` code for the interpreter that `eval` uses. `on_progress` gets a line for each
        step. If it fails, takes longer than `timeout` seconds or is interrupted, no snapshot is left.

            parent = Snapshot.warm("python", tag="numpy", warm_python="import numpy", on_progress=print)
        """
        body: bodies.SnapshotRequest = {"tag": tag or steps.new_tag("snapshot"), "image": image}
        if warm is not None:
            body["warm_command"] = words(warm)
        if warm_python is not None:
            body["warm_python"] = warm_python
        if mem_size_mib is not None:
            body["mem_size_mib"] = mem_size_mib
        if vcpus is not None:
            body["vcpus"] = vcpus
        if network is not None:
            body["network"] = network
        client = client or default_client()
        return cls(client.run(steps.warm(body, timeout, on_progress)), client)

    @classmethod
    def get(cls, tag: str, client: Optional[Client] = None) -> Snapshot:
        """The snapshot with this tag."""
        client = client or default_client()
        return cls(client.get_snapshot(tag), client)

    @classmethod
    def list(cls, client: Optional[Client] = None) -> Iterator[Snapshot]:
        """All snapshots that the caller may use, by tag."""
        client = client or default_client()
        cursor: Optional[str] = None
        while True:
            page = client.list_snapshots(limit=200, cursor=cursor)
            for info in page.entries:
                yield cls(info, client)
            cursor = page.next
            if cursor is None:
                return

    def info(self) -> SnapshotInfo:
        """The snapshot as it is now."""
        self._info = self._client.get_snapshot(self.tag)
        return self._info

    def details(self) -> SnapshotInfoDetail:
        """Its ancestors, its dependents and its layers."""
        return self._client.get_snapshot_info(self.tag)

    def wait_ready(self, timeout: float = 900.0, on_progress: Optional[OnProgress] = None) -> Snapshot:
        """Waits until the snapshot is on disk. Children can be forked from a branch before.

        After `timeout` seconds this is a `TimeoutError`, and the daemon goes on with the snapshot.
        """
        self._info = self._client.run(steps.wait_ready(self.tag, timeout, on_progress))
        return self

    def spawn(
        self,
        n: int = 1,
        *,
        timeout: Optional[float] = None,
        idle_timeout: Optional[float] = None,
        on_timeout: Optional[OnTimeout] = None,
        envs: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        network: Optional[bool] = None,
        memory_limit_mib: Optional[int] = None,
    ) -> List[Sandbox]:
        """Forks `n` sandboxes. All of them run, or there are none, and an error."""
        from .sandbox import Sandbox

        body = create_body(
            self.tag, n, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib
        )
        infos = self._client.run(steps.spawn(routes.create_each_sandbox(body), n))
        return [Sandbox.of(info, self._client) for info in infos]

    def delete(self, *, cascade: bool = False, force: bool = False) -> None:
        """Removes the snapshot; its sandboxes go on. `cascade` also removes the snapshots built on it."""
        self._client.delete_snapshot(self.tag, cascade=cascade or None, force=force or None)

    def unload(self) -> None:
        """Frees its memory, once its children have ended. It stays on disk."""
        self._client.unload_snapshot(self.tag)

    def compact(self, to: str) -> Snapshot:
        """Copies a chain of snapshots into one that depends on no other."""
        return Snapshot(self._client.compact_snapshot(self.tag, {"to": to}), self._client)
