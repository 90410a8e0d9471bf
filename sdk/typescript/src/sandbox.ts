// Sandboxes: to create, use, fork, branch and end them.

import { randomBytes } from "node:crypto";

import type { EvalReply } from "./api/commands.js";
import type {
  CreateRequest,
  OnTimeout,
  PingReply,
  SandboxInfo,
  SandboxState,
  SpawnError,
  Stats,
  UpdateRequest,
} from "./api/sandboxes.js";
import type { BranchRequest, SnapshotInfo, Tree } from "./api/snapshots.js";
import { throwIfAborted, unlessAborted } from "./abort.js";
import * as attempts from "./attempts.js";
import { clientOr, entriesOf, type Client, type KeyOptions } from "./client.js";
import { Commands } from "./commands.js";
import { createOwned, end, endAll, type OnForkError } from "./creation.js";
import { changesOf, type Change } from "./diff.js";
import { asyncDispose } from "./dispose.js";
import { CheckpointError, ForkdError, InvalidRequestError } from "./errors.js";
import { executionOf, valueOf, type Execution } from "./execution.js";
import { Files, type FileOptions } from "./files.js";
import { given } from "./given.js";
import { wholeSecs } from "./seconds.js";
import { createSnapshot, remove, Snapshot } from "./snapshot.js";

/** What a child or a new sandbox gets. */
export interface ChildOptions {
  /** Seconds that it lives; until it is ended when absent. */
  timeoutSecs?: number | undefined;
  /** Seconds without use after which it times out. */
  idleTimeoutSecs?: number | undefined;
  /** What the daemon does at a time-out; `kill` when absent. */
  onTimeout?: OnTimeout | undefined;
  /** Variables for every process started in it: the place for secrets. */
  envs?: Record<string, string> | undefined;
  labels?: Record<string, string> | undefined;
  network?: boolean | undefined;
  memoryLimitMib?: number | undefined;
  signal?: AbortSignal | undefined;
}

export interface CreateOptions extends ChildOptions {
  /** Boots this image, in place of a fork of a snapshot. */
  image?: string | undefined;
  /** Of a boot: memory and vCPUs. */
  memSizeMib?: number | undefined;
  vcpus?: number | undefined;
  client?: Client | undefined;
  onProgress?: ((progress: CreateProgress) => void) | undefined;
}

export interface CreateProgress {
  stage: "creating" | "running";
  /** Seconds since the start. */
  seconds: number;
}

export interface ForkOptions extends ChildOptions {
  /** What happens if some children do not start: `throw` ends the others, `return` returns them with the `errors`. */
  onError?: OnForkError | undefined;
}

/** Children of a fork. */
export type Children = Sandbox[] & {
  /** One error for each child that did not start; there can be some with `onError: "return"` only. */
  errors: readonly SpawnError[];
};

export interface BranchOptions {
  /** The branch's name; one with the sandbox's id when absent. */
  tag?: string | undefined;
  /** `live` when absent. */
  mode?: "live" | "diff" | "full" | "disk" | undefined;
  /** False, for `live` only: returns as soon as the sandbox runs again. */
  wait?: boolean | undefined;
  signal?: AbortSignal | undefined;
}

export interface ListOptions {
  labels?: Record<string, string> | undefined;
  /** A snapshot or its tag. */
  snapshot?: string | Snapshot | undefined;
  state?: SandboxState | undefined;
  client?: Client | undefined;
  signal?: AbortSignal | undefined;
}

interface Signal {
  signal?: AbortSignal | undefined;
}

interface EvalOptions extends Signal {
  /** Seconds after which the code is interrupted; 30 when absent. */
  timeoutSecs?: number | undefined;
}

/**
 * A running virtual machine. `await using` ends it.
 *
 * @example
 * ```ts
 * await using sandbox = await Sandbox.create("py");
 * const { stdout } = await sandbox.commands.run("uname -a");
 * console.log(stdout, await sandbox.eval("6 * 7"));
 * ```
 */
export class Sandbox {
  readonly id: string;
  readonly client: Client;
  readonly commands: Commands;
  readonly files: Files;
  /** What `rollback` returns to: branches made here, the newest last. */
  #branches: string[] = [];
  readonly #origin: string | undefined;

  /** @internal */
  constructor(client: Client, info: SandboxInfo) {
    this.client = client;
    this.id = info.id;
    this.#origin = info.snapshot_tag ?? undefined;
    this.commands = new Commands(client, info.id);
    this.files = new Files(client, info.id);
  }

