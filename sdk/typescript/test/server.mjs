// A server that answers as a test wants it to, and a small daemon that forks nothing but keeps count.

import { once } from "node:events";
import { createServer } from "node:http";

import { WebSocketServer } from "ws";

import { Client } from "@forkd/sdk";

/** A request as it came. */
export class Exchange {
  constructor(request, reply) {
    this.request = request;
    this.reply = reply;
    this.url = new URL(request.url, "http://localhost");
    this.path = this.url.pathname;
    this.method = request.method;
    this.key = request.headers["idempotency-key"];
  }

  async body() {
    const pieces = [];
    for await (const piece of this.request) pieces.push(piece);
    return Buffer.concat(pieces);
  }

  async json() {
    const bytes = await this.body();
    return bytes.length === 0 ? undefined : JSON.parse(bytes);
  }

  answer(status, value, headers = {}) {
    this.reply.writeHead(status, { "content-type": "application/json", ...headers });
    this.reply.end(value === undefined ? undefined : JSON.stringify(value));
  }

  refuse(status, code, headers = {}) {
    this.answer(status, { error: `the text of ${code}`, code, request_id: "r1" }, headers);
  }

  /** Cuts the connection, after a part of an answer if there is one. */
  reset(part) {
    if (part === undefined) return this.request.socket.destroy();
    this.reply.writeHead(200, { "content-type": "application/json", "content-length": part.length + 100 });
    this.reply.write(part, () => setTimeout(() => this.request.socket.destroy(), 20));
  }
}

/** Serves until `end`. `handle` gets each exchange, `socket` each WebSocket. */
export async function serve(handle, { socket, upgrade, listen = [0, "127.0.0.1"] } = {}) {
  const requests = [];
  const server = createServer((request, reply) => {
    const exchange = new Exchange(request, reply);
    requests.push(exchange);
    Promise.resolve(handle(exchange)).catch((error) => reply.destroy(error));
  });
  const sockets = new WebSocketServer({ noServer: true, autoPong: false });
  const connections = new Set();
  server.on("connection", (connection) => {
    connections.add(connection);
    connection.on("close", () => connections.delete(connection));
    connection.on("error", () => {});
  });
  server.on("upgrade", (request, connection, head) => {
    requests.push(new Exchange(request, undefined));
    if (upgrade !== undefined) return upgrade(connection, request);
    sockets.handleUpgrade(request, connection, head, (open) => socket(open, request));
  });
  server.listen(...listen);
  await once(server, "listening");
  const address = server.address();
  const url = typeof address === "string" ? `unix://${address}` : `http://127.0.0.1:${address.port}`;
  return {
    url,
    requests,
    connections,
    client: (options = {}) => new Client({ url, token: "t", timeoutSecs: 30, ...options }),
    /** Refuses connections from now on, until `restart`. */
    stop: () => {
      server.close();
      for (const connection of connections) connection.destroy();
    },
    /** For a server on a unix socket: another program may have taken a port meanwhile. */
    restart: async () => {
      server.listen(...listen);
      await once(server, "listening");
    },
    end: async () => {
      for (const connection of connections) connection.destroy();
      sockets.close();
      if (!server.listening) return;
      server.close();
      await once(server, "close");
    },
  };
}

/** A server that ends with the test. */
export async function served(test, handle, options) {
  const server = await serve(handle, options);
  test.after(() => server.end());
  return server;
}

/** A daemon that creates sandboxes in a table, with idempotency keys. `hold` sees each creation before its answer. It does not end what `keeps`. */
export async function daemon(test, { hold = async () => {}, fail = () => undefined, keeps = () => false, listen } = {}) {
  const sandboxes = new Map();
  const answers = new Map();
  let count = 0;
  const create = async (exchange, tag) => {
    const body = await exchange.json();
    if (!answers.has(exchange.key)) {
      const errors = [];
      const children = [];
      for (let index = 0; index < (body.n ?? 1); index++) {
        const code = fail(index);
        if (code !== undefined) {
          errors.push({ index, code, error: `the text of ${code}`, request_id: "r1" });
          continue;
        }
        const info = {
          id: `sb${++count}`,
          state: "running",
          snapshot_tag: body.snapshot_tag ?? tag,
          created_at_unix: 1,
        };
        sandboxes.set(info.id, info);
        children.push(info);
      }
      answers.set(exchange.key, { children, errors });
    }
    await hold(exchange, answers.size);
    if (!exchange.reply.destroyed && !exchange.reply.headersSent) exchange.answer(201, answers.get(exchange.key));
  };
  const server = await served(test, async (exchange) => {
    const [, id, what] = /^\/v1\/sandboxes\/([^/]+)\/?(.*)$/.exec(exchange.path) ?? [];
    if (exchange.method === "POST" && exchange.path === "/v1/sandboxes") return create(exchange);
    if (exchange.method === "POST" && what === "fork") return create(exchange, sandboxes.get(id)?.snapshot_tag);
    if (!sandboxes.has(id)) return exchange.refuse(404, "sandbox_not_found");
    if (exchange.method === "DELETE" && what === "") {
      if (keeps(id)) return exchange.refuse(500, "internal");
      sandboxes.delete(id);
      return exchange.answer(204);
    }
    if (exchange.method === "POST" && what === "eval") {
      const { code } = await exchange.json();
      return exchange.answer(200, { exit_code: 0, stdout: "", stderr: "", result: code, result_json: `${id} ${code}` });
    }
    if (exchange.method === "GET" && what === "") return exchange.answer(200, sandboxes.get(id));
    return exchange.refuse(404, "route_not_found");
  }, { listen });
  return Object.assign(server, { sandboxes, answers });
}

export const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Waits until something is so. */
export async function eventually(is, what = "it") {
  for (let tries = 0; tries < 400; tries++) {
    if (await is()) return;
    await sleep(25);
  }
  throw new Error(`${what} did not become so within 10 s`);
}
