"""The official Python client of the Model Context Protocol against forkd: over standard input and output, and over HTTP in
both forms of the protocol. Started by mcp.rs in an environment that has nothing but the client.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import httpx2
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

URL, TOKEN, TAG = os.environ["FORKD_URL"], os.environ["FORKD_TOKEN"], os.environ["DRIVE_TAG"]
BRANCH, NONE = TAG + "-mcp-branch", TAG + "-mcp-none"
TOOLS = {
    "list_snapshots", "spawn_sandboxes", "branch_sandbox", "create_snapshot", "wait_for_text", "list_sandboxes",
    "get_sandbox", "kill_sandbox", "exec_command", "eval_code", "ping_sandbox", "fork_sandbox", "rollback_sandbox",
    "tree", "read_file", "write_file", "list_files", "run_code", "keep",
}

BEGIN = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {
    "protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "x", "version": "1"}}}).encode()


def expect(condition, *about):
    if not condition:
        raise AssertionError(about)


def rest(path, method="GET"):
    request = urllib.request.Request(URL + path, method=method, headers={"Authorization": "Bearer " + TOKEN})
    with urllib.request.urlopen(request) as reply:
        return json.loads(reply.read() or "null")


def sandboxes():
    return {sandbox["id"] for sandbox in rest("/v1/sandboxes")}


def snapshots():
    return {snapshot["tag"] for snapshot in rest("/v1/snapshots")}


class Tools:
    def __init__(self, client):
        self.client = client

    async def call(self, name, **arguments):
        """The structured content of a tool that works."""
        result = await self.client.call_tool(name, arguments)
        expect(not result.is_error, name, result.content)
        expect(result.content[0].text, name)
        return result.structured_content

    async def fails(self, name, **arguments):
        result = await self.client.call_tool(name, arguments)
        expect(result.is_error, name, result.content)
        return result.content[0].text

    async def run(self, sandbox, code):
        return (await self.call("run_code", sandbox_id=sandbox, code=code))["value"]


def stdio():
    names = ("PATH", "HOME", "FORKD_URL", "FORKD_TOKEN")
    environment = {name: os.environ[name] for name in names if name in os.environ}
    return Client(StdioServerParameters(command="forkd", args=["mcp", "--output-limit-kib", "8"], env=environment))


def http(mode, token=TOKEN, **headers):
    client = httpx2.AsyncClient(headers={"Authorization": "Bearer " + token, **headers}, timeout=120)
    return Client(streamable_http_client(URL + "/mcp", http_client=client), mode=mode)


async def work(tools):
    """Everything once; returns the sandbox that is kept."""
    spawned = (await tools.call("spawn_sandboxes", snapshot_tag=TAG))["result"]
    sandbox = spawned[0]["id"]
    expect((await tools.call("ping_sandbox", sandbox_id=sandbox))["pong"])
    expect((await tools.call("get_sandbox", sandbox_id=sandbox))["state"] == "running")

    path = "/tmp/it's a file; $(reboot)"
    await tools.call("write_file", sandbox_id=sandbox, path=path, content="first\nREADY\n")
    expect((await tools.call("wait_for_text", sandbox_id=sandbox, path=path, marker="READY"))["found"])
    never = await tools.call("wait_for_text", sandbox_id=sandbox, path="/tmp/none", marker="x", timeout_secs=0.1)
    expect(never["found"] is False and never["last_excerpt"] == "", never)
    expect((await tools.call("read_file", sandbox_id=sandbox, path=path))["content"] == "first\nREADY\n")
    listed = (await tools.call("list_files", sandbox_id=sandbox, path="/tmp"))["result"]
    expect(path in [entry["path"] for entry in listed], listed)

    long = await tools.call("exec_command", sandbox_id=sandbox, args=["seq", "-f", "line %g of a long text", "20000"])
    expect(len(long["stdout"]) < 8192 and "read_file" in long["stdout"] and long["exit_code"] == 0, long)
    expect(long["stdout"].startswith("line 1 ") and long["stdout"].endswith("line 20000 of a long text\n"), long)
    failed = await tools.call("exec_command", sandbox_id=sandbox, args=["sh", "-c", "echo no >&2; exit 3"])
    expect((failed["exit_code"], failed["stderr"]) == (3, "no\n"), failed)

    expect(await tools.run(sandbox, "plan = ['read']\nplan") == "['read']")
    branch = await tools.call("branch_sandbox", sandbox_id=sandbox, tag=BRANCH)
    expect(branch["tag"] == BRANCH and branch["status"] == "ready", branch)
    expect(await tools.run(sandbox, "plan.append('delete everything'); len(plan)") == "2")
    children = (await tools.call("fork_sandbox", sandbox_id=sandbox, n=2))["result"]
    ids = [child["id"] for child in children]
    for child in ids:
        expect((await tools.call("eval_code", sandbox_id=child, code="len(plan)"))["result_json"] == 2)
    await tools.call("rollback_sandbox", sandbox_id=sandbox, to=BRANCH)
    expect(await tools.run(sandbox, "plan") == "['read']")
    error = await tools.call("run_code", sandbox_id=sandbox, code="1 / 0")
    expect("ZeroDivisionError" in error["error"] and error["exit_code"] == 1, error)

    tree = await tools.client.call_tool("tree", {})
    expect(all(name in tree.content[0].text for name in (TAG, sandbox, BRANCH, *ids)), tree.content[0].text)
    kept, killed = ids
    expect((await tools.call("kill_sandbox", sandbox_id=killed)) == {"id": killed, "killed": True})
    await tools.call("keep", sandbox_ids=[kept])
    expect({kept, sandbox} <= {one["id"] for one in (await tools.call("list_sandboxes"))["result"]})

    text = await tools.fails("get_sandbox", sandbox_id=killed)
    expect(text.startswith("sandbox_not_found: ") and "list_sandboxes" in text, text)
    text = await tools.fails("exec_command", sandbox_id=sandbox, arguments=["true"])
    expect(text.startswith("invalid_request: "), text)
    expect((await tools.fails("create_snapshot", tag=TAG, image="python")).startswith("tag_taken: "))
    text = await tools.fails("create_snapshot", tag=NONE, image="no-such", keep=False)
    expect(text.startswith("image_not_found: "), text)
    return sandbox, kept


async def look(client, sandbox):
    uris = {str(resource.uri) for resource in (await client.list_resources()).resources}
    expect({"forkd://tree.svg", f"forkd://sandboxes/{sandbox}/console"} <= uris, uris)
    read = (await client.read_resource("forkd://tree.svg")).contents[0]
    expect(read.mime_type == "image/svg+xml" and read.text.startswith("<svg "), read)
    read = (await client.read_resource(f"forkd://sandboxes/{sandbox}/files/etc/os-release")).contents[0]
    expect("Debian" in read.text, read)
    read = (await client.read_resource(f"forkd://sandboxes/{sandbox}/files/etc")).contents[0]
    expect("/etc/os-release" in read.text, read)
    await client.read_resource(f"forkd://sandboxes/{sandbox}/console")
    expect(len((await client.list_resource_templates()).resource_templates) == 2)
    prompts = {prompt.name for prompt in (await client.list_prompts()).prompts}
    expect(prompts == {"try_three_ways", "change_with_undo"}, prompts)
    prompt = await client.get_prompt("try_three_ways", {"task": "sort a list", "sandbox_id": sandbox})
    expect("sort a list" in prompt.messages[0].content.text and sandbox in prompt.messages[0].content.text, prompt)
    for call in (client.call_tool("rm_rf", {}), client.read_resource("forkd://no/such/thing")):
        try:
            await call
            raise AssertionError("not refused")
        except MCPError:
            pass


async def over_stdio():
    async with stdio() as client:
        tools = Tools(client)
        expect({tool.name for tool in (await client.list_tools()).tools} == TOOLS)
        sandbox, kept = await work(tools)
        await look(client, sandbox)
        expect({BRANCH, NONE} <= snapshots(), snapshots())
    left = sandboxes()
    expect(kept in left and sandbox not in left and not {BRANCH, NONE} & snapshots(), left, snapshots())
    rest("/v1/sandboxes/" + kept, "DELETE")
    print("over standard input and output: the session ended what it made, and kept what it should")


async def over_http():
    async with http("legacy") as client:
        tools = Tools(client)
        sandbox = (await tools.call("spawn_sandboxes", snapshot_tag=TAG))["result"][0]["id"]
        expect(await tools.run(sandbox, "6 * 7") == "42")
        # The protocol's newer form has no sessions: requests of one token share one.
        async with http("auto") as other:
            expect(await Tools(other).run(sandbox, "7 * 7") == "49")
            expect(other.protocol_version >= "2026-07-28", other.protocol_version)
        expect(sandbox in sandboxes())
    expect(sandbox not in sandboxes())
    print("over HTTP: a session that its client deletes ends what it made")


def at_a_signal():
    """SIGTERM ends the session, and what it made."""
    server = subprocess.Popen(["forkd", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(**message):
        server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        server.stdin.flush()

    send(id=1, method="initialize", params=json.loads(BEGIN)["params"])
    server.stdout.readline()
    send(method="notifications/initialized")
    send(id=2, method="tools/call", params={"name": "spawn_sandboxes", "arguments": {"snapshot_tag": TAG}})
    sandbox = json.loads(server.stdout.readline())["result"]["structuredContent"]["result"][0]["id"]
    expect(sandbox in sandboxes())
    server.send_signal(signal.SIGTERM)
    expect(server.wait(60) == 128 + signal.SIGTERM, server.returncode)
    expect(sandbox not in sandboxes())
    print("at SIGTERM: the session ended what it made")


def raw(body, token=TOKEN, **headers):
    """The status of a request that no client would send."""
    headers = {"Content-Type": "application/json", "Accept": "application/json, text/event-stream", **headers}
    if token:
        headers["Authorization"] = "Bearer " + token
    request = urllib.request.Request(URL + "/mcp", data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status
    except urllib.error.HTTPError as error:
        expect(json.loads(error.read()), "a body")
        return error.code
    except (BrokenPipeError, ConnectionResetError, urllib.error.URLError):
        return 413


def strange():
    expect(raw(BEGIN) == 200)
    for token in (None, "wrong"):
        expect(raw(BEGIN, token=token) == 401, token)
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"Host": "evil.example"}):
        expect(raw(BEGIN, **headers) == 403, headers)
    expect(raw(BEGIN, **{"Mcp-Session-Id": "none"}) == 404)
    for body in (b"", b"{", b"[]", b"\xff", b'{"jsonrpc": "2.0"}', b"[" * 100_000):
        expect(400 <= raw(body) < 500, body[:20])
    expect(raw(b'{"x": "' + b"x" * (10 << 20) + b'"}') == 413)


def clean():
    """What a run that failed left."""
    for tag in snapshots() & {BRANCH, NONE}:
        rest("/v1/snapshots/" + tag, "DELETE")


async def main():
    clean()
    strange()
    await over_stdio()
    at_a_signal()
    await over_http()
    print("the Python client works")


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
