"""Drives all of the SDK against a daemon with Linux guests: every route of the client, what sandboxes and snapshots can
do, the examples of the docstrings, and the programs of a page. What those two use is not used once more here.

    FORKD_URL=… FORKD_TOKEN=… DRIVE_TAG=sdk-python python tests/drive.py [docs/PYTHON.md]

with the command `forkd` on PATH.
DRIVE_TAG is a snapshot of the image `python`, warmed by `import json`; it is made if it is missing. All else that this
program makes begins with that tag, and is removed.
"""

import asyncio
import contextlib
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import forkd
from forkd import AsyncClient, AsyncSandbox, AsyncSnapshot, Client, Controller, ControllerError, Sandbox, Snapshot, e2b

from examples import run_docstrings, run_page

TAG = os.environ["DRIVE_TAG"]
BEGUN = time.monotonic()
# The routes that were used, by method and path.
USED = set()


def step(what):
    print("%6.1f s  %s" % (time.monotonic() - BEGUN, what), flush=True)


def expect(condition, *about):
    if not condition:
        raise AssertionError(about)


@contextlib.contextmanager
def raises(kind, code=None):
    """The block must raise this error of ours."""
    try:
        yield
    except kind as error:
        expect(code is None or error.code == code, error, getattr(error, "code", None))
        expect(str(error), error)
        return
    raise AssertionError(("nothing was raised", kind, code))


def record(client_class):
    """Notes the routes that a client uses."""
    for name in ("send", "stream"):
        plain = getattr(client_class, name)

        def noting(self, call, *args, plain=plain, **more):
            USED.add((call.method, call.route))
            return plain(self, call, *args, **more)

        setattr(client_class, name, noting)


def drive_daemon(client):
    expect(client.health().ok and client.version().api == "v1")
    expect(client.wait_for_daemon(5).ok)
    expect("forkd_build_info" in client.metrics())
    past = list(client.events(follow=False, since="0"))
    expect(past, "no events")
    with raises(forkd.AuthenticationError, "unauthorized"):
        Client(client.address.url, "wrong").get_tree()
    name = TAG + "-token"
    with contextlib.suppress(forkd.NotFoundError):
        client.delete_token(name)
    token = client.create_token({"name": name, "scope": "read", "max_sandboxes": 0})
    expect(name in [it.name for it in client.list_tokens()])
    reader = Client(client.address.url, token.token)
    with raises(forkd.PermissionDeniedError, "forbidden"):
        Sandbox.create(TAG, client=reader)
    rotated = client.rotate_token(name)
    with raises(forkd.AuthenticationError):
        reader.get_tree()
    expect(Client(client.address.url, rotated.token).get_tree().nodes == [])
    client.delete_token(name)
    step("the daemon, events, tokens")


def drive_commands(box):
    ran = box.commands.run("echo out; echo err >&2; pwd; echo $WORD", cwd="/tmp", envs={"WORD": "hello"})
    expect((ran.stdout, ran.stderr, ran.exit_code) == ("out\n/tmp\nhello\n", "err\n", 0), ran)
    expect(box.commands.run(["whoami"], user="nobody").stdout == "nobody\n")
    with raises(forkd.CommandError) as _:
        box.commands.run("exit 3")
    with raises(forkd.CommandTimeoutError):
        box.commands.run("sleep 60", timeout=1)
    with raises(forkd.InvalidRequestError):
        box.commands.run([])
    expect(box.commands.run(["no-such-program"], check=False).exit_code == 127)
    lines = []
    ran = box.commands.run("for i in 1 2 3; do echo $i; done; echo late >&2", on_stdout=lines.append, on_stderr=lines.append)
    expect("".join(sorted("".join(lines).split())) == "123late", lines)
    data = os.urandom(700_000)
    ran = box.commands.run("sha256sum; head -c 3 /dev/zero | wc -c", stdin=data)
    expect(ran.stdout.split()[0] == hashlib.sha256(data).hexdigest(), ran)
    with box.commands.run("stty size; read line; echo got $line", background=True, pty=(100, 30)) as handle:
        expect(handle.pid > 0)
        handle.send_stdin("hello\n")
        expect({"30 100", "got hello"} <= set(handle.wait().stdout.replace("\r", "").split("\n")))
    handle = box.commands.run("echo ready; sleep 600", background=True)
    expect(next(iter(handle)).text == "ready\n")
    handle.signal("TERM")
    with raises(forkd.CommandError):
        handle.wait()
    with raises(forkd.NotFoundError, "image_not_found"):
        box.client.run_stream({"image": "no-such-image", "args": ["true"]}).wait()
    step("commands")


