// Requests against servers that refuse, stall, break and lie.

import assert from "node:assert/strict";
import { mkdtemp, rm } from "node:fs/promises";
import { createServer } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { test } from "node:test";
import { inspect } from "node:util";

import * as forkd from "@forkd/sdk";

import { served, sleep } from "./server.mjs";

const rejects = (work, kind, code) =>
  assert.rejects(work, (error) => {
    assert.ok(error instanceof kind, `${error?.name} ${error?.code}: ${error?.message}`);
    assert.equal(error.code, code);
    return true;
  });

async function freePort() {
  const server = createServer();
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  const { port } = server.address();
  await new Promise((resolve) => server.close(resolve));
  return port;
}

test("without a daemon the error says how to start one", async () => {
  const url = `http://127.0.0.1:${await freePort()}`;
  for (const call of [
    (client) => client.health(),
    (client) => client.createSandboxes({ snapshot_tag: "a" }),
    (client) => client.execStream("sb1", { args: ["a"] }),
    (client) => client.readFileStream("sb1", { path: "/a" }).next(),
    (client) => client.waitForDaemon({ timeoutSecs: 0.3 }),
  ]) {
    const error = await call(new forkd.Client({ url })).catch((error) => error);
    assert.ok(error instanceof forkd.DaemonUnreachableError, String(error));
    assert.match(error.message, /forkd serve/);
    assert.match(error.message, /FORKD_URL/);
    assert.ok(error.message.includes(url));
  }
});

test("a wrong token is an error that names FORKD_TOKEN", async (t) => {
  const { client } = await served(t, (exchange) => exchange.refuse(401, "unauthorized"));
  await rejects(client().getTree(), forkd.AuthenticationError, "unauthorized");
  await assert.rejects(client().getTree(), { message: /FORKD_TOKEN/ });
});

test("the token is sent, and the environment has the defaults", async (t) => {
  const { url, requests } = await served(t, (exchange) => exchange.answer(200, { ok: true }));
  const before = { ...process.env };
  Object.assign(process.env, { FORKD_URL: `${url}/`, FORKD_TOKEN: "from-env" });
  t.after(() => {
    for (const name of ["FORKD_URL", "FORKD_TOKEN"]) delete process.env[name];
    Object.assign(process.env, before);
  });
  await new forkd.Client().health();
  await new forkd.Client({ token: "given" }).health();
  const tokens = requests.map(({ request }) => request.headers.authorization);
  assert.deepEqual(tokens, ["Bearer from-env", "Bearer given"]);
});

test("an address that is none is refused", () => {
  for (const url of [
    " ",
    "127.0.0.1:8889",
    "ftp://a",
    "nonsense",
    "http://",
    "http://a:99999",
    "http://a/?b",
    "unix:",
    "unix://run/forkd.sock",
    "unix:///%zz",
  ]) {
    assert.throws(() => new forkd.Client({ url }), { name: "InvalidRequestError", message: /^FORKD_URL is ".*": / }, url);
  }
  assert.throws(() => new forkd.Client({ cacert: "/no/such/file" }), { name: "InvalidRequestError", message: /cacert/ });
});

test("a token that cannot be sent is an error without it, and no error has the token", async (t) => {
  const { client, url, requests } = await served(t, (exchange) => exchange.answer(200, {}));
  const has = (error, secret) => inspect(error, { depth: 9, showHidden: true }).includes(secret);
  for (const token of ["secret\n", "se\ncret", "secret ", "sécret", "secret\u2026", "\0secret"]) {
    assert.throws(
      () => client({ token }),
      (error) => error instanceof forkd.InvalidRequestError && /forkd token print/.test(error.message) && !has(error, "cret"),
      JSON.stringify(token),
    );
  }
  for (const url of ["http://user:secret@a", "http://secret@a", "secret", "ftp://secret", "http://a?secret"]) {
    assert.throws(
      () => new forkd.Client({ url, token: "secret" }),
      (error) => error instanceof forkd.InvalidRequestError && !has(error, "secret"),
      url,
    );
  }
  assert.ok(!has(client({ token: "secret" }), "secret"), "printing a client does not print its token");
  assert.equal(requests.length, 0);
  await new forkd.Client({ url: ` ${url}/\n`, token: "t" }).getTree();
  assert.equal(requests[0].path, "/v1/tree");
});

