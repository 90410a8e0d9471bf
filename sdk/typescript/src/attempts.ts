// What one forks for: attempts, each in a child of the same moment.

import { onAbort, reasonOf, throwIfAborted, unlessAborted } from "./abort.js";
import { ForkdError, InvalidRequestError } from "./errors.js";
import type { Sandbox } from "./sandbox.js";

/** What an attempt gets beside its child. */
export interface AttemptContext {
  index: number;
  /** Aborts when the attempt is no longer wanted. */
  signal: AbortSignal;
}

export type Attempt<T> = (child: Sandbox, context: AttemptContext) => T | Promise<T>;

interface Ran {
  /** The place in the list of attempts. */
  index: number;
  /** The child. It has ended, unless `keep` kept it. */
  sandbox: Sandbox;
  seconds: number;
  /** What `score` returned, in `bestOf`. */
  score: number | undefined;
  /** Why the child could not be ended, if it could not: it may still run. */
  endError: unknown;
}

/** What became of one attempt. */
export type Outcome<T> =
  (Ran & { ok: true; value: T; error: undefined }) | (Ran & { ok: false; value: undefined; error: unknown });

/** No attempt succeeded. */
export class AllFailedError extends ForkdError {
  constructor(readonly outcomes: readonly Outcome<unknown>[]) {
    const first = outcomes.find((outcome) => !outcome.ok)?.error;
    const why = first instanceof Error ? first.message : String(first);
    const text = `none of the ${outcomes.length} attempts succeeded; the first: ${why}`;
    super(outcomes.length === 0 ? "there are no attempts: give at least one" : text, {
      code: "all_failed",
      cause: first,
    });
  }
}

export interface AttemptOptions {
  /** The children live on. */
  keep?: boolean | undefined;
  /** How many attempts run at the same time, at least 1; all when absent. */
  parallel?: number | undefined;
  signal?: AbortSignal | undefined;
}

/** Runs attempts in children of one fork, and ends every child that `keeps` does not want. */
class Attempts<T> {
  readonly #controller = new AbortController();
  readonly #ending = new Map<Sandbox, Promise<unknown>>();
  readonly #ran: Outcome<T>[] = [];

  private constructor(
    readonly children: Sandbox[],
    private readonly attempts: readonly Attempt<T>[],
    private readonly parallel: number,
  ) {}

