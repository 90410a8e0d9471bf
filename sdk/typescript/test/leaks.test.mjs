// No sandbox is left: not by an abort in the middle of a fork, not by a lost answer, not by attempts that fail.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import * as forkd from "@forkd/sdk";

import { daemon, eventually, sleep } from "./server.mjs";

const SOURCE = { id: "sb0", state: "running", snapshot_tag: "a", created_at_unix: 1 };

/** Runs a program in a process of its own, and collects what it prints. `meanwhile` gets the process. */
async function runs(program, output, meanwhile = async () => {}) {
  const stdio = ["ignore", "inherit", "inherit"];
  stdio[["stdin", "stdout", "stderr"].indexOf(output)] = "pipe";
  const args = ["--input-type=module", "-e", program];
  const child = spawn(process.execPath, args, { cwd: import.meta.dirname ?? ".", stdio });
  let printed = "";
  child[output].on("data", (text) => (printed += text));
  const closed = once(child, "close");
  await meanwhile(child);
  const [status] = await closed;
  return { status, printed };
}

async function source(t, options, more = {}) {
  const server = await daemon(t, options);
  server.sandboxes.set("sb0", SOURCE);
  const sandbox = new forkd.Sandbox(server.client(more), SOURCE);
  return Object.assign(server, { sandbox, ids: () => [...server.sandboxes.keys()] });
}

/** A unix socket to listen on. */
async function socketOf(t) {
  const folder = await mkdtemp(join(tmpdir(), "forkd-"));
  t.after(() => rm(folder, { recursive: true }));
  return [join(folder, "a.sock")];
}

test("a fork that is aborted before its answer leaves no child", async (t) => {
  let release;
  const held = new Promise((resolve) => (release = resolve));
  const { sandbox, ids } = await source(t, { hold: () => held });
  const controller = new AbortController();
  const forked = sandbox.fork(3, { signal: controller.signal });
  await eventually(() => ids().length === 4, "the daemon forked");
  controller.abort(new Error("enough"));
  setTimeout(release, 100);
  await assert.rejects(forked, { message: "enough" });
  assert.deepEqual(ids(), ["sb0"]);
});

test("an abort does not wait for a daemon that stalls, and the children end when it answers", async (t) => {
  let release;
  const held = new Promise((resolve) => (release = resolve));
  const { sandbox, ids } = await source(t, { hold: () => held });
  const controller = new AbortController();
  const forked = sandbox.fork(2, { signal: controller.signal });
  await eventually(() => ids().length === 3, "the daemon forked");
  controller.abort();
  await assert.rejects(forked, { name: "AbortError" });
  assert.equal(ids().length, 3);
  release();
  await eventually(() => ids().length === 1, "the children ended");
});

test("a fork that was aborted before it began is not sent", async (t) => {
  const { sandbox, requests } = await source(t);
  const before = requests.length;
  await assert.rejects(sandbox.fork(2, { signal: AbortSignal.abort() }), { name: "AbortError" });
  assert.equal(requests.length, before);
});

test("an answer that is lost is asked for again, and there is one set of children", async (t) => {
  const { sandbox, ids } = await source(t, {
    hold: async (exchange) => {
      exchange.tries = sandbox.tries = (sandbox.tries ?? 0) + 1;
      if (exchange.tries < 3) exchange.reset();
    },
  });
  const children = await sandbox.fork(2);
  assert.deepEqual(ids(), ["sb0", ...children.map(({ id }) => id)]);
  assert.equal(sandbox.tries, 3);
});

test("children that a fork made before it gave up end as soon as the daemon answers", async (t) => {
  let release;
  const held = new Promise((resolve) => (release = resolve));
  let asked = 0;
  const hold = () => (++asked === 1 ? new Promise(() => {}) : held);
  const { sandbox, ids } = await source(t, { hold }, { timeoutSecs: 0.1 });
  await assert.rejects(sandbox.fork(2), forkd.TimeoutError);
  assert.deepEqual([asked, ids().length], [2, 3]);
  release();
  await eventually(() => ids().length === 1, "the children ended");
});

