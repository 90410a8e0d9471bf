// Where the daemon is, and how a connection to it is made.

import { readFileSync } from "node:fs";

import { InvalidRequestError } from "./errors.js";

export const DEFAULT_URL = "http://127.0.0.1:8889";

/** The address of a daemon, its token, and the certificate that it must have. */
export class Endpoint {
  /** For texts. */
  readonly url: string;
  /** What paths are put after. */
  readonly base: string;
  /** The unix socket, if it is one. */
  readonly socketPath: string | undefined;
  /** The certificate of the authority, in PEM. */
  readonly ca: string | undefined;
  /** Hidden: programs print objects, and so do the tools that collect errors. */
  readonly #token: string | undefined;

  constructor(url?: string, token?: string, cacert?: string) {
    const text = (url ?? (process.env["FORKD_URL"] || DEFAULT_URL)).trim();
    this.#token = (token ?? process.env["FORKD_TOKEN"]) || undefined;
    if (this.#token !== undefined && !/^[\x21-\x7e]+$/.test(this.#token)) {
      throw invalid(
        "the token has a character that no token has, such as a space or a line break at its end; set FORKD_TOKEN, or " +
          "`token` of the Client, to what `forkd token print` prints",
      );
    }
    const parsed = this.#parsed(text);
    this.url = text;
    if (parsed.protocol === "unix:") {
      this.socketPath = decodeURIComponent(parsed.pathname);
      this.base = "http://localhost";
    } else {
      this.base = (parsed.origin + parsed.pathname).replace(/\/+$/, "");
    }
    this.ca = cacert === undefined ? undefined : certificate(cacert);
  }

  /** The address of a WebSocket. */
  webSocket(path: string): string {
    if (this.socketPath !== undefined) return `ws+unix:${this.socketPath}:${path}`;
    return this.base.replace(/^http/, "ws") + path;
  }

  headers(): Record<string, string> {
    return this.#token === undefined ? {} : { authorization: `Bearer ${this.#token}` };
  }

  #parsed(text: string): URL {
    let parsed: URL;
    try {
      parsed = new URL(text);
      decodeURIComponent(parsed.pathname);
    } catch {
      throw this.#wrong(text, "it is no address of a daemon");
    }
    // The text may be a secret in the wrong place: it is not shown.
    if (parsed.username !== "" || parsed.password !== "") {
      throw invalid("FORKD_URL has a user or a password in it: give the address alone, and the token as FORKD_TOKEN");
    }
    const { protocol, pathname, host, search, hash } = parsed;
    if (search !== "" || hash !== "") throw this.#wrong(text, "it has a `?` or a `#`");
    if (protocol === "http:" || protocol === "https:") return parsed;
    if (protocol !== "unix:") throw this.#wrong(text, "it is no address of a daemon");
    if (host !== "" || !pathname.startsWith("/") || pathname === "/") {
      throw this.#wrong(text, "the path of the socket must begin with a `/`");
    }
    return parsed;
  }

  #wrong(text: string, why: string): InvalidRequestError {
    const shown = this.#token === undefined ? text : text.replaceAll(this.#token, "…");
    return invalid(`FORKD_URL is "${shown}": ${why}; give one like ${DEFAULT_URL} or unix:///run/forkd/forkd.sock`);
  }
}

function certificate(file: string): string {
  try {
    return readFileSync(file, "utf8");
  } catch (cause) {
    const text = `cacert: ${file} cannot be read; give the file with the certificate of the daemon's authority`;
    throw new InvalidRequestError(text, { code: "invalid_request", cause });
  }
}

function invalid(text: string): InvalidRequestError {
  return new InvalidRequestError(text, { code: "invalid_request" });
}
