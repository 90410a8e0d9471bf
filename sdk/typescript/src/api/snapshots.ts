// Snapshots, branches and the tree, as the API writes them.

import type { ErrorCode } from "./daemon.js";

/** The parts of a guest that a snapshot has. */
export type SnapshotKind = "full" | "disk" | "unknown";

/** The status of a snapshot. */
export type SnapshotStatus = "writing" | "ready" | "failed" | "unknown";

/** The phases of a snapshot's creation. */
export type SnapshotPhase = "booting" | "warming" | "freezing" | "saving";

/** Progress of a saver, in bytes. */
export interface Progress {
  /** The older name of `scanned_bytes`, with the same value. */
  looked_at: number;
  /** Guest memory that the saver has scanned. */
  scanned_bytes: number;
  /** All guest memory. */
  total: number;
  /** Bytes that the saver has written. */
  written: number;
}

/** A template: the process that forks children. */
export interface TemplateInfo {
  /** Number of its children that are still in the list of sandboxes. */
  children: number;
  /** The process id on the host. */
  pid: number;
  /**
   * The source of its memory: `disk`; `memory` if it is the guest that the snapshot was made of; `unknown` if its
   * record cannot be read.
   */
  source: string;
}

/** A snapshot and its status. */
export interface SnapshotInfo {
  /**
   * Whether children can be forked from it, or boot on it. The daemon checks that its files exist, not their contents.
   */
  bootable: boolean;
  /** The source of a branch: a sandbox's id, or `compact:` and a tag. */
  branched_from?: string | null;
  /** Bytes written to store the snapshot. */
  bytes_written?: number | null;
  /** How many snapshots its memory is built on. */
  chain_depth: number;
  /** Creation time, in seconds since 1970. */
  created_at_unix: number;
  /** Length of the snapshot's own memory layer, in bytes. */
  diff_logical_bytes?: number | null;
  /** Milliseconds that the write took. */
  diff_ms?: number | null;
  /** Disk space of the snapshot's own memory layer, in bytes. */
  diff_physical_bytes?: number | null;
  /** The folder with its files. */
  dir: string;
  /** Disk space of its disks without the image, in bytes. */
  disk_bytes: number;
  /** The reason why it failed, or why the daemon cannot write it yet. */
  error?: string | null;
  error_code?: ErrorCode | null;
  /** Milliseconds that the user processes of the source were frozen. */
  frozen_ms?: number | null;
  /** The image it was booted from. */
  image?: string | null;
  /** The kernel, for a snapshot without an image. */
  kernel?: string | null;
  /** The parts of a guest that it has. */
  kind: SnapshotKind;
  /** Memory in MiB. */
  mem_size_mib: number;
  /** Disk space of its memory, in bytes. */
  memory_bytes: number;
  /** The mode of the branch: `full`, `diff`, `live` or `disk`. */
  mode?: string | null;
  /** Whether it has a network interface. */
  network: boolean;
  /** The snapshot's owner; `*` if every client may use it. */
  owner?: string;
  /** The snapshot that the memory is stored as a difference to; absent if the client may not see that snapshot. */
  parent_tag?: string | null;
  /** Milliseconds that the vCPUs of the source stood still. */
  pause_ms?: number | null;
  phase?: SnapshotPhase | null;
  progress?: Progress | null;
  /** Whether the image has Python. */
  python?: boolean | null;
  /**
   * Whether the user processes were frozen when the branch was taken. If not, children continue in the middle of an
   * operation, before they have an identity of their own.
   */
  quiesced?: boolean | null;
  /** Disk space of the state of its devices, in bytes. */
  state_bytes: number;
  /** The snapshot's status. */
  status: SnapshotStatus;
  /** The snapshot's tag. */
  tag: string;
  template?: TemplateInfo | null;
  /** Number of vCPUs. */
  vcpus: number;
  /**
   * The reason why no children can be forked, or only while its template runs: the image is missing or was replaced.
   */
  warning?: string | null;
}

/** A layer: a file that snapshots share. */
export interface LayerInfo {
  /** The layer's BLAKE3 digest, which is also its file name. */
  digest: string;
  /** `memory` or `disk`. */
  kind: string;
  /** Length in bytes. */
  logical_bytes: number;
  /** Disk space in bytes. */
  physical_bytes: number;
  /** How many snapshots use the layer. */
  shared_by: number;
}

/** A snapshot on disk, in detail. */
export interface SnapshotInfoDetail {
  /** The snapshots it came from, the farthest first, if the client may see them. */
  ancestors: string[];
  /** How many snapshots the memory is built on. */
  chain_depth: number;
  /** Creation time, in seconds since 1970. */
  created_at_unix: number;
  /** The snapshots built on it, if the client may see them. */
  dependents: string[];
  /** The folder with the snapshot's files. */
  dir: string;
  /** Length of all disk layers, in bytes. */
  disk_logical_bytes: number;
  /** Disk space of all disk layers, in bytes. */
  disk_physical_bytes: number;
  /** The parts of a guest that it has. */
  kind: SnapshotKind;
  /** All its layers. */
  layers: LayerInfo[];
  /** The version of forkd that made it. Older daemons do not return it. */
  made_by_version: string;
  /** Length of all memory layers, in bytes. */
  memory_logical_bytes: number;
  /** Disk space of all memory layers, in bytes. */
  memory_physical_bytes: number;
  /** Disk space of its own disk layers, in bytes. */
  own_disk_bytes: number;
  /** Disk space of its own memory layer, in bytes. */
  own_memory_bytes: number;
  /** The content's id of that snapshot. It stays the same if another snapshot gets the tag. */
  parent_content_hash?: string | null;
  /** The snapshot that the memory is stored as a difference to; absent if the client may not see that snapshot. */
  parent_tag?: string | null;
  /** The snapshot's tag. */
  tag: string;
  /** Length of the state of vCPUs and devices, or of the disk's block map, in bytes. */
  vmstate_bytes: number;
}

