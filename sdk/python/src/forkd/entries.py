"""Names in a sandbox and on this host: what belongs to a folder, and what would lie outside of it. Without any network."""

from __future__ import annotations

import os
import stat
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Generator, Iterable, Iterator, Optional, Union

from .errors import ForkdError, InvalidRequestError
from .models import FileInfo

Local = Union[str, "os.PathLike[str]"]
Data = Union[str, bytes, bytearray, IO[bytes], IO[str], Iterable[bytes]]
# The most levels of folders that the daemon lists.
DEEPEST = 64
PIECE = 262_144


@dataclass
class Transfer:
    """What was copied, as paths of the target; and the links, pipes and devices that were left out, as paths of the source."""

    copied: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class LocalEntry:
    """A file or a folder below a local folder that is uploaded."""

    path: Path
    # Relative to the folder, with `/`; empty for the folder itself.
    name: str
    kind: str
    mode: int


def bytes_of(data: Data) -> Union[bytes, Iterable[bytes]]:
    """What is sent as the content of a file."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray)):
        return bytes(data)
    read: Any = getattr(data, "read", None)
    return _pieces(read) if read is not None else data  # type: ignore[return-value]


def _pieces(read: Any) -> Iterator[bytes]:
    while True:
        piece: Any = read(PIECE)
        if not piece:
            return
        yield piece.encode() if isinstance(piece, str) else piece


def octal(mode: Optional[int]) -> Optional[str]:
    return None if mode is None else format(mode & 0o7777, "o")


def local_entries(root: Path) -> Iterator[LocalEntry]:
    """A local file, or a folder and all below it. Links are not followed."""
    info = os.stat(root)
    kind = _kind(info.st_mode)
    yield LocalEntry(root, "", kind, stat.S_IMODE(info.st_mode))
    if kind == "directory":
        yield from _below(root, "")


def _below(folder: Path, prefix: str) -> Iterator[LocalEntry]:
    for found in sorted(os.scandir(folder), key=lambda item: item.name):
        mode = found.stat(follow_symlinks=False).st_mode
        entry = LocalEntry(Path(found.path), prefix + found.name, _kind(mode), stat.S_IMODE(mode))
        yield entry
        if entry.kind == "directory":
            yield from _below(entry.path, entry.name + "/")


def _kind(mode: int) -> str:
    if stat.S_ISDIR(mode):
        return "directory"
    if stat.S_ISREG(mode):
        return "file"
    return "symlink" if stat.S_ISLNK(mode) else "other"


def join(folder: str, name: str) -> str:
    """A path in the guest."""
    return folder.rstrip("/") + "/" + name if name else folder


def relative(entry: FileInfo, folder: str) -> tuple[str, ...]:
    """The parts of an entry's path below the listed folder. The guest chooses names: one that leads outside is an error."""
    start = folder.rstrip("/") + "/"
    parts = tuple(entry.path[len(start) :].split("/")) if entry.path.startswith(start) else ()
    if not parts or any(_bad(part) for part in parts):
        raise ForkdError(
            f"the sandbox lists {entry.path!r} in {folder}: that name leads out of the folder, so nothing more is copied"
        )
    return parts


def _bad(part: str) -> bool:
    special = part in ("", ".", "..") or "\0" in part or os.sep in part
    return special or (os.altsep is not None and os.altsep in part) or (os.name == "nt" and ":" in part)


def local_folder(root: Path, parts: tuple[str, ...]) -> Path:
    """Makes a folder below `root`, without following links that lie there."""
    path = root
    for part in parts:
        path = path / part
        if path.is_symlink() or (path.exists() and not path.is_dir()):
            raise InvalidRequestError(f"{path} is in the way, and no folder: remove it, or choose another target")
        path.mkdir(exist_ok=True)
    return path


@contextmanager
def open_local(path: Path, mode: int) -> Generator[IO[bytes], None, None]:
    """Opens a local file for writing; it is there when the block ends, and not if that raises. A link is not followed.

    It gets the permission bits of the guest's file, without set-user-id and the like.
    """
    if path.is_symlink():
        raise InvalidRequestError(f"{path} is a link: remove it, or choose another target")
    if path.exists() and not path.is_file():
        # A pipe or a device is written to, and stays what it is.
        with open(path, "wb") as file:
            yield file
        return
    part = path.with_name(f".forkd-{uuid.uuid4().hex[:12]}.part")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
    try:
        with os.fdopen(os.open(part, flags, 0o600), "wb") as file:
            yield file
        os.chmod(part, mode & 0o777)
        os.replace(part, path)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(part)
        raise
