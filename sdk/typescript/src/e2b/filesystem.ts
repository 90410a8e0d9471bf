// Files, in E2B's shape.

import type { FileInfo } from "../api/commands.js";
import type { FileData, Files } from "../files.js";

export interface WriteInfo {
  name: string;
  type: "file" | "dir" | undefined;
  path: string;
}

export interface EntryInfo extends WriteInfo {
  size: number;
  mode: number;
  permissions: string;
  owner: string;
  group: string;
  modifiedTime: Date;
  symlinkTarget: string | undefined;
}

export interface FileOptions {
  user?: string | undefined;
}

export class Filesystem {
  /** @internal */
  constructor(private readonly native: Files) {}

  read(path: string, options: FileOptions & { format: "bytes" }): Promise<Uint8Array>;
  read(path: string, options: FileOptions & { format: "stream" }): Promise<AsyncIterable<Uint8Array>>;
  read(path: string, options?: FileOptions & { format?: "text" }): Promise<string>;
  read(path: string, options: FileOptions & { format?: "text" | "bytes" | "stream" } = {}): Promise<unknown> {
    return this.native.read(path, options as { format: "bytes" });
  }

  /** Writes one file, or several. */
  write(path: string, data: FileData, options?: FileOptions): Promise<WriteInfo>;
  write(files: { path: string; data: FileData }[], options?: FileOptions): Promise<WriteInfo[]>;
  async write(
    first: string | { path: string; data: FileData }[],
    second?: FileData | FileOptions,
    third: FileOptions = {},
  ): Promise<WriteInfo | WriteInfo[]> {
    if (typeof first === "string") return this.#write(first, second as FileData, third);
    return Promise.all(first.map(({ path, data }) => this.#write(path, data, (second as FileOptions) ?? {})));
  }

  async list(path: string, options: FileOptions & { depth?: number } = {}): Promise<EntryInfo[]> {
    return (await this.native.list(path, options)).map(entryOf);
  }

  async getInfo(path: string, options: FileOptions = {}): Promise<EntryInfo> {
    return entryOf(await this.native.stat(path, options));
  }

  exists(path: string, options: FileOptions = {}): Promise<boolean> {
    return this.native.exists(path, options);
  }

  /** Removes a file, or a folder with its content. */
  remove(path: string, options: FileOptions = {}): Promise<void> {
    return this.native.remove(path, { ...options, recursive: true });
  }

  async rename(from: string, to: string, options: FileOptions = {}): Promise<EntryInfo> {
    return entryOf(await this.native.rename(from, to, options));
  }

  /** Creates a folder. Returns false if it exists already. */
  async makeDir(path: string, options: FileOptions = {}): Promise<boolean> {
    if (await this.native.exists(path, options)) return false;
    await this.native.makeDir(path, options);
    return true;
  }

  async #write(path: string, data: FileData, options: FileOptions): Promise<WriteInfo> {
    const written = await this.native.write(path, data, options);
    return { name: written.path.split("/").at(-1) ?? "", type: "file", path: written.path };
  }
}

function entryOf(info: FileInfo): EntryInfo {
  const type = info.type === "directory" ? "dir" : info.type === "file" ? "file" : undefined;
  const { name, path, size, mode, permissions, owner, group } = info;
  const modifiedTime = new Date(info.modified_time);
  return {
    name,
    type,
    path,
    size,
    mode,
    permissions,
    owner,
    group,
    modifiedTime,
    symlinkTarget: info.symlink_target ?? undefined,
  };
}