  /** `work` gets the attempts, and returns the children to keep. */
  static async in<T, R>(
    source: Sandbox,
    attempts: readonly Attempt<T>[],
    { parallel, signal }: AttemptOptions,
    work: (attempts: Attempts<T>) => Promise<{ result: R; keep: readonly Sandbox[] }>,
  ): Promise<R> {
    throwIfAborted(signal);
    const atOnce = parallel ?? attempts.length;
    if (!(atOnce >= 1)) {
      const text = `parallel is ${atOnce}: give at least 1, or leave it out to run all at the same time`;
      throw new InvalidRequestError(text, { code: "invalid_request" });
    }
    const children = await source.fork(attempts.length, { signal });
    const all = new Attempts(children, attempts, Math.floor(atOnce));
    const stop = onAbort(signal, () => all.#controller.abort(reasonOf(signal as AbortSignal)));
    try {
      const { result, keep } = await unlessAborted(work(all), signal);
      await all.#endAllBut(keep);
      return result;
    } catch (error) {
      // What went wrong first is what the caller gets.
      await all.#endAllBut([]);
      throw error;
    } finally {
      stop();
    }
  }

  /** Every attempt's outcome, in order. `done` sees each as it comes. */
  async run(done: (outcome: Outcome<T>) => void | Promise<void>): Promise<Outcome<T>[]> {
    const outcomes: Outcome<T>[] = [];
    let next = 0;
    const worker = async (): Promise<void> => {
      while (next < this.attempts.length && !this.#controller.signal.aborted) {
        const outcome = await this.#one(next++);
        outcomes[outcome.index] = outcome;
        this.#ran.push(outcome);
        await done(outcome);
      }
    };
    await Promise.all(Array.from({ length: Math.min(this.parallel, this.attempts.length) }, worker));
    return outcomes;
  }

  /** Ends a child. It is ended once. */
  end(child: Sandbox): Promise<unknown> {
    let ending = this.#ending.get(child);
    if (ending === undefined) {
      ending = child.kill();
      // An error is reported at the end.
      ending.catch(() => {});
      this.#ending.set(child, ending);
    }
    return ending;
  }

  async #one(index: number): Promise<Outcome<T>> {
    const [attempt, sandbox] = [this.attempts[index] as Attempt<T>, this.children[index] as Sandbox];
    const start = performance.now();
    const ran = (): Ran => {
      const seconds = (performance.now() - start) / 1000;
      return { index, sandbox, seconds, score: undefined, endError: undefined };
    };
    try {
      const value = await attempt(sandbox, { index, signal: this.#controller.signal });
      return { ...ran(), ok: true, value, error: undefined };
    } catch (error) {
      return { ...ran(), ok: false, value: undefined, error };
    }
  }

  /** Never rejects: what came of the attempts is worth more. Children that could not be ended are a warning. */
  async #endAllBut(keep: readonly Sandbox[]): Promise<void> {
    this.#controller.abort(new DOMException("the attempt is no longer wanted", "AbortError"));
    const rest = this.children.filter((child) => !keep.includes(child));
    const ended = await Promise.allSettled(rest.map((child) => this.end(child)));
    const left: string[] = [];
    ended.forEach((each, at) => {
      const child = rest[at];
      if (each.status === "fulfilled" || child === undefined) return;
      const outcome = this.#ran.find(({ sandbox }) => sandbox === child);
      if (outcome !== undefined) outcome.endError = each.reason;
      left.push(`${child.id} (${each.reason instanceof Error ? each.reason.message : String(each.reason)})`);
    });
    if (left.length === 0) return;
    const text = `these children of attempts could not be ended, and may still run: ${left.join(", ")}`;
    process.emitWarning(text, { type: "ForkdWarning", code: "FORKD_CHILDREN_LEFT" });
  }
}

export function tryEach<T>(
  source: Sandbox,
  attempts: readonly Attempt<T>[],
  options: AttemptOptions,
): Promise<Outcome<T>[]> {
  if (attempts.length === 0) return Promise.resolve([]);
  return Attempts.in(source, attempts, options, async (all) => {
    const result = await all.run((outcome) => {
      if (!options.keep) void all.end(outcome.sandbox);
    });
    return { result, keep: options.keep ? all.children : [] };
  });
}

export function bestOf<T>(
  source: Sandbox,
  n: number,
  step: Attempt<T>,
  score: (value: T) => number | Promise<number>,
  options: AttemptOptions,
): Promise<Outcome<T>> {
  const attempts = Array.from({ length: n }, () => step);
  if (attempts.length === 0) return Promise.reject(new AllFailedError([]));
  return Attempts.in(source, attempts, options, async (all) => {
    let best: Outcome<T> | undefined;
    const outcomes = await all.run(async (outcome) => {
      if (outcome.ok) await scored(outcome, score);
      const better = best === undefined ? outcome.score !== undefined : beats(outcome, best);
      const loser = better ? best : outcome;
      if (better) best = outcome;
      if (loser !== undefined) void all.end(loser.sandbox);
    });
    if (best === undefined) throw new AllFailedError(outcomes);
    return { result: best, keep: options.keep ? [best.sandbox] : [] };
  });
}

/** Whether an outcome is better than the best so far. Of equals the first in the list wins. */
function beats({ score, index }: Ran, best: Ran): boolean {
  if (score === undefined || best.score === undefined) return false;
  return score > best.score || (score === best.score && index < best.index);
}

/** Gives an outcome its score. A score that cannot be computed makes it a failure. */
async function scored<T>(
  outcome: Outcome<T> & { ok: true },
  score: (value: T) => number | Promise<number>,
): Promise<void> {
  try {
    const value = await score(outcome.value);
    if (typeof value !== "number" || Number.isNaN(value))
      throw new TypeError(`the score is ${String(value)}, not a number`);
    outcome.score = value;
  } catch (error) {
    Object.assign(outcome, { ok: false, value: undefined, error });
  }
}

export function firstSuccess<T>(
  source: Sandbox,
  attempts: readonly Attempt<T>[],
  options: AttemptOptions,
): Promise<Outcome<T>> {
  if (attempts.length === 0) return Promise.reject(new AllFailedError([]));
  return Attempts.in(source, attempts, options, async (all) => {
    const winner = await new Promise<Outcome<T>>((resolve, reject) => {
      const running = all.run((outcome) => {
        if (outcome.ok) resolve(outcome);
        else void all.end(outcome.sandbox);
      });
      running.then((outcomes) => reject(new AllFailedError(outcomes)), reject);
    });
    return { result: winner, keep: options.keep ? [winner.sandbox] : [] };
  });
}
