"""Drives a daemon with a Python client of E2B: the calls that all versions since 2.20 have.

The argument is `sync` or `async`: which of the two clients of the package. Environment: E2B_API_URL, E2B_SANDBOX_URL,
E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import asyncio
import inspect
import os
import sys
import urllib.request

import e2b
from e2b import CommandExitException, SandboxQuery

IS_ASYNC = sys.argv[1] == "async"
Sandbox = e2b.AsyncSandbox if IS_ASYNC else e2b.Sandbox
TEMPLATE = os.environ["DRIVE_TEMPLATE"]
MARK = {"drive": sys.argv[1], "run": os.urandom(4).hex()}


async def done(value):
    """The value of a call: the asynchronous client's is awaited."""
    return await value if inspect.isawaitable(value) else value


async def until(what, look):
    for _ in range(200):
        if await look():
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"waited in vain for {what}")


async def commands(sandbox):
    run = sandbox.commands.run
    result = await done(run("id -un; pwd; echo $SHARED; echo err >&2"))
    assert (result.stdout, result.stderr) == ("user\n/home/user\nof all\n", "err\n"), result
    assert (await done(run("id -un; pwd", user="root", cwd="/tmp"))).stdout == "root\n/tmp\n"
    assert (await done(run("echo $ONE", envs={"ONE": "1"}))).stdout == "1\n"
    try:
        await done(run("echo out; exit 7"))
        raise AssertionError("a command that fails raises")
    except CommandExitException as error:
        assert error.exit_code == 7 and error.stdout == "out\n", error
    try:
        await done(run("sleep 60", timeout=1))
        raise AssertionError("a command out of time raises")
    except Exception as error:
        # Early versions let the time-out of their HTTP library through if that is faster than the daemon.
        assert "Timeout" in type(error).__name__, error
    sleeper = await done(run("sleep 600", background=True, timeout=0))
    assert sleeper.pid in [process.pid for process in await done(sandbox.commands.list())]
    assert await done(sandbox.commands.kill(sleeper.pid)) is True
    assert await done(sandbox.commands.kill(999_999)) is False
    reader = await done(run("read line; echo got $line", background=True, stdin=True))
    await done(sandbox.commands.send_stdin(reader.pid, "typed\n"))
    assert (await done(reader.wait())).stdout == "got typed\n"


async def files(sandbox):
    files = sandbox.files
    assert (await done(files.write("hello.txt", "hello world"))).path == "/home/user/hello.txt"
    assert await done(files.read("hello.txt")) == "hello world"
    binary = bytes(range(256)) * 4096
    await done(files.write("a/b.bin", binary))
    assert bytes(await done(files.read("a/b.bin", format="bytes"))) == binary
    assert [entry.name for entry in await done(files.list("a"))] == ["b.bin"]
    assert await done(files.make_dir("a")) is False and await done(files.exists("a/b.bin"))
    assert (await done(files.rename("a/b.bin", "a/c.bin"))).path == "/home/user/a/c.bin"
    assert (await done(files.get_info("a/c.bin"))).size == len(binary)
    many = await done(files.write_files([{"path": f"many/{n}", "data": f"{n}"} for n in range(3)]))
    assert [it.path for it in many] == [f"/home/user/many/{n}" for n in range(3)]
    await done(files.remove("a"))
    assert not await done(files.exists("a"))
    for wrong in ("a/b.bin", "many"):
        try:
            await done(files.read(wrong))
            raise AssertionError(f"{wrong} cannot be read")
        except (e2b.NotFoundException, e2b.InvalidArgumentException):
            pass
    signed = await done(sandbox.download_url("hello.txt", use_signature_expiration=60))
    with urllib.request.urlopen(signed) as answer:
        assert answer.read() == b"hello world"

    events = []
    if IS_ASYNC:
        watch = await files.watch_dir("many", on_event=events.append)
    else:
        watch = files.watch_dir("many")
    await done(files.write("many/new", "x"))

    async def came():
        if not IS_ASYNC:
            events.extend(watch.get_new_events())
        return any(event.name == "new" for event in events)

    await until("an event", came)
    await done(watch.stop())


async def terminal(sandbox):
    seen = bytearray()
    size = e2b.PtySize(rows=24, cols=80)
    line = b"echo in a $((40+2))\n"
    if IS_ASYNC:
        terminal = await sandbox.pty.create(size, on_data=lambda data: seen.extend(bytes(data)))
        await sandbox.pty.send_stdin(terminal.pid, line)

        async def came():
            return b"in a 42" in seen

        await until("output of the terminal", came)
    else:
        terminal = sandbox.pty.create(size)
        sandbox.pty.send_stdin(terminal.pid, line)
        for _, _, data in terminal:
            seen.extend(bytes(data or b""))
            if b"in a 42" in seen:
                break
    assert await done(sandbox.pty.kill(terminal.pid)) is True


async def control(sandbox):
    found = await done(Sandbox.list(query=SandboxQuery(metadata=MARK)).next_items())
    assert [it.sandbox_id for it in found] == [sandbox.sandbox_id], found
    assert (await done(sandbox.get_info())).metadata == MARK
    await done(sandbox.set_timeout(1200))
    metrics = await done(sandbox.get_metrics())
    assert metrics and metrics[-1].mem_total > 1 << 20, metrics
    snapshot = await done(sandbox.create_snapshot())
    again = await done(Sandbox.create(snapshot.snapshot_id, timeout=600))
    assert await done(again.files.read("hello.txt")) == "hello world"
    await done(again.kill())
    assert await done(Sandbox.delete_snapshot(snapshot.snapshot_id)) is True
    try:
        await done(Sandbox.create("no-such-template"))
        raise AssertionError("an unknown template raises")
    except e2b.SandboxException as error:
        assert "forkd snapshot" in str(error), error
    try:
        await done(Sandbox.create(TEMPLATE, api_key="e2b_wrong_key_that_is_long_enough"))
        raise AssertionError("a wrong key is refused")
    except e2b.AuthenticationException:
        pass
    assert await done(Sandbox.kill("sb0000000000000000")) is False


async def main():
    envs = {"SHARED": "of all"}
    sandbox = await done(Sandbox.create(TEMPLATE, timeout=900, metadata=MARK, envs=envs))
    try:
        assert await done(sandbox.is_running())
        for part in (commands, files, terminal, control):
            await part(sandbox)
            print(f"{part.__name__}: works", flush=True)
        pause = getattr(sandbox, "pause", None) or sandbox.beta_pause
        await done(pause())
        assert not await done(sandbox.is_running())
        sandbox = await done(Sandbox.connect(sandbox.sandbox_id, timeout=900))
        assert await done(sandbox.files.read("hello.txt")) == "hello world"
        assert await done(sandbox.kill()) is True and not await done(sandbox.is_running())
    finally:
        await done(Sandbox.kill(sandbox.sandbox_id))


asyncio.run(main())
print("the published Python client works", flush=True)
# All is checked. The client's HTTP library may crash while the interpreter ends.
os._exit(0)