test("a name that would lead to another route is refused before it is sent", async (t) => {
  const { client, requests } = await served(t, (exchange) => exchange.answer(200, {}));
  for (const id of ["", ".", ".."]) {
    await assert.rejects(async () => client().getSandbox(id), forkd.InvalidRequestError);
    await assert.rejects(async () => client().deleteSandbox(id), forkd.InvalidRequestError);
  }
  assert.equal(requests.length, 0);
  await client().getSandbox("../a?b#c");
  assert.equal(requests[0].request.url, "/v1/sandboxes/..%2Fa%3Fb%23c");
});

test("a busy daemon is asked again, after the time that it names", async (t) => {
  let times = 0;
  const { client } = await served(t, (exchange) => {
    if (++times === 1) return exchange.refuse(503, "daemon_busy");
    if (times === 2) return exchange.refuse(429, "rate_limited", { "retry-after": "1" });
    return exchange.answer(200, { nodes: [] });
  });
  const start = Date.now();
  assert.deepEqual(await client().getTree(), { nodes: [] });
  assert.equal(times, 3);
  assert.ok(Date.now() - start >= 990, "the client waits as long as Retry-After says");
});

test("a daemon that stays busy, and a quota, are errors of their own", async (t) => {
  const { client, requests } = await served(t, (exchange) =>
    exchange.path === "/v1/tree" ? exchange.refuse(503, "shutting_down") : exchange.refuse(429, "quota_exceeded"),
  );
  await rejects(client().getTree(), forkd.BusyError, "shutting_down");
  assert.equal(requests.length, 4);
  await rejects(client().createSandboxes({ snapshot_tag: "a" }), forkd.QuotaError, "quota_exceeded");
  assert.equal(requests.length, 5);
});

test("a command is never sent twice, except when the daemon refused it unseen", async (t) => {
  let how = "reset";
  const { client, requests } = await served(t, async (exchange) => {
    await exchange.body();
    if (how === "reset") return exchange.reset();
    if (how === "half") return exchange.reset('{"exit_code": 0, ');
    if (how === "busy") return exchange.refuse(503, "guest_busy");
    how = "done";
    return exchange.refuse(429, "rate_limited");
  });
  const run = () => client().execCommand("sb1", { args: ["a"] });
  await rejects(run(), forkd.StreamBrokenError, "stream_broken");
  assert.equal(requests.length, 1);
  how = "half";
  await rejects(run(), forkd.StreamBrokenError, "stream_broken");
  assert.equal(requests.length, 2);
  how = "busy";
  await rejects(run(), forkd.BusyError, "guest_busy");
  assert.equal(requests.length, 3);
  how = "limited";
  await rejects(run(), forkd.RateLimitError, "rate_limited");
  assert.ok(requests.length > 4);
});

test("a read is repeated after a reset and after half an answer", async (t) => {
  let times = 0;
  const { client } = await served(t, (exchange) => {
    times++;
    if (times === 1) return exchange.reset();
    if (times === 2) return exchange.reset('{"nodes": [');
    return exchange.answer(200, { nodes: [], "a field of a newer daemon": 1 });
  });
  assert.deepEqual((await client().getTree()).nodes, []);
  assert.equal(times, 3);
});

test("a create is repeated with the key of the first try, also while that is under way", async (t) => {
  const keys = [];
  const { client } = await served(t, async (exchange) => {
    await exchange.body();
    keys.push(exchange.key);
    if (keys.length === 1) return exchange.reset();
    if (keys.length < 4) return exchange.refuse(409, "idempotency_in_progress");
    return exchange.answer(201, { tag: "a", status: "ready" });
  });
  assert.equal((await client().branchSandbox("sb1")).tag, "a");
  assert.equal(keys.length, 4);
  assert.equal(new Set(keys).size, 1);
  assert.ok(keys[0].length > 20);
});

test("a rollback is repeated with the key of the first try", async (t) => {
  const keys = [];
  const { client } = await served(t, async (exchange) => {
    await exchange.body();
    keys.push(exchange.key);
    return keys.length === 1 ? exchange.reset() : exchange.answer(200, { id: "sb1" });
  });
  await client().rollbackSandbox("sb1", { to: "a" });
  assert.ok(keys.length === 2 && keys[0]?.length > 20 && keys[0] === keys[1], keys.join());
});

