"""An agent with undo: it edits a package, runs the tests, and goes back when they fail.

Each edit runs inside `with sandbox.checkpoint()`. When the body raises, the whole sandbox is rolled back: files,
processes and the memory of its interpreter. The agent needs no list of what an edit has touched.

    python3 examples/undo.py [SNAPSHOT]
"""

import os
import sys

from forkd import CommandError, Sandbox

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
PACKAGE = {
    "prices.py": "def total(prices, discount):\n    return sum(prices) * discount\n",
    "test_prices.py": "from prices import total\nassert total([10, 30], 25) == 30, total([10, 30], 25)\n",
}
# What a model would propose, one after the other.
EDITS = [
    ("divide by a hundred", "sed -i 's,* discount,* discount / 100,' prices.py"),
    ("start again from an empty file", "rm prices.py && touch prices.py"),
    ("take the discount off", "sed -i 's,* discount,* (100 - discount) / 100,' prices.py"),
]


def attempt(sandbox, name, edit):
    """Whether the tests pass after an edit. If they do not, the sandbox is as it was before."""
    try:
        with sandbox.checkpoint():
            sandbox.eval(f"tried.append({name!r})")
            sandbox.commands.run(edit, cwd="/root/shop")
            sandbox.commands.run("python3 test_prices.py", cwd="/root/shop", timeout=120)
        return True
    except CommandError as error:
        print(f"undone: {name}: {str(error).splitlines()[-1]}")
        return False


with Sandbox.create(SNAPSHOT) as sandbox:
    for name, text in PACKAGE.items():
        sandbox.files.write(f"/root/shop/{name}", text)
    sandbox.eval("tried = []")
    for name, edit in EDITS:
        if attempt(sandbox, name, edit):
            print(f"kept: {name}")
            break
    print(sandbox.files.read("/root/shop/prices.py"), end="")
    print("edits that the interpreter remembers:", sandbox.eval("tried"))
