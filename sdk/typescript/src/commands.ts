// Running commands in a sandbox.

import type { ExecStreamRequest, TtySize } from "./api/commands.js";
import type { Client } from "./client.js";
import { checked, CommandHandle, resultOf, type CommandResult } from "./command.js";
import { given } from "./given.js";
import { wholeSecs } from "./seconds.js";

export interface RunOptions {
  /** Working directory; the user's home when absent. */
  cwd?: string | undefined;
  envs?: Record<string, string> | undefined;
  user?: string | undefined;
  /** Seconds after which the command is killed: 30 when absent; with `background`, none. `null` for no limit. */
  timeoutSecs?: number | null | undefined;
  /** Standard input; empty when absent. */
  stdin?: string | Uint8Array | AsyncIterable<string | Uint8Array> | undefined;
  /** Throws `CommandError` for a status that is not 0; true when absent. */
  check?: boolean | undefined;
  /** Runs the command on a terminal of this size. All its output is then standard output. */
  pty?: TtySize | undefined;
  /** Called with output as it comes. */
  onStdout?: ((text: string) => void) | undefined;
  onStderr?: ((text: string) => void) | undefined;
  /** Kills the command when it aborts. */
  signal?: AbortSignal | undefined;
}

export interface BackgroundOptions extends RunOptions {
  /** Returns as soon as the command runs. Its input stays open, unless there is `stdin`. */
  background: true;
  /** Lets the command run on when the connection ends. */
  keep?: boolean | undefined;
}

/** A longer command runs over a WebSocket: a plain request would wait too long for a byte. */
const LONGEST_PLAIN_SECS = 120;
const DEFAULT_SECS = 30;

/** Commands in one sandbox. */
export class Commands {
  /** @internal */
  constructor(
    private readonly client: Client,
    private readonly id: string,
  ) {}

  /**
   * Runs a command. A string is run by `sh -c`; a list is a program and its arguments.
   *
   * Without input or output to stream it is one request. With `signal`, `onStdout`, `pty` and the like it is a
   * WebSocket, and the daemon kills the command when the connection ends.
   *
   * @example
   * ```ts
   * const { stdout } = await sandbox.commands.run("echo $((6 * 7))");
   * const failed = await sandbox.commands.run(["ls", "/none"], { check: false });
   * console.log(stdout, failed.exitCode, failed.stderr);
   * const cat = await sandbox.commands.run("cat", { background: true, onStdout: console.log });
   * await cat.sendStdin("hello\n");
   * await cat.closeStdin();
   * await cat.wait();
   * ```
   */
  run(command: string | readonly string[], options: BackgroundOptions): Promise<CommandHandle>;
  run(command: string | readonly string[], options?: RunOptions & { background?: false }): Promise<CommandResult>;
  async run(
    command: string | readonly string[],
    options: RunOptions & { background?: boolean; keep?: boolean | undefined } = {},
  ): Promise<CommandResult | CommandHandle> {
    const args = argumentsOf(command);
    const check = options.check ?? true;
    const asked = wholeSecs("timeoutSecs", options.timeoutSecs);
    if (options.background) return this.#start(args, { ...options, timeoutSecs: asked }, check);
    const secs = asked === undefined ? DEFAULT_SECS : asked;
    if (secs !== null && !streams(options, secs)) {
      const { cwd, envs: env, user } = options;
      const stdin = options.stdin as string | undefined;
      const body = { args, ...given({ cwd, env, user, stdin }), timeout_secs: secs };
      const result = resultOf(await this.client.execCommand(this.id, body));
      if (check) checked(result);
      return result;
    }
    const endSecs = secs === null ? undefined : secs + this.client.transport.timeoutSecs;
    const handle = await this.#start(args, { ...options, timeoutSecs: secs }, check, endSecs);
    try {
      if (options.stdin === undefined) await handle.closeStdin();
      return await handle.wait();
    } finally {
      handle.disconnect();
    }
  }

  async #start(
    args: string[],
    options: RunOptions & { keep?: boolean | undefined },
    check: boolean,
    endSecs?: number,
  ): Promise<CommandHandle> {
    const { cwd, envs: env, user, timeoutSecs, pty, keep, signal, onStdout, onStderr } = options;
    const body: ExecStreamRequest = { args, ...given({ cwd, env, user, pty, keep }) };
    if (typeof timeoutSecs === "number") body.timeout_secs = timeoutSecs;
    const socket = await this.client.execStream(this.id, body, { signal });
    const startSecs = this.client.transport.timeoutSecs;
    const handle = new CommandHandle(socket, { check, signal, onStdout, onStderr, startSecs, endSecs });
    await handle.started;
    if (options.stdin !== undefined) void feed(handle, options.stdin);
    return handle;
  }
}

/** `sh -c` is in every image; `bash` is not. */
function argumentsOf(command: string | readonly string[]): string[] {
  return typeof command === "string" ? ["sh", "-c", command] : [...command];
}

function streams(options: RunOptions, secs: number): boolean {
  const { stdin, pty, onStdout, onStderr, signal } = options;
  const asText = stdin === undefined || typeof stdin === "string";
  const plain = asText && pty === undefined && onStdout === undefined && onStderr === undefined && signal === undefined;
  return !plain || secs > LONGEST_PLAIN_SECS;
}

/** Sends all of the input, then its end. A command may end before it has read all. */
async function feed(handle: CommandHandle, stdin: NonNullable<RunOptions["stdin"]>): Promise<void> {
  try {
    if (typeof stdin === "string" || stdin instanceof Uint8Array) await handle.sendStdin(stdin);
    else for await (const piece of stdin) await handle.sendStdin(piece);
    await handle.closeStdin();
  } catch (error) {
    // The caller's input failed to come. If the command has ended, that changes nothing.
    handle.abort(error instanceof Error ? error : new Error(String(error)));
  }
}
