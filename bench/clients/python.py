#!/usr/bin/env python3
"""What a client in Python costs beside a bare HTTP call with the same body, on the same daemon, one after the other in turns.

    FORKD_URL=… FORKD_TOKEN=… python3 bench/clients/python.py --tag py [--client sync|async|mcp] [--rounds 100] [--forks 10]

The clients are `forkd.Sandbox`, `forkd.AsyncSandbox` and `forkd mcp` over its standard input and output (the program is
looked for in PATH). It needs `forkd-sdk`, and a snapshot of an image with Python. Prints a table, and a line of JSON. A ratio
above the limit is an error.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time

import httpx
from forkd import AsyncClient, AsyncSandbox, Client, Sandbox

LIMIT = 1.3


def timed(call):
    begun = time.perf_counter()
    result = call()
    return 1000 * (time.perf_counter() - begun), result


def compare(rounds, bare, sdk, after=lambda result: None):
    """The medians of both in milliseconds. Each round begins with the other one, so that neither gets the warmer daemon."""
    times = ([], [])
    for index in range(rounds + 1):
        order = [(0, bare), (1, sdk)]
        for which, call in order if index % 2 else reversed(order):
            milliseconds, result = timed(call)
            after(result)
            # The first round opens connections.
            if index:
                times[which].append(milliseconds)
    return [statistics.median(values) for values in times]


class Sync:
    """`forkd.Sandbox`."""

    def __init__(self, client, sandbox_id):
        self.box = Sandbox.connect(sandbox_id, client=client)

    def run(self):
        self.box.commands.run("true")

    def eval(self):
        self.box.eval("6 * 7")

    def fork(self):
        return [child.id for child in self.box.fork(10)]

    def close(self):
        pass


class Async:
    """`forkd.AsyncSandbox`, one call at a time."""

    def __init__(self, client, sandbox_id):
        self.loop = asyncio.new_event_loop()
        self.client = AsyncClient(timeout=120)
        self.box = self.loop.run_until_complete(AsyncSandbox.connect(sandbox_id, client=self.client))

    def run(self):
        self.loop.run_until_complete(self.box.commands.run("true"))

    def eval(self):
        self.loop.run_until_complete(self.box.eval("6 * 7"))

    def fork(self):
        return [child.id for child in self.loop.run_until_complete(self.box.fork(10))]

    def close(self):
        self.loop.run_until_complete(self.client.close())
        self.loop.close()


class Mcp:
    """`forkd mcp`: a line of JSON for each message."""

    def __init__(self, client, sandbox_id):
        self.id, self.number = sandbox_id, 0
        self.server = subprocess.Popen(["forkd", "mcp"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hello = {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": {"name": "bench", "version": "0"}}
        self.ask("initialize", hello)
        self.send({"method": "notifications/initialized"})

    def send(self, message):
        self.server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self.server.stdin.flush()

    def ask(self, method, params):
        self.number += 1
        self.send({"id": self.number, "method": method, "params": params})
        while True:
            reply = json.loads(self.server.stdout.readline())
            if reply.get("id") == self.number:
                return reply["result"]

    def call(self, tool, arguments):
        result = self.ask("tools/call", {"name": tool, "arguments": {"sandbox_id": self.id, **arguments}})
        if result.get("isError"):
            sys.exit(f"{tool}: {result}")
        return result["structuredContent"]

    def run(self):
        self.call("exec_command", {"args": ["sh", "-c", "true"]})

    def eval(self):
        self.call("eval_code", {"code": "6 * 7"})

    def fork(self):
        made = self.call("fork_sandbox", {"n": 10})
        return [child["id"] for child in made["result"]]

    def close(self):
        self.server.stdin.close()
        self.server.wait()


CLIENTS = {"sync": Sync, "async": Async, "mcp": Mcp}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", required=True, help="the snapshot to fork from")
    parser.add_argument("--client", choices=CLIENTS, default="sync", help="what is measured")
    parser.add_argument("--rounds", type=int, default=100, help="rounds of commands and evaluations")
    parser.add_argument("--forks", type=int, default=10, help="rounds of fork(10)")
    options = parser.parse_args()
    client = Client(timeout=120)
    address = client.address
    http = httpx.Client(base_url=address.base, headers=address.headers, timeout=120, trust_env=False)
    results = {}
    with Sandbox.create(options.tag, client=client) as box:

        def post(path, body):
            reply = http.post(f"/v1/sandboxes/{box.id}/{path}", json=body)
            reply.raise_for_status()
            return reply.json()

        def end(children):
            for child in children:
                client.delete_sandbox(child)

        command = {"args": ["sh", "-c", "true"], "timeout_secs": 30}
        code = {"code": "6 * 7", "timeout_secs": 30}
        measured = CLIENTS[options.client](client, box.id)
        results["command"] = compare(options.rounds, lambda: post("exec", command), measured.run)
        results["eval"] = compare(options.rounds, lambda: post("eval", code), measured.eval)

        def bare_fork():
            return [child["id"] for child in post("fork?results=each", {"n": 10})["children"]]

        results["fork(10)"] = compare(options.forks, bare_fork, measured.fork, after=end)
        measured.close()
    print(f"{'call':14} {'bare HTTP':>11} {options.client:>11} {'ratio':>7}")
    figures = {}
    for name, (bare, sdk) in results.items():
        figures[name] = {"bare_ms": round(bare, 3), "client_ms": round(sdk, 3), "ratio": round(sdk / bare, 3)}
        print(f"{name:14} {bare:8.2f} ms {sdk:8.2f} ms {sdk / bare:7.2f}")
    print(json.dumps({"client": options.client, "rounds": options.rounds, "forks": options.forks, "calls": figures}))
    return any(figure["ratio"] > LIMIT for figure in figures.values())


if __name__ == "__main__":
    sys.exit(main())
