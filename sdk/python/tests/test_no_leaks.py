"""However a program ends, no sandbox stays: an exception, ^C in the middle of a fork, a cancelled task, a closed loop."""

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
import weakref

import pytest

import forkd
from forkd import AsyncClient, AsyncSandbox, Client, Sandbox, Snapshot
from forkd.calls import Sleep


def until(condition, seconds=20):
    """Waits until it is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)


def interrupted(server, program, when):
    """Runs a program, and sends it ^C when the server has seen enough. Returns what it printed on standard error."""
    environment = dict(os.environ, FORKD_URL=server.url)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, stderr=subprocess.PIPE, text=True
    )
    try:
        until(when)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        return process.communicate(timeout=30)[1]
    finally:
        process.kill()


def test_a_block_left_by_an_exception_ends_its_sandbox(server, client):
    with pytest.raises(ZeroDivisionError):
        with Sandbox.create("parent", client=client):
            assert server.alive
            1 / 0
    assert not server.alive


class Unsent:
    """A connection that swallows the answer."""

    def reply(self, *args, **more):
        pass


@pytest.mark.parametrize("done", [False, True])
def test_a_removal_whose_answer_is_lost_is_sent_again(server, client, done):
    """`done`: the daemon has removed the object, and only its answer is lost."""
    lost, snapshots = set(), set()

    def script(request, connection):
        if request.method == "DELETE" and request.path not in lost:
            lost.add(request.path)
            if done:
                snapshots.clear()
                server.answer(request, Unsent())
            connection.reset()
        elif request.path.endswith("/branch"):
            snapshots.add("b")
            connection.reply(201, snapshot("b"))
        elif request.path == "/v1/snapshots/b":
            there = "b" in snapshots
            snapshots.clear()
            gone = {"error": "there is no such snapshot", "code": "snapshot_not_found"}
            connection.reply(204, body=b"") if there else connection.reply(404, gone)
        else:
            return False
        return True

    async def use():
        async with AsyncClient(server.url, "token") as client:
            async with await AsyncSandbox.create("parent", client=client):
                pass

    server.script = script
    with Sandbox.create("parent", client=client) as box:
        with box.checkpoint():
            pass
    asyncio.run(use())
    assert server.made == 2 and len(lost) == 3 and not server.alive and not snapshots


def test_a_callback_that_raises_leaves_nothing(server, client):
    def progress(line):
        if line.startswith("sb"):
            raise ZeroDivisionError

    async def use():
        async with AsyncClient(server.url) as client:
            await AsyncSandbox.create("parent", client=client, on_progress=progress)

    with pytest.raises(ZeroDivisionError):
        Sandbox.create("parent", client=client, on_progress=progress)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(use())
    assert server.made == 2 and not server.alive


def test_a_sandbox_is_ended_twice(server, client):
    box = Sandbox.create("parent", client=client)
    box.kill()
    box.kill()
    with pytest.raises(forkd.SandboxEndedError):
        box.info()


def test_an_interrupt_in_the_middle_of_a_fork_leaves_nothing(server):
    def script(request, connection):
        server.delay = 1.0 if request.path.endswith("/fork") else 0.0
        return False

    server.script = script
    error = interrupted(
        server,
        """
        from forkd import Sandbox
        with Sandbox.create("parent") as box:
            box.fork(3)
        """,
        lambda: server.count("POST", "/v1/sandboxes/sb0/fork") == 1,
    )
    assert "KeyboardInterrupt" in error
    assert server.made == 4 and not server.alive


def test_an_interrupt_in_the_middle_of_a_create_leaves_nothing(server):
    server.delay = 1.0
    program = 'from forkd import Sandbox; Sandbox.create("parent")'
    assert "KeyboardInterrupt" in interrupted(server, program, lambda: server.requests)
    assert server.made == 1 and not server.alive


def test_an_interrupt_during_try_each_ends_all_children(server):
    error = interrupted(
        server,
        """
        import time
        from forkd import Sandbox
        with Sandbox.create("parent") as box:
            box.try_each([lambda child: time.sleep(600)] * 3)
        """,
        lambda: len(server.alive) == 4,
    )
    assert "KeyboardInterrupt" in error and not server.alive


NESTED = """
    import time
    from forkd import Sandbox
    def wait(child): time.sleep(600)
    def nest(child): child.try_each([wait] * 2)
    with Sandbox.create("parent") as box:
        box.try_each([nest] * 2)
    """


def test_an_interrupt_during_nested_tries_ends_the_children_of_all_threads(server):
    error = interrupted(server, NESTED, lambda: len(server.alive) == 7)
    assert "KeyboardInterrupt" in error and not server.alive


def test_an_interrupt_in_the_middle_of_a_nested_fork_leaves_nothing(server):
    def script(request, connection):
        server.delay = 1.0 if request.path == "/v1/sandboxes/sb1/fork" else 0.0
        return False

    server.script = script
    error = interrupted(server, NESTED, lambda: server.count("POST", "/v1/sandboxes/sb1/fork") == 1)
    assert "KeyboardInterrupt" in error and not server.alive


def test_a_forked_process_leaves_the_children_of_its_parent(server):
    program = """
        import os, sys
        from forkd import Sandbox
        def fork(child):
            pid = os.fork()
            if pid == 0:
                # As a process ends whose threads are over.
                __import__("atexit")._run_exitfuncs()
                os._exit(0)
            os.waitpid(pid, 0)
            return child.eval("1")
        with Sandbox.create("parent") as box:
            box.first_success([fork])
        """
    environment = dict(os.environ, FORKD_URL=server.url)
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)
    assert server.count("DELETE", "/v1/sandboxes/sb1") == 1 and not server.alive


def test_an_interrupt_of_asyncio_ends_all_children(server):
    program = """
        import asyncio
        from forkd import AsyncSandbox
        async def wait(child): await asyncio.sleep(600)
        async def main():
            async with await AsyncSandbox.create("parent") as box:
                await box.try_each([wait] * 3)
        asyncio.run(main())
        """
    assert "KeyboardInterrupt" in interrupted(server, program, lambda: len(server.alive) == 4)
    assert not server.alive


@pytest.mark.parametrize("times", [1, 3])
def test_a_cancelled_fork_leaves_nothing(server, times):
    async def main():
        async with AsyncClient(server.url, timeout=5.0) as client:
            async with await AsyncSandbox.create("parent", client=client) as box:
                server.delay = 0.5
                task = asyncio.ensure_future(box.fork(2))
                while not server.count("POST", ".*/fork"):
                    await asyncio.sleep(0.01)
                for _ in range(times):
                    task.cancel()
                    await asyncio.sleep(0.05)
                with pytest.raises(asyncio.CancelledError):
                    await task

    asyncio.run(main())
    assert server.made == 3 and not server.alive


def test_a_loop_that_closes_in_a_block_ends_the_sandbox(server):
    async def main(entered):
        client = AsyncClient(server.url, timeout=5.0)
        async with await AsyncSandbox.create("parent", client=client):
            entered.append(1)
            await asyncio.Event().wait()

    loop = asyncio.new_event_loop()
    entered = []
    coroutine = main(entered)
    task = loop.create_task(coroutine)
    while not entered:
        loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    coroutine.close()
    until(lambda: not server.alive)


def test_a_loop_that_closes_in_the_middle_of_a_create_leaves_nothing(server):
    async def main():
        await AsyncSandbox.create("parent", client=AsyncClient(server.url, timeout=5.0))

    server.delay = 0.5
    loop = asyncio.new_event_loop()
    coroutine = main()
    task = loop.create_task(coroutine)
    while not server.requests:
        loop.run_until_complete(asyncio.sleep(0.01))
    task._log_destroy_pending = False
    loop.close()
    # The HTTP library complains that its loop is not there any more.
    with contextlib.suppress(RuntimeError):
        coroutine.close()
    until(lambda: server.made == 1 and not server.alive)


def test_a_client_works_in_one_loop_after_the_other(server):
    client = AsyncClient(server.url)

    async def use():
        async with await AsyncSandbox.create("parent", client=client) as box:
            return await box.eval("6 * 7")

    assert [asyncio.run(use()) for _ in range(2)] == [42, 42]
    assert not server.alive


def test_a_client_drops_the_loops_that_have_closed_and_their_sockets(server):
    client = AsyncClient(server.url)
    loops = weakref.WeakSet()

    async def use():
        loops.add(asyncio.get_running_loop())
        await asyncio.gather(*[client.health() for _ in range(3)])
        return open_now()

    def open_now():
        return len(os.listdir("/proc/self/fd"))

    with contextlib.ExitStack() as stack:
        gc.disable()
        stack.callback(gc.enable)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(use())
        first = asyncio.run(use())
        for _ in range(8):
            last = asyncio.run(use())
        gc.collect()
    # The server is in this process: a connection has two ends here.
    assert last <= first + 8, (first, last)
    assert len(loops) <= 1


def test_a_forked_process_has_connections_of_its_own(server):
    program = """
        import os
        from forkd import Sandbox
        with Sandbox.create("parent") as box:
            child = os.fork()
            if child == 0:
                os._exit(0 if box.eval("1") == 42 else 1)
            assert os.waitpid(child, 0)[1] == 0 and box.eval("1") == 42
        """
    environment = dict(os.environ, FORKD_URL=server.url)
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, check=True, timeout=60)
    # The parent's connection was left alone: it was used to the end.
    assert server.connections == 2 and not server.alive


def test_a_lost_reply_of_a_create_is_asked_for_again(server, client):
    def script(request, connection):
        if request.path == "/v1/sandboxes" and len(server.requests) == 1:
            server.answer(request, Unsent())
            connection.reset()
            return True
        return False

    server.script = script
    box = Sandbox.create("parent", client=client)
    assert server.alive == {box.id}


def test_a_create_that_times_out_leaves_nothing(server, monkeypatch):
    monkeypatch.setattr("forkd.routes.LONG", 1.0)
    server.delay = 1.0
    with pytest.raises(forkd.TimeoutError):
        Sandbox.create("parent", client=Client(server.url, timeout=0.3))
    assert server.made == 1 and not server.alive


def partial(server, connection, request):
    reply = {"children": [dict(id="sb9", owner="l", state="running", vcpus=1, mem_size_mib=1, network=False,
                               guest_addr="", created_at_unix=1)],
             "errors": [{"index": 1, "error": "no room: end a sandbox", "code": "limit_reached", "request_id": "r"}]}
    server.alive.add("sb9")
    connection.reply(201, reply)
    return True


def test_children_of_a_fork_that_fails_in_part_are_ended(server, client):
    box = Sandbox.create("parent", client=client)
    server.script = lambda request, connection: request.path.endswith("/fork") and partial(
        server, connection, request)
    with pytest.raises(forkd.ForkError, match="no room") as error:
        box.fork(2)
    assert error.value.code == "limit_reached" and error.value.errors == ["no room: end a sandbox"]
    assert server.alive == {box.id}
    forked = box.fork(2, on_error="return")
    assert [child.id for child in forked] == ["sb9"]
    assert [(type(error), error.message) for error in forked.errors] == [(forkd.QuotaError, "no room: end a sandbox")]

    async def use():
        async with AsyncClient(server.url, timeout=5.0) as client:
            forked = await (await AsyncSandbox.connect(box.id, client=client)).fork(2, on_error="return")
            return [child.id for child in forked], forked.errors[0].code

    assert asyncio.run(use()) == (["sb9"], "limit_reached")
    with pytest.raises(forkd.InvalidRequestError, match="'raise', 'return'"):
        box.fork(2, on_error="ignore")
    with pytest.raises(forkd.InvalidRequestError, match="'live'"):
        box.branch(mode="alive")


def test_a_reader_that_is_left_closes_its_connection(server, client):
    """A generator of events that is dropped does not keep a connection."""

    def script(request, connection):
        if request.path != "/v1/events":
            return False
        event = b'id: 1\nevent: sandbox.ended\ndata: {"id": "1", "kind": "sandbox.ended", "ts": "t"}\n\n'
        connection.socket.sendall(b"HTTP/1.1 200 x\r\ntransfer-encoding: chunked\r\n\r\n")
        connection.socket.sendall(b"%x\r\n%s\r\n" % (len(event), event))
        closed.append(connection.socket.recv(1) == b"")
        return True

    closed = []
    server.script = script
    for event in client.events():
        assert event.kind == "sandbox.ended"
        break
    until(lambda: closed == [True])


def test_an_interrupted_warm_up_is_cancelled(server):
    made = []

    def script(request, connection):
        if request.path == "/v1/snapshots":
            made.append(request.json["tag"])
            connection.reply(202, snapshot(made[-1]))
        elif request.path.startswith("/v1/snapshots/"):
            if request.method == "DELETE":
                made.clear()
                connection.reply(204, body=b"")
            else:
                connection.reply(200, snapshot(made[-1]))
        return True

    server.script = script
    program = 'from forkd import Snapshot; Snapshot.warm("python", tag="t")'
    error = interrupted(server, program, lambda: server.count("GET", "/v1/snapshots/t") > 1)
    assert "KeyboardInterrupt" in error and not made


def snapshot(tag, status="writing"):
    return dict(tag=tag, dir="", created_at_unix=1, status=status, bootable=False, kind="full", mem_size_mib=1, vcpus=1,
                network=True, chain_depth=0, disk_bytes=0, memory_bytes=0, state_bytes=0, phase="booting")


def test_a_warm_up_reports_its_progress_and_a_failure_its_reason(server, client):
    states = [snapshot("t"), dict(snapshot("t"), phase="warming"),
              dict(snapshot("t", "failed"), error="the command failed", error_code="snapshot_failed")]

    def script(request, connection):
        connection.reply(200, states[0] if len(states) == 1 else states.pop(0))
        return True

    server.script = script
    lines = []
    with pytest.raises(forkd.ConflictError, match="the command failed"):
        Snapshot.warm("python", tag="t", on_progress=lines.append, client=client)
    assert lines == ["t: warming", "t: failed"]


def test_first_success_ends_the_others_at_once(server, client):
    forever = threading.Event()
    box = Sandbox.create("parent", client=client)
    begun = time.monotonic()
    outcome = box.first_success([lambda child: forever.wait(), lambda child: child.eval("1"), lambda child: 1 / 0])
    assert outcome.value == 42 and time.monotonic() - begun < 20
    assert server.alive == {box.id}
    with pytest.raises(forkd.AllFailedError) as error:
        box.first_success([lambda child: 1 / 0] * 2)
    assert [type(outcome.error) for outcome in error.value.outcomes] == [ZeroDivisionError] * 2
    forever.set()


def test_the_best_one_is_kept_on_request(server, client):
    box = Sandbox.create("parent", client=client)
    best = box.best_of(3, lambda child, index: index, lambda value: -abs(value - 1), keep=True)
    assert best.value == 1 and server.alive == {box.id, best.sandbox.id}
    with pytest.raises(forkd.AllFailedError, match="division by zero"):
        box.best_of(2, lambda child, index: index, lambda value: 1 / 0)
    with pytest.raises(forkd.AllFailedError, match="not a number"):
        box.best_of(2, lambda child, index: index, lambda value: float("nan"))
    assert box.best_of(3, lambda child, index: index, lambda value: 1 / (value - 2)).value == 0
    assert server.alive == {box.id, best.sandbox.id}


def test_at_most_so_many_run_at_the_same_time(server, client):
    box = Sandbox.create("parent", client=client)
    running, most, lock = [], [], threading.Lock()

    def work(child):
        with lock:
            running.append(child)
            most.append(len(running))
        time.sleep(0.05)
        with lock:
            running.remove(child)
        return child.id

    outcomes = box.try_each([work] * 6, parallel=2, keep=True)
    assert max(most) == 2 and [outcome.value for outcome in outcomes] == [o.sandbox.id for o in outcomes]
    assert len(server.alive) == 7
    with pytest.raises(forkd.InvalidRequestError):
        box.try_each([work], parallel=0)


def forks(server, asynchronous, timeout=1.0):
    """Forks two children of `sb-source`, as a call that a test may do; the client's timeout is `timeout`."""
    server.alive.add("source")
    if not asynchronous:
        client = Client(server.url, timeout=timeout)
        return [child.id for child in Sandbox.connect("source", client=client).fork(2)]

    async def main():
        async with AsyncClient(server.url, timeout=timeout) as client:
            return [child.id for child in await (await AsyncSandbox.connect("source", client=client)).fork(2)]

    return asyncio.run(main())


