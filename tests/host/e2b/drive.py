"""Drives a daemon with the published Python client of E2B, unmodified: every call of it that forkd serves.

Environment: E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY, and DRIVE_TEMPLATE (a template that is ready).
"""

import asyncio
import base64
import gzip
import json
import os
import socket
import struct
import sys
import urllib.parse
import urllib.request

import e2b
from e2b import AsyncSandbox, CommandExitException, SandboxQuery, SandboxState

TEMPLATE = os.environ["DRIVE_TEMPLATE"]
URL = os.environ["E2B_SANDBOX_URL"]
MARK = {"drive": "a b&c=ü", "run": os.urandom(4).hex()}


async def commands(sandbox):
    done = await sandbox.commands.run("id -un; pwd; echo $FOO $E2B_SANDBOX; echo err >&2", envs={"FOO": "bar"})
    assert done.stdout == "user\n/home/user\nbar true\n" and done.stderr == "err\n", done
    assert (await sandbox.commands.run("echo $SHARED $E2B_SANDBOX_ID")).stdout == f"of all {sandbox.sandbox_id}\n"
    assert (await sandbox.commands.run("cat /sys/class/net/eth0/carrier")).stdout == "1\n"
    root = await sandbox.commands.run("id -un; pwd", user="root", cwd="/tmp")
    assert root.stdout == "root\n/tmp\n", root
    assert (await sandbox.commands.run("sudo -n id -un")).stdout == "root\n"
    tools = await sandbox.commands.run("git --version && curl --version && sudo -n apt-get --print-uris update")
    assert "git version" in tools.stdout and "libcurl" in tools.stdout and "://" in tools.stdout, tools
    try:
        await sandbox.commands.run("echo out; exit 7")
        raise AssertionError("a command that fails raises")
    except CommandExitException as error:
        assert error.exit_code == 7 and error.stdout == "out\n", error
    try:
        await sandbox.commands.run("sleep 60", timeout=1)
        raise AssertionError("a command out of time raises")
    except e2b.TimeoutException:
        pass
    try:
        await sandbox.commands.run("true", user="nosuchuser")
        raise AssertionError("an unknown user raises")
    except e2b.AuthenticationException:
        pass
    try:
        await sandbox.commands.run("true", cwd="/no/such/folder")
        raise AssertionError("an unknown folder raises")
    except e2b.InvalidArgumentException:
        pass

    pieces = []
    handle = await sandbox.commands.run("cat; echo end", background=True, stdin=True, on_stdout=pieces.append)
    assert handle.pid in [process.pid for process in await sandbox.commands.list()]
    await sandbox.commands.send_stdin(handle.pid, "typed\n")
    async with handle_input(sandbox, handle) as input:
        if input:
            await input.send("streamed\n")
    await sandbox.commands.close_stdin(handle.pid)
    done = await handle.wait()
    assert done.stdout.startswith("typed\n") and done.stdout.endswith("end\n"), done
    assert "".join(pieces) == done.stdout

    sleeper = await sandbox.commands.run("sleep 600", background=True)
    again = await sandbox.commands.connect(sleeper.pid)
    assert await sandbox.commands.kill(sleeper.pid) is True
    assert await sandbox.commands.kill(999_999) is False
    for waiting in (sleeper, again):
        try:
            await waiting.wait()
            raise AssertionError("a killed command raises")
        except CommandExitException as error:
            assert error.exit_code == -1 and "killed" in error.error, error

    # A client that goes away does not end its command.
    left = await sandbox.commands.run("sleep 2; echo done > /tmp/left", background=True)
    await left.disconnect()
    for _ in range(200):
        if await sandbox.files.exists("/tmp/left"):
            break
        await asyncio.sleep(0.2)
    assert (await sandbox.files.read("/tmp/left")) == "done\n"


def handle_input(sandbox, handle):
    """The streamed input of a command, where the client has it."""
    import contextlib

    stream = getattr(sandbox.commands, "stream_input", None)

    @contextlib.asynccontextmanager
    async def nothing():
        yield None

    return stream(handle.pid) if stream else nothing()


