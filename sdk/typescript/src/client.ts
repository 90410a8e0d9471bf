// One method per operation of the REST API. Bodies and replies are those of docs/openapi.json.

import type * as Daemon from "./api/daemon.js";
import type * as Files from "./api/commands.js";
import type * as Sandboxes from "./api/sandboxes.js";
import type * as Snapshots from "./api/snapshots.js";
import { reasonOf, sleep } from "./abort.js";
import { Endpoint } from "./endpoint.js";
import { BusyError, DaemonUnreachableError, InvalidRequestError } from "./errors.js";
import { eventsOf, type Lagged } from "./events.js";
import type { Body } from "./http.js";
import { openSocket, type Socket } from "./socket.js";
import { Transport, type CallOptions, type Query } from "./transport.js";

export interface ClientOptions {
  /** The daemon's address, also `unix:///run/forkd/forkd.sock`; FORKD_URL or `http://127.0.0.1:8889` when absent. */
  url?: string | undefined;
  /** The token; FORKD_TOKEN when absent. The unix socket needs none. */
  token?: string | undefined;
  /** Seconds until a call gives up; 60 when absent. Calls that fork, boot, branch or roll back have five times that. */
  timeoutSecs?: number | undefined;
  /** A file with the certificate of the authority of the daemon's certificate. */
  cacert?: string | undefined;
  /** In place of the global `fetch`, for everything but WebSockets. */
  fetch?: typeof globalThis.fetch | undefined;
}

/** A page of a list. */
export type Page<T> = T[] & {
  /** Give it as `cursor` to get the next page; `undefined` on the last one. */
  nextCursor: string | undefined;
};

export interface PageQuery {
  limit?: number | undefined;
  cursor?: string | undefined;
}

export interface SandboxQuery extends PageQuery {
  /** `NAME=VALUE`, or `NAME` for any value. */
  label?: readonly string[] | undefined;
  snapshot_tag?: string | undefined;
  owner?: string | undefined;
  state?: Sandboxes.SandboxState | undefined;
}

export interface EventQuery {
  /** The id of an event: the stream starts after it. 0 for all that the daemon keeps. */
  since?: string | undefined;
  sandbox?: string | undefined;
  /** Kinds, with commas between them. */
  kind?: string | undefined;
  /** False: past events only. */
  follow?: boolean | undefined;
}

export interface FileQuery {
  /** An absolute path in the guest. */
  path: string;
  user?: string | undefined;
}

/** For calls that may be done once only. */
export interface KeyOptions extends CallOptions {
  /** An Idempotency-Key in place of a random one. */
  idempotencyKey?: string | undefined;
}

const LONG = 5;
/** The daemon sends a comment every 15 s, so a longer silence in a stream of events is a broken connection. */
const EVENTS_SILENCE_SECS = 60;

/** A client of a forkd daemon. It has no open connection that must be closed. */
export class Client {
  /** @internal */
  readonly transport: Transport;

  constructor(options: ClientOptions = {}) {
    const endpoint = new Endpoint(options.url, options.token, options.cacert);
    this.transport = new Transport(endpoint, options.timeoutSecs ?? 60, options.fetch);
  }

  /** The daemon's address. */
  get url(): string {
    return this.transport.endpoint.url;
  }

  /** Seconds that calls which fork, boot, branch or roll back may take. */
  get longSecs(): number {
    return this.transport.timeoutSecs * LONG;
  }

  // The daemon

  health(options: CallOptions = {}): Promise<Daemon.Health> {
    return this.#get("/healthz", options);
  }

  version(options: CallOptions = {}): Promise<Daemon.VersionInfo> {
    return this.#get("/version", options);
  }

  /** Metrics in Prometheus' text format. */
  metrics(options: CallOptions = {}): Promise<string> {
    return this.transport.text({ method: "GET", path: "/metrics", ...options });
  }

  /** Events of sandboxes, snapshots and workspaces, as they come. */
  events(query: EventQuery = {}, options: CallOptions = {}): AsyncGenerator<Daemon.Event | Lagged, void, undefined> {
    const call = { method: "GET" as const, path: "/v1/events", query: { ...query }, ...options };
    return eventsOf(this.transport.stream(call, query.follow === false ? undefined : EVENTS_SILENCE_SECS));
  }

