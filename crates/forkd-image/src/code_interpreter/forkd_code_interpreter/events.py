"""From a kernel's messages to the events that a client reads, in a buffer with a bound."""

import asyncio
import collections
import json
import time

# A longer text is sent in pieces of this many characters.
PIECE = 1 << 20
# A longer text of one message is cut, and a larger result is left out.
MAX_TEXT = 32 << 20
MAX_RESULT = 64 << 20
# The kernel is stopped while more than HIGH characters wait for the client, until fewer than LOW do.
HIGH = 4 << 20
LOW = 1 << 20

# MIME types that only this program uses, between the Python kernel and here.
DATA = "application/vnd.forkd.data+json"
CHART = "application/vnd.forkd.chart+json"
FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    DATA: "data",
    CHART: "chart",
}


def stream(name, text):
    """The events for text on `stdout` or `stderr`."""
    notice = None
    if len(text) > MAX_TEXT:
        notice = f"[{len(text) - MAX_TEXT} characters of output were left out here]\n"
        text = text[:MAX_TEXT]
    for start in range(0, len(text), PIECE):
        yield {"type": name, "text": text[start : start + PIECE], "timestamp": time.time_ns()}
    if notice:
        yield {"type": "stderr", "text": notice, "timestamp": time.time_ns()}


def result(data, is_main):
    """The event for a kernel's MIME bundle."""
    event = {"type": "result"}
    extra = {}
    for mime, value in data.items():
        field = FIELDS.get(mime)
        # Some kernels send text as a list of lines.
        if isinstance(value, list) and mime != "application/json" and all(isinstance(line, str) for line in value):
            value = "".join(value)
        if field is None:
            extra[mime] = value
        elif field in ("png", "jpeg", "pdf") and isinstance(value, str):
            event[field] = value.strip()
        else:
            event[field] = value
    text = event.get("text")
    # A string is its own text: clients get it without the quotes of its representation.
    if isinstance(text, str) and len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        event["text"] = text[1:-1]
    if extra:
        event["extra"] = extra
    event["is_main_result"] = is_main
    return event


def of_message(kind, content):
    """The events for a message of a kernel's iopub channel."""
    if kind == "stream":
        name = "stderr" if content.get("name") == "stderr" else "stdout"
        yield from stream(name, str(content.get("text", "")))
    elif kind in ("display_data", "execute_result"):
        yield result(content.get("data") or {}, kind == "execute_result")
    elif kind == "update_display_data":
        yield result(content.get("data") or {}, False)
    elif kind == "error":
        yield error(content)


def error(content):
    """The event for an exception."""
    lines = content.get("traceback") or []
    return {
        "type": "error",
        "name": str(content.get("ename", "")),
        "value": str(content.get("evalue", "")),
        "traceback": "\n".join(str(line) for line in lines),
    }


class Output:
    """The events of one execution that the client has not got yet, as lines.

    `slow` is called when more than HIGH characters wait, and `caught_up` when fewer than LOW do."""

    def __init__(self, slow=lambda: None, caught_up=lambda: None):
        self.slow, self.caught_up = slow, caught_up
        self.lines = collections.deque()
        self.size = 0
        self.full = False
        self.ended = False
        self.changed = asyncio.Event()

    def put(self, event):
        if self.ended:
            return
        line = json.dumps(event, separators=(",", ":"), ensure_ascii=True, default=str)
        if len(line) > MAX_RESULT and event["type"] == "result":
            text = f"[a result of {len(line) >> 20} MiB was left out: more than {MAX_RESULT >> 20} MiB]\n"
            self.put({"type": "stderr", "text": text, "timestamp": time.time_ns()})
            return
        self.lines.append(line.encode() + b"\n")
        self.size += len(line)
        if self.size > HIGH and not self.full:
            self.full = True
            self.slow()
        self.changed.set()

    def end(self):
        """Nothing follows."""
        self.ended = True
        self.changed.set()

    def close(self):
        """The client is gone: nothing is kept."""
        self.ended = True
        self.lines.clear()
        self.size = 0
        self._catch_up()
        self.changed.set()

    def take(self):
        """The lines so far, about a megabyte of them at most."""
        taken, size = [], 0
        while self.lines and size < PIECE:
            line = self.lines.popleft()
            taken.append(line)
            size += len(line)
            self.size -= len(line) - 1
        if not self.lines and not self.ended:
            self.changed.clear()
        if self.size < LOW:
            self._catch_up()
        return b"".join(taken)

    def _catch_up(self):
        if self.full:
            self.full = False
            self.caught_up()

    @property
    def is_over(self):
        return self.ended and not self.lines
