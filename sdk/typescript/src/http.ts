// Requests that `fetch` of Node.js cannot make: over a unix socket, with a certificate of one's own, or with an answer
// that takes minutes or is silent for minutes (`fetch` gives up after five).

import * as http from "node:http";
import * as https from "node:https";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";

import { reasonOf } from "./abort.js";
import type { Endpoint } from "./endpoint.js";

/** What a request may carry. */
export type Body = string | Uint8Array | AsyncIterable<Uint8Array>;

export interface Init {
  method: string;
  headers: Record<string, string>;
  body: Body | undefined;
  signal: AbortSignal;
}

/** Silence on a connection after which the kernel asks whether the other side is still there. */
const KEEP_ALIVE_MS = 30_000;

const agents = new WeakMap<Endpoint, http.Agent>();

/** Connections that are kept open between requests. */
function agentOf(endpoint: Endpoint): http.Agent {
  let agent = agents.get(endpoint);
  if (agent === undefined) {
    // The daemon keeps an idle connection longer than that, so it does not close one that is about to be used.
    const options = { keepAlive: true, timeout: 4_000 };
    const ca = endpoint.ca === undefined ? {} : { ca: endpoint.ca };
    const secure = endpoint.base.startsWith("https:");
    agent = secure ? new https.Agent({ ...options, ...ca }) : new http.Agent(options);
    agents.set(endpoint, agent);
  }
  return agent;
}

/** One request by `node:http`. */
export async function request(endpoint: Endpoint, path: string, init: Init): Promise<Response> {
  const url = new URL(endpoint.base + path);
  const options: http.RequestOptions = {
    method: init.method,
    headers: init.headers,
    agent: agentOf(endpoint),
    signal: init.signal,
  };
  if (endpoint.socketPath !== undefined) options.socketPath = endpoint.socketPath;
  const start = url.protocol === "https:" ? https.request : http.request;
  const sent = start(url, options);
  // The agent's time-out is for idle connections only.
  sent.setTimeout(0);
  // A stream that may be silent for any time ends when the daemon's host has vanished.
  sent.once("socket", (socket) => socket.setKeepAlive(true, KEEP_ALIVE_MS));
  const replied = new Promise<http.IncomingMessage>((resolve, reject) => {
    sent.once("response", resolve);
    sent.once("error", reject);
  });
  // Errors after the reply come through its body.
  sent.on("error", () => {});
  try {
    if (init.body === undefined || typeof init.body === "string" || init.body instanceof Uint8Array) {
      sent.end(init.body);
    } else {
      // A daemon that refuses answers before it has read all.
      pipeline(init.body, sent).catch((error: unknown) => sent.destroy(error as Error));
    }
    return responseOf(await replied);
  } catch (error) {
    sent.destroy();
    throw init.signal.aborted ? reasonOf(init.signal) : error;
  }
}

function responseOf(reply: http.IncomingMessage): Response {
  const headers = new Headers();
  for (let i = 0; i + 1 < reply.rawHeaders.length; i += 2) {
    headers.append(reply.rawHeaders[i] as string, reply.rawHeaders[i + 1] as string);
  }
  const status = reply.statusCode ?? 0;
  if (status === 204 || status === 304) {
    reply.resume();
    return new Response(null, { status, headers });
  }
  return new Response(Readable.toWeb(reply) as ReadableStream<Uint8Array>, { status, headers });
}