  /** Waits until a daemon answers, at most `timeoutSecs`. */
  async waitForDaemon(options: CallOptions = {}): Promise<Daemon.VersionInfo> {
    const deadline = Date.now() + (options.timeoutSecs ?? this.transport.timeoutSecs) * 1000;
    for (;;) {
      const left = Math.max(0.05, (deadline - Date.now()) / 1000);
      try {
        await this.health({ ...options, timeoutSecs: Math.min(5, left) });
        return await this.version({ ...options, timeoutSecs: left });
      } catch (error) {
        if (options.signal?.aborted) throw reasonOf(options.signal);
        const later = error instanceof DaemonUnreachableError || error instanceof BusyError;
        if (!later || Date.now() + 200 >= deadline) throw error;
      }
      await sleep(200, options.signal);
    }
  }

  // Sandboxes

  /** The caller's sandboxes, oldest first; all of them without `limit`. */
  listSandboxes(query: SandboxQuery = {}, options: CallOptions = {}): Promise<Page<Sandboxes.SandboxInfo>> {
    return this.#page("/v1/sandboxes", { ...query }, options);
  }

  /** Sandboxes of the last day that ended and were removed. */
  listArchivedSandboxes(query: SandboxQuery = {}, options: CallOptions = {}): Promise<Page<Sandboxes.ArchivedSandbox>> {
    return this.#page("/v1/sandboxes", { ...query, archived: true }, options);
  }

  /** Boots a sandbox, or forks children from a snapshot. `wait: false`: the reply comes while they are `starting`. */
  createSandboxes(body: Sandboxes.CreateRequest, options: KeyOptions = {}): Promise<Sandboxes.SandboxInfo[]> {
    return this.#once("/v1/sandboxes", body, options);
  }

  /** The same, with one error for each child that does not run. */
  createEachSandbox(body: Sandboxes.CreateRequest, options: KeyOptions = {}): Promise<Sandboxes.SpawnReply> {
    return this.#once("/v1/sandboxes", body, options, { results: "each" });
  }

  /** With `wait: "ready"` the reply comes when the sandbox is no longer `starting`. */
  getSandbox(
    id: string,
    query: { wait?: "ready" | undefined; timeout_secs?: number | undefined } = {},
    options: CallOptions = {},
  ): Promise<Sandboxes.SandboxInfo> {
    const secs =
      query.wait === undefined ? {} : { timeoutSecs: (query.timeout_secs ?? 30) + this.transport.timeoutSecs };
    return this.#get(sandbox(id), { ...secs, ...defined(options) }, { ...query });
  }

  deleteSandbox(id: string, options: CallOptions = {}): Promise<void> {
    return this.transport.json({ method: "DELETE", path: sandbox(id), ...options });
  }

  updateSandbox(id: string, body: Sandboxes.UpdateRequest, options: CallOptions = {}): Promise<Sandboxes.SandboxInfo> {
    return this.transport.json({ method: "PATCH", path: sandbox(id), json: body, ...options });
  }

  /** The output of the guest's console. */
  getConsole(id: string, query: { tail?: number | undefined } = {}, options: CallOptions = {}): Promise<string> {
    return this.transport.text({ method: "GET", path: sandbox(id, "console"), query: { ...query }, ...options });
  }

  /** The output of the guest's console, and what it prints until the sandbox ends. */
  async *followConsole(
    id: string,
    query: { tail?: number | undefined } = {},
    options: CallOptions = {},
  ): AsyncGenerator<string, void, undefined> {
    const decoder = new TextDecoder();
    const call = {
      method: "GET" as const,
      path: sandbox(id, "console"),
      query: { ...query, follow: true },
      ...options,
    };
    // A guest may print nothing for days.
    for await (const bytes of this.transport.stream(call, Infinity)) yield decoder.decode(bytes, { stream: true });
  }

  /** Forks children from a running sandbox. */
  forkSandbox(
    id: string,
    body: Sandboxes.ForkRequest = {},
    options: KeyOptions = {},
  ): Promise<Sandboxes.SandboxInfo[]> {
    return this.#once(sandbox(id, "fork"), body, options);
  }

