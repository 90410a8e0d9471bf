// Copies of folders, diffs and checkpoints, with a sandbox whose answers are hostile.

import assert from "node:assert/strict";
import { mkdir, mkdtemp, readdir, readFile, rm, symlink } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";

import * as forkd from "@forkd/sdk";

import { served } from "./server.mjs";

const info = { id: "sb1", state: "running", snapshot_tag: "origin" };

async function scratch(t) {
  const folder = await mkdtemp(join(tmpdir(), "forkd-"));
  t.after(() => rm(folder, { recursive: true }));
  return folder;
}

/** A sandbox with these entries in `/srv`. Every file has its path as content. */
async function guest(t, entries) {
  const { client } = await served(t, (exchange) => {
    const path = exchange.url.searchParams.get("path");
    if (exchange.path.endsWith("/files/stat")) return exchange.answer(200, { path, type: "directory", mode: 0o755 });
    if (exchange.path.endsWith("/files/list")) return exchange.answer(200, { entries });
    exchange.reply.end(path);
  });
  return new forkd.Sandbox(client(), info);
}

const file = (path, type = "file") => ({ path, type, mode: 0o6777, name: "name" });

async function everything(folder) {
  const found = await readdir(folder, { withFileTypes: true });
  const below = await Promise.all(
    found.map(async (entry) =>
      entry.isDirectory()
        ? (await everything(join(folder, entry.name))).map((name) => `${entry.name}/${name}`)
        : [entry.name],
    ),
  );
  return below.flat().sort();
}

test("a hostile name in a list is an error, and nothing is copied", async (t) => {
  const folder = await scratch(t);
  const hostile = [
    "/srv/../escaped",
    "/srv/a/../../escaped",
    "/srv/./dot",
    "/srv//empty",
    "/srv/nul\0",
    "/etc/passwd",
    "escaped",
    "",
    "/srv",
    "/srv/",
    "/srvother/x",
    `${folder}/escaped`,
  ];
  const good = [file("/srv/good"), file("/srv/deep/er/file"), file("/srv/link", "symlink"), file("/srv/pipe", "other")];
  for (const path of hostile) {
    for (const type of ["file", "directory", "symlink"]) {
      const sandbox = await guest(t, [...good, file(path, type)]);
      const copied = sandbox.files.download("/srv", join(folder, "in"));
      await assert.rejects(copied, { name: "ForkdError", code: "hostile_name" }, path);
    }
  }
  assert.deepEqual(await everything(folder), []);
  const sandbox = await guest(t, good);
  const { files, skipped } = await sandbox.files.download("/srv", join(folder, "in"));
  assert.deepEqual([files, skipped], [2, ["/srv/link", "/srv/pipe"]]);
  assert.deepEqual(await everything(folder), ["in/deep/er/file", "in/good"]);
  assert.equal(await readFile(join(folder, "in/good"), "utf8"), "/srv/good");
});

test("a link in the local folder is not followed", async (t) => {
  const folder = await scratch(t);
  await mkdir(join(folder, "in"));
  await mkdir(join(folder, "outside"));
  await symlink(join(folder, "outside"), join(folder, "in/link"));
  await symlink(join(folder, "outside/file"), join(folder, "in/file"));
  const through = await guest(t, [file("/srv/link", "directory"), file("/srv/link/file")]);
  await assert.rejects(through.files.download("/srv", join(folder, "in")), { code: "local_conflict" });
  const over = await guest(t, [file("/srv/file")]);
  await over.files.download("/srv", join(folder, "in"));
  assert.deepEqual(await everything(folder), ["in/file", "in/link"]);
});

test("a download that fails leaves no part of a file", async (t) => {
  const folder = await scratch(t);
  const { client } = await served(t, (exchange) => {
    const path = exchange.url.searchParams.get("path");
    if (exchange.path.endsWith("/files/stat")) return exchange.answer(200, { path, type: "file", mode: 0o644 });
    exchange.reset("part");
  });
  const sandbox = new forkd.Sandbox(client(), info);
  await assert.rejects(sandbox.files.download("/srv/a", join(folder, "a")), forkd.StreamBrokenError);
  assert.deepEqual(await everything(folder), []);
});

/** A tree as the daemon sends it. */
const tree = (entries) => ({ path: "/srv", entries });
const entry = (path, more) => ({
  path,
  kind: "file",
  size: 1,
  modified_unix_ms: 1,
  mode: 420,
  sha256: "aa",
  target: null,
  ...more,
});

