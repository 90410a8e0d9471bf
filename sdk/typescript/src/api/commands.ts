// Commands, evaluations and files in a sandbox, as the API writes them.

import type { ErrorCode } from "./daemon.js";

/** Size of a terminal in characters. */
export interface TtySize {
  /** Columns. */
  cols: number;
  /** Rows. */
  rows: number;
}

/** A command to run to its end. */
export interface ExecRequest {
  /** Program and arguments; no shell is involved. */
  args: string[];
  /** Working directory; the user's home when absent. */
  cwd?: string | null;
  /** Variables added to the user's basic environment. */
  env?: Record<string, string>;
  /** The command's standard input; empty when absent. */
  stdin?: string | null;
  /** Seconds after which the command is killed; 30 when absent. */
  timeout_secs?: number;
  /** User the command runs as; the image's default when absent. */
  user?: string | null;
}

/** How a command ended. A command killed at its timeout also gets this reply, with its output up to then. */
export interface ExecReply {
  /** Why the command did not run, or did not run to its end. */
  error?: string | null;
  /**
   * The exit status as a shell reports it: the command's own status; 128 plus the signal's number; 124 after a
   * timeout; 126 or 127 if the command could not be started.
   */
  exit_code: number;
  /** The signal that ended the command. */
  signal?: number | null;
  /** Standard error; bytes that are not UTF-8 are replaced. */
  stderr: string;
  /** Whether standard error was longer than the limit, and is cut. */
  stderr_truncated?: boolean;
  /** Standard output; bytes that are not UTF-8 are replaced. */
  stdout: string;
  /** Whether standard output was longer than the limit, and is cut. */
  stdout_truncated?: boolean;
  /** Whether the command was killed because of its timeout. */
  timed_out?: boolean;
}

/** A command to run in an existing sandbox. */
export interface ExecStreamRequest {
  /** Program and arguments; no shell is involved. */
  args: string[];
  /** Working directory; the user's home when absent. */
  cwd?: string | null;
  /** Variables added to the user's basic environment. */
  env?: Record<string, string>;
  /** Let the command run on when the connection ends; its output after that is lost. */
  keep?: boolean;
  pty?: TtySize | null;
  /** Seconds after which the command is killed; no limit when absent. */
  timeout_secs?: number | null;
  /** User the command runs as; the image's default when absent. */
  user?: string | null;
}

/** A command, and the sandbox to create for it. */
export interface RunRequest {
  /** Program and arguments; no shell is involved. */
  args: string[];
  /** Working directory; the user's home when absent. */
  cwd?: string | null;
  /** Variables added to the user's basic environment. */
  env?: Record<string, string>;
  /** Name of an image (`forkd image ls`). */
  image: string;
  /** Memory in MiB; the daemon's default when absent. */
  mem_size_mib?: number | null;
  /** Whether the sandbox has a network; true when absent. */
  network?: boolean | null;
  /** Seconds after which the command is killed; no limit when absent. */
  timeout_secs?: number | null;
  tty?: TtySize | null;
  /** User the command runs as; the image's default when absent. */
  user?: string | null;
  /** Number of vCPUs; 1 when absent. */
  vcpus?: number | null;
}

/** A text message of the client, after the first. */
export type ClientMessage =
  /** The input ends. */
  | {
      type: "stdin_eof";
    }
  /** Send a signal to the command. */
  | {
      /** The signal's name, such as `SIGINT`. */
      signal: string;
      type: "signal";
    }
  /** The terminal has a new size. */
  | {
      /** Columns. */
      cols: number;
      /** Rows. */
      rows: number;
      type: "resize";
    };

/** A text message of the server. */
export type ServerEvent =
  /** Progress, as text for people. */
  | {
      event: "progress";
      /** The step that the daemon does now. */
      message: string;
    }
  /** The command runs. */
  | {
      event: "started";
      /** The command's process id in the guest. */
      pid: number;
      /** The id of the command's sandbox. */
      sandbox: string;
    }
  /** The command took input: the client may send as many bytes again. */
  | {
      /** Number of bytes. */
      bytes: number;
      event: "stdin_ack";
    }
  /** The command ended. The last event. */
  | {
      event: "exit";
      /**
       * The exit status as a shell reports it: the command's own status, 128 plus the signal's number, or 124 after a
       * timeout.
       */
      exit_code: number;
      /** The signal that ended the command. */
      signal?: number | null;
      /** Whether the command was killed because of its timeout. */
      timed_out?: boolean;
    }
  /** The command could not run, or not to its end. The last event. */
  | {
      /** The reason, for programs. */
      code: ErrorCode;
      event: "error";
      /** What happened and what to do. */
      message: string;
      /** The id of the request that opened the WebSocket. The daemon's log has the cause under this id. */
      request_id: string;
      /** The HTTP status of the error, such as 404 for an image that does not exist. */
      status: number;
    };

