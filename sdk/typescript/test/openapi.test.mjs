// The SDK and docs/openapi.json: every route has a method, every parameter, field and code is there.
//
// FORKD_OPENAPI names the document; beside the sources it is found without.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { test } from "node:test";
import { fileURLToPath } from "node:url";

import * as forkd from "@forkd/sdk";

import { served } from "./server.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const document = JSON.parse(
  readFileSync(process.env.FORKD_OPENAPI ?? join(here, "../../../docs/openapi.json"), "utf8"),
);
const { CLASS_OF_CODE } = forkd;
/** The folder of the installed package. */
const dist = dirname(createRequire(import.meta.url).resolve("@forkd/sdk"));

const name = { id: "sb1", tag: "a", name: "n" };
const file = { path: "/p", user: "u" };
const page = { limit: 2, cursor: "c" };
const first = (stream) => stream.next();

/** A call of the method of each operation, with all of its parameters. */
const CALLS = {
  get_healthz: (c) => c.health(),
  get_version: (c) => c.version(),
  get_metrics: (c) => c.metrics(),
  get_events: (c) => first(c.events({ since: "1", sandbox: "sb1", kind: "sandbox", follow: true })),
  get_run: (c) => c.runStream({ image: "i", args: ["a"] }),
  get_sandboxes: (c) =>
    c.listSandboxes({ label: ["a=b", "c"], snapshot_tag: "a", owner: "o", state: "running", ...page }),
  post_sandboxes: (c) => c.createEachSandbox({ snapshot_tag: "a" }),
  get_sandboxes_by_id: (c) => c.getSandbox(name.id, { wait: "ready", timeout_secs: 1 }),
  delete_sandboxes_by_id: (c) => c.deleteSandbox(name.id),
  patch_sandboxes_by_id: (c) => c.updateSandbox(name.id, { labels: {} }),
  put_sandboxes_by_id_agent_port: (c) => c.openAgentPort(name.id),
  delete_sandboxes_by_id_agent_port: (c) => c.closeAgentPort(name.id),
  post_sandboxes_by_id_branch: (c) => c.branchSandbox(name.id, { tag: "b" }),
  get_sandboxes_by_id_console: (c) => first(c.followConsole(name.id, { tail: 1 })),
  post_sandboxes_by_id_eval: (c) => c.evalCode(name.id, { code: "1" }),
  post_sandboxes_by_id_exec: (c) => c.execCommand(name.id, { args: ["a"] }),
  get_sandboxes_by_id_exec_stream: (c) => c.execStream(name.id, { args: ["a"] }),
  get_sandboxes_by_id_files: (c) => c.readFile(name.id, file),
  put_sandboxes_by_id_files: (c) => c.writeFile(name.id, { ...file, mode: "644" }, "data"),
  delete_sandboxes_by_id_files: (c) => c.deleteFile(name.id, { ...file, recursive: true }),
  get_sandboxes_by_id_files_list: (c) => c.listFiles(name.id, { ...file, depth: 2 }),
  post_sandboxes_by_id_files_mkdir: (c) => c.makeFolder(name.id, { path: "/p" }),
  post_sandboxes_by_id_files_move: (c) => c.moveFile(name.id, { from: "/p", to: "/q" }),
  get_sandboxes_by_id_files_stat: (c) => c.statFile(name.id, file),
  get_sandboxes_by_id_files_tree: (c) => c.fileTree(name.id, { ...file, hash: true }),
  post_sandboxes_by_id_fork: (c) => c.forkEachSandbox(name.id, { n: 2 }),
  post_sandboxes_by_id_json_lines: (c) => c.sendJsonLine(name.id, { action: "ping" }),
  post_sandboxes_by_id_pause: (c) => c.pauseSandbox(name.id),
  post_sandboxes_by_id_ping: (c) => c.pingSandbox(name.id),
  post_sandboxes_by_id_resume: (c) => c.resumeSandbox(name.id),
  post_sandboxes_by_id_rollback: (c) => c.rollbackSandbox(name.id, { to: "a" }),
  get_sandboxes_by_id_stats: (c) => c.getStats(name.id),
  get_snapshots: (c) => c.listSnapshots(page),
  post_snapshots: (c) => c.createSnapshot({ tag: "a", image: "i" }, { wait: false }),
  get_snapshots_by_tag: (c) => c.getSnapshot(name.tag),
  delete_snapshots_by_tag: (c) => c.deleteSnapshot(name.tag, { cascade: true, force: true }),
  post_snapshots_by_tag_compact: (c) => c.compactSnapshot(name.tag, { to: "b" }),
  get_snapshots_by_tag_info: (c) => c.getSnapshotInfo(name.tag),
  post_snapshots_by_tag_owner: (c) => c.setSnapshotOwner(name.tag, { owner: "*" }),
  post_snapshots_by_tag_unload: (c) => c.unloadSnapshot(name.tag),
  get_tokens: (c) => c.listTokens(),
  post_tokens: (c) => c.createToken({ name: "n" }),
  delete_tokens_by_name: (c) => c.deleteToken(name.name),
  post_tokens_by_name_rotate: (c) => c.rotateToken(name.name),
  get_tree: (c) => c.getTree(),
  get_workspaces: (c) => c.listWorkspaces(page),
  post_workspaces: (c) => c.createWorkspace({ name: "n", snapshot_tag: "a" }),
  get_workspaces_by_name: (c) => c.getWorkspace(name.name),
  delete_workspaces_by_name: (c) => c.deleteWorkspace(name.name),
  post_workspaces_by_name_resume: (c) => c.resumeWorkspace(name.name),
  post_workspaces_by_name_suspend: (c) => c.suspendWorkspace(name.name, { diff: true }),
};

