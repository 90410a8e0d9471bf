"""An agent on `forkd mcp`, end to end, over standard input and output.

The agent is the usual loop: the model names a tool and its arguments, the client calls it, the model sees the result.
The model here is a generator: what it yields is a call, and what it receives is the result.

    python agent.py [SNAPSHOT]
"""

import asyncio
import json
import os
import sys

from mcp import Client, StdioServerParameters

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
PREPARE = "import random, zlib\nrandom.seed(3)\nlines = [f'{random.randrange(100)} apples' for _ in range(1000)]\nlen(lines)"
MEASURE = "len(zlib.compress('\\n'.join({way}).encode()))"
WAYS = {"as they are": "lines", "sorted": "sorted(lines)", "reversed": "[line[::-1] for line in lines]"}


def model():
    """Prepares data in a sandbox, forks it, and tries one way in each child."""
    (source,) = yield "spawn_sandboxes", {"snapshot_tag": SNAPSHOT, "n": 1}
    yield "eval_code", {"sandbox_id": source["id"], "code": PREPARE}
    forked = yield "fork_sandbox", {"sandbox_id": source["id"], "n": len(WAYS)}
    sizes = {}
    for child, (name, way) in zip(forked["children"], WAYS.items()):
        done = yield "eval_code", {"sandbox_id": child["id"], "code": MEASURE.format(way=way)}
        sizes[name] = int(done["result"])
    for sandbox in [*forked["children"], source]:
        yield "kill_sandbox", {"sandbox_id": sandbox["id"]}
    return f"the best of three: {min(sizes, key=sizes.get)}"


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
            text = reply.content[0].text
            print(f"{name}: {text[:100]}")
            if reply.is_error:
                raise SystemExit(text)
            result = json.loads(text)


print(asyncio.run(main()))
