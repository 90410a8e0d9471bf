"""A request and how its reply is read, without any network: both clients send the same `Call`s.

`Steps` are several calls in a row, written once as a generator. A client runs them: it sends each call that the generator
yields, and passes the reply or the error back in. So a generator can clean up in an `except`, also after ^C.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Callable, Generator, Generic, Iterable, Mapping, TypeVar, Union, cast
from urllib.parse import quote, urlencode

from .decoding import decode, decode_list

T = TypeVar("T")
Query = Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """What the daemon answered: status, headers with lower-case names, and the body."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request to the daemon."""

    method: str
    # As in the OpenAPI document, such as `/v1/sandboxes/{id}`; `ids` fill its braces.
    route: str
    parse: Callable[[Reply], T]
    ids: tuple[str, ...] = ()
    query: Query = field(default_factory=dict[str, Any])
    body: Any = None
    content: Union[bytes, Iterable[bytes], None] = None
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    # Whether the daemon does it only once however often it is sent, so that it may be sent again.
    repeatable: bool = False
    # How many seconds the daemon may work on it: the client's own timeout so many times, and these beside it.
    times: float = 1.0
    patience: float = 0.0

    @property
    def path(self) -> str:
        """The path with the ids, which may hold any character."""
        path = self.route
        for value in self.ids:
            start, end = path.index("{"), path.index("}")
            path = path[:start] + quote(value, safe="") + path[end + 1 :]
        return path

    @property
    def keyed(self) -> bool:
        """Whether the daemon knows the request when it comes again, and answers what it did."""
        return "idempotency-key" in self.headers

    @property
    def target(self) -> str:
        """The path and the query, without absent values."""
        pairs: list[tuple[str, str]] = []
        for name, value in self.query.items():
            values = cast("list[Any]", value) if isinstance(value, list) else [value]
            pairs += [(name, _text(item)) for item in values if item is not None]
        return f"{self.path}?{urlencode(pairs)}" if pairs else self.path

    def payload(self) -> tuple[dict[str, str], Union[bytes, Iterable[bytes], None]]:
        """The headers and the body to send."""
        headers = dict(self.headers)
        if self.body is None:
            return headers, self.content
        headers["content-type"] = "application/json"
        return headers, json.dumps(self.body).encode()


@dataclass(frozen=True)
class Sleep:
    """A step that only waits."""

    seconds: float


Steps = Generator[Union[Call[Any], Sleep], Any, T]


def ask(call: Call[T]) -> Steps[T]:
    """One call as a step, with the type of its reply: `info = yield from ask(routes.get_sandbox(id))`."""
    return (yield call)


def sleep(seconds: float) -> Steps[None]:
    """A wait as a step."""
    yield Sleep(seconds)


def one(cls: type[T]) -> Callable[[Reply], T]:
    """Reads a reply that is one object."""
    return lambda reply: decode(cls, _json(reply))


def many(cls: type[T]) -> Callable[[Reply], list[T]]:
    """Reads a reply that is a list."""
    return lambda reply: decode_list(cls, _json(reply))


@dataclass(frozen=True)
class Page(Generic[T]):
    """Some entries of a list; `next` is the cursor of the next page, if there is one."""

    entries: list[T]
    next: Union[str, None]


def page(cls: type[T]) -> Callable[[Reply], Page[T]]:
    """Reads one page of a list."""
    return lambda reply: Page(decode_list(cls, _json(reply)), reply.headers.get("x-next-cursor"))


def nothing(reply: Reply) -> None:
    """Reads a reply without a body."""


def anything(reply: Reply) -> Any:
    """Reads a reply of any JSON."""
    return _json(reply)


def text(reply: Reply) -> str:
    """Reads a reply that is text."""
    return reply.body.decode("utf-8", "replace")


def content(reply: Reply) -> bytes:
    """Reads a reply that is a file."""
    return reply.body


def _text(value: Any) -> str:
    """A value of the query."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _json(reply: Reply) -> Any:
    from .errors import ForkdError

    try:
        return reply.json()
    except ValueError:
        start = reply.body[:60].decode("utf-8", "replace")
        raise ForkdError(
            f"the reply is no JSON (it starts with {start!r}): is this the address of forkd?", status=reply.status
        ) from None
