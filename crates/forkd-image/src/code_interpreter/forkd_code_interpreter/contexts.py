"""Contexts: a language, a working directory and the kernel that keeps their state.

Executions in one context are done one after the other. An execution that its client abandons is interrupted, and
a kernel that dies is replaced when the next execution comes."""

import asyncio
import os
import time
import traceback
import uuid

from . import events, guest
from .http import Refused
from .kernels import Failed, Kernel
from .languages import ALIASES, NAMES

HOME = "/home/user"
MAX_CONTEXTS = 64
MAX_WAITING = 64
LOST = "[the last execution was interrupted, which replaced the kernel: its state is lost]\n"

# The kernel ended before the execution did.
LOST_KERNEL = {"type": "unexpected_end_of_execution"}


class Died(Failed):
    """A kernel that ended while it ran code of this server."""


async def silently(kernel, code):
    """Runs code of this server in the kernel."""
    if kernel.died.is_set() or await kernel.execute(code, silent=True) is None:
        raise Died("the kernel ended unexpectedly")


class Execution:
    """Code to run in a context, and its output."""

    def __init__(self, code, variables):
        self.code, self.variables = code, variables
        self.abandoned = asyncio.Event()
        self.kernel = None
        self.output = events.Output(self.slow, self.caught_up)

    def slow(self):
        if self.kernel is not None:
            self.kernel.stop()

    def caught_up(self):
        if self.kernel is not None:
            self.kernel.go_on()

    def abandon(self):
        """The client has left."""
        self.abandoned.set()
        self.output.close()


class Context:
    def __init__(self, language, cwd, start_kernel):
        # From the operating system's random numbers: forked guests make different ones.
        self.id = str(uuid.uuid4())
        self.language, self.cwd, self.start_kernel = language, cwd, start_kernel
        self.lock = asyncio.Lock()
        self.kernel = None
        self.boot_id = None
        self.waiting = 0
        # Executions of clients. The kernel's own number has the server's in it, too.
        self.count = 0
        self.removed = False
        self.notice = None

    def describe(self):
        return {"id": self.id, "language": self.language.name, "cwd": self.cwd}

    async def ensure_kernel(self):
        """Starts the kernel if there is none that runs; the caller has the lock."""
        if self.kernel is not None and self.kernel.died.is_set():
            await self.kernel.end()
            self.kernel = None
        if self.kernel is None:
            boot_id = guest.boot_id()
            environment = {**guest.environment(), **self.language.variables}
            kernel = await self.start_kernel(self.language, self.cwd, environment)
            if prepare := self.language.prepare():
                try:
                    await silently(kernel, prepare)
                except Died:
                    await kernel.end()
                    raise
            self.kernel, self.boot_id, self.count = kernel, boot_id, 0
        elif self.boot_id != (boot_id := guest.boot_id()):
            # The kernel was forked with the guest: its random generators are its siblings' too.
            if code := self.language.forked(guest.variables()):
                await silently(self.kernel, code)
            self.boot_id = boot_id
        return self.kernel

    async def execute(self, execution):
        """Runs `execution` when its turn comes. Never raises: all that happens goes into its output."""
        self.waiting += 1
        try:
            async with self.lock:
                self.waiting -= 1
                try:
                    if not execution.abandoned.is_set():
                        await self.run(execution)
                except Died:
                    execution.output.put(LOST_KERNEL)
                except Failed as failure:
                    put_failure(execution, failure)
                except Exception:
                    # Such as a connection that a restart closed: an output that just ends would look like a success.
                    traceback.print_exc()
                    execution.output.put(LOST_KERNEL)
                finally:
                    execution.kernel = None
        finally:
            execution.output.end()

    async def run(self, execution):
        if self.removed:
            execution.output.put(LOST_KERNEL)
            return
        kernel = await self.ensure_kernel()
        if self.notice:
            execution.output.put({"type": "stderr", "text": self.notice, "timestamp": time.time_ns()})
            self.notice = None
        if execution.variables:
            await silently(kernel, self.language.enter(execution.variables))
        execution.kernel = kernel
        if execution.output.full:
            kernel.stop()

        self.count += 1
        execution.output.put({"type": "number_of_executions", "execution_count": self.count})

        def deliver(kind, content):
            for event in events.of_message(kind, content):
                execution.output.put(event)

        running = asyncio.create_task(kernel.execute(execution.code, deliver))
        left = asyncio.create_task(execution.abandoned.wait())
        await asyncio.wait({running, left}, return_when=asyncio.FIRST_COMPLETED)
        left.cancel()
        if not running.done() and not await kernel.interrupt(running):
            self.notice = LOST
        execution.kernel = None
        kernel.go_on()
        reply = running.result()
        if reply is None:
            execution.output.put(LOST_KERNEL)
            return
        if execution.variables:
            await silently(kernel, self.language.leave(execution.variables))
        execution.output.put({"type": "end_of_execution"})

    async def restart(self):
        """Replaces the kernel at once; what runs in it ends unexpectedly."""
        await self.end_kernel()
        async with self.lock:
            if not self.removed:
                await self.ensure_kernel()

    async def remove(self):
        self.removed = True
        await self.end_kernel()

    async def end_kernel(self):
        if self.kernel is not None:
            await self.kernel.end()


