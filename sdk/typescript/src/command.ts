// A command that runs, and how one ended.

import type { ExecReply, ServerEvent } from "./api/commands.js";
import { onAbort, reasonOf } from "./abort.js";
import { asyncDispose } from "./dispose.js";
import { CommandError, ConflictError, errorOf, TimeoutError, timedOut } from "./errors.js";
import { timerMs } from "./seconds.js";
import type { Socket, SocketListener } from "./socket.js";

/** How a command ended. */
export interface CommandResult {
  /** Standard output; bytes that are not UTF-8 are replaced. */
  stdout: string;
  stderr: string;
  /** The status, 128 plus the number of a signal, 124 after a time-out, 126 or 127 if it could not be started. */
  exitCode: number;
  /** The number of the signal that ended it. */
  signal: number | null;
  timedOut: boolean;
  /** Whether the output was longer than the limit, and is cut. */
  stdoutTruncated: boolean;
  stderrTruncated: boolean;
}

/** A piece of output. */
export interface OutputEvent {
  channel: "stdout" | "stderr";
  bytes: Uint8Array;
  /** The same as text. A character whose bytes come in two pieces is in the second one. */
  text: string;
}

/** A command was killed at its time-out. */
export class CommandTimeoutError extends TimeoutError {
  constructor(
    message: string,
    readonly stdout: string,
    readonly stderr: string,
  ) {
    super(message, { code: "command_timeout" });
  }
}

/** What a handle needs to know about its command. */
export interface HandleOptions {
  /** Throws for a status that is not 0. */
  check: boolean;
  signal?: AbortSignal | undefined;
  onStdout?: ((text: string) => void) | undefined;
  onStderr?: ((text: string) => void) | undefined;
  /** Seconds until the command must run, and until it must have ended. */
  startSecs: number;
  endSecs?: number | undefined;
}

/** The daemon's limit of input that it has not acknowledged. */
const STDIN_WINDOW = 262_144;
const STDIN_PIECE = 65_536;
/** Output that waits for a reader. Above that the command waits. */
const MAX_UNREAD = 1024 * 1024;
/** Output of each channel that a result has. */
const MAX_KEPT = 16 * 1024 * 1024;
/** How long a killed command may take to end. */
const KILL_MS = 5000;

/** What came on one channel. */
class Channel {
  readonly #decoder = new TextDecoder();
  #length = 0;
  text = "";
  truncated = false;

  take(bytes: Uint8Array): string {
    const text = this.#decoder.decode(bytes, { stream: true });
    this.#keep(text, bytes.length);
    return text;
  }

  end(): string {
    const text = this.#decoder.decode();
    this.#keep(text, text.length);
    return text;
  }

  /** After a piece that is too much nothing more is kept: there is no hole. */
  #keep(text: string, length: number): void {
    this.#length += length;
    if (this.#length <= MAX_KEPT) this.text += text;
    else this.truncated = true;
  }
}

/** A command that runs. Iterate over it for its output, or `wait()` for its end. */
export class CommandHandle implements AsyncIterable<OutputEvent> {
  readonly #socket: Socket;
  readonly #options: HandleOptions;
  readonly #stdout = new Channel();
  readonly #stderr = new Channel();
  readonly #done: Promise<CommandResult>;
  readonly #started: Promise<void>;
  #settle!: { started: () => void; done: (result: CommandResult) => void; failed: (error: Error) => void };
  #unread: OutputEvent[] = [];
  #unreadBytes = 0;
  #readers = 0;
  #waited = false;
  #ended = false;
  #window = STDIN_WINDOW;
  #input: Promise<void> = Promise.resolve();
  /** Called at every change that a reader or a writer may wait for. */
  #wake: (() => void)[] = [];
  #pid = 0;