test("a diff names what was added, removed, modified, and what became another type or mode", async (t) => {
  const trees = {
    sb1: tree([
      entry("same", { modified_unix_ms: 5 }),
      entry("content"),
      entry("size"),
      entry("both"),
      entry("mode"),
      entry("link", { kind: "symlink", target: "a", sha256: null }),
      entry("type"),
      entry("gone"),
      entry("folder", { kind: "directory", size: 4096, sha256: null }),
      entry("\ufffd", { path_base64: "/w==" }),
      entry("\ufffd", { path_base64: "/g==" }),
      entry("unreadable", { sha256: null, incomplete: "unreadable" }),
      entry("changing"),
      entry("grows", { sha256: null, incomplete: "changing" }),
      entry("closed", { kind: "directory", sha256: null, incomplete: "unreadable" }),
      entry("proc", { kind: "directory", sha256: null, incomplete: "file_system" }),
    ]),
    sb2: tree([
      entry("same"),
      entry("content", { sha256: "bb" }),
      entry("size", { size: 2, sha256: null }),
      entry("both", { sha256: "bb", mode: 0 }),
      entry("mode", { mode: 493 }),
      entry("link", { kind: "symlink", target: "b", sha256: null }),
      entry("type", { kind: "directory", sha256: null }),
      entry("new/é"),
      entry("folder", { kind: "directory", size: 8192, sha256: null }),
      entry("\ufffd", { path_base64: "/g==" }),
      entry("unreadable", { sha256: null, incomplete: "unreadable" }),
      entry("changing", { sha256: null, incomplete: "changing" }),
      entry("grows", { size: 2 }),
      entry("closed", { kind: "directory", sha256: null, incomplete: "unreadable" }),
      entry("proc", { kind: "directory", sha256: null, incomplete: "file_system" }),
    ]),
  };
  const { client, requests } = await served(t, (exchange) => exchange.answer(200, trees[exchange.path.split("/")[3]]));
  const [one, other] = ["sb1", "sb2"].map((id) => new forkd.Sandbox(client(), { ...info, id }));
  const changes = await one.diff(other, "/srv");
  assert.deepEqual(
    changes.map(({ path, kind, before, after }) => [path, kind, before !== undefined, after !== undefined]),
    [
      ["/srv/both", "modified", true, true],
      ["/srv/changing", "unknown", true, true],
      ["/srv/closed", "unknown", true, true],
      ["/srv/content", "modified", true, true],
      ["/srv/gone", "removed", true, false],
      ["/srv/grows", "modified", true, true],
      ["/srv/link", "modified", true, true],
      ["/srv/mode", "mode", true, true],
      ["/srv/new/é", "added", false, true],
      ["/srv/size", "modified", true, true],
      ["/srv/type", "type", true, true],
      ["/srv/unreadable", "unknown", true, true],
      ["/srv/\ufffd", "removed", true, false],
    ],
  );
  assert.deepEqual(
    requests.map(({ url }) => url.search),
    ["?path=%2Fsrv&hash=true", "?path=%2Fsrv&hash=true"],
  );
});

/** A daemon that logs what is asked of its sandbox. */
async function logged(t, { rollback = (exchange) => exchange.answer(200, info), branch, remove } = {}) {
  const log = [];
  const { client } = await served(t, async (exchange) => {
    const body = await exchange.json();
    if (exchange.path.endsWith("/branch")) {
      if (branch !== undefined) return branch(exchange, body);
      log.push(`branch ${body.mode} ${body.wait}`);
      return exchange.answer(202, { tag: body.tag ?? "made", status: "writing" });
    }
    if (exchange.path.endsWith("/rollback")) {
      log.push(`rollback ${body.to}`);
      return rollback(exchange, body);
    }
    log.push(`${exchange.method} ${exchange.path.split("/").at(-1)}${exchange.url.search}`);
    if (remove === undefined || !remove(exchange)) exchange.answer(204);
  });
  return { log, sandbox: new forkd.Sandbox(client(), info) };
}

test("a checkpoint rolls back when its body throws, and removes its branch either way", async (t) => {
  const { log, sandbox } = await logged(t);
  assert.equal(await sandbox.checkpoint(async () => 5, { tag: "c" }), 5);
  assert.deepEqual(log.splice(0), ["branch live false", "DELETE c"]);
  const boom = new Error("boom");
  const throws = () => {
    throw boom;
  };
  await assert.rejects(sandbox.checkpoint(throws, { tag: "c" }), boom);
  assert.deepEqual(log.splice(0), ["branch live false", "rollback c", "DELETE c"]);
  const controller = new AbortController();
  const { signal } = controller;
  const body = () => {
    controller.abort();
    return new Promise(() => {});
  };
  await assert.rejects(sandbox.checkpoint(body, { tag: "c", signal }), { name: "AbortError" });
  assert.deepEqual(log.splice(0), ["branch live false", "rollback c", "DELETE c"]);
  await assert.rejects(sandbox.checkpoint(body, { tag: "c", signal }), { name: "AbortError" });
  assert.deepEqual(log, []);
});

