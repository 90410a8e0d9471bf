"""The difference between the files of two sandboxes, without any network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from .models import FileTree, TreeEntry


@dataclass(frozen=True)
class Change:
    """A file that differs: `before` is the entry here, `after` the entry there."""

    path: str
    kind: Literal["added", "removed", "modified", "type", "mode"]
    before: Optional[TreeEntry]
    after: Optional[TreeEntry]


def changes(before: FileTree, after: FileTree) -> list[Change]:
    """What differs, by path. Times do not count: a file is modified if its size, its hash or its target differs."""
    old = {entry.path: entry for entry in before.entries}
    new = {entry.path: entry for entry in after.entries}
    folder = before.path.rstrip("/") + "/"
    found: list[Change] = []
    for name in sorted(old.keys() | new.keys()):
        kind = _kind(old.get(name), new.get(name))
        if kind is not None:
            found.append(Change(folder + name, kind, old.get(name), new.get(name)))
    return found


def _kind(
    old: Optional[TreeEntry], new: Optional[TreeEntry]
) -> Optional[Literal["added", "removed", "modified", "type", "mode"]]:
    if old is None:
        return "added"
    if new is None:
        return "removed"
    if old.kind != new.kind:
        return "type"
    if old.kind == "file" and (old.size, old.sha256) != (new.size, new.sha256):
        return "modified"
    if old.target != new.target:
        return "modified"
    return "mode" if old.mode != new.mode else None
