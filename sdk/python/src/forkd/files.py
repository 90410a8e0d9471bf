"""Files in a sandbox."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Iterator, List, Literal, Optional, Union, overload

from . import routes
from .entries import DEEPEST, Data, Local, Transfer, bytes_of, join, local_entries, local_folder
from .entries import octal, open_local, relative
from .errors import NotFoundError
from .models import FileInfo, FileTree, FileWritten

if TYPE_CHECKING:
    from .client import Client


class FileStream:
    """A file that is read piece by piece: iterate over it, or use it as a context manager and `read` it."""

    def __init__(self, client: Client, id: str, path: str, user: Optional[str]) -> None:
        self._stack = ExitStack()
        call = routes.read_file(id, path, user=user)
        self._pieces = self._stack.enter_context(client.stream(call, timeout=client.address.timeout))

    def __iter__(self) -> Iterator[bytes]:
        # A connection that breaks reaches the context manager in there, which makes our error of it.
        with self._stack:
            yield from self._pieces

    def read(self) -> bytes:
        """The rest of the file."""
        return b"".join(self)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> FileStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Files:
    """`sandbox.files`. Paths in the sandbox are absolute."""

    def __init__(self, client: Client, id: str) -> None:
        self._client = client
        self._id = id

    @overload
    def read(self, path: str, format: Literal["text"] = "text", *, user: Optional[str] = None) -> str: ...

    @overload
    def read(self, path: str, format: Literal["bytes"], *, user: Optional[str] = None) -> bytes: ...

    @overload
    def read(self, path: str, format: Literal["stream"], *, user: Optional[str] = None) -> FileStream: ...

    def read(
        self, path: str, format: Literal["text", "bytes", "stream"] = "text", *, user: Optional[str] = None
    ) -> Union[str, bytes, FileStream]:
        """Reads a file as text, as bytes, or as a stream of pieces.

        >>> sandbox.files.write("/tmp/plan", "read, think").size
        11
        >>> sandbox.files.read("/tmp/plan")
        'read, think'
        """
        if format == "stream":
            return FileStream(self._client, self._id, path, user)
        data = self._client.read_file(self._id, path, user=user)
        return data if format == "bytes" else data.decode()

    def write(self, path: str, data: Data, *, user: Optional[str] = None, mode: Optional[int] = None) -> FileWritten:
        """Writes a file completely or not at all. `data` is text, bytes, an open file, or an iterable of bytes."""
        return self._client.write_file(self._id, path, bytes_of(data), user=user, mode=octal(mode))

    def list(self, path: str, depth: int = 1, *, user: Optional[str] = None) -> List[FileInfo]:
        """The entries of a folder, `depth` levels of it, sorted by path. Links are not followed."""
        return self._client.list_files(self._id, path, user=user, depth=depth).entries

    def stat(self, path: str, *, user: Optional[str] = None) -> FileInfo:
        """The attributes of a file. A link is not followed."""
        return self._client.stat_file(self._id, path, user=user)

    def exists(self, path: str, *, user: Optional[str] = None) -> bool:
        """Whether there is such a file, folder or link."""
        try:
            self.stat(path, user=user)
        except NotFoundError as error:
            if error.code != "guest_not_found":
                raise
            return False
        return True

    def remove(self, path: str, *, recursive: bool = True, user: Optional[str] = None) -> None:
        """Removes a file, a link, or a folder with its content."""
        self._client.delete_file(self._id, path, user=user, recursive=recursive)

    def rename(self, old: str, new: str, *, user: Optional[str] = None) -> FileInfo:
        """Renames or moves within one file system. Missing folders are made; an existing file is replaced."""
        if user is None:
            return self._client.move_file(self._id, {"from": old, "to": new})
        return self._client.move_file(self._id, {"from": old, "to": new, "user": user})

    def make_dir(self, path: str, *, user: Optional[str] = None) -> FileInfo:
        """Makes a folder and its missing parents."""
        return self._client.make_folder(self._id, {"path": path, "user": user} if user else {"path": path})

    def tree(self, path: str = "/", *, hash: bool = True, user: Optional[str] = None) -> FileTree:
        """A folder with all below it, with the hashes of the files' contents: to compare two of them."""
        return self._client.file_tree(self._id, path, user=user, hash=hash)

    def upload(self, local: Local, remote: str, *, user: Optional[str] = None) -> Transfer:
        """Copies a local file or folder to the path `remote`. Links are left out, and `skipped` names them."""
        done = Transfer()
        for entry in local_entries(Path(local)):
            target = join(remote, entry.name)
            if entry.kind == "directory":
                if not self.exists(target, user=user):
                    self.make_dir(target, user=user)
            elif entry.kind == "file":
                with open(entry.path, "rb") as file:
                    self.write(target, file, user=user, mode=entry.mode)
                done.copied.append(target)
            else:
                done.skipped.append(str(entry.path))
        return done

    def download(self, remote: str, local: Local, *, user: Optional[str] = None) -> Transfer:
        """Copies a file or a folder of the sandbox to the path `local`.

        The sandbox chooses names: one that leads out of `local` is an error. Links are left out, and `skipped` names them.
        """
        done, root = Transfer(), Path(os.path.abspath(local))
        info = self.stat(remote, user=user)
        if info.type != "directory":
            self._fetch(info.path, root, info.mode, user, done)
            return done
        root.mkdir(parents=True, exist_ok=True)
        for entry in self.list(remote, DEEPEST, user=user):
            parts = relative(entry, remote)
            if entry.type == "directory":
                local_folder(root, parts)
            elif entry.type == "file":
                folder = local_folder(root, parts[:-1])
                self._fetch(entry.path, folder / parts[-1], entry.mode, user, done)
            else:
                done.skipped.append(entry.path)
        return done

    def _fetch(self, remote: str, local: Path, mode: int, user: Optional[str], done: Transfer) -> None:
        with self.read(remote, "stream", user=user) as pieces, open_local(local, mode) as file:
            for piece in pieces:
                file.write(piece)
        done.copied.append(str(local))