def first_fork_breaks(server, then=lambda: None):
    """The connection of the first fork breaks while the daemon works on it."""
    broken = []

    def script(request, connection):
        if not request.path.endswith("/fork") or broken:
            return False
        broken.append(request.key)
        threading.Thread(target=server.answer, args=(request, Unsent()), daemon=True).start()
        until(lambda: server.busy)
        connection.reset()
        then()
        return True

    server.script = script


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fork_whose_connection_breaks_while_the_daemon_works_has_its_children(server, asynchronous):
    server.delay = 1.5
    first_fork_breaks(server)
    children = forks(server, asynchronous)
    assert len(children) == 2 == server.made and server.alive == {"source", *children}
    assert len({request.key for request in server.requests if request.path.endswith("/fork")}) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_fork_that_is_under_way_for_too_long_is_undone(server, asynchronous, monkeypatch):
    monkeypatch.setattr("forkd.routes.LONG", 1.0)
    server.delay = 2.0
    first_fork_breaks(server)
    # Which of the two depends on when the connection breaks.
    with pytest.raises((forkd.TimeoutError, forkd.StreamBrokenError)):
        forks(server, asynchronous, timeout=0.5)
    assert server.made == 2 and server.alive == {"source"}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("answers", [None, "shutting_down"])
def test_a_fork_of_a_daemon_that_restarts_leaves_nothing(server, asynchronous, answers, monkeypatch):
    """The daemon has forked, and then refuses connections, or requests, for longer than the call is sent again."""
    refused, sleeps = [], []

    def sleep(seconds):
        # The clean-up has been refused, too.
        sleeps.append(seconds)
        if len(sleeps) == 2:
            server.go_on()
        yield Sleep(seconds)

    def script(request, connection):
        if request.path.endswith("/fork") and not refused:
            refused.append(request)
            server.answer(request, Unsent())
            if answers is None:
                server.pause()
            connection.reset()
        elif answers is not None and len(refused) < 8 and request.path != "/v1/sandboxes/source":
            refused.append(request)
            connection.reply(503, {"error": "it stops", "code": answers, "request_id": "r"}, [("retry-after", "0")])
        else:
            return False
        return True

    server.script = script
    if answers is None:
        monkeypatch.setattr("forkd.steps.sleep", sleep)
    with pytest.raises(forkd.DaemonUnreachableError if answers is None else forkd.BusyError):
        forks(server, asynchronous)
    assert server.made == 2 and server.alive == {"source"}


