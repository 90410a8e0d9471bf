"""What both clients decide the same way, without any network: the address, when to send again, and which error it is."""

from __future__ import annotations

import builtins
import json
import os
import random
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Any, Mapping, Optional, Union, cast
from urllib.parse import urlsplit

import httpx

from .calls import Call, Reply
from .errors import (
    AuthenticationError,
    BusyError,
    DaemonUnreachableError,
    ForkdError,
    InvalidRequestError,
    RateLimitError,
    StreamBrokenError,
    TimeoutError,
    error_for,
)

DEFAULT_URL = "http://127.0.0.1:8889"
# The codes of a daemon that has not begun with the request and asks for patience.
NOT_BEGUN = frozenset(["rate_limited", "daemon_busy", "shutting_down"])
# A connection without traffic, such as one that follows a console, breaks a minute after the daemon's host has vanished.
_IDLE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value) for name, value in _IDLE if hasattr(socket, name)
]
# How often a call is sent at most.
ATTEMPTS = 4


@dataclass(frozen=True)
class Address:
    """Where the daemon is, and how to prove who calls."""

    url: str
    token: Optional[str]
    timeout: float
    cacert: Optional[str]
    # Path of the unix socket; None for TCP.
    socket: Optional[str]

    @classmethod
    def find(cls, url: Optional[str], token: Optional[str], timeout: float, cacert: Optional[str]) -> Address:
        """The address of these arguments, else of `FORKD_URL` and `FORKD_TOKEN`, else this host's daemon."""
        url = (url or os.environ.get("FORKD_URL") or "").strip() or DEFAULT_URL
        token = checked_token(token or os.environ.get("FORKD_TOKEN") or "")
        if not timeout > 0:
            raise InvalidRequestError(f"the client's timeout is {timeout:g}: give the seconds that a call may take, such as 60")
        cause: Optional[Exception] = None
        try:
            parts = urlsplit(url)
            if parts.scheme == "unix" and (parts.path or parts.netloc):
                return cls(url, token, timeout, cacert, parts.path or parts.netloc)
            if parts.scheme in ("http", "https") and httpx.URL(url).host and parts.port != 0:
                return cls(url.rstrip("/"), token, timeout, cacert, None)
        except (ValueError, httpx.InvalidURL) as error:
            cause = error
        reason = f" ({cause})" if cause else ""
        raise InvalidRequestError(
            f"FORKD_URL is {url!r}{reason}: give http://HOST:PORT, https://HOST:PORT or unix:///PATH, such as {DEFAULT_URL}"
        ) from cause

    @property
    def base(self) -> str:
        """The start of every HTTP URL."""
        return "http://localhost" if self.socket else self.url

    @property
    def websocket(self) -> str:
        """The start of every WebSocket URL."""
        return "ws" + self.base[len("http") :]

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": "Bearer " + self.token} if self.token else {}

    def tls(self) -> Optional[ssl.SSLContext]:
        """The certificates to trust; None without TLS."""
        if not self.base.startswith("https"):
            return None
        return ssl.create_default_context(cafile=self.cacert)

    def verify(self) -> Union[ssl.SSLContext, bool]:
        # Without TLS there are no certificates to load.
        return self.tls() or False

    def transport(self) -> dict[str, Any]:
        """The options of both clients' connections."""
        options = dict(verify=self.verify(), uds=self.socket, limits=self.limits())
        return options if self.socket else {**options, "socket_options": KEEP_ALIVE}

    def limits(self) -> httpx.Limits:
        # `try_each` uses a connection per child at the same time.
        return httpx.Limits(max_connections=None, max_keepalive_connections=64)


def checked_token(token: str) -> Optional[str]:
    """The token without the white space around it, such as the newline of the file that it was in; None if there is none."""
    token = token.strip()
    bad = next((i for i, character in enumerate(token) if not "!" <= character <= "~"), None)
    if bad is not None:
        # The text is for logs, so it does not have the token.
        raise InvalidRequestError(
            f"character {bad + 1} of the token is no visible ASCII character: is FORKD_TOKEN, or Client(token=…), what"
            " `forkd token print` prints?"
        )
    return token or None


