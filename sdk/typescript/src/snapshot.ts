// Snapshots: what children are forked from.

import { randomBytes } from "node:crypto";

import type { SnapshotInfo, SnapshotPhase, SnapshotRequest, SnapshotStatus } from "./api/snapshots.js";
import { reasonOf, sleep, throwIfAborted, unlessAborted } from "./abort.js";
import { clientOr, entriesOf, type Client, type KeyOptions } from "./client.js";
import { owned } from "./creation.js";
import { ConflictError, errorOf, ForkdError, NotFoundError, timedOut } from "./errors.js";
import { given } from "./given.js";
import { spawn, type CreateOptions, type Sandbox } from "./sandbox.js";

/** What long work does now. */
export interface SnapshotProgress {
  phase: SnapshotPhase | SnapshotStatus;
  /** Of 0 to 1, while the snapshot is saved. */
  fraction: number | undefined;
  /** Seconds since the start. */
  seconds: number;
}

export interface WaitOptions {
  /** Seconds until the call gives up; 600 when absent. */
  timeoutSecs?: number | undefined;
  onProgress?: ((progress: SnapshotProgress) => void) | undefined;
  signal?: AbortSignal | undefined;
}

export interface WarmOptions extends WaitOptions {
  /** The snapshot's name; `warm-` and random digits when absent. */
  tag?: string | undefined;
  /** The warm-up command, in place of the image's own: a string is run by `sh -c`. */
  warm?: string | readonly string[] | undefined;
  /** Python code to run after the image's own warm-up, such as `import numpy`. */
  warmPython?: string | undefined;
  memSizeMib?: number | undefined;
  vcpus?: number | undefined;
  network?: boolean | undefined;
  client?: Client | undefined;
}

const POLL_MS = 250;
const DEFAULT_WAIT_SECS = 600;

/** A snapshot, by its tag. */
export class Snapshot {
  readonly #client: Client;
  #info: SnapshotInfo;

  /** @internal */
  constructor(client: Client, info: SnapshotInfo) {
    this.#client = client;
    this.#info = info;
  }

  /**
   * Boots a guest, warms it up once, and saves it. If the call is aborted or fails, the snapshot is removed.
   *
   * @example
   * ```ts
   * const parent = await Snapshot.warm("python", { tag: "numpy", warmPython: "import numpy" });
   * const children = await parent.spawn(3);
   * ```
   */
  static async warm(image: string, options: WarmOptions = {}): Promise<Snapshot> {
    const { warm, warmPython, memSizeMib, vcpus, network, signal } = options;
    throwIfAborted(signal);
    const client = clientOr(options.client);
    const tag = options.tag ?? `warm-${randomBytes(4).toString("hex")}`;
    const command = typeof warm === "string" ? ["sh", "-c", warm] : warm && [...warm];
    const more = given({ warm_command: command, warm_python: warmPython, mem_size_mib: memSizeMib, vcpus, network });
    const body: SnapshotRequest = { image, tag, ...more };
    const send = (call: KeyOptions): Promise<SnapshotInfo> => client.createSnapshot(body, { wait: false }, call);
    const ownTag = options.tag === undefined ? tag : undefined;
    const snapshot = await createSnapshot(client, send, signal, ownTag);
    try {
      return await snapshot.waitReady(options);
    } catch (error) {
      await snapshot.delete().catch(() => {});
      throw signal?.aborted ? reasonOf(signal) : error;
    }
  }

  static async get(tag: string, options: { client?: Client; signal?: AbortSignal } = {}): Promise<Snapshot> {
    const client = clientOr(options.client);
    return new Snapshot(client, await client.getSnapshot(tag, { signal: options.signal }));
  }

  /** The snapshots that the caller may use, by tag. */
  static async *list(
    options: { client?: Client; signal?: AbortSignal } = {},
  ): AsyncGenerator<Snapshot, void, undefined> {
    const client = clientOr(options.client);
    const infos = entriesOf((query) => client.listSnapshots(query, { signal: options.signal }));
    for await (const info of infos) yield new Snapshot(client, info);
  }