test("an answer that never comes, or stops in the middle, is a time-out", async (t) => {
  const { client } = await served(t, (exchange) => {
    if (exchange.path === "/v1/tree") return;
    exchange.reply.writeHead(200, { "content-length": "100" });
    exchange.reply.write("{");
  });
  const impatient = client({ timeoutSecs: 0.5 });
  await rejects(impatient.getTree(), forkd.TimeoutError, "client_timeout");
  await rejects(impatient.getSandbox("sb1"), forkd.TimeoutError, "client_timeout");
  await rejects(impatient.deleteSandbox("sb1"), forkd.TimeoutError, "client_timeout");
  await rejects(client().getTree({ timeoutSecs: 0.1 }), forkd.TimeoutError, "client_timeout");
});

test("an answer that comes from no daemon is an error with its status", async (t) => {
  const { client } = await served(t, (exchange) => {
    exchange.reply.writeHead(exchange.path === "/v1/tree" ? 418 : 200, { "content-type": "text/html" });
    exchange.reply.end("<html>");
  });
  await rejects(client().getTree(), forkd.ForkdError, "http_418");
  await rejects(client().getSandbox("sb1"), forkd.StreamBrokenError, "stream_broken");
});

test("a code that is not known is a plain error with the code, status and request id", async (t) => {
  const { client } = await served(t, (exchange) => exchange.refuse(409, "of_the_future"));
  const error = await client()
    .getTree()
    .catch((error) => error);
  assert.equal(error.constructor, forkd.ForkdError);
  assert.deepEqual([error.code, error.status, error.requestId], ["of_the_future", 409, "r1"]);
  const { client: odd } = await served(t, (exchange) => exchange.refuse(409, "constructor"));
  assert.equal(
    (
      await odd()
        .getTree()
        .catch((error) => error)
    ).constructor,
    forkd.ForkdError,
  );
});

test("every kind of call ends when its signal aborts, and is not sent after that", async (t) => {
  const { client, requests } = await served(t, () => {}, { upgrade: () => {} });
  const calls = {
    json: (signal) => client().getTree({ signal }),
    post: (signal) => client().evalCode("sb1", { code: "1" }, { signal }),
    long: (signal) => client({ timeoutSecs: 300 }).rollbackSandbox("sb1", {}, { signal }),
    stream: (signal) => client().readFileStream("sb1", { path: "/a" }, { signal }).next(),
    socket: (signal) => client().execStream("sb1", { args: ["a"] }, { signal }),
    wait: (signal) => client().waitForDaemon({ signal }),
    kill: (signal) => new forkd.Sandbox(client(), { id: "sb1" }).kill({ signal }),
  };
  for (const [name, call] of Object.entries(calls)) {
    const controller = new AbortController();
    const reason = new Error(`enough of ${name}`);
    const pending = call(controller.signal);
    setTimeout(() => controller.abort(reason), 50);
    await assert.rejects(pending, reason);
    const sent = requests.length;
    await assert.rejects(async () => call(controller.signal), reason);
    assert.equal(requests.length, sent, name);
  }
});

test("a unix socket is an address, for requests, streams and WebSockets", async (t) => {
  const folder = await mkdtemp(join(tmpdir(), "forkd-"));
  t.after(() => rm(folder, { recursive: true }));
  const { client } = await served(
    t,
    async (exchange) => {
      if (exchange.path.endsWith("/files")) return exchange.reply.end("content");
      return exchange.answer(200, { method: exchange.method, body: await exchange.json() });
    },
    {
      listen: [join(folder, "a.sock")],
      socket: (socket) =>
        socket.once("message", (text) => socket.send(JSON.stringify({ event: "progress", message: String(text) }))),
    },
  );
  assert.equal((await client().getTree()).method, "GET");
  assert.deepEqual((await client().evalCode("sb1", { code: "1" })).body, { code: "1" });
  assert.equal(Buffer.from(await client().readFile("sb1", { path: "/a" })).toString(), "content");
  const socket = await client().execStream("sb1", { args: ["a"] });
  const event = await new Promise((resolve) => socket.listen({ event: resolve, output() {}, closed() {} }));
  assert.equal(event.message, '{"args":["a"]}');
  socket.close();
  const none = new forkd.Client({ url: `unix://${join(folder, "none.sock")}` });
  await rejects(none.health(), forkd.DaemonUnreachableError, "daemon_unreachable");
  await rejects(none.execStream("sb1", { args: ["a"] }), forkd.DaemonUnreachableError, "daemon_unreachable");
});