/** Parameters that no method has, and why. */
const NOT_HERE = {
  "get_sandboxes gone": "the older name of `archived`",
  "get_sandboxes archived": "listArchivedSandboxes",
  "post_sandboxes wait": "a field of the body",
  "post_sandboxes_by_id_fork wait": "a field of the body",
  "get_events Last-Event-ID": "`since`, which has priority",
};

const operations = Object.entries(document.paths).flatMap(([path, methods]) =>
  Object.entries(methods).map(([method, operation]) => ({ path, method: method.toUpperCase(), ...operation })),
);

test("every route has a method that sends all of its parameters", async (t) => {
  const answer = (exchange) => exchange.answer(200, {});
  const { client, requests } = await served(t, answer, { socket: (socket) => socket.close() });
  const c = client();
  for (const { path, method, operationId, parameters = [], deprecated, requestBody } of operations) {
    if (deprecated) continue;
    const call = CALLS[operationId];
    assert.ok(call !== undefined, `${method} ${path} has no method: write one in client.ts, and call it here`);
    requests.length = 0;
    const got = await call(c);
    const [sent] = requests;
    assert.equal(requests.length, 1, operationId);
    assert.equal(sent.method, method, operationId);
    const expected = path.replace(/\{(\w+)\}/g, (_, part) => name[part]);
    assert.equal(sent.path, expected, operationId);
    const has = new Set(sent.url.searchParams.keys());
    for (const { name, in: where } of parameters) {
      if (where === "path" || `${operationId} ${name}` in NOT_HERE) continue;
      if (where === "header") {
        assert.ok(sent.request.headers[name.toLowerCase()], `${operationId} sends no ${name}`);
        continue;
      }
      assert.ok(has.delete(name), `${operationId} does not send ${name}`);
    }
    assert.deepEqual([...has], [], `${operationId} sends parameters that the document does not have`);
    const json = requestBody?.content?.["application/json"] !== undefined;
    const isJson = (sent.request.headers["content-type"] ?? "").startsWith("application/json");
    assert.equal(isJson, json, `${operationId}: a body of JSON`);
    if (got?.close !== undefined) got.close();
  }
});

test("no method is for a route that is not there", () => {
  const known = new Set(operations.map(({ operationId }) => operationId));
  assert.deepEqual(
    Object.keys(CALLS).filter((id) => !known.has(id)),
    [],
  );
});

test("archived sandboxes have a method of their own", async (t) => {
  const { client, requests } = await served(t, (exchange) => exchange.answer(200, []));
  await client().listArchivedSandboxes();
  assert.equal(requests[0].request.url, "/v1/sandboxes?archived=true");
});