  /** The same, with one error for each child that does not run. */
  forkEachSandbox(
    id: string,
    body: Sandboxes.ForkRequest = {},
    options: KeyOptions = {},
  ): Promise<Sandboxes.SpawnReply> {
    return this.#once(sandbox(id, "fork"), body, options, { results: "each" });
  }

  pingSandbox(id: string, options: CallOptions = {}): Promise<Sandboxes.PingReply> {
    return this.#post(sandbox(id, "ping"), undefined, options);
  }

  getStats(id: string, options: CallOptions = {}): Promise<Sandboxes.Stats> {
    return this.#get(sandbox(id, "stats"), options);
  }

  // Commands and code

  /** A command in a new sandbox, which ends with the connection. */
  runStream(body: Files.RunRequest, options: CallOptions = {}): Promise<Socket> {
    return openSocket(this.transport, "/v1/run", body, options);
  }

  /** A command over a WebSocket. `sandbox.commands.run` is easier. */
  execStream(id: string, body: Files.ExecStreamRequest, options: CallOptions = {}): Promise<Socket> {
    return openSocket(this.transport, sandbox(id, "exec/stream"), body, options);
  }

  /** Runs a command to its end. */
  execCommand(id: string, body: Files.ExecRequest, options: CallOptions = {}): Promise<Files.ExecReply> {
    return this.#post(sandbox(id, "exec"), body, this.#afterWork(body.timeout_secs, options));
  }

  /** Evaluates Python in the warmed interpreter. */
  evalCode(id: string, body: Files.EvalRequest, options: CallOptions = {}): Promise<Files.EvalReply> {
    return this.#post(sandbox(id, "eval"), body, this.#afterWork(body.timeout_secs, options));
  }

  // Files

  readFile(id: string, query: FileQuery, options: CallOptions = {}): Promise<Uint8Array> {
    return this.transport.bytes({ method: "GET", path: sandbox(id, "files"), query: { ...query }, ...options });
  }

  readFileStream(id: string, query: FileQuery, options: CallOptions = {}): AsyncGenerator<Uint8Array, void, undefined> {
    return this.transport.stream({ method: "GET", path: sandbox(id, "files"), query: { ...query }, ...options });
  }

  writeFile(
    id: string,
    query: FileQuery & { mode?: string | undefined },
    body: Body,
    options: CallOptions = {},
  ): Promise<Files.FileWritten> {
    const bytes = typeof body === "string" ? new TextEncoder().encode(body) : body;
    return this.transport.json({
      method: "PUT",
      path: sandbox(id, "files"),
      query: { ...query },
      body: bytes,
      ...options,
    });
  }

  deleteFile(
    id: string,
    query: FileQuery & { recursive?: boolean | undefined },
    options: CallOptions = {},
  ): Promise<void> {
    return this.transport.json({ method: "DELETE", path: sandbox(id, "files"), query: { ...query }, ...options });
  }

  listFiles(
    id: string,
    query: FileQuery & { depth?: number | undefined },
    options: CallOptions = {},
  ): Promise<Files.FileList> {
    return this.#get(sandbox(id, "files/list"), options, { ...query });
  }

  statFile(id: string, query: FileQuery, options: CallOptions = {}): Promise<Files.FileInfo> {
    return this.#get(sandbox(id, "files/stat"), options, { ...query });
  }

  makeFolder(id: string, body: Files.MkdirRequest, options: CallOptions = {}): Promise<Files.FileInfo> {
    return this.#post(sandbox(id, "files/mkdir"), body, options);
  }

  moveFile(id: string, body: Files.MoveRequest, options: CallOptions = {}): Promise<Files.FileInfo> {
    return this.#post(sandbox(id, "files/move"), body, options);
  }

  /** All files below a folder; with `hash`, with hashes of their contents. */
  fileTree(
    id: string,
    query: FileQuery & { hash?: boolean | undefined },
    options: CallOptions = {},
  ): Promise<Files.FileTree> {
    return this.#get(sandbox(id, "files/tree"), { timeoutSecs: this.longSecs, ...defined(options) }, { ...query });
  }

  // Branches and time

