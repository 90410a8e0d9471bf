// Sandboxes, as the API writes them.

import type { ErrorCode } from "./daemon.js";

/** The state of a sandbox. */
export type SandboxState = "starting" | "running" | "unresponsive" | "paused" | "ended" | "unknown";

/** The action of the daemon at a sandbox's timeout. */
export type OnTimeout = "kill" | "pause" | "suspend";

/** A sandbox and its state. */
export interface SandboxInfo {
  /** Milliseconds from the start of the process until the guest was ready, warm-up included. */
  boot_ms?: number | null;
  /** How many branches were taken of the sandbox. */
  branch_count?: number;
  /** The end of the console, once the sandbox has ended. */
  console_tail?: string | null;
  /** Creation time, in seconds since 1970. */
  created_at_unix: number;
  /** The same reason, as one sentence. */
  detail?: string | null;
  /**
   * Private networks that the sandbox may reach, beside all public addresses. Absent in lists and without a network.
   */
  egress?: string[] | null;
  /** The time at which the sandbox times out, in seconds since 1970. */
  expires_at_unix?: number | null;
  /** The running sandbox that the sandbox was forked from, without a snapshot. That sandbox may have ended. */
  forked_from?: string | null;
  /**
   * The address of the JSON-lines protocol: the loopback port if there is one, otherwise the address in the network
   * slot.
   */
  guest_addr: string;
  /** Whether a branch was taken of the sandbox. */
  has_branched?: boolean;
  /** `sb`, then lower-case letters and digits. */
  id: string;
  /** Seconds without use after which the sandbox times out. */
  idle_timeout_secs?: number | null;
  /** The sandbox's image; null for a bare kernel. */
  image?: string | null;
  /** The sandbox's labels. */
  labels?: Record<string, string>;
  /** Time of the last use, of the creation, or of the daemon's start, in seconds since 1970. */
  last_active_unix?: number;
  /** Always null: a branch consists of layers, and `last_branch_tag` names it. */
  last_branch_memory_path?: string | null;
  /** The tag of the last branch of the sandbox. */
  last_branch_tag?: string | null;
  /** Memory in MiB. */
  mem_size_mib: number;
  /** Memory the sandbox may use on the host, in MiB. */
  memory_limit_mib?: number | null;
  /** The name of the network slot. */
  netns?: string | null;
  /** Whether it has a network. */
  network: boolean;
  /** The action at a timeout. */
  on_timeout?: OnTimeout;
  /** The sandbox's owner. */
  owner: string;
  /** The process id on the host. */
  pid?: number | null;
  /** Whether the image has Python to evaluate code with. */
  python?: boolean | null;
  /** Whether the sandbox accepts commands now. */
  ready?: boolean;
  /**
   * Milliseconds from the arrival of the request to the agent's first answer; for a booted sandbox, from the start of
   * its process.
   */
  ready_ms?: number | null;
  /**
   * Why it ended, as one identifier. On request: `deleted`, `timed_out`, `idle_timed_out`, `suspended`. By itself:
   * `powered_off`, `reset`, `panicked`, `failed`, `out_of_memory`, `monitor_died`. It did not start: `boot_failed`,
   * `fork_failed`, `rollback_failed`. In an unknown way: `unknown`. A paused sandbox that continues when the host's
   * disk has space has the reason `host_disk_full`; one in state `unknown` has `record_unreadable`.
   */
  reason?: string | null;
  /** The snapshot of the last rollback. */
  rolled_back_to?: string | null;
  /** The snapshot that the sandbox was forked from. */
  snapshot_tag?: string | null;
  /** The sandbox's state. */
  state: SandboxState;
  /** With `suspend`: the tag of the snapshot that a timeout stores, if a client set one. */
  suspend_as?: string | null;
  /** Number of vCPUs. */
  vcpus: number;
  /** The workspace that the sandbox belongs to. */
  workspace?: string | null;
}

/** A sandbox that ended and was removed. */
export interface ArchivedSandbox {
  /** When it was created, in seconds since 1970. */
  created_at_unix: number;
  /** The same reason, as one sentence. */
  detail: string;
  /** Time of the end, in seconds since 1970. */
  ended_at_unix: number;
  /** The sandbox's id. */
  id: string;
  /** The sandbox's labels. */
  labels?: Record<string, string>;
  /** How the sandbox ended: a reason of a sandbox, or `host_rebooted`. */
  reason: string;
  /** The snapshot that the sandbox was forked from. */
  snapshot_tag?: string | null;
  /** `archived`; `gone` if the request asked with the older name. */
  state: string;
}

