"""Ways to go on from one moment, for asyncio: see `trying`."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Awaitable, Callable, Optional, Sequence, TypeVar

from .async_client import finish, loop_is_closing
from .trying import Outcome, all_failed, at_once

if TYPE_CHECKING:
    from .async_sandbox import AsyncSandbox

V = TypeVar("V")


async def _attempt(
    run: Callable[[AsyncSandbox], Awaitable[V]], child: AsyncSandbox, turn: asyncio.Semaphore
) -> Outcome[V, AsyncSandbox]:
    async with turn:
        begun = time.monotonic()
        try:
            value, error = await run(child), None
        except Exception as raised:
            value, error = None, raised
        return Outcome(value, error, child, time.monotonic() - begun)


async def _stop(tasks: Sequence[asyncio.Future[Outcome[V, AsyncSandbox]]]) -> None:
    """Cancels what still runs, and waits for that."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def try_each(
    source: AsyncSandbox,
    runs: Sequence[Callable[[AsyncSandbox], Awaitable[V]]],
    parallel: Optional[int],
    keep: bool,
) -> list[Outcome[V, AsyncSandbox]]:
    """See `AsyncSandbox.try_each`."""
    if not runs:
        return []
    turn = asyncio.Semaphore(at_once(len(runs), parallel))
    children = await source.fork(len(runs))

    async def attempt(run: Callable[[AsyncSandbox], Awaitable[V]], child: AsyncSandbox) -> Outcome[V, AsyncSandbox]:
        outcome = await _attempt(run, child, turn)
        if not keep:
            await child.kill()
        return outcome

    tasks = [asyncio.ensure_future(attempt(run, child)) for run, child in zip(runs, children)]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException as error:
        await _end(source, tasks, children, error)
        raise


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
        good = [outcome for outcome in outcomes if outcome.ok]
        if not good:
            raise all_failed(outcomes)
        best = max(good, key=lambda outcome: score(outcome.result()))
        if keep:
            losers.remove(best.sandbox)
        return best
    finally:
        await finish(source.kill_all(losers))


async def first_success(
    source: AsyncSandbox,
    runs: Sequence[Callable[[AsyncSandbox], Awaitable[V]]],
    keep: bool,
    parallel: Optional[int],
) -> Outcome[V, AsyncSandbox]:
    """See `AsyncSandbox.first_success`."""
    turn = asyncio.Semaphore(at_once(len(runs), parallel))
    children = await source.fork(len(runs)) if runs else []
    left = list(children)
    tasks = [asyncio.ensure_future(_attempt(run, child, turn)) for run, child in zip(runs, children)]
    try:
        for done in asyncio.as_completed(tasks):
            outcome = await done
            if outcome.ok:
                if keep:
                    left.remove(outcome.sandbox)
                break
        else:
            raise all_failed([task.result() for task in tasks])
    except BaseException as error:
        await _end(source, tasks, left, error)
        raise
    await finish(_stop_and_kill(source, tasks, left))
    return outcome


async def _stop_and_kill(
    source: AsyncSandbox, tasks: Sequence[asyncio.Future[Outcome[V, AsyncSandbox]]], left: Sequence[AsyncSandbox]
) -> None:
    await _stop(tasks)
    await source.kill_all(left)


async def _end(
    source: AsyncSandbox,
    tasks: Sequence[asyncio.Future[Outcome[V, AsyncSandbox]]],
    children: Sequence[AsyncSandbox],
    error: BaseException,
) -> None:
    """Ends everything after an error."""
    # These coroutines are no generators: one that closes may wait no more.
    if isinstance(error, GeneratorExit) or loop_is_closing(error):
        source.kill_all_blocking(children)
    else:
        await finish(_stop_and_kill(source, tasks, children))
