"""A kernel: a process that runs code, and the connection with it.

The connection is over sockets inside the guest, which go on in a forked guest. Nothing here depends on the
clock: what a fork makes older or younger are only time-outs."""

import asyncio
import os
import signal
import tempfile
import uuid

# Long: an emulated machine on a busy host takes minutes to import what a kernel is made of.
START_SECONDS = 600
ASK_AGAIN_SECONDS = 8
# How long after the end of an execution its last output may still come.
LAST_OUTPUT_SECONDS = 2
# When a kernel is asked again to stop, and when it is ended instead.
INTERRUPT_AGAIN_SECONDS = 2
INTERRUPT_SECONDS = 10
DEATH_SECONDS = 10
# Messages of a kernel that wait here. More wait in the kernel, which is slowed down.
MAX_MESSAGES = 64


class Failed(Exception):
    """A kernel that cannot be started."""


class Run:
    """One request to a kernel to execute code."""

    def __init__(self, deliver):
        self.deliver = deliver
        self.idle = asyncio.Event()
        self.replied = asyncio.get_running_loop().create_future()


class Kernel:
    """A running kernel."""

    def __init__(self, language, cwd, environment):
        self.language, self.cwd, self.environment = language, cwd, environment
        self.process = self.client = None
        self.died = asyncio.Event()
        self.stopped = False
        self.runs = {}
        self.tasks = []
        self.folder = None

    async def start(self):
        """Starts it and waits until it answers."""
        # Imported here: unit tests run without it.
        import zmq.asyncio
        from jupyter_client import AsyncKernelClient
        from jupyter_client.connect import write_connection_file

        self.folder = tempfile.TemporaryDirectory(prefix="forkd-kernel-")
        path = os.path.join(self.folder.name, "connection.json")
        # For `ipc`, the address is a path to which the number of the channel is added.
        ip = os.path.join(self.folder.name, "ipc") if self.language.transport == "ipc" else "127.0.0.1"
        _, info = write_connection_file(
            path, ip=ip, transport=self.language.transport, key=uuid.uuid4().hex.encode()
        )
        os.chmod(path, 0o600)
        try:
            # In a session of its own: a signal to the server's group is not for kernels.
            self.process = await asyncio.create_subprocess_exec(
                "/usr/bin/setpriv", "--pdeathsig", "KILL", *self.language.command(path),
                cwd=self.cwd, env=self.environment, start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
        except OSError as error:
            self.folder.cleanup()
            raise Failed(f"the {self.language.name} kernel cannot be started: {error}") from None
        self.spawn(self.watch())
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.RCVHWM, MAX_MESSAGES)
        self.client = AsyncKernelClient(context=context)
        info["key"] = info["key"].decode() if isinstance(info["key"], bytes) else info["key"]
        self.client.load_connection_info(info)
        self.client.start_channels(shell=True, iopub=True, stdin=False, hb=False, control=True)
        self.heard = asyncio.Event()
        self.spawn(self.read(self.client.get_iopub_msg, self.on_iopub))
        self.spawn(self.read(self.client.get_shell_msg, self.on_shell))
        self.spawn(self.read(self.client.get_control_msg, lambda message: None))
        try:
            await asyncio.wait_for(self.answer(), START_SECONDS)
        except asyncio.TimeoutError:
            await self.end()
            raise Failed(f"the {self.language.name} kernel did not answer in {START_SECONDS} s") from None

    async def answer(self):
        """Waits for an answer on both channels. A subscription takes a moment, so the question is repeated: seldom, as a
        slow kernel has to answer all of them."""
        seconds = 0.5
        while True:
            run = self.ask(self.client.kernel_info())
            first = asyncio.create_task(self.died.wait())
            done, _ = await asyncio.wait({run.replied, first}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            seconds = min(2 * seconds, ASK_AGAIN_SECONDS)
            first.cancel()
            if self.died.is_set():
                status = self.process.returncode
                await self.end()
                raise Failed(f"the {self.language.name} kernel ended with status {status} at its start")
            if done:
                try:
                    await asyncio.wait_for(self.heard.wait(), 0.2)
                    return
                except asyncio.TimeoutError:
                    pass

    def spawn(self, work):
        self.tasks.append(asyncio.create_task(work))

    async def watch(self):
        await self.process.wait()
        self.died.set()

    async def read(self, receive, handle):
        while True:
            handle(await receive(timeout=None))

    def ask(self, message_id, deliver=lambda kind, content: None):
        run = self.runs[message_id] = Run(deliver)
        return run

    def on_iopub(self, message):
        self.heard.set()
        run = self.runs.get((message.get("parent_header") or {}).get("msg_id"))
        if run is None:
            return
        kind, content = message["header"]["msg_type"], message["content"]
        if kind == "status":
            if content.get("execution_state") == "idle":
                run.idle.set()
        else:
            run.deliver(kind, content)

    def on_shell(self, message):
        run = self.runs.get((message.get("parent_header") or {}).get("msg_id"))
        if run is not None and not run.replied.done():
            run.replied.set_result(message["content"])

    async def execute(self, code, deliver=lambda kind, content: None, silent=False):
        """Runs code to its end; `deliver(kind, content)` gets its messages. The answer is the kernel's reply;
        None if the kernel died."""
        # An exception must not cancel the next execution, which is another request of a client.
        message_id = self.client.execute(
            code, silent=silent, store_history=not silent, allow_stdin=False, stop_on_error=False
        )
        run = self.ask(message_id, deliver)
        death = asyncio.create_task(self.died.wait())
        try:
            await asyncio.wait({run.replied, death}, return_when=asyncio.FIRST_COMPLETED)
            if not run.replied.done():
                return None
            # The reply may overtake the last output, and that may have been dropped.
            idle = asyncio.create_task(run.idle.wait())
            await asyncio.wait({idle, death}, timeout=LAST_OUTPUT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            idle.cancel()
            return run.replied.result()
        finally:
            death.cancel()
            self.runs.pop(message_id, None)

    async def interrupt(self, running):
        """Stops what `running`, a task, waits for. The kernel is ended if it does not stop."""
        attempts = () if self.language.interrupt == "end" else (INTERRUPT_AGAIN_SECONDS, INTERRUPT_SECONDS)
        for seconds in attempts:
            self.ask_to_stop()
            done, _ = await asyncio.wait({running}, timeout=seconds)
            if done:
                return True
        await self.end()
        await asyncio.wait({running})
        return False

    def ask_to_stop(self):
        self.go_on()
        if self.language.interrupt == "message":
            message = self.client.session.msg("interrupt_request", {})
            self.client.control_channel.send(message)
        else:
            self.signal(signal.SIGINT)

    def signal(self, number, group=True):
        if self.process.returncode is None:
            try:
                # The kernel's child processes belong to what is interrupted or ended.
                (os.killpg if group else os.kill)(self.process.pid, number)
            except ProcessLookupError:
                pass

    def stop(self):
        """Lets no more output come: the client is slower than the code."""
        self.stopped = True
        self.signal(signal.SIGSTOP, group=False)

    def go_on(self):
        if self.stopped:
            self.stopped = False
            self.signal(signal.SIGCONT, group=False)

    async def end(self):
        """Ends the process and forgets the connection."""
        self.go_on()
        self.signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self.died.wait(), DEATH_SECONDS)
        except asyncio.TimeoutError:
            pass
        self.died.set()
        for task in self.tasks:
            if task is not asyncio.current_task():
                task.cancel()
        self.tasks = []
        if self.client is not None:
            context = self.client.context
            self.client.stop_channels()
            self.client = None
            context.destroy(linger=0)
        if self.folder is not None:
            self.folder.cleanup()
            self.folder = None


