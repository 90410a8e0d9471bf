"""Ways to go on from one moment: several children, one callable each."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Generic, Optional, Sequence, TypeVar

from .children import Children, warn_of
from .errors import AllFailedError, InvalidRequestError

if TYPE_CHECKING:
    from .sandbox import Sandbox

__all__ = ["Outcome", "all_failed", "at_once", "best", "best_of", "first_success", "try_each", "warn_of"]

V = TypeVar("V")
S = TypeVar("S")


@dataclass
class Outcome(Generic[V, S]):
    """What came of one callable: its value or its error, and the child it ran in (ended, unless it was kept)."""

    value: Optional[V]
    error: Optional[BaseException]
    sandbox: S
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None

    def result(self) -> V:
        """The value; raises the error if there is one."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


def at_once(count: int, parallel: Optional[int]) -> int:
    """How many callables run at the same time."""
    if parallel is not None and parallel < 1:
        raise InvalidRequestError(f"parallel is {parallel}: give at least 1, or None for all")
    return min(count, parallel or count)


def all_failed(outcomes: Sequence[Outcome[V, S]]) -> AllFailedError:
    """The error when no attempt succeeded."""
    last = outcomes[-1].error if outcomes else None
    error = AllFailedError(f"all {len(outcomes)} attempts failed; the last one: {last!r}")
    error.outcomes = list(outcomes)
    return error


def best(outcomes: Sequence[Outcome[V, S]], score: Callable[[V], float]) -> Outcome[V, S]:
    """The outcome with the highest score; of equals the first. One without a score counts as a failure."""
    found: Optional[Outcome[V, S]] = None
    highest = 0.0
    for outcome in outcomes:
        if not outcome.ok:
            continue
        try:
            value = score(outcome.result())
            if value != value:
                raise ValueError("the score is not a number")
        except Exception as error:
            outcome.value, outcome.error = None, error
            continue
        if found is None or value > highest:
            found, highest = outcome, value
    if found is None:
        raise all_failed(outcomes)
    return found


def _attempt(run: Callable[[Sandbox], V], child: Sandbox) -> Outcome[V, Sandbox]:
    begun = time.monotonic()
    try:
        value, error = run(child), None
    except BaseException as raised:
        value, error = None, raised
    return Outcome(value, error, child, time.monotonic() - begun)


class Runner(Generic[V]):
    """Runs callables in threads, each with its child, and passes on the outcomes in the order in which they come."""

    def __init__(self, runs: Sequence[Callable[[Sandbox], V]], children: Sequence[Sandbox], parallel: int) -> None:
        self._todo: queue.SimpleQueue[tuple[int, Callable[[Sandbox], V], Sandbox]] = queue.SimpleQueue()
        for index, (run, child) in enumerate(zip(runs, children)):
            self._todo.put((index, run, child))
        self._done: queue.SimpleQueue[tuple[int, Outcome[V, Sandbox]]] = queue.SimpleQueue()
        self._stopped = False
        for _ in range(parallel):
            # A callable that hangs does not keep the program alive.
            threading.Thread(target=self._work, name="forkd-try", daemon=True).start()

    def _work(self) -> None:
        while not self._stopped:
            try:
                index, run, child = self._todo.get_nowait()
            except queue.Empty:
                return
            self._done.put((index, _attempt(run, child)))

    def next(self) -> tuple[int, Outcome[V, Sandbox]]:
        """The next outcome, with the index of its callable."""
        return self._done.get()

    def stop(self) -> None:
        """Starts no further callable."""
        self._stopped = True


def try_each(
    source: Sandbox, runs: Sequence[Callable[[Sandbox], V]], parallel: Optional[int], keep: bool
) -> list[Outcome[V, Sandbox]]:
    """See `Sandbox.try_each`."""
    if not runs:
        return []
    count = at_once(len(runs), parallel)
    with Children(source, len(runs)) as children:
        outcomes = _all(runs, children, count, keep)
        if keep:
            for child in children.all:
                children.keep(child)
    return outcomes


def _all(
    runs: Sequence[Callable[[Sandbox], V]], children: Children, parallel: int, keep: bool
) -> list[Outcome[V, Sandbox]]:
    """The outcomes of all callables, in their order. Without `keep` each child ends as soon as its callable has."""
    outcomes: dict[int, Outcome[V, Sandbox]] = {}
    runner = Runner(runs, children.all, parallel)
    try:
        while len(outcomes) < len(runs):
            index, outcome = runner.next()
            outcomes[index] = outcome
            if not keep:
                children.end(outcome.sandbox)
    finally:
        runner.stop()
    return [outcomes[index] for index in range(len(runs))]


def best_of(
    source: Sandbox,
    n: int,
    step: Callable[[Sandbox, int], V],
    score: Callable[[V], float],
    keep: bool,
    parallel: Optional[int],
) -> Outcome[V, Sandbox]:
    """See `Sandbox.best_of`."""

    def run(index: int) -> Callable[[Sandbox], V]:
        return lambda child: step(child, index)

    runs = [run(index) for index in range(n)]
    if not runs:
        raise all_failed([])
    count = at_once(n, parallel)
    with Children(source, n) as children:
        outcomes = _all(runs, children, count, True)
        winner = best(outcomes, score)
        if keep:
            children.keep(winner.sandbox)
        return winner


def first_success(
    source: Sandbox, runs: Sequence[Callable[[Sandbox], V]], keep: bool, parallel: Optional[int]
) -> Outcome[V, Sandbox]:
    """See `Sandbox.first_success`."""
    if not runs:
        raise all_failed([])
    count = at_once(len(runs), parallel)
    outcomes: dict[int, Outcome[V, Sandbox]] = {}
    with Children(source, len(runs)) as children:
        runner = Runner(runs, children.all, count)
        try:
            while len(outcomes) < len(runs):
                index, outcome = runner.next()
                outcomes[index] = outcome
                if outcome.ok:
                    if keep:
                        children.keep(outcome.sandbox)
                    return outcome
        finally:
            runner.stop()
        raise all_failed([outcomes[index] for index in range(len(runs))])
