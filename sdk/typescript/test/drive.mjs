// Every call of the SDK, against a real daemon with one warmed snapshot.
//
//   FORKD_URL=… FORKD_TOKEN=… DRIVE_TAG=sdk node drive.mjs
//
// The snapshot is of the image `python`, warmed with `import json`.

import assert from "node:assert/strict";
import { mkdir, mkdtemp, readFile, readlink, rm, stat, symlink, writeFile } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

import * as forkd from "@forkd/sdk";
import { Controller, ControllerError, Sandbox as OldSandbox } from "@forkd/sdk/compat";
import { Sandbox as E2bSandbox } from "@forkd/sdk/e2b";

const { Client, Sandbox, Snapshot } = forkd;
const TAG = process.env.DRIVE_TAG ?? "sdk";
/** The marks of what this run makes: other programs may use the same daemon. */
const RUN = `ts-${process.pid}-${Date.now().toString(36)}`;
/** The parts run at the same time, each with a sandbox and a label of its own. */
const labelsOf = (part) => ({ drive: RUN, part });
const client = new Client();
const started = Date.now();

const step = (name) => console.error(`${((Date.now() - started) / 1000).toFixed(1)} s  ${name}`);
const ours = async (labels = { drive: RUN }) => {
  const ids = [];
  for await (const { id } of Sandbox.list({ labels, client })) ids.push(id);
  return ids;
};
const freePort = () =>
  new Promise((resolve) => {
    const server = createServer().listen(0, "127.0.0.1", () => {
      const { port } = server.address();
      server.close(() => resolve(port));
    });
  });
const fails = (work, kind, code) =>
  assert.rejects(work, (error) => {
    assert.ok(error instanceof kind, `${error?.name} ${error?.code}: ${error?.message}`);
    if (code !== undefined) assert.equal(error.code, code);
    assert.ok(error.message.length > 10);
    return true;
  });

async function daemon() {
  step("the daemon");
  assert.equal((await client.waitForDaemon()).api, "v1");
  assert.deepEqual(await client.health(), { ok: true });
  assert.match(await client.metrics(), /^forkd_/m);
  await fails(new Client({ token: "wrong" }).listSandboxes(), forkd.AuthenticationError, "unauthorized");
  const nothing = new Client({ url: `http://127.0.0.1:${await freePort()}` });
  await fails(nothing.health(), forkd.DaemonUnreachableError, "daemon_unreachable");
  await fails(Sandbox.create("no-such-snapshot"), forkd.NotFoundError, "snapshot_not_found");
  await fails(Sandbox.connect("sbnosuch"), forkd.SandboxEndedError, "sandbox_not_found");
  const snapshot = await Snapshot.get(TAG);
  assert.equal(snapshot.status, "ready");
  assert.ok((await client.getSnapshotInfo(TAG)).layers.length > 0);
  const tags = [];
  for await (const { tag } of Snapshot.list()) tags.push(tag);
  assert.ok(tags.includes(TAG));
  assert.ok((await client.listSnapshots({ limit: 1 })).length === 1);
  const archived = await client.listArchivedSandboxes({ limit: 1 });
  assert.ok(archived.every(({ state }) => state === "archived"));
}