test("children of a fork whose daemon restarts in the middle end when it is back", async (t) => {
  let asked = 0;
  const { sandbox, ids, stop, restart } = await source(t, {
    listen: await socketOf(t),
    hold: () => {
      if (++asked === 1) stop();
    },
  });
  const forked = sandbox.fork(2);
  await eventually(() => ids().length === 3, "the daemon forked");
  // The call gives up, and so does the first try of its clean-up.
  setTimeout(restart, 3000);
  await assert.rejects(forked, forkd.DaemonUnreachableError);
  await eventually(() => ids().length === 1, "the children ended");
  assert.equal(asked, 2);
});

test("children of a fork whose daemon is busy after a broken connection end", async (t) => {
  let asked = 0;
  const { sandbox, ids } = await source(t, {
    hold: (exchange) => {
      if (++asked === 1) return exchange.reset();
      // All tries of the call, and a few of its clean-up.
      if (asked < 7) exchange.refuse(503, "shutting_down");
    },
  });
  await assert.rejects(sandbox.fork(2), { code: "shutting_down" });
  await eventually(() => ids().length === 1, "the children ended");
});

test("a fork that was never sent is not undone", async (t) => {
  const { sandbox, ids, stop, restart, requests } = await source(t, { listen: await socketOf(t) });
  stop();
  await assert.rejects(sandbox.fork(2), forkd.DaemonUnreachableError);
  await restart();
  await sleep(1000);
  assert.deepEqual([ids().length, requests.length], [1, 0]);
});

test("a program that ends at a time-out leaves no child", async (t) => {
  const keys = [];
  const { url, ids } = await source(t, {
    hold: (exchange) => {
      keys.push(exchange.key);
      return keys.length === 1 ? new Promise(() => {}) : undefined;
    },
  });
  const program = `
    import { Client, Sandbox } from "@forkd/sdk";
    const options = { url: ${JSON.stringify(url)}, token: "t" };
    const info = await new Client(options).getSandbox("sb0");
    await new Sandbox(new Client({ ...options, timeoutSecs: 0.4 }), info).fork(3);
  `;
  const { status, printed } = await runs(program, "stderr");
  assert.equal(status, 1);
  assert.match(printed, /TimeoutError/);
  assert.deepEqual([ids(), keys.length, keys[0]], [["sb0"], 2, keys[1]]);
});

test("a create that times out leaves no sandbox either", async (t) => {
  let stalls = true;
  const { client, sandboxes } = await daemon(t, { hold: () => (stalls ? new Promise(() => {}) : undefined) });
  const created = forkd.Sandbox.create("a", { client: client({ timeoutSecs: 0.1 }) });
  await eventually(() => sandboxes.size === 1, "the daemon forked");
  stalls = false;
  await assert.rejects(created, forkd.TimeoutError);
  assert.equal(sandboxes.size, 0);
});

test("a progress callback that throws leaves no sandbox", async (t) => {
  const { client, requests, sandboxes } = await daemon(t);
  const onProgress = ({ stage }) => {
    if (stage === "running") throw new Error("boom");
  };
  await assert.rejects(forkd.Sandbox.create("a", { client: client(), onProgress }), { message: "boom" });
  assert.deepEqual([requests[0].method, sandboxes.size], ["POST", 0]);
});

test("when some children do not start the others end, unless the caller wants them", async (t) => {
  const { sandbox, ids } = await source(t, { fail: (index) => (index === 1 ? "guest_failed" : undefined) });
  const error = await sandbox.fork(3).catch((error) => error);
  assert.ok(error instanceof forkd.ForkError);
  assert.deepEqual([error.code, error.errors.length], ["guest_failed", 1]);
  assert.match(error.message, /1 of 3 children/);
  assert.deepEqual(ids(), ["sb0"]);
  const children = await sandbox.fork(3, { onError: "return" });
  assert.equal(children.length, 2);
  assert.deepEqual(
    children.errors.map(({ index, code }) => [index, code]),
    [[1, "guest_failed"]],
  );
  assert.equal(ids().length, 3);
  const stuck = await source(t, { fail: (index) => (index === 1 ? "guest_failed" : undefined), keeps: () => true });
  await assert.rejects(stuck.sandbox.fork(2), { name: "ForkError", message: /could not be ended/ });
});

