// A tree search whose nodes are running sandboxes.
//
// The problem: in which order do three clean-up steps leave the fewest bytes of a log? A decision is a fork: each possible
// step runs in a child of the node, and the child is the next node. The search keeps the two best children of a level and
// ends the others.
//
//     node tree_search.mjs [SNAPSHOT]

import { Sandbox } from "@forkd/sdk";

const SNAPSHOT = process.argv[2] ?? process.env.FORKD_TAG ?? "python";
const WIDTH = 2;
const STEPS = { "drop times": "cut -d' ' -f2-", "drop repeats": "uniq", sort: "sort" };
const EVENTS = ["login ok", "disk full", "login ok", "retry"];
const LOG = Array.from({ length: 40 }, (_, second) => `10:00:${String(second).padStart(2, "0")} ${EVENTS[second % 4]}\n`).join("");

// A function for a child: it takes one step and returns the size of what is left.
const take = (step) => async (child) => {
  const command = `${STEPS[step]} < log > new && mv new log && wc -c < log`;
  return Number((await child.commands.run(command, { cwd: "/root", timeoutSecs: 120 })).stdout);
};

const sandboxes = [];
try {
  const root = await Sandbox.create(SNAPSHOT);
  sandboxes.push(root);
  await root.files.write("/root/log", LOG);
  let level = [{ size: LOG.length, path: [], node: root }];
  for (const _ of Object.keys(STEPS)) {
    const children = [];
    for (const { path, node } of level) {
      const choices = Object.keys(STEPS).filter((step) => !path.includes(step));
      const outcomes = await node.tryEach(choices.map(take), { keep: true });
      sandboxes.push(...outcomes.map((outcome) => outcome.sandbox));
      for (const [index, outcome] of outcomes.entries()) {
        if (!outcome.ok) throw outcome.error;
        children.push({ size: outcome.value, path: [...path, choices[index]], node: outcome.sandbox });
        console.log(`${"  ".repeat(path.length)}${choices[index]}: ${outcome.value} bytes`);
      }
    }
    children.sort((one, other) => one.size - other.size);
    await Promise.all([...level, ...children.slice(WIDTH)].map(({ node }) => node.kill()));
    level = children.slice(0, WIDTH);
  }
  const { size, path, node } = level[0];
  console.log(`best: ${path.join(", ")}: ${LOG.length} bytes become ${size}`);
  process.stdout.write(await node.files.read("/root/log"));
} finally {
  await Promise.allSettled(sandboxes.map((sandbox) => sandbox.kill()));
}