async def terminal(sandbox):
    seen = bytearray()
    pty = await sandbox.pty.create(e2b.PtySize(rows=24, cols=80), on_data=lambda data: seen.extend(bytes(data)))
    await sandbox.pty.resize(pty.pid, e2b.PtySize(rows=40, cols=100))
    await sandbox.pty.send_stdin(pty.pid, b"stty size; exit 3\n")
    try:
        await pty.wait()
        raise AssertionError("a terminal that exits with 3 raises")
    except CommandExitException as error:
        assert error.exit_code == 3, error
    assert b"40 100" in seen, seen


async def files(sandbox):
    written = await sandbox.files.write("hello.txt", "hello world")
    assert written.path == "/home/user/hello.txt", written
    assert await sandbox.files.read("hello.txt") == "hello world"
    binary = bytes(range(256)) * 4096
    await sandbox.files.write("/home/user/a/b/c.bin", binary)
    assert bytes(await sandbox.files.read("a/b/c.bin", format="bytes")) == binary
    owner = await sandbox.commands.run("stat -c %U /home/user/a /home/user/a/b/c.bin")
    assert owner.stdout == "user\nuser\n", owner
    await sandbox.files.write("/root/mine", "of root", user="root")
    try:
        await sandbox.files.read("/root/mine")
        raise AssertionError("a file of root is closed to others")
    except e2b.SandboxException:
        pass
    many = await sandbox.files.write_files([{"path": f"many/{n}", "data": f"{n}"} for n in range(5)])
    assert [it.path for it in many] == [f"/home/user/many/{n}" for n in range(5)]
    listed = await sandbox.files.list("many")
    assert sorted(entry.name for entry in listed) == ["0", "1", "2", "3", "4"]
    assert await sandbox.files.make_dir("many") is False and await sandbox.files.make_dir("fresh/deep") is True
    renamed = await sandbox.files.rename("many/0", "fresh/zero")
    assert renamed.path == "/home/user/fresh/zero"
    info = await sandbox.files.get_info("fresh/zero")
    assert info.size == 1 and info.owner == "user" and info.permissions.endswith("r--r--"), info
    await sandbox.files.remove("fresh")
    assert not await sandbox.files.exists("fresh")
    # Missing is 404, and a folder 400.
    for wrong, kind in (("fresh/zero", e2b.NotFoundException), ("many", e2b.InvalidArgumentException)):
        try:
            await sandbox.files.read(wrong)
            raise AssertionError(f"{wrong} cannot be read")
        except kind:
            pass

    # An address that needs no token.
    signed = sandbox.download_url("hello.txt", use_signature_expiration=60)
    with urllib.request.urlopen(signed) as answer:
        assert answer.read() == b"hello world"
    try:
        urllib.request.urlopen(signed.replace("hello.txt", "other.txt"))
        raise AssertionError("a signature is for one file")
    except urllib.error.HTTPError as error:
        assert error.code == 401, error

    upload = sandbox.upload_url("sent.txt", use_signature_expiration=60)
    form = b'--x\r\nContent-Disposition: form-data; name="file"; filename="sent.txt"\r\n\r\nof a stranger\r\n--x--\r\n'
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    with urllib.request.urlopen(urllib.request.Request(upload, form, kind)) as answer:
        assert json.load(answer)[0]["path"] == "/home/user/sent.txt"
    assert await sandbox.files.read("sent.txt") == "of a stranger"

    events = []
    watch = await sandbox.files.watch_dir("many", on_event=events.append)
    await sandbox.files.write("many/new", "x")
    await sandbox.files.remove("many/1")
    for _ in range(100):
        if {"create", "remove"} <= {event.type.value for event in events}:
            break
        await asyncio.sleep(0.1)
    await watch.stop()
    seen = {(event.name, event.type.value) for event in events}
    assert ("new", "create") in seen and ("1", "remove") in seen, seen


