"""What a command is before and after it runs, without any network."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Mapping, Optional, Sequence, Union

from . import requests as bodies
from .errors import CommandError, CommandTimeoutError, InvalidRequestError
from .exec_stream import CommandResult
from .models import ExecReply

# Seconds that a command may take when the caller does not say.
TIMEOUT = 30.0
# The longest timeout of the API, in seconds. It stands for none where the API needs one.
LONGEST = 30 * 24 * 3600
# The most characters of input that go into the request; more is streamed.
SMALL = 65_536
Pty = Union[bool, tuple[int, int]]
Command = Union[str, Sequence[str]]


class Default:
    """The value of an argument that was not given, where None means something."""

    def __repr__(self) -> str:
        return "…"


DEFAULT = Default()
Timeout = Union[float, None, Default]


def seconds(value: Optional[float]) -> Optional[int]:
    """Whole seconds, as the API takes them; a part of a second counts as one. None is no limit, and 0 is an error."""
    if value is None:
        return None
    if not 0 < value < math.inf:
        raise InvalidRequestError(f"the timeout is {value:g}: give seconds above 0, or None for no limit")
    return math.ceil(value)


def eval_request(code: str, timeout: Optional[float]) -> bodies.EvalRequest:
    return {"code": code, "timeout_secs": seconds(timeout) or LONGEST}


def words(cmd: Command) -> list[str]:
    """Program and arguments. A text is a line for `sh`, which every image has."""
    if isinstance(cmd, str):
        return ["sh", "-c", cmd]
    args = list(cmd)
    if not args:
        raise InvalidRequestError('the command is empty: give a line for the shell, or a list such as ["ls", "-l"]')
    return args


@dataclass(frozen=True)
class Plan:
    """A command to run, as `commands.run` got it."""

    cmd: Command
    cwd: Optional[str] = None
    envs: Mapping[str, str] = field(default_factory=dict[str, str])
    user: Optional[str] = None
    timeout: Timeout = DEFAULT
    stdin: Union[str, bytes, None] = None
    background: bool = False
    pty: Union[Pty, None] = None
    streams: bool = False
    keep: bool = False

    @property
    def limit(self) -> Optional[float]:
        """Seconds after which the daemon kills the command; a command in the background has none by default."""
        if isinstance(self.timeout, Default):
            return None if self.background else TIMEOUT
        return self.timeout

    @property
    def simple(self) -> bool:
        """Whether one HTTP request does it."""
        streams = self.background or self.pty is not None or self.streams or self.keep or self.limit is None
        small = self.stdin is None or (isinstance(self.stdin, str) and len(self.stdin) <= SMALL)
        return small and not streams

    def exec_request(self) -> bodies.ExecRequest:
        body: bodies.ExecRequest = {"args": words(self.cmd), "timeout_secs": seconds(self.limit) or LONGEST}
        if self.cwd is not None:
            body["cwd"] = self.cwd
        if self.envs:
            body["env"] = dict(self.envs)
        if self.user is not None:
            body["user"] = self.user
        if self.stdin is not None:
            body["stdin"] = str(self.stdin)
        return body

    def stream_request(self) -> bodies.ExecStreamRequest:
        body: bodies.ExecStreamRequest = {"args": words(self.cmd)}
        if self.limit is not None:
            body["timeout_secs"] = seconds(self.limit)
        if self.cwd is not None:
            body["cwd"] = self.cwd
        if self.envs:
            body["env"] = dict(self.envs)
        if self.user is not None:
            body["user"] = self.user
        if self.keep:
            body["keep"] = True
        if self.pty:
            cols, rows = (80, 24) if isinstance(self.pty, bool) else self.pty
            body["pty"] = {"cols": cols, "rows": rows}
        return body

    @property
    def input(self) -> bytes:
        """The input that is known before the command starts."""
        return self.stdin.encode() if isinstance(self.stdin, str) else self.stdin or b""

    @property
    def input_ends(self) -> bool:
        """Whether no more input comes. A terminal, and a command in the background, wait for what the caller sends."""
        return self.pty is None and (self.stdin is not None or not self.background)


def result_of(reply: ExecReply) -> CommandResult:
    return CommandResult(
        reply.stdout,
        reply.stderr,
        reply.exit_code,
        reply.error,
        reply.signal,
        reply.timed_out,
        reply.stdout_truncated or reply.stderr_truncated,
    )


def checked(result: CommandResult, cmd: Command) -> CommandResult:
    """The result if the status is 0, else the error for it."""
    if result.exit_code == 0:
        return result
    line = cmd if isinstance(cmd, str) else " ".join(cmd)
    line = line if len(line) <= 60 else line[:60] + "…"
    rest = (result.stderr.strip() or result.stdout.strip())[-2000:]
    fields = dict(stdout=result.stdout, stderr=result.stderr)
    if result.timed_out:
        text = f"`{line}` was killed at its timeout: give it more with timeout=, or None for no limit"
        raise CommandTimeoutError(text, exit_code=result.exit_code, **fields)
    text = f"`{line}` ended with status {result.exit_code}" + (f": {rest}" if rest else "")
    if result.error and result.error not in text:
        text += f" ({result.error})"
    raise CommandError(text, exit_code=result.exit_code, **fields)