  /**
   * Forks a sandbox from a snapshot, or boots one from `image`.
   *
   * @example
   * ```ts
   * const forked = await Sandbox.create("py", { timeoutSecs: 600, envs: { TOKEN: "a secret" } });
   * const booted = await Sandbox.create({ image: "python", memSizeMib: 1024, vcpus: 2 });
   * ```
   */
  static create(snapshot: string | Snapshot, options?: CreateOptions): Promise<Sandbox>;
  static create(options: CreateOptions & { image: string }): Promise<Sandbox>;
  static async create(from: string | Snapshot | CreateOptions, more: CreateOptions = {}): Promise<Sandbox> {
    const isSource = typeof from === "string" || from instanceof Snapshot;
    const options = isSource ? more : from;
    const { image, memSizeMib, vcpus } = options;
    if (!isSource && image === undefined) {
      const text = "name a snapshot to fork from (`forkd images` lists them), or give `image` to boot one";
      throw new InvalidRequestError(text, { code: "invalid_request" });
    }
    const source = isSource ? { snapshot_tag: tagOf(from) } : {};
    const boot = given({ image, mem_size_mib: memSizeMib, vcpus });
    const [sandbox] = await spawn(clientOr(options.client), { ...source, ...boot }, options);
    return sandbox as Sandbox;
  }

  /** A sandbox that exists. */
  static async connect(id: string, options: { client?: Client; signal?: AbortSignal } = {}): Promise<Sandbox> {
    const client = clientOr(options.client);
    return new Sandbox(client, await client.getSandbox(id, {}, { signal: options.signal }));
  }

  /**
   * The caller's sandboxes, oldest first.
   *
   * @example
   * ```ts
   * for await (const { id } of Sandbox.list({ labels: { job: "7" } })) console.log(id);
   * ```
   */
  static async *list(options: ListOptions = {}): AsyncGenerator<Sandbox, void, undefined> {
    const { labels, snapshot, state, signal } = options;
    const client = clientOr(options.client);
    const label = Object.entries(labels ?? {}).map(([name, value]) => `${name}=${value}`);
    const filter = { label, state, snapshot_tag: snapshot === undefined ? undefined : tagOf(snapshot) };
    const infos = entriesOf((query) => client.listSandboxes({ ...filter, ...query }, { signal }));
    for await (const info of infos) yield new Sandbox(client, info);
  }

  info(options: Signal = {}): Promise<SandboxInfo> {
    return this.client.getSandbox(this.id, {}, options);
  }

  /** Asks the agent in the guest for a sign of life. */
  ping(options: Signal = {}): Promise<PingReply> {
    return this.client.pingSandbox(this.id, options);
  }

  /** Memory, CPU time and network of the sandbox's process on the host. */
  metrics(options: Signal = {}): Promise<Stats> {
    return this.client.getStats(this.id, options);
  }

  /** Changes time-outs, the action at a time-out, and labels. `null` removes a time-out. */
  async update(
    changes: {
      timeoutSecs?: number | null;
      idleTimeoutSecs?: number | null;
      onTimeout?: OnTimeout;
      labels?: Record<string, string>;
    },
    options: Signal = {},
  ): Promise<SandboxInfo> {
    const { timeoutSecs, idleTimeoutSecs, onTimeout: on_timeout, labels } = changes;
    const body: UpdateRequest = given({
      timeout_secs: wholeSecs("timeoutSecs", timeoutSecs),
      idle_timeout_secs: wholeSecs("idleTimeoutSecs", idleTimeoutSecs),
      on_timeout,
      labels,
    });
    return this.client.updateSandbox(this.id, body, options);
  }

  /** It lives this many seconds from now; `null` for no limit. */
  async setTimeout(secs: number | null, options: Signal = {}): Promise<void> {
    await this.update({ timeoutSecs: secs }, options);
  }

  /** Ends it at once. Returns false if it had ended before. */
  kill(options: Signal = {}): Promise<boolean> {
    return end(this.client, this.id, options.signal);
  }

  /** The output of the guest's console, or its last lines. */
  console(options: { tail?: number } & Signal = {}): Promise<string> {
    return this.client.getConsole(this.id, { tail: options.tail }, { signal: options.signal });
  }

  /** What `await using` calls. */
  async [asyncDispose](): Promise<void> {
    await this.kill();
  }

