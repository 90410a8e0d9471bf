"""A command over a WebSocket, with a daemon that cuts, stalls or refuses."""

import asyncio
import json
import pathlib
import ssl
import threading
import time

import pytest

import forkd
from forkd import AsyncClient, AsyncSandbox, Client, Sandbox, e2b
from forkd.exec_stream import WINDOW
from server import Server

# A certificate of 127.0.0.1, signed by itself, and its key; good for a hundred years.
CERTIFICATE = pathlib.Path(__file__).with_name("localhost.pem")


def stream(server, then):
    """The daemon answers a stream by this: `then(connection, first message)`."""
    server.alive.add("sb1")

    def script(request, connection):
        if not request.path.endswith("/exec/stream"):
            return False
        connection.upgrade(request)
        then(connection, json.loads(connection.read_frame()))
        connection.finish()
        return True

    server.script = script


def started(connection, first):
    connection.event(event="started", sandbox="sb1", pid=7)


@pytest.fixture
def box(server, client):
    server.alive.add("sb1")
    return Sandbox.connect("sb1", client=client)


def run_async(server, use):
    async def main():
        async with AsyncClient(server.url, "token", timeout=1.0) as client:
            return await use(await AsyncSandbox.connect("sb1", client=client))

    return asyncio.run(main())


def test_output_is_decoded_across_messages_and_kept(server, box):
    def then(connection, first):
        started(connection, first)
        text = "ä".encode()
        connection.frame(b"\x01" + text[:1])
        connection.frame(b"\x01" + text[1:])
        connection.frame(b"\x02err")
        connection.event(event="exit", exit_code=0)

    stream(server, then)
    pieces = []
    result = box.commands.run("x", on_stdout=pieces.append)
    assert (result.stdout, result.stderr, pieces) == ("ä", "err", ["ä"])

    async def use(box):
        return await box.commands.run("x", on_stdout=pieces.append)

    assert run_async(server, use) == result


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_requests_and_streams_work_over_a_unix_socket_and_over_tls(kind, tmp_path):
    tls = None
    if kind == "tls":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(CERTIFICATE)
    with Server(path=str(tmp_path / "forkd.sock") if kind == "unix" else None, tls=tls) as server:

        def then(connection, first):
            started(connection, first)
            connection.frame(b"\x01hi")
            connection.event(event="exit", exit_code=0)

        stream(server, then)
        cacert = str(CERTIFICATE) if tls else None
        with Client(server.url, "token", timeout=5.0, cacert=cacert) as client:
            box = Sandbox.connect("sb1", client=client)
            assert box.commands.run("x", on_stdout=str).stdout == "hi" and box.eval("1") == 42

        async def use():
            async with AsyncClient(server.url, "token", timeout=5.0, cacert=cacert) as client:
                box = await AsyncSandbox.connect("sb1", client=client)
                return (await box.commands.run("x", on_stdout=str)).stdout, await box.eval("1")

        assert asyncio.run(use()) == ("hi", 42)
        if tls:
            with pytest.raises(forkd.DaemonUnreachableError, match="cacert"):
                Client(server.url, "token", timeout=5.0).health()
            with pytest.raises(forkd.ForkdError):
                Client(server.url, "token", timeout=5.0).exec_stream("sb1", {"args": ["x"]})


def test_a_command_that_ends_before_its_input_does_has_its_result(server, box):
    def then(connection, first):
        started(connection, first)
        connection.frame(b"\x01done")
        connection.event(event="exit", exit_code=0)

    stream(server, then)

    async def use(box):
        return await box.commands.run("x", stdin=b"y" * 1_000_000)

    for _ in range(5):
        assert box.commands.run("x", stdin=b"y" * 1_000_000).stdout == "done"
        assert run_async(server, use).stdout == "done"


def test_a_stream_that_is_cut_in_the_middle_is_an_error_with_advice(server, box):
    def then(connection, first):
        started(connection, first)
        connection.frame(b"\x01so far")
        connection.close()

    stream(server, then)
    for _ in range(2):
        with pytest.raises(forkd.StreamBrokenError, match="run it again"):
            box.commands.run("x", on_stdout=str)

    async def use(box):
        with pytest.raises(forkd.StreamBrokenError, match="run it again"):
            await box.commands.run("x", on_stdout=str)

    run_async(server, use)


def test_output_before_the_cut_is_delivered(server, box):
    def then(connection, first):
        started(connection, first)
        connection.frame(b"\x01so far")
        connection.reset()

    stream(server, then)
    handle = box.commands.run("x", background=True)
    pieces = []
    with pytest.raises(forkd.StreamBrokenError):
        for output in handle:
            pieces.append(output.text)
    assert pieces in (["so far"], [])  # A reset may drop what is on its way.


