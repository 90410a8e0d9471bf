"""The difference between the files of two sandboxes, without any network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from .models import FileTree, FileTreeEntry

Kind = Literal["added", "removed", "modified", "type", "mode", "unknown"]


@dataclass(frozen=True)
class Change:
    """A file that differs: `before` is the entry here, `after` the entry there.

    The kind is `unknown` if it may differ: the agent could not read it, or it changed meanwhile, as `incomplete` of an entry says.
    """

    path: str
    kind: Kind
    before: Optional[FileTreeEntry]
    after: Optional[FileTreeEntry]


def changes(before: FileTree, after: FileTree) -> list[Change]:
    """What differs, by path. Times do not count: a file is modified if its size, its hash or its target differs."""
    old = {_key(entry): entry for entry in before.entries}
    new = {_key(entry): entry for entry in after.entries}
    folder = before.path.rstrip("/") + "/"
    found: list[Change] = []
    for key in sorted(old.keys() | new.keys()):
        kind = _kind(old.get(key), new.get(key))
        if kind is not None:
            found.append(Change(folder + key[0], kind, old.get(key), new.get(key)))
    return found


def _key(entry: FileTreeEntry) -> tuple[str, str]:
    """The path, exactly: bytes that are not UTF-8 are replaced in `path`."""
    return entry.path, entry.path_base64 or ""


def _unknown(entry: FileTreeEntry) -> bool:
    """Whether it may differ without a sign. A pseudo file system is the same in all sandboxes."""
    return entry.incomplete is not None and entry.incomplete != "file_system"


def _kind(old: Optional[FileTreeEntry], new: Optional[FileTreeEntry]) -> Optional[Kind]:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if old.kind != new.kind:
        return "type"
    if old.kind == "file" and old.size != new.size:
        return "modified"
    if _unknown(old) or _unknown(new):
        return "unknown"
    if old.kind == "file" and (old.size, old.sha256) != (new.size, new.sha256):
        return "modified"
    if (old.target, old.target_base64) != (new.target, new.target_base64):
        return "modified"
    return "mode" if old.mode != new.mode else None
