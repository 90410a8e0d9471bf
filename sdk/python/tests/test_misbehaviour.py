"""A daemon that stalls, resets, answers half or refuses: an error whose text says what to do, and never a hang."""

import asyncio
import json
import socket
import threading
import time
import traceback

import pytest

import forkd
from forkd import AsyncClient, AsyncSandbox, Client, Sandbox

ERROR = {"error": "why, and what to do", "request_id": "r1"}


def both(server, call, timeout=1.0):
    """The error of a call of the client, which must be the same for asyncio, and come in time."""
    begun = time.monotonic()
    with pytest.raises(forkd.ForkdError) as first:
        call(Client(server.url, "token", timeout=timeout))

    async def again():
        async with AsyncClient(server.url, "token", timeout=timeout) as client:
            await call(client)

    with pytest.raises(forkd.ForkdError) as second:
        asyncio.run(again())
    assert type(first.value) is type(second.value)
    assert time.monotonic() - begun < 60
    return first.value


def misbehave(server, how):
    def script(request, connection):
        if request.path == "/healthz":
            return False
        how(request, connection)
        return True

    server.script = script


def test_a_daemon_that_stalls_is_a_timeout(server):
    misbehave(server, lambda request, connection: server.stopped.wait())
    error = both(server, lambda client: client.get_stats("sb1"), timeout=0.3)
    assert isinstance(error, forkd.TimeoutError) and isinstance(error, TimeoutError)
    assert "longer timeout" in error.message


def test_a_command_that_stalls_is_not_sent_again(server):
    misbehave(server, lambda request, connection: connection.reset())
    error = both(server, lambda client: client.exec_command("sb1", {"args": ["true"]}))
    assert isinstance(error, forkd.StreamBrokenError)
    assert server.count("POST", "/v1/sandboxes/sb1/exec") == 2


def test_a_new_token_whose_answer_is_lost_is_not_asked_for_again(server):
    misbehave(server, lambda request, connection: connection.reset())
    assert isinstance(both(server, lambda client: client.create_token({"name": "t"})), forkd.StreamBrokenError)
    assert [request.key for request in server.requests] == [None, None]


def test_a_read_is_sent_again_after_a_reset(server, client):
    def script(request, connection):
        if server.count("GET", "/v1/sandboxes/sb1") < 3:
            connection.reset()
            return True
        return False

    server.alive.add("sb1")
    server.script = script
    assert client.get_sandbox("sb1").id == "sb1"


def test_half_an_answer_is_a_broken_stream(server):
    misbehave(server, lambda request, connection: connection.half())
    error = both(server, lambda client: client.ping_sandbox("sb1"))
    assert isinstance(error, forkd.StreamBrokenError) and isinstance(error, ConnectionError)
    assert "try again" in error.message


def test_an_answer_that_is_no_json_names_the_address(server):
    misbehave(server, lambda request, connection: connection.reply(200, body=b"<html>"))
    assert "is this the address of forkd?" in both(server, lambda client: client.get_tree()).message


def test_an_answer_that_lacks_a_field_is_an_error(server):
    misbehave(server, lambda request, connection: connection.reply(200, {"id": "sb1"}))
    assert "SandboxInfo" in both(server, lambda client: client.get_sandbox("sb1")).message


def test_an_unknown_field_is_ignored(server, client):
    misbehave(server, lambda request, connection: connection.reply(200, {"nodes": [], "of_a_newer_daemon": {}}))
    assert client.get_tree().nodes == []


def test_no_daemon_is_an_error_that_names_the_command(server):
    server.stop()
    error = both(server, lambda client: client.version())
    assert isinstance(error, forkd.DaemonUnreachableError) and isinstance(error, ConnectionError)
    for word in ("forkd serve", "FORKD_URL", server.url):
        assert word in error.message


def test_no_daemon_at_a_unix_socket(tmp_path):
    with pytest.raises(forkd.DaemonUnreachableError, match="forkd serve"):
        Client("unix://%s/forkd.sock" % tmp_path).health()


def test_a_wrong_token_names_the_variable(server):
    misbehave(server, lambda request, connection: connection.reply(401, dict(ERROR, code="unauthorized")))
    error = both(server, lambda client: client.get_tree())
    assert isinstance(error, forkd.AuthenticationError) and "FORKD_TOKEN" in error.message
    assert (error.code, error.status, error.request_id) == ("unauthorized", 401, "r1")
    assert server.requests[0].headers["authorization"] == "Bearer token"


