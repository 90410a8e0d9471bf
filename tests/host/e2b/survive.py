"""Sandboxes outlive the daemon, and a paused one the machine.

`begin` makes a paused and a running sandbox and prints what a client knows of them; `look` compares that after the daemon
was killed, and ends the running one; `connect` finds the process in the paused one after a power cut. Both read on standard
input what `begin` printed.
"""

import asyncio
import json
import os
import sys
import urllib.request

from e2b import AsyncSandbox

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


async def known(sandbox_id):
    """What the daemon tells a client of a sandbox."""
    info = await AsyncSandbox.get_info(sandbox_id)
    # The client hides the token.
    key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
    request = urllib.request.Request(f"{os.environ['E2B_API_URL']}/sandboxes/{sandbox_id}", headers=key)
    with urllib.request.urlopen(request) as answer:
        token = json.load(answer)["envdAccessToken"]
    return {
        "state": info.state.value,
        "metadata": info.metadata,
        "started": info.started_at.isoformat(),
        "end": info.end_at.isoformat(),
        "token": token,
    }


async def begin():
    template = os.environ["DRIVE_TEMPLATE"]
    sandbox = await AsyncSandbox.create(template, timeout=900, envs={"KEPT": "yes"}, metadata={"kept": "in a paused one"})
    sleeper = await sandbox.commands.run("exec sleep 9000", background=True, timeout=0)
    boot_id = (await sandbox.commands.run(BOOT_ID)).stdout.strip()
    await sandbox.commands.run("echo in memory > /dev/shm/mark")
    await sleeper.disconnect()
    running = await AsyncSandbox.create(template, timeout=3000, metadata={"kept": "in a running one"})
    await sandbox.pause()
    ids = {"paused": sandbox.sandbox_id, "running": running.sandbox_id}
    told = {name: await known(sandbox_id) for name, sandbox_id in ids.items()}
    assert told["paused"]["token"] == sandbox._envd_access_token, told
    print(json.dumps({"ids": ids, "told": told, "pid": sleeper.pid, "boot_id": boot_id}))


async def look():
    before = json.load(sys.stdin)
    for name, sandbox_id in before["ids"].items():
        now = await known(sandbox_id)
        assert now == before["told"][name] and now["state"] == name, (before, now)
    running = await AsyncSandbox.connect(before["ids"]["running"])
    assert (await running.commands.run("echo goes on")).stdout == "goes on\n"
    assert await running.kill() is True
    print("they were kept")


async def connect():
    before = json.load(sys.stdin)
    sandbox_id = before["ids"]["paused"]
    assert await known(sandbox_id) == before["told"]["paused"]
    sandbox = await AsyncSandbox.connect(sandbox_id, timeout=900)
    assert sandbox._envd_access_token == before["told"]["paused"]["token"]
    assert (await sandbox.commands.run(BOOT_ID)).stdout.strip() == before["boot_id"]
    assert before["pid"] in [process.pid for process in await sandbox.commands.list()]
    assert await sandbox.files.read("/dev/shm/mark") == "in memory\n"
    assert (await sandbox.commands.run("echo $KEPT")).stdout == "yes\n"
    assert await sandbox.kill() is True
    print("it survived")


asyncio.run({"begin": begin, "look": look, "connect": connect}[sys.argv[1]]())
# All is checked. The client's HTTP library may crash while the interpreter ends.
sys.stdout.flush()
os._exit(0)
