// Files in a sandbox.

import type { FileInfo, FileTree, FileWritten } from "./api/commands.js";
import type { Client } from "./client.js";
import { NotFoundError } from "./errors.js";
import { download, upload, type Transfer } from "./folders.js";
import { given } from "./given.js";
import type { Body } from "./http.js";

export interface FileOptions {
  /** The user whose permissions apply; the image's default when absent. */
  user?: string | undefined;
  signal?: AbortSignal | undefined;
}

/** What a file can be written from. */
export type FileData = string | Uint8Array | ArrayBuffer | Blob | AsyncIterable<string | Uint8Array>;

/** Files in one sandbox. Paths are absolute. */
export class Files {
  /** @internal */
  constructor(
    private readonly client: Client,
    private readonly id: string,
  ) {}

  /**
   * A file as text, as bytes, or as a stream of bytes for one that is too large for memory.
   *
   * @example
   * ```ts
   * const text = await sandbox.files.read("/etc/os-release");
   * for await (const piece of await sandbox.files.read("/var/log/big", { format: "stream" })) console.log(piece.length);
   * ```
   */
  read(path: string, options: FileOptions & { format: "bytes" }): Promise<Uint8Array>;
  read(path: string, options: FileOptions & { format: "stream" }): Promise<AsyncIterable<Uint8Array>>;
  read(path: string, options?: FileOptions & { format?: "text" }): Promise<string>;
  async read(
    path: string,
    { user, signal, format = "text" }: FileOptions & { format?: "text" | "bytes" | "stream" } = {},
  ): Promise<string | Uint8Array | AsyncIterable<Uint8Array>> {
    const query = { path, user };
    if (format !== "stream") {
      const bytes = await this.client.readFile(this.id, query, { signal });
      return format === "bytes" ? bytes : new TextDecoder().decode(bytes);
    }
    const stream = this.client.readFileStream(this.id, query, { signal });
    // A file that is not there is an error here, not at the first piece.
    const first = await stream.next();
    return (async function* () {
      try {
        if (!first.done) yield first.value;
        yield* stream;
      } finally {
        await stream.return();
      }
    })();
  }

  /**
   * Writes a file completely or not at all, and creates missing folders. `mode` is like `0o644`.
   *
   * @example
   * ```ts
   * await sandbox.files.write("/srv/run.sh", "#!/bin/sh\necho hello\n", { mode: 0o755 });
   * ```
   */
  write(
    path: string,
    data: FileData,
    { user, signal, mode }: FileOptions & { mode?: number } = {},
  ): Promise<FileWritten> {
    const query = { path, user, mode: mode?.toString(8) };
    return this.client.writeFile(this.id, query, bodyOf(data), { signal });
  }

  /** The content of a folder, `depth` levels deep. */
  async list(path: string, { user, signal, depth }: FileOptions & { depth?: number } = {}): Promise<FileInfo[]> {
    return (await this.client.listFiles(this.id, { path, user, depth }, { signal })).entries;
  }

  /** The attributes of a file. A link is not followed. */
  stat(path: string, { user, signal }: FileOptions = {}): Promise<FileInfo> {
    return this.client.statFile(this.id, { path, user }, { signal });
  }

  async exists(path: string, options: FileOptions = {}): Promise<boolean> {
    try {
      await this.stat(path, options);
      return true;
    } catch (error) {
      if (error instanceof NotFoundError && error.code === "guest_not_found") return false;
      throw error;
    }
  }

  /** Removes a file, a link or an empty folder; with `recursive: true`, a folder with its content. */
  remove(path: string, { user, signal, recursive }: FileOptions & { recursive?: boolean } = {}): Promise<void> {
    return this.client.deleteFile(this.id, { path, user, recursive }, { signal });
  }

  /** Moves a file or a folder within one file system. */
  rename(from: string, to: string, { user, signal }: FileOptions = {}): Promise<FileInfo> {
    return this.client.moveFile(this.id, { from, to, ...given({ user }) }, { signal });
  }

  /** Creates a folder and its missing parents. */
  makeDir(path: string, { user, signal }: FileOptions = {}): Promise<FileInfo> {
    return this.client.makeFolder(this.id, { path, ...given({ user }) }, { signal });
  }

  /** All files below a folder, with hashes of their contents. */
  tree(path: string, { user, signal, hash }: FileOptions & { hash?: boolean } = {}): Promise<FileTree> {
    return this.client.fileTree(this.id, { path, user, hash: hash ?? true }, { signal });
  }

  /**
   * Copies a file or a folder of this computer to `remote`. Leaves out links, pipes and devices, and names them.
   *
   * @example
   * ```ts
   * const { files, skipped } = await sandbox.files.upload("./project", "/srv/project");
   * ```
   */
  upload(local: string, remote: string, options: FileOptions = {}): Promise<Transfer> {
    return upload(this, local, remote, options);
  }

  /**
   * Copies a file or a folder of the sandbox to `local`. Leaves out links, pipes and devices, and names them. A name in
   * the sandbox that leads out of the folder is an error before anything is copied.
   */
  download(remote: string, local: string, options: FileOptions = {}): Promise<Transfer> {
    return download(this, remote, local, options);
  }
}

function bodyOf(data: FileData): Body {
  if (typeof data === "string") return new TextEncoder().encode(data);
  if (data instanceof Uint8Array) return data;
  if (data instanceof ArrayBuffer) return new Uint8Array(data);
  return encoded(data instanceof Blob ? (data.stream() as unknown as AsyncIterable<Uint8Array>) : data);
}

async function* encoded(pieces: AsyncIterable<string | Uint8Array>): AsyncGenerator<Uint8Array> {
  for await (const piece of pieces) yield typeof piece === "string" ? new TextEncoder().encode(piece) : piece;
}
