"""Server-sent events of `GET /v1/events`, without any network."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Iterator, Optional, Union, cast

from .calls import Call, anything
from .decoding import decode
from .errors import ForkdError
from .models import Event

# The daemon sends a comment at least this often, so a longer silence is a broken connection.
SILENCE = 60.0


@dataclass(frozen=True)
class Lagged:
    """The client was too slow: it missed this many events; None if the daemon restarted."""

    missed: Optional[int]


class EventLines:
    """Collects the lines of the stream into events."""

    silence = SILENCE

    def __init__(self) -> None:
        self._rest = b""
        self._kind = ""
        self._data: list[str] = []

    @staticmethod
    def call(since: Optional[str], sandbox: Optional[str], kind: Optional[str], follow: bool) -> Call[Any]:
        query = dict(since=since, sandbox=sandbox, kind=kind, follow=None if follow else False)
        return Call("GET", "/v1/events", anything, query=query, repeatable=True)

    def feed(self, part: bytes) -> Iterator[Union[Event, Lagged]]:
        """The events that end in this part of the stream."""
        self._rest += part
        *lines, self._rest = self._rest.split(b"\n")
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            name, _, value = line.partition(":")
            value = value[1:] if value.startswith(" ") else value
            if name == "event":
                self._kind = value
            elif name == "data":
                self._data.append(value)
            elif not line and self._data:
                yield self._event()

    def _event(self) -> Union[Event, Lagged]:
        text, kind, self._kind, self._data = "\n".join(self._data), self._kind, "", []
        try:
            data: Any = json.loads(text)
        except ValueError as error:
            raise ForkdError(f"the daemon sent what is no event ({text[:80]!r}): is this the address of forkd?") from error
        if kind == "lagged" and isinstance(data, dict):
            return Lagged(cast("dict[str, Any]", data).get("missed"))
        return decode(Event, data)