def drive_files(box, folder):
    files = box.files
    expect(files.write("/tmp/t/a", "text").size == 4 and files.read("/tmp/t/a") == "text")
    files.write("/tmp/t/b", (bytes([i]) * 100_000 for i in range(5)), mode=0o600)
    expect(len(files.read("/tmp/t/b", "bytes")) == 500_000 and files.stat("/tmp/t/b").mode == 0o600)
    with files.read("/tmp/t/b", "stream") as stream:
        expect(sum(len(piece) for piece in stream) == 500_000)
    files.make_dir("/tmp/t/in/side")
    expect(files.rename("/tmp/t/a", "/tmp/t/in/side/a").name == "a")
    expect([it.path for it in files.list("/tmp/t", 3)] == [
        "/tmp/t/b", "/tmp/t/in", "/tmp/t/in/side", "/tmp/t/in/side/a"])
    expect(files.exists("/tmp/t/in") and not files.exists("/tmp/t/out"))
    with raises(forkd.NotFoundError, "guest_not_found"):
        files.read("/tmp/t/out")
    with raises(forkd.PermissionDeniedError, "guest_forbidden"):
        files.write("/root/x", "", user="nobody")
    box.commands.run("ln -s /etc/passwd /tmp/t/link; printf '%s' x > '/tmp/t/in/a b%20é'; chmod 755 '/tmp/t/in/a b%20é'")
    down = files.download("/tmp/t", folder / "down")
    expect(down.skipped == ["/tmp/t/link"] and len(down.copied) == 3, down)
    expect((folder / "down/in/a b%20é").stat().st_mode & 0o777 == 0o755)
    (folder / "down/link").symlink_to("/etc/passwd")
    up = files.upload(folder / "down", "/tmp/up")
    expect(len(up.copied) == 3 and up.skipped == [str(folder / "down/link")], up)
    expect(box.commands.run("diff -r --no-dereference /tmp/t /tmp/up", check=False).stdout == "Only in /tmp/t: link\n")
    files.upload(folder / "down/b", "/tmp/alone")
    files.download("/tmp/alone", folder / "alone")
    expect((folder / "alone").read_bytes() == (folder / "down/b").read_bytes())
    files.remove("/tmp/t")
    expect(not files.exists("/tmp/t"))
    step("files")


def drive_code(box):
    expect([box.eval(code) for code in ("1 + 1", "[1, None]", "'a'", "None", "{1}")] == [2, [1, None], "a", None, "{1}"])
    with raises(forkd.EvalError) as _:
        box.eval("1 / 0")
    with raises(forkd.EvalTimeoutError):
        box.eval("import time; time.sleep(60)", timeout=1)
    ran = box.run_code("print('out'); 6 * 7")
    expect((ran.text, ran.value, ran.stdout, ran.error) == ("42", 42, "out\n", None), ran)
    ran = box.run_code("nothing")
    expect(ran.error.name == "NameError" and "nothing" in ran.error.value and "line 1" in ran.error.traceback, ran)
    step("code")


def drive_sandbox(box, client):
    expect(box.info().state == "running" and box.ping().pong and box.metrics().uptime_ms > 0)
    expect("forkd" in box.console() or box.console(tail=5) is not None)
    expect(Sandbox.connect(box.id).id == box.id)
    expect([it.id for it in Sandbox.list(labels={TAG: None})] == [box.id])
    expect(box.update(idle_timeout=3600, labels={TAG: "", "more": "1"}).labels == {TAG: "", "more": "1"})
    box.set_timeout(3600)
    expect(box.update(timeout=None).expires_at_unix is None)
    expect(client.get_sandbox(box.id, wait="ready", timeout_secs=5).ready)
    port = client.open_agent_port(box.id)
    expect(port.target.count(":") == 1)
    client.close_agent_port(box.id)
    expect(client.send_json_line(box.id, {"action": "ping"})["pong"] is True)
    box.pause()
    with raises(forkd.SandboxPausedError):
        box.eval("1")
    box.resume()
    expect(box.eval("1") == 1)
    step("a sandbox")


def drive_forks(box, client):
    box.eval("plan = ['read']")
    one, other = box.fork(2, labels={TAG: "child"})
    with one, other:
        expect((one.eval("plan + ['one']"), other.eval("plan + ['other']")) == (["read", "one"], ["read", "other"]))
        one.files.write("/tmp/new", "x")
        if ("GET", "/v1/sandboxes/{id}/files/tree") in routes_of(client):
            changes = other.diff(one, "/tmp")
            expect(("/tmp/new", "added") in [(it.path, it.kind) for it in changes], changes)
            expect("new" in [it.path for it in one.files.tree("/tmp").entries])
    with raises(forkd.SandboxEndedError):
        one.ping()
    expect(one.id in [it.id for it in client.list_archived_sandboxes(label=[TAG]).entries])
    expect(Sandbox.connect(box.id).eval("plan") == ["read"])

    expect({it.id for it in Sandbox.list(labels={TAG: None})} == {box.id})
    with raises(forkd.InvalidRequestError):
        box.fork(0)
    with raises(forkd.NotFoundError, "snapshot_not_found"):
        Sandbox.create(TAG + "-none")
    step("forks")


