"""The children of a fork, without any network."""

from __future__ import annotations

from typing import Iterable, List, TypeVar

from .errors import ForkdError

S = TypeVar("S")


class Forked(List[S]):
    """The children that run, as a list. With `on_error="return"`, `errors` has one for each child that does not."""

    def __init__(self, children: Iterable[S] = (), errors: Iterable[ForkdError] = ()) -> None:
        super().__init__(children)
        self.errors: List[ForkdError] = list(errors)
