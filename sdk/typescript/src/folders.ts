// Copies of files and folders between this computer and a sandbox. Names in a sandbox are hostile.

import { createReadStream } from "node:fs";
import * as fs from "node:fs/promises";
import * as path from "node:path";

import type { FileInfo } from "./api/commands.js";
import { ConflictError, ForkdError } from "./errors.js";
import type { FileOptions, Files } from "./files.js";

/** What a copy did. */
export interface Transfer {
  /** Number of files. */
  files: number;
  /** Links, pipes and devices. */
  skipped: string[];
}

/** The most levels that one list has. */
const MAX_DEPTH = 64;
/** Files under way at the same time. */
const AT_ONCE = 4;

export async function upload(files: Files, local: string, remote: string, options: FileOptions): Promise<Transfer> {
  const done: Transfer = { files: 0, skipped: [] };
  const jobs: (() => Promise<void>)[] = [];
  const found = await fs.stat(local);
  const send = (from: string, to: string, mode: number) => async (): Promise<void> => {
    await files.write(to, createReadStream(from), { ...options, mode: mode & 0o777 });
    done.files++;
  };
  const folder = async (from: string, to: string): Promise<void> => {
    await makeRemote(files, to, options);
    for (const entry of await fs.readdir(from, { withFileTypes: true })) {
      const [source, target] = [path.join(from, entry.name), `${to.replace(/\/+$/, "")}/${entry.name}`];
      if (entry.isDirectory()) await folder(source, target);
      else if (entry.isFile()) jobs.push(send(source, target, (await fs.lstat(source)).mode));
      else done.skipped.push(source);
    }
  };
  if (found.isDirectory()) await folder(local, remote);
  else jobs.push(send(local, remote, found.mode));
  await all(jobs);
  return done;
}

export async function download(files: Files, remote: string, local: string, options: FileOptions): Promise<Transfer> {
  const done: Transfer = { files: 0, skipped: [] };
  const jobs: (() => Promise<void>)[] = [];
  remote = path.posix.normalize(remote);
  const root = await files.stat(remote, options);
  const isFolder = root.type === "directory" || (root.type === "symlink" && root.target_type === "directory");
  const fetch = (from: string, to: string, mode: number) => async (): Promise<void> => {
    await receive(await files.read(from, { ...options, format: "stream" }), to, mode);
    done.files++;
  };
  const folder = async (from: string): Promise<void> => {
    for (const entry of await files.list(from, { ...options, depth: MAX_DEPTH })) {
      const parts = partsBelow(remote, entry);
      const last = parts.at(-1);
      if (last === undefined || !["file", "directory"].includes(entry.type)) {
        done.skipped.push(entry.path);
      } else if (entry.type === "directory") {
        await makeLocal(local, parts);
        // Deeper ones are not in this list.
        if (levels(entry.path) - levels(from) === MAX_DEPTH) await folder(entry.path);
      } else {
        const target = path.join(await makeLocal(local, parts.slice(0, -1)), last);
        jobs.push(fetch(entry.path, target, entry.mode));
      }
    }
  };
  if (isFolder) {
    await fs.mkdir(local, { recursive: true });
    await folder(remote);
  } else {
    jobs.push(fetch(remote, local, root.mode));
  }
  await all(jobs);
  return done;
}

const levels = (name: string): number => name.split("/").filter((part) => part !== "").length;

/** The parts of an entry's path below the folder. The sandbox chooses names: one that leads elsewhere is an error. */
function partsBelow(folder: string, entry: FileInfo): string[] {
  const root = `${folder.replace(/\/+$/, "")}/`;
  const parts = entry.path.startsWith(root) ? entry.path.slice(root.length).split("/") : [""];
  const foreign = path.sep === "\\" ? /[\0\\:]/ : /\0/;
  const fine = parts.every((part) => part !== "" && part !== "." && part !== ".." && !foreign.test(part));
  if (fine) return parts;
  const text = `the sandbox lists ${JSON.stringify(entry.path)} in ${folder}: that name leads out of the folder, or this`;
  throw new ForkdError(`${text} computer cannot have it, so nothing is copied`, { code: "hostile_name" });
}

/** Creates folders below `root` one by one. None of them may be a link: it could lead elsewhere. */
async function makeLocal(root: string, parts: readonly string[]): Promise<string> {
  let at = root;
  for (const part of parts) {
    at = path.join(at, part);
    try {
      await fs.mkdir(at);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw error;
      if (!(await fs.lstat(at)).isDirectory()) {
        const text = `${at} is in the way: it is no folder, and links are not followed; remove it, or choose another folder`;
        throw new ConflictError(text, { code: "local_conflict" });
      }
    }
  }
  return at;
}

/** Writes a file beside its place and renames it: a link at that place is replaced, not followed. */
async function receive(bytes: AsyncIterable<Uint8Array>, to: string, mode: number): Promise<void> {
  const part = `${to}.${process.pid}-${Math.random().toString(36).slice(2)}.part`;
  const file = await fs.open(part, "wx", mode & 0o777);
  try {
    try {
      for await (const piece of bytes) await file.writeFile(piece);
      await file.chmod(mode & 0o777);
    } finally {
      await file.close();
    }
    await fs.rename(part, to);
  } catch (error) {
    await fs.rm(part, { force: true });
    throw error;
  }
}

async function makeRemote(files: Files, folder: string, options: FileOptions): Promise<void> {
  try {
    await files.makeDir(folder, options);
  } catch (error) {
    // It is there already; a file in its place fails the files below it.
    if (!(error instanceof ForkdError) || error.code !== "guest_conflict") throw error;
  }
}

/** Runs jobs, some at a time. The first error ends all. */
async function all(jobs: (() => Promise<void>)[]): Promise<void> {
  const worker = async (): Promise<void> => {
    try {
      for (let job = jobs.shift(); job !== undefined; job = jobs.shift()) await job();
    } catch (error) {
      jobs.length = 0;
      throw error;
    }
  };
  const results = await Promise.allSettled(Array.from({ length: AT_ONCE }, worker));
  for (const result of results) if (result.status === "rejected") throw result.reason;
}
