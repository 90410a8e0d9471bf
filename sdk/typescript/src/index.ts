// The SDK of forkd. See docs/TYPESCRIPT.md.

export type * from "./api/commands.js";
export type * from "./api/daemon.js";
export type * from "./api/sandboxes.js";
export type * from "./api/snapshots.js";
export { interrupted } from "./abort.js";
export { AllFailedError, type Attempt, type AttemptContext, type AttemptOptions, type Outcome } from "./attempts.js";
export {
  Client,
  type ClientOptions,
  type EventQuery,
  type FileQuery,
  type KeyOptions,
  type Page,
  type PageQuery,
  type SandboxQuery,
} from "./client.js";
export { CommandHandle, CommandTimeoutError, type CommandResult, type OutputEvent } from "./command.js";
export type { BackgroundOptions, Commands, RunOptions } from "./commands.js";
export type { Change } from "./diff.js";
export {
  ForkdError,
  InvalidRequestError,
  AuthenticationError,
  PermissionDeniedError,
  NotFoundError,
  SandboxEndedError,
  ConflictError,
  SandboxPausedError,
  SnapshotNotReadyError,
  QuotaError,
  CLASS_OF_CODE,
  DiskFullError,
  RateLimitError,
  BusyError,
  CheckpointError,
  TimeoutError,
  GuestError,
  DaemonError,
  DaemonUnreachableError,
  StreamBrokenError,
  CommandError,
  EvalError,
  ForkError,
  type ErrorDetails,
} from "./errors.js";
export { EvalTimeoutError, type Execution, type ExecutionError } from "./execution.js";
export type { FileData, FileOptions, Files } from "./files.js";
export type { Transfer } from "./folders.js";
export type { Lagged } from "./events.js";
export {
  Sandbox,
  type BranchOptions,
  type ChildOptions,
  type Children,
  type CreateOptions,
  type CreateProgress,
  type ForkOptions,
  type ListOptions,
} from "./sandbox.js";
export { Snapshot, type SnapshotProgress, type WaitOptions, type WarmOptions } from "./snapshot.js";
export type { Socket, SocketListener } from "./socket.js";
export type { CallOptions } from "./transport.js";
