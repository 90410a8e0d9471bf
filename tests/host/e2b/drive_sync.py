"""Drives a daemon with the synchronous Python client of E2B: the calls that all versions since 2.20 have.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import os
import time

import e2b
from e2b import CommandExitException, Sandbox, SandboxQuery

MARK = {"drive": "sync", "run": os.urandom(4).hex()}

sandbox = Sandbox.create(os.environ["DRIVE_TEMPLATE"], timeout=900, metadata=MARK, envs={"SHARED": "of all"})
try:
    assert sandbox.is_running()
    done = sandbox.commands.run("id -un; pwd; echo $SHARED; echo err >&2")
    assert (done.stdout, done.stderr) == ("user\n/home/user\nof all\n", "err\n"), done
    assert sandbox.commands.run("id -un", user="root").stdout == "root\n"
    try:
        sandbox.commands.run("echo out; exit 7")
        raise AssertionError("a command that fails raises")
    except CommandExitException as error:
        assert error.exit_code == 7 and error.stdout == "out\n", error
    sleeper = sandbox.commands.run("sleep 600", background=True, timeout=0)
    assert sleeper.pid in [process.pid for process in sandbox.commands.list()]
    assert sandbox.commands.kill(sleeper.pid) is True and sandbox.commands.kill(999_999) is False

    assert sandbox.files.write("hello.txt", "hello world").path == "/home/user/hello.txt"
    assert sandbox.files.read("hello.txt") == "hello world"
    binary = bytes(range(256)) * 4096
    sandbox.files.write("a/b.bin", binary)
    assert bytes(sandbox.files.read("a/b.bin", format="bytes")) == binary
    assert [entry.name for entry in sandbox.files.list("a")] == ["b.bin"]
    assert sandbox.files.make_dir("a") is False and sandbox.files.exists("a/b.bin")
    sandbox.files.remove("a")
    assert not sandbox.files.exists("a")
    watch = sandbox.files.watch_dir(".")
    sandbox.files.write("new", "x")
    for _ in range(100):
        if any(event.name == "new" for event in watch.get_new_events()):
            break
        time.sleep(0.1)
    else:
        raise AssertionError("no event came")
    watch.stop()

    terminal = sandbox.pty.create(e2b.PtySize(rows=24, cols=80))
    sandbox.pty.send_stdin(terminal.pid, b"echo in a $((40+2))\n")
    seen = b""
    for _, _, data in terminal:
        seen += bytes(data or b"")
        if b"in a 42" in seen:
            break
    sandbox.pty.kill(terminal.pid)

    found = Sandbox.list(query=SandboxQuery(metadata=MARK)).next_items()
    assert [it.sandbox_id for it in found] == [sandbox.sandbox_id], found
    assert sandbox.get_info().metadata == MARK
    sandbox.set_timeout(1200)
    pause = getattr(sandbox, "pause", None) or sandbox.beta_pause
    pause()
    assert not sandbox.is_running()
    sandbox = Sandbox.connect(sandbox.sandbox_id, timeout=900)
    assert sandbox.files.read("hello.txt") == "hello world"
    assert sandbox.kill() is True and not sandbox.is_running()
finally:
    Sandbox.kill(sandbox.sandbox_id)
print("the published Python client works")
