"""An agent on `forkd mcp`, end to end, over standard input and output.

The agent is the usual loop: the model names a tool and its arguments, the client calls it, the model sees the result.
The model here is a generator: what it yields is a call, and what it receives is the result.

    python agent.py [SNAPSHOT]
"""

import asyncio
import os
import sys

from mcp import Client, StdioServerParameters

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
PREPARE = "import random, zlib\nrandom.seed(3)\nlines = [f'{random.randrange(100)} apples' for _ in range(1000)]\nlen(lines)"
MEASURE = "len(zlib.compress('\\n'.join({way}).encode()))"
WAYS = {"as they are": "lines", "sorted": "sorted(lines)", "reversed": "[line[::-1] for line in lines]"}


def model():
    """Prepares data in a sandbox, branches it, tries one way in each of three children, and rolls back at the end."""
    (source,) = (yield "spawn_sandboxes", {"snapshot_tag": SNAPSHOT, "n": 1})["result"]
    in_source = {"sandbox_id": source["id"]}
    yield "eval_code", {**in_source, "code": PREPARE}
    branch = yield "branch_sandbox", in_source
    children = (yield "fork_sandbox", {**in_source, "n": len(WAYS)})["result"]
    sizes = {}
    for child, (name, way) in zip(children, WAYS.items()):
        done = yield "eval_code", {"sandbox_id": child["id"], "code": MEASURE.format(way=way), "timeout_secs": 120}
        sizes[name] = int(done["result"])
        yield "kill_sandbox", {"sandbox_id": child["id"]}
    yield "eval_code", {**in_source, "code": "lines.clear()"}
    yield "rollback_sandbox", {**in_source, "to": branch["tag"]}
    left = yield "eval_code", {**in_source, "code": "len(lines)"}
    best = min(sizes, key=sizes.get)
    return f"the best of three: {best}; lines after the rollback: {left['result']}"


async def main():
    server = StdioServerParameters(command="forkd", args=["mcp"], env=dict(os.environ))
    async with Client(server) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        print(len(tools), "tools")
        turns = model()
        result = None
        while True:
            try:
                name, arguments = turns.send(result)
            except StopIteration as end:
                return end.value
            if name not in tools:
                raise SystemExit(f"forkd mcp has no tool {name}: it has {', '.join(sorted(tools))}")
            reply = await client.call_tool(name, arguments)
            print(f"{name}: {reply.content[0].text[:100]}")
            if reply.is_error:
                raise SystemExit(reply.content[0].text)
            result = reply.structured_content


print(asyncio.run(main()))