/** A snapshot to create: the daemon boots a guest, warms it up, freezes it and saves it. */
export interface SnapshotRequest {
  /** Accepted up to 60 and ignored: the guest reports when it is up and warm. */
  boot_wait_secs?: number | null;
  /** The image to boot. Give either this or `kernel`. */
  image?: string | null;
  /**
   * The absolute path of a kernel on the daemon's host. With `rootfs`, the kernel boots that disk. Alone, it is a bare
   * guest without agent, disk or network, which signals that it is ready by a write to port 0x602.
   */
  kernel?: string | null;
  /** Memory in MiB; the daemon's default, 512, when absent. */
  mem_size_mib?: number | null;
  /** Whether the snapshot and its children have a network; true when absent. */
  network?: boolean | null;
  /**
   * The absolute path of a root disk on the daemon's host, in place of `image`: an ext4 image that must not change. It
   * boots with `kernel`, or with the daemon's own kernel when that is absent.
   */
  rootfs?: string | null;
  /** Accepted and ignored: every guest can write to its disk, and none changes `rootfs`. */
  rw?: boolean | null;
  /** The snapshot's tag. */
  tag: string;
  /** Accepted and ignored: every guest has a network of its own. */
  tap?: string | null;
  /** Number of vCPUs; 1 when absent. */
  vcpus?: number | null;
  /**
   * The warm-up command, in place of the image's own. The warm-up is done when the command exits with 0 or creates the
   * file named by `FORKD_READY_FILE`.
   */
  warm_command?: string[];
  /** Python code to run after the image's own warm-up, such as `import numpy`. */
  warm_python?: string | null;
}

/** A branch to take. The daemon ignores unknown fields. */
export interface BranchRequest {
  /** Older form of `mode: diff`. */
  diff?: boolean | null;
  /** Older form of `mode: live`. */
  live?: boolean | null;
  /** Accepted and ignored: every sandbox can be branched. */
  live_fork?: boolean | null;
  /** Accepted and ignored: the bytes written are always measured. */
  measure_diff?: boolean | null;
  /**
   * `full` (the default) stores everything; `diff` and `live` store the difference to the snapshot that the sandbox
   * was forked from. `disk` stores the disk alone, with clean file systems: sandboxes boot on it.
   */
  mode?: string | null;
  /**
   * With `diff` only: the snapshot to which the difference is stored. It must be the default: the snapshot that the
   * sandbox was forked from.
   */
  parent_tag?: string | null;
  /** The branch's tag. When absent: `branch-`, the sandbox's id, the time and four digits. */
  tag?: string | null;
  /**
   * When true or absent, the reply comes when the branch is on disk. When false, which needs `live`, it comes as soon
   * as the sandbox runs again.
   */
  wait?: boolean | null;
}

/** A snapshot to create by compacting another one. */
export interface CompactRequest {
  /** The new snapshot's tag. */
  to: string;
}

/** A new owner of a snapshot. */
export interface OwnerRequest {
  /** The owner of a token, `local`, or `*` for every owner. */
  owner: string;
}

/** How a node came from its parent. */
export type TreeHow = "spawn" | "fork" | "branch" | "diff" | "compact" | "rollback";

/** The kind of a node in the fork tree. */
export type TreeKind = "snapshot" | "sandbox";

/** A snapshot or a sandbox in the fork tree. */
export interface TreeNode {
  /** Creation time, in seconds since 1970. */
  created_at_unix?: number | null;
  /** Whether it no longer exists. The tree has it because other nodes came from it. */
  gone: boolean;
  how?: TreeHow | null;
  /**
   * `snapshot:TAG` or `sandbox:ID`. If another snapshot has the tag of a removed one, the removed one is
   * `snapshot:TAG@` and the beginning of its content's id.
   */
  id: string;
  /** The kind of the node. */
  kind: TreeKind;
  /** The tag or the id; `?` for a snapshot that the client may not see. */
  name: string;
  /** The node it came from; none for a root. */
  parent?: string | null;
  /**
   * For a sandbox that was rolled back: the node that it continued from. This node is also the parent, unless it came
   * from the sandbox itself.
   */
  rolled_back_to?: string | null;
  /** The status of a snapshot, the state of a sandbox, or `gone`. */
  state: string;
}

/** The reply of `GET /v1/tree`. */
export interface Tree {
  /** All nodes, oldest first. */
  nodes: TreeNode[];
}
