// Commands and files over connections that stall, break and lie.

import assert from "node:assert/strict";
import { test } from "node:test";

import * as forkd from "@forkd/sdk";

import { eventually, served, sleep } from "./server.mjs";

const WINDOW = 262_144;
/** For servers that say nothing. */
const IMPATIENT = { options: { timeoutSecs: 0.6 } };
const send = (socket, event) => socket.send(JSON.stringify(event));
const output = (socket, channel, bytes) => socket.send(Buffer.concat([Buffer.from([channel]), Buffer.from(bytes)]));
const info = (id) => ({ id, state: "running", snapshot_tag: "a" });

/** A sandbox whose commands are played by `play(socket, request)`. */
async function sandboxOf(t, play, { handle, options, ...more } = {}) {
  const server = await served(t, handle, {
    socket: (socket) => socket.once("message", (text) => play(socket, JSON.parse(text))),
    ...more,
  });
  return Object.assign(server, { sandbox: new forkd.Sandbox(server.client(options), info("sb1")) });
}

const rejects = (work, kind, code) =>
  assert.rejects(work, (error) => {
    assert.ok(error instanceof kind, `${error?.name} ${error?.code}: ${error?.message}`);
    assert.equal(error.code, code);
    return true;
  });

test("output comes as it is sent, with characters whole", async (t) => {
  const { sandbox } = await sandboxOf(t, (socket, request) => {
    assert.deepEqual(request, { args: ["sh", "-c", "a"], timeout_secs: 30 });
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    const euro = Buffer.from("€");
    output(socket, 1, euro.subarray(0, 1));
    output(socket, 1, euro.subarray(1));
    output(socket, 2, "err");
    output(socket, 1, [0xff]);
    send(socket, { event: "exit", exit_code: 0 });
  });
  const pieces = [];
  const result = await sandbox.commands.run("a", { onStdout: (text) => pieces.push(text) });
  assert.deepEqual([result.stdout, result.stderr, pieces], ["€\ufffd", "err", ["€", "\ufffd"]]);
});

test("a connection that breaks in the middle of a command is an error, also for its reader", async (t) => {
  const { sandbox } = await sandboxOf(t, async (socket) => {
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    output(socket, 1, "part");
    await sleep(50);
    socket.terminate();
  });
  await rejects(sandbox.commands.run("a", { onStdout() {} }), forkd.StreamBrokenError, "stream_broken");
  const handle = await sandbox.commands.run("a", { background: true });
  const seen = [];
  const read = (async () => {
    for await (const { text } of handle) seen.push(text);
  })();
  await rejects(read, forkd.StreamBrokenError, "stream_broken");
  assert.deepEqual(seen, ["part"]);
  await rejects(handle.wait(), forkd.StreamBrokenError, "stream_broken");
  await rejects(handle.sendStdin("a"), forkd.ConflictError, "command_ended");
});

test("a close without an exit, and a message that is no event, are errors", async (t) => {
  let how = "close";
  const { sandbox } = await sandboxOf(t, (socket) => (how === "close" ? socket.close() : socket.send(how)));
  await rejects(sandbox.commands.run("a", { onStdout() {} }), forkd.StreamBrokenError, "stream_broken");
  for (how of ["{nonsense", "null"])
    await rejects(sandbox.commands.run("a", { onStdout() {} }), forkd.StreamBrokenError, "stream_broken");
});

test("a server that goes silent is a time-out: before the handshake, before the start, and after it", async (t) => {
  const { sandbox: shut } = await sandboxOf(t, () => {}, { upgrade: () => {}, ...IMPATIENT });
  await rejects(shut.commands.run("a", { background: true }), forkd.TimeoutError, "client_timeout");
  const { sandbox: mute, connections } = await sandboxOf(t, () => {}, IMPATIENT);
  await rejects(mute.commands.run("a", { background: true }), forkd.TimeoutError, "client_timeout");
  const { sandbox } = await sandboxOf(
    t,
    (socket) => send(socket, { event: "started", sandbox: "sb1", pid: 7 }),
    IMPATIENT,
  );
  const silent = (async () => (await sandbox.commands.run("a", { background: true })).wait())();
  await rejects(silent, forkd.TimeoutError, "client_timeout");
  await eventually(() => connections.size <= 1, "the connection closed");
});

