"""A daemon of the tests' own: it keeps a list of sandboxes, and misbehaves on request. No virtual machine is involved."""

import base64
import hashlib
import json
import re
import socket
import struct
import threading
import time
from urllib.parse import parse_qs, urlsplit

INFO = {
    "owner": "local",
    "state": "running",
    "vcpus": 1,
    "mem_size_mib": 256,
    "network": True,
    "guest_addr": "10.0.0.2:8888",
    "created_at_unix": 1,
    "snapshot_tag": "parent",
}


class Request:
    def __init__(self, method, target, headers, body):
        parts = urlsplit(target)
        self.method, self.path, self.query = method, parts.path, parse_qs(parts.query)
        self.headers, self.body = headers, body
        self.key = headers.get("idempotency-key")

    @property
    def json(self):
        return json.loads(self.body or b"{}")


class Connection:
    """One connection of a client: what a test may do with it."""

    def __init__(self, sock, stream):
        self.socket, self.stream = sock, stream

    def reply(self, status, data=None, headers=(), body=None):
        body = json.dumps(data).encode() if body is None else body
        lines = ["HTTP/1.1 %d x" % status, "content-length: %d" % len(body), *("%s: %s" % pair for pair in headers)]
        self.socket.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def half(self, data=b'{"ok": '):
        """The beginning of a reply, then the end of the connection."""
        self.socket.sendall(b"HTTP/1.1 200 x\r\ncontent-length: 1000\r\n\r\n" + data)
        self.close()

    def reset(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.stream.close()
        self.socket.close()

    def close(self):
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()

    def upgrade(self, request):
        """Makes a WebSocket of it."""
        guid = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        digest = hashlib.sha1((request.headers["sec-websocket-key"] + guid).encode()).digest()
        self.socket.sendall(
            b"HTTP/1.1 101 x\r\nupgrade: websocket\r\nconnection: Upgrade\r\nsec-websocket-accept: "
            + base64.b64encode(digest)
            + b"\r\n\r\n"
        )

    def frame(self, payload, opcode=None):
        opcode = opcode or (1 if isinstance(payload, str) else 2)
        payload = payload.encode() if isinstance(payload, str) else payload
        size = struct.pack("!B", len(payload)) if len(payload) < 126 else struct.pack("!BH", 126, len(payload))
        self.socket.sendall(bytes([0x80 | opcode]) + size + payload)

    def finish(self):
        """The end of a WebSocket, as a daemon that behaves ends it: what is on its way arrives."""
        self.frame(b"", opcode=8)
        self.socket.shutdown(socket.SHUT_WR)
        while self.read_frame() is not None:
            pass
        self.close()

    def event(self, **event):
        self.frame(json.dumps(event))

    def read_frame(self):
        """The next message of the client, unmasked; None at the end."""
        head = self._exactly(2)
        if head is None:
            return None
        size = head[1] & 127
        if size == 126:
            size = struct.unpack("!H", self._exactly(2))[0]
        elif size == 127:
            size = struct.unpack("!Q", self._exactly(8))[0]
        mask = self._exactly(4)
        data = self._exactly(size) or b""
        return bytes(byte ^ mask[i % 4] for i, byte in enumerate(data))

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                return None
            data += part
        return data


class Server:
    """Listens on a port of loopback. `script(request, connection)` returns True if it has dealt with the request."""

    def __init__(self, script=None, path=None, tls=None):
        self.script = script or (lambda request, connection: False)
        self.alive, self.requests = set(), []
        self.replies, self.busy = {}, set()
        self.delay = 0.0
        self.made = self.connections = 0
        self.stopped = threading.Event()
        self._lock = threading.Lock()
        self._tls = tls
        if path:
            self._listener = socket.socket(socket.AF_UNIX)
            self._listener.bind(path)
            self._listener.listen()
            self.url = "unix://" + path
        else:
            self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
            self._port = self._listener.getsockname()[1]
            self.url = "%s://127.0.0.1:%d" % ("https" if tls else "http", self._port)
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()

    def stop(self):
        """From now on connections are refused."""
        self.stopped.set()
        self.pause()

    def pause(self):
        """Connections are refused, until `go_on`."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()

    def go_on(self):
        if not self.stopped.is_set():
            self._listener = socket.create_server(("127.0.0.1", self._port), backlog=64)
            threading.Thread(target=self._accept, daemon=True).start()

    def count(self, method, path):
        return sum(1 for r in self.requests if r.method == method and re.fullmatch(path, r.path))

    def _accept(self):
        listener = self._listener
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            self.connections += 1
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock):
        try:
            sock = self._tls.wrap_socket(sock, server_side=True) if self._tls else sock
        except OSError:
            return
        stream = sock.makefile("rb")
        connection = Connection(sock, stream)
        try:
            while True:
                line = stream.readline().split()
                if len(line) != 3:
                    return
                headers = {}
                for raw in iter(stream.readline, b"\r\n"):
                    name, _, value = raw.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", 0)))
                request = Request(line[0].decode(), line[1].decode(), headers, body)
                self.requests.append(request)
                if not self.script(request, connection):
                    self.answer(request, connection)
        except (OSError, ValueError):
            pass

    def answer(self, request, connection):
        """What a daemon that behaves answers."""
        path = request.path
        if path == "/healthz":
            return connection.reply(200, {"ok": True})
        if request.method == "POST" and (path == "/v1/sandboxes" or path.endswith("/fork")):
            return self._spawn(request, connection)
        found = re.fullmatch(r"/v1/sandboxes/(\w+)(/\w+)?", path)
        if found is None or found.group(1) not in self.alive:
            return connection.reply(
                404, {"error": "there is no such sandbox", "code": "sandbox_not_found", "request_id": "r"})
        id, what = found.groups()
        if request.method == "DELETE":
            self.alive.discard(id)
            return connection.reply(204, body=b"")
        if what == "/exec":
            return connection.reply(200, {"stdout": "out", "stderr": "", "exit_code": 0})
        if what == "/eval":
            return connection.reply(
                200, {"stdout": "", "stderr": "", "exit_code": 0, "result": "42", "result_json": 42})
        return connection.reply(200, dict(INFO, id=id))

    def _spawn(self, request, connection):
        """Children, once for each idempotency key, also if the client has disconnected."""
        with self._lock:
            if request.key in self.replies:
                return connection.reply(201, self.replies[request.key])
            if request.key in self.busy:
                return connection.reply(
                    409, {"error": "under way", "code": "idempotency_in_progress", "request_id": "r"})
            self.busy.add(request.key)
        time.sleep(self.delay)
        with self._lock:
            ids = ["sb%d" % (self.made + i) for i in range(request.json.get("n", 1))]
            self.made += len(ids)
            self.alive.update(ids)
            reply = {"children": [dict(INFO, id=id) for id in ids], "errors": []}
            self.replies[request.key] = reply
        connection.reply(201, reply)