def put_failure(execution, failure):
    text = str(failure)
    execution.output.put({"type": "error", "name": "KernelError", "value": text, "traceback": text})
    execution.output.put({"type": "end_of_execution"})


async def start_kernel(language, cwd, environment):
    kernel = Kernel(language, cwd, environment)
    await kernel.start()
    return kernel


class Contexts:
    """All contexts of the guest."""

    def __init__(self, languages, start_kernel=start_kernel, home=HOME):
        self.languages, self.start_kernel, self.home = languages, start_kernel, home
        self.by_id = {}
        self.defaults = {}
        for name in ("python", "javascript"):
            if name in languages:
                self.default(name)

    def language(self, name):
        name = ALIASES.get(name.lower(), name.lower())
        if name in self.languages:
            return self.languages[name]
        known = "is not built into this image" if name in NAMES else "is not known"
        has = ", ".join(self.languages) or "none"
        raise Refused(400, f"language {name} {known}; this image has: {has}")

    def default(self, name):
        """The default context of a language; it is made when it is first used."""
        language = self.language(name)
        if language.name not in self.defaults:
            self.defaults[language.name] = self.add(language, self.home)
        return self.defaults[language.name]

    def add(self, language, cwd):
        if len(self.by_id) >= MAX_CONTEXTS:
            raise Refused(429, f"there are {MAX_CONTEXTS} contexts, and no more are possible: remove one")
        context = Context(language, cwd, self.start_kernel)
        self.by_id[context.id] = context
        return context

    def find(self, context_id):
        if context_id not in self.by_id:
            raise Refused(404, f"context {context_id} was not found")
        return self.by_id[context_id]

    def choose(self, context_id, language):
        """The context that a request to execute code names."""
        if context_id and context_id != "default":
            if language:
                raise Refused(400, "give context_id or language, not both")
            return self.find(context_id)
        return self.default(language or "python")

    async def create(self, language, cwd):
        chosen = self.language(language or "python")
        path = os.path.join(self.home, os.path.expanduser(cwd or self.home))
        if not os.path.isdir(path):
            raise Refused(400, f"cwd {cwd} is not a folder")
        context = self.add(chosen, path)
        try:
            async with context.lock:
                await context.ensure_kernel()
        except Failed as failure:
            self.by_id.pop(context.id, None)
            raise Refused(500, str(failure)) from None
        return context

    async def remove(self, context_id):
        context = self.find(context_id)
        del self.by_id[context_id]
        if self.defaults.get(context.language.name) is context:
            del self.defaults[context.language.name]
        await context.remove()
