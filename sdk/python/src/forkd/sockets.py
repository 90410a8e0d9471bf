"""Opens WebSockets to the daemon."""

from __future__ import annotations

from socket import AF_UNIX
from socket import socket as Socket
from typing import Any, ContextManager, cast

from websockets.asyncio import client as asyncio_client
from websockets.exceptions import InvalidHandshake, InvalidStatus
from websockets.sync import client as sync_client

from .calls import Reply
from .errors import ForkdError
from .wire import Address, failure_error, reply_error

# The longest message that the daemon may send, in bytes.
LONGEST = 16 << 20
# A connection that does not answer a ping in this many seconds is broken.
PING = 20.0


def open_socket(address: Address, path: str, first: str) -> sync_client.ClientConnection:
    """Connects, and sends the first message."""
    try:
        uri, options = address.websocket + path, _options(address)
        if address.socket:
            options["sock"] = unix_socket(address.socket, address.timeout)
        # Entered at once: in some versions `connect` itself is the connection, in others a context manager for it.
        connecting = cast("ContextManager[sync_client.ClientConnection]", cast("Any", sync_client).connect(uri, **options))
        socket = connecting.__enter__()
        socket.send(first)
        return socket
    except Exception as failure:
        raise _error(address, path, failure) from failure


async def open_async_socket(address: Address, path: str, first: str) -> asyncio_client.ClientConnection:
    """Connects, and sends the first message."""
    try:
        uri, options = address.websocket + path, _options(address)
        if address.socket:
            options["sock"] = unix_socket(address.socket, address.timeout)
        socket = await asyncio_client.connect(uri, **options)
        await socket.send(first)
        return socket
    except Exception as failure:
        raise _error(address, path, failure) from failure


def unix_socket(path: str, timeout: float) -> Socket:
    """A connection to the daemon's unix socket."""
    connection = Socket(AF_UNIX)
    connection.settimeout(timeout)
    connection.connect(path)
    return connection


def _options(address: Address) -> dict[str, Any]:
    return {
        "additional_headers": address.headers,
        "ssl": address.tls(),
        "open_timeout": address.timeout,
        "close_timeout": 1.0,
        "ping_interval": min(PING, address.timeout),
        "ping_timeout": min(PING, address.timeout),
        "max_size": LONGEST,
        "compression": None,
        # The daemon is on this host or in this network: a proxy of the environment does not lead to it.
        "proxy": None,
    }


def _error(address: Address, path: str, failure: Exception) -> ForkdError:
    if isinstance(failure, InvalidStatus):
        response = failure.response
        headers = {name.lower(): value for name, value in response.headers.raw_items()}
        return reply_error(Reply(response.status_code, headers, bytes(response.body or b"")))
    if isinstance(failure, InvalidHandshake):
        return ForkdError(f"GET {path}: what answers at {address.url} is no forkd ({failure})")
    return failure_error(address, failure, "GET " + path)
