"""A paused sandbox outlives the daemon and the machine: `pause` prints its id, `connect ID PID` finds the process."""

import asyncio
import os
import sys

from e2b import AsyncSandbox

BOOT_ID = "cat /proc/sys/kernel/random/boot_id"


async def pause():
    sandbox = await AsyncSandbox.create(os.environ["DRIVE_TEMPLATE"], timeout=900, envs={"KEPT": "yes"})
    sleeper = await sandbox.commands.run("exec sleep 9000", background=True, timeout=0)
    boot_id = (await sandbox.commands.run(BOOT_ID)).stdout.strip()
    await sandbox.commands.run("echo in memory > /dev/shm/mark")
    await sleeper.disconnect()
    await sandbox.pause()
    print(sandbox.sandbox_id, sleeper.pid, boot_id)


async def connect(sandbox_id, pid, boot_id):
    sandbox = await AsyncSandbox.connect(sandbox_id, timeout=900)
    assert (await sandbox.commands.run(BOOT_ID)).stdout.strip() == boot_id
    assert int(pid) in [process.pid for process in await sandbox.commands.list()]
    assert await sandbox.files.read("/dev/shm/mark") == "in memory\n"
    assert (await sandbox.commands.run("echo $KEPT")).stdout == "yes\n"
    assert await sandbox.kill() is True
    print("it survived")


asyncio.run({"pause": pause, "connect": connect}[sys.argv[1]](*sys.argv[2:]))
# All is checked. The client's HTTP library may crash while the interpreter ends.
sys.stdout.flush()
os._exit(0)
