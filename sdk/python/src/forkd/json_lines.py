"""The JSON-lines protocol of an agent port: one request, one reply, and the connection closes."""

from __future__ import annotations

import json
import socket
from typing import Any, cast

from . import requests
from .decoding import decode
from .errors import DaemonUnreachableError, GuestError, InvalidRequestError, StreamBrokenError, TimeoutError
from .models import EvalReply, ExecReply, PingReply

# The longest reply, in bytes.
LONGEST = 64 << 20


class JsonLines:
    """Talks to one agent port, such as `127.0.0.1:40123`."""

    def __init__(self, target: str, timeout: float) -> None:
        self.target = target
        self.timeout = timeout
        host, _, port = target.rpartition(":")
        if not host or not port.isdigit():
            raise InvalidRequestError(f"the target is {target!r}: give HOST:PORT, as `forkd agent-port` prints it")
        self._address = (host.strip("[]"), int(port))

    def ask(self, request: dict[str, Any], patience: float = 0.0) -> dict[str, Any]:
        """Sends one request and returns the reply."""
        try:
            with socket.create_connection(self._address, timeout=min(self.timeout, 10.0)) as connection:
                connection.settimeout(self.timeout + patience)
                connection.sendall(json.dumps(request).encode() + b"\n")
                connection.shutdown(socket.SHUT_WR)
                reply = self._read(connection)
        except socket.timeout as error:
            raise TimeoutError(f"the agent port {self.target} does not answer: has the sandbox ended?") from error
        except ConnectionRefusedError as error:
            text = f"no agent port at {self.target}: open one with `forkd agent-port SANDBOX`"
            raise DaemonUnreachableError(text) from error
        except OSError as error:
            raise StreamBrokenError(f"the connection to the agent port {self.target} broke ({error})") from error
        try:
            data: Any = json.loads(reply)
        except ValueError as error:
            raise StreamBrokenError(f"the agent port {self.target} sent half a reply: has the sandbox ended?") from error
        return cast("dict[str, Any]", data) if isinstance(data, dict) else {}

    def _read(self, connection: socket.socket) -> bytes:
        parts: list[bytes] = []
        size = 0
        while size <= LONGEST:
            part = connection.recv(65536)
            if not part:
                return b"".join(parts)
            parts.append(part)
            size += len(part)
        raise GuestError(f"the agent port {self.target} sends more than {LONGEST} bytes")

    def ping(self) -> PingReply:
        data = self.ask({"action": "ping"})
        if "pong" not in data:
            raise GuestError(f"the agent port {self.target} does not answer a ping with a pong: is it one?")
        warm = "ready" if data.get("warmup_ready") else "cold"
        # The protocol has fewer fields than the API.
        more = {"python": data.get("agent_lang") == "python", "uptime_ms": 0, "version": "", "warm": warm}
        return decode(PingReply, {**more, **data})

    def execute(self, body: requests.ExecRequest) -> ExecReply:
        other = {"stdin": "stdin", "cwd": "cwd", "env": "envs", "user": "user"}
        given = [name for field, name in other.items() if body.get(field) is not None]
        if given:
            raise InvalidRequestError(
                f"an agent port runs a command without {' and '.join(given)}: use Sandbox.connect(id), with the sandbox's id"
            )
        limit = body.get("timeout_secs", 30)
        data = self.ask({"action": "exec", "args": body["args"], "timeout": limit}, patience=limit)
        return decode(ExecReply, {"stdout": "", "stderr": "", "exit_code": 1, **data})

    def evaluate(self, body: requests.EvalRequest) -> EvalReply:
        limit = body.get("timeout_secs", 30)
        data = self.ask({"action": "eval", "code": body["code"], "timeout": limit}, patience=limit)
        start = {"stdout": "", "stderr": "", "exit_code": 1 if data.get("error") else 0}
        return decode(EvalReply, {**start, **data})