async function commands(sandbox) {
  step("commands");
  const { commands } = sandbox;
  const result = await commands.run("echo out; echo err >&2; cat", { stdin: "in", cwd: "/tmp", envs: { A: "b" } });
  assert.deepEqual([result.stdout, result.stderr, result.exitCode], ["out\nin", "err\n", 0]);
  assert.equal((await commands.run(["printf", "%s", "a b"])).stdout, "a b");
  await assert.rejects(commands.run("echo why >&2; exit 3"), (error) => {
    assert.ok(error instanceof forkd.CommandError);
    assert.deepEqual([error.exitCode, error.stderr], [3, "why\n"]);
    return true;
  });
  assert.equal((await commands.run("exit 3", { check: false })).exitCode, 3);
  await fails(commands.run("sleep 600", { timeoutSecs: 1 }), forkd.CommandTimeoutError, "command_timeout");

  step("streams");
  const pieces = [];
  const streamed = await commands.run("for i in 1 2 3; do echo $i; done; cat; echo e >&2", {
    stdin: new TextEncoder().encode("bytes\n"),
    onStdout: (text) => pieces.push(text),
    onStderr: (text) => pieces.push(text),
  });
  assert.equal(streamed.stdout, "1\n2\n3\nbytes\n");
  assert.equal(pieces.join("").length, streamed.stdout.length + streamed.stderr.length);
  const big = "x".repeat(1_500_000);
  const counted = await commands.run("wc -c", {
    stdin: (async function* () {
      yield big;
      yield big;
    })(),
  });
  assert.equal(counted.stdout.trim(), "3000000");

  const cat = await commands.run("cat", { background: true });
  assert.ok(cat.pid > 0);
  await cat.sendStdin("ä€\n");
  await cat.closeStdin();
  let text = "";
  for await (const event of cat) text += event.text;
  assert.equal(text, "ä€\n");
  assert.equal((await cat.wait()).exitCode, 0);
  assert.equal(await cat.kill(), false);

  const sleeping = await commands.run("sleep 100", { background: true, check: false });
  sleeping.signal("SIGTERM");
  assert.equal((await sleeping.wait()).signal, 15);
  const killed = await commands.run("sleep 100", { background: true });
  assert.equal(await killed.kill(), true);
  const controller = new AbortController();
  const aborted = commands.run("sleep 100", { signal: controller.signal });
  setTimeout(() => controller.abort(), 300);
  await assert.rejects(aborted, { name: "AbortError" });

  step("a terminal");
  const terminal = await commands.run(["sh"], { background: true, pty: { cols: 70, rows: 20 }, check: false });
  terminal.resize(90, 30);
  await terminal.sendStdin("stty size; exit 5\n");
  const ended = await terminal.wait();
  assert.equal(ended.exitCode, 5);
  assert.match(ended.stdout, /30 90/);
}

async function files(sandbox) {
  step("files");
  const { files } = sandbox;
  const root = "/root/drive";
  await files.makeDir(`${root}/folder`);
  assert.equal((await files.write(`${root}/a.txt`, "hällo", { mode: 0o600 })).size, 6);
  assert.equal(await files.read(`${root}/a.txt`), "hällo");
  await files.write(
    `${root}/b.bin`,
    (async function* () {
      yield new Uint8Array([1, 2]);
      yield "3";
    })(),
  );
  assert.deepEqual([...(await files.read(`${root}/b.bin`, { format: "bytes" }))], [1, 2, 51]);
  const large = Buffer.alloc(3_000_000, 7);
  await files.write(`${root}/large`, large);
  let length = 0;
  for await (const piece of await files.read(`${root}/large`, { format: "stream" })) length += piece.length;
  assert.equal(length, large.length);
  assert.equal((await files.stat(`${root}/a.txt`)).mode, 0o600);
  assert.equal(await files.exists(`${root}/a.txt`), true);
  assert.equal(await files.exists(`${root}/none`), false);
  await fails(files.read(`${root}/none`), forkd.NotFoundError, "guest_not_found");
  await fails(files.read(`${root}/none`, { format: "stream" }), forkd.NotFoundError, "guest_not_found");
  await files.rename(`${root}/b.bin`, `${root}/folder/c.bin`);
  const names = (await files.list(root, { depth: 2 })).map(({ path }) => path);
  assert.deepEqual(names, [`${root}/a.txt`, `${root}/folder`, `${root}/folder/c.bin`, `${root}/large`]);
  await files.remove(`${root}/large`);

  step("folders");
  const local = await mkdtemp(join(tmpdir(), "forkd-"));
  try {
    await mkdir(join(local, "up/deep/empty"), { recursive: true });
    await writeFile(join(local, "up/one"), "1", { mode: 0o755 });
    await writeFile(join(local, "up/deep/two"), "2");
    await symlink("/etc/passwd", join(local, "up/link"));
    const sent = await files.upload(join(local, "up"), `${root}/up`);
    assert.deepEqual(sent, { files: 2, skipped: [join(local, "up/link")] });
    await sandbox.commands.run("ln -s /etc/passwd link; mkfifo pipe; printf x > 'back\\slash'", { cwd: `${root}/up` });
    const got = await files.download(`${root}/up/`, join(local, "down"));
    assert.deepEqual(got, { files: 3, skipped: [`${root}/up/link`, `${root}/up/pipe`] });
    assert.equal(await readFile(join(local, "down/deep/two"), "utf8"), "2");
    assert.equal((await stat(join(local, "down/one"))).mode & 0o777, 0o755);
    assert.ok((await stat(join(local, "down/deep/empty"))).isDirectory());
    // A link that is in the way is replaced or refused, not followed.
    await rm(join(local, "down/one"));
    await symlink(join(local, "elsewhere"), join(local, "down/one"));
    await files.download(`${root}/up/one`, join(local, "down/one"));
    assert.equal(await readFile(join(local, "down/one"), "utf8"), "1");
    await assert.rejects(readlink(join(local, "elsewhere")), { code: "ENOENT" });
  } finally {
    await rm(local, { recursive: true });
  }
  await files.remove(root, { recursive: true });
}