async def raw(sandbox):
    """What the client hides: compressed bodies, and tokens that are wrong."""
    headers = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983"}
    token = {"X-Access-Token": sandbox._envd_access_token}

    def ask(path, method="GET", body=None, **more):
        request = urllib.request.Request(URL + path, data=body, method=method, headers={**headers, **more})
        try:
            with urllib.request.urlopen(request) as answer:
                return answer.status, dict(answer.headers), answer.read()
        except urllib.error.HTTPError as error:
            return error.code, dict(error.headers), error.read()

    assert ask("/health")[0] == 204
    assert ask("/files?path=hello.txt")[0] == 401
    assert ask("/files?path=hello.txt", **{"X-Access-Token": "wrong"})[0] == 401
    other = await AsyncSandbox.create(TEMPLATE, timeout=600)
    foreign = {"X-Access-Token": other._envd_access_token}
    assert ask("/files?path=hello.txt", **foreign)[0] == 401, "a token is for one sandbox"
    await other.kill()
    for path, method in (("/files?path=hello.txt", "DELETE"), ("/process.Process/List", "GET")):
        status, _, body = ask(path, method, **token)
        assert status == 405 and json.loads(body)["message"], (status, body)
    packed = gzip.compress(b"packed" * 1000)
    status, _, _ = ask(
        "/files?path=packed",
        "POST",
        packed,
        **token,
        **{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip", "X-Metadata-Kind": "test"},
    )
    assert status == 200
    assert await sandbox.files.read("packed") == "packed" * 1000
    status, got, body = ask("/files?path=packed", **token, **{"Accept-Encoding": "gzip"})
    assert got.get("content-encoding", got.get("Content-Encoding")) == "gzip", got
    assert gzip.decompress(body) == b"packed" * 1000
    assert (await sandbox.files.get_info("packed")).metadata.get("kind") == "test"

    # A server in the guest, on loopback only: on the port of Jupyter, which nothing else has taken.
    await sandbox.commands.run("python3 -m http.server 8888 --bind 127.0.0.1 -d many", background=True)
    for _ in range(100):
        status, _, body = ask("/2", **{"E2b-Sandbox-Port": "8888"})
        if status == 200:
            break
        await asyncio.sleep(0.2)
    assert body == b"2", (status, body)
    status, _, body = ask("/", **{"E2b-Sandbox-Port": "8001"})
    assert status == 502 and b"port is not open" in body, (status, body)


async def hostile(sandbox):
    """Clients that break off or stop reading, and output without end: the sandbox goes on, and nothing is left."""
    place = urllib.parse.urlsplit(URL)
    names = {"E2b-Sandbox-Id": sandbox.sandbox_id, "E2b-Sandbox-Port": "49983", "Host": place.netloc}

    def begin(line, headers, body):
        connection = socket.create_connection((place.hostname, place.port or 80), timeout=120)
        head = {**names, "X-Access-Token": sandbox._envd_access_token, **headers}
        lines = [line + " HTTP/1.1", *(f"{name}: {value}" for name, value in head.items()), "", ""]
        connection.sendall("\r\n".join(lines).encode() + body)
        return connection

    octets = {"Content-Type": "application/octet-stream", "Content-Length": 1 << 20}
    form = {"Content-Type": "multipart/form-data; boundary=x", "Content-Length": 1 << 20}
    part = b'--x\r\nContent-Disposition: form-data; name="file"; filename="cut"\r\n\r\n' + bytes(5000)
    for headers, body in ((octets, bytes(5000)), (form, part)):
        begin("POST /files?path=cut", headers, body).close()
    # Of a command whose output has no end, this client reads the beginning, and then nothing.
    start = json.dumps({"process": {"cmd": "/bin/bash", "args": ["-c", "exec yes flood"]}, "stdin": False}).encode()
    stream = {"Content-Type": "application/connect+json", "Content-Length": len(start) + 5, "Connect-Protocol-Version": 1}
    lazy = begin("POST /process.Process/Start", stream, struct.pack(">BI", 0, len(start)) + start)
    seen = b""
    while base64.b64encode(b"flood\n" * 100) not in seen:
        piece = lazy.recv(1 << 16)
        assert piece, seen
        seen += piece
    # Others are served meanwhile, and all of a long output arrives.
    done = await sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\0' x", timeout=300)
    assert done.stdout == "x" * 3_000_000, len(done.stdout)
    lazy.close()
    flooding = [process for process in await sandbox.commands.list() if "exec yes flood" in process.args]
    assert len(flooding) == 1, "a client that goes away does not end its command"
    assert await sandbox.commands.kill(flooding[0].pid) is True
    assert not await sandbox.files.exists("cut")
    left = await sandbox.commands.run("ls -A ~ | grep -c cut || true")
    assert left.stdout == "0\n", left


async def lists(sandbox):
    query = SandboxQuery(metadata=MARK, state=[SandboxState.RUNNING, SandboxState.PAUSED])
    pages = AsyncSandbox.list(query=query, limit=1)
    found = []
    while pages.has_next:
        found += await pages.next_items()
    assert [it.sandbox_id for it in found] == [sandbox.sandbox_id], found
    info = await sandbox.get_info()
    assert info.metadata == MARK and info.state == SandboxState.RUNNING, info
    assert info.cpu_count >= 1 and info.memory_mb >= 128, info
    before = info.end_at
    # A connect never shortens a life.
    await AsyncSandbox.connect(sandbox.sandbox_id, timeout=5)
    assert (await sandbox.get_info()).end_at >= before
    await sandbox.set_timeout(24 * 3600)
    assert ((await sandbox.get_info()).end_at - info.started_at).total_seconds() > 23 * 3600
    # Two of them, in either order, and those since a time.
    younger = await AsyncSandbox.create(TEMPLATE, timeout=600, metadata=MARK)

    def listed(**query):
        metadata = urllib.parse.urlencode({key: urllib.parse.quote(value) for key, value in MARK.items()})
        query = urllib.parse.urlencode({"metadata": metadata, **query})
        key = {"X-API-KEY": os.environ["E2B_API_KEY"]}
        request = urllib.request.Request(f"{os.environ['E2B_API_URL']}/v2/sandboxes?{query}", headers=key)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    both = [sandbox.sandbox_id, younger.sandbox_id]
    assert [it["sandboxID"] for it in listed(order="asc")] == both
    assert [it["sandboxID"] for it in listed()] == both[::-1], "the newest is first"
    since = listed(order="asc")[1]["startedAt"]
    assert [it["sandboxID"] for it in listed(startedAfter=since)] == both[1:]
    await younger.kill()
    metrics = await sandbox.get_metrics()
    assert metrics and metrics[-1].mem_total > 1 << 20 and metrics[-1].disk_total > 1 << 20, metrics


async def snapshots(sandbox):
    await sandbox.files.write("kept.txt", "in the snapshot")
    snapshot = await sandbox.create_snapshot(name=f"drive-{MARK['run']}")
    await sandbox.files.write("kept.txt", "changed since")
    again = await AsyncSandbox.create(snapshot.snapshot_id, timeout=600)
    assert await again.files.read("kept.txt") == "in the snapshot"
    assert await sandbox.files.read("kept.txt") == "changed since"
    pages, ids = AsyncSandbox.list_snapshots(sandbox_id=sandbox.sandbox_id), []
    while pages.has_next:
        ids += [it.snapshot_id for it in await pages.next_items()]
    assert snapshot.snapshot_id in ids, ids
    assert await e2b.AsyncTemplate.exists(TEMPLATE) is True
    assert await e2b.AsyncTemplate.exists("no-such-template") is False
    await again.kill()
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is True
    assert await AsyncSandbox.delete_snapshot(snapshot.snapshot_id) is False


async def fork(sandbox):
    """A fork has the memory of its source: both go on in the middle of a computation."""
    program = (
        "import os, time\n"
        "secret = os.urandom(8).hex()\n"
        "open('/tmp/secret', 'w').write(secret)\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    open('/tmp/now.new', 'w').write(f'{secret} {n}')\n"
        "    os.rename('/tmp/now.new', '/tmp/now')\n"
        "    time.sleep(0.05)\n"
    )
    await sandbox.files.write("count.py", program)
    counting = await sandbox.commands.run("exec python3 count.py", background=True, timeout=0)
    while not await sandbox.files.exists("/tmp/now"):
        await asyncio.sleep(0.2)
    secret = await sandbox.files.read("/tmp/secret")
    # The memory alone has it from here on.
    await sandbox.files.remove("/tmp/secret")
    children = await sandbox.fork(count=2, timeout=600)
    assert all(isinstance(child, AsyncSandbox) for child in children), children
    everyone = [sandbox, *children]
    assert len({it.sandbox_id for it in everyone}) == 3
    assert len({it._envd_access_token for it in everyone}) == 3

    async def now(it):
        text = (await it.files.read("/tmp/now")).split()
        return text[0], int(text[1])

    at_fork = [await now(it) for it in everyone]
    await asyncio.sleep(2)
    later = [await now(it) for it in everyone]
    for (was, n), (is_now, m) in zip(at_fork, later):
        assert was == is_now == secret and m > n, (at_fork, later)
    ids = [(await it.commands.run("echo $E2B_SANDBOX_ID")).stdout.strip() for it in everyone]
    assert ids == [it.sandbox_id for it in everyone], ids
    # A process of the source goes on in its child under its pid, and is killed there alone.
    assert await children[0].commands.kill(counting.pid) is True
    assert (await now(sandbox))[1] > 0 and counting.pid in [it.pid for it in await sandbox.commands.list()]
    for child in children:
        await child.kill()
    await counting.kill()


async def pause(sandbox):
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = (await sandbox.commands.run(boot_id)).stdout
    sleeper = await sandbox.commands.run("sleep 3000", background=True, timeout=0)
    token = sandbox._envd_access_token
    assert await sandbox.pause() is True
    assert await AsyncSandbox.pause(sandbox.sandbox_id) is False
    assert await sandbox.is_running() is False
    try:
        await sandbox.commands.run("true")
        raise AssertionError("a paused sandbox runs nothing")
    except e2b.SandboxException:
        pass
    query = SandboxQuery(metadata=MARK, state=[SandboxState.PAUSED])
    assert [it.sandbox_id for it in await AsyncSandbox.list(query=query).next_items()] == [sandbox.sandbox_id]
    assert (await AsyncSandbox.get_info(sandbox.sandbox_id)).state == SandboxState.PAUSED
    resumed = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=900)
    assert resumed._envd_access_token == token
    assert (await resumed.commands.run(boot_id)).stdout == before
    assert sleeper.pid in [it.pid for it in await resumed.commands.list()]
    assert (await resumed.get_info()).metadata == MARK
    assert await resumed.files.read("hello.txt") == "hello world"
    return resumed


