// The daemon, its tokens, workspaces and events, as the API writes them.

/** The body of every error reply. */
export interface ErrorBody {
  /** The reason, for programs. It does not change with the wording. */
  code: ErrorCode;
  /** What happened and what to do, for people. The wording may change. */
  error: string;
  /** The request's id, also in the header `X-Request-Id`. The daemon's log has the cause under this id. */
  request_id: string;
}

/** Why a request failed. Later versions may add codes: treat an unknown code like its status. */
export type ErrorCode =
  | "invalid_request"
  | "folder_too_large"
  | "path_not_allowed"
  | "workspace_running"
  | "workspace_not_running"
  | "unauthorized"
  | "token_expired"
  | "forbidden"
  | "origin_forbidden"
  | "guest_forbidden"
  | "route_not_found"
  | "sandbox_not_found"
  | "snapshot_not_found"
  | "workspace_not_found"
  | "image_not_found"
  | "token_not_found"
  | "path_not_found"
  | "guest_not_found"
  | "method_not_allowed"
  | "request_timeout"
  | "tag_taken"
  | "state_unknown"
  | "name_taken"
  | "name_reserved"
  | "too_many_tokens"
  | "sandbox_starting"
  | "sandbox_paused"
  | "sandbox_waits_for_disk"
  | "sandbox_suspending"
  | "sandbox_ended"
  | "sandbox_busy"
  | "sandbox_replaced"
  | "sandbox_unfit"
  | "no_rollback_target"
  | "snapshot_not_ready"
  | "snapshot_failed"
  | "snapshot_unusable"
  | "snapshot_disk_only"
  | "snapshot_in_use"
  | "snapshot_replaced"
  | "cancelled"
  | "workspace_busy"
  | "workspace_unusable"
  | "monitor_refused"
  | "guest_conflict"
  | "idempotency_in_progress"
  | "idempotency_outcome_unknown"
  | "idempotency_answer_lost"
  | "address_in_use"
  | "body_too_large"
  | "uri_too_long"
  | "unsupported_media_type"
  | "idempotency_key_reused"
  | "websocket_required"
  | "quota_exceeded"
  | "rate_limited"
  | "headers_too_large"
  | "internal"
  | "template_ended"
  | "not_implemented"
  | "guest_failed"
  | "sandbox_lost"
  | "daemon_busy"
  | "limit_reached"
  | "shutting_down"
  | "guest_busy"
  | "guest_timeout"
  | "sandbox_unresponsive"
  | "disk_full"
  | "guest_disk_full";

/** The reply of `GET /healthz`. */
export interface Health {
  /** Always true. */
  ok: boolean;
}

/** The reply of `GET /version`. */
export interface VersionInfo {
  /** The address on which the daemon listens for TCP clients, such as `127.0.0.1:8889`. */
  address: string;
  /** The API's version: the first part of its paths. */
  api: string;
  /** Whether TCP connections use TLS. */
  tls?: boolean;
  /** The daemon's version. */
  version: string;
}

/** The requests that a token permits. Each scope includes the ones before it. */
export type TokenScope = "read" | "write" | "admin";

/** A token without its secret. */
export interface TokenInfo {
  /** Creation time, in seconds since 1970. */
  created_at_unix: number;
  /** The time at which the token expires, in seconds since 1970. */
  expires_at_unix?: number | null;
  /** The most memory of all the owner's sandboxes together, in MiB. */
  max_memory_mib?: number | null;
  /** The most sandboxes of the owner. */
  max_sandboxes?: number | null;
  /** The most snapshots of the owner. */
  max_snapshots?: number | null;
  /** The token's name. The token in the daemon's token file has the name `default`. */
  name: string;
  /** The owner of the objects that the token creates. */
  owner: string;
  /** The token's scope. */
  scope: TokenScope;
}

/** A token to create. */
export interface TokenRequest {
  /** Seconds after which the token expires; never when absent. */
  expires_in_secs?: number | null;
  /** The most memory of all the owner's sandboxes together, in MiB. */
  max_memory_mib?: number | null;
  /** The most sandboxes of the owner. This limit and the next two do not apply when absent. */
  max_sandboxes?: number | null;
  /** The most snapshots of the owner. */
  max_snapshots?: number | null;
  /** The token's name, with the characters of a tag. */
  name: string;
  /** The owner of the objects that the token creates; the token's name when absent. */
  owner?: string | null;
  /** The token's scope; `write` when absent. */
  scope?: TokenScope;
}

/** A token that was just created or rotated. */
export interface NewToken extends TokenInfo {
  /** The secret. The daemon sends it in this reply only. */
  token: string;
}

/** The status of a workspace. */
export type WorkspaceStatus = "running" | "suspended" | "stale";

/** A workspace and its status. */
export interface WorkspaceInfo {
  /** Creation time, in seconds since 1970. */
  created_at_unix: number;
  /** The snapshot that a resume forks from; absent before the first suspend. */
  current_state_tag?: string | null;
  /** `ws`, then lower-case letters and digits. */
  id: string;
  /** Time of the last create, suspend or resume, in seconds since 1970. */
  last_active_unix: number;
  /** Its sandbox, while it runs. */
  live_sandbox_id?: string | null;
  /** The workspace's name. */
  name: string;
  /** The workspace's owner. */
  owner?: string;
  /** The snapshot that the first sandbox was forked from. */
  source_snapshot_tag: string;
  /** The workspace's status. */
  status: WorkspaceStatus;
}

/** A workspace to create. */
export interface WorkspaceRequest {
  /** Memory the sandbox may use on the host, in MiB. */
  memory_limit_mib?: number | null;
  /** The workspace's name, with the characters of a tag; at most 48. */
  name: string;
  /** Whether the workspace has a network. When absent, it has one if its snapshot has one. */
  network?: boolean | null;
  /** Accepted and ignored: every sandbox has a network of its own. */
  per_child_netns?: boolean | null;
  /** The snapshot that the workspace's first sandbox is forked from. */
  snapshot_tag: string;
}

/** How to suspend a workspace. */
export interface SuspendRequest {
  /** If true, the daemon stores only the difference to the snapshot that the sandbox was forked from. */
  diff?: boolean;
}

/** The kinds of events. */
export type EventKind =
  | "sandbox.created"
  | "sandbox.running"
  | "sandbox.paused"
  | "sandbox.resumed"
  | "sandbox.branched"
  | "sandbox.rolled_back"
  | "sandbox.unresponsive"
  | "sandbox.ended"
  | "snapshot.writing"
  | "snapshot.ready"
  | "snapshot.failed"
  | "snapshot.removed"
  | "workspace.created"
  | "workspace.suspended"
  | "workspace.resumed"
  | "workspace.removed";

/** The object of an event, and details. */
export interface EventSubject {
  /** The reason, as one sentence. */
  detail?: string | null;
  /** For a forked sandbox that runs: milliseconds from the request to the agent's first answer. */
  ready_ms?: number | null;
  /** The reason, as one identifier. */
  reason?: string | null;
  /** The sandbox of the event. */
  sandbox?: string | null;
  /** The snapshot of the event, or the snapshot that the sandbox was forked from. */
  snapshot?: string | null;
  /** The workspace of the event. */
  workspace?: string | null;
}

/** An event: the data of a server-sent event of `GET /v1/events`. */
export interface Event extends EventSubject {
  /** The daemon's run and a number, such as `k3v0q1-17`. The parameter `since` takes it. */
  id: string;
  /** The kind of the event. */
  kind: EventKind;
  /** The time of the event, in UTC. */
  ts: string;
}
