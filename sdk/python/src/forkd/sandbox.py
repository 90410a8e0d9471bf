"""Sandboxes."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterator, List, Mapping, Optional, Sequence, TypeVar

from . import requests as bodies
from . import routes, steps, trying
from .changes import Change, changes
from .client import Client, default_client
from .code import Execution, execution_of, value_of
from .command import DEFAULT, Command, Timeout, eval_request
from .commands import CommandHandle, Commands
from .errors import InvalidRequestError, RollbackError
from .files import Files
from .json_lines import JsonLines
from .forked import Forked
from .models import EvalReply, ExecReply, OnTimeout, PingReply, SandboxInfo, SandboxState, Stats, Tree
from .options import BranchMode, OnError, branch_body, create_body, fork_body, label_filter, one_of, update_body
from .snapshot import Snapshot
from .steps import OnProgress
from .trying import Outcome

if TYPE_CHECKING:
    from typing_extensions import Self

V = TypeVar("V")
# The snapshot that `Sandbox()` forks from where neither an argument nor `FORKD_TAG` names one, as with the reference.
REFERENCE_TAG = "pyagent"


class Sandbox:
    """A virtual machine. Use it as a context manager: it ends with the block, however that is left.

    >>> with Sandbox.create(tag) as box:
    ...     box.commands.run("echo hello").stdout
    'hello\\n'

    `Sandbox(tag)` forks from a snapshot, too, as clients of the reference do: there a status other than 0 raises no error, and
    `eval` returns a text. With `target="HOST:PORT", spawn=False` it talks to an agent port and to no daemon. `timeout` is how
    many seconds the agent port may be silent. A fork needs none: the daemon returns it when its agent answers.
    """

    def __init__(
        self, tag: Optional[str] = None, target: Optional[str] = None, timeout: float = 30, *, spawn: bool = True
    ) -> None:
        client = default_client()
        if spawn:
            tag = tag or os.environ.get("FORKD_TAG") or REFERENCE_TAG
            info = _create(client, create_body(tag, 1, None, None, None, None, None, None, None))
            self._set(client, info, reference=True)
            return
        target = target or os.environ.get("FORKD_TARGET")
        if not target:
            raise InvalidRequestError("give target= or FORKD_TARGET, as `forkd agent-port` prints it, or spawn=True")
        self._set(client, None, reference=True)
        self._line = JsonLines(target, timeout)
        self.target = target

    def _set(self, client: Client, info: Optional[SandboxInfo], reference: bool = False) -> None:
        self._client = client
        self._info = info
        self._reference = reference
        self._line: Optional[JsonLines] = None
        self._branches: list[str] = []
        self.target = info.guest_addr if info else ""
        self.commands = Commands(self._execute, self._stream, check=not reference)
        self._files = Files(client, info.id) if info else None

    @classmethod
    def of(cls, info: SandboxInfo, client: Optional[Client] = None) -> Self:
        """A sandbox that the daemon has described already."""
        sandbox = cls.__new__(cls)
        sandbox._set(client or default_client(), info)
        return sandbox

    @classmethod
    def create(
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
        client: Optional[Client] = None,
        on_progress: Optional[OnProgress] = None,
    ) -> Self:
        """Forks a sandbox from a snapshot (its tag), or boots one from an `image`, with `mem_size_mib` and `vcpus`.

        It lives for `timeout` seconds, or until `idle_timeout` seconds have passed without use; for ever by default. Then
        the daemon does `on_timeout`: `"kill"`, `"pause"` or `"suspend"`. `envs` reach every process in it: secrets go here.
        """
        client = client or default_client()
        body = create_body(
            snapshot, 1, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib, image, mem_size_mib, vcpus
        )
        if on_progress is not None:
            on_progress(f"booting {image}" if image else f"forking from {body.get('snapshot_tag')}")
        info = _create(client, body)
        sandbox = cls.of(info, client)
        try:
            if on_progress is not None:
                on_progress(f"{info.id}: {info.state}")
        except BaseException:
            sandbox.kill()
            raise
        return sandbox

    @classmethod
    def connect(cls, id: str, *, client: Optional[Client] = None) -> Self:
        """A sandbox that exists, by its id."""
        client = client or default_client()
        return cls.of(client.get_sandbox(id), client)

    @classmethod
    def list(
        cls,
        *,
        labels: Optional[Mapping[str, Optional[str]]] = None,
        snapshot: Optional[str] = None,
        state: Optional[SandboxState] = None,
        client: Optional[Client] = None,
    ) -> Iterator[Self]:
        """The caller's sandboxes, oldest first. A label with the value None matches any value."""
        client = client or default_client()
        cursor: Optional[str] = None
        while True:
            page = client.list_sandboxes(
                label=label_filter(labels), snapshot_tag=snapshot, state=state, limit=200, cursor=cursor
            )
            for info in page.entries:
                yield cls.of(info, client)
            cursor = page.next
            if cursor is None:
                return

    @property
    def id(self) -> str:
        if self._info is None:
            raise InvalidRequestError("this sandbox is only known by its agent port: use Sandbox.connect(id)")
        return self._info.id

    @property
    def files(self) -> Files:
        """Reads, writes, lists, copies files."""
        if self._files is None:
            raise InvalidRequestError("an agent port has no files: use Sandbox.connect(id).files, with the sandbox's id")
        return self._files

    @property
    def client(self) -> Client:
        """The connection that this object uses."""
        return self._client

    def __repr__(self) -> str:
        return f"Sandbox({self._info.id if self._info else self.target!r})"

    def info(self) -> SandboxInfo:
        """The sandbox as it is now."""
        self._info = self._client.get_sandbox(self.id)
        return self._info

    def ping(self) -> PingReply:
        """Asks the agent in the guest for an answer."""
        return self._line.ping() if self._line else self._client.ping_sandbox(self.id)

    def metrics(self) -> Stats:
        """The resources that the sandbox uses on the host."""
        return self._client.get_stats(self.id)

    def console(self, *, tail: Optional[int] = None) -> str:
        """The output of the guest's console, or the last `tail` lines of it."""
        return self._client.get_console(self.id, tail=tail)

    def update(
        self,
        *,
        timeout: Timeout = DEFAULT,
        idle_timeout: Timeout = DEFAULT,
        on_timeout: Optional[OnTimeout] = None,
        labels: Optional[Mapping[str, str]] = None,
    ) -> SandboxInfo:
        """Changes timeouts, which count from now, and labels. What is not given stays; None removes a timeout."""
        self._info = self._client.update_sandbox(self.id, update_body(timeout, idle_timeout, on_timeout, labels))
        return self._info

    def set_timeout(self, seconds: Optional[float]) -> None:
        """The sandbox lives for that many seconds from now; None for ever."""
        self.update(timeout=seconds)

    def kill(self) -> None:
        """Ends the sandbox. Does nothing if it has ended."""
        if self._line is None:
            self._client.run(steps.kill([self.id]))

    def kill_all(self, sandboxes: Sequence[Sandbox]) -> None:
        """Ends several sandboxes, all of them also if one fails."""
        self._client.run(steps.kill([sandbox.id for sandbox in sandboxes]))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def eval(self, code: str, timeout: Optional[float] = 30) -> Any:
        """Evaluates Python in the warmed interpreter and returns the value of the last expression.

        A value that JSON has comes as itself, another one as its `repr`. Variables stay. Code that raises is an `EvalError`.

        >>> sandbox.eval("x = 20")
        >>> sandbox.eval("[x, x + 1]")
        [20, 21]
        """
        reply = self._evaluate(code, timeout)
        value = value_of(reply)
        return reply.result if self._reference else value

    def run_code(
        self, code: str, timeout: Optional[float] = 30, on_stdout: Optional[Callable[[str], object]] = None
    ) -> Execution:
        """Evaluates Python and returns value, output and error; an error of the code is not raised.

        `on_stdout` gets the output when the code has ended.

        >>> sandbox.run_code("print('so far'); 1 / 0").error.name
        'ZeroDivisionError'
        """
        execution = execution_of(self._evaluate(code, timeout))
        if on_stdout is not None and execution.stdout:
            on_stdout(execution.stdout)
        return execution

    def fork(
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

        >>> sandbox.eval("plan = ['read']")
        >>> one, other = sandbox.fork(2)
        >>> one.eval("plan + ['think']"), other.eval("plan")
        (['read', 'think'], ['read'])
        >>> one.kill(); other.kill()
        """
        body = fork_body(n, timeout, idle_timeout, on_timeout, envs, labels, network, memory_limit_mib)
        one_of("on_error", on_error, "raise", "return")
        call = routes.fork_sandbox(self.id, body)
        infos = self._client.run(steps.spawn(call, n, partial=on_error == "return"))
        return Forked([self.of(info, self._client) for info in infos], infos.errors)

    def branch(self, tag: Optional[str] = None, mode: BranchMode = "live", wait: bool = True) -> Snapshot:
        """Keeps this moment as a snapshot; the sandbox goes on. With `wait=False` it is written in the background."""
        info = self._client.branch_sandbox(self.id, branch_body(tag, mode, wait))
        if mode != "disk":
            # A disk alone is nothing to go back to.
            self._branches.append(info.tag)
        return Snapshot(info, self._client)

    def rollback(self, to: Optional[str] = None) -> str:
        """Goes back to a snapshot, under the same id, and returns its tag.

        Without `to`: the newest branch that this object made, else the snapshot that the sandbox came from.
        """
        if to is not None:
            self._client.rollback_sandbox(self.id, {"to": to})
            return to
        return self._client.run(steps.rollback(self.id, self._branches, self._info and self._info.snapshot_tag))

    def pause(self) -> None:
        """The sandbox stands still. It keeps its memory and uses no CPU."""
        self._info = self._client.pause_sandbox(self.id)

    def resume(self) -> None:
        """A paused sandbox goes on."""
        self._info = self._client.resume_sandbox(self.id)

    def tree(self) -> Tree:
        """The ancestry of the caller's snapshots and sandboxes."""
        return self._client.get_tree()

    @contextmanager
    def checkpoint(self, tag: Optional[str] = None) -> Generator[Snapshot, None, None]:
        """A block that the sandbox forgets when it raises: it goes back to the beginning, and the exception goes on.

        If it cannot go back, `RollbackError` says how to, and the snapshot of the beginning stays.

        >>> sandbox.eval("x = 1")
        >>> try:
        ...     with sandbox.checkpoint():
        ...         sandbox.eval("x = 1 / 0")
        ... except EvalError:
        ...     sandbox.eval("x")
        1
        """
        branch = Snapshot(self._client.run(steps.checkpoint(self.id, tag)), self._client)
        self._branches.append(branch.tag)
        try:
            yield branch
        except BaseException as raised:
            try:
                self._client.run(steps.forget(self.id, branch.tag))
            except RollbackError as error:
                raise error from raised
            self._left(branch.tag)
            raise
        self._left(branch.tag)
        self._client.run(steps.delete_quietly(branch.tag))

    def _left(self, tag: str) -> None:
        """A checkpoint is over: `rollback` does not go there any more."""
        if tag in self._branches:
            self._branches.remove(tag)

    def diff(self, other: Sandbox, path: str = "/") -> List[Change]:
        """What differs below `path` in the files of `other`: what it added, removed and changed.

        A file that one of the agents could not read, or that changed meanwhile, has the kind `unknown`.
        """
        before = self._client.file_tree(self.id, path, hash=True)
        return changes(before, self._client.file_tree(other.id, path, hash=True))

    def try_each(
        self, callables: Sequence[Callable[[Sandbox], V]], parallel: Optional[int] = None, keep: bool = False
    ) -> List[Outcome[V, Sandbox]]:
        """Runs each callable in a child of this moment, in threads, at most `parallel` at a time.

        The outcomes are in the order of the callables: a value or an error each. The children end, unless `keep`. One that
        cannot be ended is a `RuntimeWarning`.

        >>> ways = [lambda box: box.eval("6 * 7"), lambda box: box.eval("6 / 0")]
        >>> [outcome.ok for outcome in sandbox.try_each(ways)]
        [True, False]
        """
        return trying.try_each(self, callables, parallel, keep)

    def best_of(
        self,
        n: int,
        step: Callable[[Sandbox, int], V],
        score: Callable[[V], float],
        keep: bool = False,
        parallel: Optional[int] = None,
    ) -> Outcome[V, Sandbox]:
        """Runs `step(child, index)` in `n` children; the highest `score(value)` wins. With `keep` the winner's sandbox goes on.

        An attempt that raises, or whose score does, has lost. If all have: `AllFailedError`.
        """
        return trying.best_of(self, n, step, score, keep, parallel)

    def first_success(
        self, callables: Sequence[Callable[[Sandbox], V]], keep: bool = False, parallel: Optional[int] = None
    ) -> Outcome[V, Sandbox]:
        """The first callable that returns wins; the other children are ended at once. If none does: `AllFailedError`."""
        return trying.first_success(self, callables, keep, parallel)

    def _evaluate(self, code: str, timeout: Optional[float]) -> EvalReply:
        if self._line is not None:
            return self._line.evaluate(eval_request(code, timeout))
        return self._client.eval_code(self.id, eval_request(code, timeout))

    def _execute(self, body: bodies.ExecRequest) -> ExecReply:
        if self._line is not None:
            return self._line.execute(body)
        return self._client.exec_command(self.id, body)

    def _stream(self, body: bodies.ExecStreamRequest, cmd: Command, check: bool) -> CommandHandle:
        return self._client.exec_stream(self.id, body, cmd=cmd, check=check)


def _create(client: Client, body: bodies.CreateRequest) -> SandboxInfo:
    """Makes one sandbox."""
    return client.run(steps.spawn(routes.create_each_sandbox(body), 1))[0]
