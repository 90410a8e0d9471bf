// Every method takes a signal, and ends when that aborts.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as forkd from "@forkd/sdk";

import { eventually, served } from "./server.mjs";

const info = { id: "sb1", state: "running", snapshot_tag: "a", created_at_unix: 1 };
const first = (stream) => stream.next();
const path = { path: "/a" };
const attempt = () => assert.fail("there is no child");

/** A call of every method, with a signal: by class, what it is called on, and the method. */
const CALLS = {
  Client: {
    health: (c, o) => c.health(o),
    version: (c, o) => c.version(o),
    metrics: (c, o) => c.metrics(o),
    events: (c, o) => first(c.events({}, o)),
    waitForDaemon: (c, o) => c.waitForDaemon(o),
    listSandboxes: (c, o) => c.listSandboxes({}, o),
    listArchivedSandboxes: (c, o) => c.listArchivedSandboxes({}, o),
    createSandboxes: (c, o) => c.createSandboxes({}, o),
    createEachSandbox: (c, o) => c.createEachSandbox({}, o),
    getSandbox: (c, o) => c.getSandbox("a", {}, o),
    deleteSandbox: (c, o) => c.deleteSandbox("a", o),
    updateSandbox: (c, o) => c.updateSandbox("a", {}, o),
    getConsole: (c, o) => c.getConsole("a", {}, o),
    followConsole: (c, o) => first(c.followConsole("a", {}, o)),
    forkSandbox: (c, o) => c.forkSandbox("a", {}, o),
    forkEachSandbox: (c, o) => c.forkEachSandbox("a", {}, o),
    pingSandbox: (c, o) => c.pingSandbox("a", o),
    getStats: (c, o) => c.getStats("a", o),
    runStream: (c, o) => c.runStream({}, o),
    execStream: (c, o) => c.execStream("a", {}, o),
    execCommand: (c, o) => c.execCommand("a", {}, o),
    evalCode: (c, o) => c.evalCode("a", {}, o),
    readFile: (c, o) => c.readFile("a", path, o),
    readFileStream: (c, o) => first(c.readFileStream("a", path, o)),
    writeFile: (c, o) => c.writeFile("a", path, "data", o),
    deleteFile: (c, o) => c.deleteFile("a", path, o),
    listFiles: (c, o) => c.listFiles("a", path, o),
    statFile: (c, o) => c.statFile("a", path, o),
    makeFolder: (c, o) => c.makeFolder("a", path, o),
    moveFile: (c, o) => c.moveFile("a", {}, o),
    fileTree: (c, o) => c.fileTree("a", path, o),
    branchSandbox: (c, o) => c.branchSandbox("a", {}, o),
    pauseSandbox: (c, o) => c.pauseSandbox("a", o),
    resumeSandbox: (c, o) => c.resumeSandbox("a", o),
    rollbackSandbox: (c, o) => c.rollbackSandbox("a", {}, o),
    getTree: (c, o) => c.getTree(o),
    listSnapshots: (c, o) => c.listSnapshots({}, o),
    createSnapshot: (c, o) => c.createSnapshot({}, {}, o),
    getSnapshot: (c, o) => c.getSnapshot("a", o),
    deleteSnapshot: (c, o) => c.deleteSnapshot("a", {}, o),
    getSnapshotInfo: (c, o) => c.getSnapshotInfo("a", o),
    compactSnapshot: (c, o) => c.compactSnapshot("a", {}, o),
    setSnapshotOwner: (c, o) => c.setSnapshotOwner("a", {}, o),
    unloadSnapshot: (c, o) => c.unloadSnapshot("a", o),
    listWorkspaces: (c, o) => c.listWorkspaces({}, o),
    createWorkspace: (c, o) => c.createWorkspace({}, o),
    getWorkspace: (c, o) => c.getWorkspace("a", o),
    deleteWorkspace: (c, o) => c.deleteWorkspace("a", o),
    suspendWorkspace: (c, o) => c.suspendWorkspace("a", {}, o),
    resumeWorkspace: (c, o) => c.resumeWorkspace("a", o),
    listTokens: (c, o) => c.listTokens(o),
    createToken: (c, o) => c.createToken({}, o),
    deleteToken: (c, o) => c.deleteToken("a", o),
    rotateToken: (c, o) => c.rotateToken("a", o),
    openAgentPort: (c, o) => c.openAgentPort("a", o),
    closeAgentPort: (c, o) => c.closeAgentPort("a", o),
    sendJsonLine: (c, o) => c.sendJsonLine("a", {}, o),
  },
  "Sandbox.": {
    create: (client, o) => forkd.Sandbox.create("a", { client, ...o }),
    connect: (client, o) => forkd.Sandbox.connect("a", { client, ...o }),
    list: (client, o) => first(forkd.Sandbox.list({ client, ...o })),
  },
  Sandbox: {
    info: (s, o) => s.info(o),
    ping: (s, o) => s.ping(o),
    metrics: (s, o) => s.metrics(o),
    update: (s, o) => s.update({ labels: {} }, o),
    setTimeout: (s, o) => s.setTimeout(1, o),
    kill: (s, o) => s.kill(o),
    console: (s, o) => s.console(o),
    eval: (s, o) => s.eval("1", o),
    runCode: (s, o) => s.runCode("1", o),
    fork: (s, o) => s.fork(2, o),
    branch: (s, o) => s.branch(o),
    rollback: (s, o) => s.rollback(undefined, o),
    pause: (s, o) => s.pause(o),
    resume: (s, o) => s.resume(o),
    tree: (s, o) => s.tree(o),
    tryEach: (s, o) => s.tryEach([attempt], o),
    bestOf: (s, o) => s.bestOf(2, attempt, Number, o),
    firstSuccess: (s, o) => s.firstSuccess([attempt], o),
    checkpoint: (s, o) => s.checkpoint(attempt, o),
    diff: (s, o) => s.diff(s, "/", o),
  },
  Commands: {
    run: (s, o) => s.commands.run("a", o),
  },
  Files: {
    read: (s, o) => s.files.read("/a", o),
    write: (s, o) => s.files.write("/a", "data", o),
    list: (s, o) => s.files.list("/a", o),
    stat: (s, o) => s.files.stat("/a", o),
    exists: (s, o) => s.files.exists("/a", o),
    remove: (s, o) => s.files.remove("/a", o),
    rename: (s, o) => s.files.rename("/a", "/b", o),
    makeDir: (s, o) => s.files.makeDir("/a", o),
    tree: (s, o) => s.files.tree("/a", o),
    upload: (s, o) => s.files.upload(process.execPath, "/a", o),
    download: (s, o) => s.files.download("/a", "/nowhere", o),
  },
  "Snapshot.": {
    warm: (client, o) => forkd.Snapshot.warm("python", { client, ...o }),
    get: (client, o) => forkd.Snapshot.get("a", { client, ...o }),
    list: (client, o) => first(forkd.Snapshot.list({ client, ...o })),
  },
  Snapshot: {
    info: (s, o) => s.info(o),
    waitReady: (s, o) => s.waitReady(o),
    spawn: (s, o) => s.spawn(1, o),
    delete: (s, o) => s.delete(o),
    unload: (s, o) => s.unload(o),
    compact: (s, o) => s.compact("b", o),
  },
};

