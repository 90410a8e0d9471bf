"""Snapshots for asyncio."""

from __future__ import annotations

from typing import TYPE_CHECKING, AsyncIterator, List, Mapping, Optional, Sequence, Union

from . import requests as bodies
from . import routes, steps
from .async_client import AsyncClient, default_async_client
from .command import words
from .models import OnTimeout, SnapshotInfo, SnapshotInfoDetail, SnapshotStatus
from .options import create_body
from .steps import OnProgress

if TYPE_CHECKING:
    from .async_sandbox import AsyncSandbox


class AsyncSnapshot:
    """A snapshot, by its tag: `Snapshot` for asyncio.

    >>> snapshot = await AsyncSnapshot.get(tag)
    >>> await snapshot.status()
    'ready'
    """

    def __init__(self, info: SnapshotInfo, client: AsyncClient) -> None:
        self._info = info
        self._client = client

    def __repr__(self) -> str:
        return f"AsyncSnapshot({self.tag!r}, {self._info.status})"

    @property
    def tag(self) -> str:
        return self._info.tag

    @property
    def client(self) -> AsyncClient:
        """The connection that this object uses."""
        return self._client

    async def status(self) -> SnapshotStatus:
        """`writing`, `ready` or `failed`, as the daemon says now."""
        return (await self.info()).status

    @classmethod
    async def warm(
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
        client: Optional[AsyncClient] = None,
    ) -> AsyncSnapshot:
        """Boots an image, warms it up and keeps that moment: a parent for any number of children.

        `warm` is a command and `warm_python` code for the interpreter that `eval` uses. `on_progress` gets a line for each
        step. If it fails, takes longer than `timeout` seconds or is interrupted, no snapshot is left.

            parent = await AsyncSnapshot.warm("python", tag="numpy", warm_python="import numpy", on_progress=print)
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
        client = client or default_async_client()
        return cls(await client.run(steps.warm(body, timeout, on_progress)), client)

    @classmethod
    async def get(cls, tag: str, client: Optional[AsyncClient] = None) -> AsyncSnapshot:
        """The snapshot with this tag."""
        client = client or default_async_client()
        return cls(await client.get_snapshot(tag), client)

    @classmethod
    async def list(cls, client: Optional[AsyncClient] = None) -> AsyncIterator[AsyncSnapshot]:
        """All snapshots that the caller may use, by tag."""
        client = client or default_async_client()
        cursor: Optional[str] = None
        while True:
            page = await client.list_snapshots(limit=200, cursor=cursor)
            for info in page.entries:
                yield cls(info, client)
            cursor = page.next
            if cursor is None:
                return

    async def info(self) -> SnapshotInfo:
        """The snapshot as it is now."""
        self._info = await self._client.get_snapshot(self.tag)
        return self._info

    async def details(self) -> SnapshotInfoDetail:
        """Its ancestors, its dependents and its layers."""
        return await self._client.get_snapshot_info(self.tag)

    async def wait_ready(self, timeout: float = 900.0, on_progress: Optional[OnProgress] = None) -> AsyncSnapshot:
        """Waits until the snapshot is on disk. Children can be forked from a branch before.

        After `timeout` seconds this is a `TimeoutError`, and the daemon goes on with the snapshot.
        """
        self._info = await self._client.run(steps.wait_ready(self.tag, timeout, on_progress))
        return self

    async def spawn(
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
    ) -> List[AsyncSandbox]:
        """Forks `n` sandboxes. All of them run, or there are none, and an error."""
        from .async_sandbox import AsyncSandbox

        body = create_body(
            self.tag, n, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib
        )
        infos = await self._client.run(steps.spawn(routes.create_each_sandbox(body), n))
        return [AsyncSandbox.of(info, self._client) for info in infos]

    async def delete(self, *, cascade: bool = False, force: bool = False) -> None:
        """Removes the snapshot; its sandboxes go on. `cascade` also removes the snapshots built on it."""
        await self._client.delete_snapshot(self.tag, cascade=cascade or None, force=force or None)

    async def unload(self) -> None:
        """Frees its memory, once its children have ended. It stays on disk."""
        await self._client.unload_snapshot(self.tag)

    async def compact(self, to: str) -> AsyncSnapshot:
        """Copies a chain of snapshots into one that depends on no other."""
        return AsyncSnapshot(await self._client.compact_snapshot(self.tag, {"to": to}), self._client)
