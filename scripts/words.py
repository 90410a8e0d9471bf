#!/usr/bin/env python3
"""Counts pronouns that hide an actor ("whoever", "somebody") in comments and documents.

Such sentences do not say who does what to what. `make lint` fails above LIMIT per thousand words.

    scripts/words.py            the rate of the whole tree
    scripts/words.py --list     and every line that has one
    scripts/words.py PATH ...   of these paths only
"""

import pathlib
import re
import subprocess
import sys

LIMIT = 1.5
PRONOUNS = re.compile(r"\b(who|whoever|somebody|nobody|anybody)\b", re.I)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
COMMENT = {".rs": re.compile(r"^\s*(?://[/!]?|#\[doc = \")(.*)"), ".py": re.compile(r"^\s*#(.*)"), ".sh": re.compile(r"^\s*#(.*)")}


def prose(path):
    """The lines of a file that people read, with their numbers."""
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except (UnicodeDecodeError, FileNotFoundError):
        return
    suffix = pathlib.Path(path).suffix
    for number, line in enumerate(lines, 1):
        if suffix == ".md":
            yield number, line
        elif suffix in COMMENT and (found := COMMENT[suffix].match(line)):
            yield number, found.group(1)


def main():
    arguments = [a for a in sys.argv[1:] if a != "--list"]
    files = subprocess.run(["git", "ls-files", "--", *arguments], capture_output=True, text=True, check=True)
    words = pronouns = 0
    for path in files.stdout.split("\n"):
        for number, line in prose(path) if path else ():
            words += len(WORD.findall(line))
            if found := len(PRONOUNS.findall(line)):
                pronouns += found
                if "--list" in sys.argv:
                    print(f"{path}:{number}: {line.strip()}")
    rate = 1000 * pronouns / max(words, 1)
    print(f"{pronouns} pronouns without an actor in {words} words: {rate:.2f} per thousand (limit {LIMIT})")
    return rate > LIMIT


if __name__ == "__main__":
    sys.exit(main())