/** Sandboxes to create: one booted from an image, or children forked from a snapshot. */
export interface CreateRequest {
  /**
   * Open an agent port, a loopback port with the JSON-lines protocol; `guest_addr` is then its address. Users of the
   * daemon's host with access to its unix socket may use the port. The older name of the field is `line_port`.
   */
  agent_port?: boolean;
  /**
   * Variables for every process started in the children: the place for secrets. Names and values take at most 64 KiB
   * together. For a snapshot only.
   */
  env?: Record<string, string>;
  /** Accepted and ignored. */
  hugepages?: boolean | null;
  /**
   * Seconds without use after which the sandbox times out; never when absent. Commands, evaluations, pings, files and
   * ports are use.
   */
  idle_timeout_secs?: number | null;
  /** The image to boot (`forkd image ls`). Give either this or `snapshot_tag`. */
  image?: string | null;
  /** Labels for each sandbox, to find them by; at most 32. */
  labels?: Record<string, string>;
  /** Accepted and ignored: every child can be forked. */
  live_fork?: boolean | null;
  /** Memory in MiB; the daemon's default, 512, when absent. For an image only. */
  mem_size_mib?: number | null;
  /**
   * Memory each sandbox may use on the host, in MiB. When absent, the sum of: the guest's memory, a 128th of it for
   * page tables, 64 MiB for the monitor, and a 16th of it for the page cache, at least 64 MiB. It has an effect on
   * hosts with cgroups only.
   */
  memory_limit_mib?: number | null;
  /** Number of children, 1 to 1000; 1 when absent. For a snapshot only. */
  n?: number | null;
  /** Whether the sandboxes have a network. When absent, they have one if their snapshot has one. */
  network?: boolean | null;
  on_timeout?: OnTimeout | null;
  /** Accepted and ignored: every child has a network of its own. */
  per_child_netns?: boolean | null;
  /** Accepted and ignored. */
  prewarm?: boolean | null;
  /** The snapshot to fork from (`forkd images`). Give either this or `image`. */
  snapshot_tag?: string | null;
  /**
   * With `suspend`: the tag of the snapshot that a timeout stores. When absent or taken: `idle-` and the sandbox's id.
   */
  suspend_as?: string | null;
  /** Seconds after the fork or the boot at which the sandbox times out; never when absent. */
  timeout_secs?: number | null;
  /** Number of vCPUs; 1 when absent. For an image only: children have as many as their snapshot. */
  vcpus?: number | null;
  /**
   * When true or absent, the reply comes when every child's agent has answered. When false, it comes at once, and the
   * children are `starting`.
   */
  wait?: boolean | null;
  /** Run the image's warm-up before the reply. For an image only. */
  warm?: boolean;
}

/** Children to fork from a running sandbox. */
export interface ForkRequest {
  /** Open an agent port for each child; see `CreateRequest`. */
  agent_port?: boolean;
  /**
   * Variables for every process started in the children: the place for secrets. Names and values take at most 64 KiB
   * together.
   */
  env?: Record<string, string>;
  /** Seconds without use after which a child times out; never when absent. */
  idle_timeout_secs?: number | null;
  /** Labels for each child, to find them by; at most 32. The children do not get the sandbox's labels. */
  labels?: Record<string, string>;
  /** Memory each child may use on the host, in MiB; see `CreateRequest`. */
  memory_limit_mib?: number | null;
  /** Number of children, 1 to 1000; 1 when absent. */
  n?: number | null;
  /** Whether the children have a network. When absent, they have one if the sandbox has one. */
  network?: boolean | null;
  on_timeout?: OnTimeout | null;
  /**
   * With `suspend`: the tag of the snapshot that a timeout stores. When absent or taken: `idle-` and the child's id.
   */
  suspend_as?: string | null;
  /** Seconds after the fork at which each child times out; never when absent. */
  timeout_secs?: number | null;
  /**
   * When true or absent, the reply comes when every child's agent has answered. When false, it comes as soon as the
   * sandbox is forked, and the children are `starting`.
   */
  wait?: boolean | null;
}