def test_a_daemon_that_is_silent_after_the_timeout_is_left(server, box):
    stream(server, lambda connection, first: (started(connection, first), server.stopped.wait()))
    begun = time.monotonic()
    with pytest.raises((forkd.TimeoutError, forkd.StreamBrokenError)):
        box.commands.run("x", timeout=0.1, on_stdout=str)

    async def use(box):
        with pytest.raises((forkd.TimeoutError, forkd.StreamBrokenError)):
            await box.commands.run("x", timeout=0.1, on_stdout=str)

    run_async(server, use)
    assert time.monotonic() - begun < 30


def test_a_silent_connection_without_a_limit_is_broken(server, box):
    stream(server, lambda connection, first: (started(connection, first), server.stopped.wait()))
    with pytest.raises(forkd.StreamBrokenError):
        box.commands.run("x", timeout=None)


def test_an_error_event_is_the_error_of_its_code(server, box):
    def then(connection, first):
        started(connection, first)
        connection.event(event="error", code="sandbox_paused", status=409, message="resume it", request_id="r")

    stream(server, then)
    with pytest.raises(forkd.SandboxPausedError, match="resume it"):
        box.commands.run("x", on_stdout=str)


def test_what_is_no_event_ends_the_stream(server, box):
    stream(server, lambda connection, first: connection.frame("nonsense"))
    with pytest.raises(forkd.StreamBrokenError, match="no event"):
        box.commands.run("x", on_stdout=str)


def test_a_refused_upgrade_has_the_code_of_the_reply(server, client):
    server.alive.add("sb1")
    box = Sandbox.connect("sb1", client=client)
    server.alive.clear()
    with pytest.raises(forkd.SandboxEndedError):
        box.commands.run("x", background=True)


def test_input_waits_for_room_in_the_window(server, box):
    received, unacknowledged = [], []

    def then(connection, first):
        started(connection, first)
        waiting = 0
        while True:
            message = connection.read_frame()
            if message[:1] != b"\x00":
                assert json.loads(message) == {"type": "stdin_eof"}
                break
            received.append(message[1:])
            waiting += len(message) - 1
            unacknowledged.append(waiting)
            if waiting >= WINDOW:
                connection.event(event="stdin_ack", bytes=waiting)
                waiting = 0
        connection.event(event="exit", exit_code=0)

    stream(server, then)
    data = bytes(range(256)) * 4096
    box.commands.run("x", stdin=data)
    assert b"".join(received) == data and max(unacknowledged) <= WINDOW
    received.clear()

    async def use(box):
        await box.commands.run("x", stdin=data)

    run_async(server, use)
    assert b"".join(received) == data


def test_output_is_reported_while_input_is_sent(server, box):
    """The command takes the rest of its input when the program has seen its output."""

    def then(connection, first):
        started(connection, first)
        size = 0
        while size < len(data):
            message = connection.read_frame()
            size += len(message) - 1
            if size == WINDOW:
                connection.frame(b"\x01so far")
                answered.append(seen.wait(20))
                connection.event(event="stdin_ack", bytes=WINDOW)
        connection.read_frame()
        connection.event(event="exit", exit_code=0)

    async def use(box):
        await box.commands.run("x", stdin=data, on_stdout=lambda text: seen.set())

    data, seen, answered = b"x" * (WINDOW + 1), threading.Event(), []
    stream(server, then)
    client = Client(server.url, timeout=30.0)
    Sandbox.connect("sb1", client=client).commands.run("x", stdin=data, on_stdout=lambda text: seen.set())
    seen.clear()

    async def main():
        async with AsyncClient(server.url, timeout=30.0) as client:
            await use(await AsyncSandbox.connect("sb1", client=client))

    asyncio.run(main())
    assert answered == [True, True]