INTERRUPTED = """
import sys
from forkd import Sandbox
box = Sandbox.connect(sys.argv[1])
print("now", flush=True)
box.fork(2, labels={sys.argv[2]: "interrupted"})
"""


def drive_interrupt(box):
    """^C in the middle of a fork, and after it: no child stays."""
    for seconds in (0.05, 0.6):
        command = [sys.executable, "-c", INTERRUPTED, box.id, TAG]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                process.stdout.readline()
                time.sleep(seconds)
                process.send_signal(signal.SIGINT)
                _, printed = process.communicate(timeout=120)
            finally:
                process.kill()
        if process.returncode == 0:
            # The fork was faster: its children are what the program wanted.
            box.kill_all(list(Sandbox.list(labels={TAG: "interrupted"})))
        else:
            expect(b"KeyboardInterrupt" in printed, printed)
        left = [it.id for it in Sandbox.list(labels={TAG: "interrupted"})]
        expect(not left, left)
    step("interrupts")


def routes_of(client):
    """The routes that this daemon has."""
    import httpx

    document = httpx.get(client.address.base + "/openapi.json", headers=client.address.headers, timeout=30).json()
    return {(method.upper(), path) for path, methods in document["paths"].items()
            for method, it in methods.items() if not it.get("deprecated")}


def drive_branches(box, client):
    branch = box.branch(TAG + "-soon", wait=False)
    box.eval("plan.append('break')")
    expect(box.rollback() == branch.tag and box.eval("plan") == ["read"])
    with raises(ZeroDivisionError):
        with box.checkpoint():
            box.eval("plan = None")
            1 / 0
    expect(box.eval("plan") == ["read"])
    lines = []
    branch.wait_ready(on_progress=lines.append)
    expect(branch.status == "ready" and lines[-1].endswith("ready"), lines)
    expect(branch.details().parent_tag == TAG)
    (child,) = branch.spawn(envs={"SECRET": "s"})
    with child:
        expect(child.eval("plan") == ["read"] and child.commands.run("echo $SECRET").stdout == "s\n")
    expect(TAG + "-soon" in [it.tag for it in Snapshot.list()])
    names = {node.name for node in box.tree().nodes}
    expect({box.id, branch.tag} <= names)
    with raises(forkd.ConflictError, "tag_taken"):
        box.branch(branch.tag)
    branch.unload()
    client.set_snapshot_owner(branch.tag, {"owner": "*"})
    with raises(forkd.ConflictError, "tag_taken"):
        branch.compact(TAG)
    expect(box.rollback(TAG) == TAG)
    branch.delete()
    with raises(forkd.NotFoundError):
        branch.info()
    made = client.create_snapshot({"tag": TAG + "-cancelled", "image": "python"}, wait=False)
    expect(made.status == "writing")
    client.delete_snapshot(made.tag)
    step("branches, snapshots")


def drive_workspaces(client):
    name = TAG + "-desk"
    with contextlib.suppress(forkd.NotFoundError):
        client.delete_workspace(name)
    made = client.create_workspace({"name": name, "snapshot_tag": TAG})
    expect(made.status == "running" and name in [it.name for it in client.list_workspaces().entries])
    expect(client.suspend_workspace(name, {"diff": True}).status == "suspended")
    expect(client.resume_workspace(name).live_sandbox_id and client.get_workspace(name).status == "running")
    client.delete_workspace(name)
    step("workspaces")


