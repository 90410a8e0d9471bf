// What differs between the files of two sandboxes.

import type { FileTree, TreeEntry } from "./api/commands.js";

/** A file that differs. */
export interface Change {
  /** Absolute path in the guest. */
  path: string;
  /** `type`: a file became a folder or a link, or the like. `mode`: the permission bits alone differ. */
  kind: "added" | "removed" | "modified" | "type" | "mode";
  before: TreeEntry | undefined;
  after: TreeEntry | undefined;
}

/** The changes from one tree to another, by path. Times do not count: a file that was written again is the same. */
export function changesOf(before: FileTree, after: FileTree): Change[] {
  const root = after.path.replace(/\/+$/, "");
  const old = new Map(before.entries.map((entry) => [entry.path, entry]));
  const changes: Change[] = [];
  const add = (kind: Change["kind"], path: string, one?: TreeEntry, other?: TreeEntry): void => {
    changes.push({ path: `${root}/${path}`, kind, before: one, after: other });
  };
  for (const entry of after.entries) {
    const earlier = old.get(entry.path);
    old.delete(entry.path);
    if (earlier === undefined) {
      add("added", entry.path, undefined, entry);
      continue;
    }
    const kind = kindOf(earlier, entry);
    if (kind !== undefined) add(kind, entry.path, earlier, entry);
  }
  for (const [path, entry] of old) add("removed", path, entry);
  return changes.sort((a, b) => (a.path < b.path ? -1 : a.path > b.path ? 1 : 0));
}

function kindOf(before: TreeEntry, after: TreeEntry): Change["kind"] | undefined {
  if (before.kind !== after.kind) return "type";
  const content = (entry: TreeEntry): string =>
    entry.kind === "file" ? `${entry.size} ${entry.sha256 ?? ""}` : (entry.target ?? "");
  if (content(before) !== content(after)) return "modified";
  return before.mode === after.mode ? undefined : "mode";
}
