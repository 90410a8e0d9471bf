"""Commands in a sandbox."""

from __future__ import annotations

import builtins
import functools
import threading
import time
from typing import Callable, Iterator, Literal, Mapping, Optional, Protocol, Union, overload

from . import exec_stream, requests
from .command import DEFAULT, Command, Plan, Pty, Timeout, checked, result_of
from .errors import ForkdError, InvalidRequestError
from .exec_stream import CommandResult, ExecStream, OnText, Output, report
from .models import ExecReply


class Socket(Protocol):
    """The part of a WebSocket that a handle uses."""

    def send(self, message: Union[str, bytes]) -> None: ...

    def recv(self, timeout: Optional[float] = None) -> Union[str, bytes]: ...

    def close(self) -> None: ...


class CommandHandle:
    """A running command: iterate over it for output, send it input and signals, wait for its end.

    >>> with sandbox.commands.run("read name; echo hello $name", background=True) as handle:
    ...     handle.send_stdin("forkd\\n")
    ...     handle.wait().stdout
    'hello forkd\\n'
    """

    def __init__(self, socket: Socket, cmd: Command, deadline: Optional[float] = None, check: bool = True) -> None:
        self._socket = socket
        self._cmd = cmd
        self._deadline = deadline
        self._check = check
        self._stream = ExecStream()
        self._changed = threading.Condition()
        self._reading = False
        self._writing = threading.Lock()

    @property
    def pid(self) -> Optional[int]:
        """The command's process id in the guest."""
        return self._stream.pid

    @property
    def sandbox_id(self) -> Optional[str]:
        """The sandbox that the command runs in."""
        return self._stream.sandbox

    def __iter__(self) -> Iterator[Output]:
        """The output as it comes, until the command ends; `wait` then has the result."""
        while True:
            self._until(lambda: bool(self._stream.output) or self._stream.over)
            try:
                yield self._stream.output.popleft()
            except IndexError:
                self._raise_failure()
                return

    def started(self) -> CommandHandle:
        """Waits until the command runs, or cannot."""
        self._until(lambda: self._stream.pid is not None or self._stream.over)
        if self._stream.pid is None:
            self._raise_failure()
        return self

    def wait(self, on_stdout: Optional[OnText] = None, on_stderr: Optional[OnText] = None) -> CommandResult:
        """Waits for the end, and raises `CommandError` for a status other than 0 (not with `check=False`)."""
        for output in self:
            report(output, on_stdout, on_stderr)
        result = self._stream.result
        if result is None:
            raise ForkdError("the command has neither a result nor an error")
        self.disconnect()
        return checked(result, self._cmd) if self._check else result

    def send_stdin(self, data: Union[str, bytes]) -> None:
        """Sends input. Waits while the command has not taken what came before."""
        self._input(data.encode() if isinstance(data, str) else data, None)

    def _input(self, rest: bytes, take: Optional[Callable[[Output], None]]) -> None:
        """Sends input. `take` gets the output that comes meanwhile."""
        with self._writing:
            while rest:
                while take is not None and self._stream.output:
                    take(self._stream.output.popleft())
                self._until(
                    lambda: self._stream.room > 0 or self._stream.over or bool(take and self._stream.output)
                )
                if self._stream.room == 0 and not self._stream.over:
                    continue
                self._raise_if_over("its input is closed")
                message, rest = self._stream.take(rest)
                self._send(message)

    def feed(self, data: bytes, end: bool, take: Optional[Callable[[Output], None]] = None) -> None:
        """Sends input to a command that may end before it has read all of it. `take` gets the output meanwhile."""
        try:
            if data:
                self._input(data, take)
            if end:
                self.close_stdin()
        except InvalidRequestError:
            pass

    def close_stdin(self) -> None:
        """Ends the input: the command reads end-of-file."""
        self._send(exec_stream.stdin_eof())

    def resize(self, cols: int, rows: int) -> None:
        """Gives the terminal a new size."""
        self._send(exec_stream.resize(cols, rows))

    def signal(self, name: str) -> None:
        """Sends a signal, such as `"SIGINT"`."""
        self._send(exec_stream.signal(name if name.startswith("SIG") else "SIG" + name))

    def kill(self) -> None:
        """Kills the command. Does nothing if it has ended."""
        if not self._stream.over:
            self.signal("SIGKILL")

    def disconnect(self) -> None:
        """Closes the connection. The daemon then kills a command that still runs, unless it was run with `keep=True`."""
        self._socket.close()

    def __enter__(self) -> CommandHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.disconnect()

    def _send(self, message: Union[str, bytes]) -> None:
        try:
            self._socket.send(message)
        except Exception:  # The errors of the WebSocket library.
            # The daemon has closed the connection: what it sent before says why.
            self._until(lambda: self._stream.over)
            self._raise_if_over("it takes no more messages")

    def _until(self, ready: Callable[[], bool]) -> None:
        """Reads messages until something is true. Of several threads, one reads for all."""
        with self._changed:
            while not ready():
                if self._reading:
                    self._changed.wait()
                    continue
                self._reading = True
                self._changed.release()
                try:
                    message = self._receive()
                finally:
                    self._changed.acquire()
                    self._reading = False
                    self._changed.notify_all()
                if message is not None:
                    self._stream.feed(message)

    def _receive(self) -> Union[str, bytes, None]:
        try:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            return self._socket.recv(timeout=left)
        except builtins.TimeoutError:
            self._socket.close()
            self._stream.late()
        except Exception as error:  # The errors of the WebSocket library.
            self._stream.broken(f"the connection broke ({error or type(error).__name__})")
        return None

    def _raise_failure(self) -> None:
        if self._stream.failure is not None:
            self.disconnect()
            raise self._stream.failure

    def _raise_if_over(self, what: str) -> None:
        self._raise_failure()
        if self._stream.over:
            raise InvalidRequestError(f"the command has ended: {what}")