async function code(sandbox) {
  step("code");
  assert.deepEqual(await sandbox.eval("json.loads('[1, {\"a\": null}]')"), [1, { a: null }]);
  assert.equal(await sandbox.eval("x = 41"), null);
  assert.equal(await sandbox.eval("x + 1"), 42);
  assert.equal(await sandbox.eval("{1}"), "{1}");
  await assert.rejects(sandbox.eval("1 / 0"), (error) => {
    assert.ok(error instanceof forkd.EvalError);
    assert.equal(error.errorName, "ZeroDivisionError");
    assert.match(error.traceback, /1 \/ 0|ZeroDivisionError/);
    return true;
  });
  await fails(sandbox.eval("while True: pass", { timeoutSecs: 1 }), forkd.EvalTimeoutError, "eval_timeout");
  const printed = [];
  const ran = await sandbox.runCode("print('p')\n[x]", { onStdout: (text) => printed.push(text) });
  assert.deepEqual([ran.text, ran.value, ran.stdout, ran.error, printed], ["[41]", [41], "p\n", undefined, ["p\n"]]);
  assert.equal((await sandbox.runCode("nonsense")).error.name, "NameError");
}

async function sandboxes(sandbox, labels) {
  step("a sandbox");
  assert.equal((await sandbox.ping()).pong, true);
  assert.equal((await sandbox.info()).snapshot_tag, TAG);
  assert.ok((await sandbox.metrics()).private_kib > 0);
  await sandbox.setTimeout(900);
  await sandbox.update({ idleTimeoutSecs: null, onTimeout: "kill", labels });
  assert.ok((await sandbox.info()).expires_at_unix > 0);
  assert.equal(typeof (await sandbox.console({ tail: 5 })), "string");
  const again = await Sandbox.connect(sandbox.id);
  assert.equal(again.id, sandbox.id);
  assert.deepEqual(await ours(labels), [sandbox.id]);
  const follow = new AbortController();
  const line = client.followConsole(sandbox.id, {}, { signal: follow.signal });
  await sandbox.commands.run("echo a line > /dev/console");
  for await (const text of line) if (text.includes("a line")) break;
  follow.abort();
  const events = [];
  for await (const event of client.events({ sandbox: sandbox.id, since: "0", follow: false })) events.push(event.kind);
  assert.ok(events.includes("sandbox.running"), events.join());
  assert.match((await client.openAgentPort(sandbox.id)).target, /:\d+$/);
  assert.equal((await client.sendJsonLine(sandbox.id, { action: "ping" })).pong, true);
  await client.closeAgentPort(sandbox.id);
  const running = await client.getSandbox(sandbox.id, { wait: "ready", timeout_secs: 5 });
  assert.equal(running.state, "running");
  assert.ok((await sandbox.tree()).nodes.some(({ id }) => id === `sandbox:${sandbox.id}`));

  step("pause and resume");
  assert.equal((await sandbox.pause()).state, "paused");
  await fails(sandbox.commands.run("true"), forkd.SandboxPausedError, "sandbox_paused");
  assert.equal((await sandbox.resume()).state, "running");
}

