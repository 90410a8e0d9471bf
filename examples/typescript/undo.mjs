// An agent with undo: it edits a package, runs the tests, and goes back when they fail.
//
// Each edit runs inside `sandbox.checkpoint()`. When the function throws, the whole sandbox is rolled back: files,
// processes and the memory of its interpreter.
//
//     node undo.mjs [SNAPSHOT]

import { CommandError, Sandbox } from "@forkd/sdk";

const SNAPSHOT = process.argv[2] ?? process.env.FORKD_TAG ?? "python";
const PACKAGE = {
  "prices.py": "def total(prices, discount):\n    return sum(prices) * discount\n",
  "test_prices.py": "from prices import total\nassert total([10, 30], 25) == 30, total([10, 30], 25)\n",
};
// What a model would propose, one after the other.
const EDITS = {
  "divide by a hundred": "sed -i 's,* discount,* discount / 100,' prices.py",
  "start again from an empty file": "rm prices.py && touch prices.py",
  "take the discount off": "sed -i 's,* discount,* (100 - discount) / 100,' prices.py",
};

// Whether the tests pass after an edit. If they do not, the sandbox is as it was before.
async function attempt(sandbox, name, edit) {
  try {
    await sandbox.checkpoint(async () => {
      await sandbox.eval(`tried.append(${JSON.stringify(name)})`);
      await sandbox.commands.run(edit, { cwd: "/root/shop" });
      await sandbox.commands.run("python3 test_prices.py", { cwd: "/root/shop", timeoutSecs: 120 });
    });
    return true;
  } catch (error) {
    if (!(error instanceof CommandError)) throw error;
    console.log(`undone: ${name}: ${error.stderr.trim().split("\n").pop()}`);
    return false;
  }
}

const sandbox = await Sandbox.create(SNAPSHOT);
try {
  for (const [name, text] of Object.entries(PACKAGE)) await sandbox.files.write(`/root/shop/${name}`, text);
  await sandbox.eval("tried = []");
  for (const [name, edit] of Object.entries(EDITS)) {
    if (await attempt(sandbox, name, edit)) {
      console.log(`kept: ${name}`);
      break;
    }
  }
  process.stdout.write(await sandbox.files.read("/root/shop/prices.py"));
  console.log("edits that the interpreter remembers:", await sandbox.eval("tried"));
} finally {
  await sandbox.kill();
}
