// What differs between the files of two sandboxes.

import type { FileTree, FileTreeEntry } from "./api/commands.js";

/** A file that differs. */
export interface Change {
  /** Absolute path in the guest. */
  path: string;
  /**
   * `type`: a file became a folder or a link, or the like. `mode`: the permission bits alone differ. `unknown`: the
   * content may differ, because one of them could not be read, or changed meanwhile; `incomplete` of the entry says why.
   */
  kind: "added" | "removed" | "modified" | "type" | "mode" | "unknown";
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
  const unknown = isUnknown(before) || isUnknown(after);
  const content = (entry: FileTreeEntry): string => {
    if (entry.kind !== "file") return entry.target_base64 ?? entry.target ?? "";
    return unknown ? `${entry.size}` : `${entry.size} ${entry.sha256 ?? ""}`;
  };
  if (content(before) !== content(after)) return unknown && before.kind !== "file" ? "unknown" : "modified";
  if (unknown) return "unknown";
  return before.mode === after.mode ? undefined : "mode";
}

/** Whether the entry's content is not known. A pseudo file system, which is not listed, is the same in all sandboxes. */
function isUnknown({ incomplete }: FileTreeEntry): boolean {
  return incomplete === "unreadable" || incomplete === "changing";
}