test("a server that answers pings is waited for", async (t) => {
  const { sandbox } = await sandboxOf(
    t,
    async (socket) => {
      send(socket, { event: "started", sandbox: "sb1", pid: 7 });
      socket.on("ping", () => socket.pong());
      await sleep(4000);
      send(socket, { event: "exit", exit_code: 0 });
    },
    { options: { timeoutSecs: 1.5 } },
  );
  const handle = await sandbox.commands.run("a", { background: true });
  assert.equal((await handle.wait()).exitCode, 0);
});

test("a refused handshake has the daemon's error", async (t) => {
  const body = JSON.stringify({ error: "resume it first", code: "sandbox_paused", request_id: "r1" });
  const { sandbox } = await sandboxOf(t, () => {}, {
    upgrade: (connection) => connection.end(`HTTP/1.1 409 Conflict\r\nContent-Length: ${body.length}\r\n\r\n${body}`),
  });
  const error = await sandbox.commands.run("a", { background: true }).catch((error) => error);
  assert.ok(error instanceof forkd.SandboxPausedError);
  assert.deepEqual([error.message, error.status, error.requestId], ["resume it first", 409, "r1"]);
});

test("an error event ends the command, before its start and after", async (t) => {
  let first = true;
  const { sandbox } = await sandboxOf(t, (socket) => {
    if (!first) send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    first = false;
    send(socket, { event: "error", code: "sandbox_lost", message: "it ended", status: 502, request_id: "r1" });
  });
  await rejects(sandbox.commands.run("a", { background: true }), forkd.SandboxEndedError, "sandbox_lost");
  const handle = await sandbox.commands.run("a", { background: true });
  await rejects(handle.wait(), forkd.SandboxEndedError, "sandbox_lost");
});

test("an abort closes the connection, so that the daemon kills the command", async (t) => {
  let closed = false;
  const { sandbox } = await sandboxOf(t, (socket) => {
    socket.on("close", () => (closed = true));
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
  });
  const controller = new AbortController();
  const running = sandbox.commands.run("a", { signal: controller.signal });
  setTimeout(() => controller.abort(), 100);
  await assert.rejects(running, { name: "AbortError" });
  await eventually(() => closed, "the connection closed");
});

test("an error of a callback reaches the caller, and ends the command", async (t) => {
  let closed = false;
  const { sandbox } = await sandboxOf(t, (socket) => {
    socket.on("close", () => (closed = true));
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    output(socket, 1, "a");
  });
  const boom = new Error("boom");
  const onStdout = () => {
    throw boom;
  };
  await assert.rejects(sandbox.commands.run("a", { onStdout }), boom);
  await eventually(() => closed, "the connection closed");
});

test("input never exceeds what the daemon takes, and arrives whole", async (t) => {
  let unacknowledged = 0;
  let most = 0;
  let taken = 0;
  const { sandbox } = await sandboxOf(t, (socket) => {
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    socket.on("message", async (data, binary) => {
      if (!binary) {
        assert.deepEqual(JSON.parse(data), { type: "stdin_eof" });
        await eventually(() => unacknowledged === 0);
        return send(socket, { event: "exit", exit_code: 0 });
      }
      assert.equal(data[0], 0);
      const bytes = data.length - 1;
      unacknowledged += bytes;
      taken += bytes;
      most = Math.max(most, unacknowledged);
      await sleep(5);
      unacknowledged -= bytes;
      send(socket, { event: "stdin_ack", bytes });
    });
  });
  const stdin = Buffer.alloc(3 * WINDOW + 5, 65);
  await sandbox.commands.run("cat", { stdin });
  assert.equal(taken, stdin.length);
  assert.ok(most <= WINDOW && most > WINDOW / 2, `${most}`);
});

