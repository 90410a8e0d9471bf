// Requests that create sandboxes. A caller that stops waiting must leave none.

import { randomUUID } from "node:crypto";

import type { SpawnReply } from "./api/sandboxes.js";
import { reasonOf, sleep, throwIfAborted, unlessAborted } from "./abort.js";
import type { Client, KeyOptions } from "./client.js";
import { errorOf, ForkdError, ForkError, isUncertain, isUnseen, NotFoundError } from "./errors.js";

/** What to do when only some of the children run. */
export type OnForkError = "throw" | "return";

/** How long a call that was aborted or timed out waits for its clean-up. Then the clean-up goes on without it. */
const GRACE_MS = 5000;
/** How long a clean-up tries. */
const CLEAN_UP_MS = 60_000;

type Send<T> = (options: KeyOptions) => Promise<T>;

/**
 * Sends a request that creates sandboxes, and returns them. If the caller aborts, or the answer gets lost, the same
 * request with the same key finds out what was created, and that is ended.
 */
export async function createOwned(
  client: Client,
  send: Send<SpawnReply>,
  signal: AbortSignal | undefined,
  onError: OnForkError = "throw",
): Promise<SpawnReply> {
  const reply = await owned(send, signal, (created) => endAll(client, created.children));
  const { children, errors } = reply;
  const first = errors[0];
  if (first === undefined || (onError === "return" && children.length > 0)) return reply;
  const ended = await endAll(client, children).then(
    () => "were ended",
    (error: Error) => `could not be ended (${error.message})`,
  );
  const { code, request_id: requestId } = first;
  const count = children.length + errors.length;
  const text = `${errors.length} of ${count} children did not start, and the others ${ended}: ${first.error}`;
  throw new ForkError(text, errors, { code, requestId, cause: errorOf(first.error, code, { requestId }) });
}

/**
 * Sends a request that creates something. If the caller aborts, or the answer gets lost, the call rejects, and `remove`
 * removes what was created, or `removeUnknown` if the daemon does not tell what that was.
 */
export async function owned<T>(
  send: Send<T>,
  signal: AbortSignal | undefined,
  remove: (created: T) => Promise<void>,
  removeUnknown: () => Promise<void> = async () => {},
): Promise<T> {
  throwIfAborted(signal);
  const idempotencyKey = randomUUID();
  // The signal is not passed on: an answer that comes later names what to remove.
  const pending = send({ idempotencyKey });
  try {
    return await unlessAborted(pending, signal);
  } catch (error) {
    if (signal?.aborted || (error instanceof ForkdError && isUncertain(error))) {
      const undone = undo(send, idempotencyKey, remove, pending).then((known) => (known ? undefined : removeUnknown()));
      // A program that does not catch the error ends at once, and its clean-up with it.
      await withGrace(undone.catch(() => {}));
    }
    throw signal?.aborted ? reasonOf(signal) : error;
  }
}

/** Waits for a clean-up, which never rejects, for a few seconds. Then it goes on by itself. */
async function withGrace(cleanUp: Promise<unknown>): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  const grace = new Promise<void>((resolve) => (timer = setTimeout(resolve, GRACE_MS)));
  await Promise.race([cleanUp, grace]);
  clearTimeout(timer);
}

/**
 * Removes what a request created: `pending` brings it, else the same request with the same key. Once a request may have
 * arrived, a daemon that is away is waited for: it may be restarting. Returns false if the daemon does not tell what it
 * created. Never rejects.
 */
async function undo<T>(
  send: Send<T>,
  idempotencyKey: string,
  remove: (created: T) => Promise<void>,
  pending: Promise<T>,
): Promise<boolean> {
  const deadline = Date.now() + CLEAN_UP_MS;
  let reply = pending;
  let maybeDone = false;
  for (let wait = 200; ; wait = Math.min(wait * 2, 5000)) {
    try {
      const created = await reply;
      maybeDone = true;
      await remove(created);
      return true;
    } catch (error) {
      const again = error instanceof ForkdError && (isUncertain(error) || (maybeDone && isUnseen(error)));
      if (!again || Date.now() + wait >= deadline) return false;
    }
    maybeDone = true;
    await sleep(wait);
    reply = send({ idempotencyKey, timeoutSecs: Math.max(1, (deadline - Date.now()) / 1000) });
  }
}

/** Ends sandboxes. One that has ended is no error. */
export async function endAll(client: Client, sandboxes: readonly { id: string }[]): Promise<void> {
  const ended = await Promise.allSettled(sandboxes.map(({ id }) => end(client, id)));
  const failed = ended.find((each) => each.status === "rejected");
  if (failed !== undefined) throw failed.reason;
}

export async function end(client: Client, id: string, signal?: AbortSignal): Promise<boolean> {
  try {
    await client.transport.json({
      method: "DELETE",
      path: `/v1/sandboxes/${encodeURIComponent(id)}`,
      repeatable: true,
      signal,
    });
    return true;
  } catch (error) {
    if (error instanceof NotFoundError && error.code === "sandbox_not_found") return false;
    throw error;
  }
}
