// Waiting that ends when a signal aborts.

/** What `signal` was aborted with, as an error. */
export function reasonOf(signal: AbortSignal): Error {
  const reason: unknown = signal.reason;
  return reason instanceof Error ? reason : new DOMException("This operation was aborted", "AbortError");
}

export function throwIfAborted(signal: AbortSignal | undefined): void {
  if (signal?.aborted) throw reasonOf(signal);
}

/** Calls `listener` when `signal` aborts, at once if it has. Returns a function that ends the watch. */
export function onAbort(signal: AbortSignal | undefined, listener: () => void): () => void {
  if (signal === undefined) return () => {};
  if (signal.aborted) {
    listener();
    return () => {};
  }
  signal.addEventListener("abort", listener, { once: true });
  return () => signal.removeEventListener("abort", listener);
}

/** The outcome of `work`, or the reason of the signal if that aborts first. */
export async function unlessAborted<T>(work: Promise<T>, signal: AbortSignal | undefined): Promise<T> {
  if (signal === undefined) return work;
  let stop = (): void => {};
  const aborted = new Promise<never>((_, reject) => {
    stop = onAbort(signal, () => reject(reasonOf(signal)));
  });
  try {
    return await Promise.race([work, aborted]);
  } finally {
    stop();
    work.catch(() => {});
  }
}

/** Sleeps. Rejects when `signal` aborts. */
export async function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  let timer: ReturnType<typeof setTimeout> | undefined;
  try {
    await unlessAborted(
      new Promise<void>((resolve) => {
        timer = setTimeout(resolve, ms);
      }),
      signal,
    );
  } finally {
    clearTimeout(timer);
  }
}

/**
 * A signal that aborts at the first SIGINT or SIGTERM of this process, so that `await using` can end what was made.
 * A second ^C ends the process at once.
 */
export function interrupted(): AbortSignal {
  const controller = new AbortController();
  for (const name of ["SIGINT", "SIGTERM"] as const) {
    process.once(name, () => controller.abort(new DOMException(`interrupted by ${name}`, "AbortError")));
  }
  return controller.signal;
}
