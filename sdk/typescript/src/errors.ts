// Errors: one class per group of the API's codes, and those that only a client can have.

import type { ErrorCode } from "./api/daemon.js";
import type { SpawnError } from "./api/sandboxes.js";

/** What an error knows beside its text. */
export interface ErrorDetails {
  /** The API's code, or one of the SDK's own: see the classes. */
  code?: string;
  /** The HTTP status of the reply; 0 if there was none. */
  status?: number;
  /** The request's id: the daemon's log has the cause under it. */
  requestId?: string;
  /** Seconds to wait before the next try, if the daemon sent them. */
  retryAfterSecs?: number;
  cause?: unknown;
}

/** Every error of this SDK. `message` says what happened and what to do. */
export class ForkdError extends Error {
  readonly code: string;
  readonly status: number;
  readonly requestId: string;
  readonly retryAfterSecs: number | undefined;

  constructor(message: string, details: ErrorDetails = {}) {
    super(message, details.cause === undefined ? undefined : { cause: details.cause });
    this.name = new.target.name;
    this.code = details.code ?? "unknown";
    this.status = details.status ?? 0;
    this.requestId = details.requestId ?? "";
    this.retryAfterSecs = details.retryAfterSecs;
  }
}

/** A field, a parameter or a body is wrong: the same request never succeeds. */
export class InvalidRequestError extends ForkdError {}
/** The token is missing, wrong or expired. */
export class AuthenticationError extends ForkdError {}
/** The token, or the user in the guest, may not do that. */
export class PermissionDeniedError extends ForkdError {}
/** There is no such sandbox, snapshot, workspace, image, token or file. */
export class NotFoundError extends ForkdError {}
/** The sandbox has ended, or never was. It does not come back: create or fork another one. */
export class SandboxEndedError extends NotFoundError {}
/** Something is in the way, or in a state that does not permit the request. */
export class ConflictError extends ForkdError {}
/** The sandbox is paused: resume it first. */
export class SandboxPausedError extends ConflictError {}
/** The snapshot is still being made: `Snapshot.waitReady()` waits for it. */
export class SnapshotNotReadyError extends ConflictError {}
/** A quota or a limit of the daemon is used up. */
export class QuotaError extends ForkdError {}
/** The disk of the host or of the guest is full. */
export class DiskFullError extends ForkdError {}
/** The client sends too many requests. `retryAfterSecs` has the seconds to wait. */
export class RateLimitError extends ForkdError {}
/** The daemon or the guest has too much to do, or is stopping: try again in a moment. */
export class BusyError extends ForkdError {}
/** An answer did not come in time. */
export class TimeoutError extends ForkdError {}
/** The guest did not start, or its agent is broken. */
export class GuestError extends ForkdError {}
/** The daemon or its host failed: its log has the cause under the `requestId`. */
export class DaemonError extends ForkdError {}
/** No daemon answers at the address. */
export class DaemonUnreachableError extends ForkdError {}
/** The connection broke in the middle of an answer or a stream. */
export class StreamBrokenError extends ForkdError {}

/** A command ended with another status than 0. */
export class CommandError extends ForkdError {
  constructor(
    message: string,
    readonly exitCode: number,
    readonly stdout: string,
    readonly stderr: string,
    readonly signal: number | null = null,
  ) {
    super(message, { code: "command_failed" });
  }
}

/** Code raised an exception. */
export class EvalError extends ForkdError {
  constructor(
    /** The exception's class, such as `ValueError`. */
    readonly errorName: string,
    /** The exception's text. */
    readonly value: string,
    readonly traceback: string,
  ) {
    super(value === "" ? errorName : `${errorName}: ${value}`, { code: "eval_failed" });
  }
}

/** Some of the children of a fork do not run. The others were ended. */
export class ForkError extends ForkdError {
  constructor(
    message: string,
    /** One error for each child that does not run. */
    readonly errors: readonly SpawnError[],
    details: ErrorDetails,
  ) {
    super(message, details);
  }
}

/** The body of a checkpoint failed, and so did the rollback. The branch is kept. `cause` is the error of the body. */
export class CheckpointError extends ForkdError {
  constructor(
    /** The branch of the moment before the body. */
    readonly tag: string,
    work: unknown,
    readonly rollbackError: unknown,
  ) {
    const details = rollbackError instanceof ForkdError ? rollbackError : {};
    const text = `the work failed (${textOf(work)}), and so did the rollback to before it (${textOf(rollbackError)})`;
    const advice = `the branch is kept: sandbox.rollback("${tag}") goes back to it, Sandbox.create("${tag}") forks from it`;
    super(`${text}; ${advice}`, { ...details, cause: work });
  }
}

type Class = new (message: string, details?: ErrorDetails) => ForkdError;

