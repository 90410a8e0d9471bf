"""A tree search whose nodes are running sandboxes.

The problem: in which order do three clean-up steps leave the fewest bytes of a log? A step changes files of the sandbox.
On one sandbox the search would have to undo each step. Here a decision is a fork: each possible step runs in a child of
the node, and the child is the next node. The search keeps the two best children of a level and ends the others.

    python3 examples/tree_search.py [SNAPSHOT]
"""

import contextlib
import os
import sys

from forkd import Sandbox

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
WIDTH = 2
STEPS = {"drop times": "cut -d' ' -f2-", "drop repeats": "uniq", "sort": "sort"}
EVENTS = ["login ok", "disk full", "login ok", "retry"]
LOG = "".join(f"10:00:{second:02} {EVENTS[second % 4]}\n" for second in range(40))


def take(step):
    """A function for a child: it takes one step and returns the size of what is left."""

    def go_on(child):
        command = f"{STEPS[step]} < log > new && mv new log && wc -c < log"
        return int(child.commands.run(command, cwd="/root", timeout=120).stdout)

    return go_on


with contextlib.ExitStack() as sandboxes:  # ends every sandbox of the search, also after an error
    root = sandboxes.enter_context(Sandbox.create(SNAPSHOT))
    root.files.write("/root/log", LOG)
    level = [(len(LOG), [], root)]
    for depth in range(len(STEPS)):
        children = []
        for _, path, node in level:
            choices = [step for step in STEPS if step not in path]
            outcomes = node.try_each([take(step) for step in choices], keep=True)
            for outcome in outcomes:
                sandboxes.callback(outcome.sandbox.kill)
            for step, outcome in zip(choices, outcomes):
                size = outcome.result()
                children.append((size, [*path, step], outcome.sandbox))
                print(f"{'  ' * depth}{step}: {size} bytes")
        children.sort(key=lambda child: child[0])
        for _, _, node in level + children[WIDTH:]:
            node.kill()
        level = children[:WIDTH]
    size, path, best = level[0]
    print(f"best: {', '.join(path)}: {len(LOG)} bytes become {size}")
    print(best.files.read("/root/log"), end="")
