"""Drives the published clients of the reference, unmodified, against a daemon: all of `Controller`, all of
`Sandbox`, all tools of `forkd-mcp`. Started by clients.rs in an environment that has nothing but them.

Environment: FORKD_URL and FORKD_TOKEN of the daemon, `forkd` on PATH, DRIVE_TAG for snapshots, DRIVE_KERNEL and
DRIVE_ROOTFS as the daemon sees them.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
import time

TAG = os.environ["DRIVE_TAG"]
BEGUN = time.monotonic()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# `Sandbox` reads this when it is imported, and passes it on to the command it starts.
os.environ["FORKD_TARGET"] = "127.0.0.1:%d" % free_port()
os.environ["FORKD_TAG"] = TAG

from forkd import Controller, ControllerError, Sandbox  # noqa: E402
from mcp import ClientSession, StdioServerParameters  # noqa: E402
from mcp.client.stdio import stdio_client  # noqa: E402


def step(what):
    print("%6.1f s  %s" % (time.monotonic() - BEGUN, what), flush=True)


def expect(condition, *about):
    if not condition:
        raise AssertionError(about)


def refused(status, call, *args, **kwargs):
    """What the daemon says to a call that it must refuse with this status."""
    try:
        answer = call(*args, **kwargs)
    except ControllerError as error:
        expect(error.status == status, error.status, status, error.body)
        expect(set(error.body) == {"error", "code", "request_id"} and all(error.body.values()), error.body)
        return error.body["error"]
    raise AssertionError(("not refused", call, args, answer))


class Tools:
    """The tools of forkd-mcp, over its standard input and output."""

    NAMES = {
        "list_snapshots", "spawn_sandboxes", "branch_sandbox", "create_snapshot", "wait_for_text", "list_sandboxes",
        "get_sandbox", "kill_sandbox", "exec_command", "eval_code", "ping_sandbox",
    }

    def __init__(self, session):
        self.session = session
        self.used = set()

    async def call(self, name, **arguments):
        self.used.add(name)
        result = await self.session.call_tool(name, arguments)
        expect(not result.isError, name, result.content)
        answer = result.structuredContent
        if isinstance(answer, dict) and list(answer) == ["result"]:
            answer = answer["result"]
        if answer is None:
            answer = json.loads(result.content[0].text)
        return answer

    async def fails(self, name, **arguments):
        result = await self.session.call_tool(name, arguments)
        expect(result.isError, name, result.content)
        return result.content[0].text


async def make_snapshot(tools):
    offered = {tool.name for tool in (await tools.session.list_tools()).tools}
    expect(offered == Tools.NAMES, offered)
    made = await tools.call(
        "create_snapshot", tag=TAG, kernel=os.environ["DRIVE_KERNEL"], rootfs=os.environ["DRIVE_ROOTFS"],
        boot_wait_secs=10,
    )
    expect(made["tag"] == TAG and made["status"] == "ready" and made["bootable"], made)
    expect("409" in await tools.fails(
        "create_snapshot", tag=TAG, kernel=os.environ["DRIVE_KERNEL"], rootfs=os.environ["DRIVE_ROOTFS"]))
    expect("400" in await tools.fails("create_snapshot", tag=TAG, kernel="k", rootfs="r"))
    step("forkd-mcp: a snapshot of a kernel and a disk")


def drive_controller():
    """Every method of `Controller`; gives a sandbox for others to use."""
    c = Controller(timeout=300)
    listed = {snapshot["tag"]: snapshot for snapshot in c.list_snapshots()}
    for field in ("tag", "dir", "created_at_unix", "status", "bootable"):
        expect(field in listed[TAG], field, listed[TAG])

    children = c.spawn_sandboxes(
        TAG, n=2, per_child_netns=True, memory_limit_mib=600, prewarm=True, live_fork=True, hugepages=True)
    expect(len(children) == 2, children)
    for field in ("id", "snapshot_tag", "guest_addr", "created_at_unix", "pid", "memory_limit_mib", "has_branched",
                  "last_branch_memory_path", "branch_count"):
        expect(field in children[0], field, children[0])
    one, two = (child["id"] for child in children)
    expect({one, two} <= {sandbox["id"] for sandbox in c.list_sandboxes()})
    got = c.get_sandbox(one)
    expect(got["snapshot_tag"] == TAG and got["memory_limit_mib"] == 600 and not got["has_branched"], got)
    step("Controller: snapshots and sandboxes")

    pong = c.ping_sandbox(one)
    expect(pong["pong"] is True and pong["pid"] == 1 and pong["warmup_ready"] is True, pong)
    expect(pong["agent_lang"] == "python" and pong["numpy_version"].count(".") == 2, pong)
    ran = c.exec_command(one, ["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_secs=60)
    expect((ran["stdout"], ran["stderr"], ran["exit_code"]) == ("out\n", "err\n", 3), ran)
    value = c.eval_code(one, "numpy.zeros(3).tolist()")
    expect((value["result"], value["error"], value["exit_code"]) == ("[0.0, 0.0, 0.0]", None, 0), value)
    raised = c.eval_code(one, "nothing")
    expect(raised["result"] is None and "NameError" in raised["error"] and raised["exit_code"] == 1, raised)
    step("Controller: ping, exec, eval")

    named = TAG + "-branch"
    first = c.branch_sandbox(one, tag=named, diff=True)
    expect((first["tag"], first["branched_from"], first["status"]) == (named, one, "ready"), first)
    expect(first["pause_ms"] > 0 and first["diff_physical_bytes"] > 0, first)
    expect(c.get_sandbox(one)["branch_count"] == 1 and c.get_sandbox(one)["has_branched"])
    soon = c.branch_sandbox(one, mode="live", wait=False)
    expect(soon["tag"].startswith("branch-" + one), soon)
    until = time.monotonic() + 300
    while {s["tag"]: s for s in c.list_snapshots()}[soon["tag"]]["status"] == "writing":
        expect(time.monotonic() < until, "a branch is never written")
        time.sleep(0.2)
    other = c.branch_sandbox(one, mode="diff", measure_diff=True)
    step("Controller: branches")

    c.delete_snapshot(soon["tag"])
    c.delete_snapshot(other["tag"])
    expect(soon["tag"] not in [s["tag"] for s in c.list_snapshots()])
    grandchild = c.spawn_sandboxes(named)[0]["id"]
    expect(c.eval_code(grandchild, "np.ones(1).tolist()")["result"] == "[1.0]")
    for sandbox in (two, grandchild):
        c.kill_sandbox(sandbox)
    expect(not {two, grandchild} & {sandbox["id"] for sandbox in c.list_sandboxes()})
    c.delete_snapshot(named)
    step("Controller: a child of a branch, and ends")

    refused(404, c.get_sandbox, "sb-none")
    refused(404, c.kill_sandbox, two)
    refused(404, c.ping_sandbox, two)
    refused(404, c.exec_command, two, ["true"])
    refused(404, c.eval_code, two, "1")
    refused(404, c.branch_sandbox, two)
    refused(404, c.delete_snapshot, named)
    refused(404, c.spawn_sandboxes, named)
    refused(400, c.spawn_sandboxes, TAG, n=0)
    refused(400, c.spawn_sandboxes, TAG, n=1001)
    refused(400, c.exec_command, one, [])
    refused(400, c.branch_sandbox, one, wait=False)
    refused(400, c.branch_sandbox, one, tag="../x")
    refused(409, c.branch_sandbox, one, tag=TAG)
    refused(401, Controller(token="wrong").list_snapshots)
    step("Controller: refusals")
    return one


def drive_commands(sandbox):
    """All that a `Sandbox` can be asked."""
    pong = sandbox.ping()
    expect(pong["pong"] is True and pong["numpy_version"], pong)
    ran = sandbox.commands.run("echo hi; echo there >&2; exit 4", timeout=60)
    expect((ran.stdout, ran.stderr, ran.exit_code) == ("hi\n", "there\n", 4), ran)
    ran = sandbox.commands.run(["printf", "%s", "a b"])
    expect((ran.stdout, ran.exit_code) == ("a b", 0), ran)
    missing = sandbox.commands.run(["no-such-program"])
    expect(missing.exit_code == 1 and "no-such-program" in missing.stderr, missing)
    expect(sandbox.eval("numpy.zeros(5).tolist()") == "[0.0, 0.0, 0.0, 0.0, 0.0]")
    try:
        sandbox.eval("1 / 0")
        raise AssertionError("an error was not raised")
    except RuntimeError as error:
        expect("ZeroDivisionError" in str(error), error)


def is_open(target):
    host, port = target.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=60).close()
        return True
    except ConnectionRefusedError:
        return False


def drive_sandbox(running):
    """`Sandbox`: of a sandbox that runs, through `forkd agent-port` and `forkd fork`; and of its own."""
    relay = subprocess.Popen(["forkd", "agent-port", running], stdout=subprocess.PIPE, text=True)
    try:
        target = relay.stdout.readline().split()[0].removeprefix("FORKD_TARGET=")
        with Sandbox(target=target, timeout=120, spawn=False) as sandbox:
            drive_commands(sandbox)
            late = sandbox.commands.run("echo so far; sleep 600", timeout=15)
            expect((late.stdout, late.exit_code) == ("so far\n", 1), late)
        # What speaks HTTP is refused, whatever is in its body.
        line = json.dumps({"action": "exec", "args": ["touch", "/tmp/browser"]}) + "\n"
        host, port = target.split(":")
        with socket.create_connection((host, int(port)), timeout=60) as s:
            s.sendall(("POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(line), line)).encode())
            expect(b'"error"' in s.recv(4096))
        expect(Sandbox(target=target, timeout=60, spawn=False).commands.run(["ls", "/tmp/browser"]).exit_code != 0)
        for args, said in (
            (["exec", "--target", target, "--", "sh", "-c", "echo $((6 * 7)); exit 9"], (9, "42\n")),
            (["eval", "--target", target, "--", "6 * 7"], (0, "42\n")),
        ):
            done = subprocess.run(["forkd", *args], capture_output=True, text=True)
            expect((done.returncode, done.stdout) == said, done)
        pinged = subprocess.run(["forkd", "ping", "--target", target], capture_output=True, text=True)
        expect(json.loads(pinged.stdout)["pong"] is True, pinged)
    finally:
        relay.terminate()
        relay.wait()
    step("Sandbox: with a target")

    # What `forkd fork` prints is good as long as the child lives, also after that command has ended.
    forked = subprocess.run(["forkd", "fork", "--tag", TAG], capture_output=True, text=True, check=True)
    told = [line for line in forked.stdout.splitlines() if line.startswith("FORKD_TARGET=")]
    expect(len(told) == 1, forked)
    target, child = told[0].removeprefix("FORKD_TARGET=").split("  # ")
    with Sandbox(target=target, timeout=120, spawn=False) as sandbox:
        drive_commands(sandbox)
    Controller().kill_sandbox(child)
    until = time.monotonic() + 60
    while is_open(target):
        expect(time.monotonic() < until, "its port is still there")
        time.sleep(0.2)
    step("Sandbox: with the target of a fork")

    before = {sandbox["id"] for sandbox in Controller().list_sandboxes()}
    with Sandbox.create(timeout=120) as sandbox:
        expect(sandbox.target == os.environ["FORKD_TARGET"], sandbox.target)
        drive_commands(sandbox)
    until = time.monotonic() + 60
    while {sandbox["id"] for sandbox in Controller().list_sandboxes()} - before:
        expect(time.monotonic() < until, "its microVM is still there")
        time.sleep(0.2)
    try:
        Sandbox(tag="no-such-tag")
        raise AssertionError("a sandbox of nothing")
    except RuntimeError as error:
        expect("no-such-tag" in str(error), error)
    step("Sandbox: with a microVM of its own")


async def drive_tools(tools, running):
    """The tools of forkd-mcp that were not used yet."""
    expect(TAG in [snapshot["tag"] for snapshot in await tools.call("list_snapshots")])
    spawned = await tools.call("spawn_sandboxes", snapshot_tag=TAG, n=1)
    sandbox = spawned[0]["id"]
    expect(spawned[0]["memory_limit_mib"] == 256, spawned)
    expect(sandbox in [one["id"] for one in await tools.call("list_sandboxes")])
    expect((await tools.call("get_sandbox", sandbox_id=sandbox))["snapshot_tag"] == TAG)
    expect((await tools.call("ping_sandbox", sandbox_id=sandbox))["pong"] is True)
    ran = await tools.call("exec_command", sandbox_id=sandbox, args=["sh", "-c", "echo ready > /tmp/log"])
    expect(ran["exit_code"] == 0, ran)
    found = await tools.call("wait_for_text", sandbox_id=sandbox, path="/tmp/log", marker="ready")
    expect(found["found"] is True and found["last_excerpt"] == "ready\n", found)
    value = await tools.call("eval_code", sandbox_id=sandbox, code="numpy.arange(3).tolist()")
    expect(value["result"] == "[0, 1, 2]", value)
    branch = await tools.call("branch_sandbox", sandbox_id=sandbox, tag=TAG + "-mcp", mode="diff")
    expect(branch["branched_from"] == sandbox, branch)
    expect((await tools.call("kill_sandbox", sandbox_id=sandbox)) == {"id": sandbox, "killed": True})
    expect("404" in await tools.fails("get_sandbox", sandbox_id=sandbox))
    expect(tools.used == Tools.NAMES, Tools.NAMES - tools.used)
    step("forkd-mcp: every tool")


async def main():
    environment = {**os.environ, "FORKD_HTTP_TIMEOUT": "600"}
    server = StdioServerParameters(command=os.path.join(os.path.dirname(sys.executable), "forkd-mcp"), env=environment)
    async with stdio_client(server) as (read, write):
        async with ClientSession(read, write) as session:
            await session.initialize()
            tools = Tools(session)
            await make_snapshot(tools)
            running = await asyncio.to_thread(drive_controller)
            await asyncio.to_thread(drive_sandbox, running)
            await drive_tools(tools, running)
            c = Controller()
            c.kill_sandbox(running)
            for tag in (TAG + "-mcp", TAG):
                c.delete_snapshot(tag)
    step("the published clients work")


asyncio.run(main())
