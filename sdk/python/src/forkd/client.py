"""`Client`: the daemon's REST API, a method for each operation."""

from __future__ import annotations

import atexit
import codecs
import functools
import json
import os
import threading
import time
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable, Generator, Iterator, Optional, TypeVar, Union

import httpx

from . import requests, routes
from .calls import Call, Reply, Sleep, Steps
from .command import Command
from .commands import CommandHandle
from .errors import DaemonUnreachableError
from .models import Event, Health
from .sockets import open_socket
from .sse import EventLines, Lagged
from .wire import Address, Attempts, failure_error, reply_error

if TYPE_CHECKING:
    from typing_extensions import Concatenate, ParamSpec

    P = ParamSpec("P")

T = TypeVar("T")


def operation(route: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    """A method of the client that sends the route's call and returns its reply."""

    @functools.wraps(route)
    def method(self: Client, *args: P.args, **kwargs: P.kwargs) -> T:
        return self.send(route(*args, **kwargs))

    return method


class Client:
    """A connection to a daemon; threads may share it.

    `url` is `http://…`, `https://…` or `unix:///…`; without it `FORKD_URL`, else `http://127.0.0.1:8889`. `token` is
    `FORKD_TOKEN` when absent. `timeout` is how many seconds the daemon may be silent, beside the time that a command may
    take. `cacert` is a file with the authority of the daemon's certificate.

    >>> with Client() as client:
    ...     client.version().api
    'v1'
    """

    def __init__(
        self,
        url: Optional[str] = None,
        token: Optional[str] = None,
        timeout: float = 60.0,
        cacert: Optional[str] = None,
    ) -> None:
        self.address = Address.find(url, token, timeout, cacert)
        self.connect()
        _open.add(self)

    def connect(self) -> None:
        """Begins with new connections."""
        transport = httpx.HTTPTransport(**self.address.transport())
        # The daemon is on this host or in this network: a proxy of the environment does not lead to it.
        self._http = httpx.Client(transport=transport, headers=self.address.headers, trust_env=False)

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

    def wait_for_daemon(self, timeout: float = 30.0) -> Health:
        """Returns as soon as a daemon answers, at the latest after `timeout` seconds."""
        until = time.monotonic() + timeout
        while True:
            try:
                return self.health()
            except DaemonUnreachableError:
                if time.monotonic() > until:
                    raise
            time.sleep(0.1)

    def send(self, call: Call[T]) -> T:
        """Sends a call; sends it again where that is safe."""
        attempts = Attempts(self.address, call)
        headers, content = call.payload()
        while True:
            try:
                response = self._http.request(
                    call.method,
                    self.address.base + call.target,
                    headers=headers,
                    content=content,
                    timeout=attempts.timeout,
                )
            except httpx.HTTPError as failure:
                wait = attempts.after_failure(failure)
            else:
                reply = Reply(response.status_code, response.headers, response.content)
                if response.is_success:
                    return call.parse(reply)
                wait = attempts.after_reply(reply)
            time.sleep(wait)

    def run(self, steps: Steps[T]) -> T:
        """Runs several calls; an error goes back into them, so that they can clean up."""
        try:
            step = next(steps)
            while True:
                try:
                    reply = time.sleep(step.seconds) if isinstance(step, Sleep) else self.send(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(reply)
        except StopIteration as done:
            return done.value

    @contextmanager
    def stream(self, call: Call[Any], timeout: Optional[float] = None) -> Generator[Iterator[bytes], None, None]:
        """Sends a call and passes on the body as it comes; each part may take `timeout` seconds."""
        what = call.method + " " + call.path
        headers, content = call.payload()
        limit = httpx.Timeout(self.address.timeout, read=timeout)
        try:
            with self._http.stream(
                call.method,
                self.address.base + call.target,
                headers=headers,
                content=content,
                timeout=limit,
            ) as response:
                if not response.is_success:
                    raise reply_error(Reply(response.status_code, response.headers, response.read()))
                yield response.iter_bytes()
        except httpx.HTTPError as failure:
            raise failure_error(self.address, failure, what) from failure

    def exec_stream(
        self, id: str, body: requests.ExecStreamRequest, *, cmd: Optional[Command] = None, check: bool = True
    ) -> CommandHandle:
        """Runs a command in a sandbox, with input and output as they come."""
        limit = body.get("timeout_secs")
        deadline = None if limit is None else time.monotonic() + limit + self.address.timeout
        socket = open_socket(self.address, routes.exec_stream(id).path, json.dumps(body))
        return CommandHandle(socket, cmd or body["args"], deadline, check)

    def run_stream(self, body: requests.RunRequest, *, check: bool = True) -> CommandHandle:
        """Runs a command in a new sandbox of an image. The sandbox ends with the connection."""
        socket = open_socket(self.address, routes.run_stream().path, json.dumps(body))
        return CommandHandle(socket, body["args"], None, check)

    def follow_console(self, id: str, *, tail: Optional[int] = None) -> Iterator[str]:
        """The console's output as it comes, until the sandbox ends."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        call = routes.follow_console(id, tail=tail)
        with self.stream(call) as parts:
            for part in parts:
                text = decoder.decode(part)
                if text:
                    yield text

    def events(
        self,
        *,
        since: Optional[str] = None,
        sandbox: Optional[str] = None,
        kind: Optional[str] = None,
        follow: bool = True,
    ) -> Iterator[Union[Event, Lagged]]:
        """Events of sandboxes, snapshots and workspaces as they come; with `follow=False` only past ones."""
        lines = EventLines()
        with self.stream(lines.call(since, sandbox, kind, follow), timeout=lines.silence) as parts:
            for part in parts:
                yield from lines.feed(part)

    def close(self) -> None:
        """Closes the connections. Sandboxes go on."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


_open: weakref.WeakSet[Client] = weakref.WeakSet()
_default: dict[tuple[Any, ...], Client] = {}
_lock = threading.Lock()


@atexit.register
def close_default_clients() -> None:
    """Closes the connections of the clients below."""
    for client in _default.values():
        client.close()


def _connect_again() -> None:
    """A forked process must not use the connections of its parent."""
    for client in _open:
        client.connect()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_connect_again)


def default_client() -> Client:
    """The client that is used where none is given: one for each address in the environment."""
    address = Address.find(None, None, 60.0, None)
    with _lock:
        key = (address.url, address.token)
        if key not in _default:
            _default[key] = Client(address.url, address.token)
        return _default[key]
