"""What takes several calls, written once for both clients: see `Steps`.

A request that makes sandboxes carries an idempotency key. If its outcome is unknown, because of ^C, a cancelled task or a
broken connection, the same request is sent again: the daemon answers what it made, and that is ended.
"""

from __future__ import annotations

import dataclasses
import time
import uuid
from typing import Callable, Iterable, Optional, TypeVar

from . import requests as bodies
from . import routes
from .calls import Call, Steps, ask, sleep
from .errors import BusyError, ConflictError, DaemonUnreachableError, ForkdError, ForkError, NotFoundError, RateLimitError
from .errors import RollbackError, StreamBrokenError, TimeoutError, error_for
from .forked import Forked
from .models import SandboxInfo, SnapshotInfo, SpawnReply

# How long a clean-up may take: also a daemon that restarts comes back and knows what it made.
CLEAN_UP_SECONDS = 60.0
# The same while no daemon answers, if the request may never have reached one, such as after ^C.
DOUBTFUL_SECONDS = 10.0
# The longest wait, in seconds, between two attempts of a clean-up.
LONGEST_PAUSE = 2.0
OnProgress = Callable[[str], None]
T = TypeVar("T")


def outcome_unknown(error: BaseException) -> bool:
    """Whether the daemon may have done the request all the same."""
    if not isinstance(error, ForkdError) or error.outcome_unknown:
        return True
    return error.status is None and not isinstance(error, DaemonUnreachableError)


def says_nothing(error: ForkdError) -> bool:
    """Whether this answer tells nothing about what became of the request, and a later one may."""
    no_answer = (StreamBrokenError, TimeoutError, DaemonUnreachableError, BusyError, RateLimitError)
    return isinstance(error, no_answer) or error.outcome_unknown


def insist(call: Call[T], until: float, arrived: bool = True) -> Steps[T]:
    """Sends a call until the daemon answers, or it is too late. `arrived`: the daemon surely has the call already."""
    call = dataclasses.replace(call, times=1.0, patience=0.0)
    doubtful = min(until, time.monotonic() + DOUBTFUL_SECONDS)
    pause = 0.2
    while True:
        try:
            return (yield from ask(call))
        except ForkdError as error:
            arrived = arrived or isinstance(error, TimeoutError)
            if not says_nothing(error) or time.monotonic() + pause >= (until if arrived else doubtful):
                raise
        yield from sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def again(call: Call[None]) -> Call[None]:
    """A removal that is sent again after a broken connection: here it is no error that the object is gone."""
    return dataclasses.replace(call, repeatable=True)


def kill(
    ids: Iterable[str], until: Optional[float] = None, failed: Optional[dict[str, ForkdError]] = None
) -> Steps[None]:
    """Ends sandboxes. One that has ended is fine; an interrupt or an error is raised after all of them.

    With `until` a daemon that does not answer is asked again until then. `failed` gets the errors by their sandboxes: then
    none is raised.
    """
    problem: Optional[BaseException] = None
    left = list(ids)
    while left:
        try:
            call = again(routes.delete_sandbox(left[0]))
            yield from (ask(call) if until is None else insist(call, until))
        except NotFoundError:
            pass
        except Exception as error:
            if failed is not None and isinstance(error, ForkdError):
                failed[left[0]] = error
            else:
                problem = problem or error
        except BaseException as interrupt:
            # The first interrupt waits, and its request is sent again; the second one is obeyed.
            if problem is not None and not isinstance(problem, Exception):
                raise
            problem = interrupt
            continue
        left.pop(0)
    if problem is not None:
        raise problem


def spawn(call: Call[SpawnReply], wanted: int, partial: bool = False) -> Steps[Forked[SandboxInfo]]:
    """Makes children. All of them run, or with `partial` some; else there are none, and an error."""
    try:
        reply = yield from ask(call)
    except BaseException as error:
        if outcome_unknown(error):
            yield from undo(call, arrived=has_arrived(error))
        raise
    if not reply.errors or (partial and reply.children):
        errors = (error_for(one.code, one.error, request_id=one.request_id) for one in reply.errors)
        return Forked(reply.children, errors)
    yield from kill([child.id for child in reply.children])
    first = reply.errors[0]
    if wanted == 1:
        raise error_for(first.code, first.error, request_id=first.request_id)
    text = f"{len(reply.errors)} of {wanted} children did not start, and the others were ended: {first.error}"
    error = ForkError(text, code=first.code, request_id=first.request_id)
    error.errors = [one.error for one in reply.errors]
    raise error


def has_arrived(error: BaseException) -> bool:
    """Whether a daemon surely has the request that ended like this."""
    return isinstance(error, ForkdError) and error.status is None


def undo(call: Call[SpawnReply], until: Optional[float] = None, arrived: bool = True) -> Steps[None]:
    """Ends what a request made whose reply never came. What goes wrong here is not what the caller waits for."""
    until = until or time.monotonic() + CLEAN_UP_SECONDS
    try:
        reply = yield from insist(call, until, arrived)
        yield from kill([child.id for child in reply.children], until)
    except ForkdError:
        pass


