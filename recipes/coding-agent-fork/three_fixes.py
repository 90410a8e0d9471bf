"""A coding agent that tries three fixes of a package, each in a child of one branch of its sandbox.

The agent has worked for a while: there is a blob of 50 MiB, and a package whose tests fail. One branch keeps that
moment. Three children of it have the same blob, byte by byte, and each applies one fix. The winner passes all tests.

    python three_fixes.py [SNAPSHOT]
"""

import contextlib
import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

from forkd import Sandbox

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
PACKAGE = {
    "slug.py": 'def slug(title):\n    return title.lower().replace(" ", "-")\n',
    "test_slug.py": """\
import unittest
from slug import slug

class Test(unittest.TestCase):
    def test_words(self):
        self.assertEqual(slug("Two Words"), "two-words")

    def test_spaces(self):
        self.assertEqual(slug("  two   words "), "two-words")
""",
}


def substitute(child):
    child.commands.run("sed -i 's/title.lower()/title.lower().strip()/' slug.py", cwd="/root/package")


def rewrite(child):
    child.files.write("/root/package/slug.py", 'def slug(title):\n    return "-".join(title.lower().split())\n')


def remove_the_test(child):
    child.commands.run("sed -i '/test_spaces/,$d' test_slug.py", cwd="/root/package")


def timed(name, function):
    start = time.monotonic()
    result = function()
    print(f"{time.monotonic() - start:8.2f} s  {name}")
    return result


def digest(sandbox):
    return sandbox.commands.run("sha256sum < /root/blob", timeout=300).stdout.split()[0]


def attempt(child, fix):
    """What a fix brings: whether the tests pass, how many ran, and the digest of the blob."""
    fix(child)
    tests = child.commands.run("python3 -m unittest", cwd="/root/package", timeout=300, check=False)
    ran = int(re.search(r"Ran (\d+) test", tests.stderr).group(1))
    return tests.exit_code == 0, ran, digest(child)


with contextlib.ExitStack() as cleanup:
    source = cleanup.enter_context(Sandbox.create(SNAPSHOT))
    write = "head -c 52428800 /dev/urandom > /root/blob"
    timed("write a blob of 50 MiB", lambda: source.commands.run(write, timeout=300))
    for name, text in PACKAGE.items():
        source.files.write(f"/root/package/{name}", text)
    before = timed("its digest", lambda: digest(source))
    branch = timed("branch", source.branch)
    cleanup.callback(branch.delete)
    fixes = [substitute, rewrite, remove_the_test]
    children = timed("three children of the branch", lambda: branch.spawn(len(fixes)))
    for child in children:
        cleanup.callback(child.kill)
    with ThreadPoolExecutor() as threads:
        results = timed("three fixes and digests", lambda: list(threads.map(attempt, children, fixes)))
    for fix, (passed, ran, after) in zip(fixes, results):
        blob = "the same blob" if after == before else "ANOTHER BLOB"
        print(f"{fix.__name__}: {'passed' if passed else 'failed'}, {ran} tests ran, {blob}")
    winner = max(range(len(fixes)), key=lambda at: results[at][:2])
    print("best fix:", fixes[winner].__name__)
    print(children[winner].files.read("/root/package/slug.py"), end="")
    if any(after != before for _, _, after in results):
        sys.exit("a child of the branch has another blob")