test("attempts run in children of one fork, come in order, and leave no child", async (t) => {
  const { sandbox, ids, answers } = await source(t);
  let running = 0;
  let most = 0;
  const attempt =
    (ms, result) =>
    async (child, { index, signal }) => {
      assert.equal(signal.aborted, false);
      most = Math.max(most, ++running);
      await sleep(ms);
      running--;
      if (result instanceof Error) throw result;
      return `${await child.eval(result)} ${index}`;
    };
  const boom = new Error("boom");
  const outcomes = await sandbox.tryEach([attempt(60, "x"), attempt(10, boom), attempt(20, "y")], { parallel: 2 });
  assert.deepEqual(
    outcomes.map(({ value }) => value),
    [`sb1 x 0`, undefined, `sb3 y 2`],
  );
  assert.equal(outcomes[1].error, boom);
  assert.ok(outcomes[0].seconds >= 0.05, "an attempt that sleeps for 60 ms takes as long");
  assert.equal(most, 2);
  assert.equal(answers.size, 1);
  assert.deepEqual(ids(), ["sb0"]);
  const kept = await sandbox.tryEach([attempt(1, "x"), attempt(1, boom)], { keep: true });
  assert.deepEqual(ids(), ["sb0", ...kept.map(({ sandbox }) => sandbox.id)]);
  assert.deepEqual(await sandbox.tryEach([]), []);
});

test("a child that cannot be ended costs no outcome, and is reported", async (t) => {
  const { sandbox } = await source(t, { keeps: (id) => id !== "sb1" });
  const warnings = [];
  t.mock.method(process, "emitWarning", (text, { code }) => warnings.push(`${code} ${text}`));
  const boom = new Error("boom");
  const attempts = ["x", boom, "y"].map((result) => async () => {
    if (result instanceof Error) throw result;
    return result;
  });
  const outcomes = await sandbox.tryEach(attempts);
  assert.deepEqual(
    outcomes.map(({ value, error, endError }) => [value, error, endError?.code]),
    [
      ["x", undefined, undefined],
      [undefined, boom, "internal"],
      ["y", undefined, "internal"],
    ],
  );
  assert.equal((await sandbox.bestOf(2, async (_, { index }) => index, Number)).value, 1);
  assert.equal((await sandbox.firstSuccess(attempts)).value, "x");
  await assert.rejects(sandbox.firstSuccess([attempts[1]]), forkd.AllFailedError);
  assert.equal(warnings.length, 4);
  for (const [at, ids] of [["sb2", "sb3"], ["sb4", "sb5"]].entries()) {
    assert.match(warnings[at], /^FORKD_CHILDREN_LEFT /);
    for (const id of ids) assert.ok(warnings[at].includes(id), warnings[at]);
  }
});

test("attempts that cannot run are an error before the fork", async (t) => {
  const { sandbox, requests } = await source(t);
  const attempt = () => assert.fail("it does not run");
  for (const parallel of [0, -1, NaN]) {
    await assert.rejects(sandbox.tryEach([attempt], { parallel }), forkd.InvalidRequestError);
    await assert.rejects(sandbox.firstSuccess([attempt], { parallel }), forkd.InvalidRequestError);
    await assert.rejects(sandbox.bestOf(1, attempt, Number, { parallel }), forkd.InvalidRequestError);
  }
  await assert.rejects(sandbox.firstSuccess([]), forkd.AllFailedError);
  await assert.rejects(sandbox.bestOf(0, attempt, Number), forkd.AllFailedError);
  assert.deepEqual(await sandbox.tryEach([]), []);
  assert.equal(requests.length, 0);
});