  /** @internal */
  constructor(socket: Socket, options: HandleOptions) {
    this.#socket = socket;
    this.#options = options;
    // A caller that iterates needs no result.
    this.#waited = options.onStdout !== undefined || options.onStderr !== undefined;
    let started!: { resolve: () => void; reject: (error: Error) => void };
    this.#started = new Promise((resolve, reject) => (started = { resolve, reject }));
    this.#done = new Promise((resolve, reject) => {
      const failed = (error: Error): void => {
        started.reject(error);
        reject(error);
      };
      this.#settle = { started: started.resolve, done: resolve, failed };
    });
    this.#started.catch(() => {});
    this.#done.catch(() => {});
    const { signal } = options;
    const stop = onAbort(signal, () => this.abort(reasonOf(signal as AbortSignal)));
    this.#done.then(stop, stop);
    this.#limit(options.startSecs, this.#started);
    if (options.endSecs !== undefined) this.#limit(options.endSecs, this.#done);
    const listener: SocketListener = {
      event: (event) => this.#event(event),
      output: (channel, bytes) => this.#output(channel === 2 ? "stderr" : "stdout", bytes),
      closed: (error) => {
        if (error !== undefined) this.abort(error);
      },
    };
    socket.listen(listener);
  }

  /** Resolves when the command runs. @internal */
  get started(): Promise<void> {
    return this.#started;
  }

  /** The process id in the guest. */
  get pid(): number {
    return this.#pid;
  }

  /** The end of the command. Throws for a status that is not 0, unless the command has `check: false`. */
  async wait(): Promise<CommandResult> {
    this.#waited = true;
    this.#makeRoom();
    const result = await this.#done;
    if (this.#options.check) checked(result);
    return result;
  }

  /** The output as it comes. The command waits when its output is not read. */
  async *[Symbol.asyncIterator](): AsyncGenerator<OutputEvent, void, undefined> {
    this.#readers++;
    try {
      for (;;) {
        const event = this.#unread.shift();
        if (event !== undefined) {
          this.#unreadBytes -= event.bytes.length;
          this.#makeRoom();
          yield event;
        } else if (this.#ended) {
          await this.#done;
          return;
        } else {
          await this.#change();
        }
      }
    } finally {
      this.#readers--;
      this.#makeRoom();
    }
  }

  /** Sends input. Resolves when the daemon has room for all of it. */
  sendStdin(data: string | Uint8Array): Promise<void> {
    const bytes = typeof data === "string" ? new TextEncoder().encode(data) : data;
    const sent = this.#input.then(() => this.#send(bytes));
    this.#input = sent.catch(() => {});
    return sent;
  }

  /** Ends the input. */
  closeStdin(): Promise<void> {
    const closed = this.#input.then(() => this.#socket.send({ type: "stdin_eof" }));
    this.#input = closed;
    return closed;
  }

  /** The terminal has a new size. */
  resize(cols: number, rows: number): void {
    this.#socket.send({ type: "resize", cols, rows });
  }

  /** Sends a signal, such as `SIGINT`. */
  signal(name: string): void {
    this.#socket.send({ type: "signal", signal: name });
  }

  /** Kills the command, and waits until it has ended. Returns false if it had ended before. */
  async kill(): Promise<boolean> {
    if (this.#ended) return false;
    this.#waited = true;
    this.#makeRoom();
    this.signal("SIGKILL");
    let timer: ReturnType<typeof setTimeout> | undefined;
    const late = new Promise<void>((resolve) => (timer = setTimeout(resolve, KILL_MS)));
    await Promise.race([
      late,
      this.#done.then(
        () => {},
        () => {},
      ),
    ]);
    clearTimeout(timer);
    this.disconnect();
    return true;
  }

  /** Closes the connection. The daemon then kills the command, unless it was started with `keep`. */
  disconnect(): void {
    const text = "the handle was disconnected before the command ended; start the command again to see its end";
    this.abort(new ConflictError(text, { code: "disconnected" }));
  }

  /** Closes the connection for a reason. @internal */
  abort(error: Error): void {
    if (this.#ended) return;
    this.#end();
    this.#settle.failed(error);
  }

  /** Kills the command if it still runs. */
  async [asyncDispose](): Promise<void> {
    await this.kill();
  }

  #event(event: ServerEvent): void {
    if (event.event === "started") {
      this.#pid = event.pid;
      this.#settle.started();
    } else if (event.event === "stdin_ack") {
      this.#window += event.bytes;
      this.#changed();
    } else if (event.event === "exit") {
      this.#output("stdout", new Uint8Array(), this.#stdout.end());
      this.#output("stderr", new Uint8Array(), this.#stderr.end());
      this.#end();
      this.#settle.started();
      this.#settle.done({
        stdout: this.#stdout.text,
        stderr: this.#stderr.text,
        exitCode: event.exit_code,
        signal: event.signal ?? null,
        timedOut: event.timed_out ?? false,
        stdoutTruncated: this.#stdout.truncated,
        stderrTruncated: this.#stderr.truncated,
      });
    } else if (event.event === "error") {
      const { message, code, status, request_id } = event;
      this.abort(errorOf(message, code, { status, requestId: request_id }));
    }
  }

  #output(channel: "stdout" | "stderr", bytes: Uint8Array, last?: string): void {
    if (this.#ended) return;
    const text = last ?? (channel === "stdout" ? this.#stdout : this.#stderr).take(bytes);
    const callback = channel === "stdout" ? this.#options.onStdout : this.#options.onStderr;
    try {
      if (text !== "") callback?.(text);
    } catch (error) {
      this.abort(error instanceof Error ? error : new Error(String(error)));
      return;
    }
    if (bytes.length === 0 && text === "") return;
    this.#unread.push({ channel, bytes, text });
    this.#unreadBytes += bytes.length;
    this.#makeRoom();
    this.#changed();
  }

  /** Output that nothing will read is dropped; output that waits for a reader makes the command wait. */
  #makeRoom(): void {
    if (this.#waited && this.#readers === 0) {
      this.#unread = [];
      this.#unreadBytes = 0;
    }
    if (this.#unreadBytes > MAX_UNREAD && !this.#ended) this.#socket.pause();
    else this.#socket.resume();
  }

  async #send(bytes: Uint8Array): Promise<void> {
    let at = 0;
    while (at < bytes.length) {
      if (this.#ended) {
        throw new ConflictError("the command has ended and takes no more input", { code: "command_ended" });
      }
      const length = Math.min(this.#window, STDIN_PIECE, bytes.length - at);
      if (length === 0) {
        await this.#change();
        continue;
      }
      this.#window -= length;
      this.#socket.input(bytes.subarray(at, at + length));
      at += length;
    }
  }

  /** Fails the command unless `step` comes in time: a daemon may stall. */
  #limit(secs: number, step: Promise<unknown>): void {
    const timer = setTimeout(() => this.abort(timedOut("a command", secs)), timerMs(secs));
    const stop = (): void => clearTimeout(timer);
    step.then(stop, stop);
  }

  #end(): void {
    this.#ended = true;
    this.#socket.close();
    this.#changed();
  }

  #change(): Promise<void> {
    return new Promise((resolve) => this.#wake.push(resolve));
  }

  #changed(): void {
    for (const wake of this.#wake.splice(0)) wake();
  }
}

/** The result of a command that `/exec` ran. */
export function resultOf(reply: ExecReply): CommandResult {
  return {
    stdout: reply.stdout,
    stderr: reply.error && reply.stderr === "" ? reply.error : reply.stderr,
    exitCode: reply.exit_code,
    signal: reply.signal ?? null,
    timedOut: reply.timed_out ?? false,
    stdoutTruncated: reply.stdout_truncated ?? false,
    stderrTruncated: reply.stderr_truncated ?? false,
  };
}

/** Throws unless the command succeeded. */
export function checked(result: CommandResult): void {
  const { exitCode, stdout, stderr } = result;
  if (result.timedOut) {
    const text =
      "the command was killed at its time-out; give it a larger timeoutSecs, or run it with background: true";
    throw new CommandTimeoutError(text, stdout, stderr);
  }
  if (exitCode === 0) return;
  const last = stderr.trimEnd().split("\n").at(-1)?.slice(0, 500) ?? "";
  const text = `the command ended with status ${exitCode}${last === "" ? "" : `: ${last}`}`;
  throw new CommandError(text, exitCode, stdout, stderr, result.signal);
}
