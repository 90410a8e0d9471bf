// A command's WebSocket: opening it, its messages, and its end.

import type { IncomingMessage } from "node:http";
import { WebSocket, type RawData } from "ws";

import type { ClientMessage, ServerEvent } from "./api/commands.js";
import { onAbort, reasonOf, throwIfAborted } from "./abort.js";
import { broken, timedOut, unreachable } from "./errors.js";
import { timerMs } from "./seconds.js";
import { refusal, type CallOptions, type Transport } from "./transport.js";

/** Most bytes of an error's body that are read. */
const MAX_REFUSAL = 64 * 1024;
/** So many pings without an answer end the connection. */
const BEATS = 3;

/** What arrives on a socket. */
export interface SocketListener {
  event(event: ServerEvent): void;
  /** `channel` is 1 for standard output and 2 for standard error. */
  output(channel: number, bytes: Uint8Array): void;
  /** The connection has ended. An error, unless the client ended it. */
  closed(error: Error | undefined): void;
}

/** An open connection to a command. */
export interface Socket {
  /** From here on the listener gets everything, also what came before. */
  listen(listener: SocketListener): void;
  send(message: ClientMessage): void;
  /** Sends input of the command: at most 262144 bytes that the daemon has not acknowledged. */
  input(bytes: Uint8Array): void;
  /** Takes no more messages until `resume`: the daemon and the command wait. */
  pause(): void;
  resume(): void;
  close(): void;
}

class OpenSocket implements Socket {
  #listener: SocketListener | undefined;
  #early: ((listener: SocketListener) => void)[] = [];
  /** Beats since the last sign of life. */
  #beats = 0;
  #paused = false;
  #closing = false;
  #ended = false;
  readonly #beat: ReturnType<typeof setInterval>;

  constructor(
    private readonly socket: WebSocket,
    private readonly what: string,
    silenceSecs: number,
  ) {
    // Beats count, not the clock: a program that computes for long has not seen what came meanwhile.
    this.#beat = setInterval(
      () => {
        if (this.#paused) return;
        if (++this.#beats > BEATS) this.#end(timedOut(what, silenceSecs));
        else if (socket.readyState === WebSocket.OPEN) socket.ping();
      },
      timerMs(silenceSecs / BEATS),
    );
    const heard = (): void => {
      this.#beats = 0;
    };
    socket.on("ping", heard);
    socket.on("pong", heard);
    socket.on("message", (data: RawData, binary: boolean) => {
      heard();
      this.#message(data as Buffer, binary);
    });
    socket.on("error", (cause: Error) => this.#end(broken(what, cause)));
    socket.on("close", () => this.#end(this.#closing ? undefined : broken(what)));
  }

  listen(listener: SocketListener): void {
    this.#listener = listener;
    for (const early of this.#early.splice(0)) early(listener);
  }

  send(message: ClientMessage): void {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  input(bytes: Uint8Array): void {
    if (this.socket.readyState !== WebSocket.OPEN) return;
    const frame = new Uint8Array(bytes.length + 1);
    frame.set(bytes, 1);
    this.socket.send(frame);
  }

  pause(): void {
    this.#paused = true;
    this.socket.pause();
  }

  resume(): void {
    if (!this.#paused) return;
    this.#paused = false;
    this.#beats = 0;
    this.socket.resume();
  }

  close(): void {
    this.#closing = true;
    this.socket.resume();
    this.socket.close();
    // A server that does not answer the close is not waited for.
    setTimeout(() => this.socket.terminate(), 1000).unref();
    this.#end(undefined);
  }

  #message(data: Buffer, binary: boolean): void {
    if (binary) {
      if (data.length > 1) this.#deliver((listener) => listener.output(data[0] as number, data.subarray(1)));
      return;
    }
    let event: ServerEvent;
    try {
      event = JSON.parse(data.toString("utf8")) as ServerEvent;
      if (typeof event !== "object" || event === null) throw new TypeError("a message is no object");
    } catch (cause) {
      this.#end(broken(this.what, cause));
      return;
    }
    this.#deliver((listener) => listener.event(event));
  }

  #end(error: Error | undefined): void {
    clearInterval(this.#beat);
    if (this.#ended) return;
    this.#ended = true;
    if (error !== undefined) this.socket.terminate();
    this.#deliver((listener) => listener.closed(error));
  }

  #deliver(what: (listener: SocketListener) => void): void {
    if (this.#listener === undefined) this.#early.push(what);
    else what(this.#listener);
  }
}

/** Connects, and sends the first message. */
export async function openSocket(
  transport: Transport,
  path: string,
  first: unknown,
  options: CallOptions,
): Promise<Socket> {
  const { endpoint } = transport;
  const { signal } = options;
  const secs = options.timeoutSecs ?? transport.timeoutSecs;
  const what = `GET ${path}`;
  throwIfAborted(signal);
  const socket = new WebSocket(endpoint.webSocket(path), {
    headers: endpoint.headers(),
    ...(endpoint.ca === undefined ? {} : { ca: endpoint.ca }),
    perMessageDeflate: false,
    // Output comes in frames far below that.
    maxPayload: 16 * 1024 * 1024,
  });
  return new Promise<Socket>((resolve, reject) => {
    const fail = (error: Error): void => {
      end();
      socket.on("error", () => {});
      socket.terminate();
      reject(error);
    };
    const timer = setTimeout(() => fail(timedOut(what, secs)), timerMs(secs));
    const stop = onAbort(signal, () => fail(reasonOf(signal as AbortSignal)));
    const end = (): void => {
      clearTimeout(timer);
      stop();
      socket.removeAllListeners();
    };
    socket.once("open", () => {
      end();
      const opened = new OpenSocket(socket, what, transport.timeoutSecs);
      socket.send(JSON.stringify(first));
      resolve(opened);
    });
    socket.once("error", (cause: NodeJS.ErrnoException) => {
      const refused = ["ECONNREFUSED", "ENOENT", "ENOTFOUND", "EAI_AGAIN", "EACCES"].includes(cause.code ?? "");
      fail(refused ? unreachable(endpoint.url, cause) : broken(what, cause));
    });
    socket.once("unexpected-response", (_request: unknown, reply: IncomingMessage) => {
      let text = "";
      reply.setEncoding("utf8");
      reply.on("data", (piece: string) => {
        if (text.length < MAX_REFUSAL) text += piece;
      });
      reply.once("end", () => fail(refusal(reply.statusCode ?? 0, text, what)));
      reply.once("error", (cause) => fail(broken(what, cause)));
    });
  });
}
