"""The conversation over a WebSocket while a command runs, without any network."""

from __future__ import annotations

import codecs
import json
from collections import deque
from dataclasses import dataclass
from typing import Any, Callable, Literal, Optional, Union

from .errors import ForkdError, StreamBrokenError, TimeoutError, error_for

# The most input, in bytes, that the daemon has not acknowledged.
WINDOW = 262_144
# The size of one message of input.
PIECE = 65_536
# The most output of each kind that a result keeps, in bytes; callbacks and iterators get all of it.
KEPT = 64 << 20
OnText = Callable[[str], object]


@dataclass(frozen=True)
class CommandResult:
    """How a command ended."""

    stdout: str
    stderr: str
    exit_code: int
    error: Optional[str] = None
    signal: Optional[int] = None
    timed_out: bool = False
    # Whether the output was longer than the limit, and is cut.
    truncated: bool = False

    @property
    def ok(self) -> bool:
        return self.exit_code == 0


@dataclass(frozen=True)
class Output:
    """A piece of a command's output; `text` never ends in the middle of a character."""

    stream: Literal["stdout", "stderr"]
    data: bytes
    text: str


def report(output: Output, on_stdout: Optional[OnText], on_stderr: Optional[OnText]) -> None:
    """Passes a piece of output on."""
    callback = on_stdout if output.stream == "stdout" else on_stderr
    if callback is not None and output.text:
        callback(output.text)


class _Kept:
    """The output of one kind, up to a limit."""

    def __init__(self, stream: Literal["stdout", "stderr"]) -> None:
        self.stream: Literal["stdout", "stderr"] = stream
        self.text: list[str] = []
        self.size = 0
        self.truncated = False
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, data: bytes, final: bool = False) -> Output:
        text = self.decoder.decode(data, final)
        self.size += len(data)
        if self.size <= KEPT:
            self.text.append(text)
        else:
            self.truncated = True
        return Output(self.stream, data, text)


class ExecStream:
    """What is known about a running command. A client feeds it messages and asks what to send."""

    def __init__(self) -> None:
        self.pid: Optional[int] = None
        self.sandbox: Optional[str] = None
        self.room = WINDOW
        self.result: Optional[CommandResult] = None
        self.failure: Optional[ForkdError] = None
        self.output: deque[Output] = deque()
        self.progress: deque[str] = deque()
        self._kept = (_Kept("stdout"), _Kept("stderr"))

    @property
    def over(self) -> bool:
        return self.result is not None or self.failure is not None

    @property
    def stdout(self) -> str:
        return "".join(self._kept[0].text)

    @property
    def stderr(self) -> str:
        return "".join(self._kept[1].text)

    def feed(self, message: Union[str, bytes]) -> None:
        """Takes a message of the daemon."""
        if isinstance(message, bytes):
            if message[:1] in (b"\x01", b"\x02"):
                self.output.append(self._kept[message[0] - 1].add(message[1:]))
            return
        try:
            event: Any = json.loads(message)
            self._event(event)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self.broken(f"the daemon sent what is no event ({message[:80]!r}: {error!r})")

    def _event(self, event: dict[str, Any]) -> None:
        kind = event["event"]
        if kind == "started":
            self.pid, self.sandbox = int(event["pid"]), str(event["sandbox"])
        elif kind == "stdin_ack":
            self.room += int(event["bytes"])
        elif kind == "progress":
            self.progress.append(str(event["message"]))
        elif kind == "exit":
            for kept in self._kept:
                rest = kept.add(b"", final=True)
                if rest.text:
                    self.output.append(rest)
            self.result = CommandResult(
                self.stdout,
                self.stderr,
                int(event["exit_code"]),
                signal=event.get("signal"),
                timed_out=bool(event.get("timed_out", False)),
                truncated=any(kept.truncated for kept in self._kept),
            )
        elif kind == "error":
            text, status = str(event["message"]), event.get("status")
            self.failure = error_for(event.get("code"), text, status=status, request_id=event.get("request_id"))

    def broken(self, why: str) -> None:
        """The connection ended before the command did."""
        if not self.over:
            self.failure = StreamBrokenError(
                f"{why}. The daemon kills the command of a broken connection (unless it was run with keep=True); run it"
                " again"
            )

    def late(self) -> None:
        """The daemon is silent although the command's time is over."""
        self.failure = TimeoutError(
            "the daemon reports nothing of the command, although its time is over: is the daemon overloaded?"
        )

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """The message with the next input that may be sent now, and the rest. The message is empty if there is no room."""
        size = min(len(data), self.room, PIECE)
        if size == 0:
            return b"", data
        self.room -= size
        return b"\x00" + data[:size], data[size:]


def stdin_eof() -> str:
    return json.dumps({"type": "stdin_eof"})


def signal(name: str) -> str:
    return json.dumps({"type": "signal", "signal": name})


def resize(cols: int, rows: int) -> str:
    return json.dumps({"type": "resize", "cols": cols, "rows": rows})