async def reboot(sandbox):
    """A pause of the file system alone: the sandbox boots anew on its files."""
    boot_id = "cat /proc/sys/kernel/random/boot_id"
    before = (await sandbox.commands.run(boot_id)).stdout
    await sandbox.commands.run("echo on disk > ~/kept; echo in memory > /dev/shm/lost")
    assert await sandbox.pause(keep_memory=False) is True
    booted = await AsyncSandbox.connect(sandbox.sandbox_id, timeout=900)
    assert (await booted.commands.run(boot_id)).stdout != before
    assert await booted.files.read("kept") == "on disk\n"
    assert not await booted.files.exists("/dev/shm/lost")
    assert (await booted.commands.run("echo $SHARED")).stdout == "of all\n"
    return booted


async def wakes(template):
    """A time-out pauses, and a request resumes."""
    lifecycle = {"on_timeout": "pause", "auto_resume": True}
    sandbox = await AsyncSandbox.create(template, timeout=900, lifecycle=lifecycle, metadata=MARK)
    await sandbox.files.write("mark", "here")
    await sandbox.set_timeout(0)
    for _ in range(200):
        if (await sandbox.get_info()).state == SandboxState.PAUSED:
            break
        await asyncio.sleep(0.3)
    assert (await sandbox.get_info()).state == SandboxState.PAUSED
    await AsyncSandbox.connect(sandbox.sandbox_id, timeout=900)
    assert await sandbox.pause() is True
    assert await sandbox.files.read("mark") == "here"
    assert (await sandbox.get_info()).state == SandboxState.RUNNING
    await sandbox.kill()


