// Where the daemon is, and how a connection to it is made.

import { readFileSync } from "node:fs";

import { InvalidRequestError } from "./errors.js";

export const DEFAULT_URL = "http://127.0.0.1:8889";

/** The address of a daemon, its token, and the certificate that it must have. */
export class Endpoint {
  /** As the caller wrote it, for texts. */
  readonly url: string;
  /** What paths are put after. */
  readonly base: string;
  /** The unix socket, if it is one. */
  readonly socketPath: string | undefined;
  readonly token: string | undefined;
  /** The certificate of the authority, in PEM. */
  readonly ca: string | undefined;

  constructor(url?: string, token?: string, cacert?: string) {
    this.url = url ?? (process.env["FORKD_URL"] || DEFAULT_URL);
    this.token = (token ?? process.env["FORKD_TOKEN"]) || undefined;
    this.ca = cacert === undefined ? undefined : readFileSync(cacert, "utf8");
    let parsed: URL;
    try {
      parsed = new URL(this.url);
    } catch (cause) {
      throw wrong(this.url, cause);
    }
    if (parsed.protocol === "unix:") {
      this.socketPath = decodeURIComponent(parsed.pathname);
      this.base = "http://localhost";
    } else if (parsed.protocol === "http:" || parsed.protocol === "https:") {
      this.base = this.url.replace(/\/+$/, "");
    } else {
      throw wrong(this.url);
    }
  }

  /** The address of a WebSocket. */
  webSocket(path: string): string {
    if (this.socketPath !== undefined) return `ws+unix:${this.socketPath}:${path}`;
    return this.base.replace(/^http/, "ws") + path;
  }

  headers(): Record<string, string> {
    return this.token === undefined ? {} : { authorization: `Bearer ${this.token}` };
  }
}

function wrong(url: string, cause?: unknown): InvalidRequestError {
  const text = `${url} is no address of a daemon; FORKD_URL is like ${DEFAULT_URL} or unix:///run/forkd/forkd.sock`;
  return new InvalidRequestError(text, { code: "invalid_request", cause });
}
