"""Opens WebSockets to the daemon."""

from __future__ import annotations

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
        library, options = cast("Any", sync_client), _options(address, path)
        connecting = library.unix_connect(**options) if address.socket else library.connect(**options)
        # Entered at once: in some versions `connect` itself is the connection, in others a context manager for it.
        socket = cast("ContextManager[sync_client.ClientConnection]", connecting).__enter__()
        try:
            socket.send(first)
        except BaseException:
            socket.close()
            raise
        return socket
    except Exception as failure:
        raise _error(address, path, failure) from failure


async def open_async_socket(address: Address, path: str, first: str) -> asyncio_client.ClientConnection:
    """Connects, and sends the first message."""
    try:
        options = _options(address, path)
        connect = asyncio_client.unix_connect if address.socket else asyncio_client.connect
        socket = await connect(**options)
        try:
            await socket.send(first)
        except BaseException:
            # Also where nothing can be awaited any more, because the task is cancelled or its loop closes.
            socket.transport.abort()
            raise
        return socket
    except Exception as failure:
        raise _error(address, path, failure) from failure


def _options(address: Address, path: str) -> dict[str, Any]:
    # The daemon is on this host or in this network: a proxy of the environment does not lead to it.
    where = {"path": address.socket} if address.socket else {"proxy": None}
    return {
        **where,
        "uri": address.websocket + path,
        "additional_headers": address.headers,
        "ssl": address.tls(),
        "open_timeout": address.timeout,
        "close_timeout": 1.0,
        "ping_interval": min(PING, address.timeout),
        "ping_timeout": min(PING, address.timeout),
        "max_size": LONGEST,
        "compression": None,
    }


def _error(address: Address, path: str, failure: Exception) -> ForkdError:
    if isinstance(failure, InvalidStatus):
        response = failure.response
        headers = {name.lower(): value for name, value in response.headers.raw_items()}
        return reply_error(Reply(response.status_code, headers, bytes(response.body or b"")))
    if isinstance(failure, InvalidHandshake):
        return ForkdError(f"GET {path}: what answers at {address.url} is no forkd ({failure})")
    return failure_error(address, failure, "GET " + path)
