"""The code interpreter's server with a kernel that is a coroutine of the test: HTTP, contexts and bounds.

    python3 -m unittest discover crates/forkd-image/tests/code_interpreter
"""

import asyncio
import json
import os
import pathlib
import sys
import tempfile
import unittest
from unittest import mock

SOURCE = pathlib.Path(__file__).parents[2] / "src" / "code_interpreter"
sys.path.insert(0, str(SOURCE))

from forkd_code_interpreter import contexts, events, guest, http, languages, server  # noqa: E402

DEADLINE = 30


class FakeKernel:
    """Runs `say TEXT`, `flood N`, `wait`, `wait-deaf`, `die`, `fail` and prints variables with `print NAME`."""

    started = []

    def __init__(self, language, cwd, environment):
        self.language, self.cwd = language, cwd
        self.variables = dict(environment)
        self.died = asyncio.Event()
        self.interrupted = asyncio.Event()
        self.stopped = False
        self.running = self.most = 0
        self.codes = []
        FakeKernel.started.append(self)

    async def execute(self, code, deliver=lambda kind, content: None, silent=False):
        self.codes.append(code)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            word, _, rest = code.partition(" ")
            if word == "set":
                self.variables.update(json.loads(rest))
            elif word == "say":
                await asyncio.sleep(0)
                deliver("stream", {"name": "stdout", "text": rest})
            elif word == "print":
                deliver("execute_result", {"data": {"text/plain": repr(self.variables.get(rest))}})
            elif word == "flood":
                for _ in range(int(rest)):
                    while self.stopped:
                        await asyncio.sleep(0.01)
                    deliver("stream", {"name": "stdout", "text": "x" * (1 << 20)})
                    await asyncio.sleep(0)
            elif word == "fail":
                deliver("error", {"ename": "E", "evalue": "v", "traceback": ["a", "b"]})
            elif word == "wait":
                await self.interrupted.wait()
                self.interrupted.clear()
            elif word == "die":
                self.died.set()
                return None
            return {"status": "ok"}
        finally:
            self.running -= 1

    async def interrupt(self, running):
        self.go_on()
        self.interrupted.set()
        await asyncio.wait({running})
        return True

    def stop(self):
        self.stopped = True

    def go_on(self):
        self.stopped = False

    async def end(self):
        self.died.set()
        self.interrupted.set()


class FakeLanguage(languages.Language):
    def __init__(self, name):
        self.name = name

    def is_installed(self):
        return True

    def export(self, variables):
        return "set " + json.dumps(variables)

    enter = export

    def leave(self, variables):
        return "set " + json.dumps(dict.fromkeys(variables, "old"))

    def forked(self, variables):
        return "set " + json.dumps({**variables, "FORKED": "yes"})


async def start_kernel(language, cwd, environment):
    return FakeKernel(language, cwd, environment)


class Client:
    """One connection to the server."""

    def __init__(self, port):
        self.port = port

    async def open(self):
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
        return self

    async def send(self, method, path, body=None, raw=None):
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        head = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n"
        self.writer.write(head.encode() + data)
        await self.writer.drain()

    async def head(self):
        text = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        lines = text.split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), headers

    async def answer(self):
        status, headers = await self.head()
        body = await self.reader.readexactly(int(headers.get("content-length", 0)))
        return status, json.loads(body) if headers.get("content-type") == "application/json" else body.decode()

    async def ask(self, method, path, body=None):
        await self.send(method, path, body)
        return await self.answer()

    async def events(self):
        """The events as they come, to the end."""
        buffered = b""
        while True:
            size = int(await self.reader.readline(), 16)
            buffered += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
            *lines, buffered = buffered.split(b"\n")
            for line in lines:
                yield json.loads(line)
            if size == 0:
                return

    async def execute(self, code, **more):
        await self.send("POST", "/execute", {"code": code, **more})
        status, headers = await self.head()
        if status != 200:
            return status
        return [event async for event in self.events()]

    def close(self):
        self.writer.close()


