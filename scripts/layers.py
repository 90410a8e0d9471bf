#!/usr/bin/env python3
"""Checks that imports between the controller's rooms go down one list only, so that no two rooms need each other.

    scripts/layers.py           fails when an import goes up
    scripts/layers.py --list    also prints how often each room imports each other room

Tests are not checked: a test may build a whole daemon.
"""

import collections
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/forkd-controller/src"
# From the top to the bottom. A room imports only rooms below it. BASE has what every room may import.
ROOMS = ("daemon api compat exec lifecycle workspace branch sandbox snapshot auth agent monitor host network telemetry util").split()
BASE = {"config", "error", "VERSION"}
TESTING = "testing"
MOST_ENTRIES = 20


def code(path):
    """The lines of a file that are neither comments nor unit tests."""
    test = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if re.match(r"(pub(\(crate\))? )?mod \w+ \{", line):
            test = True
        if not test and not line.lstrip().startswith("//"):
            yield number, line
        if line.startswith("}"):
            test = False


def is_test(relative):
    return relative.parts[0] == TESTING or "tests" in relative.parts or relative.name == "tests.rs"


def imports():
    """(room, file, line number, imported room) of every import that leaves its room."""
    for path in sorted(ROOT.rglob("*.rs")):
        relative = path.relative_to(ROOT)
        if relative.name == "lib.rs" or is_test(relative):
            continue
        room = relative.with_suffix("").parts[0]
        test_item = False
        for number, line in code(path):
            # An item under cfg(test): skipped up to its closing brace.
            if line == "#[cfg(test)]":
                test_item = True
            elif test_item and (line.startswith("}") or line.endswith(";") and not line.startswith(" ")):
                test_item = False
                continue
            if test_item:
                continue
            if re.search(r"\bcrate::\{", line):
                # Rustfmt may put the rooms of such an import on lines of their own, where this script does not see them.
                yield room, relative, number, "crate::{…}"
            if re.search(r"\bsuper::super::", line) and len(relative.parts) <= 2:
                yield room, relative, number, "super::super"
            for target in re.findall(r"\bcrate::(\w+)", line):
                if target != room and target not in BASE:
                    yield room, relative, number, target


def main():
    errors, counts = [], collections.Counter()
    entries = sorted({path.name.removesuffix(".rs") for path in ROOT.iterdir()})
    unknown = set(entries) - set(ROOMS) - BASE - {TESTING, "lib"}
    if unknown:
        errors.append(f"src: {', '.join(sorted(unknown))} is in no room: move it into one, or add it to ROOMS")
    if len(entries) > MOST_ENTRIES:
        errors.append(f"src has {len(entries)} entries; at most {MOST_ENTRIES} fit on a page")
    for room, path, number, target in imports():
        counts[room, target] += 1
        if room in BASE:
            errors.append(f"src/{path}:{number}: {room} is imported by every room and must not import {target}")
        elif target not in ROOMS:
            errors.append(f"src/{path}:{number}: {target} is no room; name one room in each import")
        elif ROOMS.index(target) < ROOMS.index(room):
            errors.append(f"src/{path}:{number}: {room} imports {target}, which is above it")
    if "--list" in sys.argv:
        for (room, target), count in sorted(counts.items()):
            print(f"{room} -> {target}: {count}")
    for error in errors:
        print(error)
    print(f"{len(errors)} imports against the order: {' > '.join(ROOMS)}" if errors else "layers: imports go down only")
    return bool(errors)


if __name__ == "__main__":
    sys.exit(main())
