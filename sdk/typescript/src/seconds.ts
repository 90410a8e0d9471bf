// Seconds of a caller, as the API takes them (whole, and at least 1) and as timers do.

import { InvalidRequestError } from "./errors.js";

/** The longest time of a command or of code that the daemon accepts. */
export const MAX_SECS = 30 * 24 * 3600;

/** Whole seconds, rounded up; `null` for no limit, `undefined` where the caller says nothing. */
export function wholeSecs<T extends number | null | undefined>(name: string, secs: T): T {
  if (typeof secs !== "number") return secs;
  if (secs > 0 && secs < Infinity) return Math.ceil(secs) as T;
  const text = `${name} is ${secs}: give a number of seconds above 0, or leave it out`;
  throw new InvalidRequestError(text, { code: "invalid_request" });
}

/** A longer timer of Node.js fires at once. */
const LONGEST_TIMER_MS = 2 ** 31 - 1;

/** Milliseconds for a timer. */
export function timerMs(secs: number): number {
  return Math.min(Math.max(0, secs) * 1000, LONGEST_TIMER_MS);
}