  /**
   * The value of Python code in the warmed interpreter; its `repr` if JSON has no such type. Throws what it raises.
   *
   * @example
   * ```ts
   * await sandbox.eval("x = 20");
   * console.log(await sandbox.eval("[x, x + 1]")); // [ 20, 21 ]
   * ```
   */
  async eval(code: string, { timeoutSecs, signal }: EvalOptions = {}): Promise<unknown> {
    return valueOf(await this.#evaluate(code, timeoutSecs, signal));
  }

  /**
   * Runs Python code, and returns what it did: an exception of the code is in `error`.
   *
   * @example
   * ```ts
   * const { stdout, error } = await sandbox.runCode("print('so far'); 1 / 0");
   * console.log(stdout, error?.name); // so far, ZeroDivisionError
   * ```
   */
  async runCode(
    code: string,
    { timeoutSecs, signal, onStdout }: EvalOptions & { onStdout?: (text: string) => void } = {},
  ): Promise<Execution> {
    const reply = await this.#evaluate(code, timeoutSecs, signal);
    // The interpreter's output comes with its answer.
    if (reply.stdout !== "") onStdout?.(reply.stdout);
    return executionOf(reply);
  }

  /**
   * Forks children: all have the memory and the disk of the same instant. The sandbox goes on.
   *
   * @example
   * ```ts
   * const children = await sandbox.fork(2, { labels: { job: "7" } });
   * console.log(await Promise.all(children.map((child) => child.eval("x + 1"))));
   * await Promise.all(children.map((child) => child.kill()));
   * ```
   */
  async fork(n = 1, { signal, onError, ...options }: ForkOptions = {}): Promise<Children> {
    const body = { n, ...wireOf(options) };
    const send = (call: object) => this.client.forkEachSandbox(this.id, body, call);
    const { children, errors } = await createOwned(this.client, send, signal, onError);
    return Object.assign(
      children.map((info) => new Sandbox(this.client, info)),
      { errors },
    );
  }

  /**
   * Keeps this moment as a snapshot. The sandbox goes on.
   *
   * @example
   * ```ts
   * const branch = await sandbox.branch({ tag: "before-the-upgrade" });
   * const [child] = await branch.spawn();
   * ```
   */
  async branch({ tag, mode = "live", wait, signal }: BranchOptions = {}): Promise<Snapshot> {
    const info = await this.client.branchSandbox(this.id, { mode, ...given({ tag, wait }) }, { signal });
    if (mode !== "disk") this.#branches.push(info.tag);
    return new Snapshot(this.client, info);
  }

  /**
   * Goes back to a snapshot: by default to the newest branch made by this object that is left, else to where it came from.
   *
   * @example
   * ```ts
   * await sandbox.branch();
   * await sandbox.commands.run("rm -r /srv");
   * await sandbox.rollback();
   * ```
   */
  async rollback(to?: string | Snapshot, options: Signal = {}): Promise<SandboxInfo> {
    if (to !== undefined) return this.client.rollbackSandbox(this.id, { to: tagOf(to) }, options);
    for (const tag of [...this.#branches].reverse()) {
      try {
        return await this.client.rollbackSandbox(this.id, { to: tag }, options);
      } catch (error) {
        if (!(error instanceof ForkdError) || error.code !== "snapshot_not_found") throw error;
        // It was deleted: an older one is next.
        this.#branches = this.#branches.filter((each) => each !== tag);
      }
    }
    return this.client.rollbackSandbox(this.id, given({ to: this.#origin }), options);
  }

  pause(options: Signal = {}): Promise<SandboxInfo> {
    return this.client.pauseSandbox(this.id, options);
  }

  resume(options: Signal = {}): Promise<SandboxInfo> {
    return this.client.resumeSandbox(this.id, options);
  }

  /** The ancestry of all snapshots and sandboxes of the caller. */
  tree(options: Signal = {}): Promise<Tree> {
    return this.client.getTree(options);
  }

  /**
   * Runs each attempt in a child of this moment. Outcomes come in order; the children end, unless `keep`.
   *
   * @example
   * ```ts
   * const ways = ["6 * 7", "6 / 0"].map((code) => (child: Sandbox) => child.eval(code));
   * for (const { ok, value, error } of await sandbox.tryEach(ways)) console.log(ok ? value : error);
   * ```
   */
  tryEach<T>(
    each: readonly attempts.Attempt<T>[],
    options: attempts.AttemptOptions = {},
  ): Promise<attempts.Outcome<T>[]> {
    return attempts.tryEach(this, each, options);
  }

  /**
   * Runs `step` in `n` children of this moment. The highest score wins. With `keep` the winner's sandbox lives.
   *
   * @example
   * ```ts
   * const best = await sandbox.bestOf(3, (child, { index }) => child.eval(`x * ${index}`), Number, { keep: true });
   * console.log(best.value, best.score, best.sandbox.id);
   * ```
   */
  bestOf<T>(
    n: number,
    step: attempts.Attempt<T>,
    score: (value: T) => number | Promise<number>,
    options: attempts.AttemptOptions = {},
  ): Promise<attempts.Outcome<T>> {
    return attempts.bestOf(this, n, step, score, options);
  }

  /**
   * Runs all attempts in children of this moment. The first that returns wins; the others end at once.
   *
   * @example
   * ```ts
   * const ways = ["pip install numpy", "uv pip install numpy"].map((line) => (child: Sandbox) => child.commands.run(line));
   * const winner = await sandbox.firstSuccess(ways, { keep: true });
   * ```
   */
  firstSuccess<T>(
    each: readonly attempts.Attempt<T>[],
    options: attempts.AttemptOptions = {},
  ): Promise<attempts.Outcome<T>> {
    return attempts.firstSuccess(this, each, options);
  }

  /**
   * Runs `body`. If it throws, the sandbox goes back to the moment before, and the error goes on. If `signal` aborts, it
   * goes back at once: pass the signal to the calls in the body, too. If it cannot go back, a `CheckpointError` names
   * the branch, which is kept.
   *
   * @example
   * ```ts
   * await sandbox.checkpoint(async () => {
   *   await sandbox.commands.run("pip install --upgrade numpy && python -m unittest");
   * });
   * ```
   */
  async checkpoint<T>(body: () => T | Promise<T>, { tag, signal }: { tag?: string } & Signal = {}): Promise<T> {
    throwIfAborted(signal);
    const own = tag === undefined ? `checkpoint-${this.id}-${randomBytes(3).toString("hex")}` : undefined;
    const request: BranchRequest = given({ tag: tag ?? own, mode: "live", wait: false });
    const send = (call: KeyOptions): Promise<SnapshotInfo> => this.client.branchSandbox(this.id, request, call);
    const branch = await createSnapshot(this.client, send, signal, own);
    // A rollback in the body goes there, and so does one after a rollback that failed.
    this.#branches.push(branch.tag);
    let result: T;
    try {
      throwIfAborted(signal);
      result = await unlessAborted((async () => body())(), signal);
    } catch (error) {
      try {
        await this.client.rollbackSandbox(this.id, { to: branch.tag });
      } catch (cause) {
        throw new CheckpointError(branch.tag, error, cause);
      }
      // What went wrong first is what the caller gets.
      await this.#removeBranch(branch).catch(() => {});
      throw error;
    }
    await this.#removeBranch(branch);
    return result;
  }

  #evaluate(code: string, timeoutSecs: number | undefined, signal: AbortSignal | undefined): Promise<EvalReply> {
    const body = { code, ...given({ timeout_secs: wholeSecs("timeoutSecs", timeoutSecs) }) };
    return this.client.evalCode(this.id, body, { signal });
  }

  #removeBranch(branch: Snapshot): Promise<void> {
    this.#branches = this.#branches.filter((tag) => tag !== branch.tag);
    return remove(branch);
  }

  /**
   * What differs in the files of `other`: `added` is in `other` alone.
   *
   * @example
   * ```ts
   * const [child] = await sandbox.fork();
   * await child?.files.write("/srv/new", "x");
   * if (child) console.log(await sandbox.diff(child, "/srv"));
   * ```
   */
  async diff(other: Sandbox, path = "/", options: FileOptions = {}): Promise<Change[]> {
    const [before, after] = await Promise.all([this.files.tree(path, options), other.files.tree(path, options)]);
    return changesOf(before, after);
  }
}

/** Creates sandboxes. @internal */
export async function spawn(
  client: Client,
  source: Pick<CreateRequest, "snapshot_tag" | "image" | "mem_size_mib" | "vcpus" | "n">,
  { signal, onProgress, ...options }: CreateOptions,
): Promise<Sandbox[]> {
  const start = Date.now();
  const report = (stage: CreateProgress["stage"]): void =>
    onProgress?.({ stage, seconds: (Date.now() - start) / 1000 });
  report("creating");
  const body = { ...source, ...wireOf(options) };
  const { children } = await createOwned(client, (call) => client.createEachSandbox(body, call), signal);
  try {
    report("running");
  } catch (error) {
    await endAll(client, children).catch(() => {});
    throw error;
  }
  return children.map((info) => new Sandbox(client, info));
}

/** The fields of a request that all new sandboxes have. */
function wireOf(options: ChildOptions): Partial<CreateRequest> {
  return given({
    timeout_secs: wholeSecs("timeoutSecs", options.timeoutSecs),
    idle_timeout_secs: wholeSecs("idleTimeoutSecs", options.idleTimeoutSecs),
    on_timeout: options.onTimeout,
    env: options.envs,
    labels: options.labels,
    network: options.network,
    memory_limit_mib: options.memoryLimitMib,
  });
}

function tagOf(snapshot: string | Snapshot): string {
  return typeof snapshot === "string" ? snapshot : snapshot.tag;
}