def test_an_unknown_code_is_a_plain_error(server):
    misbehave(server, lambda request, connection: connection.reply(409, dict(ERROR, code="of_tomorrow")))
    error = both(server, lambda client: client.get_tree())
    assert type(error) is forkd.ForkdError and error.code == "of_tomorrow" and str(error) == ERROR["error"]


def test_a_busy_daemon_is_asked_again_after_the_time_that_it_names(server, client):
    def script(request, connection):
        if len(server.requests) == 1:
            connection.reply(503, dict(ERROR, code="daemon_busy"), [("retry-after", "0.2")])
            return True
        return False

    server.script = script
    begun = time.monotonic()
    Sandbox.create("parent", client=client)
    assert time.monotonic() - begun >= 0.2
    assert len({request.key for request in server.requests}) == 1 and len(server.requests) == 2


def test_a_daemon_that_stays_busy_is_an_error_with_the_time_to_wait(server):
    reply = dict(ERROR, code="rate_limited")
    misbehave(server, lambda request, connection: connection.reply(429, reply, [("retry-after", "3600")]))
    error = both(server, lambda client: client.get_tree())
    assert isinstance(error, forkd.RateLimitError) and error.retry_after == 3600


def test_code_that_was_evaluated_is_not_sent_again(server):
    reply = dict(ERROR, code="guest_busy")
    misbehave(server, lambda request, connection: connection.reply(503, reply, [("retry-after", "0")]))
    error = both(server, lambda client: client.eval_code("sb1", {"code": "x += 1"}))
    assert isinstance(error, forkd.BusyError)
    assert server.count("POST", "/v1/sandboxes/sb1/eval") == 2


def test_a_quota_is_not_asked_again(server):
    reply = dict(ERROR, code="quota_exceeded")
    misbehave(server, lambda request, connection: connection.reply(429, reply))
    assert isinstance(both(server, lambda client: client.create_sandboxes({"snapshot_tag": "x"})), forkd.QuotaError)
    assert len(server.requests) == 2


def test_a_file_that_is_cut_in_the_middle_is_a_broken_stream(server, client, tmp_path):
    server.alive.add("sb1")
    stat = dict(group="root", mode=0o644, modified_time="", name="f", owner="root", path="/f", permissions="", size=9)

    def script(request, connection):
        if request.path.endswith("/files"):
            connection.half(b"the beginning")
            return True
        if request.path.endswith("/stat"):
            connection.reply(200, dict(stat, type="file"))
            return True
        return False

    server.script = script
    box = Sandbox.connect("sb1", client=client)
    with pytest.raises(forkd.StreamBrokenError):
        box.files.read("/f", "stream").read()
    (tmp_path / "old").write_text("as it was")
    for target in ("f", "old"):
        with pytest.raises(forkd.StreamBrokenError):
            box.files.download("/f", tmp_path / target)

    async def use():
        async with AsyncClient(server.url, timeout=5.0) as client:
            box = await AsyncSandbox.connect("sb1", client=client)
            with pytest.raises(forkd.StreamBrokenError):
                await box.files.download("/f", tmp_path / "f")

    asyncio.run(use())
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "as it was"


@pytest.mark.parametrize("reply", [b"", b'{"pong": tr', b"[]\n", b'{"of": "another kind"}\n'])
def test_an_agent_port_that_answers_half_is_an_error(reply):
    def serve():
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        target = "127.0.0.1:%d" % listener.getsockname()[1]
        with pytest.raises(forkd.ForkdError):
            Sandbox(target=target, timeout=5, spawn=False).ping()


def test_what_an_agent_port_cannot_do_is_refused():
    box = Sandbox(target="127.0.0.1:1", spawn=False)
    for word, more in (("stdin", {"stdin": "x"}), ("cwd", {"cwd": "/"}), ("envs", {"envs": {"A": "1"}}), ("user", {"user": "u"})):
        with pytest.raises(forkd.InvalidRequestError, match=word + r": use Sandbox.connect\(id\)"):
            box.commands.run("x", **more)
    with pytest.raises(forkd.InvalidRequestError, match=r"Sandbox.connect\(id\)"):
        box.files.read("/etc/passwd")
    with pytest.raises(forkd.InvalidRequestError, match=r"Sandbox.connect\(id\)"):
        box.commands.run("x", background=True)