async function forks(sandbox, labels) {
  step("forks");
  await sandbox.eval("n = 10");
  const children = await sandbox.fork(2, { labels, envs: { SECRET: "s" } });
  assert.deepEqual(await Promise.all(children.map((child, i) => child.eval(`n + ${i}`))), [10, 11]);
  assert.equal((await children[0].commands.run("echo $SECRET")).stdout, "s\n");
  assert.equal((await ours(labels)).length, 3);
  await Promise.all(children.map((child) => child.kill()));
  assert.equal(await children[0].kill(), false);

  step("attempts");
  const attempt = (code) => (child) => child.eval(code);
  const outcomes = await sandbox.tryEach([attempt("n * 2"), attempt("1 / 0")], { parallel: 1 });
  assert.deepEqual(
    outcomes.map(({ ok, value }) => [ok, value]),
    [
      [true, 20],
      [false, undefined],
    ],
  );
  assert.ok(outcomes[1].error instanceof forkd.EvalError && outcomes[1].seconds > 0);
  const best = await sandbox.bestOf(
    2,
    (child, { index }) => child.eval(`n - ${index}`),
    (value) => -value,
    { keep: true },
  );
  assert.deepEqual([best.index, best.value, best.score], [1, 9, -9]);
  assert.equal(await best.sandbox.eval("n"), 10);
  await best.sandbox.kill();
  const slow = (child) => child.commands.run("sleep 120", { timeoutSecs: 150 });
  const first = await sandbox.firstSuccess([slow, attempt("n + 1")]);
  assert.equal(first.value, 11);
  // None is left: neither children of attempts nor of an aborted fork.
  const controller = new AbortController();
  const aborted = sandbox.fork(2, { labels, signal: controller.signal });
  setTimeout(() => controller.abort(), 20);
  await assert.rejects(aborted, { name: "AbortError" });
  // On a slow daemon the children end after the call.
  const deadline = Date.now() + 60_000;
  while ((await ours(labels)).length > 1 && Date.now() < deadline)
    await new Promise((resolve) => setTimeout(resolve, 200));
  assert.deepEqual(await ours(labels), [sandbox.id]);
}

async function branches(sandbox, labels) {
  step("branches");
  await sandbox.eval("n = 10");
  const branch = await sandbox.branch({ tag: `${RUN}-a`, wait: false });
  try {
    const seen = [];
    await branch.waitReady({ onProgress: ({ phase }) => seen.push(phase) });
    assert.equal(seen.at(-1), "ready");
    await sandbox.eval("n = 99");
    const [child] = await branch.spawn(1, { labels });
    assert.equal(await child.eval("n"), 10);
    await child.kill();
    await sandbox.rollback();
    assert.equal(await sandbox.eval("n"), 10);

    step("checkpoints");
    const boom = new Error("boom");
    await assert.rejects(
      sandbox.checkpoint(async () => {
        await sandbox.eval("n = 1");
        throw boom;
      }),
      boom,
    );
    assert.equal(await sandbox.eval("n"), 10);
    assert.equal(await sandbox.checkpoint(() => sandbox.eval("n + 1"), { tag: `${RUN}-c` }), 11);
    await fails(Snapshot.get(`${RUN}-c`), forkd.NotFoundError, "snapshot_not_found");
    const compacted = await branch.compact(`${RUN}-b`);
    await compacted.unload();
    await compacted.delete();
  } finally {
    await branch.delete({ force: true });
  }
}

async function differences(sandbox, labels) {
  step("a diff");
  await sandbox.commands.run(
    "mkdir -p /root/d && cd /root/d && echo 1 > same && echo 1 > changed && echo 1 > gone && : > mode && : > kind",
  );
  const [child] = await sandbox.fork(1, { labels });
  try {
    const change =
      "cd /root/d && touch same && echo 2 > changed && rm gone kind && mkdir kind && chmod 755 mode && echo 1 > new";
    await child.commands.run(change);
    const changes = await sandbox.diff(child, "/root/d");
    const expected = ["changed modified", "gone removed", "kind type", "mode mode", "new added"];
    assert.deepEqual(
      changes.map(({ path, kind }) => `${path.slice("/root/d/".length)} ${kind}`),
      expected,
    );
  } finally {
    await child.kill();
  }
}

async function workspacesAndTokens() {
  step("workspaces and tokens");
  const name = `${RUN}-w`;
  const made = await client.createWorkspace({ name, snapshot_tag: TAG });
  assert.equal(made.status, "running");
  assert.equal((await client.suspendWorkspace(name, { diff: true })).status, "suspended");
  assert.equal((await client.resumeWorkspace(name)).status, "running");
  assert.equal((await client.getWorkspace(name)).name, name);
  assert.ok((await client.listWorkspaces()).some((workspace) => workspace.name === name));
  await client.deleteWorkspace(name);
  const token = await client.createToken({ name: RUN, scope: "read" });
  const reader = new Client({ token: token.token });
  await fails(reader.createSandboxes({ snapshot_tag: TAG }), forkd.PermissionDeniedError, "forbidden");
  await client.rotateToken(RUN);
  await fails(reader.listSandboxes(), forkd.AuthenticationError);
  assert.ok((await client.listTokens()).some(({ name }) => name === RUN));
  await client.deleteToken(RUN);
}

