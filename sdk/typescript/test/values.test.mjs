// What replies become: values of code, snapshots that are made, and the shapes of other clients.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as forkd from "@forkd/sdk";
import { Controller, ControllerError, Sandbox as Compatible } from "@forkd/sdk/compat";
import { CommandExitError, Sandbox as E2b } from "@forkd/sdk/e2b";

import { served } from "./server.mjs";

const info = { id: "sb1", state: "running", snapshot_tag: "a", created_at_unix: 1 };

async function answering(t, reply) {
  const { client, requests, url } = await served(t, (exchange) => exchange.answer(200, reply(exchange)));
  return { sandbox: new forkd.Sandbox(client(), info), client: client(), requests, url };
}

test("an evaluation is its value as JSON, else its text, and null for None", async (t) => {
  let reply;
  const { sandbox } = await answering(t, () => ({ exit_code: 0, stdout: "", stderr: "", ...reply }));
  for (const [each, value] of [
    [{ result: "[1]", result_json: [1] }, [1]],
    [{ result: "0", result_json: 0 }, 0],
    [{ result: "''", result_json: "" }, ""],
    [{ result: "False", result_json: false }, false],
    [{ result: "{1}" }, "{1}"],
    [{ result: "{1}", result_json: null }, "{1}"],
    [{ result: null }, null],
    [{}, null],
  ]) {
    reply = each;
    assert.deepEqual(await sandbox.eval("x"), value);
  }
});

test("an exception of the code has its name, text and traceback", async (t) => {
  let error = "ValueError: a: b\nc";
  const { sandbox } = await answering(t, () => ({ exit_code: 1, stdout: "o", stderr: "", error, traceback: "tb" }));
  const raised = await sandbox.eval("x").catch((error) => error);
  assert.ok(raised instanceof forkd.EvalError);
  assert.deepEqual([raised.errorName, raised.value, raised.traceback], ["ValueError", "a: b\nc", "tb"]);
  error = "KeyboardInterrupt";
  assert.equal((await sandbox.eval("x").catch((error) => error)).message, "KeyboardInterrupt");
  error = "a text that is no name";
  const execution = await sandbox.runCode("x");
  assert.deepEqual(
    [execution.error.name, execution.error.value, execution.stdout],
    ["Error", "a text that is no name", "o"],
  );
});

test("a snapshot is waited for with its progress, and removed when the wait fails", async (t) => {
  const states = [
    { status: "writing", phase: "booting" },
    { status: "writing", phase: "saving", progress: { total: 10, scanned_bytes: 5, looked_at: 5, written: 1 } },
    { status: "ready" },
  ];
  let at = 0;
  const { client, requests } = await answering(t, (exchange) => {
    if (exchange.method === "DELETE") return undefined;
    return { tag: "a", ...states[Math.min(at++, states.length - 1)] };
  });
  const seen = [];
  const onProgress = ({ phase, fraction }) => seen.push([phase, fraction]);
  const snapshot = await forkd.Snapshot.warm("python", {
    tag: "a",
    warm: "echo",
    warmPython: "import json",
    client,
    onProgress,
  });
  assert.deepEqual(seen, [
    ["booting", undefined],
    ["saving", 0.5],
    ["ready", undefined],
  ]);
  assert.equal(snapshot.status, "ready");
  states.splice(1, 2, { status: "failed", error: "it broke", error_code: "guest_failed" });
  at = 0;
  const failed = await forkd.Snapshot.warm("python", { tag: "a", client }).catch((error) => error);
  assert.ok(failed instanceof forkd.GuestError);
  assert.match(failed.message, /it broke/);
  assert.equal(requests.at(-1).method, "DELETE");
  states.length = 1;
  const controller = new AbortController();
  const waiting = forkd.Snapshot.warm("python", { client, signal: controller.signal });
  setTimeout(() => controller.abort(), 100);
  await assert.rejects(waiting, { name: "AbortError" });
  assert.equal(requests.at(-1).method, "DELETE");
  await assert.rejects(forkd.Snapshot.warm("python", { client, timeoutSecs: 0 }), forkd.TimeoutError);
});

