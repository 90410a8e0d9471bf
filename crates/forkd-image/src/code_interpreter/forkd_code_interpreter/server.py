"""The routes, and the program's start."""

import argparse
import asyncio
import os
import re
import sys

from . import languages
from .contexts import MAX_WAITING, Contexts, Execution
from .guest import NAME
from .http import Answer, Refused, Server, Stream
from .kernels import Failed

PORT = 49999
KEEPALIVE_SECONDS = 5
KEEPALIVE = b'{"type":"keepalive"}\n'
CONTEXT = re.compile(r"/contexts/([^/]+)(/restart)?")


class CodeInterpreter:
    """Answers the requests of clients."""

    def __init__(self, contexts, keepalive_seconds=KEEPALIVE_SECONDS):
        self.contexts, self.keepalive_seconds = contexts, keepalive_seconds
        self.tasks = set()

    async def handle(self, request):
        path = request.path.rstrip("/") or "/"
        named = CONTEXT.fullmatch(path)
        if path == "/health":
            return self.only(request, GET=lambda: Answer(200, "OK"))
        if path == "/execute":
            return self.only(request, POST=lambda: self.execute(request))
        if path == "/contexts":
            return await self.only(request, GET=self.list, POST=lambda: self.create(request))
        if named and named[2]:
            return await self.only(request, POST=lambda: self.restart(named[1]))
        if named:
            return await self.only(request, DELETE=lambda: self.remove(named[1]), GET=lambda: self.show(named[1]))
        raise Refused(404, f"there is no {request.path}")

    def only(self, request, **methods):
        if request.method not in methods:
            raise Refused(405, f"{request.path} takes {' and '.join(methods)}")
        return methods[request.method]()

    async def list(self):
        return Answer(200, [context.describe() for context in self.contexts.by_id.values()])

    async def show(self, context_id):
        return Answer(200, self.contexts.find(context_id).describe())

    async def create(self, request):
        body = request.json()
        context = await self.contexts.create(text(body, "language"), text(body, "cwd"))
        return Answer(200, context.describe())

    async def restart(self, context_id):
        try:
            await self.contexts.find(context_id).restart()
        except Failed as failure:
            raise Refused(500, str(failure)) from None
        return Answer(200, self.contexts.find(context_id).describe())

    async def remove(self, context_id):
        await self.contexts.remove(context_id)
        return Answer(204)

    def execute(self, request):
        body = request.json()
        code = text(body, "code")
        if code is None:
            raise Refused(400, "code is missing")
        context = self.contexts.choose(text(body, "context_id"), text(body, "language"))
        if context.waiting >= MAX_WAITING:
            raise Refused(429, f"{MAX_WAITING} executions wait for this context already")
        execution = Execution(code, variables(body))
        task = asyncio.create_task(context.execute(execution))
        # A task that is referred to by nothing may be collected.
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return Stream("application/x-ndjson", lambda gone: self.lines(execution, gone))

    async def lines(self, execution, gone):
        """The output as the client reads it, with a sign of life while there is none."""
        output = execution.output
        left = asyncio.create_task(gone.wait())
        try:
            while not output.is_over:
                changed = asyncio.create_task(output.changed.wait())
                done, _ = await asyncio.wait(
                    {changed, left}, timeout=self.keepalive_seconds, return_when=asyncio.FIRST_COMPLETED
                )
                changed.cancel()
                if left in done:
                    return
                if piece := output.take():
                    yield piece
                elif not done:
                    yield KEEPALIVE
        finally:
            left.cancel()
            execution.abandon()


def text(body, name):
    """A text of the body, or None."""
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise Refused(400, f"{name} is not a text")
    return value


def variables(body):
    """The variables for one execution."""
    given = body.get("env_vars") or {}
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise Refused(400, "env_vars is not an object of texts")
    for name, value in given.items():
        if not NAME.fullmatch(name) or "\0" in value:
            raise Refused(400, f"{name!r} is not the name of a variable, or its value has a zero byte")
    return given


async def run(host, port, ready_fd, ready_early=False):
    """Serves. It is ready when the Python kernel is warm; `ready_early` is for a sandbox in use, whose executions wait
    for the kernel by themselves."""

    def tell():
        if ready_fd is not None:
            os.write(ready_fd, b"1")
            os.close(ready_fd)

    contexts = Contexts(languages.installed(), home=os.path.expanduser("~"))
    interpreter = CodeInterpreter(contexts)
    server = await Server(interpreter.handle).listen(host, port)
    if ready_early:
        tell()
    python = contexts.default("python")
    try:
        async with python.lock:
            await python.ensure_kernel()
    except Failed as failure:
        if not ready_early:
            raise
        # The next execution starts another one, and reports it if that fails, too.
        print(f"forkd-code-interpreter: {failure}", file=sys.stderr)
    if not ready_early:
        tell()
    async with server:
        await server.serve_forever()


def main():
    parser = argparse.ArgumentParser(prog="forkd_code_interpreter")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=PORT)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--ready-early", action="store_true")
    arguments = parser.parse_args()
    try:
        asyncio.run(run(arguments.host, arguments.port, arguments.ready_fd, arguments.ready_early))
    except (Failed, Refused, OSError) as error:
        raise SystemExit(f"forkd-code-interpreter: {error}") from None
    except KeyboardInterrupt:
        pass
