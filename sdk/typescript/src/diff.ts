// What differs between the files of two sandboxes.

import type { FileTree, FileTreeEntry } from "./api/commands.js";

/** A file that differs. */
export interface Change {
  /** Absolute path in the guest. */
  path: string;
  /** `type`: a file became a folder or a link, or the like. `mode`: the permission bits alone differ. */
  kind: "added" | "removed" | "modified" | "type" | "mode";
  before: FileTreeEntry | undefined;
  after: FileTreeEntry | undefined;
}

/** The changes from one tree to another, by path. Times do not count: a file that was written again is the same. */
export function changesOf(before: FileTree, after: FileTree): Change[] {
  const root = after.path.replace(/\/+$/, "");
  const old = new Map(before.entries.map((entry) => [keyOf(entry), entry]));
  const changes: Change[] = [];
  const add = (kind: Change["kind"], path: string, one?: FileTreeEntry, other?: FileTreeEntry): void => {
    changes.push({ path: `${root}/${path}`, kind, before: one, after: other });
  };
  for (const entry of after.entries) {
    const earlier = old.get(keyOf(entry));
    old.delete(keyOf(entry));
    if (earlier === undefined) {
      add("added", entry.path, undefined, entry);
      continue;
    }
    const kind = kindOf(earlier, entry);
    if (kind !== undefined) add(kind, entry.path, earlier, entry);
  }
  for (const entry of old.values()) add("removed", entry.path, entry);
  return changes.sort((a, b) => (a.path < b.path ? -1 : a.path > b.path ? 1 : 0));
}

/** The path, with the bytes of one that is no text: two of them may look the same. */
function keyOf({ path, path_base64 }: FileTreeEntry): string {
  return path_base64 == null ? path : `\0${path_base64}`;
}

function kindOf(before: FileTreeEntry, after: FileTreeEntry): Change["kind"] | undefined {
  if (before.kind !== after.kind) return "type";
  const content = (entry: FileTreeEntry): string =>
    entry.kind === "file" ? `${entry.size} ${entry.sha256 ?? ""}` : (entry.target_base64 ?? entry.target ?? "");
  if (content(before) !== content(after)) return "modified";
  return before.mode === after.mode ? undefined : "mode";
}
