"""Files in a sandbox, for asyncio."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, AsyncIterator, List, Literal, Optional, Union, overload

from . import routes
from .entries import DEEPEST, Data, Local, Transfer, bytes_of, join, local_entries, local_folder
from .entries import octal, open_local, relative
from .errors import NotFoundError
from .models import FileInfo, FileTree, FileWritten

if TYPE_CHECKING:
    from .async_client import AsyncClient


class AsyncFileStream:
    """A file that is read piece by piece: iterate over it, or use it as a context manager and `read` it."""

    def __init__(self, client: AsyncClient, id: str, path: str, user: Optional[str]) -> None:
        self._stack = AsyncExitStack()
        self._body = client.stream(routes.read_file(id, path, user=user), timeout=client.address.timeout)
        self._pieces: Optional[AsyncIterator[bytes]] = None

    async def open(self) -> AsyncFileStream:
        """Waits for the beginning of the file."""
        if self._pieces is None:
            self._pieces = await self._stack.enter_async_context(self._body)
        return self

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await self.open()
        # A connection that breaks reaches the context manager in there, which makes our error of it.
        async with self._stack:
            if self._pieces is not None:
                async for piece in self._pieces:
                    yield piece

    async def read(self) -> bytes:
        """The rest of the file."""
        return b"".join([piece async for piece in self])

    async def close(self) -> None:
        await self._stack.aclose()

    async def __aenter__(self) -> AsyncFileStream:
        return await self.open()

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class AsyncFiles:
    """`sandbox.files`. Paths in the sandbox are absolute."""

    def __init__(self, client: AsyncClient, id: str) -> None:
        self._client = client
        self._id = id

    @overload
    async def read(self, path: str, format: Literal["text"] = "text", *, user: Optional[str] = None) -> str: ...

    @overload
    async def read(self, path: str, format: Literal["bytes"], *, user: Optional[str] = None) -> bytes: ...

    @overload
    async def read(self, path: str, format: Literal["stream"], *, user: Optional[str] = None) -> AsyncFileStream: ...

    async def read(
        self, path: str, format: Literal["text", "bytes", "stream"] = "text", *, user: Optional[str] = None
    ) -> Union[str, bytes, AsyncFileStream]:
        """Reads a file as text, as bytes, or as a stream of pieces.

        >>> (await sandbox.files.write("/tmp/plan", "read, think")).size
        11
        >>> await sandbox.files.read("/tmp/plan")
        'read, think'
        """
        if format == "stream":
            return await AsyncFileStream(self._client, self._id, path, user).open()
        data = await self._client.read_file(self._id, path, user=user)
        return data if format == "bytes" else data.decode()

    async def write(self, path: str, data: Data, *, user: Optional[str] = None, mode: Optional[int] = None) -> FileWritten:
        """Writes a file completely or not at all. `data` is text, bytes, an open file, or an iterable of bytes."""
        return await self._client.write_file(self._id, path, bytes_of(data), user=user, mode=octal(mode))

    async def list(self, path: str, depth: int = 1, *, user: Optional[str] = None) -> List[FileInfo]:
        """The entries of a folder, `depth` levels of it, sorted by path. Links are not followed."""
        return (await self._client.list_files(self._id, path, user=user, depth=depth)).entries

    async def stat(self, path: str, *, user: Optional[str] = None) -> FileInfo:
        """The attributes of a file. A link is not followed."""
        return await self._client.stat_file(self._id, path, user=user)

    async def exists(self, path: str, *, user: Optional[str] = None) -> bool:
        """Whether there is such a file, folder or link."""
        try:
            await self.stat(path, user=user)
        except NotFoundError as error:
            if error.code != "guest_not_found":
                raise
            return False
        return True

    async def remove(self, path: str, *, recursive: bool = True, user: Optional[str] = None) -> None:
        """Removes a file, a link, or a folder with its content."""
        await self._client.delete_file(self._id, path, user=user, recursive=recursive)

    async def rename(self, old: str, new: str, *, user: Optional[str] = None) -> FileInfo:
        """Renames or moves within one file system. Missing folders are made; an existing file is replaced."""
        if user is None:
            return await self._client.move_file(self._id, {"from": old, "to": new})
        return await self._client.move_file(self._id, {"from": old, "to": new, "user": user})

    async def make_dir(self, path: str, *, user: Optional[str] = None) -> FileInfo:
        """Makes a folder and its missing parents."""
        return await self._client.make_folder(self._id, {"path": path, "user": user} if user else {"path": path})

    async def tree(self, path: str = "/", *, hash: bool = True, user: Optional[str] = None) -> FileTree:
        """A folder with all below it, with the hashes of the files' contents: to compare two of them."""
        return await self._client.file_tree(self._id, path, user=user, hash=hash)

    async def upload(self, local: Local, remote: str, *, user: Optional[str] = None) -> Transfer:
        """Copies a local file or folder to the path `remote`. Links are left out, and `skipped` names them."""
        done = Transfer()
        for entry in local_entries(Path(local)):
            target = join(remote, entry.name)
            if entry.kind == "directory":
                if not await self.exists(target, user=user):
                    await self.make_dir(target, user=user)
            elif entry.kind == "file":
                with open(entry.path, "rb") as file:
                    await self.write(target, file, user=user, mode=entry.mode)
                done.copied.append(target)
            else:
                done.skipped.append(str(entry.path))
        return done

    async def download(self, remote: str, local: Local, *, user: Optional[str] = None) -> Transfer:
        """Copies a file or a folder of the sandbox to the path `local`.

        The sandbox chooses names: one that leads out of `local` is an error. Links are left out, and `skipped` names them.
        """
        done, root = Transfer(), Path(os.path.abspath(local))
        info = await self.stat(remote, user=user)
        if info.type != "directory":
            await self._fetch(info.path, root, info.mode, user, done)
            return done
        root.mkdir(parents=True, exist_ok=True)
        for entry in await self.list(remote, DEEPEST, user=user):
            parts = relative(entry, remote)
            if entry.type == "directory":
                local_folder(root, parts)
            elif entry.type == "file":
                folder = local_folder(root, parts[:-1])
                await self._fetch(entry.path, folder / parts[-1], entry.mode, user, done)
            else:
                done.skipped.append(entry.path)
        return done

    async def _fetch(self, remote: str, local: Path, mode: int, user: Optional[str], done: Transfer) -> None:
        async with await self.read(remote, "stream", user=user) as pieces:
            with open_local(local, mode) as file:
                async for piece in pieces:
                    file.write(piece)
        done.copied.append(str(local))
