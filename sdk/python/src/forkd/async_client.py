"""`AsyncClient`: the daemon's REST API for asyncio, a method for each operation."""

from __future__ import annotations

import asyncio
import codecs
import functools
import json
import time
import weakref
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, AsyncGenerator, AsyncIterator, Callable, Coroutine, Optional, TypeVar, Union

import httpx

from . import requests, routes
from .async_commands import AsyncCommandHandle
from .calls import Call, Reply, Sleep, Steps
from .client import Client
from .command import Command
from .errors import DaemonUnreachableError
from .models import Event, Health
from .sockets import open_async_socket
from .sse import EventLines, Lagged
from .wire import Address, Attempts, failure_error, reply_error

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")


def operation(
    route: Callable[P, Call[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """A method of the client that sends the route's call and returns its reply."""

    @functools.wraps(route)
    async def method(self: AsyncClient, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self.send(route(*args, **kwargs))

    return method


class _Connections:
    """The connections of one event loop."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._streams: weakref.WeakSet[Any] = weakref.WeakSet()

    async def request(self, method: str, url: str, **options: Any) -> httpx.Response:
        response = await self.http.request(method, url, **options)
        self._note(response)
        return response

    @asynccontextmanager
    async def stream(self, method: str, url: str, **options: Any) -> AsyncGenerator[httpx.Response, None]:
        async with self.http.stream(method, url, **options) as response:
            self._note(response)
            yield response

    def _note(self, response: httpx.Response) -> None:
        stream = response.extensions.get("network_stream")
        if stream is not None:
            self._streams.add(stream)

    def drop(self) -> None:
        """Closes the sockets of a loop that has closed: nothing can be awaited there any more."""
        for stream in list(self._streams):
            # What asyncio shows of a socket has no `close`, and its own transport closes only as garbage.
            shown = stream.get_extra_info("socket")
            real = getattr(shown, "_sock", None)
            if real is not None:
                real.close()


class AsyncClient:
    """A connection to a daemon for asyncio, with the arguments and the methods of `Client`.

    It may be used in several event loops, one after the other: each gets connections of its own.
    """

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        timeout: float = 60.0,
        cacert: Optional[str] = None,
    ) -> None:
        self.address = Address.find(url, token, timeout, cacert)
        self._options = self.address.transport()
        self._of_loop: dict[asyncio.AbstractEventLoop, _Connections] = {}

    health = operation(routes.health)
    version = operation(routes.version)
    metrics = operation(routes.metrics)
    get_tree = operation(routes.get_tree)

    list_sandboxes = operation(routes.list_sandboxes)
    list_archived_sandboxes = operation(routes.list_archived_sandboxes)
    create_sandboxes = operation(routes.create_sandboxes)
    create_each_sandbox = operation(routes.create_each_sandbox)
    get_sandbox = operation(routes.get_sandbox)
    update_sandbox = operation(routes.update_sandbox)
    delete_sandbox = operation(routes.delete_sandbox)
    fork_sandbox = operation(routes.fork_sandbox)
    ping_sandbox = operation(routes.ping_sandbox)
    get_stats = operation(routes.get_stats)
    get_console = operation(routes.get_console)
    exec_command = operation(routes.exec_command)
    eval_code = operation(routes.eval_code)
    send_json_line = operation(routes.send_json_line)
    open_agent_port = operation(routes.open_agent_port)
    close_agent_port = operation(routes.close_agent_port)

    read_file = operation(routes.read_file)
    write_file = operation(routes.write_file)
    delete_file = operation(routes.delete_file)
    list_files = operation(routes.list_files)
    stat_file = operation(routes.stat_file)
    file_tree = operation(routes.file_tree)
    make_folder = operation(routes.make_folder)
    move_file = operation(routes.move_file)

    branch_sandbox = operation(routes.branch_sandbox)
    rollback_sandbox = operation(routes.rollback_sandbox)
    pause_sandbox = operation(routes.pause_sandbox)
    resume_sandbox = operation(routes.resume_sandbox)

    list_snapshots = operation(routes.list_snapshots)
    create_snapshot = operation(routes.create_snapshot)
    get_snapshot = operation(routes.get_snapshot)
    get_snapshot_info = operation(routes.get_snapshot_info)
    delete_snapshot = operation(routes.delete_snapshot)
    compact_snapshot = operation(routes.compact_snapshot)
    unload_snapshot = operation(routes.unload_snapshot)
    set_snapshot_owner = operation(routes.set_snapshot_owner)

    list_workspaces = operation(routes.list_workspaces)
    create_workspace = operation(routes.create_workspace)
    get_workspace = operation(routes.get_workspace)
    delete_workspace = operation(routes.delete_workspace)
    suspend_workspace = operation(routes.suspend_workspace)
    resume_workspace = operation(routes.resume_workspace)

    list_tokens = operation(routes.list_tokens)
    create_token = operation(routes.create_token)
    delete_token = operation(routes.delete_token)
    rotate_token = operation(routes.rotate_token)

    def _connections(self) -> _Connections:
        """The connections of the running loop. Those of a loop that has closed cannot be used any more, and go."""
        loop = asyncio.get_running_loop()
        connections = self._of_loop.get(loop)
        if connections is None:
            for other in list(self._of_loop):
                if other.is_closed():
                    self._of_loop.pop(other).drop()
            transport = httpx.AsyncHTTPTransport(**self._options)
            # The daemon is on this host or in this network: a proxy of the environment does not lead to it.
            http = httpx.AsyncClient(transport=transport, headers=self.address.headers, trust_env=False)
            connections = self._of_loop[loop] = _Connections(http)
        return connections

    async def wait_for_daemon(self, timeout: float = 30.0) -> Health:
        """Returns as soon as a daemon answers, at the latest after `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            try:
                return await self.health()
            except DaemonUnreachableError:
                if time.monotonic() > until:
                    raise
            await asyncio.sleep(0.1)

    async def send(self, call: Call[T]) -> T:
        """Sends a call; sends it again where that is safe."""
        attempts = Attempts(self.address, call)
        headers, content = call.payload()
        while True:
            try:
                response = await self._connections().request(
                    call.method,
                    self.address.base + call.target,
                    headers=headers,
                    content=content if content is None or isinstance(content, bytes) else _in_turn(content),
                    timeout=attempts.timeout,
                )
            except httpx.HTTPError as failure:
                wait = attempts.after_failure(failure)
            else:
                reply = Reply(response.status_code, response.headers, response.content)
                if response.is_success:
                    return call.parse(reply)
                wait = attempts.after_reply(reply)
            await asyncio.sleep(wait)

    async def run(self, steps: Steps[T]) -> T:
        """Runs several calls; an error goes back into them, so that they can clean up.

        What they do after a cancellation goes on through further ones. If the event loop closes in the middle, nothing can
        be awaited any more: the clean-up then blocks.
        """
        try:
            step = next(steps)
            while True:
                try:
                    reply = await (asyncio.sleep(step.seconds) if isinstance(step, Sleep) else self.send(step))
                except BaseException as error:
                    # A generator that closes has no await in the middle: here it is a coroutine, which may wait no more.
                    if isinstance(error, GeneratorExit) or loop_is_closing(error):
                        return self.run_blocking(_thrown(steps, error))
                    if isinstance(error, asyncio.CancelledError):
                        return await finish(self.run(_thrown(steps, error)))
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as done:
            return done.value

    def run_blocking(self, steps: Steps[T]) -> T:
        """Runs several calls without an event loop."""
        timeout = min(self.address.timeout, 10.0)
        with Client(self.address.url, self.address.token, timeout, self.address.cacert) as client:
            return client.run(steps)

    @asynccontextmanager
    async def stream(
        self, call: Call[Any], timeout: Optional[float] = None
    ) -> AsyncGenerator[AsyncIterator[bytes], None]:
        """Sends a call and passes on the body as it comes; each part may take `timeout` seconds."""
        headers, content = call.payload()
        limit = httpx.Timeout(self.address.timeout, read=timeout)
        try:
            async with self._connections().stream(
                call.method,
                self.address.base + call.target,
                headers=headers,
                content=content if content is None or isinstance(content, bytes) else _in_turn(content),
                timeout=limit,
            ) as response:
                if not response.is_success:
                    raise reply_error(Reply(response.status_code, response.headers, await response.aread()))
                yield response.aiter_bytes()
        except httpx.HTTPError as failure:
            raise failure_error(self.address, failure, call.method + " " + call.path) from failure

    async def exec_stream(
        self, id: str, body: requests.ExecStreamRequest, *, cmd: Optional[Command] = None, check: bool = True
    ) -> AsyncCommandHandle:
        """Runs a command in a sandbox, with input and output as they come."""
        limit = body.get("timeout_secs")
        deadline = None if limit is None else time.monotonic() + limit + self.address.timeout
        socket = await open_async_socket(self.address, routes.exec_stream(id).path, json.dumps(body))
        return AsyncCommandHandle(socket, cmd or body["args"], deadline, check)

    async def run_stream(self, body: requests.RunRequest, *, check: bool = True) -> AsyncCommandHandle:
        """Runs a command in a new sandbox of an image. The sandbox ends with the connection."""
        socket = await open_async_socket(self.address, routes.run_stream().path, json.dumps(body))
        return AsyncCommandHandle(socket, body["args"], None, check)

    async def follow_console(self, id: str, *, tail: Optional[int] = None) -> AsyncIterator[str]:
        """The console's output as it comes, until the sandbox ends."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        async with self.stream(routes.follow_console(id, tail=tail)) as parts:
            async for part in parts:
                text = decoder.decode(part)
                if text:
                    yield text

    async def events(
        self,
        *,
        since: Optional[str] = None,
        sandbox: Optional[str] = None,
        kind: Optional[str] = None,
        follow: bool = True,
    ) -> AsyncIterator[Union[Event, Lagged]]:
        """Events of sandboxes, snapshots and workspaces as they come; with `follow=False` only past ones."""
        lines = EventLines()
        async with self.stream(lines.call(since, sandbox, kind, follow), timeout=lines.silence) as parts:
            async for part in parts:
                for event in lines.feed(part):
                    yield event

    async def close(self) -> None:
        """Closes the connections of the running loop. Sandboxes go on."""
        connections = self._of_loop.pop(asyncio.get_running_loop(), None)
        if connections is not None:
            await connections.http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


def loop_is_closing(error: Optional[BaseException]) -> bool:
    """Whether nothing can be awaited any more, because a coroutine closes without its event loop.

    A generator that closes while its loop runs may wait, and must: a clean-up that blocks would block all other tasks.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return True
    return isinstance(error, GeneratorExit) and asyncio.current_task() is None


async def finish(work: Coroutine[object, object, T]) -> T:
    """Waits for a clean-up to its end, however often this task is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: Optional[asyncio.CancelledError] = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if not task.cancelled():
        # What went wrong in the clean-up is not what the caller waits for.
        task.exception()
    raise cancelled


async def _in_turn(pieces: Any) -> AsyncIterator[bytes]:
    """The pieces of a body. A file is read in the loop, a piece at a time."""
    for piece in pieces:
        yield piece


def _thrown(steps: Steps[T], error: BaseException) -> Steps[T]:
    """The steps that are left after an error."""
    step = steps.throw(error)
    while True:
        try:
            reply = yield step
        except BaseException as raised:
            step = steps.throw(raised)
        else:
            step = steps.send(reply)


_default: dict[tuple[Any, ...], AsyncClient] = {}


def default_async_client() -> AsyncClient:
    """The client that is used where none is given: one for each address in the environment."""
    address = Address.find(None, None, 60.0, None)
    key = (address.url, address.token)
    if key not in _default:
        _default[key] = AsyncClient(address.url, address.token)
    return _default[key]
