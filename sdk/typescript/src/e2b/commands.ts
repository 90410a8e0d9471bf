// Commands, in E2B's shape.

import type * as native from "../command.js";
import type { Commands as NativeCommands } from "../commands.js";
import { CommandError } from "../errors.js";

export interface CommandResult {
  exitCode: number;
  stdout: string;
  stderr: string;
  error: string | undefined;
}

/** A command ended with another status than 0. */
export class CommandExitError extends Error implements CommandResult {
  readonly exitCode: number;
  readonly stdout: string;
  readonly stderr: string;
  readonly error: string | undefined;

  constructor(cause: CommandError) {
    super(cause.message, { cause });
    this.name = "CommandExitError";
    this.exitCode = cause.exitCode;
    this.stdout = cause.stdout;
    this.stderr = cause.stderr;
    this.error = cause.message;
  }
}

export interface CommandOptions {
  background?: boolean | undefined;
  cwd?: string | undefined;
  envs?: Record<string, string> | undefined;
  user?: string | undefined;
  /** Milliseconds until the command is killed: 60000 when absent, 0 for no limit. */
  timeoutMs?: number | undefined;
  /** Leaves standard input open, for `sendStdin`. */
  stdin?: boolean | undefined;
  onStdout?: ((text: string) => void) | undefined;
  onStderr?: ((text: string) => void) | undefined;
}

const DEFAULT_TIMEOUT_MS = 60_000;

/** A command that runs. */
export class CommandHandle {
  readonly #native: native.CommandHandle;

  /** @internal */
  constructor(handle: native.CommandHandle) {
    this.#native = handle;
  }

  get pid(): number {
    return this.#native.pid;
  }

  async wait(): Promise<CommandResult> {
    return resultOf(await converted(this.#native.wait()));
  }

  kill(): Promise<boolean> {
    return this.#native.kill();
  }

  async disconnect(): Promise<void> {
    this.#native.disconnect();
  }

  sendStdin(data: string | Uint8Array): Promise<void> {
    return this.#native.sendStdin(data);
  }

  closeStdin(): Promise<void> {
    return this.#native.closeStdin();
  }
}

export class Commands {
  /** @internal */
  constructor(private readonly native: NativeCommands) {}

  /** Runs a command by the shell. Throws `CommandExitError` for a status that is not 0. */
  run(command: string, options: CommandOptions & { background: true }): Promise<CommandHandle>;
  run(command: string, options?: CommandOptions & { background?: false }): Promise<CommandResult>;
  async run(command: string, options: CommandOptions = {}): Promise<CommandResult | CommandHandle> {
    const { cwd, envs, user, onStdout, onStderr, timeoutMs = DEFAULT_TIMEOUT_MS } = options;
    const timeoutSecs = timeoutMs === 0 ? null : timeoutMs / 1000;
    const common = { cwd, envs, user, onStdout, onStderr, timeoutSecs };
    if (!options.background) return resultOf(await converted(this.native.run(command, common)));
    const handle = await this.native.run(command, { ...common, background: true });
    if (!options.stdin) await handle.closeStdin();
    return new CommandHandle(handle);
  }
}

function resultOf({ exitCode, stdout, stderr }: native.CommandResult): CommandResult {
  return { exitCode, stdout, stderr, error: undefined };
}

async function converted<T>(work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    throw error instanceof CommandError ? new CommandExitError(error) : error;
  }
}
