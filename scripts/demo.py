#!/usr/bin/env python3
"""The main job, with times: warm one Linux guest, fork children from it, show that each is its own; branch
one in the middle of a computation, send children of that moment different ways, show the tree.

Expects `make build` to have run. Needs nothing but the standard library.
"""

import json
import os
import pathlib
import subprocess
import sys
import time

FORKD = str(pathlib.Path(__file__).resolve().parent.parent / "target/release/forkd")
CHILDREN = 10
# A name of its own: the user may have a snapshot called `demo`.
TAG = f"demo-{os.getpid()}"
BRANCH = f"{TAG}-midway"

# Runs in the parent, once. Both generators are used, so that every child inherits them in a state that
# would give all of them the same next number.
WARM = """
import glob, os, random, socket
import numpy
inherited = numpy.arange(1_000_000)
random.random(), numpy.random.random()
"""

# Runs in every child, before the demo looks at any.
WRITE = """
me = open('/run/forkd/sandbox-id').read().strip()
open(f'/root/written-by-{me}', 'w').write(me)
"""

# Runs in every child after all have written.
LOOK = """
dict(
    id=me,
    hostname=socket.gethostname(),
    random=random.random(),
    numpy=float(numpy.random.random()),
    urandom=os.urandom(4).hex(),
    file=' '.join(open(path).read() for path in glob.glob('/root/written-by-*')),
    inherited=int(inherited.sum()),
)
"""

# Runs in the sandbox that is branched: a computation that goes on by itself, and notes its longest gap. The
# demo changes `keep`, the decision what to collect, while it runs.
COMPUTE = """
import threading, time

def is_prime(n):
    return n > 1 and all(n % d for d in range(2, int(n ** 0.5) + 1))

keep, found, reached, gap = is_prime, [], 0, 0.0
token = os.urandom(4).hex()

def compute():
    global reached, gap
    last = time.monotonic()
    while True:
        for n in range(reached, reached + 20):
            if keep(n):
                found.append(n)
        reached += 20
        # Other guests need the CPU too.
        time.sleep(0.01)
        now = time.monotonic()
        gap, last = max(gap, now - last), now

threading.Thread(target=compute, daemon=True).start()
"""

PROGRESS = "dict(reached=reached, found=len(found), gap_ms=gap * 1000, token=token)"

# The same state, another decision in each child.
DECISIONS = {
    "keep palindromes": "lambda n: str(n) == str(n)[::-1]",
    "keep squares": "lambda n: int(n ** 0.5) ** 2 == n",
    "keep multiples of 1000": "lambda n: n % 1000 == 0",
}

# Steers a child: it has all finds until now from its parent.
STEER = """
keep = {decision}
inherited = len(found)
began = reached
"""

STEERED = "dict(token=token, began=began, inherited=inherited, first=found[:3], since=found[inherited:][:3])"

steps = []


def step(name, action):
    """Runs action, prints how long it took, and returns its result."""
    print(f"\n\033[1m{name}\033[0m" if sys.stdout.isatty() else f"\n{name}", flush=True)
    start = time.monotonic()
    result = action()
    seconds = time.monotonic() - start
    steps.append((name, seconds))
    print(f"  -> {seconds:.2f} s", flush=True)
    return result