class ServerTest(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self):
        FakeKernel.started = []
        self.boot_id, self.variables = "one", {}
        patches = [
            mock.patch.object(guest, "boot_id", lambda: self.boot_id),
            mock.patch.object(guest, "variables", lambda: self.variables),
            mock.patch.object(guest, "environment", lambda: {"SANDBOX": "set"}),
        ]
        for patch in patches:
            patch.start()
            self.addCleanup(patch.stop)
        names = {name: FakeLanguage(name) for name in ("python", "bash")}
        self.contexts = contexts.Contexts(names, start_kernel, home="/")
        self.interpreter = server.CodeInterpreter(self.contexts, keepalive_seconds=0.05)
        self.server = await http.Server(self.interpreter.handle).listen("127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def asyncTearDown(self):
        self.server.close()

    async def client(self):
        client = await Client(self.port).open()
        self.addCleanup(client.close)
        return client

    async def execute(self, code, **more):
        return await asyncio.wait_for((await self.client()).execute(code, **more), DEADLINE)

    async def until(self, condition):
        for _ in range(DEADLINE * 100):
            if condition():
                return
            await asyncio.sleep(0.01)
        self.fail("it did not happen in time")

    async def test_an_execution_is_a_line_for_each_event_and_ends(self):
        kinds = [event["type"] for event in await self.execute("say hello") if event["type"] != "keepalive"]
        self.assertEqual(kinds, ["number_of_executions", "stdout", "end_of_execution"])
        count, stdout, _ = await self.execute("say hello")
        self.assertEqual((count["execution_count"], stdout["text"]), (2, "hello"))
        self.assertIsInstance(stdout["timestamp"], int)

    async def test_an_exception_has_a_name_a_value_and_a_traceback(self):
        error = (await self.execute("fail"))[1]
        self.assertEqual(error, {"type": "error", "name": "E", "value": "v", "traceback": "a\nb"})

    async def test_contexts_are_made_listed_restarted_and_removed(self):
        client = await self.client()
        status, made = await client.ask("POST", "/contexts", {"language": "bash", "cwd": "/tmp"})
        self.assertEqual((status, made["language"], made["cwd"]), (200, "bash", "/tmp"))
        _, listed = await client.ask("GET", "/contexts")
        self.assertIn(made, listed)
        self.assertEqual(FakeKernel.started[0].cwd, "/tmp")
        path = "/contexts/" + made["id"]
        self.assertEqual((await client.ask("POST", path + "/restart"))[0], 200)
        self.assertTrue(FakeKernel.started[0].died.is_set())
        self.assertEqual(len(FakeKernel.started), 2)
        self.assertEqual((await client.ask("DELETE", path))[0], 204)
        self.assertEqual((await client.ask("DELETE", path))[0], 404)
        self.assertEqual(await self.execute("say x", context_id=made["id"]), 404)

    async def test_wrong_requests_are_answered_and_the_server_goes_on(self):
        client = await self.client()
        for method, path, body, expected in [
            ("POST", "/execute", {}, 400),
            ("POST", "/execute", {"code": 1}, 400),
            ("POST", "/execute", {"code": "x", "language": "r"}, 400),
            ("POST", "/execute", {"code": "x", "language": "nonsense"}, 400),
            ("POST", "/execute", {"code": "x", "env_vars": {"A B": "1"}}, 400),
            ("POST", "/execute", {"code": "x", "context_id": "x"}, 404),
            ("POST", "/execute", {"code": "x", "context_id": "x", "language": "bash"}, 400),
            ("POST", "/contexts", {"cwd": "/nonexistent"}, 400),
            ("GET", "/execute", None, 405),
            ("GET", "/", None, 404),
            ("GET", "/health", None, 200),
        ]:
            status, text = await client.ask(method, path, body)
            self.assertEqual(status, expected, (path, body, text))
        _, text = await client.ask("POST", "/execute", {"code": "x", "language": "r"})
        self.assertIn("python, bash", text)
        for raw in (b"{", b"[]", b"\xff"):
            await client.send("POST", "/execute", raw=raw)
            self.assertEqual((await client.answer())[0], 400)

    async def test_what_is_no_http_ends_the_connection_only(self):
        for raw in (b"\r\n\r\n", b"GET / SPDY/3\r\n\r\n", b"x" * (http.MAX_HEAD + 10) + b"\r\n\r\n",
                    b"POST /execute HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                    b"POST /execute HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n"):  # fmt: skip
            client = await self.client()
            client.writer.write(raw)
            status, _ = await asyncio.wait_for(client.head(), DEADLINE)
            self.assertGreaterEqual(status, 400)
        self.assertEqual((await (await self.client()).ask("GET", "/health"))[0], 200)

    async def test_a_body_in_chunks_is_read(self):
        client = await self.client()
        client.writer.write(
            b"POST /contexts HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"8\r\n{\"langua\r\n9\r\nge\":\"js\"}\r\n0\r\n\r\n"
        )
        status, text = await client.answer()
        self.assertEqual((status, "javascript" in text), (400, True))

    async def test_executions_in_one_context_wait_for_each_other(self):
        results = await asyncio.gather(*(self.execute(f"say {number}") for number in range(8)))
        self.assertEqual(len(results), 8)
        self.assertEqual([kernel.most for kernel in FakeKernel.started], [1])

    async def test_contexts_do_not_wait_for_each_other(self):
        waiting = await self.client()
        await waiting.send("POST", "/execute", {"code": "wait"})
        await self.until(lambda: FakeKernel.started and FakeKernel.started[0].running)
        await self.execute("say x", language="bash")
        self.assertEqual(FakeKernel.started[0].running, 1)

    async def test_a_client_that_leaves_interrupts_its_execution_and_no_other(self):
        first, second = await self.client(), await self.client()
        await first.send("POST", "/execute", {"code": "wait"})
        await self.until(lambda: FakeKernel.started and "wait" in FakeKernel.started[0].codes)
        await second.send("POST", "/execute", {"code": "say never"})
        await self.until(lambda: self.contexts.default("python").waiting == 1)
        second.close()
        first.close()
        result = await self.execute("say next")
        self.assertEqual([event["text"] for event in result if event["type"] == "stdout"], ["next"])
        self.assertNotIn("say never", FakeKernel.started[0].codes)

    async def test_a_silent_execution_shows_signs_of_life(self):
        client = await self.client()
        await client.send("POST", "/execute", {"code": "wait"})
        await client.head()
        kinds = []
        async for event in client.events():
            kinds.append(event["type"])
            if kinds.count("keepalive") == 2:
                FakeKernel.started[0].interrupted.set()
        self.assertEqual(kinds[-1], "end_of_execution")

    async def test_a_kernel_that_dies_is_reported_and_replaced(self):
        self.assertEqual((await self.execute("die"))[-1], {"type": "unexpected_end_of_execution"})
        self.assertEqual((await self.execute("say x"))[0]["execution_count"], 1)
        self.assertEqual(len(FakeKernel.started), 2)

    async def test_a_kernel_that_dies_while_variables_are_set_is_reported(self):
        for place in ("enter", "leave"):
            with mock.patch.object(FakeLanguage, place, lambda self, variables: "die"):
                events = await self.execute("say hello", env_vars={"A": "1"})
            self.assertEqual(events[-1], {"type": "unexpected_end_of_execution"}, place)
            said = [event for event in events if event["type"] == "stdout"]
            self.assertEqual(len(said), 1 if place == "leave" else 0)

    async def test_a_kernel_that_dies_while_it_is_prepared_is_reported_and_ended(self):
        with mock.patch.object(FakeLanguage, "prepare", lambda self: "die"):
            self.assertEqual(await self.execute("say hello"), [{"type": "unexpected_end_of_execution"}])
            status, _ = await (await self.client()).ask("POST", "/contexts", {})
            self.assertEqual(status, 500)
        self.assertEqual((await self.execute("say hello"))[1]["text"], "hello")

    async def test_a_connection_that_a_restart_closed_is_no_success(self):
        async def closed(kernel, code, deliver=None, silent=False):
            raise AttributeError("the connection is closed")

        with mock.patch.object(FakeKernel, "execute", closed), mock.patch("sys.stderr"):
            self.assertEqual((await self.execute("say hello"))[-1], {"type": "unexpected_end_of_execution"})

    async def test_a_flood_stops_the_kernel_until_the_client_reads_on(self):
        client = await self.client()
        await client.send("POST", "/execute", {"code": "flood 64"})
        # It is stopped now and then while the sockets fill, and for good when they are full: the client reads nothing.
        looks = 0

        def is_stopped_for_good():
            nonlocal looks
            looks = looks + 1 if FakeKernel.started and FakeKernel.started[0].stopped else 0
            return looks == 50

        await self.until(is_stopped_for_good)
        await client.head()
        size = 0
        async for event in client.events():
            size += len(event.get("text", ""))
        self.assertEqual(size, 64 << 20)

    async def test_a_client_that_leaves_in_a_flood_leaves_a_kernel_that_goes_on(self):
        client = await self.client()
        await client.send("POST", "/execute", {"code": "flood 1000"})
        await self.until(lambda: FakeKernel.started and FakeKernel.started[0].stopped)
        client.close()
        await self.until(lambda: not FakeKernel.started[0].stopped)

    async def test_variables_of_an_execution_are_for_it_alone(self):
        result = await self.execute("print A", env_vars={"A": "1"})
        self.assertEqual([event["text"] for event in result if event["type"] == "result"], ["1"])
        result = await self.execute("print A")
        self.assertEqual([event["text"] for event in result if event["type"] == "result"], ["old"])

    async def test_a_forked_guest_has_other_variables_before_the_first_execution(self):
        await self.execute("print A")
        self.boot_id, self.variables = "two", {"A": "sandbox"}
        for name, value in (("A", "sandbox"), ("FORKED", "yes")):
            result = await self.execute("print " + name)
            self.assertEqual([event["text"] for event in result if event["type"] == "result"], [value])
        self.assertEqual(sum("FORKED" in code and "set" in code for code in FakeKernel.started[0].codes), 1)

    async def test_the_number_of_contexts_has_a_bound(self):
        with mock.patch.object(contexts, "MAX_CONTEXTS", len(self.contexts.by_id) + 1):
            client = await self.client()
            self.assertEqual((await client.ask("POST", "/contexts", {}))[0], 200)
            self.assertEqual((await client.ask("POST", "/contexts", {}))[0], 429)

    async def test_ids_come_from_the_systems_random_numbers(self):
        with mock.patch("os.urandom", side_effect=lambda count: bytes(count)):
            first = contexts.Context(FakeLanguage("python"), "/", start_kernel).id
            self.assertEqual(first, contexts.Context(FakeLanguage("python"), "/", start_kernel).id)


class StartTest(unittest.IsolatedAsyncioTestCase):
    async def started(self, ready_early, start_kernel):
        """The server's task, and its context of Python, when a kernel is being started."""
        made = []

        def contexts_of(found, home):
            made.append(contexts.Contexts(found, start_kernel, home))
            return made[0]

        reader, writer = os.pipe()
        self.addCleanup(os.close, reader)
        os.set_blocking(reader, False)
        names = {"python": FakeLanguage("python")}
        for patch in (
            mock.patch.object(server, "Contexts", contexts_of),
            mock.patch.object(server.languages, "installed", lambda: names),
            mock.patch.object(guest, "environment", dict),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        task = asyncio.create_task(server.run("127.0.0.1", 0, writer, ready_early))
        self.addCleanup(task.cancel)
        return task, reader, made

    def is_ready(self, reader):
        try:
            return os.read(reader, 1) == b"1"
        except BlockingIOError:
            return False

    async def until(self, condition):
        for _ in range(DEADLINE * 100):
            if condition():
                return
            await asyncio.sleep(0.01)
        self.fail("it did not happen in time")

    async def test_a_warm_up_is_ready_when_its_kernel_is(self):
        begun, go = asyncio.Event(), asyncio.Event()

        async def slow(language, cwd, environment):
            begun.set()
            await go.wait()
            return FakeKernel(language, cwd, environment)

        _, reader, _ = await self.started(False, slow)
        await asyncio.wait_for(begun.wait(), DEADLINE)
        self.assertFalse(self.is_ready(reader))
        go.set()
        await self.until(lambda: self.is_ready(reader))

    async def test_in_a_sandbox_that_boots_it_takes_requests_before_its_kernel_is_warm(self):
        go, started = asyncio.Event(), 0

        async def slow(language, cwd, environment):
            nonlocal started
            started += 1
            await go.wait()
            return FakeKernel(language, cwd, environment)

        _, reader, made = await self.started(True, slow)
        await self.until(lambda: self.is_ready(reader))
        execution = contexts.Execution("say hello", {})
        running = asyncio.create_task(made[0].default("python").execute(execution))
        await self.until(lambda: started)
        self.assertFalse(running.done())
        go.set()
        await asyncio.wait_for(running, DEADLINE)
        self.assertIn(b"hello", execution.output.take())
        self.assertEqual(started, 1, "the execution waited for the kernel that was being started")

    async def test_there_a_kernel_that_cannot_be_started_ends_no_server(self):
        attempts = []

        async def broken(language, cwd, environment):
            attempts.append(cwd)
            if len(attempts) == 1:
                raise contexts.Failed("out of memory")
            return FakeKernel(language, cwd, environment)

        with mock.patch("sys.stderr"):
            task, reader, made = await self.started(True, broken)
            await self.until(lambda: attempts)
        execution = contexts.Execution("say hello", {})
        await asyncio.wait_for(made[0].default("python").execute(execution), DEADLINE)
        self.assertIn(b"hello", execution.output.take())
        self.assertFalse(task.done())

    def test_the_program_that_starts_it_leaves_its_variables_for_kernels(self):
        program, space = (SOURCE / "forkd-code-interpreter").read_text(), {}
        exec(program.removesuffix("\nmain()\n"), space)
        with tempfile.TemporaryDirectory() as folder:
            path = space["VARIABLES"] = os.path.join(folder, "run", "variables")
            given = {"SHARED": "a\nb", "HOME": "/root", "FORKD_READY_FILE": "x", "FORKD_READY_WHEN": "usable"}
            with mock.patch.dict(os.environ, given, clear=True), mock.patch.object(os, "getuid", lambda: 1000):
                space["make_variables"]()
            with mock.patch.object(guest, "VARIABLES", path):
                self.assertEqual(guest.variables(), {"SHARED": "a\nb"})
            self.assertEqual(os.stat(path).st_mode & 0o777, 0o600)


class EventsTest(unittest.TestCase):
    def test_every_kind_of_result_has_its_field_and_others_are_extra(self):
        data = {mime: "x" for mime in events.FIELDS}
        event = events.result({**data, "application/x-own": 1}, True)
        self.assertEqual(set(event), {"type", "is_main_result", "extra", *events.FIELDS.values()})
        self.assertEqual(event["extra"], {"application/x-own": 1})

    def test_a_string_has_no_quotes_and_lists_of_lines_are_joined(self):
        self.assertEqual(events.result({"text/plain": "'a b'"}, True)["text"], "a b")
        self.assertEqual(events.result({"text/plain": "'"}, True)["text"], "'")
        self.assertEqual(events.result({"image/svg+xml": ["<svg>", "</svg>"]}, False)["svg"], "<svg></svg>")
        self.assertEqual(events.result({"application/json": ["a"]}, False)["json"], ["a"])

    def test_a_long_text_is_sent_in_pieces_and_one_without_end_is_cut_with_a_notice(self):
        with mock.patch.object(events, "MAX_TEXT", 25), mock.patch.object(events, "PIECE", 10):
            found = list(events.stream("stdout", "x" * 30))
        self.assertEqual([len(event["text"]) for event in found[:3]], [10, 10, 5])
        self.assertEqual(found[3]["type"], "stderr")
        self.assertIn("5 characters", found[3]["text"])


class GuestTest(unittest.TestCase):
    def test_only_variables_of_the_sandbox_are_taken_from_the_hook(self):
        import tempfile

        with tempfile.NamedTemporaryFile() as file, mock.patch.object(guest, "VARIABLES", file.name):
            file.write("PATH=/x\0HOME=/root\0A=1\nB=2\0bad name=3\0EMPTY=\0".encode())
            file.flush()
            self.assertEqual(guest.variables(), {"A": "1\nB=2", "EMPTY": ""})
        self.assertEqual(guest.variables(), {})


class LanguagesTest(unittest.TestCase):
    def test_bash_gets_its_variables_back(self):
        import subprocess

        bash, values = languages.Bash(), {"A": "it's $HOME\n2", "B": "b"}
        script = "\n".join(["B=before", bash.enter(values), 'printf "%s|%s" "$A" "$B"', bash.leave(values),
                            'printf "|%s|%s" "${A-unset}" "$B"'])  # fmt: skip
        run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
        self.assertEqual(run.stdout, "it's $HOME\n2|b|unset|before")


if __name__ == "__main__":
    unittest.main()
