// Requests and replies: deadlines, retries where they are safe, and errors by their codes.

import { randomUUID } from "node:crypto";

import { onAbort, reasonOf, sleep, throwIfAborted } from "./abort.js";
import type { Endpoint } from "./endpoint.js";
import {
  broken,
  BusyError,
  errorOf,
  ForkdError,
  isUncertain,
  isUnseen,
  markMaybeDone,
  RateLimitError,
  timedOut,
  unreachable,
} from "./errors.js";
import { request as requestByNode, type Body } from "./http.js";
import { timerMs } from "./seconds.js";

/** What every call takes. */
export interface CallOptions {
  /** Ends the call. */
  signal?: AbortSignal | undefined;
  /** Seconds until the call gives up; the client's when absent. */
  timeoutSecs?: number | undefined;
}

export type Query = Record<string, string | number | boolean | readonly string[] | undefined>;

export interface Call extends CallOptions {
  method: "GET" | "POST" | "PUT" | "PATCH" | "DELETE";
  path: string;
  query?: Query | undefined;
  /** Sent as JSON. */
  json?: unknown;
  /** Sent as it is. */
  body?: Body | undefined;
  /** An Idempotency-Key: `true` for a new one. With it a POST may be sent again. */
  key?: string | true | undefined;
  /** Whether the request may be sent again although an earlier one may have arrived. */
  repeatable?: boolean | undefined;
}

/** A reply and the watch over it. */
interface Attempt {
  reply: Response;
  watch: Watch;
}

/** `fetch` gives up by itself when no header, or nothing more of the body, has come for five minutes. */
const LONGEST_FETCH_SECS = 240;
const TRIES = 4;
/** A body above this is sent in pieces, so that the deadline counts from the last one. */
const PIECE = 256 * 1024;
/** Codes of errors from before the request was sent. */
const NOT_SENT = new Set(["ECONNREFUSED", "ENOENT", "ENOTFOUND", "EAI_AGAIN", "EACCES", "UND_ERR_CONNECT_TIMEOUT"]);

/** Aborts a request at its deadline, or with the caller's signal. */
class Watch {
  readonly #controller = new AbortController();
  readonly #stop: () => void;
  #timer: ReturnType<typeof setTimeout> | undefined;
  late = false;
  ended = false;

  constructor(
    readonly caller: AbortSignal | undefined,
    public secs: number,
  ) {
    this.#stop = onAbort(caller, () => this.#controller.abort(caller && reasonOf(caller)));
    this.touch();
  }

  get signal(): AbortSignal {
    return this.#controller.signal;
  }

  /** Starts the time anew, with the seconds that are left or all of them. */
  touch(secs = this.secs): void {
    clearTimeout(this.#timer);
    if (this.ended || secs === Infinity) return;
    this.#timer = setTimeout(
      () => {
        this.late = true;
        this.#controller.abort(new DOMException("the deadline is over", "TimeoutError"));
      },
      timerMs(secs),
    );
  }

  /** Stops the time until the next touch. */
  pause(): void {
    clearTimeout(this.#timer);
  }

  end(): void {
    this.ended = true;
    clearTimeout(this.#timer);
    this.#stop();
  }
}

export class Transport {
  constructor(
    readonly endpoint: Endpoint,
    /** Seconds of one call when it has no time-out of its own. */
    readonly timeoutSecs: number,
    private readonly fetch: typeof globalThis.fetch | undefined,
  ) {}

  /** The JSON of a reply. */
  async json<T>(call: Call): Promise<T> {
    return (await this.jsonAndHeaders<T>(call)).value;
  }

  async jsonAndHeaders<T>(call: Call): Promise<{ value: T; headers: Headers }> {
    return this.#tried(call, async ({ reply }) => {
      const text = await reply.text();
      if (text === "") return { value: undefined as T, headers: reply.headers };
      try {
        return { value: JSON.parse(text) as T, headers: reply.headers };
      } catch (cause) {
        throw broken(`${call.method} ${call.path}`, cause);
      }
    });
  }

  async text(call: Call): Promise<string> {
    return this.#tried(call, ({ reply }) => reply.text());
  }

