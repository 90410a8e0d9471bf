#!/usr/bin/env python3
"""Checks that all packages of this repository have one version: that of the workspace in Cargo.toml.

    scripts/versions.py [ROOT]
"""

import json
import pathlib
import re
import sys


def quoted(path, pattern):
    """The text in quotes after `pattern`, at the start of a line."""
    found = re.search(rf'^{pattern}\s*=\s*"([^"]*)"', path.read_text(), re.M)
    return found.group(1) if found else None


def field(path, *keys):
    """A field of a JSON document."""
    value = json.loads(path.read_text())
    for key in keys:
        value = value[key]
    return value


def versions(root):
    """Every file that has the version, with its version."""
    yield root / "docs/openapi.json", field(root / "docs/openapi.json", "info", "version")
    stated = re.search(r"this is version (\d+\.\d+\.\d+)", (root / "README.md").read_text())
    yield root / "README.md", stated and stated.group(1)
    for package in sorted((root / "sdk").glob("*/")):
        if (manifest := package / "pyproject.toml").exists():
            yield manifest, quoted(manifest, "version")
            for module in sorted(package.glob("src/*/__init__.py")):
                yield module, quoted(module, "__version__")
        elif (manifest := package / "package.json").exists():
            yield manifest, field(manifest, "version")
            lock = package / "package-lock.json"
            yield lock, field(lock, "version")
            yield lock, field(lock, "packages", "", "version")
        else:
            yield package, None


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    workspace = quoted(root / "Cargo.toml", "version")
    wrong = [(path, version) for path, version in versions(root) if version != workspace]
    for path, version in wrong:
        print(f"{path} has version {version}, and Cargo.toml has {workspace}: write {workspace} there")
    return 1 if wrong or not workspace else 0


if __name__ == "__main__":
    sys.exit(main())
