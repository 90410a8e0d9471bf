"""As much HTTP/1.1 as the code interpreter needs, on asyncio."""

import asyncio
import contextlib
import json

MAX_HEAD = 64 << 10
MAX_BODY = 32 << 20
MAX_CONNECTIONS = 256
IDLE_SECONDS = 600
REASONS = {
    200: "OK", 204: "No Content", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed",
    409: "Conflict", 411: "Length Required", 413: "Payload Too Large", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


class Refused(Exception):
    """A request that is answered with a status and a text."""

    def __init__(self, status, text):
        super().__init__(text)
        self.status, self.text = status, text


class Request:
    def __init__(self, method, path, headers, body):
        self.method, self.path, self.headers, self.body = method, path, headers, body

    def json(self):
        """The body, a JSON object; an absent one is empty."""
        if not self.body.strip():
            return {}
        try:
            value = json.loads(self.body)
        except ValueError as error:
            raise Refused(400, f"the body is not JSON: {error}") from None
        if not isinstance(value, dict):
            raise Refused(400, "the body is not a JSON object")
        return value


class Answer:
    """A complete answer: JSON, or text if `value` is a string."""

    def __init__(self, status, value=None):
        self.status = status
        if isinstance(value, str):
            self.kind, self.body = "text/plain; charset=utf-8", value.encode()
        elif value is None:
            self.kind, self.body = None, b""
        else:
            self.kind, self.body = "application/json", json.dumps(value).encode()


class Stream:
    """An answer in pieces. `pieces(gone)` yields bytes; `gone` is set when the client has left."""

    def __init__(self, kind, pieces):
        self.kind, self.pieces = kind, pieces


async def read_request(reader):
    """The next request; None at the end of the connection."""
    try:
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), IDLE_SECONDS)
    except asyncio.LimitOverrunError:
        raise Refused(431, f"the request's head is larger than {MAX_HEAD} bytes") from None
    except (asyncio.IncompleteReadError, asyncio.TimeoutError, ConnectionError):
        return None
    first, *lines = head.decode("latin-1").split("\r\n")
    try:
        method, target, version = first.split(" ")
    except ValueError:
        raise Refused(400, "the request line is broken") from None
    if not version.startswith("HTTP/1."):
        raise Refused(400, "only HTTP/1.1 is served")
    headers = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            headers[name.strip().lower()] = value.strip()
    headers[":version"] = version
    return method, target.partition("?")[0], headers


async def read_body(reader, headers):
    if "chunked" in headers.get("transfer-encoding", "").lower():
        pieces, size = [], 0
        while True:
            try:
                length = int((await reader.readuntil(b"\r\n")).split(b";")[0].strip(), 16)
            except ValueError:
                raise Refused(400, "a chunk of the body has no length") from None
            size += length
            if length < 0 or size > MAX_BODY:
                raise Refused(413, f"the body is larger than {MAX_BODY >> 20} MiB")
            if length == 0:
                while (await reader.readuntil(b"\r\n")) != b"\r\n":
                    pass
                return b"".join(pieces)
            pieces.append(await reader.readexactly(length))
            await reader.readexactly(2)
    try:
        length = int(headers.get("content-length", "0"))
    except ValueError:
        length = -1
    if length < 0:
        raise Refused(400, "Content-Length is not a length")
    if length > MAX_BODY:
        raise Refused(413, f"the body is larger than {MAX_BODY >> 20} MiB")
    return await reader.readexactly(length)


class Server:
    """Answers requests with what `handle(request)` returns, an Answer or a Stream."""

    def __init__(self, handle):
        self.handle = handle
        self.connections = 0

    async def listen(self, host, port):
        return await asyncio.start_server(self.serve, host, port, limit=MAX_HEAD, backlog=128)

    async def serve(self, reader, writer):
        self.connections += 1
        try:
            if self.connections > MAX_CONNECTIONS:
                await self.send(writer, Answer(503, "too many connections"), close=True)
                return
            while await self.serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.connections -= 1
            writer.close()

    async def serve_one(self, reader, writer):
        """One request; whether the connection goes on."""
        try:
            head = await read_request(reader)
            if head is None:
                return False
            method, path, headers = head
            if headers.get("expect", "").lower() == "100-continue":
                writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            body = await read_body(reader, headers)
        except Refused as refused:
            # Where the next request would start is not known.
            await self.send(writer, Answer(refused.status, refused.text), close=True)
            return False
        close = headers.get("connection", "").lower() == "close" or headers[":version"] == "HTTP/1.0"
        try:
            answer = await self.handle(Request(method, path, headers, body))
        except Refused as refused:
            answer = Answer(refused.status, refused.text)
        except Exception as error:  # a fault of this program must not end the connection without a word
            answer = Answer(500, f"the code interpreter failed: {type(error).__name__}: {error}")
        if isinstance(answer, Stream):
            await self.stream(reader, writer, answer)
            return False
        await self.send(writer, answer, close)
        return not close

    async def send(self, writer, answer, close):
        head = [f"HTTP/1.1 {answer.status} {REASONS.get(answer.status, 'Unknown')}"]
        if answer.kind:
            head.append(f"Content-Type: {answer.kind}")
        if answer.status != 204:
            head.append(f"Content-Length: {len(answer.body)}")
        if close:
            head.append("Connection: close")
        writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + answer.body)
        await writer.drain()

    async def stream(self, reader, writer, answer):
        gone = asyncio.Event()

        async def watch():
            # Clients send nothing after their request: what ends this is the end of the connection.
            try:
                while await reader.read(1 << 16):
                    pass
            except ConnectionError:
                pass
            gone.set()

        watcher = asyncio.create_task(watch())
        writer.write(
            f"HTTP/1.1 200 OK\r\nContent-Type: {answer.kind}\r\nCache-Control: no-store\r\n"
            "Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
        )
        try:
            async with contextlib.aclosing(answer.pieces(gone)) as pieces:
                async for piece in pieces:
                    writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
                    if not await drained_before(writer, gone):
                        return
            if not gone.is_set():
                writer.write(b"0\r\n\r\n")
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            gone.set()
            watcher.cancel()


async def drained_before(writer, gone):
    """Whether the client took what was written, and did not leave first."""
    drained = asyncio.ensure_future(writer.drain())
    left = asyncio.ensure_future(gone.wait())
    await asyncio.wait({drained, left}, return_when=asyncio.FIRST_COMPLETED)
    left.cancel()
    if drained.done():
        drained.result()
        return True
    drained.cancel()
    return False
