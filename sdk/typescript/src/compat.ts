// The two classes of the reference's client: their names and options, over this SDK. Replies are plain objects with the
// API's field names. Each method needs one request, and nothing is sent twice.

import type { EvalReply, ExecReply } from "./api/commands.js";
import type { PingReply, SandboxInfo } from "./api/sandboxes.js";
import type { BranchRequest, SnapshotInfo } from "./api/snapshots.js";
import { Client } from "./client.js";
import { asyncDispose } from "./dispose.js";
import { ForkdError, NotFoundError } from "./errors.js";
import { given } from "./given.js";
import { wholeSecs } from "./seconds.js";

/** How a branch is stored. */
export type BranchMode = "full" | "diff" | "live";

export interface ControllerOptions {
  /** FORKD_URL or `http://127.0.0.1:8889` when absent. */
  baseUrl?: string | undefined;
  token?: string | undefined;
  /** Milliseconds until a request gives up; 60000 when absent. */
  timeoutMs?: number | undefined;
  fetch?: typeof globalThis.fetch | undefined;
}

export interface SpawnOptions {
  snapshotTag: string;
  n?: number | undefined;
  perChildNetns?: boolean | undefined;
  memoryLimitMib?: number | undefined;
  prewarm?: boolean | undefined;
  liveFork?: boolean | undefined;
  hugepages?: boolean | undefined;
}

export interface BranchOptions {
  tag?: string | undefined;
  mode?: BranchMode | undefined;
  diff?: boolean | undefined;
  measure_diff?: boolean | undefined;
  wait?: boolean | undefined;
}

/** A request that failed. `status` is 0 if there was no reply. */
export class ControllerError extends Error {
  constructor(
    readonly status: number,
    readonly body: string,
    readonly url: string,
    options?: { cause?: unknown },
  ) {
    super(`${url}: ${status === 0 ? "" : `${status}: `}${body}`, options);
    this.name = "ControllerError";
  }
}

/** The REST API, as the reference's client has it. */
export class Controller {
  readonly #client: Client;
  readonly #timeoutSecs: number;

  constructor({ baseUrl, token, timeoutMs = 60_000, fetch }: ControllerOptions = {}) {
    this.#timeoutSecs = timeoutMs / 1000;
    this.#client = new Client({ url: baseUrl, token, timeoutSecs: this.#timeoutSecs, fetch });
  }

  listSnapshots(): Promise<SnapshotInfo[]> {
    return this.#ask("/v1/snapshots", (client, options) => client.listSnapshots({}, options));
  }

  deleteSnapshot(tag: string): Promise<void> {
    return this.#ask(`/v1/snapshots/${tag}`, (client, options) => client.deleteSnapshot(tag, {}, options));
  }

  spawnSandboxes(options: SpawnOptions): Promise<SandboxInfo[]> {
    const { snapshotTag, n, perChildNetns, memoryLimitMib, prewarm, liveFork, hugepages } = options;
    const more = given({
      n,
      per_child_netns: perChildNetns,
      memory_limit_mib: memoryLimitMib,
      prewarm,
      live_fork: liveFork,
      hugepages,
    });
    const body = { snapshot_tag: snapshotTag, ...more };
    return this.#ask("/v1/sandboxes", (client, call) => client.createSandboxes(body, call));
  }

  listSandboxes(): Promise<SandboxInfo[]> {
    return this.#ask("/v1/sandboxes", (client, options) => client.listSandboxes({}, options));
  }

  getSandbox(id: string): Promise<SandboxInfo> {
    return this.#ask(`/v1/sandboxes/${id}`, (client, options) => client.getSandbox(id, {}, options));
  }

  killSandbox(id: string): Promise<void> {
    return this.#ask(`/v1/sandboxes/${id}`, (client, options) => client.deleteSandbox(id, options));
  }

  branchSandbox(id: string, options: BranchOptions = {}): Promise<SnapshotInfo> {
    const body: BranchRequest = given({ ...options });
    return this.#ask(`/v1/sandboxes/${id}/branch`, (client, call) => client.branchSandbox(id, body, call));
  }

  async execCommand(id: string, args: string[], options: { timeoutSecs?: number } = {}): Promise<ExecReply> {
    const body = { args, timeout_secs: wholeSecs("timeoutSecs", options.timeoutSecs) ?? 30 };
    // A command may take longer than other requests.
    const timeoutSecs = body.timeout_secs + this.#timeoutSecs;
    return this.#ask(`/v1/sandboxes/${id}/exec`, (client) => client.execCommand(id, body, { timeoutSecs }));
  }

  evalCode(id: string, code: string): Promise<EvalReply> {
    return this.#ask(`/v1/sandboxes/${id}/eval`, (client, options) => client.evalCode(id, { code }, options));
  }

  pingSandbox(id: string): Promise<PingReply> {
    return this.#ask(`/v1/sandboxes/${id}/ping`, (client, options) => client.pingSandbox(id, options));
  }

  async #ask<T>(path: string, send: (client: Client, options: { timeoutSecs: number }) => Promise<T>): Promise<T> {
    try {
      return await send(this.#client, { timeoutSecs: this.#timeoutSecs });
    } catch (error) {
      if (!(error instanceof ForkdError)) throw error;
      throw new ControllerError(error.status, error.message, this.#client.url + path, { cause: error });
    }
  }
}

export type SandboxOptions = ControllerOptions & Omit<SpawnOptions, "n" | "liveFork" | "hugepages">;

/** One sandbox, as the reference's client has it. */
export class Sandbox {
  readonly id: string;
  readonly #controller: Controller;
  #killed = false;

  private constructor(controller: Controller, id: string) {
    this.#controller = controller;
    this.id = id;
  }

  static async create({
    snapshotTag,
    perChildNetns,
    memoryLimitMib,
    prewarm,
    ...options
  }: SandboxOptions): Promise<Sandbox> {
    const controller = new Controller(options);
    const [info] = await controller.spawnSandboxes({ snapshotTag, n: 1, perChildNetns, memoryLimitMib, prewarm });
    if (info === undefined) throw new ControllerError(0, "the daemon made no sandbox", "/v1/sandboxes");
    return new Sandbox(controller, info.id);
  }

  /** Runs `work` with a sandbox that ends afterwards. */
  static async with<T>(options: SandboxOptions, work: (sandbox: Sandbox) => Promise<T>): Promise<T> {
    const sandbox = await Sandbox.create(options);
    try {
      return await work(sandbox);
    } finally {
      await sandbox.kill();
    }
  }

  exec(args: string[], options: { timeoutSecs?: number } = {}): Promise<ExecReply> {
    return this.#controller.execCommand(this.id, args, options);
  }

  eval(code: string): Promise<EvalReply> {
    return this.#controller.evalCode(this.id, code);
  }

  ping(): Promise<PingReply> {
    return this.#controller.pingSandbox(this.id);
  }

  branch(options: Omit<BranchOptions, "mode" | "wait"> = {}): Promise<SnapshotInfo> {
    return this.#controller.branchSandbox(this.id, options);
  }

  /** Ends the sandbox. A second call does nothing. */
  async kill(): Promise<void> {
    if (this.#killed) return;
    try {
      await this.#controller.killSandbox(this.id);
    } catch (error) {
      if (!(error instanceof ControllerError) || !(error.cause instanceof NotFoundError)) throw error;
    }
    this.#killed = true;
  }

  async [asyncDispose](): Promise<void> {
    await this.kill();
  }
}
