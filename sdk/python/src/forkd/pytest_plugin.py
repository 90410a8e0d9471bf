"""A plug-in of pytest: `forkd_sandbox` is a fresh fork for each test, ended after it; `forkd_snapshot` is its parent.

The parent's tag comes from `--forkd-snapshot`, else from the ini option `forkd_snapshot`, else from `FORKD_TEST_SNAPSHOT`.

    def test_install(forkd_sandbox):
        assert forkd_sandbox.commands.run("pip --version").ok
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Iterator

import pytest

if TYPE_CHECKING:
    from .sandbox import Sandbox
    from .snapshot import Snapshot


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("forkd")
    group.addoption("--forkd-snapshot", metavar="TAG", help="the snapshot that forkd_sandbox forks from")
    parser.addini("forkd_snapshot", "the snapshot that forkd_sandbox forks from", default="")


@pytest.fixture(scope="session")
def forkd_snapshot(pytestconfig: pytest.Config) -> Snapshot:
    """The snapshot that the tests' sandboxes are forked from."""
    from .snapshot import Snapshot

    options = (pytestconfig.getoption("--forkd-snapshot"), pytestconfig.getini("forkd_snapshot"))
    tag = next((str(option) for option in options if option), os.environ.get("FORKD_TEST_SNAPSHOT"))
    if not tag:
        pytest.fail(
            "no snapshot to fork from: give --forkd-snapshot TAG, the ini option forkd_snapshot, or FORKD_TEST_SNAPSHOT"
        )
    return Snapshot.get(tag)


@pytest.fixture
def forkd_sandbox(forkd_snapshot: Snapshot) -> Iterator[Sandbox]:
    """A sandbox of this test alone: a fork of `forkd_snapshot`."""
    (sandbox,) = forkd_snapshot.spawn()
    with sandbox:
        yield sandbox
