"""Sandboxes for asyncio."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, AsyncGenerator, AsyncIterator, Awaitable, Callable, List, Mapping, Optional, Sequence, TypeVar

from . import requests as bodies
from . import async_trying, routes, steps
from .changes import Change, changes
from .async_client import AsyncClient, default_async_client, finish, loop_is_closing
from .code import Execution, execution_of, value_of
from .command import DEFAULT, Command, Timeout, eval_request
from .errors import RollbackError
from .async_commands import AsyncCommandHandle, AsyncCommands
from .async_files import AsyncFiles
from .forked import Forked
from .models import EvalReply, ExecReply, OnTimeout, PingReply, SandboxInfo, SandboxState, Stats, Tree
from .options import BranchMode, OnError, branch_body, create_body, fork_body, label_filter, one_of, update_body
from .async_snapshot import AsyncSnapshot
from .steps import OnProgress
from .trying import Outcome

if TYPE_CHECKING:
    from typing_extensions import Self

V = TypeVar("V")


class AsyncSandbox:
    """A virtual machine: `Sandbox` for asyncio. Use it as a context manager: it ends with the block, however that is left.

    >>> async with await AsyncSandbox.create(tag) as box:
    ...     (await box.commands.run("echo hello")).stdout
    'hello\\n'
    """

    def __init__(self, info: SandboxInfo, client: AsyncClient) -> None:
        self._client = client
        self._info = info
        self._branches: list[str] = []
        self.commands = AsyncCommands(self._execute, self._stream)
        self._files = AsyncFiles(client, info.id)

    @classmethod
    def of(cls, info: SandboxInfo, client: Optional[AsyncClient] = None) -> Self:
        """A sandbox that the daemon has described already."""
        return cls(info, client or default_async_client())

    @classmethod
    async def create(
        cls,
        snapshot: Optional[str] = None,
        *,
        timeout: Optional[float] = None,
        idle_timeout: Optional[float] = None,
        on_timeout: Optional[OnTimeout] = None,
        envs: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        network: Optional[bool] = None,
        memory_limit_mib: Optional[int] = None,
        image: Optional[str] = None,
        mem_size_mib: Optional[int] = None,
        vcpus: Optional[int] = None,
        client: Optional[AsyncClient] = None,
        on_progress: Optional[OnProgress] = None,
    ) -> Self:
        """Forks a sandbox from a snapshot (its tag), or boots one from an `image`, with `mem_size_mib` and `vcpus`.

        It lives for `timeout` seconds, or until `idle_timeout` seconds have passed without use; for ever by default. Then
        the daemon does `on_timeout`: `"kill"`, `"pause"` or `"suspend"`. `envs` reach every process in it: secrets go here.
        """
        client = client or default_async_client()
        body = create_body(
            snapshot, 1, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib, image, mem_size_mib, vcpus
        )
        if on_progress is not None:
            on_progress(f"booting {image}" if image else f"forking from {body.get('snapshot_tag')}")
        info = await _create(client, body)
        sandbox = cls.of(info, client)
        try:
            if on_progress is not None:
                on_progress(f"{info.id}: {info.state}")
        except BaseException:
            await finish(sandbox.kill())
            raise
        return sandbox

    @classmethod
    async def connect(cls, id: str, *, client: Optional[AsyncClient] = None) -> Self:
        """A sandbox that exists, by its id."""
        client = client or default_async_client()
        return cls.of(await client.get_sandbox(id), client)

    @classmethod
    async def list(
        cls,
        *,
        labels: Optional[Mapping[str, Optional[str]]] = None,
        snapshot: Optional[str] = None,
        state: Optional[SandboxState] = None,
        client: Optional[AsyncClient] = None,
    ) -> AsyncIterator[Self]:
        """The caller's sandboxes, oldest first. A label with the value None matches any value."""
        client = client or default_async_client()
        cursor: Optional[str] = None
        while True:
            page = await client.list_sandboxes(
                label=label_filter(labels), snapshot_tag=snapshot, state=state, limit=200, cursor=cursor
            )
            for info in page.entries:
                yield cls.of(info, client)
            cursor = page.next
            if cursor is None:
                return

    @property
    def id(self) -> str:
        return self._info.id

    @property
    def files(self) -> AsyncFiles:
        """Reads, writes, lists, copies files."""
        return self._files

    @property
    def client(self) -> AsyncClient:
        """The connection that this object uses."""
        return self._client

    def __repr__(self) -> str:
        return f"AsyncSandbox({self.id!r})"

    async def info(self) -> SandboxInfo:
        """The sandbox as it is now."""
        self._info = await self._client.get_sandbox(self.id)
        return self._info

    async def ping(self) -> PingReply:
        """Asks the agent in the guest for an answer."""
        return await self._client.ping_sandbox(self.id)

    async def metrics(self) -> Stats:
        """The resources that the sandbox uses on the host."""
        return await self._client.get_stats(self.id)

    async def console(self, *, tail: Optional[int] = None) -> str:
        """The output of the guest's console, or the last `tail` lines of it."""
        return await self._client.get_console(self.id, tail=tail)

    async def update(
        self,
        *,
        timeout: Timeout = DEFAULT,
        idle_timeout: Timeout = DEFAULT,
        on_timeout: Optional[OnTimeout] = None,
        labels: Optional[Mapping[str, str]] = None,
    ) -> SandboxInfo:
        """Changes timeouts, which count from now, and labels. What is not given stays; None removes a timeout."""
        self._info = await self._client.update_sandbox(self.id, update_body(timeout, idle_timeout, on_timeout, labels))
        return self._info

    async def set_timeout(self, seconds: Optional[float]) -> None:
        """The sandbox lives for that many seconds from now; None for ever."""
        await self.update(timeout=seconds)

    async def kill(self) -> None:
        """Ends the sandbox. Does nothing if it has ended."""
        await self._client.run(steps.kill([self.id]))

    async def kill_all(self, sandboxes: Sequence[AsyncSandbox]) -> None:
        """Ends several sandboxes, all of them also if one fails."""
        await self._client.run(steps.kill([sandbox.id for sandbox in sandboxes]))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: Optional[type[BaseException]], error: Optional[BaseException], trace: object
    ) -> None:
        if loop_is_closing(error):
            self._client.run_blocking(steps.kill([self.id]))
        else:
            await finish(self.kill())

    async def eval(self, code: str, timeout: Optional[float] = 30) -> Any:
        """Evaluates Python in the warmed interpreter and returns the value of the last expression.

        A value that JSON has comes as itself, another one as its `repr`. Variables stay. Code that raises is an `EvalError`.

        >>> await sandbox.eval("x = 20")
        >>> await sandbox.eval("[x, x + 1]")
        [20, 21]
        """
        return value_of(await self._evaluate(code, timeout))

    async def run_code(
        self, code: str, timeout: Optional[float] = 30, on_stdout: Optional[Callable[[str], object]] = None
    ) -> Execution:
        """Evaluates Python and returns value, output and error; an error of the code is not raised.

        `on_stdout` gets the output when the code has ended.

        >>> (await sandbox.run_code("print('so far'); 1 / 0")).error.name
        'ZeroDivisionError'
        """
        execution = execution_of(await self._evaluate(code, timeout))
        if on_stdout is not None and execution.stdout:
            on_stdout(execution.stdout)
        return execution

    async def fork(
        self,
        n: int = 1,
        *,
        timeout: Optional[float] = None,
        idle_timeout: Optional[float] = None,
        on_timeout: Optional[OnTimeout] = None,
        envs: Optional[Mapping[str, str]] = None,
        labels: Optional[Mapping[str, str]] = None,
        network: Optional[bool] = None,
        memory_limit_mib: Optional[int] = None,
        on_error: OnError = "raise",
    ) -> Forked[Self]:
        """Forks `n` children, all from this instant; the sandbox goes on.

        All of them run, or there are none, and an error. With `on_error="return"` those that run are returned, and the `errors`
        of the list are those of the others.

        >>> await sandbox.eval("plan = ['read']")
        >>> one, other = await sandbox.fork(2)
        >>> await one.eval("plan + ['think']"), await other.eval("plan")
        (['read', 'think'], ['read'])
        >>> await asyncio.gather(one.kill(), other.kill())
        [None, None]
        """
        body = fork_body(n, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib)
        one_of("on_error", on_error, "raise", "return")
        call = routes.fork_sandbox(self.id, body)
        infos = await self._client.run(steps.spawn(call, n, partial=on_error == "return"))
        return Forked([self.of(info, self._client) for info in infos], infos.errors)

    async def branch(self, tag: Optional[str] = None, mode: BranchMode = "live", wait: bool = True) -> AsyncSnapshot:
        """Keeps this moment as a snapshot; the sandbox goes on. With `wait=False` it is written in the background."""
        info = await self._client.branch_sandbox(self.id, branch_body(tag, mode, wait))
        if mode != "disk":
            # A disk alone is nothing to go back to.
            self._branches.append(info.tag)
        return AsyncSnapshot(info, self._client)

    async def rollback(self, to: Optional[str] = None) -> str:
        """Goes back to a snapshot, under the same id, and returns its tag.

        Without `to`: the newest branch that this object made, else the snapshot that the sandbox came from.
        """
        if to is not None:
            await self._client.rollback_sandbox(self.id, {"to": to})
            return to
        return await self._client.run(steps.rollback(self.id, self._branches, self._info.snapshot_tag))

    async def pause(self) -> None:
        """The sandbox stands still. It keeps its memory and uses no CPU."""
        self._info = await self._client.pause_sandbox(self.id)

    async def resume(self) -> None:
        """A paused sandbox goes on."""
        self._info = await self._client.resume_sandbox(self.id)

    async def tree(self) -> Tree:
        """The ancestry of the caller's snapshots and sandboxes."""
        return await self._client.get_tree()

    @asynccontextmanager
    async def checkpoint(self, tag: Optional[str] = None) -> AsyncGenerator[AsyncSnapshot, None]:
        """A block that the sandbox forgets when it raises: it goes back to the beginning, and the exception goes on.

        If it cannot go back, `RollbackError` says how to, and the snapshot of the beginning stays.

        >>> await sandbox.eval("x = 1")
        >>> try:
        ...     async with sandbox.checkpoint():
        ...         await sandbox.eval("x = 1 / 0")
        ... except EvalError:
        ...     print(await sandbox.eval("x"))
        1
        """
        branch = AsyncSnapshot(await self._client.run(steps.checkpoint(self.id, tag)), self._client)
        self._branches.append(branch.tag)
        try:
            yield branch
        except BaseException as raised:
            back = steps.forget(self.id, branch.tag)
            try:
                if loop_is_closing(raised):
                    self._client.run_blocking(back)
                else:
                    await finish(self._client.run(back))
            except RollbackError as error:
                raise error from raised
            self._left(branch.tag)
            raise
        self._left(branch.tag)
        await finish(self._client.run(steps.delete_quietly(branch.tag)))

    def _left(self, tag: str) -> None:
        """A checkpoint is over: `rollback` does not go there any more."""
        if tag in self._branches:
            self._branches.remove(tag)

    async def diff(self, other: AsyncSandbox, path: str = "/") -> List[Change]:
        """What differs below `path` in the files of `other`: what it added, removed and changed.

        A file that one of the agents could not read, or that changed meanwhile, has the kind `unknown`.
        """
        before = await self._client.file_tree(self.id, path, hash=True)
        return changes(before, await self._client.file_tree(other.id, path, hash=True))

    async def try_each(
        self, callables: Sequence[Callable[[AsyncSandbox], Awaitable[V]]], parallel: Optional[int] = None, keep: bool = False
    ) -> List[Outcome[V, AsyncSandbox]]:
        """Runs each callable in a child of this moment, as tasks, at most `parallel` at a time.

        The outcomes are in the order of the callables: a value or an error each. The children end, unless `keep`. One that
        cannot be ended is a `RuntimeWarning`.

        >>> ways = [lambda box: box.eval("6 * 7"), lambda box: box.eval("6 / 0")]
        >>> [outcome.ok for outcome in await sandbox.try_each(ways)]
        [True, False]
        """
        return await async_trying.try_each(self, callables, parallel, keep)

    async def best_of(
        self,
        n: int,
        step: Callable[[AsyncSandbox, int], Awaitable[V]],
        score: Callable[[V], float],
        keep: bool = False,
        parallel: Optional[int] = None,
    ) -> Outcome[V, AsyncSandbox]:
        """Runs `step(child, index)` in `n` children; the highest `score(value)` wins. With `keep` the winner's sandbox goes on.

        An attempt that raises, or whose score does, has lost. If all have: `AllFailedError`.
        """
        return await async_trying.best_of(self, n, step, score, keep, parallel)

    async def first_success(
        self, callables: Sequence[Callable[[AsyncSandbox], Awaitable[V]]], keep: bool = False, parallel: Optional[int] = None
    ) -> Outcome[V, AsyncSandbox]:
        """The first callable that returns wins; the other children are ended at once. If none does: `AllFailedError`."""
        return await async_trying.first_success(self, callables, keep, parallel)

    async def _evaluate(self, code: str, timeout: Optional[float]) -> EvalReply:
        return await self._client.eval_code(self.id, eval_request(code, timeout))

    async def _execute(self, body: bodies.ExecRequest) -> ExecReply:
        return await self._client.exec_command(self.id, body)

    async def _stream(self, body: bodies.ExecStreamRequest, cmd: Command, check: bool) -> AsyncCommandHandle:
        return await self._client.exec_stream(self.id, body, cmd=cmd, check=check)


async def _create(client: AsyncClient, body: bodies.CreateRequest) -> SandboxInfo:
    """Makes one sandbox."""
    return (await client.run(steps.spawn(routes.create_each_sandbox(body), 1)))[0]