async function older(labels) {
  step("the shapes of other clients");
  const controller = new Controller();
  const value = await OldSandbox.with({ snapshotTag: TAG }, async (sandbox) => {
    const { id } = sandbox;
    assert.ok((await controller.listSandboxes()).some((each) => each.id === id));
    assert.equal((await controller.getSandbox(id)).id, id);
    assert.equal((await controller.pingSandbox(id)).pong, true);
    assert.equal((await controller.execCommand(id, ["echo", "a"], { timeoutSecs: 60 })).stdout, "a\n");
    assert.equal((await sandbox.exec(["echo", "b"])).stdout, "b\n");
    assert.equal((await sandbox.ping()).pong, true);
    const branch = await controller.branchSandbox(id, { tag: `${RUN}-o`, mode: "live", wait: true });
    assert.equal(branch.tag, `${RUN}-o`);
    assert.ok((await controller.listSnapshots()).some(({ tag }) => tag === branch.tag));
    await controller.deleteSnapshot(branch.tag);
    assert.equal((await sandbox.eval("1 + 1")).result, "2");
    const [other] = await controller.spawnSandboxes({ snapshotTag: TAG, n: 1 });
    await controller.killSandbox(other.id);
    const gone = (error) => error instanceof ControllerError && error.status === 404;
    await assert.rejects(controller.getSandbox(other.id), gone);
    return (await controller.evalCode(id, "6 * 7")).result;
  });
  assert.equal(value, "42");

  const box = await E2bSandbox.create(TAG, { timeoutMs: 600_000, metadata: labels, envs: { B: "c" } });
  assert.match(box.sandboxId, /^sb/);
  assert.equal((await box.commands.run("echo $B")).stdout, "c\n");
  await assert.rejects(box.commands.run("exit 4"), (error) => error.exitCode === 4);
  const handle = await box.commands.run("cat", { background: true, stdin: true });
  await handle.sendStdin("hi");
  await handle.closeStdin();
  assert.equal((await handle.wait()).stdout, "hi");
  await box.files.write("/root/e.txt", "e2b");
  assert.equal(await box.files.read("/root/e.txt"), "e2b");
  assert.ok((await box.files.list("/root")).some(({ name, type }) => name === "e.txt" && type === "file"));
  const execution = await box.runCode("print('x')\n1 + 1");
  assert.deepEqual([execution.text, execution.logs.stdout], ["2", ["x\n"]]);
  assert.equal((await box.runCode("1 / 0")).error.name, "ZeroDivisionError");
  const [fork] = await box.fork();
  assert.equal(await fork.files.read("/root/e.txt"), "e2b");
  await fork.kill();
  await box.setTimeout(300_000);
  const connected = await E2bSandbox.connect(box.sandboxId);
  assert.equal(await connected.isRunning(), true);
  await box.kill();
  assert.equal(await connected.isRunning(), false);
}

async function warm(labels) {
  step("a snapshot of one's own");
  const seen = new Set();
  const onProgress = ({ phase }) => seen.add(phase);
  const snapshot = await Snapshot.warm("python", { tag: `${RUN}-p`, warmPython: "v = 5", onProgress });
  try {
    assert.equal(snapshot.status, "ready");
    assert.ok(seen.has("ready"), [...seen].join());
    const [child] = await snapshot.spawn(1, { labels });
    assert.equal(await child.eval("v"), 5);
    await child.kill();
  } finally {
    await snapshot.delete();
  }
  const booted = await Sandbox.create({ image: "python", labels });
  assert.equal((await booted.commands.run("echo up")).stdout, "up\n");
  await booted.kill();
}

/** A part with a sandbox of its own. */
async function part(name, ...steps) {
  const labels = labelsOf(name);
  const sandbox = await Sandbox.create(TAG, { labels, timeoutSecs: 1200 });
  for (const each of steps) await each(sandbox, labels);
  assert.equal(await sandbox.kill(), true);
}

try {
  const parts = [
    daemon(),
    part("one", sandboxes, commands, files, code),
    part("forks", forks, differences),
    part("branches", branches),
    workspacesAndTokens(),
    older(labelsOf("older")),
  ];
  // A boot takes a minute in an emulated machine.
  if (process.env.DRIVE_BOOTS) parts.push(warm(labelsOf("warm")));
  const failed = (await Promise.allSettled(parts)).find(({ status }) => status === "rejected");
  if (failed !== undefined) throw failed.reason;
  assert.deepEqual(await ours(), []);
  step("done");
  console.log("the TypeScript SDK works");
} finally {
  for await (const left of Sandbox.list({ labels: { drive: RUN } })) await left.kill();
}