  async bytes(call: Call): Promise<Uint8Array> {
    return this.#tried(call, async ({ reply, watch }) => {
      const pieces: Uint8Array[] = [];
      for await (const piece of piecesOf(reply, watch)) pieces.push(piece);
      return Buffer.concat(pieces);
    });
  }

  /**
   * The body of a reply, piece by piece. A silence longer than the time-out is an error; in a stream that says itself how
   * long it may be silent, one longer than `silenceSecs`. The request is sent when the first piece is asked for.
   */
  async *stream(call: Call, silenceSecs?: number): AsyncGenerator<Uint8Array, void, undefined> {
    const { reply, watch } = await this.#tried(call, async (attempt) => attempt, true, silenceSecs);
    if (silenceSecs !== undefined) watch.secs = silenceSecs;
    watch.touch();
    try {
      yield* piecesOf(reply, watch);
    } catch (error) {
      if (silenceSecs === undefined || !watch.late) throw this.#errorOf(call, error, watch);
      throw broken(`${call.method} ${call.path}`, new Error(`silent for ${silenceSecs} s`));
    } finally {
      watch.end();
      await reply.body?.cancel().catch(() => {});
    }
  }

  /** Sends a request until it succeeds, fails for good, or is too late. `read` is part of a try. */
  async #tried<T>(
    call: Call,
    read: (attempt: Attempt) => Promise<T>,
    keepsWatch = false,
    silenceSecs = 0,
  ): Promise<T> {
    throwIfAborted(call.signal);
    const secs = call.timeoutSecs ?? this.timeoutSecs;
    const deadline = Date.now() + secs * 1000;
    const key = call.key === true ? randomUUID() : call.key;
    let maybeDone = false;
    for (let number = 1; ; number++) {
      const watch = new Watch(call.signal, secs);
      watch.touch((deadline - Date.now()) / 1000);
      let kept = false;
      try {
        const reply = await this.#send(call, key, watch, silenceSecs);
        if (!reply.ok) throw await refusalOf(reply, call);
        const value = await read({ reply, watch });
        kept = keepsWatch;
        return value;
      } catch (cause) {
        const error = this.#errorOf(call, cause, watch);
        if (error instanceof ForkdError) {
          if (maybeDone && isUnseen(error)) markMaybeDone(error);
          maybeDone ||= isUncertain(error);
        }
        const wait = waitBefore(call, key, error, cause, number);
        if (wait === undefined || Date.now() + wait >= deadline) throw error;
        watch.end();
        await sleep(wait, call.signal);
      } finally {
        if (!kept) watch.end();
      }
    }
  }

  async #send(call: Call, key: string | undefined, watch: Watch, silenceSecs: number): Promise<Response> {
    const headers: Record<string, string> = this.endpoint.headers();
    let body = call.body;
    if (call.json !== undefined) {
      headers["content-type"] = "application/json";
      body = JSON.stringify(call.json);
    } else if (body !== undefined) {
      headers["content-type"] = "application/octet-stream";
    }
    if (key !== undefined) headers["idempotency-key"] = key;
    if (body instanceof Uint8Array && body.length > PIECE) body = cut(body);
    if (body !== undefined && typeof body !== "string" && !(body instanceof Uint8Array)) body = touching(body, watch);
    const path = call.path + queryOf(call.query);
    const init = { method: call.method, headers, body, signal: watch.signal };
    const { endpoint } = this;
    const long = Math.max(watch.secs, silenceSecs) > LONGEST_FETCH_SECS;
    const byNode = endpoint.socketPath !== undefined || endpoint.ca !== undefined || long;
    if (byNode && this.fetch === undefined) return requestByNode(endpoint, path, init);
    const streams = body !== undefined && typeof body !== "string" && !(body instanceof Uint8Array);
    const more = streams ? { duplex: "half" } : {};
    const fetch = this.fetch ?? globalThis.fetch;
    // `fetch` of Node.js takes an async iterable as a body, which its types do not have.
    return fetch(endpoint.base + path, { ...init, ...more, body: body ?? null, redirect: "manual" } as RequestInit);
  }

  /** What the caller gets for anything that a try may throw. */
  #errorOf(call: Call, cause: unknown, watch: Watch): Error {
    if (cause instanceof ForkdError) return cause;
    if (call.signal?.aborted) return reasonOf(call.signal);
    const what = `${call.method} ${call.path}`;
    if (watch.late) return timedOut(what, watch.secs);
    const ofBody = bodyErrorIn(cause);
    if (ofBody !== undefined) return ofBody.cause;
    if (NOT_SENT.has(codeOf(cause))) return unreachable(this.endpoint.url, cause);
    return broken(what, cause);
  }
}

/** The caller's own stream, which is the body of a request, failed. */
class BodyError extends Error {
  constructor(override readonly cause: Error) {
    super(cause.message);
  }
}

/** The error of the caller's stream, however `fetch` has wrapped it. */
function bodyErrorIn(error: unknown): BodyError | undefined {
  for (let at = error, depth = 0; depth < 5 && at instanceof Error; depth++, at = at.cause) {
    if (at instanceof BodyError) return at;
  }
  return undefined;
}