test("input that fails to come is the caller's error, and ends the command", async (t) => {
  const { sandbox } = await sandboxOf(t, (socket) => send(socket, { event: "started", sandbox: "sb1", pid: 7 }));
  const boom = new Error("boom");
  const stdin = (async function* () {
    yield "a";
    throw boom;
  })();
  await assert.rejects(sandbox.commands.run("cat", { stdin }), boom);
});

test("a command whose output is not read waits, and none of it is lost", async (t) => {
  const pieces = 320;
  const size = 65_536;
  let sent = 0;
  const { sandbox } = await sandboxOf(t, async (socket) => {
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    for (; sent < pieces && socket.readyState === 1; sent++) {
      await new Promise((resolve) => socket.send(Buffer.alloc(size + 1, 1), resolve));
    }
    send(socket, { event: "exit", exit_code: 0 });
  });
  const handle = await sandbox.commands.run("a", { background: true });
  await sleep(400);
  assert.ok(sent < pieces, "the server could send all of 20 MiB to a client that did not read");
  let length = 0;
  for await (const { bytes } of handle) length += bytes.length;
  assert.equal(length, pieces * size);
  const result = await handle.wait();
  assert.equal(result.stdoutTruncated, true);
  assert.ok(result.stdout.length <= 16 * 1024 * 1024);
});

test("output after a piece that was too much is not kept, so that there is no hole", async (t) => {
  const MiB = 1024 * 1024;
  const { sandbox } = await sandboxOf(t, (socket) => {
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    output(socket, 1, Buffer.alloc(15 * MiB, "a"));
    output(socket, 1, Buffer.alloc(2 * MiB, "b"));
    output(socket, 1, "c");
    send(socket, { event: "exit", exit_code: 0 });
  });
  const { stdout, stdoutTruncated } = await sandbox.commands.run("a", { onStdout() {} });
  assert.deepEqual([stdout.length, stdout.at(-1), stdoutTruncated], [15 * MiB, "a", true]);
});

test("a time-out is sent in whole seconds, one of 0 is an error, and null is none", async (t) => {
  const bodies = [];
  const play = (socket, body) => {
    bodies.push(body);
    send(socket, { event: "started", sandbox: "sb1", pid: 7 });
    send(socket, { event: "exit", exit_code: 0 });
  };
  const handle = async (exchange) => {
    bodies.push(await exchange.json());
    exchange.answer(200, { exit_code: 0, stdout: "", stderr: "", children: [info("sb2")], errors: [] });
  };
  const { sandbox, client } = await sandboxOf(t, play, { handle });
  const onStdout = () => {};
  const calls = [
    (timeoutSecs) => sandbox.commands.run("a", { timeoutSecs }),
    (timeoutSecs) => sandbox.commands.run("a", { timeoutSecs, onStdout }),
    (timeoutSecs) => sandbox.commands.run("a", { timeoutSecs, background: true }),
    (timeoutSecs) => sandbox.eval("a", { timeoutSecs }),
    (timeoutSecs) => sandbox.runCode("a", { timeoutSecs }),
    (timeoutSecs) => sandbox.fork(1, { timeoutSecs }),
    (timeoutSecs) => sandbox.setTimeout(timeoutSecs),
    (timeoutSecs) => forkd.Sandbox.create("a", { timeoutSecs, client: client() }),
  ];
  for (const call of calls) {
    await call(0.2);
    await call(1.5);
    assert.deepEqual(
      bodies.splice(0).map(({ timeout_secs }) => timeout_secs),
      [1, 2],
      String(call),
    );
    for (const wrong of [0, -1, NaN, Infinity]) {
      await assert.rejects(async () => call(wrong), { name: "InvalidRequestError", message: /timeoutSecs is/ });
    }
    assert.equal(bodies.length, 0);
  }
  await sandbox.update({ idleTimeoutSecs: 0.5 });
  assert.deepEqual(bodies.splice(0), [{ idle_timeout_secs: 1 }]);
  await sandbox.commands.run("a", { timeoutSecs: null });
  assert.deepEqual(bodies, [{ args: ["sh", "-c", "a"] }]);
});