def test_an_interrupt_while_nothing_listens_ends_the_program_soon(server, monkeypatch):
    monkeypatch.setattr("forkd.steps.DOUBTFUL_SECONDS", 0.5)
    client = Client(server.url)
    server.stop()
    monkeypatch.setattr(client, "send", interrupt_once(client.send))
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Sandbox.create("parent", client=client)
    assert time.monotonic() - begun < 30


def interrupt_once(send):
    interrupts = [KeyboardInterrupt()]

    def sending(call):
        if interrupts:
            raise interrupts.pop()
        return send(call)

    return sending


def unkillable(server, *ids):
    """The daemon fails to end these."""

    def script(request, connection):
        if request.method != "DELETE" or request.path.split("/")[-1] not in ids:
            return False
        connection.reply(500, {"error": "the host failed", "code": "internal", "request_id": "r"})
        return True

    server.script = script


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_came_of_the_callables_is_not_lost_when_a_child_cannot_be_ended(server, client, asynchronous):
    def use(box):
        with pytest.warns(RuntimeWarning, match="sb1 still runs.*the host failed.*kill"):
            outcomes = box.try_each([lambda child: child.id, lambda child: 1 / 0])
        with pytest.warns(RuntimeWarning, match="sb3 still runs"):
            best = box.best_of(2, lambda child, index: child.id, lambda id: id == "sb4")
        with pytest.warns(RuntimeWarning, match="sb5 still runs"):
            first = box.first_success([lambda child: child.id])
        return [outcome.value for outcome in outcomes], best.value, first.value

    async def use_async():
        async def name(child, index=0):
            return child.id

        async def fail(child):
            1 / 0

        async with AsyncClient(server.url, timeout=5.0) as client:
            box = await AsyncSandbox.create("parent", client=client)
            with pytest.warns(RuntimeWarning, match="sb1 still runs.*the host failed.*kill"):
                outcomes = await box.try_each([name, fail])
            with pytest.warns(RuntimeWarning, match="sb3 still runs"):
                best = await box.best_of(2, name, lambda id: id == "sb4")
            with pytest.warns(RuntimeWarning, match="sb5 still runs"):
                first = await box.first_success([name])
            return [outcome.value for outcome in outcomes], best.value, first.value

    unkillable(server, "sb1", "sb3", "sb5")
    found = asyncio.run(use_async()) if asynchronous else use(Sandbox.create("parent", client=client))
    assert found == (["sb1", None], "sb4", "sb5") and server.alive == {"sb0", "sb1", "sb3", "sb5"}


def test_a_callable_that_cancels_itself_has_failed_and_the_others_go_on(server):
    async def cancels(child):
        raise asyncio.CancelledError

    async def works(child):
        await asyncio.sleep(0.1)
        return await child.eval("1")

    async def main():
        async with AsyncClient(server.url, timeout=5.0) as client:
            async with await AsyncSandbox.create("parent", client=client) as box:
                outcomes = await box.try_each([cancels, works])
                first = await box.first_success([cancels, works])
                return [type(outcome.error) for outcome in outcomes], outcomes[1].value, first.value

    assert asyncio.run(main()) == ([asyncio.CancelledError, type(None)], 42, 42)
    assert not server.alive
