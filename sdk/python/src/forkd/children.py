"""The children of `try_each`, `best_of` and `first_success`, which end however the program does.

Callables run in threads that do not keep the program alive. When it ends, at ^C for example, these threads stop wherever they
are, and no `finally` of theirs runs. So what they own is in a list, and the program ends it when it exits.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import warnings
from typing import TYPE_CHECKING, Mapping, Optional

from . import routes, steps
from .client import Client
from .errors import ForkdError
from .options import fork_body

if TYPE_CHECKING:
    from .sandbox import Sandbox

# How long the exit of the program may take for all of them together, and for one answer of the daemon.
EXIT_SECONDS = 10.0
ANSWER_SECONDS = 5.0


def warn_of(failed: Mapping[str, ForkdError]) -> None:
    """Says which sandboxes still run because they could not be ended."""
    for id, error in failed.items():
        text = f"{id} still runs, because it could not be ended ({error}): end it with Sandbox.connect({id!r}).kill()"
        warnings.warn(text, RuntimeWarning, stacklevel=5)


class Children:
    """The children of one fork. As a context manager it ends those that are left.

    One that cannot be ended is a warning: what came of the callables is not lost for it.
    """

    def __init__(self, source: Sandbox, n: int) -> None:
        self._source = source
        self._call = routes.fork_sandbox(source.id, fork_body(n))
        # None until the reply is here.
        self._left: Optional[list[Sandbox]] = None
        _owned.add(self)
        try:
            infos = source.client.run(steps.spawn(self._call, n))
        except BaseException:
            _owned.discard(self)
            raise
        self.all = [source.of(info, source.client) for info in infos]
        self._left = list(self.all)

    def end(self, child: Sandbox) -> None:
        """Ends one of them. If that fails, it is tried again with those that are left."""
        try:
            child.kill()
        except ForkdError:
            return
        self.keep(child)

    def keep(self, child: Sandbox) -> None:
        """Leaves one to the caller."""
        if self._left is not None:
            self._left.remove(child)

    def __enter__(self) -> Children:
        return self

    def __exit__(self, *error: object) -> None:
        failed: dict[str, ForkdError] = {}
        self._source.client.run(steps.kill([child.id for child in self._left or []], failed=failed))
        _owned.discard(self)
        warn_of(failed)

    def end_at_exit(self, until: float) -> None:
        """Ends them from another thread than the one that owns them, until it is too late."""
        address = self._source.client.address
        with Client(address.url, address.token, min(address.timeout, ANSWER_SECONDS), address.cacert) as client:
            if self._left is None:
                # The fork may be under way.
                client.run(steps.undo(self._call, until))
            for child in list(self._left or []):
                if time.monotonic() < until:
                    with contextlib.suppress(ForkdError):
                        client.run(steps.kill([child.id]))


class _Owned:
    """The children of all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[Children] = set()
        self._closed = False

    def add(self, children: Children) -> None:
        with self._lock:
            if self._closed:
                raise ForkdError("the program exits: it forks no more sandboxes")
            self._all.add(children)

    def discard(self, children: Children) -> None:
        with self._lock:
            self._all.discard(children)

    def close(self) -> None:
        """Ends all of them: threads may still work, but nothing waits for them."""
        with self._lock:
            self._closed = True
            left = list(self._all)
        until = time.monotonic() + EXIT_SECONDS
        for children in left:
            with contextlib.suppress(ForkdError):
                children.end_at_exit(until)


_owned = _Owned()


# The connections of `client` are closed after this: its function was registered before.
@atexit.register
def end_children() -> None:
    """Ends what the program leaves."""
    _owned.close()


def _forget() -> None:
    """A forked process does not own the children of its parent."""
    global _owned
    _owned = _Owned()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
