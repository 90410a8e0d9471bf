"""Looks for another distribution that has a module of this name."""

from __future__ import annotations

from importlib import metadata


def check() -> None:
    """Fails with one sentence if PyPI's `forkd`, which is the reference's, is installed in the same environment."""
    try:
        metadata.distribution("forkd")
    except metadata.PackageNotFoundError:
        return
    raise ImportError(
        "two distributions have the module `forkd`: `forkd-sdk` and the reference's `forkd`; uninstall both, then install"
        " the one that this program needs"
    )