def test_a_stream_that_is_cancelled_before_its_first_message_is_closed(server, monkeypatch):
    closed = []

    def script(request, connection):
        if not request.path.endswith("/exec/stream"):
            return False
        connection.upgrade(request)
        closed.append(connection.socket.recv(1) == b"")
        return True

    async def cancelled(self, message):
        raise asyncio.CancelledError

    def interrupted(self, message):
        raise KeyboardInterrupt

    server.alive.add("sb1")
    server.script = script
    monkeypatch.setattr("websockets.asyncio.client.ClientConnection.send", cancelled)
    monkeypatch.setattr("websockets.sync.client.ClientConnection.send", interrupted)
    with pytest.raises(asyncio.CancelledError):
        run_async(server, lambda box: box.commands.run("x", background=True))
    with pytest.raises(KeyboardInterrupt):
        Sandbox.connect("sb1", client=Client(server.url, timeout=5.0)).commands.run("x", background=True)
    end = time.monotonic() + 20
    while len(closed) < 2:
        assert time.monotonic() < end, "a connection stays"
        time.sleep(0.02)
    # The blocking one closes in the words of WebSockets.
    assert closed[0]


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_a_timeout_that_is_no_time_is_refused(server, box, timeout):
    calls = [lambda: box.commands.run("x", timeout=timeout), lambda: box.commands.run("x", timeout, on_stdout=str),
             lambda: box.eval("1", timeout), lambda: box.run_code("1", timeout), lambda: box.fork(1, timeout=timeout),
             lambda: box.set_timeout(timeout), lambda: Sandbox.create("parent", idle_timeout=timeout, client=box.client)]
    for call in calls:
        with pytest.raises(forkd.InvalidRequestError, match="above 0, or None"):
            call()

    async def use(box):
        for call in (lambda: box.commands.run("x", timeout), lambda: box.eval("1", timeout)):
            with pytest.raises(forkd.InvalidRequestError, match="above 0, or None"):
                await call()

    run_async(server, use)
    assert {request.method for request in server.requests} <= {"GET"}


def test_no_timeout_is_none_and_in_the_shape_of_e2b_also_0(server, box):
    firsts = []

    def then(connection, first):
        firsts.append(first)
        started(connection, first)
        connection.event(event="exit", exit_code=0)

    async def use(box):
        await box.commands.run("x", timeout=None)
        box = e2b.AsyncSandbox(box)
        await box.commands.run("x", timeout=0)
        await box.run_code("1", timeout=0)
        with pytest.raises(forkd.InvalidRequestError):
            await box.native.commands.run("x", timeout=0)

    stream(server, then)
    box.commands.run("x", timeout=None)
    box.eval("1", timeout=None)
    e2b.Sandbox(box).commands.run("x", timeout=0)
    e2b.Sandbox(box).run_code("1", timeout=0)
    with pytest.raises(forkd.InvalidRequestError):
        box.commands.run("x", timeout=0)
    run_async(server, use)
    assert len(firsts) == 4 and not any("timeout_secs" in first for first in firsts)
    evals = [request.json["timeout_secs"] for request in server.requests if request.path.endswith("/eval")]
    assert len(evals) == 3 and min(evals) >= 86400
    box.commands.run("x", timeout=0.2)
    assert server.requests[-1].json["timeout_secs"] == 1


def test_one_thread_reads_while_another_one_writes(server, box):
    def then(connection, first):
        started(connection, first)
        while True:
            message = connection.read_frame()
            if message[:1] != b"\x00":
                break
            connection.event(event="stdin_ack", bytes=len(message) - 1)
            connection.frame(b"\x01" + message[1:100])
        connection.event(event="exit", exit_code=0)

    stream(server, then)
    handle = box.commands.run("cat", background=True)
    pieces = []
    reader = threading.Thread(target=lambda: pieces.extend(output.data for output in handle))
    reader.start()
    for _ in range(50):
        handle.send_stdin(b"x" * 20000)
    handle.close_stdin()
    reader.join(30)
    assert not reader.is_alive() and len(pieces) >= 50


def test_signals_sizes_and_the_end_of_input_are_messages(server, box):
    messages = []

    def then(connection, first):
        started(connection, first)
        for _ in range(4):
            messages.append(json.loads(connection.read_frame()))
        connection.event(event="exit", exit_code=137, signal=9)

    stream(server, then)
    handle = box.commands.run("x", background=True, pty=(100, 30), check=False)
    handle.signal("INT")
    handle.resize(80, 24)
    handle.close_stdin()
    handle.kill()
    result = handle.wait()
    assert (result.exit_code, result.signal) == (137, 9)
    assert messages == [
        {"type": "signal", "signal": "SIGINT"},
        {"type": "resize", "cols": 80, "rows": 24},
        {"type": "stdin_eof"},
        {"type": "signal", "signal": "SIGKILL"},
    ]
    handle.kill()


def test_a_command_that_ended_is_known_also_after_its_time(server, box):
    """The program does other things until the time of the command, and of the daemon's silence, is over."""

    def then(connection, first):
        started(connection, first)
        connection.frame(b"\x01done")
        connection.event(event="exit", exit_code=0)

    async def use(box):
        handle = await box.commands.run("x", timeout=1, background=True)
        time.sleep(2.5)
        return await handle.wait()

    stream(server, then)
    handle = box.commands.run("x", timeout=1, background=True)
    time.sleep(2.5)
    assert handle.wait().stdout == "done" == run_async(server, use).stdout
