"""Ways to go on from one moment, for asyncio: see `trying`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Awaitable, Callable, Generic, Optional, Sequence, TypeVar

from . import steps
from .async_client import finish, loop_is_closing
from .errors import ForkdError
from .trying import Outcome, all_failed, at_once, best, warn_of

if TYPE_CHECKING:
    from .async_sandbox import AsyncSandbox

V = TypeVar("V")


class _Attempts(Generic[V]):
    """Callables that run as tasks, each in a child of one fork."""

    def __init__(
        self,
        source: AsyncSandbox,
        runs: Sequence[Callable[[AsyncSandbox], Awaitable[V]]],
        children: Sequence[AsyncSandbox],
        parallel: int,
        keep: bool,
    ) -> None:
        self._source = source
        self._keep = keep
        self._turn = asyncio.Semaphore(parallel)
        self._stopping = False
        # Those that have not ended yet, and are not kept.
        self.left = list(children)
        self.tasks = [asyncio.ensure_future(self._attempt(run, child)) for run, child in zip(runs, children)]

    async def _attempt(self, run: Callable[[AsyncSandbox], Awaitable[V]], child: AsyncSandbox) -> Outcome[V, AsyncSandbox]:
        async with self._turn:
            begun = time.monotonic()
            try:
                value, error = await run(child), None
            except (Exception, asyncio.CancelledError) as raised:
                # A callable may cancel itself: that is its error, and not the end of the others.
                if self._stopping:
                    raise
                value, error = None, raised
            outcome = Outcome(value, error, child, time.monotonic() - begun)
        if not self._keep:
            try:
                await child.kill()
                self.left.remove(child)
            except ForkdError:
                pass  # It is tried again at the end.
        return outcome

    async def end(self) -> None:
        """Cancels what still runs, and ends the children that are left."""
        self._stopping = True
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        failed: dict[str, ForkdError] = {}
        await self._source.client.run(steps.kill([child.id for child in self.left], failed=failed))
        warn_of(failed)

    async def end_after(self, error: BaseException) -> None:
        """The same after an error, which is what the caller gets."""
        # These coroutines are no generators: one that closes may wait no more.
        if isinstance(error, GeneratorExit) or loop_is_closing(error):
            failed: dict[str, ForkdError] = {}
            self._source.client.run_blocking(steps.kill([child.id for child in self.left], failed=failed))
            warn_of(failed)
        else:
            await finish(self.end())


async def try_each(
    source: AsyncSandbox,
    runs: Sequence[Callable[[AsyncSandbox], Awaitable[V]]],
    parallel: Optional[int],
    keep: bool,
) -> list[Outcome[V, AsyncSandbox]]:
    """See `AsyncSandbox.try_each`."""
    if not runs:
        return []
    count = at_once(len(runs), parallel)
    attempts = _Attempts(source, runs, await source.fork(len(runs)), count, keep)
    try:
        await asyncio.wait(attempts.tasks, return_when=asyncio.FIRST_EXCEPTION)
        outcomes = [task.result() for task in attempts.tasks]
    except BaseException as error:
        await attempts.end_after(error)
        raise
    if not keep:
        await finish(attempts.end())
    return outcomes


async def best_of(
    source: AsyncSandbox,
    n: int,
    step: Callable[[AsyncSandbox, int], Awaitable[V]],
    score: Callable[[V], float],
    keep: bool,
    parallel: Optional[int],
) -> Outcome[V, AsyncSandbox]:
    """See `AsyncSandbox.best_of`."""

    def run(index: int) -> Callable[[AsyncSandbox], Awaitable[V]]:
        return lambda child: step(child, index)

    outcomes = await try_each(source, [run(index) for index in range(n)], parallel, True)
    losers = [outcome.sandbox for outcome in outcomes]
    try:
        winner = best(outcomes, score)
        if keep:
            losers.remove(winner.sandbox)
        return winner
    finally:
        failed: dict[str, ForkdError] = {}
        await finish(source.client.run(steps.kill([loser.id for loser in losers], failed=failed)))
        warn_of(failed)


async def first_success(
    source: AsyncSandbox,
    runs: Sequence[Callable[[AsyncSandbox], Awaitable[V]]],
    keep: bool,
    parallel: Optional[int],
) -> Outcome[V, AsyncSandbox]:
    """See `AsyncSandbox.first_success`."""
    if not runs:
        raise all_failed([])
    count = at_once(len(runs), parallel)
    attempts = _Attempts(source, runs, await source.fork(len(runs)), count, True)
    try:
        winner = await _first(attempts.tasks)
        if keep:
            attempts.left.remove(winner.sandbox)
    except BaseException as error:
        await attempts.end_after(error)
        raise
    await finish(attempts.end())
    return winner


async def _first(tasks: Sequence[asyncio.Future[Outcome[V, AsyncSandbox]]]) -> Outcome[V, AsyncSandbox]:
    """The outcome of the first task that succeeds."""
    pending = set(tasks)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            if task in done and task.result().ok:
                return task.result()
    raise all_failed([task.result() for task in tasks])