/** The types that the package declares, as text by their names. */
function declared() {
  const types = new Map();
  for (const module of ["commands", "daemon", "sandboxes", "snapshots"]) {
    const text = readFileSync(join(dist, "api", `${module}.d.ts`), "utf8").replace(/\/\*\*[\s\S]*?\*\//g, "");
    for (const [, name, base, body] of text.matchAll(
      /^export interface (\w+)(?: extends (\w+))? \{\n([\s\S]*?)^\}/gm,
    )) {
      types.set(name, { base, fields: fieldsOf(body) });
    }
    for (const [, name, type] of text.matchAll(/^export type (\w+) =([\s\S]*?);\n(?=export|$)/gm)) {
      types.set(name, { type: type.replace(/\s+/g, " ").trim().replace(/^\| /, "") });
    }
  }
  return types;
}

function fieldsOf(body) {
  const fields = {};
  for (const line of body.split("\n").filter((line) => line.trim() !== "")) {
    const [, name, optional, type] = /^\s*(\w+)(\??): (.*);$/.exec(line) ?? assert.fail(`cannot read: ${line}`);
    fields[name] = `${optional}${type}`;
  }
  return fields;
}

/** The TypeScript of a schema. */
function typeOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.oneOf) return joined(schema.oneOf.map(typeOf));
  if (Array.isArray(schema.type)) return joined(schema.type.map((type) => typeOf({ ...schema, type })));
  if (schema.enum) return joined(schema.enum.map((value) => JSON.stringify(value)));
  if (schema.type === "array") return `${typeOf(schema.items)}[]`;
  if (schema.type === "object")
    return schema.additionalProperties ? `Record<string, ${typeOf(schema.additionalProperties)}>` : "unknown";
  const plain = { integer: "number", number: "number", string: "string", boolean: "boolean", null: "null" }[
    schema.type
  ];
  return plain ?? assert.fail(`cannot read: ${JSON.stringify(schema)}`);
}

function joined(types) {
  if (types.includes("unknown")) return "unknown";
  return [...types.filter((type) => type !== "null"), ...types.filter((type) => type === "null")].join(" | ");
}

function fieldsIn({ properties = {}, required = [] }) {
  return Object.fromEntries(
    Object.entries(properties).map(([name, schema]) => [
      name,
      `${required.includes(name) ? "" : "?"}${typeOf(schema)}`,
    ]),
  );
}

/** One member of a union of objects, as text. */
const objectOf = (schema) =>
  `{ ${Object.entries(fieldsIn(schema))
    .map(([name, type]) => (type.startsWith("?") ? `${name}?: ${type.slice(1)};` : `${name}: ${type};`))
    .join(" ")} }`;

test("every type of the document has the same fields here", () => {
  const types = declared();
  for (const [name, schema] of Object.entries(document.components.schemas)) {
    const here = types.get(name);
    assert.ok(here !== undefined, `${name} is missing in src/api`);
    if (schema.allOf) {
      const [{ $ref }, own] = schema.allOf;
      assert.deepEqual([here.base, here.fields], [$ref.split("/").at(-1), fieldsIn(own)], name);
    } else if (schema.properties) {
      assert.deepEqual(here.fields, fieldsIn(schema), name);
    } else if (schema.oneOf) {
      assert.deepEqual(
        here.type
          .split(" | {")
          .map((part) => part.replace(/^\{?/, "{"))
          .sort(),
        schema.oneOf.map(objectOf).sort(),
        name,
      );
    } else {
      assert.equal(here.type, typeOf(schema), name);
    }
  }
});

test("every code of the document has a class, and a client of yesterday knows no other", () => {
  const codes = document.components.schemas.ErrorCode.enum;
  for (const code of codes) {
    assert.ok(Object.hasOwn(CLASS_OF_CODE, code), `${code} has no class in errors.ts`);
    assert.ok(CLASS_OF_CODE[code].prototype instanceof forkd.ForkdError, code);
  }
  assert.deepEqual(
    Object.keys(CLASS_OF_CODE).filter((code) => !codes.includes(code)),
    [],
  );
});

test("the version is the document's", () => {
  const { version } = JSON.parse(readFileSync(join(dist, "../package.json"), "utf8"));
  assert.equal(version, document.info.version);
});