def lost_reply(call: Call[T], arrived: bool) -> Steps[Optional[T]]:
    """The reply that never came; None if the daemon refused the request or does not answer."""
    try:
        return (yield from insist(call, time.monotonic() + CLEAN_UP_SECONDS, arrived))
    except ForkdError:
        return None


def make_snapshot(call: Call[SnapshotInfo], own_tag: Optional[str]) -> Steps[SnapshotInfo]:
    """Sends a request that makes a snapshot. If its outcome is unknown, what it made is removed.

    A tag that the caller chose may be another snapshot's: then only the reply tells. `own_tag` is one that no other has.
    """
    try:
        return (yield from ask(call))
    except BaseException as error:
        if outcome_unknown(error):
            made = yield from lost_reply(call, has_arrived(error))
            tag = made.tag if made is not None else own_tag
            if tag is not None:
                yield from discard(tag)
        raise


def discard(tag: str) -> Steps[None]:
    """Removes a snapshot after an error, which is what the caller gets."""
    try:
        yield from delete_quietly(tag)
    except ForkdError:
        pass


def checkpoint(id: str, tag: Optional[str]) -> Steps[SnapshotInfo]:
    """Makes the branch of a checkpoint."""
    own_tag = None if tag else new_tag("checkpoint-" + id)
    body: bodies.BranchRequest = {"tag": tag or own_tag, "mode": "live", "wait": False}
    return (yield from make_snapshot(routes.branch_sandbox(id, body), own_tag))


def forget(id: str, tag: str) -> Steps[None]:
    """Rolls back to the branch of a checkpoint, and removes it. It stays if that fails: nothing else has its moment."""
    try:
        yield from ask(routes.rollback_sandbox(id, {"to": tag}))
    except ForkdError as failure:
        error = RollbackError(
            f"the rollback of {id} after its block failed: {failure}. The snapshot {tag!r} has the moment before"
            f" the block: call sandbox.rollback({tag!r}), then Snapshot.get({tag!r}).delete()",
            code=failure.code,
            status=failure.status,
            request_id=failure.request_id,
        )
        error.tag = tag
        raise error
    yield from delete_quietly(tag)


def rollback(id: str, branches: list[str], source: Optional[str]) -> Steps[str]:
    """Rolls back to the newest branch that is left, else to `source`. Returns the tag."""
    while branches:
        try:
            yield from ask(routes.rollback_sandbox(id, {"to": branches[-1]}))
            return branches[-1]
        except NotFoundError as error:
            if error.code != "snapshot_not_found":
                raise
            branches.pop()
    if source is None:
        info = yield from ask(routes.get_sandbox(id))
        source = info.snapshot_tag
    info = yield from ask(routes.rollback_sandbox(id, {"to": source} if source else {}))
    return info.rolled_back_to or source or ""


def wait_ready(tag: str, timeout: float, progress: Optional[OnProgress]) -> Steps[SnapshotInfo]:
    """Waits until a snapshot is on disk, and reports what the daemon does. The daemon goes on also if the wait ends."""
    until = time.monotonic() + timeout
    reported, pause = "", 0.05
    while True:
        info = yield from ask(routes.get_snapshot(tag))
        now = describe(info)
        if progress is not None and now != reported:
            progress(now)
            reported = now
        if info.status == "ready":
            return info
        if info.status != "writing":
            reason = info.error or f"the snapshot {tag} is {info.status}"
            raise error_for(info.error_code or "snapshot_failed", f"{tag}: {reason}")
        if time.monotonic() > until:
            raise TimeoutError(f"{now}: it is not ready after {timeout:g} s; give a longer timeout")
        yield from sleep(pause)
        pause = min(pause * 1.5, 1.0)


def describe(info: SnapshotInfo) -> str:
    """What the daemon does with a snapshot, in a few words."""
    if info.status != "writing":
        return f"{info.tag}: {info.status}"
    part = ""
    if info.progress is not None and info.progress.total:
        part = f" {100 * info.progress.scanned_bytes // info.progress.total} %"
    return f"{info.tag}: {info.phase or 'writing'}{part}"


def warm(body: bodies.SnapshotRequest, timeout: float, progress: Optional[OnProgress]) -> Steps[SnapshotInfo]:
    """Makes a snapshot. An interrupt, an error or a time-out cancels the daemon's work: there is no snapshot then."""
    info = yield from make_snapshot(routes.create_snapshot(body, wait=False), None)
    try:
        return (yield from wait_ready(info.tag, timeout, progress))
    except BaseException:
        # A failed snapshot goes, too: the error has its reason.
        yield from discard(info.tag)
        raise


def delete_quietly(tag: str, force: Optional[bool] = None) -> Steps[None]:
    """Removes a branch that is no longer needed; snapshots that are built on it keep their layers."""
    try:
        yield from ask(again(routes.delete_snapshot(tag, force=force)))
    except NotFoundError:
        pass
    except ConflictError:
        if force:
            raise
        yield from delete_quietly(tag, force=True)


def new_tag(start: str) -> str:
    """A tag that no other snapshot has."""
    return f"{start}-{uuid.uuid4().hex[:12]}"
