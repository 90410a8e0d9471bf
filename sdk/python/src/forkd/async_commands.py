"""Commands in a sandbox, for asyncio."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import AsyncIterator, Awaitable, Callable, Literal, Mapping, Optional, Protocol, Union, overload

from . import exec_stream, requests
from .command import DEFAULT, Command, Plan, Pty, Timeout, checked, result_of
from .errors import ForkdError, InvalidRequestError
from .exec_stream import CommandResult, ExecStream, OnText, Output, report
from .models import ExecReply

# The seconds that it may take to read what has arrived already.
ARRIVED = 0.2


class Socket(Protocol):
    """The part of a WebSocket that a handle uses."""

    async def send(self, message: Union[str, bytes]) -> None: ...

    async def recv(self) -> Union[str, bytes]: ...

    async def close(self) -> None: ...


class AsyncCommandHandle:
    """A running command: iterate over it for output, send it input and signals, wait for its end.

    >>> async with await sandbox.commands.run("read name; echo hello $name", background=True) as handle:
    ...     await handle.send_stdin("forkd\\n")
    ...     print((await handle.wait()).stdout)
    hello forkd
    <BLANKLINE>
    """

    def __init__(self, socket: Socket, cmd: Command, deadline: Optional[float] = None, check: bool = True) -> None:
        self._socket = socket
        self._cmd = cmd
        self._deadline = deadline
        self._check = check
        self._stream = ExecStream()
        self._changed = asyncio.Condition()
        self._reading = False
        self._writing = asyncio.Lock()

    @property
    def pid(self) -> Optional[int]:
        """The command's process id in the guest."""
        return self._stream.pid

    @property
    def sandbox_id(self) -> Optional[str]:
        """The sandbox that the command runs in."""
        return self._stream.sandbox

    async def __aiter__(self) -> AsyncIterator[Output]:
        """The output as it comes, until the command ends; `wait` then has the result."""
        while True:
            await self._until(lambda: bool(self._stream.output) or self._stream.over)
            try:
                yield self._stream.output.popleft()
            except IndexError:
                await self._raise_failure()
                return

    async def started(self) -> AsyncCommandHandle:
        """Waits until the command runs, or cannot."""
        await self._until(lambda: self._stream.pid is not None or self._stream.over)
        if self._stream.pid is None:
            await self._raise_failure()
        return self

    async def wait(self, on_stdout: Optional[OnText] = None, on_stderr: Optional[OnText] = None) -> CommandResult:
        """Waits for the end, and raises `CommandError` for a status other than 0 (not with `check=False`)."""
        async for output in self:
            report(output, on_stdout, on_stderr)
        result = self._stream.result
        if result is None:
            raise ForkdError("the command has neither a result nor an error")
        await self.disconnect()
        return checked(result, self._cmd) if self._check else result

    async def send_stdin(self, data: Union[str, bytes]) -> None:
        """Sends input. Waits while the command has not taken what came before."""
        await self._input(data.encode() if isinstance(data, str) else data, None)

    async def _input(self, rest: bytes, take: Optional[Callable[[Output], None]]) -> None:
        """Sends input. `take` gets the output that comes meanwhile."""
        async with self._writing:
            while rest:
                while take is not None and self._stream.output:
                    take(self._stream.output.popleft())
                await self._until(
                    lambda: self._stream.room > 0 or self._stream.over or bool(take and self._stream.output)
                )
                if self._stream.room == 0 and not self._stream.over:
                    continue
                await self._raise_if_over("its input is closed")
                message, rest = self._stream.take(rest)
                await self._send(message)

    async def feed(self, data: bytes, end: bool, take: Optional[Callable[[Output], None]] = None) -> None:
        """Sends input to a command that may end before it has read all of it. `take` gets the output meanwhile."""
        try:
            if data:
                await self._input(data, take)
            if end:
                await self.close_stdin()
        except InvalidRequestError:
            pass

    async def close_stdin(self) -> None:
        """Ends the input: the command reads end-of-file."""
        await self._send(exec_stream.stdin_eof())

    async def resize(self, cols: int, rows: int) -> None:
        """Gives the terminal a new size."""
        await self._send(exec_stream.resize(cols, rows))

    async def signal(self, name: str) -> None:
        """Sends a signal, such as `"SIGINT"`."""
        await self._send(exec_stream.signal(name if name.startswith("SIG") else "SIG" + name))

    async def kill(self) -> None:
        """Kills the command. Does nothing if it has ended."""
        if not self._stream.over:
            await self.signal("SIGKILL")

    async def disconnect(self) -> None:
        """Closes the connection. The daemon then kills a command that still runs, unless it was run with `keep=True`."""
        await self._socket.close()

    async def __aenter__(self) -> AsyncCommandHandle:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.disconnect()

    async def _send(self, message: Union[str, bytes]) -> None:
        try:
            await self._socket.send(message)
        except Exception:  # The errors of the WebSocket library.
            # The daemon has closed the connection: what it sent before says why.
            await self._until(lambda: self._stream.over)
            await self._raise_if_over("it takes no more messages")

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Reads messages until something is true. Of several tasks, one reads for all."""
        while not ready():
            if self._reading:
                async with self._changed:
                    # Looked at once more: the reader may have finished before this task got the lock.
                    if self._reading:
                        await self._changed.wait()
                continue
            self._reading = True
            try:
                message = await self._receive()
                if message is not None:
                    self._stream.feed(message)
            finally:
                self._reading = False
                async with self._changed:
                    self._changed.notify_all()

    async def _receive(self) -> Union[str, bytes, None]:
        try:
            # A task that comes back after the deadline reads what has arrived meanwhile: the command may have ended.
            left = None if self._deadline is None else max(ARRIVED, self._deadline - time.monotonic())
            return await asyncio.wait_for(self._socket.recv(), left)
        except asyncio.TimeoutError:
            await self._socket.close()
            self._stream.late()
        except Exception as error:  # The errors of the WebSocket library.
            self._stream.broken(f"the connection broke ({error or type(error).__name__})")
        return None

    async def _raise_failure(self) -> None:
        if self._stream.failure is not None:
            await self.disconnect()
            raise self._stream.failure

    async def _raise_if_over(self, what: str) -> None:
        await self._raise_failure()
        if self._stream.over:
            raise InvalidRequestError(f"the command has ended: {what}")


class AsyncCommands:
    """`sandbox.commands`."""

    def __init__(
        self,
        execute: Callable[[requests.ExecRequest], Awaitable[ExecReply]],
        stream: Callable[[requests.ExecStreamRequest, Command, bool], Awaitable[AsyncCommandHandle]],
        check: bool = True,
    ) -> None:
        self._execute = execute
        self._stream = stream
        self._check = check
        # A timeout that means none, beside None.
        self.no_limit: Optional[float] = None

    @overload
    async def run(
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
    async def run(
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
    ) -> AsyncCommandHandle: ...

    async def run(
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
    ) -> Union[CommandResult, AsyncCommandHandle]:
        """Runs a command. A text is a line for `sh -c`; a list is a program and its arguments, without a shell.

        It is killed after `timeout` seconds: 30 by default, never with None; in the background never by default. A status
        other than 0 raises `CommandError`, unless `check=False`. With `background=True` the result is a `AsyncCommandHandle`
        of the running command. `pty` is True or `(columns, rows)` for a terminal. `keep=True` lets the command run on
        when the connection ends.

        >>> (await sandbox.commands.run("echo $((6 * 7))")).stdout
        '42\\n'
        """
        check = self._check if check is None else check
        streams = on_stdout is not None or on_stderr is not None
        timeout = None if timeout == self.no_limit else timeout
        plan = Plan(cmd, cwd, envs or {}, user, timeout, stdin, background, pty, streams, keep)
        if plan.simple:
            result = result_of(await self._execute(plan.exec_request()))
            return checked(result, cmd) if check else result
        handle = await self._stream(plan.stream_request(), cmd, check)
        try:
            await handle.started()
            take = None if background else functools.partial(report, on_stdout=on_stdout, on_stderr=on_stderr)
            await handle.feed(plan.input, plan.input_ends, take)
            return handle if background else await handle.wait(on_stdout, on_stderr)
        except BaseException:
            await handle.disconnect()
            raise
