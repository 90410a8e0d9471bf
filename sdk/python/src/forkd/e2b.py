"""E2B's shape over the native calls: `from forkd.e2b import Sandbox` in place of `from e2b import Sandbox`.

The package `e2b` is not needed. A template is a snapshot, by its tag. Programs that need all of E2B's API use E2B's own
client on the daemon: see `docs/E2B.md`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Callable, Mapping, Optional

from . import async_sandbox, sandbox
from .async_client import AsyncClient
from .async_commands import AsyncCommands
from .async_files import AsyncFiles
from .client import Client
from .code import Execution as NativeExecution
from .commands import Commands
from .errors import CommandError, SandboxEndedError
from .files import Files
from .models import SandboxInfo

# As in E2B: a status other than 0 raises it.
CommandExitException = CommandError
OnText = Callable[[str], object]


@dataclass(frozen=True)
class Logs:
    """The output of code, in lines."""

    stdout: list[str] = field(default_factory=list[str])
    stderr: list[str] = field(default_factory=list[str])


@dataclass(frozen=True)
class ExecutionError:
    """The exception of code."""

    name: str
    value: str
    traceback: str


@dataclass(frozen=True)
class Execution:
    """What came of `run_code`."""

    text: Optional[str]
    logs: Logs
    error: Optional[ExecutionError]


def _execution(native: NativeExecution) -> Execution:
    raised = native.error
    error = ExecutionError(raised.name, raised.value, raised.traceback) if raised else None
    logs = Logs(native.stdout.splitlines(keepends=True), native.stderr.splitlines(keepends=True))
    return Execution(native.text, logs, error)


def _network(allow_internet_access: bool) -> Optional[bool]:
    return None if allow_internet_access else False


class Sandbox:
    """A sandbox as E2B shows it; `native` is the same one as forkd shows it.

    >>> with Sandbox.create(tag) as box:
    ...     box.run_code("6 * 7").text
    '42'
    """

    def __init__(self, native: sandbox.Sandbox) -> None:
        self.native = native
        self.commands: Commands = copy.copy(native.commands)
        # E2B's word for no limit.
        self.commands.no_limit = 0
        self.files: Files = native.files

    @classmethod
    def create(
        cls,
        template: str = "base",
        timeout: Optional[float] = 300,
        metadata: Optional[Mapping[str, str]] = None,
        envs: Optional[Mapping[str, str]] = None,
        allow_internet_access: bool = True,
        client: Optional[Client] = None,
    ) -> Sandbox:
        """Forks a sandbox from a snapshot; it lives for `timeout` seconds."""
        network = _network(allow_internet_access)
        native = sandbox.Sandbox.create(
            template, timeout=timeout, labels=metadata, envs=envs, network=network, client=client
        )
        return cls(native)

    @classmethod
    def connect(cls, sandbox_id: str, timeout: Optional[float] = None, client: Optional[Client] = None) -> Sandbox:
        """A sandbox that exists. One that is paused goes on."""
        native = sandbox.Sandbox.connect(sandbox_id, client=client)
        if native.info().state == "paused":
            native.resume()
        if timeout is not None:
            native.set_timeout(timeout)
        return cls(native)

    @property
    def sandbox_id(self) -> str:
        return self.native.id

    def get_info(self) -> SandboxInfo:
        """The sandbox as it is now."""
        return self.native.info()

    def is_running(self) -> bool:
        """Whether it runs now: not paused, and not ended."""
        try:
            return self.native.info().state == "running"
        except SandboxEndedError:
            return False

    def set_timeout(self, timeout: float) -> None:
        """It lives for that many seconds from now."""
        self.native.set_timeout(timeout)

    def kill(self) -> bool:
        """Ends it. Returns whether it was there."""
        try:
            self.native.client.delete_sandbox(self.sandbox_id)
        except SandboxEndedError:
            return False
        return True

    def pause(self) -> str:
        """It stands still until `resume` or `connect`. Returns its id."""
        self.native.pause()
        return self.sandbox_id

    def resume(self) -> None:
        """A paused sandbox goes on."""
        self.native.resume()

    def fork(self, count: int = 1) -> list[Sandbox]:
        """Children that go on from the memory of this moment."""
        return [Sandbox(child) for child in self.native.fork(count)]

    def run_code(
        self, code: str, timeout: Optional[float] = 300, on_stdout: Optional[OnText] = None, on_stderr: Optional[OnText] = None
    ) -> Execution:
        """Evaluates Python. `on_stdout` and `on_stderr` get the output when the code has ended. A `timeout` of 0 is none."""
        execution = _execution(self.native.run_code(code, timeout or None))
        _report(execution.logs, on_stdout, on_stderr)
        return execution

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *error: object) -> None:
        self.native.kill()


class AsyncSandbox:
    """The same for asyncio."""

    def __init__(self, native: async_sandbox.AsyncSandbox) -> None:
        self.native = native
        self.commands: AsyncCommands = copy.copy(native.commands)
        self.commands.no_limit = 0
        self.files: AsyncFiles = native.files

    @classmethod
    async def create(
        cls,
        template: str = "base",
        timeout: Optional[float] = 300,
        metadata: Optional[Mapping[str, str]] = None,
        envs: Optional[Mapping[str, str]] = None,
        allow_internet_access: bool = True,
        client: Optional[AsyncClient] = None,
    ) -> AsyncSandbox:
        """Forks a sandbox from a snapshot; it lives for `timeout` seconds."""
        network = _network(allow_internet_access)
        native = await async_sandbox.AsyncSandbox.create(
            template, timeout=timeout, labels=metadata, envs=envs, network=network, client=client
        )
        return cls(native)

    @classmethod
    async def connect(
        cls, sandbox_id: str, timeout: Optional[float] = None, client: Optional[AsyncClient] = None
    ) -> AsyncSandbox:
        """A sandbox that exists. One that is paused goes on."""
        native = await async_sandbox.AsyncSandbox.connect(sandbox_id, client=client)
        if (await native.info()).state == "paused":
            await native.resume()
        if timeout is not None:
            await native.set_timeout(timeout)
        return cls(native)

    @property
    def sandbox_id(self) -> str:
        return self.native.id

    async def get_info(self) -> SandboxInfo:
        """The sandbox as it is now."""
        return await self.native.info()

    async def is_running(self) -> bool:
        """Whether it runs now: not paused, and not ended."""
        try:
            return (await self.native.info()).state == "running"
        except SandboxEndedError:
            return False

    async def set_timeout(self, timeout: float) -> None:
        """It lives for that many seconds from now."""
        await self.native.set_timeout(timeout)

    async def kill(self) -> bool:
        """Ends it. Returns whether it was there."""
        try:
            await self.native.client.delete_sandbox(self.sandbox_id)
        except SandboxEndedError:
            return False
        return True

    async def pause(self) -> str:
        """It stands still until `resume` or `connect`. Returns its id."""
        await self.native.pause()
        return self.sandbox_id

    async def resume(self) -> None:
        """A paused sandbox goes on."""
        await self.native.resume()

    async def fork(self, count: int = 1) -> list[AsyncSandbox]:
        """Children that go on from the memory of this moment."""
        return [AsyncSandbox(child) for child in await self.native.fork(count)]

    async def run_code(
        self, code: str, timeout: Optional[float] = 300, on_stdout: Optional[OnText] = None, on_stderr: Optional[OnText] = None
    ) -> Execution:
        """Evaluates Python. `on_stdout` and `on_stderr` get the output when the code has ended. A `timeout` of 0 is none."""
        execution = _execution(await self.native.run_code(code, timeout or None))
        _report(execution.logs, on_stdout, on_stderr)
        return execution

    async def __aenter__(self) -> AsyncSandbox:
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: object
    ) -> None:
        await self.native.__aexit__(kind, error, trace)


def _report(logs: Logs, on_stdout: Optional[OnText], on_stderr: Optional[OnText]) -> None:
    for lines, callback in ((logs.stdout, on_stdout), (logs.stderr, on_stderr)):
        if callback is not None:
            for line in lines:
                callback(line)