class Commands:
    """`sandbox.commands`."""

    def __init__(
        self,
        execute: Callable[[requests.ExecRequest], ExecReply],
        stream: Callable[[requests.ExecStreamRequest, Command, bool], CommandHandle],
        check: bool = True,
    ) -> None:
        self._execute = execute
        self._stream = stream
        self._check = check
        # A timeout that means none, beside None.
        self.no_limit: Optional[float] = None

    @overload
    def run(
        self,
        cmd: Command,
        timeout: Timeout = DEFAULT,
        *,
        cwd: Optional[str] = None,
        envs: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        stdin: Union[str, bytes, None] = None,
        check: Optional[bool] = None,
        background: Literal[False] = False,
        pty: Optional[Pty] = None,
        on_stdout: Optional[OnText] = None,
        on_stderr: Optional[OnText] = None,
        keep: bool = False,
    ) -> CommandResult: ...

    @overload
    def run(
        self,
        cmd: Command,
        timeout: Timeout = DEFAULT,
        *,
        cwd: Optional[str] = None,
        envs: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        stdin: Union[str, bytes, None] = None,
        check: Optional[bool] = None,
        background: Literal[True],
        pty: Optional[Pty] = None,
        on_stdout: Optional[OnText] = None,
        on_stderr: Optional[OnText] = None,
        keep: bool = False,
    ) -> CommandHandle: ...

    def run(
        self,
        cmd: Command,
        timeout: Timeout = DEFAULT,
        *,
        cwd: Optional[str] = None,
        envs: Optional[Mapping[str, str]] = None,
        user: Optional[str] = None,
        stdin: Union[str, bytes, None] = None,
        check: Optional[bool] = None,
        background: bool = False,
        pty: Optional[Pty] = None,
        on_stdout: Optional[OnText] = None,
        on_stderr: Optional[OnText] = None,
        keep: bool = False,
    ) -> Union[CommandResult, CommandHandle]:
        """Runs a command. A text is a line for `sh -c`; a list is a program and its arguments, without a shell.

        It is killed after `timeout` seconds: 30 by default, never with None; in the background never by default. A status
        other than 0 raises `CommandError`, unless `check=False`. With `background=True` the result is a `CommandHandle`
        of the running command. `pty` is True or `(columns, rows)` for a terminal. `keep=True` lets the command run on
        when the connection ends.

        >>> sandbox.commands.run("echo $((6 * 7))").stdout
        '42\\n'
        >>> sandbox.commands.run(["cat"], stdin="through").stdout
        'through'
        >>> sandbox.commands.run("exit 3", check=False).exit_code
        3
        """
        check = self._check if check is None else check
        streams = on_stdout is not None or on_stderr is not None
        timeout = None if timeout == self.no_limit else timeout
        plan = Plan(cmd, cwd, envs or {}, user, timeout, stdin, background, pty, streams, keep)
        if plan.simple:
            result = result_of(self._execute(plan.exec_request()))
            return checked(result, cmd) if check else result
        handle = self._stream(plan.stream_request(), cmd, check)
        try:
            handle.started()
            take = None if background else functools.partial(report, on_stdout=on_stdout, on_stderr=on_stderr)
            handle.feed(plan.input, plan.input_ends, take)
            return handle if background else handle.wait(on_stdout, on_stderr)
        except BaseException:
            handle.disconnect()
            raise