test("a fetch of the caller's own is used", async () => {
  const seen = [];
  const fetch = async (url, init) => {
    seen.push([String(url), init.method, init.headers.authorization]);
    return new Response('{"ok": true}', { status: 200 });
  };
  const client = new forkd.Client({ url: "http://far.example", token: "t", fetch });
  assert.equal((await client.health()).ok, true);
  assert.deepEqual(seen, [["http://far.example/healthz", "GET", "Bearer t"]]);
});

test("events come as they are sent, with those that were missed, and end in an error when the daemon goes", async (t) => {
  const { client, requests } = await served(t, async (exchange) => {
    exchange.reply.writeHead(200, { "content-type": "text/event-stream" });
    exchange.reply.write(': keep-alive\n\nid: a-1\nevent: sandbox.running\ndata: {"id":"a-1",');
    await sleep(20);
    exchange.reply.write('"kind":"sandbox.running","ts":"t"}\n\nevent: lagged\r\ndata: {"missed": 7}\r\n\r\n');
    await sleep(700);
    exchange.request.socket.destroy();
  });
  const seen = [];
  const events = client().events({ since: "0", kind: "sandbox" });
  await rejects(
    (async () => {
      for await (const event of events) seen.push(event.kind === "lagged" ? event.missed : event.kind);
    })(),
    forkd.StreamBrokenError,
    "stream_broken",
  );
  assert.deepEqual(seen, ["sandbox.running", 7]);
  assert.equal(requests[0].request.url, "/v1/events?since=0&kind=sandbox");
});

test("events that are none are a broken stream", async (t) => {
  let data;
  const { client } = await served(t, (exchange) => exchange.reply.end(data));
  const read = async () => {
    for await (const event of client().events()) assert.equal(event, "no event");
  };
  const long = `data: ${"a".repeat(600_000)}\n`;
  for (data of ["data: {nonsense\n\n", "data: null\n\n", "event: lagged\ndata: 7\n\n", long + long, `${long}${"a".repeat(600_000)}`]) {
    await rejects(read(), forkd.StreamBrokenError, "stream_broken");
  }
});

test("a daemon that stalls in the middle of the events is a broken stream after a minute", async (t) => {
  const { setTimeout } = globalThis;
  t.mock.method(globalThis, "setTimeout", (work, ms, ...more) => setTimeout(work, ms === 60_000 ? 300 : ms, ...more));
  const folder = await mkdtemp(join(tmpdir(), "forkd-"));
  t.after(() => rm(folder, { recursive: true }));
  for (const listen of [[0, "127.0.0.1"], [join(folder, "a.sock")]]) {
    const handle = async (exchange) => {
      exchange.reply.writeHead(200, { "content-type": "text/event-stream" });
      exchange.reply.write(": keep-alive\n\n");
    };
    const { client } = await served(t, handle, { listen });
    const next = client().events().next();
    await rejects(next, forkd.StreamBrokenError, "stream_broken");
    await assert.rejects(client().events().next(), { message: /silent for 60 s/ });
  }
});

test("a console may be silent for longer than fetch waits", async (t) => {
  const { client } = await served(t, async (exchange) => {
    if (!exchange.path.endsWith("console")) return exchange.answer(200, { ok: true });
    exchange.reply.write("one\n");
    await sleep(3000);
    exchange.reply.end("two\n");
  });
  // The first request makes the dispatcher of fetch, whose time-out is five minutes.
  await client().health();
  const slot = Symbol.for("undici.globalDispatcher.1");
  const usual = globalThis[slot];
  t.after(() => (globalThis[slot] = usual));
  globalThis[slot] = new usual.constructor({ bodyTimeout: 500 });
  let seen = "";
  for await (const text of client({ timeoutSecs: 2 }).followConsole("sb1")) seen += text;
  assert.equal(seen, "one\ntwo\n");
});

test("a wait for the daemon ends when one answers", async (t) => {
  let times = 0;
  const { client } = await served(t, (exchange) => {
    if (++times < 6) return exchange.refuse(503, "shutting_down");
    return exchange.answer(200, { ok: true, version: "0.2.0", api: "v1", address: "a" });
  });
  assert.equal((await client().waitForDaemon({ timeoutSecs: 10 })).version, "0.2.0");
});