test("a snapshot whose answer was lost is removed, and one of the same tag that was there before is not", async (t) => {
  let lost;
  let taken = true;
  const { client, requests } = await served(t, (exchange) => {
    if (exchange.method === "DELETE") return exchange.answer(204);
    if (lost-- > 0) return exchange.reset();
    return taken ? exchange.refuse(409, "tag_taken") : exchange.answer(201, { tag: "a", status: "writing" });
  });
  const warm = () => forkd.Snapshot.warm("python", { tag: "a", client: client() });
  lost = 0;
  await assert.rejects(warm(), { code: "tag_taken" });
  assert.equal(requests.length, 1);
  // More than the transport tries.
  lost = 4;
  await assert.rejects(warm(), { code: "stream_broken" });
  assert.ok(requests.every(({ method }) => method === "POST"));
  assert.equal(new Set(requests.slice(1).map(({ key }) => key)).size, 1);
  [taken, lost] = [false, 4];
  await assert.rejects(warm(), { code: "stream_broken" });
  assert.deepEqual([requests.at(-1).method, requests.at(-1).request.url], ["DELETE", "/v1/snapshots/a"]);
});

test("the removal of a snapshot is sent again when its answer is lost", async (t) => {
  let times = 0;
  const { client, requests } = await served(t, (exchange) => {
    if (exchange.method === "GET") return exchange.answer(200, { tag: "a/b", status: "ready" });
    return ++times === 1 ? exchange.reset() : exchange.refuse(404, "snapshot_not_found");
  });
  await (await forkd.Snapshot.get("a/b", { client: client() })).delete({ force: true });
  assert.equal(times, 2);
  assert.equal(requests.at(-1).request.url, "/v1/snapshots/a%2Fb?force=true");
});

test("a list goes through all of its pages", async (t) => {
  const { client } = await served(t, (exchange) => {
    const cursor = exchange.url.searchParams.get("cursor");
    const page = { null: ["sb1", "sb2"], two: ["sb3"] }[cursor];
    assert.deepEqual(exchange.url.searchParams.getAll("label"), ["a=b"]);
    exchange.answer(
      200,
      page.map((id) => ({ ...info, id })),
      cursor === null ? { "x-next-cursor": "two" } : {},
    );
  });
  const ids = [];
  for await (const { id } of forkd.Sandbox.list({ labels: { a: "b" }, client: client() })) ids.push(id);
  assert.deepEqual(ids, ["sb1", "sb2", "sb3"]);
});

test("options become the fields of the request", async (t) => {
  const bodies = [];
  const { client } = await served(t, async (exchange) => {
    bodies.push(await exchange.json());
    exchange.answer(201, { children: [info], errors: [] });
  });
  const own = client();
  const options = {
    timeoutSecs: 1,
    idleTimeoutSecs: 2,
    onTimeout: "pause",
    envs: { A: "b" },
    labels: { c: "d" },
    network: false,
    memoryLimitMib: 3,
  };
  const wire = {
    timeout_secs: 1,
    idle_timeout_secs: 2,
    on_timeout: "pause",
    env: { A: "b" },
    labels: { c: "d" },
    network: false,
    memory_limit_mib: 3,
  };
  const stages = [];
  const onProgress = ({ stage }) => stages.push(stage);
  const sandbox = await forkd.Sandbox.create("a", { ...options, client: own, onProgress });
  await sandbox.fork(2, options);
  await forkd.Sandbox.create({ image: "i", memSizeMib: 4, vcpus: 5, client: own });
  assert.deepEqual(bodies, [
    { snapshot_tag: "a", ...wire },
    { n: 2, ...wire },
    { image: "i", mem_size_mib: 4, vcpus: 5 },
  ]);
  assert.deepEqual(stages, ["creating", "running"]);
  await assert.rejects(forkd.Sandbox.create({ client: own }), forkd.InvalidRequestError);
});