/** The names of the public methods of a class, or of its static ones. */
const methodsOf = (object) =>
  Object.entries(Object.getOwnPropertyDescriptors(object))
    .filter(([name, { value }]) => typeof value === "function" && name !== "constructor" && name !== "prototype")
    .map(([name]) => name);

test("every method ends when its signal aborts, before the daemon answers", async (t) => {
  const held = [];
  const { client, requests } = await served(t, (exchange) => void held.push(exchange), { upgrade: () => {} });
  const sandbox = new forkd.Sandbox(client(), info);
  const snapshot = new forkd.Snapshot(client(), { tag: "a", status: "writing" });
  const on = { "Sandbox.": client(), "Snapshot.": client(), Client: client(), Snapshot: snapshot };
  const here = {
    Client: forkd.Client.prototype,
    "Sandbox.": forkd.Sandbox,
    Sandbox: forkd.Sandbox.prototype,
    Commands: sandbox.commands.constructor.prototype,
    Files: sandbox.files.constructor.prototype,
    "Snapshot.": forkd.Snapshot,
    Snapshot: forkd.Snapshot.prototype,
  };
  for (const [kind, calls] of Object.entries(CALLS)) {
    for (const name of methodsOf(here[kind])) assert.ok(name in calls, `${kind} ${name}: call it here`);
    for (const [name, call] of Object.entries(calls)) {
      const controller = new AbortController();
      const reason = new Error(`enough of ${kind} ${name}`);
      const { signal } = controller;
      requests.length = 0;
      const pending = call(on[kind] ?? sandbox, { signal });
      pending.catch(() => {});
      await eventually(() => requests.length > 0, `${kind} ${name} sent`);
      controller.abort(reason);
      // The clean-up of what a request makes waits for the answer.
      const answers = setInterval(() => held.splice(0).forEach((each) => each.refuse(409, "tag_taken")), 100);
      await assert.rejects(pending, reason).finally(() => clearInterval(answers));
      requests.length = 0;
      await assert.rejects(async () => call(on[kind] ?? sandbox, { signal }), reason);
      assert.equal(requests.length, 0, `${kind} ${name} is not sent when the signal has aborted`);
    }
  }
});

test("what a snapshot or a checkpoint made before its abort is removed when the daemon answers", async (t) => {
  let answer;
  const { client, requests } = await served(t, async (exchange) => {
    if (exchange.method === "DELETE") return exchange.answer(204);
    const { tag } = await exchange.json();
    await new Promise((resolve) => (answer = resolve));
    exchange.answer(202, { tag, status: "writing" });
  });
  const sandbox = new forkd.Sandbox(client(), info);
  for (const call of [
    (signal) => forkd.Snapshot.warm("python", { tag: "mine", client: client(), signal }),
    (signal) => sandbox.checkpoint(attempt, { tag: "mine", signal }),
  ]) {
    answer = undefined;
    requests.length = 0;
    const controller = new AbortController();
    const pending = call(controller.signal);
    await eventually(() => answer !== undefined, "the daemon works");
    controller.abort(new Error("enough"));
    setTimeout(answer, 100);
    await assert.rejects(pending, { message: "enough" });
    assert.deepEqual(
      requests.map(({ method, path }) => `${method} ${path}`).slice(1),
      ["DELETE /v1/snapshots/mine"],
    );
  }
});