  branchSandbox(
    id: string,
    body: Snapshots.BranchRequest = {},
    options: KeyOptions = {},
  ): Promise<Snapshots.SnapshotInfo> {
    return this.#once(sandbox(id, "branch"), body, options);
  }

  pauseSandbox(id: string, options: CallOptions = {}): Promise<Sandboxes.SandboxInfo> {
    return this.#post(sandbox(id, "pause"), undefined, options);
  }

  resumeSandbox(id: string, options: CallOptions = {}): Promise<Sandboxes.SandboxInfo> {
    return this.#post(sandbox(id, "resume"), undefined, options);
  }

  rollbackSandbox(
    id: string,
    body: Sandboxes.RollbackRequest = {},
    options: KeyOptions = {},
  ): Promise<Sandboxes.SandboxInfo> {
    return this.#once(sandbox(id, "rollback"), body, options);
  }

  /** The ancestry of snapshots and sandboxes. */
  getTree(options: CallOptions = {}): Promise<Snapshots.Tree> {
    return this.#get("/v1/tree", options);
  }

  // Snapshots

  listSnapshots(query: PageQuery = {}, options: CallOptions = {}): Promise<Page<Snapshots.SnapshotInfo>> {
    return this.#page("/v1/snapshots", { ...query }, options);
  }

  /** Boots, warms up and saves a guest. `wait: false`: the reply comes at once. */
  createSnapshot(
    body: Snapshots.SnapshotRequest,
    query: { wait?: boolean | undefined } = {},
    options: KeyOptions = {},
  ): Promise<Snapshots.SnapshotInfo> {
    return this.#once("/v1/snapshots", body, options, { ...query });
  }

  getSnapshot(tag: string, options: CallOptions = {}): Promise<Snapshots.SnapshotInfo> {
    return this.#get(snapshot(tag), options);
  }

  deleteSnapshot(
    tag: string,
    query: { cascade?: boolean | undefined; force?: boolean | undefined } = {},
    options: CallOptions = {},
  ): Promise<void> {
    return this.transport.json({ method: "DELETE", path: snapshot(tag), query: { ...query }, ...options });
  }

  getSnapshotInfo(tag: string, options: CallOptions = {}): Promise<Snapshots.SnapshotInfoDetail> {
    return this.#get(snapshot(tag, "info"), options);
  }

  compactSnapshot(
    tag: string,
    body: Snapshots.CompactRequest,
    options: KeyOptions = {},
  ): Promise<Snapshots.SnapshotInfo> {
    return this.#once(snapshot(tag, "compact"), body, options);
  }

  setSnapshotOwner(
    tag: string,
    body: Snapshots.OwnerRequest,
    options: CallOptions = {},
  ): Promise<Snapshots.SnapshotInfo> {
    return this.#post(snapshot(tag, "owner"), body, options);
  }

  unloadSnapshot(tag: string, options: CallOptions = {}): Promise<void> {
    return this.#post(snapshot(tag, "unload"), undefined, options);
  }

  // Workspaces

  listWorkspaces(query: PageQuery = {}, options: CallOptions = {}): Promise<Page<Daemon.WorkspaceInfo>> {
    return this.#page("/v1/workspaces", { ...query }, options);
  }

  createWorkspace(body: Daemon.WorkspaceRequest, options: KeyOptions = {}): Promise<Daemon.WorkspaceInfo> {
    return this.#once("/v1/workspaces", body, options);
  }

  getWorkspace(name: string, options: CallOptions = {}): Promise<Daemon.WorkspaceInfo> {
    return this.#get(workspace(name), options);
  }

  deleteWorkspace(name: string, options: CallOptions = {}): Promise<void> {
    return this.transport.json({ method: "DELETE", path: workspace(name), ...options });
  }

  suspendWorkspace(
    name: string,
    body: Daemon.SuspendRequest = {},
    options: CallOptions = {},
  ): Promise<Daemon.WorkspaceInfo> {
    return this.#post(workspace(name, "suspend"), body, { timeoutSecs: this.longSecs, ...defined(options) });
  }

  resumeWorkspace(name: string, options: CallOptions = {}): Promise<Daemon.WorkspaceInfo> {
    return this.#post(workspace(name, "resume"), undefined, { timeoutSecs: this.longSecs, ...defined(options) });
  }