def drive_reference(client):
    os.environ["FORKD_TAG"] = TAG
    with Sandbox(timeout=60) as box:
        ran = box.commands.run("echo hi; exit 4", 60)
        expect((ran.stdout, ran.exit_code) == ("hi\n", 4), ran)
        expect(box.eval("[0.0] * 2") == "[0.0, 0.0]")
        with raises(RuntimeError):
            box.eval("1 / 0")
        controller = Controller(timeout=300)
        expect(controller.get_sandbox(box.id)["snapshot_tag"] == TAG)
        expect(controller.exec_command(box.id, ["echo", "x"])["stdout"] == "x\n")
        expect(controller.eval_code(box.id, "1 + 1")["result"] == "2" and controller.ping_sandbox(box.id)["pong"])
        expect(box.id in [it["id"] for it in controller.list_sandboxes()])
        expect(TAG in [it["tag"] for it in controller.list_snapshots()])
        with raises(ControllerError, "snapshot_not_found"):
            controller.spawn_sandboxes(TAG + "-none")
        try:
            controller.get_sandbox("sb-none")
        except ControllerError as error:
            expect(error.status == 404 and error.body["code"] == "sandbox_not_found" and "sb-none" in error.url)
        command = ["forkd", "agent-port", box.id]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as relay:
            try:
                target = relay.stdout.readline().split()[0].replace("FORKD_TARGET=", "")
                with Sandbox(target=target, timeout=60, spawn=False) as same:
                    ran = same.commands.run("echo hi; exit 4", 60)
                    expect((ran.stdout, ran.exit_code) == ("hi\n", 4), ran)
                    expect(same.ping()["pong"] is True and same.eval("6 * 7") == "42")
                    with raises(forkd.InvalidRequestError):
                        same.fork()
            finally:
                relay.terminate()
    with raises(forkd.DaemonUnreachableError):
        Sandbox(target="127.0.0.1:1", timeout=5, spawn=False).ping()
    with e2b.Sandbox.create(TAG, metadata={TAG: "e2b"}) as box:
        expect(box.is_running() and box.run_code("print(1); 2").logs.stdout == ["1\n"])
        expect(box.commands.run("echo hi").stdout == "hi\n" and box.files.write("/tmp/a", "x"))
        (child,) = box.fork()
        expect(child.files.read("/tmp/a") == "x" and child.kill() and not child.kill() and not child.is_running())
        box.set_timeout(600)
        expect(box.pause() == box.sandbox_id and not box.is_running())
        expect(e2b.Sandbox.connect(box.sandbox_id).run_code("1 / 0").error.name == "ZeroDivisionError")
    step("the reference's classes, E2B's shape")


async def drive_asyncio(folder):
    async with AsyncClient() as client:
        expect((await client.wait_for_daemon()).ok)
        snapshot = await AsyncSnapshot.get(TAG, client)
        expect(await snapshot.status() == "ready")
        async with await AsyncSandbox.create(TAG, client=client, labels={TAG: "asyncio"}) as box:
            ran, value = await asyncio.gather(box.commands.run("echo hi"), box.eval("6 * 7"))
            expect((ran.stdout, value) == ("hi\n", 42))
            lines = []
            await box.commands.run("echo 1; echo 2", on_stdout=lines.append)
            expect("".join(lines) == "1\n2\n", lines)
            handle = await box.commands.run("cat", background=True)
            await handle.send_stdin("x" * 600_000)
            await handle.close_stdin()
            expect(len("".join([output.text async for output in handle])) == 600_000)
            await box.files.write("/tmp/t/a", "text")
            (folder / "up").mkdir()
            (folder / "up/b").write_text("b")
            await box.files.upload(folder / "up", "/tmp/t/up")
            down = await box.files.download("/tmp/t", folder / "async")
            expect(len(down.copied) == 2 and (folder / "async/up/b").read_text() == "b")
            left = [it.id async for it in AsyncSandbox.list(labels={TAG: "asyncio"}, client=client)]
            expect(left == [box.id], left)
        with raises(forkd.SandboxEndedError):
            await box.ping()
    step("asyncio")


def main():
    client = Client()
    try:
        Snapshot.get(TAG)
    except forkd.NotFoundError:
        Snapshot.warm("python", tag=TAG, warm_python="import json", on_progress=step)
    with contextlib.suppress(forkd.NotFoundError):
        client.delete_snapshot(TAG + "-soon", force=True)
    record(Client)
    drive_daemon(client)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        with Sandbox.create(TAG, labels={TAG: ""}, on_progress=step) as box:
            drive_commands(box)
            drive_files(box, folder)
            drive_code(box)
            drive_sandbox(box, client)
            drive_forks(box, client)
            drive_interrupt(box)
            drive_branches(box, client)
            step("%d examples of docstrings" % run_docstrings(box, TAG))
            # It goes on until the sandbox ends.
            followed = threading.Thread(target=lambda: list(client.follow_console(box.id)), daemon=True)
            followed.start()
        followed.join(60)
        expect(not followed.is_alive(), "the console of an ended sandbox goes on")
        drive_reference(client)
        drive_workspaces(client)
        asyncio.run(drive_asyncio(folder))
    for page in sys.argv[1:]:
        step("%d programs of %s" % (run_page(pathlib.Path(page), TAG), page))
    # Over a WebSocket: `drive_commands` has used both.
    USED.update({("GET", "/v1/run"), ("GET", "/v1/sandboxes/{id}/exec/stream")})
    expect(not routes_of(client) - USED, "routes that were not used", routes_of(client) - USED)
    left = [it.id for it in Sandbox.list(labels={TAG: None})]
    expect(not left, left)
    print("the Python SDK works")


if __name__ == "__main__":
    main()
