#!/usr/bin/env python3
"""What the Python SDK costs beside a bare HTTP call with the same body, on the same daemon, one after the other in turns.

    FORKD_URL=… FORKD_TOKEN=… python3 bench/clients/python.py --tag py [--rounds 100] [--forks 10]

It needs `forkd-sdk`, and a snapshot of an image with Python. Prints a table, and a line of JSON. A ratio above the limit is
an error.
"""

import argparse
import json
import statistics
import sys
import time

import httpx
from forkd import Client, Sandbox

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


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tag", required=True, help="the snapshot to fork from")
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
            for child in children["children"] if isinstance(children, dict) else children:
                client.delete_sandbox(child["id"] if isinstance(child, dict) else child.id)

        command = {"args": ["sh", "-c", "true"], "timeout_secs": 30}
        code = {"code": "6 * 7", "timeout_secs": 30}
        results["commands.run"] = compare(
            options.rounds, lambda: post("exec", command), lambda: box.commands.run("true"))
        results["eval"] = compare(options.rounds, lambda: post("eval", code), lambda: box.eval("6 * 7"))
        results["fork(10)"] = compare(
            options.forks, lambda: post("fork?results=each", {"n": 10}), lambda: box.fork(10), after=end)
    print(f"{'call':14} {'bare HTTP':>11} {'SDK':>11} {'ratio':>7}")
    figures = {}
    for name, (bare, sdk) in results.items():
        figures[name] = {"bare_ms": round(bare, 3), "sdk_ms": round(sdk, 3), "ratio": round(sdk / bare, 3)}
        print(f"{name:14} {bare:8.2f} ms {sdk:8.2f} ms {sdk / bare:7.2f}")
    print(json.dumps({"client": "python", "rounds": options.rounds, "forks": options.forks, "calls": figures}))
    return any(figure["ratio"] > LIMIT for figure in figures.values())


if __name__ == "__main__":
    sys.exit(main())