test("the reference's Controller and Sandbox ask and answer as theirs", async (t) => {
  const { url, requests } = await served(t, async (exchange) => {
    exchange.sent = await exchange.json();
    if (exchange.path.endsWith("/sbgone")) return exchange.refuse(404, "sandbox_not_found");
    if (exchange.method === "DELETE") return exchange.answer(204);
    exchange.answer(200, exchange.path === "/v1/sandboxes" ? [info] : { result: "2" });
  });
  const controller = new Controller({ baseUrl: url, token: "t", timeoutMs: 5000 });
  const spawn = {
    snapshotTag: "a",
    n: 2,
    perChildNetns: true,
    memoryLimitMib: 1,
    prewarm: true,
    liveFork: true,
    hugepages: false,
  };
  assert.deepEqual(await controller.spawnSandboxes(spawn), [info]);
  assert.deepEqual(requests[0].sent, {
    snapshot_tag: "a",
    n: 2,
    per_child_netns: true,
    memory_limit_mib: 1,
    prewarm: true,
    live_fork: true,
    hugepages: false,
  });
  await controller.branchSandbox("sb1", { tag: "b", mode: "live", wait: false, measure_diff: true });
  assert.deepEqual(requests[1].sent, { tag: "b", mode: "live", wait: false, measure_diff: true });
  const error = await controller.getSandbox("sbgone").catch((error) => error);
  assert.ok(error instanceof ControllerError);
  assert.deepEqual([error.status, error.url], [404, `${url}/v1/sandboxes/sbgone`]);
  const value = await Compatible.with({ snapshotTag: "a", baseUrl: url, token: "t" }, (sandbox) =>
    sandbox.eval("1 + 1"),
  );
  assert.equal(value.result, "2");
  assert.equal(requests.at(-1).method, "DELETE");
});

test("in E2B's shape a time of 0 is no limit", async (t) => {
  const bodies = [];
  const handle = async (exchange) => {
    if (exchange.method === "POST") bodies.push(await exchange.json());
    exchange.answer(200, { ...info, exit_code: 0, stdout: "", stderr: "" });
  };
  const socket = (open) =>
    open.once("message", (text) => {
      bodies.push(JSON.parse(text));
      open.send(JSON.stringify({ event: "exit", exit_code: 0 }));
    });
  const { url } = await served(t, handle, { socket });
  const sandbox = await E2b.connect("sb1", { apiUrl: url, apiKey: "k", requestTimeoutMs: 0 });
  await sandbox.commands.run("x", { timeoutMs: 0 });
  await sandbox.runCode("x", { timeoutMs: 0 });
  assert.deepEqual(bodies, [{ args: ["sh", "-c", "x"] }, { code: "x", timeout_secs: 30 * 24 * 3600 }]);
});

test("E2B's shape: a template is a tag, times are milliseconds, and a status is an exception", async (t) => {
  let state = "paused";
  const { url, requests } = await served(t, async (exchange) => {
    exchange.sent = await exchange.json();
    if (exchange.path.endsWith("/exec")) return exchange.answer(200, { exit_code: 3, stdout: "o", stderr: "e" });
    if (exchange.path.endsWith("/resume")) state = "running";
    if (exchange.method === "POST" && /sandboxes$|fork$/.test(exchange.path))
      return exchange.answer(201, { children: [info], errors: [] });
    exchange.answer(200, { ...info, state, labels: { a: "b" } });
  });
  const options = { apiUrl: url, apiKey: "e2b_secret" };
  const sandbox = await E2b.create({ ...options, metadata: { a: "b" }, allowInternetAccess: false });
  assert.deepEqual(requests[0].sent, { snapshot_tag: "base", timeout_secs: 300, labels: { a: "b" }, network: false });
  assert.equal(requests[0].request.headers.authorization, "Bearer secret");
  const error = await sandbox.commands.run("x", { timeoutMs: 1500 }).catch((error) => error);
  assert.ok(error instanceof CommandExitError);
  assert.deepEqual([error.exitCode, error.stdout, error.stderr], [3, "o", "e"]);
  assert.deepEqual(requests.at(-1).sent, { args: ["sh", "-c", "x"], timeout_secs: 2 });
  assert.equal(await sandbox.isRunning(), false);
  assert.equal(await (await E2b.connect("sb1", options)).isRunning(), true);
  assert.deepEqual((await sandbox.getInfo()).metadata, { a: "b" });
});