class Attempts:
    """Decides after a failure whether a call is sent once more, and after how many seconds.

    A call is sent again only if that does nothing twice: if it never reached the daemon, if it only reads, or if it has an
    idempotency key. All attempts together have the time of one, but for a body in pieces, which may take any time to send.
    """

    def __init__(self, address: Address, call: Call[Any]) -> None:
        self.address = address
        self.call = call
        self.limit = address.timeout * call.times + call.patience
        self.sent = 0
        # Whether the daemon may do, or has done, what an earlier attempt asked for.
        self.reply_lost = False
        self._waits = 0
        self._until = time.monotonic() + self.limit

    @property
    def timeout(self) -> httpx.Timeout:
        """How long the daemon may be silent during the next attempt."""
        first = self.sent == self._waits == 0
        left = self.limit if first or not _resendable(self.call) else max(0.001, self._until - time.monotonic())
        return httpx.Timeout(self.address.timeout, read=left, connect=min(self.address.timeout, 10.0))

    def after_failure(self, failure: Exception) -> float:
        """The seconds to wait before the next attempt; raises the error if this was the last."""
        self.sent += 1
        error = failure_error(self.address, failure, self._what)
        unsent = isinstance(failure, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        self.reply_lost = self.reply_lost or not unsent
        refused = isinstance(error, DaemonUnreachableError) and self.sent >= 3
        again = (unsent and _resendable(self.call)) or (self.call.repeatable and not isinstance(error, TimeoutError))
        wait = backoff(self.sent)
        if not again or refused or self.sent >= ATTEMPTS or self._too_late(wait):
            error.outcome_unknown = self.reply_lost
            raise error from failure
        return wait

    def after_reply(self, reply: Reply) -> float:
        """The same after a reply that is an error."""
        error = reply_error(reply)
        if error.code == "idempotency_in_progress" and self.call.keyed:
            return self._after_in_progress(error)
        self.sent += 1
        if error.code is None and reply.status >= 500:
            # Not from the daemon: a server between here and there has lost its answer.
            self.reply_lost = True
        again = reply.status in (429, 503) and error.code in NOT_BEGUN and _resendable(self.call)
        wait = cast("Optional[float]", getattr(error, "retry_after", None))
        if not again or self.sent >= ATTEMPTS or (wait or 0.0) > self.address.timeout:
            error.outcome_unknown = self.reply_lost and (error.code is None or error.code in NOT_BEGUN)
            raise error
        return backoff(self.sent) if wait is None else wait

    def _after_in_progress(self, error: ForkdError) -> float:
        """The daemon still works on an earlier attempt, and answers the next one with what came of it."""
        self.reply_lost = True
        self._waits += 1
        wait = min(backoff(min(self._waits, 8)), 1.0)
        if self._too_late(wait):
            late = TimeoutError(
                f"{self._what}: the daemon at {self.address.url} still works on it after {self.limit:g} s; give the client"
                " a longer timeout",
                code=error.code,
                request_id=error.request_id,
            )
            late.outcome_unknown = True
            raise late
        return wait

    def _too_late(self, wait: float) -> bool:
        return _resendable(self.call) and time.monotonic() + wait >= self._until

    @property
    def _what(self) -> str:
        return self.call.method + " " + self.call.path


def _resendable(call: Call[Any]) -> bool:
    """Whether the body is still there: an iterable may be used up."""
    return call.content is None or isinstance(call.content, bytes)


def backoff(attempt: int) -> float:
    """Seconds before the attempt after this many: 0.1, 0.2, 0.4 and so on, with some chance."""
    return 0.1 * 2.0 ** (attempt - 1) * random.uniform(0.8, 1.2)


def failure_error(address: Address, failure: Exception, what: str) -> ForkdError:
    """The error for a failure of the connection."""
    if isinstance(failure, (httpx.ConnectError, httpx.ConnectTimeout, ConnectionRefusedError, FileNotFoundError)):
        return unreachable(address, failure)
    if isinstance(failure, httpx.PoolTimeout):
        return TimeoutError(f"{what}: no free connection in {address.timeout:g} s")
    if isinstance(failure, (httpx.TimeoutException, builtins.TimeoutError)):
        return TimeoutError(
            f"{what}: the daemon at {address.url} did not answer in time. It may still do the work; look with"
            " Sandbox.list(), or give the client a longer timeout"
        )
    return StreamBrokenError(
        f"{what}: the connection to the daemon at {address.url} broke before the reply was complete"
        f" ({_name(failure)}). If the daemon was restarted, try again"
    )


def _name(failure: BaseException) -> str:
    return str(failure) or type(failure).__name__


def unreachable(address: Address, failure: BaseException) -> DaemonUnreachableError:
    """The error when no daemon answers."""
    if isinstance(failure.__cause__, ssl.SSLError) or "CERTIFICATE" in str(failure):
        return DaemonUnreachableError(
            f"the certificate of {address.url} is not trusted ({failure}): give its authority as"
            " Client(cacert=PATH)"
        )
    return DaemonUnreachableError(
        f"no daemon answers at {address.url} ({_name(failure)}): start one: forkd serve. If it listens elsewhere, set"
        " FORKD_URL"
    )


def error_fields(body: bytes) -> tuple[Optional[str], Optional[str], Optional[str]]:
    """Sentence, code and request id of an `ErrorBody`, as far as it is one."""
    try:
        data: Any = json.loads(body)
    except ValueError:
        return None, None, None
    if not isinstance(data, dict):
        return None, None, None
    fields = cast("dict[str, Any]", data)
    values = [fields.get(name) for name in ("error", "code", "request_id")]
    sentence, code, request = (value if isinstance(value, str) else None for value in values)
    return sentence, code, request


def reply_error(reply: Reply) -> ForkdError:
    """The error for a reply that is not 2xx."""
    sentence, code, request = error_fields(reply.body)
    if sentence is None:
        start = reply.body[:200].decode("utf-8", "replace").strip()
        sentence = f"status {reply.status} without a reason" + (f": {start}" if start else "")
        if code is None and reply.status == 401:
            code = "unauthorized"
    error = error_for(code, sentence, status=reply.status, request_id=request)
    if isinstance(error, AuthenticationError) and "FORKD_TOKEN" not in error.message:
        error.message += " (this client sends FORKD_TOKEN, or Client(token=…); `forkd token print` prints it)"
    if isinstance(error, (RateLimitError, BusyError)):
        error.retry_after = retry_after(reply.headers)
    return error


def retry_after(headers: Mapping[str, str]) -> Optional[float]:
    """The seconds of `Retry-After`; a date is not used."""
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