/** Python code to evaluate. */
export interface EvalRequest {
  /**
   * An expression, or statements; the result is the value of the last expression. Variables last as long as the
   * sandbox.
   */
  code: string;
  /** Seconds after which the evaluation is interrupted; 30 when absent. */
  timeout_secs?: number;
}

/** The result of an evaluation. */
export interface EvalReply {
  /** The error, such as `NameError: name 'x' is not defined`, or the timeout; null on success. */
  error?: string | null;
  /** 0 on success, 1 after an error, 124 after a timeout. */
  exit_code: number;
  /** `repr` of the value; null for statements and for `None`. */
  result?: string | null;
  /** The value as JSON, if it consists of types that JSON has. */
  result_json?: unknown;
  /** Standard error of the code. */
  stderr: string;
  /** Standard output of the code. */
  stdout: string;
  /** The traceback of `error`. */
  traceback?: string | null;
}

/** The type of a file. */
export type FileKind = "file" | "directory" | "symlink" | "other";

/** The attributes of a file. */
export interface FileInfo {
  /** Name of the group. */
  group: string;
  /** Permission bits, as a number. */
  mode: number;
  /** Time of the last change, in RFC 3339. */
  modified_time: string;
  /** Last part of the path. Bytes that are not UTF-8 are replaced. */
  name: string;
  /** Name of the owner. */
  owner: string;
  /** Absolute path. */
  path: string;
  /** Permission bits as `ls -l` shows them. */
  permissions: string;
  /** Size in bytes. */
  size: number;
  /** The path that a symbolic link contains. */
  symlink_target?: string | null;
  target_type?: FileKind | null;
  /** The file's type. */
  type: FileKind;
}

/** The content of a folder. */
export interface FileList {
  /** Ordered by path, without the folder itself. Links are not followed. */
  entries: FileInfo[];
}

/** A file that was written. */
export interface FileWritten {
  /**
   * Whether the upload was atomic: the daemon wrote a file beside the path and renamed it at the end. If false, the
   * guest could create no file beside the path; the upload wrote in place, and an interruption would have left a part.
   */
  atomic: boolean;
  /** Absolute path. */
  path: string;
  /** Size in bytes. */
  size: number;
  /** The older name of `atomic`, with the same value. */
  whole: boolean;
}

/** A folder to create. */
export interface MkdirRequest {
  /** Absolute path in the guest. Missing parent folders are created, too. */
  path: string;
  /** User who creates and owns the folder; the image's default when absent. */
  user?: string | null;
}

/** A file or a folder to move. */
export interface MoveRequest {
  /** Absolute path in the guest. */
  from: string;
  /** Absolute path in the guest. Missing parent folders are created; an existing file is replaced. */
  to: string;
  /** User whose permissions apply; the image's default when absent. */
  user?: string | null;
}

/** Why an entry of a folder is not complete. */
export type Incomplete = "unreadable" | "changing" | "file_system";

/** A file, a folder or a link below a folder. */
export interface FileTreeEntry {
  /** Why the hash, the link's target or the content of a folder is missing. Absent if nothing is missing. */
  incomplete?: Incomplete | null;
  /** The file's type. */
  kind: FileKind;
  /** Permission bits, as a number. */
  mode: number;
  /** Time of the last change in milliseconds since 1970. */
  modified_unix_ms: number;
  /** Path relative to the folder, such as `a/b`. Bytes that are not UTF-8 are replaced with U+FFFD. */
  path: string;
  /** The bytes of the path in base64. Absent if the path is UTF-8. */
  path_base64?: string | null;
  /**
   * SHA-256 of a regular file, in lower-case hexadecimal digits. Null for all others, without `hash`, and if
   * `incomplete` has a reason.
   */
  sha256?: string | null;
  /** Size of a regular file or of a link's target in bytes; 0 for all others. */
  size: number;
  /** The path that a symbolic link contains. Bytes that are not UTF-8 are replaced with U+FFFD. */
  target?: string | null;
  /** The bytes of `target` in base64. Absent if they are UTF-8. */
  target_base64?: string | null;
}

/**
 * A folder with all below it. Compare two of them by kind, mode, SHA-256, size and link target. The time of the last
 * change differs between files of the same content. Where `path_base64` is there, compare it instead of `path`.
 */
export interface FileTree {
  /**
   * All entries below the folder, at most 100000, in the order of the bytes of their paths. Links below the folder are
   * not followed.
   */
  entries: FileTreeEntry[];
  /** The folder of the request. */
  path: string;
}