async def closed():
    """A sandbox without a network: nor has its child, also after a pause. And a request that is repeated with its key."""
    more = {"allow_internet_access": False, "idempotency_key": f"drive-{MARK['run']}"}
    sandbox = await AsyncSandbox.create(TEMPLATE, timeout=600, **more)
    again = await AsyncSandbox.create(TEMPLATE, timeout=600, **more)
    assert again.sandbox_id == sandbox.sandbox_id, "one request, done once"
    [child] = await sandbox.fork(count=1, timeout=600)
    assert await child.pause() is True
    resumed = await AsyncSandbox.connect(child.sandbox_id, timeout=600)
    for it in (sandbox, resumed):
        carrier = await it.commands.run("cat /sys/class/net/eth0/carrier")
        assert carrier.stdout == "0\n", "its network card is connected to nothing"
        assert (await it.get_info()).allow_internet_access is False
        await it.kill()


async def bad_input():
    for template, text in (("no-such-template", "forkd snapshot"), ("code-interpreter-v1", "template prepare")):
        if template == "code-interpreter-v1" and await e2b.AsyncTemplate.exists(template):
            continue
        try:
            await AsyncSandbox.create(template)
            raise AssertionError(f"template {template} does not exist")
        except e2b.SandboxException as error:
            assert "404" in str(error) and text in str(error), error
    try:
        await AsyncSandbox.create(TEMPLATE, network={"deny_out": ["0.0.0.0/0"]})
        raise AssertionError("a field that is not there is refused")
    except e2b.SandboxException as error:
        assert "network.denyOut" in str(error), error
    try:
        await AsyncSandbox.create(TEMPLATE, api_key="e2b_wrong_key_that_is_long_enough")
        raise AssertionError("a wrong key is refused")
    except e2b.AuthenticationException:
        pass
    try:
        await AsyncSandbox.create(TEMPLATE, timeout=24 * 3600 * 1000)
        raise AssertionError("a time-out of years is refused")
    except e2b.SandboxException as error:
        assert "timeout is" in str(error), error
    for call in (AsyncSandbox.get_info("sb0000000000000000"), AsyncSandbox.connect("sb0000000000000000")):
        try:
            await call
            raise AssertionError("an unknown sandbox raises")
        except e2b.NotFoundException:
            pass
    assert await AsyncSandbox.kill("sb0000000000000000") is False