def test_an_evaluation_at_an_agent_port_has_its_timeout():
    def serve():
        connection, _ = listener.accept()
        with connection:
            asked.append(json.loads(connection.recv(4096)))
            connection.sendall(b'{"result": "42", "exit_code": 0}\n')

    asked = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        target = "127.0.0.1:%d" % listener.getsockname()[1]
        assert Sandbox(target=target, timeout=5, spawn=False).eval("6 * 7", 90) == "42"
    assert asked == [{"action": "eval", "code": "6 * 7", "timeout": 90}]


def test_an_agent_port_that_stalls_is_a_timeout():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        target = "127.0.0.1:%d" % listener.getsockname()[1]
        with pytest.raises(forkd.TimeoutError, match=target):
            Sandbox(target=target, timeout=0.2, spawn=False).ping()
    with pytest.raises(forkd.InvalidRequestError, match="HOST:PORT"):
        Sandbox(target="nowhere", spawn=False)


def test_wait_for_daemon_ends(server):
    assert Client(server.url).wait_for_daemon(5).ok
    server.stop()
    with pytest.raises(forkd.DaemonUnreachableError):
        Client(server.url).wait_for_daemon(0.3)


@pytest.mark.parametrize("url, why", [
    ("localhost:8889", ""), ("http://host:x", "port"), ("http://[::1", "IPv6"), ("http://", ""), ("http://host:99999", "range"),
    ("http://ho\x01st", "character"), ("unix://", "")])
def test_an_address_that_is_none_is_refused_with_the_reason(url, why, monkeypatch):
    monkeypatch.setenv("FORKD_URL", url)
    for kind in (Client, AsyncClient):
        with pytest.raises(forkd.InvalidRequestError, match="give http://HOST:PORT") as refused:
            kind()
        assert why in refused.value.message


def test_the_newline_behind_a_token_is_dropped(server, monkeypatch):
    monkeypatch.setenv("FORKD_TOKEN", "  secret\n")
    monkeypatch.setenv("FORKD_URL", server.url + "\n")
    server.alive.add("sb1")
    Client().get_sandbox("sb1")
    assert server.requests[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("token", ["sec\nret", "sécret", "sec ret", "secret\x7f"])
def test_a_token_that_cannot_be_one_is_refused_and_not_shown(server, token):
    for kind in (Client, AsyncClient):
        with pytest.raises(forkd.InvalidRequestError, match="forkd token print") as refused:
            kind(server.url, token)
        shown = "".join(traceback.format_exception(type(refused.value), refused.value, None))
        assert "ret" not in shown


def test_a_client_without_time_is_refused():
    for kind in (Client, AsyncClient):
        with pytest.raises(forkd.InvalidRequestError, match="timeout"):
            kind(timeout=0)


@pytest.mark.parametrize("what", ["fork", "create"])
def test_a_fork_that_stalls_takes_some_times_the_timeout_of_the_client(server, what, monkeypatch):
    """The daemon says nothing to the first request, and to a later one that it still works."""
    monkeypatch.setattr("forkd.steps.CLEAN_UP_SECONDS", 0.5)
    monkeypatch.setattr("forkd.steps.DOUBTFUL_SECONDS", 0.5)
    server.alive.add("sb1")

    def script(request, connection):
        if request.method != "POST":
            return False
        if len([r for r in server.requests if r.key == request.key]) == 1:
            server.stopped.wait()
        connection.reply(409, dict(ERROR, code="idempotency_in_progress"))
        return True

    def use(client):
        if what == "create":
            kind = Sandbox if isinstance(client, Client) else AsyncSandbox
            return kind.create("parent", client=client)
        if isinstance(client, Client):
            return Sandbox.connect("sb1", client=client).fork(2)
        return fork(client)

    async def fork(client):
        await (await AsyncSandbox.connect("sb1", client=client)).fork(2)

    server.script = script
    error = both(server, use, timeout=0.2)
    assert isinstance(error, forkd.TimeoutError) and "longer timeout" in error.message