test("results of short commands are one request, and long ones are streams", async (t) => {
  const bodies = [];
  const handle = async (exchange) => {
    bodies.push(await exchange.json());
    const last = bodies.length;
    const replies = [
      { exit_code: 0, stdout: "o", stderr: "" },
      { exit_code: 7, stdout: "o", stderr: "first\nlast\n" },
      { exit_code: 124, stdout: "part", stderr: "", timed_out: true },
      { exit_code: 127, stdout: "", stderr: "", error: "no such program: a" },
    ];
    exchange.answer(200, replies[last - 1]);
  };
  let streamed = 0;
  const play = (socket) => {
    streamed++;
    send(socket, { event: "exit", exit_code: 0 });
  };
  const { sandbox } = await sandboxOf(t, play, { handle });
  const { commands } = sandbox;
  assert.equal(
    (await commands.run("a", { cwd: "/c", envs: { A: "b" }, user: "u", stdin: "i", timeoutSecs: 9 })).stdout,
    "o",
  );
  assert.deepEqual(bodies[0], {
    args: ["sh", "-c", "a"],
    cwd: "/c",
    env: { A: "b" },
    user: "u",
    stdin: "i",
    timeout_secs: 9,
  });
  const failed = await commands.run(["a", "b"]).catch((error) => error);
  assert.deepEqual(bodies[1], { args: ["a", "b"], timeout_secs: 30 });
  assert.deepEqual([failed.exitCode, failed.stdout, failed.message], [7, "o", "the command ended with status 7: last"]);
  const late = await commands.run("a").catch((error) => error);
  assert.ok(late instanceof forkd.CommandTimeoutError && late.stdout === "part");
  await assert.rejects(commands.run("a"), { message: /no such program/ });
  assert.equal(streamed, 0);
  await commands.run("a", { timeoutSecs: 3600 });
  assert.equal(streamed, 1);
});

test("a file that is cut or stalls is an error after its part, and never the whole", async (t) => {
  let how = "cut";
  const { sandbox } = await sandboxOf(t, () => {}, {
    handle: async (exchange) => {
      if (how === "cut") return exchange.reset("part");
      exchange.reply.writeHead(200, {});
      exchange.reply.write("part");
    },
    options: { timeoutSecs: 1 },
  });
  const read = async () => {
    let text = "";
    for await (const piece of await sandbox.files.read("/a", { format: "stream" })) text += Buffer.from(piece);
    return text;
  };
  await rejects(read(), forkd.StreamBrokenError, "stream_broken");
  await rejects(sandbox.files.read("/a"), forkd.ForkdError, "stream_broken");
  how = "stall";
  await rejects(read(), forkd.TimeoutError, "client_timeout");
  await rejects(sandbox.files.read("/a"), forkd.TimeoutError, "client_timeout");
});

test("an upload that is refused, reset or stalls ends with the cause", async (t) => {
  let how = "refuse";
  const { sandbox } = await sandboxOf(t, () => {}, {
    handle: async (exchange) => {
      if (how === "refuse") return exchange.refuse(403, "guest_forbidden", { connection: "close" });
      if (how === "reset") return exchange.request.once("data", () => exchange.reset());
    },
    options: { timeoutSecs: 3 },
  });
  const endless = async function* () {
    for (;;) {
      yield Buffer.alloc(1000);
      await sleep(1);
    }
  };
  await rejects(sandbox.files.write("/a", "small"), forkd.PermissionDeniedError, "guest_forbidden");
  how = "reset";
  await rejects(sandbox.files.write("/a", endless()), forkd.StreamBrokenError, "stream_broken");
  how = "stall";
  await rejects(sandbox.files.write("/a", Buffer.alloc(5_000_000)), forkd.TimeoutError, "client_timeout");
  const boom = new Error("boom");
  const broken = (async function* () {
    yield "a";
    throw boom;
  })();
  await assert.rejects(sandbox.files.write("/a", broken), boom);
});
