#!/usr/bin/env python3
"""The main job, with times: warm one Linux guest, fork children from it, show that each is its own.

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
# A name of its own: somebody's snapshot may be called `demo`.
TAG = f"demo-{os.getpid()}"

# Runs in the parent, once. Both generators are used, so that every child inherits them in a state that
# would give all of them the same next number.
WARM = """
import glob, os, random, socket
import numpy
inherited = numpy.arange(1_000_000)
random.random(), numpy.random.random()
"""

# Runs in every child, before any is looked at.
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

steps = []


def step(name, action):
    """Runs action, says how long it took, gives what it gave."""
    print(f"\n\033[1m{name}\033[0m" if sys.stdout.isatty() else f"\n{name}", flush=True)
    start = time.monotonic()
    result = action()
    seconds = time.monotonic() - start
    steps.append((name, seconds))
    print(f"  -> {seconds:.2f} s", flush=True)
    return result


def forkd(*args):
    """Runs forkd; its progress and its errors are seen, its result is returned."""
    done = subprocess.run([FORKD, *args], text=True, stdout=subprocess.PIPE)
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\nforkd {args[0]} failed with status {done.returncode}")
    return done.stdout


def in_each(children, code):
    """Evaluates code in every child, one after the other, and says how far it is."""
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
    """Prints what each child says of itself; complains if two of them are not different people."""
    rows = [("CHILD", "ANSWERED", "HOSTNAME", "RANDOM", "NUMPY.RANDOM", "URANDOM", "FILES IT SEES")]
    for child, answer in zip(forked["children"], answers):
        rows.append((child["id"], f"{child['ready_ms']:.1f} ms", answer["hostname"], f"{answer['random']:.6f}",
                     f"{answer['numpy']:.6f}", answer["urandom"], answer["file"]))
    print()
    table(rows)
    for child, answer in zip(forked["children"], answers):
        if answer["id"] != child["id"]:
            sys.exit(f"{child['id']} takes itself for {answer['id']}")
        if answer["file"] != child["id"]:
            sys.exit(f"{child['id']} does not see its own file alone, but: {answer['file']}")
    for what in ("hostname", "random", "numpy", "urandom"):
        if len({answer[what] for answer in answers}) != len(answers):
            sys.exit(f"two children have the same {what}")
    if len({answer["inherited"] for answer in answers}) != 1:
        sys.exit("the children do not agree on what they inherited")
    print("\n  All differ, each sees only the file it wrote, and all share the parent's million numbers.")


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
        answers = step("Ask each who it is, and what it sees", lambda: in_each(children, LOOK))
        show(forked, answers)
    finally:
        # By tag, so that the children of a fork that failed half way go, too.
        step("Clean up: kill the children, remove the snapshot", lambda: (
            subprocess.run([FORKD, "kill", "--tag", TAG]), subprocess.run([FORKD, "rmi", TAG])))

    print(f"\nWhat ran on {where}:")
    for name, seconds in steps:
        print(f"  {seconds:8.2f} s  {name}")
    if checks["will_use"] == "machine":
        print("\nThe emulated machine stays up for the next command; `forkd machine stop` ends it.")


if __name__ == "__main__":
    main()