def forkd(*args):
    """Runs forkd with its progress and errors on the terminal; returns its output."""
    done = subprocess.run([FORKD, *args], text=True, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nforkd {args[0]} failed with status {done.returncode}")
    return done.stdout


def in_each(children, code):
    """Evaluates code in every child, one after the other, and prints its progress."""
    answers = []
    for number, child in enumerate(children, start=1):
        answers.append(json.loads(forkd("eval", child, "--json", "--", code))["result_json"])
        if sys.stdout.isatty():
            print(f"\r  {number} of {len(children)}", end="\n" if number == len(children) else "", flush=True)
    return answers


def table(rows):
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def show(forked, answers):
    """Prints each child's answer; exits with an error if two children are the same anywhere."""
    rows = [("CHILD", "ANSWERED", "HOSTNAME", "RANDOM", "NUMPY.RANDOM", "URANDOM", "FILES IT SEES")]
    for child, answer in zip(forked["children"], answers):
        rows.append((child["id"], f"{child['ready_ms']:.1f} ms", answer["hostname"], f"{answer['random']:.6f}",
                     f"{answer['numpy']:.6f}", answer["urandom"], answer["file"]))
    print()
    table(rows)
    for child, answer in zip(forked["children"], answers):
        if answer["id"] != child["id"]:
            sys.exit(f"{child['id']} has the identity of {answer['id']}")
        if answer["file"] != child["id"]:
            sys.exit(f"{child['id']} does not see its own file alone, but: {answer['file']}")
    for what in ("hostname", "random", "numpy", "urandom"):
        if len({answer[what] for answer in answers}) != len(answers):
            sys.exit(f"two children have the same {what}")
    if len({answer["inherited"] for answer in answers}) != 1:
        sys.exit("the children do not agree on what they inherited")
    print("\n  All differ, each sees only the file it wrote, and all share the parent's million numbers.")


def branch_midway():
    """Branches a sandbox that computes, steers three children of it differently, shows the tree."""
    # The children of the first part are done.
    forkd("kill", "--tag", TAG)
    parent = forkd("spawn", "--tag", TAG).strip()
    step(f"Start a computation in {parent}", lambda: forkd("eval", parent, "--", COMPUTE))
    before = in_each([parent], PROGRESS)[0]
    branch = step("Branch it while it computes", lambda: json.loads(forkd(
        "branch", parent, "--tag", BRANCH, "--json")))
    after = in_each([parent], PROGRESS)[0]
    frozen = f"{branch['frozen_ms']:.1f} ms" if branch.get("quiesced") else "not at all"
    print(f"  vCPUs stood still for {branch['pause_ms']:.1f} ms, processes {frozen}; "
          f"{branch['bytes_written'] / 2**20:.1f} MiB written")
    print(f"  before the branch the computation had reached {before['reached']}, now {after['reached']}; "
          f"its longest gap was {after['gap_ms']:.0f} ms")
    if after["reached"] <= before["reached"]:
        sys.exit("the parent has stopped computing")

    forked = step("Fork three children of that moment, and give each another decision", lambda: json.loads(forkd(
        "fork", "--tag", BRANCH, "-n", str(len(DECISIONS)), "--json")))
    children = [child["id"] for child in forked["children"]]
    for child, decision in zip(children, DECISIONS.values()):
        forkd("eval", child, "--", STEER.format(decision=decision))
    answers = step("Wait for three finds of each", lambda: [until_found(child) for child in children])
    rows = [("CHILD", "DECISION", "TOKEN", "FOUND UNTIL THEN", "WENT ON FROM", "FOUND SINCE")]
    for child, decision, answer in zip(children, DECISIONS, answers):
        rows.append((child, decision, answer["token"], f"{answer['inherited']} primes", str(answer["began"]),
                     " ".join(map(str, answer["since"]))))
    print()
    table(rows)
    if any(answer["token"] != before["token"] or answer["first"] != [2, 3, 5] for answer in answers):
        sys.exit("a child does not have its parent's state")
    if any(answer["began"] < before["reached"] for answer in answers):
        sys.exit("a child started before the branch")
    if len({tuple(answer["since"]) for answer in answers}) != len(answers):
        sys.exit("two children found the same")
    if in_each([parent], PROGRESS)[0]["reached"] <= after["reached"]:
        sys.exit("the parent has stopped computing")
    print("\n  One state, three ways on; and the parent still computes.")
    print("\n" + forkd("tree"), end="")


def until_found(child):
    """The answer of a child once it has found three numbers by its own decision."""
    deadline = time.monotonic() + 120
    while True:
        answer = in_each([child], STEERED)[0]
        if len(answer["since"]) == 3 or time.monotonic() > deadline:
            return answer
        time.sleep(0.5)


def main():
    checks = json.loads(subprocess.run([FORKD, "doctor", "--json"], text=True, stdout=subprocess.PIPE).stdout)
    kvm = next(check for check in checks["checks"] if check["name"] == "kvm")
    where = "this host's KVM" if checks["will_use"] == "kvm" else "the emulated machine (slow, but real KVM inside)"
    print(f"KVM: {kvm['detail']}\nGuests run on {where}.")

    if not any(image["name"] == "python" for image in json.loads(forkd("image", "ls", "--json"))):
        step("Build the python image, once", lambda: forkd("image", "build", "python"))
    step("Start the daemon, if none runs", lambda: forkd("ls"))
    try:
        step("Warm a parent: boot Linux, start Python, import numpy, keep it", lambda: forkd(
            "snapshot", "--tag", TAG, "--image", "python", "--warm-python", WARM))
        forked = step(f"Fork {CHILDREN} children from it", lambda: json.loads(forkd(
            "fork", "--tag", TAG, "-n", str(CHILDREN), "--json")))
        children = [child["id"] for child in forked["children"]]
        times = forked["times"]
        print(f"  first answer after {times['first_ms']:.1f} ms, half of them after {times['p50_ms']:.1f} ms, "
              f"all after {times['all_ms']:.1f} ms")
        step("Each writes a file", lambda: in_each(children, WRITE))
        answers = step("Ask each for its identity, and the files it sees", lambda: in_each(children, LOOK))
        show(forked, answers)
        branch_midway()
    finally:
        # By tag, so that it also ends the children of a fork that failed half way.
        step("Clean up: kill the children, remove the snapshots", lambda: [
            subprocess.run([FORKD, *args]) for args in
            (("kill", "--tag", TAG), ("kill", "--tag", BRANCH), ("rmi", "--cascade", TAG))])

    print(f"\nWhat ran on {where}:")
    for name, seconds in steps:
        print(f"  {seconds:8.2f} s  {name}")
    if checks["will_use"] == "machine":
        print("\nThe emulated machine stays up for the next command; `forkd machine stop` ends it.")


if __name__ == "__main__":
    main()