/** The class of each code of the API. */
export const CLASS_OF_CODE: Readonly<Record<ErrorCode, Class>> = {
  invalid_request: InvalidRequestError,
  path_not_allowed: InvalidRequestError,
  workspace_running: ConflictError,
  workspace_not_running: ConflictError,
  unauthorized: AuthenticationError,
  token_expired: AuthenticationError,
  forbidden: PermissionDeniedError,
  origin_forbidden: PermissionDeniedError,
  guest_forbidden: PermissionDeniedError,
  route_not_found: NotFoundError,
  sandbox_not_found: SandboxEndedError,
  snapshot_not_found: NotFoundError,
  workspace_not_found: NotFoundError,
  image_not_found: NotFoundError,
  token_not_found: NotFoundError,
  path_not_found: NotFoundError,
  guest_not_found: NotFoundError,
  method_not_allowed: InvalidRequestError,
  request_timeout: TimeoutError,
  tag_taken: ConflictError,
  state_unknown: ConflictError,
  name_taken: ConflictError,
  name_reserved: ConflictError,
  too_many_tokens: QuotaError,
  sandbox_starting: ConflictError,
  sandbox_paused: SandboxPausedError,
  sandbox_waits_for_disk: SandboxPausedError,
  sandbox_suspending: ConflictError,
  sandbox_ended: SandboxEndedError,
  sandbox_busy: ConflictError,
  sandbox_replaced: ConflictError,
  sandbox_unfit: ConflictError,
  no_rollback_target: ConflictError,
  snapshot_not_ready: SnapshotNotReadyError,
  snapshot_failed: ConflictError,
  snapshot_unusable: ConflictError,
  snapshot_disk_only: ConflictError,
  snapshot_in_use: ConflictError,
  snapshot_replaced: ConflictError,
  cancelled: ConflictError,
  workspace_busy: ConflictError,
  workspace_unusable: ConflictError,
  monitor_refused: ConflictError,
  guest_conflict: ConflictError,
  idempotency_in_progress: ConflictError,
  idempotency_outcome_unknown: ConflictError,
  idempotency_answer_lost: ConflictError,
  address_in_use: ConflictError,
  folder_too_large: InvalidRequestError,
  body_too_large: InvalidRequestError,
  uri_too_long: InvalidRequestError,
  unsupported_media_type: InvalidRequestError,
  idempotency_key_reused: InvalidRequestError,
  websocket_required: InvalidRequestError,
  quota_exceeded: QuotaError,
  rate_limited: RateLimitError,
  headers_too_large: InvalidRequestError,
  internal: DaemonError,
  template_ended: DaemonError,
  not_implemented: DaemonError,
  guest_failed: GuestError,
  sandbox_lost: SandboxEndedError,
  daemon_busy: BusyError,
  limit_reached: QuotaError,
  shutting_down: BusyError,
  guest_busy: BusyError,
  guest_timeout: TimeoutError,
  sandbox_unresponsive: TimeoutError,
  disk_full: DiskFullError,
  guest_disk_full: DiskFullError,
};

/** Texts that say more than the daemon can know. */
const ADVICE: Partial<Record<string, string>> = {
  route_not_found: "the daemon is older than this client",
  unauthorized: "set FORKD_TOKEN to what `forkd token print` prints, or pass `token` to the Client",
};

/** The error of a reply: its class by the code, else a plain `ForkdError`. */
export function errorOf(message: string, code: string, details: ErrorDetails): ForkdError {
  const known = Object.hasOwn(CLASS_OF_CODE, code) ? CLASS_OF_CODE[code as ErrorCode] : ForkdError;
  const advice = ADVICE[code];
  const text = advice === undefined || message.includes("FORKD_TOKEN") ? message : `${message} (${advice})`;
  return new known(text, { ...details, code });
}

/** Errors of requests of which an earlier try may have arrived. */
const maybeDone = new WeakSet<ForkdError>();

/** Notes that an earlier try of the request may have arrived, whatever this error says about the last one. */
export function markMaybeDone(error: ForkdError): void {
  maybeDone.add(error);
}

/** Whether an error leaves open if the daemon did the request. */
export function isUncertain(error: ForkdError): boolean {
  return ["client_timeout", "stream_broken", "idempotency_in_progress"].includes(error.code) || maybeDone.has(error);
}

/** Whether an error says nothing about an earlier try: the daemon did not look at the request. */
export function isUnseen(error: ForkdError): boolean {
  return error instanceof DaemonUnreachableError || error instanceof BusyError || error instanceof RateLimitError;
}

/** A time-out on the client's side. */
export function timedOut(what: string, secs: number): TimeoutError {
  const advice = "the daemon or the guest may be busy: pass a larger timeoutSecs, or look at `forkd ls`";
  return new TimeoutError(`${what}: no answer within ${secs} s; ${advice}`, { code: "client_timeout" });
}

export function unreachable(url: string, cause: unknown): DaemonUnreachableError {
  const text = `no forkd daemon answers at ${url} (FORKD_URL); start one: forkd serve`;
  return new DaemonUnreachableError(text, { code: "daemon_unreachable", cause });
}

export function broken(what: string, cause?: unknown): StreamBrokenError {
  const why = reasonIn(cause);
  const text = `${what}: the connection to the daemon broke before the end${why === "" ? "" : ` (${why})`}`;
  const advice = "look whether it runs (forkd ls), then try again";
  return new StreamBrokenError(`${text}; ${advice}`, { code: "stream_broken", cause });
}

function textOf(error: unknown): string {
  return error instanceof Error ? error.message : String(error);
}

/** The text of the innermost cause. */
function reasonIn(cause: unknown): string {
  let at = cause;
  for (let depth = 0; depth < 5 && at instanceof Error && at.cause instanceof Error; depth++) at = at.cause;
  return at instanceof Error ? at.message : "";
}