/** Milliseconds to wait before the next try; `undefined` if there must be none. */
function waitBefore(
  call: Call,
  key: string | undefined,
  error: Error,
  cause: unknown,
  number: number,
): number | undefined {
  const streams = call.body !== undefined && typeof call.body !== "string" && !(call.body instanceof Uint8Array);
  if (!(error instanceof ForkdError) || streams) return undefined;
  const backOff = 100 * 3 ** (number - 1) * (0.75 + Math.random() / 2);
  const repeatable = call.repeatable ?? (call.method === "GET" || key !== undefined);
  // The first request with this key is still under way: its answer comes.
  if (error.code === "idempotency_in_progress" && key !== undefined) return Math.min(backOff, 1000);
  if (number >= TRIES) return undefined;
  if (error instanceof RateLimitError || error instanceof BusyError) {
    const safe = repeatable || error.code === "rate_limited";
    return safe ? Math.max(backOff, (error.retryAfterSecs ?? 0) * 1000) : undefined;
  }
  // There may be no daemon at all, and the caller wants to know soon.
  if (NOT_SENT.has(codeOf(cause))) return number <= 2 ? backOff : undefined;
  return error.code === "stream_broken" && repeatable ? backOff : undefined;
}

/** The code of an error of the network, from its cause where it is there. */
function codeOf(error: unknown): string {
  let at: unknown = error;
  for (let depth = 0; depth < 5 && at instanceof Error; depth++) {
    const { code, errors } = at as { code?: unknown; errors?: unknown };
    if (typeof code === "string") return code;
    at = at.cause ?? (Array.isArray(errors) ? errors[0] : undefined);
  }
  return "";
}

/** The error that a reply is. */
async function refusalOf(reply: Response, call: Call): Promise<ForkdError> {
  const text = await reply.text();
  const retryAfter = Number(reply.headers.get("retry-after") ?? "");
  return refusal(reply.status, text, `${call.method} ${call.path}`, {
    requestId: reply.headers.get("x-request-id") ?? "",
    ...(retryAfter > 0 ? { retryAfterSecs: retryAfter } : {}),
  });
}

/** The error of a status and a body, which may be anything: not every server is a daemon. */
export function refusal(
  status: number,
  text: string,
  what: string,
  more: { requestId?: string; retryAfterSecs?: number } = {},
): ForkdError {
  let body: { error?: unknown; code?: unknown; request_id?: unknown } = {};
  try {
    const parsed: unknown = JSON.parse(text);
    if (typeof parsed === "object" && parsed !== null) body = parsed;
  } catch {
    // Not from a daemon.
  }
  const code = typeof body.code === "string" ? body.code : codeOfStatus(status);
  const short = `${what}: the server answered with status ${status}; look whether a forkd daemon is at FORKD_URL`;
  const message = typeof body.error === "string" ? body.error : short;
  const requestId = typeof body.request_id === "string" ? body.request_id : (more.requestId ?? "");
  return errorOf(message, code, { ...more, status, requestId });
}

/** A code for a reply without one. */
function codeOfStatus(status: number): string {
  if (status === 401) return "unauthorized";
  if (status === 403) return "forbidden";
  if (status === 429) return "rate_limited";
  if (status === 503) return "daemon_busy";
  return `http_${status}`;
}

function queryOf(query: Query | undefined): string {
  const parameters = new URLSearchParams();
  for (const [name, value] of Object.entries(query ?? {})) {
    if (Array.isArray(value)) for (const each of value) parameters.append(name, String(each));
    else if (value !== undefined) parameters.append(name, String(value));
  }
  const text = parameters.toString();
  return text === "" ? "" : `?${text}`;
}

async function* piecesOf(reply: Response, watch: Watch): AsyncGenerator<Uint8Array, void, undefined> {
  if (reply.body === null) return;
  for await (const piece of reply.body as unknown as AsyncIterable<Uint8Array>) {
    // The time that the caller needs for a piece does not count.
    watch.pause();
    yield piece;
    watch.touch();
  }
}

function* pieces(bytes: Uint8Array): Generator<Uint8Array> {
  for (let at = 0; at < bytes.length; at += PIECE) yield bytes.subarray(at, at + PIECE);
}

async function* cut(bytes: Uint8Array): AsyncGenerator<Uint8Array> {
  yield* pieces(bytes);
}

/** A body whose every piece starts the deadline anew. */
async function* touching(body: AsyncIterable<Uint8Array>, watch: Watch): AsyncGenerator<Uint8Array> {
  try {
    for await (const piece of body) {
      // `fetch` goes on to read a body whose request has failed.
      if (watch.ended) return;
      watch.touch();
      yield* piece.length > PIECE ? pieces(piece) : [piece];
    }
  } catch (error) {
    throw new BodyError(error instanceof Error ? error : new Error(String(error)));
  }
  watch.touch();
}