  get tag(): string {
    return this.#info.tag;
  }

  /** The status when it was last asked for. */
  get status(): SnapshotStatus {
    return this.#info.status;
  }

  /** Asks the daemon for its present state. */
  async info(options: { signal?: AbortSignal } = {}): Promise<SnapshotInfo> {
    this.#info = await this.#client.getSnapshot(this.tag, options);
    return this.#info;
  }

  /** Waits until it is on disk. */
  async waitReady(options: WaitOptions = {}): Promise<this> {
    const { signal, onProgress, timeoutSecs = DEFAULT_WAIT_SECS } = options;
    const start = Date.now();
    let shown = "";
    for (;;) {
      const { status, phase, progress, error, error_code } = this.#info;
      const fraction = progress && progress.total > 0 ? progress.scanned_bytes / progress.total : undefined;
      const now = status === "writing" ? (phase ?? status) : status;
      if (`${now} ${fraction}` !== shown) onProgress?.({ phase: now, fraction, seconds: (Date.now() - start) / 1000 });
      shown = `${now} ${fraction}`;
      if (status === "ready") return this;
      if (status !== "writing") {
        throw errorOf(`snapshot ${this.tag}: ${error ?? status}; make it again`, error_code ?? "snapshot_failed", {});
      }
      if (Date.now() - start > timeoutSecs * 1000) throw timedOut(`snapshot ${this.tag}`, timeoutSecs);
      await sleep(POLL_MS, signal);
      try {
        await unlessAborted(this.info(), signal);
      } catch (error) {
        if (!(error instanceof NotFoundError)) throw error;
        const text = `snapshot ${this.tag} was removed before it was ready; make it again`;
        throw new ConflictError(text, { code: "cancelled", cause: error });
      }
    }
  }

  /** Forks children. */
  spawn(n = 1, options: Omit<CreateOptions, "client" | "image"> = {}): Promise<Sandbox[]> {
    return spawn(this.#client, { snapshot_tag: this.tag, n }, options);
  }

  /** Removes it. Sandboxes that were forked from it keep running. One that was removed before is no error. */
  async delete(options: { cascade?: boolean; force?: boolean; signal?: AbortSignal } = {}): Promise<void> {
    const { cascade, force, signal } = options;
    const path = `/v1/snapshots/${encodeURIComponent(this.tag)}`;
    try {
      const call = { method: "DELETE" as const, path, query: { cascade, force }, repeatable: true, signal };
      await this.#client.transport.json(call);
    } catch (error) {
      if (!(error instanceof ForkdError) || error.code !== "snapshot_not_found") throw error;
    }
  }

  /** Frees its memory. It stays on disk. */
  unload(options: { signal?: AbortSignal } = {}): Promise<void> {
    return this.#client.unloadSnapshot(this.tag, options);
  }

  /** Makes a snapshot without ancestors of it. */
  async compact(to: string, options: { signal?: AbortSignal } = {}): Promise<Snapshot> {
    return new Snapshot(this.#client, await this.#client.compactSnapshot(this.tag, { to }, options));
  }
}

/**
 * Sends a request that makes a snapshot. If the caller aborts, or the answer gets lost, what this very request made is
 * removed: the tag may be that of an older snapshot. `ownTag` is one that no other snapshot has. @internal
 */
export async function createSnapshot(
  client: Client,
  send: (options: KeyOptions) => Promise<SnapshotInfo>,
  signal: AbortSignal | undefined,
  ownTag?: string,
): Promise<Snapshot> {
  const discard = (tag: string): Promise<void> => new Snapshot(client, { tag } as SnapshotInfo).delete();
  const removeOwn = ownTag === undefined ? undefined : () => discard(ownTag);
  return new Snapshot(client, await owned(send, signal, ({ tag }) => discard(tag), removeOwn));
}

/** Removes a branch that is no longer needed; snapshots that are built on it keep their layers. @internal */
export async function remove(branch: Snapshot): Promise<void> {
  try {
    await branch.delete();
  } catch (error) {
    if (!(error instanceof ConflictError)) throw error;
    await branch.delete({ force: true });
  }
}
