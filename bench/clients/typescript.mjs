#!/usr/bin/env node
// What the TypeScript SDK costs beside a bare `fetch` with the same body, on the same daemon, one after the other in turns.
//
//     (cd sdk/typescript && npm ci && npm run build)
//     FORKD_URL=… FORKD_TOKEN=… node bench/clients/typescript.mjs --tag py [--rounds 100] [--forks 10]
//
// It needs a snapshot of an image with Python. Prints a table, and a line of JSON. A ratio above the limit is an error.

import { parseArgs } from "node:util";

import { Client, Sandbox } from "../../sdk/typescript/dist/index.js";

const LIMIT = 1.3;
const { values } = parseArgs({
  options: {
    tag: { type: "string" },
    rounds: { type: "string", default: "100" },
    forks: { type: "string", default: "10" },
  },
});
if (values.tag === undefined) throw new Error("give --tag: the snapshot to fork from");
const [rounds, forks] = [Number(values.rounds), Number(values.forks)];
const client = new Client({ timeoutSecs: 120 });
const headers = { authorization: `Bearer ${process.env.FORKD_TOKEN}`, "content-type": "application/json" };

function median(numbers) {
  const sorted = [...numbers].sort((a, b) => a - b);
  const middle = sorted.length / 2;
  return sorted.length % 2 ? sorted[Math.floor(middle)] : (sorted[middle - 1] + sorted[middle]) / 2;
}

/** The medians of both in milliseconds. Each round begins with the other one, so that neither gets the warmer daemon. */
async function compare(rounds, bare, sdk, after = async () => {}) {
  const times = [[], []];
  for (let round = 0; round <= rounds; round++) {
    for (const which of round % 2 ? [0, 1] : [1, 0]) {
      const begun = performance.now();
      const result = await (which === 0 ? bare() : sdk());
      const took = performance.now() - begun;
      await after(result);
      // The first round opens connections.
      if (round > 0) times[which].push(took);
    }
  }
  return times.map(median);
}

const results = {};
const sandbox = await Sandbox.create(values.tag, { client });
try {
  const post = async (path, body) => {
    const init = { method: "POST", headers, body: JSON.stringify(body) };
    const reply = await fetch(`${client.url}/v1/sandboxes/${sandbox.id}/${path}`, init);
    if (!reply.ok) throw new Error(await reply.text());
    return reply.json();
  };
  const end = (children) => Promise.all((children.children ?? children).map(({ id }) => client.deleteSandbox(id)));
  const command = { args: ["sh", "-c", "true"], timeout_secs: 30 };
  const code = { code: "6 * 7", timeout_secs: 30 };
  results["commands.run"] = await compare(
    rounds,
    () => post("exec", command),
    () => sandbox.commands.run("true"),
  );
  results.eval = await compare(
    rounds,
    () => post("eval", code),
    () => sandbox.eval("6 * 7"),
  );
  results["fork(10)"] = await compare(
    forks,
    () => post("fork?results=each", { n: 10 }),
    () => sandbox.fork(10),
    end,
  );
} finally {
  await sandbox.kill();
}

const calls = {};
console.log(`${"call".padEnd(14)} ${"bare fetch".padStart(11)} ${"SDK".padStart(11)} ${"ratio".padStart(7)}`);
for (const [name, [bare, sdk]] of Object.entries(results)) {
  const ratio = sdk / bare;
  calls[name] = { bare_ms: Number(bare.toFixed(3)), sdk_ms: Number(sdk.toFixed(3)), ratio: Number(ratio.toFixed(3)) };
  console.log(
    `${name.padEnd(14)} ${bare.toFixed(2).padStart(8)} ms ${sdk.toFixed(2).padStart(8)} ms ${ratio.toFixed(2).padStart(7)}`,
  );
}
console.log(JSON.stringify({ client: "typescript", rounds, forks, calls }));
if (Object.values(calls).some(({ ratio }) => ratio > LIMIT)) process.exitCode = 1;