  // Tokens

  listTokens(options: CallOptions = {}): Promise<Daemon.TokenInfo[]> {
    return this.#get("/v1/tokens", options);
  }

  /** The only reply that has the secret: the daemon does not keep it, so a lost reply cannot be had again. */
  createToken(body: Daemon.TokenRequest, options: CallOptions = {}): Promise<Daemon.NewToken> {
    return this.#post("/v1/tokens", body, options);
  }

  deleteToken(name: string, options: CallOptions = {}): Promise<void> {
    return this.transport.json({ method: "DELETE", path: `/v1/tokens/${segment(name)}`, ...options });
  }

  rotateToken(name: string, options: CallOptions = {}): Promise<Daemon.NewToken> {
    return this.#post(`/v1/tokens/${segment(name)}/rotate`, undefined, options);
  }

  // The JSON-lines protocol

  openAgentPort(id: string, options: CallOptions = {}): Promise<Sandboxes.AgentPort> {
    return this.transport.json({ method: "PUT", path: sandbox(id, "agent-port"), ...options });
  }

  closeAgentPort(id: string, options: CallOptions = {}): Promise<void> {
    return this.transport.json({ method: "DELETE", path: sandbox(id, "agent-port"), ...options });
  }

  /** One request of the JSON-lines protocol, such as `{ action: "ping" }`. */
  sendJsonLine(id: string, body: Record<string, unknown>, options: CallOptions = {}): Promise<Record<string, unknown>> {
    return this.#post(sandbox(id, "json-lines"), body, options);
  }

  #get<T>(path: string, options: CallOptions, query?: Query): Promise<T> {
    return this.transport.json<T>({ method: "GET", path, query, ...options });
  }

  #post<T>(path: string, json: unknown, options: CallOptions): Promise<T> {
    return this.transport.json<T>({ method: "POST", path, json, ...options });
  }

  /** A POST with an idempotency key: done once, however often it is sent. */
  #once<T>(path: string, json: unknown, { idempotencyKey, ...options }: KeyOptions, query?: Query): Promise<T> {
    const call = { method: "POST" as const, path, json, query, key: idempotencyKey ?? (true as const) };
    return this.transport.json<T>({ ...call, timeoutSecs: this.longSecs, ...defined(options) });
  }

  async #page<T>(path: string, query: Query, options: CallOptions): Promise<Page<T>> {
    const { value, headers } = await this.transport.jsonAndHeaders<T[]>({ method: "GET", path, query, ...options });
    return Object.assign(value, { nextCursor: headers.get("x-next-cursor") ?? undefined });
  }

  /** The guest may work for that long before the daemon answers. */
  #afterWork(secs: number | undefined, options: CallOptions): CallOptions {
    return { timeoutSecs: (secs ?? 30) + this.transport.timeoutSecs, ...defined(options) };
  }
}

/** The client that a caller gave, or one by FORKD_URL and FORKD_TOKEN. */
export function clientOr(client: Client | undefined): Client {
  return client ?? new Client();
}

/** Every entry of a list, page by page. */
export async function* entriesOf<T>(page: (query: PageQuery) => Promise<Page<T>>): AsyncGenerator<T, void, undefined> {
  let cursor: string | undefined;
  do {
    const entries: Page<T> = await page({ limit: 200, cursor });
    yield* entries;
    cursor = entries.nextCursor;
  } while (cursor !== undefined);
}

function defined<T extends object>(options: T): Partial<T> {
  return Object.fromEntries(Object.entries(options).filter(([, value]) => value !== undefined)) as Partial<T>;
}

/** A part of a path. A name must not lead to another route. */
function segment(name: string): string {
  if (name === "" || name === "." || name === "..") {
    throw new InvalidRequestError(`"${name}" is no id and no name`, { code: "invalid_request" });
  }
  return encodeURIComponent(name);
}

const below = (folder: string) => (name: string, rest?: string) =>
  `/v1/${folder}/${segment(name)}${rest === undefined ? "" : `/${rest}`}`;
const sandbox = below("sandboxes");
const snapshot = below("snapshots");
const workspace = below("workspaces");
