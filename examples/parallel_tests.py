"""A parallel test runner: a fork per test file, all from one warmed parent.

The parent imports the code under test once; every child has it in memory already. A test may change files, modules and
the clock of its sandbox: no other test sees that. One of the files below deletes the data that the other ones read.

    python3 examples/parallel_tests.py [SNAPSHOT]
"""

import os
import sys

from forkd import Sandbox

SNAPSHOT = sys.argv[1] if len(sys.argv) > 1 else os.environ.get("FORKD_TAG", "python")
PROJECT = {
    "stock.py": "import json\ndef count(name):\n    return json.load(open('/root/app/stock.json')).get(name, 0)\n",
    "stock.json": '{"apple": 3, "pear": 0}',
}
HEAD = "import os, unittest, stock\nclass Test(unittest.TestCase):\n"
TESTS = {
    "test_apple.py": HEAD + "    def test_it(self): self.assertEqual(stock.count('apple'), 3)\n",
    "test_missing.py": HEAD
    + "    def test_it(self):\n"
    + "        os.remove('/root/app/stock.json')\n"
    + "        self.assertRaises(FileNotFoundError, stock.count, 'apple')\n",
    "test_pear.py": HEAD
    + "    def test_it(self): self.assertEqual(stock.count('pear'), 0)\n"
    + "    def test_wrong(self): self.assertEqual(stock.count('pear'), 1)\n",
}
WARM = """
import io, os, sys, unittest
os.chdir("/root/app")
sys.path.insert(0, "/root/app")
import stock

def run_file(name):
    suite = unittest.defaultTestLoader.loadTestsFromName(name.removesuffix(".py"))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    failures = [[str(test), text] for test, text in result.failures + result.errors]
    return {"ran": result.testsRun, "failures": failures}
"""


def runner(name):
    return lambda child: child.eval(f"run_file({name!r})", timeout=120)


with Sandbox.create(SNAPSHOT) as parent:
    for name, text in {**PROJECT, **TESTS}.items():
        parent.files.write(f"/root/app/{name}", text)
    parent.eval(WARM, timeout=120)
    outcomes = parent.try_each([runner(name) for name in TESTS])

ran, failed = 0, []
for name, outcome in zip(TESTS, outcomes):
    result = outcome.value if outcome.ok else {"ran": 0, "failures": [[name, str(outcome.error)]]}
    ran += result["ran"]
    failed += result["failures"]
    print(f"{name}: {result['ran']} ran, {len(result['failures'])} failed, {outcome.seconds:.2f} s")
for test, text in failed:
    print(f"FAILED {test}: {text.strip().splitlines()[-1]}")
print(f"{ran} tests in {len(TESTS)} sandboxes, {len(failed)} failed")