test("a checkpoint that cannot roll back keeps its branch, and names it beside the error of the body", async (t) => {
  let busy = true;
  const rollback = (exchange) => (busy ? exchange.refuse(409, "sandbox_busy") : exchange.answer(200, info));
  const { log, sandbox } = await logged(t, { rollback });
  const boom = new Error("boom");
  const error = await sandbox.checkpoint(() => Promise.reject(boom), { tag: "c" }).catch((error) => error);
  assert.ok(error instanceof forkd.CheckpointError);
  assert.deepEqual([error.code, error.status, error.tag, error.cause], ["sandbox_busy", 409, "c", boom]);
  assert.equal(error.rollbackError.code, "sandbox_busy");
  for (const part of ["boom", "the text of sandbox_busy", 'sandbox.rollback("c")']) {
    assert.ok(error.message.includes(part), error.message);
  }
  assert.deepEqual(log.splice(0), ["branch live false", "rollback c"]);
  busy = false;
  await sandbox.rollback();
  assert.deepEqual(log, ["rollback c"]);
});

test("a rollback in the body of a checkpoint goes to its beginning, and one after it does not", async (t) => {
  const { log, sandbox } = await logged(t);
  await sandbox.checkpoint(() => sandbox.rollback(), { tag: "c" });
  await sandbox.rollback();
  assert.deepEqual(log, ["branch live false", "rollback c", "DELETE c", "rollback origin"]);
});

test("the branch of a checkpoint is removed also if other snapshots are built on it", async (t) => {
  const remove = (exchange) => {
    if (exchange.url.search === "") exchange.refuse(409, "snapshot_in_use");
    else return false;
    return true;
  };
  const { log, sandbox } = await logged(t, { remove });
  assert.equal(await sandbox.checkpoint(async () => 5, { tag: "c" }), 5);
  assert.deepEqual(log, ["branch live false", "DELETE c", "DELETE c?force=true"]);
});

test("an error of the body is what a checkpoint throws, also if its branch cannot be removed", async (t) => {
  const remove = (exchange) => {
    exchange.refuse(500, "internal");
    return true;
  };
  const { sandbox } = await logged(t, { remove });
  await assert.rejects(
    sandbox.checkpoint(() => Promise.reject(new Error("boom"))),
    { message: "boom" },
  );
  await assert.rejects(
    sandbox.checkpoint(async () => 5),
    { code: "internal" },
  );
});

test("a checkpoint whose answer is lost leaves no branch, and none that was there before is removed", async (t) => {
  let lost;
  let then;
  const tags = [];
  const branch = (exchange, { tag }) => {
    tags.push(tag);
    return lost-- > 0 ? exchange.reset() : then(exchange, tag);
  };
  const { log, sandbox } = await logged(t, { branch });
  const checkpoint = (tag) =>
    assert.rejects(
      sandbox.checkpoint(() => assert.fail("there is no branch"), { tag }),
      { code: "stream_broken" },
    );
  // More than the transport tries.
  for (const [answer, tag, removed] of [
    [(exchange, tag) => exchange.answer(202, { tag, status: "writing" }), "mine", true],
    [(exchange) => exchange.refuse(409, "tag_taken"), "mine", false],
    [(exchange, tag) => exchange.answer(202, { tag, status: "writing" }), undefined, true],
    [(exchange) => exchange.refuse(409, "idempotency_outcome_unknown"), undefined, true],
  ]) {
    [lost, then] = [4, answer];
    tags.length = log.length = 0;
    await checkpoint(tag);
    assert.equal(new Set(tags).size, 1);
    assert.deepEqual(log, removed ? [`DELETE ${tags[0]}`] : []);
  }
});

test("a rollback goes to the newest branch of the object, or to where the sandbox came from", async (t) => {
  const { log, sandbox } = await logged(t);
  await sandbox.rollback();
  const branch = await sandbox.branch({ tag: "one" });
  await sandbox.branch({ tag: "two", wait: false });
  await sandbox.rollback();
  await sandbox.rollback(branch);
  const expected = ["rollback origin", "branch live undefined", "branch live false", "rollback two", "rollback one"];
  assert.deepEqual(log, expected);
});

test("a rollback passes over branches that were deleted", async (t) => {
  let gone = ["two", "three"];
  const rollback = (exchange, { to }) =>
    gone.includes(to) ? exchange.refuse(404, "snapshot_not_found") : exchange.answer(200, info);
  const { log, sandbox } = await logged(t, { rollback });
  for (const tag of ["one", "two", "three"]) await sandbox.branch({ tag });
  log.splice(0);
  await sandbox.rollback();
  await sandbox.rollback();
  assert.deepEqual(log.splice(0), ["rollback three", "rollback two", "rollback one", "rollback one"]);
  gone = ["one"];
  await sandbox.rollback();
  assert.deepEqual(log, ["rollback one", "rollback origin"]);
  await assert.rejects(sandbox.rollback("one"), forkd.NotFoundError);
});
