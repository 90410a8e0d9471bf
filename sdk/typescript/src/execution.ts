// Code in the warmed Python interpreter.

import type { EvalReply } from "./api/commands.js";
import { EvalError, TimeoutError } from "./errors.js";

/** What went wrong in the code. */
export interface ExecutionError {
  /** The exception's class. */
  name: string;
  value: string;
  traceback: string;
}

/** What code did. */
export interface Execution {
  /** `repr` of the value of the last expression; absent for statements and `None`. */
  text: string | undefined;
  /** The value, if JSON has its type; else the same as `text`; null for `None`. */
  value: unknown;
  stdout: string;
  stderr: string;
  error: ExecutionError | undefined;
}

/** Code was interrupted at its time-out. */
export class EvalTimeoutError extends TimeoutError {
  constructor(
    message: string,
    readonly stdout: string,
    readonly stderr: string,
  ) {
    super(message, { code: "eval_timeout" });
  }
}

const TIMED_OUT = 124;

export function executionOf(reply: EvalReply): Execution {
  const text = reply.result ?? undefined;
  const { stdout, stderr } = reply;
  return { text, value: reply.result_json ?? text ?? null, stdout, stderr, error: errorIn(reply) };
}

/** The value of an evaluation. Throws what the code raised. */
export function valueOf(reply: EvalReply): unknown {
  const { error, value } = executionOf(reply);
  if (error === undefined) return value;
  if (reply.exit_code === TIMED_OUT) {
    const text = "the evaluation was interrupted at its time-out; give it a larger timeoutSecs";
    throw new EvalTimeoutError(text, reply.stdout, reply.stderr);
  }
  throw new EvalError(error.name, error.value, error.traceback);
}

function errorIn(reply: EvalReply): ExecutionError | undefined {
  if (reply.error === undefined || reply.error === null) return undefined;
  const [, name = "Error", value = reply.error] = /^([\w.]+)(?:: ([\s\S]*))?$/.exec(reply.error) ?? [];
  const bare = value === reply.error && name === reply.error;
  return { name, value: bare ? "" : value, traceback: reply.traceback ?? "" };
}
