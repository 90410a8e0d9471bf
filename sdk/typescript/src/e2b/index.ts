// A class in the shape of E2B's, over this SDK: for programs that use the common part of it.

import type { SandboxInfo } from "../api/sandboxes.js";
import { Client, type ClientOptions } from "../client.js";
import { asyncDispose } from "../dispose.js";
import { NotFoundError } from "../errors.js";
import { Sandbox as Native } from "../sandbox.js";
import { MAX_SECS } from "../seconds.js";
import { Commands } from "./commands.js";
import { executionOf, type Execution } from "./execution.js";
import { Filesystem } from "./filesystem.js";

export { CommandExitError, type CommandHandle, type CommandResult } from "./commands.js";
export type { Execution } from "./execution.js";
export type { EntryInfo, WriteInfo } from "./filesystem.js";

export interface ConnectOptions {
  /** A token of the daemon, with or without `e2b_` before it; E2B_API_KEY or FORKD_TOKEN when absent. */
  apiKey?: string | undefined;
  /** The daemon's address; E2B_API_URL or FORKD_URL when absent. */
  apiUrl?: string | undefined;
  /** Milliseconds until a request gives up: 60000 when absent, 0 for no limit. */
  requestTimeoutMs?: number | undefined;
}

export interface SandboxOptions extends ConnectOptions {
  /** Milliseconds that the sandbox lives; 300000 when absent. */
  timeoutMs?: number | undefined;
  metadata?: Record<string, string> | undefined;
  envs?: Record<string, string> | undefined;
  allowInternetAccess?: boolean | undefined;
}

export interface RunCodeOptions {
  /** Milliseconds until the code is interrupted: 30000 when absent, 0 for the longest time that the daemon allows. */
  timeoutMs?: number | undefined;
  onStdout?: ((text: string) => void) | undefined;
}

const DEFAULT_TIMEOUT_MS = 300_000;

export class Sandbox {
  readonly sandboxId: string;
  readonly commands: Commands;
  readonly files: Filesystem;
  readonly #native: Native;

  private constructor(native: Native) {
    this.#native = native;
    this.sandboxId = native.id;
    this.commands = new Commands(native.commands);
    this.files = new Filesystem(native.files);
  }

  /** Forks a sandbox from a template: a snapshot of this tag. */
  static create(options?: SandboxOptions): Promise<Sandbox>;
  static create(template: string, options?: SandboxOptions): Promise<Sandbox>;
  static async create(first: string | SandboxOptions = {}, second: SandboxOptions = {}): Promise<Sandbox> {
    const [template, options] = typeof first === "string" ? [first, second] : ["base", first];
    const native = await Native.create(template, {
      client: clientOf(options),
      timeoutSecs: secsOf(options.timeoutMs ?? DEFAULT_TIMEOUT_MS),
      labels: options.metadata,
      envs: options.envs,
      // No network at all; when absent, the one that the template has.
      network: options.allowInternetAccess === false ? false : undefined,
    });
    return new Sandbox(native);
  }

  static async connect(sandboxId: string, options: ConnectOptions = {}): Promise<Sandbox> {
    const client = clientOf(options);
    const native = await Native.connect(sandboxId, { client });
    if ((await native.info()).state === "paused") await native.resume();
    return new Sandbox(native);
  }

  static async kill(sandboxId: string, options: ConnectOptions = {}): Promise<boolean> {
    try {
      return await (await Native.connect(sandboxId, { client: clientOf(options) })).kill();
    } catch (error) {
      if (error instanceof NotFoundError) return false;
      throw error;
    }
  }

  async setTimeout(timeoutMs: number): Promise<void> {
    await this.#native.setTimeout(secsOf(timeoutMs));
  }

  async isRunning(): Promise<boolean> {
    try {
      return (await this.#native.info()).state === "running";
    } catch (error) {
      if (error instanceof NotFoundError) return false;
      throw error;
    }
  }

  async getInfo(): Promise<{
    sandboxId: string;
    templateId: string | undefined;
    metadata: Record<string, string>;
    state: string;
    startedAt: Date;
    endAt: Date | undefined;
  }> {
    const info: SandboxInfo = await this.#native.info();
    return {
      sandboxId: info.id,
      templateId: info.snapshot_tag ?? undefined,
      metadata: info.labels ?? {},
      state: info.state,
      startedAt: new Date(info.created_at_unix * 1000),
      endAt: info.expires_at_unix == null ? undefined : new Date(info.expires_at_unix * 1000),
    };
  }

  kill(): Promise<boolean> {
    return this.#native.kill();
  }

  /** The sandbox keeps its memory and uses no CPU. `connect` resumes it. */
  async pause(): Promise<boolean> {
    await this.#native.pause();
    return true;
  }

  /** Children of this moment. */
  async fork({ count = 1, timeoutMs = DEFAULT_TIMEOUT_MS }: { count?: number; timeoutMs?: number } = {}): Promise<
    Sandbox[]
  > {
    const children = await this.#native.fork(count, { timeoutSecs: secsOf(timeoutMs) });
    return children.map((child) => new Sandbox(child));
  }

  /** Runs Python in the warmed interpreter. An exception of the code is in `error`. */
  async runCode(code: string, { timeoutMs, onStdout }: RunCodeOptions = {}): Promise<Execution> {
    const secs = timeoutMs === undefined ? {} : { timeoutSecs: timeoutMs === 0 ? MAX_SECS : timeoutMs / 1000 };
    return executionOf(await this.#native.runCode(code, { ...secs, ...(onStdout === undefined ? {} : { onStdout }) }));
  }

  async [asyncDispose](): Promise<void> {
    await this.kill();
  }
}

export default Sandbox;

const secsOf = (ms: number): number => Math.max(1, Math.ceil(ms / 1000));

function clientOf({ apiKey, apiUrl, requestTimeoutMs }: ConnectOptions): Client {
  const key = apiKey ?? process.env["E2B_API_KEY"];
  const options: ClientOptions = {
    url: apiUrl ?? (process.env["E2B_API_URL"] || undefined),
    token: key?.replace(/^e2b_/, "") || undefined,
    timeoutSecs: requestTimeoutMs === undefined ? undefined : requestTimeoutMs === 0 ? MAX_SECS : requestTimeoutMs / 1000,
  };
  return new Client(options);
}
