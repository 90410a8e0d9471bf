// A parallel test runner: a fork per test file, all from one warmed parent.
//
// The parent imports the code under test once; every child has it in memory already. One of the files below deletes the
// data that the other ones read.
//
//     node parallel_tests.mjs [SNAPSHOT]

import { Sandbox } from "@forkd/sdk";

const SNAPSHOT = process.argv[2] ?? process.env.FORKD_TAG ?? "python";
const PROJECT = {
  "stock.py": "import json\ndef count(name):\n    return json.load(open('/root/app/stock.json')).get(name, 0)\n",
  "stock.json": '{"apple": 3, "pear": 0}',
};
const HEAD = "import os, unittest, stock\nclass Test(unittest.TestCase):\n";
const TESTS = {
  "test_apple.py": `${HEAD}    def test_it(self): self.assertEqual(stock.count('apple'), 3)\n`,
  "test_missing.py": `${HEAD}    def test_it(self):
        os.remove('/root/app/stock.json')
        self.assertRaises(FileNotFoundError, stock.count, 'apple')\n`,
  "test_pear.py": `${HEAD}    def test_it(self): self.assertEqual(stock.count('pear'), 0)
    def test_wrong(self): self.assertEqual(stock.count('pear'), 1)\n`,
};
const WARM = `
import io, os, sys, unittest
os.chdir("/root/app")
sys.path.insert(0, "/root/app")
import stock

def run_file(name):
    suite = unittest.defaultTestLoader.loadTestsFromName(name.removesuffix(".py"))
    result = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
    failures = [[str(test), text] for test, text in result.failures + result.errors]
    return {"ran": result.testsRun, "failures": failures}
`;

const parent = await Sandbox.create(SNAPSHOT);
try {
  for (const [name, text] of Object.entries({ ...PROJECT, ...TESTS })) await parent.files.write(`/root/app/${name}`, text);
  await parent.eval(WARM, { timeoutSecs: 120 });
  const names = Object.keys(TESTS);
  const outcomes = await parent.tryEach(
    names.map((name) => (child) => child.eval(`run_file(${JSON.stringify(name)})`, { timeoutSecs: 120 })),
  );
  const failed = [];
  let ran = 0;
  for (const [index, outcome] of outcomes.entries()) {
    const name = names[index];
    const result = outcome.ok ? outcome.value : { ran: 0, failures: [[name, String(outcome.error)]] };
    ran += result.ran;
    failed.push(...result.failures);
    console.log(`${name}: ${result.ran} ran, ${result.failures.length} failed, ${outcome.seconds.toFixed(2)} s`);
  }
  for (const [test, text] of failed) console.log(`FAILED ${test}: ${text.trim().split("\n").pop()}`);
  console.log(`${ran} tests in ${names.length} sandboxes, ${failed.length} failed`);
} finally {
  await parent.kill();
}
