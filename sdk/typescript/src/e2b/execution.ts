// What code did, in E2B's shape.

import type { Execution as NativeExecution, ExecutionError } from "../execution.js";

export interface Execution {
  /** The value of the last expression. */
  text: string | undefined;
  results: { text: string; isMainResult: boolean }[];
  /** Output, in the pieces in which it came. */
  logs: { stdout: string[]; stderr: string[] };
  error: ExecutionError | undefined;
}

export function executionOf({ text, stdout, stderr, error }: NativeExecution): Execution {
  const logs = { stdout: stdout === "" ? [] : [stdout], stderr: stderr === "" ? [] : [stderr] };
  return { text, results: text === undefined ? [] : [{ text, isMainResult: true }], logs, error };
}
