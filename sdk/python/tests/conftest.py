import pytest

import forkd
from server import Server


@pytest.fixture
def server():
    with Server() as it:
        yield it


@pytest.fixture
def client(server):
    """A client that does not wait long."""
    with forkd.Client(server.url, "token", timeout=1.0) as it:
        yield it


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("FORKD_URL", "FORKD_TOKEN", "FORKD_TAG", "FORKD_TARGET"):
        monkeypatch.delenv(name, raising=False)