async def main():
    await bad_input()
    sandbox = await AsyncSandbox.create(TEMPLATE, timeout=900, metadata=MARK, envs={"SHARED": "of all"})
    try:
        assert await sandbox.is_running() is True
        for part in (commands, terminal, files, raw, hostile, lists, snapshots, fork):
            await part(sandbox)
            print(f"{part.__name__}: works", flush=True)
        sandbox = await pause(sandbox)
        print("pause: works", flush=True)
        sandbox = await reboot(sandbox)
        await wakes(TEMPLATE)
        await closed()
        print("reboot, wakes, closed: work", flush=True)
        endless = await sandbox.commands.run("sleep 6000", background=True, timeout=0)
        assert await sandbox.kill() is True
        # Its streams end at once, and it is not there any more.
        try:
            await asyncio.wait_for(endless.wait(), 30)
            raise AssertionError("the stream of a killed sandbox ends with an error")
        except (e2b.SandboxException, CommandExitException):
            pass
        assert await sandbox.is_running() is False
        assert await sandbox.kill() is False

        # Its time is over at once.
        brief = await AsyncSandbox.create(TEMPLATE, timeout=900)
        await brief.set_timeout(0)
        for _ in range(100):
            if not await brief.is_running():
                break
            await asyncio.sleep(0.2)
        assert await brief.is_running() is False
    finally:
        try:
            await AsyncSandbox.kill(sandbox.sandbox_id)
        except e2b.SandboxException:
            pass
    print("the published Python client works")


asyncio.run(main())
# All is checked. The client's HTTP library may crash while the interpreter ends.
sys.stdout.flush()
os._exit(0)