test("attempts that are aborted reject at once, see the signal, and leave no child", async (t) => {
  const { sandbox, ids } = await source(t);
  const controller = new AbortController();
  let started = 0;
  let seen = 0;
  const forever = (child, { signal }) => {
    started++;
    return new Promise(() => signal.addEventListener("abort", () => seen++));
  };
  for (const call of ["tryEach", "firstSuccess"]) {
    started = seen = 0;
    const one = new AbortController();
    const pending = sandbox[call]([forever, forever], { signal: one.signal, keep: true });
    await eventually(() => started === 2, "the attempts run");
    one.abort(new Error("enough"));
    await assert.rejects(pending, { message: "enough" });
    assert.deepEqual(ids(), ["sb0"]);
    assert.equal(seen, 2);
  }
  started = 0;
  const best = sandbox.bestOf(2, forever, () => 1, { signal: controller.signal });
  await eventually(() => started === 2, "the attempts run");
  controller.abort();
  await assert.rejects(best, { name: "AbortError" });
  assert.deepEqual(ids(), ["sb0"]);
});

test("the best of several is the one with the highest score", async (t) => {
  const { sandbox, ids } = await source(t);
  const step = async (child, { index }) => {
    if (index === 1) throw new Error("boom");
    return index;
  };
  for (const [score, winner] of [
    [(value) => value, 3],
    [(value) => -value, 0],
    [() => 5, 0],
  ]) {
    const best = await sandbox.bestOf(4, step, score);
    assert.deepEqual([best.ok, best.value, best.index], [true, winner, winner]);
    assert.deepEqual(ids(), ["sb0"]);
  }
  const kept = await sandbox.bestOf(4, step, (value) => value, { keep: true, parallel: 1 });
  assert.deepEqual(ids(), ["sb0", kept.sandbox.id]);
  await kept.sandbox.kill();
  const error = await sandbox.bestOf(2, step, () => NaN).catch((error) => error);
  assert.ok(error instanceof forkd.AllFailedError);
  assert.match(error.outcomes[0].error.message, /not a number/);
  assert.match(error.outcomes[1].error.message, /boom/);
  assert.deepEqual(ids(), ["sb0"]);
});

test("the first success ends the others at once", async (t) => {
  const { sandbox, ids } = await source(t);
  let aborted = false;
  const never = (child, { signal }) => new Promise(() => signal.addEventListener("abort", () => (aborted = true)));
  const fails = async () => {
    throw new Error("boom");
  };
  const wins = async (child) => {
    await sleep(30);
    return child.id;
  };
  const first = await sandbox.firstSuccess([never, fails, wins], { keep: true });
  assert.deepEqual([first.index, first.value], [2, first.sandbox.id]);
  assert.ok(aborted);
  assert.deepEqual(ids(), ["sb0", first.sandbox.id]);
  await first.sandbox.kill();
  const error = await sandbox.firstSuccess([fails, fails]).catch((error) => error);
  assert.ok(error instanceof forkd.AllFailedError);
  assert.equal(error.outcomes.length, 2);
  assert.deepEqual(ids(), ["sb0"]);
});

test("^C in the middle of a fork ends the children, when the program passes on the signal", async (t) => {
  let release;
  const held = new Promise((resolve) => (release = resolve));
  const { url, ids } = await source(t, { hold: () => held });
  const program = `
    import { Client, interrupted, Sandbox } from "@forkd/sdk";
    const client = new Client({ url: ${JSON.stringify(url)}, token: "t" });
    const sandbox = await Sandbox.connect("sb0", { client });
    await sandbox.fork(3, { signal: interrupted() }).catch((error) => console.log(error.message));
  `;
  const { status, printed } = await runs(program, "stdout", async (child) => {
    await eventually(() => ids().length === 4, "the daemon forked");
    child.kill("SIGINT");
    setTimeout(release, 100);
  });
  assert.deepEqual([status, printed], [0, "interrupted by SIGINT\n"]);
  assert.deepEqual(ids(), ["sb0"]);
});

test("a disposed sandbox has ended, and a second kill says that it had", async (t) => {
  const { sandbox, ids } = await source(t);
  const [child, other] = await sandbox.fork(2);
  const dispose = Symbol.asyncDispose ?? Symbol.for("Symbol.asyncDispose");
  await child[dispose]();
  assert.deepEqual(ids(), ["sb0", other.id]);
  assert.equal(await child.kill(), false);
  assert.equal(await other.kill(), true);
});