/** Changes to a sandbox. Absent fields keep their values. */
export interface UpdateRequest {
  /** Seconds without use, counted from now, after which the sandbox times out; never if null. */
  idle_timeout_secs?: number | null;
  /** All labels; they replace the previous ones. */
  labels?: Record<string, string> | null;
  on_timeout?: OnTimeout | null;
  /** With `suspend`: the tag of the snapshot that a timeout stores; `idle-` and the sandbox's id if null. */
  suspend_as?: string | null;
  /** Seconds from now at which the sandbox times out; never if null. */
  timeout_secs?: number | null;
}

/** The reason why one child does not run. */
export interface SpawnError {
  /** The reason, for programs. */
  code: ErrorCode;
  /** What happened and what to do. */
  error: string;
  /** The child's index among the `n`, from 0. */
  index: number;
  /** The request's id. The daemon's log has the cause under this id. */
  request_id: string;
}

/** The reply to a request for several children with `?results=each`. */
export interface SpawnReply {
  /** The children that run. */
  children: SandboxInfo[];
  /** One error for each child that does not run. */
  errors: SpawnError[];
}

/** The reply of an agent to a ping. */
export interface PingReply {
  /** The language of `eval`: `python`, or `none` in an image without Python. */
  agent_lang: string;
  /** The version of numpy that the warm-up imported; null if it imported none. */
  numpy_version?: string | null;
  /** The process id of the agent in the guest: always 1. */
  pid: number;
  /** Always true. */
  pong: boolean;
  /** Whether the image has Python. */
  python: boolean;
  /** Milliseconds since the guest's kernel started. */
  uptime_ms: number;
  /** The agent's version. */
  version: string;
  /** State of the warm-up: `cold`, `warming`, `ready` or `failed`. */
  warm: string;
  /** Whether `warm` is `ready`. */
  warmup_ready: boolean;
}

/** A pause of a sandbox. */
export interface PauseInfo {
  /** The end of the pause, in milliseconds since 1970; the start, if the sandbox is still paused. */
  at_unix_ms: number;
  /** Milliseconds that the user processes were frozen; absent if they were not. */
  frozen_ms?: number | null;
  /** Milliseconds that the vCPUs stood still; null if the sandbox is still paused. */
  pause_ms?: number | null;
  /** `branch`, `fork` or `pause`. */
  why: string;
}

/** Resources that a sandbox's process uses on the host. */
export interface Stats {
  /** Time of the agent's last answer, in milliseconds since 1970; null without an agent. */
  agent_answered_at_unix_ms?: number | null;
  /** CPU time in milliseconds. */
  cpu_ms?: number | null;
  /** Disk space of the disks' own layers, in bytes. */
  disk_bytes?: number;
  /** Memory that the cgroup accounts for; absent without a cgroup. */
  memory_current_kib?: number | null;
  /** Bytes that the network interface has received; null without a network. */
  net_rx_bytes?: number | null;
  /** Bytes that the network interface has sent; null without a network. */
  net_tx_bytes?: number | null;
  /** The last pauses, at most 32, oldest first. */
  pauses?: PauseInfo[];
  /** Memory that no other process has, in KiB. */
  private_kib: number;
  /**
   * Proportional set size: private memory, plus each shared page divided by the number of processes that share it.
   */
  pss_kib: number;
  /** Resident set size: private memory and all shared memory. */
  rss_kib: number;
  /** Memory shared with other processes: the template, its other children, the page cache's files. */
  shared_kib?: number;
  /** Milliseconds since the process started. */
  uptime_ms?: number;
}

/** The target of a rollback. */
export interface RollbackRequest {
  /**
   * The snapshot to continue from. When absent: the sandbox's latest branch, or, if that is missing or unusable, the
   * snapshot that the sandbox was forked from.
   */
  to?: string | null;
}

/** A sandbox's agent port: a loopback port with the JSON-lines protocol. */
export interface AgentPort {
  /**
   * The address, such as `127.0.0.1:40123`. Clients of the reference get it as `FORKD_TARGET`. Users of the daemon's
   * host who may open its unix socket may use the port.
   */
  target: string;
}
